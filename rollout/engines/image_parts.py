"""The images of a prompt in a request of `/inference/v1/generate`, and how a server reads them.

    {"type": "image_url", "url": "data:image/png;base64,iVBO...", "uuid": "7-11-3"}

This is vLLM's own form: a data URL, and a name that its caller chooses. The name says which tokens are the image, here `[7, 11)`,
and the salt of the request, here 3.

Invariants:
- A server reads an image with the processor that the learner reads it with, and refuses one that has another number of tokens.

Imported by vLLM's processes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ...common.image_processor import ImageProcessor, Pixels
from ...common.images import KINDS, PlacedImage, PromptImage, digest_of, kind_of

NAME = re.compile(r"(\d{1,9})-(\d{1,9})-(.*)", re.ASCII)


class BadImage(ValueError):
    """An image that a request may not have; the message says why."""


class ImagePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One element of `content_parts`."""

    url: str
    uuid: str
    type: Literal["image_url"] = "image_url"

    @classmethod
    def of(cls, image: PromptImage, salt: str) -> ImagePart:
        data = base64.b64encode(image.data).decode()
        return cls(f"data:image/{kind_of(image.data)};base64,{data}", f"{image.start}-{image.end}-{salt}")

    def image(self) -> PromptImage:
        """Raises BadImage."""
        name, (_, _, data) = ImageName.of(self.uuid), self.url.partition(",")
        try:
            return PromptImage(name.start, name.end, base64.b64decode(data, validate=True))
        except ValueError as error:
            raise BadImage(f"an image's url is no base64: {error}") from None


class ImageName(NamedTuple):
    start: int
    end: int
    salt: str

    @classmethod
    def of(cls, uuid: str | None) -> ImageName:
        """Raises BadImage."""
        if match := NAME.fullmatch(uuid or ""):
            return cls(int(match[1]), int(match[2]), match[3])
        raise BadImage(f"an image is called {uuid!r}; allowed are START-END-SALT")


def image_parts(images: Sequence[PromptImage], salt: str) -> dict[str, Any]:
    """What a request with `images` has beside its token ids."""
    return {"content_parts": [ImagePart.of(image, salt) for image in images]}


def check_places(places: Iterable[tuple[int, int]], tokens: int) -> None:
    """Raises BadImage where images are not at `places` of a prompt of so many tokens, in order. None touches the one before, and
    none has the last token."""
    before = 0
    for start, end in places:
        if not before <= start < end < tokens:
            raise BadImage(f"an image at the tokens {start} to {end} of {tokens}")
        before = end + 1


def read_image(processor: ImageProcessor, image: PromptImage) -> tuple[PlacedImage, Pixels]:
    """The image in the file, as the vision tower is given it. Raises BadImage: it cannot be read, or has other tokens."""
    if (kind := kind_of(image.data)) is None:
        raise BadImage(f"an image begins with {image.data[:8]!r}; allowed are files of {', '.join(KINDS)}")
    try:
        pixels = processor.pixels(image.data)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises whatever a broken file makes its decoders raise
        raise BadImage(f"an image cannot be read: {error}") from None
    size = pixels.height, pixels.width
    if (tokens := processor.tokens(pixels)) != image.end - image.start:
        came = image.end - image.start
        raise BadImage(f"an image of {size[0]} x {size[1]} patches came with {came} tokens, it has {tokens}")
    return PlacedImage(image.start, image.end, digest_of(image.data), kind, *size), pixels
