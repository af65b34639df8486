"""Processes of this package's own commands, forked from one that has imported torch, transformers and the package already.

An interpreter that imports them takes 3 to 15 s of CPU time, and most tests of roles, servers and ranks start several. `install`
replaces what `subprocess` starts a process by: a command that `image_of` knows is forked from a *fork server*, any other is
executed. The product has no part in it. Inside of `disabled` everything is executed.

    pytest ──starts──> fork server, imports once ──forks──> `slipstream train`, a child of pytest
                                      its own fork server <──forks──┘
                                                └──forks──> `slipstream role learner-0`, a child of `slipstream train`

Invariants:
- A forked process is a real child of the process that asked for it (the fork server forks twice, and the requester adopts the
  orphan): exit status, signals, `PR_SET_PDEATHSIG` and process groups are as after an exec.
- It has its own environment, working directory, standard streams and command line, /proc shows them, too.
- A fork server is single-threaded and computes nothing: it forks before any OpenMP, gloo or BLAS thread exists.
- A fork server ends when the process that asks it ends.
- `multiprocessing` in a forked process works as in an executed one; random generators are seeded anew.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import logging
import multiprocessing.util
import os
import pickle
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

OURS = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "slipstream.launch.cli.main",
    "slipstream.launch.supervisor.entrypoints",
    "slipstream.launch.supervisor.factory",
    "slipstream.launch.supervisor.supervisor",
    "slipstream.learner.fsdp2.backend",
    "slipstream.learner.megatron.backend",
    "slipstream.learner.loop",
    "slipstream.buffer.service",
    "slipstream.rollout.worker",
    "slipstream.rollout.engines.server.app",
    "slipstream.rollout.engines.transformers.engine",
    "slipstream.rollout.engines.fake.engine",
    "slipstream.tests.forkgate",
    "slipstream.tests.tiny",
    "slipstream.tests.ranks",
)
"""What most commands of a run import. One that is renamed is imported by the command itself, later."""

VLLM = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3",
)
"""What a vLLM server and the process that it computes in import."""

SGLANG = (
    "slipstream.common.process",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.models.qwen3",
)
"""What the three processes of an SGLang server import, in its own Python."""

PARSERS = "rollout/engines/parse_options.py"
"""The script that asks a server's own parser, and whose first argument is the kind of the server."""

IMAGES = {"ours": OURS, "vllm": (*OURS, *VLLM), "sglang": SGLANG}
"""Image name -> the modules that its fork server imports."""

PADDING = "FORKSERVER_PADDING"
"""Makes room for the environment of forked processes where /proc/PID/environ reads it."""

OWN = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    PADDING: "x" * 100_000,
}
"""Environment of a fork server beside the requester's: threads are counted when libraries are loaded, and a
process that has asked CUDA itself whether there is a device cannot fork one that uses it."""

FROM_VLLM = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
"""What vLLM reads when it is imported."""

NEVER_STARTS = {
    "role": ("buffer", "worker", "learner", "reference", "critic", "sft"),
    "ledger": (),
    "replicas": (),
    "workers": (),
}
"""Commands, or their first arguments, whose processes start no others of this package: these get no fork server of their own."""

SERVED_BY_VLLM = re.compile("kind: (vllm|classifier|judge)")
OTHER_ENGINE = re.compile("engine:\n +kind: (?!vllm)")
"""In the config of a run: engines and reward models that vLLM serves, and an engine that is another."""

INHERITED = (signal.SIGHUP, signal.SIGQUIT)
"""Signals that a process ignores from its start if its parent does, as `nohup` has it."""

GATE_FLAG = "--gate"
"""First argument of what is no command but the gate, see `forkgate.py`; the others are its address and its image."""

STAND_IN = "SLIPSTREAM_TESTS_STAND_IN"
"""Variable with the path of what stands for Python in commands that Ray starts, see `forkgate.py`."""

PR_SET_CHILD_SUBREAPER = 36

STARTED_S = 120.0
"""Longest wait for a fork server: the first import after an install reads all files from disk."""


