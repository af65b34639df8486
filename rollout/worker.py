"""The worker: plays many episodes at once and delivers what they left.

    buffer ──lease──> one task per member ──> play() ──Deliver──> buffer
                        ├── twice a second: Progress (tokens so far, slots idle), which also renews the leases
                        └── every second: how busy the servers are, which moves the number of slots (`concurrency.py`)

Invariants:
- A lease is asked for only when there is room for a whole group, so a group's members start together.
- No episode is ended because there are fewer slots now: fewer are begun.
- Every token an engine returned to this worker is reported, with its version, whether its episode ends, fails or is cut off.
- An episode that nobody waits for any more is ended as soon as the buffer says so.
- With an episode everything ends that its agent has asked of an engine, also what the agent did not wait for.
- `stop` gives all leases back before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from ..agents.base import Agent, Completion, Generate
from ..agents.session import Session
from ..buffer.client import BufferClient
from ..buffer.ledger import Counts
from ..buffer.messages import Lease
from ..buffer.trajectory import Outcome
from ..configs.schema import Config
from ..envs import Part, require_penalties
from ..errors import EpisodesFail, PolicyError
from .blocking import LoopGuard
from .concurrency import Concurrency
from .engine import Sampling
from .episode import EpisodeResult, play
from .reward import RewardModel
from .router import Router
from .watched import Limits

log = logging.getLogger(__name__)

PROGRESS_S = 0.5
"""Between reports: fine enough to see what is generated during one learner step, a small message each."""

SAMPLE_S = 1.0
"""Between looks at the servers; what `Concurrency` calls a second."""

GOODBYE_S = 5.0
"""How long a stopping worker tries to give its leases back; after that they expire by themselves."""

FAILURES = 64
"""Failed episodes in a row, or twice the slots where that is more, after which the worker gives up: something is broken."""

UNWANTED = EpisodeResult(Outcome("failed", "unwanted", "nobody waits for it any more"), 0.0, ())
"""How an episode ends that is broken off because its lease is lost or its group is over."""

MakeSession = Callable[[Generate], Session]
"""A new session around a way to generate."""


class Player:
    """What it takes to play an episode: the agent, the environments, the engines. Shared by the worker and the evaluation.

    Attributes:
        parts: the run's environments; `Lease.env` counts them.
        router: reaches the engines.
        decodes: episodes that the servers which the run began with decode at once.

    Raises:
        ConfigError: failures are to be trained on and an environment declares no penalty.
    """

    def __init__(
        self,
        config: Config,
        agent: Agent,
        parts: Sequence[Part],
        router: Router,
        make_session: MakeSession,
        stop_token_ids: Sequence[int],
        temperature: float,
        model: RewardModel | None = None,
    ) -> None:
        rollout = config.rollout
        require_penalties(parts, rollout.failures)
        self.parts = tuple(parts)
        self.router = router
        self.decodes = rollout.engine.replicas * rollout.engine.max_concurrent
        self._agent = agent
        self._model = model
        self._make_session = make_session
        self._limits = Limits(rollout.episode_s, rollout.step_s, rollout.tool_s)
        self._trained_failures = {reason for reason, failure in rollout.failures.items() if failure.then == "train"}
        self._one_at_a_time = [asyncio.Lock() for _ in parts]
        self._top_p = rollout.sampling.top_p
        self._temperature = temperature
        self._stop_token_ids = tuple(stop_token_ids)

    async def play(
        self, lease: Lease, member: int, *, count: Callable[[Completion], None] = lambda completion: None
    ) -> EpisodeResult:
        """Play one episode of `lease`; `count` is given every completion as it comes, and what had arrived of those that were cut
        off with the episode, or that the agent gave up."""
        episode_id = lease.episode(member)
        temperature = 0.0 if member in lease.greedy else self._temperature
        calls: set[asyncio.Task[Completion]] = set()
        over = False

        async def call(token_ids: Sequence[int], sampling: Sampling) -> Completion:
            completion = await self.router.generate(episode_id, token_ids, sampling, lease.oldest_version, lost=count)
            count(completion)
            return completion

        async def generate(token_ids: Sequence[int], max_tokens: int) -> Completion:
            if over:
                raise PolicyError(f"episode {episode_id} is over; its policy answers nobody")
            sampling = Sampling(
                max_tokens, temperature=temperature, top_p=self._top_p, stop_token_ids=self._stop_token_ids
            )
            calling = asyncio.create_task(call(token_ids, sampling))
            calls.add(calling)
            calling.add_done_callback(ended)
            return await calling

        def ended(calling: asyncio.Task[Completion]) -> None:
            calls.discard(calling)
            if not calling.cancelled():
                calling.exception()  # the agent may have left

        try:
            return await play(
                self._agent,
                self.parts[lease.env],
                lease.task,
                self._make_session(generate),
                group_id=lease.group_id,
                attempt=lease.attempt,
                member=member,
                limits=self._limits,
                one_at_a_time=self._one_at_a_time[lease.env],
                trained_failures=self._trained_failures,
                model=self._model,
            )
        finally:
            over = True
            for calling in calls:
                calling.cancel()
            if calls:
                await asyncio.wait(calls)
            self.router.forget(episode_id)


class Stopped(Exception):
    """Ends the worker's task group: somebody asked it to stop."""


