"""The first process of a gVisor sandbox: `python -c TEXT OPTIONS`, where OPTIONS are marshalled and hexadecimal. It starts the
second one, which runs what follows this text (commands.py or cells.py), and ends with it. Its exit status says why.

The second process has another real user than the commands that it starts: they cannot signal it, nor read its memory. The filter
of system calls holds for the commands, and for cells from the beginning. gVisor limits neither processes nor files of all together:
while a command runs they are counted by the second process, and beside cells by the first one.
"""

import ctypes
import marshal
import os
import signal
import struct
import sys
import time

NEW_PRIVILEGES, SECCOMP = 38, 22  # prctl
ENDED, BEYOND = 100, {"processes": 101, "disk": 102}  # exit statuses
WATCH_S = 0.1  # between looks
SHARE = 50  # a look takes at most one part in so many of the time
WRITABLE = ("/tmp", "/dev/shm")  # beside home


def refuse_calls(program):
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, 2, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP) failed")


def become(uid, program):
    """What follows has no rights in the sandbox."""
    os.setresuid(uid, uid, uid)
    refuse_calls(program)


def threads():
    """How many threads there are of processes that are the policy's."""
    found = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in ours:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        found += int(fields[17]) if fields[0] not in (b"Z", b"X") else 0
    return found


def files(most):
    """How many files and folders can be found where any can be made; `most` and one at most."""
    found, waiting = 0, [home, *WRITABLE]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as inside:
                for entry in inside:
                    found += 1
                    if found > most:
                        return found
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # it was removed
            continue
    return found


def exceeded():
    """The limit that all processes, or all files, are beyond; "" where there is none."""
    if threads() > most_threads:
        return "processes"
    return "disk" if files(most_files) > most_files else ""


def look():
    """As `exceeded`, seldom enough."""
    global looked_s, seen_s
    began = time.monotonic()
    if began < seen_s + SHARE * looked_s:
        return ""
    found = exceeded()
    seen_s = time.monotonic()
    looked_s = seen_s - began
    return found


def look_as_root():
    """By the second process, whose user is that of its commands, and who may have closed his folders."""
    os.seteuid(0)
    try:
        return look()
    finally:
        os.seteuid(uid)


def wait_for(child, watches):
    """Also reap what has lost its parent."""
    os.close(0)
    os.close(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        ended = -1
        while ended:
            ended = os.waitpid(-1, os.WNOHANG)[0]
            if ended == child:
                os._exit(ENDED)
        if not watches:
            signal.sigwait([signal.SIGCHLD])
            continue
        if limit := look():
            os._exit(BEYOND[limit])
        signal.sigtimedwait([signal.SIGCHLD], max(WATCH_S, SHARE * looked_s))


def hide_environment():
    """gVisor (of 2024, and before) lets every process read what every other one was started with. It adds HOME itself."""
    with open("/proc/self/environ", "rb") as file:
        if file.read():
            with open("/proc/self/cmdline", "rb") as line:
                os.execve(sys.executable, line.read().split(b"\0")[:-1], {})


def begin(program, cells, environ, folders):
    os.umask(0)
    for folder in folders:
        os.makedirs(folder, 0o1777, exist_ok=True)
        os.chmod(folder, 0o1777)
    os.umask(0o022)
    os.chdir(home)
    os.environ.clear()
    os.environ.update(environ)
    child = os.fork()
    if child:
        wait_for(child, cells)
    for fd in (0, 1):  # one socket, which gVisor may show as it has made it itself, that does not block
        os.set_blocking(fd, True)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    if cells:
        become(uid, program)
        sys.path[1:1] = filter(None, [environ.get("PYTHONPATH")])  # it was not there when Python began
    else:
        os.setresuid(0, uid, 0)
        before_exec.append(lambda: become(uid, program))


if __name__ == "__main__":
    before_exec = []
    hide_environment()
    uid, *rest, (most_threads, most_files) = marshal.loads(bytes.fromhex(sys.argv.pop()))
    home, looked_s, seen_s = rest[2]["HOME"], 0.0, 0.0
    ours = {1} if rest[1] else {1, 2}
    if not rest[1]:
        beyond = look_as_root
    try:
        begin(*rest)
    except OSError as error:
        sys.exit(str(error))
