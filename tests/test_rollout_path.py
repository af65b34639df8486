"""The path from a lease to tokens: how many product files it passes through, and how many tasks a completion takes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
from aiohttp import web
from slipstream.agents import Session, load_agent, load_renderer
from slipstream.agents.base import Generate
from slipstream.buffer.client import BufferClient
from slipstream.buffer.messages import Lease
from slipstream.buffer.trajectory import Outcome, Trajectory
from slipstream.configs import load
from slipstream.envs import EnvPart
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.rollout.player import EpisodePlayer
from slipstream.rollout.router import Router
from slipstream.rollout.worker import Worker
from slipstream.tests.episodes import Once
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

ROOT = Path(__file__).parent.parent
SOON = 60.0

MAX_FILES = 12
"""Product files of which a function runs before the trajectory is delivered, with the record as a tree (`agents/tree.py`) and text
as data (`agents/plain_text.py`)."""

NOT_COUNTED = ("envs/", "buffer/", "common/", "errors.py")
"""The environment's own files, the types of leases and trajectories, and what every room uses."""

MAX_TASKS = 2
"""Tasks of an episode while it waits for a completion: its own, and the one that isolates the agent."""


class TokenServer:
    """Speaks vLLM's protocol: every completion is the token 40 as often as the request allows, sent once `answer` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.asked.set()
        await self.answer.wait()
        count = (await request.json())["sampling_params"]["max_tokens"]
        spans = [{"version": "0", "start": 0, "end": count}]
        logprobs = {"content": [{"logprob": -0.5}] * count}
        choice = {"token_ids": [40] * count, "logprobs": logprobs, "weight_versions": spans, "finish_reason": "length"}
        event = {"choices": [choice]}
        await response.write(b"data: " + msgspec.json.encode(event) + b"\n\ndata: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Deliveries:
    """The end of the path: what a worker delivers."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []
        self.files: set[str] = set()
        self.path: list[str] = []

    async def deliver(
        self,
        episode_id: str,
        generated: dict[int, int],
        outcome: Outcome,
        trajectories: Sequence[Trajectory],
        failed_branches: Sequence[Trajectory],
        image_files: Mapping[str, bytes],
    ) -> None:
        assert not failed_branches
        assert not image_files
        self.trajectories += trajectories
        self.path = sorted(file for file in self.files if not file.startswith(NOT_COUNTED))


@asynccontextmanager
async def worker_on(policy: Path, url: str, deliveries: Deliveries) -> AsyncIterator[Worker]:
    size = vocabulary_size(str(policy))
    renderer = load_renderer("qwen3", load_tokenizer(str(policy)), thinking=False)

    def make_engine(info: ReplicaInfo) -> VllmEngine:
        return VllmEngine(info.name, info.url, vocab_size=size, max_model_len=256)

    def make_session(generate: Generate) -> Session:
        return Session(renderer, generate, vocabulary=size, max_tokens_per_turn=8, max_tokens=256)

    async with Router(make_engine, max_concurrent=4, request_s=SOON, start_s=SOON, partial="recompute") as router:
        router.update(Fleet(1, (ReplicaInfo("a", url, 0, "serving", 0),)))
        part = EnvPart("once", 1.0, Once(split="train", seed=0), None)
        agent = load_agent("single_turn")
        player = EpisodePlayer(load("quickstart"), agent, [part], router, make_session, (), 1.0)
        yield Worker(player, cast(BufferClient, deliveries), 1, 1)


def is_product(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in (".venv", "tests")


def product_tasks() -> set[str]:
    """The tasks of this loop that run a coroutine of the product, by its name."""
    coroutines = [cast(Any, task.get_coro()) for task in asyncio.all_tasks()]
    return {c.__qualname__ for c in coroutines if is_product(c.cr_code.co_filename)}


@contextmanager
def product_files() -> Iterator[set[str]]:
    """Collects the product's files of which any function runs in this thread."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_product(frame.f_code.co_filename):
            found.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


async def test_the_path_from_a_lease_to_tokens_is_short(policy: Path) -> None:
    server, deliveries = TokenServer(), Deliveries()
    async with asyncio.timeout(SOON), server.serve() as url, worker_on(policy, url, deliveries) as worker:
        lease = Lease(0, 0, (0,), 0, 0, 0, 0)
        worker._running[lease.episode(0)] = {}
        with product_files() as deliveries.files:
            playing = asyncio.create_task(worker._episode(lease, 0))
            await server.asked.wait()
            tasks = product_tasks()
            server.answer.set()
            await playing
    (trajectory,) = deliveries.trajectories
    assert trajectory.token_ids[-1] == 40
    path = deliveries.path
    assert {"rollout/worker.py", "rollout/engines/http_client.py"} <= set(path)
    assert len(path) <= MAX_FILES, "\n".join(path)
    assert len(tasks) <= MAX_TASKS, tasks
