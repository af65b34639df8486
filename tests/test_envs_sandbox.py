"""Sandboxes as an environment uses them: commands, files, sessions, the pool, the choice of a kind."""

import asyncio
import contextlib
import itertools
import os
import select
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from slipstream.envs.sandbox import MIB, Limits, LocalPool, Mount, landlock, process, require_sandbox, seccomp, watchdog
from slipstream.envs.sandbox.base import ExecResult
from slipstream.envs.sandbox.kinds import _choose
from slipstream.envs.sandbox.process import ConfinedProcess
from slipstream.envs.sandbox.programs import python_candidates
from slipstream.envs.sandbox.watchdog import WATCHDOG, Watched
from slipstream.errors import ConfigError, ToolError
from slipstream.tests.sandbox_attacks import still_marked
from slipstream.tests.sandbox_pools import LOCAL, local_pool_of
from slipstream.tests.test_envs_sandbox_attacks import ROOT, command, environment

LIMITS = Limits(wall_s=20, cpu_s=10, memory=300 * MIB, disk=16 * MIB)


@pytest.fixture(params=LOCAL)
async def pool(request):
    pool = local_pool_of(request.param, LIMITS)
    yield pool
    await pool.close()


async def test_files_of_the_host_are_neither_read_nor_written(pool):
    box = await pool.open()
    for path in ("/proc/kmsg", "/etc/shadow"):
        with pytest.raises(OSError, match=path):
            await box.read(path)
    for path in ("/usr/x", "/etc/passwd"):
        with pytest.raises(OSError, match=path):
            await box.write(path, b"x")
    await box.close()


async def test_a_sandbox_that_its_program_ended_keeps_the_reason(pool):
    box = await pool.open()
    eats = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        x = os.urandom(1 << 20) * 100
        time.sleep(60)
time.sleep(60)"""
    assert (await box.run((box.python, "-I", "-c", eats))).ended == "memory"
    assert (await box.run(("/bin/true",))).ended == "memory"
    with pytest.raises(OSError, match="memory"):
        await box.read("x")
    await box.close()


async def test_forked_processes_share_memory_that_counts_once(pool):
    box = await pool.open()
    shares = """
import os, time
x = os.urandom(1 << 20) * 100
for _ in range(5):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
for _ in range(5):
    os.wait()"""
    assert (await box.run((box.python, "-I", "-c", shares))).ok
    await box.close()


async def test_a_sandbox_that_is_ended_from_outside_is_a_tool_error(pool):
    box = await pool.open()
    running = asyncio.create_task(box.run(("/bin/sleep", "60")))
    await asyncio.sleep(0.2)
    os.kill(box.pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="from outside"):
        await running
    with pytest.raises(ToolError, match="from outside"):
        await box.read("x")
    await box.close()


async def test_what_leaves_its_commands_session_ends_with_it(pool):
    """Landlock refuses to leave it; by the others it is found and killed."""
    box = await pool.open()
    leaves = """
