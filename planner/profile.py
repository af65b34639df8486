"""The profile of a run: what a simulation needs to know of it, as numbers in one file that can be shared.

Invariants:
- No text of the run is in a profile: no prompt, no token id, no path, no name of a task or a tool.
- A profile is either right or refused with one line that names the key.
- `settings` are values of config keys, those in `SIMULATED`; other keys have no part in a simulation, and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..common.fsio import write_atomic
from ..configs import Config, describe, load
from ..errors import ConfigError
from .engine import DecodeCurve
from .figures import RunFigures
from .workload import Seconds, Workload

PROFILE = "profile.json"  # in the folder of a run
FORMAT = 4  # raise it when a field changes its meaning
# Any preset, with an advantage that allows groups of every size and of equal rewards: `load` checks settings as it checks those of
# a config, and a simulation reads no other key of it. What the algorithm of a run allows is for the run's own config to say.
BASE, ANY_ADVANTAGE = "quickstart", 'learner.algorithm.advantage={kind: python, function: "any:advantage"}'

SIMULATED = (
    "buffer.max_staleness",
    "buffer.groups_per_batch",
    "buffer.group_size",
    "buffer.min_members",
    "buffer.dynamic_sampling",
    "buffer.filter",
    "buffer.on_deadline",
    "rollout.engine.replicas",
    "rollout.engine.max_concurrent",
    "rollout.workers",
    "rollout.max_episodes",
    "rollout.partial",
    "learner.backend.ranks",
    "weightsync.cohort",
)
"""Keys whose values a simulation knows the meaning of."""


class LearnerProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the learner's steps took."""

    # Seconds of a step per token of its batch, context included, a value for each of some steps, while no replica works beside it;
    # each is drawn equally often. A step of another size takes proportionally longer.
    seconds_per_token: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)]
    ranks: Annotated[int, Meta(ge=1)] = 1  # with which these were measured; with others steps take inversely as long
    ranks_per_copy: Annotated[int, Meta(ge=1)] = 1  # `ranks` is a multiple of it
    take_s: Seconds = 0.0  # from the request for a batch that is ready to its arrival
    # How many times as long steps take beside replicas that work: those decode in a part of this time only, so that it is less than
    # their `contention`.
    contention: Annotated[float, Meta(ge=1)] = 1.0


class PushProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a push takes while no request is in flight."""

    cohort_s: Seconds  # of one cohort: transfer, swap, canary
    pause_s: Seconds  # of a replica
    once_s: Seconds = 0.0  # before the first cohort, however many there are: the learner gathers the weights
    canary_s: Seconds = 0.0  # of `cohort_s`, after the pause: the replicas serve the new version already
    # Decode steps that the push of a cohort waits for beside requests: what it asks of a replica waits for the step under way.
    steps: Annotated[float, Meta(ge=0)] = 0.0


class EngineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one replica takes."""

    decode: DecodeCurve
    prefill_s: Seconds = 0.0  # per token of a prompt that is not cached
    ranks: Annotated[int, Meta(ge=1)] = 1  # GPUs of a replica
    # `recorded`: from the times of the run's completions. `fitted`: a guessed form, scaled so that episodes take as long as they
    # did. `given`: by who wrote the file.
    source: Literal["recorded", "fitted", "given"] = "given"
    running: float = 0.0  # sequences that ran at once, on average
    # Decode steps, of as many sequences as the replica has requests, from a request to the step that makes its first token.
    request_steps: Annotated[float, Meta(ge=0)] = 0.0
    # How many times as long a replica takes while the learner computes: they share a host's cores. All other times are those of a
    # replica beside which the learner does not compute.
    contention: Annotated[float, Meta(ge=1)] = 1.0
    block: Annotated[int, Meta(ge=1)] = 1  # prefixes are cached in whole blocks of so many tokens


class _Format(msgspec.Struct):
    """Of a file all of whose other keys may be of another release."""

    format: object = FORMAT


class RunProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module. `measured` are the figures of the run, from which a simulation of the run itself should not differ."""

    format: Literal[4] = FORMAT
    settings: dict[str, bool | int | str]
    environments: Annotated[tuple[Workload, ...], Meta(min_length=1)]
    engine: EngineProfile
    learner: LearnerProfile
    push: PushProfile
    # From the end of an episode until its slot is free and its group counts: the way to the buffer's disk.
    deliver_s: Seconds = 0.0
    # How many times as long a worker computes for an episode while the learner computes. It is not the contention of replicas: the
    # one thread of a worker waits for a core whenever the threads of the learner and of the servers have them all.
    worker_contention: Annotated[float, Meta(ge=1)] = 1.0
    greedy: bool = False  # one member of each group is the baseline of the others
    measured: RunFigures | None = None

    def __post_init__(self) -> None:
        known(self.settings)

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The settings, with overrides, as a config; only its keys in `SIMULATED` mean something. Raises ConfigError."""
        known([override.partition("=")[0].strip() for override in overrides])
        given = (f"{key}={text_of(value)}" for key, value in self.settings.items())
        return load(BASE, [ANY_ADVANTAGE, *given, *overrides])

    def with_settings(self, config: Config) -> RunProfile:
        """The same times and lengths with the settings of another config."""
        return msgspec.structs.replace(self, settings=settings_of(config), measured=None)


def settings_of(config: Config) -> dict[str, bool | int | str]:
    """The values of the keys that a simulation reads."""
    found: dict[str, bool | int | str] = {}
    for key in SIMULATED:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if isinstance(value, dict):  # of `rollout.engine.replicas`: servers that others started
            value = len(value)
        assert isinstance(value, bool | int | str)
        found[key] = value
    return found


def known(keys: Sequence[str] | dict[str, bool | int | str]) -> None:
    """Raises ConfigError for a key that a simulation does not read."""
    for key in keys:
        if key not in SIMULATED:
            every = {field.key for field in describe(Config())}
            why = "has no part in a simulation" if key in every else "is no key of a config"
            raise ConfigError(f"{key}: {why}; allowed are {', '.join(SIMULATED)}")


def read_profile(path: Path) -> RunProfile:
    """Raises ConfigError where the file is not a profile."""
    try:
        data = path.read_bytes()
        format = msgspec.json.decode(data, type=_Format).format
        if format == FORMAT:
            return msgspec.json.decode(data, type=RunProfile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: settings: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a profile of a run: {error}") from None
    raise ConfigError(
        f"{path}: format: {format!r} is another release's, this one reads {FORMAT}; `slipstream simulate RUN` writes that "
        "of its run again, and docs/operation.md has the keys of one written by hand"
    )


def write_profile(profile: RunProfile, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        write_atomic(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}; --out names another folder") from None


def text_of(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
