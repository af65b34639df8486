"""Inside a sandbox, runs cells of Python one after another, in one namespace: what a cell defines, the next ones see.

Cells run in this very process and may do with it as they like, its answers included; the host takes them as the policy's
word. What they and their children print goes to a file without a name that is read back after each cell. The text of framing.py
stands before this one.
"""

# ruff: noqa: F821 - names of framing.py
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportUndefinedVariable=false

import os
import resource
import signal
import sys
from _ast import Expr, Expression, PyCF_ONLY_AST

KEPT = 1 << 20  # bytes of old output after which the file is emptied


class Overtime(BaseException):
    """The cell's time is over."""


def overtime(*_):
    raise Overtime


def evaluate(code, space):
    """Execute a cell; the value of an expression at its end is printed, as in a notebook."""
    tree = compile(code, "<cell>", "exec", PyCF_ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    if last is not None:
        value = eval(compile(Expression(last.value), "<cell>", "eval"), space)
        if value is not None:
            sys.stdout.write(repr(value) + "\n")


def traceback_of(error):
    import traceback  # only cells that fail need it

    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if frame.filename == "<cell>"]
    lines = traceback.format_list(frames[own[0] :][-6:]) if own else []
    head = ["Traceback (most recent call last):\n"] if lines else []
    return "".join([*head, *lines, *traceback.format_exception_only(type(error), error)])


def cell(code, wall_s, output, space):
    """Answer: why it ended, exit status, output, traceback."""
    begin, failed, ended = os.lseek(log, 0, os.SEEK_END), "", b"exited"
    try:
        signal.signal(signal.SIGALRM, overtime)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        evaluate(code, space)
    except Overtime:
        ended = b"wall"
    except SystemExit as error:
        failed = f"SystemExit: {error}"
    except BaseException as error:
        failed = traceback_of(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the disk is full, or the cell has closed or replaced it
            pass
    size = os.lseek(log, 0, os.SEEK_END) - begin
    text = os.pread(log, min(size, output), begin)
    if begin + size > KEPT:
        os.ftruncate(log, 0)
    if ended == b"exited" and size > output:
        ended = b"output"
    answer(answers, ended, b"1" if failed else b"0", text, failed.encode(errors="replace")[:output])


if __name__ == "__main__":
    sys.path[:] = ["", *(path for path in sys.path if path not in ("", "/opt"))]  # what cells write can be imported
    requests, answers = os.dup(0), os.dup(1)
    log = os.open(".cells", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.unlink(".cells")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # in order with what goes to stderr
    answer(answers, b"ready", str(os.getpid()).encode(), sys.executable.encode())
    for kind, most in request_of(requests):
        resource.setrlimit(kind, (most, most))
    space = {"__name__": "__main__", "__builtins__": __builtins__, "exit": sys.exit, "quit": sys.exit}
    while True:
        request = request_of(requests)
        try:
            cell(*request, space)
        except Overtime:  # the alarm came when the cell was over
            answer(answers, b"wall", b"0", b"", b"")
