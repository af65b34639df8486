"""A reward model as a role of a run: placed, watched, started again, and what is refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.member import role_names
from slipstream.launch.resources import needed_gpus, place
from slipstream.launch.reward_fit import check_reward
from slipstream.tests import rewards
from slipstream.tests.runs import SMALL, Background, check_accounts, leftovers, metrics, query, tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture(scope="module")
def classifier(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewards.classifier(tmp_path_factory.mktemp("reward") / "classifier", policy)


def test_a_run_whose_reward_server_is_killed(policy: Path, classifier: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = ("rollout.engine.kind=transformers", "learner.steps=14")
    model = (
        "reward.kind=classifier",
        f"reward.path={classifier}",
        "reward.memory=32MiB",
        "reward.weight=0.5",
        "reward.environment=2.0",
    )
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *own, *model) as going:
        going.until_step(3)
        going.kill("reward")
        output = going.output()
        assert going.process.returncode == 0, output
    assert "reward ended with SIGKILL" in output
    assert leftovers(run) == []
    assert [row["step"] for row in metrics(run)] == list(range(1, 15))
    check_accounts(run)
    # Nothing failed by the death of the server. The classifier makes NaN of one token, which the policy says now and then.
    failed = query(run, "SELECT reason, outcome FROM episodes WHERE reason LIKE 'failed%'")
    assert {reason for reason, _ in failed} == {"failed_reward"}
    assert all("Out of range float" in outcome for _, outcome in failed)
    scores = set[float]()
    for (header,) in query(run, "SELECT header FROM trajectories"):
        kept = msgspec.msgpack.decode(header[1:])
        score, environment = (kept["metrics"][name] for name in ("reward_model", "reward_environment"))
        assert kept["reward"] == pytest.approx(0.5 * score + 2.0 * environment, abs=1e-6)
        assert sum(kept["turn_rewards"]) == pytest.approx(kept["reward"], abs=1e-6)
        scores.add(score)
    assert len(scores) > 5


def test_it_is_a_role_with_a_gpu_of_its_own() -> None:
    plain = load("qwen3-0.6b")
    config = load("qwen3-0.6b", ["reward.kind=judge", "reward.path=j"])
    assert [name for name in role_names(config) if name not in role_names(plain)] == ["reward"]
    wanted = needed_gpus(config, engines=True, learners=True, reward=True)
    assert place(wanted, 3).gpus["reward"] == (2,)
    assert place(wanted, 2).gpus["reward"] == (0,)  # shared, and weights need not pass it
    assert place(wanted, 2).backend == "nccl"


def check(policy: Path, kind: str, path: Path, *overrides: str) -> str:
    """What the check says, refused or not."""
    config = load("quickstart", [f"model.path={policy}", f"reward.kind={kind}", f"reward.path={path}", *overrides])
    try:
        return check_reward(config)
    except ConfigError as error:
        return str(error)


def test_models_that_cannot_score_are_one_line(policy: Path, classifier: Path, tmp_path: Path) -> None:
    assert check(policy, "classifier", classifier).startswith("classifier ")
    assert check(policy, "judge", policy).startswith("judge ")
    found = {
        "reward.path": check(policy, "classifier", tmp_path / "nowhere"),
        "ForSequenceClassification": check(policy, "classifier", policy),
        "ForCausalLM": check(policy, "judge", classifier),
        "512 positions": check(policy, "classifier", classifier, "agent.max_tokens=513"),
        'payload["reference"]': check(policy, "judge", policy, "reward.template={answer} {reference}"),
        "write a size such as 128MiB": check(policy, "classifier", classifier, "reward.memory=0.5"),
    }
    labels = tmp_path / "labels"
    shutil.copytree(classifier, labels)
    config = json.loads((labels / "config.json").read_text())
    config |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (labels / "config.json").write_text(json.dumps(config))
    found["has 2 labels"] = check(policy, "classifier", labels)
    foreign = tmp_path / "foreign"
    shutil.copytree(classifier, foreign)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    found["another tokenizer"] = check(policy, "classifier", foreign)
    mute = tmp_path / "mute"
    shutil.copytree(policy, mute)
    (mute / "chat_template.jinja").unlink()
    found["chat template"] = check(policy, "judge", mute)
    for expected, said in found.items():
        assert expected in said
        assert "\n" not in said
