"""One replica through a weight push: stage, verify, pause, swap, canary, resume.

    stage     the transport sends the snapshot to every rank; the old weights keep serving, or the replica sleeps without any
    verify    every rank acknowledges: all tensors arrived, checksum, names and shapes match
    wake      one that sleeps allocates the memory of its weights
    pause     requests under way are treated according to `rollout.partial`
    swap      the staged tensors become the version
    canary    the replica's log-probs of a fixed prompt equal the learner's; where not, all of it once more
    resume    before the canary where the server computes nothing while paused (vLLM, SGLang), else after it

Invariants:
- A request to a target that leaves the fleet ends at once.
- A command (pause, swap, resume) is never revoked: a server goes on with it after its client hangs up. The next one is sent only
  when it has settled.
- A target is unverified from the moment its swap is sent until its weights are known, and stays paused: a token sampled between the
  load and the version's change would be labeled with the wrong version. A later attempt waits for it, then resumes it.
- Every other paused target is resumed, whatever happened. Each target fails by itself, and before the swap keeps its old weights.
- An attempt ends within its seconds. After a cancellation it takes at most `CANCEL_RESUME_S` to resume paused targets.
- A target that sleeps is unverified until its next swap: it has no weights. So is one that may sleep, from the moment it is woken.
- A second push after a canary that was off pauses with `recompute`, which drops all keys and values of wrong weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ..common.spans import Id, RecordSpan, Span, no_record, time_of_day, timed
from ..configs.schema import Partial
from ..errors import EngineError, NoAnswer, SlipstreamError, WeightSyncError, with_deadline
from .plan import ReplicaControl
from .snapshot import Canary, WeightSnapshot

logger = logging.getLogger(__name__)

T = TypeVar("T")

NOTHING = -1  # the version of a replica whose weights are not verified
STAGE_SHARE = 0.6  # of an attempt's seconds: the deadline of the acks
SWAP_SHARE = 0.8  # of an attempt's seconds: the deadline of all swaps; the remaining seconds are kept for resuming
CANCEL_RESUME_S = 1.0  # longest wait for the resume of a replica that left, or of any when the attempt is cancelled


class PushTarget:
    """What the publisher knows of one replica."""

    def __init__(self, replica: ReplicaControl) -> None:
        self.replica = replica
        self.name = replica.name
        self.verified = NOTHING  # the version that its canary confirmed, NOTHING when fenced or new
        self.paused_at: float | None = None  # when its pause was sent (`time.perf_counter`), None once it has resumed
        self.unverified = False  # its swap was sent, and its weights are not known yet
        self.swapped = NOTHING  # the version that it last confirmed to have swapped in
        # Whether it sleeps; None where it is not known: a learner before this one may have had it sleep.
        self.asleep: bool | None = None
        self.missed_pushes = 0  # how often in a row `catch_up` did not reach it
        self.cancelled = 0  # how often in a row a version cancelled the attempt to reach it
        self.retry_at = 0.0  # of the next `catch_up` that tries it (`time.monotonic`)
        self.left = False  # it is no replica of the fleet any more
        self._requests: set[asyncio.Timeout] = set()  # that end when it leaves
        self._command: asyncio.Future[None] | None = None

    def leave(self) -> None:
        self.left = True
        for scope in self._requests:
            scope.reschedule(0)  # cancels its block in the next turn of the loop
        self._requests.clear()

    async def request(self, answer: Awaitable[T]) -> T:
        """Await `answer`. Raises EngineError as soon as the target leaves. A cancelled caller cancels the request."""
        scope = asyncio.timeout(0 if self.left else None)
        try:
            async with scope:
                if not self.left:
                    self._requests.add(scope)
                return await answer
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._requests.discard(scope)
            del answer, scope  # see `with_deadline`
        raise EngineError(f"{self.name} left the fleet")

    @property
    def settled(self) -> bool:
        """Whether every command was answered, or cannot be any more."""
        return self._command is None or self._command.done()

    async def settle(self) -> None:
        """Return once it is `settled`, however the command ended. Has no deadline."""
        if self._command is not None:
            await asyncio.wait({self._command})

    async def pause(self, mode: Partial) -> None:
        self._check_member()
        if self.paused_at is None:
            self.paused_at = time.perf_counter()  # before the call: a pause without an answer may have happened
        await self.request(self._send(self.replica.pause(mode)))

    async def sleep(self) -> None:
        """Have it free its memory. Raises as `request`."""
        self._check_member()
        self.asleep, self.unverified, self.swapped = True, True, NOTHING
        await self.request(self._send(self.replica.sleep()))

    async def wake(self) -> None:
        """Have it allocate the memory of its weights, which a swap fills. Raises as `request`."""
        self._check_member()
        self.unverified, self.swapped = True, NOTHING
        await self.request(self._send(self.replica.wake()))

    async def swap(self, version: int) -> None:
        """Swap in the staged tensors; from here on it is unverified, unless it refuses. Raises as `request`."""
        self._check_member()
        before, self.unverified, self.swapped = self.unverified, True, NOTHING

        def settle(command: asyncio.Future[None]) -> None:
            error = asyncio.CancelledError() if command.cancelled() else command.exception()
            if error is None:
                self.swapped = version
            elif isinstance(error, EngineError) and not isinstance(error, NoAnswer):
                # The server refused. After a broken connection or a deadline it may have swapped, or may yet.
                self.unverified = before

        await self.request(self._send(self.replica.swap_weights(version), settle))

    async def resume(self) -> None:
        """Resume it once it has settled, also one that left: it may be draining. Has no deadline."""
        assert not self.unverified, f"{self.name} must not resume with unknown weights"
        await self.settle()
        await self._send(self.replica.resume())
        self.paused_at, self.asleep = None, False

    async def canary_difference(self, canary: Canary) -> float:
        """Largest difference in nats from the learner's log-probs. Raises as `request`."""
        return canary.max_difference(await self.request(self.replica.score(canary.token_ids)))

    def abandon(self) -> None:
        """Abandon a command that has not settled; its result is discarded."""
        if self._command is not None:
            self._command.cancel()

    def _check_member(self) -> None:
        if self.left:
            raise EngineError(f"{self.name} left the fleet")

    def _send(
        self, command: Coroutine[Any, Any, None], on_settled: Callable[[asyncio.Future[None]], None] | None = None
    ) -> asyncio.Future[None]:
        """A future of the answer; cancelling it does not cancel the command."""
        assert self.settled, f"{self.name} was sent a command before the one before it settled"
        self._command = sent = asyncio.ensure_future(command)
        sent.add_done_callback(self._forget)
        if on_settled is not None:
            sent.add_done_callback(on_settled)
        return asyncio.shield(sent)

    def _forget(self, command: asyncio.Future[None]) -> None:
        """Its error refers to the attempt, which refers to the version that was pushed."""
        if self._command is command:
            self._command = None


