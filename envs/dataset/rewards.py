"""Rewards of data sets: a verifier by its name, or a function of the user's, called the way its parameter names ask for.

| parameters | called with |
|---|---|
| `completion`, `row` (may be left out) | the policy's answer, and the whole row |
| `completions`, and any of `prompts`, columns, `**kwargs` | TRL's form: lists of one, as a batch of one answer |
| `solution_str`, and any of `data_source`, `ground_truth`, `extra_info`, `**kwargs` | verl's form: the answer and the reference |

Invariants:
- What the function returns is checked: a number, or a mapping with one under `reward` or `score` (`score` first where the form is
  verl's), whose other numbers are metrics. Anything else, text that reads like a number included, is an error of the environment.
- TRL's and verl's functions get what theirs decode: all that the policy wrote, thinking and the text of calls included.
- A plain function runs in a thread, so it may block; a coroutine function runs on the event loop.
- An exception of the function is reported with its own file and line.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec

from ...common.targets import load_target
from ...errors import ConfigError, EnvError, describe, user_line
from ..base import Message, as_number, checked_metrics, checked_reward
from ..loading import require_file
from ..sandbox import require_sandbox
from ..tools import in_thread
from ..verifiers import REWARDS, choice, exact, f1, gsm8k, require_math
from ..verifiers.code import read_cases
from .examples import Example

IN_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)")
IN_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
OURS = ("completion", "row")
VERL = ("solution_str", "data_source", "ground_truth", "extra_info")
FORMS = "(completion, row), TRL's (prompts, completions, **columns), verl's (solution_str, ground_truth, data_source, extra_info)"
RESULT_KEYS = ("reward", "score")


READERS: Mapping[str, Callable[[str, Any], float]] = {"choice": choice, "exact": exact, "f1": f1, "gsm8k": gsm8k}
"""Verifiers that take microseconds: every reference of a data set is tried before a run starts."""


class Score(msgspec.Struct, frozen=True):
    """The reward of an answer, and numbers beside it."""

    reward: float
    metrics: dict[str, float] = {}


class RewardFunction:
    """A function of the user's. `needs_answer`: it is called with the reference answer. Every row needs its `columns`."""

    def __init__(self, key: str, name: str, function: Callable[..., Any]) -> None:
        """Raises ConfigError naming `key`: its parameters are of no form that can be called."""
        self.name = name
        self._function = function
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (an object whose call is a coroutine)
        )
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}: {name} cannot be called: {error}") from None
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = {p.name for p in parameters if p.name in self._names and p.default is p.empty}
        required |= {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
        self.columns = required - {"prompts", "completions"} if "completions" in self._names else set[str]()
        if "completions" in self._names:
            self._arguments = self._trl
        elif "solution_str" in self._names and required <= set(VERL):
            self._arguments = self._verl
        elif "completion" in self._names and required <= set(OURS):
            self._arguments = self._own_arguments
        else:
            raise ConfigError(f"{key}: {name} takes ({', '.join(p.name for p in parameters)}); allowed are {FORMS}")
        self.needs_answer = "ground_truth" in required and self._arguments == self._verl

    def check(self, key: str, first: Mapping[str, Any]) -> None:
        """Raises ConfigError where the function needs columns that the first row lacks."""
        if missing := sorted(self.columns - set(first)):
            raise ConfigError(
                f"{key}: {self.name} needs {', '.join(missing)}, of which the first row has no column; it has {', '.join(first)}"
            )

    def check_reference(self, reference: Any) -> None:
        return None

    async def __call__(self, answer: Message, example: Example) -> Score:
        """Raises EnvError: the function raised, or returned something else than a reward."""
        arguments = self._arguments(answer, example)
        try:
            if self._is_coroutine:
                result = await self._function(**arguments)
            else:
                result = await in_thread(lambda: self._function(**arguments))
        except Exception as error:  # the user's own code
            raise EnvError(f"the reward {self.name} raised {describe(error)}{_raising_line(error)}") from error
        if self._arguments == self._trl and _is_list(result):
            result = result[0]
        keys = RESULT_KEYS[::-1] if self._arguments == self._verl else RESULT_KEYS
        return read_score(self.name, result, keys)

    def _own_arguments(self, answer: Message, example: Example) -> dict[str, Any]:
        return self._accepted({"completion": answer.content, "row": example.row})

    def _trl(self, answer: Message, example: Example) -> dict[str, Any]:
        text = answer.written or answer.content
        completion = text if isinstance(example.prompt, str) else [{"role": "assistant", "content": text}]
        columns = {name: [value] for name, value in example.row.items() if name not in ("prompts", "completions")}
        return self._accepted({**columns, "prompts": [example.prompt], "completions": [completion]})

    def _verl(self, answer: Message, example: Example) -> dict[str, Any]:
        row = example.row
        given = {"solution_str": answer.written or answer.content, "ground_truth": example.reference}
        return self._accepted(
            {**given, "data_source": row.get("data_source"), "extra_info": row.get("extra_info") or {}}
        )

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments if self._takes_all else {name: v for name, v in arguments.items() if name in self._names}


class VerifierReward:
    """A verifier of `envs.verifiers`, which compares the answer with the reference."""

    needs_answer = True
    columns: Set[str] = frozenset()

    def __init__(self, name: str) -> None:
        """Raises ConfigError: a package or a sandbox that it needs is missing."""
        self.name = name
        if name == "math":
            require_math()
        if name == "code":
            require_sandbox()

    def check(self, key: str, first: Mapping[str, Any]) -> None:
        return None

    def check_reference(self, reference: Any) -> None:
        """Raises EnvError where the verifier could not read a reference; `math` reads it only when it scores."""
        if self.name == "code":
            read_cases(reference)
        elif self.name in READERS:
            READERS[self.name]("", reference)

    async def __call__(self, answer: Message, example: Example) -> Score:
        """Raises EnvError: the reference cannot be read; ToolError: the sandbox failed."""
        return Score(await REWARDS[self.name](answer.content, example.reference))


def load_reward(key: str, name: str) -> RewardFunction | VerifierReward:
    """The verifier `name`, or what `file.py:function` or `package.module:function` names. Raises ConfigError naming `key`."""
    if name in REWARDS:
        try:
            return VerifierReward(name)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None
    if found := IN_FILE.fullmatch(name):
        return RewardFunction(
            key, f"{Path(found['file']).name}:{found['name']}", _from_file(key, found["file"], found["name"])
        )
    if IN_MODULE.fullmatch(name):
        return RewardFunction(key, name, load_target(key, name))
    known = ", ".join(REWARDS)
    raise ConfigError(
        f"{key}: {name!r} is none of {known}, and not of the form file.py:function or package.module:function"
    )


def read_score(name: str, result: Any, keys: Sequence[str] = RESULT_KEYS) -> Score:
    """A checked result of a reward function; of a mapping the reward is under the first of `keys` that it has. Raises EnvError."""
    metrics: dict[str, float] = {}
    try:
        if isinstance(result, Mapping):
            key = next((key for key in keys if key in result), None)
            if key is None:
                raise EnvError(f"it returned {dict(result)!r:.100} without {' or '.join(keys)}")
            metrics = checked_metrics({str(k): v for k, v in result.items() if k != key and as_number(v) is not None})
            result = result[key]
        return Score(checked_reward(result), metrics)
    except EnvError as error:
        raise EnvError(f"the reward {name}: {error}") from None


def _is_list(result: Any) -> bool:
    return (isinstance(result, list | tuple) or getattr(result, "shape", None) == (1,)) and len(result) == 1


def _from_file(key: str, file: str, name: str) -> Callable[..., Any]:
    require_file(key, file)
    path = Path(file).resolve()
    module_name = f"slipstream_reward_{path.stem}_{zlib.crc32(bytes(path)):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code
        raise ConfigError(f"{key}: cannot import {file}: {describe(error)}{_raising_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        own = sorted(n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module_name)
        raise ConfigError(f"{key}: {file} has no function {name!r}; it has {', '.join(own) or 'none'}")
    return function


def _raising_line(error: BaseException) -> str:
    """File and line of the user's code that raised, for the end of a message; "" where none of it ran."""
    return f" ({line})" if (line := user_line(error)) else ""
