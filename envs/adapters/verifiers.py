"""Tasksets of the verifiers library (https://github.com/PrimeIntellect-ai/verifiers), in an interpreter that has it. The library
owns its loop: it plays an episode with the policy at an endpoint, see `self_played.py`.

Invariants:
- A rollout that the library reports with an error is a failure, whatever its reward; so is one without a reward.
- The library's servers of a process start with its first episode, and end with the process.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from typing import Any

from ...configs.environments import Verifiers
from ...errors import ConfigError, EnvError, describe
from ..base import JSON, Message, Observation, StepResult, Task
from ..epochs import EpochOrder, numbers_of_split
from ..loading import load_foreign_library
from ..self_played import PolicyEndpoint, endpoint_of
from ..simple import SimpleEnv, Split

KEY_VARIABLE = "SLIPSTREAM_ENDPOINT_KEY"  # which is not set: the endpoint's URL has the key of its episode
SHOWN = 600  # characters of an error of the library
ALONE: JSON = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
"""One agent without a program of its own, and no sandbox in a cloud that asks for a login."""


class VerifiersEnv(SimpleEnv):
    """The tasks of one split of a taskset, and the episode on one of them."""

    self_played = True

    def __init__(self, config: Verifiers, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: this interpreter has no verifiers, or the library refuses the taskset or its
        settings."""
        super().__init__(split=split, seed=seed)
        self._vf = load_foreign_library(key, "verifiers.v1", "verifiers")
        loaders = load_foreign_library(key, "verifiers.v1.utils.loaders", "verifiers")
        cli = load_foreign_library(key, "verifiers.v1.configs.cli.eval", "verifiers")
        self.name = config.taskset
        settings = merged(ALONE, merged(config.settings, {"taskset": {"id": config.taskset}}))
        try:
            self._library = loaders.load_environment(cli.EvalConfig.model_validate({"env": settings}).env)
            self._tasks = list(self._library.taskset)
        except Exception as error:  # the taskset is the user's code, and the library raises many kinds
            line = " ".join(describe(error).split())
            raise ConfigError(f"{key}.taskset: verifiers cannot load {config.taskset!r}: {line[:SHOWN]}") from error
        what = f"tasks of {config.taskset}"
        numbers = numbers_of_split(len(self._tasks), config.evaluation, split, key=key, what=what)
        self._order = EpochOrder(numbers, split, seed)
        # By loop the library's context manager, whose end would end its servers, and what enters it.
        self._serving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, asyncio.Task[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def __len__(self) -> int:
        """Tasks in an epoch."""
        return len(self._order.numbers)

    def task(self, index: int) -> Task:
        number = self._order.number(index)
        return Task(f"{self.name}-{self.split}-{number}", {"task": number})

    async def reset(self, task: Task) -> Observation:
        self._current = self._tasks[task.payload["task"]]
        prompt = getattr(getattr(self._current, "data", None), "prompt", "")
        return Observation((Message("user", prompt if isinstance(prompt, str) else str(prompt)),))

    async def step(self, message: Message) -> StepResult:
        endpoint = endpoint_of(message)
        await self._start_servers()
        try:
            episode: Any = await self._library.run_episode(self._current, self._context(endpoint))
        except Exception as error:
            raise EnvError(f"verifiers: {describe(error)[:SHOWN]}") from error
        traces: list[Any] = list(episode.traces or ())
        errors = [str(error) for error in (*(episode.errors or ()), *(e for t in traces for e in (t.errors or ())))]
        if errors:
            raise EnvError(f"verifiers: {'; '.join(errors)[:SHOWN]}")
        if len(traces) != 1:
            raise EnvError(
                f"verifiers: an episode of {self.name} has {len(traces)} traces; only one agent is supported"
            )
        reward = traces[0].reward
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvError(f"verifiers: an episode of {self.name} has the reward {reward!r}")
        values = {name: float(value) for name, value in dict(traces[0].metrics or {}).items()}
        metrics = {name: value for name, value in values.items() if math.isfinite(value)}
        return StepResult((), float(reward), done=True, metrics=metrics)

    def _context(self, endpoint: PolicyEndpoint) -> Any:
        client = self._vf.EvalClientConfig(base_url=endpoint.url, api_key_var=KEY_VARIABLE)
        return self._vf.ModelContext(client=client, model=endpoint.model, sampling=self._vf.SamplingConfig())

    async def _start_servers(self) -> None:
        """Return when the library's own servers run in this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            # Not by the episode's own task: what it opens must outlive it.
            manager: Any = self._library.serving()
            self._serving[loop] = manager, loop.create_task(manager.__aenter__(), name="verifiers' servers")
        entered = self._serving[loop]
        _, serving = entered
        try:
            await asyncio.shield(serving)
        except BaseException:
            failed = serving.done() and (serving.cancelled() or serving.exception() is not None)
            if failed and self._serving.get(loop) is entered:
                del self._serving[loop]  # the next episode tries again
            raise


def merged(below: JSON, above: JSON) -> JSON:
    """Nested settings; `above` wins."""
    both = {
        name: merged(below[name], above[name])
        for name in below.keys() & above.keys()
        if isinstance(below[name], dict) and isinstance(above[name], dict)
    }
    return below | above | both
