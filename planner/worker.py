"""The workers of a simulation: slots that `Concurrency` moves, leases, and episodes turn by turn. Pure.

    lease ──> one episode per member:  turn: request ──> completion ──> environment ──> worker ──┐ ──last turn──> delivery
                                        ^───────────────────────────────────────────────────────┘

Invariants:
- A worker plays as `rollout.worker` does: it leases only with room for a whole group, a smaller number of slots ends no episode,
  and a slot that waits for the room of a whole group is not idle.
- An episode whose result is no longer wanted is cancelled at the next report of progress.
- A worker computes for one episode at a time: those that wait for it share it, and it is slowed while the learner of the same host
  computes.

Not modelled: failures of episodes, and their time limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..buffer.lease_manager import LeaseManager
from ..buffer.messages import Lease
from ..buffer.trajectory import FINISHED, UNWANTED, Outcome
from ..rollout.concurrency import Concurrency, EngineLoad
from .engine import SimulatedRequest
from .fleet import SimulatedRouter
from .kernel import ONE_AT_A_TIME, SharedProcessor, VirtualClock
from .plan import SimulationPlan
from .workload import EpisodeShape

CANCELLED = Outcome("failed", UNWANTED)


class PlayedEpisode:
    __slots__ = ("began", "context", "ended", "generated", "group", "id", "oldest", "request", "shape", "turn")

    def __init__(self, id: str, group: int, oldest: int, shape: EpisodeShape, began: float) -> None:
        self.id = id
        self.group = group
        self.oldest = oldest  # version of a replica that it may use
        self.shape = shape
        self.began = began
        self.ended = 0.0
        self.turn = 0
        self.context = 0  # tokens so far
        self.generated: dict[int, int] = {}  # of completions that have arrived: version -> tokens
        self.request: SimulatedRequest | None = None  # under way


class SimulatedWorker:
    """`draw` makes the shapes of a leased group's members; `delivered` is called after each delivery with the episode, and whether
    the buffer keeps it.

    Attributes:
        slot_s, idle_slot_s: as a worker reports them.
    """

    def __init__(
        self,
        index: int,
        plan: SimulationPlan,
        clock: VirtualClock,
        leases: LeaseManager,
        router: SimulatedRouter,
        draw: Callable[[Lease], Sequence[EpisodeShape]],
        delivered: Callable[[PlayedEpisode, bool], None],
    ) -> None:
        self.slot_s = 0.0
        self.idle_slot_s = 0.0
        self._name = f"worker-{index}"
        self._deliver_s = plan.deliver_s
        self._clock = clock
        self._leases = leases
        self._router = router
        self._draw = draw
        self._delivered = delivered
        self._group_size = plan.replay.group_size
        self._concurrency = Concurrency(self._group_size, plan.max_concurrent, plan.workers, plan.limits[index])
        self._concurrency.set_replicas(plan.replicas)
        self._playing: dict[str, PlayedEpisode] = {}
        self._processor: SharedProcessor[PlayedEpisode] = SharedProcessor(clock, ONE_AT_A_TIME, self._next)
        self._accounted_at = clock.now

    @property
    def free_groups(self) -> int:
        """Whole groups that may start."""
        return max(0, self._concurrency.cap - len(self._playing)) // self._group_size

    @property
    def playing(self) -> int:
        """Episodes that run."""
        return len(self._playing)

    def account(self) -> None:
        """Bring `slot_s` and `idle_slot_s` up to now; before every change of what is playing or of the slots."""
        seconds, self._accounted_at = self._clock.now - self._accounted_at, self._clock.now
        if seconds > 0:
            slots, playing = self._concurrency.cap, len(self._playing)
            self.slot_s += max(slots, playing) * seconds
            self.idle_slot_s += (slots - playing if self.free_groups else 0) * seconds

    def observe(self, loads: Sequence[EngineLoad]) -> None:
        """A second has passed."""
        self.account()
        self._concurrency.observe(loads, self._router.waiting, len(self._playing))

    def lease(self) -> bool:
        """Lease a group and begin its episodes. False where the buffer grants none."""
        lease = self._leases.grant(self._name, self._clock.now)
        if lease is None:
            return False
        self.account()
        for member, shape in zip(lease.members, self._draw(lease), strict=True):
            id = lease.episode(member)
            episode = PlayedEpisode(id, lease.group_id, lease.oldest_version, shape, self._clock.now)
            self._playing[id] = episode
            self._compute_after(shape.start_s, shape.start_work_s, episode)
        return True

    def slow(self, slowness: float) -> None:
        """Compute `slowness` times as long from now on."""
        self._processor.slow(slowness)

    def report(self) -> None:
        """Report progress, and cancel the episodes that the buffer names."""
        running = {id: episode.generated for id, episode in self._playing.items()}
        for id in self._leases.progress(self._name, running, self._clock.now):
            episode = self._playing[id]
            if episode.request is not None:
                self._router.cancel(episode.request)
                self._count(episode, episode.request)
            self._end(episode, CANCELLED)

    def _next(self, episode: PlayedEpisode) -> None:
        """Its next turn, or its end."""
        if episode.id not in self._playing:
            return  # cancelled while its environment worked
        if episode.turn == len(episode.shape.turns):
            episode.ended = self._clock.now
            self._clock.after(self._deliver_s, self._deliver, episode)
            return
        turn = episode.shape.turns[episode.turn]
        episode.context += turn.prompt
        request = SimulatedRequest(
            episode.context, episode.shape.shared, turn.sampled, lambda request: self._completed(episode, request)
        )
        episode.request = request
        self._router.send(episode.id, request, episode.oldest)

    def _deliver(self, episode: PlayedEpisode) -> None:
        if episode.id in self._playing:
            self._end(episode, FINISHED)

    def _completed(self, episode: PlayedEpisode, request: SimulatedRequest) -> None:
        self._router.completed(request)
        self._count(episode, request)
        turn = episode.shape.turns[episode.turn]
        episode.turn += 1
        self._compute_after(turn.environment_s, turn.work_s, episode)

    def _compute_after(self, seconds: float, work_s: float, episode: PlayedEpisode) -> None:
        """Its next turn, or its end, `seconds` from now and after `work_s` of computing."""
        if seconds:
            self._clock.after(seconds, self._compute, episode, work_s)
        else:
            self._compute(episode, work_s)

    def _compute(self, episode: PlayedEpisode, work_s: float) -> None:
        if work_s and episode.id in self._playing:
            self._processor.add(episode, work_s)
        else:
            self._next(episode)

    def _count(self, episode: PlayedEpisode, request: SimulatedRequest) -> None:
        episode.request = None
        for version, tokens in request.counts.items():
            episode.generated[version] = episode.generated.get(version, 0) + tokens
            episode.context += tokens

    def _end(self, episode: PlayedEpisode, outcome: Outcome) -> None:
        self.account()
        del self._playing[episode.id]
        if episode in self._processor.jobs:
            self._processor.remove(episode)
        self._router.end_episode(episode.id)
        kept = episode.generated if outcome is FINISHED else {}
        ready = self._leases.deliver(episode.id, outcome, episode.generated, kept, episode.shape.reward)
        self._delivered(episode, ready)
