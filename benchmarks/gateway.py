"""`slipstream bench rollout`: what the gateway costs: conversations over its HTTP API, against the same calls of the session.

    contender   client, HTTP, the dialect, the session          floor   the session alone

Both in one process, whose CPU time is measured: the contender's includes that of the client. The engine answers at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai

from ..agents import Completion, Endpoint, Gateway, Session, load_renderer
from ..buffer.trajectory import VersionSpan
from ..envs.base import Message
from ..learner.model import load_tokenizer, vocabulary_size
from .models import AGAIN, make_policy
from .result import Result, by_rounds

EPISODES = 16
TURNS = 20
REPLY = 30  # words of an answer
ROUNDS = 5

History = list[dict[str, Any]]
Ask = Callable[[History], Awaitable[str]]


async def gateway(folder: Path) -> Result:
    """Milliseconds of CPU for one call: by a bare HTTP client, and by OpenAI's."""
    make_policy(folder / "model", "1M")
    tokenizer = load_tokenizer(str(folder / "model"))
    renderer = load_renderer("qwen3", tokenizer, thinking=False)
    answer: list[int] = tokenizer.encode("word " * REPLY + "<|im_end|>", add_special_tokens=False)
    vocabulary = vocabulary_size(str(folder / "model"))

    async def generate(token_ids: Sequence[int], max_tokens: int) -> Completion:
        await asyncio.sleep(0)
        return Completion(tuple(answer), (-0.1,) * len(answer), (VersionSpan(0, len(answer), 0),), "stop")

    def session() -> Session:
        return Session(renderer, generate, vocabulary=vocabulary, max_tokens_per_turn=1 << 10, max_tokens=1 << 20)

    async def direct() -> None:
        policy, history = session(), [Message("user", AGAIN)]
        for _ in range(TURNS):
            history += [await policy.chat(history), Message("user", AGAIN)]

    async with (
        Gateway() as open_gateway,
        aiohttp.ClientSession() as http,
        openai.DefaultAsyncHttpxClient() as openai_http,
    ):

        async def bare() -> None:
            async with open_gateway.endpoint(session()) as endpoint:
                await _converse(lambda history: _post(http, endpoint, history))

        async def sdk() -> None:
            async with open_gateway.endpoint(session()) as endpoint:
                client = openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, http_client=openai_http)
                await _converse(lambda history: _create(client, history))

        costs: dict[str, list[float]] = {"direct": [], "bare": [], "sdk": []}
        for number in range(ROUNDS + 1):
            for name, play in (("direct", direct), ("bare", bare), ("sdk", sdk)):
                cost = await _cost(play)
                if number:  # the first round warms up
                    costs[name].append(cost)
    note = f"{EPISODES} conversations of {TURNS} turns at once"
    rows = (
        by_rounds("by a bare HTTP client", costs["bare"], costs["direct"], "ms of CPU a call", note=note),
        by_rounds("by OpenAI's client", costs["sdk"], costs["direct"], "ms of CPU a call", note=note),
    )
    return Result("the gateway over the session", "gateway", "session", rows)


async def _cost(play: Callable[[], Awaitable[None]]) -> float:
    """Milliseconds of CPU a call."""
    began = time.process_time()
    await asyncio.gather(*(play() for _ in range(EPISODES)))
    return 1e3 * (time.process_time() - began) / (EPISODES * TURNS)


async def _converse(ask: Ask) -> None:
    history: History = [{"role": "user", "content": AGAIN}]
    for _ in range(TURNS):
        said = await ask(history)
        history += [{"role": "assistant", "content": said}, {"role": "user", "content": AGAIN}]


async def _post(http: aiohttp.ClientSession, endpoint: Endpoint, history: History) -> str:
    body = {"model": "policy", "messages": history}
    async with http.post(f"{endpoint.url}/chat/completions", json=body) as response:
        return (await response.json())["choices"][0]["message"]["content"]


async def _create(client: openai.AsyncOpenAI, history: Any) -> str:
    made = await client.chat.completions.create(model="policy", messages=history)
    return made.choices[0].message.content or ""
