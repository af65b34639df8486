"""External inference servers, which others started, as replicas of the supervisor: what they have for a `ProcessHandle`.

    probe answers, and the description fits ──> requests and keys of earlier runs are dropped ──> in the fleet ──> pushed to
         ▲                                                                                            │
         └──── silent, not well, started again, or of another model: missed, no signal is sent <──────┘

Invariants:
- No signal is ever sent to such a server: `terminate` and `kill` only end the `wait` of its handle.
- A server that was started again lost the weights that were pushed to it: it is missed, and joins as a new one.
- A server that gave false replies stays out until it was started again.
- The reason why a server is out is logged once, and again when it changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...configs import Config
from ...configs.engine_checks import SERVERS
from ...errors import DeadlineExceeded, EngineError
from ...rollout.engines.base import FalseReply, RequestRejected
from ...rollout.engines.http_client import ErrorStatus, HttpClient
from ...rollout.engines.server_keys import ServerKeys, read_all_keys
from ..external_servers import ServerDescription, ask, describe_server, misfit

UNWELL = "it answers that it is not well"


class ExternalServer:
    """One of them. `needed` is what it must serve; `tell` shows a line to the user."""

    pid = 0
    lost = False

    def __init__(self, url: str, keys: ServerKeys, needed: ServerDescription, tell: Callable[[str], None]) -> None:
        self.url = url
        self.keys = keys
        self.why = UNWELL  # why the last probe found that it is not well
        self._needed = needed
        self._tell = tell
        self._told = ""
        self._instance = ""  # of the process that is in the fleet; empty where none is
        self._barred = ""  # of the process that may not come back
        self._given_up = asyncio.Event()

    def attach(self) -> ExternalServer:
        """Begin to probe it, as if it had been started now."""
        self.why, self._instance = UNWELL, ""
        self._given_up = asyncio.Event()
        return self

    def bar(self) -> None:
        """The process that is in the fleet now may not come back."""
        self._barred = self._instance

    async def is_ours(self, client: HttpClient) -> bool | None:
        """Whether the process that answers is the one in the fleet, or may be it; None without an answer."""
        try:
            found = await ask(client)
        except (ErrorStatus, RequestRejected, FalseReply) as error:
            return self._refuse(str(error))
        except (EngineError, DeadlineExceeded):
            return None
        if self._instance and found.instance != self._instance:
            self.why = "it was started again"
            return False
        if found.instance == self._barred:
            return False
        if why := misfit(self.url, self._needed, found):
            return self._refuse(why)
        self._instance = found.instance
        return True

    def _refuse(self, why: str) -> bool:
        self.why = why
        if why != self._told:
            self._told = why
            self._tell(f"{self.url} is left out: {why}")
        return False

    async def wait(self) -> int:
        await self._given_up.wait()
        return 0

    async def terminate(self) -> None:
        self._given_up.set()

    async def kill(self) -> None:
        self._given_up.set()


def external_servers(config: Config, tell: Callable[[str], None]) -> dict[str, ExternalServer]:
    """The servers of a run by the names of its replicas, none where it starts its own. Raises ConfigError where a file of keys or
    the model cannot be read."""
    keys = read_all_keys(SERVERS, config.rollout.engine.external)
    needed = describe_server(config) if keys else ServerDescription("", {}, {})
    return {f"engine-{i}": ExternalServer(url, one, needed, tell) for i, (url, one) in enumerate(keys.items())}
