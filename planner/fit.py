"""From the folder of a run, finished or going on, to its profile.

    buffer.sqlite  ──> lengths, turns, times in environments, rewards          config.yaml ──> settings
    metrics.jsonl  ──> seconds of steps and pushes, and the run's own figures

The decode curve is inferred where the run did not record it: episodes say how long a token took, and with the rate of all tokens
how many sequences were running (Little's law). That is one point; the line through it is a guess, whose scale is then fitted so
that simulated episodes take as long as the real ones. `EngineProfile.source` says so: the guess does not carry far from its point.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..buffer.history import read_groups
from ..buffer.trajectory import BatchRow
from ..configs import Config, load, run_config
from ..configs.algorithm import plays_greedily
from ..configs.backends import copy_ranks
from ..configs.environments import parts_by_key, shares_of
from ..configs.schema import Sglang, Vllm
from ..errors import ConfigError
from ..monitor.metrics import METRICS, Row, read_metrics
from .engine import DecodeCurve
from .figures import RunFigures, StepSample, figures_of
from .plan import SETTLING, SimulationPlan
from .profile import EngineProfile, LearnerProfile, PushProfile, RunProfile, settings_of
from .run import simulate
from .workload import EpisodeShape, Observed, TurnShape

DATABASE = "buffer.sqlite"
LEAST_STEPS = 5  # that a profile needs, besides those in which the run fills up
GROUPS = 200  # most groups in a profile; evenly spread over the run
STEPS = 200  # most steps in it
# Quantile of the waits for batches that is taken for the wait for one that is ready, and the most that it may be: in a run that
# always waits no batch is ready.
READY_QUANTILE, READY_MOST_S = 0.25, 0.05
# The guess: running sequences at which a decode step takes twice as long as with a single one. vLLM on a CPU with a model of a
# million parameters has 22; 7B on an H20 has about 90, where a fleet is rarely beyond it.
DOUBLED_AT = 32.0
FITS, FITTED = 8, 0.01  # most simulations of a fit; the relative error of an episode's time at which it ends
FIT_STEPS = 40  # of each
DELIVER_MOST = 1.0  # of an episode's time: deliveries are no longer, and what looks so is something else


def profile_of(folder: Path) -> RunProfile:
    """Raises ConfigError where there is no run, or too little of one; StoreError where a file of it is damaged."""
    config = load(str(run_config(folder)))
    settling = config.buffer.max_staleness + SETTLING
    every = read_metrics(folder / METRICS)
    rows = every[settling:]
    if len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"{folder}: the run has {len(every)} steps; a profile needs {settling + LEAST_STEPS}: "
            f"continue it with `slipstream resume {folder} learner.steps={settling + LEAST_STEPS}`"
        )
    groups = read_groups(folder / DATABASE, rows[0]["version"] - 1, GROUPS)
    served = [row["replicas"] for row in rows if row.get("replicas")]
    replicas = round(sum(served) / len(served)) if served else config.rollout.engine.replicas
    settings = settings_of(config) | {"rollout.engine.replicas": max(1, replicas)}
    episode_s = float(np.mean([episode[0].timings.get("total", 0.0) for group in groups for episode in group]))
    measured = figures_of([_sample(row) for row in rows], episode_s)
    profile = RunProfile(
        settings=settings,
        environments=_environments(config, groups),
        engine=_guessed_engine(config, groups, measured, max(1, replicas)),
        learner=_learner(config, rows),
        push=PushProfile(0.0, float(np.mean([row["pause_ms"] for row in rows])) / 1e3),
        greedy=plays_greedily(config.learner.algorithm),
        measured=measured,
    )
    cohorts = SimulationPlan.of(profile).cohorts
    push = msgspec.structs.replace(profile.push, cohort_s=measured.push_s / cohorts)
    return _fitted(msgspec.structs.replace(profile, push=push))


def _environments(config: Config, groups: Sequence[Sequence[Sequence[BatchRow]]]) -> tuple[Observed, ...]:
    """By the order in which leases number them. A part of a mixture is known by its name, which its trajectories have."""
    shares = shares_of(config.env)
    names = [key.rpartition(".")[2] for key in parts_by_key(config.env)]
    found: list[Observed] = []
    for name, share in zip(names, shares, strict=True):
        mine = [group for group in groups if len(shares) == 1 or group[0][0].env == name]
        played = (tuple(shape for shape in map(_shape, group) if shape.turns) for group in mine)
        shapes = tuple(group for group in played if group)
        if not shapes:
            raise ConfigError(
                f"env.parts.{name}: the run has no episode of it yet; a profile needs some of every environment"
            )
        found.append(Observed(shapes, share))
    return tuple(found)


def _shape(branches: Sequence[BatchRow]) -> EpisodeShape:
    """Of one episode. The environment's time is spread evenly over the turns."""
    lengths: list[tuple[int, int]] = []  # new tokens before a turn, tokens sampled in it
    for branch in branches:
        starts = [span.start for span in branch.version_spans]
        end = 0
        for turn in branch.turns:
            if any(turn.start <= start < turn.end for start in starts):  # else it is context, of an earlier branch
                lengths.append((turn.start - end, turn.end - turn.start))
            end = turn.end
    timings = branches[0].timings
    waited = (timings.get("environment", 0.0) + timings.get("reward", 0.0)) / max(1, len(lengths))
    turns = tuple(TurnShape(prompt, sampled, round(waited, 5)) for prompt, sampled in lengths)
    return EpisodeShape(branches[0].reward, sum(map(len, branches)), turns)