class Request(NamedTuple):
    """A process to fork. Its standard streams travel beside it, and then the descriptors that it is to have as `passed`."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    passed: tuple[int, ...]
    new_session: bool
    ignored: tuple[int, ...]
    parent: int
    preexec: Callable[[], object] | None


def image_of(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """The image that `command` is forked from; None where it is executed."""
    if command[1:2] == (GATE_FLAG,):
        return command[3]
    kind, what, rest = _split(command)
    if kind == "-m" and what.startswith("sglang."):
        return "sglang"
    if not kind and what.endswith(PARSERS) and rest[0] == "sglang":
        return "sglang"
    if command[0] != sys.executable or environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH"):
        return None
    if (kind == "-m" and what.startswith("vllm.")) or (not kind and what.endswith(PARSERS)):
        return "vllm"
    if kind == "-m" and what == "slipstream.launch.cli":
        return "vllm" if _runs_vllm(rest) else "ours"
    if kind == "-m" and what == "slipstream.common.process" and rest:  # it becomes the rest
        became = image_of(rest, environment)
        return became if became != "sglang" else None
    if kind == "-m" and what.startswith(("slipstream.rollout.engines.", "slipstream.benchmarks.")):
        return "ours"
    if kind == "-m" and what == "pytest":
        return "ours"
    if kind == "-c":
        known = what.startswith("from multiprocessing.spawn import") or "slipstream.tests" in what
        return "ours" if known else None
    return "ours" if not kind and what.startswith(str(Path(__file__).parent)) else None


def _runs_vllm(words: Sequence[str]) -> bool:
    """Whether this command starts vLLM's servers, as far as its words and its run's config tell. A reward model is served by vLLM
    beside any engine."""
    match words[:2]:
        case ["resume", run]:
            return any(SERVED_BY_VLLM.search(path.read_text()) for path in Path(run).glob("*.yaml"))
        case ["train" | "eval", source]:
            named = [word for word in words if "engine.kind=" in word or "engine={" in word]
            rewarded = any(word.startswith(("reward.kind=classifier", "reward.kind=judge")) for word in words)
            if not named and Path(source).is_file() and OTHER_ENGINE.search(config := Path(source).read_text()):
                return rewarded or SERVED_BY_VLLM.search(config) is not None
            return not named or rewarded or any("vllm" in word for word in named)
    return False


def _split(command: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """`-m`, `-c` or nothing, then the module, code or script, then its arguments. Other flags of Python are left out."""
    for at, word in enumerate(command[1:], 1):
        if word in ("-m", "-c"):
            return word, command[at + 1], tuple(command[at + 2 :])
        if not word.startswith("-"):
            return "", word, tuple(command[at + 1 :])
        if word not in ("-P", "-B", "-u", "-Wignore"):
            break
    return "?", "", ()


class ForkServer:
    """The requester's end of one fork server."""

    def __init__(self, image: str, connection: socket.socket) -> None:
        self.image = image
        self._connection = connection
        self._lock = threading.Lock()

    def fork(self, request: Request, descriptors: Sequence[int]) -> int:
        """The id of the new process, a child of this one. Raises OSError where the fork server has ended."""
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                payload = pickle.dumps(request)
                socket.send_fds(self._connection, [len(payload).to_bytes(8, "little")], list(descriptors))
                self._connection.sendall(payload)
                answer = self._connection.recv(8)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        if len(answer) < 8:
            raise OSError("the fork server has ended")
        return int.from_bytes(answer, "little")


_servers: dict[str, ForkServer] = {}
_root = True
_disabled = 0
_execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds
_replace: Callable[..., Any] = os.execvpe


def install() -> None:
    """Fork known commands from now on, in this process."""
    subprocess._fork_exec = _fork_or_execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_or_spawn


