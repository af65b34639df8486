"""Whether a folder is one folder for several hosts: one of them writes a file of random content there, and the others read it.

Invariants:
- The name is new each time: no host has kept an answer about it.
- The file is removed at the end.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...errors import ConfigError


class FolderProof(msgspec.Struct, frozen=True):
    """A file that a host has written, and what is in it."""

    path: str
    content: str


@contextlib.contextmanager
def folder_proof(folder: Path) -> Iterator[FolderProof]:
    """A proof in `folder`, for as long as the block lasts."""
    proof = FolderProof(str(folder / f".shared-{secrets.token_hex(8)}"), secrets.token_hex(16))
    path = Path(proof.path)
    path.write_text(proof.content)
    try:
        yield proof
    finally:
        path.unlink(missing_ok=True)


def missing_proof(proof: FolderProof) -> str:
    """Why this host does not see the folder of a proof: one line that names the host, empty where it sees it."""
    try:
        if Path(proof.path).read_text() == proof.content:
            return ""
        why = "it reads another file of that name"
    except OSError as error:
        why = error.strerror or str(error)
    return f"{socket.gethostname()}: {why}"


def require_shared(folder: Path, host: str, answers: Mapping[str, tuple[str, str]], named_by: str = "run.dir") -> None:
    """`answers` has the host of each role, and what `missing_proof` said there. Raises ConfigError naming the hosts that do not see
    what `host` wrote in `folder`, and the key or option `named_by` by which a user says where that is."""
    blind = dict[tuple[str, str], list[str]]()
    for role, (address, why) in answers.items():
        if why:
            blind.setdefault((address, why), []).append(role)
    if not blind:
        return
    named = "; ".join(f"{address}, the host of {', '.join(roles)} ({why})" for (address, why), roles in blind.items())
    raise ConfigError(
        f"{named_by}: {folder} is not the same folder on all hosts: a file that {host} wrote there is not seen by {named}; mount "
        "one file system at this path on all of them, or name a folder on one that they share"
    )
