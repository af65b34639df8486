"""Sandboxes on machines elsewhere, at E2B (https://e2b.dev), by its own SDK: the provider's API starts and ends a machine, and
E2B's server in it, envd, runs commands.

Invariants: those of `elsewhere.py`, and
- A machine has no network unless `allow_internet_access` gives it one, and lives for at most `timeout` seconds, also where the
  worker is killed.
- The policy may have taken envd over, as the user of E2B's own template may become root. No answer of it takes more memory than the
  request allows.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...errors import ConfigError, describe, with_deadline
from .base import Limits
from .deployments import STOP_S
from .elsewhere import CONNECT_S, HINT, START_S, TRAVEL_S, WHO, Executed, MachinePool
from .frames import ENVELOPE
from .local import DEFAULT, FILE_S

if TYPE_CHECKING:
    from e2b import AsyncSandbox
    from pyqwest import Request, Response, Transport

log = logging.getLogger(__name__)

KEY = "E2B_API_KEY"
REFUSED = 400  # the first HTTP status of an error
CLOCK_S = 0.05  # by which E2B's clock may be ahead of ours


class E2BOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of E2B's `AsyncSandbox.create`, by its names."""

    template: str = "base"
    timeout: int = 3600  # seconds that a machine lives at most; E2B allows an hour, or a day to those who pay
    allow_internet_access: bool = False
    envs: dict[str, str] = {}
    metadata: dict[str, str] = {}
    domain: str | None = None
    http_version: Literal["1.1", "2"] = "2"


class E2BMachine:
    """A `Machine` at E2B."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        from e2b.api import proxy_to_config
        from e2b.api.client_async import get_pyqwest_transport
        from e2b.envd.client_async import PlainHTTPErrorTransport
        from pyqwest import Client
        from pyqwest.httpx import AsyncPyqwestTransport

        self.address = f"E2B, {sandbox.sandbox_id}"
        self._sandbox = sandbox
        # The SDK reads answers to their end, however long. It has no option for a limit: its clients get transports that have one.
        config = sandbox.connection_config
        plain = get_pyqwest_transport(proxy_to_config(config.proxy), http_version=config.http_version)
        self._rpc = sandbox.commands._rpc
        self._rpc._http_client = Client(PlainHTTPErrorTransport(_Bounded(plain, errors_only=True)))
        sandbox.files._envd_api._transport = AsyncPyqwestTransport(_Bounded(plain, errors_only=False))

    async def execute(self, argv: Sequence[str], seconds: float, most: int) -> Executed:
        """See `Machine.execute`."""
        from e2b import CommandExitException, TimeoutException

        written: dict[str, list[str]] = {"stdout": [], "stderr": []}
        size = 0

        def take(stream: str, piece: str) -> None:
            nonlocal size
            size += len(piece)
            if size > most:
                raise ValueError(f"the answer has more than {most} bytes")
            written[stream].append(piece)

        def executed(exit_code: int | None, overtime: bool = False) -> Executed:
            return Executed("".join(written["stdout"]), "".join(written["stderr"]), exit_code, overtime)

        self._rpc._read_max_bytes = 2 * most + ENVELOPE  # of one message, whose text is in base64
        until = get_running_loop().time() + seconds - CLOCK_S
        command = await self._sandbox.commands.run(
            shlex.join(argv),
            background=True,
            timeout=seconds,
            request_timeout=CONNECT_S,
            retain_output=False,
            on_stdout=lambda piece: take("stdout", piece),
            on_stderr=lambda piece: take("stderr", piece),
        )
        try:
            await command.wait()
            return executed(0)
        except CommandExitException as end:
            return executed(end.exit_code)
        except TimeoutException as error:
            # Its subclasses say that the machine is gone; so does one that comes too early.
            if type(error) is not TimeoutException or get_running_loop().time() < until:
                raise
            return executed(None, overtime=True)
        finally:
            await command.disconnect()

    async def upload(self, path: str, data: bytes) -> None:
        """See `Machine.upload`."""
        await self._sandbox.files.write(path, data, request_timeout=FILE_S + TRAVEL_S)

    async def stop(self) -> None:
        """See `Machine.stop`."""
        ending = self._sandbox.kill(request_timeout=STOP_S)
        try:
            await with_deadline(STOP_S, ending, who=WHO, waits_for="a sandbox elsewhere to end", hint=HINT)
        except Exception as error:  # whatever the SDK raises, and DeadlineExceeded
            log.warning("a machine elsewhere (%s) may be left running: %s", self.address, describe(error))


class _Bounded:
    """A transport that reads at most so many bytes of an answer; with `errors_only` of one that is an error."""

    def __init__(self, inner: Transport, *, errors_only: bool) -> None:
        self._inner, self._errors_only = inner, errors_only

    async def execute(self, request: Request) -> Response:
        from pyqwest import Response

        response = await self._inner.execute(request)
        if self._errors_only and response.status < REFUSED:
            return response
        return Response(status=response.status, headers=response.headers, content=_at_most(response, ENVELOPE))


async def _at_most(response: Response, most: int) -> AsyncIterator[bytes]:
    size = 0
    async with response:
        async for piece in response.content:
            size += len(piece)
            if size > most:
                raise ConnectionError(f"the answer has more than {most} bytes")
            yield bytes(piece)


class E2BPool(MachinePool):
    """A `SandboxPool` of machines at E2B. The variable E2B_API_KEY has the key.

    Args:
        options: some of `E2BOptions`, such as `{"template": "my-template", "timeout": 600}`.

    Raises:
        ConfigError: E2B has no such option, its SDK is not installed, or there is no key.
    """

    def __init__(self, options: Mapping[str, Any] = {}, limits: Limits = DEFAULT) -> None:
        self._options = _checked(options)
        super().__init__(self._started, limits)

    async def _started(self) -> E2BMachine:
        from e2b import AsyncSandbox

        # Not E2B's debug mode: there all sandboxes are one server of this host.
        making = AsyncSandbox.create(**msgspec.structs.asdict(self._options), debug=False, request_timeout=START_S)
        what = "a sandbox elsewhere to start"
        return E2BMachine(await with_deadline(START_S, making, who=WHO, waits_for=what, hint=HINT))


def _checked(options: Mapping[str, Any]) -> E2BOptions:
    unknown = options.keys() - set(E2BOptions.__struct_fields__)
    if unknown:
        allowed = ", ".join(sorted(E2BOptions.__struct_fields__))
        raise ConfigError(f"sandbox: {min(unknown)!r} is no option of a machine at E2B; allowed are {allowed}")
    try:
        found = msgspec.convert(dict(options), E2BOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sandbox: options of a machine at E2B: {error}") from None
    if importlib.util.find_spec("e2b") is None:
        raise ConfigError("sandbox: a machine at E2B needs the package e2b; pip install -e .[e2b]")
    if not os.environ.get(KEY):
        raise ConfigError(f"sandbox: a machine at E2B needs the variable {KEY}, which is not set; e2b.dev gives a key")
    return found
