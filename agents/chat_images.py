"""Images in the chat format: a message as a list of parts, and where the chat format has put the images of messages.

    Message("user", "How many? Answer.", images=(Image(png, at=10),))
    [{"type": "text", "text": "How many? "}, {"type": "image", "image": png}, {"type": "text", "text": "Answer."}]

Invariants:
- A message without images stays text: what a session shows without images touches nothing here.
- Every image of a message has its own tokens, or there is an error: a chat format drops none unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..common.images import PlacedImage, digest_of, kind_of
from ..envs.base import Message
from ..errors import PolicyError

if TYPE_CHECKING:
    from renderers import RenderedTokens


def chat_parts(message: Message) -> list[dict[str, Any]]:
    """The content of a message in OpenAI's and Hugging Face's form."""
    parts, before = list[dict[str, Any]](), 0
    for image in message.images:
        if text := message.content[before : image.at]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image", "image": image.data})
        before = image.at
    if text := message.content[before:]:
        parts.append({"type": "text", "text": text})
    return parts


def require_text(messages: Sequence[Message]) -> None:
    """Raises PolicyError where a message has an image, for an agent that is given text."""
    if any(message.images for message in messages):
        raise PolicyError("the environment shows images, which agents written elsewhere are not given; see agent.kind")


def placed_images(
    rendered: RenderedTokens, messages: Sequence[Message]
) -> tuple[tuple[PlacedImage, ...], dict[str, bytes]]:
    """The images of `messages` in the tokens that were rendered of them, and their files by digest. Raises PolicyError where the
    chat format has no images."""
    files = [image.data for message in messages for image in message.images]
    if not files:
        return (), {}
    shown = rendered.multi_modal_data
    places = [] if shown is None else shown.mm_placeholders.get("image", [])
    items = [] if shown is None else shown.mm_items.get("image", [])
    if len(places) != len(files) or len(items) != len(files):
        raise PolicyError("messages have images, and this chat format shows none; see agent.renderer and model.path")
    placed, kept = list[PlacedImage](), dict[str, bytes]()
    for place, item, data in zip(places, items, files, strict=True):
        digest, kind = digest_of(data), kind_of(data)
        if kind is None:
            raise PolicyError("an image is neither a PNG nor a JPEG file")
        _, height, width = (int(size) for size in item["image_grid_thw"][0])
        placed.append(PlacedImage(place.offset, place.offset + place.length, digest, kind, height, width))
        kept[digest] = data
    return tuple(placed), kept
