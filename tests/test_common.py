"""Tasks, threads and files that every room uses."""

from __future__ import annotations

import asyncio
import getpass
import os
import pwd
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from slipstream.common.fsio import write_atomic
from slipstream.common.owned_folders import SERVER_FILES, remove_tree, sweep
from slipstream.common.tasks import Stopped, in_thread, run_or_stop
from slipstream.common.users import user_name
from slipstream.common.waits import Overdue, within

SOON = 60.0


async def test_work_ends_with_its_result_or_with_the_stop() -> None:
    stop = asyncio.Event()
    assert await run_or_stop(asyncio.sleep(0, "done"), stop) == "done"
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    running = asyncio.create_task(run_or_stop(work(), stop))
    await asyncio.sleep(0.01)
    stop.set()
    with pytest.raises(Stopped):
        await running
    assert ended == ["work"]  # before the caller goes on
    with pytest.raises(ValueError, match="broken"):
        await run_or_stop(_fails(), asyncio.Event())
    assert len(asyncio.all_tasks()) == 1


async def _fails() -> None:
    raise ValueError("broken")


async def test_a_caller_that_is_cancelled_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(run_or_stop(work(), asyncio.Event()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


def _stop_iteration() -> None:
    raise StopIteration(3)


async def test_a_thread_gives_back_its_result_or_its_error() -> None:
    assert await in_thread(lambda: threading.current_thread().name, "mine") == "mine"
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0, "wrong")
    with pytest.raises(RuntimeError, match="wrong raised StopIteration"):
        await in_thread(_stop_iteration, "wrong")


async def test_only_a_thread_that_may_be_interrupted_ends_with_its_future() -> None:
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            time.sleep(0.01)

    futures = [in_thread(work, f"work {interrupt}", interrupt=interrupt) for interrupt in (True, False)]
    threads = {thread.name: thread for thread in threading.enumerate()}
    for future in futures:
        future.cancel()
    await asyncio.sleep(0)  # callbacks of futures run in the loop
    threads["work True"].join(SOON)
    assert not threads["work True"].is_alive()
    assert threads["work False"].is_alive()
    stop.set()
    threads["work False"].join(SOON)
    assert not threads["work False"].is_alive()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, b"one", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_atomic(path, b"two", durable=True)
    assert path.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


WRITER = """
import sys
from pathlib import Path
from slipstream.common.fsio import write_atomic
for number in range(10**9):
    write_atomic(Path(sys.argv[1]), bytes([number % 251]) * 200_000)
    if number == 0:
        print("begun", flush=True)
"""


def test_a_reader_never_sees_a_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            for _ in range(300):
                data = path.read_bytes()
                assert len(data) == 200_000
                assert len(set(data)) == 1
        finally:
            writer.kill()
    assert len(path.read_bytes()) == 200_000
    write_atomic(path, b"after a crash")
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_refuses_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    (tmp_path / ".file.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was started with an id."""
    assert user_name() == getpass.getuser()

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    assert user_name() == str(os.getuid())


def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "slipstream-server-notes").mkdir()  # a user's
    becomes = (
        "import os; from slipstream.common.owned_folders import temporary_environment;"
        "os.execvpe('sh', ['sh', '-c', 'touch $TMPDIR/socket; echo $TMPDIR $TORCHINDUCTOR_CACHE_DIR; exec sleep 60'],"
        " os.environ | temporary_environment())"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it when it is imported
    with subprocess.Popen([sys.executable, "-c", becomes], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folder, kernels = map(Path, process.stdout.readline().decode().split())
        assert folder.parent == kernels.parent == tmp_path
        sweep(tmp_path, SERVER_FILES)
        assert (folder / "socket").exists()  # it lives
        process.kill()
    sweep(tmp_path, SERVER_FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["slipstream-server-notes"]


def test_a_tree_of_any_depth_is_removed_also_where_its_folders_are_closed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    made = [os.open(top, os.O_RDONLY)]
    for level in range(1500):
        os.mkdir("d", dir_fd=made[-1])
        os.mkdir("e", dir_fd=made[-1])
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=made[-1]))
        os.symlink("/", "link", dir_fd=made[-1])
        made.append(os.open("d", os.O_RDONLY, dir_fd=made[-1]))
        os.chmod(made[-2], 0o500 if level % 2 else 0)
        os.close(made.pop(0))
    remove_tree(top)
    assert not top.exists()


async def test_a_loop_that_stood_still_looks_at_what_came_before_it_is_overdue() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    async def work() -> str:
        return await answer

    threading.Timer(0.3, lambda: loop.call_soon_threadsafe(answer.set_result, "there")).start()
    loop.call_later(0.1, time.sleep, 1.2)
    assert await within(0.8, work()) == "there"
    cancelled = asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(Overdue):
        await within(0.05, never())
    assert cancelled.is_set()


FAULTS = """
import resource
from slipstream.common.gc import freeze_startup_objects
freeze_startup_objects()
def messages():
    for _ in range(10):
        _ = [b"x" * (1 << 20) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = messages()
print(messages() - before)
"""


def test_commands_scan_what_they_import_seldom() -> None:
    """Python's own threshold is 700."""
    code = "import gc; from slipstream.launch.cli.main import main; main(['config', 'quickstart']); print(gc.get_threshold()[0])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout.splitlines()[-1]) == 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_a_process_keeps_the_memory_of_messages_that_are_gone() -> None:
    """200 blocks of 256 pages each, and 20 at once. With glibc's own bounds nearly every page is a fault each time."""
    ran = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    assert int(ran.stdout) < 256 * 20
