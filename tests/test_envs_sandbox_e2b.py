"""Sandboxes at E2B, beside the contract of `test_envs_sandbox_contract.py`: E2B's own SDK, against what stands in for its servers
(`e2b_stand_in.py`). No machine of E2B was ever asked."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from aiohttp import web
from slipstream.envs.sandbox import MIB, E2BPool, Limits, e2b
from slipstream.errors import ConfigError, ToolError
from slipstream.tests.e2b_stand_in import FORM, Answer, E2BService, envelope
from slipstream.tests.sandbox_pools import e2b_service

LIMITS = Limits(wall_s=20, cpu_s=10, memory=300 * MIB, disk=16 * MIB)


@pytest.fixture
def service() -> Iterator[E2BService]:
    """No machine is left when a test has ended."""
    service = e2b_service()
    yield service
    service.envd = None
    service.may_create.set()
    assert service.machines == {}


async def test_what_the_provider_is_asked_for(service: E2BService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_DEBUG", "true")  # in which the SDK makes no machine
    options = {"template": "mine", "timeout": 600, "allow_internet_access": True, "metadata": {"team": "rl"}}
    for given in ({}, options):
        box = await E2BPool(given, LIMITS).open()
        assert len(service.machines) == 1
        await box.close()
    usual, chosen = service.asked[-2:]
    assert (usual["templateID"], usual["timeout"], usual["allow_internet_access"]) == ("base", 3600, False)
    assert (chosen["templateID"], chosen["timeout"], chosen["allow_internet_access"]) == ("mine", 600, True)
    assert chosen["metadata"] == {"team": "rl"}


def is_below(name: str, pid: int) -> bool:
    """Whether a process of this name descends from another."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.name() == name for process in psutil.Process(pid).children(recursive=True))
    return False


async def test_a_machine_that_is_lost_is_a_tool_error(service: E2BService) -> None:
    box = await E2BPool(limits=LIMITS).open()
    running = asyncio.create_task(box.run(("/bin/sleep", "60")))
    ((machine, (container, *_)),) = service.machines.items()
    async with asyncio.timeout(60):
        while not is_below("sleep", container.pid):  # noqa: ASYNC110 - what a machine has begun sets nothing here
            await asyncio.sleep(0.02)
    await asyncio.to_thread(service.end, machine)
    with pytest.raises(ToolError, match=rf"at E2B, {machine} is lost: execute: \w+: .*The sandbox was "):
        await running
    for asked in (box.read("x"), box.run(("/bin/true",))):
        with pytest.raises(ToolError, match="is lost: execute: "):
            await asked
    await box.close()  # E2B has it no more, which is no fault


async def test_a_machine_whose_start_was_cancelled_is_ended(service: E2BService) -> None:
    service.may_create.clear()
    service.creates.clear()
    pool = E2BPool(limits=LIMITS)
    opening = asyncio.create_task(pool.open())
    assert await asyncio.to_thread(service.creates.wait, 60)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    service.may_create.set()
    async with asyncio.timeout(60):
        await pool.close()
    assert service.machines == {}


async def test_a_machine_that_cannot_be_ended_is_logged(
    service: E2BService, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    box = await E2BPool(limits=LIMITS).open()
    (machine,) = service.machines
    box._machine._sandbox.connection_config.api_url = "http://127.0.0.1:1"  # pyright: ignore[reportAttributeAccessIssue]
    await box.close()
    assert f"a machine elsewhere (E2B, {machine}) may be left running: " in caplog.text
    await asyncio.to_thread(service.end, machine)


def started(*messages: bytes) -> Answer:
    """An envd that starts a command, says something, and goes on until nobody listens."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": FORM})
        await response.prepare(request)
        await response.write(envelope({"event": {"start": {"pid": 1}}}))
        with contextlib.suppress(ConnectionError):
            for message in messages[:-1]:
                await response.write(message)
            while messages:
                await response.write(messages[-1])
        return response

    return answer


def status(code: int, **options: Any) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=204)
        response = web.StreamResponse(status=code, **options)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes(1 << 16))
        return response

    return answer


async def is_no_json(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("/elsewhere")


SPEAKS = envelope({"event": {"data": {"stdout": "AAAA" * 1000}}})
CANCELED = envelope({"error": {"code": "canceled", "message": "the sandbox is paused"}}, flags=2)


@pytest.mark.parametrize(
    ("envd", "error"),
    [
        pytest.param(started(SPEAKS), "the answer has more than 8192 bytes", id="speaks on"),
        pytest.param(started(b"\0\x7f\xff\xff\xff", bytes(1 << 16)), "larger than configured max", id="long message"),
        pytest.param(status(500), "the answer has more than 4096 bytes", id="long error"),
        pytest.param(started(), "ended without an end event", id="says nothing"),
        pytest.param(started(CANCELED), "the sandbox is paused", id="paused"),
        pytest.param(is_no_json, "content-type", id="no stream"),
        pytest.param(redirects, "Temporary Redirect", id="redirects"),
    ],
)
async def test_a_server_that_is_not_envd_is_a_tool_error_and_is_ended(
    service: E2BService, envd: Answer, error: str
) -> None:
    """The policy may have put it there."""
    service.envd, pool = envd, E2BPool(limits=LIMITS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ToolError, match=f"did not start: .*is lost: execute: .*{error}"):
        await pool.open()
    await pool.close()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


async def test_an_upload_whose_answer_does_not_end_is_a_tool_error(service: E2BService) -> None:
    box = await E2BPool(limits=LIMITS).open()
    service.envd = status(200)
    with pytest.raises(ToolError, match=r"is lost: upload: .*the answer has more than 4096 bytes"):
        await box.write("file", b"x")
    await box.close()


async def test_a_wrong_key_is_named(service: E2BService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(e2b.KEY, "e2b_another")
    with pytest.raises(ToolError, match=r"did not start: AuthenticationException: .*Invalid API key"):
        await E2BPool(limits=LIMITS).open()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"temlate": "x"},
            "'temlate' is no option of a machine at E2B; allowed are allow_internet_access, .*, timeout",
        ),
        ({"timeout": "soon"}, r"options of a machine at E2B: Expected `int`, got `str` - at `\$.timeout`"),
        ({"http_version": "3"}, r"Invalid enum value '3' - at `\$.http_version`"),
    ],
)
def test_options_that_e2b_does_not_have_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error) as refused:
        E2BPool(options)
    assert "\n" not in str(refused.value)


def test_without_a_key_or_the_sdk_nothing_starts(service: E2BService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(e2b.KEY)
    with pytest.raises(ConfigError, match="a machine at E2B needs the variable E2B_API_KEY, which is not set"):
        E2BPool()
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match=r"a machine at E2B needs the package e2b; pip install -e \.\[e2b\]"):
        E2BPool()
