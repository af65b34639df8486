"""Episodes of evaluations, in a file of the buffer's schema, so that what reads one reads the other.

    RUN/evaluation.sqlite, RUN/evaluation.arrays/

Invariants:
- A group is a task of one evaluation, whose label is in `groups.request`: that of its results, also after the run has gone on and
  they have another. Episodes of an evaluation that did not come to its end have the label `LABEL (interrupted)`.
- Nothing here is ever leased, trained on or recovered: all groups are `discarded`, and their tokens are in the account
  `evaluation`, or in that of their failure.
- No evaluation waits for its record, and none fails by it: a thread writes, and what finds its queue full or the disk refusing is
  dropped and counted.
- The file is kept below `buffer.keep`: tokens of failed episodes go first, then the oldest evaluations.
- One process at a time writes: the evaluator.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ..common.outcomes import FAILED
from ..common.tasks import in_thread
from ..errors import DeadlineExceeded, StoreError, describe, with_deadline
from .admission import ReplayCounters
from .encoded import DeliveredTrajectory, EncodedTrajectory
from .group_table import Episode, Group
from .image_files import NO_IMAGES, named_files
from .messages import Lease
from .schema import EVALUATION_DATABASE, connect, require_schema, store_error
from .store import Store, WriteBatch
from .trajectory import Outcome, Trajectory, by_version, sampled_of

log = logging.getLogger(__name__)

ACCOUNT = "evaluation"  # of its tokens
EPISODES_WAITING = 256  # for the disk
AT_ONCE = 64  # episodes of one transaction
INTERRUPTED = " (interrupted)"
END_S = 20.0  # longest wait for them at the end


class _Played(NamedTuple):
    label: str
    lease: Lease
    member: int
    outcome: Outcome
    trajectories: Sequence[Trajectory]
    failed_branches: Sequence[Trajectory]
    image_files: Mapping[str, bytes]
    time: float


def rename_evaluations(folder: Path, names: Mapping[str, str]) -> None:
    """Call the episodes of evaluations, by their labels, by others. Raises StoreError."""
    path = folder / EVALUATION_DATABASE
    if not path.exists():
        return
    try:
        with contextlib.closing(connect(path, "rw")) as db:
            require_schema(db, path)
            db.executemany(
                "UPDATE groups SET request = ? WHERE request = ?", [(new, old) for old, new in names.items()]
            )
    except sqlite3.Error as error:
        raise store_error(f"cannot write {path}", error) from None


@contextlib.asynccontextmanager
async def keep_episodes(folder: Path | None, limit: int) -> AsyncIterator[EvaluationEpisodes]:
    """`EvaluationEpisodes` for an event loop, which waits for no disk; for one that hangs, without a record."""
    episodes = EvaluationEpisodes(folder, limit)
    waits_for = f"{EVALUATION_DATABASE} to open"
    try:
        opening = in_thread(episodes.__enter__, waits_for)
        await with_deadline(END_S, opening, who="the evaluator", waits_for=waits_for, hint="is the disk stuck?")
    except DeadlineExceeded as error:
        log.warning("the episodes of this evaluation are not kept: %s", error)
        episodes = EvaluationEpisodes(None, limit)
    try:
        yield episodes
    finally:
        await in_thread(episodes.close, f"the end of {EVALUATION_DATABASE}")


class EvaluationEpisodes:
    """Records episodes in the run's `folder` while the context lasts; without a folder, nothing. The files are kept below `limit`
    bytes."""

    def __init__(self, folder: Path | None, limit: int) -> None:
        self._path = None if folder is None else folder / EVALUATION_DATABASE
        self._limit = limit
        self._store: Store | None = None
        self._counters = ReplayCounters()
        self._queue: queue.Queue[_Played | str | None] = queue.Queue(EPISODES_WAITING)  # str: this evaluation begins
        self._overflowed = self._refused = 0
        self._thread = threading.Thread(target=self._run, name="evaluation episodes", daemon=True)

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                self._store = Store(self._path)
                self._counters, _ = self._store.load()
            except StoreError as error:
                log.warning("the episodes of this evaluation are not kept: %s", error)
                self._close()
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Return when what was recorded is in the file, or after `END_S`: the thread is a daemon. It blocks: an event loop calls it
        in a thread."""
        if self._store is None:
            return
        until = time.monotonic() + END_S
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=END_S)
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            log.warning("the last episodes of this evaluation may not be in %s: its disk hangs", self._path)
        if self.dropped:
            log.warning("%d episodes of evaluations are not in %s", self.dropped, self._path)

    def reserve(self, label: str, groups: int) -> int:
        """The number of the first of so many groups, which no other evaluation of the run has. The evaluation `label` begins.
        Returns at once."""
        if self._store is not None:
            try:
                self._queue.put_nowait(label)
            except queue.Full:
                self._not_renamed(label, "the disk is too slow")
        first, self._counters.next_group = self._counters.next_group, self._counters.next_group + groups
        return first

    def record(
        self,
        label: str,
        lease: Lease,
        member: int,
        outcome: Outcome,
        trajectories: Sequence[Trajectory],
        failed_branches: Sequence[Trajectory],
        image_files: Mapping[str, bytes] = NO_IMAGES,
    ) -> None:
        """An episode of the evaluation `label` has ended; its group was reserved. `image_files` has the files of all images in its
        branches, by digest. Returns at once."""
        if self._store is None:
            return
        branches = trajectories, failed_branches
        try:
            self._queue.put_nowait(_Played(label, lease, member, outcome, *branches, image_files, time.time()))
        except queue.Full:
            self._overflowed += 1

    @property
    def dropped(self) -> int:
        """Episodes that were recorded and are not in the file."""
        return self._overflowed + self._refused

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _run(self) -> None:
        store, episodes = self._store, list[_Played]()
        assert store is not None
        while True:
            asked = self._queue.get()
            if isinstance(asked, _Played):
                episodes.append(asked)
                if len(episodes) < AT_ONCE and not self._queue.empty():
                    continue
            self._save(store, episodes)
            episodes = []
            if asked is None:
                break
            if isinstance(asked, str):
                self._rename(asked)
        self._close()

    def _save(self, store: Store, episodes: Sequence[_Played]) -> None:
        """Whatever goes wrong, the evaluation goes on."""
        try:
            if episodes:
                store.save(self._rows(episodes))
        except Exception as error:
            if not self._refused:
                why = describe(error)
                log.warning("%s: %d episodes of an evaluation are not kept: %s", self._path, len(episodes), why)
            self._refused += len(episodes)
        try:
            while store.shrink(self._limit, settled=-1):
                pass
        except Exception as error:
            log.warning("%s may grow beyond buffer.keep: %s", self._path, describe(error))

    def _rename(self, label: str) -> None:
        """What is there with this label is of an earlier start of the evaluation."""
        assert self._path is not None
        try:
            rename_evaluations(self._path.parent, {label: f"{label}{INTERRUPTED}"})
        except StoreError as error:
            self._not_renamed(label, error)

    def _not_renamed(self, label: str, why: object) -> None:
        log.warning("episodes of an earlier start of the evaluation %s are shown with its own: %s", label, why)

    def _rows(self, played: Sequence[_Played]) -> WriteBatch:
        """Raises WireError where an episode is no valid trajectory."""
        changed, kept, failed = (
            dict[int, tuple[Group, list[Episode]]](),
            list[DeliveredTrajectory](),
            list[DeliveredTrajectory](),
        )
        images: dict[str, bytes] = {}
        for one in played:
            lease, id = one.lease, one.lease.episode(one.member)
            for branches, to in ((one.trajectories, kept), (one.failed_branches, failed)):
                sampled_of(id, branches)
                images |= named_files(one.image_files, branches)
                to += (DeliveredTrajectory.of(id, branch, EncodedTrajectory.of(branch)) for branch in branches)
            spans = (span for branch in (*one.trajectories, *one.failed_branches) for span in branch.version_spans)
            reason = ACCOUNT if one.outcome.trainable else FAILED + one.outcome.reason
            episode = Episode(
                id,
                "evaluator",
                "discarded",
                by_version(spans),
                settled=True,
                final=True,
                reason=reason,
                outcome=one.outcome,
                delivered_time=one.time,
            )
            group = Group(lease.group_id, lease.env, lease.task, "discarded", request=one.label, ready_time=one.time)
            changed.setdefault(group.id, (group, []))[1].append(episode)
        return WriteBatch.of(self._counters, changed.values(), kept, failed=failed, images=images)
