"""What one server is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

import msgspec

from ...configs.schema import Fault


class Options(msgspec.Struct, frozen=True):
    """One server.

    Attributes:
        kind: what computes the tokens.
        model: a Hugging Face folder or hub name.
        host, port: where to listen.
        dtype: numbers that the model computes in.
        seed: of sampling; replicas need different ones.
        memory: bytes of KV cache, or a share of the GPU's memory in (0, 1).
        max_concurrent: sequences decoded at once.
        max_tokens: of a prompt and its completion together.
        replica: which replica this is, for faults.
        faults: what goes wrong; `fake` only.
    """

    kind: Literal["transformers", "fake"]
    model: str
    host: str
    port: int
    dtype: Literal["float32", "bfloat16"]
    seed: int
    memory: int | float
    max_concurrent: int
    max_tokens: int
    replica: int = 0
    faults: tuple[Fault, ...] = ()

    def arguments(self) -> list[str]:
        """The command line that `parse` turns into these options."""
        values = msgspec.structs.asdict(self) | {"faults": msgspec.json.encode(self.faults).decode()}
        return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]


def parse(arguments: Sequence[str]) -> Options:
    """The options that a command line spells. Ends the process with a usage line when it spells none."""
    parser = argparse.ArgumentParser("slipstream.rollout.server", description="Slipstream's own inference server.")
    for name in ("kind", "model", "host", "port", "dtype", "seed", "memory", "max-concurrent", "max-tokens"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--replica", default="0")
    parser.add_argument("--faults", default="[]", help="JSON; `fake` only")
    values = vars(parser.parse_args(arguments))
    faults = values.pop("faults")
    try:
        values["faults"] = msgspec.json.decode(faults, type=tuple[Fault, ...])
        values["memory"] = float(values["memory"]) if "." in values["memory"] else int(values["memory"])
        return msgspec.convert(values, Options, strict=False)
    except (ValueError, msgspec.MsgspecError) as error:
        parser.error(str(error))
