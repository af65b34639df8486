"""Agents that are programs, in real sandboxes at the real gateway: what they reach, what they leave, and how they end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from slipstream.agents import Completion, Gateway
from slipstream.agents.command import CommandAgent
from slipstream.configs import load
from slipstream.configs.schema import Agent as AgentSettings
from slipstream.configs.schema import ProgramSandbox
from slipstream.envs import CALCULATOR, Image, Message, Observation, StepResult, Task, TaskFile, call_tool
from slipstream.envs.sandbox import local_pool
from slipstream.envs.sandbox.kinds import VARIABLE
from slipstream.errors import ConfigError, EngineError
from slipstream.rollout.player import EpisodeResult
from slipstream.tests.episodes import Once
from slipstream.tests.sandbox_attacks import still_marked
from slipstream.tests.sandbox_pools import LOCAL, require_program
from slipstream.tests.sessions import Script, play_foreign
from slipstream.tests.test_docs import module_of
from transformers import PreTrainedTokenizerBase

CHAT = """
import json, os, sys, urllib.request
def post(url, body, **headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    return json.load(urllib.request.urlopen(request))
def ask(text, model="policy", most=None):
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": most}
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    return post(url + "/chat/completions", body, Authorization="Bearer " + key)["choices"][0]["message"]["content"]
"""
"""What small agents begin with; they know nothing but the environment variables."""


@pytest.fixture(params=LOCAL)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    require_program(request.param)
    monkeypatch.setenv(VARIABLE, request.param)
    return request.param


class Folder(Once):
    """A folder with two files; the reward is what `judge` makes of what is left of it and of the answer."""

    def __init__(self, judge: Callable[[dict[str, bytes], str], float] = lambda files, answer: 1.0) -> None:
        super().__init__(split="train", seed=0)
        self.judge = judge
        self.files = (TaskFile("numbers.txt", b"6 7\n"), TaskFile("deep/er/notes", b"\xff\x00"))

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("system", "Be brief."), Message("user", "6 * {question}?")), (), self.files)

    async def step(self, message: Message) -> StepResult:
        assert message.files is not None
        return StepResult((), self.judge({f.path: f.content for f in message.files}, message.content), done=True)


Play = Callable[..., Awaitable[EpisodeResult]]


def program(code: str, *arguments: str, **options: Any) -> AgentSettings:
    return AgentSettings(
        kind="command", command=("{python}", "-c", code, *arguments), sandbox=ProgramSandbox(**options)
    )


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerBase) -> Play:
    """Plays one episode of a program; options as of `play_foreign`."""

    async def played(
        agent: AgentSettings | str, *texts: str, source: Once | None = None, generate: Any = None, **options: Any
    ) -> EpisodeResult:
        settings = program(CHAT + agent) if isinstance(agent, str) else agent
        said = generate or Script(tokenizer, texts.__getitem__)
        return await play_foreign(tokenizer, settings, said, source or Folder(), **options)

    return played


async def test_what_a_program_leaves_and_prints_is_what_the_environment_rewards(play: Play, kind: str) -> None:
    seen: list[tuple[dict[str, bytes], str]] = []

    def judge(files: dict[str, bytes], answer: str) -> float:
        seen.append((files, answer))
        return 0.5

    code = """
import subprocess
product = ask(sys.stdin.read() + open("numbers.txt").read())
open("made.txt", "w").write(product)
os.remove("deep/er/notes"); os.symlink("/etc/passwd", "link"); os.mkfifo("pipe"); open("closed", "w").close(); os.chmod("closed", 0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("so:", os.getcwd().endswith("/task"))
"""
    result = await play(code, "42", source=Folder(judge))
    assert (result.outcome.kind, result.reward) == ("finished", 0.5), result.outcome.detail
    assert seen == [({"numbers.txt": b"6 7\n", "made.txt": b"42"}, "so: True")]
    (trajectory,) = result.trajectories
    assert len(trajectory.turns) == 1


async def test_the_question_is_an_argument_or_on_stdin(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    """A placeholder that the question spells stays."""
    code = CHAT + "print(ask(sys.stdin.read() + '|'.join(sys.argv[1:])))"
    for arguments, asked in (
        ((), "Be brief.\n\n6 * {question}?"),
        (("-p", "{question}!"), "-p|Be brief.\n\n6 * {question}?!"),
    ):
        script = Script(tokenizer, ["42"].__getitem__)
        result = await play(program(code, *arguments), generate=script)
        assert result.outcome.kind == "finished", result.outcome
        assert asked in tokenizer.decode(script.log[0][0])


BOTH = """
import anthropic, openai
chat = openai.OpenAI().chat.completions.create
messages = [{"role": "user", "content": "6 * 7?"}]
one = chat(model="policy", messages=messages).choices[0].message.content
side = chat(model="side", messages=[{"role": "user", "content": "a title"}]).choices[0].message.content
messages += [{"role": "assistant", "content": one}, {"role": "user", "content": "and now?"}]
made = anthropic.Anthropic().messages.create(model="policy-2", max_tokens=50, messages=messages)
streamed = "".join(c.choices[0].delta.content or "" for c in openai.OpenAI().chat.completions.create(
    model="policy", messages=[*messages, {"role": "assistant", "content": made.content[0].text}, messages[0]], stream=True))
print(one, side, made.content[0].text, streamed)
"""


async def test_a_program_with_the_stock_sdks_is_one_branch(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    """Its packages are in the folder that it may read; a model that is not trained has no loss."""
    packages = sysconfig.get_paths()["purelib"]
    command = ("env", "PYTHONPATH={folder}", "{python}", "-c", BOTH)
    agent = AgentSettings(kind="command", command=command, sandbox=ProgramSandbox(folder=packages, memory="2GiB"))
    script = Script(tokenizer, ["one", "title", "two", "three"].__getitem__)
    answers: list[str] = []

    def judge(files: dict[str, bytes], answer: str) -> float:
        answers.append(answer)
        return 1.0

    result = await play(agent, generate=script, source=Folder(judge), wall_s=50.0)
    assert result.outcome.kind == "finished", result.outcome.detail
    assert answers == ["one title two three"]
    (trajectory,) = result.trajectories
    assert [turn.end - turn.start for turn in trajectory.turns] == [len(script.log[i][1]) for i in (0, 2, 3)]


MCP = """
def tool(method, **parameters):
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
    return post(os.environ["SLIPSTREAM_MCP_URL"], body)["result"]
ask("well?")
name = tool("tools/list")["tools"][0]["name"]
print(tool("tools/call", name=name, arguments={"expression": "6*7"})["content"][0]["text"])
"""


class Calculator(Once):
    shows: bytes = b""  # a picture in the place of a result

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "6 * 7?"),), (CALCULATOR.spec,))

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult((), float(message.content == "42" and message.files == ()), done=True)
        reply, _ = await call_tool({"calculator": CALCULATOR}, message.tool_calls[0])
        if self.shows:
            reply = Message("tool", "", tool_call_id=reply.tool_call_id, name=reply.name, images=(Image(self.shows),))
        return StepResult((reply,), 0.25)


async def test_a_program_calls_the_environments_tools(play: Play) -> None:
    source, file = Calculator(split="train", seed=0), io.BytesIO()
    result = await play(MCP, "hm", source=source)
    assert (result.outcome.kind, result.trajectories[0].turn_rewards) == ("finished", (0.25, 1.0))
    Pillow.new("1", (8, 8)).save(file, "PNG")
    source.shows = file.getvalue()
    result = await play(MCP, "hm", source=source)
    assert (result.outcome.kind, result.outcome.reason) == ("failed", "policy")
    assert "calculator shows an image, which agents written elsewhere are not given" in result.outcome.detail


# --- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "told"),
    [
        ("ask('x'); print('half done'); raise KeyError('no such tool')", "policy", "ended with exit status 1; it printed: "),
        ("print('only this'); sys.exit(3)", "policy", "ended with exit status 3; it printed: only this"),
        ("os.kill(os.getpid(), 9)", "policy", "ended with signal 9; it printed nothing"),
        ("import time; print('waiting', flush=True); time.sleep(60)", "timeout", "was stopped: it took longer than "),
        ("print('x' * (3 << 20))", "policy", "was stopped: it printed more than 1048576 bytes"),
        ("ask('x'); os.makedirs('/box/a' * 1); open('a', 'w').write('x' * (1 << 24))", "policy", ""),
    ],
)  # fmt: skip
async def test_any_other_end_is_a_failure_that_says_what_it_printed(
    play: Play, code: str, reason: str, told: str
) -> None:
    for wall_s in (2.0, 20.0) if reason == "timeout" else (60.0,):
        outcome = (await play(program(CHAT + code, disk="4MiB"), "hm", wall_s=wall_s)).outcome
        if not outcome.detail.endswith("printed nothing"):  # else it took too long to begin
            break
    assert (outcome.kind, outcome.reason) == ("failed", reason), outcome
    assert outcome.detail.startswith("the program {python} ")
    assert told in outcome.detail
    assert "\n" not in outcome.detail
    if "KeyError" in code:
        assert outcome.detail.endswith("KeyError: 'no such tool'")
    if reason == "timeout":
        assert outcome.detail.endswith(f"{wall_s:g} s; it printed: waiting")


async def test_a_program_that_does_not_exist_is_named_before_a_run_and_in_an_episode(play: Play, kind: str) -> None:
    agent = AgentSettings(kind="command", command=("no-such-agent", "-p"))
    outcome = (await play(agent)).outcome
    assert outcome.detail.endswith("it printed: no-such-agent: No such file or directory")
    async with Gateway() as gateway:
        await CommandAgent(AgentSettings(kind="command", command=("{python}",)), gateway, 5.0).check()
        with pytest.raises(ConfigError, match=r"agent.command: there is no program no-such-agent in"):
            await CommandAgent(agent, gateway, 5.0).check()
        nowhere = AgentSettings(kind="command", command=("sh",), sandbox=ProgramSandbox(folder="/no/where"))
        with pytest.raises(ConfigError, match=r"agent.sandbox.folder: /no/where is no folder"):
            CommandAgent(nowhere, gateway, 5.0)


async def test_a_full_context_truncates_and_a_lost_engine_fails(play: Play) -> None:
    talks_on = "text = 'more'\nwhile True: text += ask(text) + ' more' * 30"
    result = await play(talks_on, *["yes"] * 20, max_tokens=200)
    assert (result.outcome.kind, result.outcome.detail) == ("truncated", "")
    assert result.trajectories

    async def lost(token_ids: Sequence[int], max_tokens: int) -> Completion:
        raise EngineError("no replica answers")

    carefree = "try: ask('x')\nexcept OSError: print('a guess')"
    outcome = (await play(carefree, generate=lost)).outcome
    assert (outcome.reason, outcome.detail) == ("engine", "no replica answers")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ask('x'); sys.exit(1)", "truncated"),
        ("ask('x'); ask('y'); sys.exit(1)", "failed"),  # it went on, and the second reply was whole
        ("ask('x', most=5); sys.exit(1)", "failed"),  # that was its own limit
        ("ask('x'); os.kill(os.getpid(), 9)", "failed"),
    ],
)
async def test_a_program_that_gives_up_on_a_reply_that_was_cut_is_truncated(play: Play, code: str, kind: str) -> None:
    """As Claude Code and Codex do."""
    result = await play(code, "word " * 100, "A whole one.", max_tokens=2000, max_tokens_per_turn=20)
    assert result.outcome.kind == kind, result.outcome
    assert [t.sampled for t in result.trajectories] == ([20] if kind == "truncated" else [])


async def test_an_episode_that_is_over_leaves_no_program(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    mark = f"agent-{os.getpid()}-late"
    for episode_s in (4.0, 30.0):
        script = Script(tokenizer, lambda number: asyncio.Event().wait())  # pyright: ignore[reportArgumentType]
        result = await play(program(f"# {mark}\n{CHAT}ask('x')"), generate=script, episode_s=episode_s)
        if script.asked:  # else it took too long to begin
            break
    assert (result.outcome.reason, script.asked, script.cancelled) == ("timeout", 1, 1)
    assert still_marked(mark) == []


# --- what it reaches --------------------------------------------------------------------------------------------------

SPY = """
import ctypes, errno, socket
def attempt(what, function):
    try: function(); through.append(what)
    except OSError as error: refused.append([what, errno.errorcode.get(error.errno, str(error))])
through, refused = [], []
def connect(family, kind, address, protocol=0):
    with socket.socket(family, kind, protocol) as s:
        s.settimeout(1); s.connect(address)
        if kind == 2: s.send(b"x"); s.recv(1)
def fast_open(port):
    with socket.socket() as s: s.settimeout(1); s.sendto(b"GET / HTTP/1.0", 0x20000000, ("127.0.0.1", port))
port, udp_port, path, abstract, host_file = json.loads(sys.argv[1])
inet, inet6, stream, datagram = 2, 10, 1, 2
attempt("another port", lambda: connect(inet, stream, ("127.0.0.1", port)))
attempt("another port by IPv6", lambda: connect(inet6, stream, ("::ffff:127.0.0.1", port)))
attempt("another port by MPTCP", lambda: connect(inet, stream, ("127.0.0.1", port), 262))
attempt("another port by TCP fast open", lambda: fast_open(port))
attempt("UDP", lambda: connect(inet, datagram, ("127.0.0.1", udp_port)))
attempt("the internet", lambda: connect(inet, stream, ("1.1.1.1", 80)))
attempt("raw packets", lambda: socket.socket(inet, 3, 1))
attempt("a socket of the host", lambda: connect(1, stream, path))
attempt("an abstract socket", lambda: connect(1, stream, chr(0) + abstract))
attempt("a file of the host", lambda: open(host_file).read())
attempt("the agent's folder", lambda: open(os.path.join(sys.argv[2], "given"), "a"))
"""
TOLD = """
key = os.environ["OPENAI_API_KEY"]
url = os.environ["OPENAI_BASE_URL"]
for other in ("x" * len(key), ""):
    try: post(url.replace(key, other) + "/chat/completions", {}); through.append("another episode")
    except urllib.error.HTTPError as error: refused.append(["another episode", error.code])
assert ask("x") == "hm"
print(json.dumps([through, refused, open(os.path.join(sys.argv[2], "given")).read()]))
"""


async def test_a_program_reaches_the_gateway_and_nothing_else(
    play: Play, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it tries gets through where it is not confined."""
    for place in (tmp_path, *tmp_path.parents):
        if place.owner() == Path.home().owner() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o055)
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "given").write_text("read me")
    (tmp_path / "host-file").write_text("secret")
    answers: list[Any] = []

    def judge(files: dict[str, bytes], answer: str) -> float:
        answers.append(json.loads(answer))
        return 1.0

    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", 0))
        path = str(tmp_path / "socket")
        unix.bind(path)
        os.chmod(path, 0o777)
        name = f"slipstream-spy-{os.getpid()}"
        abstract.bind(f"\0{name}")
        for server in (unix, abstract):
            server.listen()
        facts = [tcp.getsockname()[1], udp.getsockname()[1], path, name, str(tmp_path / "host-file")]
        free = (sys.executable, "-c", f"{CHAT}{SPY}print(json.dumps(through))", json.dumps(facts), str(folder))
        ran = await asyncio.create_subprocess_exec(*free, stdout=asyncio.subprocess.PIPE)
        assert {
            "another port",
            "a socket of the host",
            "an abstract socket",
            "a file of the host",
            "the agent's folder",
        } <= set(json.loads((await ran.communicate())[0]))
        agent = AgentSettings(
            kind="command",
            command=("{python}", "-c", CHAT + SPY + TOLD, json.dumps(facts), "{folder}"),
            sandbox=ProgramSandbox(folder=str(folder)),
        )
        result = await play(agent, "hm", source=Folder(judge))
    assert result.outcome.detail == ""
    ((through, refused, given),) = answers
    assert through == []
    assert given == "read me"
    assert len(refused) == 13, refused


