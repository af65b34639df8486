"""Whole runs for tests: the real command in a real process, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs import load
from slipstream.envs import task_source
from slipstream.launch.init_model import TinyModelShape, init_model
from slipstream.launch.launchers.local import LocalLauncher
from slipstream.launch.supervisor.processes import ProcessManager
from slipstream.launch.supervisor.replicas import ReplicaManager
from slipstream.monitor.terminal import LineView
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.rpc.pubsub import StatePublisher
from slipstream.tests.cache import cached
from slipstream.weightsync.fleet import Fleet

SMALL = (
    "buffer.groups_per_batch=2",
    "buffer.group_size=4",
    "agent.max_tokens_per_turn=24",
    "learner.checkpoint_every=2",
    "evaluation.tasks=0",
    "rollout.engine.memory=32MiB",
)
"""The quickstart, as small as it gets."""

WAIT_S = 480.0
"""Longest wait for a command or for something to happen in a run: where other processes compute, a minute becomes several."""

ENDING_S = 30.0
"""Longest time for processes to end that SIGKILL was sent to: of those in a group only the first is waited for."""

ENDLESS = "learner.steps=1000000"
"""Of a run that a test ends: however fast it is, and however slow the test, it does not end before."""


NARROW = TinyModelShape(hidden=64, layers=1, heads=2, kv_heads=2, intermediate=128)
"""A forward takes a third of the time of one of the quickstart's model, a step of the learner a fifth."""


def tiny_policy(folder: Path, shape: TinyModelShape = NARROW) -> Path:
    """A random model with a tokenizer that fits the quickstart's environment."""

    def make(folder: Path) -> None:
        init_model(folder, sources=[task_source(config.env, "train", 0)], agent=config.agent, seed=0, shape=shape)

    config = load("quickstart")
    return cached(folder, f"tiny_policy {config} {shape}", make)


