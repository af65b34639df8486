"""Whole runs on real parts: every process, socket, server and collective is the one that users get."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest
from slipstream.launch import evaluations
from slipstream.launch.checkpoint_evaluation import FOLDER
from slipstream.monitor.series import read_evaluations
from slipstream.tests import forkgate
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    WAIT_S,
    Background,
    check_accounts,
    leftovers,
    metrics,
    query,
    slipstream,
)
from slipstream.tests.whole_run import TEN_STEPS, check_run, check_staleness


def test_a_run_from_start_to_report(policy: Path, tmp_path: Path) -> None:
    """Its processes are forked; one whose processes are started as users start them is in test_packaging.py."""
    run = tmp_path / "run"
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *TEN_STEPS)
    check_run(run, done.stdout)
    answer = slipstream("eval", str(run), "evaluation.tasks=4", "--json")
    assert json.loads(answer.stdout)["tasks"] == 4


def test_a_run_under_nohup_goes_on_without_its_terminal_and_the_reader_of_its_output(
    policy: Path, tmp_path: Path
) -> None:
    """As in `nohup slipstream train quickstart 2>&1 | head -3`, in a terminal that is then closed."""
    run = tmp_path / "run"
    small = (*SMALL, "rollout.engine.kind=transformers", "learner.steps=2")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what `nohup` does; a child process inherits it
    try:
        going = Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small)
    finally:
        signal.signal(signal.SIGHUP, before)
    with going:
        assert going.process.stdout is not None
        lines = [going.process.stdout.readline() for _ in range(3)]
        assert "checks the config, then trains" in lines[0]
        going.process.stdout.close()
        going.process.send_signal(signal.SIGHUP)
        assert going.process.wait(WAIT_S) == 0
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert (run / "report.html").is_file()
    text = (run / "logs" / "supervisor.log").read_text()
    assert text.count("has closed it; the command goes on without printing") == 1
    assert "step 2/2  reward" in text
    assert "Traceback" not in text


def test_kills_of_worker_engine_buffer_and_learner(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS)
    with Background(*arguments) as going:
        for step, victim in ((2, "worker-0"), (4, "engine-0"), (6, "buffer"), (9, "learner-0")):
            going.until_step(step)
            going.kill(victim)
        going.until_step(10)
        going.kill_engine_core("engine-0")
        going.until_event("engine-0 ended with", 2)
        going.until_step(max(20, metrics(run)[-1]["step"] + 5))
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    for victim in ("worker-0", "engine-0", "buffer", "learner-0"):
        assert f"{victim} ended with SIGKILL" in output
    assert output.count("! engine-0 ended with") == 2
    assert leftovers(run) == []
    steps = {row["step"] for row in metrics(run)}
    assert steps == set(range(1, max(steps) + 1))
    check_accounts(run)
    check_staleness(run)
    versions = [version for (version,) in query(run, "SELECT version FROM commits ORDER BY time")]
    assert versions == sorted(set(versions))


def test_interrupted_then_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS) as going:
        going.until_step(3)
        began = time.monotonic()
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
        assert time.monotonic() - began < 90  # where nothing else computes it takes a few
    assert f"`slipstream resume '{run}'`" in output
    assert leftovers(run) == []
    reached = max(row["step"] for row in metrics(run))
    assert (run / "checkpoints" / f"step-{reached:08d}").is_dir()
    check_accounts(run)
    slipstream("resume", str(run), f"learner.steps={reached + 3}")
    assert [row["step"] for row in metrics(run)] == list(range(1, reached + 4))
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_killed_as_a_whole_then_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS) as going:
        going.until_step(3)
        going.process.kill()  # the supervisor alone: the kernel must end the rest
        going.process.wait()
    assert leftovers(run) == []
    reached = max(row["step"] for row in metrics(run))
    with Background("resume", str(run), f"run.dir={run}", f"learner.steps={reached + 3}") as again:
        again.until(lambda: "buffer" in again.roles(), "its first roles")
        refused = slipstream("resume", str(run), check=False)
        assert refused.returncode == 2, refused.stderr
        assert "is active; stop it first" in refused.stderr
        output = again.output()
        assert again.process.returncode == 0, output
    assert max(row["step"] for row in metrics(run)) == reached + 3
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_two_of_each_synchronous_and_a_replica_dies(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    layout = ("rollout.engine.replicas=2", "learner.backend.ranks=2", "rollout.workers=2", "buffer.max_staleness=0")
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS, *layout)
    with Background(*arguments) as going:
        going.until_step(2)
        going.kill("engine-1")
        going.until_event("engine-1 ended with SIGKILL")
        going.until_step(max(8, metrics(run)[-1]["step"] + 2))
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "engine-1 ended with SIGKILL" in output
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row["mismatch_tokens"] for row in rows) > 0
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3
    check_accounts(run)
    check_staleness(run, 0)
    assert leftovers(run) == []


FP8 = ("rollout.engine.options.quantization=fp8", "weightsync.canary_tolerance=0.5")


@pytest.mark.parametrize(
    ("kind", "options", "least", "most"),  # nats between the log-probs of servers and learner, more where one is in fp8
    [
        pytest.param("transformers", FP8, 1e-4, 0.5, id="transformers"),
        pytest.param("sglang", (), 0, 1e-3, id="sglang"),
    ],
)
def test_a_run_on_every_kind_of_server(
    kind: str, options: tuple[str, ...], least: float, most: float, policy: Path, tmp_path: Path
) -> None:
    """The other tests run vLLM. A server that is not installed is an error, as in the conformance suite."""
    run = tmp_path / "run"
    engine = (f"rollout.engine.kind={kind}", *options)
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *engine, "learner.steps=3")
    with forkgate.gated("sglang") if kind == "sglang" else contextlib.nullcontext():
        slipstream(*arguments)
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert sum(row["mismatch_tokens"] for row in rows) > 0
    assert least <= max(row["mismatch_max"] or 0 for row in rows) < most
    assert all(least <= row["canary"] < most for row in rows)
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


def test_the_same_run_under_ray(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = (*SMALL, "launch.kind=ray", "learner.steps=3")
    with forkgate.gated("vllm"):
        slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    check_accounts(run)
    check_staleness(run)
    assert leftovers(run) == []


@pytest.mark.full
def test_checkpoints_are_evaluated_under_ray(policy: Path, tmp_path: Path) -> None:
    """By a role in an actor, which starts a server and an evaluator of its own."""
    run = tmp_path / "run"
    small = (*SMALL, "launch.kind=ray_cluster", "rollout.engine.kind=transformers", "learner.backend.device=cpu")
    often = ("learner.steps=4", "evaluation.every=2", "evaluation.tasks=4")
    with forkgate.gated():
        slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, *often)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    found = read_evaluations(run / evaluations.FILE)
    assert [(one.label, one.step) for one in found] == [("warm start", 0), ("step 2", 2), ("final", 4)]
    version_of = {row["step"]: row["version"] for row in metrics(run)}
    assert all(one.version == version_of[one.step] for one in found if one.step)
    assert all(sum(one.outcomes.values()) == 4 for one in found)
    assert not (run / FOLDER).exists()
    assert leftovers(run) == []
    check_accounts(run)
    check_staleness(run)


def test_an_environment_that_always_fails_ends_the_run_by_name(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "always_fails.py").write_text(
        "from slipstream.envs import Message, Observation, SimpleEnv, Task\n\n\n"
        "class Env(SimpleEnv):\n"
        "    def task(self, index):\n        return Task(str(index))\n\n"
        "    async def reset(self, task):\n        return Observation((Message('user', '1'),))\n\n"
        "    async def step(self, message):\n        raise OSError('no sandbox')\n"
    )
    monkeypatch.chdir(tmp_path)
    env = ("env.kind=python", "env.factory=always_fails:Env", "agent.kind=single_turn")
    run = tmp_path / "run"
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *env, check=False)
    assert done.returncode == 1
    assert "episodes in a row failed, the last by environment" in done.stderr
    assert "no sandbox" in done.stderr
    assert done.stderr.count("\n") == 1
    assert leftovers(run) == []


def test_a_role_that_cannot_live_ends_the_run_by_name(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # The learner may wait for the buffer's answer to a commit until it is killed, after two thirds of `heartbeat_s`.
    settings = ("launch.restarts=0", "launch.heartbeat_s=10", "rollout.engine.kind=transformers")
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *settings) as going:
        going.kill("buffer")
        output = going.output()
        assert going.process.returncode == 1
    assert "RoleDied: buffer ended with SIGKILL" in output
    assert leftovers(run) == []