async def test_without_a_network_of_its_own_and_an_old_kernel_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "landlock")
    async with Gateway() as gateway:
        agent = CommandAgent(AgentSettings(kind="command", command=("sh",)), gateway, 5.0)
        monkeypatch.setattr(agent._pool.confinement, "_version", 3)
        with pytest.raises(
            ConfigError, match=r"needs bubblewrap, or Landlock of version 4 \(Linux 6.7\); this kernel's has"
        ):
            await agent.check()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["agent.kind=command"], "agent.command: agent.kind=command needs a program"),
        (["agent.command=[sh]"], "agent.command: agent.kind=tool_calling runs no program"),
        (["agent.sandbox.processes=3"], "agent.sandbox: agent.kind=tool_calling runs no program"),
        (["agent.kind=command", "agent.command=['{folder}/a']"], "agent.command: {folder} is the folder that"),
        (["agent.kind=command", "agent.command=[sh]", "agent.sandbox.memory=much"], "agent.sandbox.memory: 'much' is not a size"),
    ],
)  # fmt: skip
def test_a_config_that_fits_no_program_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("quickstart", overrides)
    assert complaint in str(error.value)


async def test_the_folder_of_the_page_is_scored_in_a_new_sandbox(play: Play) -> None:
    page = Path(__file__).parent.parent / "docs" / "environments.md"
    source = module_of(page, "add_up", "AddUp").AddUp(split="train", seed=0)
    for written, reward in (("a + b", 1.0), ("a * b", 0.0)):
        code = (
            f"ask('x'); open('add.py', 'w').write('def add(a, b): return {written}'); open('test_add.py', 'w').close()"
        )
        result = await play(code, "hm", source=source)
        assert (result.outcome.kind, result.reward) == ("finished", reward)
    await local_pool().close()
