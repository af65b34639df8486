"""What the terminal shows, drawn on a recorded console; and what a role process logs."""

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.monitor.log import logged_to, setup_logging
from slipstream.monitor.terminal import LineView, TerminalView, open_view
from slipstream.monitor.text import count, duration, share, sparkline

CONFIG = load("quickstart", ["learner.steps=50"])
ROW = {
    "step": 12,
    "reward_mean": 0.531,
    "staleness_mean": 0.8,
    "staleness_max": 2,
    "rollout_tokens_per_s": 3123.0,
    "overlap_tokens_per_s": 2900.0,
    "learner_tokens_per_s": 5200.0,
    "learner_idle": 0.41,
    "rollout_idle": 0.03,
}


def shown(terminal: bool, config=CONFIG) -> tuple[str, type]:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)
    with open_view(config, console) as view:
        view.status("engine-0", "starting")
        view.step(ROW | {"step": 11, "reward_mean": 0.429})
        view.step(ROW)
        view.status("engine-0", "serves version 12 [ready]")
        view.event("worker-0 was restarted (1 of 3)")
    return console.file.getvalue(), type(view)


def test_without_a_terminal_there_is_one_short_line_per_step():
    text, kind = shown(terminal=False)
    assert kind is LineView
    assert text.splitlines() == [
        "engine-0: starting",
        "step 11/50  reward 0.429 (+0.000)  staleness 0.80, 2/2  tok/s rollout 3.12k learner 5.2k  "
        "idle rollout 3 % learner 41 %",
        "step 12/50  reward 0.531 (+0.102)  staleness 0.80, 2/2  tok/s rollout 3.12k learner 5.2k  "
        "idle rollout 3 % learner 41 %",
        "! worker-0 was restarted (1 of 3)",
    ]
    assert "\x1b" not in text


def test_steps_without_much_signal_say_so():
    console = Console(file=io.StringIO(), force_terminal=False, width=200, color_system=None)
    with open_view(CONFIG, console) as view:
        view.step(ROW | {"groups": 8, "groups_alike": 3})
        view.step(ROW | {"groups": 8, "groups_alike": 7})
    few, many = console.file.getvalue().splitlines()
    assert "equal rewards" not in few
    assert many.endswith("7 of 8 groups had equal rewards")


@pytest.mark.parametrize("terminal", [True, False])
def test_after_a_resume_the_change_is_since_the_first_step_of_the_run(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110, color_system=None)
    with open_view(CONFIG, console) as view:
        view.past([{"step": 1, "reward_mean": None}, {"step": 2, "reward_mean": 0.25}, {"step": 3, "reward_mean": 0.5}])
        view.step(ROW)
    text = console.file.getvalue()
    assert ("+0.281 since the first step" if terminal else "reward 0.531 (+0.281)") in text


def test_in_a_terminal_everything_is_on_one_screen():
    text, kind = shown(terminal=True)
    assert kind is TerminalView
    last = text[text.rindex("step 12/50") :]
    for part in (
        "24%",
        "0.531",
        "+0.102 since the first step",
        "0.80, 2/2",
        "3.12k tok/s",
        "2.9k while the learner steps",
        "idle 41 %",
        "serves version 12 [ready]",
        "worker-0 was restarted",
    ):
        assert part in last


def test_many_processes_share_a_line_by_kind():
    console = Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None)
    with open_view(CONFIG, console) as view:
        for replica in range(16):
            view.status(f"engine-{replica}", "starting" if replica == 7 else "ready")
        view.status("learner", "waits for a batch")
    last = console.file.getvalue().rpartition("no step yet")[2]
    assert "engine (16)" in last
    assert "15 ready; 1 starting" in last
    assert "1 waits for a batch" in last


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert shown(terminal=True)[1] is LineView


@pytest.mark.parametrize("terminal", [True, False])
def test_a_row_with_nothing_in_it_is_drawn(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=110)
    with open_view(CONFIG, console) as view:
        view.step({"step": 1, "reward_mean": None})
    assert "–" in console.file.getvalue()


def test_log_records_appear_above_the_drawn_view(monkeypatch):
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.getLogger("slipstream").level)
    try:
        setup_logging("supervisor")
        console = Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None)
        with open_view(CONFIG, console):
            logging.getLogger("slipstream.launch").warning("replica lost")
        assert "[supervisor] slipstream.launch: replica lost" in console.file.getvalue()
    finally:
        root.handlers, root.level = before[0], before[1]
        logging.getLogger("slipstream").setLevel(before[2])
        logging.captureWarnings(False)


