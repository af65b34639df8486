"""The learner's push targets: a client of every replica of the fleet that answers, and reports about the weight pushes to it. With
them `make_publisher` makes the publisher of a run.

    fleet snapshots ──> PushTargets ──update──> publisher ──served, lost──> PushTargets ──report──> supervisor

Invariants:
- A push goes only to replicas that have answered and are not draining. A restarted process is another replica.
- A report names the incarnation that the push went to. All that is known goes with each, to be repeated: a lost one loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import torch

from ...common.bounded import TEXT_LENGTH
from ...common.spans import RecordSpan
from ...common.tasks import run_or_stop
from ...configs.engines import is_quantized
from ...errors import DeadlineExceeded, with_deadline
from ...rollout.engines.http_client import PUSH_KEEPALIVE_S
from ...rollout.engines.http_engine import HttpEngine
from ...rollout.engines.registry import canary_tolerance
from ...rpc.pubsub import StateSubscriber
from ...rpc.security import PeerTable
from ...weightsync.fleet import Fleet, ReplicaInfo, ReplicaReport, ReportReplica, following_fleet
from ...weightsync.publisher import Publisher
from ..external_servers import push_address
from ..peers import request_access
from ..run_context import RunContext
from .factory import FIRST_RANK, make_engine

BUCKET_BYTES = 64 << 20  # largest bucket of tensors in a weight broadcast; the receiver holds one next to its KV cache


class PushTargets:
    """Keeps the replicas of `publisher` those of the fleet. `joined` is set whenever one of them serves nothing yet; `report` sends
    the supervisor what changed, and what is known of all replicas."""

    publisher: Publisher

    def __init__(self, make_engine: Callable[[ReplicaInfo], HttpEngine], report: ReportReplica) -> None:
        self.joined = asyncio.Event()
        self._make_engine = make_engine
        self._report = report
        self._engines: dict[str, tuple[int, HttpEngine]] = {}
        self._reports: dict[str, ReplicaReport] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update(self, fleet: Fleet) -> None:
        old, self._engines = self._engines, {}
        for replica in fleet.replicas:
            if not replica.answers or replica.state == "draining":
                continue
            incarnation, engine = old.get(replica.name, (-1, None))
            if engine is None or incarnation != replica.incarnation:
                engine = self._make_engine(replica)
                engine.keep_connections(PUSH_KEEPALIVE_S)
            self._engines[replica.name] = (replica.incarnation, engine)
            if replica.state == "starting":
                self.joined.set()
        self.publisher.update([engine for _, engine in self._engines.values()])
        for name, entry in old.items():
            if self._engines.get(name) != entry:
                self._reports.pop(name, None)
                self._close(entry[1])

    def served(self, name: str, version: int) -> None:
        self._send(name, version, 0, "")

    def asleep(self, name: str) -> None:
        if name in self._reports and (version := self._reports[name].version) is not None:
            self._send(name, version, 0, "", asleep=True)

    def lost(self, name: str, why: str) -> None:
        missed = self._reports[name].missed_pushes if name in self._reports else 0
        self._send(name, None, missed + 1, why)

    async def close(self) -> None:
        for _, engine in self._engines.values():
            self._close(engine)
        self._engines = {}
        await asyncio.gather(*self._closing)

    def _send(self, name: str, version: int | None, missed: int, why: str, *, asleep: bool = False) -> None:
        if name in self._engines:
            changed = ReplicaReport(name, self._engines[name][0], version, missed, why[:TEXT_LENGTH], asleep)
            self._reports[name] = changed
            self._report(changed, self._reports)

    def _close(self, engine: HttpEngine) -> None:
        closing = asyncio.create_task(engine.close(), name=f"closing {engine.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def wait_for_replicas(fleets: StateSubscriber[Fleet], seconds: float) -> None:
    """Return as soon as every replica answers; after `seconds` one that answers is enough. Raises DeadlineExceeded where none
    does."""

    def silent(fleet: Fleet) -> list[str]:
        return [replica.name for replica in fleet.replicas if not replica.answers]

    try:
        await with_deadline(
            seconds,
            fleets.until(lambda fleet: bool(fleet.replicas) and not silent(fleet)),
            who="the learner",
            waits_for="every replica to answer",
            hint=lambda: f"{', '.join(silent(fleets.state)) or 'the fleet'} did not; see logs/engine-*.log",
        )
    except DeadlineExceeded:
        if not any(replica.answers for replica in fleets.state.replicas):
            raise


@contextlib.asynccontextmanager
async def make_publisher(
    context: RunContext,
    device: torch.device,
    report: ReportReplica,
    stop: asyncio.Event,
    record: RecordSpan,
    peers: PeerTable | None,
) -> AsyncIterator[tuple[Publisher, asyncio.Event]]:
    """A publisher that pushes to the replicas of the fleet, once they answer, and an event that is set whenever one of them serves
    nothing yet. `report` sends what is known of them to the supervisor, `record` keeps what they go through, `peers` says whose
    acks count. Raises Stopped."""
    config = context.config
    access = await request_access(context, FIRST_RANK)
    targets = PushTargets(functools.partial(make_engine, context, access), report)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(targets.close)
        targets.publisher = Publisher(
            (),
            transport=config.weightsync.transport,
            folder=context.dir / "weights",
            spool=Path(tempfile.gettempdir()) if config.launch.hosts == "many" else context.dir,
            host=push_address(config, context.addresses.learner_host),
            backend=context.backend,
            device=device,
            bucket_bytes=BUCKET_BYTES,
            push_s=config.push_s,
            canary_tolerance=canary_tolerance(config),
            cohort=config.weightsync.cohort,
            partial=config.rollout.partial,
            quantized=is_quantized(config.rollout.engine),
            on_served=targets.served,
            on_lost=targets.lost,
            on_asleep=targets.asleep,
            record=record,
            peers=peers,
        )
        stack.callback(targets.publisher.close)
        fleets = await stack.enter_async_context(following_fleet(context.addresses.fleet, targets.update))
        await run_or_stop(wait_for_replicas(fleets, config.rollout.engine.start_s), stop)
        targets.update(fleets.state)
        yield targets.publisher, targets.joined
