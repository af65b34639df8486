"""Stands for a process that a fork server forks which is no ancestor of who starts it, see `forkgate.py`. Run in place of `python`.

It asks the gate for that process and is its double from then on: it passes signals on, has the same exit status, and ends and is
ended together with it. Others see no environment of it, so that they find the process instead. A command that is not forked is
executed.
"""

import contextlib
import ctypes
import marshal
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    libc, command, variables = ctypes.CDLL(None), [sys.executable, *sys.argv[1:]], dict(os.environ)
    if parent := variables.get("SLIPSTREAM_PARENT"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent) and not os.path.exists(f"/proc/{parent}"):  # the first: what a role starts
            os._exit(1)
    with open("/proc/self/stat") as stat:
        begin, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)
    gate = socket.socket(socket.AF_UNIX)
    ignored = tuple(int(number) for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN)
    asked = command, variables, os.getcwd(), ignored, os.getpid(), os.getsid(0) == os.getpid()
    payload, pid = marshal.dumps(asked), 0
    with contextlib.suppress(OSError, KeyError):
        gate.connect(variables["SLIPSTREAM_TESTS_GATE"])
        socket.send_fds(gate, [len(payload).to_bytes(8, "little")], [0, 1, 2])
        gate.sendall(payload)
        pid = int.from_bytes(gate.recv(8), "little")
    if not pid:
        os.execve(command[0], command, variables)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in PASSED_ON:
        if number not in ignored:
            signal.signal(number, pass_on)
    answer = gate.recv(8)
    status = int.from_bytes(answer, "little", signed=True) if answer else -signal.SIGKILL
    if status < 0:
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