def _sample(row: Row) -> StepSample:
    total_s = row["wait_s"] + row["step_s"] + row["push_s"]
    return StepSample(
        wait_s=row["wait_s"],
        step_s=row["step_s"],
        push_s=row["push_s"],
        tokens_by_staleness={int(lag): tokens for lag, tokens in row["staleness_tokens"].items()},
        withheld=row["tokens_withheld"],
        generated=row["rollout_tokens_per_s"] * total_s,
        slot_s=row["slots"] * total_s,
        idle_slot_s=row["rollout_idle"] * row["slots"] * total_s,
        context=round(row["learner_tokens_per_s"] * row["step_s"]),
    )


def _learner(config: Config, rows: Sequence[Row]) -> LearnerProfile:
    backend = config.learner.backend
    spread = rows if len(rows) <= STEPS else [rows[i * len(rows) // STEPS] for i in range(STEPS)]
    per_token = tuple(1 / row["learner_tokens_per_s"] for row in spread if row["learner_tokens_per_s"])
    ready_s = min(READY_MOST_S, float(np.quantile([row["wait_s"] for row in rows], READY_QUANTILE)))
    return LearnerProfile(per_token, backend.ranks, copy_ranks(backend), ready_s)


def _guessed_engine(
    config: Config, groups: Sequence[Sequence[Sequence[BatchRow]]], measured: RunFigures, replicas: int
) -> EngineProfile:
    engine = config.rollout.engine
    episodes = [episode for group in groups for episode in group]
    decoded_s = sum(_decoded_s(episode) for episode in episodes)
    tokens = sum(branch.sampled for episode in episodes for branch in episode)
    token_s = max(1e-6, decoded_s / tokens)
    running = min(float(engine.max_concurrent), measured.generated_tokens_per_s * token_s / replicas)
    alone_s = token_s * DOUBLED_AT / (DOUBLED_AT + running)
    ranks = engine.tensor_parallel if isinstance(engine, Vllm | Sglang) else 1
    curve = DecodeCurve(((0.0, alone_s), (max(1.0, running), token_s)))
    return EngineProfile(curve, 0.0, ranks, "fitted", running)


def _decoded_s(episode: Sequence[BatchRow]) -> float:
    """Seconds of an episode that were not its environment's or its reward model's."""
    timings = episode[0].timings
    return max(0.0, timings.get("total", 0.0) - timings.get("environment", 0.0) - timings.get("reward", 0.0))


def _fitted(profile: RunProfile) -> RunProfile:
    """Scale the decode curve until simulated episodes take as long as the measured ones, and have deliveries take what slots are
    occupied for longer than that: by Little's law the occupied slots over the rate of episodes are the seconds of each."""
    measured = profile.measured
    if measured is None or not measured.episode_s:
        return profile
    shapes = [e for one in profile.environments if isinstance(one, Observed) for group in one.groups for e in group]
    waited_s = sum(shape.environment_s for shape in shapes) / len(shapes)
    tokens = sum(shape.sampled for shape in shapes) / len(shapes)
    for _ in range(FITS):
        plan = SimulationPlan.of(profile)
        simulated = simulate(plan, min(plan.default_steps, plan.settling + FIT_STEPS)).figures
        if not simulated.episode_s or min(simulated.episode_s, measured.episode_s) <= waited_s:
            break
        factor = (measured.episode_s - waited_s) / (simulated.episode_s - waited_s)
        late_s = _occupied_s(measured, tokens) - _occupied_s(simulated, tokens)
        deliver_s = min(DELIVER_MOST * measured.episode_s, max(0.0, profile.deliver_s + late_s))
        settled = abs(factor - 1) < FITTED and abs(deliver_s - profile.deliver_s) < FITTED * measured.episode_s
        engine = msgspec.structs.replace(profile.engine, decode=profile.engine.decode.scaled(factor))
        profile = msgspec.structs.replace(profile, engine=engine, deliver_s=deliver_s)
        if settled:
            break
    return profile


def _occupied_s(figures: RunFigures, tokens: float) -> float:
    """Seconds that a slot is occupied for an episode of `tokens` sampled ones, on average."""
    return figures.slots * (1 - figures.rollout_idle) * tokens / figures.generated_tokens_per_s
