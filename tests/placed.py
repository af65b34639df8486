"""Three steps of a policy with all aux models, local or remote; and the processes that hold the remote ones.

A rank of the learner runs this file as a script, see tests/ranks.py; ranks of remote models are the roles that a run has.
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
import zmq
from safetensors.torch import save_file
from slipstream.configs import Config, load
from slipstream.launch.run_context import Addresses
from slipstream.launch.run_context import RunContext as RoleJob
from slipstream.launch.supervisor.factory import make_aux_models, make_backend
from slipstream.learner.algorithms import advantage_of, returns_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.aux_models.aux_models import AuxModels
from slipstream.learner.backend import Backend
from slipstream.learner.batch import Group, trainable
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.metrics import AuxModelsResult
from slipstream.learner.step import PolicyStepper
from slipstream.tests.columns import by_id, flat
from slipstream.tests.ranks import reserved_ports
from slipstream.tests.test_learner_credit import branches

STEPS, LONGEST, DEADLINE_S = 3, 64, 120.0

GROUPS: list[Group] = [
    (*branches(0, 0, [0.0, 1.0], split=1), *branches(0, 1, [0.0, 0.0]), *branches(0, 2, [1.0])),
    (*branches(1, 3, [0.0]), *branches(1, 4, [0.0, 0.0, 1.0])),
]

GAE = (
    "learner.algorithm.advantage={kind: gae, lr: 2e-5, lam: {by_length: 0.05}}",
    "learner.algorithm.kl.kind=reward",
)
PRIME = (
    "learner.algorithm.advantage={kind: prime, lr: 2e-5}",
    "learner.algorithm.kl={kind: loss, coefficient: 0.5}",
)


class Job(msgspec.Struct):
    """Steps by a rank of the learner of the config `keys`, with its remote aux models `placed` at addresses; weights and
    outputs go to `out`."""

    keys: tuple[str, ...]
    placed: dict[str, tuple[str, ...]]
    out: str

    @property
    def checkpoints(self) -> Path:
        """Folder for those of its aux models."""
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
    config: Config, policy: Backend, aux_models: AuxModels, folder: Path
) -> tuple[dict[str, torch.Tensor], AuxModelsResult]:
    """Three steps; the trained aux model is saved to `folder` after the second one, while the third is taken. Returns weights and
    outputs by name, and the result of the aux model's last steps."""
    stepper = PolicyStepper(config.learner, policy, LONGEST)
    algorithm, found, writing, aux_result = config.learner.algorithm, dict[str, torch.Tensor](), [], None
    for step in range(STEPS):
        scored = await aux_models.score(flat(GROUPS))
        columns = {"reference": scored.reference_logprobs, "values": scored.values, "penalties": scored.penalties}
        for what, column in columns.items():
            found |= {f"{what} {step} {i}": torch.tensor(one) for i, one in (by_id(scored, column) or {}).items()}
        sequences = trainable(assign_advantages(scored, advantage_of(algorithm), returns_of(algorithm)), 0)
        learned = aux_models.learn(sequences)
        stepper.step(sequences, stepper.plan(sequences), (), CheckpointState(step=step, version=5))
        aux_result = await learned()
        if step == 1:
            writing = [
                asyncio.ensure_future(one) for one in aux_models.save(folder, CheckpointState(step=2, version=2))
            ]
    await asyncio.gather(*writing)
    assert aux_result is not None
    return found | {name: tensor.clone() for name, tensor in policy.named_weights()}, aux_result


@contextlib.contextmanager
def placed(config: Config, folder: Path) -> Iterator[dict[str, tuple[str, ...]]]:
    """The addresses of real roles: each rank of each model that `config` makes remote. Their logs go to `folder`."""
    folder.mkdir()
    ranks = config.learner.aux_models
    ports = {kind: reserved_ports(count + 1) for kind, count in ranks.items()}
    addresses = {kind: tuple(f"tcp://127.0.0.1:{port}" for port in ports[kind][1:]) for kind in ranks}
    with contextlib.ExitStack() as stack:
        # It listens to no report. At its end a role waits three seconds for a supervisor that does not answer at all.
        listening = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.ROUTER))
        supervisor = f"tcp://127.0.0.1:{listening.bind_to_random_port('tcp://127.0.0.1')}"
        job = RoleJob(
            config,
            Addresses(supervisor=supervisor, fleet="", buffer="", learner_host="127.0.0.1", aux_models=addresses),
            run_dir=str(folder),
            backend="gloo",
            started_in=str(folder),
            pushed=True,
        )
        for kind, count in ranks.items():
            for rank in range(count):
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[kind][0]), "WORLD_SIZE": str(count)}
                stack.callback(_end, _start(f"{kind}-{rank}", job, meeting | {"RANK": str(rank)} if count > 1 else {}))
        yield addresses


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
    aux_models = make_aux_models(config, policy, job.placed)
    found, aux_result = await train(config, policy, aux_models, job.checkpoints)
    aux_models.close()
    if policy.rank == 0:
        save_file(found | {"aux": torch.tensor(msgspec.structs.astuple(aux_result))}, job.out)


if __name__ == "__main__":
    for index, job in enumerate(msgspec.json.decode(sys.argv[1], type=list[Job])):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        config = load("quickstart", job.keys)
        policy = make_backend(config, temperature=1.0)
        asyncio.run(run_rank(job, config, policy))
        policy.close()
