"""GPUs and threads of each role, and the backend of the collectives that transfer weights.

Invariants:
- Waiting threads must not spin (`OMP_WAIT_POLICY=PASSIVE`), and all processes together use about as many threads as there are
  cores: on two cores, two processes of two spinning threads slow each other down a hundredfold.
- A GPU is a device of whatever accelerator torch sees (`common/accelerator.py`), also an NPU.
- With enough GPUs each rank of the learner or of a placed auxiliary model has one, each process of a replica one per rank, and the
  accelerator's collectives (NCCL, HCCL, XCCL) transfer the weights. A replica that is added later gets GPUs that are free, or is
  refused.
- With fewer GPUs roles share them, and gloo transfers the weights: NCCL does not connect two processes on one GPU.
- A role sees its own GPUs only, of those that the user's environment lets this process see.
- Colocated replicas have the learner's GPUs, however many there are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import msgspec

from ..common import accelerator
from ..common.accelerator import CollectiveBackend
from ..common.replica_names import processes_of, replica_of
from ..configs import Config
from ..configs.engine_checks import nodes_of
from ..configs.engines import ENGINE_OPTIONS, NODES, SPLIT, OptionServers, Servers
from ..configs.reward import ModelReward
from ..configs.schema import NO_AUX_PROCESSES
from ..errors import ConfigError

AUX_MODEL_KINDS = tuple(NO_AUX_PROCESSES)  # kinds of roles of placed auxiliary models
RANKED = ("learner", "sft", *AUX_MODEL_KINDS)  # kinds of roles whose processes are the ranks of one model
PUSHING = ("learner", "engine")  # kinds of roles between which weights are transferred; the others may share GPUs


class GpuAssignment(msgspec.Struct, frozen=True):
    """GPU numbers by role, none for roles that need none, and the backend of collectives between learner and replicas."""

    gpus: dict[str, tuple[int, ...]]
    backend: CollectiveBackend


def ranks_by_kind(config: Config) -> dict[str, int]:
    """Number of ranks of the policy and of each placed auxiliary model."""
    return {"learner": config.learner.backend.ranks, **config.learner.aux_models}


def needs_rendezvous_port(config: Config) -> tuple[str, ...]:
    """Kinds of roles that listen on their own port, and whose ranks need one more port for their rendezvous."""
    return tuple(kind for kind, ranks in ranks_by_kind(config).items() if kind in AUX_MODEL_KINDS and ranks > 1)


def ranks_of(engine: Servers) -> int:
    """Ranks of one replica, on all its hosts; each needs a GPU."""
    return engine.tensor_parallel if isinstance(engine, OptionServers) else 1


def own_servers(config: Config) -> int:
    """Replicas that the run starts itself: none where `rollout.engine.replicas` names servers that others started."""
    return config.rollout.engine.count - len(config.rollout.engine.external)


def engine_roles(config: Config) -> list[str]:
    """The roles of the servers that the run starts itself; one for each host of each."""
    nodes = nodes_of(config.rollout.engine)
    return [role for i in range(own_servers(config)) for role in processes_of(f"engine-{i}", nodes)]


def needed_gpus(config: Config, *, engines: bool, learners: bool, reward: bool = False) -> dict[str, int]:
    """Number of GPUs that each role needs, where `engines`, `learners` and the `reward` model use any."""

    def ranks(*kinds: str) -> dict[str, int]:
        return {f"{kind}-{i}": 1 for kind in kinds if learners for i in range(ranks_by_kind(config)[kind])}

    wanted = ranks("learner")
    if engines:
        engine = config.rollout.engine
        wanted |= dict.fromkeys(engine_roles(config), ranks_of(engine) // nodes_of(engine))
    if reward:
        wanted["reward"] = 1
    wanted |= ranks(*AUX_MODEL_KINDS)
    if engines and config.evaluation.every:
        wanted["evaluator"] = ranks_of(config.rollout.engine)  # those of its own server
    return wanted


def assign_gpus(
    wanted: Mapping[str, int], available: int, collectives: CollectiveBackend, *, colocated: bool = False
) -> GpuAssignment:
    """Assign GPUs 0 to `available - 1`: different ones to each role while there are enough, else round-robin; `colocated` replicas
    begin again with the first, which the learner's ranks have. `collectives` are those of the accelerator. Raises ConfigError
    where one role, or a replica on one host, needs more than there are."""
    for kind in RANKED:
        ranks = sum(role.startswith(f"{kind}-") for role in wanted)
        if ranks > available:
            key = f"learner.aux_models.{kind}" if kind in AUX_MODEL_KINDS else "learner.backend.ranks"
            raise ConfigError(
                f"{key}: {ranks} ranks need a GPU each, {collectives.upper()} does not share one; torch sees {available}"
            )
    each = Counter[str]()
    for role, count in wanted.items():
        each[replica_of(role)] += count
    largest = max(each.values(), default=0)
    if largest > available:
        raise ConfigError(
            f"{ENGINE_OPTIONS}.{SPLIT}: a replica wants {largest} GPUs, torch sees {available}; "
            f"allowed are at most as many as there are, or more over several hosts (vLLM's {NODES}) with launch.kind=ray_cluster"
        )
    gpus, following = {}, Counter[bool]()
    for role, count in wanted.items():
        apart = colocated and role.startswith("engine-")
        gpus[role] = tuple((following[apart] + i) % available for i in range(count))
        following[apart] += count
    both = any(role.startswith("engine") for role in wanted) and any(role.startswith("learner") for role in wanted)
    pushing = [gpu for role, its in gpus.items() if role.startswith(PUSHING) for gpu in its]
    return GpuAssignment(gpus, collectives if both and len(set(pushing)) == len(pushing) else "gloo")


def free_gpus(taken: Mapping[str, tuple[int, ...]], count: int, available: int) -> tuple[int, ...]:
    """`count` of the GPUs 0 to `available - 1` that are free. Raises ConfigError where fewer are."""
    used = {gpu for gpus in taken.values() for gpu in gpus}
    free = [gpu for gpu in range(available) if gpu not in used]
    if count > len(free):
        raise ConfigError(
            f"another replica wants {count} GPUs of its own, and {len(free)} of {available} are free; remove one first, "
            "or start the run with fewer ranks of the learner or of placed models"
        )
    return tuple(free[:count])


def gpus_of(config: Config) -> dict[str, int]:
    """GPUs needed by role with the packages that are installed on this machine."""
    from ..rollout import reward_server
    from ..rollout.engines import registry as servers

    device = config.learner.backend.device
    learners = device not in accelerator.ANYWHERE or (device == "auto" and accelerator.current() is not None)
    reward = isinstance(config.reward, ModelReward) and not reward_server.serves_on_cpu()
    engines = bool(own_servers(config) or config.evaluation.every) and not servers.serves_on_cpu(config)
    return needed_gpus(config, engines=engines, learners=learners, reward=reward)


def collectives_of(config: Config) -> CollectiveBackend:
    """Of the accelerator that the learner runs on."""
    kind = accelerator.named(config.learner.backend.device)
    return kind.collectives if kind else "gloo"


def placed_by_ray(config: Config) -> bool:
    """Whether roles run on an existing Ray cluster, whose hosts may differ from this one."""
    return config.launch.by_ray and "RAY_ADDRESS" in os.environ


def role_environment(config: Config, role: str, gpus: tuple[int, ...] = ()) -> dict[str, str]:
    """Environment variables of a role. Those that the user has set win; of those that choose devices, `gpus` are the ones of the
    user's choice that the role gets. Raises ConfigError where the user's variable does not name so many."""
    cores = os.cpu_count() or 1
    threads = 1
    if role.startswith("sft"):
        threads = max(1, cores // config.learner.backend.ranks)
    elif role.startswith(RANKED):  # which may compute at the same time
        threads = max(1, (cores - own_servers(config)) // sum(ranks_by_kind(config).values()))
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONHASHSEED": str(config.seed % 2**32),  # some task families depend on the order of sets
    }
    chosen = {name: os.environ.get(name, value) for name, value in wanted.items()}
    if gpus and (kind := accelerator.current()):
        chosen |= accelerator.visible_devices(kind, gpus, os.environ)
    return chosen
