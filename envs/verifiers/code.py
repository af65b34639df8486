"""The verifier of programs: it runs them in a sandbox and compares what they compute.

Invariants:
- Expected values never enter the sandbox. A program can only be right by printing them; its exit status and its comparisons
  count for nothing.
- What a program does (it fails, hangs, prints too much, kills its sandbox) earns 0. A sandbox that was ended from outside is
  a ToolError.
- All cases or nothing: a program written for the cases that it saw earns as little as any wrong one.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from typing import Any

import msgspec

from ...common.waits import Overdue, within
from ...errors import EnvError
from ..sandbox import ExecResult, Sandbox, SandboxPool, local_pool

FENCE = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]*)?\n(.*?)```", re.DOTALL | re.IGNORECASE)
CLOSE = 1e-6  # relative and absolute difference up to which numbers with a point are equal
TOTAL_S = 60.0  # of all cases of a program; a step of the environment has 120 s, unless an episode has less


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program must compute, as APPS, TACO and PRIME have it: for each of `inputs` the one of `outputs`. With `fn_name`
    an input is the list of that function's arguments and an output what it returns; without, an input is stdin and an output
    stdout.

    `unsafe_asserts`, instead of these, is Python that raises where the program is wrong, as HumanEval has it. It runs in one
    process with the program, which can deceive it. Do not train on it."""

    inputs: list[Any] = []
    outputs: list[Any] = []
    fn_name: str = ""
    unsafe_asserts: str = ""


# Prints what the function returns for each input, on the stdout that the program cannot have replaced by then.
CALLS = """import json, os, sys
answers = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
cases = json.loads(sys.stdin.readline()); program = sys.stdin.read(); name = sys.argv[1]
space = {"__name__": "solution"}
exec(compile(program, "solution", "exec"), space)
function = space[name] if name in space else getattr(space["Solution"](), name)
for case in cases:
    answers.write(json.dumps(function(*case)) + "\\n"); answers.flush()
"""
ASSERTS = """import sys
token = sys.stdin.readline(); size = int(sys.stdin.readline()); program = sys.stdin.read(size); asserts = sys.stdin.read()
space = {"__name__": "solution"}
exec(compile(program, "solution", "exec"), space); exec(compile(asserts, "asserts", "exec"), space)
sys.stdout.write("\\n" + token); sys.stdout.flush()
"""


async def code(completion: str, reference: Any, pool: SandboxPool | None = None) -> float:
    """1 where the completion's program is right in all cases. The program is its last Python block, else all of it. The
    reference is `Cases`, as an object or as its JSON text. Raises EnvError: a reference that is not; ToolError: the sandbox
    failed."""
    cases = read_cases(reference)
    program = program_of(completion)
    sandbox = await (pool or local_pool()).open()
    try:
        if cases.unsafe_asserts:
            return await by_unsafe_asserts(sandbox, program, cases.unsafe_asserts)
        if cases.fn_name:
            return await by_calls(sandbox, program, cases)
        return await by_stdin(sandbox, program, cases)
    finally:
        await sandbox.close()


def read_cases(reference: Any) -> Cases:
    """Raises EnvError: it is not of the form of `Cases`."""
    try:
        found = (
            msgspec.json.decode(reference, type=Cases)
            if isinstance(reference, str)
            else msgspec.convert(reference, Cases)
        )
    except msgspec.DecodeError as error:
        raise EnvError(f"the reference {reference!r:.100} of the verifier `code` cannot be read: {error}") from None
    if bool(found.unsafe_asserts) == bool(found.inputs) or len(found.inputs) != len(found.outputs):
        raise EnvError(
            f"the verifier `code` needs as many outputs as inputs, or unsafe_asserts; got {reference!r:.100}"
        )
    if found.fn_name and not all(isinstance(case, list) for case in found.inputs):
        raise EnvError(f"with fn_name each input is the list of the function's arguments; got {found.inputs!r:.100}")
    return found


def program_of(completion: str) -> str:
    """The last Python block of a completion, else all of it."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


async def by_calls(sandbox: Sandbox, program: str, cases: Cases) -> float:
    """Call the function with each input, all within `TOTAL_S` and within the CPU time and the output of one run; compare here."""
    given = json.dumps(cases.inputs) + "\n" + program
    ran = await _python(sandbox, ("-c", CALLS, cases.fn_name), given, TOTAL_S)
    printed = ran.stdout.split("\n")[:-1]
    right = ran.ended == "exited" and len(printed) == len(cases.outputs)
    return float(right and all(map(_prints, printed, cases.outputs)))


async def by_stdin(sandbox: Sandbox, program: str, cases: Cases) -> float:
    """Run the program for each input, up to the first that it fails; compare the words that it prints. A program that takes
    longer than `TOTAL_S` for all fails."""
    try:
        await sandbox.write("program.py", program.encode())
    except OSError:  # larger than the disk
        return 0.0

    async def passes() -> bool:
        for given, wanted in zip(cases.inputs, cases.outputs, strict=True):
            ran = await _python(sandbox, ("program.py",), _text(given), None)
            if not ran.ok or ran.stdout.split() != _text(wanted).split():
                return False
        return True

    try:
        return float(await within(TOTAL_S, passes()))
    except Overdue:
        return 0.0


async def by_unsafe_asserts(sandbox: Sandbox, program: str, asserts: str) -> float:
    """Run program and asserts in one process. A program that looks for it finds what stands for success."""
    token = secrets.token_hex(16)
    given = f"{token}\n{len(program)}\n{program}{asserts}"
    ran = await _python(sandbox, ("-c", ASSERTS), given, None)
    return float(ran.ok and ran.stdout.endswith("\n" + token + "\n"))


async def _python(sandbox: Sandbox, arguments: tuple[str, ...], stdin: str, wall_s: float | None) -> ExecResult:
    return await sandbox.run((sandbox.python, "-I", *arguments), stdin.encode(errors="replace"), wall_s=wall_s)


def _text(lines: Any) -> str:
    """Stdin or stdout: a text, or a list of lines."""
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


def _prints(line: str, wanted: Any) -> bool:
    try:
        return same(json.loads(line), wanted)
    except (ValueError, RecursionError):
        return False


def same(given: Any, wanted: Any) -> bool:
    """Equality of JSON values. True is not 1; numbers with a point are compared approximately."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        if isinstance(given, int) and isinstance(wanted, int):
            return given == wanted
        try:
            return math.isclose(given, wanted, rel_tol=CLOSE, abs_tol=CLOSE)
        except OverflowError:
            return False
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(same(given[key], wanted[key]) for key in given)
    return type(given) is type(wanted) and given == wanted
