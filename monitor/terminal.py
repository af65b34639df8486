"""The terminal view of an active run.

Invariants:
- On a terminal: one view that is redrawn in place, log records above it. Elsewhere: one short line per step and per event.
- Every step and every event is also logged, so that `logs/supervisor.log` has them in both cases.
- Drawing never blocks or changes the run; missing numbers are drawn as dashes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..common.outcomes import WARN_SHARE, failed_share, failures_text
from ..common.replica_names import replica_of
from ..configs import Config
from .alerts import Alert
from .metrics import Row
from .output import open_console
from .series import ALIKE_SHARE, alike_share, alike_text
from .text import MISSING, count, reward, share, sparkline

log = logging.getLogger(__name__)

EVENTS_SHOWN = 4
SPARK_WIDTH = 40
REFRESH_PER_S = 4.0
_ALERT_STYLES = {"critical": "bold red", "warning": "red"}
ROLES_SHOWN = 10  # with more processes than this, those of one kind share a line, so that the view fits on a screen


class View:
    """A context manager that shows a run. This one shows nothing."""

    def past(self, rows: Sequence[Row]) -> None:
        """The steps that the run made before it was resumed."""

    def step(self, row: Row) -> None:
        """The learner finished a step."""

    def status(self, role: str, text: str) -> None:
        """What a role does now; replaces its last status."""

    def event(self, text: str) -> None:
        """Something worth recording: a restart, a failure, a replica that missed a push."""

    def alert(self, alert: Alert) -> None:
        """An alert fired, or is over."""

    def configure(self, config: Config) -> None:
        """Another config is in force."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def open_view(config: Config, console: Console | None = None) -> View:
    """The live view on a terminal, plain lines elsewhere and with TERM=dumb. `console` defaults to stdout."""
    console = console or open_console()
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(config, console)
    return LineView(config, console)


class LineView(View):
    """One line per step and event, and one per change of a role's status until the first step."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self._first_reward: float | None = None
        self._started = False
        self._status: dict[str, str] = {}

    def past(self, rows: Sequence[Row]) -> None:
        self._first_reward = next(iter(_rewards(rows)), None)

    def step(self, row: Row) -> None:
        if self._first_reward is None:
            self._first_reward = row.get("reward_mean")
        self._started = True
        line = step_line(row, self._config, self._first_reward)
        log.info("%s", line)
        self._print(line)

    def status(self, role: str, text: str) -> None:
        if not self._started and self._status.get(role) != text:
            self._status[role] = text
            self._print(f"{role}: {text}")

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._print(f"! {text}")

    def alert(self, alert: Alert) -> None:
        log.info("%s", _alert_text(alert))
        self._print(f"! {_alert_text(alert)}")

    def configure(self, config: Config) -> None:
        self._config = config

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class TerminalView(View):
    """Progress, active alerts, reward, staleness, throughput and idle share of both sides, the roles, and the last events."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._row: Row = {}
        self._rewards: list[float] = []
        self._status: dict[str, str] = {}
        self._alerts: dict[str, Alert] = {}  # those that are active, by rule
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

    def past(self, rows: Sequence[Row]) -> None:
        self._rewards = _rewards(rows)

    def step(self, row: Row) -> None:
        self._row = row
        if row.get("reward_mean") is not None:
            self._rewards.append(row["reward_mean"])
        log.info("%s", step_line(row, self._config, next(iter(self._rewards), None)))
        self._progress.update(self._task, completed=int(row.get("step", 0)))

    def status(self, role: str, text: str) -> None:
        self._status[role] = text

    def event(self, text: str) -> None:
        log.info("%s", text)
        self._events.append(f"{time.strftime('%H:%M:%S')}  {text}")

    def alert(self, alert: Alert) -> None:
        log.info("%s", _alert_text(alert))
        if alert.active:
            self._alerts[alert.rule] = alert
        else:
            self._alerts.pop(alert.rule, None)
            self._events.append(f"{time.strftime('%H:%M:%S')}  {_alert_text(alert)}")

    def configure(self, config: Config) -> None:
        self._config = config

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _draw(self) -> RenderableType:
        numbers = self._numbers() if self._row else [Text("no step yet", "dim")]
        status = _by_kind(self._status.copy())  # copies: the event loop changes them, and a thread draws
        width = max(map(len, status), default=0) + 2
        roles = [_line((f"{role:{width}}", "cyan"), text) for role, text in sorted(status.items())]
        events = [_line((event, "yellow")) for event in list(self._events)]
        alerts = [_line((f"! {_alert_text(one)}", _ALERT_STYLES[one.severity])) for one in list(self._alerts.values())]
        blocks = ([Text(), *lines] for lines in (alerts, roles, events) if lines)
        return Group(self._progress, *numbers, *itertools.chain.from_iterable(blocks))

    def _numbers(self) -> list[Text]:
        """One line each for reward, staleness, rollout and learner, and where there are many, for failures and groups without
        signal; a narrow terminal cuts them at the right."""
        row = self._row
        now, staleness = row.get("reward_mean"), _staleness(row, self._config.buffer.max_staleness)
        change = f"{_change(now, next(iter(self._rewards), None))} since the first step   "
        curve = (sparkline(self._rewards, SPARK_WIDTH), "green")
        lines = [
            _line(f"{'reward':11}", (f"{reward(now):14}", "bold green"), change, curve),
            _line(f"{'staleness':11}", (f"{staleness:14}", "bold"), "mean, max / bound, in versions"),
        ]
        for side, overlap in (("rollout", "overlap_tokens_per_s"), ("learner", None)):
            idle = row.get(f"{side}_idle")
            speed = f"{count(row.get(f'{side}_tokens_per_s'))} tok/s"
            note = f"   {count(row.get(overlap))} while the learner steps" if overlap else ""
            waiting = (f"idle {share(idle)}", "red" if (idle or 0) > 0.25 else "")
            lines.append(_line(f"{side:11}", (f"{speed:14}", "bold"), waiting, note))
        if failed := failures_text(row.get("outcomes") or {}):
            many = failed_share(row["outcomes"]) > WARN_SHARE
            lines.append(_line(f"{'failures':11}", (failed, "red" if many else ""), " since the step before"))
        if alike_share([row]) > ALIKE_SHARE:
            lines.append(_line(f"{'no signal':11}", (alike_text([row]), "yellow")))
        return lines


