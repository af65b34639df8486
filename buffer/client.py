"""How workers and learner ranks call the buffer, which is one process, or a clock and its shards.

    worker ──leases, progress, deliver──> shards                      a group, and all that is said of it, has one shard
    rank ──take_plan, read_rows───> shards: parts of one batch        learner ──recover, commit, discard──> clock, then shards

Invariants:
- Every request has a deadline, except for a lease, which waits until its caller cancels it. A request is sent again after
  `RESEND_S` without a reply: all of them may be repeated. A restart of the buffer goes unnoticed.
- Any number of requests may be under way at once.
- Shards know nothing of each other. What concerns all of them the caller sends to all, and goes on when the last has answered: each
  has stored it before the caller's next request. A version is committed by the clock first, so that no shard is ever ahead of it.
- A caller that dies halfway leaves shards behind the clock. Its successor begins with `recover`, which brings all to the clock's
  version: a checkpoint is written after the commits that it contains, so each shard has the commits that are in it, and rolls back
  its later ones.
- A shard is a buffer with a part of every batch and of the groups that may be outstanding. The parts add up to the whole, and so do
  the ledgers: the bound, the accounts and what survives a kill are those of each process by itself.
- A worker's requests for leases never add up to more groups than the call of `leases` that sent the newest of them asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import zmq.asyncio

from ..common.images import PlacedImage
from ..errors import StateError, WireError
from ..rpc.client import RpcClient
from ..rpc.security import KeyPair
from . import messages as m
from .admission import LiveRules
from .array_reader import ArrayReader
from .client_registry import connection_name
from .encoded import EncodedRow, EncodedTrajectory
from .group_table import group_number
from .image_files import NO_IMAGES
from .ledger import Counts, Unstepped, Withheld
from .messages import BatchPlan, Lease, Stats
from .schema import BUFFER, process_names
from .summed_stats import sum_of
from .trajectory import DETAIL_LIMIT, BatchRow, Outcome, Trajectory

# Time without a reply after which a request is sent again. A lease or a batch may take longer; repeating one is cheap.
RESEND_S = 5.0
# How long one of several shards may think about a lease, after which another is asked: a worker with room for one group finds the
# shard that has one within this time for each. A shard that is dead does not answer: a worker with room for one group that asked it
# waits until it is back.
LEASE_S = 1.0
R = TypeVar("R")
Q = TypeVar("Q")


class BufferClient:
    """Connections to the buffer at `address` and to its `shards`, where it has several, used as an async context manager. `name` is
    unique per role, not per process; `pair` are the caller's keys, where they are not those of this process; `context` is as in
    `RpcClient`.

    Attributes:
        connections: by the names of the buffer's processes as roles.
    """

    connections: dict[str, RpcClient]

    def __init__(
        self,
        address: str,
        name: str,
        shards: Sequence[str] = (),
        *,
        deadline_s: float = 60.0,
        pair: KeyPair | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self._addresses = dict(zip(process_names(max(1, len(shards))), (address, *shards), strict=True))
        self._deadline_s = deadline_s
        self._pair, self._context = pair, context
        self._leasing = asyncio.Lock()
        self._clock, *own = self._addresses
        self._shards: list[str] = own or [self._clock]  # by the numbers of their groups
        first = zlib.crc32(name.encode()) % len(self._shards)  # clients spread over the shards
        self._turns = deque([*self._shards[first:], *self._shards[:first]])  # shards that are asked for no lease now
        self._nearest = self._shards[first]
        self._asked: dict[asyncio.Task[tuple[Lease, ...]], tuple[str, int]] = {}  # shard, groups
        self._oldest = 0, 0  # of the plan that was taken last: its version, and the oldest with loss
        self._arrays: list[Path] = []  # of each shard the folder of its arrays, as the newest plan says

    async def __aenter__(self) -> BufferClient:
        identity = connection_name(self.name, self.incarnation)
        self.connections = {
            role: RpcClient(
                address,
                self.name,
                "the buffer" if role == BUFFER else f"the shard {role}",
                m.Reply,
                identity=identity,
                resend_s=RESEND_S,
                pair=self._pair,
                context=self._context,
            )
            for role, address in self._addresses.items()
        }
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._ask_no_more()
        for connection in self.connections.values():
            connection.close()

    @property
    def shards(self) -> int:
        """How many processes hold groups."""
        return len(self._shards)

    def shard_of(self, id: str) -> int:
        """Which of them, from 0, holds the group of an episode or a trajectory."""
        return max(0, group_number(id)) % len(self._shards)

    # --- workers --------------------------------------------------------------------------------------------------

    async def register(self) -> None:
        await self._request_shards(m.Register(self.name, self.incarnation), m.Ack)

    async def lease(self) -> Lease:
        """The next group to run, see `leases`."""
        return (await self.leases(1))[0]

    async def leases(self, groups: int) -> tuple[Lease, ...]:
        """The next groups to run: at least one, at most `groups`; but those that an earlier call has asked shards for still come,
        also where that is more. With 0 groups only what is `answered`, maybe nothing. Admission depends on the learner's progress,
        so only the caller's cancellation ends the wait. A shard remembers one lease request per client: calls wait for each other,
        and a new request replaces a cancelled one."""
        async with self._leasing:
            if len(self._shards) == 1:
                return await self._ask(self._clock, groups, None) if groups else ()
            while True:
                self._ask_shards(groups)
                if groups:
                    await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
                done = [asked for asked in self._asked if asked.done()]
                for asked in done:
                    self._turns.append(self._asked.pop(asked)[0])
                leases = tuple(itertools.chain.from_iterable(asked.result() for asked in done))
                if leases or not groups:
                    return leases

    @property
    def answered(self) -> bool:
        """Whether a shard has answered a request for leases that no call of `leases` has read."""
        return any(asked.done() for asked in self._asked)

    def _ask_shards(self, groups: int) -> None:
        """Ask those shards that are not asked, for as many of `groups` as the others are not asked for already."""
        left = groups - sum(count for _, count in self._asked.values())
        while left > 0 and self._turns:
            count = -(-left // len(self._turns))
            shard, left = self._turns.popleft(), left - count
            asked = asyncio.create_task(self._ask(shard, count, LEASE_S), name=f"lease of {shard}")
            self._asked[asked] = shard, count

    async def _ask(self, shard: str, groups: int, wait_s: float | None) -> tuple[Lease, ...]:
        request = m.RequestLease(self.name, min(groups, m.GROUPS_AT_ONCE), wait_s)
        waits_for = "a lease from the buffer"
        return (await self._request(request, m.LeaseReply, float("inf"), waits_for, to=shard)).leases

    async def _ask_no_more(self) -> None:
        asked, self._asked = self._asked, {}
        for one, (shard, _) in asked.items():
            one.cancel()
            self._turns.append(shard)
        await asyncio.gather(*asked, return_exceptions=True)

    async def progress(
        self, generated: dict[str, Counts], slot_s: float, idle_slot_s: float, shard: int = 0
    ) -> tuple[str, ...]:
        """Report running totals, of episodes of one shard; returns the episodes among them to cancel. The slots are reported to one
        shard only: all are added up."""
        report = m.ReportProgress(self.name, generated, slot_s, idle_slot_s)
        return (await self._request(report, m.CancelledEpisodes, to=self._shards[shard])).episodes

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
            WireError: a trajectory is longer than the buffer takes, or has text without an encoding, and nothing was sent; or the
                reply cannot be decoded.
        """
        outcome = msgspec.structs.replace(outcome, detail=outcome.detail[:DETAIL_LIMIT])
        try:
            branches, failed = (tuple(map(EncodedTrajectory.of, some)) for some in (trajectories, failed_branches))
        except UnicodeEncodeError as error:
            raise WireError(f"a text in the trajectories of episode {episode_id}: {error}") from None
        named = {image.digest for one in (*trajectories, *failed_branches) for image in one.images}
        images = tuple(np.frombuffer(image_files[digest], dtype=np.uint8) for digest in sorted(named))
        delivery = m.DeliverEpisode(self.name, episode_id, generated, outcome, branches, failed, images)
        await self._request(delivery, m.Ack, to=self._shards[self.shard_of(episode_id)])

    async def deregister(self, shard: int | None = None) -> None:
        """Return the leases of one shard, or of all, and ask none for more."""
        await self._ask_no_more()
        of = self._shards if shard is None else [self._shards[shard]]
        await self._request_each(dict.fromkeys(of, m.Deregister(self.name)), m.Ack)

    # --- learner --------------------------------------------------------------------------------------------------

    async def recover(self, version: int) -> int:
        """Start from weights that contain the commits up to `version`; returns the version to publish them under."""
        recovered = (await self._request(m.Recover(version), m.RecoverReply)).version
        await self._request_others(m.Recover(version, recovered), m.RecoverReply)
        return recovered

    async def take_plan(self, version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        """The batch for `version`, without its arrays; the same for every rank until it is committed.

        Raises:
            DeadlineExceeded: it was not complete within `deadline_s`.
        """
        start = time.monotonic()
        parts: list[BatchPlan[EncodedRow]] = await self._request_shards(m.TakeBatch(version), BatchPlan, deadline_s)
        stats = parts[0].stats
        self._arrays = [Path(part.arrays) for part in parts]
        # The clock follows: its rules, as the last shard has taken its part, are those of the commit.
        if len(parts) > 1:
            left = max(RESEND_S, deadline_s - (time.monotonic() - start))
            clock: BatchPlan[EncodedRow] = await self._request(m.TakeBatch(version), BatchPlan, left)
            stats = await self.stats()  # those of the parts are of when each was complete
            parts.append(clock)
        oldest = max(part.oldest_version for part in parts)
        self._oldest = version, oldest
        encoded = itertools.chain.from_iterable(part.groups for part in parts)
        groups = sorted((tuple(row.decode() for row in group) for group in encoded), key=lambda g: g[0].group_id)
        withheld: dict[str, Withheld] = {}
        for part in parts:
            withheld |= part.withheld
        return BatchPlan(version, oldest, tuple(groups), withheld, stats)

    async def read_rows(self, rows: Sequence[BatchRow], deadline_s: float | None = None) -> tuple[Trajectory, ...]:
        """The trajectories of `rows` of the plan that was taken last, in this order. Their arrays are read from the shards' files,
        which keep them until the batch is committed or discarded.

        Raises:
            DeadlineExceeded: this host does not see all of them in time, or a file is damaged.
            StateError: a row is of no batch.
        """
        if rows and not self._arrays:
            raise StateError(f"{self.name} has taken no batch")
        reader = ArrayReader([(row, self._arrays[self.shard_of(row.id)]) for row in rows])
        return await reader.read(self.name, self._deadline_s if deadline_s is None else deadline_s)

    async def images(self, images: Iterable[PlacedImage]) -> dict[str, bytes]:
        """The files of `images`, by digest. Raises StateError where the buffer has one of them not."""
        named = {image.digest: image.name for image in images}
        found: dict[str, bytes] = {}
        while some := [digest for digest in named if digest not in found][: m.IMAGES_AT_ONCE]:
            request = m.FetchImages(tuple(named[digest] for digest in some))
            reply = await self._request(request, m.ImagesReply, to=self._nearest)  # all write to one folder
            if not 0 < len(reply.files) <= len(some):
                raise WireError(f"the buffer answered a request for {len(some)} images with {len(reply.files)}")
            found |= {digest: file.tobytes() for digest, file in zip(some, reply.files, strict=False)}
        return found

    async def take(self, version: int, deadline_s: float) -> BatchPlan[Trajectory]:
        """The whole batch for `version`. Raises as `take_plan` and `read_rows`."""
        start = time.monotonic()
        plan = await self.take_plan(version, deadline_s)
        left = deadline_s - (time.monotonic() - start)
        rows = iter(await self.read_rows(list(itertools.chain.from_iterable(plan.groups)), left))
        groups = tuple(tuple(itertools.islice(rows, len(group))) for group in plan.groups)
        return BatchPlan(version, plan.oldest_version, groups, plan.withheld, plan.stats)

    async def fresh(self, version: int, limit: int) -> tuple[Trajectory, ...]:
        """At most `limit` delivered trajectories, outside of batches, that hold tokens of `version`."""
        replies = await self._request_shards(m.RequestFresh(version, limit), m.TrajectoriesReply)
        found = [one.decode() for reply in replies for one in reply.trajectories]
        if len(replies) > 1:
            found.sort(key=lambda one: -one.group_id)
        return tuple(found[:limit])

    async def commit(self, version: int) -> None:
        taken, oldest = self._oldest
        request = m.CommitBatch(version, oldest if taken == version else 0)
        await self._request(request, m.Ack)
        await self._request_others(request, m.Ack)

    async def discard_batch(self, version: int, groups: Sequence[int], reason: Unstepped) -> None:
        """The batch of `version`, which is `groups`, made no version. Raises StateError where there is no such batch."""
        if len(self._shards) > 1:
            await self._request(m.DiscardBatch(version, (), reason), m.Ack)
        parts = self._by_shard(groups, lambda group: group % len(self._shards))
        await self._request_each(
            {shard: m.DiscardBatch(version, tuple(own), reason) for shard, own in parts.items()}, m.Ack
        )

    async def set_aside(self, version: int, groups: Sequence[int], reason: str) -> tuple[int, ...]:
        """Groups of the batch of `version` are proven to be unusable; those of them that this sets aside. Raises StateError: too
        many batches of the run were."""
        parts = self._by_shard(groups, lambda group: group % len(self._shards))
        requests = {shard: m.SetAside(version, tuple(own), reason[: m.REASON_LIMIT]) for shard, own in parts.items()}
        replies = await self._request_each(requests, m.GroupsSetAside)
        return tuple(itertools.chain.from_iterable(reply.groups for reply in replies.values()))

    async def step_failed(self, version: int, reason: str) -> tuple[int, ...]:
        """The step on the batch of `version` failed; the groups that are set aside for it, none at the first time. Raises as
        `set_aside`."""
        replies = await self._request_shards(m.StepFailed(version, reason[: m.REASON_LIMIT]), m.GroupsSetAside)
        return tuple(itertools.chain.from_iterable(reply.groups for reply in replies))

    async def checkpointed(self, version: int) -> None:
        await self._request(m.MarkCheckpointed(version), m.Ack)
        await self._request_others(m.MarkCheckpointed(version), m.Ack)

    async def stats(self) -> Stats:
        own = await self._request(m.RequestStats(), Stats)
        if len(self._shards) == 1:
            return own
        return sum_of(own, await self._request_shards(m.RequestStats(), Stats))

    async def newest_version(self) -> int:
        """The newest policy version that exists: of the learner's weights. A shard knows it before it is pushed; that spares the
        clock the workers' questions."""
        return (await self._request(m.RequestStats(), Stats, to=self._nearest)).version

    # --- supervisor -----------------------------------------------------------------------------------------------

    async def configure(self, revision: int, rules: LiveRules) -> int:
        """Put rules in force; returns the version at which the first batch under them is taken. See `messages.Configure`."""
        await self._request_others(m.Configure(revision, rules), m.Configured)
        return (await self._request(m.Configure(revision, rules), m.Configured)).version

    # --- requests -------------------------------------------------------------------------------------------------

    async def _request(
        self,
        request: m.Request,
        reply_type: type[R],
        deadline_s: float | None = None,
        waits_for: str = "",
        to: str = "",
    ) -> R:
        """Of the process `to`, by default the clock, which may be all there is."""
        to = to or self._clock
        hint = f"is the {to} at {self._addresses[to]} alive, and are workers delivering?"
        seconds = self._deadline_s if deadline_s is None else deadline_s
        return await self.connections[to].request(request, reply_type, seconds, waits_for=waits_for, hint=hint)

    async def _request_each(
        self, requests: Mapping[str, m.Request], reply_type: type[R], deadline_s: float | None = None
    ) -> dict[str, R]:
        """One request of each of these processes, all at once; by their names. Raises what one raises as soon as it does, and waits
        for no other then."""
        sent = [self._request(request, reply_type, deadline_s, to=to) for to, request in requests.items()]
        if len(sent) == 1:
            return {to: await one for to, one in zip(requests, sent, strict=True)}
        tasks = [asyncio.create_task(one) for one in sent]
        try:
            return dict(zip(requests, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request_shards(
        self, request: m.Request, reply_type: type[R], deadline_s: float | None = None
    ) -> list[R]:
        """The same of all shards."""
        return list((await self._request_each(dict.fromkeys(self._shards, request), reply_type, deadline_s)).values())

    async def _request_others(self, request: m.Request, reply_type: type[R]) -> None:
        """The same of all shards, where the clock is none of them."""
        if len(self._shards) > 1:
            await self._request_shards(request, reply_type)

    def _by_shard(self, of: Iterable[Q], number: Callable[[Q], int]) -> dict[str, list[Q]]:
        """What concerns each shard; none that nothing concerns."""
        parts: dict[str, list[Q]] = {}
        for one in of:
            parts.setdefault(self._shards[number(one)], []).append(one)
        return parts
