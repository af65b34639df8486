"""Inside a sandbox, runs commands one after another, and reads and writes files, as the host asks on the socket that is its stdin
and stdout. The texts of framing.py and execute.py stand before this one.

The process that runs this is out of reach of the commands (see `seccomp.protecting` and `inside/confine.py`), and not dumpable, so
they cannot read or write its memory. When the host ends, so do the command that runs and this process.
"""

# ruff: noqa: F821 - names of framing.py and execute.py
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportUndefinedVariable=false

import os
import signal
import sys
import time

PR_SET_DUMPABLE = 4
PASSES = 1000  # over processes that fork while they are killed, a millisecond apart


def hide():
    """Keep processes of the same user out of this one's memory and descriptors."""
    try:
        import _ctypes  # a tenth of the time that `import ctypes` takes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")
        refused = _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))
    except (ImportError, AttributeError):
        import ctypes

        refused = ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if refused:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def end_others():
    """Kill what has left the command's group. Where /proc cannot be read, no process can leave its group."""
    for _ in range(PASSES):
        try:
            others = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, os.getpid()}
        except OSError:
            return
        if not others:
            return
        for pid in others:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended
        time.sleep(0.001)
    os._exit(1)  # the whole sandbox ends with this process


def serve():
    while True:
        what, *arguments = request_of(0)
        try:
            answer(1, *{"run": run, "write": write, "read": read, "folder": folder}[what](*arguments))
        except OSError as error:
            answer(1, *error_parts(error))


if __name__ == "__main__":
    WAKE = listen_for_ends()
    hide()
    answer(1, b"ready", str(os.getpid()).encode(), sys.executable.encode())
    serve()
