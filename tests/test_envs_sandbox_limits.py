"""Each limit of a sandbox by itself: the others are out of reach, so that nothing else can end the program."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import msgspec
import pytest
from slipstream.envs.sandbox import GIB, MIB, ExecResult, Limits
from slipstream.tests.sandbox_pools import ALL as KINDS
from slipstream.tests.sandbox_pools import pool_of

FAR = Limits(wall_s=120, cpu_s=100, memory=4 * GIB, disk=GIB, processes=500, output=8 * MIB)


async def ended(kind: str, program: str, **limits: float) -> ExecResult:
    pool = pool_of(kind, msgspec.structs.replace(FAR, **limits))
    box = await pool.open()
    try:
        return await box.run((box.python, "-I", "-S", "-c", program))
    finally:
        await box.close()
        await pool.close()


ALONE = "while True: pass"
MANY = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
UNAWAITED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel adds their time to nobody's
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass"""


@pytest.mark.parametrize("program", [ALONE, MANY], ids=["one process", "many"])
@pytest.mark.parametrize("kind", KINDS)
async def test_cpu_time(kind: str, program: str) -> None:
    assert (await ended(kind, program, cpu_s=1)).ended == "cpu"


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
async def test_cpu_time_of_processes_that_nobody_waits_for(kind: str) -> None:
    """The watchdog of this host has seen them."""
    assert (await ended(kind, UNAWAITED, cpu_s=1)).ended == "cpu"


@pytest.mark.parametrize("kind", KINDS)
async def test_wall_time(kind: str) -> None:
    assert (await ended(kind, "import time; time.sleep(600)", wall_s=0.5)).ended == "wall"


EATERS = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        x = os.urandom(1 << 20) * 100
        time.sleep(600)
time.sleep(600)"""


@pytest.mark.parametrize("kind", KINDS)
async def test_memory_of_all_processes_together(kind: str) -> None:
    assert (await ended(kind, EATERS, memory=300 * MIB)).ended == "memory"


@pytest.mark.parametrize("kind", KINDS)
async def test_memory_of_one_process_is_refused_to_it(kind: str) -> None:
    """gVisor refuses none; the sandbox ends."""
    ran = await ended(kind, "x = []\nwhile True: x.append(bytearray(16 << 20))", memory=300 * MIB)
    if kind == "gvisor":
        assert ran == ExecResult("", "", None, "memory")
        return
    assert (ran.ended, ran.exit_code) == ("exited", 1)
    assert "MemoryError" in ran.stderr


FORKS = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0: time.sleep(600)
        made += 1
except BlockingIOError: pass
else: time.sleep(600)
print(made)"""


@pytest.mark.parametrize("kind", KINDS)
async def test_processes_beyond_the_limit_are_refused_or_end_it(kind: str) -> None:
    """As root a sandbox's uid has no more processes; an ordinary user's under Landlock are counted from look to look."""
    ran = await ended(kind, FORKS, processes=20)
    if ran.ended != "exited":
        assert ran.ended == "processes"
    else:
        assert 10 <= int(ran.stdout) <= 20


FILLS = """
import errno, json, os
found = []
for name in ("one", "two"):
    try:
        with open(name, "wb") as file:
            while True: file.write(b"0" * (1 << 20)); file.flush()
    except OSError as error: found.append(errno.errorcode[error.errno])
print(json.dumps([*found, sum(os.stat(name).st_size for name in ("one", "two"))]))"""


@pytest.mark.parametrize("kind", ["bubblewrap", "gvisor"])
async def test_disk_has_no_more_room(kind: str) -> None:
    ran = await ended(kind, FILLS, disk=16 * MIB)
    one, two, written = json.loads(ran.stdout)
    assert ran.ended == "exited"
    assert one in ("ENOSPC", "EFBIG")  # a single file has the same limit
    assert two == "ENOSPC"
    assert 15 * MIB <= written <= 16 * MIB


@pytest.mark.parametrize("kind", KINDS)
async def test_disk_of_many_files_ends_it(kind: str) -> None:
    program = "import time\nfor i in range(10**7):\n    open(f'f{i}', 'w').close()\n    i % 1000 or time.sleep(0.01)"
    assert (await ended(kind, program, disk=8 * MIB)).ended == "disk"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("kind", KINDS)
async def test_output(kind: str, stream: str) -> None:
    ran = await ended(kind, f"import sys\nwhile True: print('x' * 9999, file=sys.{stream})", output=1 << 16)
    assert ran.ended == "output"
    assert len(getattr(ran, stream)) == 1 << 16


DEEP = """
import os
while True:
    os.mkdir("d")
    os.chmod("d", 0o700)
    os.chdir("d")"""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("landlock")])
async def test_folders_beyond_the_reach_of_a_path_end_it_and_are_removed(kind: str) -> None:
    """They would hide what is in them from the limit."""
    pool = pool_of(kind, FAR)
    box, other = await pool.open(), await pool.open()
    try:
        assert (await box.run((box.python, "-I", "-S", "-c", DEEP))).ended == "disk"
        await box.close()
        assert box.home.rpartition("/")[2] not in await asyncio.to_thread(os.listdir, box.home.rpartition("/")[0])
        assert (await other.run((other.python, "-I", "-S", "-c", "print(1)"))).stdout == "1\n"
    finally:
        await other.close()
        await pool.close()


STARVED = """
import asyncio, os, resource, sys
from slipstream.envs.sandbox import Limits, require_sandbox
from slipstream.envs.sandbox.process import ConfinedProcess
from slipstream.errors import SlipstreamError

async def start():
    await (await ConfinedProcess.start(require_sandbox(sys.argv[1]).launch("commands", Limits()), Limits())).close()

def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False

def descriptors():
    return [fd for fd in range(200) if is_open(fd)]

async def main():
    await start()
    hard, free, failed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], 0, 0
    before = descriptors()
    while True:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[-1] + 1 + free, hard))
        try:
            await start()
            break
        except (OSError, SlipstreamError):
            failed, free = failed + 1, free + 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        await asyncio.sleep(0)  # a transport closes its socket in the next turn of the loop
    assert descriptors() == before, (free, descriptors(), before)
    print("failed", failed)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_a_start_that_finds_no_free_descriptor_closes_those_that_it_opened(kind: str) -> None:
    """It has one more at each try, until it starts."""
    ran = subprocess.run((sys.executable, "-c", STARVED, kind), capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) >= 4
