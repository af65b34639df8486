"""Checks of an environment against its contract, for its author. Each plays real episodes with scripted policies and returns a
line, or raises ContractViolation with what is wrong and how to mend it.

Invariants:
- Nothing is assumed of the environment beyond `envs/base.py`. Every wait has a deadline.
- The scripted policies say what policies say: text, nothing, broken calls, calls of no tool, calls that fit a schema and that do
  not. They are seeded, so a difference between two episodes of one task is the environment's.
- Tasks, messages, rewards and ends of episodes are compared; metrics and timings are not, they may differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from subprocess import PIPE
from typing import Any, TypeVar

import jsonschema
import msgspec
import psutil

from ..common.unawaited import UnawaitedLog, without_await
from ..configs.environments import EnvironmentKind
from ..errors import EnvError, SlipstreamError, describe_user_error
from .base import Environment, Message, Observation, StepResult, Task, TaskSource, checked_metrics, checked_reward
from .cpu_starvation import CpuStarvation
from .registry import task_source
from .sandbox import closing_pools
from .scripted_policy import scripted
from .simple import Split
from .tools import in_thread

T = TypeVar("T")

TASKS = 32  # whose equality between processes is checked
EPISODES = 4  # tasks that are played
BLOCKED_S = 0.1  # longest stand-still of the event loop: hundreds of episodes share it
TRIES = 3  # of the check of the event loop
STEP_S = 120.0  # longest task, reset or step; as in a run
CLOSE_S = 30.0  # longest close; as in a run
ALIVE_S = 1.0  # between signs of life while the event loop turns
CANCEL_S = 5.0  # longest end of what was cancelled; as in a run
OTHER_HASH_SEED = "77"  # of the process that makes the same tasks


class ContractViolation(Exception):
    """The environment does not keep its contract."""


class BrokenCall(ContractViolation):
    """A call of the environment raises, does not end, or returns what the contract does not allow: every other check that makes it
    would say so again."""


class Subject(msgspec.Struct, frozen=True):
    """The environment that is checked: its config, and one source of it."""

    config: EnvironmentKind
    seed: int
    source: TaskSource
    alive: Callable[[], None] = lambda: None  # a check calls it while it goes on


def checked(value: object, kind: type[T], what: str) -> T:
    """What an environment returned, as a valid `kind`. Raises BrokenCall."""
    try:
        return msgspec.convert(msgspec.to_builtins(value), kind)
    except (TypeError, msgspec.ValidationError) as error:
        if why := without_await(value):
            plain = "; `task` is a plain function, `def task`" if kind is Task else ""
            raise BrokenCall(f"{what}: {why}{plain}") from None
        raise BrokenCall(f"{what} returned {value!r:.80}, which is no valid {kind.__name__}: {error}") from None


async def in_time(work: Awaitable[T], what: str, seconds: float | None = None) -> T:
    """What `work` returns. Raises BrokenCall: it is no coroutine; it takes longer than `seconds`, `STEP_S` without any,
    also where it ignores its cancellation; or it raised."""
    seconds = STEP_S if seconds is None else seconds
    if not inspect.isawaitable(work):
        raise BrokenCall(f"{what} returned {work!r:.80} and no coroutine; write `async def {what}`")
    task = asyncio.ensure_future(work)
    try:
        _, running = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if running:
        task.cancel()
        _, running = await asyncio.wait({task}, timeout=CANCEL_S)
        raise BrokenCall(f"{what} took longer than {seconds:g} s{', and ignores its cancellation' * bool(running)}")
    try:
        return task.result()
    except ContractViolation:
        raise
    except (Exception, asyncio.CancelledError) as error:  # whatever the environment raises
        raise BrokenCall(f"{what} raised {describe_user_error(error)}") from error


async def make_task(source: TaskSource, index: int) -> Task:
    """Raises BrokenCall."""
    return checked(await in_time(in_thread(source.task, index), f"task {index}"), Task, f"task {index}")


async def play(source: TaskSource, index: int, task: Task | None = None) -> bytes:
    """An episode of a scripted policy: its opening and what followed, encoded. `task` is made before where several are played at
    once: a source makes one at a time. Raises BrokenCall."""
    task = task or await make_task(source, index)
    env, seen = source.make(), []
    try:
        opening = checked(await in_time(env.reset(task), "reset"), Observation, "reset")
        seen.append(opening)
        async with scripted(source, opening, index) as messages:
            for message in messages:
                result = await step(env, message, bool(opening.tools))
                seen.append((result.messages, result.reward, result.done, result.truncated))
                if result.done:
                    break
                await asyncio.sleep(0)
    finally:
        await in_time(env.close(), "close", CLOSE_S)
    return msgspec.json.encode(seen, order="sorted")


async def step(env: Environment, message: Message, has_tools: bool) -> StepResult:
    """A step whose result keeps the contract. Raises BrokenCall."""
    result = await in_time(env.step(message), "step")
    if isinstance(result, StepResult):
        try:
            reward, metrics = checked_reward(result.reward), checked_metrics(result.metrics)
        except EnvError as error:
            raise BrokenCall(f"step: {error}") from None
        result = msgspec.structs.replace(result, reward=reward, metrics=metrics)
    result = checked(result, StepResult, "step")
    if result.done:
        return result
    if not result.messages:
        raise BrokenCall(f"step({message!r:.80}) is not done and has no message: the policy would speak twice in a row")
    answered = {reply.tool_call_id for reply in result.messages if reply.role == "tool"}
    if has_tools and (missing := {call.id for call in message.tool_calls} - answered):
        names = ", ".join(call.name for call in message.tool_calls if call.id in missing)
        raise BrokenCall(f"no tool message answers the call of {names}; set tool_call_id to the call's id")
    return result


def payloads(source: TaskSource, indices: Sequence[int], alive: Callable[[], None] = lambda: None) -> list[bytes]:
    made = list[bytes]()
    for i in indices:
        made.append(msgspec.json.encode(checked(source.task(i), Task, f"task {i}"), order="sorted"))
        alive()
    return made


def tasks(subject: Subject) -> str:
    """The same tasks whatever was asked before, and in another process with another hash seed."""
    indices, alive = range(TASKS), subject.alive
    try:
        here = payloads(subject.source, indices, alive)
        again = payloads(task_source(subject.config, "train", subject.seed), indices[::-1], alive)[::-1]
        held_out = payloads(task_source(subject.config, "eval", subject.seed), indices, alive)
    except (ContractViolation, SlipstreamError):
        raise
    except Exception as error:  # whatever the environment raises
        raise BrokenCall(f"making a task raised {describe_user_error(error)}") from error
    if here != again:
        raise ContractViolation("task(i) depends on what was asked before, or on the global `random`; use self.rng(i)")
    if (there := _elsewhere(subject)) != here:
        wrong = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), len(there))
        raise ContractViolation(
            f"another process makes another task {wrong}: it depends on hash(), time or `random`; use self.rng(i)"
        )
    both = len({_content(t) for t in held_out} & {_content(t) for t in here})
    overlap = f", {both} of them in evaluation, too" if both else ", none of them in evaluation"
    return f"{TASKS} tasks, {len({_content(t) for t in here})} different, the same in another process{overlap}"


def _content(task: bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(task, type=Task).payload, order="sorted")


def _elsewhere(subject: Subject) -> list[bytes]:
    """The tasks, made by a process of its own."""
    code = (
        "import sys, msgspec\n"
        "sys.path[:] = msgspec.json.decode(sys.argv[1])\n"
        "from slipstream.configs.environments import EnvironmentKind\n"
        "from slipstream.envs.check import TASKS, payloads\n"
        "from slipstream.envs.registry import task_source\n"
        "config = msgspec.json.decode(sys.argv[2], type=EnvironmentKind)\n"
        "made = payloads(task_source(config, 'train', int(sys.argv[3])), range(TASKS))\n"
        "sys.stdout.buffer.write(b'\\0tasks\\0' + msgspec.msgpack.encode(made))\n"
    )
    given = (msgspec.json.encode(sys.path).decode(), msgspec.json.encode(subject.config).decode(), str(subject.seed))
    environment = {**os.environ, "PYTHONHASHSEED": OTHER_HASH_SEED}
    process, started = (
        subprocess.Popen([sys.executable, "-c", code, *given], stdout=PIPE, stderr=PIPE, env=environment),
        time.monotonic(),
    )
    with process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, errors = process.communicate(timeout=ALIVE_S)
                break
            subject.alive()
            if time.monotonic() - started > STEP_S:
                process.kill()
                raise ContractViolation(f"another process made no tasks within {STEP_S:g} s")
    _, mark, made = out.partition(b"\0tasks\0")
    if process.returncode or not mark:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ContractViolation(f"another process cannot make the tasks: {last[0]}")
    return msgspec.msgpack.decode(made, type=list[bytes])


async def opening(subject: Subject) -> str:
    """The first observation: messages that a policy can answer, tools whose schemas are valid."""
    env = subject.source.make()
    try:
        task = await in_time(in_thread(subject.source.task, 0), "task 0")
        seen = checked(await in_time(env.reset(task), "reset"), Observation, "reset")
    finally:
        await in_time(env.close(), "close", CLOSE_S)
    if not seen.messages or seen.messages[-1].role == "assistant":
        raise ContractViolation("reset returned no message for the policy to answer")
    for tool in seen.tools:
        try:
            jsonschema.Draft202012Validator.check_schema(tool.parameters)
        except jsonschema.SchemaError as error:
            raise ContractViolation(f"the schema of the tool {tool.name!r} is invalid: {error.message}") from None
        if tool.parameters.get("type") != "object":
            raise ContractViolation(f"the schema of the tool {tool.name!r} must have the type object")
    if len({tool.name for tool in seen.tools}) < len(seen.tools):
        raise ContractViolation("two tools have the same name")
    tools = [tool.name if tool.description.strip() else f"{tool.name} (no description)" for tool in seen.tools]
    return f"{len(seen.messages)} messages, tools: {', '.join(tools) or 'none'}"


async def play_at_once(source: TaskSource, times: int = 1) -> list[bytes]:
    """The first `EPISODES` episodes, each so many times. Raises BrokenCall."""
    tasks = [(i, await make_task(source, i)) for i in range(EPISODES) for _ in range(times)]
    return await asyncio.gather(*(play(source, i, task) for i, task in tasks))


async def episodes(subject: Subject) -> str:
    """Episodes end well whatever the policy says, are the same again, and the same when they run at once."""
    alone = [await play(subject.source, i) for i in range(EPISODES)]
    for i in range(EPISODES):
        if await play(subject.source, i) != alone[i]:
            raise ContractViolation(
                f"task {i} played again by the same policy went another way: use the task's own randomness"
            )
    at_once = await play_at_once(subject.source, 4)
    if [at_once[4 * i + j] for i in range(EPISODES) for j in range(4)] != [
        alone[i] for i in range(EPISODES) for _ in range(4)
    ]:
        raise ContractViolation(
            "episodes that run at once disturb each other: keep state in the instance, set in reset"
        )
    return f"{EPISODES} episodes are the same again, and with {4 * EPISODES} at once"


async def event_loop(subject: Subject) -> str:
    """Nothing blocks the loop that hundreds of episodes share. An environment that blocks does so each time; a busy machine does
    not, so the best of a few tries counts."""
    stood_still = math.inf
    for _ in range(TRIES):
        stood_still = min(stood_still, await _longest_stand_still(subject))
        if stood_still <= BLOCKED_S:
            return f"stood still for {stood_still * 1e3:.0f} ms at most"
    raise ContractViolation(
        f"the event loop stood still for {stood_still * 1e3:.0f} ms; run what blocks by `await in_thread(...)`"
    )


async def _longest_stand_still(subject: Subject) -> float:
    """Seconds between two turns of the loop, the longest while episodes run. Those in which the whole process waited for a core are
    left out."""
    worst = 0.0

    async def beat(starvation: CpuStarvation) -> None:
        nonlocal worst
        last, starved = time.perf_counter(), starvation.seconds()
        while True:
            await asyncio.sleep(0.001)
            now, starved_now = time.perf_counter(), starvation.seconds()
            worst = max(worst, now - last - (starved_now - starved))
            last, starved = now, starved_now

    with CpuStarvation() as starvation:
        beating = asyncio.create_task(beat(starvation))
        try:
            await play_at_once(subject.source)
            await asyncio.sleep(0.002)  # the last block is seen, too
        finally:
            beating.cancel()
    return worst


async def leaks(subject: Subject) -> str:
    """Files, threads and processes are released by `close`."""
    process = psutil.Process()

    async def rounds(n: int) -> tuple[int, int, int]:
        for _ in range(n):
            await play_at_once(subject.source)
        gc.disable()  # what only the collector would release counts as held
        try:
            for _ in range(20):  # threads and processes that end take a moment
                await asyncio.sleep(0.01)
            return process.num_fds(), threading.active_count(), len(process.children(recursive=True))
        finally:
            gc.enable()

    before = await rounds(1)
    after = await rounds(2)
    for what, old, new in zip(("open files", "threads", "processes"), before, after, strict=True):
        if new >= old + EPISODES:
            raise ContractViolation(f"{new - old} {what} are left by {2 * EPISODES} episodes; release them in close")
    return "files, threads and processes are released"


async def cancellation(subject: Subject) -> str:
    """A step that is cancelled ends, and `close` works after it."""
    env = subject.source.make()
    task = await in_time(in_thread(subject.source.task, 0), "task 0")
    seen = checked(await in_time(env.reset(task), "reset"), Observation, "reset")
    async with scripted(subject.source, seen, 0) as messages:
        stepping = asyncio.ensure_future(env.step(next(messages)))
        await asyncio.sleep(0)
        stepping.cancel()
        _, running = await asyncio.wait({stepping}, timeout=CANCEL_S)
    started = time.perf_counter()
    await in_time(env.close(), "close after a cancelled step", CLOSE_S)
    if running:
        raise ContractViolation(f"step ignores its cancellation for {CANCEL_S:g} s; let CancelledError through")
    return f"a cancelled step ends, and close after it takes {(time.perf_counter() - started) * 1e3:.0f} ms"


CHECKS: dict[str, Callable[[Subject], str] | Callable[[Subject], Awaitable[str]]] = {
    "tasks": tasks,
    "opening": opening,
    "episodes": episodes,
    "event loop": event_loop,
    "leaks": leaks,
    "cancellation": cancellation,
}


def run_check(name: str, subject: Subject) -> str:
    """What a check finds. Raises ContractViolation, ConfigError."""
    try:
        with UnawaitedLog() as unawaited:
            result: Any = CHECKS[name](subject)
            found = _run(result, subject.alive) if asyncio.iscoroutine(result) else result
        if unawaited.lines and name != "cancellation":  # what was cancelled may drop some
            raise BrokenCall(unawaited.lines[0])
        return found
    except EnvError as error:
        raise ContractViolation(str(error)) from error


def _run(check: Coroutine[Any, Any, str], alive: Callable[[], None]) -> str:
    """As `asyncio.run`, which would wait for ever for a task that ignores its cancellation: such a task is left behind. Calls
    `alive` as long as the event loop turns."""
    loop = asyncio.new_event_loop()

    def beat() -> None:
        alive()
        loop.call_later(ALIVE_S, beat)

    loop.call_soon(beat)
    try:
        return loop.run_until_complete(closing_pools(check))
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))
            for task in asyncio.all_tasks(loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  (the check has told it)
        loop.close()


def subject_of(
    config: EnvironmentKind, seed: int, split: Split = "train", alive: Callable[[], None] = lambda: None
) -> Subject:
    """Raises ConfigError where there is no such environment."""
    return Subject(config, seed, task_source(config, split, seed), alive)
