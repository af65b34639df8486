"""What a person sees while a run goes on; the one place that writes to the terminal.

Invariants:
- With a terminal: one view that is drawn in place, log records above it. Without: one short line per step and per event.
- An event is in the process's log, too: who comes later finds it there.
- Drawing never waits for the run and never changes it; a row with missing numbers is drawn with dashes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..configs import Config
from .metrics import Row
from .text import MISSING, count, reward, share, sparkline

log = logging.getLogger(__name__)

EVENTS_SHOWN = 4
SPARK_WIDTH = 40
REFRESH_PER_S = 4.0
ROLES_SHOWN = 10
"""With more processes than this, those of one kind share a line, so that the view fits on a screen."""


class View(Protocol):
    """A context manager that shows a run."""

    def step(self, row: Row) -> None:
        """A learner step has ended."""
        ...

    def status(self, role: str, text: str) -> None:
        """What a role is doing now; replaces what it did before."""
        ...

    def event(self, text: str) -> None:
        """Something worth remembering: a restart, a failure, a replica that was left out."""
        ...

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_view(config: Config, console: Console | None = None) -> View:
    """The drawn view where there is a terminal and `monitor.live` is on, lines otherwise. `console` defaults to stdout."""
    console = console or Console(highlight=False)
    if config.monitor.live and console.is_terminal:
        return TerminalView(config, console)
    return LineView(config, console)


class LineView:
    """One line per step. Until the first step, and for events, a line each."""

    def __init__(self, config: Config, console: Console) -> None:
        self._console = console
        self._steps = config.learner.steps
        self._bound = config.buffer.max_staleness
        self._first: float | None = None
        self._status: dict[str, str] = {}

    def step(self, row: Row) -> None:
        now = row.get("reward_mean")
        self._first = now if self._first is None else self._first
        self._line(
            f"step {row.get('step', MISSING)}/{self._steps}  reward {reward(now)} ({_change(now, self._first)})  "
            f"staleness {_staleness(row, self._bound)}  "
            f"tok/s rollout {count(row.get('rollout_tokens_per_s'))} learner {count(row.get('learner_tokens_per_s'))}  "
            f"idle rollout {share(row.get('rollout_idle'))} learner {share(row.get('learner_idle'))}"
        )

    def status(self, role: str, text: str) -> None:
        if self._first is None and self._status.get(role) != text:
            self._status[role] = text
            self._line(f"{role}: {text}")

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._line(f"! {text}")

    def __enter__(self) -> LineView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class TerminalView:
    """Progress, reward, staleness, both sides' speed and idleness, the roles, and the last events."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._row: Row = {}
        self._rewards: list[float] = []
        self._status: dict[str, str] = {}
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._progress = Progress(
            TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            expand=True,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task("steps", total=config.learner.steps)
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=REFRESH_PER_S)

    def step(self, row: Row) -> None:
        self._row = row
        if row.get("reward_mean") is not None:
            self._rewards.append(row["reward_mean"])
        self._progress.update(self._task, completed=int(row.get("step", 0)))

    def status(self, role: str, text: str) -> None:
        self._status[role] = text

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._events.append(f"{time.strftime('%H:%M:%S')}  {text}")

    def __enter__(self) -> TerminalView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress, self._numbers() if self._row else Text("no step yet", "dim")]
        if self._status:
            roles = Table.grid(padding=(0, 2))
            for role, text in sorted(_condensed(self._status).items()):
                roles.add_row(Text(role, "cyan"), Text(text, overflow="ellipsis", no_wrap=True))
            parts += [Text(), roles]
        if self._events:
            parts += [Text(), *(Text(line, "yellow", overflow="ellipsis", no_wrap=True) for line in self._events)]
        return Group(*parts)

    def _numbers(self) -> Table:
        row, bound = self._row, self._config.buffer.max_staleness
        first = self._rewards[0] if self._rewards else None
        table = Table.grid(padding=(0, 2))
        change = f"{_change(row.get('reward_mean'), first)} since the first step"
        table.add_row(
            "reward",
            Text(reward(row.get("reward_mean")), "bold green"),
            change,
            Text(sparkline(self._rewards, SPARK_WIDTH), "green"),
        )
        table.add_row("staleness", Text(_staleness(row, bound), "bold"), "mean, max / bound, in versions")
        for side, other in (("rollout", "overlap_tokens_per_s"), ("learner", None)):
            idle = row.get(f"{side}_idle")
            note = f"{count(row.get(other))} while the learner steps" if other else ""
            speed = Text(f"{count(row.get(f'{side}_tokens_per_s'))} tok/s", "bold")
            table.add_row(side, speed, Text(f"idle {share(idle)}", "red" if (idle or 0) > 0.25 else ""), note)
        return table


def _condensed(status: dict[str, str]) -> dict[str, str]:
    """Line by role, or by kind of role with how many say what: `engine (16)`: `15 ready; 1 starting`."""
    if len(status) <= ROLES_SHOWN:
        return status
    kinds: dict[str, Counter[str]] = {}
    for role, text in status.items():
        kinds.setdefault(role.partition("-")[0], Counter())[text] += 1
    return {
        f"{kind} ({said.total()})": "; ".join(f"{number} {text}" for text, number in said.most_common(3))
        for kind, said in kinds.items()
    }


def _change(now: float | None, first: float | None) -> str:
    return MISSING if now is None or first is None else f"{now - first:+.3f}"


def _staleness(row: Row, bound: int) -> str:
    mean = row.get("staleness_mean")
    return f"{MISSING if mean is None else format(mean, '.2f')}, {row.get('staleness_max', MISSING)}/{bound}"
