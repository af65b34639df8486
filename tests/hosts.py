"""Whole runs on several hosts of this machine: which role is where, and how far the run is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from slipstream.chaos.hosts import Hosts, may_make_namespaces
from slipstream.launch.run_context import ROLE, VARIABLE
from slipstream.tests import forkgate
from slipstream.tests.runs import WAIT_S, metrics

needs_namespaces = pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need root")

CLUSTER = ("launch.kind=ray_cluster", "evaluation.tasks=0", "learner.steps=100000")


class HostedRun:
    """A `slipstream train` on host 0 of `hosts`, whose supervisor may be the process that was started itself (`executed`). Use as a
    context manager."""

    def __init__(self, hosts: Hosts, run_dir: Path, *arguments: str, executed: bool = False) -> None:
        self.hosts, self.run_dir, self.executed = hosts, run_dir, executed
        self.log = run_dir.with_name(f"{run_dir.name}.log")
        self._command("train", *arguments, f"run.dir={run_dir}")

    def _command(self, *arguments: str) -> None:
        start = [sys.executable, "-P", "-c", forkgate.SUPERVISOR] if self.executed else self._start
        command = [*start, *arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.hosts.command(0, command), stdout=log, stderr=log, env={**os.environ, **self.hosts.environment}
            )

    @property
    def _start(self) -> list[str]:
        return [forkgate.python(), "-P", "-m", "slipstream.launch.cli"]

    def __enter__(self) -> HostedRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def call(self, *arguments: str) -> str:
        """The output of another command, on the host of the supervisor."""
        command = self.hosts.command(0, [*self._start, *arguments])
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True).stdout

    def roles(self) -> dict[str, tuple[int, psutil.Process]]:
        """Role -> its host and its process, of those that are alive."""
        assert self.hosts.namespaces is not None
        places = {os.stat(path).st_ino: host for host, path in enumerate(self.hosts.namespaces.paths)}
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
                variables = process.environ()
                if str(self.run_dir) not in variables.get(VARIABLE, ""):
                    continue
                host, parent = places.get(os.stat(f"/proc/{process.pid}/ns/net").st_ino), process.parent()
                same = parent is not None and parent.environ().get(ROLE) == variables.get(ROLE)
                if host is not None and not same:
                    found[variables[ROLE]] = host, process
        return found

    def places(self) -> dict[str, int]:
        return {role: host for role, (host, _) in self.roles().items()}

    def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_S, every: float = 0.25) -> float:
        """Wait for a condition on files or processes, which offer nothing to await; how long it took. One on what a command says is
        looked at less often."""
        began, ended = time.monotonic(), False
        while not condition():
            assert not ended, f"the run ended before {what}:\n{self.output()}"
            assert time.monotonic() < began + seconds, f"no {what} within {seconds} s:\n{self.output()}"
            time.sleep(every)
            ended = self.process.poll() is not None  # what it did last may make the condition hold
        return time.monotonic() - began

    def steps(self) -> int:
        """Rows of metrics.jsonl, of steps that were repeated too."""
        return len(metrics(self.run_dir))

    def until_steps(self, more: int, seconds: float = WAIT_S) -> float:
        """Wait for so many more learner steps; how long it took."""
        goal = self.steps() + more
        return self.until(lambda: self.steps() >= goal, f"{more} more steps", seconds)

    def stop(self) -> str:
        """Stop it as Ctrl-C does; its output."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(WAIT_S) == 130, self.output()
        return self.output()

    def output(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]
