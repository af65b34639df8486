"""What every process of a run is given when it starts: the config, and the addresses of the other processes.

Invariants:
- The context is JSON in one environment variable, so that a role starts the same way under any launcher, on any host. It holds no
  secret.
- A restarted process listens where it did before, unless its host is lost. Ranks of the learner and of auxiliary models then
  restart together and learn the new addresses; those of replicas are in the fleet snapshots. The supervisor, the buffer and the
  reward server never move.
- The config of a context is the one in force when the process starts; what `slipstream set` changes afterwards is published.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..common.accelerator import CollectiveBackend
from ..configs import Config
from ..errors import ConfigError
from ..rpc.pubsub import StateSubscriber, following

VARIABLE = "SLIPSTREAM_JOB"
ROLE = "SLIPSTREAM_ROLE"


class Addresses(msgspec.Struct, frozen=True):
    """Where the processes listen: hosts, and addresses of ZeroMQ, those of the supervisor with its public key (`rpc.security`)."""

    supervisor: str  # for heartbeats
    fleet: str  # the fleet snapshots
    buffer: str  # with shards of their own, their clock
    learner_host: str  # of rank 0, the rendezvous of a push
    settings: str = ""  # `RunSettings`
    peers: str = ""  # `PeerDirectory`
    access: str = ""  # for `RequestAccess`
    reward: str = ""  # URL of the reward server, if there is one
    aux_models: dict[str, tuple[str, ...]] = {}  # the ranks of each placed auxiliary model, by its kind
    buffer_shards: tuple[str, ...] = ()  # none where the buffer is one process


class RunSettings(msgspec.Struct, frozen=True):
    """The config in force. The supervisor publishes it; `revision` rises with every change."""

    revision: int
    config: Config
    workers: tuple[str, ...] = ()  # the run's, which may be others than it began with

    def share(self, worker: str) -> tuple[int, int]:
        """The place of `worker` among the workers of the run, from 0, and how many these are; one not among them is last."""
        index = self.workers.index(worker) if worker in self.workers else len(self.workers)
        return index, max(1, len(self.workers))

    def episode_limit(self, worker: str) -> int | None:
        """Most episodes that `worker` plays at once, its share of `rollout.max_episodes`; None without a limit."""
        return self.config.rollout.episode_limit(*self.share(worker))


class RunContext(msgspec.Struct, frozen=True):
    config: Config
    addresses: Addresses
    run_dir: str
    backend: CollectiveBackend  # of collectives between learner and replicas
    started_in: str  # the folder that the run was started from
    pushed: bool  # a learner pushes versions; without one engines serve what they loaded, as version 0
    recorded: bool = True  # the processes write spans and series
    revision: int = 1  # of `config`, see `RunSettings`
    workers: tuple[str, ...] = ()  # see `RunSettings`
    evaluated_dir: str = ""  # of the run that evaluations are of, where that is another one's folder

    @property
    def dir(self) -> Path:
        return Path(self.run_dir)

    @property
    def settings(self) -> RunSettings:
        return RunSettings(self.revision, self.config, self.workers)

    @property
    def timeline_dir(self) -> Path | None:
        """Where a `TimelineWriter` writes."""
        return self.dir if self.recorded else None

    @property
    def evaluation_dir(self) -> Path | None:
        """Where the episodes of evaluations are kept."""
        return Path(self.evaluated_dir or self.run_dir) if self.recorded else None

    def environment(self, role: str) -> dict[str, str]:
        """What to add to the environment of `role`; the variable with its name is for people who inspect processes."""
        return {VARIABLE: msgspec.json.encode(self).decode(), ROLE: role}


def following_settings(
    context: RunContext, update: Callable[[RunSettings], None]
) -> contextlib.AbstractAsyncContextManager[StateSubscriber[RunSettings]]:
    """Passes the settings of the run to `update`, now and on every change; a failure of `update` ends the context."""
    return following(context.addresses.settings, context.settings, update, "settings")


def read_run_context() -> RunContext:
    """The context of this process. Raises ConfigError when a role was started by hand."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise ConfigError(f"`slipstream role` is started by `slipstream train`; {VARIABLE} is not set")
    try:
        return msgspec.json.decode(text, type=RunContext)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{VARIABLE} is not a run context of this version of Slipstream: {error}") from None
