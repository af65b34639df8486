"""A tiny random Qwen3 model and its tokenizer: the policy of laptop runs and tests. Where demonstrations show images it is a
Qwen3-VL, with an image processor.

Invariants:
- The folder is an ordinary Hugging Face folder: `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it.
- Nothing is downloaded. The tokenizer is trained on rendered episodes (tool preamble, questions, calls, results), so that they have
  few tokens. Every digit is one token, so that the model can learn to copy numbers.
- The same arguments give the same files.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..agents import load_renderer, render_demonstration
from ..common.fsio import apply_umask
from ..configs.schema import Agent
from ..envs import Message, Observation, TaskSource
from ..errors import ConfigError
from .tiny_vision import IMAGE_TOKENS, image_processor, seeing_model

Shown = tuple[Observation, tuple[Message, ...]]  # what a source gives as a demonstration

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Atomic tokens of Qwen3 that remain visible when text is decoded without special tokens."""

CHAT_TEMPLATE = (Path(__file__).parent / "qwen3_chat.jinja").read_text(encoding="utf-8")
"""Qwen3's chat format, with thinking switched off in every turn, as in the `qwen3` renderer."""

GENERIC_TEXT = (
    "The quick brown fox jumps over the lazy dog. What is the answer to this question? Please solve the problem, think step "
    "by step, and return the final result. There are many ways to do it, but only one of them is right. If you are not sure, "
    "you can use a tool and read what it returns before you answer. A number is made of digits, a word of letters, and a "
    "sentence of words. Find the largest, the smallest, the first and the last value in the list, then sort them in order. "
    "How much, how many, which, where, when and why are questions that people ask about their work and about the world. "
    '{"name": "value", "type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}} '
    "error: a tool call could not be read, the arguments must be a JSON object. error: division by zero. "
    "error: there is no tool with this name. True or false, yes or no, left or right, up or down, black or white."
)
"""English and JSON that the tokenizer learns word by word, so that other text is not split into bytes."""

INITIALIZER_RANGE = 0.08  # about 1 / sqrt(hidden); with the usual 0.02 so narrow a model learns to copy too slowly


class TinyModelShape(msgspec.Struct, frozen=True):
    """A Qwen3 decoder with tied embeddings; the defaults have about a million parameters."""

    hidden: int = 192
    layers: int = 2
    heads: int = 6  # of queries
    kv_heads: int = 6
    head_dim: int = 32
    intermediate: int = 512  # width of the gated MLP
    context: int = 2048  # positions that the model declares
    vocabulary: int = 1024  # most tokens to learn; the model has those that were, rounded up to a multiple of 64


def init_model(
    directory: Path,
    *,
    sources: Sequence[TaskSource],
    agent: Agent,
    seed: int = 0,
    shape: TinyModelShape = TinyModelShape(),  # noqa: B008  (frozen)
    samples: int = 512,
) -> int:
    """Write a randomly initialized model and its tokenizer, which the demonstrations of `sources` train, `samples` of each, in the
    chat format of `agent`, which has to show images where they have any; returns the number of parameters. Raises ConfigError where
    `directory` is not empty, or the chat format does not fit a Qwen3 tokenizer."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name a new folder for the model")
    rng = random.Random(seed)
    shown = [demonstration for source in sources for demonstration in _demonstrations(source, samples, rng)]
    sees = any(message.images for opening, messages in shown for message in (*opening.messages, *messages))
    special = (*SPECIAL, *IMAGE_TOKENS) if sees else SPECIAL
    byte_tokenizer = _hugging_face_tokenizer(_byte_level(special), shape.context)
    if sees:
        image_processor().save_pretrained(directory)
        byte_tokenizer.name_or_path = str(directory)  # where the chat format looks for it
    renderer = load_renderer(agent.renderer, byte_tokenizer, thinking=agent.thinking)
    texts: list[str] = []
    for opening, messages in shown:
        rendered = render_demonstration(renderer, opening, messages)
        texts.append(str(byte_tokenizer.decode(list(rendered.token_ids), skip_special_tokens=False)))
    tokenizer = _hugging_face_tokenizer(_train(texts, shape.vocabulary, special), shape.context)
    model = _random_model(shape, tokenizer, seed, sees=sees)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    apply_umask(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _demonstrations(source: TaskSource, samples: int, rng: random.Random) -> Iterator[Shown]:
    """Of the first `samples` tasks, up to the first that has none."""
    for index in range(samples):
        demonstration = source.demonstration(source.task(index), rng)
        if demonstration is None:
            return
        yield demonstration


def _byte_level(special: Sequence[str]) -> Tokenizer:
    """A tokenizer of bytes and Qwen3's own tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    return _configure(tokenizer, special)


def _train(texts: Sequence[str], vocabulary: int, special: Sequence[str]) -> Tokenizer:
    """Byte-level BPE whose merges may cross spaces, not digits or line ends: a fixed phrase becomes few tokens."""
    tokenizer = Tokenizer(models.BPE())
    _configure(tokenizer, special)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(special) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = re.findall(r" ?\S+", GENERIC_TEXT)
    tokenizer.train_from_iterator([*_splittable(texts, special), *words], trainer)
    return _configure(tokenizer, special)


def _splittable(texts: Sequence[str], special: Sequence[str]) -> Iterator[str]:
    """The texts between atomic tokens, which BPE must not learn."""
    atomic = re.compile("|".join(re.escape(token) for token in (*special, *MARKERS)))
    for text in texts:
        yield from filter(None, atomic.split(text))


def _configure(tokenizer: Tokenizer, special: Sequence[str]) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            # Chat formats end a prompt with a line end: no token may span prompt and completion.
            pre_tokenizers.Split(Regex(r"\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def _hugging_face_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _random_model(
    shape: TinyModelShape, tokenizer: PreTrainedTokenizerFast, seed: int, *, sees: bool
) -> PreTrainedModel:
    vocabulary = tokenizer.get_vocab()
    end, text_end = (vocabulary[token] for token in ("<|im_end|>", "<|endoftext|>"))
    ends = {"eos_token_id": end, "pad_token_id": text_end, "bos_token_id": text_end}
    decoder = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "initializer_range": INITIALIZER_RANGE,
        **ends,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if sees:
            made = seeing_model(decoder, vocabulary, INITIALIZER_RANGE)
        else:
            made = Qwen3ForCausalLM(Qwen3Config(**decoder, tie_word_embeddings=True, dtype="float32"))
    made.float()
    made.generation_config = GenerationConfig(**{**ends, "eos_token_id": [end, text_end]})
    return made
