"""Three steps of a policy with all models beside it, wherever these are; and the processes that hold them where they are placed.

A rank of the learner runs this file as a script, see tests/ranks.py; ranks of placed models are the roles that a run has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from slipstream.configs import Config, load
from slipstream.launch.job import Cluster
from slipstream.launch.job import Job as RoleJob
from slipstream.launch.wiring import make_backend, make_companions
from slipstream.learner.algorithms import advantage_of
from slipstream.learner.backend import Backend
from slipstream.learner.batch import to_sequences
from slipstream.learner.checkpoint import CheckpointState
from slipstream.learner.companions import Companions
from slipstream.learner.credit import Group
from slipstream.learner.meter import CompanionsDone
from slipstream.learner.step import Stepper
from slipstream.tests.ranks import quiet_ports
from slipstream.tests.test_learner_credit import branches

STEPS, LONGEST, DEADLINE_S = 3, 64, 120.0

GROUPS: list[Group] = [
    (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
    (*branches(1, 3, [0.0]), *branches(1, 4, [0.0, 0.0, 1.0])),
]

GAE = (
    "learner.algorithm.advantage={kind: gae, critic_lr: 2e-5, lam_by_length: true}",
    "learner.algorithm.kl.kind=reward",
)
PRIME = (
    "learner.algorithm.advantage={kind: prime, reward_lr: 2e-5}",
    "learner.algorithm.kl={kind: loss, coefficient: 0.5}",
)


class Job(msgspec.Struct):
    """Steps by a rank of the learner of the config `keys`, with the models beside it `placed` at addresses; weights and what was
    said go to `out`."""

    keys: tuple[str, ...]
    placed: dict[str, tuple[str, ...]]
    out: str

    @property
    def checkpoints(self) -> Path:
        """Folder for those of what is beside it."""
        return Path(f"{self.out}.checkpoints")


def keys_of(folder: Path, *keys: str) -> tuple[str, ...]:
    """A small learner of the policy in `folder`. AdamW makes up to a hundredth of a step of the rounding of the smallest gradients:
    of six steps at these rates about the 1e-6 that weights may differ by."""
    fixed = ("learner.optimizer.lr=2e-5", "learner.algorithm.minibatches=2", "learner.backend.tokens_per_microbatch=16")
    return f"model.path={folder}", f"learner.batch_s={DEADLINE_S}", *fixed, *keys


def config_of(folder: Path, *keys: str) -> Config:
    """The config of `keys_of`."""
    return load("quickstart", keys_of(folder, *keys))


async def train(
    config: Config, policy: Backend, companions: Companions, folder: Path
) -> tuple[dict[str, torch.Tensor], CompanionsDone]:
    """Three steps; what is beside them is saved to `folder` after the second one, while the third is taken. Returns weights and
    what was said, by names, and how the last steps beside the policy went."""
    stepper = Stepper(config.learner, policy, LONGEST)
    advantage, found, writing, beside = advantage_of(config.learner.algorithm), dict[str, torch.Tensor](), [], None
    for step in range(STEPS):
        scores = await companions.score(GROUPS)
        for what, said in (("reference", scores.reference), ("told", scores.told), ("penalties", scores.penalties)):
            found |= {f"{what} {step} {name}": torch.tensor(values) for name, values in (said or {}).items()}
        sequences = to_sequences(GROUPS, advantage, 5, 5, scores=scores)
        learnt = companions.learn(sequences)
        stepper.step(sequences, (), CheckpointState(step=step, version=5))
        beside = await learnt()
        if step == 1:
            writing = [
                asyncio.ensure_future(one) for one in companions.save(folder, CheckpointState(step=2, version=2))
            ]
    await asyncio.gather(*writing)
    assert beside is not None
    return found | {name: tensor.clone() for name, tensor in policy.named_weights()}, beside


@contextlib.contextmanager
def placed(config: Config, folder: Path) -> Iterator[dict[str, tuple[str, ...]]]:
    """The addresses of real roles: each rank of each model that `config` places. Their logs go to `folder`."""
    folder.mkdir()
    ranks = config.learner.beside
    ports = {kind: quiet_ports(count + 1) for kind, count in ranks.items()}
    beside = {kind: tuple(f"tcp://127.0.0.1:{port}" for port in ports[kind][1:]) for kind in ranks}
    job = RoleJob(
        config,
        Cluster(supervisor="tcp://127.0.0.1:9", fleet="", buffer="", learner_host="127.0.0.1", beside=beside),
        run_dir=str(folder),
        backend="gloo",
        started_in=str(folder),
        pushed=True,
    )
    with contextlib.ExitStack() as stack:
        for kind, count in ranks.items():
            for rank in range(count):
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[kind][0]), "WORLD_SIZE": str(count)}
                stack.callback(_end, _start(f"{kind}-{rank}", job, meeting | {"RANK": str(rank)} if count > 1 else {}))
        yield beside


def _start(role: str, job: RoleJob, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | job.environment(role) | more
    with (job.dir / f"{role}.log").open("wb") as log:
        command = [sys.executable, "-m", "slipstream.launch.cli", "role", role]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()


async def run_rank(job: Job, config: Config, policy: Backend) -> None:
    """Do `job` as one of several ranks of the learner."""
    companions = make_companions(config, policy, job.placed)
    found, beside = await train(config, policy, companions, job.checkpoints)
    companions.close()
    if policy.rank == 0:
        save_file(found | {"beside": torch.tensor(msgspec.structs.astuple(beside))}, job.out)


if __name__ == "__main__":
    for index, job in enumerate(msgspec.json.decode(sys.argv[1], type=list[Job])):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        config = load("quickstart", job.keys)
        policy = make_backend(config, temperature=1.0)
        asyncio.run(run_rank(job, config, policy))
        policy.close()
