"""From the config's `env` section to task sources; every error in it is reported here, before anything starts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence, Sized

import msgspec

from ..common.targets import load_target
from ..configs.environments import (
    Dataset,
    EnvironmentKind,
    Gymnasium,
    Harbor,
    Inspect,
    Mcp,
    Mixture,
    NemoGym,
    OpenEnv,
    PythonEnv,
    ReasoningGym,
    TextArena,
    Verifiers,
    parts_by_key,
)
from ..configs.schema import Failure, Reason
from ..errors import ConfigError
from .base import TaskSource
from .simple import Split

SOURCES: dict[type, tuple[str, str]] = {
    ReasoningGym: (".reasoning_gym", "ReasoningGymEnv"),
    Dataset: (".dataset.source", "DatasetSource"),
    Mcp: (".adapters.mcp", "McpEnv"),
    Gymnasium: (".adapters.gymnasium", "GymnasiumEnv"),
    TextArena: (".adapters.textarena", "TextArenaEnv"),
    OpenEnv: (".adapters.openenv", "OpenEnvEnv"),
    Harbor: (".adapters.harbor.env", "HarborEnv"),
    NemoGym: (".adapters.nemo_gym", "NemoGymEnv"),
    Verifiers: (".adapters.verifiers", "VerifiersEnv"),
    Inspect: (".adapters.inspect.env", "InspectEnv"),
}
"""Where the task source of each built-in kind is; it is imported when one is made, since some libraries take seconds."""


class EnvPart(msgspec.Struct, frozen=True):
    """One environment of a run: its name in trajectories and reports, its weight in every batch relative to the others' shares, its
    tasks, the reward of its failed episodes where they are trained on, None where it declares none, and whether it plays its
    episodes itself (`self_played.py`)."""

    name: str
    share: float
    source: TaskSource
    penalty: float | None
    self_played: bool = False

    @property
    def size(self) -> int:
        """The tasks of an epoch; 0 where they have no end."""
        return len(self.source) if isinstance(self.source, Sized) else 0


def parts_of(config: EnvironmentKind | Mixture, split: Split, seed: int, section: str = "env") -> tuple[EnvPart, ...]:
    """The environments of a run, or of the config's `section`; `Lease.env` is an index into them. Raises ConfigError: as
    `task_source`, naming the part; or a penalty that is not a finite number."""
    return tuple(
        _part(key, key.removeprefix(section).removeprefix(".parts."), part, split, seed)
        for key, part in parts_by_key(config, section).items()
    )


def require_penalties(parts: Sequence[EnvPart], failures: Mapping[Reason, Failure]) -> None:
    """Raises ConfigError where failures are to be trained on and an environment declares no penalty."""
    for reason, failure in failures.items():
        for part in parts:
            if failure.then == "train" and part.penalty is None:
                raise ConfigError(
                    f"rollout.failures.{reason}.then: train needs the penalty that the environment declares, and {part.name} "
                    "declares none; set the attribute `penalty` of its task source, or use drop"
                )


def task_source(config: EnvironmentKind, split: Split, seed: int, key: str = "env") -> TaskSource:
    """The tasks of `split`; sources of different splits or seeds share no random seed. `key` is the config section of `config`.
    Raises ConfigError: an unknown family, parameter, module or name, or a factory that rejects its arguments."""
    if config.isolated:
        from .isolation.source import isolated_source

        return isolated_source(config, split, seed, key)
    if not isinstance(config, PythonEnv):
        module, name = SOURCES[type(config)]
        return getattr(importlib.import_module(module, __package__), name)(config, split, seed, key)
    factory = load_target(f"{key}.factory", config.factory)
    if abstract := getattr(factory, "__abstractmethods__", None):
        raise ConfigError(f"{key}.factory: {config.factory} has no {' and no '.join(sorted(abstract))}; write them")
    try:
        source = factory(split=split, seed=seed, **config.arguments)
    except TypeError as error:
        raise ConfigError(f"{key}.arguments: {config.factory} does not take {config.arguments}: {error}") from error
    except Exception as error:  # the factory is user code
        raise ConfigError(f"{key}.factory: {config.factory} raised {type(error).__name__}: {error}") from error
    missing = [name for name in ("name", "task", "make", "demonstration") if not hasattr(source, name)]
    if missing:
        raise ConfigError(
            f"{key}.factory: {config.factory} returned {type(source).__name__} without {', '.join(missing)}; "
            "return a task source, for example a subclass of slipstream.envs.SimpleEnv"
        )
    return source


def _part(key: str, name: str, config: EnvironmentKind, split: Split, seed: int) -> EnvPart:
    source = task_source(config, split, seed, key)
    penalty = getattr(source, "penalty", None)
    if penalty is not None and not (isinstance(penalty, int | float) and math.isfinite(penalty)):
        raise ConfigError(f"{key}: {source.name} declares the penalty {penalty!r}; it must be a finite number, or None")
    self_played = bool(getattr(source, "self_played", False))
    return EnvPart(name or source.name, config.share, source, None if penalty is None else float(penalty), self_played)
