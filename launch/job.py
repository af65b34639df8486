"""What every process of a run is told when it starts: the config, and where the others are.

Invariants:
- A job travels as JSON in one environment variable, so that a role starts the same way under any launcher, on any host.
- Addresses are fixed for the life of a run: a process that is restarted comes back where it was. Replicas come and go, so
  where they are is told by the fleet's feed alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from ..configs import Config
from ..errors import ConfigError

VARIABLE = "SLIPSTREAM_JOB"
ROLE = "SLIPSTREAM_ROLE"


class Cluster(msgspec.Struct, frozen=True):
    """Where each process listens.

    Attributes:
        supervisor: ZeroMQ address for heartbeats.
        fleet: ZeroMQ address of the fleet's feed.
        buffer: ZeroMQ address of the buffer.
        learner_host: host of learner rank 0, where the replicas meet it for a push.
        reward: URL of the reward server; empty where there is none.
        beside: ZeroMQ addresses of the ranks of each model beside the policy that is placed, by the kind of their roles.
    """

    supervisor: str
    fleet: str
    buffer: str
    learner_host: str
    reward: str = ""
    beside: dict[str, tuple[str, ...]] = {}


class Job(msgspec.Struct, frozen=True):
    """One run as its processes see it.

    Attributes:
        run_dir: absolute.
        backend: what collectives between learner and replicas run on.
        started_in: the folder that the run was started from.
        pushed: a learner pushes versions to the engines; without one they serve what they loaded, as version 0.
    """

    config: Config
    cluster: Cluster
    run_dir: str
    backend: Literal["gloo", "nccl"]
    started_in: str
    pushed: bool

    @property
    def dir(self) -> Path:
        return Path(self.run_dir)

    def environment(self, role: str) -> dict[str, str]:
        """What to add to the environment of `role`; its name is for people who look at processes."""
        return {VARIABLE: msgspec.json.encode(self).decode(), ROLE: role}


def read_job() -> Job:
    """The job of this process. Raises ConfigError when a role was started by hand without one."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise ConfigError(f"`slipstream role` is started by `slipstream train`; {VARIABLE} is not set")
    try:
        return msgspec.json.decode(text, type=Job)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{VARIABLE} is not a job of this version of Slipstream: {error}") from None
