"""How many threads each process may use for arithmetic on a CPU.

Two processes that spin on more threads than there are cores slow each other down a hundredfold; so threads that wait sleep
(`OMP_WAIT_POLICY=PASSIVE`), and everything together asks for about as many threads as there are cores.
"""

from __future__ import annotations

import os

from ..configs import Config

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def thread_environment(config: Config, kind: str) -> dict[str, str]:
    """Environment variables for a role of this kind. What the user has set already wins."""
    cores = os.cpu_count() or 1
    threads = 1
    if kind == "learner":
        threads = max(1, (cores - config.rollout.engine.replicas) // config.learner.backend.ranks)
    wanted = {"OMP_NUM_THREADS": str(threads), **PASSIVE, "TOKENIZERS_PARALLELISM": "false"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def wait_passively() -> None:
    """For this process itself; call before torch is imported."""
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
