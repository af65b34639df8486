"""The findings of `slipstream explain`: each with its evidence, a change, and the gain of the change. Structs only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Literal

import msgspec

from ...configs import LIVE
from ...monitor.alerts import Alert
from ...monitor.text import count, share
from ..figures import RunFigures

Unit = Literal["share", "s", "versions", "steps"]
NOTHING = "no change that this hardware allows is worth 3 %"
# Keys of which a finding that changes nothing else wants one more, and the command that adds one while the run goes on.
POOLS = {"rollout.engine.replicas": "replicas", "rollout.workers": "workers"}


class Measurement(msgspec.Struct, frozen=True):
    """A piece of evidence; a share is between 0 and 1."""

    metric: str
    value: float
    window: str  # which steps
    unit: Unit = "share"

    def __str__(self) -> str:
        if self.unit == "share":
            return f"{self.metric} {share(self.value)}"
        return f"{self.metric} {self.value:.3g}{' s' if self.unit == 's' else ''}"


class Candidate(msgspec.Struct, frozen=True):
    """A change that might help, and what to simulate of it."""

    change: str  # `key=value`s, or what to do outside of the config
    overrides: tuple[str, ...] = ()
    assuming: str = ""  # what is supposed of something whose effect is not known
    environment: float = 1.0  # factor of the seconds that environments take
    push: float = 1.0  # factor of the seconds of a push
    signal: float = 1.0  # share of the tokens trained now that carry a signal; after the change all do


Aim = Literal["tokens", "staleness", "fresh", "none"]
"""What a change is for: trained tokens per second; less staleness at the same rate; any tokens of the newest version; or something
that the simulator does not know."""
Cost = Literal["free", "devices", "age"]
"""What a change costs. Findings are told in this order: what is free, what wants more devices, what makes tokens older or fewer."""


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    text: str
    evidence: tuple[Measurement, ...]
    candidates: tuple[Candidate, ...]  # the preferred first
    aim: Aim = "tokens"
    cost: Cost = "free"
    warning: bool = False  # told whatever it gains: the run learns less than it seems
    otherwise: str = ""  # the change where no candidate gains enough


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds, and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / 2


class Gain(msgspec.Struct, frozen=True):
    """What the simulator says of a change, against the settings of the run, over several seeds."""

    # Relative change: 0.1 is a tenth more. Of groups with unequal rewards where `of_signal`.
    trained_tokens_per_s: Interval
    staleness: Interval  # change in versions
    seeds: int
    assuming: str = ""
    of_signal: bool = False

    def __str__(self) -> str:
        tokens, age = self.trained_tokens_per_s, self.staleness
        what = "trained tok/s of groups with unequal rewards" if self.of_signal else "trained tok/s"
        text = f"{what} {100 * tokens.mean:+.0f} ± {100 * tokens.spread:.0f} %"
        text += f", staleness {age.mean:+.2f} ± {age.spread:.2f}"
        return f"{text}, assuming {self.assuming}" if self.assuming else text


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    severity: Literal["warning", "hint"]  # a warning: the run learns less than it seems
    text: str
    evidence: tuple[Measurement, ...]
    change: str  # `key=value`s, or what to do outside of the config
    live: bool  # it can be done while the run goes on
    cost: Cost
    gain: Gain | None  # None where the simulator does not know the change, or misses the run

    def command(self, run: str, *, active: bool) -> str:
        """What makes the change in `run`: a command while the run goes on, then the keys of a next run. Empty where the change is
        outside of the config."""
        keys = overrides_in(self.change)
        if not keys or not active:
            return self.change if keys else ""
        if pool := pool_of(keys):
            return f"slipstream {pool} {shlex.quote(run)} add"
        return f"slipstream {'set' if self.live else 'resume'} {shlex.quote(run)} {shlex.join(keys)}"


def overrides_in(change: str) -> list[str]:
    """The `key=value`s that a change consists of; none where it is outside of the config."""
    words = change.split()
    return words if all("=" in word for word in words) else []


def pool_of(keys: Sequence[str]) -> str:
    """The command that adds one where a change consists of one more replica or worker; empty for another change."""
    return POOLS.get(keys[0].partition("=")[0], "") if len(keys) == 1 else ""


def is_live(change: str) -> bool:
    """Whether a run that goes on can take the change: by `slipstream set`, or a command that adds a process."""
    keys = overrides_in(change)
    return bool(keys) and (bool(pool_of(keys)) or all(key.partition("=")[0] in LIVE for key in keys))


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`findings` are empty while an alert is active that they would distract from, and where nothing is worth a change."""

    run: str
    active: bool = False  # whether the run goes on
    alerts: tuple[Alert, ...]  # those that are active
    findings: tuple[Finding, ...] = ()
    steps: tuple[int, int] | None = None  # the first and the last that were looked at
    measured: RunFigures | None = None
    missed: float | None = None  # relative error of the simulated cycle of the run itself
    note: str = ""  # why there are no findings, or no gains

    @property
    def worst(self) -> Literal["critical", "warning", "hint", ""]:
        """The highest severity among alerts and findings, empty without any."""
        found = {one.severity for one in (*self.alerts, *self.findings)}
        return "critical" if "critical" in found else "warning" if "warning" in found else "hint" if found else ""

    def lines(self) -> list[str]:
        """As text, the most urgent first; a single line where there is nothing to say."""
        found = [f"{alert.severity}: {alert} (since step {alert.step})" for alert in self.alerts]
        for finding in self.findings:
            found.append(f"{finding.severity}: {finding.text}")
            gain = f": {finding.gain}" if finding.gain else ""
            found.append(f"  -> {finding.change}{gain}")
            found.append(f"     {', '.join(map(str, finding.evidence))}")
            if self.active and finding.live:
                found.append(f"     while the run goes on: {finding.command(self.run, active=True)}")
        if self.measured is not None:
            nothing = "" if self.findings else f"; {NOTHING}"
            balanced = "" if self.findings or self.alerts else "balanced: "
            found.insert(len(self.alerts), f"{balanced}{self.summary}{nothing}")
        return [*found, *([self.note] if self.note else [])]

    @property
    def summary(self) -> str:
        """What was measured, in one line; empty where nothing was."""
        m, steps = self.measured, self.steps
        if m is None or steps is None:
            return ""
        return (
            f"steps {steps[0]}–{steps[1]}: {count(m.trained_tokens_per_s)} trained tok/s, the learner waits "
            f"{share(m.learner_wait)} of the time, {share(m.rollout_idle)} of the slots are empty, staleness {m.staleness:.2f}"
        )
