"""One rank here and several there: jobs of three steps by FSDP2, and what starts the several for any backend.

Ranks are processes of this Python on the loopback; they are started once for a list of jobs and do them in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from slipstream.configs.backends import Fsdp2
from slipstream.configs.schema import Model
from slipstream.launch.launchers.local import keep_port
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.distributed import join, new_gloo_group
from slipstream.learner.fsdp2.backend import ON_CPU, TOGETHER, Fsdp2Backend
from slipstream.tests.equality import LOSS, OPTIMIZER, SEQUENCE_MEAN, STEPS, TEMPERATURE, make_batch, make_rows
from slipstream.tests.tiny import one_gpu
from slipstream.weightsync.weight_check import are_adapters, base_weights, merge

DEADLINE_S = 200
CPU = Fsdp2(device="cpu")


class Job(msgspec.Struct):
    """Steps `first` to `last` from `load` or from the start; `save` after step 2;
    what an engine loads and [steps, 2] numbers go to `out`."""

    model: str
    budget: int
    out: str
    config: Fsdp2 = CPU
    dtype: str = "float32"
    first: int = 0
    last: int = STEPS
    load: str = ""
    save: str = ""
    sequence_mean: bool = False
    together: bool = False  # all layers are gathered at once, as on an accelerator


def open_backend(model: str, dtype: str = "float32", config: Fsdp2 = CPU, together: bool = False) -> Fsdp2Backend:
    ON_CPU["cpu"] = TOGETHER if together else 0
    return Fsdp2Backend(
        Model(path=model, dtype=dtype), OPTIMIZER, config, temperature=TEMPERATURE, timeout_s=DEADLINE_S
    )


def run(job: Job, backend: Fsdp2Backend) -> None:
    if job.load:
        assert backend.load(Path(job.load)) == CheckpointState(step=job.first, version=job.first + 10)
    numbers = []
    saving = None
    for step in range(job.first, job.last):
        rows = make_rows(step, backend.data_rank, backend.data_size, job.budget)
        loss = SEQUENCE_MEAN(rows, backend.gather) if job.sequence_mean else LOSS
        result = backend.step(rows, loss, OPTIMIZER.lr)
        assert result.tokens == sum(s.loss_mask.sum() for s in make_batch(step)[0])
        assert result.grad_norm > OPTIMIZER.clip_norm
        numbers.append([result.loss, result.grad_norm])
        if job.save and step == 1:  # the third step is taken while it is written
            saving = backend.save(Path(job.save), CheckpointState(step=2, version=12))
    if saving is not None:
        saving.result(DEADLINE_S)
    weights = {name: tensor.cpu() for name, tensor in backend.named_weights()}
    if are_adapters(weights):
        weights = dict(merge(weights, base_weights(job.model)))
    if backend.rank == 0:
        save_file(weights | {"numbers": torch.tensor(numbers)}, job.out)


def run_on_one_rank(jobs: Sequence[Job]) -> None:
    for job in jobs:
        backend = open_backend(job.model, job.dtype, job.config, job.together)
        run(job, backend)
        backend.close()


def run_in_turn(jobs: Sequence[Job]) -> Fsdp2Backend:
    """What each of several ranks does first. Returns the backend of the last job, open."""
    for index, job in enumerate(jobs):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[index]
        backend = open_backend(job.model, job.dtype, job.config, job.together)
        run(job, backend)
        if index < len(jobs) - 1:
            backend.close()
    return backend


def reserved_ports(count: int) -> list[int]:
    """Successive free ports below those that the kernel gives to connections: no other process takes one by chance, and this one
    gives none of them to another."""
    while True:
        first = random.randrange(20_000, 32_000)
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        if all(keep_port(port) for port in ports):
            return ports


def run_on_two_ranks(root: Path, script: str, jobs: Sequence[msgspec.Struct], *arguments: str) -> None:
    run_on_ranks(2, root, script, jobs, *arguments)


def run_on_ranks(count: int, root: Path, script: str, jobs: Sequence[msgspec.Struct], *arguments: str) -> None:
    """Run `script` `count` times, with the jobs as JSON and `arguments`; it is to do them in turn, each at its own of `PORTS`. Logs
    go to `root`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": ",".join(map(str, reserved_ports(len(jobs)))),
    }
    payload = json.dumps([msgspec.to_builtins(job) for job in jobs])
    command = [sys.executable, script, payload, *arguments]
    logs = [(root / f"rank-{rank}.log").open("w+") for rank in range(count)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)} | one_gpu(f"rank-{rank}"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for log in logs:
        log.seek(0)
    assert codes == [0] * count, "\n".join(log.read()[-3000:] for log in logs)


def add_up() -> None:
    """Be a rank of the learner that adds up numbers with the others, in the first group and in another, and prints the sum."""
    join(torch.device("cpu"), DEADLINE_S)
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    dist.all_reduce(total, group=new_gloo_group(DEADLINE_S))
    sys.stdout.write(f"{total.item()}\n")


def jobs_of(payload: str) -> list[Job]:
    """The jobs that `run_on_ranks` passes."""
    return msgspec.json.decode(payload, type=list[Job])