def installed() -> bool:
    """Whether this process forks known commands now."""
    return subprocess._fork_exec is _fork_or_execute and not _disabled  # type: ignore[attr-defined]


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Execute everything, as users do; so do the processes that are started inside."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def _server(command: Sequence[str], environment: dict[str, str]) -> ForkServer | None:
    """The fork server for this command. It is started where it is asked for first, and only by the process of the tests."""
    if not command or _disabled or (image := image_of(command, environment)) is None:
        return None
    if not _root:
        return next((server for server in _servers.values() if image in ("ours", server.image)), None)
    if image not in _servers:
        ours, theirs = socket.socketpair()
        environment = {
            **(environment if image == "sglang" else os.environ),
            **OWN,
            **(FROM_VLLM if image == "vllm" else {}),
        }
        command = [command[0], "-P", __file__, str(theirs.fileno()), image, " " * 4096]
        with disabled():
            subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        theirs.close()
        ours.settimeout(STARTED_S)
        assert ours.recv(1) == b"+", f"the fork server of {image!r} did not start; run {command[:5]} to see why"
        ours.settimeout(None)
        _servers[image] = ForkServer(image, ours)
    return _servers[image]


def _ignored() -> tuple[int, ...]:
    return tuple(number for number in INHERITED if signal.getsignal(number) == signal.SIG_IGN)


def _fork_or_execute(*given: Any) -> int:
    """In place of `subprocess._fork_exec`; its arguments."""
    command, _, _, kept, folder, environment = given[:6]
    read, write, errors, errpipe, new_session, preexec = given[6], given[9], given[11], given[13], given[15], given[21]
    words = tuple(os.fsdecode(word) for word in command)
    variables = dict(os.environ)
    if environment is not None:
        variables = dict(os.fsdecode(pair).split("=", 1) for pair in environment)
    plain = given[16] == -1 and given[17:20] == (None, None, None) and given[20] == -1
    if plain and (server := _server(words, variables)) is not None:
        passed = tuple(fd for fd in map(int, kept) if fd != errpipe)
        streams = [fd if fd != -1 else index for index, fd in enumerate((read, write, errors))]
        place = os.fsdecode(folder) if folder is not None else os.getcwd()
        with contextlib.suppress(pickle.PicklingError, AttributeError, OSError):
            request = Request(words, variables, place, passed, bool(new_session), _ignored(), os.getpid(), preexec)
            return server.fork(request, [*streams, *passed])
    return _execute(*given)