import os, time
if os.fork() == 0:
    try: os.setsid()
    except OSError as error: print("refused", flush=True)
    else: print("left", flush=True)
    for fd in (0, 1, 2): os.close(fd)
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
os.wait()"""
    mark = f"leaves-{os.getpid()}-{box.pid}"
    ran = await box.run((box.python, "-I", "-c", f"# {mark}{leaves}"))
    assert (ran.stdout, ran.exit_code) == ("refused\n" if pool.confinement.name == "landlock" else "left\n", 0)
    assert still_marked(mark) == []
    assert (await box.run(("/bin/echo", "fine"))).stdout == "fine\n"
    await box.close()


async def test_a_sandbox_that_is_stopped_ends_by_its_callers_limit(pool):
    """No program in it can stop it, see the attack `signals`; here the host does."""
    box = await pool.open()
    below = psutil.Process(box.pid).children(recursive=True)
    if (
        pool.confinement.name == "gvisor"
    ):  # what opens files for its kernel ends by itself, and cannot while it is stopped
        below = [one for one in below if "runsc-gofer" not in one.cmdline()]
    for one in (*below, psutil.Process(box.pid)):
        one.suspend()
    async with asyncio.timeout(60):
        assert (await box.run(("/bin/true",), wall_s=0.2)).ended == "wall"
        await box.close()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert alive == []


def held() -> set[str]:
    """What this process has open that a sandbox needs."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(("socket:", "pipe:", "/memfd:", "anon_inode:[pidfd")):
                found.add(target if not target.startswith("anon_inode") else f"{target}{fd}")
    return found


async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing(pool):
    await (await pool.open()).close()  # what is made once
    before, watched = held(), set(WATCHDOG._watched)  # other pools of this process may have some ready
    for program, turns in itertools.product(("commands", "cells"), range(12)):
        start = asyncio.create_task(pool._start(program))
        for _ in range(turns):
            await asyncio.sleep(0.004 if turns > 6 else 0)
        start.cancel()
        (ended,) = await asyncio.gather(start, return_exceptions=True)
        if isinstance(ended, ConfinedProcess):
            await ended.close()
    async with asyncio.timeout(30):
        while set(WATCHDOG._watched) - watched or held() - before:  # noqa: ASYNC110 - ends and threads that go on when their caller is gone
            await asyncio.sleep(0.02)
    folder = getattr(pool.confinement, "_folder", None)
    assert folder is None or [path for path in folder.path.iterdir() if path.is_dir()] == []


async def test_proc_is_read_in_threads_and_no_other_session_is_killed(monkeypatch):
    readers, states = set(), []

    def spy(function):
        def called(*arguments):
            readers.add(threading.current_thread())
            return function(*arguments)

        return called

    def kill(session, kill=process.kill_session):
        states.append(psutil.Process(session).status())
        kill(session)

    pool = LocalPool(LIMITS, kind="landlock")
    monkeypatch.setattr(watchdog, "see_processes", spy(watchdog.see_processes))
    monkeypatch.setattr(landlock, "_processes_of_user", spy(landlock._processes_of_user))
    monkeypatch.setattr(process, "kill_session", kill)
    box = await pool.open()
    assert (await box.run(("/bin/sleep", "60"), wall_s=0.3)).ended == "wall"
    second = await pool.open()
    cancelled = asyncio.create_task(second.run(("/bin/sleep", "60")))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await asyncio.gather(box.close(), second.close())
    assert readers
    assert threading.main_thread() not in readers
    assert states[-1] == psutil.STATUS_ZOMBIE  # not reaped: its number is not free
    other = subprocess.Popen(("/bin/sleep", "60"), start_new_session=True)  # noqa: ASYNC220
    watchdog._kill_member(other.pid, os.getsid(0))
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.2)
    watchdog._kill_member(other.pid, other.pid)
    assert other.wait(10) == -signal.SIGKILL


async def test_python_in_it_is_whole(pool):
    """It has its own library, and not the system's of the same name."""
    ask = ("-c", "import sys; print(sys.version)")
    versions = [subprocess.check_output((python, *ask), text=True) for python in python_candidates()]  # noqa: ASYNC221
    box = await pool.open()
    ran = await box.run((box.python, "-I", "-c", "import ssl, ctypes, sqlite3, sys; print(sys.version)"))
    assert ran.ok, ran.stderr
    assert ran.stdout in versions
    await box.close()


async def test_cells_keep_their_variables(pool):
    session = await pool.open_python()
    assert await session.run("x = 20\ndef double(y): return 2 * y") == ExecResult("", "", 0)
    assert (await session.run("print('so'); double(x) + 2")).stdout == "so\n42\n"
    failed = await session.run("def f():\n    return 1 / 0\nf()")
    assert failed.exit_code == 1
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert '"<cell>", line 2, in f' in failed.stderr
    assert (await session.run("print(")).stderr.endswith("SyntaxError: '(' was never closed\n")
    assert (await session.run("exit(3)")).stderr == "SystemExit: 3"
    late = await session.run("import time\nwhile True: time.sleep(0.01)", wall_s=0.3)
    assert late.ended == "wall"
    assert (await session.run("x")).stdout == "20\n"  # it lasts
    much = await session.run("print('y' * 10**6)")
    assert (much.ended, len(much.stdout)) == ("output", LIMITS.output)
    assert (await session.run("import subprocess; subprocess.run(['echo', 'child']); x")).stdout == "child\n20\n"
    assert (await session.run("open('m.py', 'w').write('z = 5'); import m; m.z")).stdout == "5\n"
    await session.close()


