"""Textarena games for one player: the policy's messages are its moves, the game's answers are messages of the user.

Invariants:
- Textarena seeds and draws from the global `random` of the process. Each episode has a state of its own, which is put in place for
  each call and taken away after it, one call of the process at a time: episodes do not disturb each other.
- A wrong move is answered by the game itself, which allows so many. An exception of the library is a failure of the environment.
- The reward is the game's, once, at its end. A game that `max_turns` cuts off earned nothing.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ...common.libraries import load_library
from ...configs.environments import TextArena
from ...errors import ConfigError
from ..base import Message, Observation, StepResult, Task
from ..simple import SimpleEnv, Split
from ..tools import in_thread

T = TypeVar("T")

PLAYER = 0
PLAYERS = 1
_GLOBAL_RANDOM = threading.Lock()  # held while the global `random` is an episode's


class TextArenaEnv(SimpleEnv):
    """One game id; each task is a seed of its reset."""

    def __init__(self, config: TextArena, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: textarena is not installed, has no such game, refuses the arguments, or the game is not
        for one player."""
        super().__init__(split=split, seed=seed)
        self._library = load_library(f"{key}.kind: textarena", "textarena", "envs")
        self.config, self.name = config, config.id
        self._turns = 0
        self._state: object = None  # of the global `random`, this episode's
        self._game: Any = None
        known = load_library(key, "textarena.envs.registration", "envs").ENV_REGISTRY
        if config.id not in known:
            near = [name for name in sorted(known) if name.lower().startswith(config.id.lower()[:4])]
            raise ConfigError(
                f"{key}.id: textarena has no game {config.id!r}; similar are {', '.join(near[:8]) or 'none'}"
            )
        try:
            self.make()._with_own_random(
                lambda: self._library.make(config.id, **config.arguments).reset(PLAYERS, seed=0)
            )
        except Exception as error:  # games raise different errors for a wrong number of players and for wrong arguments
            line = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{key}.id: textarena cannot start {config.id!r} for one player: {line}") from error

    def task(self, index: int) -> Task:
        seed = self.rng(index).getrandbits(31)
        return Task(f"{self.name}-{self.split}-{self.seed}-{index}", {"seed": seed})

    async def reset(self, task: Task) -> Observation:
        self._turns, self._state = 0, None
        opening = await in_thread(lambda: self._with_own_random(lambda: self._open(task.payload["seed"])))
        return Observation((Message("user", opening),))

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        return await in_thread(lambda: self._with_own_random(lambda: self._move(message.content)))

    def _open(self, seed: int) -> str:
        self._game = self._library.make(self.config.id, **self.config.arguments)
        self._game.reset(num_players=PLAYERS, seed=seed)
        return self._new_text()

    def _move(self, text: str) -> StepResult:
        done, _ = self._game.step(text)
        metrics = {"turns": float(self._turns)}
        if done:
            rewards, infos = self._game.close()
            metrics["invalid_move"] = float(bool(infos[PLAYER].get("invalid_move", False)))
            return StepResult(reward=float(rewards[PLAYER]), done=True, metrics=metrics)
        over = self._turns >= self.config.max_turns
        return StepResult((Message("user", self._new_text()),), done=over, truncated=over, metrics=metrics)

    def _new_text(self) -> str:
        """What the game says since the last look, without the policy's own moves, which it has in its context already."""
        _, seen = self._game.get_observation()
        if isinstance(seen, str):
            return seen
        return "\n".join(text for sender, text, *_ in seen if sender != PLAYER)

    def _with_own_random(self, work: Callable[[], T]) -> T:
        """Run `work` with the global `random` of this episode."""
        with _GLOBAL_RANDOM:
            before = random.getstate()
            if self._state is not None:
                random.setstate(self._state)  # pyright: ignore[reportArgumentType]  (from getstate)
            try:
                return work()
            finally:
                self._state = random.getstate()
                random.setstate(before)