class PushResult(msgspec.Struct):
    """What attempts, or a transfer, did."""

    failed: dict[str, str] = {}  # replica name -> why it did not get the weights
    canary: dict[str, float] = {}  # replica name -> difference in nats, verified or not
    pause_s: float = 0.0  # the longest time that a replica was paused
    transfer_s: float = 0.0  # the longest transfer
    sent_bytes: int = 0  # bytes that left the learner, written files included
    wrong: str = ""  # why the push stops: a replica took the weights twice and still computes something else

    def add(self, other: PushResult) -> None:
        self.failed |= other.failed
        self.canary |= other.canary
        self.pause_s = max(self.pause_s, other.pause_s)
        self.transfer_s = max(self.transfer_s, other.transfer_s)
        self.sent_bytes += other.sent_bytes
        self.wrong = other.wrong or self.wrong


class Transport(Protocol):
    """One way to move a snapshot to replicas. What a replica serves does not change."""

    async def transfer(
        self, snapshot: WeightSnapshot, targets: Sequence[PushTarget], seconds: float, *, retry: bool
    ) -> PushResult:
        """Have all `targets` stage `snapshot`, within `seconds`; their failures are in the result. `retry`: reuse nothing of an
        earlier attempt. Raises WeightSyncError: no target can be reached this way, for example because the disk is full."""
        ...

    def forget(self, name: str) -> None:
        """Drop what is known of this replica: it left, or its process was restarted."""
        ...

    def close(self) -> None: ...


class PushSettings(msgspec.Struct, frozen=True):
    """What is pushed, and how."""

    snapshot: WeightSnapshot
    transport: Transport
    mode: Partial
    tolerance: float
    record: RecordSpan = no_record  # receives what each replica went through


