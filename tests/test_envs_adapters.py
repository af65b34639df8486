"""Gymnasium, textarena and MCP, the real libraries: a wrong action is told to the policy, an outage is a failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from slipstream.configs.environments import Gymnasium, Mcp, TextArena
from slipstream.envs import Message, StepResult, ToolCall, task_source
from slipstream.envs.tools import ToolCallTracker
from slipstream.errors import ConfigError, ToolError
from slipstream.launch.launchers.local import free_ports

SHOP = str(Path(__file__).parent / "mcp_shop.py")


def act(action, name: str = "act") -> Message:
    return Message("assistant", "", (ToolCall(name, {"action": action}, "c0"),))


async def opened(config, index: int = 0):
    source = task_source(config, "train", 0)
    env = source.make()
    return env, await env.reset(source.task(index))


# --- gymnasium ----------------------------------------------------------------------------------------------------


LAKE = Gymnasium(id="FrozenLake-v1", arguments={"is_slippery": False}, max_turns=20)
RIGHT_WAY = (1, 1, 2, 1, 2, 2)


async def test_a_lake_is_crossed_by_calls_of_the_tool() -> None:
    env, opening = await opened(LAKE)
    (tool,) = opening.tools
    assert tool.parameters["properties"]["action"] == {"type": "integer", "minimum": 0, "maximum": 3}
    assert "FrozenLake-v1" in opening.messages[0].content
    assert "[S]FFF" in opening.messages[0].content
    *before, last = [await env.step(act(action)) for action in RIGHT_WAY]
    assert all((r.reward, r.done) == (0.0, False) for r in before)
    assert "S[F]FF" not in before[0].messages[0].content
    assert before[0].messages[0].tool_call_id == "c0"
    assert (last.reward, last.done, last.truncated, last.metrics) == (1.0, True, False, {"turns": 6.0, "invalid": 0.0})
    await env.close()


async def test_what_is_no_action_is_told_and_not_played() -> None:
    env, _ = await opened(LAKE)
    for wrong, told in (
        (act(4), "4 is no action; an action is Discrete(4)"),
        (act(True), "True is no action"),
        (act("1"), "'1' is no action"),
        (act(None), "None is no action"),
        (act([1]), "no action"),
        (act(1, "jump"), "there is no tool 'jump'; use act"),
        (Message("assistant", "", (ToolCall("act", {"move": 1}, "c0"),)), 'act takes {"action": ...}'),
        (Message("assistant", "right"), "call the tool act"),
        (Message("assistant", "", malformed="no JSON"), "no JSON"),
    ):
        result = await env.step(wrong)
        assert told in result.messages[0].content
        assert (result.reward, result.done) == (0.0, False)
    assert (await env.step(act(1))).messages[0].content.count("[F]") == 1
    await env.close()


async def test_the_librarys_and_our_limits_truncate() -> None:
    env, _ = await opened(Gymnasium(id="FrozenLake-v1", arguments={"is_slippery": False}, max_turns=2))
    first, second = await env.step(Message("assistant", "hm")), await env.step(act(0))
    assert (first.done, second.done, second.truncated, second.reward) == (False, True, True, 0.0)
    env, _ = await opened(Gymnasium(id="CartPole-v1", arguments={"max_episode_steps": 1}))
    result = await env.step(act(0))
    assert (result.done, result.truncated, result.reward) == (True, True, 1.0)


async def test_numbers_are_rounded_and_vectors_are_lists() -> None:
    env, opening = await opened(Gymnasium(id="Pendulum-v1"))
    seen = json.loads(opening.messages[0].content.rpartition("\n")[2])
    assert len(seen) == 3
    assert all(len(f"{abs(x):.10g}".replace("0.", "").replace(".", "").lstrip("0")) <= 4 for x in seen)
    assert (await env.step(act([0.5]))).messages[0].role == "tool"
    for wrong in ([9.0], [0.1, 0.2], 0.5, ["a"], [True], [10**400]):
        assert "is no action" in (await env.step(act(wrong))).messages[0].content


async def test_episodes_of_a_seed_are_the_same() -> None:
    async def play() -> list[StepResult]:
        env, _ = await opened(Gymnasium(id="Blackjack-v1"), 3)
        return [await env.step(act(0))]

    assert await play() == (await asyncio.gather(play(), play()))[0]


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (Gymnasium(id="FrozenLak-v1"), "env.id: gymnasium cannot make 'FrozenLak-v1': NameNotFound: .*FrozenLake"),
        (Gymnasium(id="CartPole-v1", arguments={"gravity": 1}), "env.arguments: gymnasium cannot make .*gravity"),
    ],
)
def test_what_gymnasium_refuses_is_one_line(config: Gymnasium, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(config, "train", 0)
    assert "\n" not in str(refused.value)


# --- textarena ----------------------------------------------------------------------------------------------------


GAME = TextArena(id="2048-v0-raw", max_turns=4)
MOVES = ("[Up]", "[Left]", "[Down]", "[Right]")


async def transcript(index: int, disturb=lambda: None) -> list[str]:
    env, opening = await opened(TextArena(id="2048-v0-raw"), index)
    texts = [opening.messages[0].content]
    for move in MOVES * 2:
        disturb()
        await asyncio.sleep(0)
        result = await env.step(Message("assistant", move))
        texts += [message.content for message in result.messages]
        if result.done:
            break
    await env.close()
    return texts


async def test_games_at_once_do_not_disturb_each_other_nor_the_global_random() -> None:
    alone = [await transcript(i) for i in range(3)]
    assert alone[0] != alone[1]
    assert "2048" in alone[0][0]
    assert not any(move in text for text in alone[0][1:] for move in MOVES[:1])  # its own moves are not repeated
    together = await asyncio.gather(*(transcript(i, random.random) for i in (0, 1, 2, 0, 1, 2)))
    assert list(together) == alone * 2
    random.seed(5)
    expected = random.random()
    random.seed(5)
    await transcript(0)
    assert random.random() == expected


async def test_a_wrong_move_is_answered_by_the_game_and_turns_are_limited() -> None:
    env, _ = await opened(GAME)
    result = await env.step(Message("assistant", "I do not know."))
    assert not result.done
    assert "invalid" in result.messages[0].content.lower()
    results = [await env.step(Message("assistant", move)) for move in MOVES[:3]]
    assert (results[-1].done, results[-1].truncated, results[-1].reward) == (True, True, 0.0)


async def test_a_game_that_ends_gives_its_reward_once() -> None:
    env, _ = await opened(TextArena(id="GuessTheNumber-v0-raw"))
    results = []
    for number in range(1, 21):
        results.append(await env.step(Message("assistant", f"[{number}]")))
        if results[-1].done:
            break
    assert results[-1].done
    assert not results[-1].truncated
    assert all(r.reward == 0.0 for r in results[:-1])
    assert results[-1].metrics["turns"] == len(results)


@pytest.mark.parametrize(
    ("game", "complaint"),
    [
        ("2049-v0", r"env.id: textarena has no game '2049-v0'"),
        ("Chess-v0-raw", r"env.id: textarena cannot start 'Chess-v0-raw' for one player"),
    ],
)
def test_what_textarena_refuses_is_one_line(game: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(TextArena(id=game), "train", 0)
    assert "\n" not in str(refused.value)


# --- MCP ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mcp:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "Buy an apple.", "answer": "2"}\n' * 2)
    (tmp_path / "my.py").write_text("def score(completion, row):\n    return float(row['answer'] in completion)\n")
    return Mcp(path="rows.jsonl", reward="my.py:score", evaluation=0.0, command=(sys.executable, SHOP), max_turns=6)


def call(name: str, **arguments) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments, "c0"),))


async def bought(env) -> str:
    result = await env.step(call("buy", item="apple"))
    return result.messages[0].content


def children() -> list[psutil.Process]:
    """The servers that run; a process that has ended has no command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if SHOP in process.cmdline():
                found.append(process)
    return found


