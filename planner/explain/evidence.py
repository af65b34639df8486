"""The evidence of `slipstream explain`: what a run recorded, as the few numbers that rules read.

    profile (measured figures)      metrics.jsonl      trajectories of buffer.sqlite      series/worker-*.jsonl
         └──────────────────────────────┴──────────────────────┴──────────────────────────────┴──> Evidence

Invariants:
- A number that the run did not record is None, never a guess; a rule that needs it says nothing then.
- Numbers are of the steps since the run filled up, as those of a profile are.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from ...configs import Config
from ...monitor.metrics import Row
from ...monitor.series import alike_share, by_staleness, staleness_tokens
from ...monitor.timeline import read_series
from ..figures import RunFigures
from ..profile import RunProfile
from ..records import Groups, RunRecords

NEWEST = 5  # steps over which groups of equal rewards are counted
LATE_SHARE = 0.1  # of a group's members: the last of them, at least one
MEMBERS = 4  # fewer members have no last ones
LEAST_SHARE = 0.01  # of the trained tokens: a staleness with fewer has no effective sample size to speak of
LINE_S = 5.0  # two lines of a series that are further apart are of a process that hung, or of two


class Hardware(msgspec.Struct, frozen=True):
    """What a run can use. `devices` are GPUs where roles need some, else cores, of which every replica and every rank of the
    learner wants one; None where they are not known, as those of a Ray cluster."""

    kind: Literal["GPUs", "cores"]
    devices: int | None
    others: int  # that other roles have
    cores: int


class SlowestCall(msgspec.Struct, frozen=True):
    """The tool, or the step of the environment, that took the most time in all."""

    name: str
    p95_s: float
    calls: int


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are 0 to 1."""

    run: str
    config: Config
    hardware: Hardware
    steps: tuple[int, int]  # the first and the last that were counted
    measured: RunFigures
    replicas: int  # that served on average
    replica_ranks: int  # devices of each
    rank_copy: int  # ranks that hold the model once; their number is a multiple of it
    running: float | None  # sequences that a replica decodes, of those that it may
    kv: float | None  # of a replica's cache that is in use
    worker_cpu: float | None  # of a core, by the busiest worker process
    environment: float  # of an episode's time: environment, tools and reward
    tool: SlowestCall | None
    tail: float | None  # of the time of a group that only its last members took
    alike: float  # of the newest groups, those of equal rewards
    alike_all: float  # of all groups
    ess: dict[int, float]  # effective sample size by staleness
    unseen: int  # newest steps in which no token of learner and engines was compared

    @property
    def free(self) -> int | None:
        """Devices that no role has."""
        if self.hardware.devices is None:
            return None
        ranks = self.config.learner.backend.ranks
        serving = 0 if self.config.rollout.engine.external else self.replicas * self.replica_ranks
        return max(0, self.hardware.devices - self.hardware.others - serving - ranks)

    @property
    def places(self) -> int:
        """Sequences that all replicas together may decode."""
        return self.replicas * self.config.rollout.engine.max_concurrent

    @property
    def admitted(self) -> int:
        """Episodes that admission allows."""
        buffer = self.config.buffer
        return (buffer.max_staleness + 1) * buffer.groups_per_batch * buffer.group_size

    @property
    def full(self) -> float:
        """How full the replicas are; without their gauges, by the episodes that were played and not in their environment."""
        if self.running is not None:
            return self.running
        playing = self.measured.slots * (1 - self.measured.rollout_idle) * (1 - self.environment)
        return min(1.0, playing / self.places)

    @property
    def window(self) -> str:
        return f"steps {self.steps[0]}–{self.steps[1]}"

    @property
    def newest(self) -> str:
        return f"steps {max(self.steps[0], self.steps[1] - NEWEST + 1)}–{self.steps[1]}"


