"""A tiny Qwen3 model and its tokenizer, made from nothing: the policy of laptop demonstrations and tests.

Invariants:
- The folder is an ordinary Hugging Face one: `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load it like any other.
- Nothing is downloaded. The tokenizer is trained on what the renderer really shows the policy (tool preamble, questions,
  calls, results), so that this costs few tokens; every digit is a token of its own, so that numbers can be copied.
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
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..agents import load_renderer, render_demonstration
from ..configs.schema import Agent
from ..envs import TaskSource
from ..errors import ConfigError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Qwen3's tokens that are atomic but stay visible when text is decoded without special tokens."""

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (system + '\\n\\n' if messages[0].role == 'system' else '') }}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""Qwen3's chat format, with thinking kept off the same way on every turn, as the `qwen3` renderer does."""

GENERAL = (
    "The quick brown fox jumps over the lazy dog. What is the answer to this question? Please solve the problem, think step "
    "by step, and return the final result. There are many ways to do it, but only one of them is right. If you are not sure, "
    "you can use a tool and read what it returns before you answer. A number is made of digits, a word of letters, and a "
    "sentence of words. Find the largest, the smallest, the first and the last value in the list, then sort them in order. "
    "How much, how many, which, where, when and why are questions that people ask about their work and about the world. "
    '{"name": "value", "type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}} '
    "error: a tool call could not be read, the arguments must be a JSON object. error: division by zero. "
    "error: there is no tool with this name. True or false, yes or no, left or right, up or down, black or white."
)
"""A little English and JSON, learnt word by word, so that text outside the demonstrations is not spelled byte by byte."""


INITIALIZER_RANGE = 0.08
"""About 1 / sqrt(hidden). With the usual 0.02 a model this narrow did not learn to copy within the minutes it is given."""


class Shape(msgspec.Struct, frozen=True):
    """A Qwen3 decoder with tied embeddings; the defaults have about a million parameters.

    Attributes:
        hidden: width of the residual stream.
        layers: decoder blocks.
        heads: query heads of `head_dim` each.
        kv_heads: key and value heads.
        head_dim: width of a head.
        intermediate: width of the gated MLP.
        context: positions the model declares.
        vocabulary: most tokens to learn; the model has as many as were found, rounded up to a multiple of 64.
    """

    hidden: int = 192
    layers: int = 2
    heads: int = 6
    kv_heads: int = 6
    head_dim: int = 32
    intermediate: int = 512
    context: int = 2048
    vocabulary: int = 1024


def init_model(
    directory: Path,
    *,
    sources: Sequence[TaskSource],
    agent: Agent,
    seed: int = 0,
    shape: Shape = Shape(),  # noqa: B008  (frozen)
    samples: int = 512,
) -> int:
    """Write a randomly initialised model and its tokenizer into `directory`; returns the number of parameters.

    Args:
        directory: made if it does not exist.
        sources: whose demonstrations (`samples` of each) the tokenizer is trained on.
        agent: names the chat format.
        seed: of the weights and of the demonstrations.

    Raises:
        ConfigError: `directory` holds files already, or the chat format does not fit a Qwen3 tokenizer.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty; name a new folder for the model")
    spelled = _wrap(_byte_level(), shape.context)
    renderer = load_renderer(agent.renderer, spelled, thinking=agent.thinking)
    rng = random.Random(seed)
    texts: list[str] = []
    for source in sources:
        for index in range(samples):
            demonstration = source.demonstration(source.task(index), rng)
            if demonstration is None:
                break
            rendered = render_demonstration(renderer, *demonstration)
            texts.append(str(spelled.decode(list(rendered.token_ids), skip_special_tokens=False)))
    tokenizer = _wrap(_train(texts, shape.vocabulary), shape.context)
    model = _random_model(shape, tokenizer, seed)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def _byte_level() -> Tokenizer:
    """A tokenizer that knows bytes and Qwen3's own tokens only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    return _dress(tokenizer)


def _train(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE whose merges may cross spaces, not digits or line ends: a fixed phrase becomes a handful of tokens."""
    tokenizer = Tokenizer(models.BPE())
    _dress(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - len(MARKERS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = re.findall(r" ?\S+", GENERAL)
    tokenizer.train_from_iterator([*_plain(texts), *words], trainer)
    return _dress(tokenizer)


def _plain(texts: Sequence[str]) -> Iterator[str]:
    """The stretches between atomic tokens: BPE must not learn to spell those."""
    atomic = re.compile("|".join(re.escape(token) for token in SPECIAL + MARKERS))
    for text in texts:
        yield from filter(None, atomic.split(text))


def _dress(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            # Formats end their scaffold with a line end and the policy speaks after it: no token may span the two.
            pre_tokenizers.Split(Regex(r"\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def _wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _random_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    end, text_end = (tokenizer.get_vocab()[token] for token in ("<|im_end|>", "<|endoftext|>"))
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        eos_token_id=end,
        pad_token_id=text_end,
        bos_token_id=text_end,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=[end, text_end], pad_token_id=text_end, bos_token_id=text_end
    )
    return model