async def test_an_mcp_server_of_each_episode_gives_its_tools(shop: Mcp) -> None:
    env, opening = await opened(shop)
    other, _ = await opened(shop)
    assert [tool.name for tool in opening.tools] == ["buy", "slow", "crash"]
    assert opening.tools[0].description == "Buy items."
    assert opening.tools[0].parameters["required"] == ["item"]
    assert [await bought(env), await bought(env), await bought(other)] == [
        "1 apple, 2 left",
        "1 apple, 1 left",
        "1 apple, 2 left",
    ]
    for wrong, told in (
        (call("buy", item="pear"), "error: Error executing tool buy"),
        (call("buy", count="x"), "error: "),
        (call("sell"), "error: there is no tool 'sell'; use buy, crash, slow"),
    ):
        result = await env.step(wrong)
        assert result.messages[0].content.startswith(told)
        assert not result.done
    result = await env.step(Message("assistant", "There are 2 left."))
    assert (result.reward, result.done, result.metrics) == (1.0, True, {"tool_calls": 5.0, "tool_errors": 3.0})
    assert len(children()) >= 2  # an interpreter may start another
    await asyncio.gather(*(asyncio.create_task(e.close()) for e in (env, other)))  # not in the task that opened it
    assert children() == []


async def test_a_server_that_dies_or_hangs_is_a_failure_of_the_tool(shop: Mcp) -> None:
    env, _ = await opened(shop)
    with pytest.raises(ToolError, match="the tool 'crash' failed"):
        await env.step(call("crash"))
    with pytest.raises(ToolError, match="the tool 'buy' failed"):
        await env.step(call("buy", item="apple"))
    await env.close()
    env, _ = await opened(shop)
    with ToolCallTracker(tool_s=0.5), pytest.raises(ToolError, match=r"waited 0.5 s for the tool 'slow'"):
        await env.step(call("slow", seconds=60))
    started = time.monotonic()
    await env.close()
    assert time.monotonic() - started < 50  # the call would take 60
    assert children() == []


