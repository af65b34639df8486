"""The rules of `slipstream explain`: from the evidence to what may be wrong, and what to try against it. Pure.

    Evidence ──> each rule ──> Suspicion: what is wrong, its evidence, and changes that might help, the best first

Invariants:
- A rule names one change; where it has several values for it, the simulator chooses (`gains`).
- No change needs more than the hardware: replicas, ranks and workers are offered only where their devices and cores are free.
- A rule whose numbers the run did not record says nothing.
- What a run does not record has no rule: high percentiles of the importance ratios, the delay of a worker's event loop, GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...configs.algorithm import REFILLABLE, Distillation, Prime, PythonFunction, plays_greedily
from ...configs.environments import traced_sections
from ...configs.schema import parse_memory
from ...monitor.series import ALIKE_SHARE
from ...monitor.text import duration, share
from ..closed_form import ClosedForm
from ..plan import SimulationPlan
from ..proposals import first_members
from .evidence import Evidence
from .findings import Candidate, Measurement, Suspicion, Unit

BUSY = 0.05  # a learner that waits for less of its time is the limit
WAITS = 0.10  # one that waits for more lacks batches
EMPTY = 0.15  # slots of which more are empty lack leases
AT_BOUND = 0.8  # of the bound: tokens are as old as they may be
FULL = 0.75  # of the sequences that a replica may decode: it is the limit
BACKED_OFF, CACHE_FULL = 0.7, 0.9  # workers play less than this of what replicas may decode, and the caches are so full
WAITING = 0.5  # of an episode's time: the environment is the limit
WORKER_FULL = 0.8  # of a core: one event loop cannot do more
PUSH_SHARE = 0.1  # of a cycle
TAIL = 0.4  # of a group's time, for its last members
WITHHELD = 0.05  # of the sampled tokens of batches
LOW_ESS = 0.7
BLIND_STEPS = 20
FASTER = 0.5  # what is assumed of something that can be made faster, and by how much is not known
HARDER = "harder or more varied tasks"


Rule = Callable[[Evidence, SimulationPlan, ClosedForm], Suspicion | None]


def suspicions(evidence: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Iterator[Suspicion]:
    """Of a run whose settings `plan` has, and `guess` is the closed form of."""
    for rule in RULES:
        found = rule(evidence, plan, guess)
        if found is not None and (found.candidates or found.otherwise):
            yield found


def _measured(e: Evidence, *named: tuple[str, float] | tuple[str, float, Unit]) -> tuple[Measurement, ...]:
    """Shares, unless they name another unit."""
    return tuple(Measurement(one[0], one[1], e.window, *one[2:]) for one in named)


def _idle_shares(e: Evidence) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("learner waits", e.measured.learner_wait), ("slots empty", e.measured.rollout_idle)


# --- what the run learns from ------------------------------------------------------------------------------------


def low_ess(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    """Tokens of some age count for little. The bias of stale tokens grows as the bound times the learning rate."""
    bad = sorted(lag for lag, value in e.ess.items() if value < LOW_ESS)
    if not bad:
        return None
    lag, slower = bad[0], f"learner.optimizer.lr={e.config.learner.optimizer.lr / 2:g}"
    change = f"buffer.max_staleness={lag - 1}" if lag else slower
    return Suspicion(
        rule="low_ess",
        text=f"tokens of staleness {lag} hardly count: the policy has moved too far from the one that sampled them",
        evidence=_measured(e, *((f"effective sample size at staleness {at}", e.ess[at]) for at in bad)),
        candidates=(Candidate(change, (change,) if lag else ()),),
        aim="none",
        warning=True,
        otherwise=slower,
    )


def blind(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    """Engines and learner are compared on tokens of the newest version; a smaller bound leaves some."""
    bound = e.config.buffer.max_staleness
    if e.unseen < BLIND_STEPS:
        return None
    return Suspicion(
        rule="blind",
        text=f"no token of the engines was compared with the learner's for {e.unseen} steps: each was older than the weights",
        evidence=_measured(
            e, ("newest steps without a comparison", e.unseen, "steps"), ("staleness", e.measured.staleness, "versions")
        ),
        candidates=tuple(_bounds(range(bound - 1, -1, -1))),
        aim="fresh",
        warning=True,
    )


def alike(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    """A group of equal rewards has no gradient where an advantage compares its members, no trace is among them and no teacher
    judges its tokens."""
    advantage, buffer = e.config.learner.algorithm.advantage, e.config.buffer
    if traced_sections(e.config.env) or isinstance(e.config.learner.algorithm.kl, Distillation):
        return None
    if e.alike <= ALIKE_SHARE or not isinstance(advantage, REFILLABLE) or isinstance(advantage, Prime | PythonFunction):
        return None
    change, nothing = "buffer.dynamic_sampling=true", buffer.dynamic_sampling or e.alike_all >= 1
    return Suspicion(
        rule="alike",
        text=f"{share(e.alike)} of the newest groups taught nothing: all their episodes earned the same",
        evidence=(
            Measurement("newest groups of equal rewards", e.alike, e.newest),
            Measurement("in the whole run", e.alike_all, e.window),
        ),
        candidates=() if nothing else (Candidate(change, (change,), signal=1 - e.alike_all),),
        warning=True,
        otherwise=HARDER,
    )


# --- what is slow ------------------------------------------------------------------------------------------------


def slow_environment(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    wait, empty = _idle_shares(e)
    if e.measured.learner_wait <= WAITS or e.environment <= WAITING:
        return None
    tool = (
        ""
        if e.tool is None
        else f"; the slowest is {e.tool.name}, 95 % of its calls take less than {_time(e.tool.p95_s)}"
    )
    what = "the environment" if e.tool is None else e.tool.name
    return Suspicion(
        rule="slow_environment",
        text=f"episodes spend {share(e.environment)} of their time in the environment{tool}",
        evidence=_measured(e, wait, ("environment's share of an episode", e.environment), empty),
        candidates=(Candidate(f"make {what} faster", assuming="environments take half the time", environment=FASTER),),
    )


def slow_push(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    part, sync = e.measured.push_s / e.measured.cycle_s, e.config.weightsync
    if part <= PUSH_SHARE:
        return None
    found: list[Candidate] = []
    if plan.cohorts > 1:
        change = f"weightsync.cohort={e.replicas}"
        found.append(Candidate(change, (change,)))
    else:
        kind = "shared" if e.config.launch.hosts == "one" and e.hardware.kind == "cores" else "delta"
        if sync.transport != kind:
            found.append(Candidate(f"weightsync.transport={kind}", assuming="a push takes half the time", push=FASTER))
    cohorts = f", {plan.cohorts} cohorts one after the other" if plan.cohorts > 1 else ""
    return Suspicion(
        rule="slow_push",
        text=f"the learner spends {share(part)} of a cycle on its push of weights{cohorts}",
        evidence=_measured(e, ("push's share of a cycle", part), ("a push", e.measured.push_s, "s")),
        candidates=tuple(found),
    )


def full_cache(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    played = e.measured.slots / e.places
    if e.measured.learner_wait <= WAITS or e.kv is None or e.kv <= CACHE_FULL or played >= BACKED_OFF:
        return None
    size = parse_memory(e.config.rollout.engine.memory)
    larger = f"{min(0.95, size + 0.1):.2f}" if isinstance(size, float) else f"{2 * size >> 20}MiB"
    if isinstance(size, float) and size >= 0.95:
        return None
    return Suspicion(
        rule="full_cache",
        text="the KV caches are full before the servers decode what they may",
        evidence=_measured(
            e, _idle_shares(e)[0], ("cache in use", e.kv), ("slots, of the sequences that may be decoded", played)
        ),
        candidates=(Candidate(f"rollout.engine.memory={larger}"),),
        aim="none",
    )


def full_worker(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    workers, used, free = e.config.rollout.workers, 0, e.free
    if e.hardware.kind == "cores" and e.hardware.devices is not None and free is not None:
        used = e.hardware.devices - free
    if e.measured.learner_wait <= WAITS or e.worker_cpu is None or e.worker_cpu <= WORKER_FULL:
        return None
    if used + workers + 1 > e.hardware.cores:
        return None
    return Suspicion(
        rule="full_worker",
        text="a worker's process computes all the time: it renders messages and follows episodes on one core",
        evidence=_measured(e, _idle_shares(e)[0], ("CPU of a worker", e.worker_cpu)),
        candidates=(Candidate(f"rollout.workers={workers + 1}"),),
        aim="none",
    )


# --- who waits for whom ------------------------------------------------------------------------------------------


def more_sequences(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    if e.measured.learner_wait <= WAITS or e.full < FULL or e.admitted <= e.places or (e.kv or 0.0) > CACHE_FULL:
        return None
    now = e.config.rollout.engine.max_concurrent
    overrides = [f"rollout.engine.max_concurrent={factor * now}" for factor in (2, 4)]
    return Suspicion(
        rule="more_sequences",
        text=f"the learner waits for servers that decode {now} sequences at once, and could decode more",
        evidence=_measured(e, _idle_shares(e)[0], ("sequences decoded, of those allowed", e.full)),
        candidates=tuple(Candidate(override, (override,)) for override in overrides),
    )


def more_replicas(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    if e.measured.learner_wait <= WAITS or e.full < FULL or e.free is None or e.free < e.replica_ranks:
        return None
    if e.config.rollout.engine.external:  # others start its servers, on devices that are not known here
        return None
    override = f"rollout.engine.replicas={e.replicas + 1}"
    return Suspicion(
        rule="more_replicas",
        text="the learner waits for servers that are full",
        evidence=_measured(e, _idle_shares(e)[0], ("sequences decoded, of those allowed", e.full)),
        candidates=(Candidate(override, (override,)),),
        cost="devices",
    )


def more_ranks(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    m = e.measured
    if m.learner_wait > WAITS or m.rollout_idle <= EMPTY or e.free is None or e.free < e.rank_copy:
        return None
    ranks = e.config.learner.backend.ranks
    overrides = [f"learner.backend.ranks={ranks + n}" for n in range(e.rank_copy, e.free + 1, e.rank_copy)][:3]
    return Suspicion(
        rule="more_ranks",
        text="slots stand empty while the learner is busy",
        evidence=_measured(e, *_idle_shares(e)),
        candidates=tuple(Candidate(override, (override,)) for override in overrides),
        cost="devices",
    )


def other_split(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    """The devices of replicas for the learner, or the reverse, where none is free."""
    m, ranks, unit = e.measured, e.config.learner.backend.ranks, max(e.replica_ranks, e.rank_copy)
    whole = unit % e.replica_ranks == 0 and unit % e.rank_copy == 0
    replicas = unit // e.replica_ranks
    if not whole or (e.free or 0) >= min(e.replica_ranks, e.rank_copy) or e.config.rollout.engine.external:
        return None
    if m.learner_wait <= WAITS and m.rollout_idle > EMPTY and e.replicas > replicas:
        split, text = (e.replicas - replicas, ranks + unit), "slots stand empty while the learner is busy"
    elif m.learner_wait > WAITS and e.full >= FULL and ranks > unit:
        split, text = (e.replicas + replicas, ranks - unit), "the learner waits for servers that are full"
    else:
        return None
    overrides = f"rollout.engine.replicas={split[0]}", f"learner.backend.ranks={split[1]}"
    return Suspicion(
        rule="other_split",
        text=f"{text}, and no device is free",
        evidence=_measured(e, *_idle_shares(e)),
        candidates=(Candidate(" ".join(overrides), overrides),),
    )


# --- what age buys -----------------------------------------------------------------------------------------------


def lower_bound(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    bound, m = e.config.buffer.max_staleness, e.measured
    if not bound or m.learner_wait >= BUSY or m.staleness < AT_BOUND * bound:
        return None
    tried = {bound - 1, bound // 2, *(() if guess.staleness is None else (guess.staleness, guess.staleness + 1))}
    return Suspicion(
        rule="lower_bound",
        text="the learner never waits, and its tokens are as old as they may be",
        evidence=_measured(e, ("staleness", m.staleness, "versions"), ("bound", bound, "versions"), *_idle_shares(e)),
        candidates=tuple(_bounds(sorted(one for one in tried if 0 <= one < bound))),
        aim="staleness",
    )


def higher_bound(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    bound, m = e.config.buffer.max_staleness, e.measured
    if m.learner_wait <= WAITS or m.rollout_idle <= EMPTY or guess.rollout_s <= bound * guess.learner_s:
        return None
    enough = max(bound + 1, guess.staleness or 0)
    return Suspicion(
        rule="higher_bound",
        text="each side waits for the other: a batch takes longer to play than the bound allows the learner to go on without it",
        evidence=_measured(
            e,
            *_idle_shares(e),
            ("playing a batch", guess.rollout_s, "s"),
            ("a step and its push", guess.learner_s, "s"),
        ),
        candidates=tuple(_bounds(sorted({bound + 1, (bound + enough + 1) // 2, enough}))),
        cost="age",
    )


def long_tail(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    first = first_members(e.config.buffer, greedy=plays_greedily(e.config.learner.algorithm))
    if e.measured.learner_wait <= WAITS or e.tail is None or e.tail <= TAIL or first is None:
        return None
    override = f"buffer.min_members={first}"
    return Suspicion(
        rule="long_tail",
        text=f"for {share(e.tail)} of its time a group waits for the last of its members",
        evidence=_measured(e, _idle_shares(e)[0], ("last members' share of a group's time", e.tail)),
        candidates=(Candidate(override, (override,)),),
        cost="age",
    )


def withheld(e: Evidence, plan: SimulationPlan, guess: ClosedForm) -> Suspicion | None:
    buffer, m = e.config.buffer, e.measured
    chosen = buffer.filter != "none" or buffer.min_members or plays_greedily(e.config.learner.algorithm)
    if m.withheld <= WITHHELD or chosen:
        return None  # they are left out on purpose
    smaller = f"buffer.groups_per_batch={max(1, buffer.groups_per_batch // 2)}"
    found = [*_bounds([buffer.max_staleness + 1]), Candidate(smaller, (smaller,))]
    return Suspicion(
        rule="withheld",
        text=f"{share(m.withheld)} of the tokens became older than the bound, and were not trained on",
        evidence=_measured(e, ("withheld", m.withheld), ("staleness", m.staleness, "versions")),
        candidates=tuple(found),
        cost="age",
    )


def _bounds(values: Sequence[int]) -> Iterator[Candidate]:
    for value in values:
        yield Candidate(f"buffer.max_staleness={value}", (f"buffer.max_staleness={value}",))


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


RULES: tuple[Rule, ...] = (
    low_ess, blind, alike, slow_environment, slow_push, full_cache, full_worker, more_sequences, more_replicas, more_ranks,
    other_split, lower_bound, higher_bound, long_tail, withheld,
)  # fmt: skip
