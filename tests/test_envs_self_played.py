"""Environments that own their loop: they play through the gateway, and an outage is a failure whatever they make of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from slipstream.agents import Completion
from slipstream.agents.base import Generate
from slipstream.configs import load
from slipstream.configs.environments import Inspect, PythonEnv, Verifiers, absolute_paths
from slipstream.envs import Message, StepResult, Task, TaskSource, task_source
from slipstream.envs import check as check_module
from slipstream.envs.adapters.inspect.env import PROGRAM
from slipstream.envs.adapters.verifiers import VerifiersEnv
from slipstream.envs.check import CHECKS, run_check, subject_of
from slipstream.envs.scripted_endpoint import scripted_endpoint
from slipstream.envs.self_played import PolicyEndpoint, endpoint_of, play_message
from slipstream.errors import ConfigError, EngineError, EnvError
from slipstream.launch import env_play
from slipstream.launch.cli.main import main
from slipstream.rollout.player import EpisodeResult
from slipstream.tests.self_playing import Itself
from slipstream.tests.servers import needs, python_of
from slipstream.tests.sessions import LEASE, Script, call, play_foreign
from transformers import PreTrainedTokenizerBase

HERE = Path(__file__).parent
FACTORY = "slipstream.tests.self_playing:Itself"
Play = Callable[..., Awaitable[EpisodeResult]]


def itself(**arguments: object):
    return task_source(PythonEnv(factory=FACTORY, arguments=arguments), "train", 0)


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerBase) -> Play:
    async def played(source: object, *texts: str, generate: Generate | None = None, **options: object) -> EpisodeResult:
        said = generate or Script(tokenizer, texts.__getitem__)
        return await play_foreign(tokenizer, None, said, source, **options)  # pyright: ignore[reportArgumentType]

    return played


async def down(token_ids: Sequence[int], max_tokens: int) -> Completion:
    raise EngineError("no replica is left")


def sampled(result: EpisodeResult) -> list[int]:
    return [trajectory.sampled for trajectory in result.trajectories]


async def test_an_episode_is_one_branch_of_what_was_sampled(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    script = Script(tokenizer, ["It is 4", "Yes, 4"].__getitem__)
    result = await play(itself(), generate=script)
    assert (result.outcome.kind, result.reward) == ("finished", 1.0)
    assert sampled(result) == [sum(len(ids) for _, ids in script.log)]
    (trajectory,) = result.trajectories
    assert trajectory.metrics == {"asked": 2.0}
    assert (await play(itself(), "5", "5")).reward == 0.0


@pytest.mark.parametrize("reports", [False, True])
async def test_a_lost_engine_is_the_engines_failure_whatever_the_library_makes_of_it(play: Play, reports: bool) -> None:
    result = await play(itself(reports=reports), generate=down)
    assert (result.outcome.kind, result.outcome.reason, result.trajectories) == ("failed", "engine", ())
    assert "no replica is left" in result.outcome.detail


@pytest.mark.parametrize("reports", [False, True])
async def test_a_full_context_truncates(play: Play, reports: bool) -> None:
    result = await play(itself(reports=reports), "word " * 300, max_tokens=60, max_tokens_per_turn=60)
    assert (result.outcome.kind, result.reward) == ("truncated" if reports else "finished", 0.0)
    assert sampled(result)


async def test_what_takes_too_long_and_what_raises_are_failures(play: Play) -> None:
    late = await play(itself(hangs=True), "4", "4", episode_s=2.0)
    assert (late.outcome.kind, late.outcome.reason) == ("failed", "timeout")

    class Raises(Itself):
        async def step(self, message: Message) -> StepResult:
            await super().step(message)
            raise ValueError("alas")

    raised = await play(Raises(split="train", seed=0), "4", "4")
    assert (raised.outcome.reason, "ValueError: alas" in raised.outcome.detail) == ("environment", True)


async def test_an_agent_cannot_play_it() -> None:
    env = itself().make()  # pyright: ignore[reportAttributeAccessIssue]
    await env.reset(Task("t"))
    for message in (
        Message("assistant", "4"),
        Message("assistant", "", play_message(PolicyEndpoint("u", "k")).tool_calls * 2),
    ):
        with pytest.raises(EnvError, match="plays itself and takes no messages"):
            await env.step(message)
    assert endpoint_of(play_message(PolicyEndpoint("u", "k", "m"))) == PolicyEndpoint("u", "k", "m")


async def test_env_play_gives_it_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    told = list[str]()
    config = load("quickstart", ["env.kind=python", f"env.factory={FACTORY}"])
    async with scripted_endpoint(
        lambda tools: iter([Message("assistant", "4?"), Message("assistant", "4!")])
    ) as endpoint:
        player = env_play.itself(endpoint.url, "any")
        assert await env_play.play(env_play.part_of(config, ""), config, 0, player, told.append) == 1.0
    assert told[-2:] == ["reward 1, asked 2", "the episode is done"]
    assert main(["env", "play", "quickstart", "env.kind=python", f"env.factory={FACTORY}"]) == 2
    assert "--model: Itself plays itself, with a model; name one" in capsys.readouterr().err


@pytest.mark.parametrize("isolate", [0, 1])
def test_it_keeps_the_contract(isolate: int) -> None:
    subject = subject_of(PythonEnv(factory=FACTORY, isolate=isolate), 0)
    assert run_check("episodes", subject)
    assert run_check("cancellation", subject)


@pytest.mark.parametrize(
    ("config", "module"),
    [(Verifiers(taskset="x"), "verifiers.v1"), (Inspect(task="x.py@y"), "inspect_ai")],
)
def test_without_the_library_its_own_environment_is_named(config: Verifiers | Inspect, module: str) -> None:
    name = config.__struct_config__.tag
    with pytest.raises(
        ConfigError, match=rf"env\.python: .* cannot import {module}.*install-env\.sh {name}.*\.venv-{name}"
    ):
        task_source(config, "train", 0)


def test_a_task_in_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    found = absolute_paths(Inspect(task="mine.py@theirs", python="bin/python"))
    assert found == Inspect(task=f"{tmp_path}/mine.py@theirs", python=f"{tmp_path}/bin/python")
    assert absolute_paths(Inspect(task="package/name")) == Inspect(task="package/name")


# --- the libraries themselves -------------------------------------------------------------------------------------


def verifiers(**options: object) -> Verifiers:
    return Verifiers(taskset="mini_taskset", python=str(python_of("verifiers")), evaluation=0.1, **options)


def inspect(**options: object) -> Inspect:
    task = f"{HERE / 'inspect_tasks.py'}@doubles"
    return Inspect(
        **{"task": task, "python": str(python_of("inspect")), "evaluation": 0.1, "score": "match", **options}
    )


Shared = Callable[[Callable[[], Verifiers | Inspect]], TaskSource]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Of each library the environment that all tests of this file play, in one process: it takes seconds to import."""
    sources = dict[Callable[[], Verifiers | Inspect], TaskSource]()

    def source_of(make: Callable[[], Verifiers | Inspect]) -> TaskSource:
        if make not in sources:
            sources[make] = task_source(make(), "train", 0)
        return sources[make]

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE / "tasksets"))
        yield source_of


