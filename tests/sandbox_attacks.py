"""What hostile programs try in a sandbox; run as `python sandbox_attacks.py KIND PORT` it tries all and prints what came of
each as JSON.

A program that gets through prints a word of `THROUGH`."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.envs.sandbox import LocalPool

THROUGH = ("REACHED", "WROTE", "READ", "ROOT", "PUSHED", "RAW", "SIGNALLED", "CHANGED")

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
def attempt(word, function, *arguments):
    try:
        print(word, function(*arguments), arguments)
    except (OSError, RuntimeError) as error:
        print("refused", error)
def content(path):  # what is empty tells nothing
    with open(path, "rb") as file:
        return file.read(20) or refused("it is empty")
def refused(why):
    raise OSError(why)
def call(*arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(arguments))
"""

ATTACKS = {
    "network": """
for family, address in ((2, ("127.0.0.1", PORT)), (2, ("1.1.1.1", 80)), (1, "\\0PROBE"), (1, "/run/docker.sock"), (1,
"/tmp/PROBE")):
    attempt("REACHED", lambda: socket.socket(family).connect(address))""",
    "raw sockets": """
for family, kind in ((17, 3), (2, 3), (40, 1), (38, 5)):
    attempt("RAW", lambda: socket.socket(family, kind))""",
    "files of the host": """
for path in ("/etc/shadow", "/root", "/home", "/var", "/run", "/sys", "/etc/hostname", "/proc/1/environ", "/proc/1/root/etc/shadow",
             "/proc/PARENT/environ", "HOSTFILE"):
    attempt("READ", lambda p: os.listdir(p) if os.path.isdir(p) else content(p), path)""",
    "writes outside": """
for path in ("/usr/x", "/x", "/etc/x", "/opt/x", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/dev/x", "/var/tmp/x",
             "HOSTFILE"):
    attempt("WROTE", lambda p: open(p, "w").write("x"), path)
attempt("WROTE", os.truncate, "HOSTFILE", 0)
attempt("WROTE", os.rename, "HOSTFILE", "HOSTFILE.moved")
attempt("WROTE", os.link, "HOSTFILE", "link")""",
    "changes of the host's files": """
attempt("CHANGED", os.chmod, "HOSTFILE", 0o777)
attempt("CHANGED", os.utime, "HOSTFILE", (1, 1))
attempt("CHANGED", os.chown, "HOSTFILE", os.getuid(), os.getgid())
attempt("CHANGED", os.setxattr, "HOSTFILE", "user.x", b"1")""",
    "symbolic links": """
os.symlink("/etc/shadow", "l"); os.symlink("/proc/1/root", "r"); os.symlink("HOSTFILE", "h")
for path in ("l", "r/etc/shadow", "h", "/proc/self/root/../../etc/shadow"):
    attempt("READ", lambda p: open(p).read(20), path)""",
    "open descriptors": """
for fd in range(3, 256):
    attempt("READ", os.read, fd, 20) if os.path.exists(f"/proc/self/fd/{fd}") or 1 else 0""",
    "signals": """
for pid in (PARENT, -PARENT, os.getppid(), -os.getppid()):
    attempt("SIGNALLED", os.kill, pid, 9)
attempt("survivors of", os.kill, -1, 9)  # the kernel reports success although it signalled none
attempt("SIGNALLED", call, 234, os.getppid(), os.getppid(), 9)
attempt("SIGNALLED", call, 424, 3, 9, 0, 0)
def by_folder(pid):  # of /proc, which is a descriptor of its process
    call(424, os.open(f"/proc/{pid}", os.O_RDONLY), 19, 0, 0)
def by_owner(pid):  # whom a pipe signals, with a signal of one's choice, when it can be read
    import fcntl
    ours, theirs = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    fcntl.fcntl(ours, fcntl.F_SETSIG, 19)
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(theirs, b"x")
def by_request(pid):
    import array, fcntl
    fcntl.ioctl(os.pipe()[0], 0x8901, array.array("i", [pid]))
for way in (by_folder, by_owner, by_request):
    attempt("SIGNALLED", way, os.getppid())
attempt("CHANGED", call, 302, os.getppid(), 0, ctypes.create_string_buffer(16), 0)
attempt("CHANGED", os.setpriority, os.PRIO_PROCESS, os.getppid(), 19)""",
    "another's memory": """
for pid in (os.getppid(), PARENT):
    attempt("READ", lambda: open(f"/proc/{pid}/mem", "rb").read(1))
    attempt("READ", content, f"/proc/{pid}/environ")
    attempt("WROTE", lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000") and open(f"/proc/{pid}/fd/0"))
    attempt("REACHED", call, 101, 16, pid, 0, 0)""",
    "user namespaces": """
attempt("ROOT", call, 272, 0x10000000)
attempt("ROOT", call, 56, 0x10000000 | 17, 0, 0, 0, 0)
attempt("ROOT", call, 435, ctypes.create_string_buffer(88), 88)""",
    "the kernel's rare parts": """
for number in (101, 250, 248, 321, 298, 425, 323, 165, 155, 161, 319, 29, 175, 246):
    attempt("REACHED", call, number, 0, 0, 0, 0, 0)""",
    "root": """
attempt("ROOT", os.setuid, 0)
attempt("ROOT", os.setgroups, [0])
os.system("su -c 'echo ROOT' 2>/dev/null; sudo -n echo ROOT 2>/dev/null; mount -t tmpfs x /mnt 2>/dev/null && echo ROOT")
print("ROOT" if os.getuid() == 0 else "")""",
    "keystrokes": """
import fcntl
attempt("PUSHED", fcntl.ioctl, 0, 0x5412, b"x")
attempt("PUSHED", lambda: open("/dev/tty", "w").write("x"))""",
    "fork bomb": """
def bomb():
    try:
        while True:
            if os.fork() == 0: time.sleep(60)
    except OSError: pass
bomb(); time.sleep(60)""",
    "thread bomb": """
try:
    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError: pass
time.sleep(60)""",
    "memory": "x = []\nwhile True: x.append(bytearray(16 << 20))",
    "memory of many": """
for _ in range(6):
    if os.fork() == 0:
        x = os.urandom(1 << 20) * 100
        time.sleep(60)
time.sleep(60)""",
    "disk": """
try:
    with open("f", "wb") as file:
        while True: file.write(b"0" * (1 << 20))
except OSError as error: print("refused", error)""",
    "many files": """
for i in range(10**7): open(f"f{i}", "w").close()""",
    "many files in shared memory": """
folder = "/dev/shm/"
try: open(folder + "f", "w").close()
except OSError: folder = ""  # Landlock refuses it
for i in range(10**7): open(f"{folder}f{i}", "w").close()""",
    "CPU": "while True: pass",
    "CPU of many": "for _ in range(3): os.fork()\nwhile True: pass",
    "sleep": "time.sleep(1e6)",
    "output": "while True: print('x' * 10000)",
    "errors": "while True: print('x' * 10000, file=sys.stderr)",
    "ignored signals": """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(1e6)""",
    "daemon": """
if os.fork() == 0:
    attempt("session", os.setsid)
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        time.sleep(31415)
    os._exit(0)
print("left")""",
    "recursion": "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
}

