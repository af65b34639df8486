"""The control channel of an active run: the commands `slipstream replicas`, `workers`, `set` and `waits`, carried out by the
supervisor.

Invariants:
- It listens on loopback, and serves only clients that prove the key of commands. `control.json` names the folder of that key,
  which only the owner of the run can read, on the supervisor's host.
- Two commands never change the roles or the settings together: the second waits for the first. Those that only read are answered
  at once.
- No command can end a run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...common.bounded import Name
from ...common.fsio import write_atomic
from ...common.owned_folders import private_folder
from ...common.tasks import Stopped, run_unless_exited
from ...configs import run_config
from ...errors import ConfigError, RequestRefused, SlipstreamError, describe, with_deadline
from ...monitor.settings import LiveSetting, SettingChange
from ...rpc.client import RpcClient
from ...rpc.security import KeyPair, PeerTable, make_pair, read_pair, write_pair
from ...rpc.server import RpcRequest, RpcServer
from ..run_lock import CONTROL, is_locked
from .fleet import ReplicaListing
from .health import RoleWait
from .workers import WorkerListing

if TYPE_CHECKING:
    from .pool import RolePool
    from .replicas import ReplicaManager
    from .settings import SettingsManager
    from .workers import WorkerManager

log = logging.getLogger(__name__)


COMMAND = "command"  # the name of those who send them: no role
REPLY_S = 150.0  # longest wait for a reply: Ray may need long to find room for a replica
TURN_S = 120.0  # longest wait of a command for those before it; its sender still waits then, and is told
MOST_WAITING = 64  # commands that wait for their turn
MOST_ADDED = 1000  # replicas or workers by one command
COMMAND_BYTES = 1 << 20  # of one request
T = TypeVar("T")


class ControlAddress(msgspec.Struct, frozen=True):
    """What `control.json` holds."""

    pid: int  # of the supervisor
    address: str
    fleet: str  # address of the fleet's snapshots
    folder: str  # the private folder, on the supervisor's host, with the key pair of commands

    @property
    def pair(self) -> KeyPair:
        """The key pair of commands. Raises ConfigError where this user, or this host, cannot read it."""
        return read_pair(self.folder)


class AddReplicas(msgspec.Struct, frozen=True, tag=True):
    """Start `count` more replicas. Reply: `CommandAccepted`."""

    count: int


class RemoveReplica(msgspec.Struct, frozen=True, tag=True):
    """Drain and end replica `name`. Reply: `CommandAccepted`."""

    name: Name


class AddWorkers(msgspec.Struct, frozen=True, tag=True):
    """Start `count` more workers. Reply: `CommandAccepted`."""

    count: int


class RemoveWorker(msgspec.Struct, frozen=True, tag=True):
    """End worker `name`. Reply: `CommandAccepted`."""

    name: Name


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Reply: `RunStatus`."""


class ChangeSettings(msgspec.Struct, frozen=True, tag=True):
    """Change live settings: `overrides` as on a command line. Reply: `SettingsChanged`."""

    overrides: tuple[str, ...]


class GetSettings(msgspec.Struct, frozen=True, tag=True):
    """Reply: `SettingsListing`."""


Change = AddReplicas | RemoveReplica | AddWorkers | RemoveWorker | ChangeSettings
Command = Change | GetStatus | GetSettings


class CommandAccepted(msgspec.Struct, frozen=True, tag=True):
    """The command has begun: it concerns the roles `names`, and is in the fleet from `revision` on."""

    names: tuple[str, ...]
    revision: int


class RunStatus(msgspec.Struct, frozen=True, tag=True):
    replicas: tuple[ReplicaListing, ...]
    waits: tuple[RoleWait, ...]
    workers: tuple[WorkerListing, ...] = ()


class SettingsChanged(msgspec.Struct, frozen=True, tag=True):
    """What has changed, in force and on the disk; empty where all keys had these values."""

    changes: tuple[SettingChange, ...]


class SettingsListing(msgspec.Struct, frozen=True, tag=True):
    settings: tuple[LiveSetting, ...]


Reply = CommandAccepted | RunStatus | SettingsChanged | SettingsListing


