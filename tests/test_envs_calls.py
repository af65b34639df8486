"""Blocking functions run in a thread, and are interrupted when their caller is cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from typing import Any

import pytest
from slipstream.envs import in_thread

SOON = 10.0


async def test_a_function_that_blocks_does_not_hold_up_the_loop() -> None:
    released = threading.Event()

    def blocks(word: str) -> str:
        assert released.wait(SOON)
        return f"{word} from {threading.current_thread().name}"

    waiting = asyncio.create_task(in_thread(blocks, "hello"))
    await asyncio.sleep(0.01)  # the loop turns meanwhile
    assert not waiting.done()
    released.set()
    assert (await waiting).startswith("hello from test_a_function")


@pytest.mark.parametrize("error", [KeyError("row 3"), SystemExit(3), asyncio.CancelledError(), StopAsyncIteration()])
async def test_what_a_function_raises_is_raised_where_it_is_awaited(error: BaseException) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await in_thread(fails)
    assert caught.value is error


async def test_a_function_sees_the_context_of_its_caller() -> None:
    word = contextvars.ContextVar("word", default="none")
    word.set("mine")
    assert await in_thread(word.get) == "mine"


async def test_a_function_whose_caller_is_cancelled_is_interrupted() -> None:
    began, ended = threading.Event(), threading.Event()

    def forever() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    work = asyncio.create_task(in_thread(forever))
    assert await in_thread(began.wait, SOON)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await in_thread(ended.wait, SOON)


async def test_a_function_that_runs_no_python_is_abandoned() -> None:
    released = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await in_thread(released.wait)  # no line of Python runs in there
    assert time.monotonic() - began < SOON
    assert "Event.wait" in [thread.name for thread in threading.enumerate()]
    released.set()


async def test_a_function_that_is_cancelled_before_its_thread_runs_it_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is still in `threading`'s own code, where an exception would be reported as one of nobody's."""
    cancelled, ran, elsewhere = threading.Event(), list[int](), list[threading.ExceptHookArgs]()
    threads = list[threading.Thread]()

    class Late(threading.Thread):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            threads.append(self)

        def run(self) -> None:
            cancelled.wait(SOON)
            super().run()

    monkeypatch.setattr(threading, "excepthook", elsewhere.append)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", Late)
        work = asyncio.create_task(in_thread(ran.append, 1))
        await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    cancelled.set()
    for thread in threads:
        await asyncio.to_thread(thread.join, SOON)
    assert (len(threads), ran, elsewhere) == (1, [], [])


async def test_functions_that_end_while_they_are_cancelled_raise_nothing_elsewhere() -> None:
    """The race between the end of a function and its breaking off, many times."""
    threads = threading.active_count()
    for number in range(300):
        work = asyncio.create_task(in_thread(time.sleep, number % 7 * 1e-5))
        await asyncio.sleep(number % 5 * 1e-5)
        work.cancel()
        await asyncio.wait({work})
    assert await in_thread(len, "alive") == 5
    deadline = time.monotonic() + SOON
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