def read_evidence(run: RunRecords, profile: RunProfile, measured: RunFigures, hardware: Hardware) -> Evidence:
    """Of `run`, which `profile` is of. Raises StoreError where a file of it is damaged."""
    config, rows, groups = run.config, run.steady, run.groups
    replicas = int(profile.settings["rollout.engine.replicas"])
    gauges = _gauges(run.folder, rows[0]["time"] - rows[0]["wait_s"], rows[-1]["time"])
    running, kv = _means(gauges, "running"), _means(gauges, "kv")
    environment, tool = _environment(groups)
    unseen = next((n for n, row in enumerate(reversed(rows)) if row.get("mismatch_tokens", 1)), len(rows))
    return Evidence(
        run=str(run.folder),
        config=config,
        hardware=hardware,
        steps=(rows[0]["step"], rows[-1]["step"]),
        measured=measured,
        replicas=replicas,
        replica_ranks=profile.engine.ranks,
        rank_copy=profile.learner.ranks_per_copy,
        running=None if running is None else running / config.rollout.engine.max_concurrent,
        kv=kv,
        worker_cpu=max(filter(None, map(_cpu_share, gauges.values())), default=None),
        environment=environment,
        tool=tool,
        tail=tail_of(groups),
        alike=alike_share(rows[-NEWEST:]),
        alike_all=alike_share(rows),
        ess=_ess(rows),
        unseen=unseen,
    )


def _ess(rows: Sequence[Row]) -> dict[int, float]:
    tokens = staleness_tokens(rows)
    least = LEAST_SHARE * sum(tokens.values())
    return {lag: value for lag, value in by_staleness(rows, "ess").items() if tokens.get(lag, 0) >= least}


# --- gauges of the workers ----------------------------------------------------------------------------------------

Lines = list[Mapping[str, Any]]  # of a series, in their order


def _gauges(folder: Path, since: float, until: float) -> dict[str, Lines]:
    """By worker, from `since` to `until`."""
    found: defaultdict[str, Lines] = defaultdict(list)
    for role, line in read_series(folder):
        if role.startswith("worker-") and since <= line.get("t", 0.0) <= until:
            found[role].append(line)
    return dict(found)


def _means(gauges: Mapping[str, Lines], name: str) -> float | None:
    """Mean of a gauge over replicas and time, None where no replica has it."""
    replicas = (one for lines in gauges.values() for line in lines for one in line.get("replicas", {}).values())
    values = [one[name] for one in replicas if one.get(name) is not None]
    return float(np.mean(values)) if values else None


def _cpu_share(lines: Lines) -> float | None:
    """Of one worker: CPU seconds per second."""
    busy_s = passed_s = 0.0
    for before, after in itertools.pairwise(lines):
        seconds, cpu_s = after["t"] - before["t"], after["cpu_s"] - before["cpu_s"]
        if 0 < seconds < LINE_S and cpu_s >= 0:  # else another process of this name
            busy_s, passed_s = busy_s + cpu_s, passed_s + seconds
    return busy_s / passed_s if passed_s else None


# --- episodes -----------------------------------------------------------------------------------------------------


def _environment(groups: Groups) -> tuple[float, SlowestCall | None]:
    """The environment's share of the episodes' time, and what in it took longest."""
    total = waited = 0.0
    calls: defaultdict[str, list[float]] = defaultdict(list)
    for first in (episode[0] for group in groups for episode in group):
        total += first.timings.get("total", 0.0)
        waited += first.timings.get("environment", 0.0) + first.timings.get("reward", 0.0)
        for call in first.env_calls:
            calls[f"tool {call.tool}" if call.tool else call.what].append(call.end - call.begin)
    if not total:
        return 0.0, None
    tools = {name: seconds for name, seconds in calls.items() if name.startswith("tool ")}
    slowest = max((tools or calls).items(), key=lambda item: sum(item[1]), default=None)
    if slowest is None:
        return waited / total, None
    name, seconds = slowest
    return waited / total, SlowestCall(name, float(np.quantile(seconds, 0.95)), len(seconds))


def tail_of(groups: Groups) -> float | None:
    """Median over groups of the share of their time in which only their last members ran; None without times."""
    return _median(_tail([(e[0].started, e[0].started + e[0].timings.get("total", 0.0)) for e in g]) for g in groups)


def _tail(times: Sequence[tuple[float, float]]) -> float | None:
    """Of one group: (begin, end) of its members."""
    if len(times) < MEMBERS or not all(begin for begin, _ in times):
        return None
    begin, ends = min(begin for begin, _ in times), sorted(end for _, end in times)
    last = max(1, math.floor(LATE_SHARE * len(times)))
    makespan = ends[-1] - begin
    return (ends[-1] - ends[-1 - last]) / makespan if makespan > 0 else None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.median(found)) if found else None
