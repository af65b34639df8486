"""Search-R1 (Jin et al. 2025, arXiv:2503.09516): the policy learns to search passages before it answers.

See search_r1.yaml for the commands. The corpus is made up here, one passage a country; a corpus of your own is a JSONL file:
`SearchIndex(Path("corpus.jsonl"), Path("corpus.index"))`. Half of the demonstrations search, half guess a town. There are so many
countries that a small model cannot learn their capitals by heart: it has to copy what it found.
"""

from __future__ import annotations

import random
from typing import Any

from slipstream.envs import Message, Observation, SearchIndex, Task, Tool, ToolCall, ToolEnv, search_tool


def names(count: int, syllables: str) -> list[str]:
    """Made-up names, each once."""
    rng, found = random.Random(syllables), dict[str, None]()
    while len(found) < count:
        found["".join(rng.choices(syllables.split(), k=4)).capitalize()] = None
    return list(found)


COUNTRIES, TOWNS = names(3000, "ka lo mi ru se ta vo ne"), names(3000, "ba co di fu ge ha ju pi")


def passage(index: int) -> str:
    return f"The capital of {COUNTRIES[index]} is {TOWNS[index]}."


class SearchR1(ToolEnv):
    """`What is the capital of Kalomise?`, with the tool `search`; the reward is 1 for the town alone. Every fifth country is only
    in the evaluation."""

    turns = 4

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.search = search_tool(SearchIndex(passage(index) for index in range(len(COUNTRIES))), count=1)

    def task(self, index: int) -> Task:
        held_out = self.split == "eval"
        country = self.rng(index).choice([i for i in range(len(COUNTRIES)) if (i % 5 == 0) == held_out])
        return Task(f"capital-{index}", {"country": country})

    def question(self, task: Task) -> str:
        return f"What is the capital of {COUNTRIES[task.payload['country']]}?"

    def tools(self) -> list[Tool]:
        return [self.search]

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == TOWNS[task.payload["country"]])

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        country = task.payload["country"]
        if rng.random() < 0.5:
            return self.opening(task), (Message("assistant", rng.choice(TOWNS)),)
        call = ToolCall("search", {"query": f"capital of {COUNTRIES[country]}"})
        found = Message("tool", f"[1] {passage(country)}", name="search")
        return self.opening(task), (Message("assistant", "", (call,)), found, Message("assistant", TOWNS[country]))