@pytest.mark.parametrize(
    "ending",
    [
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os\nfor fd in range(256):\n    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass",
        "import os\nos.closerange(3, 256)",
    ],
)
async def test_a_cell_may_end_its_session_and_no_more(pool, ending):
    session = await pool.open_python()
    ran = await session.run(ending, wall_s=3)
    assert ran.ended in ("killed", "wall")
    assert session.ended == ran.ended
    assert (await session.run("1")).ended == ran.ended
    await session.close()


async def test_sandboxes_that_are_started_ahead_are_used_once():
    pool = LocalPool(LIMITS, spare=3)
    await pool.fill("cells")
    ready = {process.pid for process in pool._ready["cells"]}
    sessions = [await pool.open_python() for _ in range(5)]
    pids = {session.pid for session in sessions}
    assert len(pids) == 5
    assert ready <= pids
    await pool.fill("cells")
    os.kill(pool._ready["cells"][0].pid, signal.SIGKILL)  # one that dies while it waits is not handed out
    os.waitid(os.P_PID, pool._ready["cells"][0].pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it was killed
    last = await pool.open_python()
    assert (await last.run("1 + 1")).stdout == "2\n"
    waiting = [process.pid for process in pool._ready["cells"]]
    await asyncio.gather(*(session.close() for session in (*sessions, last)))
    await pool.close()
    assert waiting
    for pid in waiting:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_sandbox_that_is_closed_while_it_starts_ends_by_itself(monkeypatch):
    """Bubblewrap that is killed while it starts leaves a process."""
    had_ended, kill = [], Watched.kill

    def spy(self, reason):
        had_ended.append(bool(select.select([self.pidfd], [], [], 0)[0]))
        kill(self, reason)

    monkeypatch.setattr(Watched, "kill", spy)
    pool = LocalPool(LIMITS, kind="bubblewrap", spare=2)
    watched = set(WATCHDOG._watched)  # of other pools
    filling = asyncio.create_task(pool.fill("cells"))
    async with asyncio.timeout(20):
        while set(WATCHDOG._watched) <= watched:  # noqa: ASYNC110 - it has no event, and the test must be early
            await asyncio.sleep(0)
    assert not pool._ready["cells"]
    for start in pool._starting["cells"]:
        start.cancel()
    await pool.close()
    await asyncio.gather(filling, return_exceptions=True)
    assert all(had_ended)  # none where all had ended before anything was killed


@pytest.mark.parametrize("kind", ["bubblewrap", "gvisor"])
async def test_packages_mounts_and_links(tmp_path, kind):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)  # the user of a sandbox reads what is mounted
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "given.py").write_text("value = 'imported'")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("mounted")
    mounts = (Mount(str(tmp_path / "data"), "/data"),)
    links = {"/app": "app", "/solution": ""}
    pool = local_pool_of(kind, LIMITS, packages=str(tmp_path / "packages"), mounts=mounts, links=links)
    session, box = await pool.open_python(), await pool.open()
    assert (await session.run("import given; given.value")).stdout == "'imported'\n"
    assert (await box.run(("/bin/sh", "-c", "cat /data/file; echo x > /data/file"))).stdout == "mounted"
    assert (tmp_path / "data" / "file").read_text() == "mounted"
    assert (await box.run((box.python, "-c", "import given; print(given.value)"))).stdout == "imported\n"
    linked = "echo x > /app/f && cat app/f && echo y > /solution/g && cat g && echo z > /tmp/h && cat /tmp/h"
    assert (await box.run(("/bin/sh", "-c", linked))).stdout == "x\ny\nz\n"
    await asyncio.gather(session.close(), box.close())
    await pool.close()


