"""One episode from lease to trajectories: runs the agent against its environment and decides how the episode ended.
`docs/environments.md` lists the limits, and the outcome of what exceeds one.

Invariants:
- A failure is never a reward: an exception becomes `failed(reason)`, and the reason names the component at fault. Where failures
  are trained on, the reward is the penalty that the environment declares; rewards earned before the failure do not count.
- The environment runs inside `EnvGuard`: it is closed exactly once, and no exception of it ends more than its episode.
- Completions run in the agent's own task: cancelling the agent cancels them. When an episode ends, every completion that its agent
  left running is cancelled, and later requests are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..agents.base import Agent, Completion, ContextExhausted, Generate
from ..agents.session import Session
from ..buffer.messages import Lease
from ..buffer.trajectory import DETAIL_LIMIT, FINISHED, TRUNCATED, Outcome, Trajectory
from ..common.images import PromptImage
from ..common.spans import Id, RecordSpan, Span, Stopwatch, no_record
from ..common.unawaited import without_await
from ..configs.schema import Config
from ..envs import EnvPart, require_penalties
from ..envs.base import REWARD_LIMIT
from ..errors import (
    AgentTimeout,
    DeadlineExceeded,
    EngineError,
    EnvError,
    PolicyError,
    ToolError,
    describe_user_error,
    encodable,
    user_line,
)
from .engines.base import SamplingParams
from .env_guard import EnvGuard, EpisodeLimits, EscapedException, TaskMemo, run_isolated
from .loop_watchdog import calls_user_code
from .reward_model import RewardModel, ScoredConversation
from .router import Router

OnTokens = Callable[[Completion], None]  # called with every completion that arrived, whole or partial


class EpisodeResult(msgspec.Struct, frozen=True):
    """How an episode ended, and its trajectories; none when it failed and is not trained on: then `failed_branches` are what it
    sampled. `reward` is the sum of the rewards by step, the environment's or a reward model's; of a failure its penalty, or 0 and
    meaningless. `image_files` are those of the images in them, by digest."""

    outcome: Outcome
    reward: float
    trajectories: tuple[Trajectory, ...]
    error: BaseException | None = None  # by which it failed, where code raised one
    failed_branches: tuple[Trajectory, ...] = ()
    image_files: Mapping[str, bytes] = {}


class EpisodePlayer:
    """Plays episodes, for the worker and the evaluation: by `agent`, and by `self_player`, where it is given, those of environments
    that play themselves. `Lease.env` is an index into `parts`; `concurrency` is how many episodes the initial replicas decode at
    once; `limits` are those of `config` unless given; with `record_experts` the trajectories have the experts that the engines'
    routers chose. Raises ConfigError: failures are to be trained on and an environment declares no penalty."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        parts: Sequence[EnvPart],
        router: Router,
        make_session: Callable[[Generate], Session],
        stop_token_ids: Sequence[int],
        temperature: float,
        model: RewardModel | None = None,
        *,
        self_player: Agent | None = None,
        limits: EpisodeLimits | None = None,
        record_experts: bool = False,
    ) -> None:
        rollout = config.rollout
        require_penalties(parts, rollout.failures)
        self.parts = tuple(parts)
        self.router = router
        self.concurrency = rollout.engine.count * rollout.engine.max_concurrent
        self._agents = [self_player if self_player and part.self_played else agent for part in parts]  # of each part
        self._model = model
        self._make_session = make_session
        self._limits = limits or EpisodeLimits(rollout.episode_s, rollout.step_s, rollout.tool_s)
        self._trained_failures = {reason for reason, failure in rollout.failures.items() if failure.then == "train"}
        self._tasks = [TaskMemo() for _ in parts]
        self._records_experts = record_experts
        self._sampling = SamplingParams(
            1, temperature=temperature, top_p=rollout.top_p, stop_token_ids=tuple(stop_token_ids)
        )

    async def play(
        self,
        lease: Lease,
        member: int,
        *,
        on_tokens: OnTokens = lambda completion: None,
        record: RecordSpan = no_record,
    ) -> EpisodeResult:
        """Play one episode of `lease`. `on_tokens` receives every completion as it arrives, and the partial ones that were cut off
        with the episode or that the agent cancelled. `record` receives the episode, its completions and its calls of the
        environment, also where the episode is cancelled."""
        env = EnvGuard(self.parts[lease.env], self._limits, self._tasks[lease.env])
        watch = Stopwatch()
        ids: dict[str, Id] = {"episode": lease.episode(member), "env": lease.env, "task": lease.task}
        ids["leased_at"] = lease.version
        try:
            result = await self._play(lease, member, env, on_tokens, record)
            ids |= {"outcome": result.outcome.label, "reward": result.reward}
            return result
        finally:
            for call in env.timed:
                of = {"episode": lease.episode(member), "tool": call.tool, "error": call.error}
                record(Span(call.begin, call.end, call.what, {key: value for key, value in of.items() if value}))
            record(Span(watch.began, watch.now(), "episode", ids))

    async def _play(
        self, lease: Lease, member: int, env: EnvGuard, on_tokens: OnTokens, record: RecordSpan
    ) -> EpisodeResult:
        greedy = {"temperature": 0.0} if member in lease.greedy else {}
        sampling = msgspec.structs.replace(self._sampling, **greedy)
        requests = _Requests(self.router, lease, member, sampling, on_tokens, record)
        session, part = self._make_session(requests.generate), self.parts[lease.env]
        if self._records_experts:
            requests.experts_known = session.experts_known
        watch = Stopwatch()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(env.calls)
            stack.enter_context(env.unawaited)
            stack.push_async_callback(env.close)
            # Before the environment: what an agent left behind samples no more.
            stack.push_async_callback(requests.close)
            stack.callback(env.end)
            outcome, error = await _run_agent(self._agents[lease.env], env, session, lease.task, self._limits.episode_s)
        timings = {"total": watch.seconds(), "environment": env.seconds}
        turn_rewards, metrics = tuple(env.rewards), env.metrics | session.metrics
        if outcome.trainable and not session.branches:
            outcome = msgspec.structs.replace(outcome, detail=_why_empty(session))
        if self._model is not None and outcome.trainable and session.branches:
            scoring_started = time.perf_counter()
            try:
                turn_rewards, score = await _score(self._model, env, session)
                metrics = metrics | {"reward_environment": sum(env.rewards), "reward_model": score}
            except Exception as raised:  # messages and payload are user data: rendering them as text may raise anything
                ours = isinstance(raised, EngineError | DeadlineExceeded)
                outcome = Outcome("failed", "reward", str(raised) if ours else describe_user_error(raised))
                error = raised
            timings |= {"total": watch.seconds(), "reward": time.perf_counter() - scoring_started}
        outcome = msgspec.structs.replace(outcome, detail=encodable(outcome.detail)[:DETAIL_LIMIT])
        reward, trained = sum(turn_rewards), True
        if not outcome.trainable:
            trained = part.penalty is not None and outcome.reason in self._trained_failures
            reward, turn_rewards, metrics = (part.penalty or 0.0) if trained else 0.0, (), {}
        trajectories = session.trajectories(
            group_id=lease.group_id,
            attempt=lease.attempt,
            member=member,
            task_id=env.task.id,
            env=part.name,
            reward=reward,
            turn_rewards=turn_rewards,
            outcome=outcome,
            timings=timings,
            metrics=metrics,
            started=watch.began,
            env_calls=env.timed,
        )
        if not trained:
            return EpisodeResult(outcome, 0.0, (), error, trajectories, session.image_files)
        return EpisodeResult(outcome, reward, trajectories, error, image_files=session.image_files)


