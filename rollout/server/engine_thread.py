"""The one thread that owns the model: it steps the batch, and between two steps does what the event loop asks of it.

    event loop ──commands (a queue)──> engine thread ──chunks (call_soon_threadsafe)──> one queue per request

Invariants:
- Everything that touches the stepper or the model runs here, one thing after the other: a swap falls between two steps, and so
  every token has exactly one version.
- The thread sleeps in its command queue while it is paused or has nothing to do; it never polls.
- An error that is not one of ours (`SlipstreamError`) leaves the model in an unknown state: the thread ends and `failed` is
  called, which ends the process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from ...agents.base import FinishReason
from ...errors import SlipstreamError
from ..client import UNPUSHED
from ..engine import Pressure
from .protocol import BadRequest, Span
from .stepper import Sampled, Sequence, Stepper

T = TypeVar("T")

CHUNK = 16
"""Tokens sent at a time, unless a request says otherwise: what the death of a server costs at most, and what keeps sending
cheap beside computing."""


class Chunk(msgspec.Struct, frozen=True):
    """n tokens of a completion since its last chunk, the spans of all its tokens, and why it ended, if it did."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish: FinishReason | None


class _Output:
    """What was sampled of one sequence, and what of it was not sent yet."""

    def __init__(self, stream: asyncio.Queue[Chunk], interval: int | None) -> None:
        self.stream = stream
        self.waiting: list[Sampled] = []
        self._interval = interval
        self._length = 0
        self._spans: list[Span] = []

    def take(self, sampled: Sampled, version: str) -> None:
        self.waiting.append(sampled)
        start = self._length
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._length += 1
        self._spans.append(Span(version, start, self._length))

    def due(self) -> bool:
        """Whether it is time for a chunk: at the first token, and then at every `interval` tokens."""
        return self._interval is not None and (self._length == 1 or len(self.waiting) >= self._interval)

    def flush(self, finish: FinishReason | None) -> Chunk:
        tokens, self.waiting = self.waiting, []
        return Chunk(tuple(s.token for s in tokens), tuple(s.logprob for s in tokens), tuple(self._spans), finish)


class EngineThread:
    """Runs `stepper` for the event loop that `start` was called in.

    Args:
        stepper: what computes.
        failed: called in the engine thread with the error that ended it.
    """

    def __init__(self, stepper: Stepper, failed: Callable[[BaseException], None]) -> None:
        self.version = UNPUSHED
        """What the weights are called that the next token is sampled from."""
        self.paused = False
        self.pressure = Pressure(0, 0, 0.0)
        """As of the last step."""
        self._stepper = stepper
        self._failed = failed
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outputs: dict[str, _Output] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the step under way."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    async def call(self, do: Callable[[], T]) -> T:
        """The result of `do`, run in the engine thread between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = do()
            except (SlipstreamError, BadRequest) as error:
                loop.call_soon_threadsafe(_fail, answer, error)
            else:
                loop.call_soon_threadsafe(_settle, answer, result)

        self._commands.put(command)
        return await answer

    async def submit(self, sequence: Sequence, interval: int | None = CHUNK) -> asyncio.Queue[Chunk]:
        """Begin to decode. Chunks of `interval` tokens (None: all at once) come into the queue, the last one with a finish.

        Raises:
            BadRequest: the id is in use.
        """
        stream: asyncio.Queue[Chunk] = asyncio.Queue()

        def add() -> None:
            if sequence.id in self._outputs:
                raise BadRequest(f"request_id {sequence.id!r} is in use")
            self._stepper.add(sequence)
            self._outputs[sequence.id] = _Output(stream, interval)

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.abort(sequence.id)
            raise
        return stream

    def abort(self, id: str) -> None:
        """End a sequence with what it has, if it is there. Returns at once."""

        def abort() -> None:
            self._abort((id,))

        self._commands.put(abort)

    async def aborted(self, ids: tuple[str, ...] | None) -> int:
        """End sequences, None means all, with what they have; returns how many, when they no longer run."""
        return await self.call(lambda: self._abort(tuple(self._outputs) if ids is None else ids))

    async def pause(self, mode: Literal["keep", "abort"], *, clear_cache: bool) -> None:
        """Stop stepping; returns when no step is under way. What is sampled is sent, so that no death can cost it."""

        def pause() -> None:
            self.paused = True
            if mode == "abort":
                self._abort(tuple(self._outputs))
            self._send([(output, None) for output in self._outputs.values() if output.waiting])
            if clear_cache:
                self._stepper.recompute()

        await self.call(pause)

    async def resume(self) -> None:
        def resume() -> None:
            self.paused = False

        await self.call(resume)

    async def swap(self, version: str, load: Callable[[], None]) -> None:
        """Replace the weights by `load`, and call them `version` from the next token on."""

        def swap() -> None:
            load()
            self.version = version

        await self.call(swap)

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probs of `token_ids[1:]` under the weights of this moment, paused or not."""
        return await self.call(lambda: self._stepper.score(token_ids))

    def _run(self) -> None:
        try:
            while self._obey(wait=self.paused or not self._stepper.busy()):
                if not self.paused and self._stepper.busy():
                    self._advance()
                self.pressure = self._stepper.pressure()
        except BaseException as error:
            self._failed(error)

    def _obey(self, *, wait: bool) -> bool:
        """Do what was asked for; with `wait`, until something is. False when it is time to end."""
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
        for sampled in self._stepper.step():
            output = self._outputs[sampled.id]
            output.take(sampled, self.version)
            if sampled.finish:
                del self._outputs[sampled.id]
            if sampled.finish or output.due():
                ready.append((output, sampled.finish))
        self._send(ready)

    def _abort(self, ids: tuple[str, ...]) -> int:
        known = [id for id in ids if id in self._outputs]
        for id in known:
            self._stepper.abort(id)
        self._send([(self._outputs.pop(id), "abort") for id in known])
        return len(known)

    def _send(self, ready: list[tuple[_Output, FinishReason | None]]) -> None:
        if ready and self._loop is not None:
            chunks = [(output.stream, output.flush(finish)) for output, finish in ready]
            self._loop.call_soon_threadsafe(_put, chunks)


def _put(chunks: list[tuple[asyncio.Queue[Chunk], Chunk]]) -> None:
    for stream, chunk in chunks:
        stream.put_nowait(chunk)


def _settle(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():  # else nobody waits any more
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
