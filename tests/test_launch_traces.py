"""Expert traces of a run: graded once by their environment before it starts, refused by file and line, kept for a resume, and
learned from where the policy earns nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, Trajectory
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.traces import grade_traces
from slipstream.learner.batch import NO_VERSION
from slipstream.learner.model import load_tokenizer
from slipstream.learner.traces import FILE
from slipstream.tests import tiny
from slipstream.tests.runs import SMALL, check_accounts, metrics, query, slipstream

# Not in the working folder: a grading that is cancelled may write when that is the next test's.
REWARD = """
import os
def score(completion, row):
    open(os.path.join(os.path.dirname(__file__), "graded.txt"), "a").write(completion + "\\n")
    if completion == "raise":
        raise ValueError("no such answer")
    return {"reward": float(completion == row["answer"]), "characters": len(completion)}
"""
ROWS = [{"prompt": f"Say {n}.", "answer": f"as you wish: {n}{n}{n}", "id": f"row-{n}"} for n in range(6)]
ENV = "env={kind: dataset, path: rows.jsonl, reward: 'my.py:score', evaluation: 0.0, traces: experts.jsonl}"
KEYS = (ENV, "evaluation.tasks=0", "rollout.engine.kind=transformers")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARD)
    write("rows.jsonl", ROWS)
    write("experts.jsonl", [{"prompt": row["prompt"], "trace": row["answer"]} for row in ROWS])
    return tmp_path


def write(name: str, rows: list) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def graded(policy: Path, *keys: str) -> list[Trajectory]:
    return grade_traces(RunInputs(load("quickstart", [f"model.path={policy}", *KEYS, *keys])))


def test_a_trace_is_graded_by_its_environment_and_has_the_tokens_of_an_episode(policy: Path, folder: Path) -> None:
    traces = [("Say 3.", ROWS[3]["answer"]), ("Say 3.", "wrong"), ("Say 1.", ROWS[1]["answer"])]
    write("experts.jsonl", [{"prompt": prompt, "trace": text} for prompt, text in traces])
    found = graded(policy)
    assert [one.task_id for one in found] == ["rows-train-row-1", "rows-train-row-3", "rows-train-row-3"]
    assert [one.reward for one in found] == [1.0, 1.0, 0.0]
    assert sorted(Path("graded.txt").read_text().splitlines()) == sorted(text for _, text in traces)
    tokenizer = load_tokenizer(str(policy))
    for one, text in zip(found, (ROWS[1]["answer"], ROWS[3]["answer"], "wrong"), strict=True):
        (span,) = one.version_spans
        assert (span.version, span.end) == (NO_VERSION, len(one))
        assert one.loss_mask.tolist() == [at >= span.start for at in range(len(one))]
        said = str(tokenizer.decode(one.token_ids[one.loss_mask].tolist()))
        assert said.startswith(text)
        assert said.removeprefix(text).strip() == "<|im_end|>"
        assert not one.behavior_logprobs.any()
        assert (one.outcome, one.turn_rewards, one.metrics) == (FINISHED, (one.reward,), {"characters": len(text)})


def test_tasks_of_the_same_number_in_two_environments_are_not_mixed_up(policy: Path, folder: Path) -> None:
    """Each has one row, so that the last task of the first and the first of the second have the same number."""
    write("rows.jsonl", ROWS[:1])
    write("others.jsonl", [{"prompt": "Shout 0.", "answer": "no", "id": "other"}])
    write("experts.jsonl", [{"prompt": "Say 0.", "trace": ROWS[0]["answer"]}])
    write("shouts.jsonl", [{"prompt": "Shout 0.", "trace": "no"}])
    parts = [
        f"{name}: {{kind: dataset, path: {rows}, reward: 'my.py:score', evaluation: 0.0, traces: {traces}}}"
        for name, rows, traces in (("a", "rows.jsonl", "experts.jsonl"), ("b", "others.jsonl", "shouts.jsonl"))
    ]
    found = graded(policy, f"env={{kind: mixture, parts: {{{', '.join(parts)}}}}}")
    assert [(one.env, one.reward) for one in found] == [("a", 1.0), ("b", 1.0)]


def test_traces_that_are_too_long_are_left_out_and_refused_where_none_is_left(policy: Path, folder: Path) -> None:
    write("experts.jsonl", [{"prompt": "Say 3.", "trace": "long " * 300}, {"prompt": "Say 1.", "trace": "short"}])
    assert [one.task_id for one in graded(policy)] == ["rows-train-row-1"]
    write("experts.jsonl", [{"prompt": "Say 3.", "trace": "long " * 300}])
    with pytest.raises(ConfigError, match=r"env.traces: each has more tokens than agent.max_tokens=256; raise that"):
        graded(policy)


def test_without_traces_nothing_is_graded(policy: Path, folder: Path) -> None:
    assert graded(policy, "env.traces=") == []
    assert not Path("graded.txt").exists()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"prompt": "Say 7.", "trace": "7"},
            "env.traces: experts.jsonl, line 2: no row of rows.jsonl has its 'prompt'",
        ),
        ({"prompt": "Say 2.", "trace": "raise"}, "env.traces: experts.jsonl, line 2: rows: step: "),
    ],
)
def test_a_trace_that_answers_no_task_or_cannot_be_graded_is_one_line_before_anything_starts(
    policy: Path, folder: Path, capsys: pytest.CaptureFixture[str], row: dict, complaint: str
) -> None:
    write("experts.jsonl", [{"prompt": "Say 3.", "trace": "3"}, row])
    assert main(["train", "quickstart", f"model.path={policy}", f"run.dir={folder / 'run'}", *KEYS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) not in complaint
    assert complaint in line.replace(f"{folder}/", "")
    assert not (folder / "run").exists()


def test_doctor_counts_traces_and_names_a_file_that_is_missing(
    policy: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = ["doctor", "quickstart", f"model.path={policy}", *KEYS]
    write("experts.jsonl", [{"prompt": "Say 3.", "trace": "3"}] * 2 + [{"prompt": "Say 1.", "trace": "1"}])
    assert main(doctor) == 0
    assert "rows: 3 of 2 tasks" in capsys.readouterr().out
    assert not Path("graded.txt").exists()
    assert main([*doctor, "env.traces=nothing.jsonl"]) != 0
    assert "env.traces: there is no file nothing.jsonl" in capsys.readouterr().out


def logprob(policy: Path, one: Trajectory) -> float:
    """Of the answer, under the policy in a folder, nats."""
    found = tiny.logprobs(tiny.load(policy), one.token_ids.tolist())
    each = found[torch.arange(len(one) - 1), torch.from_numpy(one.token_ids[1:].astype(np.int64))]
    return float(each[torch.from_numpy(one.loss_mask[1:].copy())].sum())


@pytest.mark.full
def test_a_run_learns_from_traces_where_it_earns_nothing_and_goes_on_with_the_same(
    wide_policy: Path, folder: Path
) -> None:
    run = folder / "run"
    settings = ("learner.optimizer.lr=1e-3", "learner.steps=10", "learner.algorithm.terms.imitation=1.0")
    slipstream("train", "quickstart", f"model.path={wide_policy}", f"run.dir={run}", *SMALL, *KEYS, *settings)
    kept = (run / FILE).read_bytes()
    (folder / "my.py").write_text("def score(completion, row):\n    return 0.0\n")  # would grade them otherwise
    slipstream("resume", str(run), "learner.steps=12")
    assert (run / FILE).read_bytes() == kept
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    traces = graded(wide_policy)
    lengths = {int(one.loss_mask.sum()) for one in traces}
    assert all(2 * min(lengths) <= row["trace_tokens"] <= 2 * max(lengths) for row in rows)  # two groups in each batch
    assert all(row["reward_mean"] == 0.0 for row in rows)  # no episode earned anything
    assert all(row["groups_alike"] == 0 and row["grad_norm"] > 0 for row in rows)
    assert all(0 <= row["staleness_mean"] <= 2 and 0 < row["ess"] < 1.001 for row in rows)
    check_accounts(run)
    assert query(run, "SELECT count(*) FROM trajectories WHERE header LIKE '%trace%'") == [(0,)]
    before, after = (np.mean([logprob(folder, one) for one in traces]) for folder in (wide_policy, run / "model"))
    assert after > before + 40  # GRPO alone wanders: its noise in 12 steps is that of the answers it samples
    assert EncodedTrajectory.of(traces[0]).row.decode().reward == 0.0  # as the other function grades them now
