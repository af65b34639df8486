"""The program of `run.on_alert`: real processes that get an alert, fail, flood, hang, and do not outlive the run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from slipstream.configs import load
from slipstream.configs.schema import Config
from slipstream.launch.probes import probe_config
from slipstream.launch.run import with_absolute_paths
from slipstream.launch.supervisor import alert_command
from slipstream.launch.supervisor.alert_command import WAITING, AlertCommand
from slipstream.launch.supervisor.alert_monitor import AlertMonitor
from slipstream.monitor.alerts import ALERTS, NO_STEP, Alert
from slipstream.monitor.terminal import LineView

SOON = 60.0
FOREVER = 100_000 + os.getpid()  # seconds of a `sleep`: no other test's
ALERT = Alert(NO_STEP, "critical", "no step for 90 s", "see the logs", 7, 1.5)

KILLED = """
import asyncio, sys
from pathlib import Path
from slipstream.launch.supervisor.alert_command import AlertCommand
from slipstream.tests.test_launch_on_alert import ALERT

async def main():
    command = AlertCommand(sys.argv[1:], Path())
    command.submit(ALERT)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may take as long as a busy machine lets it."""
    monkeypatch.setattr(alert_command, "LAST_S", SOON)
    monkeypatch.setattr(alert_command, "LIMIT_S", SOON)


def shell(script: str, *arguments: str) -> tuple[str, ...]:
    return "sh", "-c", script, "on_alert", *arguments


def config_of(*command: str) -> Config:
    return load("quickstart", [f"run.on_alert={json.dumps(command)}"])


def sleeping() -> list[int]:
    """The processes that sleep for `FOREVER`."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(FOREVER) in " ".join(p.info["cmdline"] or ())]


def left() -> list[int]:
    """Those that still do after all of them were killed."""
    deadline = time.monotonic() + SOON
    while (found := sleeping()) and time.monotonic() < deadline:
        time.sleep(0.05)  # the end of a process that is no child sets nothing that could be awaited
    return found


async def told(*command: str, alerts: int = 1) -> None:
    """The program was started for so many alerts, and has ended."""
    on_alert = AlertCommand(command, Path("runs/x"))
    for _ in range(alerts):
        on_alert.submit(ALERT)
    await on_alert.close()


async def test_every_line_of_the_file_is_told_once_and_in_order(tmp_path: Path) -> None:
    config = config_of(*shell("cat >> $1", str(tmp_path / "told")))
    monitor = AlertMonitor(tmp_path, config, LineView(config, Console(quiet=True)))
    for stalled in ("", "no step for 90 s", "no step for 92 s", "", "no step for 60 s", ""):
        monitor.stalled = stalled
        await monitor._check()
    await monitor.close()
    lines = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    written = [json.loads(line) for line in (tmp_path / ALERTS).read_text().splitlines()]
    assert [(line["rule"], line["severity"], line["active"]) for line in lines] == [
        (NO_STEP, "critical", True), (NO_STEP, "critical", False), (NO_STEP, "critical", True), (NO_STEP, "critical", False),
    ]  # fmt: skip
    assert lines == [{"run": str(tmp_path), **line} for line in written]


async def test_what_fired_under_a_supervisor_that_was_killed_is_told_to_be_over(tmp_path: Path) -> None:
    config = config_of(*shell("cat >> $1", str(tmp_path / "told")))
    view = LineView(config, Console(quiet=True))
    killed = AlertMonitor(tmp_path, config, view)
    await killed._check()
    killed.stalled = "no step for 90 s"
    await killed._check()
    await killed.close()
    again = AlertMonitor(tmp_path, config, view)
    await again._check()
    await again.close()
    lines = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [(line["rule"], line["active"]) for line in lines] == [(NO_STEP, True), (NO_STEP, False)]


