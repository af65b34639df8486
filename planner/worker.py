"""The workers of a simulation: slots that `Concurrency` moves, leases, and episodes turn by turn. Pure.

    lease ──> one episode per member:  turn: request ──> completion ──> environment ──> worker ──┐ ──last turn──> delivery
                                        ^───────────────────────────────────────────────────────┘

Invariants:
- A worker plays as `rollout.worker` does: it requests leases only with room for a whole group, one request after the other; an
  episode counts from when the loop has got to the reply, which is when the first of its episodes begins; a smaller number of slots
  ends no episode.
- A request and its reply wait for the worker's event loop, as episodes do between completions.
- An episode whose result is no longer wanted is cancelled at the next report of progress.
- A worker computes for one episode at a time: those that wait for it share it, and it is slowed while the learner of the same host
  computes.

Not modelled: failures of episodes, their time limits, and several shards of the buffer, each of which has a request of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..buffer.lease_manager import LeaseManager
from ..buffer.messages import GROUPS_AT_ONCE, Lease
from ..buffer.trajectory import FINISHED, UNWANTED, Outcome
from ..rollout.concurrency import Concurrency, EngineLoad, SlotTime
from .engine import SimulatedRequest
from .fleet import SimulatedRouter
from .kernel import ONE_AT_A_TIME, SharedProcessor, VirtualClock
from .plan import SimulationPlan
from .workload import EpisodeShape

CANCELLED = Outcome("failed", UNWANTED)
REQUEST = "request"  # the job of the loop that ends with a request for groups


class PlayedEpisode:
    __slots__ = (
        "began",
        "context",
        "ended",
        "generated",
        "group",
        "id",
        "oldest",
        "request",
        "shape",
        "started",
        "turn",
    )

    def __init__(self, id: str, group: int, oldest: int, shape: EpisodeShape, began: float) -> None:
        self.id = id
        self.group = group
        self.oldest = oldest  # version of a replica that it may use
        self.shape = shape
        self.began = began  # when it was leased
        self.started = False  # the worker's loop has got to it
        self.ended = 0.0
        self.turn = 0
        self.context = 0  # tokens so far
        self.generated: dict[int, int] = {}  # of completions that have arrived: version -> tokens
        self.request: SimulatedRequest | None = None  # under way


class SimulatedWorker:
    """`draw` makes the shapes of a leased group's members. `delivered` is called after each delivery with the episode, and whether
    the buffer keeps it; `requested_groups` when a request has arrived, which `grant` and `reply` answer.

    Attributes:
        slot_time: as a worker reports it.
        requested: groups of a request that waits for admission.
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
        requested_groups: Callable[[], None],
    ) -> None:
        self.slot_time = SlotTime(plan.replay.group_size, clock.now)
        self.requested = 0
        self._name = f"worker-{index}"
        self._deliver_s = plan.deliver_s
        self._request_work_s = plan.request_work_s
        self._clock = clock
        self._leases = leases
        self._router = router
        self._draw = draw
        self._delivered = delivered
        self._requested_groups = requested_groups
        self._group_size = plan.replay.group_size
        self._concurrency = Concurrency(self._group_size, plan.max_concurrent, plan.workers, plan.limits[index])
        self._concurrency.set_replicas(plan.replicas)
        self._playing: dict[str, PlayedEpisode] = {}
        self._asking = False  # from when the loop is to send a request until it has the reply
        self._granted: dict[str, PlayedEpisode] = {}  # in a reply that the loop has not got to
        self._processor: SharedProcessor[PlayedEpisode | str] = SharedProcessor(clock, ONE_AT_A_TIME, self._computed)

    @property
    def _free_groups(self) -> int:
        """Whole groups that may start."""
        return max(0, self._concurrency.cap - self.playing) // self._group_size

    @property
    def playing(self) -> int:
        """Episodes that the worker counts: those in a reply that is on its way are none of them yet."""
        return len(self._playing) - len(self._granted)

    @property
    def waits(self) -> bool:
        """Whether it plays nothing, and its request is not granted."""
        return not self._playing and self.requested > 0

    def account(self) -> None:
        """Bring `slot_time` up to now; before every change of what is played or of the slots."""
        self.slot_time.account(self._clock.now, self._concurrency.cap, self.playing)

    def observe(self, loads: Sequence[EngineLoad]) -> None:
        """A second has passed."""
        self.account()
        self._concurrency.observe(loads, self._router.waiting, self.playing)
        self.ask()

    def ask(self) -> None:
        """Request all groups that there is room for, one request after the other."""
        if not self._asking and self._free_groups:
            self._asking = True
            self._compute(REQUEST, self._request_work_s)

    def _request(self) -> None:
        self.requested = min(self._free_groups, GROUPS_AT_ONCE)
        if self.requested:
            self._requested_groups()
        else:  # there are fewer slots now
            self._asking = False

    def grant(self) -> bool:
        """Grant one of the requested groups; its episodes wait for the worker's loop. False where admission allows none."""
        lease = self._leases.grant(self._name, self._clock.now)
        if lease is None:
            return False
        self.requested -= 1
        for member, shape in zip(lease.members, self._draw(lease), strict=True):
            id = lease.episode(member)
            episode = PlayedEpisode(id, lease.group_id, lease.oldest_version, shape, self._clock.now)
            self._playing[id] = self._granted[id] = episode
        return True

    def reply(self) -> None:
        """Answer the request with what was granted."""
        self.requested = 0
        for episode in list(self._granted.values()):
            self._compute_after(episode.shape.lease_s, episode.shape.lease_work_s, episode)

    def _take_reply(self) -> None:
        """The loop has the reply, whose episodes count from now on, and requests more where there is room."""
        self.account()
        self._granted.clear()
        self._asking = False
        self._clock.after(0.0, self.ask)

    def slow(self, slowness: float) -> None:
        """Compute `slowness` times as long from now on."""
        self._processor.slow(slowness)

    def report(self) -> None:
        """Report progress, and cancel the episodes that the buffer names."""
        running = {id: episode.generated for id, episode in self._playing.items() if id not in self._granted}
        for id in self._leases.progress(self._name, running, self._clock.now):
            episode = self._playing[id]
            if episode.request is not None:
                self._router.cancel(episode.request)
                self._count(episode, episode.request)
            self._end(episode, CANCELLED)

    def _next(self, episode: PlayedEpisode) -> None:
        """Its start, its next turn, or its end."""
        if episode.id not in self._playing:
            return  # cancelled while its environment worked
        if not episode.started:
            episode.started = True
            if episode.id in self._granted:
                self._take_reply()
            self._compute_after(episode.shape.start_s, episode.shape.start_work_s, episode)
            return
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

    def _compute(self, job: PlayedEpisode | str, work_s: float) -> None:
        if work_s and (isinstance(job, str) or job.id in self._playing):
            self._processor.add(job, work_s)
        else:
            self._computed(job)

    def _computed(self, job: PlayedEpisode | str) -> None:
        if isinstance(job, PlayedEpisode):
            self._next(job)
        else:
            self._request()

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
        self.ask()
