"""Command line and environment of Slipstream's own server, for the kinds `transformers` and `fake`.

Invariants:
- A server listens at the given host and port only, and uses one CPU thread.
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from ....common import accelerator
from ....configs.backends import REPLAY
from ....configs.engines import Fake, Transformers
from ....configs.schema import Config
from ....errors import ConfigError
from ..access import ServerFiles
from ..launch_common import CPU_THREADS, hub_environment, kv_memory

MODULE = "slipstream.rollout.engines.server"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server; its only argument, as JSON. `model` is a folder or hub name, `memory` bytes of KV cache or a share of the GPU's
    memory in (0, 1), `max_tokens` of a prompt and its completion together, `replica` which one this is, for faults. `folder` holds
    the tokens of one that only this run may use, and with `tls` its certificate."""

    kind: Literal["transformers", "fake"]
    model: str
    host: str
    port: int
    dtype: Literal["float32", "bfloat16"]
    seed: int
    memory: int | float
    max_concurrent: int
    max_tokens: int
    replica: int = 0
    folder: str = ""
    tls: bool = False
    routed_experts: bool = False  # whether it records which experts its routers choose


def command(config: Config, host: str, port: int, *, seed: int = 0, files: ServerFiles | None = None) -> list[str]:
    """See `registry.command`. A scripted fault's replica is the seed minus the run's seed."""
    engine = config.rollout.engine
    if not isinstance(engine, Transformers | Fake):
        raise ConfigError(f"rollout.engine.kind: {type(engine).__name__.lower()!r} has a server of its own")
    if isinstance(engine, Fake):
        from ..fake.faults import read_script  # takes seconds
        from ..fake.law import read_law

        read_script()  # a wrong one is refused before a server starts
        read_law()  # likewise
    options = Options(
        kind="fake" if isinstance(engine, Fake) else "transformers",
        model=config.model.path,
        host=host,
        port=port,
        dtype=config.model.dtype,
        seed=seed,
        memory=kv_memory(engine.memory, serves_on_cpu(config)),
        max_concurrent=engine.max_concurrent,
        max_tokens=config.agent.max_tokens,
        replica=seed - config.seed,
        folder=files.folder if files else "",
        tls=files.tls if files else False,
        routed_experts=REPLAY in config.learner.backend.options,
    )
    return [sys.executable, "-m", MODULE, msgspec.json.encode(options).decode()]


def environment(config: Config) -> dict[str, str]:
    return CPU_THREADS | {"TOKENIZERS_PARALLELISM": "false"} | hub_environment(config.model.path)


def serves_on_cpu(config: Config) -> bool:
    if isinstance(config.rollout.engine, Fake):
        return True
    return accelerator.current() is None
