"""What a rank reads of a model's files: its rows of every parameter, bit for bit those of transformers' own loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.errors import ConfigError
from slipstream.learner.fsdp2 import attention
from slipstream.learner.model import make_critic, make_model
from slipstream.learner.weight_reader import WeightReader
from slipstream.tests.test_learner_families import TRAINED, write
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("family", TRAINED)
def test_the_rows_of_three_ranks_make_the_model_that_transformers_loads(tmp_path: Path, family: str) -> None:
    path = write(tmp_path, family, TRAINED[family])
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    model = make_model(path, attention.PACKED)
    tied = model.all_tied_weights_keys
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in expected.items()}

    def rows(rank: int):
        def of(name: str) -> slice:
            shape = shapes[name]
            each = -(-shape[0] // 3) if shape else 1
            return slice(rank * each, (rank + 1) * each)

        return of

    parts: dict[str, list[torch.Tensor]] = {}
    for rank in range(3):
        reader = WeightReader(path, model)
        for name, tensor in reader.read(rows(rank)):
            parts.setdefault(name, []).append(tensor.clone())
        reader.close()
    assert parts.keys() == expected.keys() - tied.keys()
    for name, found in parts.items():
        whole = torch.cat(found) if found[0].ndim else found[0]
        assert torch.equal(whole, expected[name]), name


def test_buffers_that_no_file_has_are_computed(tmp_path: Path) -> None:
    path = write(tmp_path, "gemma3_text", TRAINED["gemma3_text"])
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    made = dict(make_model(path, attention.PACKED).named_buffers())
    assert made.keys() == dict(expected.named_buffers()).keys()
    for name, buffer in expected.named_buffers():
        assert torch.equal(made[name], buffer), name


def test_a_checkpoint_that_lacks_a_parameter_or_has_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3", {})
    file = tmp_path / "model.safetensors"
    whole = load_file(file)

    def refusal(**changed: torch.Tensor | None) -> str:
        names = {name.replace("_dot_", "."): tensor for name, tensor in changed.items()}
        save_file({k: v for k, v in (whole | names).items() if v is not None}, file, metadata={"format": "pt"})
        with pytest.raises(ConfigError) as caught:
            list(WeightReader(path, make_model(path, attention.PACKED)).read(lambda name: slice(None)))
        return str(caught.value)

    lacks = refusal(model_dot_norm_dot_weight=None)
    assert lacks == f"model.path: the weights of {path!r} lack 'model.norm.weight'"
    other = refusal(model_dot_norm_dot_weight=torch.ones(3))
    assert "'model.norm.weight'" in other
    assert "[3], by the config it is [32]" in other


def test_a_critic_reads_all_but_its_head_which_is_0(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3", {})
    critic = make_critic(path, attention.PACKED)
    head = {name for name, _ in critic.named_parameters() if name.startswith("score.")}
    assert head
    assert not any(parameter.any() for name, parameter in critic.named_parameters() if name in head)
    with pytest.raises(ConfigError, match="lack 'score"):
        list(WeightReader(path, critic).read(lambda name: slice(None)))
    read = dict(WeightReader(path, critic, head).read(lambda name: slice(None)))
    assert read.keys() == critic.state_dict().keys() - head


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3", {})
    model = make_model(path, attention.PACKED)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="holds quantized weights; allowed are float32, bfloat16 and float16"):
        WeightReader(path, model)
