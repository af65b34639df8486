"""The sandboxes of tasks in Harbor's format: the policy works in one, and tests score the files that it left in new ones.

Invariants:
- Tests enter a sandbox only when the policy has finished, and never the one that it worked in. Only files are taken over, none of
  those below /tests, /logs and /solution, whoever read them.
- Tests that do not work here are a failure, not a reward of 0: before the first episode of a task its own solution is played in
  the same way and must earn something; without a solution the tests must at least write a reward.
- After that, tests that end without a reward were prevented by what the policy left, which earns 0.
"""

from __future__ import annotations

import asyncio
import math
import posixpath
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ....errors import EnvError
from ...base import JSON
from ...interpreters import ending
from ...sandbox import ExecResult, LocalPool, LocalSandbox, Sandbox
from ...tools import in_thread
from .dockerfile import RunStep
from .tasks import LOGS, SOLUTION, TESTS, HarborTask, below_home, copied, files_below

REWARDS = ("reward.json", "reward.txt")  # below /logs/verifier; the first that is there counts
LONGEST = 64 << 10  # bytes of a reward file
SHOWN = 400  # characters of a program's output in a failure
SESSION = ".shell/"  # where a `ShellSession` keeps its folder and variables between commands
OURS = (SESSION, f"{TESTS[1:]}/", f"{LOGS[1:]}/", f"{SOLUTION[1:]}/", "/", "../")  # and what is not below home
PREPARE = 'mkdir -p -- "$1" && cd -- "$1" && shift && exec "$@"'
VERIFY = 'mkdir -p -- /logs/verifier /logs/agent "$1" && cd -- "$1" && /tests/test.sh'

Files = Mapping[str, bytes]  # by their paths below the home of a sandbox


class HarborScore(msgspec.Struct, frozen=True):
    """What tests said: the reward, None where they left none that can be read, their other numbers, and the end of their output."""

    reward: float | None
    metrics: dict[str, float]
    printed: str


