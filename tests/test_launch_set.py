"""`slipstream set`: the supervisor's part with a real buffer and real sockets, and the command beside a real run in which every
role follows, also one that starts again, and a run that is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from slipstream.configs import LIVE, Config, dump, load
from slipstream.errors import ConfigError
from slipstream.launch.launchers.local import LocalLauncher, Placement
from slipstream.launch.run_context import VARIABLE, Addresses, RunContext, RunSettings, following_settings
from slipstream.launch.run_lock import run_lock
from slipstream.launch.supervisor import settings as settings_module
from slipstream.launch.supervisor.control import (
    ChangeSettings,
    ControlServer,
    GetSettings,
    SettingsChanged,
    SettingsListing,
    read_control_address,
    send_command,
)
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.launch.supervisor.settings import SettingsManager
from slipstream.launch.supervisor.workers import WorkerManager
from slipstream.learner.checkpoint_folder import STATE_FILE, CheckpointState, path_of
from slipstream.monitor.settings import (
    SETTINGS,
    SettingChange,
    append_changes,
    in_force,
    largest_bound,
    marks,
    read_changes,
)
from slipstream.monitor.terminal import LineView
from slipstream.rpc.pubsub import StatePublisher
from slipstream.tests.fleets import buffer_service
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    Background,
    bare_replicas,
    check_accounts,
    leftovers,
    metrics,
    query,
    slipstream,
)
from slipstream.weightsync.fleet import Fleet

ENGINE = ("rollout.engine.kind=transformers", "buffer.max_staleness=4")
SOON = 60.0
"""Longer than anything here takes without a run."""


# --- the file ---------------------------------------------------------------------------------------------------------


def change_of(key: str, old: float, new: float, version: int = 3, time: float = 1.5) -> SettingChange:
    return SettingChange(time, version + 1, version, key, old, new)


def test_a_torn_line_never_was_and_the_last_line_of_a_key_counts(tmp_path: Path) -> None:
    path, first = tmp_path / SETTINGS, change_of("buffer.max_staleness", 2, 0)
    assert read_changes(path) == []
    append_changes(path, [first])
    path.write_bytes(path.read_bytes() + b'{"time":1.0,"st')
    assert read_changes(path) == [first]
    others = [change_of("buffer.max_staleness", 0, 4), change_of("learner.optimizer.lr", 1e-4, 2e-5)]
    append_changes(path, others)
    assert read_changes(path) == [first, *others]
    overrides = in_force(read_changes(path))
    assert overrides == ("buffer.max_staleness=4", "learner.optimizer.lr=2e-05")
    assert load("quickstart", overrides).learner.optimizer.lr == 2e-5
    assert largest_bound(others, 1) == 4
    assert largest_bound(others[1:], 1) == 1


def test_marks_are_before_the_first_step_under_the_change() -> None:
    changes = [
        change_of("buffer.max_staleness", 2, 0, version=3, time=1.0),
        change_of("buffer.groups_per_batch", 2, 4, version=3, time=1.0),
        change_of("learner.optimizer.lr", 1e-4, 2e-5, version=9, time=2.0),
    ]
    # Steps 3 and 4 were rolled back and made again, as versions 6 and 7.
    rows = [{"step": step, "version": version} for step, version in ((1, 1), (2, 2), (3, 6), (4, 7))]
    assert [(mark.step, mark.text) for mark in marks(changes, rows)] == [
        (3, "max_staleness 2 → 0, groups_per_batch 2 → 4"),
        (5, "lr 0.0001 → 2e-05"),
    ]
    assert [mark.step for mark in marks(changes, [])] == [1, 1]


# --- the supervisor's part --------------------------------------------------------------------------------------------


class Stage:
    """A supervisor's parts around a buffer of this process, and a worker that is not started."""

    def __init__(self, folder: Path, buffer: str) -> None:
        config = load("quickstart", [f"run.dir={folder}"])
        (folder / "config.yaml").write_text(dump(config))
        self.console = Console(file=io.StringIO(), width=1000)
        view, launcher = LineView(config, self.console), LocalLauncher(folder, 0)
        self.processes = ProcessManager(config, folder, launcher, view)
        self.worker = self.processes.roles["worker-0"] = RoleProcess("worker-0")
        self.fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        self.settings = StatePublisher("tcp://127.0.0.1:*", RunSettings(1, config))
        addresses = Addresses("", self.fleets.address, buffer, "", self.settings.address)
        self.context = RunContext(config, addresses, str(folder), "gloo", str(folder), pushed=True)
        manager = SettingsManager(self.context, self.settings, self.processes, view, last_step=lambda: None)
        replicas = bare_replicas(self.processes, launcher, self.fleets, view)
        self.control = ControlServer(folder, replicas, self.fleets.address, settings=manager)
        self.service = buffer_service(config.buffer, folder / "buffer.sqlite", buffer)

    async def set(self, *overrides: str) -> tuple[SettingChange, ...]:
        control = read_control_address(Path(self.context.run_dir))
        return (await send_command(control, ChangeSettings(overrides), SettingsChanged)).changes

    async def listed(self) -> dict[str, object]:
        control = read_control_address(Path(self.context.run_dir))
        listing = await send_command(control, GetSettings(), SettingsListing)
        return {one.key: one.value for one in listing.settings}


