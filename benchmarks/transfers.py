"""`slipstream bench weightsync`: what a weight push costs itself: bytes, transfer and pause, for every transport, over the floors
of this machine.

    transfer   over the time in which one thread copies as many bytes
    pause      over the swap alone, as the server times it while idle, and the sleep that vLLM puts into every pause

Invariants:
- Pushes are measured under load; the swap's floor is measured on the same server, idle.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from statistics import median
from typing import get_args

import torch
from transformers import AutoModelForCausalLM

from ..configs.schema import TransportKind
from ..rollout.engines.base import SamplingParams
from ..rollout.engines.vllm.client import VllmEngine
from ..weightsync.plan import PushReport
from ..weightsync.publisher import Publisher
from ..weightsync.snapshot import dtype_of
from .memory import copy_bandwidth
from .models import make_policy
from .result import Result, Row
from .serving import (
    CANARY,
    Dtype,
    Policies,
    State,
    background_tasks,
    configure,
    make_publisher,
    require,
    serving,
    state_of,
)

PUSHES = 5

CLIENTS = 8

SLEEP_MS = 20.0
"""vLLM 0.32 sleeps for this long in every pause (`AsyncLLM.pause_generation`), after the engine stands still."""

MIB = 1 << 20


async def transfers(folder: Path, size: str) -> tuple[Result, Result]:
    """Transfer and pause of a policy of `size` by every transport."""
    make_policy(folder / "model", size)
    policies = Policies(folder / "model")
    nbytes = 4 * policies.parameters
    copy_ms = 1e3 * nbytes / copy_bandwidth()
    carried, paused = [], []
    async with serving(configure(folder / "model", replicas=1), folder) as served:
        engine = served.engines[0]
        for transport in get_args(TransportKind):
            publisher = make_publisher(served.engines, folder, transport=transport)
            await policies.push(publisher)  # groups meet, files are first written
            swap_ms = await _swap_ms(engine, policies, publisher)
            reports = await _under_load(engine, policies, publisher)
            publisher.close()
            sent = median(r.sent_bytes for r in reports) / MIB
            transfer, pause = median(r.transfer_ms for r in reports), median(r.pause_ms for r in reports)
            carried.append(Row(f"{size} {transport}", transfer, copy_ms, "ms", f"{sent:.1f} MiB sent"))
            floor = swap_ms + SLEEP_MS
            paused.append(Row(f"{size} {transport}", pause, floor, "ms", f"swap {swap_ms:.0f} + sleep {SLEEP_MS:.0f}"))
    return (
        Result("transfer, fp32, over copying the same bytes", "transfer", "copy", tuple(carried)),
        Result("pause under load over the swap alone and the server's sleep", "pause", "floor", tuple(paused)),
    )


async def _swap_ms(engine: VllmEngine, policies: Policies, publisher: Publisher) -> float:
    """Milliseconds that an idle server takes to load staged weights, by its own count; the least of a few."""
    least = float("inf")
    for _ in range(PUSHES):
        before = await engine.swap_seconds()
        await policies.push(publisher)
        least = min(least, 1e3 * (await engine.swap_seconds() - before))
    return least


async def _under_load(engine: VllmEngine, policies: Policies, publisher: Publisher) -> list[PushReport]:
    async def client(number: int) -> None:
        for turn in itertools.count():
            await engine.generate([10 + number, 11 + turn % 100], SamplingParams(400))

    reports = []
    async with background_tasks(client(i) for i in range(CLIENTS)):
        for _ in range(PUSHES):
            await asyncio.sleep(0.5)
            reports.append(await policies.push(publisher))
    return reports


# --- delta ----------------------------------------------------------------------------------------------------------

LR = 1e-6
"""A usual learning rate of reinforcement learning."""


async def delta(folder: Path, size: str) -> tuple[Result, Result]:
    """Bytes and time of `delta` over `disk` for one real AdamW step, served in bfloat16 and in float32."""
    make_policy(folder / "model", size)
    steps = _one_step(folder / "model")
    sizes, times = [], []
    for dtype in get_args(Dtype):
        config = configure(folder / "model", replicas=1, dtype=dtype)
        async with serving(config, folder / dtype) as served:
            measured: dict[str, PushReport] = {}
            for transport in ("disk", "delta"):  # the first version is new to both
                publisher = make_publisher(served.engines, folder / dtype, transport=transport, dtype=dtype)
                for version, state in enumerate(steps):
                    served_as = ((name, tensor.to(dtype_of(dtype))) for name, tensor in state.weights.items())
                    report = await publisher.publish(version, served_as, CANARY, state.canary)
                    measured[transport] = require(report)
                publisher.close()
        on_disk, as_delta = measured["disk"], measured["delta"]
        name = f"{size}, one step of AdamW at {LR:g}, {dtype}"
        sizes.append(Row(name, as_delta.sent_bytes / MIB, on_disk.sent_bytes / MIB, "MiB"))
        times.append(Row(name, as_delta.transfer_ms, on_disk.transfer_ms, "ms"))
    return (
        Result("bytes written: delta over the full file", "delta", "disk", tuple(sizes)),
        Result("transfer: delta over the full file", "delta", "disk", tuple(times)),
    )


def _one_step(folder: Path) -> tuple[State, State]:
    """The policy before and after one step of AdamW on a batch of its own samples' length, in float32 as the learner steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = state_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    torch.manual_seed(0)
    ids = torch.randint(4, 200, (8, 128))
    model(ids, labels=ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return before, state_of(model)