async def test_a_failure_is_one_line_with_its_status_and_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    await told(*shell("echo first >&2; echo 'no route to host' >&2; exit 7"), alerts=3)
    await told(*shell("kill -TERM $$"))
    await told(*shell("exit 2"))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "run.on_alert: sh ended with exit status 7: no route to host",
        "run.on_alert: sh ended with signal 15",
        "run.on_alert: sh ended with exit status 2",
    ]


async def test_a_program_that_is_gone_since_the_start_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await told(str(tmp_path / "removed"), alerts=2)
    assert caplog.text.count("run.on_alert: ") == 1
    assert "No such file" in caplog.text


async def test_a_program_that_reads_nothing_and_says_much_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    await told("true")
    await told(*shell("yes | head -c 1000000; yes | head -c 200000 >&2"))
    assert caplog.text == ""


async def test_of_a_flood_the_last_line_is_left(caplog: pytest.LogCaptureFixture) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await told(*shell("yes noise | head -n 80000 >&2; echo the end >&2; exit 3"))
    counting.cancel()
    assert "run.on_alert: sh ended with exit status 3: the end" in caplog.text
    assert "noise" not in caplog.text
    assert turns > 100


async def test_a_closed_pipe_ends_it_as_in_a_shell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Python ignores SIGPIPE, and a program that inherited that would complain of a pipe whose reader has enough."""
    await told(*shell("grep SigIgn /proc/self/status > $1", str(tmp_path / "signals")))
    ignored = int((tmp_path / "signals").read_text().split()[1], 16)
    assert not ignored & 1 << (signal.SIGPIPE - 1)
    assert caplog.text == ""


async def test_a_program_that_hangs_is_killed_with_what_it_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_command, "LIMIT_S", 2.0)
    await told(*shell(f"sleep {FOREVER} & sleep {FOREVER}"), alerts=2)
    assert caplog.text.count("run.on_alert: sh took longer than 2 s for an alert and was killed") == 1
    assert left() == []


async def test_what_it_leaves_running_ends_with_it(caplog: pytest.LogCaptureFixture) -> None:
    await told(*shell(f"sleep {FOREVER} & exit 0"))
    assert caplog.text == ""
    assert left() == []


async def test_it_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_command, "LAST_S", 0.2)
    os.mkfifo(tmp_path / "started")
    on_alert = AlertCommand(shell(f"sleep {FOREVER} & echo yes > $1; wait", str(tmp_path / "started")), tmp_path)
    for _ in range(3):
        on_alert.submit(ALERT)
    async with asyncio.timeout(SOON):
        await asyncio.to_thread((tmp_path / "started").read_text)
    assert len(sleeping()) == 2  # the shell and its `sleep`
    await on_alert.close()
    said = (
        "run.on_alert: sh was killed 0.2 s after the end of the run, and 2 alerts that waited are only in alerts.jsonl"
    )
    assert said in caplog.text
    assert left() == []


async def test_more_alerts_than_wait_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alert_command, "LAST_S", 0.0)
    on_alert = AlertCommand(("true",), tmp_path)
    for _ in range(WAITING + 5):
        on_alert.submit(ALERT)
    assert caplog.text.count(f"run.on_alert: {WAITING} alerts wait for true; more are only in alerts.jsonl") == 1
    await on_alert.close()


def test_it_is_killed_with_the_supervisor(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    program = shell("echo $$ > $1; exec sleep $2", str(tmp_path / "started"), str(FOREVER))
    supervisor = subprocess.Popen([sys.executable, "-c", KILLED, *program])
    try:
        with (tmp_path / "started").open() as started:
            ended = os.pidfd_open(int(started.read()))
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait(SOON)
    assert select.select([ended], [], [], SOON)[0]
    os.close(ended)
    assert left() == []


def test_probes_tell_no_program_and_a_path_of_it_is_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(config_of("./page", "a/b")).run.on_alert == (str(tmp_path / "page"), "a/b")
    assert with_absolute_paths(config_of("page", "a/b")).run.on_alert == ("page", "a/b")
    assert probe_config(config_of("page"), tmp_path, 3).run.on_alert == ()
