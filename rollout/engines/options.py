"""`rollout.engine.options`: the arguments of a server that are its own, passed on as they are.

Invariants:
- An argument that Slipstream sets itself is refused with the key that sets it, also under another of its names; so is one with
  which a run could not work.
- A name or a value that the server's own parser does not take is refused before anything starts: the parser says so, in the Python
  that the server runs in.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...configs.engines import ENGINE_OPTIONS as KEY
from ...configs.engines import NODES, QUANTIZATION, SPLIT
from ...errors import ConfigError

SCRIPT = Path(__file__).with_name("parse_options.py")
PARSE_S = 180.0  # longest wait for a parser: it imports the whole server, the first time from a cold disk


class ParserAnswer(msgspec.Struct, frozen=True):
    """What a server's parser says of options."""

    unknown: dict[str, str] = {}  # options that it does not have -> the most similar one that it has, or nothing
    owned: dict[str, str] = {}  # options that are another name of an owned argument -> that argument
    error: str = ""  # why it does not take their values


def arguments_of(options: Mapping[str, Any]) -> list[str]:
    """The words of a command line: `{max_num_batched_tokens: 4096, async_scheduling: false, compilation_config: {level: 0}}` is
    `--max-num-batched-tokens=4096 --no-async-scheduling --compilation-config={"level":0}`."""
    words = list[str]()
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                words.append(f"--{flag}" if value else f"--no-{flag}")
            case list():
                words += [f"--{flag}", *map(str, value)]
            case dict():
                words.append(f"--{flag}={json.dumps(value)}")
            case _:
                words.append(f"--{flag}={value}")
    return words


def owned_arguments(by_key: Mapping[str, str], *, needed: Sequence[str], unsupported: Sequence[str]) -> dict[str, str]:
    """Arguments that are refused, and why: those that a key of ours sets, those that Slipstream `needed` as it sets them, and those
    with which weights would not reach all of a replica. What all servers have is among them."""
    keys = {"host": "launch.kind", "port": "launch.ports.first", "dtype": "model.dtype", "seed": "seed", **by_key}
    keys |= {name.replace("_", "-"): f"{KEY}.{name}" for name in (SPLIT, NODES, QUANTIZATION)}
    private = ("served-model-name", "api-key", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs")
    return {
        **{name: f"{key} sets this argument" for name, key in keys.items()},
        **dict.fromkeys((*private, *needed), "Slipstream sets this argument, and relies on it"),
        **dict.fromkeys(
            unsupported, "a replica is one server whose ranks all take part in a push of weights; add replicas"
        ),
    }


def refuse_owned(options: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    """Raises ConfigError for an option that `owned` has: an argument, as the server's command line spells it -> why it is
    refused."""
    for name in options:
        if why := owned.get(name.replace("_", "-")):
            raise ConfigError(f"{KEY}.{name}: {why}")


def check_by_parser(
    kind: str,
    python: Sequence[str],
    environment: Mapping[str, str],
    options: Mapping[str, Any],
    owned: Mapping[str, str],
) -> None:
    """Raises ConfigError for an option that the parser of `kind`, in the interpreter `python`, does not take."""
    asked = json.dumps({"arguments": arguments_of(options), "options": list(options), "owned": list(owned)})
    try:
        done = subprocess.run(
            [*python, str(SCRIPT), kind, asked],
            capture_output=True,
            text=True,
            timeout=PARSE_S,
            env={**os.environ, **environment},
            check=True,
        )
        answer = msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=ParserAnswer)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{KEY}: the parser of {kind} cannot be asked: {said.strip().rpartition(chr(10))[2]}"
        ) from error
    for name, near in answer.unknown.items():
        hint = f"; did you mean {near.replace('-', '_')}?" if near else ""
        raise ConfigError(f"{KEY}.{name}: {kind} has no such argument{hint}")
    for name, argument in answer.owned.items():
        raise ConfigError(f"{KEY}.{name}: {owned[argument]}")
    if answer.error:
        raise ConfigError(f"{KEY}: {kind} does not take this: {answer.error}")
