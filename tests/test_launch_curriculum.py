"""`env.sampler` in whole runs, and `slipstream rate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError, StoreError
from slipstream.launch import rating
from slipstream.launch.cli.main import main
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.samplers import make_samplers
from slipstream.tests.runs import SMALL, Background, check_accounts, leftovers, query, slipstream, tiny_policy

ROWS = 12
# A row is solved always, never, or every second time, by its number; what is answered does not matter.
REWARD = f"""import itertools

times = [itertools.count() for _ in range({ROWS})]

def score(completion, row):
    return (0.0, float(next(times[row["n"]]) % 2), 1.0)[row["n"] % 3]
"""
ENV = "env={kind: dataset, path: rows.jsonl, reward: 'my.py:score', evaluation: 0.0}"
ENGINE = ("rollout.engine.kind=transformers", "learner.backend.device=cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARD)
    rows = ({"id": f"row-{n}", "n": n, "prompt": f"Say {n}.", "answer": ""} for n in range(ROWS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


SAMPLER = """
class Backwards:
    def __init__(self, tasks, seed):
        self.tasks = tasks

    def observe(self, task, statistics):
        pass

    def next(self, draw):
        return self.tasks - 1 - draw % self.tasks


class Late(Backwards):
    def next(self, draw):
        return 1 if draw < 5 else {}["draw"]


class Unwilling(Backwards):
    def __init__(self, tasks, seed):
        raise ValueError("no tasks for me")


class Incomplete:
    def __init__(self, tasks, seed):
        pass
