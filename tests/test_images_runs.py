"""Runs with a model that sees images: what is refused before they start, and one that learns to count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from slipstream.configs import SftConfig, load
from slipstream.envs import Observation
from slipstream.errors import ConfigError
from slipstream.launch.image_checks import check_images, check_opening
from slipstream.tests.runs import SMALL, leftovers, metrics, slipstream
from slipstream.tests.seeing import asked, picture, renderer_of, seeing_policy
from slipstream.tests.tiny import tiny_qwen3

ROOT = Path(__file__).parent.parent
SERVER = "rollout.engine.kind=transformers"
HIDDEN = "env.arguments={hidden: true}"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_policy(tmp_path_factory.mktemp("models") / "seeing")


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            ("rollout.engine.kind=sglang",),
            "rollout.engine.kind=sglang is not given images with token ids here; allowed are transformers and vllm: '",
        ),
        (
            (SERVER, "learner.backend.kind=megatron"),
            "learner.backend.kind=megatron has no vision tower; allowed is fsdp2",
        ),
        (
            (SERVER, "learner.backend.options=[compile]"),
            r"options=\[compile\] does not reach a vision tower; allowed are recompute",
        ),
        ((SERVER, "learner.backend.lora_rank=4"), "lora_rank=4 has no adapters for a vision tower; allowed is 0"),
        ((SERVER, "learner.backend.parallel.context=2", "learner.backend.ranks=2"), "context=2 splits no images"),
        ((SERVER, "learner.algorithm.advantage.kind=gae"), "kind=gae trains a second model, which sees none"),
        (
            (SERVER, "learner.algorithm.kl={kind: loss, coefficient: 0.1}", "learner.aux_models.reference=1"),
            "aux_models.reference=1: ranks of",
        ),
        ((SERVER, "reward={kind: judge, path: judges}"), "reward.kind=judge scores text; allowed is environment"),
    ],
)
def test_what_takes_no_images_is_refused_by_one_line(policy: Path, keys: tuple[str, ...], why: str) -> None:
    config = load("quickstart", [f"model.path={policy}", *keys])
    with pytest.raises(ConfigError, match=why) as raised:
        check_images(config)
    assert "sees images" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_takes_images_is_not_refused(policy: Path) -> None:
    check_images(load("quickstart", [f"model.path={policy}", "rollout.engine.kind=vllm"]))
    for options in ("[]", "[recompute, frozen_vision]"):
        check_images(load("quickstart", [f"model.path={policy}", SERVER, f"learner.backend.options={options}"]))
    kl = f"learner.algorithm.kl={{kind: loss, coefficient: 0.1, reference: {policy}}}"
    check_images(load("quickstart", [f"model.path={policy}", SERVER, kl]))


def test_fine_tuning_needs_no_engine_and_one_rank(policy: Path) -> None:
    model, two, shows = f"model.path={policy}", "learner.backend.ranks=2", Observation((asked(picture("red")),))
    check_images(load("quickstart", [model], SftConfig))
    check_opening(load("quickstart", [model], SftConfig), renderer_of(policy), "colors", shows)
    check_opening(load("quickstart", [model, two]), renderer_of(policy), "colors", shows)
    several = load("quickstart", [model, two], SftConfig)
    with pytest.raises(ConfigError, match=r"backend.ranks=2: colors shows images, .* by one rank; allowed is 1"):
        check_opening(several, renderer_of(policy), "colors", shows)
    check_opening(several, renderer_of(policy), "words", Observation((asked(),)))


def test_a_model_without_a_vision_tower_is_told_so(policy: Path, tmp_path: Path) -> None:
    blind = tiny_qwen3(tmp_path / "blind")
    shows = Observation((asked(picture("red")),))
    config = load("quickstart", [f"model.path={blind}", SERVER])
    check_images(config)
    with pytest.raises(ConfigError, match="sees no images, and colors shows some; allowed are models that see images"):
        check_opening(config, renderer_of(policy), "colors", shows)
    with pytest.raises(ConfigError, match=r"options=\[frozen_vision\]: .* has no vision tower; leave it out"):
        check_images(load("quickstart", [f"model.path={blind}", "learner.backend.options=[frozen_vision]"]))
    other = load("quickstart", [f"model.path={policy}", SERVER])
    with pytest.raises(ConfigError, match="'qwen3' shows no images, and colors has some; allowed is qwen3-vl"):
        check_opening(other, object(), "colors", shows)  # type: ignore[arg-type]
    mixed = load(
        "quickstart",
        [f"model.path={policy}", SERVER, f"learner.algorithm.kl={{kind: loss, coefficient: 0.1, reference: {blind}}}"],
    )
    with pytest.raises(ConfigError, match="sees no images; allowed are models that do"):
        check_images(mixed)


@pytest.mark.full
def test_a_model_learns_to_count_what_a_tool_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From random weights: warmed up on demonstrations of which half guess, it learns to say what it sees. Every version that is
    pushed, its vision tower included, gives the learner's log-probs."""
    monkeypatch.chdir(ROOT)
    example, run = "examples/counting.yaml", tmp_path / "run"
    slipstream("init-model", str(tmp_path / "random"), "--config", example, HIDDEN)
    few = ("sft.demonstrations=1024", "sft.epochs=1", HIDDEN)
    slipstream("sft", example, f"model.path={tmp_path / 'random'}", f"sft.out={tmp_path / 'model'}", *few)
    groups = ("buffer.groups_per_batch=8", "buffer.group_size=8", "buffer.max_staleness=0")
    steps = ("learner.steps=20", "learner.checkpoint_every=20")
    slipstream("train", example, f"model.path={tmp_path / 'model'}", f"run.dir={run}", *SMALL, *groups, *steps, HIDDEN)
    rows = metrics(run)
    rewards = [row["reward_mean"] for row in rows]
    slope = np.polyfit(range(len(rewards)), rewards, 1)[0]  # about 0.028 a step, with an error of 0.004
    assert slope > 0.008, rewards
    assert all(row["mismatch_max"] < 1e-3 for row in rows)
    files = list((run / "images").glob("*/*.png"))
    assert len(files) > 64
    shown = slipstream("show", str(run), "--best").stdout.replace("\n", "")
    assert any(f"images/{path.name[:2]}/{path.name}" in shown for path in files)
    assert f"images: {len(files)} files" in slipstream("ledger", str(run)).stdout
    slipstream("export", str(run), "--to", "jsonl")
    assert '"images":[{"start":' in (run / "trajectories.jsonl").read_text()
    assert leftovers(run) == []
