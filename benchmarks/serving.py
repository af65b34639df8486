"""Servers for a benchmark: the same command lines, clients and routers as in a run, without a supervisor.

Invariants:
- What is started here ends with the `async with` that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..common import gc as heap
from ..configs.engines import Vllm
from ..configs.environments import PythonEnv
from ..configs.schema import Agent, Buffer, Config, Model, Partial, Rollout, TransportKind, parse_size
from ..errors import WeightSyncError
from ..launch.launchers.local import LocalLauncher
from ..launch.run_context import Addresses, RunContext
from ..launch.supervisor.factory import make_engine
from ..rollout.engines import registry as servers
from ..rollout.engines.access import ServerAccess
from ..rollout.engines.vllm.client import VllmEngine
from ..rollout.router import Router
from ..weightsync.fleet import Fleet, ReplicaInfo
from ..weightsync.plan import PushReport, ReplicaControl
from ..weightsync.publisher import Publisher

Dtype = Literal["float32", "bfloat16"]

CANARY = tuple((31 * i * i + 7 * i) % 200 + 4 for i in range(32))
"""Any ids that every policy here knows."""


def configure(model: Path, *, replicas: int, dtype: Dtype = "float32") -> Config:
    """A run of `replicas` vLLM servers of `model`, which plays `models.Talk` in groups of four."""
    return Config(
        model=Model(path=str(model), dtype=dtype),
        agent=Agent(max_tokens=1024, max_tokens_per_turn=48),
        env=PythonEnv(factory="slipstream.benchmarks.models:Talk"),
        buffer=Buffer(group_size=4, max_staleness=0),
        rollout=Rollout(engine=Vllm(replicas=replicas, memory="256MiB")),
    )


class Serving(msgspec.Struct):
    """Servers that answer. `job` is as a run's, but for the feeds that it lacks."""

    job: RunContext
    replicas: tuple[ReplicaInfo, ...]
    engines: tuple[VllmEngine, ...]

    def router(self, version: int) -> Router:
        """A router over all of them, which serve `version`."""
        rollout = self.job.config.rollout
        router = Router(
            lambda replica: make_engine(self.job, ServerAccess(), replica),
            max_concurrent=rollout.engine.max_concurrent,
            request_s=rollout.request_s,
            start_s=rollout.engine.start_s,
            partial=rollout.partial,
        )
        self.set_version(router, version)
        return router

    def set_version(self, router: Router, version: int) -> None:
        """All of them serve `version` now."""
        replicas = tuple(msgspec.structs.replace(s, state="serving", version=version) for s in self.replicas)
        router.update(Fleet(version, replicas))

    async def generated(self) -> int:
        """Tokens that all servers have sampled since they started, by their own count."""
        name = "vllm:generation_tokens_total"
        counts = await asyncio.gather(*(engine.metrics((name,)) for engine in self.engines))
        return int(sum(values[name] for values in counts))

    async def rate(self, seconds: float) -> float:
        """Tokens per second of all servers over the next `seconds`."""
        before, began = await self.generated(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (await self.generated() - before) / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def serving(config: Config, folder: Path) -> AsyncIterator[Serving]:
    """Start `rollout.engine.replicas` servers and wait until they answer; their logs go to `folder`."""
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    launcher = LocalLauncher(logs, 0)
    names = [f"engine-{i}" for i in range(config.rollout.engine.count)]
    cluster = Addresses(supervisor="", fleet="", buffer="", learner_host=launcher.host)
    job = RunContext(config, cluster, run_dir=str(folder), backend="gloo", started_in=os.getcwd(), pushed=True)
    engines: list[VllmEngine] = []
    try:
        placements = await launcher.place(dict.fromkeys(names, 0))
        for number, (name, placement) in enumerate(placements.items()):
            command = servers.command(config, placement.host, placement.port, seed=number)
            command = [sys.executable, "-m", "slipstream.common.process", *command]  # also when this process is killed
            await launcher.start(name, command, servers.environment(config))
        replicas = tuple(
            ReplicaInfo(name, f"http://{placement.host}:{placement.port}") for name, placement in placements.items()
        )
        for replica in replicas:
            engine = make_engine(job, ServerAccess(), replica)
            assert isinstance(engine, VllmEngine)  # counts are read from its metrics
            engines.append(engine)
        await asyncio.gather(*(engine.wait_ready(config.rollout.engine.start_s) for engine in engines))
        heap.freeze_startup_objects()  # as the roles of a run do
        yield Serving(job, replicas, tuple(engines))
    finally:
        for engine in engines:
            await engine.close()
        await launcher.close()


@contextlib.asynccontextmanager
async def background_tasks(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Runs coroutines that never end during the body, and cancels them after it; one that fails ends the body."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in work]
        try:
            yield
        finally:
            for task in running:
                task.cancel()


class State(msgspec.Struct, frozen=True):
    """A policy's weights, and the log-probs that it computes for `CANARY`."""

    weights: dict[str, torch.Tensor]
    canary: list[float]


def state_of(model: PreTrainedModel) -> State:
    """A copy of what `model` holds now."""
    ids = torch.tensor([CANARY])
    with torch.no_grad():
        rows = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    canary = rows[torch.arange(len(CANARY) - 1), ids[0, 1:]].tolist()
    return State({name: p.detach().clone() for name, p in model.named_parameters()}, canary)


class Policies:
    """Versions to push, by turns: two policies that differ in every weight of `folder`'s."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.parameters = sum(p.numel() for p in model.parameters())
        self._versions = itertools.count()
        self._states = [state_of(model)]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-3)
        self._states.append(state_of(model))

    async def push(self, publisher: Publisher) -> PushReport:
        """Publish the next version. Raises WeightSyncError where a replica did not take it: nothing was measured then."""
        version = next(self._versions)
        state = self._states[version % 2]
        report = await publisher.publish(version, state.weights.items(), CANARY, state.canary)
        if report.failed:  # on a crowded machine a replica may be too late; the learner does the same
            report = await publisher.catch_up() or report
        return require(report)


def require(report: PushReport) -> PushReport:
    """The report of a push that reached every replica. Raises WeightSyncError for any other."""
    if report.failed:
        raise WeightSyncError(f"version {report.version} did not reach every replica: {report.failed}")
    return report


def make_publisher(
    engines: Sequence[ReplicaControl],
    folder: Path,
    *,
    transport: TransportKind = "broadcast",
    cohort: int = 0,
    partial: Partial = "recompute",
    dtype: Dtype = "float32",
) -> Publisher:
    """A publisher as the learner has it."""
    return Publisher(
        engines,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=parse_size("bucket", "64MiB"),
        push_s=120.0,
        canary_tolerance=0.002 if dtype == "float32" else 0.5,
        transport=transport,
        cohort=cohort,
        partial=partial,
        folder=folder / "weights",
        spool=folder,
    )
