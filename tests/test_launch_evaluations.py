"""What evaluations are called when a run goes on, and the policy of a step as a model folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file
from slipstream.common.scores import EvaluationResult
from slipstream.launch import evaluations
from slipstream.monitor.series import read_evaluations
from slipstream.tests.runs import SMALL, slipstream, tiny_policy


def result(label: str, version: int) -> EvaluationResult:
    score = {"tasks": 4, "reward_mean": 0.5, "reward_stderr": 0.25, "outcomes": {"finished": 4}}
    return EvaluationResult(**score, label=label, version=version, seconds=1.0)


def labels(run: Path) -> list[str]:
    return [one.label for one in read_evaluations(run / evaluations.FILE)]


def test_a_final_evaluation_is_of_its_step_once_the_run_goes_on(tmp_path: Path) -> None:
    assert evaluations.label_of(0) == "warm start"
    evaluations.append(tmp_path, result("warm start", 0), 0)
    record = evaluations.append(tmp_path, result("final", 20), 20)
    assert isinstance(record, EvaluationResult)
    assert (record.step, record.tasks, record.reward_mean) == (20, 4, 0.5)
    evaluations.begin(tmp_path, 20)
    assert labels(tmp_path) == ["warm start", "final"]
    evaluations.begin(tmp_path, 22)
    assert labels(tmp_path) == ["warm start", "step 20"]
    assert evaluations.is_evaluated(tmp_path, 20)
    assert not evaluations.is_evaluated(tmp_path, 22)


def test_evaluations_of_earlier_versions_of_this_program_are_read(tmp_path: Path) -> None:
    entry = msgspec.to_builtins(result("final", 3))
    (tmp_path / evaluations.FILE).write_bytes(msgspec.json.encode([entry]))
    assert read_evaluations(tmp_path / evaluations.FILE)[0].step == 0


def weights(folder: Path) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_run_that_goes_on_is_evaluated_once_per_step_and_any_checkpoint_is_exported(
    backend: str, tmp_path: Path
) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    small = (
        *SMALL,
        "rollout.engine.kind=transformers",
        f"learner.backend.kind={backend}",
        "learner.backend.device=cpu",
    )
    slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, "learner.steps=2")
    assert not (run / evaluations.FILE).exists()
    exported = slipstream("export", str(run))
    assert f"the model is in {run}/model-step-2" in exported.stdout
    assert weights(run / "model-step-2") == weights(run / "model")
    again = slipstream("export", str(run), check=False)
    assert again.returncode == 2
    assert again.stderr == f"slipstream: {run}/model-step-2 exists; remove it, or name another folder with --out\n"
    # An evaluation that the run did not begin with is not of its warm start, and a finished run has one final evaluation.
    slipstream("resume", str(run), "evaluation.tasks=2", "learner.steps=4")
    assert labels(run) == ["step 2", "final"]
    slipstream("resume", str(run))
    assert labels(run) == ["step 2", "final"]
    answer = slipstream("eval", str(run), "--step", "2", "--json")
    assert msgspec.json.decode(answer.stdout, type=EvaluationResult).tasks == 2
    wrong = slipstream("eval", str(run), "--step", "3", check=False)
    assert wrong.returncode == 2
    assert f"--step: {run} has no checkpoint of step 3; it has 2, 4" in wrong.stderr
    slipstream("resume", str(run), "evaluation.tasks=0", "learner.steps=5")
    assert labels(run) == ["step 2", "step 4"]
    assert "reward, step 2 → step 4" in (run / "report.html").read_text()
