"""A run as a program: the program's process is rank 0 of the learner, and takes and steps when it wants to.

    program ──starts──> `slipstream program`, the supervisor ──starts──> buffer, engines, workers, the other ranks of the learner
       └── rank 0: take, step, commit, publish, as in `slipstream train`; the program's own code between

    who waits          for what                                        until
    the program        the supervisor, to start rank 0                 the supervisor's own deadlines; its end ends the wait
    the program        a batch, a step                                 as in `learner/loop.py`
    the program        the supervisor, to end the run                  END_S after rank 0 has ended

Invariants:
- However the program leaves the run, no process of it is left: the supervisor ends them, and the kernel does where the program is
  killed.
- Rank 0 lives in one task of its own, which carries out one verb at a time. A verb that has begun to step goes on to its end, also
  when its caller is cancelled: what is committed is published. A verb that failed ends the rank.
- An error of the program's own code leaves the run as an interrupt of `slipstream train` does: with a checkpoint of the last
  commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import chain, islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from ... import errors
from ...common import accelerator
from ...common.owned_folders import PRIVATE_VARIABLE
from ...common.process import PARENT
from ...common.tasks import Stopped
from ...common.waits import TrackedWait
from ...configs import Config
from ...errors import ConfigError, Interrupted, RoleDied, SlipstreamError, StateError, first_cause, with_deadline
from ...monitor.log import logged_to
from ..peers import peer_table
from ..run_context import ROLE, VARIABLE, RunContext
from ..supervisor.heartbeat import HeartbeatSender
from ..supervisor.processes import FINAL
from .messages import (
    BeginRun,
    FromProgram,
    FromSupervisor,
    LeaveRun,
    RankEnded,
    RunEnded,
    StartRank,
    StopRank,
    encode_line,
)

if TYPE_CHECKING:
    from ...buffer.messages import BatchPlan
    from ...buffer.trajectory import BatchRow, Trajectory
    from ...learner.metrics import StepMetrics
    from ..supervisor.learner_rank import LearnerRank

COMMAND = (sys.executable, "-P", "-m", "slipstream.launch.cli", "program")
END_S = 300.0  # longest wait for the other roles to end, and for the report
LINE_BYTES = 1 << 22  # of one message
T = TypeVar("T")
Verb = Callable[["LearnerRank"], Awaitable[Any]]


class Run:
    """The run that `config` describes, from `async with` to the end of its block.

        async with Run(load("quickstart", ["run.dir=runs/mine"])) as run:
            async for batch in run:
                metrics = await run.step(batch)

    After `learner.steps` the loop ends, and the block's end waits for the last evaluation and for `model/`. A `break`, an exception
    and Ctrl-C leave the run earlier: with a checkpoint of the last step, and all its processes ended. `resume` continues the run in
    `run.dir`, where there is one. With `show` the run prints a line per step and event on stderr.

    Entering raises ConfigError where something is wrong with the config or this machine, and nothing was started. Every call raises
    the error of the run where that fails, and StateError outside of the block.

    Attributes:
        summary: after the block, what `slipstream train` prints at the end of a run: evaluations, what to change, the report.
    """

    _active: ClassVar[bool] = False  # whether this process has a Run that is entered, or is being entered

    def __init__(self, config: Config, *, resume: bool = False, show: bool = False) -> None:
        if config.launch.by_ray:
            raise ConfigError(
                f"launch.kind: {config.launch.kind!r} is not allowed in a program, whose process is rank 0 of the learner; "
                "allowed: local and colocated"
            )
        self.config = config
        self.summary = ""
        self._begin = BeginRun(config, resume, show)
        self._process: asyncio.subprocess.Process | None = None
        self._started: asyncio.Queue[StartRank] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._rank: LearnerRank | None = None  # while it can be asked for something
        self._requests: asyncio.Queue[tuple[BatchPlan[BatchRow] | None, Verb, asyncio.Future[Any]] | None] = (
            asyncio.Queue()
        )
        self._stop = asyncio.Event()
        self._leaving = False  # before the last step, or without what comes after it
        self._interrupted = False  # by a signal to the supervisor

    async def __aenter__(self) -> Run:
        if PRIVATE_VARIABLE in os.environ or Run._active or self._process is not None:
            raise StateError("a process is in one run at a time, and a Run is entered once")
        Run._active = True
        if "torch" not in sys.modules:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads do not spin
        pipe, environment = asyncio.subprocess.PIPE, {**os.environ, PARENT: str(os.getpid())}
        started = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *COMMAND, stdin=pipe, stdout=pipe, env=environment, start_new_session=True, limit=LINE_BYTES
            )
        )
        try:
            await asyncio.shield(started)  # asyncio may hang where the start itself is cancelled
        except BaseException:
            await asyncio.wait({started})
            if not started.cancelled() and started.exception() is None:
                started.result().kill()
                await started.result().wait()
            Run._active = False
            raise
        self._process = process = started.result()
        assert process.stdout is not None
        self._send(self._begin)
        self._driving = asyncio.create_task(self._drive(), name="rank 0")
        self._listening = asyncio.create_task(self._listen(process.stdout), name="supervisor")
        begun = asyncio.create_task(self._begun.wait(), name="begun")
        try:
            with TrackedWait("the program", "the run to begin"):
                await asyncio.wait({begun, self._driving}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leaving = True
            with contextlib.suppress(ProcessLookupError):
                process.terminate()  # it may be checking the config, and read nothing
            await self._end(process)
            raise
        finally:
            begun.cancel()
        if self._driving.done():
            await self._end(process)
            raise self._error() or Interrupted("the run was stopped before it began")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process is not None
        if not self._driving.done() and (error is not None or self._steps_left()):
            self._leave()
        self._requests.put_nowait(None)
        try:
            await asyncio.wait({self._driving})
        finally:
            await self._end(self._process)
        failure = self._error()
        if error is None and failure is not None:
            raise failure
        if error is not None and failure is not None and failure is not error:
            error.add_note(f"the run: {errors.describe(failure)}")

    async def __aiter__(self) -> AsyncIterator[BatchPlan[BatchRow]]:
        """The batches, until the last step is made or the run is stopped. Each is stepped or discarded before the next one is asked
        for. Raises DeadlineExceeded where none comes within `learner.batch_s`."""
        while True:
            if (batch := await self._call(None, lambda rank: rank.loop.take())) is None:
                return
            yield batch

    async def step(self, batch: BatchPlan[BatchRow]) -> StepMetrics | None:
        """Train on the batch, commit it and publish the next version: what `slipstream train` does with it. The event loop stands
        still while the model computes. None where groups of the batch are set aside as unusable and it is taken again. Raises
        StateError where it is not the newest batch."""
        return await self._call(batch, lambda rank: rank.loop.step(batch))

    async def discard(self, batch: BatchPlan[BatchRow]) -> None:
        """Learn nothing from the batch: its tokens are discarded as `program`, and the next batch is for the same version. Raises
        as `step`."""
        await self._call(batch, lambda rank: rank.loop.discard(batch))

    async def trajectories(self, batch: BatchPlan[BatchRow]) -> tuple[tuple[Trajectory, ...], ...]:
        """The batch with its arrays, group by group: token ids, log-probs, the mask of what the policy sampled. Raises as
        `step`."""
        found = await self._call(batch, lambda rank: rank.client.read_rows(list(chain.from_iterable(batch.groups))))
        rows = iter(found)
        return tuple(tuple(islice(rows, len(group))) for group in batch.groups)

    def stop(self) -> None:
        """No batch is given out any more, as after a `break`. May be the handler of a signal."""
        self._leave()

    @property
    def version(self) -> int:
        """Of the weights: every step makes the next one."""
        return self._required().loop.state.version

    def _required(self) -> LearnerRank:
        if self._rank is None:
            raise self._error() or StateError("there is no run outside of the block of `async with Run(config)`")
        return self._rank

    def _steps_left(self) -> bool:
        return self._rank is None or self._rank.loop.state.step < self.config.learner.steps

    async def _call(self, batch: BatchPlan[BatchRow] | None, verb: Callable[[LearnerRank], Awaitable[T]]) -> T:
        """Have rank 0 carry out a verb on `batch`, None for one that needs that there is none."""
        self._required()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((batch, verb, done))
        either = {done, self._driving}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave()
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                done.exception()  # the caller does not hear of it, the run's end does
            raise
        if done.done():
            return done.result()
        assert self._process is not None
        await self._end(self._process)
        raise self._error() or StateError("the run has ended")

    # --- rank 0, in a task of its own -----------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Be rank 0 of the learner until the program leaves, or the run ends."""
        status = FINAL
        try:
            start = await self._started.get()
            with _as_role(start.environment):
                await self._be_rank(start.environment)
            status = 0
        finally:
            self._rank = None
            self._send(RankEnded(status))

    async def _be_rank(self, environment: dict[str, str]) -> None:
        context, role = msgspec.json.decode(environment[VARIABLE], type=RunContext), environment[ROLE]
        log = context.dir / "logs" / f"{role}.log"
        with logged_to(log, role), HeartbeatSender(context.addresses.supervisor, role) as heartbeat:
            try:
                await self._train(context, heartbeat)
            except Stopped:
                return
            except BaseExceptionGroup as group:  # of the task groups inside the rank
                if isinstance(error := first_cause(group), Stopped):
                    return
                heartbeat.failed(errors.describe(error), expected=isinstance(error, SlipstreamError))
                raise error from group
            except Exception as error:
                heartbeat.failed(errors.describe(error), expected=isinstance(error, SlipstreamError))
                raise

    async def _train(self, context: RunContext, heartbeat: HeartbeatSender) -> None:
        from ..supervisor.learner_rank import open_rank

        async with open_rank(peer_table(context), context, 0, heartbeat, self._stop) as rank:
            try:
                await rank.loop.begin(self._stop, heartbeat.ready)
                self._rank = rank
                self._begun.set()
                await self._serve(rank)
                await (rank.loop.leave() if self._leaving else rank.loop.save())
            finally:
                await rank.loop.close()
            if not self._leaving:
                await rank.finish()

    async def _serve(self, rank: LearnerRank) -> None:
        """Carry out what the program asks for. An error goes to the caller, and ends the rank: the model may be ahead of the last
        commit. Of a batch that is not the newest any more, which another task may have stepped, only the caller hears."""
        while (request := await self._requests.get()) is not None:
            batch, verb, done = request
            try:
                rank.loop.require(batch)
            except StateError as error:
                done.set_exception(error)
                continue
            try:
                done.set_result(await verb(rank))
            except Exception as error:
                done.set_exception(error)
                raise

    # --- the supervisor -------------------------------------------------------------------------------------------------

    def _send(self, message: FromProgram) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(encode_line(message))  # dropped where the supervisor has ended

    def _leave(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._stop.set()  # a wait for a batch ends now, a step goes on
            self._send(LeaveRun())

    async def _listen(self, lines: asyncio.StreamReader) -> RunEnded | None:
        """What the run ended with; None where the supervisor ended without a word."""
        decode = msgspec.json.Decoder(FromSupervisor).decode
        try:
            while line := await lines.readline():
                match message := decode(line):
                    case StartRank():
                        self._started.put_nowait(message)
                    case StopRank():
                        self._interrupted = not self._leaving
                        self._stop.set()
                    case RunEnded():
                        return message
            return None
        finally:
            self._driving.cancel()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Return when rank 0 and the supervisor's process have ended; the supervisor is killed where it is late, or where this is
        cancelled, as all tasks are at a second Ctrl-C."""

        async def end() -> None:
            await asyncio.wait({self._listening})
            if not self._listening.cancelled():
                await process.wait()

        hint = f"it is killed; see {self.config.run.dir}/logs/supervisor.log"
        try:
            await with_deadline(END_S, end(), who="the program", waits_for="the supervisor to end the run", hint=hint)
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            self._driving.cancel()
            await asyncio.wait({self._driving, self._listening, asyncio.ensure_future(process.wait())})
            Run._active = False

    def _error(self) -> BaseException | None:
        """Why the run ended before its last step, where the program has not left it."""
        if self._process is None:
            return None
        if self._driving.done() and not self._driving.cancelled() and (own := self._driving.exception()):
            return own
        if not self._listening.done() or self._listening.cancelled():
            return None
        ended = self._listening.result()
        if ended is None:
            logs = f"{self.config.run.dir}/logs/supervisor.log"
            return RoleDied(
                f"the supervisor of the run ended without a word; see {logs}, and continue with resume=True"
            )
        if not ended.kind:
            self.summary = ended.text
            return None
        if ended.kind == Interrupted.__name__ and not self._interrupted:
            return None
        kind = getattr(errors, ended.kind, RoleDied)
        return kind.__new__(kind, ended.text)  # some have arguments of their own


@contextlib.contextmanager
def _as_role(environment: dict[str, str]) -> Iterator[None]:
    """This process has what the role's processes would have of `environment`: keys, ranks, GPUs, threads."""
    import torch

    if (kind := accelerator.current()) and accelerator.has_been_used():
        for name in kind.visible:
            if environment.get(name, os.environ.get(name)) != os.environ.get(name):
                raise ConfigError(
                    f"{name}: the run gives this process the GPUs {environment[name]}, but it has used {kind.name} before; enter "
                    "the run first"
                )
    wanted = {name: value for name, value in environment.items() if name not in (VARIABLE, ROLE, PARENT)}
    before, threads = {name: os.environ.get(name) for name in wanted}, torch.get_num_threads()
    os.environ.update(wanted)
    torch.set_num_threads(int(wanted["OMP_NUM_THREADS"]))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # for functions that the config names
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