class _Requests:
    """The completions that one episode has in flight; each runs in the task of the agent that awaits it."""

    def __init__(
        self,
        router: Router,
        lease: Lease,
        member: int,
        sampling: SamplingParams,
        on_tokens: OnTokens,
        record: RecordSpan,
    ) -> None:
        self.experts_known: Callable[[Sequence[int]], int] | None = None  # None where no experts are recorded
        self._record = record
        self._router = router
        self._episode_id, self._oldest_version = lease.episode(member), lease.oldest_version
        self._sampling = sampling
        self._on_tokens = on_tokens
        self._in_flight: dict[asyncio.Task[object], asyncio.Future[None]] = {}
        self._closed = False

    async def generate(
        self, token_ids: Sequence[int], max_tokens: int, images: Sequence[PromptImage] = ()
    ) -> Completion:
        """See `Generate`. Raises PolicyError after `close`."""
        if self._closed:
            raise PolicyError(f"episode {self._episode_id} is over; its policy no longer answers")
        known = None if self.experts_known is None else self.experts_known(token_ids)
        sampling = msgspec.structs.replace(self._sampling, max_tokens=max_tokens, experts_from=known)
        task = asyncio.current_task()
        assert task is not None
        ended = self._in_flight[task] = asyncio.get_running_loop().create_future()

        def arrived(completion: Completion) -> None:
            self._record_turn(len(token_ids), completion)
            self._on_tokens(completion)

        try:
            completion = await self._router.generate(
                self._episode_id, token_ids, sampling, self._oldest_version, images=images, on_cancelled=arrived
            )
        finally:
            del self._in_flight[task]
            ended.set_result(None)
        arrived(completion)
        return completion

    def _record_turn(self, prompt: int, completion: Completion) -> None:
        took = completion.timing
        if took is None:
            return
        ids: dict[str, Id] = {
            "episode": self._episode_id,
            "replica": took.replica,
            "prompt": prompt,
            "cached": took.cached,
            "tokens": len(completion.token_ids),
            "version": completion.version_spans[-1].version if completion.version_spans else None,
            "queued_s": took.queued_s,
            "first_s": took.first_s,
            "finish": completion.finish_reason,
        }
        self._record(Span(took.asked, took.asked + took.queued_s + took.first_s + took.decode_s, "turn", ids))

    async def close(self) -> None:
        """Cancel the completions in flight, and return when none is left on a server."""
        self._closed = True
        in_flight = dict(self._in_flight)
        for task in in_flight:
            task.cancel()
        if in_flight:
            await asyncio.wait(in_flight.values())
        self._router.end_episode(self._episode_id)