LIMITED = {
    "fork bomb": {"wall", "processes"},
    "thread bomb": {"wall", "processes"},
    "memory": {
        "exited",
        "memory",
        "wall",
    },  # its data are limited by the kernel, its data and libraries by the watchdog
    "memory of many": {"memory", "wall"},  # on a busy machine; test_envs_sandbox has it with time enough
    "disk": {"exited", "disk", "wall"},
    "many files": {"disk", "cpu", "wall"},
    "many files in shared memory": {"disk", "cpu", "wall"},
    "CPU": {"cpu", "wall"},  # wall where the machine gives it less than a core
    "CPU of many": {"cpu", "wall"},
    "recursion": {"exited", "memory", "cpu", "wall"},
    "sleep": {"wall"},
    "output": {"output", "wall"},
    "errors": {"output", "wall"},
    "ignored signals": {"wall"},
}
"""Attacks on limits, and what may end them; the others end by themselves, with time enough on a busy machine."""


def program(name: str, port: int, host_file: str) -> str:
    """An attack for `python -c`, marked so that its processes can be found."""
    code = PRELUDE + ATTACKS[name]
    for word, value in {
        "PORT": port,
        "PROBE": "slipstream-attacks",
        "PARENT": os.getpid(),
        "HOSTFILE": host_file,
    }.items():
        code = code.replace(word, str(value))
    return f"# {marker()}\n{code}"


