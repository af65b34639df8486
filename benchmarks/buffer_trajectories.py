"""The trajectories that benchmarks of the buffer send: turns of random tokens, all fields filled, as in a run.

Invariants:
- They are made once in each process; `stamped` gives one the ids of a lease and shares its arrays.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from ..buffer.encoded import EncodedTrajectory
from ..buffer.messages import Lease
from ..buffer.trajectory import FINISHED, Trajectory, Turn, VersionSpan
from ..rpc import wire

TURN, PROMPT = 512, 128
"""Tokens of a turn, and those of them that are not sampled. A shorter trajectory is one turn, a quarter of it prompt."""

KINDS = 16
"""Different trajectories that a producer sends by turns."""


def sampled(tokens: int) -> int:
    """How many of a trajectory's tokens the policy sampled."""
    return sum(turn.end - turn.start for turn in _turns(tokens))


def stamped(tokens: int, lease: Lease, member: int) -> Trajectory:
    """A trajectory for a member of a lease; arrays are shared."""
    made = _trajectories_at(tokens, lease.version)[(lease.group_id + member) % KINDS]
    episode = lease.episode(member)
    return msgspec.structs.replace(made, id=f"{episode}.0", group_id=lease.group_id, member=member)


def trajectory_bytes(tokens: int) -> int:
    """What a trajectory takes on the wire and in the file."""
    frames = wire.encode(EncodedTrajectory.of(stamped(tokens, Lease(0, 0, (0,), 0, 0), 0)))
    return sum(len(frame) for frame in frames)


@functools.lru_cache
def _turns(tokens: int) -> tuple[Turn, ...]:
    size, prompt = (TURN, PROMPT) if tokens >= TURN else (tokens, tokens // 4)
    took = 1.8e9 + 0.25, 0.01, 0.125, 2.5, prompt, "engine-0", 1.0  # all fields are filled, as in a run
    return tuple(Turn(at + prompt, at + size, "stop", *took) for at in range(0, tokens - size + 1, size))


@functools.lru_cache(maxsize=4)
def _trajectories_at(tokens: int, version: int) -> list[Trajectory]:
    spans = tuple(VersionSpan(turn.start, turn.end, version) for turn in _turns(tokens))
    return [msgspec.structs.replace(made, version_spans=spans) for made in _originals(tokens)]


@functools.lru_cache(maxsize=1)
def _originals(tokens: int) -> list[Trajectory]:
    """Random tokens of a vocabulary of 150,000."""
    mask = np.zeros(tokens, dtype=np.bool_)
    for turn in _turns(tokens):
        mask[turn.start : turn.end] = True
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            id="",
            group_id=0,
            member=0,
            branch=0,
            task_id="task",
            env="bench",
            token_ids=rng.integers(0, 150_000, tokens, dtype=np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -rng.exponential(size=tokens), 0).astype(np.float32),
            version_spans=(),
            turns=_turns(tokens),
            reward=float(rng.random()),
            turn_rewards=tuple(rng.random(len(_turns(tokens))).tolist()),
            outcome=FINISHED,
            timings={"environment": 1.0, "total": 2.0},
        )
        for _ in range(KINDS)
    ]
