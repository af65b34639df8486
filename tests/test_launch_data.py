"""A run on the user's own data: refused by file and line, long prompts left out and counted, every row once per epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from slipstream.configs import dump, load
from slipstream.errors import ConfigError, StoreError
from slipstream.launch.cli.main import main
from slipstream.launch.preflight import CHECKS, PreflightCheck
from slipstream.launch.row_counts import check_row_counts, record_counts, recorded_counts
from slipstream.launch.run import refuse_changes
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.supervisor.factory import BACKEND_FACTORY
from slipstream.monitor.series import read_evaluations
from slipstream.tests.killing_backend import KILLS
from slipstream.tests.runs import SMALL, check_accounts, metrics, query, slipstream

ROOT = Path(__file__).parent.parent
EXAMPLE = str(ROOT / "examples" / "own_data" / "train.yaml")
REWARD = "def score(completion, row):\n    return len(completion) % 2\n"
ROWS = 30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARD)
    rows = [
        {"id": f"row-{i}", "prompt": "long " * 400 if i in (3, 17) else f"Say {i}.", "answer": ""} for i in range(ROWS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


OWN = ("env={kind: dataset, path: rows.jsonl, reward: 'my.py:score', evaluation: 0.0}", "evaluation.tasks=0")


def test_doctor_counts_rows_and_long_prompts(policy: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "quickstart", f"model.path={policy}", *OWN, "env.evaluation=0.2", "evaluation.tasks=4"]) == 0
    shown = capsys.readouterr().out
    assert "rows: 24 rows to train on; rows: 6 rows to evaluate on" in shown
    assert "prompts of 256 tokens or more are left out" in shown


def test_a_broken_row_is_one_line_and_exit_2_before_anything_starts(
    policy: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "x", "answer"\n')
    for split in (("env.evaluation=0.0",), ("env.evaluation=rows.jsonl", "env.path=good.jsonl", "evaluation.tasks=4")):
        (folder / "good.jsonl").write_text('{"prompt": "x", "answer": ""}\n')
        assert main(["train", "quickstart", f"model.path={policy}", f"run.dir={folder / 'run'}", *OWN, *split]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "rows.jsonl, line 31: no JSON object" in line
    assert not (folder / "run").exists()


def test_a_resumed_run_has_as_many_rows_as_it_began_with(folder: Path) -> None:
    config = load("quickstart", OWN)
    assert recorded_counts(folder) == {}
    for _ in range(2):  # the second time it is recorded already
        inputs = RunInputs(config, recorded_counts(folder))
        check_row_counts(inputs)
        record_counts(folder, inputs.counts)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "x", "answer": ""}\n')
    with pytest.raises(
        ConfigError, match=r"env.path: rows.jsonl has 31 rows to train on, and the run began with 30: .*restore"
    ):
        check_row_counts(RunInputs(config, recorded_counts(folder)))
    for damaged in (b"", b'{"env": "30"}', b'{"env\xff": 30}'):  # the first as a power cut leaves a file
        (folder / "rows.json").write_bytes(damaged)
        with pytest.raises(StoreError, match=r"rows.json: not the numbers of tasks .* start a new run"):
            recorded_counts(folder)


def test_a_resumed_run_may_run_its_environment_elsewhere_and_nothing_else(folder: Path) -> None:
    before = load("quickstart", OWN)
    for allowed in ("env.isolate=2", "env.python=/usr/bin/python3", "env.address=tcp://127.0.0.1:7000"):
        refuse_changes(load("quickstart", [*OWN, allowed]), before)
    with pytest.raises(ConfigError, match=r"env.system: a run keeps what it began with"):
        refuse_changes(load("quickstart", [*OWN, "env.system=Hi"]), before)


COUNTING = "open('made.txt', 'a').write('x')\n" + REWARD


def test_a_data_set_is_read_once_for_each_split_before_a_run_starts_or_goes_on(
    policy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A source imports the file of its reward, which counts how often. The last check refuses to start."""

    def refuse(inputs: RunInputs) -> str:
        raise ConfigError("reached")

    (folder / "my.py").write_text(COUNTING)
    monkeypatch.setitem(CHECKS, "trackers", PreflightCheck(refuse))
    keys = (f"model.path={policy}", f"run.dir={folder}/run", *OWN, "env.evaluation=0.2", "evaluation.tasks=4")
    pools = "env.sampler=pools"  # needs the number of the rows that fit
    assert main(["train", "quickstart", *keys, pools]) == 2
    assert capsys.readouterr().err == "slipstream: reached\n"
    assert (folder / "made.txt").read_text() == "xx"
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text(dump(load("quickstart", [*keys, pools])))
    record_counts(folder / "run", {"env": 24})
    assert main(["resume", str(folder / "run")]) == 2
    assert capsys.readouterr().err == "slipstream: reached\n"
    assert (folder / "made.txt").read_text() == "xxxx"