LIBRARIES = [
    pytest.param(verifiers, marks=needs("verifiers"), id="verifiers"),
    pytest.param(inspect, marks=needs("inspect"), id="inspect"),
]


def answer_to(source: object, task: int = LEASE.task) -> str:
    payload = source.task(task).payload  # pyright: ignore[reportAttributeAccessIssue]
    return str(2 * payload.get("task", payload.get("sample")))


@pytest.mark.full
@pytest.mark.parametrize("make", LIBRARIES)
async def test_the_library_plays_through_the_gateway(
    play: Play, tokenizer: PreTrainedTokenizerBase, shared: Shared, make: Callable[[], Verifiers | Inspect]
) -> None:
    source = shared(make)
    right = answer_to(source)
    script = Script(tokenizer, lambda number: f"The answer is {right}")
    result = await play(source, generate=script)
    assert (result.outcome.kind, result.outcome.detail, result.reward) == ("finished", "", 1.0)
    assert sampled(result) == [sum(len(ids) for _, ids in script.log)]
    wrong = await play(source, "The answer is 1")
    assert (wrong.outcome.kind, wrong.reward) == ("finished", 0.0)
    assert (
        make is inspect or wrong.trajectories[0].metrics["serving"] == 1.0
    )  # the library's servers outlive an episode
    lost = await play(source, generate=down)
    assert (lost.outcome.kind, lost.outcome.reason, lost.trajectories) == ("failed", "engine", ())
    full = await play(source, "word " * 300, max_tokens=40, max_tokens_per_turn=40)
    assert full.outcome.kind in ("finished", "truncated")
    assert full.reward == 0.0


