"""The settings of an active run that `slipstream set` changes: validated here, applied by the process that each key belongs to.

    overrides ──> checked config ──> buffer: in force at version v ──> settings.jsonl, config.yaml ──> published to all roles

Invariants:
- A change is in `settings.jsonl` before it is acknowledged. One that the buffer does not take, or that cannot be written, changes
  nothing.
- A process that starts, or starts again, has the settings in force; what was published meanwhile reaches it, too.
- Revisions rise with every attempt: a buffer that took rules of an attempt that failed returns to those in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...buffer.admission import LiveRules
from ...buffer.client import BufferClient
from ...buffer.client_registry import SUPERVISOR
from ...common.fsio import write_atomic
from ...common.tasks import in_thread
from ...configs import LIVE, RUN_CONFIG, Config, changed_live, check, dump
from ...errors import ConfigError, DeadlineExceeded, SlipstreamError, with_deadline
from ...learner.checkpoint_folder import checkpoints, read_state
from ...monitor.settings import SETTINGS, LiveSetting, SettingChange, append_changes
from ...monitor.terminal import View
from ...rpc.client import RpcClient
from ...rpc.pubsub import StatePublisher
from ...rpc.security import KeyPair
from ..run_context import Addresses, RunContext, RunSettings
from .heartbeat import StepSummary
from .processes import ProcessManager

log = logging.getLogger(__name__)

WRITE_S = 10.0  # longest wait for the disk of the run


@dataclass(eq=False)
class SettingsManager:
    """`context` is what processes start with. `followers` are told each config that comes into force; `last_step` returns the last
    step that the learner reported."""

    context: RunContext
    publisher: StatePublisher[RunSettings]
    processes: ProcessManager
    view: View
    last_step: Callable[[], StepSummary | None]
    followers: Sequence[Callable[[Config], None]] = ()
    # While the context lasts a client of the supervisor talks to the present process of a role; nothing in a run without keys.
    trusting: Callable[[RpcClient, str], contextlib.AbstractContextManager[None]] = lambda client, role: nullcontext()
    pair: KeyPair | None = None  # of this process
    _writing: asyncio.Future[None] | None = None  # the last work on the disk of the run
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # what is published is in force, or was not changed

    def listed(self) -> list[LiveSetting]:
        """Those in force, also while others are being put in force."""
        config = self.publisher.state.config
        return [LiveSetting(k.key, k.value(config), k.applied_by, k.takes_effect) for k in LIVE.values()]

    async def change(self, overrides: Sequence[str]) -> tuple[SettingChange, ...]:
        """Apply overrides of live keys; those that changed something. Raises ConfigError where one is not allowed, no step is
        left to use them, or the changes cannot be written, DeadlineExceeded where the buffer or the disk does not answer: then
        nothing has changed."""
        async with self._changing:
            return await self._change(overrides)

    async def _change(self, overrides: Sequence[str]) -> tuple[SettingChange, ...]:
        before = self.context.config
        after, different = changed_live(before, overrides)
        if not different:
            return ()
        self._require_slots(len(self.context.workers), after)
        self._start_with(after)  # from now on: the buffer may start again while it is asked
        try:
            version = await self._configure_buffer()
            now, step = time.time(), self._step_of(version)
            if step > (steps := after.learner.steps):
                raise ConfigError(
                    f"no step is left to use it: the last one, {steps}, has its batch; nothing was changed"
                )
            changes = tuple(SettingChange(now, step, version, one.key, one.old, one.new) for one in different)
            await self._record(changes)
        except (SlipstreamError, OSError) as error:
            self._start_with(before)
            self.publisher.publish(self.context.settings)
            if isinstance(error, SlipstreamError):
                raise
            raise ConfigError(
                f"{self.context.dir / SETTINGS} cannot be written, nothing was changed: {error}"
            ) from None
        await self._follow(after)
        for change in changes:
            self.view.event(f"{change}, from step {step} on")
        return changes

    def relocate(self, addresses: Addresses) -> None:
        """Processes that start from now on find the other roles at `addresses`."""
        self.context = msgspec.structs.replace(self.context, addresses=addresses)

    def require_slots(self, workers: int) -> None:
        """Raises ConfigError where `rollout.max_episodes` is less than one group for each of `workers` workers."""
        self._require_slots(workers, self.context.config)

    @staticmethod
    def _require_slots(workers: int, config: Config) -> None:
        rollout = config.rollout
        check(
            msgspec.structs.replace(
                config, rollout=msgspec.structs.replace(rollout, workers=max(workers, rollout.workers))
            )
        )

    async def set_workers(self, workers: tuple[str, ...]) -> None:
        """The workers of the run are these: each follows its share of `rollout.max_episodes`."""
        async with self._changing:
            self.context = msgspec.structs.replace(self.context, workers=workers)
            self._start_with(self.context.config)
            self.publisher.publish(self.context.settings)

    async def _record(self, changes: Sequence[SettingChange]) -> None:
        """Have them in `settings.jsonl`. Raises OSError or DeadlineExceeded: then they are not; a disk that takes them later takes
        back what they changed at once."""
        path, lock = self.context.dir / SETTINGS, threading.Lock()
        written = given_up = False

        def append() -> None:
            nonlocal written
            append_changes(path, changes)
            with lock:
                written = not given_up
            if not written:
                append_changes(path, [msgspec.structs.replace(one, old=one.new, new=one.old) for one in changes])

        try:
            await self._write(append, path)
        except DeadlineExceeded:
            with lock:
                given_up = not written
            if given_up:
                raise

    async def _write(self, work: Callable[[], None], path: Path) -> None:
        """In a thread, after what was begun before: a disk that hangs holds up no other command for longer than the deadline.
        Raises DeadlineExceeded, and what `work` raises."""
        hint = f"is the disk of {self.context.dir} gone?"
        waiting = {"who": "the supervisor", "waits_for": str(path), "hint": hint}
        if self._writing is not None:
            await with_deadline(WRITE_S, asyncio.wait([self._writing]), **waiting)
        self._writing = in_thread(work, "settings")
        await with_deadline(WRITE_S, asyncio.shield(self._writing), **waiting)

    async def _follow(self, config: Config) -> None:
        """`config` is in force."""
        self.publisher.publish(self.context.settings)
        for follow in self.followers:
            follow(config)
        path, text = self.context.dir / RUN_CONFIG, dump(config).encode()
        try:
            await self._write(lambda: write_atomic(path, text), path)
        except (OSError, DeadlineExceeded) as error:  # `resume` folds in `settings.jsonl`
            log.warning("%s keeps the old values: %s", path, error)

    def _start_with(self, config: Config) -> None:
        """Processes that start from now on have `config`."""
        revision = self.context.revision + 1
        self.context = msgspec.structs.replace(self.context, config=config, revision=revision)
        for role in self.processes.roles.values():
            role.environment |= self.context.environment(role.name)

    async def _configure_buffer(self) -> int:
        rules = LiveRules.of(self.context.config.buffer)
        at, seconds = self.context.addresses, self.context.config.reply_s
        client = BufferClient(at.buffer, SUPERVISOR, at.buffer_shards, deadline_s=seconds, pair=self.pair)
        async with client as buffer:
            with contextlib.ExitStack() as stack:
                for role, connection in buffer.connections.items():
                    stack.enter_context(self.trusting(connection, role))
                return await buffer.configure(self.context.revision, rules)

    def _step_of(self, version: int) -> int:
        """The step that the batch taken at `version` makes."""
        if (last := self.last_step()) is not None:
            step, made = last.step, last.version
        else:
            complete = checkpoints(self.context.dir / "checkpoints")
            state = read_state(complete[-1]) if complete else None
            step, made = (state.step, state.version) if state else (0, 0)
        return step + max(1, version + 1 - made)