async def test_a_server_that_does_not_start_is_a_failure_of_the_tool(shop: Mcp) -> None:
    broken = Mcp(
        path=shop.path, reward=shop.reward, evaluation=0.0, command=(sys.executable, "-c", "raise SystemExit(3)")
    )
    source = task_source(broken, "train", 0)
    env = source.make()
    with pytest.raises(ToolError, match="cannot be used"):
        await env.reset(source.task(0))
    await env.close()
    assert children() == []


async def test_turns_are_limited(shop: Mcp) -> None:
    env, _ = await opened(Mcp(path=shop.path, reward=shop.reward, evaluation=0.0, command=shop.command, max_turns=1))
    result = await env.step(call("buy", item="apple"))
    await env.close()
    assert (result.done, result.truncated, result.reward) == (True, True, 0.0)


async def test_a_server_over_http_has_a_session_of_each_episode(shop: Mcp) -> None:
    (port,) = free_ports(1)
    server = subprocess.Popen([sys.executable, SHOP, "http", str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
        over = Mcp(path=shop.path, reward=shop.reward, evaluation=0.0, url=f"http://127.0.0.1:{port}/mcp")
        environments = [env for env, _ in await asyncio.gather(*(opened(over, i) for i in range(8)))]
        said = await asyncio.gather(*(bought(env) for env in environments[:3]))
        assert sorted(said) == ["1 apple, 0 left", "1 apple, 1 left", "1 apple, 2 left"]  # one process, one stock
        for env in environments[1:]:
            await env.close()
        server.kill()
        server.wait()
        with pytest.raises(ToolError, match="the tool 'buy' failed"):
            await environments[0].step(call("buy", item="apple"))
        await environments[0].close()
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"command": ()}, "env: set either command or url"),
        ({"url": "http://127.0.0.1:1/mcp"}, "env: set either command or url"),
        ({"command": ("no-such-program",)}, "env.command: there is no program 'no-such-program'"),
        ({"path": "none.jsonl"}, "env.path: there is no file none.jsonl"),
    ],
)
def test_what_an_mcp_environment_lacks_is_named(shop: Mcp, change: dict, complaint: str) -> None:
    options = {"path": shop.path, "reward": shop.reward, "command": shop.command}
    with pytest.raises(ConfigError, match=complaint):
        task_source(Mcp(**(options | change)), "train", 0)


def test_a_library_that_is_missing_is_named_with_its_extra(shop: Mcp) -> None:
    """In a process that cannot import them."""
    code = """
import sys
for name in ("gymnasium", "textarena", "mcp"):
    sys.modules[name] = None
from slipstream.configs.environments import Gymnasium, Mcp, TextArena
from slipstream.envs import task_source
from slipstream.errors import ConfigError
for config in (Gymnasium(id="x"), TextArena(id="x"), Mcp(path="rows.jsonl", reward="my.py:score", command=("x",))):
    try:
        task_source(config, "train", 0)
    except ConfigError as error:
        print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for line, name in zip(shown.splitlines(), ("gymnasium", "textarena", "mcp"), strict=True):
        assert line == f"env.kind: {name}: needs the package {name}; run `pip install -e .[envs]`"
