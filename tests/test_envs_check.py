"""`slipstream env check`: each planted fault is found by its check, and good environments pass."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from slipstream.configs.environments import Dataset, Gymnasium, PythonEnv, TextArena
from slipstream.envs import check as check_module
from slipstream.envs.check import CHECKS, ContractViolation, run_check, subject_of
from slipstream.launch.cli.main import main
from slipstream.launch.env_check import check_environment

FAULTY = '''
import asyncio, os, random, re, threading, time
from slipstream.envs import CALCULATOR, Message, Observation, SimpleEnv, StepResult, Task, ToolSpec, call_tool, in_thread

class Good(SimpleEnv):
    """Three turns, with a tool."""
    def task(self, index):
        return Task(f"t-{index}", {"n": self.rng(index).randint(0, 10**6)})

    async def reset(self, task):
        self.n, self.turns = task.payload["n"], 0
        return Observation((Message("user", f"{self.n}?"),), (CALCULATOR.spec,))

    async def step(self, message):
        self.turns += 1
        if message.tool_calls:
            tools = {"calculator": CALCULATOR}
            return StepResult(tuple([(await call_tool(tools, call))[0] for call in message.tool_calls]))
        return StepResult((Message("user", f"no, {self.n + self.turns}"),), done=self.turns > 6)

class MakesOneAtATime(Good):
    """As the contract allows: a source's `task` is never called twice at once."""
    making = threading.Lock()
    def task(self, index):
        if not self.making.acquire(blocking=False): raise RuntimeError("two tasks at once")
        try:
            time.sleep(0.002)
            return super().task(index)
        finally:
            self.making.release()

class HashSeed(Good):
    def task(self, index): return Task(f"t-{index}", {"n": hash(f"{index}") % 1000})

class GlobalRandom(Good):
    def task(self, index): return Task(f"t-{index}", {"n": random.randint(0, 10**6)})

class Raises(Good):
    def task(self, index): return Task(f"t-{index}", {"n": {}["key"]})

class Moody(Good):
    async def step(self, message):
        return StepResult((Message("user", str(random.random())),))

class Shared(Good):
    seen = []
    async def reset(self, task):
        self.seen.clear()
        return await super().reset(task)
    async def step(self, message):
        self.seen.append(self.n)
        if message.tool_calls: return await super().step(message)
        return StepResult((Message("user", str(sorted(set(self.seen)))),))

class Blocks(Good):
    async def reset(self, task):
        time.sleep(0.3)
        return await super().reset(task)

class Computes(Good):
    async def reset(self, task):
        sum(range(10**7))  # and keeps the interpreter's lock
        return await super().reset(task)

class ComputesInThread(Good):
    async def reset(self, task):
        await in_thread(lambda: re.match(r"(a+)+$", "a" * 20 + "b"))  # which keeps the interpreter's lock, too
        return await super().reset(task)

class Waits(Good):
    async def step(self, message):
        await asyncio.sleep(0.05)
        return await super().step(message)

class BlocksForEver(Good):
    async def step(self, message):
        time.sleep(10**6)

class HoldsTheLock(Good):
    async def step(self, message):
        re.match(r"(a+)+$", "a" * 60 + "b")

class TaskBlocks(Good):
    def task(self, index): time.sleep(10**6)

class EndsItsProcess(Good):
    async def step(self, message):
        os._exit(3)

class LeaksFiles(Good):
    kept = []
    async def reset(self, task):
        self.kept.append(open("/dev/null"))
        return await super().reset(task)

class LeaksThreads(Good):
    async def reset(self, task):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return await super().reset(task)

class BadSchema(Good):
    async def reset(self, task):
        return Observation((Message("user", "x"),), (ToolSpec("t", "", {"type": "strin"}),))

class NoObject(Good):
    async def reset(self, task):
        return Observation((Message("user", "x"),), (ToolSpec("t", "", {"type": "string"}),))

class Unanswered(Good):
    async def step(self, message):
        return StepResult((Message("user", "what?"),))

class Silent(Good):
    async def step(self, message): return StepResult()

class Nan(Good):
    async def step(self, message): return StepResult(reward=float("nan"), done=True)

class Huge(Good):
    async def step(self, message): return StepResult(reward=1e31, done=True)

class TrueReward(Good):
    async def step(self, message): return StepResult(reward=True, done=True)

class TextReward(Good):
    async def step(self, message): return StepResult(reward="1.0", done=True)

class Metric(Good):
    async def step(self, message): return StepResult(metrics={"\\ud800": 1.0}, done=True)

class StepRaises(Good):
    async def step(self, message): raise RuntimeError("no sandbox")

class ReturnsText(Good):
    async def reset(self, task): return "Say a number."

