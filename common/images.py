"""Images of a conversation: at which positions their tokens stand, and the names of their files.

    message ──Image──> session ──PromptImage──> server          the bytes, and which tokens they are seen at
                          └──PlacedImage──> trajectory, learner     the digest of the bytes, and which tokens they are seen at

Invariants:
- An image is known by the SHA-256 of its file's bytes; equal bytes are one image.
- The tokens of an image are its placeholders, as many as the model's own processor makes of it. They are given, never sampled.
- A placeholder's id that the policy samples, or that stands in a prompt without an image, is a token like any other.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..errors import EnvError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

FAMILIES = ("qwen3_vl",)
"""Model types of Hugging Face configs whose images are rendered, served and trained on here."""

BYTES_LIMIT = 16 << 20  # of one image's file
PIXELS_LIMIT = 16 << 20  # of one image
SIDES_LIMIT = (
    200  # times that the longer side may be the shorter one: `smart_resize` of Qwen's image processors takes no more
)
KINDS: dict[str, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # and how their files begin
NAME = r"^[0-9a-f]{64}\.(png|jpeg)$"  # of an image's file
Position = Annotated[int, Meta(ge=0, lt=1 << 31)]
Patches = Annotated[int, Meta(ge=1, lt=1 << 16)]


class PlacedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens `[start, end)` are the placeholders of an image, which is `height` x `width` patches for the vision tower."""

    start: Position
    end: Position
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    kind: Literal["png", "jpeg"]
    height: Patches
    width: Patches

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.digest}.{self.kind}"

    @property
    def number(self) -> int:
        """A number below 0 for the bytes, of 56 bits: in the place of its tokens it tells one image from another."""
        return -1 - int(self.digest[:14], 16)

    def moved(self, by: int) -> PlacedImage:
        return msgspec.structs.replace(self, start=self.start + by, end=self.end + by)


class PromptImage(msgspec.Struct, frozen=True):
    """The tokens `[start, end)` of a prompt are the placeholders of the image in the file `data`."""

    start: Position
    end: Position
    data: bytes


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kind_of(data: bytes) -> Literal["png", "jpeg"] | None:
    """By how the file begins; None where it is neither."""
    if data.startswith(KINDS["png"]):
        return "png"
    return "jpeg" if data.startswith(KINDS["jpeg"]) else None


@contextmanager
def opened_image(data: bytes) -> Iterator[PillowImage]:
    """The image in a file, before its pixels are decoded. Raises EnvError where it has more of them, or a longer side, than is
    allowed, and what Pillow raises for a broken file."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as opened:
        width, height = opened.size
        if width * height > PIXELS_LIMIT or max(width, height) > SIDES_LIMIT * min(width, height):
            raise EnvError(
                f"an image has {width} x {height} pixels; allowed are {PIXELS_LIMIT} in all, and a side of at most {SIDES_LIMIT} "
                "times the other"
            )
        yield opened


def check_image(data: bytes) -> None:
    """Raises EnvError where `data` is not a whole PNG or JPEG file of at most `BYTES_LIMIT` bytes, or `opened_image` allows it
    not."""
    if kind_of(data) is None:
        raise EnvError(f"an image begins with {bytes(data[:8])!r}; allowed are files of {', '.join(KINDS)}")
    if len(data) > BYTES_LIMIT:
        raise EnvError(f"an image has {len(data)} bytes; allowed are {BYTES_LIMIT}")
    try:
        with opened_image(data) as opened:
            opened.load()
    except EnvError:
        raise
    except Exception as error:  # Pillow raises whatever a broken file makes its decoders raise
        raise EnvError(f"an image cannot be decoded: {error}") from None


def misplaced(images: Iterable[PlacedImage], sampled: NDArray[np.bool_]) -> PlacedImage | None:
    """The first of a sequence's images that is not in given tokens, of bool[T], behind the one before; None where all are. No two
    touch: their tokens would be those of one."""
    at = 0
    for image in images:
        if not at <= image.start < image.end <= len(sampled) or sampled[image.start : image.end].any():
            return image
        at = image.end + 1
    return None


def moved_images(images: Iterable[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    return tuple(image.moved(by) for image in images)