@contextlib.asynccontextmanager
async def stage(folder: Path, address: str) -> AsyncIterator[Stage]:
    there, ready = Stage(folder, address), asyncio.Event()
    with run_lock(folder):
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            works = there.settings.serve(), there.control.serve(), there.service.serve(ready.set)
            running = [tasks.create_task(work) for work in works]
            await ready.wait()
            yield there
            for task in running:
                task.cancel()
    await there.settings.close()
    await there.fleets.close()


async def test_a_change_reaches_the_buffer_the_file_and_every_process(tmp_path: Path, address: str) -> None:
    async with stage(tmp_path, address) as there, following_settings(there.context, lambda new: None) as followed:
        assert (await there.listed())["buffer.max_staleness"] == 2
        changes = await there.set("buffer.max_staleness=0", "learner.optimizer.lr=0.25")
        assert [(one.step, one.version, str(one)) for one in changes] == [
            (1, 0, "buffer.max_staleness: 2 -> 0"),
            (1, 0, "learner.optimizer.lr: 0.0003 -> 0.25"),
        ]
        assert there.service._replay.admission.max_staleness == 0
        assert tuple(read_changes(tmp_path / SETTINGS)) == changes
        for config in (
            load(str(tmp_path / "config.yaml")),
            (await followed.until(lambda settings: settings.revision > 1)).config,
            json_config(there.worker.environment[VARIABLE]),
        ):
            assert (config.buffer.max_staleness, config.learner.optimizer.lr) == (0, 0.25)
        assert (await there.listed())["buffer.max_staleness"] == 0
        assert await there.set("buffer.max_staleness=0") == ()
        for override, why in (("seed=1", "live keys are"), ("buffer.max_staleness=-1", "expected an integer >= 0")):
            with pytest.raises(ConfigError, match=why):
                await there.set("buffer.groups_per_batch=3", override)
        assert len(read_changes(tmp_path / SETTINGS)) == 2
        assert (await there.listed())["buffer.groups_per_batch"] == load("quickstart").buffer.groups_per_batch


async def test_a_change_that_cannot_be_written_is_taken_back(tmp_path: Path, address: str) -> None:
    async with stage(tmp_path, address) as there:
        taken_back = asyncio.Event()

        def follow(settings: RunSettings) -> None:
            there.service.configure(settings.revision, settings.config.buffer)
            if settings.revision > 1:
                taken_back.set()

        async with following_settings(there.context, follow):
            (tmp_path / SETTINGS).mkdir()  # the disk refuses, also root
            with pytest.raises(ConfigError, match="cannot be written, nothing was changed"):
                await there.set("buffer.max_staleness=0")
            await taken_back.wait()
            assert there.service._replay.admission.max_staleness == 2
            (tmp_path / SETTINGS).rmdir()
            assert len(await there.set("buffer.max_staleness=0")) == 1
            assert there.service._replay.admission.max_staleness == 0
        assert json_config(there.worker.environment[VARIABLE]).buffer.max_staleness == 0


