"""Counting shapes in a picture: a policy that sees images learns to tell what is in them.

See counting.yaml for the commands. With `hidden: true` the question comes without the picture, which the tool `look` shows.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image as Pillow
from PIL import ImageDraw
from slipstream.envs import Image, Message, Observation, Task, ToolCall, ToolEnv

SIDE, CELL = 32, 16  # pixels of a picture and of each of its four cells, which holds one shape or none
CELLS = [(x, y) for y in range(0, SIDE, CELL) for x in range(0, SIDE, CELL)]


class Counting(ToolEnv):
    """One to four shapes, discs and squares, each in a corner of its own; the reward is 1 for their number alone."""

    turns = 3

    def __init__(self, *, hidden: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = hidden

    def task(self, index: int) -> Task:
        rng = self.rng(index)
        return Task(f"shapes-{index}", {"count": rng.randint(1, len(CELLS)), "seed": rng.getrandbits(32)})

    def question(self, task: Task) -> Sequence[Message]:
        images = () if self.hidden else (picture(**task.payload),)
        return (Message("user", "How many shapes are there? Answer with the number.", images=images),)

    def tools(self) -> Sequence[Callable[[], Image]]:
        return [self.look] if self.hidden else []

    def look(self) -> Image:
        """Show the picture."""
        return picture(**self._task.payload)

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == str(task.payload["count"]))

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        count = task.payload["count"] if rng.random() < 0.5 else rng.randint(1, len(CELLS))
        answer = Message("assistant", str(count))
        if not self.hidden:
            return self.opening(task), (answer,)
        call = Message("assistant", "", (ToolCall("look", {}),))
        shown = Message("tool", "", name="look", images=(picture(**task.payload),))
        return self.opening(task), (call, shown, answer)


def picture(count: int, seed: int) -> Image:
    """A PNG file of `count` shapes."""
    rng = random.Random(seed)
    canvas = Pillow.new("RGB", (SIDE, SIDE), "black")
    draw = ImageDraw.Draw(canvas)
    for x, y in rng.sample(CELLS, count):
        margin = rng.randint(1, 3)
        box = (x + margin, y + margin, x + CELL - 1 - margin, y + CELL - 1 - margin)
        color = tuple(rng.randint(160, 255) for _ in range(3))
        rng.choice((draw.ellipse, draw.rectangle))(box, fill=color)
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return Image(file.getvalue())
