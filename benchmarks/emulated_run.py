"""The emulated run of `slipstream bench async`, a `slipstream train` under an `EmulatedLaw`: its settings, and what its processes
find in their environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..launch.supervisor.factory import BACKEND_FACTORY
from ..rollout.engines.fake import law as engine_law
from . import emulated_episodes, emulated_learner
from .asynchrony_law import EmulatedLaw

PRESET = "quickstart"


def settings_of(law: EmulatedLaw, bound: int, model: Path) -> dict[str, object]:
    """Overrides of `PRESET`. Of `model` only the canary is computed."""
    longest = law.episodes.longest + 1
    env = {
        "kind": "python",
        "factory": emulated_episodes.FACTORY,
        "arguments": {"law": msgspec.to_builtins(law.episodes), "alike": law.alike},
    }
    return {
        **law.settings(bound),
        "env": msgspec.json.encode(env).decode(),
        "model.path": model,
        "agent.kind": emulated_episodes.AGENT,
        "agent.max_tokens": longest,
        "agent.max_tokens_per_turn": longest,
        "rollout.engine.kind": "fake",
    }


def environment_of(law: EmulatedLaw) -> Mapping[str, str]:
    """Variables of the command."""
    return {
        engine_law.VARIABLE: msgspec.json.encode(law.engine).decode(),
        BACKEND_FACTORY: emulated_learner.FACTORY,
        emulated_learner.VARIABLE: repr(law.seconds_per_token),
    }
