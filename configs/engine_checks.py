"""Combinations of the config keys of the inference servers that are impossible, see `checks`: their own options, and servers that
others started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import ConfigError
from .engines import ENGINE_OPTIONS, NODES, QUANTIZATION, SPLIT, OptionServers, Servers, Sglang, Vllm, is_quantized
from .schema import Config
from .sft import SftConfig

FP8 = f"{ENGINE_OPTIONS}.{QUANTIZATION}=fp8"  # as messages call it
FP8_NOISE = 0.1  # nats: the least tolerance of the canary with it, since what weights lose in fp8 moves log-probs
SERVERS = (
    "rollout.engine.replicas"  # the key that says how many servers a run starts, or names servers that others started
)
URL = re.compile(r"https://([\w.-]+):(\d{1,5})")  # of a server that others started: its host and its port
_OPTION = re.compile(r"[a-z][a-z0-9_]*")


def nodes_of(engine: Servers) -> int:
    """Hosts that one replica is spread over, each with a process of its server."""
    return engine.options.get(NODES, 1) if isinstance(engine, OptionServers) else 1


def option_problems(config: Config) -> Iterator[str]:
    """Options of the inference server, whose own parser knows the rest."""
    engine = config.rollout.engine
    if not isinstance(engine, OptionServers):
        return
    for name, value in engine.options.items():
        if not _OPTION.fullmatch(name):
            yield (
                f"{ENGINE_OPTIONS}.{name}: a name has small letters, digits and underscores, as max_num_batched_tokens for "
                "--max-num-batched-tokens"
            )
        if value is None:
            yield f"{ENGINE_OPTIONS}.{name}: null is no value; leave it out, or write false for a switch that is on"
    if (ranks := engine.options.get(SPLIT, 1)) is True or not isinstance(ranks, int) or ranks < 1:
        yield f"{ENGINE_OPTIONS}.{SPLIT}={ranks!r}: allowed are integers from 1 on"
    elif (nodes := engine.options.get(NODES, 1)) is True or not isinstance(nodes, int) or nodes < 1 or ranks % nodes:
        allowed = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield f"{ENGINE_OPTIONS}.{NODES}={nodes!r} with {SPLIT}={ranks}: each host has as many ranks; allowed are {allowed}"
    elif nodes > 1:
        yield from _spanning_problems(config, engine, f"{ENGINE_OPTIONS}.{NODES}={nodes}")


def _spanning_problems(config: Config, engine: OptionServers, said: str) -> Iterator[str]:
    """Replicas that span several hosts."""
    if isinstance(engine, Sglang):
        yield f"{said}: only vLLM's servers span hosts here; allowed is rollout.engine.kind=vllm, or {NODES}=1"
    executor = engine.options.get("distributed_executor_backend", "mp")
    if executor != "mp":
        yield (
            f"{ENGINE_OPTIONS}.distributed_executor_backend={executor!r} with {NODES}: Slipstream starts the process of each host; "
            "allowed is mp"
        )
    if config.launch.colocated:
        yield f"{said} with launch.kind=colocated: servers share one host's devices with the learner there; allowed is 1"
    if engine.external:
        yield f"{said} with {SERVERS} that names servers of others: `slipstream serve` is one process; allowed is 1"
    if config.evaluation.every:
        yield (
            f"{said} with evaluation.every={config.evaluation.every}: the server of such evaluations has one host; allowed is "
            "evaluation.every=0"
        )


def quantization_problems(config: Config) -> Iterator[str]:
    """What servers of weights in fp8 do not go with. Which models they are, and on which devices, preflight checks."""
    engine, tolerance = config.rollout.engine, config.weightsync.canary_tolerance
    if not is_quantized(engine) or isinstance(config, SftConfig):  # SFT starts no servers
        return
    if (chosen := engine.options[QUANTIZATION]) != "fp8":
        yield f"{ENGINE_OPTIONS}.{QUANTIZATION}: {chosen!r} is not how weights are pushed; allowed is fp8, or leave it out"
    if isinstance(engine, Sglang):
        yield f"{FP8} with rollout.engine.kind=sglang: pushes to it are in model.dtype only; allowed are vllm and transformers"
    if isinstance(engine, Vllm) and config.model.dtype != "bfloat16":
        yield f"{FP8} with model.dtype={config.model.dtype}: vLLM's kernels for fp8 give bfloat16; allowed is bfloat16"
    if rank := config.learner.backend.lora_rank:
        yield (
            f"{FP8} with learner.backend.lora_rank={rank}: pushes of adapters are added to weights in model.dtype; leave one of "
            "the two out"
        )
    if tolerance < FP8_NOISE:
        yield (
            f"weightsync.canary_tolerance={tolerance:g} with {FP8} would refuse pushes that arrived: what weights lose in fp8 "
            f"moves log-probs by more; allowed is {FP8_NOISE:g} and more, 0.5 is usual"
        )


def external_problems(config: Config) -> Iterator[str]:
    """Servers that others started."""
    replicas = config.rollout.engine.replicas
    if isinstance(replicas, int):
        return
    if not replicas:
        yield f"{SERVERS}: names no server; allowed are {{https://HOST:PORT: FILE}} for each, and a number of servers to start"
    for url, file in replicas.items():
        if not is_server_url(url):
            yield f"{SERVERS}: {url!r} is not of the form https://HOST:PORT"
        if not file.strip():
            yield f"{SERVERS}: {url} has no file with its keys; name the one that `slipstream serve` made"
    if config.launch.colocated:
        yield (
            f"launch.kind=colocated: servers sleep there on the devices of the learner, and {SERVERS} names servers that others "
            "started; allowed are local, ray and ray_cluster, or a number of servers to start"
        )
    if isinstance(config.rollout.engine, Sglang) and config.rollout.partial == "keep_kv":
        yield (
            f"rollout.partial=keep_kv with {SERVERS} that names SGLang servers of others: what an earlier run left in their caches "
            "would pass for this one's; allowed are recompute and abort_resume"
        )
    if config.weightsync.transport == "shared":
        yield (
            f"weightsync.transport=shared is one copy in the learner's memory, and {SERVERS} names servers that others started, "
            "which do not see it; allowed there are broadcast, and disk and delta where they see run.dir"
        )


def is_server_url(url: str) -> bool:
    """Whether `url` may be that of a server that others start."""
    found = URL.fullmatch(url)
    return found is not None and 0 < int(found[2]) < 1 << 16


def require_own_servers(config: Config, command: str) -> None:
    """Raises ConfigError for a config of servers that others started, where `command` starts its own: theirs serve what a run has
    pushed to them last."""
    if config.rollout.engine.external:
        raise ConfigError(
            f"{SERVERS}: it names servers that others started, and `slipstream {command}` starts its own; allowed here is a number "
            f"of servers, for example {SERVERS}=1"
        )