"""


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env.sampler=random", "env.sampler: 'random' is neither of sequential, pools, nor of the form"),
        ("env.sampler=pools", "env.sampler=pools needs an end of the tasks; set env.tasks to how many there are"),
        ("env.sampler=no_such:Thing", "env.sampler: cannot import 'no_such'"),
        (
            "env.sampler=samplers_of_mine:Nothing",
            "has no callable 'Nothing'; it has Backwards, Incomplete, Late, Unwilling",
        ),
        (
            "env.sampler=samplers_of_mine:Unwilling",
            "raised ValueError: no tasks for me (samplers_of_mine.py:20 in __init__)",
        ),
        ("env.sampler=samplers_of_mine:Incomplete", "has no method observe and no next"),
        (
            "evaluation.suites={a: {env: {kind: reasoning_gym, tasks: 3}}}",
            "evaluation.suites.a.env: an evaluation plays its tasks",
        ),
    ],
)
def test_a_wrong_sampler_is_refused_in_one_line(
    override: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "samplers_of_mine.py").write_text(SAMPLER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        make_samplers(RunInputs(load("quickstart", [override])))
    assert says in str(error.value)


def test_a_sampler_gets_the_tasks_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samplers_of_mine.py").write_text(SAMPLER)
    monkeypatch.syspath_prepend(tmp_path)
    parts = "{a: {kind: reasoning_gym, tasks: 7, sampler: 'samplers_of_mine:Backwards'}, b: {kind: reasoning_gym, tasks: 2}}"
    samplers, tasks = make_samplers(RunInputs(load("quickstart", [f"env={{kind: mixture, parts: {parts}}}"])))
    assert tasks == [7, 2]
    assert [samplers[0].next(draw) for draw in range(3)] == [6, 5, 4]
    assert [samplers[1].next(draw) for draw in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--min", "0.6", "--max", "0.2"], "--min 0.6 --max 0.2: allowed are rates from 0 to 1, the smaller one first"),
        (["--samples", "0"], "--samples 0: allowed are 1 and more"),
        (["--min", "nan"], "--min nan --max 1: allowed are rates from 0 to 1"),
        (["--out", "rows.jsonl/x.jsonl"], "--out: rows.jsonl cannot be created or written: "),
        (["--out", "folder.jsonl"], "--out folder.jsonl: is a folder; name a file"),
        (["--out", "x.parquet"], "--out x.parquet: the rows are written as JSON lines"),
        ([], "env.kind: reasoning_gym has no rows to rate; allowed are dataset and mcp"),
    ],
)
def test_wrong_bounds_and_environments_are_refused(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = [ENV] if arguments else []
    (folder / "folder.jsonl").mkdir()
    assert main(["rate", "quickstart", "--out", "rated.jsonl", *arguments, *env]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (folder / "rated.jsonl.ratings.jsonl").exists()


def test_what_cannot_be_written_at_the_end_is_an_error_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"--out \S+/rows.jsonl cannot be written: .*; the ratings stay in \S+ratings.jsonl"
    ):
        rating._write(
            cast(Any, None), tmp_path / "gone" / "rows.jsonl", [], (0.0, 1.0)
        )  # no row: the source is not asked


def statistics(run: Path) -> dict[str, tuple[int, int, int]]:
    """Groups, attempts and solves of each task."""
    return {name: tuple(numbers) for name, *numbers in query(run, "SELECT id, groups, attempts, solves FROM tasks")}


def test_a_file_that_is_no_rating_is_not_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    assert main(["rate", "quickstart", ENV, "--out", "rows.jsonl"]) == 2
    assert "--out rows.jsonl: that file exists, and is not of an earlier rating" in capsys.readouterr().err
    assert (folder / "rows.jsonl").read_bytes() == before


@pytest.mark.full
def test_statistics_are_exact_though_buffer_worker_and_run_are_killed(folder: Path) -> None:
    """They are the sums over the episodes in the store; solved rows are retired."""
    policy, run = tiny_policy(folder / "policy"), folder / "run"
    small = (*SMALL, *ENGINE, ENV, "env.sampler=pools", "rollout.max_episodes=8", "learner.steps=40")
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small) as going:
        for step, victim in ((3, "buffer"), (6, "worker-0"), (10, "buffer")):
            going.until_step(step)
            going.kill(victim)
        going.until_step(14)
        going.process.kill()
        going.process.wait()
    slipstream("resume", str(run))
    assert leftovers(run) == []
    check_accounts(run)
    found = statistics(run)
    assert set(found) <= {f"rows-train-row-{n}" for n in range(ROWS)}
    ended = (
        "SELECT count(*) FROM episodes WHERE outcome IS NOT NULL AND reason <> 'failed_nothing_sampled'"
        " AND json_extract(outcome, '$.kind') <> 'failed'"
    )
    assert query(run, f"SELECT (SELECT sum(attempts) FROM tasks), ({ended})")[0] == (query(run, ended)[0][0],) * 2
    assert query(run, "SELECT sum(groups) FROM tasks") == query(run, "SELECT count(*) FROM groups")
    per_task = "SELECT t.groups, (SELECT count(*) FROM groups g WHERE g.env = t.env AND g.task = t.task) FROM tasks t"
    assert all(ours == theirs for ours, theirs in query(run, per_task))
    solved = [n for n in range(ROWS) if n % 3 == 2]
    played = {n: found[f"rows-train-row-{n}"] for n in range(ROWS) if f"rows-train-row-{n}" in found}
    assert all(played[n][1] == played[n][2] for n in solved if n in played)
    assert all(played[n][2] == 0 for n in played if n % 3 == 0)
    # 4 of 12 rows are learned from, and get more than their third of the groups. How many more is up to chance, and to how many
    # groups are chosen before their rows' solves are known, here two: of eight at a time, one run in two has less than half.
    assert sum(played[n][0] for n in played if n % 3 == 1) > 0.36 * sum(groups for groups, *_ in played.values())


@pytest.mark.full
def test_a_sampler_that_breaks_ends_the_run_with_its_line(folder: Path) -> None:
    (folder / "samplers_of_mine.py").write_text(SAMPLER)
    policy, run = tiny_policy(folder / "policy"), folder / "run"
    small = (*SMALL, *ENGINE, ENV, "env.sampler=samplers_of_mine:Late", "learner.steps=40", "launch.heartbeat_s=10")
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, check=False)
    assert done.returncode == 1
    assert "EnvError: env.sampler: Late.next(5) raised KeyError: 'draw' (samplers_of_mine.py:15 in next)" in done.stderr
    assert "a restart would not help" in done.stderr
    assert leftovers(run) == []


def ratings_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "half.jsonl.ratings.jsonl").read_text().splitlines()[1:]]


@pytest.mark.full
def test_rows_are_rated_once_each_and_filtered_by_any_bounds(folder: Path) -> None:
    policy, out = tiny_policy(folder / "policy"), folder / "half.jsonl"
    config = ("quickstart", f"model.path={policy}", *SMALL, *ENGINE, ENV, "--out", str(out), "--samples", "6")
    first = slipstream("rate", *config, "--rows", "5")
    solves = [one["solves"] for one in ratings_in(folder)]
    assert len(solves) == 5
    assert f"5 rows, 6 attempts each: {solves.count(0)} never solved, {solves.count(6)} always" in first.stdout
    slipstream("rate", *config)
    done = slipstream("rate", *config, "--min", "0.01", "--max", "0.99")
    assert f"{ROWS} rows, 6 attempts each: " in done.stdout
    assert "engine-0" not in done.stderr  # nothing is left to measure
    ratings = ratings_in(folder)
    assert sorted(one["task"] for one in ratings) == list(range(ROWS))
    rates = {one["task"]: one["solves"] / one["attempts"] for one in ratings}
    assert all(rates[n] == (0, rates[n], 1)[n % 3] for n in range(ROWS))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["n"] for row in rows] == [n for n in range(ROWS) if 0 < rates[n] < 1]
    assert all(row["pass_rate"] == rates[row["n"]] and row["pass_attempts"] == 6 for row in rows)
    assert rows[0]["prompt"] == f"Say {rows[0]['n']}."
    other = slipstream("rate", *config, "agent.max_tokens_per_turn=9", check=False)
    assert other.returncode == 2
    assert "half.jsonl.ratings.jsonl was measured under other conditions" in other.stderr
    other = slipstream("rate", *config[:-1], "5", check=False)
    assert (
        "half.jsonl.ratings.jsonl was measured with samples 6, not 5; remove it, or name another --out" in other.stderr
    )
    (folder / "my.py").write_text(f"{REWARD}\n")  # other bytes, so perhaps another reward
    assert (
        "half.jsonl.ratings.jsonl was measured under other conditions"
        in slipstream("rate", *config, check=False).stderr
    )
