"""How the server of a replica is started and asked how it is, whichever kind `rollout.engine.kind` names.

Invariants:
- Each kind has one module that knows its command line and environment; who starts a replica knows this file only.
- Nothing here imports an inference server.
- No process of a server imports modules from the folder that the run was started in.
"""

from __future__ import annotations

from ..configs.schema import Config, Servers, Sglang, Vllm
from . import own_server, sglang_server, vllm_server

LOOPBACK = "127.0.0.1"
"""Where a server listens that only this host asks."""


def command(config: Config, host: str, port: int, *, seed: int) -> list[str]:
    """The command line of a server that listens on `port` of `host`.

    Replicas need different seeds: with equal ones they draw equal samples for members of one group.

    Raises:
        ConfigError: the kind is not installed, or would refuse this config.
    """
    match config.rollout.engine:
        case Vllm():
            return vllm_server.command(config, host, port, seed=seed)
        case Sglang():
            return sglang_server.command(config, host, port, seed=seed)
        case _:
            return own_server.command(config, host, port, seed=seed)


def environment(config: Config) -> dict[str, str]:
    """What the server needs in its environment besides the caller's own."""
    match config.rollout.engine:
        case Vllm():
            variables = vllm_server.environment(config)
        case Sglang():
            variables = sglang_server.environment(config)
        case _:
            variables = own_server.environment(config)
    return variables | {"PYTHONSAFEPATH": "1"}  # what `python -P` does, for all the processes that a server starts, too


def serves_on_cpu(config: Config) -> bool:
    """Whether replicas compute on CPU, as the kind is installed here. Raises ConfigError where it is not."""
    match config.rollout.engine:
        case Vllm():
            return vllm_server.serves_on_cpu()
        case Sglang():
            return sglang_server.serves_on_cpu(config)
        case _:
            return own_server.serves_on_cpu(config)


def probe_path(config: Config) -> str:
    """What to GET to learn whether a server is well, also while it is paused: SGLang's `/health` then waits for 20 s and takes
    itself for dead."""
    return "/model_info" if isinstance(config.rollout.engine, Sglang) else "/health"


def kind_of(engine: Servers) -> str:
    """What `rollout.engine.kind` says."""
    return str(type(engine).__struct_config__.tag)
