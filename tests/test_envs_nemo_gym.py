"""The kind `nemo_gym` over the wire, against a server that is written from the wire format, and against the library's own resources
servers in their own interpreter (`requirements/install-env.sh nemo_gym`)."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.configs.environments import NemoGym
from slipstream.envs import Message, StepResult, ToolCall, task_source
from slipstream.envs.adapters.nemo_gym import NemoGymEnv, read_prompt
from slipstream.envs.check import CHECKS, run_check, subject_of
from slipstream.errors import ConfigError, EnvError
from slipstream.tests.servers import SOON, needs, python_of, served

LOOK_UP = {
    "type": "function",
    "name": "look_up",
    "description": "Look something up.",
    "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
}


def row(number: int) -> dict[str, object]:
    opening = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "What is the number?"}]
    return {"number": number, "responses_create_params": {"input": opening, "tools": [LOOK_UP]}}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with served(sys.executable, "nemo_gym_wire.py") as running:
        yield running


def rows(folder: Path, *numbers: int) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row(number)) + "\n" for number in numbers))
    return str(path)


def look_up(*whats: object, name: str = "look_up") -> Message:
    return Message("assistant", "", tuple(ToolCall(name, {"what": what}, f"c{i}") for i, what in enumerate(whats)))


async def opened(config: NemoGym) -> NemoGymEnv:
    source = task_source(config, "train", 0)
    assert isinstance(source, NemoGymEnv)
    env = source.make()
    await env.reset(source.task(0))
    return env


async def test_an_episode_is_played_over_the_wire_and_wrong_calls_are_told(server, tmp_path: Path) -> None:
    source = task_source(NemoGym(url=server[0], path=rows(tmp_path, 7), evaluation=0.0), "train", 0)
    env, task = source.make(), source.task(0)
    opening = await env.reset(task)
    assert task.id == "nemo_gym-train-0"
    assert [(m.role, m.content) for m in opening.messages] == [("system", "Be short."), ("user", "What is the number?")]
    assert [(tool.name, tool.parameters["required"]) for tool in opening.tools] == [("look_up", ["what"])]
    for wrong, told in (
        (look_up(1), "Field required"),
        (look_up("colour"), "there is no colour"),
        (look_up("number", name="verify"), "there is no tool 'verify'; use look_up"),
        (look_up("number", name="../look_up"), "there is no tool '../look_up'"),
        (Message("assistant", "", malformed="no JSON"), "error: no JSON"),
    ):
        result = await env.step(wrong)
        assert told in result.messages[0].content
        assert (result.reward, result.done) == (0.0, False)
    found = await env.step(look_up("number", "number"))
    assert [json.loads(m.content) for m in found.messages] == [{"number": 7}] * 2
    assert [m.tool_call_id for m in found.messages] == ["c0", "c1"]
    last = await env.step(Message("assistant", "7"))
    assert (last.reward, last.done, last.truncated, last.messages) == (1.0, True, False, ())
    assert last.metrics == {"calls": 6.0, "whole": 1.0, "turns": 7.0, "invalid": 5.0}
    await env.close()


async def test_sessions_at_once_are_those_of_their_rows_and_are_cut_off(server, tmp_path: Path) -> None:
    source = task_source(
        NemoGym(url=server[0], path=rows(tmp_path, *range(8)), max_turns=2, evaluation=0.0), "train", 0
    )

    async def play(index: int) -> tuple[str, StepResult]:
        env, task = source.make(), source.task(index)
        await env.reset(task)
        (reply,) = (await env.step(look_up("number"))).messages
        assert json.loads(reply.content) == {"number": task.payload["row"]["number"]}
        last = await env.step(Message("assistant", str(task.payload["row"]["number"]), look_up("number").tool_calls))
        await env.close()
        return task.id, last

    played = await asyncio.gather(*(play(index) for index in range(64)))
    assert len({name for name, _ in played}) == 8
    assert all((last.reward, last.done, last.truncated) == (1.0, True, True) for _, last in played)


@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_contract(server, tmp_path: Path, name: str) -> None:
    path = rows(tmp_path, *range(20))
    assert run_check(name, subject_of(NemoGym(url=server[0], path=path, max_turns=6), 0))


async def test_errors_of_the_server_and_its_absence_are_failures(server, tmp_path: Path) -> None:
    config = NemoGym(url=server[0], path=rows(tmp_path, 13), evaluation=0.0)
    broken = await opened(config)
    with pytest.raises(EnvError, match="/look_up answered 500: Internal Server Error"):
        await broken.step(look_up("boom"))
    with pytest.raises(EnvError, match=r"/verify answered without a reward: .*note"):
        await broken.step(Message("assistant", "7"))
    await broken.close()
    wrong = NemoGym(url=f"{server[0]}/elsewhere", path=config.path, evaluation=0.0)
    with pytest.raises(EnvError, match="/seed_session answered 404"):
        await opened(wrong)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = NemoGym(url=f"http://127.0.0.1:{closed.getsockname()[1]}", path=config.path, evaluation=0.0)
        with pytest.raises(EnvError, match=r"the NeMo-Gym server at .* cannot be used: ClientConnectorError"):
            await opened(gone)


def test_a_server_that_dies_in_an_episode_is_a_failure(tmp_path: Path) -> None:
    async def play(url: str, process: subprocess.Popen[bytes]) -> None:
        env = await opened(NemoGym(url=url, path=rows(tmp_path, 7), evaluation=0.0))
        process.kill()
        process.wait(SOON)
        with pytest.raises(EnvError, match="cannot be used"):
            await env.step(look_up("number"))
        await env.close()

    with served(sys.executable, "nemo_gym_wire.py") as running:
        asyncio.run(play(*running))


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ({"input": "x"}, "it has no 'responses_create_params'; it has input"),
        ({"responses_create_params": {"input": []}}, r"input is \[\]; allowed are text and a list of messages"),
        ({"responses_create_params": {"input": [{"role": "tool", "content": "x"}]}}, "allowed are messages of system"),
        ({"responses_create_params": {"input": [{"role": "user", "content": [{"type": "image"}]}]}}, "is not text"),
        ({"responses_create_params": {"input": [{"role": "assistant", "content": "x"}]}}, "leaves nothing to answer"),
        ({"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}, "allowed are functions"),
    ],
)
def test_a_row_that_cannot_be_played_is_named(tmp_path: Path, written: dict[str, object], complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(1)) + "\n" + json.dumps(written) + "\n")
    source = task_source(NemoGym(url="http://h", path=str(path), evaluation=0.0), "train", 0)
    assert isinstance(source, NemoGymEnv)
    with pytest.raises(ConfigError, match=rf"env\.path: .*rows\.jsonl, line 2: .*{complaint}"):
        source.check()


def test_an_opening_may_be_text_parts_and_instructions() -> None:
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    messages, tools = read_prompt({"responses_create_params": {"input": parts, "instructions": "Be short."}})
    assert messages == (Message("system", "Be short."), Message("user", "ab"))
    assert tools == ()
    assert read_prompt({"responses_create_params": {"input": "hi"}})[0] == (Message("user", "hi"),)


def test_a_wrong_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.url: '10\.0\.0\.7' is not of the form http://HOST:PORT"):
        task_source(NemoGym(url="10.0.0.7", path=rows(tmp_path, 1)), "train", 0)


# --- the library's own servers ------------------------------------------------------------------------------------

with_nemo_gym = needs("nemo_gym")


def example_rows(name: str) -> str:
    (found,) = python_of("nemo_gym").parent.parent.glob(
        f"lib/python3*/site-packages/resources_servers/{name}/data/example.jsonl"
    )
    return str(found)


def called(name: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(name, arguments, "c0"),))


@pytest.mark.full
@with_nemo_gym
def test_a_resources_server_of_the_library_is_played() -> None:
    name = "example_multi_step"
    with served(python_of("nemo_gym"), "nemo_gym_server.py", name, "ExampleMultiStepResourcesServer") as running:
        asyncio.run(play_synonyms(*running, NemoGym(url=running[0], path=example_rows(name), evaluation=0.0)))


async def play_synonyms(url: str, process: subprocess.Popen[bytes], config: NemoGym) -> None:
    source = task_source(config, "train", 0)
    assert isinstance(source, NemoGymEnv)
    source.check()
    env, task = source.make(), source.task(0)
    opening = await env.reset(task)
    assert {tool.name for tool in opening.tools} == {"get_synonym_value", "extract_synonym_values"}
    wrong = await env.step(called("get_synonym_value", x=1))
    assert "error: " in wrong.messages[0].content
    assert "synonym" in wrong.messages[0].content
    found = [
        json.loads((await env.step(called("get_synonym_value", synonym=word))).messages[0].content)["synonym_value"]
        for word in task.payload["row"]["expected_synonyms"]
    ]
    assert found == task.payload["row"]["expected_synonym_values"]
    await env.step(called("extract_synonym_values", synonym_values=found))
    last = await env.step(Message("assistant", "done"))
    assert (last.reward, last.done) == (1.0, True)
    await env.close()
    other = source.make()
    await other.reset(task)
    assert (await other.step(Message("assistant", "done"))).reward == 0.0
    process.kill()
    process.wait(SOON)
    await other.close()
    with pytest.raises(EnvError, match=f"{url} cannot be used"):
        await source.make().reset(task)


@pytest.mark.full
@with_nemo_gym
def test_a_resources_server_of_the_library_keeps_the_contract() -> None:
    name = "example_single_tool_call"
    with served(python_of("nemo_gym"), "nemo_gym_server.py", name, "SimpleWeatherResourcesServer") as (url, _):
        subject = subject_of(NemoGym(url=url, path=example_rows(name), max_turns=6, evaluation=0.0), 0)
        for check in set(CHECKS) - {"tasks"}:  # it needs tasks to evaluate on
            assert run_check(check, subject)
