"""Servers that a run uses and does not start: `rollout.engine.replicas` names their URLs and the files with their keys.

    slipstream serve CONFIG ──writes──> ServerDescription ──GET, with the token for control──> run: is it what this run needs?

Invariants:
- A server is one of the fleet only while it says that it serves what this run needs. One that says something else before the run
  starts ends the run's start with one line.
- Before the start one server that answers is enough. The others join when they answer (`supervisor/external.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .. import __version__
from ..common.network import address_towards
from ..configs import Config
from ..configs.backends import REPLAY
from ..configs.engine_checks import SERVERS
from ..configs.engines import ENGINE_OPTIONS, QUANTIZATION, SPLIT
from ..errors import ConfigError, DeadlineExceeded, EngineError
from ..rollout.engines.access import DESCRIPTION_PATH
from ..rollout.engines.http_client import HttpClient
from ..rollout.engines.server_keys import ServerKeys, read_all_keys
from .resources import ranks_of

ASK_S = 10.0  # longest wait for a server to say what it serves: it reads a file
# What the weights of a policy must have in common with those of the model that a server has loaded, by its config.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "tie_word_embeddings",
)
Setting = bool | int | str


class ServerDescription(msgspec.Struct, frozen=True):
    """What a server was started for, or what a run needs."""

    instance: str  # another one after each start
    same: dict[str, Setting]  # what both must have in common
    least: dict[str, int]  # of which a server may have more than a run needs


def describe_server(config: Config, instance: str = "") -> ServerDescription:
    """What a server for `config` serves. Raises ConfigError: `model.path` has no model."""
    from ..learner.model import read_config

    engine, shape = config.rollout.engine, read_config(config.model.path)
    text: Any = shape.get_text_config(decoder=True)
    sizes = {name: getattr(text, name, None) for name in SIZES}
    same: dict[str, Setting] = {
        "Slipstream": __version__,
        "rollout.engine.kind": str(engine.__struct_config__.tag),
        f"{ENGINE_OPTIONS}.{SPLIT}": ranks_of(engine),
        "model.dtype": config.model.dtype,
        f"{ENGINE_OPTIONS}.{QUANTIZATION}": engine.options.get(QUANTIZATION, "none"),
        "model_type of model.path": shape.model_type,
        **{f"{name} of model.path": size for name, size in sizes.items() if isinstance(size, int)},
        f"learner.backend.options=[{REPLAY}]": REPLAY in config.learner.backend.options,
    }
    least = {"agent.max_tokens": config.agent.max_tokens, "rollout.engine.max_concurrent": engine.max_concurrent}
    return ServerDescription(instance, same, least)


def misfit(url: str, needed: ServerDescription, found: ServerDescription) -> str:
    """Why the server at `url`, which serves `found`, is not what a run needs; empty where it is."""
    for name in needed.same | found.same:
        if (wanted := needed.same.get(name)) != (served := found.same.get(name)):
            return _line(url, name, served, f"this run has {_text(wanted)}")
    for name, least in needed.least.items():
        if (served := found.least.get(name, 0)) < least:
            return _line(url, name, served, f"this run needs {least} or more")
    return ""


def _line(url: str, name: str, served: Setting | None, wants: str) -> str:
    advice = "start it by `slipstream serve` with the config of this run"
    return f"{SERVERS}: {url} was started with {name} = {_text(served)}, {wants}; {advice}"


def _text(value: Setting | None) -> str:
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


async def ask(client: HttpClient) -> ServerDescription:
    """What the server of `client` serves. Raises EngineError, DeadlineExceeded."""
    return client.decode(await client.call("GET", DESCRIPTION_PATH), ServerDescription)


async def _ask_all(servers: Mapping[str, ServerKeys]) -> list[ServerDescription | EngineError | DeadlineExceeded]:
    async def one(url: str, keys: ServerKeys) -> ServerDescription | EngineError | DeadlineExceeded:
        client = HttpClient("a server", url, ASK_S, keys.access)
        try:
            return await ask(client)
        except (EngineError, DeadlineExceeded) as error:
            return error
        finally:
            await client.close()

    return await asyncio.gather(*(one(url, keys) for url, keys in servers.items()))


def check_servers(config: Config) -> str:
    """One line about the servers. Raises ConfigError: none answers, or one that does is not what the run needs."""
    servers, needed = read_all_keys(SERVERS, config.rollout.engine.external), describe_server(config)
    answers = dict(zip(servers, asyncio.run(_ask_all(servers)), strict=True))
    errors = {url: one for url, one in answers.items() if not isinstance(one, ServerDescription)}
    instances = dict[str, str]()
    for url, one in answers.items():
        if not isinstance(one, ServerDescription):
            continue
        if why := misfit(url, needed, one):
            raise ConfigError(why)
        if (other := instances.setdefault(one.instance, url)) != url:
            raise ConfigError(f"{SERVERS}: {other} and {url} are the same server; name it once")
    if len(errors) == len(servers):
        first = next(iter(errors.values()))
        raise ConfigError(
            f"{SERVERS}: none of its servers answers as one that `slipstream serve` started with this file of keys: {first}"
        )
    silent = f"; not there yet: {', '.join(errors)} ({next(iter(errors.values()))})" if errors else ""
    return f"started by others: {', '.join(instances.values())}{silent}"


def push_address(config: Config, host: str) -> str:
    """The address of this host at which replicas reach the learner: `host`, or where others started them the one that leads to
    them, beyond this host where one is there."""
    found = list[str]()
    for url in map(urlsplit, config.rollout.engine.external):
        with contextlib.suppress(OSError):  # a name that is unknown now: that server cannot be pushed to
            found.append(address_towards(url.hostname or "", url.port or 0))
    away = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return next(iter([*away, *found]), host)
