"""Delivered trajectories as small as they get, and the shortest of environments."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, BatchRow, Trajectory, Turn, VersionSpan
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

SAMPLED = 3


def trajectory(episode_id: str, branch: int = 0, sampled: int = SAMPLED, version: int = 0) -> Trajectory:
    group, _, member = map(int, episode_id.split("."))
    return Trajectory(
        id=f"{episode_id}.{branch}",
        group_id=group,
        member=member,
        branch=branch,
        task_id=f"task {group}",
        env="env",
        token_ids=np.arange(sampled + 1, dtype=np.int32),
        loss_mask=np.array([False] + [True] * sampled),
        behavior_logprobs=np.array([0.0] + [-1.5] * sampled, dtype=np.float32),
        version_spans=(VersionSpan(1, 1 + sampled, version),),
        turns=(Turn(1, 1 + sampled, "stop"),),
        reward=float(member),
        turn_rewards=(float(member),),
        outcome=FINISHED,
    )


def trajectory_of(episode_id: str, kept: Mapping[int, int]) -> Trajectory:
    """One branch with so many sampled tokens of each version."""
    spans, at = [], 1
    for version, tokens in sorted(kept.items()):
        spans.append(VersionSpan(at, at + tokens, version))
        at += tokens
    return msgspec.structs.replace(trajectory(episode_id, sampled=at - 1), version_spans=tuple(spans))


def row_of(one: Trajectory) -> BatchRow:
    """As a learner takes it: without its arrays."""
    return EncodedTrajectory.of(one).row.decode()


class Once(SimpleEnv):
    """One question, one answer."""

    def task(self, index: int) -> Task:
        return Task(f"once-{index}")

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "Well?"),))

    async def step(self, message: Message) -> StepResult:
        return StepResult((), 1.0, done=True)
