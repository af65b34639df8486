"""Verifiers, each with tries to cheat it. `code` is in test_envs_code.py."""

import asyncio
import math as numbers
import os
import signal
import subprocess
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.common.waits import Overdue
from slipstream.envs.verifiers import REWARDS, ProcessLost, choice, exact, f1, gsm8k, in_process, mathematics
from slipstream.errors import EnvError

PURE = {"choice": choice, "exact": exact, "f1": f1, "gsm8k": gsm8k}


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("so 6 * 7 = 42\n#### 42", "Natalia sold ... #### 42", 1),
        ("#### 1,234", "1234", 1),
        ("#### $18.00", 18, 1),
        ("The total is 42 dollars, so \\boxed{42}.", "#### 42", 1),
        ("He pays 3 and then 42", "#### 42", 1),
        ("#### 41", "#### 42", 0),
        ("#### 42 #### 41", "#### 42", 0),  # the last counts
        ("42", "#### 4", 0),
        ("", "#### 4", 0),
        ("#### " + "9" * 5000, "#### 4", 0),
        ("#### nothing, though 4 was near", "#### 5", 0),
        ("\\boxed{", "#### 5", 0),
    ],
)
def test_gsm8k(completion, reference, reward):
    assert gsm8k(completion, reference) == reward


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("B", "B", 1),
        ("(b)", "B", 0),  # a letter of prose
        ("(B)", "(B)", 1),
        ("I think so.\nB) a dog", "b", 1),
        ("The answer is (C).", "C", 1),
        ("The answer is A. No: the answer is B.", "B", 1),
        ("\\boxed{\\text{D}}", "D", 1),
        ("<answer>C</answer>", "C", 1),
        ("Answer: **A**", "A", 1),
        ("A", "B", 0),
        ("A B C D", "B", 0),
        ("The answer is A or B or C or D", "B", 0),
        ("The answer is A, B, C, D", "A", 0),
        ("\\boxed{A, B}", "B", 0),
        ("\\boxed{A}\\boxed{B}", "A", 0),
        ("All of them", "A", 0),
        ("<answer>A</answer> and <answer>B", "A", 1),  # the last that is closed
        ("Answer:\n (C)", "C", 1),
        ("", "A", 0),
    ],
)
def test_choice(completion, reference, reward):
    assert choice(completion, reference) == reward


@pytest.mark.parametrize(
    ("completion", "reference", "reward"),
    [
        ("The Eiffel Tower", "eiffel tower", 1),
        ("I know: <answer>Paris.</answer>", ["London", "Paris"], 1),
        ("<answer>Paris</answer>", {"target": ["paris"]}, 1),
        ("<answer>Paris</answer> <answer>London</answer>", "Paris", 0),
        ("<answer>Paris London</answer>", "Paris", 0),
        ("It is Paris", "Paris", 0),
        ("the", "a", 0),  # both normalize to nothing
        ("", "the", 0),
        ("7", 7, 1),
    ],
)
def test_exact(completion, reference, reward):
    assert exact(completion, reference) == reward


def test_f1():
    assert f1("<answer>the black cat</answer>", "a black cat") == 1
    assert f1("black dog", "black cat") == pytest.approx(0.5)
    assert f1("cat " * 100, "cat") == pytest.approx(2 / 101)
    assert f1("", "cat") == 0
    assert f1("every word there is", ["a dog", "word"]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gsm8k", "no number"),
        ("choice", "maybe"),
        ("choice", 3),
        ("exact", {"x": 1}),
        ("exact", []),
        ("f1", None),
        ("f1", [[1]]),
    ],
)
def test_a_reference_that_cannot_be_read_is_the_datas_fault(name, reference):
    with pytest.raises(EnvError, match="the reference"):
        PURE[name]("anything", reference)


@given(st.text() | st.text(alphabet="\\boxed{}#<answer>/ABC0123.,$- \n"))
def test_no_completion_makes_them_raise(completion):
    assert all(
        0 <= PURE[name](completion, wanted) <= 1 for name, wanted in zip(PURE, ("B", "x", "x", "1"), strict=True)
    )


HOSTILE = {
    "blanks": "The answer is" + "\n" * 30_000,
    "blanks and stars": "Answer " + " *" * 15_000,
    "open tags": "<answer>" * 15_000,
    "open braces": "<answer>" + "\\text{" * 8000 + "</answer>",
    "many answers": "The answer is " + "A, " * 15_000,
    "digits": "-$1," * 15_000,
}


@pytest.mark.parametrize("completion", HOSTILE.values(), ids=HOSTILE)
def test_no_completion_takes_long(completion):
    for name, wanted in zip(PURE, ("B", "x", "x", "1"), strict=True):
        began = time.process_time()
        PURE[name](completion, wanted)
        assert time.process_time() - began < 0.5, name


async def test_every_reward_is_awaited_and_named():
    assert set(REWARDS) == {"math", "choice", "exact", "f1", "gsm8k", "code"}
    assert await REWARDS["gsm8k"]("#### 3", "3") == 1.0


# --- processes that are killed ----------------------------------------------------------------------------------------


