"""Real reward models, as small as they get: a classifier of random weights, a judge that was taught four answers, their servers."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from slipstream.configs import Config, load
from slipstream.rollout import reward_server
from slipstream.rollout.engines import registry as servers
from slipstream.tests import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

TAUGHT = {
    "good": "Fine.\nScore: 0.75",
    "bad": "score: 0.25\n",
    "odd": "Score: high",
    "proud": "Score: 7",
}
"""What the judge says of four answers: two scores, and two that are none."""

TEMPLATE = "{question} {answer}"

POISON = 7
"""A token of which the classifier makes NaN."""


def classifier(folder: Path, policy: Path, seed: int = 3) -> Path:
    """A random sequence classifier of one label over the tokens of `policy`."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForSequenceClassification(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def judge(folder: Path, policy: Path) -> Path:
    """A copy of `policy` that was taught `TAUGHT` when it is asked by `TEMPLATE` with the question `Q`."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    examples = []
    for answer, said in TAUGHT.items():
        ask = [{"role": "user", "content": f"Q {answer}"}]
        prompt = tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=False)
        ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, said + "<|im_end|>")]
        examples.append((torch.tensor([ids[0] + ids[1]]), len(ids[0])))
    for _ in range(200):
        losses = []
        for ids, start in examples:
            labels = ids.clone()
            labels[:, :start] = -100
            losses.append(model(ids, labels=labels, use_cache=False).loss)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.01
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def asking(kind: str, model: Path, *overrides: str) -> Config:
    """The config of a run whose episodes `model` scores."""
    return load(
        "quickstart",
        [f"reward.kind={kind}", f"reward.path={model}", "rollout.engine.memory=32MiB", "seed=5", *overrides],
    )


@contextlib.contextmanager
def served(config: Config, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server of the reward model, killed with its children at the end; it may not answer yet."""
    command = reward_server.command(config, servers.LOOPBACK, port)
    with tiny.server(command, reward_server.environment(config), log) as process:
        yield process
