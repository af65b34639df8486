"""Answers one request in a sandbox elsewhere, and ends: `python -c TEXT REQUEST`, where REQUEST is a marshalled tuple in base64, or
@ and the file in which it is. The texts of framing.py and execute.py stand before this one. The answer, one line on stdout, is a
list of bytes, framed as framing.py does, in base64.

The command and all that it starts are below this process, also what has left its group or lost its parent: they are looked at
while the command runs, and killed when it has ended.
"""

# ruff: noqa: F821 - names of framing.py and execute.py
# pyright: reportUndefinedVariable=false

import base64
import ctypes
import errno
import marshal
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
PASSES = 1000  # over processes that fork while they are killed, a millisecond apart
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def below():
    """Processes below this one by their numbers: seconds of CPU, threads, bytes resident."""
    parents, seen = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
            seen[int(name)] = sum(map(int, fields[11:15])) / TICKS, int(fields[17]), PAGE * int(fields[21])
    own, found = os.getpid(), {}
    for pid in seen:
        line = [pid]
        while line[-1] in parents and line[-1] != own and line[-1] not in found:
            line.append(parents[line[-1]])
        if line[-1] == own or line[-1] in found:
            found.update((one, seen[one]) for one in line if one != own and one in seen)
    return found


def proportional(found):
    """Bytes of memory, each shared page divided among those who share it; without that where the kernel does not say it."""
    total = 0
    for pid, (_, _, resident) in found.items():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += next((int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:")), 0)
        except OSError:
            total += resident if os.path.exists(f"/proc/{pid}") else 0
    return total


def size(path):
    """Bytes on disk of all files and folders in a folder, and of their records."""
    total = 0
    for place, folders, names in os.walk(path):
        for name in (*folders, *names):
            try:
                total += 1024 + 512 * os.lstat(os.path.join(place, name)).st_blocks
            except OSError:
                continue
    return total


def end_others():
    """Kill what the command has left."""
    for _ in range(PASSES):
        others = below()
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not others:
            return
        time.sleep(0.001)
    os._exit(1)  # without an answer: the sandbox is over


def taken(path):
    """What the host has put into a file, which is removed."""
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    return content


def adopt_orphans():
    """What loses its parent stays below this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def run_below(home, stdin, cpu_s, memory, disk, processes, argv, environ, wall_s, rlimits, output, cwd):
    """Answer a command, with limits of all its processes together."""
    global WAKE, beyond
    adopt_orphans()
    WAKE = listen_for_ends()

    def beyond():
        found = below()
        if sum(one[0] for one in found.values()) > cpu_s:
            return "cpu"
        if sum(one[1] for one in found.values()) > processes:
            return "processes"
        if sum(one[2] for one in found.values()) > memory and proportional(found) > memory:
            return "memory"
        return "disk" if size(home) > disk else ""

    content = taken(stdin) if stdin else b""
    return run(argv, content, environ, wall_s, cpu_s, rlimits, output, cwd)


def answer_to(what, *arguments):
    if what == "open":
        import tempfile  # which takes as long as all the rest

        adopt_orphans()  # where that is refused, no command runs
        return [b"ok", tempfile.mkdtemp(prefix="slipstream-").encode(), sys.executable.encode()]
    home, *rest = arguments
    os.chdir(home)
    if what == "run":
        return run_below(home, *rest)
    if what == "write":
        source, path, disk = rest
        content = taken(source)
        if size(home) + len(content) > disk:
            raise OSError(errno.ENOSPC, "the sandbox has no room")
        return write(path, content)
    return {"read": read, "folder": folder}[what](*rest)


if __name__ == "__main__":
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)  # a server whose stdin has ended is still there
    asked = sys.argv[1]
    try:
        parts = answer_to(*marshal.loads(taken(asked[1:]) if asked[:1] == "@" else base64.b64decode(asked)))
    except OSError as error:
        parts = error_parts(error)
    sys.stdout.write(base64.b64encode(body_of(parts)).decode() + "\n")
