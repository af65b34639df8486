"""Simulated inference servers: one HTTP server that answers for all of them, as vLLM does.

Invariants:
- A replica has a path of its own, `/engine-0`. It takes every version at once, and says of every token that its log-prob is
  `LOGPROB`.
- An ack is sent to the learner for each version that a replica is sent, as its receiver would.
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop
from aiohttp import web

from ..buffer.messages import Ack
from ..rollout.engines.base import UNPUSHED
from ..rollout.engines.http_client import PUSH_KEEPALIVE_S
from ..rollout.engines.server.protocol import Generated, Logprob
from ..rollout.engines.vllm.client import VllmEngine
from ..rpc.client import RpcClient
from ..weightsync.fleet import Fleet, ReplicaInfo
from ..weightsync.plan import WeightAck

LOGPROB = -1.0

METRICS = "\n".join(
    f'vllm:{name}{{engine="0",model_name="m"}} {value}'
    for name, value in (
        ("num_requests_running", 64),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.5),
        ("generation_tokens_total", 1e6),
    )
)
"""What vLLM's `/metrics` says of its load."""


def serve_replicas(ready: Connection) -> None:
    """Answer for any number of replicas, until the process is killed."""
    uvloop.run(_serve(ready))


class SimulatedServers:
    """What the replicas were sent."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}
        self._learners: dict[str, RpcClient] = {}

    async def answer(self, request: web.Request) -> web.Response:
        replica, path = request.match_info["replica"], request.match_info["path"]
        match path:
            case "metrics":
                return web.Response(text=METRICS)
            case "weight_info":
                return web.json_response({"weight_version": self._versions.get(replica, UNPUSHED)})
            case "update_weights":
                self._acknowledge((await request.json())["update_info"]["plan"])
            case "finish_weight_update":
                self._versions[replica] = (await request.json())["weight_version"]
            case "inference/v1/generate":
                _, *others = (await request.json())["token_ids"]
                scores = (None, *({str(token): Logprob(LOGPROB, token)} for token in others))
                return web.Response(body=msgspec.json.encode(Generated(prompt_logprobs=scores)))
        return web.Response()

    def _acknowledge(self, plan: dict[str, Any]) -> None:
        address = plan["acks"]
        if address not in self._learners:
            self._learners[address] = RpcClient(address, "the replicas", "the learner", Ack)
        self._learners[address].notify(WeightAck(plan["receiver"], 0, plan["version"]))


async def _serve(ready: Connection) -> None:
    app, servers = web.Application(), SimulatedServers()
    app.add_routes([web.route("*", "/{replica}/{path:.*}", servers.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    host, port = runner.addresses[0]
    ready.send((f"{host}:{port}",))
    await asyncio.Event().wait()


def fleet_of(count: int, address: str, version: int, revision: int = 1) -> Fleet:
    """Replicas that serve `version`, all at `address`."""
    names = (f"engine-{i}" for i in range(count))
    infos = (ReplicaInfo(name, f"http://{address}/{name}", 0, "serving", version, answers=True) for name in names)
    return Fleet(revision, tuple(infos))


def client_of(replica: ReplicaInfo) -> VllmEngine:
    """A client of one of them, which keeps its connections as the learner's do."""
    engine = VllmEngine(replica.name, replica.url, vocab_size=1 << 17, max_model_len=1 << 15)
    engine.keep_connections(PUSH_KEEPALIVE_S)
    return engine
