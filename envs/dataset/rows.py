"""Rows of a data set by their number: JSON lines, Parquet, or a name on a hub.

Invariants:
- A row is a JSON object. Rows are numbered from 0 and never change their number.
- JSON lines are mapped, not read: memory holds an index of 16 bytes a row. Parquet is held in memory. The `datasets` package maps
  what it has downloaded.
- `row` is called by several threads at once.
"""

from __future__ import annotations

import importlib
import mmap
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from ...common.libraries import load_library
from ...common.modelscope import PREFIX, is_on_modelscope, local_dataset
from ...errors import ConfigError
from ..base import JSON
from ..epochs import Numbers
from ..loading import require_file

JSON_LINES = (".jsonl", ".ndjson", ".json")
CHUNK = 1 << 26  # bytes of a file that are searched for line ends at once
EMPTY = 2  # a line of so many bytes holds at most its own line end
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Rows(Protocol):
    def __len__(self) -> int: ...

    def row(self, number: int) -> JSON:
        """Raises ValueError: what is there is no JSON object."""
        ...

    def place(self, number: int) -> str:
        """Where the row is, for messages: a file and a line, or a data set and a row."""
        ...

    def sizes(self, column: str) -> Numbers | None:
        """For each row, bytes that the text in `column` (text or messages) surely does not exceed; None where that is not known
        without reading the rows."""
        ...


def require_rows(key: str, path: str) -> None:
    """Raises ConfigError naming `key` where `path` names a file and there is none; a name on the hub is not looked up."""
    if Path(path).suffix in (*JSON_LINES, ".parquet"):
        require_file(key, path)


def open_rows(key: str, path: str) -> Rows:
    """The rows of a file, of a folder that the `datasets` package reads, or of a hub name. Raises ConfigError naming `key`: there
    is no such file, it is empty or of another kind, or a package that it needs is missing."""
    file = Path(path)
    require_rows(key, path)
    if file.is_file():
        if file.suffix == ".parquet":
            rows: Rows = ArrowRows(_parquet(key, path), path)
        elif file.suffix in JSON_LINES:
            rows = JsonLines(key, file)
        else:
            raise ConfigError(
                f"{key}: {path} is neither of {', '.join(JSON_LINES)}, one JSON object a line, nor .parquet"
            )
    else:
        rows = HubRows(key, path)
    if not len(rows):
        raise ConfigError(f"{key}: {path} has no rows")
    return rows


class JsonLines:
    """A file of one JSON object a line; empty lines are skipped."""

    def __init__(self, key: str, path: Path) -> None:
        self._path = path
        if not path.stat().st_size:
            raise ConfigError(f"{key}: {path} is empty")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = len(BYTE_ORDER_MARK) if self._bytes[:3] == BYTE_ORDER_MARK else 0
        if self._bytes[start : start + 64].lstrip()[:1] == b"[":
            raise ConfigError(
                f"{key}: {path} holds one JSON list; write its objects one a line, without commas between them"
            )
        whole = np.frombuffer(self._bytes, dtype=np.uint8)
        found = [np.flatnonzero(whole[i : i + CHUNK] == ord("\n")) + i + 1 for i in range(0, len(whole), CHUNK)]
        ends = np.concatenate([*found, [len(whole)]])
        starts = np.concatenate([[start], ends[:-1]])
        (self._lines,) = np.nonzero(ends - starts > EMPTY)
        self._starts, self._ends = starts[self._lines], ends[self._lines]

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, number: int) -> JSON:
        try:
            return msgspec.json.decode(self._bytes[self._starts[number] : self._ends[number]], type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"no JSON object: {error}") from None

    def place(self, number: int) -> str:
        return f"{self._path}, line {self._lines[number] + 1}"

    def sizes(self, column: str) -> Numbers | None:
        return self._ends - self._starts


class ArrowRows:
    """An Arrow table."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, number: int) -> JSON:
        return self._table.slice(number, 1).to_pylist()[0]

    def place(self, number: int) -> str:
        return f"{self._name}, row {number + 1}"

    def sizes(self, column: str) -> Numbers | None:
        pc = importlib.import_module("pyarrow.compute")  # the table came from it
        if column not in self._table.column_names:
            return None
        values = self._table.column(column)
        if str(values.type) not in ("string", "large_string"):
            return None
        return np.asarray(pc.fill_null(pc.binary_length(values), 0).to_numpy(), dtype=np.int64)


class HubRows:
    """`NAME`, `NAME:SUBSET`, either with `@SPLIT` behind it (`train` unless given), read by the `datasets` package: a name on the
    hub, `modelscope:ORG/NAME`, or a folder."""

    def __init__(self, key: str, path: str) -> None:
        where, _, split = path.partition("@")
        hub = PREFIX if is_on_modelscope(where) else ""
        name, _, subset = where.removeprefix(hub).partition(":")
        datasets = load_library(f"{key}: {path} is no file, and a hub name", "datasets", "data")
        self._path = path
        if hub:
            name = local_dataset(hub + name, key)
        try:
            self._rows = datasets.load_dataset(name, subset or None, split=split or "train")
        except Exception as error:  # the package raises what its many sources raise
            line = " ".join(str(error).split())
            raise ConfigError(
                f"{key}: {path} is no file, and `datasets` cannot load it: {type(error).__name__}: {line}"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> JSON:
        return self._rows[int(number)]

    def place(self, number: int) -> str:
        return f"{self._path}, row {number + 1}"

    def sizes(self, column: str) -> Numbers | None:
        return None


def _parquet(key: str, path: str) -> Any:
    parquet = load_library(key, "pyarrow.parquet", "data")
    try:
        return parquet.read_table(path)
    except Exception as error:  # pyarrow has an error for every layer of a file
        raise ConfigError(f"{key}: {path} cannot be read as Parquet: {' '.join(str(error).split())}") from error
