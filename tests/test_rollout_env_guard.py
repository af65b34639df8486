"""What an environment returns from `step` is checked where it arrives, and is the environment's failure where it is wrong."""

import asyncio
import sys
import threading

import numpy as np
import pytest
from slipstream.configs.environments import PythonEnv
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task, parts_of
from slipstream.envs.isolation.host import valid_result
from slipstream.errors import EnvError
from slipstream.rollout.env_guard import EnvGuard, EpisodeLimits, TaskMemo

SAID = Message("assistant", "42")


class Returns(SimpleEnv):
    returned: object = None

    def task(self, index: int) -> Task:
        return Task(f"t-{index}")

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "?"),))

    async def step(self, message: Message) -> StepResult:
        return self.returned  # pyright: ignore[reportReturnType]  (the point of the test)


async def stepped(returned: object, monkeypatch: pytest.MonkeyPatch) -> StepResult:
    monkeypatch.setitem(sys.modules, "returns_module", sys.modules[__name__])
    monkeypatch.setattr(Returns, "returned", returned)
    (part,) = parts_of(PythonEnv(factory="returns_module:Returns"), "train", 0)
    guard = EnvGuard(part, EpisodeLimits(10.0, 10.0, 10.0), TaskMemo())
    await guard.reset(await guard.open(0))
    try:
        return await guard.step(SAID)
    finally:
        await guard.close()


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (StepResult(reward="1.0", done=True), r"Returns: step: EnvError: a reward of '1.0'; allowed are numbers"),
        (StepResult(reward=None, done=True), "a reward of None"),
        (StepResult(reward=float("nan"), done=True), "a reward of nan"),
        (StepResult(reward=np.ones(2), done=True), r"a reward of array"),
        (None, r"it returned None; return StepResult\(messages, reward, done\)"),
        ((1.0, True), r"it returned \(1.0, True\); return StepResult"),
        (StepResult((Message("tool", "4"), True)), "no valid tuple"),  # what `call_tool` returns, taken for the message
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
async def test_what_is_no_result_is_the_environments_failure(returned, complaint, monkeypatch) -> None:
    with pytest.raises(EnvError, match=complaint):
        await stepped(returned, monkeypatch)


@pytest.mark.parametrize(
    ("metrics", "complaint"),
    [
        ({1: 0.5}, "a metric with the name 1; allowed is text of 200 characters"),
        ({"\ud800": 0.5}, r"a metric with the name '\\ud800'"),
        ({"n" * 201: 0.5}, "a metric with the name 'nnn"),
        ({"a": float("inf")}, "the metric 'a' is inf; allowed are finite numbers"),
        ({"a": "0.5"}, "the metric 'a' is '0.5'; allowed are numbers"),
        ([0.5], r"metrics of \[0.5\]; allowed are numbers by their names"),
    ],
)
async def test_metrics_that_cannot_be_delivered_are_the_environments_failure(metrics, complaint, monkeypatch) -> None:
    result = StepResult(metrics=metrics, done=True)
    with pytest.raises(EnvError, match=f"Returns: step: EnvError: {complaint}"):
        await stepped(result, monkeypatch)
    with pytest.raises(EnvError, match=complaint):  # in a process of its own
        valid_result(result)


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.int64(1)])
async def test_numbers_of_every_kind_are_rewards(reward, monkeypatch) -> None:
    result = await stepped(StepResult(reward=reward, metrics={"m": reward}, done=True), monkeypatch)
    assert (result.reward, type(result.reward)) == (1.0, float)
    assert [(name, value, type(value)) for name, value in result.metrics.items()] == [("m", 1.0, float)]


async def test_the_id_of_a_task_can_be_delivered(monkeypatch) -> None:
    monkeypatch.setattr(Returns, "task", lambda self, index: Task("t-\ud800"))
    with pytest.raises(EnvError, match=r"its id must be text of at most 1000 characters, not 't-\\ud800'"):
        await stepped(StepResult(done=True), monkeypatch)


class ClosesSlowly(Returns):
    closing: asyncio.Event
    said: tuple[str, ...] = ()

    async def close(self) -> None:
        ClosesSlowly.said += ("begun",)
        self.closing.set()
        await asyncio.sleep(0.05)
        ClosesSlowly.said += ("closed",)


async def test_a_cancellation_while_the_environment_closes_does_not_stop_that(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "closes_module", sys.modules[__name__])
    monkeypatch.setattr(ClosesSlowly, "said", ())
    monkeypatch.setattr(ClosesSlowly, "closing", asyncio.Event(), raising=False)
    (part,) = parts_of(PythonEnv(factory="closes_module:ClosesSlowly"), "train", 0)
    guard = EnvGuard(part, EpisodeLimits(10.0, 10.0, 10.0), TaskMemo())
    await guard.open(0)
    closing = asyncio.create_task(guard.close())
    await ClosesSlowly.closing.wait()
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert ClosesSlowly.said == ("begun", "closed")


class Counts(Returns):
    calls: tuple[int, ...] = ()

    def task(self, index: int) -> Task:
        Counts.calls = (*Counts.calls, index)
        return Task(f"t-{index}", {"seen": []} if index < 7 else {"seen": threading.Lock()})  # pyright: ignore[reportArgumentType]


async def test_episodes_of_one_task_that_begin_one_after_the_other_share_the_call_and_no_payload(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "counts_module", sys.modules[__name__])
    monkeypatch.setattr(Counts, "calls", ())
    (part,) = parts_of(PythonEnv(factory="counts_module:Counts"), "train", 0)
    memo = TaskMemo()

    async def opened(index: int) -> Task:
        guard = EnvGuard(part, EpisodeLimits(10.0, 10.0, 10.0), memo)
        task = await guard.open(index)
        if index < 7:
            assert task.payload == {"seen": []}
            task.payload["seen"].append("mine")  # pyright: ignore[reportIndexIssue, reportArgumentType, reportCallIssue, reportOptionalSubscript, reportAttributeAccessIssue]
        await guard.close()
        return task

    tasks = await asyncio.gather(*(opened(index) for index in (3, 3, 3, 5, 5, 3, 7, 7)))
    assert [task.id for task in tasks] == ["t-3", "t-3", "t-3", "t-5", "t-5", "t-3", "t-7", "t-7"]
    assert Counts.calls == (3, 5, 3, 7, 7)  # of 7 the payload cannot be copied
