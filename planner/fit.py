"""From the folder of a run, finished or going on, to its profile.

    buffer.sqlite  ──> lengths, turns, times in environments, rewards, deliveries     config.yaml ──> settings
    spans/         ──> how fast replicas decode and prefill, pushes, hand-overs of batches
    metrics.jsonl  ──> seconds of steps, and the run's own figures

Each part is taken from where it was recorded. A run without spans, or whose servers do not time their completions, has its decode
curve guessed (`guess.py`), and its pushes and hand-overs from its metrics.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ..buffer.history import BufferTimes, read_times
from ..buffer.trajectory import BatchRow, Turn
from ..configs import Config
from ..configs.algorithm import plays_greedily, warmup_of
from ..configs.backends import copy_ranks
from ..configs.engines import OptionServers
from ..configs.environments import parts_by_key, shares_of
from ..errors import ConfigError
from ..monitor.metrics import Row
from .engine import DecodeCurve
from .figures import RunFigures, StepSample, figures_of
from .guess import guess_engine, scaled_to_episodes
from .plan import SimulationPlan
from .profile import EngineProfile, LearnerProfile, PushProfile, RunProfile, settings_of
from .records import Groups, RunRecords
from .replica_law import replica_law
from .run_spans import RunSpans, read_run_spans, under_way
from .worker_law import WorkerLoad, worker_contention, worker_loads
from .workload import EpisodeShape, Observed, TurnShape

LEAST_STEPS = 5  # that a profile needs, besides those in which the run fills up
STEPS = 200  # most steps in it
# Where no span says when a batch was asked for: the quantile of the waits for batches that is taken for the wait for one that is
# ready, and the most that it may be: in a run that always waits no batch is ready.
READY_QUANTILE, READY_MOST_S = 0.25, 0.05
LOOKS = 20  # times during a push at which its requests in flight are counted
MOST_SLOWED = 4.0  # times as long as beside idle replicas that the pushes of a run may be found to take


def refuse_colocated(config: Config) -> None:
    """Raises ConfigError for a run whose servers sleep while the learner steps."""
    if config.launch.colocated:
        raise ConfigError(
            "launch.kind=colocated: servers and learner take turns, which the simulation does not know; it is of runs with "
            "launch.kind=local, ray or ray_cluster"
        )


def profile_of(folder: Path, *, active: bool = True, resumable: bool = True) -> RunProfile:
    """Of a run that a process may write to where it is `active`. Raises as `RunRecords` and `fit_profile`."""
    return fit_profile(RunRecords(folder, active=active), resumable=resumable)


def fit_profile(run: RunRecords, *, resumable: bool = True) -> RunProfile:
    """Raises ConfigError where the run is colocated, where it has too few steps, and says how it goes on where it is `resumable`,
    and where the buffer holds no sampled token of its steady steps any more; StoreError where a file of it is damaged."""
    config, rows = run.config, run.steady
    refuse_colocated(config)
    needed = run.settling + LEAST_STEPS
    if len(rows) < LEAST_STEPS:
        found = len(run.in_force)
        changed = " since its settings were changed" if found < len(run.rows) else ""
        advice = f"; where it has ended, {resume_command(run, needed)} continues it" if resumable else ""
        raise ConfigError(f"{run.folder}: the run has {found} steps{changed}; a profile needs {needed}{advice}")
    groups = run.groups
    episodes = [episode for group in groups for episode in group]
    if not any(branch.sampled for episode in episodes for branch in episode):
        raise ConfigError(
            f"{run.folder}: the buffer holds no sampled token of a group since version {run.since}; a profile needs some: where "
            "buffer.keep has dropped them, a run with a larger one has a profile"
        )
    ids = {episode[0].group_id for episode in episodes}
    times = read_times(run.database, run.since, ids, active=run.active)
    spans = read_run_spans(run.folder, times.leased)
    served = [row["replicas"] for row in rows if row.get("replicas")]
    replicas = max(1, round(sum(served) / len(served)) if served else config.rollout.engine.count)
    began = [_began(episode, times.leased) for episode in episodes]
    episode_s = float(np.mean([_ended(episode) - start for episode, start in zip(episodes, began, strict=True)]))
    measured = figures_of_rows(rows, episode_s)
    engine, slowed = _engine(config, spans, groups, measured, replicas)
    slowed_worker, loads = 1.0, dict[str, WorkerLoad]()
    if engine.source == "recorded":
        slowed_worker = worker_contention(spans.workers, spans.steps)
        loads = worker_loads(spans.workers, spans.steps, slowed_worker)
    profile = RunProfile(
        settings=settings_of(config) | {"rollout.engine.replicas": replicas},
        environments=_environments(config, groups, times.leased, loads),
        engine=engine,
        learner=_learner(config, rows, spans, times, slowed),
        push=PushProfile(0.0, 0.0),
        deliver_s=_deliver_s(episodes, times.delivered),
        worker_contention=slowed_worker,
        greedy=plays_greedily(config.learner.algorithm),
        measured=measured,
    )
    push = _push(rows, spans, SimulationPlan.of(profile), engine.decode)
    profile = msgspec.structs.replace(profile, push=push)
    return scaled_to_episodes(profile) if profile.engine.source == "fitted" else profile


def resume_command(run: RunRecords, steps: int) -> str:
    """What lets a run have so many steps under the settings in force: it never ends sooner than its config says."""
    last = run.rows[-1]["step"] if run.rows else warmup_of(run.config.learner.algorithm)
    needed = last + steps - len(run.in_force)
    more = f" learner.steps={needed}" if needed > run.config.learner.steps else ""
    return f"`slipstream resume {shlex.quote(str(run.folder))}{more}`"


def figures_of_rows(rows: Sequence[Row], episode_s: float | None = None) -> RunFigures:
    """The figures of a run over at least one of its steps."""
    return figures_of([_sample(row) for row in rows], episode_s)


# --- episodes -------------------------------------------------------------------------------------------------------


def _environments(
    config: Config, groups: Groups, leased: Mapping[int, float], loads: Mapping[str, WorkerLoad]
) -> tuple[Observed, ...]:
    """By the order in which leases number them. A part of a mixture is known by its name, which its trajectories have."""
    shares = shares_of(config.env)
    names = [key.rpartition(".")[2] for key in parts_by_key(config.env)]
    found: list[Observed] = []
    for name, share in zip(names, shares, strict=True):
        mine = [group for group in groups if len(shares) == 1 or group[0][0].env == name]
        shapes_of = ([_shape(episode, _began(episode, leased), loads) for episode in group] for group in mine)
        played = (tuple(shape for shape in shapes if shape.turns) for shapes in shapes_of)
        shapes = tuple(group for group in played if group)
        if not shapes:
            raise ConfigError(
                f"env.parts.{name}: the run has no episode of it yet; a profile needs some of every environment"
            )
        found.append(Observed(shapes, share))
    return tuple(found)


def _shape(branches: Sequence[BatchRow], leased: float, loads: Mapping[str, WorkerLoad]) -> EpisodeShape:
    """Of one episode. Where its turns have no times, that of the environment is spread evenly over them; where nothing is recorded
    of its worker, all of it is waiting."""
    found: list[tuple[Turn, int]] = []  # a turn, and the new tokens before it
    for branch in branches:
        starts = [span.start for span in branch.version_spans]
        end = 0
        for turn in branch.turns:
            if any(turn.start <= start < turn.end for start in starts):  # else it is context, of an earlier branch
                found.append((turn, turn.start - end))
            end = turn.end
    tokens, reward = sum(map(len, branches)), branches[0].reward
    if not found or not all(turn.asked for turn, _ in found):
        timings = branches[0].timings
        waited = (timings.get("environment", 0.0) + timings.get("reward", 0.0)) / max(1, len(found))
        return EpisodeShape(
            reward, tokens, tuple(TurnShape(new, turn.end - turn.start, round(waited, 5)) for turn, new in found)
        )
    found.sort(key=lambda one: one[0].asked)
    turns, asked = list[TurnShape](), [turn.asked for turn, _ in found]
    load = loads.get(branches[0].episode)

    def split(since: float, until: float) -> tuple[float, float]:
        return load.split(since, until) if load is not None else (round(max(0.0, until - since), 5), 0.0)

    for (turn, new), following in zip(found, [*asked[1:], _ended(branches)], strict=True):
        arrived = turn.asked + turn.queued_s + turn.first_s + turn.decode_s
        turns.append(TurnShape(new, turn.end - turn.start, *split(arrived, following)))
    start, lease = split(branches[0].started, asked[0]), split(leased, branches[0].started)
    return EpisodeShape(reward, tokens, tuple(turns), found[0][0].cached or 0, *start, *lease)


def _began(branches: Sequence[BatchRow], leased: Mapping[int, float]) -> float:
    """When its slot was taken: a little before the episode started. An earlier one of a group that was leased again has its own."""
    started = branches[0].started
    return min(started, leased.get(branches[0].group_id, started))


def _ended(branches: Sequence[BatchRow]) -> float:
    return branches[0].started + branches[0].timings.get("total", 0.0)


def _deliver_s(episodes: Sequence[Sequence[BatchRow]], delivered: Mapping[str, float]) -> float:
    """Mean from the end of an episode to the disk of the buffer."""
    took = [delivered[e[0].episode] - _ended(e) for e in episodes if e[0].started and e[0].episode in delivered]
    return max(0.0, float(np.mean(took))) if took else 0.0


# --- replicas -------------------------------------------------------------------------------------------------------


def _engine(
    config: Config, spans: RunSpans, groups: Groups, measured: RunFigures, replicas: int
) -> tuple[EngineProfile, float]:
    """And how many times as long the learner's steps took as they would have without the replicas beside it."""
    engine = config.rollout.engine
    ranks = engine.tensor_parallel if isinstance(engine, OptionServers) else 1
    recompute = config.rollout.partial == "recompute"
    law = replica_law(spans.replicas, engine.max_concurrent, spans.steps, recompute=recompute)
    if law is None:
        return guess_engine(groups, measured, replicas, engine.max_concurrent, ranks), 1.0
    found = EngineProfile(
        law.decode,
        law.prefill_s,
        ranks,
        "recorded",
        law.running,
        request_steps=law.request_steps,
        contention=law.contention,
        block=law.block,
    )
    return found, 1 / (1 - law.beside + law.beside / law.contention)


