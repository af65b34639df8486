"""Commands that run environments in an event loop for a moment leave no sandbox that waits, however the environment ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from slipstream.configs import load
from slipstream.configs.environments import PythonEnv
from slipstream.envs.check import ContractViolation, run_check, subject_of
from slipstream.envs.sandbox import Limits, LocalPool, closing_pools, local_pool
from slipstream.envs.sandbox.local import STARTS
from slipstream.envs.sandbox.watchdog import WATCHDOG
from slipstream.errors import ConfigError
from slipstream.launch import preflight
from slipstream.launch.cli.main import main
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.traces import grade_traces
from slipstream.tests.test_envs_harbor import ANSWER, harbor, write

BOXED = """
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.envs.sandbox import LocalPool, local_pool

waited = []  # the processes of the sandboxes that waited, by event loop

async def use(pool):
    sandbox = await pool.open()
    try:
        ran = await sandbox.run(("/bin/echo", "fine"))
    finally:
        await sandbox.close()
    await pool.fill("commands")
    waited.append({process.pid for process in pool._ready["commands"]})
    return ran.stdout

class Boxed(SimpleEnv):
    def task(self, index): return Task(f"t-{index}", {})
    async def reset(self, task): return Observation((Message("user", await use(local_pool())),))
    async def step(self, message): return StepResult((), 1.0, done=True)

class Raises(Boxed):
    async def reset(self, task):
        await use(local_pool())
        raise ValueError("broken")

async def score(completion, row):
    await use(local_pool())
    return 1.0
"""
ENV = "env={kind: python, factory: 'boxed:NAME'}"
DATA = "env={kind: dataset, path: rows.jsonl, reward: 'boxed:score', evaluation: 0.0, traces: experts.jsonl}"


@pytest.fixture
def boxed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the environments. At the end no sandbox that waited is left, and the watchdog looks for none of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "boxed", raising=False)
    (tmp_path / "boxed.py").write_text(BOXED)
    for name, answer in (("rows", "answer"), ("experts", "trace")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "Say 1.", answer: "1"}) + "\n")
    watched = set(WATCHDOG._watched)  # of other pools of this process
    import boxed  # pyright: ignore[reportMissingImports]

    yield boxed
    sys.modules.pop("boxed")
    assert set(WATCHDOG._watched) <= watched


def are_gone(waited: list[set[int]]) -> bool:
    return bool(waited) and all(waited) and not any(map(psutil.pid_exists, set[int]().union(*waited)))


def check_prompt(policy: Path, name: str) -> None:
    config = load("quickstart", [f"model.path={policy}", ENV.replace("NAME", name)])
    assert "tokens" in preflight.prompt(RunInputs(config))


def check_opening(_: Path, name: str) -> None:
    assert run_check("opening", subject_of(PythonEnv(factory=f"boxed:{name}"), 0))


def bench(_: Path, name: str) -> None:
    assert main(["env", "bench", "quickstart", ENV.replace("NAME", name), "--concurrent", "1", "--seconds", "0.1"]) == 0


def grade(policy: Path, _: str) -> None:
    (one,) = grade_traces(RunInputs(load("quickstart", [f"model.path={policy}", DATA])))
    assert one.reward == 1.0


@pytest.mark.parametrize("run", [check_prompt, check_opening, bench, grade])
def test_no_sandbox_waits_after_a_command_and_the_next_one_has_new_ones(
    policy: Path, boxed: Any, run: Callable[[Path, str], None]
) -> None:
    for _ in range(2):
        boxed.waited.clear()
        run(policy, "Boxed")
        assert are_gone(boxed.waited)


@pytest.mark.parametrize(("run", "error"), [(check_prompt, ConfigError), (check_opening, ContractViolation)])
def test_none_waits_after_an_environment_that_raises(
    policy: Path, boxed: Any, run: Callable[[Path, str], None], error: type[Exception]
) -> None:
    with pytest.raises(error, match="broken"):
        run(policy, "Raises")
    assert are_gone(boxed.waited)


def test_none_waits_after_a_cancellation(boxed: Any) -> None:
    async def cancelled() -> None:
        await boxed.use(local_pool())
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(closing_pools(cancelled()))
    assert are_gone(boxed.waited)


def test_a_pool_of_the_environments_own_serves_the_next_loop(boxed: Any) -> None:
    pool = LocalPool(Limits(wall_s=20), spare=2)

    async def use() -> list[str]:
        return await asyncio.gather(*(boxed.use(pool) for _ in range(2 * STARTS)))  # more than may start at once

    for _ in range(2):
        boxed.waited.clear()
        assert asyncio.run(closing_pools(use())) == ["fine\n"] * 2 * STARTS
        assert are_gone(boxed.waited)


def test_none_waits_of_task_folders(tmp_path: Path) -> None:
    write(tmp_path / "answer", ANSWER)
    watched = set(WATCHDOG._watched)
    assert run_check("opening", subject_of(harbor(tmp_path, evaluation=str(tmp_path)), 0))
    assert set(WATCHDOG._watched) <= watched
