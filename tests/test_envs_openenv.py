"""The kind `openenv` against a real server of the library, in its own interpreter (`requirements/install-env.sh openenv`)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Iterator

import pytest
from slipstream.configs.environments import OpenEnv
from slipstream.envs import Message, ToolCall, task_source
from slipstream.envs.check import CHECKS, run_check, subject_of
from slipstream.errors import ConfigError, EnvError
from slipstream.tests.servers import SOON, needs, python_of, served

with_openenv = needs("openenv")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with served(python_of("openenv"), "openenv_server.py") as running:
        yield running


def guess(number: object, name: str = "act") -> Message:
    return Message("assistant", "", (ToolCall(name, {"number": number}, "c0"),))


@pytest.mark.full
@with_openenv
async def test_an_episode_is_played_on_the_librarys_own_server(server) -> None:
    source = task_source(OpenEnv(url=server[0], prompt="A game.", max_turns=20), "train", 0)
    env = source.make()
    opening = await env.reset(source.task(0))
    assert opening.messages[0].content == "A game.\nGuess 1 to 9."
    (tool,) = opening.tools
    assert tool.parameters["properties"]["number"]["type"] == "integer"
    assert tool.parameters["required"] == ["number"]
    for wrong, told in (
        (Message("assistant", "5"), "call the tool act"),
        (Message("assistant", "", malformed="no JSON"), "no JSON"),
        (guess(5, "jump"), "there is no tool 'jump'"),
        (guess("many"), "error: "),
        (Message("assistant", "", (ToolCall("act", {}, "c0"),)), "error: "),
    ):
        result = await env.step(wrong)
        assert told in result.messages[0].content
        assert (result.reward, result.done) == (0.0, False)
    results = [await env.step(guess(number)) for number in range(1, 10)]
    right = next(result for result in results if result.done)
    assert (right.reward, right.messages[0].content, right.metrics["invalid"]) == (1.0, "right", 5.0)
    await env.close()


@pytest.mark.full
@with_openenv
async def test_many_episodes_at_once_are_those_of_their_seeds_and_are_cut_off(server) -> None:
    source = task_source(OpenEnv(url=server[0], max_turns=2), "train", 0)

    async def play(index: int) -> list[str]:
        env = source.make()
        await env.reset(source.task(index))
        results = [await env.step(guess(number)) for number in (5, 4)]
        assert results[-1].done
        await env.close()
        return [result.messages[0].content for result in results]

    alone = [await play(index) for index in range(8)]
    assert await asyncio.gather(*(play(index % 8) for index in range(48))) == alone * 6


@pytest.mark.full
@with_openenv
@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_contract(server, name: str) -> None:
    assert run_check(name, subject_of(OpenEnv(url=server[0], max_turns=6), 0))


@pytest.mark.full
@with_openenv
async def test_an_error_of_the_server_and_its_end_are_failures(server) -> None:
    """The last test of the server: it kills it."""
    url, process = server
    source = task_source(OpenEnv(url=url), "train", 0)
    broken, cut = source.make(), source.make()
    for env in (broken, cut):
        await env.reset(source.task(0))
    with pytest.raises(EnvError, match=r"boom|closed the connection"):
        await broken.step(guess(99))
    process.kill()
    process.wait(SOON)
    with pytest.raises(EnvError, match=r"closed the connection|is lost"):
        await cut.step(guess(1))
    for env in (broken, cut):
        await env.close()


async def test_a_server_that_is_not_there_is_a_failure_and_a_wrong_url_is_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        source = task_source(OpenEnv(url=f"http://127.0.0.1:{closed.getsockname()[1]}"), "train", 0)
        env = source.make()
        with pytest.raises(EnvError, match=r"the OpenEnv server at .* cannot be used: ClientConnectorError"):
            await env.reset(source.task(0))
        await env.close()
    with pytest.raises(ConfigError, match=r"env\.url: '10\.0\.0\.7' is not of the form http://HOST:PORT"):
        task_source(OpenEnv(url="10.0.0.7"), "train", 0)
