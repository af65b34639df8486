"""Work that ends early on a stop event or with another process, and blocking work in a thread of its own.

Invariants:
- `run_or_stop` leaves no task behind, however it ends.
- A thread started by `in_thread` is a daemon: work that hangs does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)
# How long the interpreter waits at exit for abandoned threads: one that ends inside torch's C++ code aborts the process.
EXIT_JOIN_S = 10.0
T = TypeVar("T")


class Stopped(Exception):
    """The stop event was set, or the process exited, before the work was done."""


class ThreadCancelled(BaseException):
    """Raised in a thread whose future was cancelled."""


async def run_or_stop(work: Awaitable[T], stop: asyncio.Event) -> T:
    """The result of `work`. When the caller is cancelled, so is `work`.

    Raises:
        Stopped: `stop` was set first; `work` was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait({working, stopping})


async def run_unless_exited(work: Coroutine[Any, Any, T], pid: int) -> T:
    """The result of `work`. When the caller is cancelled, so is `work`.

    Raises:
        Stopped: process `pid` of this host exited first; `work` was cancelled and has ended.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        work.close()
        raise Stopped from None
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process, exited.set)
    try:
        return await run_or_stop(work, exited)
    finally:
        loop.remove_reader(process)
        os.close(process)


def being_cancelled() -> bool:
    """Whether the running task was cancelled from outside. If not, a CancelledError was raised by the code that it runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def in_thread(work: Callable[[], T], name: str, *, interrupt: bool = False) -> asyncio.Future[T]:
    """Run `work` in a thread of its own, so that a call that hangs holds back no other work, as it would in the loop's pool.

    Cancelling the future abandons the thread; with `interrupt` it also raises `ThreadCancelled` there, which takes effect at the
    next Python instruction, and work that has not begun does not begin. Work that holds the interpreter's lock for minutes belongs
    in a process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    lock, begun, finished = threading.Lock(), False, False

    def run(future: asyncio.Future[T]) -> None:
        nonlocal begun, finished
        with contextlib.suppress(ThreadCancelled):
            with lock:
                if interrupt and future.cancelled():
                    return
                begun = True  # from here on `ThreadCancelled` ends in the `suppress`; before, in threading's own code
            try:
                outcome: tuple[Callable[[Any], None], Any] = (future.set_result, work())
            except StopIteration as error:  # a future refuses it
                outcome = (future.set_exception, RuntimeError(f"{name} raised StopIteration({error.value!r})"))
            except BaseException as error:
                outcome = (future.set_exception, error)
            with lock:
                finished = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, future, *outcome)
            # An error refers to this frame: the two would keep each other, and all that its traceback refers to.
            del future, outcome

    def cancelled(future: asyncio.Future[T]) -> None:
        with lock:
            if not begun or finished or not future.cancelled():
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(ThreadCancelled)
            )
        log.warning("%s is cancelled; the thread ends at its next Python instruction", name)

    thread = threading.Thread(target=run, args=(future,), name=name, daemon=True)
    if interrupt:
        future.add_done_callback(cancelled)
    else:
        _threads.add(thread)
    thread.start()
    return future


def _settle(future: asyncio.Future[Any], setter: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        setter(outcome)


def start_thread(work: Callable[[], None], name: str) -> None:
    """Run `work` in a daemon thread, which the interpreter waits for at exit, for `EXIT_JOIN_S` at most."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _join_threads() -> None:
    until = time.monotonic() + EXIT_JOIN_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))
