"""One episode from task to trajectories: the agent plays, this module watches and says how it ended.

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
- The environment is closed exactly once, also after a failure or a cancellation.
- No exception of the user's code ends more than its episode, also none that Python does not count among the Exceptions: only who
  cancels the task of `play` itself sees a cancellation.
- User code that does not heed its cancellation is left behind, not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import TypeVar

import msgspec

from ..agents.base import Agent, ContextExhausted
from ..agents.session import Session
from ..buffer.trajectory import FINISHED, NAME_LIMIT, TRUNCATED, Outcome, Trajectory
from ..envs import Part
from ..envs.base import JSON, Environment, Message, Observation, StepResult, Task
from ..envs.calls import Calls, counting, in_thread
from ..envs.tools import cancelled, line
from ..errors import DeadlineExceeded, EngineError, EnvError, PolicyError, ToolError, within
from .blocking import calls_user_code
from .reward import Played, RewardModel

log = logging.getLogger(__name__)

T = TypeVar("T")

REWARD_LIMIT = 1e30
"""Of one step, either way: sums of rewards, their squares and float32 advantages stay finite. What is larger means nothing."""

CLOSE_S = 30.0
"""How long an environment may take to release what it holds; its episode keeps its slot meanwhile."""

HEED_S = 5.0
"""How long user code may take to end once it is cancelled."""


class Limits(msgspec.Struct, frozen=True):
    """Seconds that an episode, a call of its environment and a call of a tool may take."""

    episode_s: float
    step_s: float
    tool_s: float


class EpisodeResult(msgspec.Struct, frozen=True):
    """How an episode ended and what it left; no trajectories when it failed and is not to be trained on.

    `reward` is the sum of its rewards, the environment's or a reward model's; of a failure its penalty, or 0 and meaningless.
    """

    outcome: Outcome
    reward: float
    trajectories: tuple[Trajectory, ...]


class Escaped(Exception):
    """What user code raised that is no Exception, for example SystemExit or a CancelledError of its own; names it."""


class Watched:
    """The environment of one episode: keeps its account, and turns what it raises or returns against its contract, and what takes
    too long, into EnvError or ToolError, so that it can end an episode and never a worker."""

    def __init__(self, part: Part, limits: Limits, one_at_a_time: asyncio.Lock) -> None:
        self._part = part
        self._limits = limits
        self._one_at_a_time = one_at_a_time
        self._inner: Environment | None = None
        self._over = False
        self.calls = Calls(limits.tool_s)
        self.task_id = ""
        self.payload: JSON = {}
        self.opening: tuple[Message, ...] = ()
        self.said: list[Message] = []
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        self.done = False
        self.truncated = False

    @calls_user_code
    async def open(self, index: int) -> Task:
        """Make the environment and the task."""
        async with self._one_at_a_time:
            with self._blamed(f"task {index}"):
                self._inner = self._part.source.make()
                task = await self._in_time(in_thread(self._part.source.task, index), f"task {index}")
                if not isinstance(task.id, str) or len(task.id) > NAME_LIMIT:
                    raise EnvError(f"its id must be text of at most {NAME_LIMIT} characters, not {task.id!r:.100}")
                self.task_id = task.id
                self.payload = task.payload
        return task

    @calls_user_code
    async def reset(self, task: Task) -> Observation:
        with self._blamed(f"reset of task {task.id!r}"):
            observation = await self._in_time(self._opened.reset(task), "the reset")
            self.opening = tuple(observation.messages)
        return observation

    @calls_user_code
    async def step(self, message: Message) -> StepResult:
        with self._blamed("step"):
            result = await self._in_time(self._opened.step(message), "a step")
            reward = float(result.reward)
            if not abs(reward) <= REWARD_LIMIT:
                raise EnvError(f"a reward of {reward}; allowed are numbers up to {REWARD_LIMIT:g}")
            self.rewards.append(reward)
            self.said += (message, *result.messages)
            self.metrics |= {name: float(value) for name, value in result.metrics.items()}
            self.done, self.truncated = result.done, result.truncated
        return result

    async def close(self) -> None:
        """Whatever the episode was worth, it has been earned: a failure to clean up is told and changes nothing."""
        self._over = True
        try:
            if self._inner is not None:
                await within(
                    CLOSE_S,
                    _apart(self._inner.close),
                    who=f"task {self.task_id}",
                    waits_for="its environment to close",
                    hint="what the environment holds may leak",
                )
        except Exception:
            log.exception("%s: close raised on task %s", self._part.name, self.task_id)

    @property
    def _opened(self) -> Environment:
        if self._inner is None or self._over:
            raise EnvError("its episode is over")
        return self._inner

    @calls_user_code
    async def _in_time(self, work: Awaitable[T], what: str) -> T:
        """Await a call of the environment; a tool that it waits for meanwhile is to blame for what takes too long."""
        self.calls.tool = ""
        hint = "look at the environment, or raise rollout.step_s"
        try:
            return await within(self._limits.step_s, work, who="an episode", waits_for=what, hint=hint)
        except DeadlineExceeded as error:
            if self.calls.tool:
                raise ToolError(f"{error}; it was calling the tool {self.calls.tool!r}") from error
            raise

    @contextlib.contextmanager
    def _blamed(self, doing: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ToolError:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and cancelled():
                raise
            raise EnvError(f"{self._part.name}: {doing}: {line(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started


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
            await _apart(whole)
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


async def _apart(work: Callable[[], Awaitable[T]]) -> T:
    """Await user code in a task of its own: it may cancel that one, and nothing it raises passes for a cancellation of ours. When
    we are cancelled it is, too; if it goes on nevertheless it is left behind.

    Raises:
        Escaped: it raised something that is no Exception.
    """

    @calls_user_code
    async def contained() -> T:
        try:
            return await work()
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # with some of these asyncio would end the event loop
            raise Escaped(line(error)) from error

    task = asyncio.create_task(contained())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        task.add_done_callback(_look)
        _, deaf = await asyncio.wait({task}, timeout=HEED_S)
        if deaf:
            log.error("user code goes on although it was cancelled, and is left behind: %s", task)
        raise
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise Escaped(line(error)) from error


def _look(task: asyncio.Task[T]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
