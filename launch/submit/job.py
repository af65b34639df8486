"""The job of a run: which nodes it needs, for how long, and when it is interrupted. The same for Slurm and for Kubernetes.

Invariants:
- All nodes are alike, the head's included: the supervisor runs there and must see the GPUs that the config counts on.
- Ray books one CPU for each role, and the GPUs that `needed_gpus` says. A job asks for at least that.
- A run is interrupted `interrupt_s` before its time is over: the learner writes a checkpoint, and the next job resumes the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...common.accelerator import ANYWHERE, CUDA, KINDS, AcceleratorKind
from ...configs import Config
from ...configs.engines import ENGINE_OPTIONS, NODES, SPLIT, Fake
from ...configs.reward import ModelReward
from ...configs.schema import parse_size
from ...errors import ConfigError
from ..resources import needed_gpus
from ..supervisor.processes import role_names

END_S = 100.0  # beyond the learner's checkpoint: for the other roles to end, for the report, and for a signal that comes late
SHORTEST_S = 300  # a job starts Ray, imports, checks the config and loads the model before it takes a step
OBJECT_STORE = (
    100_000_000  # bytes of each Ray node, near the least that Ray takes; by default it takes a third of the memory
)
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")


class Nodes(msgspec.Struct, frozen=True):
    """How many nodes a job has, and what each of them has."""

    count: int
    cpus: int
    gpus: int
    memory: int = 0  # bytes; 0 where the cluster decides

    def __str__(self) -> str:
        return f"{self.count} node{'s' if self.count > 1 else ''} with {self.cpus} CPUs and {self.gpus} GPUs each"


class Job(msgspec.Struct, frozen=True):
    """A run as a job of a cluster. `time_s` is its time limit, None for the cluster's own."""

    config: Config
    name: str
    nodes: Nodes
    time_s: int | None

    @property
    def interrupt_s(self) -> int:
        """How long before the end of its time the run is interrupted."""
        return math.ceil(self.config.launch.stop_s + END_S)

    @property
    def accelerator(self) -> AcceleratorKind:
        """What the nodes' GPUs are: of the type that `learner.backend.device` names, else CUDA's."""
        device = self.config.learner.backend.device
        return next((kind for kind in KINDS if kind.type == device), CUDA)

    @property
    def time(self) -> str:
        """The time limit as `HH:MM:SS`, in which both kinds of clusters are given it."""
        minutes, seconds = divmod(self.time_s or 0, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"


def gpus_by_role(config: Config, gpus_per_node: int) -> dict[str, int]:
    """GPUs of each role on nodes that have some; none on nodes that have none. Raises ConfigError where the config wants them."""
    device = config.learner.backend.device
    if not gpus_per_node:
        if device not in ANYWHERE:
            raise ConfigError(
                f"--gpus-per-node: 0, but learner.backend.device={device} needs some; allowed with 0 are auto and cpu"
            )
        return {}
    reward = isinstance(config.reward, ModelReward)
    engines = not isinstance(config.rollout.engine, Fake)
    return needed_gpus(config, engines=engines, learners=device != "cpu", reward=reward)


def plan_nodes(
    config: Config, *, nodes: int | None = None, cpus: int | None = None, gpus: int = 0, memory: str = ""
) -> Nodes:
    """The nodes of a job: of those with `gpus` GPUs as few as the roles fit on, unless `nodes` says how many; with as many CPUs as
    Ray may book there, unless `cpus` says how many. Raises ConfigError where the roles do not fit."""
    roles, needed = role_names(config), gpus_by_role(config, gpus)
    packed = _packed(needed, gpus)
    least = max(1, len(packed))
    if nodes is not None and nodes < least:
        raise ConfigError(
            f"--nodes: {nodes} with {gpus} GPUs each have no room for {', '.join(needed)}, which need {sum(needed.values())} GPUs; "
            f"allowed are {least} and more, or fewer replicas and ranks"
        )
    count = nodes or least
    booked = max(math.ceil(len(roles) / count), max(map(len, packed), default=1))
    # Wherever Ray places the roles without GPUs, those with GPUs have CPUs where their GPUs are.
    wanted = max(map(len, packed)) + len(roles) - len(needed) if packed else booked
    if cpus is not None and cpus < booked:
        raise ConfigError(
            f"--cpus-per-node: {cpus} on {count} nodes are too few for the {len(roles)} roles, for each of which Ray books one; "
            f"allowed are {booked} and more"
        )
    return Nodes(count, cpus or wanted, gpus, parse_size("--memory", memory) if memory else 0)


def _packed(needed: Mapping[str, int], gpus: int) -> list[list[str]]:
    """The roles that need GPUs, by node: the largest first, each on the first node with room."""
    packed, free = list[list[str]](), list[int]()
    for role, count in sorted(needed.items(), key=lambda item: -item[1]):
        if count > gpus:
            raise ConfigError(
                f"--gpus-per-node: {role} needs {count} GPUs on one node ({ENGINE_OPTIONS}.{SPLIT}); allowed are {count} and "
                f"more, or a replica over several nodes (vLLM's {ENGINE_OPTIONS}.{NODES})"
            )
        node = next((i for i, left in enumerate(free) if left >= count), len(free))
        if node == len(free):
            free.append(gpus)
            packed.append([])
        free[node] -= count
        packed[node].append(role)
    return packed


def parse_time(text: str) -> int:
    """Seconds of `[DAYS-]HOURS:MINUTES:SECONDS`. Raises ConfigError naming `--time`."""
    found = TIME.fullmatch(text)
    if not found:
        raise ConfigError(f"--time: {text!r} is not of the form [DAYS-]HOURS:MINUTES:SECONDS, for example 04:00:00")
    days, hours, minutes, seconds = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def make_job(config: Config, *, name: str, nodes: Nodes, time: str) -> Job:
    """Raises ConfigError where `config` is no run over several hosts, or where its time is too short."""
    if config.launch.kind != "ray_cluster":
        raise ConfigError(
            f"launch.kind: {config.launch.kind} keeps all processes on one host; a job of several nodes needs "
            "launch.kind=ray_cluster"
        )
    job = Job(config, name or Path(config.run.dir).name, nodes, parse_time(time) if time else None)
    if job.time_s is not None and job.time_s < job.interrupt_s + SHORTEST_S:
        raise ConfigError(
            f"--time: {time} is too short: the run is interrupted {job.interrupt_s} s before the end, and needs {SHORTEST_S} s to "
            f"start; allowed are {job.interrupt_s + SHORTEST_S} s and more"
        )
    return job
