"""Tasks in Harbor's format, played in our sandbox: the policy has a shell in the folder of the task, and tests score what it left.

Invariants:
- The policy reads which of its commands failed, hung or ended the sandbox. Its next command then runs in a new sandbox, as at the
  start of the task.
- A message without a call ends the work, as `max_turns` does: both are scored (`sandboxes.py`).
- An agent that works in a folder of its own (`agent.kind: command`) gets the files of the task's folder and is scored by the
  files that it left there, unless it called the tool.
"""

from __future__ import annotations

import asyncio
import shlex
import weakref

from ....configs.environments import Harbor
from ....configs.schema import parse_size
from ....errors import EnvError
from ...base import Message, Observation, StepResult, Task, TaskFile
from ...epochs import EpochOrder, numbers_of_split
from ...interpreters import ShellTool
from ...sandbox import Limits, LocalPool, LocalSandbox, ShellSession
from ...sandbox.local import SPARE
from ...simple import SimpleEnv, Split
from ...tools import call_tool
from ..turns import turn_metrics
from .sandboxes import Files, TaskSandboxes
from .tasks import HarborTask, below_home, links_of, read_tasks


class HarborEnv(SimpleEnv):
    """The task folders of one split, and the episode on one of them."""

    def __init__(self, config: Harbor, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: a folder that holds no task, a task that cannot be played as it is meant, or no sandbox
        that can show its folders."""
        super().__init__(split=split, seed=seed)
        self.config = config
        other = config.evaluation if isinstance(config.evaluation, str) else ""
        path = other if split == "eval" and other else config.path
        tasks = read_tasks(
            f"{key}.{'evaluation' if path == other else 'path'}", path, skip_installs=config.skip_installs
        )
        self.name = config.path.rstrip("/").rpartition("/")[2]
        self._tasks = {task.name: task for task in tasks}
        what = f"tasks in {config.path}"
        self._order = EpochOrder(
            numbers_of_split(len(tasks), config.evaluation, split, key=key, what=what), split, seed
        )
        self._limits = Limits(
            wall_s=config.command_s,
            cpu_s=max(config.command_s, config.verifier_s) * config.processes,  # what can be used in that time
            memory=parse_size(f"{key}.memory", config.memory),
            disk=parse_size(f"{key}.disk", config.disk),
            processes=config.processes,
        )
        self._links = links_of(tasks)
        self._make_pool()  # where no sandbox can show its folders, that is said now
        self._sandboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, TaskSandboxes] = (
            weakref.WeakKeyDictionary()
        )
        self._shell: TaskShell | None = None

    def __len__(self) -> int:
        """Tasks in an epoch."""
        return len(self._order.numbers)

    def task(self, index: int) -> Task:
        name = list(self._tasks)[self._order.number(index)]
        return Task(f"{self.name}-{self.split}-{name}", {"task": name})

    async def reset(self, task: Task) -> Observation:
        self._turns = self._calls = self._invalid_calls = 0
        if task.payload["task"] not in self._tasks:
            raise EnvError(f"{self.config.path} has no task {task.payload['task']!r} here")
        self._current = self._tasks[task.payload["task"]]
        sandboxes = self._sandboxes_of_loop()
        await sandboxes.proved(self._current)
        self._shell = TaskShell(sandboxes, self._current)
        self._start = await self._shell.start()
        folder = below_home(self._current.recipe.workdir)
        self._prefix = "" if folder == "." else f"{folder}/"
        files = tuple(
            TaskFile(path.removeprefix(self._prefix), content)
            for path, content in sorted(self._start.items())
            if path.startswith(self._prefix)
        )
        return Observation((Message("user", self._current.instruction),), (self._shell.tool.spec,), files)

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if message.malformed or message.tool_calls:
            tool_replies = await self._call_tools(message)
            if self._turns < self.config.max_turns:
                return StepResult(tool_replies, metrics=self._metrics())
            return await self._score(tool_replies, await self._policy_files(), truncated=True)
        if message.files is not None and not self._calls:
            files = {f"{self._prefix}{file.path}": file.content for file in message.files}
        else:
            files = await self._policy_files()
        return await self._score((), files, truncated=False)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    async def _call_tools(self, message: Message) -> tuple[Message, ...]:
        assert self._shell is not None  # reset has made it
        if message.malformed:
            self._invalid_calls += 1
            return (Message("user", f"error: {message.malformed}"),)
        tool_replies: list[Message] = []
        for call in message.tool_calls:
            reply, valid = await call_tool({self._shell.name: self._shell.tool}, call)
            self._calls += 1
            self._invalid_calls += not valid
            tool_replies.append(reply)
        return tuple(tool_replies)

    async def _policy_files(self) -> Files:
        """Close the policy's sandbox; the files in it, or those of the task's start where the policy's last command ended it."""
        assert self._shell is not None
        sandbox = self._shell.sandbox
        files = None if sandbox is None else await self._sandboxes_of_loop().files_of(sandbox)
        await self._shell.close()
        return self._start if files is None else files

    async def _score(self, tool_replies: tuple[Message, ...], files: Files, *, truncated: bool) -> StepResult:
        score = await self._sandboxes_of_loop().score(self._current, files)
        metrics = score.metrics | self._metrics()
        return StepResult(tool_replies, score.reward or 0.0, done=True, truncated=truncated, metrics=metrics)

    def _metrics(self) -> dict[str, float]:
        return turn_metrics(self._turns, self._invalid_calls) | {"tool_calls": float(self._calls)}

    def _sandboxes_of_loop(self) -> TaskSandboxes:
        loop = asyncio.get_running_loop()
        if loop not in self._sandboxes:
            self._sandboxes[loop] = TaskSandboxes(self._make_pool(), self.config.verifier_s)
        return self._sandboxes[loop]

    def _make_pool(self) -> LocalPool:
        return LocalPool(self._limits, spare=SPARE, packages=self.config.packages, links=self._links)


class TaskShell(ShellTool):
    """The tool `shell` of an episode, in sandboxes at the start of its task."""

    def __init__(self, sandboxes: TaskSandboxes, task: HarborTask) -> None:
        super().__init__(sandboxes.pool)
        self.sandbox: LocalSandbox | None = None
        self._sandboxes, self._task = sandboxes, task

    async def start(self) -> Files:
        """Open the first sandbox, and return the files in it at the start of the task. Raises EnvError, ToolError."""
        self._session = session = await self._open()
        return await self._sandboxes.files_of(session.sandbox) or {}

    async def close(self) -> None:
        self.sandbox = None
        await super().close()

    async def _open(self) -> ShellSession:
        sandbox = await self._sandboxes.open(self._task)
        session = ShellSession(sandbox)
        recipe = self._task.recipe
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in recipe.environ.items())
        try:
            folder = shlex.quote(recipe.workdir)
            ran = await session.run(f"{exports}mkdir -p -- {folder} && cd -- {folder}")
        except BaseException:
            await session.close()
            raise
        if not ran.ok:
            await session.close()
            raise EnvError(f"{self._task.folder}: its folder {recipe.workdir} cannot be entered: {ran.stderr.strip()}")
        self.sandbox = sandbox
        return session
