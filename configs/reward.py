"""The config section `reward`: the environment's own reward of an episode, or that of a model of fixed weights.

Invariants:
- The model is a role of the run, `reward`: a vLLM server that the supervisor starts, monitors and restarts like the others.
- A missing or invalid score is a failure (`rollout.failures.reward`), never a reward.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import field

from .section import Positive, Section

FIELDS = ("question", "answer", "conversation", "reference")  # what a template may name in braces

TEMPLATE = """\
Judge an answer to a question.

The question:
{question}

The answer:
{answer}

Say in a few sentences what is right and what is wrong with the answer. Then end with a line that holds nothing but \
`Score: X`, where X is a number from 0 for a useless answer to 1 for a perfect one, for example 0.3.
"""

FIELD = re.compile(r"\{(\w+)\}")  # a name in braces


class EnvironmentReward(Section, frozen=True, tag_field="kind", tag="environment"):
    """The environment's own reward and nothing else."""


class ModelReward(Section, frozen=True):
    path: str
    """The model: a Hugging Face folder, or a name on a hub, as in `model.path`. Its weights stay as they are."""
    weights: dict[Literal["model", "environment"], float] = field(
        default_factory=lambda: {"model": 1.0, "environment": 0.0}
    )
    """The reward is weights.model x the model's score, added to the last step, plus weights.environment x the environment's
    rewards."""


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
