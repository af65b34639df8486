"""Inside a sandbox, confines this process by Landlock and seccomp, and what runs in it after this text: commands.py or cells.py.

With commands, each command enters a second domain from which it cannot signal this process. Cells run in this process, so
it is forked first: the parent, out of their reach, kills them when the host ends.
"""

import ctypes
import marshal
import os
import signal
import struct
import sys

CREATE, ADD, RESTRICT = 444, 445, 446  # landlock calls; the same numbers on every architecture
PATH, PORT = 1, 2  # kinds of rules
CONNECT = 2  # the right to connect by TCP
NEW_PRIVILEGES, SECCOMP, DEATH_SIGNAL = 38, 22, 1  # prctl
EXECUTE, WRITE, READ, LIST = 1, 2, 4, 8
TRUNCATE, IOCTL = 1 << 14, 1 << 15
SCOPES = 3  # abstract Unix sockets, signals
libc = ctypes.CDLL(None, use_errno=True)


def call(what, found):
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return found


def ruleset(files, abi):
    scope = SCOPES if abi >= 6 else 0
    attributes = struct.pack("QQQ", files, 3 if abi >= 4 and files else 0, scope)  # 3: bind and connect TCP
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    return call("landlock_create_ruleset", libc.syscall(CREATE, attributes, size, 0))


def restrict(rules):
    call("landlock_restrict_self", libc.syscall(RESTRICT, rules, 0))
    os.close(rules)


def confine_access(abi, readable, writable, port):
    """To files, and to the one TCP port that it may connect to; 0 for none."""
    files = (1 << (16 if abi >= 5 else 15)) - 1
    rules = ruleset(files, abi)
    for path, rights in [(p, EXECUTE | READ | LIST) for p in readable] + [(p, files) for p in writable]:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= EXECUTE | WRITE | READ | TRUNCATE | IOCTL
        rule = struct.pack("=Qi", rights & files, fd)
        call(f"landlock_add_rule {path}", libc.syscall(ADD, rules, PATH, rule, 0))
        os.close(fd)
    if port:
        rule = struct.pack("=QQ", CONNECT, port)
        call("landlock_add_rule", libc.syscall(ADD, rules, PORT, rule, 0))
    restrict(rules)


def refuse_calls(program):
    buffer = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    call("prctl(PR_SET_SECCOMP)", libc.prctl(SECCOMP, 2, filters, 0, 0))


def leave_reach(abi, program):
    """What follows cannot signal the processes outside, or change its session."""
    if abi >= 6:
        restrict(ruleset(0, abi))
    refuse_calls(program)


def keep_watch(parent):
    """Fork; only the child returns. This process ends with it, and kills it when `parent` ends."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        return

    def end(*_):
        try:
            os.killpg(child, signal.SIGKILL)
        except OSError:
            os.kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    call("prctl(PR_SET_PDEATHSIG)", libc.prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0))
    if os.getppid() != parent:
        end()
    os.close(0)
    os.close(1)
    status = os.waitpid(child, 0)[1]
    try:
        os.killpg(child, signal.SIGKILL)  # what the cells have left
    except OSError:
        pass
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def confine():
    parent, abi, uid, home, readable, writable, port, first, second, cells = marshal.loads(
        bytes.fromhex(os.environ.pop("CONFINEMENT"))
    )
    os.chdir(home)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    call("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl(NEW_PRIVILEGES, 1, 0, 0, 0))
    confine_access(abi, readable, writable, port)
    refuse_calls(first)
    if cells:
        keep_watch(parent)
        leave_reach(abi, second)
    else:
        before_exec.append(lambda: leave_reach(abi, second))


if __name__ == "__main__":
    before_exec = []
    try:
        confine()
    except OSError as error:
        sys.exit(str(error))
