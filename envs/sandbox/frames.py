"""The answers of the programs inside a sandbox. What does not have their form was written by the policy, which has taken the
program over."""

from __future__ import annotations

import contextlib
import errno
from typing import cast, get_args

from .base import Ended, ExecResult

FRAME = 4  # bytes of a length
ENVELOPE = 4096  # bytes of an answer beside the texts in it
TAKEN_OVER = "what runs in the sandbox answered in its place"


def parts_of(body: bytes) -> list[bytes]:
    """The parts of an answer, each of which stands behind its length. Raises ValueError."""
    parts, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + FRAME], "big")
        at += FRAME
        if at + size > len(body):
            raise ValueError("a part longer than its answer")
        parts.append(body[at : at + size])
        at += size
    return parts


def result_of(parts: list[bytes]) -> ExecResult:
    """The answer to a command or cell. Raises ValueError."""
    ended, code, out, err = parts
    if ended.decode() not in get_args(Ended):
        raise ValueError(ended)
    texts = out.decode(errors="replace"), err.decode(errors="replace")
    return ExecResult(*texts, int(code), cast(Ended, ended.decode()))


def file_parts(parts: list[bytes], path: str, count: int | None = None) -> list[bytes]:
    """The answer to a request for `path`, in `count` parts. Raises OSError: what prevented it, or the answer has no such form."""
    kind, *rest = parts or [b""]
    if kind == b"error" and len(rest) == 2 and rest[0].isdigit():
        raise OSError(int(rest[0]), rest[1].decode(errors="replace"), path)
    if kind != b"ok" or (count is not None and len(rest) != count):
        raise OSError(errno.EIO, TAKEN_OVER)
    return rest


def folder_of(parts: list[bytes]) -> dict[str, bytes]:
    """Files by their names, of which they are made one after the other. Raises OSError."""
    if len(parts) % 2:
        raise OSError(errno.EIO, TAKEN_OVER)
    found: dict[str, bytes] = {}
    for name, content in zip(parts[::2], parts[1::2], strict=True):
        with contextlib.suppress(UnicodeDecodeError):
            found[name.decode()] = content
    return found
