"""Stand-ins for a Slurm cluster, which run a batch script's steps as processes of this machine.

What is real: the script, `bash`, Ray, and all that the script starts. What is a stand-in: the programs `sbatch`, `srun`, `scontrol`
and `sinfo`, which know only the options that `slipstream submit` writes and refuse others; and the controller, which is `FakeSlurm`
in the test. Nodes are addresses of the loopback network, and their names are these addresses. Nothing limits what a process uses.

This file is also each of these programs: `PROGRAM` is its first argument.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
STATE = "FAKE_SLURM"  # variable with the folder of the cluster's state
PROGRAMS = ("sbatch", "srun", "scontrol", "sinfo")
NUMBER = "0123456789"

KILL_S = 0.5
"""Between the SIGTERM and the SIGKILL at the end of a job: KillWait in Slurm's configuration, there 30 s by default. What is left
then are nodes of Ray, which drain until they are killed."""


class FakeSlurm:
    """A cluster of `NODES`. `programs` goes to the front of the PATH of those who submit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        for name in PROGRAMS:
            program = self.programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
            program.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, STATE: str(self.folder), "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}"}

    @property
    def queue(self) -> list[int]:
        """The numbers of the submitted jobs."""
        return sorted(int(path.stem.removeprefix("job-")) for path in self.folder.glob("job-*.json"))

    def job(self, number: int) -> dict[str, str]:
        """The options of a submitted job."""
        return json.loads((self.folder / f"job-{number}.json").read_text())

    @contextlib.contextmanager
    def started(self, number: int, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
        """The batch script of a job, on its nodes; all that it has started ends with the block, as with a job."""
        job, script = self.job(number), self.folder / f"job-{number}.sh"
        nodes = NODES[: int(job["nodes"])]
        variables = {
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURMD_NODENAME": nodes[0],
            "SLURM_RESTART_COUNT": str(restarts),
        }
        with self.output(number).open("ab") as output:
            shell = subprocess.Popen(
                ["bash", str(script)],
                env=self.environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield shell
        finally:
            self._end(shell, number)

    def output(self, number: int) -> Path:
        return self.folder / f"slurm-{number}.out"

    def requeued(self, number: int) -> bool:
        """Whether the job asked to be requeued; True once."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / f"requeue-{number}").unlink()
            return True
        return False

    def mark_down(self, node: str) -> None:
        (self.folder / f"down-{node}").touch()

    def _end(self, shell: subprocess.Popen[bytes], number: int) -> None:
        """As at the end of a job: SIGTERM, then SIGKILL, to every process that has the job's variable."""
        import psutil

        def of_job(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                return environment.get("SLURM_JOB_ID") == str(number) and environment.get(STATE) == str(self.folder)
            return False

        left = [process for process in psutil.process_iter() if of_job(process)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(left, timeout=KILL_S)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shell.wait()


def sbatch(arguments: list[str], state: Path) -> int:
    """Check a script as `sbatch --test-only` does, and queue it."""
    (script,) = arguments
    text = Path(script).read_text()
    if not text.startswith("#!"):
        return _refuse("sbatch", "This does not look like a batch script. The first line must start with #!")
    options = {"kill": "yes"}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break  # as sbatch: options end at the first command
        if found := re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line):
            options[found[1]] = found[2] or "yes"
        elif line.startswith("#SBATCH"):
            return _refuse("sbatch", f"invalid option line: {line}")
    for name, value in options.items():
        if name not in SBATCH or not re.fullmatch(SBATCH[name], value):
            return _refuse("sbatch", f"Invalid --{name} specification: {value}")
    if int(options["nodes"]) > len(NODES):
        return _refuse("sbatch", "Batch job submission failed: Requested node configuration is not available")
    number = 100 * (os.getppid() % 100_000) + len(list(state.glob("job-*.json"))) + 1  # another one in each cluster
    shutil.copy(script, state / f"job-{number}.sh")
    (state / f"job-{number}.json").write_text(json.dumps(options))
    sys.stdout.write(f"Submitted batch job {number}\n")
    return 0


SBATCH = {
    "job-name": r".+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "signal": r"([BR]+:)?(\d+|[A-Z]+\d?)(@\d{1,5})?",
    "requeue": "yes",
    "no-kill": "yes|off",
    "kill": "yes",
    "open-mode": "append|truncate",
    "partition": r"[\w,-]+",
    "account": r"[\w-]+",
    "qos": r"[\w-]+",
    "constraint": r".+",
}
"""Options of sbatch, and what its manual allows as their values."""


def srun(arguments: list[str], state: Path) -> int:
    """Run a command once on each node. SIGTERM ends them all; the status is the largest of theirs."""
    parser = argparse.ArgumentParser("srun")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, choices=[1])
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--kill-on-bad-exit", type=int, choices=[0, 1])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")[: options.nodes]
    tasks = [
        subprocess.Popen(
            options.command, env={**os.environ, "SLURM_NODEID": str(i), "SLURMD_NODENAME": node}, start_new_session=True
        )
        for i, node in enumerate(nodes)
    ]

    def forward(number: int, _: object) -> None:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(task.pid, number)  # as Slurm: all processes of the step

    signal.signal(signal.SIGTERM, forward)
    return max(abs(task.wait()) for task in tasks)


def scontrol(arguments: list[str], state: Path) -> int:
    action, number = arguments
    if action != "requeue" or not set(number) <= set(NUMBER):
        return _refuse("scontrol", f"invalid keyword: {action}")
    (state / f"requeue-{number}").touch()
    return 0


def sinfo(arguments: list[str], state: Path) -> int:
    """The nodes that are down."""
    parser = argparse.ArgumentParser("sinfo")
    parser.add_argument("--noheader", action="store_true", required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--states", choices=["down,drain,fail,no_respond"], required=True)
    parser.add_argument("--format", choices=["%n"], required=True)
    for node in parser.parse_args(arguments).nodes.split(","):
        if (state / f"down-{node}").exists():
            sys.stdout.write(f"{node}\n")
    return 0


def _refuse(program: str, why: str) -> int:
    sys.stderr.write(f"{program}: error: {why}\n")
    return 1


def main(program: str, arguments: list[str], environment: Mapping[str, str]) -> int:
    return {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "sinfo": sinfo}[program](
        arguments, Path(environment[STATE])
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:], os.environ))
