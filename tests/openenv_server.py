"""An OpenEnv server for tests, run by the interpreter that has openenv: `python openenv_server.py PORT [BROKEN]`. Guess a number;
where it is BROKEN, the environment raises at its reset."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

BROKEN = int(sys.argv[2]) if len(sys.argv) > 2 else 0


class Guess(Action):
    number: int


class Seen(Observation):
    hint: str = ""


class GuessEnv(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="x", step_count=0)

    def reset(self, seed=None, episode_id=None, **options):
        self.number, self.turns = random.Random(seed).randint(1, 9), 0
        if self.number == BROKEN:
            raise RuntimeError("broken")
        return Seen(hint="Guess 1 to 9.", done=False, reward=None)

    def step(self, action, **options):
        self.turns += 1
        if action.number == 99:
            raise RuntimeError("boom")
        right = action.number == self.number
        hint = "right" if right else "higher" if action.number < self.number else "lower"
        return Seen(hint=hint, done=right or self.turns == 9, reward=float(right))

    @property
    def state(self):
        return self._state


app = create_app(GuessEnv, Guess, Seen, env_name="guess", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