def _push(rows: Sequence[Row], spans: RunSpans, plan: SimulationPlan, decode: DecodeCurve) -> PushProfile:
    """What is not of a cohort happens once: weights are gathered, a checkpoint is written now and then."""
    cohorts = plan.cohorts
    steps, slowed = _push_steps(spans, decode, plan.max_concurrent)
    steps /= cohorts
    push_s = float(np.mean([row["push_s"] for row in rows])) / slowed
    pause_s = float(np.mean([row["pause_ms"] for row in rows])) / 1e3 / slowed
    if not spans.pushes:
        return PushProfile(push_s / cohorts, pause_s, steps=steps)
    every = np.array([cohort for push in spans.pushes for cohort in push]) / slowed
    lasted_s, canary_s = every.mean(axis=0).tolist()
    cohort_s = min(lasted_s, push_s / cohorts)
    pause_s = min(pause_s, cohort_s)
    return PushProfile(cohort_s, pause_s, push_s - cohorts * cohort_s, min(canary_s, cohort_s - pause_s), steps)


def _push_steps(spans: RunSpans, decode: DecodeCurve, max_concurrent: int) -> tuple[float, float]:
    """Decode steps that a push waits for, and how many times as long the run's pushes took as they do beside idle replicas: the
    straight line of least squares through the seconds of all pushes by those of a step under way, as a mean over the push. Of a
    replica's requests at most `max_concurrent` are in a step."""
    published = spans.published
    if len(published) < LEAST_STEPS or not spans.replicas:
        return 0.0, 1.0
    at = np.linspace(published[:, 0], published[:, 1], LOOKS, axis=1)
    step_s = np.zeros(len(published))
    for replica in spans.replicas:
        running = np.minimum(max_concurrent, under_way(replica.turns[:, 0], replica.turns[:, 2], at))
        by_number = np.array([decode.under_way_s(n) for n in range(int(running.max()) + 1)])
        step_s += by_number[running].mean(axis=1)
    step_s /= len(spans.replicas)
    seconds = published[:, 1] - published[:, 0]
    mean_s, mean_step_s = float(seconds.mean()), float(step_s.mean())
    slope = float(np.polyfit(step_s, seconds, 1)[0]) if step_s.std() > 0 else 0.0
    alone_s = min(mean_s, max(mean_s - slope * mean_step_s, mean_s / MOST_SLOWED))
    return ((mean_s - alone_s) / mean_step_s if mean_step_s else 0.0), mean_s / alone_s


