"""The thread of Slipstream's own server that owns the model: it steps the batch, and executes commands of the event loop between
two steps.

    event loop ──commands (a queue)──> engine thread ──chunks (call_soon_threadsafe)──> one queue per request

Invariants:
- Only this thread uses the runner and the model: a swap falls between two steps, so every token has exactly one version.
- The thread blocks on its command queue while it is paused or idle; it never polls.
- While the server sleeps it is paused, and requests wait. It steps and scores only with weights that were loaded since.
- Any error but a `SlipstreamError` leaves the model in an unknown state: the thread ends and calls `failed`, which ends the
  process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
import numpy as np

from ....agents.base import FinishReason
from ....errors import EngineError, SlipstreamError
from ..base import UNPUSHED, EngineLoad, OutputSpan
from ..expert_codec import encode
from .contract import ModelRunner, SampledToken, Sequence
from .protocol import CACHE, WEIGHTS, BadRequest, Logprobs, WireChoice, logprob

T = TypeVar("T")
Mode = Literal["keep", "abort"]  # what a pause does with requests under way


class _Output:
    """The tokens of one sequence that were not sent yet, and the spans of all."""

    def __init__(self, stream: asyncio.Queue[WireChoice], interval: int | None) -> None:
        self.stream = stream
        self.waiting: list[SampledToken] = []
        self._interval = interval
        self._length = 0
        self._spans: list[OutputSpan] = []

    def add(self, sampled: SampledToken, version: str) -> None:
        self.waiting.append(sampled)
        start = self._length
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._length += 1
        self._spans.append(OutputSpan(version, start, self._length))

    def due(self) -> bool:
        """Whether to send a chunk: at the first token, and then every `interval` tokens."""
        return self._interval is not None and (self._length == 1 or len(self.waiting) >= self._interval)

    def flush(self, finish: FinishReason | None) -> WireChoice:
        tokens, self.waiting = self.waiting, []
        logprobs = Logprobs(tuple(logprob(s.token, s.logprob) for s in tokens))
        experts = [s.experts for s in tokens if s.experts is not None]
        recorded = encode(np.concatenate(experts)) if experts else None
        ids = tuple(s.token for s in tokens)
        return WireChoice(ids, logprobs, tuple(self._spans), finish, routed_experts=recorded)


class EngineThread:
    """Runs `runner` for the event loop that `start` was called in; calls `failed`, in its own thread, with the error that ended
    it."""

    def __init__(self, runner: ModelRunner, failed: Callable[[BaseException], None]) -> None:
        self.version = UNPUSHED  # of the weights that the next token is sampled from
        self.paused = False
        self.freed: frozenset[str] = frozenset()  # of `WEIGHTS` and `CACHE`: the server sleeps while it is not empty
        self._loaded = True  # the weights are those of `version`: they were not freed since
        self.load = EngineLoad(0, 0, 0.0, 0)  # as of the last step
        self._sampled = 0
        self._runner = runner
        self._failed = failed
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._outputs: dict[str, _Output] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the current step."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, do: Callable[[], T]) -> T:
        """The result of `do`, run in the engine thread between two steps."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def command() -> None:
            try:
                settle, outcome = answer.set_result, do()
            except (SlipstreamError, BadRequest) as error:
                settle, outcome = answer.set_exception, error
            if answer.set_running_or_notify_cancel():  # else the caller was cancelled
                settle(outcome)  # type: ignore[arg-type]

        self._commands.put(command)
        return await asyncio.wrap_future(answer)

    async def submit(self, sequence: Sequence, interval: int | None) -> asyncio.Queue[WireChoice]:
        """Begin to decode. The queue gets chunks of `interval` tokens (None: all in one), the last one with a finish reason. Raises
        BadRequest: the id is in use."""
        stream: asyncio.Queue[WireChoice] = asyncio.Queue()

        def add() -> None:
            if sequence.id in self._outputs:
                raise BadRequest(f"request_id {sequence.id!r} is in use")
            self._runner.add(sequence)
            self._outputs[sequence.id] = _Output(stream, interval)

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.abort(sequence.id)
            raise
        return stream

    def abort(self, id: str) -> None:
        """End a sequence, if it exists, with the tokens it has. Returns at once."""
        self._commands.put(lambda: self._abort((id,)))

    async def aborted(self, ids: tuple[str, ...] | None) -> int:
        """End sequences, None means all, with the tokens they have; returns how many, once they no longer run."""
        return await self.call(lambda: self._abort(tuple(self._outputs) if ids is None else ids))

    async def pause(self, mode: Mode, *, clear_cache: bool) -> None:
        """Stop stepping; returns after the current step. Sends all sampled tokens, so that the server's death loses none."""
        await self.call(lambda: self._pause(mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        """Raises EngineError: it sleeps."""
        await self.call(self._resume)

    async def swap(self, version: str, load: Callable[[], None]) -> None:
        """Replace the weights by `load`; the next token is labeled `version`. Raises EngineError: their memory is freed."""

        def swap() -> None:
            if WEIGHTS in self.freed:
                raise EngineError("the memory of the weights is freed; wake them first")
            load()
            self.version, self._loaded = version, True

        await self.call(swap)

    async def sleep(self, mode: Mode, free_weights: Callable[[], None]) -> None:
        """Pause, and free the memory of keys, values and, by `free_weights`, weights. No effect on a server that sleeps."""

        def sleep() -> None:
            self._pause(mode, clear_cache=not self.freed)
            if CACHE not in self.freed:
                self._runner.free_cache()
            if WEIGHTS not in self.freed:
                free_weights()
            self.freed, self._loaded = frozenset((WEIGHTS, CACHE)), False

        await self.call(sleep)

    async def wake(self, parts: frozenset[str], allocate_weights: Callable[[], None]) -> bool:
        """Allocate the memory of `parts` again, of weights by `allocate_weights`; `swap` loads them. Resumes, and returns True,
        once nothing is freed and weights are loaded."""

        def wake() -> bool:
            woken = parts & self.freed
            if WEIGHTS in woken:
                allocate_weights()
            if CACHE in woken:
                self._runner.allocate_cache()
            self.freed -= woken
            awake = not self.freed and self._loaded
            if awake:
                self._resume()
            return awake

        return await self.call(wake)

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Raises EngineError: its weights are freed, or were not loaded since."""

        def score() -> list[float]:
            self._require_weights()
            return self._runner.score(token_ids)

        return await self.call(score)

    def _pause(self, mode: Mode, *, clear_cache: bool) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(tuple(self._outputs))
        self._send([(output, None) for output in self._outputs.values() if output.waiting])
        if clear_cache:
            self._runner.recompute()

    def _resume(self) -> None:
        self._require_weights()
        if self.freed:
            raise EngineError("it sleeps: the memory of keys and values is freed")
        self.paused = False

    def _require_weights(self) -> None:
        if not self._loaded:
            raise EngineError("it sleeps: its weights are freed, and none were loaded since")

    def _run(self) -> None:
        try:
            while self._run_commands(wait=self.paused or not self._runner.busy()):
                if not self.paused and self._runner.busy():
                    self._advance()
                self.load = msgspec.structs.replace(self._runner.get_load(), tokens=self._sampled)
        except BaseException as error:
            self._failed(error)

    def _run_commands(self, *, wait: bool) -> bool:
        """Run the queued commands; with `wait`, block for the first one. False when the thread is to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _advance(self) -> None:
        ready: list[tuple[_Output, FinishReason | None]] = []
        for sampled in self._runner.step():
            self._sampled += 1
            output = self._outputs[sampled.id]
            output.add(sampled, self.version)
            if sampled.finish:
                del self._outputs[sampled.id]
            if sampled.finish or output.due():
                ready.append((output, sampled.finish))
        self._send(ready)

    def _abort(self, ids: tuple[str, ...]) -> int:
        known = [id for id in ids if id in self._outputs]
        for id in known:
            self._runner.abort(id)
        self._send([(self._outputs.pop(id), "abort") for id in known])
        return len(known)

    def _send(self, ready: list[tuple[_Output, FinishReason | None]]) -> None:
        if ready and self._loop is not None:
            chunks = [(output.stream, output.flush(finish)) for output, finish in ready]
            self._loop.call_soon_threadsafe(_put, chunks)


def _put(chunks: list[tuple[asyncio.Queue[WireChoice], WireChoice]]) -> None:
    for stream, chunk in chunks:
        stream.put_nowait(chunk)
