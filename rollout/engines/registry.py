"""Command line, environment and health route of a replica's server, by `rollout.engine.kind`.

Invariants:
- Each kind has one module with its command line and environment; the supervisor uses this file only.
- No inference server is imported here.
- No process of a server imports modules from the working directory of the run.
"""

from __future__ import annotations

from ...configs.engines import Fake, OptionServers, Servers, Sglang, Transformers, Vllm
from ...configs.schema import Config
from .access import ServerFiles
from .launch_common import ServerNode, node_environment
from .options import check_by_parser
from .server import launch as own_server
from .sglang import launch as sglang_server
from .vllm import launch as vllm_server

LOOPBACK = "127.0.0.1"  # the address of a server that only this host uses
GPU_NOISE = 0.02
"""Nats by which vLLM's float32 may differ on a GPU: up to 0.009 were seen there (TF32), 3e-6 on a CPU."""

LAUNCHES = {Vllm: vllm_server, Sglang: sglang_server, Transformers: own_server, Fake: own_server}


def command(
    config: Config,
    host: str,
    port: int,
    *,
    seed: int,
    files: ServerFiles | None = None,
    node: ServerNode | None = None,
) -> list[str]:
    """The command line of a server that listens on `port` of `host`. Replicas need different seeds: with equal ones they sample the
    same tokens for the members of a group. With `files` only who has a token of the run may use it. `node` is for a server that
    spans hosts: all its processes have the same seed, and those of ranks above 0 do not listen. Raises ConfigError: the kind is
    not installed, or does not support this config."""
    if node is not None:  # `configs.engine_checks` refuses other kinds
        return vllm_server.command(config, host, port, seed=seed, files=files, node=node)
    return LAUNCHES[type(config.rollout.engine)].command(config, host, port, seed=seed, files=files)


def environment(config: Config, host: str = "") -> dict[str, str]:
    """Environment variables that the server needs in addition to the caller's. `host` is this host's address, for a server that
    spans several."""
    variables = LAUNCHES[type(config.rollout.engine)].environment(config)
    if host:
        variables |= node_environment(host)
    return variables | {"PYTHONSAFEPATH": "1"}  # `python -P`, also for the processes that a server starts


def serves_on_cpu(config: Config) -> bool:
    """Whether replicas compute on CPU, by the installed build of the kind. Raises ConfigError where it is not installed."""
    return LAUNCHES[type(config.rollout.engine)].serves_on_cpu(config)


def canary_tolerance(config: Config) -> float:
    """Nats by which the log-probs of the learner and of a replica that holds its weights may differ."""
    engine, tolerance = config.rollout.engine, config.weightsync.canary_tolerance
    inexact = isinstance(engine, Vllm) and not engine.external and config.model.dtype == "float32"
    return max(tolerance, GPU_NOISE) if inexact and not serves_on_cpu(config) else tolerance


def probe_path(config: Config) -> str:
    """The health route, also for a paused server: SGLang's `/health` then waits for 20 s and reports the server dead."""
    return "/model_info" if isinstance(config.rollout.engine, Sglang) else "/health"


def check_options(config: Config) -> None:
    """Raises ConfigError where the server's parser does not take `rollout.engine.options`. It takes seconds where there are any:
    the parser comes with the server's packages."""
    launch, engine = LAUNCHES[type(config.rollout.engine)], config.rollout.engine
    if isinstance(engine, OptionServers) and engine.passed_on:
        python = launch.command(config, LOOPBACK, 0)[0]
        owned = vllm_server.OWNED if isinstance(engine, Vllm) else sglang_server.OWNED
        check_by_parser(kind_of(engine), (python, "-P"), environment(config), engine.passed_on, owned)


def kind_of(engine: Servers) -> str:
    return str(type(engine).__struct_config__.tag)
