"""A model that cannot be trained is named before anything starts; packed attention refuses what it cannot do."""

import json
import time

import pytest
import torch
from slipstream.errors import ConfigError, LearnerError
from slipstream.learner.fsdp2 import attention
from slipstream.learner.model import check_files, check_model, load_tokenizer, make_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def write(folder, words=32, **config):
    Qwen3ForCausalLM(Qwen3Config(**SIZES | config)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def refusal(path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(str(path))
    message = str(caught.value)
    assert message.startswith("model.path: ")
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_good_folder_passes_and_loads_in_float32(tmp_path):
    folder = write(tmp_path)
    check_model(str(folder))
    model = make_model(str(folder), attention.PACKED)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert len(load_tokenizer(str(folder))) == 32


def test_a_path_that_is_nothing_is_refused_at_once(tmp_path):
    began = time.monotonic()
    refusal(tmp_path / "missing")
    refusal("models/not-there")
    assert time.monotonic() - began < 25


def test_incomplete_folders_are_refused(tmp_path):
    assert "no usable config" in refusal(tmp_path)
    folder = write(tmp_path / "whole")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    assert "*.safetensors" in refusal(folder)
    (folder / "elsewhere").rename(folder / "model.safetensors")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer file" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "no usable config" in refusal(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    assert "tokenizer of 40 tokens and a model of 32" in refusal(write(tmp_path, words=40))


def test_a_model_of_several_parts_is_refused_whatever_fields_it_has(tmp_path):
    folder = write(tmp_path)
    text = AutoConfig.from_pretrained(folder).to_dict() | {"model_type": "gemma3_text"}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert "is a gemma3, of several parts; allowed are text-only decoders" in refusal(folder)
    assert check_files(str(folder), "model.path").model_type == "gemma3"


def test_layers_that_cannot_be_packed_are_refused(tmp_path):
    folder = write(tmp_path)
    config = AutoConfig.from_pretrained(folder)
    config.layer_types = ["full_attention", "linear_attention"]
    config.save_pretrained(folder)
    assert "linear_attention" in refusal(folder)


def test_quantized_weights_are_refused(tmp_path):
    folder = write(tmp_path)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert "holds quantized weights; allowed are float32" in refusal(folder)


@pytest.mark.parametrize("window", [None, 5])
def test_packed_attention_equals_one_sequence_at_a_time(tmp_path, window):
    """Also where every second layer sees only the last five tokens."""
    kinds = ["full_attention", "sliding_attention" if window else "full_attention"]
    folder = write(tmp_path, layer_types=kinds, sliding_window=window, use_sliding_window=window is not None)
    packed = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention.PACKED
    ).eval()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert plain.config._attn_implementation != packed.config._attn_implementation
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 32, (n,), generator=generator) for n in (9, 1, 17)]
    arguments = attention.forward_arguments((0, 9, 10, 27), torch.device("cpu"))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    logits = packed(input_ids=torch.cat(sequences)[None], position_ids=positions[None], **arguments).logits[0]
    expected = torch.cat([plain(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("option", [{"position_bias": torch.zeros(4)}, {"dropout": 0.1}, {"packed": None}])
def test_attention_that_would_be_ignored_is_an_error(option):
    states = torch.zeros(1, 4, 3, 8)
    with pytest.raises(LearnerError, match="cannot do"):
        attention.packed_attention(
            torch.nn.Identity(),
            states,
            states,
            states,
            None,
            **{"packed": attention.PackedMask((0, 3), states.device)} | option,
        )
