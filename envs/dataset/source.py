"""The data set as an environment: a row is a task, answered once, scored by the reward function.

Invariants:
- Every row is the task of exactly one index per epoch, and rows held out for evaluation are never trained on: see `epochs.py`.
- All processes leave out the same rows for the length of their prompts, see `leave_out_long_prompts`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...configs.environments import DataSection, Dataset
from ...errors import ConfigError, EnvError
from ..base import JSON, Message, Observation, StepResult, Task
from ..epochs import EpochOrder, numbers_of_split
from ..simple import SimpleEnv, Split
from .examples import MISSING, Example, find_columns, lookup, read_example
from .rewards import load_reward
from .rows import open_rows
from .traces import TaskTrace, read_traces

TEMPLATE_TOKENS = 64  # more than a chat format adds to a message


class DatasetSource(SimpleEnv):
    """The rows of one split, and the episode on one of them."""

    def __init__(self, config: DataSection, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError, naming a key below `key`: a file, a column, a package or the reward is missing or unusable, or the
        split has no rows."""
        super().__init__(split=split, seed=seed)
        self.config = config
        self.key = key
        self._reward = load_reward(f"{key}.reward", config.reward)
        other = config.evaluation if isinstance(config.evaluation, str) else ""
        path, self._path_key = (
            (other, f"{key}.evaluation") if split == "eval" and other else (config.path, f"{key}.path")
        )
        self._rows = open_rows(self._path_key, path)
        self.name = Path(config.path.partition("@")[0]).stem
        numbers = numbers_of_split(len(self._rows), config.evaluation, split, key=key, what=f"rows of {config.path}")
        self._order = EpochOrder(numbers, split, seed)
        first = self._first_row()
        self._columns = find_columns(key, config, first, needs_answer=self._reward.needs_answer)
        self._reward.check(f"{key}.reward", first)

    def _first_row(self) -> JSON:
        try:
            return self._rows.row(0)
        except ValueError as error:
            raise ConfigError(f"{self._path_key}: {self._rows.place(0)}: {error}") from None

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._order.numbers)

    def task(self, index: int) -> Task:
        """See `TaskSource.task`. Raises EnvError where the row cannot be used."""
        number = self.row_number(index)
        try:
            example = self._example(number)
        except ValueError as error:
            raise EnvError(str(error)) from None
        name = lookup(example.row, self._columns.id) if self._columns.id else MISSING
        row_id = number if name is MISSING else name
        return Task(f"{self.name}-{self.split}-{row_id}", {"row": example.row, "reference": example.reference})

    def row(self, number: int) -> JSON:
        """A row by its number in the file."""
        return self._rows.row(number)

    def row_number(self, index: int) -> int:
        """The number of a task's row in its file."""
        return self._order.number(index)

    def _example(self, number: int) -> Example:
        """Raises ValueError naming the place of a row that cannot be used."""
        try:
            return self._read(self._rows.row(number))
        except ValueError as error:
            raise ValueError(f"{self._rows.place(number)}: {error}") from None

    def _read(self, row: JSON) -> Example:
        if missing := sorted(self._reward.columns - set(row)):
            raise ValueError(
                f"it has no {', '.join(map(repr, missing))}, which the reward {self._reward.name} needs; it has {', '.join(row)}"
            )
        return read_example(row, self._columns, self.config.system, needs_answer=self._reward.needs_answer)

    def check(self) -> None:
        """Read every row of this split. Raises ConfigError naming the file and the line of the first that cannot be used."""
        for number in self._order.numbers.tolist():
            example = self._valid_example(number)
            try:
                self._reward.check_reference(example.reference)
            except EnvError as error:
                raise ConfigError(f"{self._path_key}: {self._rows.place(number)}: {error}") from None

    def _valid_example(self, number: int) -> Example:
        try:
            return self._example(number)
        except ValueError as error:
            raise ConfigError(f"{self._path_key}: {error}") from None

    def traces(self) -> list[TaskTrace]:
        """The expert traces of the tasks of this split, in the order of their tasks' rows; those of other rows of the same file are
        left out. Raises ConfigError naming the place of a trace that cannot be used, or that answers no row."""
        if not isinstance(self.config, Dataset) or not self.config.traces:
            return []
        key = f"{self.key}.traces"
        by_prompt = read_traces(key, self.config.traces, self._columns.prompt, self.config.system)
        unmatched, found = dict(by_prompt), list[TaskTrace]()
        index_of = {self.row_number(index): index for index in range(len(self))}
        for number in range(len(self._rows)):
            prompt = self._valid_example(number).messages
            unmatched.pop(prompt, None)
            if number in index_of:
                found += [TaskTrace(index_of[number], one) for one in by_prompt.get(prompt, ())]
        for traces in unmatched.values():
            raise ConfigError(
                f"{key}: {traces[0].place}: no row of {self.config.path} has its {self._columns.prompt!r}; a trace answers a row, "
                "whose prompt it repeats"
            )
        return found

    def leave_out_long_prompts(self, fits: Callable[[Observation], bool], max_tokens: int) -> int:
        """Leave out the rows whose prompt does not fit; returns how many. Only rows with enough text for `max_tokens` are read: a
        token has at least a byte. Raises ConfigError where none is left."""
        sizes, numbers = self._rows.sizes(self._columns.prompt), self._order.numbers
        suspects = np.ones(len(numbers), dtype=bool)
        if sizes is not None:
            suspects = sizes[numbers] + len(self.config.system.encode()) + TEMPLATE_TOKENS >= max_tokens
        keep = np.ones(len(numbers), dtype=bool)
        for position in np.flatnonzero(suspects).tolist():
            keep[position] = fits(Observation(self._valid_example(int(numbers[position])).messages))
        if not keep.any():
            raise ConfigError(
                f"agent.max_tokens: {max_tokens} leaves no room for an answer: every prompt of {self.name} has as many tokens"
            )
        self._order.keep(keep)
        return int(np.count_nonzero(~keep))

    async def reset(self, task: Task) -> Observation:
        self._current = self._read(task.payload["row"])
        return Observation(self._current.messages)

    async def step(self, message: Message) -> StepResult:
        score = await self._reward(message, self._current)
        return StepResult(reward=score.reward, done=True, metrics=score.metrics)