async def _score(model: RewardModel, env: EnvGuard, session: Session) -> tuple[tuple[float, ...], float]:
    """The rewards by step, and the score of `model`. Raises EngineError or DeadlineExceeded where there is no valid score."""
    reference = env.task.payload.get("reference", "")
    text = reference if isinstance(reference, str) else msgspec.json.encode(reference).decode()
    conversation = ScoredConversation(session.branches[-1].token_ids, env.opening, tuple(env.transcript), text)
    rewards, score = await model.rewards(env.rewards, conversation)
    if not all(abs(reward) <= REWARD_LIMIT for reward in rewards):
        raise EngineError(f"a score of {score} makes rewards of {rewards}; allowed are numbers up to {REWARD_LIMIT:g}")
    return rewards, score


@calls_user_code
async def _call_agent(agent: Agent, env: EnvGuard, session: Session, index: int) -> float | None:
    returned = await agent(env, session, await env.open(index))
    total = sum(env.rewards)
    if why := without_await(returned):
        raise PolicyError(why)
    if returned is not None and not (isinstance(returned, int | float) and math.isclose(returned, total, abs_tol=1e-6)):
        raise PolicyError(
            f"the agent returned {returned!r:.100}, and its rewards by env.step are {total:g}; return None"
        )
    return returned


async def _run_agent(
    agent: Agent, env: EnvGuard, session: Session, index: int, episode_s: float
) -> tuple[Outcome, BaseException | None]:
    """Run the agent to its end; every exception becomes an outcome, and is returned with it. A failure of the environment or the
    engine is the outcome also where the agent went on after it."""
    outcome, error = await _end_of_agent(agent, env, session, index, episode_s)
    failure = env.failure or session.failure
    if env.self_played and failure is not None:  # the environment's error is what it makes of the policy's
        failure = session.failure or failure
        if _is_exhausted(failure, session):
            return TRUNCATED, None
    if failure is None and outcome.trainable and env.unawaited.lines:  # those of the environment have failed it
        failure = PolicyError(env.unawaited.lines[0])
    return (outcome, error) if failure is None else (_failure(failure), failure)


async def _end_of_agent(
    agent: Agent, env: EnvGuard, session: Session, index: int, episode_s: float
) -> tuple[Outcome, BaseException | None]:
    """What the agent's own end says, whatever it met before."""
    deadline = asyncio.timeout(episode_s)
    try:
        async with deadline:
            await run_isolated(lambda: _call_agent(agent, env, session, index))
    except ContextExhausted:
        return TRUNCATED, None
    except TimeoutError as error:
        if deadline.expired():
            why = f"the episode took longer than rollout.episode_s={episode_s:g} s"
            return Outcome("failed", "timeout", why), None
        return Outcome("failed", "policy", describe_user_error(error)), error
    except Exception as error:  # an agent is user code: its exceptions end an episode, not a worker
        if _is_exhausted(error, session):
            return TRUNCATED, None
        return _failure(error), error
    return FINISHED if env.finished else TRUNCATED, None


def _is_exhausted(error: BaseException, session: Session) -> bool:
    """Whether `error`, or what caused it, is what a client made of ContextExhausted: it holds the gateway's message."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(text in str(one) for text in session.exhausted for one in chain)


def _why_empty(session: Session) -> str:
    """Why an episode that did not fail has nothing to train on."""
    if session.exhausted:
        return session.exhausted[-1]
    if session.untrained:
        return "the agent named only models that agent.trained does not match"
    return "the agent sampled no token"


def _failure(error: Exception) -> Outcome:
    """Who is at fault for an exception that ended an agent."""
    match error:
        case ToolError():
            return Outcome("failed", "tool", str(error))
        case EnvError():
            return Outcome("failed", "environment", str(error))
        case EngineError() | DeadlineExceeded():  # the router's: EnvGuard turns the environment's into EnvError
            return Outcome("failed", "engine", str(error))
        case AgentTimeout():
            return Outcome("failed", "timeout", str(error))
        case PolicyError():
            line, text = user_line(error), str(error)
            said = not line or line.partition(":")[0] in text  # one that names a coroutine has the line that made it
            return Outcome("failed", "policy", text if said else f"{text} ({line})")
        case EscapedException():
            return Outcome("failed", "policy", str(error))
        case _:
            return Outcome("failed", "policy", describe_user_error(error))