class Worker:
    """Plays as many episodes at once as the servers take, until `stop`.

    Args:
        player: plays one episode. Its router must be entered, and is given the fleet by somebody else.
        buffer: where leases come from and trajectories go.
        group_size: episodes per group (`buffer.group_size`).
        workers: worker processes that share the servers (`rollout.workers`).
    """

    def __init__(self, player: Player, buffer: BufferClient, group_size: int, workers: int) -> None:
        self._player = player
        self._buffer = buffer
        self._group_size = group_size
        self._concurrency = Concurrency(group_size, player.router.max_concurrent, workers)
        self._running: dict[str, Counts] = {}
        self._playing: dict[str, asyncio.Task[EpisodeResult]] = {}
        self._failures = 0
        self._slot_s = 0.0
        self._idle_slot_s = 0.0
        self._changed = asyncio.Condition()

    async def run(self, stop: asyncio.Event) -> None:
        """Lease, play, deliver; returns after `stop` is set and the leases are given back."""
        await self._buffer.hello()
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            async with LoopGuard(), asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._report(), name="progress")
                watch = tasks.create_task(self._watch(), name="pressure")
                work = tasks.create_task(self._lease_forever(tasks), name="leases")
                await asyncio.wait([stopped, report, watch, work], return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    raise Stopped
        except* Stopped:
            log.info("stopping; %d episodes are given up", len(self._running))
        finally:
            stopped.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._buffer.progress(dict(self._running), self._slot_s, self._idle_slot_s)
                await self._buffer.goodbye()

    @property
    def _room(self) -> int:
        """Whole groups that may start."""
        return max(0, self._concurrency.cap - len(self._running)) // self._group_size

    async def _lease_forever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._room)
            for lease in await self._buffer.leases(self._room):
                for member in lease.members:
                    self._running[lease.episode(member)] = {}
                for member in lease.members:
                    tasks.create_task(self._episode(lease, member), name=lease.episode(member))

    async def _episode(self, lease: Lease, member: int) -> None:
        episode_id = lease.episode(member)
        generated = self._running[episode_id]

        def count(completion: Completion) -> None:
            for version, tokens in completion.by_version.items():
                generated[version] = generated.get(version, 0) + tokens

        playing = asyncio.create_task(self._player.play(lease, member, count=count), name=f"playing {episode_id}")
        self._playing[episode_id] = playing
        try:
            await asyncio.wait({playing})
        finally:
            del self._playing[episode_id]
            playing.cancel()
            await asyncio.wait({playing})
        result = UNWANTED if playing.cancelled() else playing.result()
        await self._buffer.deliver(episode_id, generated, result.outcome, result.trajectories)
        async with self._changed:
            del self._running[episode_id]
            self._changed.notify_all()
        if result is not UNWANTED:
            self._judge(episode_id, result)

    def _judge(self, episode_id: str, result: EpisodeResult) -> None:
        """Tell of a failure; raise EpisodesFail when there was nothing else for long."""
        if result.trajectories and result.outcome.trainable:
            self._failures = 0
            return
        outcome = result.outcome
        why = f"{outcome.reason}: {outcome.detail}" if outcome.reason else "nothing fits into agent.max_tokens"
        log.warning("episode %s failed by %s", episode_id, why)
        self._failures += 1
        if self._failures >= max(FAILURES, 2 * self._concurrency.cap):
            raise EpisodesFail(f"{self._failures} episodes in a row failed, the last by {why}")

    async def _watch(self) -> None:
        """Let the number of slots follow the servers."""
        router, concurrency = self._player.router, self._concurrency
        while True:
            samples = await router.pressure()
            concurrency.follow(router.serving)
            concurrency.observe(samples, router.waiting, len(self._running))
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(SAMPLE_S)

    async def _report(self) -> None:
        """Tell of tokens and slots. A slot is idle for want of a lease: one that waits for a whole group's room is not."""
        last = time.monotonic()
        while True:
            for episode_id in await self._buffer.progress(dict(self._running), self._slot_s, self._idle_slot_s):
                if episode_id in self._playing:
                    self._playing[episode_id].cancel()
            await asyncio.sleep(PROGRESS_S)
            now = time.monotonic()
            slots, playing = self._concurrency.cap, len(self._running)
            self._slot_s += max(slots, playing) * (now - last)
            self._idle_slot_s += (slots - playing if self._room else 0) * (now - last)
            last = now
