"""`slipstream tune RUN --live`: moves the staleness bound of a run while it goes on, by `planner.tune.live`.

    metrics.jsonl ──> rule ──move──> `ChangeSettings` ──> supervisor
                       ^ └──loss at a lower bound──> profile of the run so far, simulated
    settings.jsonl ────┘ the bound in force, whoever set it

Invariants:
- It reads the run's files and sends commands as `slipstream set` does. It ends with the run, and the run goes on without it.
- The bound stays within the limits of the user: 0 and the bound that the run began with, unless others are given.
- A command that the run does not take changes nothing, and is said.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from watchfiles import watch

from ..configs import load, run_config
from ..errors import ConfigError, SlipstreamError, StateError, StoreError
from ..monitor.metrics import METRICS, MetricsTail
from ..monitor.settings import SETTINGS, read_changes
from ..planner.fit import profile_of
from ..planner.plan import SimulationPlan
from ..planner.run import simulate
from ..planner.tune.live import BoundMove, BoundRule
from ..planner.tune.space import BOUND
from .run_lock import is_locked
from .supervisor.control import ChangeSettings, SettingsChanged, read_control_address, send_command

log = logging.getLogger(__name__)

WHO = "slipstream tune --live"
LOOK_S = 5.0  # a run that ends changes no file that is watched
SEEDS = 3  # simulations of each bound


class LiveTuner:
    """Of the active run in `folder`; `limits` are the lowest and the highest bound. Raises ConfigError where it does not run."""

    def __init__(self, folder: Path, limits: tuple[int, int] | None, say: Callable[[str], None]) -> None:
        read_control_address(folder)
        self._folder, self._say = folder, say
        began_with, bound = self._bounds()
        self.limits = low, high = limits or (0, max(began_with, bound))
        if not low <= bound <= high:
            change = f"slipstream set {shlex.quote(str(folder))} {BOUND}={min(max(bound, low), high)}"
            raise ConfigError(
                f"--over {BOUND}={low},{high}: the run has {bound}, which is not between them; `{change}` first"
            )
        self._rule = BoundRule(bound, *self.limits, self._loss)
        self._tail = MetricsTail(folder / METRICS)
        self._tail.read()  # steps before this command

    def follow(self) -> None:
        """Until the run ends. Raises StoreError where a file of it is damaged."""
        low, high = self.limits
        self._say(f"{BOUND} is {self._rule.bound}, and may become {low} to {high}; Ctrl-C leaves it as it is then")
        while is_locked(self._folder):
            self._rule.moved(self._bounds()[1])
            for row in self._tail.read():
                if (move := self._rule.observe(row)) is not None:
                    self._make(move)
            self._wait()
        self._say(f"the run is over; {BOUND} was {self._rule.bound}")

    def _wait(self) -> None:
        """Until a file changes, or for a while."""
        changes = watch(
            self._folder,
            watch_filter=lambda change, path: Path(path).name in (METRICS, SETTINGS),
            recursive=False,
            rust_timeout=round(1e3 * LOOK_S),
            yield_on_timeout=True,
            raise_interrupt=True,
        )
        next(changes)

    def _bounds(self) -> tuple[int, int]:
        """The bound that the run began with, and the one in force."""
        changes = [one for one in read_changes(self._folder / SETTINGS) if one.key == BOUND]
        if changes:
            return int(changes[0].old), int(changes[-1].new)
        own = load(str(run_config(self._folder))).buffer.max_staleness
        return own, own

    def _make(self, move: BoundMove) -> None:
        """Send it to the run."""
        before = self._rule.bound
        if (found := self._bounds()[1]) != before:  # a user changed it while this was simulated
            self._rule.moved(found)
            return
        command = ChangeSettings((f"{BOUND}={move.bound}",))
        try:
            asyncio.run(send_command(read_control_address(self._folder), command, SettingsChanged, who=WHO))
        except SlipstreamError as error:
            self._say(f"{BOUND} stays {before}: {error}")
            return
        self._rule.moved(move.bound)
        self._say(f"{BOUND} {before} -> {move.bound}: {move.why}")

    def _loss(self, bound: int) -> float | None:
        """Share of the trained tokens per second that a lower bound costs; None where the run cannot be simulated."""
        try:
            profile = profile_of(self._folder)
            own, other = (
                fmean(simulate(plan, plan.compared_steps, seed).figures.trained_tokens_per_s
                      for seed in range(SEEDS))
                for plan in (SimulationPlan.of(profile, (f"{BOUND}={one}",)) for one in (self._rule.bound, bound))
            )  # fmt: skip
        except (ConfigError, StateError, StoreError) as error:
            log.warning("the bound is not lowered: %s", error)
            return None
        return 1 - other / own if own else None