@dataclass(eq=False)
class ControlServer:
    """The supervisor's end; `waits` returns the waits of all roles. `settings` and `workers` are None where the run does not
    train."""

    run_dir: Path
    replicas: ReplicaManager
    fleet_address: str
    waits: Callable[[], Sequence[RoleWait]] = tuple
    settings: SettingsManager | None = None
    workers: WorkerManager | None = None
    pair: KeyPair = field(default_factory=make_pair)
    admit: Callable[[str, str], None] = lambda name, key: None  # is told the key of commands, for the fleet
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # of the command that changes the run now
    _waiting: int = 0  # commands that wait for it

    async def serve(self) -> None:
        """Serve until cancelled; `control.json` and the key of commands exist for as long."""
        folder = private_folder()
        key = write_pair(folder.path).public
        self.admit(COMMAND, key)
        server: RpcServer[Command] = RpcServer(
            "tcp://127.0.0.1:*",
            "the supervisor",
            Command,
            frame_limit=COMMAND_BYTES,
            peers=PeerTable({COMMAND: key}),
            pair=self.pair,
        )
        path = self.run_dir / CONTROL
        address = ControlAddress(os.getpid(), server.address, self.fleet_address, str(folder.path))
        try:
            write_atomic(path, msgspec.json.encode(address), mode=0o600)
            async with asyncio.TaskGroup() as changes:
                await server.serve(functools.partial(self._handle, server, changes), "the next command")
        finally:
            path.unlink(missing_ok=True)
            server.close()
            folder.close()

    async def _handle(
        self, server: RpcServer[Command], changes: asyncio.TaskGroup, request: RpcRequest[Command]
    ) -> Reply | None:
        """Answer what only reads; what changes the run is answered by a task, when its turn is over."""
        if not isinstance(request.message, Change):
            return await self._carry_out(request)
        if self._waiting >= MOST_WAITING:
            raise RequestRefused(f"{MOST_WAITING} commands wait for their turn already; try again when they are done")
        self._waiting += 1
        changes.create_task(server.answer(request, self._carry_out), name=f"command {type(request.message).__name__}")
        return None

    async def _carry_out(self, request: RpcRequest[Command]) -> Reply:
        try:
            match request.message:
                case GetStatus():
                    workers = self.workers.listed() if self.workers else ()
                    return RunStatus(tuple(self.replicas.listed()), tuple(self.waits()), tuple(workers))
                case GetSettings():
                    return SettingsListing(tuple(self._settings().listed()))
                case change:
                    await self._take_turn(change)
                    try:
                        return await self._change(change)
                    finally:
                        self._turn.release()
        except SlipstreamError as error:
            raise RequestRefused(str(error)) from error
        except Exception as error:  # a command that fails unexpectedly must not end the run
            log.exception("%s failed", request.message)
            raise RequestRefused(describe(error)) from error

    async def _take_turn(self, change: Change) -> None:
        """Raises DeadlineExceeded where those before it take too long: then nothing has changed."""
        who, waits_for = f"the command {type(change).__name__}", "the commands before it"
        hint = "nothing was changed; `slipstream waits` names what they wait for"
        try:
            await with_deadline(TURN_S, self._turn.acquire(), who=who, waits_for=waits_for, hint=hint)
        finally:
            self._waiting -= 1

    async def _change(self, change: Change) -> Reply:
        match change:
            case AddReplicas(count=count):
                names = await _add(self.replicas, "replicas", count)
            case RemoveReplica(name=name):
                await self.replicas.remove(name)
                names = [name]
            case AddWorkers(count=count):
                names = await _add(self._workers(), "workers", count)
            case RemoveWorker(name=name):
                await self._workers().remove(name)
                names = [name]
            case ChangeSettings(overrides=overrides):
                return SettingsChanged(await self._settings().change(overrides))
        return CommandAccepted(tuple(names), self.replicas.fleet.revision)

    def _settings(self) -> SettingsManager:
        if self.settings is None:
            raise ConfigError("this run does not train: it has no settings to change")
        return self.settings

    def _workers(self) -> WorkerManager:
        if self.workers is None:
            raise ConfigError("this run does not train: it has no workers")
        return self.workers


async def _add(pool: RolePool, what: str, count: int) -> list[str]:
    if not 1 <= count <= MOST_ADDED:
        raise ConfigError(f"{count} {what} cannot be added; allowed are 1 to {MOST_ADDED}")
    return await pool.add(count)


def read_control_address(run_dir: Path, overrides: Sequence[str] = ()) -> ControlAddress:
    """How to reach the supervisor of the run in `run_dir`. Raises ConfigError where there is no run, or it does not run now; then
    `overrides`, such as `learner.steps=200`, are part of the command that continues it."""
    resume = shlex.join(["slipstream", "resume", str(run_dir), *overrides])
    locked = is_locked(run_dir)
    if not locked:
        run_config(run_dir)
    path = run_dir / CONTROL
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ControlAddress)
    except FileNotFoundError:
        idle = f"is not running; if it has not finished, `{resume}` continues it"
        why = "is only starting or just ending; try again in a moment" if locked else idle
        raise ConfigError(f"{run_dir} {why}") from None
    except PermissionError:
        raise ConfigError(f"{path} may be read only by the user who started the run") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not of this version of Slipstream: {error}") from None
    if not locked:
        raise ConfigError(
            f"{run_dir} is not running: its supervisor, process {found.pid}, was killed; "
            f"continue the run with `{resume}`"
        )
    return found


async def send_command(
    control: ControlAddress, command: Command, expected: type[T], *, who: str = "slipstream replicas"
) -> T:
    """The supervisor's reply to `command`, sent by `who`. Raises ConfigError if it refuses or ends, DeadlineExceeded if it is
    silent."""
    client = RpcClient(control.address, who, "the supervisor", Reply, frame_limit=COMMAND_BYTES, pair=control.pair)
    try:
        waits_for = f"the supervisor, process {control.pid}"
        hint = "is it stopped, the run on another host, or of another version of Slipstream?"
        reply = client.request(command, expected, REPLY_S, waits_for=waits_for, hint=hint)
        return await run_unless_exited(reply, control.pid)
    except Stopped:
        raise ConfigError(f"the run's supervisor, process {control.pid}, ended before it replied") from None
    except RequestRefused as error:
        raise ConfigError(error.reason) from None
    finally:
        client.close()