class TaskSandboxes:
    """The sandboxes of one event loop."""

    def __init__(self, pool: LocalPool, verifier_s: float) -> None:
        self.pool = pool
        self._verifier_s = verifier_s
        self._proofs: dict[str, asyncio.Task[None]] = {}

    async def open(self, task: HarborTask) -> LocalSandbox:
        """A sandbox as the task's Dockerfile describes it. Raises EnvError: one of its instructions failed."""
        sandbox = await self.pool.open()
        try:
            await self._prepare(sandbox, task)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def proved(self, task: HarborTask) -> None:
        """Return when the tests of this task have been seen to work here. Raises EnvError: they do not."""
        if task.name not in self._proofs:
            self._proofs[task.name] = asyncio.create_task(self._run_proof(task), name=f"proof of {task.name}")
        proof = self._proofs[task.name]
        try:
            await asyncio.shield(proof)
        except EnvError:
            raise
        except Exception:  # a sandbox that was lost says nothing about the task
            if self._proofs.get(task.name) is proof:
                del self._proofs[task.name]
            raise

    async def files_of(self, sandbox: Sandbox) -> Files | None:
        """The policy's files in `sandbox`; None where they cannot be read, which is the policy's doing. Raises ToolError."""
        try:
            found = await sandbox.read_folder(".")
        except OSError:
            return None
        return _of_policy(found)

    async def score(self, task: HarborTask, files: Files) -> HarborScore:
        """Run the tests in a new sandbox with these files, but those that are no work of the policy. Raises ToolError."""
        tests = await in_thread(_contents, Path(task.folder, "tests"), TESTS)
        sandbox = await self.pool.open()
        try:
            try:
                for path, content in (_of_policy(files) | tests).items():
                    await sandbox.write(path, content)
            except OSError as error:  # the policy's files and the tests together are more than the disk
                return HarborScore(None, {}, f"its files cannot be copied: {error}")
            # What the policy has put among its user's packages is not imported by the tests.
            environ = task.recipe.environ | task.verifier_environ | {"PYTHONNOUSERSITE": "1"}
            seconds = min(task.verifier_s, self._verifier_s)
            argv = ("/bin/bash", "-c", VERIFY, "bash", task.recipe.workdir)
            ran = await sandbox.run(argv, wall_s=seconds, environ=environ)
            if ran.ended != "exited":
                return HarborScore(None, {}, ending(ran, msgspec.structs.replace(self.pool.limits, wall_s=seconds)))
            for name in REWARDS:
                try:
                    written = await sandbox.read(below_home(f"{LOGS}/verifier/{name}"))
                except OSError:
                    continue
                return _read_score(written, _tail(ran), is_json=name.endswith(".json"))
            return HarborScore(None, {}, f"they wrote no {LOGS}/verifier/reward.txt; {_tail(ran)}")
        finally:
            await sandbox.close()

    async def _run_proof(self, task: HarborTask) -> None:
        sandbox = await self.open(task)
        try:
            what = "its tests"
            if task.has_solution:
                what = "its own solution"
                await self._solve(sandbox, task)
            files = await self.files_of(sandbox)
        finally:
            await sandbox.close()
        score = await self.score(task, files or {})
        if score.reward is None or (task.has_solution and score.reward <= 0):
            earned = "no reward from 0 to 1" if score.reward is None else "0"
            raise EnvError(f"{task.folder} cannot be played in this sandbox: {what} earned {earned}; {score.printed}")

    async def _solve(self, sandbox: LocalSandbox, task: HarborTask) -> None:
        for path, content in (await in_thread(_contents, Path(task.folder, "solution"), SOLUTION)).items():
            await sandbox.write(path, content)
        environ = task.recipe.environ | task.solution_environ
        ran = await self._run(sandbox, ("/bin/bash", f"{SOLUTION}/solve.sh"), task.recipe.workdir, environ)
        if ran.ended != "exited":
            raise EnvError(
                f"{task.folder} cannot be played in this sandbox: its own solution was stopped; {_tail(ran)}"
            )

    async def _prepare(self, sandbox: LocalSandbox, task: HarborTask) -> None:
        docker = Path(task.folder, "environment", "Dockerfile")
        for step in task.recipe.steps:
            if isinstance(step, RunStep):
                ran = await self._run(sandbox, step.argv, step.workdir, step.environ)
                if not ran.ok:
                    raise EnvError(f"{docker}: line {step.line}: RUN failed in the sandbox; {_tail(ran)}")
                continue
            for path, file in await in_thread(lambda step=step: list(copied(docker.parent, step))):
                try:
                    await sandbox.write(below_home(path), await in_thread(file.read_bytes))
                except OSError as error:
                    raise EnvError(
                        f"{docker}: line {step.line}: {path} cannot be copied into the sandbox: {error}"
                    ) from error

    async def _run(
        self, sandbox: Sandbox, argv: tuple[str, ...], workdir: str, environ: Mapping[str, str]
    ) -> ExecResult:
        """A program of the task's author, in a folder that is made."""
        command = ("/bin/bash", "-c", PREPARE, "bash", workdir, *argv)
        return await sandbox.run(command, wall_s=self._verifier_s, environ=environ)


def _of_policy(files: Files) -> dict[str, bytes]:
    """The files without those that are no work of the policy: they would be the tests', or are the shell's own."""
    return {path: content for path, content in files.items() if not posixpath.normpath(path).startswith(OURS)}


def _contents(folder: Path, place: str) -> dict[str, bytes]:
    return {below_home(f"{place}/{name}"): file.read_bytes() for name, file in files_below(folder)}


def _tail(ran: ExecResult) -> str:
    """The end of what a program printed, in one line."""
    printed = " ".join(f"{ran.stdout} {ran.stderr}".split())
    return f"it printed: ...{printed[-SHOWN:]}" if len(printed) > SHOWN else f"it printed: {printed or 'nothing'}"


def _read_score(written: bytes, printed: str, *, is_json: bool) -> HarborScore:
    """A reward file; what is in it may be the policy's own, whose programs tests run."""
    try:
        found: JSON = (
            msgspec.json.decode(written[:LONGEST], type=dict[str, float])
            if is_json
            else {"reward": float(written[:LONGEST])}
        )
    except (ValueError, msgspec.DecodeError):
        return HarborScore(None, {}, printed)
    reward = next(iter(found.values())) if len(found) == 1 else found.get("reward")
    metrics = {f"tests_{name}": value for name, value in found.items() if math.isfinite(value) and name != "reward"}
    return HarborScore(reward if reward is not None and 0 <= reward <= 1 else None, metrics, printed)
