"""`slipstream export --to`: what other programs read is what was delivered, and a file is whole or absent."""

from __future__ import annotations

import json
import math
import resource
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow import parquet
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs import load
from slipstream.dashboard import trajectory
from slipstream.dashboard.formats import trajectory_files
from slipstream.dashboard.formats.rows import TrajectoryRow
from slipstream.launch.cli.main import main
from slipstream.tests.dashboard_runs import MEMBERS, DashboardRun
from slipstream.tests.runs import WAIT_S
from slipstream.tests.servers import needs, python_of

GROUPS = 5
TRAINED = GROUPS - 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trajectory]]:
    run = DashboardRun(tmp_path_factory.mktemp("export") / "run")
    trajectories = run.record(GROUPS)
    run.close()
    return run.folder, trajectories


def exported(made: tuple[Path, list[Trajectory]], kind: str, out: Path, *options: str) -> None:
    assert main(["export", str(made[0]), "--to", kind, "-o", str(out), *options]) == 0


def check_row(row: dict[str, Any], one: Trajectory) -> None:
    """A row of JSON or Parquet is a trajectory."""
    assert list(row) == list(TrajectoryRow.__struct_fields__)
    assert (row["id"], row["episode_id"], row["reward"]) == (one.id, one.episode, one.reward)
    assert (row["group_id"], row["attempt"], row["member"], row["branch"]) == (one.group_id, 0, one.member, 0)
    assert np.array(row["token_ids"], np.int32).tolist() == one.token_ids.tolist()
    assert np.array(row["loss_mask"], np.bool_).tolist() == one.loss_mask.tolist()
    assert np.array(row["behavior_logprobs"], np.float32).tobytes() == one.behavior_logprobs.tobytes()
    for name in ("version_spans", "turns", "env_calls"):
        structs = getattr(one, name)
        assert row[name] == [{field: getattr(s, field) for field in s.__struct_fields__} for s in structs]
    assert row["outcome"] == msgspec.to_builtins(one.outcome)
    assert (row["task_id"], row["started"], row["turn_rewards"]) == (one.task_id, one.started, list(one.turn_rewards))
    trained = one.group_id + 1 if one.group_id < TRAINED else None
    assert (row["trained_at"], row["step"]) == (trained, trained)
    assert (row["account"], row["group_state"]) == (("trained",) * 2 if trained else ("ready",) * 2)
    assert [(m["role"], m["turn"]) for m in row["messages"]] == [
        ("user", None),
        ("assistant", 0),
        ("user", None),
        ("assistant", 1),
    ]
    assert row["messages"][1]["text"] == f"calculator({one.group_id})"