def test_an_evaluation_counts_each_held_out_row_once_and_says_once_that_they_are_few(
    policy: Path, folder: Path
) -> None:
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(38)))
    run, few = folder / "run", "evaluation, two: rows: 2 held-out tasks, not 8"
    small = (*SMALL, *OWN, "env.evaluation=0.05", "rollout.engine.kind=fake", "learner.steps=2")
    suites = ("evaluation.tasks=8", "evaluation.suites={one: {tasks: 1}, two: {samples: 2}}")
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, *suites)
    assert done.stdout.count("held-out tasks, not") == done.stdout.count(few) == 1
    assert done.stdout.count("over 2 held-out tasks, 2 samples each") >= 2
    resumed = slipstream("resume", str(run), "learner.steps=4")
    assert "held-out tasks, not" not in resumed.stdout
    found = [one for one in read_evaluations(run / "evaluations.json") if one.suite == "two"]
    assert [(one.step, one.tasks, one.outcomes) for one in found] == [(n, 2, {"finished": 4}) for n in (0, 2, 4)]
    recorded = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert {row["tasks"] for row in recorded if row.get("evaluation") == "two"} == {2}
    alone = slipstream("eval", str(run))
    assert alone.stderr.count(few) == 1
    assert " over 2 tasks (4 finished) in " in alone.stdout


def tasks_of_groups(run: Path) -> dict[int, str]:
    """The task of each group of which something was delivered. A group has one task; they begin in the order of their numbers."""
    sql = "SELECT e.group_id, t.header FROM trajectories t JOIN episodes e ON t.episode_id = e.id ORDER BY e.group_id"
    found: dict[int, set[str]] = {}
    for group, header in query(run, sql):
        found.setdefault(group, set()).add(msgspec.msgpack.decode(header[1:])["task_id"])
    assert all(len(tasks) == 1 for tasks in found.values())
    return {group: tasks.pop() for group, tasks in found.items()}


@pytest.mark.full
def test_every_row_is_seen_once_per_epoch_though_worker_and_buffer_are_killed(
    policy: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of 28 rows (of 30, two are too long) in batches of two groups: 28 steps, in four of which the learner kills."""
    run = folder / "run"
    monkeypatch.setenv(BACKEND_FACTORY, "slipstream.tests.killing_backend:make")
    monkeypatch.setenv(KILLS, "4:worker-0,7:buffer,11:worker-0,17:buffer")
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *OWN, "learner.steps=28")
    output = slipstream(*arguments).stdout
    assert output.count("ended with SIGKILL") == 4
    assert {row["step"] for row in metrics(run)} == set(range(1, 29))
    check_accounts(run)
    tasks, epoch = tasks_of_groups(run), Counter(f"rows-train-row-{i}" for i in range(ROWS) if i not in (3, 17))
    # A batch takes the oldest groups that are complete: the last one need not wait for a slow one, of which there is nothing then.
    unfinished = {group for (group,) in query(run, "SELECT id FROM groups WHERE state IN ('open', 'leased')")}
    for groups in (range(28), range(28, 56)):
        seen = Counter(tasks[group] for group in groups if group in tasks)
        assert seen <= epoch
        assert (epoch - seen).total() == len({*groups} - {*tasks})
        assert {*groups} - {*tasks} <= unfinished


@pytest.mark.full
def test_the_example_trains_from_its_file_and_resumes_from_another_folder(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.chdir(ROOT)
    done = slipstream("train", EXAMPLE, f"model.path={policy}", f"run.dir={run}", *SMALL, "learner.steps=2")
    assert "report" in done.stdout
    monkeypatch.chdir(tmp_path)
    slipstream("resume", str(run), "learner.steps=3")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    check_accounts(run)
