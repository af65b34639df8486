"""What an episode is worth: what its environment says, or a model of fixed weights.

Invariants:
- The model is a role of the run, `reward`: a vLLM server that is placed, watched and started again like the others.
- What it does not answer properly is a failure (`rollout.failures.reward`), never a reward.
"""

from __future__ import annotations

import re

from .section import AboveZero, Positive, Section

FIELDS = ("question", "answer", "conversation", "reference")
"""What a template may name in braces."""

TEMPLATE = """\
Judge an answer to a question.

The question:
{question}

The answer:
{answer}

Say in a few sentences what is right and what is wrong with the answer. Then end with a line that holds nothing but \
`Score: X`, where X is a number from 0 for a useless answer to 1 for a perfect one, for example 0.3.
"""

FIELD = re.compile(r"\{(\w+)\}")
"""How it names one."""


class EnvironmentReward(Section, frozen=True, tag_field="kind", tag="environment"):
    """The environment's own reward and nothing else."""


class ModelReward(Section, frozen=True):
    """What both kinds of models have."""

    path: str
    """The model: a Hugging Face folder, or a hub name. Its weights stay as they are."""
    weight: float = 1.0
    """Factor of the model's score, which is added to the reward of the last step."""
    environment: float = 0.0
    """Factor of the environment's own rewards; 0 leaves the model's score alone."""
    memory: str = "128MiB"
    """KV cache of its server, as `rollout.engine.memory`."""
    request_s: AboveZero = 600.0
    """Longest wait for one score; then the episode failed by `reward`. An episode that ends while the server is down waits for it:
    keep this above `rollout.engine.start_s`, which it has to start again."""


class Classifier(ModelReward, frozen=True, tag_field="kind", tag="classifier"):
    """A sequence classifier of one label: its logit for all tokens of the episode. It must share the policy's tokenizer."""


class Judge(ModelReward, frozen=True, tag_field="kind", tag="judge"):
    """A generative model that is asked for a score from 0 to 1."""

    template: str = TEMPLATE
    """What it is asked. `{question}` is what the policy was shown first, `{answer}` its last message, `{conversation}` all
    messages, `{reference}` the task's `payload["reference"]`. It has to ask for `Score: X` as the last line, X from 0 to 1."""
    max_tokens: Positive = 256
    """Tokens of its answer; one that is cut off is no answer."""


Reward = EnvironmentReward | Classifier | Judge


def fields_of(template: str) -> tuple[str, ...]:
    """The names in braces, in order; other braces are text."""
    return tuple(FIELD.findall(template))