class OneMessage(Good):
    async def reset(self, task): return Observation(Message("user", "x"))

class ReturnsTool(Good):
    async def reset(self, task): return Observation((Message("user", "x"),), (CALCULATOR,))

class Nothing(Good):
    async def reset(self, task): return Observation(())

class Stubborn(Good):
    async def step(self, message):
        while True:
            try: await asyncio.sleep(600)
            except asyncio.CancelledError: pass

class NoAwait(Good):
    async def rule(self): return 1.0
    async def step(self, message):
        return StepResult(reward=self.rule(), done=True)

class NoAwaitInReset(Good):
    async def reset(self, task):
        return Observation(super().reset(task))

class Drops(Good):
    async def log(self): pass
    async def step(self, message):
        self.log()
        return await super().step(message)

class AsyncTask(Good):
    async def task(self, index): return Task(f"t-{index}")

class PlainReset(Good):
    def reset(self, task): return Observation((Message("user", "x"),))

class CloseAfterCancel(Good):
    stepping = False
    async def step(self, message):
        self.stepping = True
        await asyncio.sleep(0.01)
        self.stepping = False
        return await super().step(message)
    async def close(self):
        if self.stepping: raise RuntimeError("still stepping")
'''

FAULTS = [
    ("HashSeed", "tasks", r"another process makes another task 0: it depends on hash\(\)"),
    ("GlobalRandom", "tasks", r"task\(i\) depends on what was asked before"),
    ("Raises", "tasks", r"raised KeyError: 'key' \(faulty\.py:\d+ in task\)"),
    ("Moody", "episodes", "went another way|no tool message answers"),
    ("Shared", "episodes", "episodes that run at once disturb each other"),
    ("Blocks", "event loop", r"the event loop stood still for \d+ ms; .*in_thread"),
    ("Computes", "event loop", r"the event loop stood still for \d+ ms"),
    ("ComputesInThread", "event loop", r"the event loop stood still for \d+ ms"),
    ("LeaksFiles", "leaks", r"\d+ open files are left by 8 episodes; release them in close"),
    ("LeaksThreads", "leaks", r"\d+ threads are left by 8 episodes"),
    ("BadSchema", "opening", "the schema of the tool 't' is invalid: 'strin' is not valid"),
    ("NoObject", "opening", "the schema of the tool 't' must have the type object"),
    ("Unanswered", "episodes", "no tool message answers the call of"),
    ("Silent", "episodes", "is not done and has no message"),
    ("Nan", "episodes", "step: a reward of nan; allowed are numbers up to 1e\\+30"),
    ("Huge", "episodes", r"step: a reward of 1e\+31; allowed are numbers up to 1e\+30"),
    ("TextReward", "episodes", "step: a reward of '1.0'"),
    ("Metric", "episodes", r"step: a metric with the name '\\ud800'; allowed is text"),
    ("StepRaises", "episodes", r"step raised RuntimeError: no sandbox \(faulty\.py:\d+ in step\)"),
    ("ReturnsText", "opening", "reset returned 'Say a number.', which is no valid Observation"),
    ("OneMessage", "opening", "which is no valid Observation: Expected `array`"),
    ("ReturnsTool", "opening", "which is no valid Observation"),
    ("Nothing", "opening", "reset returned no message for the policy to answer"),
    ("NoAwait", "episodes", r"step: `rule\(\.\.\.\)` was called without `await` \(faulty\.py:\d+ in step\)"),
    ("NoAwaitInReset", "opening", r"reset: `reset\(\.\.\.\)` was called without `await` \(faulty\.py:\d+ in reset\)"),
    ("Drops", "episodes", r"`log\(\.\.\.\)` was called without `await` \(faulty\.py:\d+ in step\)"),
    ("AsyncTask", "tasks", r"task 0: `task\(\.\.\.\)` was called without `await`"),
    ("PlainReset", "opening", r"reset returned Observation.* and no coroutine; write `async def reset`"),
    ("Stubborn", "cancellation", "step ignores its cancellation for 0.3 s"),
    ("Stubborn", "episodes", "step took longer than 1 s, and ignores its cancellation"),
    ("CloseAfterCancel", "cancellation", "close after a cancelled step raised RuntimeError: still stepping"),
]


@pytest.fixture(autouse=True)
def _faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    monkeypatch.chdir(tmp_path)
    if "Stubborn" in request.node.name:
        monkeypatch.setattr(check_module, "CANCEL_S", 0.3)
        monkeypatch.setattr(check_module, "STEP_S", 1.0)


@pytest.mark.parametrize(("name", "check", "complaint"), FAULTS, ids=[f"{name}-{check}" for name, check, _ in FAULTS])
def test_a_planted_fault_is_found(name: str, check: str, complaint: str) -> None:
    with pytest.raises(ContractViolation, match=complaint) as found:
        run_check(check, subject_of(PythonEnv(factory=f"faulty:{name}"), 0))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "config",
    [
        PythonEnv(factory="faulty:Good"),
        PythonEnv(factory="faulty:MakesOneAtATime"),
        PythonEnv(factory="faulty:TrueReward"),
        Gymnasium(id="FrozenLake-v1", max_turns=12),
        TextArena(id="2048-v0-raw", max_turns=6),
    ],
    ids=["own", "one task at a time", "true", "gymnasium", "textarena"],
)
def test_good_environments_pass_every_check(config) -> None:
    subject = subject_of(config, 0)
    for name in CHECKS:
        assert run_check(name, subject)


def test_the_command_prints_a_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "faulty:Good"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("env: Good\n")
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["ok"] * len(CHECKS)
    assert main(["env", "check", "faulty:Nan"]) == 1
    shown = capsys.readouterr().out
    assert "WRONG episodes     step: a reward of nan" in shown
    assert "ok    opening" in shown


@pytest.mark.parametrize(
    ("name", "check"), [("Raises", "tasks"), ("ReturnsText", "opening"), ("StepRaises", "episodes")]
)
def test_a_fault_that_several_checks_would_meet_is_one_line(name: str, check: str) -> None:
    lines = list[str]()
    assert not check_environment("env", PythonEnv(factory=f"faulty:{name}"), 0, lines.append)
    before = list(CHECKS).index(check)
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * before + ["WRONG"] + ["-"] * (len(CHECKS) - before - 1)
    assert all(line.endswith(f"not checked, after {check}") for line in lines[before + 2 :])


def test_a_broken_row_is_one_line_although_two_checks_meet_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "human", "content": "1 + 1?"}], "answer": "2"}\n' * 2)
    lines = list[str]()
    config = Dataset(path="rows.jsonl", reward="exact", evaluation=0.5)
    assert not check_environment("env", config, 0, lines.append)
    assert lines[1].startswith("WRONG tasks        rows.jsonl, line 1: its 'messages' has ")
    assert [line.split()[0] for line in lines[2:]] == ["-"] * (len(CHECKS) - 1)
    assert lines[2].endswith("opening      not checked, after tasks")


@pytest.mark.parametrize(
    ("name", "check", "why"),
    [
        (
            "BlocksForEver",
            "episodes",
            r"it blocks its process for more than 4 s at faulty\.py:\d+ in step; run what blocks",
        ),
        (
            "HoldsTheLock",
            "episodes",
            r"it blocks its process for more than 4 s at faulty\.py:\d+ in step; run what blocks",
        ),
        ("TaskBlocks", "tasks", r"it blocks its process for more than 4 s at faulty\.py:\d+ in task; run what blocks"),
        ("EndsItsProcess", "episodes", r"it ended its process: exit status 3"),
    ],
)
def test_what_blocks_or_ends_its_process_is_named(name: str, check: str, why: str) -> None:
    before, lines = set(psutil.Process().children()), list[str]()  # those of other tests may end meanwhile
    config = PythonEnv(factory=f"faulty:{name}")
    assert not check_environment("env", config, 0, lines.append, silent_s=4.0)
    new = set(psutil.Process().children()) - before
    assert [p for p in new if not any(word.endswith("tests/forkserver.py") for word in p.cmdline())] == []
    assert lines[0] == f"env: {name}"
    done = list(CHECKS).index(check)
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * done + ["WRONG"] + ["-"] * (len(CHECKS) - done - 1)
    assert re.search(f"WRONG {check} +{why}", lines[done + 1])
    assert lines[-1].endswith(f"not checked, after {check}")


STOPPED = """
from slipstream.configs.environments import PythonEnv
from slipstream.envs.check import run_check, subject_of
subject = subject_of(PythonEnv(factory="faulty:Waits"), 0)
print("begun", flush=True)
print(run_check("event loop", subject))
"""


def test_a_process_that_stands_still_as_a_whole_is_not_blocked() -> None:
    """As on a busy machine. It is stopped in every try."""
    with subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.15)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
        assert re.fullmatch(r"stood still for \d+ ms at most\n", process.stdout.read())


def test_what_cannot_be_checked_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unreadable.py").write_text("class Env(")
    for what, complaint in (
        ("faulty:None_", "env.factory: 'faulty' has no callable 'None_'"),
        ("unreadable:Env", "SyntaxError"),
        ("none.yaml", "none.yaml: no such file"),
    ):
        assert main(["env", "check", what]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert complaint in line