def marker() -> str:
    return f"attack-{os.getpid()}"


def mark_of(pool: LocalPool) -> str:
    """What the processes of its sandboxes have in their command lines; what runs under gVisor is no process of the host, but
    gVisor's own name the folder of its pools."""
    folder = getattr(pool.confinement, "_folder", None)
    return str(folder.path) if pool.confinement.name == "gvisor" and folder is not None else marker()


def marked(mark: str) -> list[int]:
    """The processes of the host that have `mark` in their command lines."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def still_marked(mark: str, seconds: float = 10.0) -> list[int]:
    """Of the processes with `mark`, without this one, those that are there after `seconds`: the kernel ends what is killed one
    after the other."""
    deadline = time.monotonic() + seconds
    for pid in marked(mark):
        if pid == os.getpid():
            continue
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        os.close(fd)
    return [pid for pid in marked(mark) if pid != os.getpid()]


async def attack_all(kind: str, port: int) -> dict:
    import msgspec
    from slipstream.envs.sandbox import MIB, Limits, LocalPool

    limits = Limits(wall_s=2, cpu_s=1, memory=300 * MIB, disk=16 * MIB, processes=16, output=1 << 16)
    calm = msgspec.structs.replace(limits, wall_s=60, cpu_s=30)
    pools, few = [LocalPool(each, kind=kind) for each in (limits, calm)], asyncio.Semaphore(6)
    host_file = os.path.join(os.environ["HOSTFOLDER"], "host-file")
    results = {}

    async def one(name: str) -> None:
        async with few:
            box = await pools[name not in LIMITED].open()
            try:
                began = time.perf_counter()
                ran = await box.run((box.python, "-I", "-S", "-c", program(name, port, host_file)))
                seconds = time.perf_counter() - began
                results[name] = {"stdout": ran.stdout[:3000], "stderr": ran.stderr[-500:], "code": ran.exit_code, "ended":
                ran.ended,
                                 "seconds": seconds, "size": len(ran.stdout) + len(ran.stderr)}  # fmt: skip
            finally:
                await box.close()

    await asyncio.gather(*map(one, ATTACKS))
    for pool in pools:
        await pool.close()
    return {"results": results, "left": still_marked(mark_of(pools[0])), "host_file": state_of(host_file)}


def state_of(path: str) -> list[object]:
    """Content, mode and time of a file."""
    found = os.stat(path)
    return [Path(path).read_text(), oct(found.st_mode), int(found.st_mtime)]


async def wait_to_be_killed(kind: str) -> None:
    """Sandboxes whose programs sleep, one of each sort."""
    from slipstream.envs.sandbox import Limits, LocalPool

    pool = LocalPool(Limits(wall_s=600), kind=kind, spare=1)
    box, session = await pool.open(), await pool.open_python()
    sleeper = f"sleep 27182.8 {marker()} & sleep 27182.8 {marker()} & wait"
    sleeper = sleeper.replace(f"sleep 27182.8 {marker()}", f"python3 -c 'import time; time.sleep(600)' {marker()}")
    cell = f"import subprocess, time\nsubprocess.Popen(['/bin/sh', '-c', {sleeper!r}])\nwhile True: time.sleep(1)"
    tasks = asyncio.gather(box.run(("/bin/sh", "-c", sleeper)), session.run(cell, 600))
    sys.stdout.write(f"ready {mark_of(pool)}\n")
    sys.stdout.flush()
    await tasks


if __name__ == "__main__":
    if sys.argv[1] == "sleep":
        asyncio.run(wait_to_be_killed(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps(asyncio.run(attack_all(sys.argv[1], int(sys.argv[2])))))
