"""The search space of `slipstream tune`: values of each knob, all combinations, and those that arithmetic leaves. Pure.

    knobs ──values──> grid ──closed form──> prune ──> points that are worth a simulation

Invariants:
- A point is what it changes against the config's own settings, key by key, as text. The config's own, `{}`, is always the first.
- Of a grid the `affordable` points want no more devices than there are, or than the config's own settings.
- Batches grow with `learner.algorithm.minibatches`, so that an optimizer step has as many episodes as the config gives it: a point
  changes how often weights are pushed, not the algorithm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ...errors import ConfigError
from ..closed_form import ClosedForm, estimate
from ..plan import SimulationPlan
from ..profile import SIMULATED, RunProfile, settings_of, text_of
from ..proposals import RANKS, REPLICAS, first_members, splits_of
from ..workload import sample_groups

BOUND = "buffer.max_staleness"
GROUPS = "buffer.groups_per_batch"
MINIBATCHES = "learner.algorithm.minibatches"
MEMBERS = "buffer.min_members"
CONCURRENT = "rollout.engine.max_concurrent"

HIGHEST = 16  # bound that a search proposes, unless the config has a higher one
MOST = 2000  # points of a grid
MARGIN = 0.25  # by which the closed form may be wrong, with room: it is within about a tenth
BEYOND = 2  # bounds above the one at which the learner never waits, by the closed form
SAMPLED = 50  # groups whose mean length the closed form's rate is of

Point = dict[str, str]  # key -> value


class SearchLimits(msgspec.Struct, frozen=True):
    """What a profile does not know of its run."""

    minibatches: int = 1  # `learner.algorithm.minibatches`
    devices: int | None = None  # that replicas and learner may have together; None where their number is not known


class EstimatedPoint(msgspec.Struct, frozen=True):
    """A point and what the closed form says of it."""

    point: Point
    bound: int
    tokens_per_s: float
    useless: bool = False  # its bound is beyond the one at which the learner never waits


def search_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`["buffer.max_staleness=0,1", "rollout.engine.max_concurrent"]` as key -> values, none where the search proposes them. Keys
    without values may share a text, with commas between. Raises ConfigError."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if equals:
            found[key.strip()] = tuple(dict.fromkeys(value.strip() for value in values.split(",")))
            if not all(found[key.strip()]):
                raise ConfigError(f"--over {text}: a value is missing; for example --over {BOUND}=0,1,2")
            continue
        found |= {one.strip(): () for one in text.split(",")}
    for key, values in found.items():
        if key not in SIMULATED:
            raise ConfigError(f"--over {key}: no simulation knows this key; allowed are {', '.join(SIMULATED)}")
        if not values and key not in PROPOSED:
            raise ConfigError(f"--over {key}: name its values, as in --over {key}=a,b; proposed are those of {_ALL}")
    return found


def grid_of(
    profile: RunProfile, guess: ClosedForm, limits: SearchLimits, over: Mapping[str, Sequence[str]] | None = None
) -> list[Point]:
    """Every combination of the knobs in `over`, or of all. `guess` is the closed form of the profile. Raises ConfigError for more
    than `MOST`."""
    profile = msgspec.structs.replace(profile, settings=settings_of(profile.config()))  # every key
    keys = dict.fromkeys(PROPOSED[key] for key in over or PROPOSED if not (over or {}).get(key))
    dimensions = [propose(profile, guess, limits) for propose in keys]
    dimensions += [[{key: value} for value in values] for key, values in (over or {}).items() if values]
    total = 1
    for dimension in dimensions:
        total *= len(dimension)
    if total > MOST:
        raise ConfigError(f"{total} combinations of settings; allowed are {MOST}: name fewer values by --over")
    own = {key: text_of(value) for key, value in profile.settings.items()} | {MINIBATCHES: str(limits.minibatches)}
    points: dict[frozenset[tuple[str, str]], Point] = {frozenset(): {}}
    for parts in itertools.product(*dimensions):
        merged = {key: value for part in parts for key, value in part.items()}
        point = {key: value for key, value in merged.items() if own.get(key) != value}
        points.setdefault(frozenset(point.items()), point)
    return list(points.values())


def affordable(profile: RunProfile, points: Sequence[Point], limits: SearchLimits) -> list[Point]:
    """Those that want no more devices than there are, or than the config's own settings. Values that are no numbers are for the
    config to refuse."""
    if limits.devices is None:
        return list(points)
    own = {key: text_of(profile.settings.get(key, 1)) for key in (REPLICAS, RANKS)}

    def wanted(point: Mapping[str, str]) -> int:
        replicas, ranks = ({**own, **point}[key] for key in (REPLICAS, RANKS))
        numbers = replicas.isdecimal() and ranks.isdecimal()
        return int(replicas) * profile.engine.ranks + int(ranks) if numbers else 0

    most = max(limits.devices, wanted({}))
    return [point for point in points if wanted(point) <= most]


def simulated(point: Mapping[str, str]) -> tuple[str, ...]:
    """The overrides of a point that a simulation reads."""
    return tuple(f"{key}={value}" for key, value in point.items() if key in SIMULATED)


def labels_of(point: Mapping[str, str]) -> list[str]:
    """`max_staleness=1`, as the last parts of the keys differ; of the point without changes `config's settings`."""
    return [f"{key.rpartition('.')[2]}={value}" for key, value in point.items()] or ["config's settings"]


def label_of(point: Mapping[str, str]) -> str:
    """The `labels_of` a point in one line."""
    return " ".join(labels_of(point))


def estimate_point(profile: RunProfile, point: Point) -> EstimatedPoint:
    """The closed form of a point. Raises ConfigError where its keys do not fit together."""
    plan = SimulationPlan.of(profile, simulated(point))
    members, guess = plan.replay.group_size, estimate(plan)
    groups = list(sample_groups(plan.environments, SAMPLED, members))
    each = sum(episode.sampled for group in groups for episode in group) / len(groups)
    bound = plan.admission.max_staleness
    useless = guess.staleness is not None and bound > guess.staleness + BEYOND
    return EstimatedPoint(point, bound, plan.admission.groups_per_batch * each / guess.cycle_s, useless)


def prune(estimated: Sequence[EstimatedPoint], most: int) -> list[Point]:
    """At most `most` points that may be worth a simulation, the config's own first: those that no point of the same or a lower
    bound beats by more than the closed form may be wrong, the fastest of each bound in turn."""
    own = estimated[0]
    best: dict[int, float] = {}
    for one in estimated:
        best[one.bound] = max(one.tokens_per_s, best.get(one.bound, 0.0))
    kept = [one for one in estimated[1:] if not one.useless and _may_win(one, best)]
    rows = [
        sorted((one for one in kept if one.bound == bound), key=lambda one: -one.tokens_per_s) for bound in sorted(best)
    ]
    in_turn = [one for rank in itertools.zip_longest(*rows) for one in rank if one is not None]
    return [own.point, *(one.point for one in in_turn[: max(0, most - 1)])]


def _may_win(one: EstimatedPoint, best: Mapping[int, float]) -> bool:
    fastest = max(tokens for bound, tokens in best.items() if bound <= one.bound)
    return one.tokens_per_s * (1 + MARGIN) >= fastest


# --- the values of each knob ---------------------------------------------------------------------------------------


def _number(profile: RunProfile, key: str) -> int:
    return int(profile.settings[key])


def _bounds(profile: RunProfile, guess: ClosedForm, limits: SearchLimits) -> list[Point]:
    own = _number(profile, BOUND)
    tried = {0, 1, 2, 4, 8, own - 1, own, own + 1}
    if guess.staleness is not None:
        tried |= {guess.staleness, guess.staleness + 1}
    return [{BOUND: str(bound)} for bound in sorted(tried) if 0 <= bound <= max(HIGHEST, own)]


def _batches(profile: RunProfile, guess: ClosedForm, limits: SearchLimits) -> list[Point]:
    """A half, a quarter and twice the groups, with as many groups in an optimizer step as now."""
    groups, steps = _number(profile, GROUPS), limits.minibatches
    if groups % steps:
        return [{GROUPS: str(groups), MINIBATCHES: str(steps)}]
    counts = {count for count in (steps // 4, steps // 2, steps, 2 * steps) if count and (2 * steps) % count == 0}
    return [{GROUPS: str(groups // steps * count), MINIBATCHES: str(count)} for count in sorted(counts)]


def _placements(profile: RunProfile, guess: ClosedForm, limits: SearchLimits) -> list[Point]:
    own = {REPLICAS: text_of(profile.settings[REPLICAS]), RANKS: text_of(profile.settings[RANKS])}
    return [own, *splits_of(profile, limits.devices or 0)]


def _sequences(profile: RunProfile, guess: ClosedForm, limits: SearchLimits) -> list[Point]:
    own = _number(profile, CONCURRENT)
    return [{CONCURRENT: str(number)} for number in (own // 2, own, 2 * own, 4 * own) if number]


def _members(profile: RunProfile, guess: ClosedForm, limits: SearchLimits) -> list[Point]:
    """All members, or those that come first."""
    buffer = profile.config().buffer
    first = first_members(buffer, greedy=profile.greedy)
    return [{MEMBERS: str(number)} for number in (buffer.min_members, first) if number is not None]


PROPOSED: dict[str, Callable[[RunProfile, ClosedForm, SearchLimits], list[Point]]] = {
    BOUND: _bounds,
    GROUPS: _batches,
    REPLICAS: _placements,
    RANKS: _placements,
    CONCURRENT: _sequences,
    MEMBERS: _members,
}
"""The keys of which a search knows values to try. Replicas and ranks are one knob: devices go to one or to the other."""
_ALL = ", ".join(PROPOSED)