# --- the learner ----------------------------------------------------------------------------------------------------


def _sample(row: Row) -> StepSample:
    return StepSample(
        wait_s=row["wait_s"],
        step_s=row["step_s"],
        push_s=row["push_s"],
        tokens_by_staleness={int(lag): tokens for lag, tokens in row["staleness_tokens"].items()},
        withheld=row["tokens_withheld"],
        generated=row["tokens_generated"],
        slot_s=row["slot_s"],
        idle_slot_s=row["idle_slot_s"],
        context=round(row["learner_tokens_per_s"] * row["step_s"]),
    )


def _learner(config: Config, rows: Sequence[Row], spans: RunSpans, times: BufferTimes, slowed: float) -> LearnerProfile:
    backend = config.learner.backend
    spread = rows if len(rows) <= STEPS else [rows[i * len(rows) // STEPS] for i in range(STEPS)]
    per_token = tuple(1 / row["learner_tokens_per_s"] / slowed for row in spread if row["learner_tokens_per_s"])
    take_s = _take_s(spans, times.complete)
    if take_s is None:
        take_s = min(READY_MOST_S, float(np.quantile([row["wait_s"] for row in rows], READY_QUANTILE)))
    return LearnerProfile(per_token, backend.ranks, copy_ranks(backend), take_s, slowed)


def _take_s(spans: RunSpans, complete: Mapping[int, float]) -> float | None:
    """Mean seconds until the learner had a batch, from when it had asked and the last group was complete."""
    took = [t1 - max(t0, complete[version + 1]) for version, (t0, t1) in spans.takes.items() if version + 1 in complete]
    return max(0.0, float(np.mean(took))) if took else None
