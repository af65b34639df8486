"""Python, command line and environment of one upstream SGLang server.

Invariants:
- A server listens at the given host and port only, and logs warnings only.
- It runs in a Python that has SGLang and this package, which every process of the server loads as a plugin.
- On CPU a server uses one thread per process; `shim/` replaces modules that exist for GPUs only.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec

from ....common.accelerator import CUDA, NPU, XPU
from ....common.kv_cache import kv_bytes_per_token
from ....common.modelscope import local_folder
from ....configs.engines import Sglang
from ....configs.schema import Config
from ....errors import ConfigError
from ..access import ServerFiles
from ..base import STREAM_INTERVAL
from ..http_client import SERVER_KEEPALIVE_S
from ..launch_common import CPU_THREADS, hub_environment, kv_memory, refuse_sleep_on_cpu
from ..options import arguments_of, owned_arguments, refuse_owned
from .plugin import GROUP, LOADER, NAME

ROOT = Path(__file__).resolve().parents[3]  # the package; in a checkout `.venv-sglang` lies there
SHIM = Path(__file__).resolve().parent / "shim"

SPARE = 8  # SGLang ends a completion up to this many tokens before the context it was given is full
HOST_SHARE = 0.9  # of a host's memory for weights and KV cache on CPU; `max-total-tokens` is the real, lower limit
ISOLATED = ("-P",)  # no imports from the working directory: metadata of an old build there would hide the plugin
OWNED = owned_arguments(
    {
        "model-path": "model.path",
        "context-length": "agent.max_tokens",
        "random-seed": "seed",
        "max-running-requests": "rollout.engine.max_concurrent",
        "mem-fraction-static": "rollout.engine.memory",
        "max-total-tokens": "rollout.engine.memory",
        "enable-metrics": "launch.ports.metrics",
        "enable-memory-saver": "launch.kind",
    },
    needed=(
        "stream-interval",
        "default-priority-value",
        "custom-weight-loader",
        "log-level",
        "skip-tokenizer-init",
        "incremental-streaming-output",
        "enable-priority-scheduling",
        "disable-priority-preemption",
        "config",
        "admin-api-key",
        "node-rank",
        "dist-init-addr",
    ),
    unsupported=("pipeline-parallel-size", "data-parallel-size"),
)
PYTHON = "SLIPSTREAM_SGLANG_PYTHON"  # environment variable that names the Python that has SGLang
PROBE_S = 60.0  # longest wait for the other Python to list its packages; it takes 0.1 s
PROBE = f"""
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
plugin = any(e.name == {NAME!r} for e in m.entry_points(group={GROUP!r}))
versions = {{name.replace("-", "_"): version(name) for name in ("sglang", "torch", "torch-npu")}}
print(json.dumps(versions | {{"plugin": plugin}}))
"""


class _Packages(msgspec.Struct, frozen=True):
    sglang: str | None
    torch: str | None
    torch_npu: str | None
    plugin: bool


def command(config: Config, host: str, port: int, *, seed: int = 0, files: ServerFiles | None = None) -> list[str]:
    """See `registry.command`. The KV cache must hold an episode of `agent.max_tokens`. Options of the config come last: they
    replace what Slipstream has chosen for CPUs."""
    engine = _engine(config)
    refuse_owned(engine.passed_on, OWNED)
    python = _python()
    device = _device(python)
    cpu = device == "cpu"
    arguments = {
        "model-path": config.model.path,
        "served-model-name": "policy",
        "host": host,
        "port": port,
        "dtype": config.model.dtype,
        "random-seed": seed,
        "context-length": config.agent.max_tokens + SPARE,
        "max-running-requests": engine.max_concurrent,
        "tp-size": engine.tensor_parallel,
        "stream-interval": STREAM_INTERVAL,
        "default-priority-value": 0,
        "custom-weight-loader": LOADER,
        "log-level": "warning",
        **_memory(config, cpu),
    }
    switches = [
        "--skip-tokenizer-init",  # token ids in, token ids out
        "--incremental-streaming-output",  # chunks hold new tokens only
        "--enable-priority-scheduling",  # the canary of a push does not queue behind the episodes
        "--disable-priority-preemption",
    ]
    if config.rollout.partial == "keep_kv":
        # Else a token is under way when weights change, and the span is one off.
        switches.append("--disable-overlap-schedule")
    if "metrics" in config.launch.ports:
        switches.append("--enable-metrics")  # without it SGLang has no /metrics
    if device != CUDA.type:
        arguments["device"] = device
    if config.launch.colocated:
        refuse_sleep_on_cpu("SGLang", cpu=cpu)
        switches.append("--enable-memory-saver")
    if cpu:
        arguments["attention-backend"] = "torch_native"
        switches.append("--sleep-on-idle")
    if files is not None:
        switches += [
            "--config",
            files.options,
        ]  # its keys, also for its own requests to itself; the plugin guards all paths
    if files is not None and files.tls:
        arguments |= {"ssl-certfile": files.certificate, "ssl-keyfile": files.key}
    named = (f"--{name}={value}" for name, value in arguments.items())
    options = arguments_of(engine.passed_on)
    return [python, *ISOLATED, "-m", "sglang.launch_server", *named, *switches, *options]


def environment(config: Config) -> dict[str, str]:
    variables = (
        {
            "SGLANG_PLUGINS": NAME,
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would wait for a token, and while paused there is none
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the `SPARE` tokens are never computed
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
            "DO_NOT_TRACK": "1",
            "PYTHONWARNINGS": "ignore",
        }
        | hub_environment(config.model.path)
    )
    if serves_on_cpu(config):
        path = os.environ.get("PYTHONPATH")
        variables |= CPU_THREADS | {
            "PYTHONPATH": f"{SHIM}{os.pathsep}{path}" if path else str(SHIM),
            "SGLANG_USE_CPU_ENGINE": "1",
        }
        if "enable_torch_compile" not in _engine(config).passed_on:
            variables["TORCH_COMPILE_DISABLE"] = (
                "1"  # ranks of tensor parallelism would compile a mask for half a minute
            )
        if (ranks := _engine(config).tensor_parallel) > 1:
            cores = sorted(os.sched_getaffinity(0))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(ranks))
    return variables


def serves_on_cpu(_: Config) -> bool:
    """Whether the SGLang that a run would start has a torch for CPU, known without importing it. Raises ConfigError where there is
    none."""
    return _device(_python()) == "cpu"


def _engine(config: Config) -> Sglang:
    engine = config.rollout.engine
    if not isinstance(engine, Sglang):
        raise ConfigError("rollout.engine.kind: this is not sglang")
    return engine


def _python() -> str:
    if named := os.environ.get(PYTHON):
        return named
    if importlib.util.find_spec("sglang"):
        return sys.executable
    installed = ROOT / ".venv-sglang" / "bin" / "python"
    if installed.exists():
        return str(installed)
    raise ConfigError(
        "rollout.engine.kind: sglang is not installed; run `make install-sglang`, or name a Python that has it in"
        f" the environment variable {PYTHON}"
    )


@functools.cache
def _device(python: str) -> str:
    """The type of device that the torch of `python` is for; `cuda` is ROCm, too. Raises ConfigError where a server could not
    start."""
    try:
        listed = subprocess.run([python, *ISOLATED, "-c", PROBE], capture_output=True, timeout=PROBE_S, check=True)
        packages = msgspec.json.decode(listed.stdout, type=_Packages)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise ConfigError(f"{PYTHON}: {python!r} is not a Python that runs: {error}") from error
    if not packages.sglang or not packages.torch:
        raise ConfigError(f"{PYTHON}: {python!r} has no sglang; run `make install-sglang`, or name another")
    if not packages.plugin:
        raise ConfigError(
            f"{PYTHON}: {python!r} has sglang but not slipstream, which receives the weights;"
            f" run `{python} -m pip install --no-deps {ROOT}`"
        )
    if packages.torch_npu:  # which comes beside the build of torch for CPU
        return NPU.type
    return next((type_ for type_ in ("cpu", XPU.type) if type_ in packages.torch), CUDA.type)


def _memory(config: Config, cpu: bool) -> dict[str, object]:
    text = config.rollout.engine.memory
    memory = kv_memory(text, cpu)
    if isinstance(memory, float):
        return {"mem-fraction-static": memory}
    tokens = memory // _kv_bytes(config)
    if tokens < config.agent.max_tokens + SPARE:
        raise ConfigError(
            f"rollout.engine.memory: {text} holds {tokens} tokens of this model, but one episode may have agent.max_tokens ="
            f" {config.agent.max_tokens}"
        )
    limits: dict[str, object] = {"max-total-tokens": tokens}
    return limits | {"mem-fraction-static": HOST_SHARE} if cpu else limits


def _kv_bytes(config: Config) -> int:
    """Bytes of one token's keys and values in each rank, from the model's `config.json`."""
    path = config.model.path
    try:
        folder = Path(local_folder(path, "model.path", weights=False))
        file = folder / "config.json"
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "config.json"))
        shape = json.loads(file.read_bytes(), object_hook=lambda fields: SimpleNamespace(**fields))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} has no readable config: {error}") from error
    item_bytes = {"float32": 4, "bfloat16": 2}[config.model.dtype]
    try:
        return kv_bytes_per_token(
            getattr(shape, "text_config", None) or shape, item_bytes, _engine(config).tensor_parallel
        )
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"model.path: the config of {path!r} does not say how many layers and heads there are: {error}"
        ) from error
