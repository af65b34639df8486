"""System calls that a sandbox refuses, as a seccomp filter: what reaches the kernel's rarely used parts, other processes,
memory that no limit counts, or the process that runs the commands.

Invariants:
- Programs of another architecture than the host's are killed: their numbers mean other calls.
- `clone3` is answered ENOSYS, since a filter cannot read its flags; libraries then use `clone`, whose flags it reads.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Sequence
from errno import EAFNOSUPPORT, ENOSYS, EOPNOTSUPP, EPERM, EPROTONOSUPPORT

import msgspec

from ...errors import ConfigError

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: which of the numbers below are its own, and its AUDIT_ARCH."""

# fmt: off
NUMBERS: dict[str, tuple[int | None, int | None]] = {  # x86_64, aarch64; None where there is no such call
    "ptrace": (101, 117), "syslog": (103, 116), "mount": (165, 40), "umount2": (166, 39), "swapon": (167, 224),
    "swapoff": (168, 225), "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "pivot_root": (155, 41), "chroot": (161, 51), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "perf_event_open": (298, 241), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "kcmp": (312, 272), "bpf": (321, 280), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438), "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "migrate_pages": (256, 238), "move_pages": (279, 239), "vhangup": (153, 58),
    "fanotify_init": (300, 262), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "lookup_dcookie": (212, 18), "iopl": (172, None), "ioperm": (173, None),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447), "clone3": (435, 435),
    "clone": (56, 220), "ioctl": (16, 29), "socket": (41, 198), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "setsid": (112, 157), "setpgid": (109, 154), "chmod": (90, None),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "inotify_add_watch": (254, 27), "fcntl": (72, 25), "listen": (50, 201), "sendto": (44, 206), "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}
# fmt: on

FORBIDDEN = tuple(NUMBERS)[: tuple(NUMBERS).index("userfaultfd")]
"""Refused whatever the arguments."""

ABSENT = (
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "memfd_create",
    "memfd_secret",
    "clone3",
)
"""Refused as if the kernel did not have them, so that libraries do without. The memory of a memfd is in no process's resident
set."""

CLONE_NEWUSER = 0x10000000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # put input into a terminal
OWNER_CALLS = (8, 15)  # fcntl's F_SETOWN and F_SETOWN_EX: whom a descriptor signals, with a signal of one's choice
OWNER_REQUESTS = (0x8901, 0x8902)  # ioctl's FIOSETOWN and SIOCSPGRP: the same
STREAM = tuple(1 | flags for flags in (0, 0x800, 0x80000, 0x80800))  # SOCK_STREAM, also NONBLOCK and CLOEXEC
TCP = (0, 6)  # protocols; not MPTCP or SCTP, whose connections Landlock does not see
MSG_FASTOPEN = 0x20000000  # connects while it sends, which Landlock does not see
FAMILIES = (
    1,
    2,
    10,
    16,
)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK; not AF_VSOCK, which no namespace confines, nor AF_ALG

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, ANY_BIT, AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF instructions


class When(msgspec.Struct, frozen=True):
    """A condition on one half of an argument of a call: the low 32 bits, or with `high` the others."""

    argument: int
    is_any_of: tuple[int, ...] = ()
    has_bits: int = 0
    is_not: tuple[int, ...] = ()  # fulfilled where the argument is none of these
    high: bool = False


class Rule(msgspec.Struct, frozen=True):
    """Answer a call with `errno`: always, or where one of `when` is fulfilled."""

    call: str
    when: tuple[When, ...] = ()
    errno: int = EPERM


OTHERS = (When(0, is_not=(0,)),)  # a process other than the caller

COMMON = (
    *(Rule(call) for call in FORBIDDEN),
    *(Rule(call, errno=ENOSYS) for call in ABSENT),
    Rule("clone", (When(0, has_bits=CLONE_NEWUSER),)),
    Rule("ioctl", (When(1, is_any_of=(TIOCSTI, TIOCLINUX, *OWNER_REQUESTS)),)),
    Rule("fcntl", (When(1, is_any_of=OWNER_CALLS),)),
    Rule("socket", (When(0, is_not=FAMILIES),), EAFNOSUPPORT),
    *(
        Rule(call, OTHERS)
        for call in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
    ),
    *(Rule(call, (When(1, is_not=(0,)),)) for call in ("setpriority", "ioprio_set")),
)
"""What every kind of sandbox refuses."""