class HungDisk:
    """Holds up what a function writes until it is `well`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        write, self.well, self.hung = getattr(settings_module, name), threading.Event(), threading.Event()

        def held(path: Path, data: Any) -> None:
            self.hung.set()
            assert self.well.wait(SOON)
            write(path, data)

        monkeypatch.setattr(settings_module, name, held)
        monkeypatch.setattr(settings_module, "WRITE_S", 0.2)


async def test_a_disk_that_hangs_is_named_and_the_change_is_taken_back_also_later(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, address) as there:
        disk = HungDisk(monkeypatch, "append_changes")
        with pytest.raises(ConfigError, match=rf"the supervisor waited 0.2 s for \S+{SETTINGS}; is the disk of"):
            await there.set("buffer.max_staleness=0")
        assert (await there.listed())["buffer.max_staleness"] == 2  # another command is answered
        with pytest.raises(ConfigError, match=SETTINGS):  # what hangs comes first
            await there.set("buffer.max_staleness=1")
        monkeypatch.setattr(settings_module, "WRITE_S", SOON)
        changing = asyncio.create_task(there.set("buffer.max_staleness=4"))
        while there.control.settings.context.config.buffer.max_staleness != 4:  # noqa: ASYNC110 - it sets no event
            await asyncio.sleep(0.01)
        assert (await there.listed())["buffer.max_staleness"] == 2  # at once: what is in force, not what is to be
        assert not changing.done()
        disk.well.set()
        await changing
        (change,) = await there.set("buffer.max_staleness=3")
        changes = read_changes(tmp_path / SETTINGS)
        assert [(one.old, one.new) for one in changes] == [(2, 0), (0, 2), (2, 4), (4, 3)]
        assert changes[-1] == change


async def test_a_config_that_is_not_written_in_time_keeps_nobody_from_a_change(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path, address) as there:
        disk, append = HungDisk(monkeypatch, "write_atomic"), settings_module.append_changes

        def append_in_time(path: Path, changes: Any) -> None:
            append(path, changes)
            monkeypatch.setattr(settings_module, "WRITE_S", 0.2)  # of what is written next

        monkeypatch.setattr(settings_module, "append_changes", append_in_time)
        monkeypatch.setattr(settings_module, "WRITE_S", SOON)
        assert len(await there.set("buffer.max_staleness=0")) == 1
        assert "config.yaml keeps the old values: the supervisor" in caplog.text
        assert disk.hung.wait(SOON)
        assert len(read_changes(tmp_path / SETTINGS)) == 1
        disk.well.set()


async def test_after_the_last_batch_nothing_is_changed(tmp_path: Path, address: str) -> None:
    async with stage(tmp_path, address) as there:
        steps = there.context.config.learner.steps
        last = path_of(tmp_path / "checkpoints", steps)
        last.mkdir(parents=True)
        (last / STATE_FILE).write_bytes(msgspec.json.encode(CheckpointState(step=steps, version=0)))
        with pytest.raises(
            ConfigError, match=f"no step is left to use it: the last one, {steps}, .* nothing was changed"
        ):
            await there.set("buffer.max_staleness=0", "learner.optimizer.lr=0.25")
        assert (await there.listed())["buffer.max_staleness"] == 2
        assert read_changes(tmp_path / SETTINGS) == []
        (last / STATE_FILE).write_bytes(msgspec.json.encode(CheckpointState(step=steps - 1, version=0)))
        assert [one.step for one in await there.set("buffer.max_staleness=0")] == [steps]
        assert there.service._replay.admission.max_staleness == 0


async def test_all_workers_have_room_for_a_group_also_those_that_are_added(tmp_path: Path) -> None:
    """Each plays a group at least: `rollout.max_episodes` bounds all together."""
    overrides = ["rollout.workers=1", "buffer.group_size=4", "rollout.max_episodes=8"]
    config = load("quickstart", [f"run.dir={tmp_path}", *overrides])
    view, launcher = LineView(config, Console(file=io.StringIO())), LocalLauncher(tmp_path, 0)
    processes = ProcessManager(config, tmp_path, launcher, view)
    settings = StatePublisher("tcp://127.0.0.1:*", RunSettings(1, config))
    context = RunContext(config, Addresses("", "", "", ""), str(tmp_path), "gloo", str(tmp_path), pushed=True)
    manager = SettingsManager(context, settings, processes, view, last_step=lambda: None)
    workers = WorkerManager(
        processes, launcher, view, lambda *_: {}, manager.set_workers, require_slots=manager.require_slots
    )
    workers.prepare({"worker-0": Placement("127.0.0.1", 1)})
    processes.roles["worker-0"].ending.set()  # it is not started
    async with asyncio.TaskGroup() as tasks:
        await workers.begin(tasks.create_task)
        why = r"rollout.max_episodes=8 leaves no room .* rollout.workers=3 times buffer.group_size=4; allowed .* 12 and more"
        with pytest.raises(ConfigError, match=why):
            await workers.add(2)
    assert settings.state.workers == ()
    await manager.set_workers(("worker-0", "worker-1"))
    with pytest.raises(ConfigError, match=r"max_episodes=4 leaves no room .*\.workers=2"):
        await manager.change(["rollout.max_episodes=4"])
    assert settings.state.config == config
    await settings.close()


def json_config(text: str) -> Config:
    return msgspec.json.decode(text, type=RunContext).config


# --- a run ------------------------------------------------------------------------------------------------------------


def refused(run: Path, *arguments: str) -> str:
    """The one line of a change that is refused."""
    done = slipstream("set", str(run), *arguments, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def shown(run: Path) -> dict[str, object]:
    return json.loads(slipstream("set", str(run), "--json").stdout)


def change(run: Path, *pairs: str) -> list[dict]:
    return json.loads(slipstream("set", str(run), *pairs, "--json").stdout)


def lags(run: Path, version: int) -> set[int]:
    """Of the tokens that were trained from this version on, by the file alone."""
    rows = query(
        run,
        "SELECT DISTINCT trained_at - 1 - accounts.version FROM accounts JOIN groups ON id = group_id"
        f" WHERE account = 'trained' AND trained_at > {version}",
    )
    return {lag for (lag,) in rows}


def bounds(run: Path) -> list[tuple]:
    return list(query(run, "SELECT version - 1, max_staleness, groups_per_batch, groups FROM commits ORDER BY version"))


def series_of(run: Path, role: str) -> set[Path]:
    """What each process of a role records."""
    return set((run / "series").glob(f"{role}.*"))


def last_gauges(run: Path, role: str) -> dict:
    """What the newest process of a role recorded last."""
    files = sorted(series_of(run, role), key=lambda path: path.stat().st_mtime)
    return json.loads(files[-1].read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2])


@pytest.mark.full
def test_every_role_follows_and_so_does_one_that_starts_again(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE)
    with Background(*arguments, ENDLESS) as going:
        going.until_step(2)
        began = (run / "config.yaml").read_bytes()
        assert shown(run) == {key: live.value(load(str(run / "config.yaml"))) for key, live in LIVE.items()}
        assert "live keys are buffer.max_staleness, " in refused(run, "seed=1")
        done = slipstream("set", str(run), "buffer.max_staleness=4")
        assert done.stdout == "nothing changes: the run has these values\n"

        (sync,) = change(run, "buffer.max_staleness=0")
        at = sync["version"]
        going.until(lambda: any(taken > at for taken, *_ in bounds(run)), "two batches without old tokens")
        assert lags(run, at) == {0}
        assert all(bound == (4 if taken < at else 0) for taken, bound, *_ in bounds(run))

        pairs = (
            "buffer.max_staleness=1",
            "buffer.groups_per_batch=3",
            "rollout.max_episodes=8",
            "learner.optimizer.lr=1e-5",
        )
        changed = change(run, *pairs)
        assert [f"{one['key']}={one['new']:g}" for one in changed] == [*pairs[:3], "learner.optimizer.lr=1e-05"]
        at = changed[0]["version"]
        before = series_of(run, "worker-0")
        going.kill("buffer")
        going.kill("worker-0")
        going.until(lambda: metrics(run)[-1]["version"] > at + 2, "steps under the second change")
        going.until(
            lambda: any(b"\n" in path.read_bytes() for path in series_of(run, "worker-0") - before),
            "what the new worker records",
        )
        assert {(bound, size, groups) for taken, bound, size, groups in bounds(run) if taken >= at} == {(1, 3, 3)}
        assert {row["lr"] for row in metrics(run) if row["version"] > at + 2} == {1e-5}
        assert lags(run, at) <= {0, 1}
        assert last_gauges(run, "worker-0")["slots"] <= 8
        step = metrics(run)[-1]["step"]
        going.kill("learner-0")
        going.until(lambda: metrics(run)[-1]["step"] > step + 2, "the learner to step again")
        assert metrics(run)[-1]["lr"] == 1e-5
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "! buffer.max_staleness: 4 -> 0, from step " in output
    assert leftovers(run) == []
    check_accounts(run)
    lines = read_changes(run / SETTINGS)
    assert [(one.key, one.new) for one in lines] == [(one["key"], one["new"]) for one in [sync, *changed]]
    assert f"`slipstream resume {run} buffer.max_staleness=2` continues it" in refused(run, "buffer.max_staleness=2")

    (run / "config.yaml").write_bytes(began)  # as if the supervisor had been killed before it wrote this
    steps = metrics(run)[-1]["step"] + 2
    done = slipstream("resume", str(run), f"learner.steps={steps}", "rollout.max_episodes=0", check=False)
    assert done.returncode == 0, done.stderr
    config = load(str(run / "config.yaml"))
    assert (config.buffer.max_staleness, config.buffer.groups_per_batch) == (1, 3)
    assert (config.rollout.max_episodes, config.learner.optimizer.lr) == (0, 1e-5)
    assert [(one.key, one.old, one.new) for one in read_changes(run / SETTINGS)[len(lines) :]] == [
        ("rollout.max_episodes", 8, 0)
    ]
    assert marks(read_changes(run / SETTINGS), metrics(run))[0].text == "max_staleness 4 → 0"
