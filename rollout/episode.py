"""One episode from task to trajectories: the agent plays, this module watches and says how it ended.

Invariants:
- A failure is never a reward: what raises becomes `failed(reason)`, and the reason names whose fault it was.
- The environment is closed exactly once, also after a failure or a cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import msgspec

from ..agents.base import Agent, ContextExhausted
from ..agents.session import Session
from ..buffer.trajectory import FINISHED, TRUNCATED, Outcome, Trajectory
from ..envs.base import Environment, Message, Observation, StepResult, Task, TaskSource
from ..errors import DeadlineExceeded, EngineError, EnvError, PolicyError, ToolError

log = logging.getLogger(__name__)


class EpisodeResult(msgspec.Struct, frozen=True):
    """How an episode ended and what it left; no trajectories when it failed.

    `reward` is the sum of the environment's rewards; meaningless when the outcome is a failure.
    """

    outcome: Outcome
    reward: float
    generated: int
    trajectories: tuple[Trajectory, ...]


@dataclass
class Watched:
    """An environment that keeps the account of its episode and turns what it raises into EnvError."""

    inner: Environment
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    done: bool = False
    truncated: bool = False

    async def reset(self, task: Task) -> Observation:
        started = time.perf_counter()
        try:
            return await self.inner.reset(task)
        except ToolError:
            raise
        except Exception as error:
            raise EnvError(f"reset of task {task.id!r} raised {type(error).__name__}: {error}") from error
        finally:
            self.seconds += time.perf_counter() - started

    async def step(self, message: Message) -> StepResult:
        started = time.perf_counter()
        try:
            result = await self.inner.step(message)
        except ToolError:
            raise
        except Exception as error:
            raise EnvError(f"step raised {type(error).__name__}: {error}") from error
        finally:
            self.seconds += time.perf_counter() - started
        self.rewards.append(float(result.reward))
        self.metrics |= result.metrics
        self.done, self.truncated = result.done, result.truncated
        return result

    async def close(self) -> None:
        await self.inner.close()


async def play(
    agent: Agent,
    source: TaskSource,
    task: Task,
    session: Session,
    *,
    group_id: int,
    attempt: int,
    member: int,
    episode_s: float,
) -> EpisodeResult:
    """Play one episode of at most `episode_s` seconds."""
    env = Watched(source.make())
    started = time.perf_counter()
    try:
        outcome = await _outcome(agent, env, session, task, episode_s)
    finally:
        await env.close()
    total = time.perf_counter() - started
    reward = sum(env.rewards)
    generated = sum(sum(branch.loss_mask) for branch in session.branches)
    if not outcome.trainable:
        return EpisodeResult(outcome, reward, generated, ())
    trajectories = session.trajectories(
        group_id=group_id,
        attempt=attempt,
        member=member,
        task_id=task.id,
        env=source.name,
        reward=reward,
        turn_rewards=env.rewards,
        outcome=outcome,
        timings={"total": total, "environment": env.seconds},
        metrics=env.metrics,
    )
    return EpisodeResult(outcome, reward, generated, trajectories)


async def _outcome(agent: Agent, env: Watched, session: Session, task: Task, episode_s: float) -> Outcome:
    deadline = asyncio.timeout(episode_s)
    try:
        async with deadline:
            await agent(env, session, task)
    except ContextExhausted:
        return TRUNCATED
    except TimeoutError as error:
        if deadline.expired():
            return Outcome("failed", "timeout", f"the episode took longer than {episode_s:g} s")
        return Outcome("failed", "environment", f"TimeoutError: {error}")
    except DeadlineExceeded as error:
        return Outcome("failed", "timeout", str(error))
    except ToolError as error:
        return Outcome("failed", "tool", str(error))
    except EnvError as error:
        return Outcome("failed", "environment", str(error))
    except EngineError as error:
        return Outcome("failed", "engine", str(error))
    except PolicyError as error:
        return Outcome("failed", "policy", str(error))
    except Exception as error:  # an agent is the user's code: its faults end an episode, not a worker
        log.exception("the agent raised on task %s", task.id)
        return Outcome("failed", "policy", f"{type(error).__name__}: {error}")
    return FINISHED if env.done and not env.truncated else TRUNCATED
