"""How a role reaches the buffer: plainly, or with a journal of its own beside, see `journal`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from ..buffer.client import BufferClient
from ..buffer.messages import Batch, Lease
from ..buffer.trajectory import Outcome, Trajectory
from . import journal as j
from .job import Job


def buffer_client(job: Job, name: str) -> BufferClient:
    """A client of the run's buffer for role `name`; it keeps a journal where the run is to be audited."""
    client = JournalledClient if os.environ.get(j.NOTE) else BufferClient
    made = client(job.cluster.buffer, name)
    if isinstance(made, JournalledClient):
        made.journal = j.Journal(Path(job.run_dir), name, made.incarnation)
    return made


class JournalledClient(BufferClient):
    """As `BufferClient`; its `journal` is closed with it."""

    journal: j.Journal

    async def __aenter__(self) -> BufferClient:
        self._reports = itertools.count(1)
        self._noted: dict[str, j.Counts] = {}
        return await super().__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.journal.close()
        await super().__aexit__(kind, error, tb)

    async def leases(self, groups: int) -> tuple[Lease, ...]:
        leases = await super().leases(groups)
        for lease in leases:
            self.journal.note(
                j.Leased(
                    group=lease.group_id, attempt=lease.attempt, members=lease.members, env=lease.env, task=lease.task
                )
            )
        return leases

    async def progress(self, generated: dict[str, j.Counts], slot_s: float, idle_slot_s: float) -> tuple[str, ...]:
        more = {e: dict(counts) for e, counts in generated.items() if counts and counts != self._noted.get(e)}
        number = next(self._reports)
        if more:
            self.journal.note(j.Sampled(number=number, generated=more))
        unwanted = await super().progress(generated, slot_s, idle_slot_s)
        if more:
            self.journal.note(j.Heard(number=number))
        self._noted = {e: counts for e, counts in (self._noted | more).items() if e in generated}
        return unwanted

    async def deliver(
        self, episode_id: str, generated: j.Counts, outcome: Outcome, trajectories: Sequence[Trajectory]
    ) -> None:
        self.journal.note(
            j.Delivered(
                episode=episode_id,
                outcome=(outcome.kind, outcome.reason),
                generated=dict(generated),
                trajectories={t.id: _sampled([t]) for t in trajectories},
            )
        )
        await super().deliver(episode_id, generated, outcome, trajectories)
        self.journal.note(j.Acknowledged(episode=episode_id))

    async def recover(self, version: int) -> int:
        recovered = await super().recover(version)
        self.journal.note(j.Recovered(kept=version, version=recovered))
        return recovered

    async def take(self, version: int, deadline_s: float) -> Batch:
        batch = await super().take(version, deadline_s)
        episodes: dict[str, list[Trajectory]] = {}
        for trajectory in itertools.chain.from_iterable(batch.groups):
            episodes.setdefault(trajectory.episode, []).append(trajectory)
        self.journal.note(
            j.Took(
                version=batch.version,
                oldest=batch.oldest_version,
                episodes={episode: _sampled(branches) for episode, branches in episodes.items()},
                withheld=tuple(sorted(batch.withheld)),
            )
        )
        return batch

    async def commit(self, version: int) -> None:
        self.journal.note(j.Committing(version=version))
        await super().commit(version)
        self.journal.note(j.Committed(version=version))


def _sampled(branches: Iterable[Trajectory]) -> j.Counts:
    """Sampled tokens by version."""
    counts: j.Counts = {}
    for branch in branches:
        for span in branch.version_spans:
            counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return counts