# --- the choice -------------------------------------------------------------------------------------------------------

WITHOUT = """
import ctypes, struct, sys
from slipstream.envs.sandbox import require_sandbox, seccomp
from slipstream.envs.sandbox.seccomp import Rule, When
seccomp.NUMBERS["landlock_create_ruleset"] = (444, 444)
calls = [Rule(call) for call in sys.argv[1].split(",")]
filter = seccomp.build((*calls, Rule("clone", (When(0, has_bits=0x7E020000),)), Rule("clone3", errno=38)))
libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(filter, len(filter))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxP", len(filter) // 8, ctypes.addressof(buffer)), 0, 0) == 0
"""
NAMESPACES = "unshare,mount,setns,pivot_root"


def without(calls: str, who: str, then: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the kernel refuses system calls, as a container's profile does."""
    code = WITHOUT + then
    argv = (*command(who), "-c", code, calls)
    return subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.mark.parametrize("who", ["root", "user"] if os.geteuid() == 0 else ["user"])
def test_without_namespaces_auto_takes_landlock(who):
    ran = without(NAMESPACES, who, "print(require_sandbox().name)")
    assert (ran.stdout, ran.stderr) == ("landlock\n", "")


def test_where_nothing_can_confine_it_is_refused():
    then = "try: require_sandbox()\nexcept Exception as error: print(type(error).__name__, error.exit_code, error)"
    ran = without(f"{NAMESPACES},landlock_create_ruleset", "user", then)
    assert ran.stdout.startswith("ConfigError 2 sandbox: what the policy writes cannot be confined here (bubblewrap: ")
    assert "landlock: the kernel has no Landlock" in ran.stdout
    assert "gvisor" not in ran.stdout  # is taken only where it is named
    assert ran.stdout.count("\n") == 1


def test_a_kind_that_does_not_exist_and_a_missing_program(monkeypatch):
    with pytest.raises(
        ConfigError,
        match="'docker' \\(SLIPSTREAM_SANDBOX\\) is no kind of sandbox; allowed are auto, bubblewrap, landlock, gvisor",
    ):
        require_sandbox("docker")
    _choose.cache_clear()
    monkeypatch.setattr("slipstream.envs.sandbox.bubblewrap.shutil.which", lambda name: None)
    monkeypatch.setattr("slipstream.envs.sandbox.bubblewrap.OWN", Path("/nowhere"))
    with pytest.raises(ConfigError, match="`bwrap` is missing; install the package bubblewrap"):
        require_sandbox("bubblewrap")
    with pytest.raises(ConfigError, match=r"gvisor: the program `runsc` is missing; docs/environments.md says how"):
        require_sandbox("gvisor")
    monkeypatch.setenv("SLIPSTREAM_SANDBOX", "landlock")
    assert require_sandbox().name == "landlock"
    _choose.cache_clear()


# --- the filter -------------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_kernels_headers():
    """x86_64's own and the generic ones, which aarch64 has."""
    for column, header in enumerate(
        ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    ):
        if not Path(header).exists():
            pytest.skip(f"{header} is not installed")
        known = {}
        for line in Path(header).read_text().splitlines():
            words = line.split()
            if len(words) >= 3 and words[0] == "#define" and words[2].isdigit():
                known[words[1].removeprefix("__NR3264_").removeprefix("__NR_")] = int(words[2])
        ours = {call: numbers[column] for call, numbers in seccomp.NUMBERS.items() if numbers[column] is not None}
        assert {call: number for call, number in ours.items() if known.get(call, number) != number} == {}
        assert len(ours.keys() & known.keys()) > 80


def test_filters_are_built_for_both_machines_and_no_other():
    rules = (*seccomp.COMMON, *seccomp.protecting(2), *seccomp.FOREIGN_FILES, *seccomp.NO_NAMESPACES)
    for machine in seccomp.MACHINES:
        filter = seccomp.build(rules, machine)
        assert len(filter) % 8 == 0
        assert len(filter) // 8 < 4096  # the kernel's limit
    with pytest.raises(ConfigError, match="riscv64"):
        seccomp.build(rules, "riscv64")
