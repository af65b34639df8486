"""The configuration of `slipstream sft`: a run's configuration and one section of its own.

A run's file has no section `sft`; `slipstream sft CONFIG sft.out=... sft.lr=...` takes it from the command line, or from a file
that says `extends: CONFIG` and holds the section.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from .algorithm import Dpo
from .schema import Config
from .section import AboveZero, Positive, Section


class UsualLoss(Section, frozen=True, tag_field="kind", tag="auto"):
    """Of conversations minus the log-likelihood; of preferences that of a classifier (Bradley and Terry 1952)."""


class Sft(Section, frozen=True):
    """Supervised fine-tuning on conversations: those of a file, or demonstrations that the environment generates; or on
    preferences."""

    out: str = "models/quickstart"
    """Folder that receives the trained model."""
    messages: str = ""
    """Conversations, each `{"messages": [...], "tools": [...]}` in OpenAI's chat format: a `.jsonl` or `.parquet` file, or what
    the `datasets` package loads, as `env.path` of a data set. The model learns the assistant's messages. Empty uses
    demonstrations of the environment."""
    preferences: str = ""
    """Preferences, each `{"prompt": [...], "chosen": [...], "rejected": [...]}`, in such a file or data set. The model becomes a
    classifier, which `reward.kind=classifier` serves: it learns to score chosen conversations above rejected ones. With
    `sft.loss.kind=dpo` it stays a policy, which learns to prefer them."""
    loss: UsualLoss | Dpo = field(default_factory=UsualLoss)
    """`auto`: the likelihood of conversations, or of preferences a classifier's. `dpo`: preferences train the policy itself,
    against the policy as it is before the first step; `sft.loss.eta` is 1 / beta, 10 by default."""
    demonstrations: Positive = 4096
    """Conversations to generate when there is no file."""
    held_out: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.02
    """Share of the conversations, or preferences, that is not trained on; the loss on it is printed before the first and after
    every epoch."""
    epochs: Positive = 2
    """Passes over the other conversations."""
    tokens_per_step: Positive = 512
    """Tokens per optimizer step, packed. A tiny model learns to copy by many small steps, not by few large ones."""
    lr: AboveZero = 3e-3
    """Peak learning rate; linear warm-up, then cosine to a tenth."""


class SftConfig(Config, frozen=True):
    sft: Sft = field(default_factory=Sft)
    """Supervised fine-tuning."""