@pytest.mark.full
@pytest.mark.parametrize("make", LIBRARIES)
async def test_many_episodes_of_a_library_at_once(
    tokenizer: PreTrainedTokenizerBase, shared: Shared, make: Callable[[], Verifiers | Inspect]
) -> None:
    source = shared(make)

    async def one(index: int) -> float:
        lease = msgspec.structs.replace(LEASE, task=6 + index % 3)
        right = answer_to(source, lease.task)
        script = Script(tokenizer, lambda number: right if index % 2 else "1")
        return (await play_foreign(tokenizer, None, script, source, lease=lease, episode_s=240.0)).reward

    assert await asyncio.gather(*map(one, range(12))) == [float(index % 2) for index in range(12)]


@pytest.mark.full
@pytest.mark.parametrize("make", LIBRARIES)
def test_a_library_keeps_the_contract(
    shared: Shared, make: Callable[[], Verifiers | Inspect], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one task, played again and four times at once: each episode starts a process, which takes a second of CPU. Different
    tasks at once are those of the test above."""
    monkeypatch.setattr(check_module, "EPISODES", 1)
    shared(make)
    subject = subject_of(make(), 0)
    for name in CHECKS:
        assert run_check(name, subject), name


@pytest.mark.full
@pytest.mark.parametrize("make", LIBRARIES)
async def test_an_episode_of_a_library_that_is_cut_off_leaves_nothing(
    play: Play, shared: Shared, make: Callable[[], Verifiers | Inspect]
) -> None:
    source = shared(make)
    await play(source, "1")

    def running() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True))

    async def never(token_ids: Sequence[int], max_tokens: int) -> Completion:
        await asyncio.sleep(600)
        raise AssertionError

    before = running()
    late = await play(source, generate=never, episode_s=4.0)
    assert (late.outcome.kind, late.outcome.reason) == ("failed", "timeout")
    _, left = await asyncio.to_thread(psutil.wait_procs, running() - before, 30)
    assert not left
    assert (await play(source, answer_to(source))).reward == 1.0


@pytest.mark.full
@needs("inspect")
async def test_inspects_tools_metrics_and_deaths(
    play: Play, shared: Shared, tokenizer: PreTrainedTokenizerBase
) -> None:
    source = shared(inspect)
    answer = f"It is {answer_to(source)}"
    script = Script(tokenizer, [call("add", a=2, b=2), call("add", a="x"), answer].__getitem__)
    result = await play(source, generate=script)
    assert (result.outcome.kind, result.outcome.detail, result.reward) == ("finished", "", 1.0)
    assert sampled(result) == [sum(len(ids) for _, ids in script.log)]
    metrics = result.trajectories[0].metrics
    assert (metrics["shape.length"], metrics["shape.calls"]) == (len(answer), 2.0)
    died = await play(source, call("add", a=99, b=1))
    assert (died.outcome.reason, "its process ended with status" in died.outcome.detail) == ("environment", True)


PROGRAM_OF_ITS_OWN = """
import json, player, socket, sys, tempfile
task = player.load(sys.argv[1], {})
with socket.socket() as nobody, tempfile.TemporaryDirectory() as folder:
    nobody.bind(("127.0.0.1", 0))
    player.import_what_playing_imports(folder)
    before = set(sys.modules)
    request = {"sample": 0, "url": f"http://127.0.0.1:{nobody.getsockname()[1]}/v1", "key": "k", "model": "policy"}
    played = player.play(task, request, {"folder": folder, "score": "match"})
print(json.dumps([list(played), len(set(sys.modules) - before)]))
from inspect_ai.scorer import Score
scores = {"match": Score(value="C"), "shape": Score(value={"length": 7, "calls": 2})}
print(json.dumps([player.scored(scores, wanted) for wanted in ("shape.calls", "", "other")]))
"""


@pytest.fixture(scope="module")
def of_player() -> tuple[list, list]:
    """What it had to import for a sample, and what it makes of scores: as JSON, from a process that plays one."""
    program = subprocess.run(
        [python_of("inspect"), "-c", PROGRAM_OF_ITS_OWN, f"{HERE / 'inspect_tasks.py'}@doubles"],
        env={**os.environ, "PYTHONPATH": str(Path(PROGRAM).parent), "INSPECT_EVAL_CTL_SERVER": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert program.returncode == 0, program.stderr
    imported, scored = map(json.loads, program.stdout.splitlines()[-2:])
    return imported, scored


@pytest.mark.full
@needs("inspect")
def test_the_process_of_a_sample_of_inspect_has_nothing_left_to_import(of_player: tuple[list, list]) -> None:
    """A thousand modules take two seconds of CPU, of each episode."""
    assert of_player[0] == [["error"], 0]


@pytest.mark.full
@needs("inspect")
def test_the_reward_is_the_score_that_is_named(of_player: tuple[list, list]) -> None:
    named, several, unknown = of_player[1]
    assert named == {"reward": 2.0, "metrics": {"match": 1.0, "shape.length": 7.0, "shape.calls": 2.0}}
    assert "the sample has the scores match, shape.length, shape.calls; name" in several["error"]
    assert "the sample has no score 'other'" in unknown["error"]


class Serving:
    """What the library's servers are to an environment; their first start fails."""

    def __init__(self) -> None:
        self.starts = 0

    def serving(self) -> Serving:
        return self

    async def __aenter__(self) -> None:
        self.starts += 1
        if self.starts == 1:
            raise OSError("no port is free")


async def test_a_failed_start_of_the_librarys_servers_is_tried_again() -> None:
    env = object.__new__(VerifiersEnv)  # the library is in another interpreter
    env._library, env._serving = Serving(), weakref.WeakKeyDictionary()
    with pytest.raises(OSError, match="no port is free"):
        await env._start_servers()
    await env._start_servers()
    await env._start_servers()
    assert env._library.starts == 2


TWO_SAMPLES = """
import ctypes, os, select, subprocess, sys, time, player
folder = sys.argv[1]

def play(task, request, spec):
    if request["sample"] == 1:
        return {"reward": 1.0, "metrics": {}}
    subprocess.run(["sh", "-c", f"sh -c 'sleep 60 & sleep 60' & echo $! > {folder}/new && mv {folder}/new {folder}/pid"])
    while not os.path.exists(f"{folder}/ended"):
        time.sleep(0.01)
    return {"reward": float(alive()), "metrics": {}}

def alive():
    with open(f"{folder}/pid") as file:
        pid = int(file.read())
    return os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"

ctypes.CDLL(None).prctl(player.SUBREAPER, 1, 0, 0, 0)
player.play = play
both = player.Player(None, {"folder": folder})
both.imported = True
for number in (0, 1):
    both.start({"number": number, "sample": number})
    while not os.path.exists(f"{folder}/pid"):
        time.sleep(0.01)
for number in (1, 0):
    while number in both.running:
        both.read(number)
    open(f"{folder}/ended", "w").close()
print(alive(), player.children())
"""


def test_the_end_of_a_sample_ends_its_own_processes_and_no_others(tmp_path: Path) -> None:
    program = subprocess.run(
        [sys.executable, "-c", TWO_SAMPLES, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(PROGRAM).parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert program.returncode == 0, program.stderr
    *answers, left = program.stdout.splitlines()
    assert [json.loads(line)["reward"] for line in answers] == [1.0, 1.0]
    assert left == "False []"


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        pytest.param(lambda: Verifiers(taskset="no_such_taskset", python=str(python_of("verifiers"))),
                     r"env\.taskset: verifiers cannot load 'no_such_taskset'", marks=needs("verifiers")),
        pytest.param(lambda: inspect(task=f"{HERE / 'inspect_tasks.py'}@none"), r"env\.task: Inspect cannot load .*@none",
                     marks=needs("inspect")),
    ],
    ids=["verifiers", "inspect"],
)  # fmt: skip
def test_what_a_library_cannot_load_is_one_line(make: Callable[[], Verifiers | Inspect], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(make(), "train", 0)
    assert "\n" not in str(refused.value)