def protecting(pid: int) -> tuple[Rule, ...]:
    """No signal to process `pid`, also not to its group or to all."""
    itself = When(0, is_any_of=(pid, -pid & 0xFFFFFFFF, 0xFFFFFFFF))
    return (
        *(Rule(call, (itself,)) for call in ("kill", "tkill", "rt_sigqueueinfo", "pidfd_open")),
        *(Rule(call, (itself, When(1, is_any_of=(pid,)))) for call in ("tgkill", "rt_tgsigqueueinfo")),
        Rule("pidfd_send_signal", errno=ENOSYS),  # a folder of /proc is a descriptor of its process, too
    )


SIGNALS = tuple(
    map(Rule, ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_send_signal"))
)
"""No signal to anything."""

NO_NAMESPACES = (Rule("socket", errno=EAFNOSUPPORT), Rule("inotify_add_watch"))
"""Without a network namespace: no socket but pairs."""

ONE_PORT = (
    Rule("socket", (When(0, is_not=(2, 10)), When(1, is_not=STREAM), When(2, is_not=TCP)), EPROTONOSUPPORT),
    Rule("listen"),
    *(
        Rule(call, (When(flags, has_bits=MSG_FASTOPEN),), EOPNOTSUPP)
        for call, flags in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))
    ),
    Rule("inotify_add_watch"),
)
"""Without a network namespace, and with a port that Landlock lets through: TCP connections and nothing else."""

SAME_SESSION = (Rule("setsid"), Rule("setpgid"))
"""Without a process namespace: a process stays in its session and group, by which it is found and killed."""

# A path outside the sandbox's folder is refused as well as one inside: a filter cannot read paths.
FOREIGN_FILES = (
    *map(
        Rule, ("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "removexattr")
    ),
    *map(Rule, ("lremovexattr", "utime", "utimes", "futimesat")),
    Rule("utimensat", (When(1, is_not=(0,)), When(1, is_not=(0,), high=True))),  # with a path
)
"""Landlock does not see changes of a file's mode, owner, attributes and times, and a sandbox of the caller's own uid may make
them."""


def build(rules: Iterable[Rule], machine: str | None = None) -> bytes:
    """The filter as BPF instructions, for `prctl` and for bubblewrap. Raises ConfigError: an unknown machine."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise ConfigError(f"sandbox: no system call numbers for {machine}; known are {', '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    found = [_op(LOAD, 4), _op(EQUAL, architecture, 1, 0), _op(RETURN, KILL), _op(LOAD, 0)]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        found += [_op(AT_LEAST, 0x40000000, 0, 1), _op(RETURN, ERRNO | EPERM)]
    for rule in rules:
        number = NUMBERS[rule.call][column]
        if number is None:
            continue
        refusal = _op(RETURN, ERRNO | rule.errno)
        body = [refusal] if not rule.when else [op for when in rule.when for op in _condition(when, refusal)]
        if rule.when:
            body.append(_op(LOAD, 0))
        found += [_op(EQUAL, number, 0, len(body)), *body]
    return b"".join([*found, _op(RETURN, ALLOW)])


def _condition(when: When, refusal: bytes) -> Sequence[bytes]:
    """Instructions that refuse where it is fulfilled, and else run into the next."""
    load = _op(LOAD, 16 + 8 * when.argument + 4 * when.high)
    if when.has_bits:
        return [load, _op(ANY_BIT, when.has_bits, 0, 1), refusal]
    if when.is_not:
        tests = [_op(EQUAL, value, len(when.is_not) - i, 0) for i, value in enumerate(when.is_not)]
        return [load, *tests, refusal]
    return [load, *(op for value in when.is_any_of for op in (_op(EQUAL, value, 0, 1), refusal))]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