class PushAttempt:
    """One attempt at `targets`: all stage, then each pauses (by `mode`), swaps and resumes. `retry`: a first attempt failed."""

    def __init__(
        self,
        push: PushSettings,
        targets: Sequence[PushTarget],
        seconds: float,
        *,
        retry: bool = False,
        mode: Partial | None = None,
    ) -> None:
        self._push, self._targets, self._retry = push, targets, retry
        self._mode: Partial = mode or push.mode
        self._stage_s, self._swap_s = STAGE_SHARE * seconds, SWAP_SHARE * seconds
        self._resume_s = seconds - self._swap_s
        self._began = time.monotonic()
        self._done: set[str] = set()
        self._result = PushResult()

    async def run(self) -> PushResult:
        """Errors are in the result."""
        failed = self._result.failed
        try:
            await await_reply(self._swap_s, self._sequence(), names(self._targets), "see the servers' logs")
        except (SlipstreamError, OSError) as error:
            failed |= {t.name: str(error) for t in self._targets if t.name not in self._done | failed.keys()}
        except asyncio.CancelledError:
            self._resume_s = min(CANCEL_RESUME_S, self._resume_s)
            raise
        finally:
            paused = [t for t in self._targets if t.paused_at is not None and not t.unverified]
            self._result.failed = await each({t.name: self._resume(t) for t in paused}) | failed
        return self._result

    async def _sequence(self) -> None:
        failed, push = self._result.failed, self._push
        failed |= await each({t.name: self._settle(t) for t in self._targets if not t.settled})
        ready = [t for t in self._targets if t.name not in self._done | failed.keys()]
        if ready:
            left = self._stage_s - (time.monotonic() - self._began)
            with timed(push.record, "stage", version=push.snapshot.version, replicas=names(ready)):
                staged = await push.transport.transfer(push.snapshot, ready, left, retry=self._retry)
            self._result.add(staged)
            failed |= await each({t.name: self._switch(t) for t in ready if t.name not in staged.failed})

    async def _settle(self, target: PushTarget) -> None:
        waits_for, hint = f"{target.name} to finish its last command", "see its log; it stays paused until then"
        await await_reply(self._stage_s, target.settle(), waits_for, hint)
        if target.unverified and target.swapped == self._push.snapshot.version:  # its swap was only late
            await self._finish(target)

    async def _switch(self, target: PushTarget) -> None:
        """Wake, pause, swap, canary where the server scores while paused, resume."""
        if target.replica.sleeps and target.asleep is not False:  # first, as it may end a pause
            await await_reply(self._swap_s, target.wake(), f"{target.name} to wake")
        # Also one that an earlier attempt left paused, maybe in another mode.
        await await_reply(self._swap_s, target.pause(self._mode), f"{target.name} to pause")
        with timed(self._push.record, "swap", version=self._push.snapshot.version, replica=target.name):
            await target.swap(self._push.snapshot.version)
        await self._finish(target)

    async def _finish(self, target: PushTarget) -> None:
        """After the swap: resume, unless the canary shows wrong weights."""
        if target.replica.scores_paused:
            with timed(self._push.record, "canary", version=self._push.snapshot.version, replica=target.name):
                self._result.canary[target.name] = await target.canary_difference(self._push.snapshot.canary)
        if self._result.canary.get(target.name, 0.0) <= self._push.tolerance:
            target.unverified = False
            await self._resume(target)
        self._done.add(target.name)

    async def _resume(self, target: PushTarget) -> None:
        since = target.paused_at
        seconds = min(CANCEL_RESUME_S, self._resume_s) if target.left else self._resume_s
        hint = "see its log; catch_up resumes it once it answers"
        await await_reply(seconds, target.resume(), f"{target.name} to resume", hint)
        if since is not None:
            paused, now = time.perf_counter() - since, time_of_day()
            self._result.pause_s = max(self._result.pause_s, paused)
            ids: dict[str, Id] = {"version": self._push.snapshot.version, "replica": target.name}
            self._push.record(Span(now - paused, now, "pause", ids))


async def check_canary(push: PushSettings, target: PushTarget, seconds: float, result: PushResult) -> None:
    """Return where the target computes what the learner computes; ask it, unless its attempt did while it was paused (`result`).
    Above the tolerance it is pushed to once more.

    Raises:
        WeightSyncError: the second difference is above the tolerance, too; `result.wrong` says so.
        EngineError, DeadlineExceeded: it did not answer.
    """
    name, canary = target.name, result.canary
    for second in (False, True):
        if name not in canary:
            with timed(push.record, "canary", version=push.snapshot.version, replica=name):
                canary[name] = await target.canary_difference(push.snapshot.canary)
        if canary[name] <= push.tolerance:
            return
        if not second:
            logger.warning("%s: canary off by %g nats, pushing once more", name, canary[name])
            del canary[name]
            attempt = await PushAttempt(push, [target], seconds / 2, retry=True, mode="recompute").run()
            result.add(attempt)
            if attempt.failed:
                raise EngineError(attempt.failed[name])
    result.wrong = (
        f"{name} does not hold version {push.snapshot.version}: after two pushes its canary log-probs differ"
        f" from the learner's by {canary[name]:.3g} nats (weightsync.canary_tolerance={push.tolerance:g})"
    )
    raise WeightSyncError(result.wrong)


def names(targets: Sequence[PushTarget]) -> str:
    return ", ".join(target.name for target in targets)


async def await_reply(
    seconds: float, answer: Awaitable[T], waits_for: str, hint: str | Callable[[], str] = "see its log"
) -> T:
    """Await `answer` as the publisher. Raises DeadlineExceeded."""
    return await with_deadline(seconds, answer, who="publisher", waits_for=waits_for, hint=hint)


def failures(names: Sequence[str], outcomes: Sequence[object]) -> dict[str, str]:
    """Replica name -> error of those that failed with a SlipstreamError or OSError; any other exception is raised."""
    failed: dict[str, str] = {}
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, SlipstreamError | OSError):
            failed[name] = str(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    return failed


async def each(awaitables: Mapping[str, Awaitable[object]]) -> dict[str, str]:
    """Await all; replica name -> error of those that failed."""
    return failures(list(awaitables), await asyncio.gather(*awaitables.values(), return_exceptions=True))