def _fork_or_spawn(path: Any, command: Sequence[Any], passed: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`."""
    words = tuple(os.fsdecode(word) for word in command)
    if (server := _server(words, dict(os.environ))) is not None:
        fds = tuple(sorted(map(int, passed)))
        request = Request(words, dict(os.environ), os.getcwd(), fds, False, _ignored(), os.getpid(), None)
        return server.fork(request, [0, 1, 2, *fds])
    return _spawn(path, command, passed)


def _run_or_replace(file: str, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    """In place of `os.execvpe` and `os.execvp`: a known command begins in this process, whose own work ends here."""
    environment = dict(os.environ) if environment is None else environment
    if _server(command, environment) is None:
        _replace(file, command, environment)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    _take_on(command, environment)
    _finish(command)


def serve(connection: socket.socket) -> Request:
    """Fork as the requester asks until it ends. Returns in a forked process only, with what was asked for."""
    while True:
        head, fds, *_ = socket.recv_fds(connection, 8, 64)
        if len(head) < 8:
            os._exit(0)
        left, parts = int.from_bytes(head, "little"), []
        while left:
            parts.append(connection.recv(left))
            left -= len(parts[-1])
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # the requester adopts the other one
            return _begin(connection, pickle.loads(b"".join(parts)), fds)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _begin(connection: socket.socket, request: Request, fds: Sequence[int]) -> Request:
    """The first moments of a forked process: what happens between fork and exec elsewhere."""
    while os.getppid() != request.parent:
        if not Path(f"/proc/{request.parent}").exists():
            os._exit(1)  # it was killed while it waited
        time.sleep(0.0002)
    connection.sendall(os.getpid().to_bytes(8, "little"))
    connection.close()
    become(request, fds)
    return request


def become(request: Request, fds: Sequence[int]) -> None:
    """Be the process that was asked for, up to its first instruction."""
    moved = _above(fds)
    for target, fd in zip((0, 1, 2, *request.passed), moved, strict=True):
        os.dup2(fd, target)
    for fd in moved:
        os.close(fd)
    os.chdir(request.folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Python begins: it ignores SIGPIPE and SIGXFSZ
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in INHERITED:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    if request.new_session:
        os.setsid()
    _take_on(request.command, request.environment)
    if request.preexec is not None:
        request.preexec()


def _above(fds: Sequence[int]) -> list[int]:
    """The same files at descriptors that no process is given by number; the old ones are closed."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 500) for fd in fds]
    for fd in fds:
        os.close(fd)
    return moved


def _take_on(command: Sequence[str], environment: dict[str, str]) -> None:
    """Have this command line and environment, for libraries and for /proc, too."""
    os.environ.clear()
    os.environ.update(environment)
    starts = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    blocks = ("\0".join(command), "\0".join(f"{key}={value}" for key, value in environment.items()))
    for text, start, end in zip(blocks, starts[::2], starts[1::2], strict=True):
        data = os.fsencode(text)[: end - start - 2]
        ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)
    tempfile.tempdir = None  # found again from this environment
    random.seed()
    sys.modules["numpy"].random.seed()
    torch = sys.modules["torch"]
    threads = environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))
    torch.set_num_threads(int(threads))
    if "torch._dynamo.config" in sys.modules:
        sys.modules["torch._dynamo.config"].disable = environment.get("TORCH_COMPILE_DISABLE") == "1"
    if STAND_IN in environment and "slipstream.launch.supervisor.processes" in sys.modules:
        importlib.import_module("slipstream.tests.forkgate").start_elsewhere(command)


def _run(command: Sequence[str]) -> None:
    """Do what Python does with this command line, up to the end of its main module."""
    kind, what, rest = _split(command)
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="-u" in command)  # type: ignore[union-attr]
    sys.path[:] = _path if "-P" in command else [str(Path(what).parent) if not kind else os.getcwd(), *_path]
    sys.argv = [kind or what, *rest]
    sys.orig_argv = list(command)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        return
    if not kind:
        main.__file__ = what
    exec(compile(what if kind else Path(what).read_bytes(), what if not kind else "<string>", "exec"), main.__dict__)


def _finish(command: Sequence[str]) -> NoReturn:
    """Run it to the end of the process. The interpreter is not taken down: to free what was imported takes half a second."""
    status: object = 0
    try:
        _run(command)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)  # noqa: T201
        status = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


def _starts_others(command: Sequence[str]) -> bool:
    _, _, words = _split(command)
    if not words or words[0] not in NEVER_STARTS:
        return True
    kinds = NEVER_STARTS[words[0]]
    return bool(kinds) and not words[1].startswith(kinds)


def _own_server(image: str, passed: Sequence[int]) -> socket.socket | None:
    """A fork server for this process, forked from it as long as it is new; returns there the connection to serve, here None."""
    global _root
    _root = False
    _servers.clear()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2, *passed):
            os.dup2(nothing, fd)
        os.close(nothing)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return theirs
    theirs.close()
    _servers[image] = ForkServer(image, ours)
    subprocess._fork_exec = _fork_or_execute  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_or_spawn
    os.execvpe = _run_or_replace
    os.execvp = _run_or_replace
    return None


def main(descriptor: int, image: str) -> None:
    """Be the fork server of `image`; in forked processes, be those."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: socket.socket | None = socket.socket(fileno=descriptor)
    for name in IMAGES[image]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a fork server has one thread"
    connection.sendall(b"+")
    request = None
    while connection is not None:
        request = serve(connection)
        if request.command[1] == GATE_FLAG:
            request = importlib.import_module("slipstream.tests.forkgate").serve_gate(*request.command[2:])
        connection = _own_server(image, request.passed) if _starts_others(request.command) else None
    assert request is not None
    _finish(request.command)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


_path = list(sys.path)

if __name__ == "__main__":
    from slipstream.tests import forkserver  # the one module of this name that all of them know

    forkserver.main(int(sys.argv[1]), sys.argv[2])
