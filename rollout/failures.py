"""Failures of the episodes of one worker: each distinct failure is logged once with a traceback; too many end its process.

Invariants:
- Failures are distinct by reason, and by type and the user's line that raised; messages may differ from episode to episode.
- A repeated failure is logged without a traceback, each time that its number has doubled: a log stays readable.
- Failures by engines and reward models end the process only in a row: both come back, and the episodes are played again.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping

from ..buffer.trajectory import Outcome
from ..common.outcomes import WARN_SHARE, failed_share, failures, failures_text
from ..errors import EpisodesFail, user_line

log = logging.getLogger(__name__)

EPISODES = 64  # episodes of which the failures are counted, or twice the slots where that is more
END_SHARE = 0.7  # share of them above which only a biased rest would be left to train on
PASSING = ("engine", "reward")  # reasons that pass by themselves
TOLD = 3  # distinct failures of one process that the view shows
KNOWN = 1000  # distinct failures that are told apart


class FailureLog:
    """Logs failures; the first few distinct ones are also given to `tell`, in one line each."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._seen = Counter[str]()

    def record(self, episode_id: str, outcome: Outcome, error: BaseException | None) -> None:
        """`error` is the exception by which the episode failed; None where no code raised one."""
        kind = _kind(outcome, error)
        if kind not in self._seen and len(self._seen) >= KNOWN:
            kind = "others"
        self._seen[kind] += 1
        number = self._seen[kind]
        if number & (number - 1):
            return
        what = f"{outcome.reason}: {outcome.detail}"
        if number > 1:
            log.warning("episode %s failed by %s (as %d before it)", episode_id, what, number - 1)
            return
        log.warning("episode %s failed by %s", episode_id, what, exc_info=error)
        if len(self._seen) <= TOLD:
            self._tell(f"an episode failed by {what}")


class FailureWindow:
    """The outcomes of the last episodes; `tell` hears when more than `WARN_SHARE` of them failed."""

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self._tell = tell
        self._last = deque[str]()
        self._in_a_row = 0
        self._told = False

    def add(self, outcome: Outcome, *, useful: bool, slots: int) -> None:
        """An episode ended; one that is not `useful` brought nothing to train on. Raises EpisodesFail: the last `EPISODES` (twice
        `slots` where that is more) brought nothing, or more than `END_SHARE` of them failed by what does not pass by itself."""
        size = max(EPISODES, 2 * slots)
        self._last.append(outcome.label)
        while len(self._last) > size:
            self._last.popleft()
        self._in_a_row = 0 if useful else self._in_a_row + 1
        why = f"{outcome.reason}: {outcome.detail}" if outcome.reason else f"no token to train on: {outcome.detail}"
        if self._in_a_row >= size:
            raise EpisodesFail(f"{self._in_a_row} episodes in a row failed, the last by {why}")
        if len(self._last) < size:
            return
        counts = Counter(self._last)
        text = failures_text(counts, of="the last ")
        if too_many_failed(counts) and outcome.reason:
            raise EpisodesFail(f"{text}, the last by {why}")
        if failed_share(counts) > WARN_SHARE and not self._told:
            self._tell(f"{text}; this process's log has a traceback of each kind")
        # Told again only after it was much better for a while.
        self._told = failed_share(counts) > (WARN_SHARE / 2 if self._told else WARN_SHARE)


def too_many_failed(outcomes: Mapping[str, int]) -> bool:
    """Whether more than `END_SHARE` of the episodes failed by what does not pass by itself."""
    lasting = sum(number for reason, number in failures(outcomes).items() if reason not in PASSING)
    return lasting > END_SHARE * sum(outcomes.values())


def _kind(outcome: Outcome, error: BaseException | None) -> str:
    """What two failures have in common that are one to the user."""
    cause = None if error is None else error.__cause__ or error
    line = "" if cause is None else user_line(cause)
    what = f"{type(cause).__name__} {line}" if line else re.sub(r"\d+", "#", outcome.detail)
    return f"{outcome.reason} {what}"