def _alert_text(alert: Alert) -> str:
    since = f" (since step {alert.step})" if alert.active and alert.step else ""
    return f"{alert.severity}: {alert}{since}"


def _line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _rewards(rows: Sequence[Row]) -> list[float]:
    return [row["reward_mean"] for row in rows if row.get("reward_mean") is not None]


def step_line(row: Row, config: Config, first_reward: float | None) -> str:
    """A step in one line; the change of the reward is since the run's first step."""
    now = row.get("reward_mean")
    failed = failures_text(row.get("outcomes") or {})
    return (
        f"step {row.get('step', MISSING)}/{config.learner.steps}  reward {reward(now)} ({_change(now, first_reward)})  "
        f"staleness {_staleness(row, config.buffer.max_staleness)}  "
        f"tok/s rollout {count(row.get('rollout_tokens_per_s'))} learner {count(row.get('learner_tokens_per_s'))}  "
        f"idle rollout {share(row.get('rollout_idle'))} learner {share(row.get('learner_idle'))}"
        + (f"  {failed}" if failed else "")
        + (f"  {alike_text([row])}" if alike_share([row]) > ALIKE_SHARE else "")
    )


def _by_kind(status: dict[str, str]) -> dict[str, str]:
    """Status by role; of many roles by kind, with the number of roles per status: `engine (16)`: `15 ready; 1 starting`."""
    if len(status) <= ROLES_SHOWN:
        return status
    kinds: dict[str, Counter[str]] = {}
    for role, text in status.items():
        if replica_of(role) != role:  # a host of a server that is counted already
            continue
        kinds.setdefault(role.partition("-")[0], Counter())[text] += 1
    return {
        f"{kind} ({counts.total()})": "; ".join(f"{number} {text}" for text, number in counts.most_common(3))
        for kind, counts in kinds.items()
    }


def _change(now: float | None, first: float | None) -> str:
    return MISSING if now is None or first is None else f"{now - first:+.3f}"


def _staleness(row: Row, bound: int) -> str:
    mean = row.get("staleness_mean")
    return f"{MISSING if mean is None else format(mean, '.2f')}, {row.get('staleness_max', MISSING)}/{bound}"
