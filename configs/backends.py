"""How the learner holds and steps the model: the kinds of backends, each with its own few fields."""

from __future__ import annotations

from typing import Literal

from .section import Positive, Section


class Fsdp2(Section, frozen=True, tag_field="kind", tag="fsdp2"):
    """PyTorch fully_shard over a transformers model."""

    ranks: Positive = 1
    """Learner processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner runs; `auto` takes CUDA where there is one."""
    tokens_per_microbatch: Positive = 8192
    """Tokens packed into one forward pass."""
