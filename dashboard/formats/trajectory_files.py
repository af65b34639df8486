"""The trajectories of a run as one file for other programs: JSONL, Parquet, or a log of Inspect.

Invariants:
- A file is whole or absent: a run that goes on, a full disk and an interrupt leave no part of one under its name.
- Rows are written as they are read. Inspect's library holds a log in memory as a whole, in a process of its own, and so takes a
  limited number of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ...common.fsio import part_of
from ...common.libraries import load_library
from ...configs import RUN_CONFIG
from ...errors import ConfigError, DeadlineExceeded, StoreError
from ..runs import WatchedRun
from .rows import TrajectoryRow, Wanted, rows

ENDINGS = {"jsonl": "jsonl", "parquet": "parquet", "inspect": "eval"}  # of the file's name, by kind
ROW_GROUP_TOKENS, ROW_GROUP_ROWS = 1 << 18, 512  # what is in memory of a Parquet file that is written
SAMPLES_LIMIT = 10_000  # of one Inspect log: some hundred MiB in its process, and more than its viewer lists with ease
INSPECT = str(Path(__file__).with_name("inspect_log.py"))
INSPECT_S = 1800.0  # longest that its library may take: it writes some hundred samples per second
Write = Callable[[Path, Iterable[TrajectoryRow]], int]  # to a file; gives the number of rows


def export_trajectories(
    run: WatchedRun, kind: str, out: Path | None, wanted: Wanted, python: str = ""
) -> tuple[Path, int]:
    """Write the `wanted` trajectories of `run` to `out`, by default `RUN/trajectories.KIND` or `RUN/evaluation-trajectories.KIND`.
    Gives the file and the number of its rows. `python` is an interpreter that has inspect-ai, by default this one.

    Raises:
        ConfigError: the file exists or cannot be there, a library is missing, or there is nothing to write.
        StoreError: the buffer cannot be read, or the file cannot be written.
    """
    name = "trajectories" if wanted.evaluation is None else "evaluation-trajectories"
    out = out or run.folder / f"{name}.{ENDINGS[kind]}"
    if out.exists():
        raise ConfigError(f"{out} exists; remove it, or name another file with -o")
    if not out.parent.is_dir():
        raise ConfigError(f"-o {out}: there is no folder {out.parent}")
    write: Write
    match kind:
        case "jsonl":
            write = _write_jsonl
        case "parquet":
            write = functools.partial(_write_parquet, load_library("--to parquet", "pyarrow", "data"))
        case _:
            write = functools.partial(_write_inspect, _inspect_python(python), run)
    found = rows(run, wanted, arrays=kind != "inspect")
    first = next(found, None)
    if first is None:
        of = " of evaluations" if wanted.evaluation is not None else " of these steps" if wanted.versions else ""
        raise ConfigError(f"{run.folder} has no trajectories{of} to export")
    try:
        with part_of(out) as part:
            number = write(part, itertools.chain((first,), found))
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {os.strerror(error.errno or 0)}") from error
    return out, number


# --- JSONL --------------------------------------------------------------------------------------------------------


def _write_jsonl(path: Path, found: Iterable[TrajectoryRow]) -> int:
    encode = msgspec.json.Encoder(enc_hook=_listed).encode
    with path.open("wb") as file:
        return sum(1 for row in found if file.write(encode(row) + b"\n"))


def _listed(array: Any) -> list[Any]:
    """An array as JSON has it: the shortest numbers that are the same float32."""
    if array.dtype == np.float32:
        array = array.astype(np.str_).astype(np.float64)
    return array.tolist()


# --- Parquet ------------------------------------------------------------------------------------------------------


def parquet_schema(pa: Any) -> Any:
    """The columns, by the fields of `TrajectoryRow`. Mappings are lists of names and values, which every reader knows."""
    text, whole, number, truth = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    numbers = pa.list_(pa.struct({"name": text, "value": number}))
    span = {"start": whole, "end": whole, "version": whole, "kv_version": whole}
    turn = {"start": whole, "end": whole, "finish_reason": text, "asked": number, "queued_s": number, "first_s": number}
    turn |= {"decode_s": number, "cached": whole, "replica": text, "temperature": number}
    call = {"begin": number, "end": number, "what": text, "tool": text, "error": text}
    message = {"start": whole, "end": whole, "role": text, "name": text, "turn": whole, "text": text, "malformed": text}
    image = {"start": whole, "end": whole, "digest": text, "kind": text, "height": whole, "width": whole}
    types = {
        **dict.fromkeys(("id", "episode_id"), text),
        **dict.fromkeys(("group_id", "attempt", "member", "branch"), whole),
        **dict.fromkeys(("task_id", "env"), text),
        "reward": number,
        "turn_rewards": pa.list_(number),
        "outcome": pa.struct({"kind": text, "reason": text, "detail": text}),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(truth),
        "behavior_logprobs": pa.list_(pa.float32()),
        "version_spans": pa.list_(pa.struct(span)),
        "turns": pa.list_(pa.struct(turn)),
        "env_calls": pa.list_(pa.struct(call)),
        "messages": pa.list_(pa.struct(message)),
        "images": pa.list_(pa.struct(image)),
        "timings": numbers,
        "metrics": numbers,
        **dict.fromkeys(("started", "delivered_time"), number),
        **dict.fromkeys(("account", "withheld"), text),
        "loss_from": whole,
        **dict.fromkeys(("reason", "group_state"), text),
        "leased_at": whole,
        **dict.fromkeys(("leased_time", "ready_time", "taken_time"), number),
        **dict.fromkeys(("trained_at", "step"), whole),
        "evaluation": text,
    }
    return pa.schema([(name, types[name]) for name in TrajectoryRow.__struct_fields__])


def _write_parquet(pa: Any, path: Path, found: Iterable[TrajectoryRow]) -> int:
    parquet = load_library("--to parquet", "pyarrow.parquet", "data")
    schema, number = parquet_schema(pa), 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for group in _groups(found):
            columns = [
                pa.array([_cell(getattr(row, name)) for row in group], type=schema.field(name).type)
                for name in schema.names
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            number += len(group)
    return number


def _groups(found: Iterable[TrajectoryRow]) -> Iterator[list[TrajectoryRow]]:
    group, tokens = list[TrajectoryRow](), 0
    for row in found:
        group.append(row)
        tokens += 0 if row.token_ids is None else len(row.token_ids)
        if tokens >= ROW_GROUP_TOKENS or len(group) >= ROW_GROUP_ROWS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _cell(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    return [{"name": name, "value": one} for name, one in value.items()] if isinstance(value, dict) else value


# --- Inspect ------------------------------------------------------------------------------------------------------


def _inspect_python(python: str) -> str:
    """An interpreter that has inspect-ai. Raises ConfigError."""
    python = python or sys.executable
    try:
        asked = [python, "-c", "import importlib.util as u; print(u.find_spec('inspect_ai') is not None)"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--python {python}: it does not run: {error}") from None
    if answer.strip() != "True":
        raise ConfigError(
            f"--to inspect: {python} has no inspect-ai; make an environment by `bash requirements/install-env.sh inspect`, and "
            "name it by --python .venv-inspect/bin/python"
        )
    return python


def _write_inspect(python: str, run: WatchedRun, path: Path, found: Iterable[TrajectoryRow]) -> int:
    config, _ = run.config()
    head = {
        "name": run.name,
        "model": Path(config.model.path).name if config else "policy",
        "active": run.is_active(),
        "created": (run.folder / RUN_CONFIG).stat().st_mtime,
    }
    with tempfile.TemporaryDirectory(prefix="slipstream-export-") as folder:
        source = Path(folder) / "rows.jsonl"
        if (number := _write_jsonl(source, itertools.islice(found, SAMPLES_LIMIT + 1))) > SAMPLES_LIMIT:
            raise ConfigError(
                f"--to inspect: more than {SAMPLES_LIMIT} trajectories are too many for one log; name fewer steps by --step"
            )
        command = [python, INSPECT, json.dumps(head), str(source), str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSPECT_S, check=False)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                "slipstream export", "inspect-ai to write the log", INSPECT_S, "name fewer steps"
            ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StoreError(f"--to inspect: {python} could not write the log: {last}")
    return number
