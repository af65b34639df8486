"""What a config names that takes time to make, made once per command that starts a run: its task sources and its chat format.

Invariants:
- A source is made once, a data set is read once, and its prompts are measured once, however many checks look at them.
- `counts` are taken before prompts that are too long are left out of the sources.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..configs import Config
from ..configs.environments import DataSection, LibraryTasks, parts_by_key, traced_sections
from ..configs.sft import SftConfig
from ..configs.suites import suites_of

if TYPE_CHECKING:
    from renderers import Renderer

    from ..envs import EnvPart
    from ..envs.dataset.traces import TaskTrace


class RunInputs:
    """The inputs of a run; nothing is made before it is asked for. `began` is how many tasks of an epoch a resumed run began with,
    by section, see `row_counts.py`; empty for a new run. `pushed`: a learner pushes to the servers."""

    def __init__(self, config: Config, began: Mapping[str, int] | None = None, *, pushed: bool = True) -> None:
        self.config = config
        self.pushed = pushed and not isinstance(config, SftConfig)
        self.began = began or {}

    @property
    def train(self) -> tuple[EnvPart, ...]:
        """The environments to train on. Raises ConfigError as `parts_of`."""
        return self._training[0]

    @property
    def counts(self) -> dict[str, int]:
        """By section, the tasks of an epoch of each environment that has so many and no more: rows of data, and what libraries
        give. Raises ConfigError as `parts_of`."""
        return self._training[1]

    @functools.cached_property
    def _training(self) -> tuple[tuple[EnvPart, ...], dict[str, int]]:
        from ..envs import parts_of

        parts, counts = parts_of(self.config.env, "train", self.config.seed), dict[str, int]()
        for (key, section), part in zip(parts_by_key(self.config.env).items(), parts, strict=True):
            if isinstance(section, DataSection | LibraryTasks):
                counts[key] = part.size
        return parts, counts

    @functools.cached_property
    def traces(self) -> tuple[list[TaskTrace], ...]:
        """Of each environment to train on the expert traces of its tasks, without those whose prompt is too long. Raises
        ConfigError as `DatasetSource.traces`."""
        from ..envs.dataset.source import DatasetSource

        if not traced_sections(self.config.env):
            return ([],) * len(self.train)
        self.leave_out_long_prompts()  # indices of tasks are those that the run will have
        return tuple(part.source.traces() if isinstance(part.source, DatasetSource) else [] for part in self.train)

    @functools.cached_property
    def suites(self) -> dict[str, tuple[EnvPart, ...]]:
        """The environments that each suite is played in. Raises ConfigError as `parts_of`."""
        from ..envs import parts_of

        made, named = dict[str, tuple["EnvPart", ...]](), self.config.evaluation.suites
        for name, suite in suites_of(self.config).items():
            own = name and named[name].env is not None
            key = f"evaluation.suites.{name}.env" if own else "env"
            made[name] = parts_of(suite.env, "eval", self.config.seed, key)
        return made

    def renderer(self) -> Renderer:
        """The chat format, over the tokenizer of the model. Raises ConfigError as `load_renderer`."""
        return self._renderer

    @functools.cached_property
    def _renderer(self) -> Renderer:
        from ..agents import load_renderer
        from ..learner.model import load_tokenizer

        agent = self.config.agent
        return load_renderer(agent.renderer, load_tokenizer(self.config.model.path), thinking=agent.thinking)

    def leave_out_long_prompts(self) -> dict[str, dict[str, int]]:
        """Leave out the tasks whose prompt is too long; how many there are, by environment, of training (the name is empty) and of
        each named suite. Raises ConfigError where none is left."""
        return self._left_out

    @functools.cached_property
    def _left_out(self) -> dict[str, dict[str, int]]:
        from .prompts import leave_out_long_prompts

        played = {"": self.config} | {name: suite for name, suite in suites_of(self.config).items() if name}
        return {
            name: leave_out_long_prompts(self.suites[name] if name else self.train, self._renderer, config.agent)
            for name, config in played.items()
        }

    def size_of(self, key: str) -> int:
        """The tasks of an epoch of the environment of section `key`, without those whose prompt is too long; 0 where they have no
        end."""
        sections = parts_by_key(self.config.env)
        part = self.train[list(sections).index(key)]
        if isinstance(sections[key], DataSection):
            return self.counts[key] - self.leave_out_long_prompts()[""].get(part.name, 0)
        return part.size
