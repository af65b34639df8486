"""A buffer client that writes an audit log. `slipstream chaos` has every role of its run use it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..buffer.client import BufferClient
from ..buffer.image_files import NO_IMAGES
from ..buffer.messages import BatchPlan, Lease
from ..buffer.trajectory import BatchRow, Outcome, Trajectory, TrajectoryHeader
from ..launch.run_context import RunContext
from .audit_log import (
    AuditLog,
    BatchTaken,
    CancelReceived,
    CommitFinished,
    CommitStarted,
    Counts,
    DeliveryAcknowledged,
    EpisodeDelivered,
    LearnerRecovered,
    LeaseGranted,
    TokensSampled,
)


def audited_client(context: RunContext, name: str) -> AuditedClient:
    """A client of the run's buffer for role `name`."""
    addresses, deadline_s = context.addresses, context.config.reply_s
    client = AuditedClient(addresses.buffer, name, addresses.buffer_shards, deadline_s=deadline_s)
    client.audit_log = AuditLog(Path(context.run_dir), name, client.incarnation)
    return client


class AuditedClient(BufferClient):
    """A `BufferClient` that logs every request and answer before and after it; closes its `audit_log`."""

    audit_log: AuditLog

    async def __aenter__(self) -> BufferClient:
        self._reports = itertools.count(1)
        self._logged: dict[str, Counts] = {}
        return await super().__aenter__()

    async def __aexit__(self, *exception: object) -> None:
        self.audit_log.close()
        await super().__aexit__(*exception)

    async def leases(self, groups: int) -> tuple[Lease, ...]:
        leases = await super().leases(groups)
        for lease in leases:
            self.audit_log.append(
                LeaseGranted(
                    group=lease.group_id, attempt=lease.attempt, members=lease.members, env=lease.env, task=lease.task
                )
            )
        return leases

    async def progress(
        self, generated: dict[str, Counts], slot_s: float, idle_slot_s: float, shard: int = 0
    ) -> tuple[str, ...]:
        more = {e: dict(counts) for e, counts in generated.items() if counts and counts != self._logged.get(e)}
        number = next(self._reports)
        if more:
            self.audit_log.append(TokensSampled(number=number, generated=more))
        cancelled = await super().progress(generated, slot_s, idle_slot_s, shard)
        if more:
            self.audit_log.append(CancelReceived(number=number))
        known = (self._logged | more).items()
        self._logged = {e: counts for e, counts in known if e in generated or self.shard_of(e) != shard}
        return cancelled

    async def deliver(
        self,
        episode_id: str,
        generated: Counts,
        outcome: Outcome,
        trajectories: Sequence[Trajectory],
        failed_branches: Sequence[Trajectory] = (),
        image_files: Mapping[str, bytes] = NO_IMAGES,
    ) -> None:
        self.audit_log.append(
            EpisodeDelivered(
                episode=episode_id,
                outcome=(outcome.kind, outcome.reason),
                generated=dict(generated),
                trajectories={t.id: _sampled([t]) for t in trajectories},
            )
        )
        await super().deliver(episode_id, generated, outcome, trajectories, failed_branches, image_files)
        self.audit_log.append(DeliveryAcknowledged(episode=episode_id))

    async def recover(self, version: int) -> int:
        recovered = await super().recover(version)
        self.audit_log.append(LearnerRecovered(kept=version, version=recovered))
        return recovered

    async def take_plan(self, version: int, deadline_s: float) -> BatchPlan[BatchRow]:
        batch = await super().take_plan(version, deadline_s)
        episodes: dict[str, list[BatchRow]] = {}
        for trajectory in itertools.chain.from_iterable(batch.groups):
            episodes.setdefault(trajectory.episode, []).append(trajectory)
        self.audit_log.append(
            BatchTaken(
                version=batch.version,
                oldest=batch.oldest_version,
                episodes={episode: _sampled(branches) for episode, branches in episodes.items()},
                withheld=tuple(sorted(batch.withheld)),
            )
        )
        return batch

    async def commit(self, version: int) -> None:
        self.audit_log.append(CommitStarted(version=version))
        await super().commit(version)
        self.audit_log.append(CommitFinished(version=version))


def _sampled(branches: Iterable[TrajectoryHeader]) -> Counts:
    """Sampled tokens by version."""
    counts: Counts = {}
    for branch in branches:
        for span in branch.version_spans:
            counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return counts
