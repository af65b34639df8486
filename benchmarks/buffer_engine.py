"""`slipstream bench buffer`: throughput of the buffer over that of a busy engine.

Invariants:
- Each has the machine to itself, by turns; the server is warm, and its tokens are its own count.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec

from .buffer import FLOOR_S, PRODUCERS, ROUNDS, SIZES
from .buffer_traffic import Crew, Rounds, through_the_buffer
from .buffer_trajectories import sampled
from .models import make_policy
from .result import Result, by_rounds
from .serving import Serving, background_tasks, configure, serving

SIZE = "1M"
REQUESTS = 64
"""Under way at once."""

LENGTH = 256
ENGINE_S = 5.0

JSON = {"Content-Type": "application/json"}


async def beside_an_engine(folder: Path) -> Result:
    """Sampled tokens per second through the service over those of one busy server of a small policy, each with the machine to
    itself, by turns."""
    make_policy(folder / "model", SIZE)
    rounds, carried, made = Rounds(folder), {name: list[float]() for name in SIZES}, list[float]()
    async with serving(configure(folder / "model", replicas=1), folder) as served, Crew(max(PRODUCERS)) as crew:
        await _engine_rate(served)  # warms it up
        for _ in range(ROUNDS):
            made.append(await _engine_rate(served))
            for name, tokens in SIZES.items():
                took = await rounds.count(tokens, FLOOR_S, lambda r: through_the_buffer(crew, r, max(PRODUCERS)))
                carried[name].append(took.rate * sampled(tokens))
    rows = []
    for name, rates in carried.items():
        rows.append(by_rounds(f"{name} tokens, {max(PRODUCERS)} producers", rates, made, "tokens/s", digits=0))
    title = f"sampled tokens: the buffer over one busy vLLM server, {SIZE} policy, {REQUESTS} requests at once"
    return Result(title, "buffer", "engine", tuple(rows))


async def _engine_rate(served: Serving) -> float:
    """Tokens per second, by the server's own count."""
    parameters = {"max_tokens": LENGTH, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    body = msgspec.json.encode({"token_ids": list(range(10, 42)), "sampling_params": parameters})

    async def client() -> None:
        while True:
            async with http.post(
                f"{served.replicas[0].url}/inference/v1/generate", data=body, headers=JSON
            ) as response:
                response.raise_for_status()
                await response.read()

    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        background_tasks(client() for _ in range(REQUESTS)),
    ):
        await asyncio.sleep(1.0)
        return await served.rate(ENGINE_S)
