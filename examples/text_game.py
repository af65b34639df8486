"""A text game of several turns: find a number from 1 to 15 in four guesses, each of which is told to be too high or too low.

See text_game.yaml for the commands. Half of the demonstrations halve what is left, which always wins; half guess wildly.
"""

from __future__ import annotations

import random

from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

LARGEST, GUESSES = 15, 4
RULES = f"Find the number from 1 to {LARGEST} in {GUESSES} guesses. Say a number."


class HigherLower(SimpleEnv):
    """The reward is 1 for finding the number."""

    def task(self, index: int) -> Task:
        return Task(f"number-{index}", {"number": self.rng(index).randint(1, LARGEST)})

    async def reset(self, task: Task) -> Observation:
        self.number, self.guesses = task.payload["number"], 0
        return Observation((Message("user", RULES),))

    async def step(self, message: Message) -> StepResult:
        self.guesses += 1
        text = message.content.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else None
        if guess == self.number:
            return StepResult(reward=1.0, done=True, metrics={"guesses": float(self.guesses)})
        if self.guesses == GUESSES:
            return StepResult(reward=0.0, done=True)
        return StepResult((Message("user", "Say a number." if guess is None else hint(guess, self.number)),))

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        number, low, high = task.payload["number"], 1, LARGEST
        halves = rng.random() < 0.5
        messages = list[Message]()
        for _ in range(GUESSES):
            guess = (low + high) // 2 if halves else rng.randint(1, LARGEST)
            messages.append(Message("assistant", str(guess)))
            if guess == number:
                break
            messages.append(Message("user", hint(guess, number)))
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
        return Observation((Message("user", RULES),)), tuple(
            messages if messages[-1].role == "assistant" else messages[:-1]
        )


def hint(guess: int, number: int) -> str:
    return "Higher." if guess < number else "Lower."
