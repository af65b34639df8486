"""The decode curve of a run that did not record its completions: a guess.

Episodes say how long a token took, and with the rate of all tokens how many sequences were running (Little's law). That is one
point; the line through it is a guess, whose scale is then fitted so that simulated episodes take as long as the real ones.
`EngineProfile.source` says so: the guess does not carry far from its point.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..buffer.trajectory import BatchRow
from .engine import DecodeCurve
from .figures import RunFigures
from .plan import SimulationPlan
from .profile import EngineProfile, RunProfile
from .run import simulate
from .workload import Observed

# Running sequences at which a decode step takes twice as long as with a single one. vLLM on a CPU with a model of a million
# parameters has 22; 7B on an H20 has about 90, where a fleet is rarely beyond it.
DOUBLED_AT = 32.0
FITS, FITTED = 8, 0.01  # most simulations of a fit; the relative error of an episode's time at which it ends
FIT_STEPS = 40  # of each


def guess_engine(
    groups: Sequence[Sequence[Sequence[BatchRow]]], measured: RunFigures, replicas: int, max_concurrent: int, ranks: int
) -> EngineProfile:
    """One point, and the line through it; `scaled_to_episodes` comes next."""
    episodes = [episode for group in groups for episode in group]
    decoded_s = sum(_decoded_s(episode) for episode in episodes)
    tokens = sum(branch.sampled for episode in episodes for branch in episode)
    token_s = max(1e-6, decoded_s / tokens)
    running = min(float(max_concurrent), measured.generated_tokens_per_s * token_s / replicas)
    alone_s = token_s * DOUBLED_AT / (DOUBLED_AT + running)
    curve = DecodeCurve(((0.0, alone_s), (max(1.0, running), token_s)))
    return EngineProfile(curve, 0.0, ranks, "fitted", running)


def _decoded_s(episode: Sequence[BatchRow]) -> float:
    """Seconds of an episode that were not its environment's or its reward model's."""
    timings = episode[0].timings
    return max(0.0, timings.get("total", 0.0) - timings.get("environment", 0.0) - timings.get("reward", 0.0))


def scaled_to_episodes(profile: RunProfile) -> RunProfile:
    """`profile` with its decode curve scaled until simulated episodes take as long as the measured ones."""
    measured = profile.measured
    if measured is None or not measured.episode_s:
        return profile
    shapes = [e for one in profile.environments if isinstance(one, Observed) for group in one.groups for e in group]
    waited_s = sum(shape.environment_s for shape in shapes) / len(shapes)
    for _ in range(FITS):
        plan = SimulationPlan.of(profile)
        simulated = simulate(plan, min(plan.default_steps, plan.settling + FIT_STEPS)).figures
        if not simulated.episode_s or min(simulated.episode_s, measured.episode_s) <= waited_s:
            break
        factor = (measured.episode_s - waited_s) / (simulated.episode_s - waited_s)
        engine = msgspec.structs.replace(profile.engine, decode=profile.engine.decode.scaled(factor))
        profile = msgspec.structs.replace(profile, engine=engine)
        if abs(factor - 1) < FITTED:
            break
    return profile
