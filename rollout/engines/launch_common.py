"""What the launch of every kind of server shares: KV cache memory, offline models, threads on CPU, hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ...common.network import collective_interface
from ...configs.schema import parse_memory
from ...errors import ConfigError

CPU_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}  # one thread a process: more spin against each other


class ServerNode(NamedTuple):
    """One of the hosts of a server that spans several."""

    rank: int  # 0 for the one that answers requests
    host: str  # of rank 0, where all meet
    port: int


def node_environment(host: str) -> dict[str, str]:
    """Environment variables of one of the hosts of a server that spans several, by the host's address: vLLM would guess it,
    and gloo would listen on the one of the host's name, often of loopback. Interfaces that the user has chosen win."""
    interfaces = {name: os.environ.get(name, value) for name, value in collective_interface(host).items()}
    return {"VLLM_HOST_IP": host, **interfaces}


def hub_environment(path: str) -> dict[str, str]:
    """No requests to the hub for a model that is a folder."""
    return {"HF_HUB_OFFLINE": "1"} if Path(path).is_dir() else {}


def refuse_sleep_on_cpu(server: str, *, cpu: bool) -> None:
    """Raises ConfigError where a server whose sleep frees the memory of GPUs would run on CPU."""
    if cpu:
        raise ConfigError(
            f"launch.kind=colocated: {server} sleeps on GPUs only, on CPU it frees nothing; allowed here is "
            "rollout.engine.kind=transformers, or launch.kind=local"
        )


def kv_memory(text: str, on_cpu: bool) -> int | float:
    """The KV cache of a server, from `rollout.engine.memory`: bytes, or a share of the GPU's memory. Raises ConfigError: it is
    neither, or a share on CPU."""
    memory = parse_memory(text)
    if isinstance(memory, float) and on_cpu:
        raise ConfigError(f"rollout.engine.memory: {text!r} is not allowed here; write a size such as 128MiB")
    return memory