def test_jsonl_has_what_was_delivered(
    made: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory, "PAGE", 3)  # rows of several pages
    exported(made, "jsonl", tmp_path / "all.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [one.id for one in made[1]]
    for row, one in zip(rows, made[1], strict=True):
        check_row(row, one)
        assert row["timings"] == one.timings
    assert [path.name for path in tmp_path.iterdir()] == ["all.jsonl"]
    exported(made, "jsonl", tmp_path / "two.jsonl", "--step", "2-3")
    some = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert some == [row for row in rows if row["step"] in (2, 3)]
    assert len(some) == 2 * MEMBERS


def test_parquet_has_what_was_delivered(
    made: tuple[Path, list[Trajectory]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_files, "ROW_GROUP_ROWS", 3)
    exported(made, "parquet", tmp_path / "all.parquet")
    table = parquet.read_table(tmp_path / "all.parquet")
    assert parquet.ParquetFile(tmp_path / "all.parquet").num_row_groups == math.ceil(GROUPS * MEMBERS / 3)
    for row, one in zip(table.to_pylist(), made[1], strict=True):
        check_row(row, one)
        assert {pair["name"]: pair["value"] for pair in row["timings"]} == one.timings


def test_tokens_that_were_dropped_are_null(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    made = run.play()
    run.close()
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE trajectories SET arrays = NULL WHERE id = ?", (made[1].id,))
    assert main(["export", str(run.folder), "--to", "jsonl"]) == 0
    rows = [json.loads(line) for line in (run.folder / "trajectories.jsonl").read_text().splitlines()]
    assert [row["token_ids"] is None for row in rows] == [False, True, False, False]
    assert (rows[1]["messages"], rows[1]["loss_mask"], rows[1]["reward"]) == (None, None, made[1].reward)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--to", "jsonl", "--step", "7-9"), "--step 7-9: {run} has not trained that; it has trained steps 1 to 4"),
        (("--to", "jsonl", "--step", "best"), "--step best: is of a checkpoint; trajectories are of the steps that trained them"),
        (("--step", "1-2"), "--step 1-2: a model is of one step; --to jsonl, parquet and inspect take several"),
        (("--to", "jsonl", "-o", "{run}/config.yaml"), "{run}/config.yaml exists; remove it, or name another file with -o"),
        (("--to", "jsonl", "-o", "{run}/x/y"), "-o {run}/x/y: there is no folder {run}/x"),
        (("--to", "jsonl", "--python", "python3"), "--python is for --to inspect"),
        (("--to", "inspect", "--python", "{run}/python"), "--python {run}/python: it does not run: [Errno 2] No such file or "
         "directory: '{run}/python'"),
        (("--to", "inspect", "--python", "/usr/bin/true"), "--to inspect: /usr/bin/true has no inspect-ai; make an environment by "
         "`bash requirements/install-env.sh inspect`, and name it by --python .venv-inspect/bin/python"),
        (("--to", "hf"), "{run} has no checkpoint yet; the first is written after learner.checkpoint_every steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_line(
    options: tuple[str, ...], line: str, made: tuple[Path, list[Trajectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(made[0].iterdir())
    assert main(["export", str(made[0]), *(option.format(run=made[0]) for option in options)]) == 2
    assert capsys.readouterr() == ("", f"slipstream: {line.format(run=made[0])}\n")
    assert sorted(made[0].iterdir()) == before


def test_a_full_disk_and_a_damaged_row_leave_no_file(
    made: tuple[Path, list[Trajectory]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        assert main(["export", str(made[0]), "--to", "jsonl", "-o", str(tmp_path / "all.jsonl")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    line = f"slipstream: StoreError: {tmp_path}/all.jsonl cannot be written: File too large\n"
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []
    run = DashboardRun(tmp_path / "run")
    run.play()
    run.close()
    with sqlite3.connect(run.folder / "buffer.sqlite") as db:
        db.execute("UPDATE trajectories SET header = x'00' WHERE rowid = 3")
    before = sorted(run.folder.iterdir())
    assert main(["export", str(run.folder), "--to", "jsonl"]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert sorted(run.folder.iterdir()) == before


READ = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
samples = [[s.id, s.epoch, [m.role for m in s.messages], s.scores["reward"].value, s.metadata["id"], s.output.completion,
            [span["version"] for span in s.metadata["version_spans"]], s.total_time] for s in log.samples]
print(json.dumps([log.status, log.eval.model, log.eval.config.epochs, log.results.scores[0].metrics["mean"].value,
                  log.stats.started_at, log.stats.completed_at, samples]))
"""


@pytest.mark.full
@needs("inspect")
def test_inspect_reads_what_was_delivered(made: tuple[Path, list[Trajectory]], tmp_path: Path) -> None:
    python, out = str(python_of("inspect")), tmp_path / "run.eval"
    exported(made, "inspect", out, "--python", python)
    done = subprocess.run([python, "-c", READ, str(out)], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    name = Path(load(str(made[0] / "config.yaml")).model.path).name
    status, model, epochs, mean, began, ended, samples = json.loads(done.stdout)
    assert (status, model, epochs, mean) == ("success", f"slipstream/{name}", MEMBERS, 0.5)
    assert began < ended
    assert len({(id, epoch) for id, epoch, *_ in samples}) == len(samples) == len(made[1])
    by_id = {sample[4]: sample for sample in samples}
    for one in made[1]:
        _, epoch, roles, reward, _, completion, versions, total = by_id[one.id]
        assert (epoch, reward, total) == (one.member + 1, one.reward, one.timings["total"])
        assert roles == ["user", "assistant", "user", "assistant"]
        assert completion.startswith(f"It is {one.group_id + one.member}")
        assert versions == [span.version for span in one.version_spans]
