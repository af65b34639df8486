"""`slipstream bench rollout`: what the worker costs: multi-turn episodes through it, against the same conversations sent to the
server by a bare loop.

    contender   worker process: agent, session, renderer, router, streaming; buffer process: SQLite, acknowledgements
    floor       one process whose coroutines post token ids and append the answer and a fixed next message, no more

Invariants:
- Both play the same groups of the same tasks on the same server, by turns, and find the same prefixes cached; both in a process of
  their own.
- The floor extends its own samples, so that it hits the server's prefix cache as the worker does, and does not stream.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Coroutine
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from ..agents import load_renderer
from ..buffer.client import BufferClient
from ..buffer.service import BufferService
from ..common.process import set_parent_death_signal
from ..errors import with_deadline
from ..launch.launchers.local import free_ports
from ..launch.run_context import RunContext
from ..launch.supervisor.factory import make_agents, make_player
from ..learner.model import load_tokenizer
from ..rollout.worker import Worker
from ..weightsync.fleet import ReplicaInfo
from .models import AGAIN, TURNS, Talk, make_policy
from .result import Result, Row
from .serving import Policies, Serving, configure, make_publisher, serving

CONCURRENCY = 64
EPISODES = 256
ROUNDS = 3

PLAYED_S = 600.0
"""Longest wait for the episodes of one round."""

STOP_S = 30.0

JSON = {"Content-Type": "application/json"}


class Round(msgspec.Struct, frozen=True):
    """What a process needs to know: the server, the version it serves, and the number of the round."""

    job: RunContext
    replicas: tuple[ReplicaInfo, ...]
    version: int
    number: int
    buffer: str


class Played(msgspec.Struct, frozen=True):
    """Sampled tokens and the seconds that they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def overhead(folder: Path, size: str) -> Result:
    """Tokens per second of the worker over the bare loop, for a policy of `size`."""
    make_policy(folder / "model", size)
    config = configure(folder / "model", replicas=1)
    groups = msgspec.structs.replace(config.buffer, groups_per_batch=EPISODES // config.buffer.group_size)
    config = msgspec.structs.replace(config, buffer=groups)
    bare, worker = list[Played](), list[Played]()
    spawn = multiprocessing.get_context("spawn")
    async with serving(config, folder) as served:
        publisher = make_publisher(served.engines, folder)
        version = (await Policies(folder / "model").push(publisher)).version
        publisher.close()
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=set_parent_death_signal) as processes:
            for number in range(ROUNDS + 1):
                address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
                this = Round(served.job, served.replicas, version, number, address)
                asked = await in_process(processes, _ask, this)
                buffer = spawn.Process(target=run_coroutine, args=(store, this), daemon=True)
                buffer.start()
                played = await in_process(processes, play, this)
                buffer.terminate()
                await asyncio.to_thread(buffer.join, STOP_S)
                if number:  # the first round warms the server up
                    bare.append(asked)
                    worker.append(played)
    row = Row(
        f"{size}, {CONCURRENCY} episodes of {TURNS} turns at once",
        median(p.rate for p in worker),
        median(p.rate for p in bare),
        "tokens/s",
        f"{worker[0].tokens} and {bare[0].tokens} tokens a round, median of {ROUNDS}",
    )
    return Result("the worker and the buffer over the bare engine", "worker", "bare", (row,))


async def in_process(processes: ProcessPoolExecutor, work: Any, this: Round) -> Any:
    done = asyncio.get_running_loop().run_in_executor(processes, run_coroutine, work, this)
    return await with_deadline(
        PLAYED_S, done, who="the benchmark", waits_for=f"{work.__name__} of a round", hint="see its logs"
    )


def run_coroutine(work: Any, this: Round) -> Any:
    coroutine: Coroutine[Any, Any, Any] = work(this)
    return uvloop.run(coroutine)


async def _ask(this: Round) -> Played:
    """The floor: post, append, post."""
    config = this.job.config
    renderer = load_renderer(config.agent.renderer, load_tokenizer(config.model.path), thinking=config.agent.thinking)
    source = Talk(split="train", seed=config.seed)
    prompts = [
        renderer.render_ids([{"role": "user", "content": source.opening(index)}], add_generation_prompt=True)
        for index in range(EPISODES // config.buffer.group_size)
        for _ in range(config.buffer.group_size)
    ]
    answer = prompts[0][-3:]  # any three tokens; what follows an answer is the same after all of them
    bridged = renderer.bridge_to_next_turn(prompts[0], answer, [{"role": "user", "content": AGAIN}])
    assert bridged is not None
    following = bridged.token_ids[len(prompts[0]) + len(answer) :]
    parameters = {
        "max_tokens": config.agent.max_tokens_per_turn,
        "stop_token_ids": list(renderer.get_stop_token_ids()),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    waiting, sampled = iter(prompts), 0

    async def converse(http: aiohttp.ClientSession) -> None:
        nonlocal sampled
        for prompt in waiting:
            ids = prompt
            for _ in range(TURNS):
                body = {"token_ids": ids, "sampling_params": parameters, "cache_salt": f"{this.version}"}
                url = f"{this.replicas[0].url}/inference/v1/generate"
                async with http.post(url, data=msgspec.json.encode(body), headers=JSON) as response:
                    tokens = msgspec.json.decode(await response.read())["choices"][0]["token_ids"]
                sampled += len(tokens)
                ids = [*ids, *tokens, *following]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        await asyncio.gather(*(converse(http) for _ in range(CONCURRENCY)))
        return Played(sampled, time.perf_counter() - began)


async def play(this: Round) -> Played:
    """The contender: be the worker until every group is in the buffer."""
    config = this.job.config
    async with (
        Serving(this.job, this.replicas, ()).router(this.version) as router,
        BufferClient(this.buffer, "learner-0") as learner,
        BufferClient(this.buffer, "worker-0") as client,
        make_agents(config) as agents,
    ):
        player = make_player(config, agents, router, split="train", temperature=1.0)
        await learner.stats()  # once the buffer answers
        stop = asyncio.Event()
        began = time.perf_counter()
        working = asyncio.create_task(Worker(player, client, config.buffer.group_size, 1).run(stop))
        batch = await learner.take(0, PLAYED_S)
        seconds = time.perf_counter() - began
        stop.set()
        await working
    return Played(sum(t.sampled for group in batch.groups for t in group), seconds)


async def store(this: Round) -> None:
    """The buffer of a round, until SIGTERM."""
    path = this.job.dir / f"buffer-{this.number}.sqlite"
    service = BufferService(this.job.config.buffer, path, this.buffer)
    service.mark_served(0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.stop)
    await service.serve()
