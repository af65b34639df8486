"""The samplers of `env.sampler`: how many tasks each environment has, and what chooses among them."""

from __future__ import annotations

from typing import Any

from ..buffer.task_table import PoolSampler, SequentialSampler, TaskSampler, TaskTable
from ..configs.environments import LimitedTasks, parts_by_key
from ..errors import ConfigError, EnvError, describe_user_error
from .run_inputs import RunInputs

METHODS = ("observe", "next")  # of a `TaskSampler`


def make_samplers(inputs: RunInputs) -> tuple[list[TaskSampler], list[int]]:
    """Of each environment, in the order in which leases number them: its sampler, and how many tasks it has, 0 without end. Reads
    data sets where a sampler needs their size. Raises ConfigError: a sampler is unknown, raises, or needs a number that there is
    not."""
    samplers, counts, config = list[TaskSampler](), list[int](), inputs.config
    for key, part in parts_by_key(config.env).items():
        tasks = part.tasks if isinstance(part, LimitedTasks) else 0
        if part.sampler != "sequential" and not tasks:
            tasks = inputs.size_of(key)
        samplers.append(_make(f"{key}.sampler", part.sampler, tasks, config.seed))
        counts.append(tasks)
    return samplers, counts


def check_samplers(inputs: RunInputs) -> str:
    """The samplers can be made, and choose a first task. Raises ConfigError."""
    try:
        samplers, tasks = make_samplers(inputs)
        table = TaskTable(samplers, tasks)
        for env in range(len(samplers)):
            table.choose(env, 0)
    except EnvError as error:
        raise ConfigError(str(error)) from error
    names = [part.sampler for part in parts_by_key(inputs.config.env).values()]
    return ", ".join(f"{name} of {count} tasks" if count else name for name, count in zip(names, tasks, strict=True))


def _make(key: str, name: str, tasks: int, seed: int) -> TaskSampler:
    if name == "sequential":
        return SequentialSampler(tasks, seed)
    if name == "pools":
        if not tasks:
            section = key.removesuffix(".sampler")
            raise ConfigError(f"{key}=pools needs an end of the tasks; set {section}.tasks to how many there are")
        return PoolSampler(tasks, seed)
    from ..common.targets import load_target

    factory: Any = load_target(key, name)
    try:
        sampler = factory(tasks=tasks, seed=seed)
    except Exception as error:  # the class is user code
        raise ConfigError(f"{key}: {name}(tasks={tasks}, seed={seed}) raised {describe_user_error(error)}") from error
    missing = [method for method in METHODS if not callable(getattr(sampler, method, None))]
    if missing:
        raise ConfigError(
            f"{key}: {name} has no method {' and no '.join(missing)}; a sampler has observe(task, statistics) and next(draw)"
        )
    return sampler
