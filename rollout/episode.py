"""One episode from task to trajectories: the agent plays, and this module says how it ended.

    what takes too long                    failed by      after
    task, reset, step                      environment    rollout.step_s
    a tool, called by `call_tool`          tool           rollout.tool_s, or with its step
    a completion                           engine         rollout.request_s
    the score of a reward model            reward         reward.request_s
    all of it                              timeout        rollout.episode_s
    anything, without an await             whose it is    blocking.BLOCK_S

Invariants:
- A failure is never a reward: what raises becomes `failed(reason)`, and the reason names whose fault it was. Where it is trained
  on, its reward is the penalty that the environment declared, and nothing of what was earned before.
- The environment is watched (`watched`): it is closed exactly once, and nothing it raises ends more than its episode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import msgspec

from ..agents.base import Agent, ContextExhausted
from ..agents.session import Session
from ..buffer.trajectory import FINISHED, TRUNCATED, Outcome, Trajectory
from ..envs import Part
from ..envs.calls import counting
from ..envs.tools import line
from ..errors import DeadlineExceeded, EngineError, EnvError, PolicyError, ToolError
from .blocking import calls_user_code
from .reward import Played, RewardModel
from .watched import REWARD_LIMIT, Escaped, Limits, Watched, apart

log = logging.getLogger(__name__)


class EpisodeResult(msgspec.Struct, frozen=True):
    """How an episode ended and what it left; no trajectories when it failed and is not to be trained on.

    `reward` is the sum of its rewards, the environment's or a reward model's; of a failure its penalty, or 0 and meaningless.
    """

    outcome: Outcome
    reward: float
    trajectories: tuple[Trajectory, ...]


async def play(
    agent: Agent,
    part: Part,
    index: int,
    session: Session,
    *,
    group_id: int,
    attempt: int,
    member: int,
    limits: Limits,
    one_at_a_time: asyncio.Lock,
    trained_failures: Collection[str] = (),
    model: RewardModel | None = None,
) -> EpisodeResult:
    """Play task `index` of `part`; `group_id`, `attempt` and `member` name the episode.

    Args:
        one_at_a_time: held while the source makes a task.
        trained_failures: reasons for which a failed episode is trained on with the penalty of `part`, if it declares one.
        model: scores what was played; without one the rewards are the environment's.
    """
    env = Watched(part, limits, one_at_a_time)
    started = time.perf_counter()
    with counting(env.calls):
        try:
            outcome = await _outcome(agent, env, session, index, limits.episode_s)
        finally:
            await env.close()
    timings = {"total": time.perf_counter() - started, "environment": env.seconds}
    turn_rewards, metrics = tuple(env.rewards), env.metrics
    if model is not None and outcome.trainable and session.branches:
        began = time.perf_counter()
        try:
            turn_rewards, score = await _scored(model, env, session)
            metrics = metrics | {"reward_environment": sum(env.rewards), "reward_model": score}
        except (EngineError, DeadlineExceeded) as error:
            outcome = Outcome("failed", "reward", str(error))
        except Exception as error:  # messages and payload are the user's: no text to show where they are none
            outcome = Outcome("failed", "reward", line(error))
        timings |= {"total": time.perf_counter() - started, "reward": time.perf_counter() - began}
    reward = sum(turn_rewards)
    if not outcome.trainable:
        if part.penalty is None or outcome.reason not in trained_failures:
            return EpisodeResult(outcome, 0.0, ())
        reward, turn_rewards, metrics = part.penalty, (), {}
    trajectories = session.trajectories(
        group_id=group_id,
        attempt=attempt,
        member=member,
        task_id=env.task_id,
        env=part.name,
        reward=reward,
        turn_rewards=turn_rewards,
        outcome=outcome,
        timings=timings,
        metrics=metrics,
    )
    return EpisodeResult(outcome, reward, trajectories)


async def _scored(model: RewardModel, env: Watched, session: Session) -> tuple[tuple[float, ...], float]:
    """The rewards by step, and the score of `model`. Raises EngineError or DeadlineExceeded where there is none."""
    reference = env.payload.get("reference", "")
    text = reference if isinstance(reference, str) else msgspec.json.encode(reference).decode()
    played = Played(session.branches[-1].token_ids, env.opening, tuple(env.said), text)
    rewards, score = await model.rewards(env.rewards, played)
    if not all(abs(reward) <= REWARD_LIMIT for reward in rewards):
        raise EngineError(f"a score of {score} makes rewards of {rewards}; allowed are numbers up to {REWARD_LIMIT:g}")
    return rewards, score


async def _outcome(agent: Agent, env: Watched, session: Session, index: int, episode_s: float) -> Outcome:
    @calls_user_code
    async def whole() -> float:
        return await agent(env, session, await env.open(index))

    deadline = asyncio.timeout(episode_s)
    try:
        async with deadline:
            await apart(whole)
    except ContextExhausted:
        return TRUNCATED
    except TimeoutError as error:
        if deadline.expired():
            return Outcome("failed", "timeout", f"the episode took longer than rollout.episode_s={episode_s:g} s")
        return Outcome("failed", "policy", line(error))
    except ToolError as error:
        return Outcome("failed", "tool", str(error))
    except EnvError as error:
        return Outcome("failed", "environment", str(error))
    except (EngineError, DeadlineExceeded) as error:  # of the router: the environment's own are EnvErrors by now
        return Outcome("failed", "engine", str(error))
    except PolicyError as error:
        return Outcome("failed", "policy", str(error))
    except Exception as error:  # an agent is the user's code: its faults end an episode, not a worker
        log.exception("the agent raised on task %s", env.task_id)
        return Outcome("failed", "policy", str(error) if isinstance(error, Escaped) else line(error))
    return FINISHED if env.done and not env.truncated else TRUNCATED
