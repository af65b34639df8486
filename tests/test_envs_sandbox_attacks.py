"""Hostile programs in every kind of sandbox of this host, as root and as an ordinary user: nothing gets through, each ends
within its limit, nothing is left."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from slipstream.tests.sandbox_attacks import ATTACKS, LIMITED, THROUGH, marked, still_marked
from slipstream.tests.sandbox_pools import LOCAL, require_program

ROOT = Path(__file__).parent.parent
USER = 54_321  # an ordinary one
SOME = [
    pytest.param(kind, who, id=f"{kind}-{who}")
    for kind in LOCAL
    for who in (("root", "user") if os.geteuid() == 0 else ("user",))
]


@functools.cache
def command(who: str) -> tuple[str, ...]:
    """Python as `who`."""
    if who == "root" or os.geteuid():
        return (sys.executable,)
    become = (shutil.which("setpriv") or "setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
    for python in (sys.executable, "/usr/bin/python3"):
        tried = subprocess.run(
            (*become, python, "-c", "import slipstream.envs.sandbox"), env=environment(), capture_output=True
        )
        if not tried.returncode:
            return (*become, python)
    pytest.skip("no Python with msgspec that an ordinary user may run here")


def environment() -> dict[str, str]:
    paths = (str(ROOT.parent), sysconfig.get_paths()["purelib"])
    return {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """What came of all attacks in a kind of sandbox of a user, run once."""

    @functools.cache
    def attack(kind: str, who: str) -> dict:
        require_program(kind)
        folder = Path("/tmp") / f"slipstream-attacks-{os.getpid()}-{who}-{kind}"
        folder.mkdir()
        (folder / "host-file").write_text("secret")
        os.utime(folder / "host-file", (10**9, 10**9))
        if who == "user" and not os.geteuid():
            for path in (folder, folder / "host-file"):
                os.chown(path, USER, USER)
        os.chmod(folder / "host-file", 0o644)
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0slipstream-attacks")
            abstract.listen()
            try:
                ran = subprocess.run(
                    (*command(who), str(ROOT / "tests" / "sandbox_attacks.py"), kind, str(server.getsockname()[1])),
                    env=environment() | {"HOSTFOLDER": str(folder)},
                    capture_output=True,
                    text=True,
                    timeout=240,
                )
            finally:
                read = (folder / "host-file").read_text() if (folder / "host-file").exists() else None
                shutil.rmtree(folder)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout) | {"read": read}

    return attack


@pytest.mark.parametrize(("kind", "who"), SOME)
def test_nothing_gets_through_and_every_limit_holds(attacked, kind, who):
    found = attacked(kind, who)
    results = found["results"]
    assert set(results) == set(ATTACKS)
    through = {name: ran["stdout"] for name, ran in results.items() if any(word in ran["stdout"] for word in THROUGH)}
    assert through == {}
    ended = {name: ran["ended"] for name, ran in results.items()}
    own = {"cpu"} if kind == "gvisor" else set()  # what gVisor does for them is CPU time, too, of which there is 1 s
    may = {name: LIMITED[name] | own if name in LIMITED else {"exited"} for name in ATTACKS}
    assert {name: how for name, how in ended.items() if how not in may[name]} == {}
    assert {
        name: results[name]["seconds"] for name in LIMITED if results[name]["seconds"] > 8
    } == {}  # limit 2 s, and a busy machine
    assert all(ran["size"] <= 2 << 16 for ran in results.values())
    tried = [name for name in ATTACKS if name not in LIMITED and name != "daemon"]
    assert {name: results[name] for name in tried if "refused" not in results[name]["stdout"]} == {}  # each did try
    assert found["left"] == []
    assert found["read"] == "secret"
    assert found["host_file"] == ["secret", "0o100644", 10**9]


@pytest.mark.parametrize(("kind", "who"), SOME)
def test_killing_the_caller_leaves_nothing(kind, who):
    require_program(kind)
    caller = subprocess.Popen(
        (*command(who), str(ROOT / "tests" / "sandbox_attacks.py"), "sleep", kind),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    mark = caller.stdout.readline().split()[-1]
    deadline = time.monotonic() + 60
    sandboxed = []
    while len(sandboxed) < 4:  # two sleepers of the command and two of the cell; of gVisor two processes of either
        assert time.monotonic() < deadline
        sandboxed = [
            pid
            for pid in marked(mark)
            if kind == "gvisor" or (b"time.sleep(600)" in cmdline(pid) and b"/bin/sh" not in cmdline(pid))
        ]
    caller.kill()
    caller.wait()
    assert still_marked(mark) == [], "a sandboxed process outlives its caller"


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
