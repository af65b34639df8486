"""The weights of a model in a folder or on a hub, read slice by slice from its safetensors: a rank reads what it holds, and nothing
else.

Invariants:
- At most one slice is in memory at a time; of a parameter that transformers makes of several tensors, that parameter's. Files are
  mapped, and what was read of them can be dropped by the kernel at any time.
- Every parameter and every saved buffer is read, or the error names it. Tensors that the model has no use for are not read.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..common.modelscope import is_on_modelscope, local_folder
from ..errors import ConfigError, first_line
from ..weightsync.checkpoint_layout import CheckpointLayout
from .hub import require_model
from .model import MODEL_KEY, require_unquantized

FILES = ("*.safetensors", "*.json")
Rows = Callable[[str], slice]  # of a parameter by name, the rows of its first dimension that are wanted


class WeightFiles(Mapping[str, torch.Tensor]):
    """The tensors in the safetensors of a folder or hub name, each mapped when it is asked for. To be closed. Raises ConfigError
    where there are none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        with self.readable():
            for file in sorted(_folder(path).glob(FILES[0])):
                opened = self._open.enter_context(safe_open(file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        if not self._files:
            raise ConfigError(f"{MODEL_KEY}: {path!r} holds no safetensors; write the model with save_pretrained")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """The rows of the first dimension; a number is one row."""
        file = self._files[name]
        return file.get_slice(name)[rows] if self.shape(name) else file.get_tensor(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"{MODEL_KEY}: the weights of {self._path!r} lack {name!r}")
        with self.readable():
            return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def close(self) -> None:
        self._open.close()
        self._files = {}

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{MODEL_KEY}: the weights of {self._path!r} cannot be read: {first_line(error)}"
            ) from error


def _folder(path: str) -> Path:
    if is_on_modelscope(path):
        return Path(local_folder(path, MODEL_KEY, weights=True))
    folder = Path(path)
    if folder.is_dir():
        return folder
    require_model(path, MODEL_KEY)
    return Path(snapshot_download(path, allow_patterns=list(FILES)))


class WeightReader:
    """Reads the weights of `path` for `model`, which `make_model` made of it; of the model it keeps names and shapes. `missing`
    are parameters that the files need not have. Raises ConfigError: a parameter is missing, or has another shape there."""

    def __init__(self, path: str, model: PreTrainedModel, missing: Collection[str] = ()) -> None:
        require_unquantized(path, model.config)
        self._path = path
        self._layout = CheckpointLayout(model)
        self._files = WeightFiles(path)
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        for name in self._files:
            target, pattern = self._layout.route(name, self._files.shape(name))
            if (target in self._layout.held or pattern is not None) and target not in tied:
                self._sources[target].append((name, pattern))
        ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
        self._wanted = {
            name for name in self._layout.held.keys() - tied - set(missing) if not any(p.search(name) for p in ignored)
        }

    def read(self, rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
        """Of every parameter the `rows` of it, in the dtype of the files. The caller takes one before it asks for the next."""
        unread = set(self._wanted)
        with self._files.readable():
            for target, sources in self._sources.items():
                for name, tensor in self._read(target, sources, rows):
                    if name in self._layout.held:
                        unread.discard(name)
                        yield name, tensor
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise ConfigError(f"{MODEL_KEY}: the weights of {self._path!r} lack {min(unread)!r}{more}")

    def close(self) -> None:
        self._files.close()

    def _read(
        self, target: str, sources: list[tuple[str, str | None]], rows: Rows
    ) -> Iterator[tuple[str, torch.Tensor]]:
        first, pattern = sources[0]
        if pattern is None:
            self._check(first, target, self._files.shape(first))
            yield target, self._files.rows(first, rows(target))
            return
        stacked = self._layout.held.get(target)
        by_pattern: dict[str, list[str]] = defaultdict(list)
        for name, one in sources:
            by_pattern[one or ""].append(name)
        if stacked and self._layout.stacks(pattern) and {len(n) for n in by_pattern.values()} == {stacked[0]}:
            wanted = rows(target)
            if parts := [
                (name, one, self._files[name])
                for one, names in by_pattern.items()
                for name in sorted(names, key=_number)[wanted]
            ]:
                yield from self._layout.convert(target, parts).items()
            else:
                yield target, torch.empty(0, *stacked[1:])
            return
        parts = [(name, one or "", self._files[name]) for name, one in sources]
        for name, made in self._layout.convert(target, parts).items():
            self._check(target, name, tuple(made.shape))
            yield name, made[rows(name)] if made.ndim else made

    def _check(self, source: str, name: str, shape: tuple[int, ...]) -> None:
        held = self._layout.held.get(name, shape)
        if held != shape:
            raise ConfigError(
                f"{MODEL_KEY}: {source!r} of {self._path!r} has the shape {list(shape)}, by the config it is {list(held)}"
            )


def _number(name: str) -> list[int]:
    """By which the tensors of a list of modules are ordered."""
    return [int(digits) for digits in re.findall(r"\d+", name)]
