"""A run of a mixture of experts: its trajectories carry the experts that the server chose, and its learner takes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.segments import read_arrays, segments_path, starts_of
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.model_checks import check_experts_fit
from slipstream.launch.model_checks import learner as check_learner
from slipstream.launch.run_inputs import RunInputs
from slipstream.learner.model import read_routers
from slipstream.tests import tiny
from slipstream.tests.routing import likeliest
from slipstream.tests.runs import SMALL, check_accounts, metrics, query, slipstream, tiny_policy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

OPTION = "learner.backend.options=[router_replay]"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's random policy with four experts in place of each feed-forward layer."""
    folder = tiny_policy(tmp_path_factory.mktemp("model") / "dense")
    dense = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("max_position_embeddings", "eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    sizes = {name: dense[name] for name in kept} | experts
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, initializer_range=0.1)).float()
    mixture = tmp_path_factory.mktemp("model") / "moe"
    model.save_pretrained(mixture)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / file).exists():
            (mixture / file).write_bytes((folder / file).read_bytes())
    return mixture


@pytest.mark.full
def test_a_run_replays_what_its_server_chose(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    engine = "rollout.engine.kind=transformers"
    slipstream(
        "train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, engine, "learner.steps=3", OPTION
    )
    rows = metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3
    assert all(0 <= row["router_disagreement"] < 0.2 for row in rows)
    assert rows[0]["router_disagreement"] < 0.01  # the weights that sampled it
    check_accounts(run)
    model, routers = tiny.load(policy), read_routers(str(policy))
    each, compared = 9 + len(routers.layers) * 2, 0
    folder = segments_path(run / "buffer.sqlite")
    for header, position, length, size in query(run, "SELECT header, arrays, length, bytes FROM trajectories"):
        assert size == each * length
        data = read_arrays(folder, starts_of(folder), position, size)
        one = EncodedTrajectory(header, np.frombuffer(data, dtype=np.uint8)).decode()
        assert one.experts is not None
        recorded = one.experts[:, 0, 0] != one.experts[:, 0, 1]
        assert recorded[:-1].all()  # no pass has read the last token
        if {span.version for span in one.version_spans} == {0}:
            assert likeliest(model, one.token_ids.tolist(), torch.from_numpy(one.experts.copy()))
            compared += 1
    assert compared >= 8


def test_what_cannot_be_replayed_is_refused_before_anything_starts(policy: Path, tmp_path: Path) -> None:
    dense = tiny_policy(tmp_path / "dense")
    engine = "rollout.engine.kind=transformers"
    with pytest.raises(
        ConfigError, match=r"options=\[router_replay\]: .* is a model of family qwen3; allowed are .*qwen3_moe"
    ):
        check_learner(RunInputs(load("quickstart", [f"model.path={dense}", engine, OPTION])))
    with pytest.raises(ConfigError, match=r"engine\.kind=sglang gives no experts.*allowed are vllm and transformers"):
        load("quickstart", ["rollout.engine.kind=sglang", OPTION])
    with pytest.raises(ConfigError, match=r"router_replay\] with compile"):
        load("quickstart", [engine, "learner.backend.options=[router_replay, compile]"])
    check_learner(RunInputs(load("quickstart", [f"model.path={policy}", engine, OPTION])))
    routers = read_routers(str(policy))
    longest = (36 << 20) // (9 + 2 * len(routers.layers))
    check_experts_fit(load("quickstart", [engine, OPTION, f"agent.max_tokens={longest}"]), routers)
    with pytest.raises(ConfigError, match=rf"agent\.max_tokens={longest + 1} .* allowed are {longest} tokens"):
        check_experts_fit(load("quickstart", [engine, OPTION, f"agent.max_tokens={longest + 1}"]), routers)