def slipstream(*arguments: str, check: bool = True, seconds: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "slipstream.launch.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert not check or done.returncode == 0, (
        f"{arguments}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


class Background:
    """A `slipstream train` or `resume` that goes on while the test acts on it. Use as a context manager."""

    def __init__(self, *arguments: str) -> None:
        self.run_dir = Path(next(a.partition("=")[2] for a in arguments if a.startswith("run.dir=")))
        command = [sys.executable, "-m", "slipstream.launch.cli", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def roles(self) -> dict[str, psutil.Process]:
        """The living role processes by name, none of a run that has ended."""
        found = {}
        if self.process.poll() is not None:
            return found
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
                words = child.environ().get("SLIPSTREAM_ROLE") if child.status() != psutil.STATUS_ZOMBIE else None
                if words:
                    found[words] = child
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition on files or processes, which offer nothing to await."""
        deadline, ended = time.monotonic() + WAIT_S, False
        while not condition():
            assert not ended, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {WAIT_S} s"
            time.sleep(0.1)
            ended = self.process.poll() is not None  # what it did last may make the condition hold

    def until_step(self, step: int) -> None:
        self.until(lambda: any(row["step"] >= step for row in metrics(self.run_dir)), f"step {step}")

    def until_event(self, text: str, times: int = 1) -> None:
        """Wait until the supervisor has reported it so often."""
        log = self.run_dir / "logs" / "supervisor.log"
        self.until(lambda: log.exists() and log.read_text().count(text) >= times, f"event {text!r}")

    def kill(self, role: str) -> None:
        found: dict[str, psutil.Process] = {}

        def lives() -> bool:
            found.update(self.roles())
            return role in found

        self.until(lives, f"{role} to live")
        found[role].send_signal(signal.SIGKILL)

    def kill_engine_core(self, role: str) -> None:
        """Kill the process in which a vLLM server computes, not the server itself."""
        cores = [p for p in self.roles()[role].children() if "spawn_main" in " ".join(p.cmdline())]
        cores[0].send_signal(signal.SIGKILL)

    def output(self) -> str:
        out, _ = self.process.communicate(timeout=WAIT_S)
        return out


def metrics(run_dir: Path) -> list[dict]:
    """Rows of the steps in metrics.jsonl, complete lines only."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "evaluation" not in row]


def ledger(run_dir: Path) -> dict:
    return json.loads(slipstream("ledger", str(run_dir), "--json").stdout)


def query(run_dir: Path, sql: str) -> Sequence[tuple]:
    """Plain SQL over the buffer: an audit that shares no code with what it audits."""
    with sqlite3.connect(f"file:{run_dir / 'buffer.sqlite'}?mode=ro", WAIT_S, uri=True) as db:
        return db.execute(sql).fetchall()


def stored_trajectory(run_dir: Path, header: bytes, position: int, tokens: int) -> Trajectory:
    """A row of `trajectories` with its arrays (`position` and `tokens` are its columns `arrays` and `length`), read without the
    code that wrote them."""
    starts = {int(path.name, 16): path for path in (run_dir / "buffer.arrays").iterdir()}
    start = max(start for start in starts if start <= position)
    arrays = starts[start].read_bytes()[position - start :][: 9 * tokens]
    return EncodedTrajectory(header, np.frombuffer(arrays, dtype=np.uint8)).decode()


def leftovers(run_dir: Path) -> list[str]:
    """Processes that still belong to the run, `ENDING_S` after it ended."""
    deadline = time.monotonic() + ENDING_S
    while (found := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the end of a process that is no child sets nothing that could be awaited
    return found


def processes_of(run_dir: Path) -> list[str]:
    """Processes that belong to the run now: their ids, and the beginnings of their commands."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(run_dir.resolve()) in process.environ().get("SLIPSTREAM_JOB", "") and process.pid != os.getpid():
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def check_accounts(run_dir: Path) -> None:
    """The ledger closes, by the command and by an audit of the file that shares no code with it."""
    shown = ledger(run_dir)
    assert shown["closes"]
    assert shown["generated"] == sum(
        (
            *(shown[k] for k in ("in_flight", "ready", "trained")),
            *shown["withheld"].values(),
            *shown["discarded"].values(),
        )
    )
    sums = "SELECT (SELECT total(length) FROM episodes) + (SELECT total(tokens) FROM archive)"
    assert query(run_dir, sums) == [(shown["generated"],)]
    by_version = "SELECT total(value) FROM episodes, json_each(generated) WHERE account <> 'discarded'"
    discarded = sum(n for reason, n in shown["discarded"].items() if reason != "unused")
    assert query(run_dir, by_version) == [(shown["generated"] - discarded,)]
    # Each trajectory belongs to one group, and each group to at most one commit that still counts.
    assert query(run_dir, "SELECT count(*) - count(DISTINCT id) FROM trajectories") == [(0,)]
    orphans = "SELECT count(*) FROM groups WHERE state = 'trained' AND trained_at NOT IN (SELECT version FROM commits)"
    assert query(run_dir, orphans) == [(0,)]
    lost = "SELECT count(*) FROM groups JOIN commits ON trained_at = version WHERE rolled_back"
    assert query(run_dir, lost) == [(0,)]
    sizes = "SELECT groups, (SELECT count(*) FROM groups WHERE trained_at = version) FROM commits WHERE NOT rolled_back"
    assert all(committed == kept for committed, kept in query(run_dir, sizes))


def bare_replicas(
    processes: ProcessManager, launcher: LocalLauncher, fleets: StatePublisher[Fleet], view: LineView
) -> ReplicaManager:
    """A run's replicas without the run: on no GPU, in the environment of this process."""
    return ReplicaManager(
        processes,
        launcher,
        fleets.publish,
        view,
        environment=lambda name, placement: {},
        make_engine=lambda info: VllmEngine(info.name, info.url, vocab_size=10, max_model_len=10),
        probe_path="/health",
        gpus=0,
        pushed=True,
    )