def spin():
    while True:
        pass


def hold_the_lock():
    return 9**9**9


def ignore_everything():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


@pytest.mark.parametrize("runaway", [hold_the_lock, ignore_everything])
async def test_a_runaway_is_killed_within_its_limit_while_the_loop_runs(runaway):
    await in_process(numbers.sqrt, 4.0, seconds=60)  # a process is there
    began = time.perf_counter()

    async def step():
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    for _ in range(5):  # the loop may have to wait for a core, but not each time
        turns = 0
        others = asyncio.create_task(step())
        with pytest.raises(TimeoutError):
            await in_process(runaway, seconds=0.5)
        others.cancel()
        if turns > 3:  # of fifty, where nothing else computes
            break
    assert turns > 3
    assert time.perf_counter() - began < 90
    assert await in_process(numbers.sqrt, 9.0, seconds=60) == 3.0  # its slot is free


async def test_more_runaways_than_slots_all_end():
    async with asyncio.timeout(120):
        ended = await asyncio.gather(*(in_process(spin, seconds=0.2) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in ended] == [Overdue] * 3


async def test_a_process_that_dies_is_named_and_replaced():
    with pytest.raises(ProcessLost, match="ended with status 3"):
        await in_process(os._exit, 3, seconds=60)
    assert await in_process(os.path.basename, "a/b", seconds=60) == "b"


async def test_a_process_that_ended_before_a_call_is_not_that_calls_doing():
    pid = await in_process(os.getpid, seconds=60)
    os.kill(pid, signal.SIGKILL)
    assert await in_process(os.getpid, seconds=60) != pid  # at once: the dying process may not be seen as dead yet
    pid = await in_process(os.getpid, seconds=60)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it was killed
    assert await in_process(os.getpid, seconds=60) != pid


async def test_a_module_that_ends_its_process_is_an_error_and_no_loss_of_a_call(tmp_path, monkeypatch):
    (tmp_path / "ends_it.py").write_text("import os; os._exit(5)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match="ended with status 5") as raised:
        await in_process("ends_it:call", seconds=60)
    assert not isinstance(raised.value, ProcessLost)


async def test_killing_a_process_does_not_wait_on_the_loop(monkeypatch):
    pid = await in_process(os.getpid, seconds=60)
    waits, wait = [], subprocess.Popen.wait

    def spy(self, timeout=None):
        waits.append((self.pid, threading.current_thread() is threading.main_thread()))
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", spy)
    with pytest.raises(ProcessLost, match="ended with status 3"):
        await in_process(os._exit, 3, seconds=60)
    assert waits == [(pid, False)]


async def test_what_a_function_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        await in_process(divmod, 1, 0, seconds=60)


async def test_a_cancelled_call_leaves_no_process_behind():
    await in_process(os.getpid, seconds=60)
    call = asyncio.create_task(in_process(spin, seconds=600))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await in_process(os.getpid, seconds=60) != os.getpid()


# --- math --------------------------------------------------------------------------------------------------------------

EQUAL = [
    ("1/2", "The answer is \\boxed{0.5}", 1),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1),
    ("x^2+2x+1", "\\boxed{(x+1)^2}", 1),
    ("10", "so we get 10.", 1),
    ("\\frac{\\sqrt{3}}{2}", "$\\sqrt{3}/2$", 1),
    ("(1,2]", "\\boxed{(1, 2]}", 1),
    (["3", "5"], "\\boxed{5}", 1),
    ("5", "\\boxed{6}", 0),
    ("5", "\\boxed{5} \\boxed{6}", 0),
    ("5", "\\boxed{6} or 5", 0),
    ("5", "\\boxed{1,2,3,4,5,6}", 0),
    ("5", "\\boxed{x}", 0),
    ("5", "", 0),
    ("5", "\\boxed{" + "(" * 300 + "1" + ")" * 300 + "}", 0),
]


async def test_math():
    """In one test, since a process takes seconds to import sympy."""
    pytest.importorskip("math_verify")
    rewards = await asyncio.gather(*(REWARDS["math"](given, wanted) for wanted, given, _ in EQUAL))
    assert rewards == [reward for *_, reward in EQUAL]
    with pytest.raises(EnvError, match="cannot be read"):
        await REWARDS["math"]("\\boxed{5}", "")

    began = time.perf_counter()  # one that never ends earns nothing, within its limit, and holds back no other
    runaway = asyncio.create_task(REWARDS["math"]("\\boxed{9^{9^{9^{9}}}}", "5"))
    assert await REWARDS["math"]("\\boxed{5}", "5") == 1.0
    assert not runaway.done()
    assert await runaway == 0.0
    assert time.perf_counter() - began < 90


SLOW = """
import sys, time
time.sleep(4)
sys.path = [path for path in sys.path if path != {folder!r}]
del sys.modules["math_verify"]
import math_verify
"""


async def test_the_import_of_math_verify_does_not_count_against_an_answer(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    (tmp_path / "math_verify.py").write_text(SLOW.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(mathematics, "LIMIT_S", 3.5)
    assert await REWARDS["math"]("\\boxed{5}", "5") == 1.0
