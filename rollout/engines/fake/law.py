"""The law of an emulated engine, which says how long it takes, in place of a model's forward passes, for benchmarks of what
surrounds them.

Invariants:
- Without the environment variable nothing is emulated: a fake server computes its tokens.
- A law is the same for all replicas of a run.
"""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta

from ....configs.section import AboveZero
from ....configs.yaml_text import parse
from ....errors import ConfigError

# Environment variable with the law, for example `{step_s: 0.012, sequence_s: 0.0001}`.
VARIABLE = "SLIPSTREAM_ENGINE_LAW"
BLOCK = 16  # tokens of a block of the prefix cache
Seconds = Annotated[float, Meta(ge=0)]


class EngineLaw(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decode step of n sequences takes `step_s + n * sequence_s` seconds, and each token of a prompt that is not cached
    `prefill_s` more. With `drains` a server that is asked to pause first decodes its running sequences to their ends, and begins no
    other: what servers do that cannot keep requests over a change of weights."""

    step_s: AboveZero
    sequence_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    drains: bool = False


def read_law() -> EngineLaw | None:
    """The law in the environment variable. Raises ConfigError where it is invalid."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.convert(parse(text), EngineLaw)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None
