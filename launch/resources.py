"""Who gets which GPU, how many threads, and how weights travel between them.

Invariants:
- Processes that wait must not spin (`OMP_WAIT_POLICY=PASSIVE`), and together ask for about as many threads as there are cores:
  on two cores, two processes of two spinning threads slow each other down a hundredfold.
- Each rank of the learner, or of a model placed beside it, sees one GPU and each replica as many of its own as it has ranks, when
  there are enough; NCCL carries the weights. A replica that comes later gets GPUs that nobody else has, or does not come.
- With fewer they share, and gloo carries the weights: NCCL does not connect two processes on one GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from ..configs import Config
from ..configs.reward import ModelReward
from ..configs.schema import NOBODY_BESIDE, Servers, Sglang, Vllm
from ..errors import ConfigError

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}

BESIDE = tuple(NOBODY_BESIDE)
"""Kinds of roles that hold a model beside the policy, where it is placed."""

RANKED = ("learner", "sft", *BESIDE)
"""Kinds of roles whose processes are the ranks of one model."""

PUSHING = ("learner", "engine")
"""Kinds of roles between which weights travel; it does not matter who shares a GPU with the others."""


class Placement(msgspec.Struct, frozen=True):
    """GPU numbers by role, none for roles that need none, and what collectives between learner and replicas run on."""

    gpus: dict[str, tuple[int, ...]]
    backend: Literal["gloo", "nccl"]


def ranks_by_kind(config: Config) -> dict[str, int]:
    """How many processes of a run hold the policy, and each model beside it that is placed."""
    return {"learner": config.learner.backend.ranks, **config.learner.beside}


def met_apart(config: Config) -> tuple[str, ...]:
    """Kinds of roles that listen at their own addresses, and whose ranks meet each other at one more port of the first of them."""
    return tuple(kind for kind, ranks in ranks_by_kind(config).items() if kind in BESIDE and ranks > 1)


def ranks_of(engine: Servers) -> int:
    """Processes that one replica is split over; each wants a GPU of its own."""
    return engine.tensor_parallel if isinstance(engine, Vllm | Sglang) else 1


def needed_gpus(config: Config, *, engines: bool, learners: bool, reward: bool = False) -> dict[str, int]:
    """How many GPUs each role wants, where `engines`, `learners` and the `reward` model use any."""

    def ranks(*kinds: str) -> dict[str, int]:
        return {f"{kind}-{i}": 1 for kind in kinds if learners for i in range(ranks_by_kind(config)[kind])}

    wanted = ranks("learner")
    if engines:
        wanted |= {f"engine-{i}": ranks_of(config.rollout.engine) for i in range(config.rollout.engine.replicas)}
    if reward:
        wanted["reward"] = 1
    return wanted | ranks(*BESIDE)


def place(wanted: Mapping[str, int], available: int) -> Placement:
    """Give out GPUs 0 to `available - 1`: to each role its own while they last, else in turn.

    Raises:
        ConfigError: one role wants more GPUs than there are.
    """
    for kind in RANKED:
        ranks = sum(role.startswith(f"{kind}-") for role in wanted)
        if ranks > available:
            key = f"learner.beside.{kind}" if kind in BESIDE else "learner.backend.ranks"
            raise ConfigError(f"{key}: {ranks} ranks need a GPU each, NCCL does not share one; torch sees {available}")
    largest = max(wanted.values(), default=0)
    if largest > available:
        raise ConfigError(
            f"rollout.engine.tensor_parallel: a process wants {largest} GPUs, torch sees {available}; "
            "allowed are at most as many as there are"
        )
    gpus, following = {}, 0
    for role, count in wanted.items():
        gpus[role] = tuple((following + i) % available for i in range(count))
        following += count
    both = any(role.startswith("engine") for role in wanted) and any(role.startswith("learner") for role in wanted)
    pushing = [gpu for role, its in gpus.items() if role.startswith(PUSHING) for gpu in its]
    return Placement(gpus, "nccl" if both and len(set(pushing)) == len(pushing) else "gloo")


def spare(taken: Mapping[str, tuple[int, ...]], count: int, available: int) -> tuple[int, ...]:
    """`count` of the GPUs 0 to `available - 1` that no role has.

    Raises:
        ConfigError: there are not so many.
    """
    used = {gpu for gpus in taken.values() for gpu in gpus}
    free = [gpu for gpu in range(available) if gpu not in used]
    if count > len(free):
        raise ConfigError(
            f"another replica wants {count} GPUs of its own, and {len(free)} of {available} are free; remove one first, "
            "or start the run with fewer ranks of the learner or of placed models"
        )
    return tuple(free[:count])


def gpus_of(config: Config) -> dict[str, int]:
    """GPUs wanted by role on this machine, as it is installed."""
    import torch

    from ..rollout import reward_server, servers

    device = config.learner.backend.device
    learners = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    reward = isinstance(config.reward, ModelReward) and not reward_server.serves_on_cpu()
    return needed_gpus(config, engines=not servers.serves_on_cpu(config), learners=learners, reward=reward)


def local_placement(config: Config) -> Placement:
    """Who gets which GPU of this machine."""
    import torch

    return place(gpus_of(config), torch.cuda.device_count())


def role_environment(config: Config, role: str, gpus: tuple[int, ...] = ()) -> dict[str, str]:
    """Environment variables for a role. What the user has set already wins, but for the GPUs."""
    cores = os.cpu_count() or 1
    threads = 1
    if role.startswith("sft"):
        threads = max(1, cores // config.learner.backend.ranks)
    elif role.startswith(RANKED):  # which may all compute at the same time
        threads = max(1, (cores - config.rollout.engine.replicas) // sum(ranks_by_kind(config).values()))
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        **PASSIVE,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONHASHSEED": str(config.seed % 2**32),  # some task families depend on the order of sets
    }
    chosen = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return chosen | ({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {})


def wait_passively() -> None:
    """For this process itself; call before torch is imported."""
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
