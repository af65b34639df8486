"""A tracker in a thread of its own: whatever its library does, the run goes on.

    learner ──record, at once──> bounded queue ──> thread: open, log, ..., close

Invariants:
- To record never blocks and never raises. Where the queue is full, because the library hangs, records are dropped and counted.
- A tracker that cannot be opened records nothing, and one whose call fails goes on with the next: each is one line in the log.
- The end waits at most `CLOSE_S`, for all trackers together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ...errors import describe
from .base import Samples, Tracker

log = logging.getLogger(__name__)

QUEUE = 1000  # records that wait
CLOSE_S = 15.0  # for all that waits and the libraries' own ends; a learner that is stopped has not much more

Call = Callable[[Tracker], None]


class TrackerThread:
    """Gives the tracker `name` that `open` makes what it is given."""

    def __init__(self, name: str, open: Callable[[], Tracker]) -> None:
        self._name, self._open = name, open
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._missed = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.log(step, values))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.evaluated(step, values))

    def sampled(self, step: int, samples: Samples) -> None:
        self._put(lambda tracker: tracker.sampled(step, samples.rows()))

    def end(self) -> None:
        """No more records follow."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, seconds: float) -> None:
        """After `end`, wait at most `seconds` for what was recorded."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("%s did not end in time; metrics.jsonl has what it lacks", self._name)
        elif self._missed:
            log.warning("%s lacks %d records; metrics.jsonl has them", self._name, self._missed)

    def _put(self, call: Call) -> None:
        with self._changed:
            if len(self._calls) < QUEUE:
                self._calls.append(call)
                self._changed.notify()
                return
            self._missed += 1
        if self._missed == 1:
            log.warning("%s does not keep up: records are dropped from now on", self._name)

    def _next(self) -> Call | None:
        """The next call, None after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._ended)
            return self._calls.popleft() if self._calls else None

    def _run(self) -> None:
        tracker = self._opened()
        refused = False
        while (call := self._next()) is not None:
            if tracker is None:
                continue
            try:
                call(tracker)
            except Exception as error:
                self._missed += 1
                if not refused:
                    refused = True
                    log.warning("%s refused a record, others may follow: %s", self._name, describe(error))
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                log.warning("%s did not end well: %s", self._name, describe(error))

    def _opened(self) -> Tracker | None:
        try:
            return self._open()
        except Exception as error:
            log.warning("%s records nothing: %s", self._name, describe(error))
            return None


def close_trackers(trackers: Sequence[TrackerThread], seconds: float = CLOSE_S) -> None:
    """End all of them, within `seconds` together."""
    for tracker in trackers:
        tracker.end()
    until = time.monotonic() + seconds
    for tracker in trackers:
        tracker.join(max(0.0, until - time.monotonic()))
