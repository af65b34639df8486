"""How workers and learner ranks call the buffer.

Invariants:
- Every request has a deadline, except for a lease, which waits until its caller cancels it. A request is sent again after
  `RESEND_S` without a reply: all of them may be repeated. A restart of the buffer goes unnoticed.
- Any number of requests may be under way at once.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import zmq.asyncio

from ..common.images import PlacedImage
from ..rpc.client import RpcClient
from ..rpc.security import KeyPair
from . import messages as m
from .admission import LiveRules
from .client_registry import connection_name
from .ledger import Counts, Unstepped
from .messages import BatchPlan, Lease, Stats
from .trajectory import DETAIL_LIMIT, BatchRow, EncodedRow, EncodedTrajectory, Outcome, Trajectory

# Time without a reply after which a request is sent again. A lease or a batch may take longer; repeating one is cheap.
RESEND_S = 5.0
NO_IMAGES: Mapping[str, bytes] = {}
R = TypeVar("R")


class BufferClient:
    """A connection to the buffer at `address`, used as an async context manager. `name` is unique per role, not per process; `pair`
    are the caller's keys, where they are not those of this process; `context` is as in `RpcClient`. `rpc` is the connection."""

    rpc: RpcClient

    def __init__(
        self,
        address: str,
        name: str,
        *,
        deadline_s: float = 60.0,
        pair: KeyPair | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self._address = address
        self._deadline_s = deadline_s
        self._pair, self._context = pair, context
        self._leasing = asyncio.Lock()

    async def __aenter__(self) -> BufferClient:
        identity = connection_name(self.name, self.incarnation)
        self.rpc = RpcClient(
            self._address,
            self.name,
            "the buffer",
            m.Reply,
            identity=identity,
            resend_s=RESEND_S,
            pair=self._pair,
            context=self._context,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.rpc.close()

    # --- workers --------------------------------------------------------------------------------------------------

    async def register(self) -> None:
        await self._request(m.Register(self.name, self.incarnation), m.Ack)

    async def lease(self) -> Lease:
        """The next group to run, see `leases`."""
        return (await self.leases(1))[0]

    async def leases(self, groups: int) -> tuple[Lease, ...]:
        """The next groups to run: at least one, at most `groups`. Admission depends on the learner's progress, so only the caller's
        cancellation ends the wait. The buffer remembers one lease request per client: calls wait for each other, and a new request
        replaces a cancelled one."""
        async with self._leasing:
            request = m.RequestLease(self.name, min(groups, m.GROUPS_AT_ONCE))
            return (await self._request(request, m.LeaseReply, float("inf"), "a lease from the buffer")).leases

    async def progress(self, generated: dict[str, Counts], slot_s: float, idle_slot_s: float) -> tuple[str, ...]:
        """Report running totals; returns the episodes among them to cancel."""
        report = m.ReportProgress(self.name, generated, slot_s, idle_slot_s)
        return (await self._request(report, m.CancelledEpisodes)).episodes

    async def deliver(
        self,
        episode_id: str,
        generated: Counts,
        outcome: Outcome,
        trajectories: Sequence[Trajectory],
        failed_branches: Sequence[Trajectory] = (),
        image_files: Mapping[str, bytes] = NO_IMAGES,
    ) -> None:
        """Returns once the episode is durable. `failed_branches` are those of an episode that failed and is not trained on;
        `image_files` has the files of all images in both, by digest.

        Raises:
            WireError: a trajectory is longer than the buffer takes.
        """
        outcome = msgspec.structs.replace(outcome, detail=outcome.detail[:DETAIL_LIMIT])
        branches, failed = (tuple(map(EncodedTrajectory.of, some)) for some in (trajectories, failed_branches))
        named = {image.digest for one in (*trajectories, *failed_branches) for image in one.images}
        images = tuple(np.frombuffer(image_files[digest], dtype=np.uint8) for digest in sorted(named))
        request = m.DeliverEpisode(self.name, episode_id, generated, outcome, branches, failed, images)
        await self._request(request, m.Ack)

    async def deregister(self) -> None:
        await self._request(m.Deregister(self.name), m.Ack)

    # --- learner --------------------------------------------------------------------------------------------------

    async def recover(self, version: int) -> int:
        """Start from weights that contain the commits up to `version`; returns the version to publish them under."""
        return (await self._request(m.Recover(version), m.RecoverReply)).version

    async def take_plan(self, version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        """The batch for `version`, without its arrays; the same for every rank until it is committed.

        Raises:
            DeadlineExceeded: it was not complete within `deadline_s`.
        """
        reply: BatchPlan[EncodedRow] = await self._request(m.TakeBatch(version), BatchPlan, deadline_s)
        groups = tuple(tuple(row.decode() for row in group) for group in reply.groups)
        return BatchPlan(reply.version, reply.oldest_version, groups, reply.withheld, reply.stats)

    async def fetch_rows(
        self, version: int, rows: Sequence[BatchRow], deadline_s: float | None = None
    ) -> tuple[Trajectory, ...]:
        """The trajectories of `rows`, in this order, of the batch of `version`, which is taken and not yet committed.

        Raises:
            StateError: there is no such batch, or a trajectory is not in it.
        """
        reply = await self._request(m.FetchRows(version, tuple(row.id for row in rows)), m.RowsReply, deadline_s)
        return tuple(row.with_arrays(arrays) for row, arrays in zip(rows, reply.arrays, strict=True))

    async def images(self, images: Iterable[PlacedImage]) -> dict[str, bytes]:
        """The files of `images`, by digest. Raises StateError where the buffer has one of them not."""
        named = {image.digest: image.name for image in images}
        found: dict[str, bytes] = {}
        for start in range(0, len(named), m.IMAGES_AT_ONCE):
            some = tuple(named)[start : start + m.IMAGES_AT_ONCE]
            reply = await self._request(m.FetchImages(tuple(named[digest] for digest in some)), m.ImagesReply)
            found |= {digest: file.tobytes() for digest, file in zip(some, reply.files, strict=True)}
        return found

    async def take(self, version: int, deadline_s: float) -> BatchPlan[Trajectory]:
        """The whole batch for `version`. Raises as `take_plan` and `fetch_rows`."""
        start = time.monotonic()
        plan = await self.take_plan(version, deadline_s)
        left = deadline_s - (time.monotonic() - start)
        rows = iter(await self.fetch_rows(version, list(itertools.chain.from_iterable(plan.groups)), left))
        groups = tuple(tuple(itertools.islice(rows, len(group))) for group in plan.groups)
        return BatchPlan(version, plan.oldest_version, groups, plan.withheld, plan.stats)

    async def fresh(self, version: int, limit: int) -> tuple[Trajectory, ...]:
        """At most `limit` delivered trajectories, outside of batches, that hold tokens of `version`."""
        reply = await self._request(m.RequestFresh(version, limit), m.TrajectoriesReply)
        return tuple(one.decode() for one in reply.trajectories)

    async def commit(self, version: int) -> None:
        await self._request(m.CommitBatch(version), m.Ack)

    async def discard_batch(self, version: int, groups: Sequence[int], reason: Unstepped) -> None:
        """The batch of `version`, which is `groups`, made no version. Raises StateError where there is no such batch."""
        await self._request(m.DiscardBatch(version, tuple(groups), reason), m.Ack)

    async def set_aside(self, version: int, groups: Sequence[int], reason: str) -> tuple[int, ...]:
        """Groups of the batch of `version` are proven to be unusable; those of them that this sets aside. Raises StateError: too
        many batches of the run were."""
        request = m.SetAside(version, tuple(groups), reason[: m.REASON_LIMIT])
        return (await self._request(request, m.GroupsSetAside)).groups

    async def step_failed(self, version: int, reason: str) -> tuple[int, ...]:
        """The step on the batch of `version` failed; the groups that are set aside for it, none at the first time. Raises as
        `set_aside`."""
        return (await self._request(m.StepFailed(version, reason[: m.REASON_LIMIT]), m.GroupsSetAside)).groups

    async def checkpointed(self, version: int) -> None:
        await self._request(m.MarkCheckpointed(version), m.Ack)

    async def stats(self) -> Stats:
        return await self._request(m.RequestStats(), Stats)

    async def newest_version(self) -> int:
        """The newest policy version that exists: of the learner's weights."""
        return (await self.stats()).version

    # --- supervisor -----------------------------------------------------------------------------------------------

    async def configure(self, revision: int, rules: LiveRules) -> int:
        """Put rules in force; returns the version at which the first batch under them is taken. See `messages.Configure`."""
        return (await self._request(m.Configure(revision, rules), m.Configured)).version

    async def _request(
        self, request: m.Request, reply_type: type[R], deadline_s: float | None = None, waits_for: str = ""
    ) -> R:
        hint = f"is the buffer at {self._address} alive, and are workers delivering?"
        seconds = self._deadline_s if deadline_s is None else deadline_s
        return await self.rpc.request(request, reply_type, seconds, waits_for=waits_for, hint=hint)