def logged(level: str) -> list[str]:
    code = (
        "import logging; from slipstream.monitor.log import setup_logging; setup_logging('engine-0');"
        "[logging.getLogger(n).log(l, 'hello') for n in ('slipstream.x', 'httpx') for l in (10, 20, 30)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"SLIPSTREAM_LOG": level},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""
    return [line.split(" ", 1)[1] for line in done.stderr.splitlines()]


def test_a_role_logs_its_own_from_the_chosen_level_and_others_only_from_warning():
    ours, theirs = "[engine-0] slipstream.x: hello", "[engine-0] httpx: hello"
    assert logged("INFO") == [f"INFO    {ours}", f"WARNING {ours}", f"WARNING {theirs}"]
    assert logged("debug")[0] == f"DEBUG   {ours}"


def test_a_level_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_LOG", "LOUD")
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_LOG: 'LOUD'.*DEBUG, INFO"):
        setup_logging("worker-0")


def test_numbers_are_readable():
    assert [count(n) for n in (0, 0.5, 950, 999.9, 1250, 31_400_000)] == ["0", "0.5", "950", "1k", "1.25k", "31.4M"]
    assert [duration(s) for s in (4.4, 245, 11_520)] == ["4 s", "4 min 05 s", "3 h 12 min"]
    assert [share(s) for s in (None, 0.0, 0.001, 0.126)] == ["–", "0 %", "<1 %", "13 %"]
    assert sparkline([0, 1, 2, 3], 3) == "▁▅█"
    assert sparkline([1.0], 5) == "▁"


def test_at_38_columns_the_roles_are_on_the_screen():
    console = Console(file=io.StringIO(), force_terminal=True, width=38, height=16, color_system=None)
    with open_view(CONFIG, console) as view:
        for role in ("buffer", "engine-0", "learner-0", "worker-0"):
            view.status(role, f"{role} is ready [and does what it does]")
        view.step(ROW)
        view.event("worker-0 was restarted (1 of 3) because it ended")
    last = console.file.getvalue()
    last = last[last.rindex("step 12/50") :]
    for part in ("0.531", "0.80, 2/2", "3.12k tok/s", "engine-0   engine-0 is ready", "worker-0 was restarted"):
        assert part in last
    assert len(last.splitlines()) <= 16


@pytest.mark.parametrize("terminal", [True, False])
def test_every_step_is_in_the_log_of_the_run(terminal, tmp_path):
    with logged_to(tmp_path / "logs" / "supervisor.log", "supervisor"):
        shown(terminal)
    text = (tmp_path / "logs" / "supervisor.log").read_text()
    assert "step 11/50  reward 0.429 (+0.000)  staleness 0.80, 2/2" in text
    assert "step 12/50  reward 0.531 (+0.102)" in text


def test_a_traceback_is_logged_once_and_then_counted(tmp_path):
    log = logging.getLogger("slipstream.test")

    def fail(number):
        raise KeyError(f"row {number}")

    with logged_to(tmp_path / "worker.log", "worker-0"):
        for number in range(1000):
            try:
                fail(number)
            except KeyError:
                log.exception("episode failed")
        try:
            int("x")
        except ValueError:
            log.exception("episode failed")
    text = (tmp_path / "worker.log").read_text()
    assert text.count("Traceback") == 2
    assert "KeyError: 'row 0'" in text
    assert "ValueError" in text
    assert "traceback as above, 512 times so far): KeyError('row 511')" in text
    assert len(text.splitlines()) < 30


def test_a_reader_that_closes_its_pipe_ends_nothing(tmp_path):
    code = """
import sys
from pathlib import Path
from slipstream.configs import load
from slipstream.monitor.log import logged_to
from slipstream.monitor.output import print_line
from slipstream.monitor.terminal import open_view

with logged_to(Path(sys.argv[1]), "supervisor"), open_view(load("quickstart")) as view:
    for step in range(1, 20001):
        view.step({"step": step})
print_line("the end")
sys.exit(3)
"""
    file = tmp_path / "supervisor.log"
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("step 1/")
        process.stdout.close()
        assert process.wait(120) == 3
        assert "Traceback" not in process.stderr.read()
    text = file.read_text()
    assert text.count("has closed it; the command goes on without printing") == 1
    assert "step 20000/" in text
