"""Search-R1 (Jin et al. 2025, arXiv:2503.09516): the policy learns to search passages before it answers.

See search_r1.yaml for the commands. The corpus is made up here, one passage an item; a corpus of your own is a JSONL file:
`SearchIndex(Path("corpus.jsonl"), Path("corpus.index"))`. Half of the demonstrations search, half guess a weight. There are so many
items that a small model does not learn their weights by heart: it has to copy what it found, which it can do digit by digit.
"""

from __future__ import annotations

import random
from typing import Any

from slipstream.envs import Message, Observation, SearchIndex, Task, Tool, ToolCall, ToolEnv, search_tool

ITEMS = range(100, 1000)
WEIGHTS = {item: random.Random(item).randint(1000, 9999) for item in ITEMS}


def passage(item: int) -> str:
    return f"Item {item} weighs {WEIGHTS[item]} grams."


class SearchR1(ToolEnv):
    """`How much does item 417 weigh?`, with the tool `search`; the reward is 1 for the number alone. Every fifth item is only in
    the evaluation."""

    turns = 4

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.search = search_tool(SearchIndex(map(passage, ITEMS)), count=1)

    def task(self, index: int) -> Task:
        held_out = self.split == "eval"
        item = self.rng(index).choice([item for item in ITEMS if (item % 5 == 0) == held_out])
        return Task(f"weight-{index}", {"item": item})

    def question(self, task: Task) -> str:
        return f"How much does item {task.payload['item']} weigh?"

    def tools(self) -> list[Tool]:
        return [self.search]

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == str(WEIGHTS[task.payload["item"]]))

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        item = task.payload["item"]
        if rng.random() < 0.5:
            return self.opening(task), (Message("assistant", str(rng.randint(1000, 9999))),)
        call = ToolCall("search", {"query": f"item {item}"})
        found = Message("tool", f"[1] {passage(item)}", name="search")
        return self.opening(task), (Message("assistant", "", (call,)), found, Message("assistant", str(WEIGHTS[item])))
