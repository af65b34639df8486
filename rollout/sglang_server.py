"""How one upstream SGLang server is started: its Python, its command line and its environment. We write no inference server.

Invariants:
- A server listens where it is told and nowhere else, and is quiet.
- It runs in a Python that has SGLang and this package: our receiver is loaded in every process of it, as its plugin.
- On CPU a server uses one thread per process, and finds stand-ins for what exists on a GPU only in `sglang_shim`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from ..configs.schema import Config, Sglang, parse_memory
from ..errors import ConfigError
from ..weightsync.sglang_plugin import GROUP, LOADER, NAME
from .client import STREAM_INTERVAL
from .http import SERVER_KEEPALIVE_S

ROOT = Path(__file__).resolve().parent.parent
"""The package, and in a checkout the folder that `make install-sglang` works in."""

SHIM = ROOT / "rollout" / "sglang_shim"

SPARE = 8
"""SGLang ends a completion up to this many tokens before the context it was given is full."""

HOST_SHARE = 0.9
"""Of a host's memory, what weights and KV cache may fill on CPU; `max-total-tokens` sets the real limit, below it."""

ISOLATED = ("-P",)
"""Nothing is imported from the working directory: metadata of an old build there would hide that our plugin is installed."""

PROBE_S = 60.0
"""Longest wait for the other Python to name its packages; it takes a tenth of a second."""

PROBE = f"""
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
plugin = any(e.name == {NAME!r} for e in m.entry_points(group={GROUP!r}))
print(json.dumps({{"sglang": version("sglang"), "torch": version("torch"), "plugin": plugin}}))
"""


class _Packages(msgspec.Struct, frozen=True):
    sglang: str | None
    torch: str | None
    plugin: bool


def command(config: Config, host: str, port: int, *, seed: int = 0) -> list[str]:
    """The command line of a server that listens on `port` of `host`.

    Replicas need different seeds: with equal ones they draw equal samples for members of one group.

    Raises:
        ConfigError: there is no SGLang, or `rollout.engine.memory` is not allowed here or holds less than one episode.
    """
    engine = _engine(config)
    python = _python(engine.python)
    cpu = _on_cpu(python)
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
        "--incremental-streaming-output",  # chunks hold what is new only
        "--enable-priority-scheduling",  # the canary of a push does not queue behind the episodes
        "--disable-priority-preemption",
    ]
    if config.rollout.partial == "keep_kv":
        switches.append(
            "--disable-overlap-schedule"
        )  # else a token is under way when weights change, and the span is one off
    if cpu:
        arguments |= {"device": "cpu", "attention-backend": "torch_native"}
        switches.append("--sleep-on-idle")
    return [python, *ISOLATED, "-m", "sglang.launch_server", *(f"--{k}={v}" for k, v in arguments.items()), *switches]


def environment(config: Config) -> dict[str, str]:
    """What the server needs in its environment besides the caller's own."""
    variables = {
        "SGLANG_PLUGINS": NAME,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would wait for a token, and while paused there is none
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the spare tokens are never computed
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
        "DO_NOT_TRACK": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if Path(config.model.path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if serves_on_cpu(config):
        path = os.environ.get("PYTHONPATH")
        variables |= {
            "PYTHONPATH": f"{SHIM}{os.pathsep}{path}" if path else str(SHIM),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if (ranks := _engine(config).tensor_parallel) > 1:
            cores = sorted(os.sched_getaffinity(0))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(ranks))
    return variables


def serves_on_cpu(config: Config) -> bool:
    """Whether the SGLang that a run would start has a torch for CPU; known without importing it.

    Raises:
        ConfigError: there is none.
    """
    return _on_cpu(_python(_engine(config).python))


def _engine(config: Config) -> Sglang:
    engine = config.rollout.engine
    if not isinstance(engine, Sglang):
        raise ConfigError("rollout.engine.kind: this is not sglang")
    return engine


def _python(named: str) -> str:
    """The Python that has SGLang."""
    if named:
        return named
    if importlib.util.find_spec("sglang"):
        return sys.executable
    ours = ROOT / ".venv-sglang" / "bin" / "python"
    if ours.exists():
        return str(ours)
    raise ConfigError(
        "rollout.engine.kind: sglang is not installed; run `make install-sglang`, or name a Python that has it in"
        " rollout.engine.python"
    )


def _on_cpu(python: str) -> bool:
    return "cpu" in (_packages(python).torch or "")


@functools.cache
def _packages(python: str) -> _Packages:
    """What `python` has. Raises ConfigError where a server could not start."""
    try:
        told = subprocess.run([python, *ISOLATED, "-c", PROBE], capture_output=True, timeout=PROBE_S, check=True)
        packages = msgspec.json.decode(told.stdout, type=_Packages)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise ConfigError(f"rollout.engine.python: {python!r} is not a Python that runs: {error}") from error
    if not packages.sglang or not packages.torch:
        raise ConfigError(
            f"rollout.engine.python: {python!r} has no sglang; run `make install-sglang`, or name another"
        )
    if not packages.plugin:
        raise ConfigError(
            f"rollout.engine.python: {python!r} has sglang but not slipstream, which takes the weights in;"
            f" run `{python} -m pip install --no-deps {ROOT}`"
        )
    return packages


def _memory(config: Config, cpu: bool) -> dict[str, object]:
    text = config.rollout.engine.memory
    memory = parse_memory(text)
    if isinstance(memory, float):
        if cpu:
            raise ConfigError(f"rollout.engine.memory: {text!r} is not allowed here; write a size such as 128MiB")
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
    """Bytes that the keys and values of one token take in each rank."""
    shape = _config_json(config.model.path)
    shape = shape.text_config or shape
    kv_heads = shape.num_key_value_heads or shape.num_attention_heads
    head_dim = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    heads = max(kv_heads // _engine(config).tensor_parallel, 1)  # fewer heads than ranks are held several times
    if not shape.num_hidden_layers or not head_dim:
        raise ConfigError(
            f"model.path: the config of {config.model.path!r} does not say how many layers and heads there are"
        )
    return 2 * shape.num_hidden_layers * heads * head_dim * {"float32": 4, "bfloat16": 2}[config.model.dtype]


class _Shape(msgspec.Struct, frozen=True):
    num_hidden_layers: int = 0
    num_attention_heads: int = 1
    num_key_value_heads: int | None = None
    hidden_size: int = 0
    head_dim: int | None = None
    text_config: _Shape | None = None


def _config_json(path: str) -> _Shape:
    file = Path(path) / "config.json"
    try:
        if not Path(path).is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, "config.json"))
        shape = msgspec.json.decode(file.read_bytes(), type=_Shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} has no config that can be read: {error}") from error
    return shape
