"""Agents that are programs: one runs in a sandbox, in the folder of its task, and reaches nothing but the gateway.

    env.reset ──files──> folder ──> program ──what it left, stdout──> env.step
                                     │  ^
                      completions    v  │    calls of the environment's tools
                          relay, Unix socket ──> gateway ──> session, environment

Invariants:
- Every episode has a sandbox of its own, which the program shares with what the policy writes. It ends with the episode.
- The program's calls have ended before what it left is a step of the environment. Its files leave the sandbox as bytes.
- A program that ends by itself with exit status 0 has answered. Any other end is no reward: `timeout` where it took too long,
  `truncated` where the context was full or the reply before its end was cut for its tokens, else a failure of the `policy`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import cast

import msgspec

from ..configs.schema import Agent as AgentSettings
from ..configs.schema import parse_size
from ..envs.base import Environment, Message, Task, TaskFile
from ..envs.interpreters import ending
from ..envs.sandbox import ExecResult, GatewayAddress, Limits, LocalPool, LocalSandbox, Mount, require_sandbox
from ..errors import AgentTimeout, ConfigError, EnvError, PolicyError, ToolError
from .base import ContextExhausted, Policy
from .chat_images import require_text
from .gateway import Endpoint, EnvTools, Gateway
from .session import Session

PLACEHOLDER = re.compile(r"\{(?:question|folder|python)\}")
TASK = "task"  # the folder in which the program starts, below its home
OUTPUT = 1 << 20  # bytes that the program may print to stdout, and to stderr
LINES, WIDTH = 5, 600  # of its output in the outcome of an episode: the last lines, and characters of them
LOGGED = 10_000  # characters of its stdout, and of its stderr, in the log of a failure
CHECK_S = 30.0  # longest check of a program before a run
CHECK = """command -v -- "$1" > /dev/null || echo "agent.command: there is no program $1 in the sandbox"
[ -z "$2" ] || { [ -r "$2" ] && [ -x "$2" ]; } || echo "agent.sandbox.folder: the sandbox's user cannot read it"
"""


class CommandAgent:
    """The agent of `agent.kind: command`, whose program may take `wall_s` seconds. `gateway` must be open while it plays. Raises
    ConfigError: nothing can be confined here, or the sandbox cannot reach the gateway alone."""

    def __init__(self, settings: AgentSettings, gateway: Gateway, wall_s: float) -> None:
        sandbox = settings.sandbox
        self._command = settings.command
        self._gateway = gateway
        self._limits = Limits(
            wall_s=wall_s,
            cpu_s=wall_s * sandbox.processes,  # what can be used in that time: CPU time has no limit of its own
            memory=parse_size("agent.sandbox.memory", sandbox.memory),
            disk=parse_size("agent.sandbox.disk", sandbox.disk),
            processes=sandbox.processes,
            output=OUTPUT,
        )
        folder = os.path.abspath(sandbox.folder) if sandbox.folder else ""
        if folder and not os.path.isdir(folder):
            raise ConfigError(f"agent.sandbox.folder: {folder} is no folder")
        self._folder = require_sandbox().place(folder) if folder else ""
        mounts = (Mount(folder, self._folder),) if folder else ()
        self._pool = LocalPool(self._limits, mounts=mounts, gateway=GatewayAddress(str(gateway.socket), gateway.port))

    async def __call__(self, env: Environment, policy: Policy, task: Task) -> None:
        session = cast(Session, policy)
        observation = await env.reset(task)
        require_text(observation.messages)
        tools = EnvTools(env, observation.tools)
        question = "\n\n".join(message.content for message in observation.messages)
        box = await self._pool.open()
        try:
            await _fill(box, observation.files)
            async with self._gateway.endpoint(session, tools) as endpoint:
                ran = await self._run(box, question, endpoint)
            tools.check()
            self._require_success(ran, session)
            files = await _folder_files(box)
        finally:
            await box.close()
        if not tools.done:
            await env.step(Message("assistant", ran.stdout.strip(), files=files))

    async def check(self) -> None:
        """Raises ConfigError: the program is not in the sandbox, or cannot read its folder."""
        try:
            box = await self._pool.open()
        except ToolError as error:
            raise ConfigError(f"agent.kind: {error}") from error
        try:
            shell = ("/bin/sh", "-c", CHECK, "sh", self._arguments(box, "")[0], self._folder)
            ran = await box.run(shell, wall_s=CHECK_S)
        finally:
            await box.close()
        if ran.stdout or not ran.ok:
            raise ConfigError((ran.stdout or f"agent.kind: its sandbox does not work: {_tail(ran)}").split("\n")[0])

    def _arguments(self, box: LocalSandbox, question: str) -> list[str]:
        values = {"{question}": question, "{folder}": self._folder, "{python}": box.python}
        return [_replaced(argument, values) for argument in self._command]

    async def _run(self, box: LocalSandbox, question: str, endpoint: Endpoint) -> ExecResult:
        """The question is on stdin where no argument has it."""
        question = question.replace("\0", "\ufffd").encode(errors="replace").decode()  # as arguments can be
        outside, inside = self._gateway.url, f"http://{box.gateway}"
        url, mcp = (one.replace(outside, inside, 1) for one in (endpoint.url, endpoint.mcp))
        environ = msgspec.structs.replace(endpoint, url=url, mcp=mcp).environ
        given = b"" if any("{question}" in argument for argument in self._command) else question.encode()
        return await box.run(self._arguments(box, question), given, environ=environ, cwd=TASK)

    def _require_success(self, ran: ExecResult, session: Session) -> None:
        if ran.ok:
            return
        if ran.ended == "exited" and session.exhausted:
            raise ContextExhausted(session.exhausted[-1])
        if ran.ended == "exited" and session.cut_short and (ran.exit_code or 0) > 0:
            raise ContextExhausted("the newest reply was cut at agent.max_tokens_per_turn")
        how = f"ended with {_status(ran)}" if ran.ended == "exited" else f"was stopped: {ending(ran, self._limits)}"
        kind = AgentTimeout if ran.ended == "wall" else PolicyError
        error = kind(f"the program {self._command[0]} {how}; {_tail(ran)}")
        error.add_note(f"stdout:\n{ran.stdout[-LOGGED:]}\nstderr:\n{ran.stderr[-LOGGED:]}")
        raise error


async def _fill(box: LocalSandbox, files: Sequence[TaskFile]) -> None:
    try:
        for file in files:
            await box.write(f"{TASK}/{file.path}", file.content)
    except OSError as error:
        raise EnvError(f"the files of the task cannot be put into its folder: {error}") from error


async def _folder_files(box: LocalSandbox) -> tuple[TaskFile, ...]:
    """What is in the folder after the program."""
    try:
        found = await box.read_folder(TASK)
    except OSError as error:
        raise PolicyError(f"what the program left in its folder cannot be read: {error}") from error
    return tuple(TaskFile(path, content) for path, content in sorted(found.items()))


def _replaced(argument: str, values: dict[str, str]) -> str:
    """In one pass: a question that spells a placeholder keeps it."""
    return PLACEHOLDER.sub(lambda match: values[match[0]], argument)


def _status(ran: ExecResult) -> str:
    code = ran.exit_code or 0
    return f"exit status {code}" if code > 0 else f"signal {-code}"


def _tail(ran: ExecResult) -> str:
    """The last lines of what it printed, in one."""
    printed = ran.stderr.strip() or ran.stdout.strip()
    lines = [line.strip() for line in printed.splitlines() if line.strip()][-LINES:]
    return f"it printed: {' | '.join(lines)[-WIDTH:]}" if lines else "it printed nothing"
