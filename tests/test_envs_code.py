"""The verifier `code`, and what tries to cheat it. The machine's own kind of sandbox runs it."""

import asyncio
import json
import os
import signal
import time

import pytest
from slipstream.envs.sandbox import Limits, LocalPool
from slipstream.envs.verifiers import REWARDS, code
from slipstream.envs.verifiers.code import program_of, same
from slipstream.errors import EnvError, ToolError

DOUBLE = {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}
RIGHT = {
    "plain": "def double(x): return 2 * x",
    "in a block": "First:\n```python\ndef double(x): return 3 * x\n```\nNo:\n```python\ndef double(x):\n    return x + x\n```",
    "of a class": "class Solution:\n    def double(self, x): return 2 * x",
    "prints meanwhile": "import os\ndef double(x):\n    print(7)\n    os.system('echo 8')\n    return 2 * x",
}
HACKS = {
    "wrong": "def double(x): return x",
    "os._exit(0)": "import os; os._exit(0)",
    "sys.exit(0)": "import sys; sys.exit(0)",
    "equal to all": "class E(int):\n    def __eq__(s, o): return True\ndef double(x): return E(0)",
    "atexit": "import os, atexit; atexit.register(os._exit, 0)\ndef double(x): return 0",
    "no asserts": "import sys\nsys.excepthook = lambda *a: None\ndef double(x): return 0",
    "reads frames": "import sys\nt = str(sys._getframe(1).f_globals)\ndef double(x): return t",
    "writes the answers": "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'4\\n')\n    except OSError: pass\n"
    "def double(x): return 0",
    "loop": "while 1: pass",
    "constant": "def double(x): return 4",
    "patches json": "import json\njson.dumps = lambda *a: 'true'\ndef double(x): return 0",
    "true is 1": "def double(x): return True",
    "too many": "import json\nd = json.dumps\njson.dumps = lambda x: '4\\n10\\n4\\n10'\ndef double(x): return 0",
    "kills its sandbox": "import os, signal\ndef double(x):\n    for p in (-1, 1, 2, os.getppid(), -os.getppid()):\n"
    "        try: os.kill(p, 9)\n        except OSError: pass\n    return 0",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "memory": "x = []\nwhile 1: x.append(bytearray(1 << 26))",
    "output": "while 1: print('x' * 10000)",
    "no program": "",
    "no python": "I would double it.",
}  # fmt: skip


@pytest.fixture
async def pool():
    pool = LocalPool(Limits(wall_s=60, cpu_s=2))  # no program of these sleeps: what spins ends by its CPU time
    yield pool
    await pool.close()


async def test_programs_by_calls_and_tries_to_cheat(pool):
    rewards = await asyncio.gather(*(code(program, DOUBLE, pool) for program in (*RIGHT.values(), *HACKS.values())))
    earned = dict(zip((*RIGHT, *HACKS), rewards, strict=True))
    assert earned == dict.fromkeys(RIGHT, 1.0) | dict.fromkeys(HACKS, 0.0)


async def test_programs_by_stdin(pool):
    cases = {"inputs": ["2\n", "5\n"], "outputs": ["4", "10\n"]}
    programs = {
        "print(2 * int(input()))": 1.0,
        "import os\nprint(2 * int(input()), flush=True)\nexit()": 1.0,
        "print(4)": 0.0,
        "print(4, 10)": 0.0,
        "print(2 * int(input())); raise SystemExit(1)": 0.0,
        "import glob\nprint(open(sorted(glob.glob('*'))[-1]).read())": 0.0,
    }
    rewards = await asyncio.gather(*(code(program, json.dumps(cases), pool) for program in programs))
    assert dict(zip(programs, rewards, strict=True)) == programs


async def test_a_program_that_is_slow_in_many_cases_earns_nothing(pool, monkeypatch):
    monkeypatch.setitem(code.__globals__, "TOTAL_S", 2.0)
    cases = {"inputs": ["1"] * 20, "outputs": ["1"] * 20}
    assert await code("import time\ntime.sleep(0.5)\nprint(1)", cases, pool) == 0.0  # each is within its own limit


def test_the_last_block_is_found_in_time_proportional_to_its_length():
    for fence in ("```", "```python", "```py ", "```python3\t"):
        assert program_of(f"a\n```\nfirst\n```\n{fence}\nx = 1\n```") == "x = 1\n"
    began = time.process_time()
    program_of("```" + " " * 30_000)
    assert time.process_time() - began < 1


async def test_asserts_are_unsafe_as_their_name_says(pool):
    asserts = {"unsafe_asserts": "assert double(2) == 4\nassert double(5) == 10\n"}
    assert await code("def double(x): return 2 * x", asserts, pool) == 1.0
    assert await code("def double(x): return x", asserts, pool) == 0.0
    assert await code("import os; os._exit(0)", asserts, pool) == 0.0
    assert await code(HACKS["equal to all"], asserts, pool) == 1.0  # fooled


async def test_expected_values_never_enter_the_sandbox(pool):
    """A program that returns all that it can find, in its process and on its disk, does not find them."""
    secret = 987_654_321_123
    program = """
import gc, glob, sys
def find(x):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_globals, frame.f_locals]
        frame = frame.f_back
    seen += [o for o in gc.get_objects() if isinstance(o, (list, dict, str, int))]
    seen += [open(p, errors="replace").read() for p in glob.glob("/box/**", recursive=True) if p.endswith((".py", ".txt"))]
    wanted = "98765" + "4321123"
    return int(wanted) if wanted in str(seen) else 0
"""
    assert await code(program, {"fn_name": "find", "inputs": [[1]], "outputs": [secret]}, pool) == 0.0


async def test_a_dead_sandbox_is_a_tool_error_and_never_a_reward(pool):
    class Killing:
        """The pool, whose sandbox is killed from outside while the program runs."""

        async def open(self):
            box = await pool.open()
            asyncio.get_running_loop().call_later(0.5, os.kill, box.pid, signal.SIGKILL)
            return box

        async def close(self):
            return None

    with pytest.raises(ToolError, match="ended from outside"):
        await code("import time\ndef double(x): time.sleep(3); return 2 * x", DOUBLE, Killing())


UNREADABLE = (
    "no JSON",
    3,
    {},
    {"inputs": [], "outputs": []},
    {"inputs": [1], "outputs": []},
    {"inputs": ["a"], "outputs": ["b"], "fn_name": "f"},
    {"inputs": ["1"], "outputs": ["1"], "expected": 1},
)


@pytest.mark.parametrize("reference", UNREADABLE)
async def test_a_reference_that_cannot_be_read_is_the_datas_fault(reference):
    with pytest.raises(EnvError, match=r"verifier `code`|fn_name"):
        await REWARDS["code"]("x", reference)


def test_equality_of_values():
    assert same([1, 2.0, {"a": None}], [1, 2.0000000001, {"a": None}])
    assert same(3, 3.0)
    assert not same(True, 1)
    assert not same(float("nan"), float("nan"))
    assert not same(10**400, 1.5)
    assert not same("1", 1)
    assert not same([1], [1, 2])
