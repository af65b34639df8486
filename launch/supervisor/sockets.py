"""What the supervisor listens on for the roles of a run: heartbeats, and what it publishes. Every socket is guarded.

Invariants:
- The sockets are bound before any role starts and closed after every role has ended; followers of the fleet are told the end first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ...configs import Config
from ...rpc.pubsub import StatePublisher
from ...rpc.server import RpcServer
from ...weightsync.fleet import Fleet
from ..run_context import Addresses, RunSettings
from .access import AccessManager
from .heartbeat import RIGHTS, SIGNAL_BYTES, RoleSignal


class SupervisorSockets:
    """Bound at free ports of `host` when it is made, in a running event loop. `certified` as in `AccessManager`."""

    def __init__(self, host: str, config: Config, certified: Callable[[str, str], None]) -> None:
        self.access = access = AccessManager(host, certified)
        anywhere, guarded = f"tcp://{host}:*", (access.table, access.pair)
        self.signals: RpcServer[RoleSignal] = RpcServer(
            anywhere,
            "the supervisor",
            RoleSignal,
            frame_limit=SIGNAL_BYTES,
            peers=access.table,
            rights=RIGHTS,
            pair=access.pair,
        )
        self.fleet: StatePublisher[Fleet] = StatePublisher(anywhere, Fleet(), *guarded)
        self.settings: StatePublisher[RunSettings] = StatePublisher(anywhere, RunSettings(1, config), *guarded)

    @property
    def addresses(self) -> Addresses:
        """Of these sockets alone."""
        return Addresses(
            supervisor=self.signals.address,
            fleet=self.fleet.address,
            buffer="",
            learner_host="",
            settings=self.settings.address,
            peers=self.access.directory_address,
            access=self.access.request_address,
        )

    def services(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """What must run for as long as the run."""
        access = self.access
        return access.serve_directory(), access.serve_requests(), self.fleet.serve(), self.settings.serve()

    async def close(self) -> None:
        await self.settings.close()
        await self.fleet.close(self.fleet.state.ended())
        self.signals.close()
        await self.access.close()
