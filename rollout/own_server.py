"""How one server of our own is started: its command line and its environment. For the kinds `transformers` and `fake`.

Invariants:
- A server listens where it is told and nowhere else.
- On CPU a server uses one thread: two servers of two threads each on two cores spin against each other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..configs.schema import Config, Fake, Transformers, parse_memory
from ..errors import ConfigError
from .server.options import Options

MODULE = "slipstream.rollout.server"


def command(config: Config, host: str, port: int, *, seed: int = 0) -> list[str]:
    """The command line of a server that listens on `port` of `host`.

    Replicas need different seeds: with equal ones they draw equal samples for members of one group. The replica that a scripted
    fault names is the seed's distance from the run's own.

    Raises:
        ConfigError: the kind is not one of ours, or `rollout.engine.memory` is neither a size nor, on a GPU, a share of its
            memory.
    """
    engine = config.rollout.engine
    if not isinstance(engine, Transformers | Fake):
        raise ConfigError(f"rollout.engine.kind: {type(engine).__name__.lower()!r} has a server of its own")
    options = Options(
        kind="fake" if isinstance(engine, Fake) else "transformers",
        model=config.model.path,
        host=host,
        port=port,
        dtype=config.model.dtype,
        seed=seed,
        memory=_memory(config),
        max_concurrent=engine.max_concurrent,
        max_tokens=config.agent.max_tokens,
        replica=seed - config.seed,
        faults=engine.faults if isinstance(engine, Fake) else (),
    )
    return [sys.executable, "-m", MODULE, *options.arguments()]


def environment(config: Config) -> dict[str, str]:
    """What the server needs in its environment besides the caller's own."""
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    if Path(config.model.path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def serves_on_cpu(config: Config) -> bool:
    """Whether a server here computes on CPU."""
    if isinstance(config.rollout.engine, Fake):
        return True
    import torch

    return not torch.cuda.is_available()


def _memory(config: Config) -> int | float:
    text = config.rollout.engine.memory
    memory = parse_memory(text)
    if isinstance(memory, float) and serves_on_cpu(config):
        raise ConfigError(f"rollout.engine.memory: {text!r} is not allowed here; write a size such as 128MiB")
    return memory
