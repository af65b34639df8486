"""Repair of a small program in the folder of its task, in the manner of SWE-bench: the agent sees the broken program and what it is
meant to do, and the tests run when it has finished, in another sandbox.

The tests know values, not how to compute them, and these stay outside the sandbox: a program that ends the tests early, or replaces
what they import, has computed nothing. Files other than the program are not taken over.
"""

from __future__ import annotations

import json

from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task, TaskFile
from slipstream.envs.sandbox import local_pool
from slipstream.errors import EnvError

PROGRAM = "ledger.py"
RIGHT = '''"""A ledger of amounts in cents."""


def balance(entries):
    """The sum of all entries."""
    total = 0
    for entry in entries:
        total += entry
    return total


def largest(entries):
    """The largest entry; 0 where there is none."""
    found = 0
    for entry in entries:
        if entry > found:
            found = entry
    return found


def average(entries):
    """The balance per entry, rounded down; 0 where there is none."""
    if not entries:
        return 0
    return balance(entries) // len(entries)
'''
FAULTS = {
    "balance": ("total += entry", "total = entry"),
    "largest": ("if entry > found:", "if entry < found:"),
    "average": ("balance(entries) // len(entries)", "balance(entries) // 2"),
}
"""By the function that breaks: a line of the program, and what stands there instead."""

HIDDEN = ([], [5], [3, 9, 4], [120, 40, 80, 7])
EXPECTED = {
    "balance": [0, 5, 16, 247],
    "largest": [0, 5, 9, 120],
    "average": [0, 5, 5, 61],
}
# Prints what each function returns for each case, as JSON.
RUN = """import json, sys
sys.path.insert(0, "")
import ledger
cases = json.load(sys.stdin)
print(json.dumps({name: [getattr(ledger, name)(case) for case in cases] for name in ("balance", "largest", "average")}))
"""


class Repair(SimpleEnv):
    """One function of the program is broken; the reward is 1 where all work."""

    def task(self, index: int) -> Task:
        return Task(f"repair-{index}", {"broken": self.rng(index).choice(sorted(FAULTS))})

    async def reset(self, task: Task) -> Observation:
        broken = task.payload["broken"]
        program = RIGHT.replace(*FAULTS[broken])
        question = (
            f"{PROGRAM} in this folder has a fault: {broken} is wrong. Repair it with the shell, then say what you did."
        )
        return Observation((Message("user", question),), files=(TaskFile(PROGRAM, program.encode()),))

    async def step(self, message: Message) -> StepResult:
        if message.files is None:
            raise EnvError("its tasks are folders; an agent of agent.kind=command has one")
        programs = [file.content for file in message.files if file.path == PROGRAM]
        return StepResult(reward=await self.score(programs[0]) if programs else 0.0, done=True)

    async def score(self, program: bytes) -> float:
        """1 where it computes every value that the tests know."""
        sandbox = await local_pool().open()
        try:
            await sandbox.write(PROGRAM, program)
            ran = await sandbox.run((sandbox.python, "-I", "-c", RUN), json.dumps(HIDDEN).encode())
        finally:
            await sandbox.close()
        try:
            return float(ran.ended == "exited" and json.loads(ran.stdout) == EXPECTED)
        except ValueError:
            return 0.0
