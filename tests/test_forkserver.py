"""A process that is forked for a test is what it would be if it had been executed."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from slipstream.common.process import set_parent_death_signal
from slipstream.tests import forkgate, forkserver
from slipstream.tests.forked import STAND_IN

SHOWN = """
import json, os, signal, sys, tempfile
import slipstream.tests
shown = {
    "argv": sys.argv, "executable": sys.executable, "folder": os.getcwd(), "main": __name__, "ours": os.environ.get("OURS"),
    "padding": os.environ.get("FORKSERVER_PADDING"), "leader": os.getsid(0) == os.getpid(), "read": sys.stdin.read(),
    "ignored": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN], "parent": os.getppid(),
    "temporary": tempfile.gettempdir(), "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "fds": [fd for fd in range(3, 1000) if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)],
}
print(json.dumps(shown))
sys.exit(7)
"""

WAITS = "import slipstream.tests, sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture(params=["forked", "executed"])
def how(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "forked":
        yield request.param
    else:
        with forkserver.disabled():
            yield request.param


def start(code: str, **options: object) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-P", "-c", code, "a", "b c"], **(pipes | options))  # type: ignore[call-overload]


def forked(process: subprocess.Popen[str]) -> bool:
    """Its image is that of a fork server, which has torch before anything asks for it."""
    with open(f"/proc/{process.pid}/maps") as maps:
        return "libtorch" in maps.read()


def test_it_has_its_own_everything(how: str, tmp_path) -> None:
    variables = os.environ | {"OURS": "yes", "TMPDIR": str(tmp_path)}
    inherited = {n for n in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(n) == signal.SIG_IGN}
    if how == "forked":
        inherited.discard(signal.SIGINT)  # a forked process begins with Python's own handler
    read, write = os.pipe()
    with start(SHOWN, cwd=tmp_path, env=variables, start_new_session=True, pass_fds=[write]) as process:
        out, _ = process.communicate("typed")
    os.close(read)
    os.close(write)
    assert process.returncode == 7
    assert json.loads(out) == {
        "argv": ["-c", "a", "b c"],
        "executable": sys.executable,
        "folder": str(tmp_path),
        "main": "__main__",
        "ours": "yes",
        "padding": None,
        "leader": True,
        "temporary": str(tmp_path),
        "read": "typed",
        "ignored": sorted({signal.SIGPIPE, signal.SIGXFSZ} | inherited),
        "parent": os.getpid(),
        "interrupt": signal.SIGINT not in inherited,
        "fds": [write],
    }


def test_descriptors_keep_their_high_numbers(how: str) -> None:
    """A process of tests may have hundreds of descriptors open: a child is given some of the highest."""
    read, write = os.pipe()
    high = [fcntl.fcntl(write, fcntl.F_DUPFD, number) for number in range(500, 503)]
    code = f"import os, slipstream.tests; [os.write(fd, b'%d ' % fd) for fd in {high}]"
    with start(code, pass_fds=high) as process:
        assert process.wait() == 0
    assert os.read(read, 100).split() == [b"%d" % number for number in high]
    for fd in (read, write, *high):
        os.close(fd)


def test_others_see_its_command_line_and_environment(how: str) -> None:
    with start(WAITS, env=os.environ | {"OURS": "yes"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert forked(process) == (how == "forked")
        shown = psutil.Process(process.pid)
        assert [word for word in shown.cmdline() if word] == [sys.executable, "-P", "-c", WAITS, "a", "b c"]
        assert shown.environ()["OURS"] == "yes"
        assert "FORKSERVER_PADDING" not in shown.environ()
        assert shown.ppid() == os.getpid()
        process.communicate("")
    assert process.returncode == 0


def test_signals_and_errors_are_its_exit_status(how: str) -> None:
    with start(WAITS) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    with start("import slipstream.tests; 1 / 0", stderr=subprocess.PIPE) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.endswith("ZeroDivisionError: division by zero\n")


def test_it_dies_with_its_parent(how: str) -> None:
    """A process between that starts it and is killed; it inherits the pipe, which ends when both have."""
    between = f"""
import slipstream.tests, subprocess, sys
from slipstream.common.process import set_parent_death_signal
child = subprocess.Popen([sys.executable, "-P", "-c", {WAITS!r}], stdin=subprocess.PIPE, preexec_fn=set_parent_death_signal)
child.wait()
"""
    with start(between, preexec_fn=set_parent_death_signal) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        assert process.stdout.read() == ""


def test_random_numbers_differ_between_processes(how: str) -> None:
    code = "import slipstream.tests, random, numpy; print(random.random(), numpy.random.random())"
    numbers = {start(code).communicate()[0] for _ in range(3)}
    assert len(numbers) == 3


def elsewhere(code: str, **options: object) -> subprocess.Popen[str]:
    """As `start`, by a gate."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with forkgate.gated():
        variables = {"env": os.environ | {"OURS": "yes"}}
        return subprocess.Popen([forkgate.python(), "-P", "-c", code, "a"], **(variables | pipes | options))  # type: ignore[call-overload]


def ours() -> list[psutil.Process]:
    """Processes that `elsewhere` started, as who looks at environments finds them, without those that they started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("OURS") == "yes":
                found.append(process)
    return [process for process in found if process.ppid() not in {one.pid for one in found}]


def test_by_a_gate_it_is_what_its_stand_in_asks_for(tmp_path) -> None:
    with elsewhere(SHOWN, cwd=tmp_path) as process:
        out, _ = process.communicate("typed")
    assert process.returncode == 7
    shown = json.loads(out)
    wanted = {
        "argv": ["-c", "a"],
        "executable": sys.executable,
        "folder": str(tmp_path),
        "ours": "yes",
        "read": "typed",
    }
    assert {key: shown[key] for key in wanted} == wanted
    assert shown["leader"]
    assert shown["fds"] == []


def test_by_a_gate_it_ends_together_with_its_stand_in() -> None:
    for number, stops in ((signal.SIGTERM, True), (signal.SIGKILL, True), (signal.SIGKILL, False)):
        with elsewhere(WAITS) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            (forked,) = ours()
            assert forked.pid != process.pid
            os.kill(process.pid if stops else forked.pid, number)
            assert process.stdout.read() == ""  # no process has this pipe any more
        assert process.returncode == -number
        assert psutil.wait_procs(ours(), 30)[1] == []


def test_by_a_gate_it_dies_with_who_started_it() -> None:
    between = f"""
import os, subprocess, sys
variables = os.environ | {{"SLIPSTREAM_PARENT": str(os.getpid())}}
command = [os.environ["{STAND_IN}"], "-P", "-c", {WAITS!r}]
subprocess.Popen(command, stdin=subprocess.PIPE, env=variables).wait()
"""
    with forkgate.gated(), start(between) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        assert process.stdout.read() == ""
