"""Sandboxes on machines elsewhere, by SWE-ReX (https://swe-rex.com): its deployments start a machine in Docker, at Modal, at AWS or
at another provider, with SWE-ReX's server in it.

Invariants: those of `elsewhere.py`, and
- SWE-ReX's own client is not used: it has no deadlines, and no limit for an answer.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...common.tasks import in_thread
from ...errors import with_deadline
from .base import Limits
from .deployments import SweRexDeployment, deployment_maker, stop
from .elsewhere import CONNECT_S, HINT, START_S, WHO, Executed, MachinePool
from .frames import ENVELOPE
from .local import DEFAULT

OVERTIME = "swerex.exceptions.CommandTimeoutError"


class _Failure(msgspec.Struct):
    class_path: str = ""
    message: str = ""


class _Reply(msgspec.Struct):
    """SWE-ReX's answer to a request: what the request raised there (with status 511), if it did."""

    swerexception: _Failure | None = None


class _Ran(_Reply):
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


R = TypeVar("R", bound=_Reply)


class SweRexMachine:
    """A `Machine` that a deployment has started."""

    def __init__(self, deployment: SweRexDeployment) -> None:
        import aiohttp  # here: an environment in an interpreter of its own may be without it

        runtime = deployment.runtime  # SWE-ReX has no public names for its address and key
        self.address = str(runtime._api_url).rstrip("/")
        self._deployment = deployment
        self._http = aiohttp.ClientSession(
            headers={**runtime._headers, "Accept-Encoding": "identity"},
            auto_decompress=False,  # an answer has no more bytes than were received
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def execute(self, argv: Sequence[str], seconds: float, most: int) -> Executed:
        """See `Machine.execute`."""
        ran = await self._post("execute", most, _Ran, json={"command": list(argv), "timeout": seconds})
        return Executed(ran.stdout, ran.stderr, ran.exit_code, ran.swerexception is not None)

    async def upload(self, path: str, data: bytes) -> None:
        """See `Machine.upload`."""
        import aiohttp

        form = aiohttp.FormData({"target_path": path})
        form.add_field("file", io.BytesIO(data), filename="data")
        await self._post("upload", ENVELOPE, _Reply, data=form)

    async def stop(self) -> None:
        """See `Machine.stop`."""
        await self._http.close()
        await stop(self._deployment)

    async def _post(self, what: str, most: int, kind: type[R], **body: Any) -> R:
        # No redirects: the machine must not choose what else this host asks.
        async with self._http.post(f"{self.address}/{what}", allow_redirects=False, **body) as response:
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > most:
                    raise ValueError(f"the answer has more than {most} bytes")
            if response.status not in (200, 511):
                raise ValueError(f"status {response.status}: {answer[:300].decode(errors='replace')}")
        reply = msgspec.json.decode(answer, type=kind)
        failure = reply.swerexception
        if failure is not None and failure.class_path != OVERTIME:
            raise ValueError(f"{failure.class_path}: {failure.message:.300}")
        return reply


class SweRexPool(MachinePool):
    """A `SandboxPool` of machines elsewhere.

    Args:
        machine: options of a deployment of SWE-ReX, such as `{"type": "docker", "image": "python:3.12"}`, see `deployment_maker`;
            or a function that makes a deployment that was not started.

    Raises:
        ConfigError: SWE-ReX has no such options, or is not installed.
    """

    def __init__(self, machine: Mapping[str, Any] | Callable[[], SweRexDeployment], limits: Limits = DEFAULT) -> None:
        self._make = machine if callable(machine) else deployment_maker(machine)
        super().__init__(self._started, limits)

    async def _started(self) -> SweRexMachine:
        async def within(work: asyncio.Future[Any]) -> Any:
            what = "a sandbox elsewhere to start"
            return await with_deadline(START_S, work, who=WHO, waits_for=what, hint=HINT)

        name = "start of a sandbox elsewhere"
        deployment: SweRexDeployment = await within(in_thread(self._make, name))
        try:
            await within(in_thread(lambda: asyncio.run(deployment.start()), name))
            return SweRexMachine(deployment)
        except BaseException:
            await stop(deployment)
            raise
