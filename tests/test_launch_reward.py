"""A reward model as a role of a run: placed, watched, started again, and what is refused before anything starts."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
from slipstream.configs import dump, load
from slipstream.configs.reward import Judge
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.launch.preflight import CHECKS, PreflightCheck, memory
from slipstream.launch.resources import assign_gpus, gpus_of, needed_gpus
from slipstream.launch.reward_check import check_reward_model
from slipstream.launch.run import resume
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.supervisor.processes import role_names
from slipstream.tests import rewards
from slipstream.tests.runs import ENDLESS, SMALL, Background, check_accounts, leftovers, metrics, query


@pytest.fixture(scope="module")
def classifier(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewards.classifier(tmp_path_factory.mktemp("reward") / "classifier", policy)


def test_a_run_whose_reward_server_is_killed(policy: Path, classifier: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = ("rollout.engine.kind=transformers", ENDLESS)
    model = (
        "reward.kind=classifier",
        f"reward.path={classifier}",
        "reward.weights={model: 0.5, environment: 2.0}",
    )
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *own, *model) as going:
        going.until_step(3)
        going.kill("reward")
        going.until_event("reward ended with SIGKILL")
        going.until_step(max(8, metrics(run)[-1]["step"] + 3))  # with scores of the server that follows it
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert "reward ended with SIGKILL" in output
    assert leftovers(run) == []
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    check_accounts(run)
    # Nothing failed by the death of the server. The classifier makes NaN of one token in a thousand, which the policy says in most
    # runs of this length, and not in all.
    failed = query(run, "SELECT reason, outcome FROM episodes WHERE reason LIKE 'failed%'")
    assert {reason for reason, _ in failed} <= {"failed_reward"}
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
    assert assign_gpus(wanted, 3, "nccl").gpus["reward"] == (2,)
    assert assign_gpus(wanted, 2, "nccl").gpus["reward"] == (0,)  # shared, and weights need not pass it
    assert assign_gpus(wanted, 2, "nccl").backend == "nccl"


@pytest.mark.parametrize("preset", ["quickstart", "qwen3-0.6b"])
def test_a_score_is_waited_for_longer_than_its_server_takes_to_start(preset: str) -> None:
    config = load(preset, ["reward.kind=judge", "reward.path=j"])
    assert isinstance(config.reward, Judge)
    assert config.score_s > config.rollout.engine.start_s


def test_its_memory_is_added_to_that_of_the_engines() -> None:
    free = psutil.virtual_memory().available
    half = f"rollout.engine.memory={int(free * 0.6) >> 20}MiB"
    memory(RunInputs(load("quickstart", [half])))
    with pytest.raises(ConfigError, match=r"rollout\.engine\.memory: .* for the reward server .* free") as caught:
        memory(RunInputs(load("quickstart", [half, "reward.kind=judge", "reward.path=j"])))
    assert "\n" not in str(caught.value)


def test_commands_without_a_reward_model_do_not_check_it(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a judge that was moved, a command that does not need it is not told: it gets as far as the last check."""
    assert [*CHECKS][-1] == "trackers"
    missing = ("reward.kind=judge", f"reward.path={tmp_path / 'moved'}", f"model.path={policy}")
    monkeypatch.setitem(CHECKS, "trackers", PreflightCheck(_reached))
    for command in (("eval", "quickstart"), ("sft", "quickstart", f"sft.out={tmp_path / 'out'}")):
        assert main([*command, *missing]) == 2
        assert capsys.readouterr().err == "slipstream: reached\n"
    assert main(["train", "quickstart", *missing, f"run.dir={tmp_path / 'run'}"]) == 2
    assert "reward.path" in capsys.readouterr().err


def _reached(inputs: RunInputs) -> str:
    """The last check: no process is started after it. GPUs are requested as the final config says."""
    gpus_of(inputs.config)
    raise ConfigError("reached")


def resumed(run: Path, *overrides: str) -> str:
    """What refuses to resume a run of a judge."""
    (run / "config.yaml").write_text(
        dump(load("quickstart", ["reward.kind=judge", "reward.path=j", "model.path=gone"]))
    )
    before = load(str(run / "config.yaml"))
    with pytest.raises(ConfigError) as caught:
        resume(load(str(run / "config.yaml"), overrides), before, run)
    return str(caught.value)


def test_a_resumed_run_keeps_its_reward_section_and_may_change_the_rest(tmp_path: Path) -> None:
    template = resumed(tmp_path, "reward.template={answer}")
    assert template.startswith('reward.template: a run keeps what it began with ("Judge an answer')
    assert "{answer} is not allowed" in template
    assert len(template) < 250
    assert "\n" not in template
    assert resumed(tmp_path, "reward.weights.model=2").startswith(
        'reward.weights: a run keeps what it began with ({"model":1.0,"environment":0.0})'
    )
    assert resumed(tmp_path, "reward.kind=environment").startswith("reward.kind: ")
    # It gets as far as the checks, where its model is not found.
    assert resumed(tmp_path, "rollout.engine.memory=1GiB", "rollout.episode_s=7").startswith("model.path: 'gone'")


def test_a_resumed_run_can_neither_start_nor_stop_greedy_episodes(tmp_path: Path) -> None:
    line = resumed(tmp_path, "learner.algorithm.advantage.kind=remax")
    assert line.startswith("learner.algorithm.advantage.kind: from grpo to remax is not allowed")
    assert "\n" not in line
    assert resumed(tmp_path, "learner.algorithm.advantage.kind=rloo").startswith("model.path: 'gone'")


def check(policy: Path, kind: str, path: Path, *overrides: str) -> str:
    """What the check says, refused or not."""
    config = load("quickstart", [f"model.path={policy}", f"reward.kind={kind}", f"reward.path={path}", *overrides])
    try:
        return check_reward_model(RunInputs(config))
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
        "write a size such as 128MiB": check(policy, "classifier", classifier, "rollout.engine.memory=0.5"),
    }
    labels = tmp_path / "labels"
    shutil.copytree(classifier, labels)
    config = json.loads((labels / "config.json").read_text())
    config |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (labels / "config.json").write_text(json.dumps(config))
    found["has 2 labels"] = check(policy, "classifier", labels)
    parts = tmp_path / "parts"
    shutil.copytree(classifier, parts)
    text = json.loads((classifier / "config.json").read_text()) | {
        "model_type": "gemma3_text",
        "max_position_embeddings": 64,
    }
    config = {"model_type": "gemma3", "text_config": text, "architectures": ["Gemma3ForSequenceClassification"]}
    (parts / "config.json").write_text(json.dumps(config | {key: text[key] for key in ("id2label", "label2id")}))
    found["64 positions"] = check(policy, "classifier", parts)
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
