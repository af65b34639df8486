"""An environment that plays itself, for tests; importing it takes little."""

from __future__ import annotations

import asyncio
import json

import aiohttp
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.envs.self_played import PolicyEndpoint, endpoint_of
from slipstream.errors import EnvError


class Itself(SimpleEnv):
    """Asks twice, and believes that what fails is worth nothing."""

    self_played = True

    def task(self, index: int) -> Task:
        return Task(f"itself-{index}", {})

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "What is 2 + 2?"),))

    async def step(self, message: Message) -> StepResult:
        endpoint, history = endpoint_of(message), [{"role": "user", "content": "What is 2 + 2?"}]
        for question in ("Sure?", "Really?"):
            found = await self.complete(endpoint, history)
            if "choices" not in found:
                if self.arguments.get("reports"):
                    raise EnvError(f"the library says: {json.dumps(found)}")
                return StepResult((), 0.0, done=True)
            said = found["choices"][0]["message"]["content"]
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        if self.arguments.get("hangs"):
            await asyncio.sleep(60)
        return StepResult((), float("4" in said), done=True, metrics={"asked": 2.0})

    async def complete(self, endpoint: PolicyEndpoint, history: list[dict[str, str]]) -> dict:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        body = {"model": endpoint.model, "messages": history}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as response,
        ):
            return await response.json()
