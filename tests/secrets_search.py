"""Secrets of a run's processes, and whether bytes hold any of them, in whatever text they are written.

Private keys and tokens lie in the private folders of the roles. The supervisor's key is only in its memory: it is found there by
its public key.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import zmq
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from slipstream.common.owned_folders import PRIVATE_VARIABLE
from slipstream.launch.run_context import VARIABLE
from slipstream.rollout.engines.access import KEY, TOKENS, ServerAccess
from slipstream.rpc.security import FILE, KeyPair, split_address
from zmq.utils import z85

IN_KEYS = bytes(byte in z85.Z85CHARS for byte in range(256))
"""For each byte whether it is a character of Z85."""

CHUNK = 8 << 20
"""Bytes of memory that are looked at at once."""


def forms(secret: str) -> Iterator[bytes]:
    """How a secret may be written: as it is, its bytes, and both in hexadecimal and base64, at any offset of what is encoded."""
    plain = {secret.encode()}
    with contextlib.suppress(ValueError):
        plain.add(bytes.fromhex(secret))
    if len(secret) == 40:
        plain.add(z85.decode(secret))
    for data in plain:
        yield data
        yield data.hex().encode()
        yield data.hex().upper().encode()
        for before in range(3):  # characters that come before it in a group of three
            for alphabet in (base64.b64encode, base64.urlsafe_b64encode):
                encoded = alphabet(bytes(before) + data)
                yield encoded[4 * bool(before) : len(encoded) - 4]


def found_in(data: bytes, secrets: Iterable[str]) -> list[str]:
    """Those of `secrets` that `data` holds."""
    return [secret for secret in secrets if any(form in data for form in forms(secret))]


def processes_of_run(run_dir: Path) -> Iterator[tuple[str, psutil.Process, dict[str, str]]]:
    """The name of each living role, its process, and its environment; processes that it started, too."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            variables = process.environ()
            if str(run_dir) in variables.get(VARIABLE, "") and PRIVATE_VARIABLE in variables:
                yield variables.get("SLIPSTREAM_ROLE", ""), process, variables


def secrets_of_roles(run_dir: Path) -> dict[str, str]:
    """Secret -> whose it is, of all living roles."""
    found: dict[str, str] = {}
    for role, _, variables in processes_of_run(run_dir):
        folder = Path(variables[PRIVATE_VARIABLE])
        with contextlib.suppress(OSError):  # it ends meanwhile
            found[msgspec.json.decode((folder / FILE).read_bytes(), type=KeyPair).secret] = f"key of {role}"
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # it is being written: the next look finds it
            access = msgspec.json.decode((folder / TOKENS).read_bytes(), type=ServerAccess)
            found |= {access.request: "token for requests", access.control: "token for control"}
        with contextlib.suppress(OSError, ValueError):
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
            assert isinstance(key, EllipticCurvePrivateKey)
            found[f"{key.private_numbers().private_value:064x}"] = f"TLS key of {role}"
    return found


def supervisor_key(variables: dict[str, str]) -> str:
    """The public key of the supervisor, which every role is given."""
    key = split_address(json.loads(variables[VARIABLE])["addresses"]["supervisor"])[1]
    assert key
    return key


def secret_in_memory(pid: int, public: str) -> str | None:
    """The secret key of `public` in the memory of a process; None where it is not there."""
    for data in _memory(pid):
        for candidate in keys_in(data):
            with contextlib.suppress(ValueError, zmq.ZMQError):  # forty letters that are no key
                if zmq.curve_public(candidate).decode() == public:
                    return candidate.decode()
    return None


def keys_in(data: bytes) -> set[bytes]:
    """What may be keys in Z85: forty characters of it. One that is followed by another such character is not found: strings end
    with a zero byte."""
    found = set[bytes]()
    for begin in range(0, len(data), CHUNK):
        part = data[max(0, begin - 41) : begin + CHUNK]
        inside = np.frombuffer(b"\0" + part.translate(IN_KEYS) + b"\0", np.bool_)
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        starts = edges[::2][edges[1::2] - edges[::2] == 40]
        found |= {part[start : start + 40] for start in starts.tolist()}
    return found


def _memory(pid: int) -> Iterator[bytes]:
    """The private writable memory of a process, where Python keeps its objects."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in maps:
            span, mode, _, _, inode, *_ = line.split()
            if not mode.startswith("rw") or inode != "0":
                continue
            begin, end = (int(one, 16) for one in span.split("-"))
            with contextlib.suppress(OSError):
                memory.seek(begin)
                yield memory.read(end - begin)
