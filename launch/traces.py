"""Expert traces (`env.traces`) before a run: each is played as an episode whose answer is given, so that its tokens are those that
the policy would have sampled, and its reward is the environment's own.

    env.traces ──matched with tasks──> reset, the given answer, step ──> run.dir/traces.msgpack ──> the learner's ranks

Invariants:
- A trace is graded once in the life of a run: what the file holds stays, also when the run is resumed.
- A trace that cannot be rendered or graded refuses the start, by its place. None has a reward that the environment did not give.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..configs.environments import parts_by_key
from ..errors import ConfigError, EnvError, PolicyError, ToolError, describe, first_cause
from .run_inputs import RunInputs

if TYPE_CHECKING:
    from ..agents import Completion, Generate
    from ..buffer.trajectory import Trajectory
    from ..envs import EnvPart, Observation
    from ..envs.dataset.traces import TaskTrace, Trace
    from ..rollout.env_guard import TaskMemo

log = logging.getLogger(__name__)

CONCURRENT = 64  # traces that are graded at a time


def check_traces(inputs: RunInputs) -> str:
    """Every expert trace answers a task. Raises ConfigError naming the place of the first that does not."""
    parts = zip(inputs.train, inputs.traces, strict=True)
    counts = {part.name: (len(found), len({one.index for one in found})) for part, found in parts if found}
    return "; ".join(f"{name}: {traces} of {tasks} tasks" for name, (traces, tasks) in counts.items()) or "none"


def grade_traces(inputs: RunInputs) -> list[Trajectory]:
    """The traces of `inputs` as trajectories of no group and no version, with the rewards of their environments; those of more than
    `agent.max_tokens` tokens are left out. Raises ConfigError naming the place of one that cannot be rendered or graded, and where
    none is left."""
    from ..envs.sandbox import closing_pools

    wanted, most = sum(map(len, inputs.traces)), inputs.config.agent.max_tokens
    if not wanted:
        return []
    try:
        graded = asyncio.run(closing_pools(_grade_all(inputs)))
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    if not graded:
        key = next(key for key, found in zip(parts_by_key(inputs.config.env), inputs.traces, strict=True) if found)
        raise ConfigError(f"{key}.traces: each has more tokens than agent.max_tokens={most}; raise that")
    earned = sum(one.reward for one in graded) / len(graded)
    log.info("%d expert traces earn %.3f on average, %d are too long", len(graded), earned, wanted - len(graded))
    return graded


async def _grade_all(inputs: RunInputs) -> list[Trajectory]:
    grader = _Grader(inputs)
    graded: list[Trajectory | None] = [None] * sum(map(len, inputs.traces))
    queue = enumerate(_by_environment(inputs))

    async def grade_on() -> None:
        for number, (key, part, tasks, one) in queue:
            try:
                graded[number] = await grader.grade(part, one, tasks)
            except (EnvError, PolicyError, ToolError) as error:
                raise ConfigError(f"{key}.traces: {one.trace.place}: {error}") from error

    async with asyncio.TaskGroup() as group:
        for slot in range(min(CONCURRENT, len(graded))):
            group.create_task(grade_on(), name=f"grading {slot}")
    return [one for one in graded if one is not None]


def _by_environment(inputs: RunInputs) -> Iterator[tuple[str, EnvPart, TaskMemo, TaskTrace]]:
    """Traces; those of a part share its newest task: another part has another one of this number."""
    from ..rollout.env_guard import TaskMemo

    for key, part, found in zip(parts_by_key(inputs.config.env), inputs.train, inputs.traces, strict=True):
        tasks = TaskMemo()
        yield from ((key, part, tasks, one) for one in found)


class _Grader:
    """Plays traces as a worker plays episodes."""

    def __init__(self, inputs: RunInputs) -> None:
        from ..learner.model import vocabulary_size
        from ..rollout.env_guard import EpisodeLimits

        rollout = inputs.config.rollout
        self._limits = EpisodeLimits(rollout.episode_s, rollout.step_s, rollout.tool_s)
        self._renderer, self._most = inputs.renderer(), inputs.config.agent.max_tokens
        self._vocabulary = vocabulary_size(inputs.config.model.path)

    async def grade(self, part: EnvPart, one: TaskTrace, tasks: TaskMemo) -> Trajectory | None:
        """The trace as a trajectory; None where it is too long. Raises EnvError, ToolError or PolicyError."""
        from ..agents import Session
        from ..buffer.trajectory import FINISHED
        from ..rollout.env_guard import EnvGuard

        env = EnvGuard(part, self._limits, tasks)
        try:
            with env.calls:
                task = await env.open(one.index)
                opening = await env.reset(task)
                token_ids, start = self._rendered(opening, one.trace)
                if len(token_ids) > self._most:
                    return None
                session = Session(
                    self._renderer,
                    _scripted_generate(token_ids[start:]),
                    vocabulary=self._vocabulary,
                    max_tokens_per_turn=self._most,
                    max_tokens=self._most,
                )
                await env.step(await session.chat(opening.messages, opening.tools))
        finally:
            await env.close()
        (trajectory,) = session.trajectories(
            group_id=0,
            attempt=0,
            member=0,
            task_id=task.id,
            env=part.name,
            reward=sum(env.rewards),
            turn_rewards=env.rewards,
            outcome=FINISHED,
            timings={},
            metrics=env.metrics,
        )
        return trajectory

    def _rendered(self, opening: Observation, trace: Trace) -> tuple[tuple[int, ...], int]:
        """The tokens of the conversation, and where the answer begins. Raises PolicyError."""
        from ..agents import render_demonstration
        from ..envs import Message

        try:
            rendered = render_demonstration(self._renderer, opening, [Message("assistant", trace.text)])
            return rendered.token_ids, rendered.loss_mask.index(True)
        except Exception as error:  # each chat format has its own errors
            raise PolicyError(f"the chat format cannot render it: {describe(error)}") from error


def _scripted_generate(answer: tuple[int, ...]) -> Generate:
    """Samples `answer`, whatever the prompt is: by no version of the policy, with log-probs of 0: an expert's are not known."""
    from ..agents import Completion
    from ..buffer.trajectory import VersionSpan
    from ..learner.batch import NO_VERSION

    async def generate(prompt: Sequence[int], room: int) -> Completion:
        spans = (VersionSpan(0, len(answer), NO_VERSION),)
        return Completion(answer, (0.0,) * len(answer), spans, "stop")

    return generate
