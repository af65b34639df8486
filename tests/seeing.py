"""A tiny model that sees images, and pictures for it; tests of images share them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image as Pillow
from PIL import ImageDraw
from slipstream.agents import load_renderer
from slipstream.agents.chat_images import placed_images
from slipstream.agents.session import to_chat
from slipstream.common.image_processor import ImageProcessor
from slipstream.common.images import PlacedImage, PromptImage
from slipstream.configs.schema import Agent
from slipstream.envs import Image, Message, Observation, SimpleEnv, StepResult, Task
from slipstream.launch.init_model import TinyModelShape, init_model
from slipstream.learner.model import load_tokenizer
from slipstream.tests.cache import cached
from transformers import AutoModelForImageTextToText

SHAPE = TinyModelShape(hidden=64, heads=2, kv_heads=2, intermediate=128, vocabulary=512)
TOKENS = 4
"""Of a `picture` of 32 x 32 pixels."""


def picture(color: str, width: int = 32, height: int = 32) -> bytes:
    """A PNG file: a disc on black."""
    canvas = Pillow.new("RGB", (width, height), "black")
    ImageDraw.Draw(canvas).ellipse((4, 4, 24, 24), fill=color)
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


class Colors(SimpleEnv):
    """Asks for the color of a disc; the reward is 1 for its name."""

    def task(self, index: int) -> Task:
        return Task(str(index), {"color": ("red", "green", "blue")[index % 3]})

    async def reset(self, task: Task) -> Observation:
        return self._opening(task)

    async def step(self, message: Message) -> StepResult:
        return StepResult(reward=1.0, done=True)

    def demonstration(self, task: Task, rng: object) -> tuple[Observation, tuple[Message, ...]]:
        return self._opening(task), (Message("assistant", task.payload["color"]),)

    def _opening(self, task: Task) -> Observation:
        return Observation((asked(picture(task.payload["color"])),))


def asked(*images: bytes, text: str = "Which color is it?") -> Message:
    return Message("user", text, images=tuple(map(Image, images)))


def seeing_policy(folder: Path) -> Path:
    """A random model that sees images, with its tokenizer and image processor."""

    def make(folder: Path) -> None:
        source = Colors(split="train", seed=0)
        init_model(folder, sources=[source], agent=Agent(renderer="qwen3-vl"), shape=SHAPE, samples=6)

    return cached(folder, f"seeing_policy {SHAPE}", make)


class Prompt:
    """Messages as a server is given them."""

    def __init__(self, policy: Path, *messages: Message) -> None:
        rendered = renderer_of(policy).render(to_chat(messages), add_generation_prompt=True)
        self.token_ids = tuple(rendered.token_ids)
        self.placed, self.files = placed_images(rendered, messages)

    @property
    def images(self) -> tuple[PromptImage, ...]:
        return tuple(PromptImage(one.start, one.end, self.files[one.digest]) for one in self.placed)


def renderer_of(policy: Path) -> Any:
    return load_renderer("qwen3-vl", load_tokenizer(str(policy)), thinking=False)


def plain_model(policy: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(policy, dtype=torch.float32).eval()


def with_second_placeholder(model: Any, placeholder: int) -> int:
    """Add a token to the vocabulary that is read as `placeholder` is without an image, and return it: transformers takes
    `placeholder` itself for an image wherever it stands. The head stays as it is."""
    embeddings = model.get_input_embeddings().weight.detach()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.get_input_embeddings().weight = torch.nn.Parameter(torch.cat([embeddings, embeddings[placeholder, None]]))
    return len(embeddings)


def plain_logits(
    policy: Path, model: Any, token_ids: Sequence[int], images: Sequence[PlacedImage], files: dict[str, bytes]
) -> torch.Tensor:
    """float32[T, vocabulary]: what transformers' own `forward` computes of a sequence and its images."""
    processor = ImageProcessor(str(policy))
    seen = torch.zeros(1, len(token_ids), dtype=torch.int64)
    for image in images:
        seen[0, image.start : image.end] = 1
    given: dict[str, Any] = {}
    if images:
        pixels = [processor.pixels(files[image.digest]) for image in images]
        given["pixel_values"] = torch.cat([torch.from_numpy(one.values) for one in pixels])
        given["image_grid_thw"] = torch.tensor([[1, one.height, one.width] for one in pixels])
        given["mm_token_type_ids"] = seen
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, **given).logits[0].float()
