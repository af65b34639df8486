"""Inside a sandbox, runs a command, and reads and writes files. What follows this text calls these functions.

It sets WAKE to what `listen_for_ends` returns, and defines `end_others`, which kills what a command has left. It may define two
more: `before_exec`, what a command's process does before it becomes the command, and `beyond`, which limit the processes of the
command exceed at this moment.
"""

# ruff: noqa: F821 - WAKE, `end_others` and `beyond`
# pyright: reportUndefinedVariable=false

import errno
import os
import resource
import select
import signal
import stat
import time

CHUNK = 1 << 16
LOOK_S = 0.1  # between looks at limits of all processes together


def listen_for_ends():
    """Children that end wake `follow`."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return wake


def start(argv, environ, pipes, limits, cwd):
    """In the child: become the command."""
    try:
        os.setpgid(0, 0)
        if cwd:
            os.makedirs(cwd, exist_ok=True)
            os.chdir(cwd)
        for target, end in enumerate(pipes):
            os.dup2(end, target)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):  # Python ignores or handles these
            signal.signal(number, signal.SIG_DFL)
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))
        for step in globals().get("before_exec", ()):
            step()
        os.execvpe(argv[0], argv, {**os.environ, **environ})
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror or error}\n".encode())
    finally:
        os._exit(127)


def run(argv, stdin, environ, wall_s, cpu_s, limits, output, cwd=""):
    """Answer: why it ended, its exit status, stdout, stderr."""
    pipes = [os.pipe() for _ in range(3)]
    theirs = pipes[0][0], pipes[1][1], pipes[2][1]
    feed, out, err = pipes[0][1], pipes[1][0], pipes[2][0]
    try:
        pid = os.fork()
    except OSError as error:  # as many processes as may be are left in the background
        for end in (*theirs, feed, out, err):
            os.close(end)
        return [b"exited", b"126", b"", str(error).encode()]
    if not pid:
        start(argv, environ, theirs, limits, cwd)
    for end in theirs:
        os.close(end)
    ended, status, usage, texts = follow(pid, stdin, feed, (out, err), time.monotonic() + wall_s, output)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    used_s = usage.ru_utime + usage.ru_stime
    killed = ended == "exited" and code in (-signal.SIGXCPU, -signal.SIGKILL)
    if killed and used_s > cpu_s / 2:  # the kernel's limit counts ticks, which on a busy machine run ahead of `used_s`
        ended = "cpu"
    return [ended.encode(), str(code).encode(), *texts]


def follow(pid, stdin, feed, streams, until, output):
    """Feed and read the command until it ends or a limit is reached; then kill what it has left."""
    poll, texts, ended = select.poll(), {fd: b"" for fd in streams}, "exited"
    for fd in streams:
        poll.register(fd, select.POLLIN)
    os.set_blocking(feed, False)
    poll.register(feed, select.POLLOUT)
    poll.register(WAKE, select.POLLIN)
    poll.register(0, select.POLLHUP)
    waited, status, usage = os.wait4(pid, os.WNOHANG)
    while not waited:
        left = until - time.monotonic()
        if left <= 0:
            ended = "wall"
            break
        if "beyond" in globals():
            left, ended = min(left, LOOK_S), beyond() or ended
        for fd, event in poll.poll(1000 * left + 1) if ended == "exited" else ():
            if fd == 0:
                os.killpg(pid, signal.SIGKILL)
                os._exit(0)
            elif fd == WAKE:
                os.read(WAKE, CHUNK)
                waited, status, usage = os.wait4(pid, os.WNOHANG)
            elif fd == feed:
                stdin = write_some(feed, stdin) if event & select.POLLOUT else b""
                if not stdin:
                    poll.unregister(feed)
                    os.close(feed)
                    feed = -1
            elif not read_some(fd, texts):
                poll.unregister(fd)
            if len(texts.get(fd, b"")) > output:
                ended = "output"
        if ended != "exited":
            break
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass  # it was alone in its group
    if not waited:
        waited, status, usage = os.wait4(pid, 0)
    end_others()
    if feed >= 0:
        os.close(feed)
    for fd in streams:
        os.set_blocking(fd, False)
        while len(texts[fd]) <= output and read_some(fd, texts):
            pass
        os.close(fd)
    if ended == "exited" and any(len(text) > output for text in texts.values()):
        ended = "output"
    return ended, status, usage, [texts[fd][:output] for fd in streams]


def write_some(fd, data):
    try:
        return data[os.write(fd, data[:CHUNK]) :] if data else b""
    except BlockingIOError:
        return data
    except OSError:  # it does not read
        return b""


def read_some(fd, texts):
    """Whether there may be more."""
    try:
        piece = os.read(fd, CHUNK)
    except OSError:
        return False
    texts[fd] += piece
    return bool(piece)


def write(path, data):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # Without O_NONBLOCK a named pipe there would block this process.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o755)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)
    return [b"ok"]


def read(path, limit, flags=0):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.st_size > limit:
            raise OSError(errno.EFBIG, "larger than the sandbox's disk")
        data = bytearray()
        while len(data) <= limit:
            piece = os.read(fd, 1 << 20)
            if not piece:
                break
            data += piece
        return [b"ok", bytes(data)]
    finally:
        os.close(fd)


def folder(path, limit):
    """Every regular file below `path` and what is in it, `limit` bytes at most."""
    parts, left = [b"ok"], limit
    for place, _, names in os.walk(os.fsencode(path)):
        for name in names:
            file = os.path.join(place, name)
            try:
                if not stat.S_ISREG(os.lstat(file).st_mode):
                    continue
                content = read(file, left, os.O_NOFOLLOW)[1]
            except OSError as error:
                if error.errno == errno.EFBIG:
                    raise
                continue  # closed by its owner
            inside = os.path.relpath(file, os.fsencode(path))
            left -= len(inside) + len(content) + 8
            if left < 0:
                raise OSError(errno.EFBIG, "its files are larger than the sandbox's disk")
            parts += [inside, content]
    return parts
