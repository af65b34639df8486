"""Checks of the environments: their tasks and rows, and the first prompt of each, for which each is reset once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.unawaited import UnawaitedLog, without_await
from ..configs.checks import BUILT_IN_AGENTS
from ..configs.suites import suites_of
from ..errors import ConfigError, EnvError, user_line, with_deadline
from .image_checks import check_opening
from .row_counts import check_row_counts
from .run_inputs import RunInputs

if TYPE_CHECKING:
    from ..envs import EnvPart, Observation


def environment(inputs: RunInputs) -> str:
    """There are tasks to train and to evaluate on, as many as the run began with, and every row of them can be used."""
    from ..envs import require_penalties

    parts = inputs.train
    require_penalties(parts, inputs.config.rollout.failures)
    check_row_counts(inputs)
    _check_first_tasks(parts)
    whole = sum(part.share for part in parts)
    shown = [f"{p.name} {p.share / whole:.0%}" if len(parts) > 1 else p.name for p in parts]
    found = [", ".join(shown), *_rows(parts, "to train on")]
    for name, played in inputs.suites.items():
        found += _rows(played, f"to evaluate on{f' in {name}' if name else ''}")
        _check_first_tasks(played)
    return "; ".join(found)


def _check_first_tasks(parts: Sequence[EnvPart]) -> None:
    from ..envs import Task

    for part in parts:
        try:
            task: object = part.source.task(0)
        except Exception as error:  # whatever the user's own code raises
            raise ConfigError(
                f"env: {part.name} raised {type(error).__name__} for task 0: {error}{_raising_line(error)}"
            ) from error
        if why := without_await(task):
            raise ConfigError(f"env: {part.name}: {why} for task 0; `task` is a plain function, `def task`")
        if not isinstance(task, Task) or not isinstance(task.id, str):
            wanted = "return Task(id, payload), the id a text"
            raise ConfigError(f"env: {part.name} returned {task!r:.100} for task 0; {wanted}")


def _rows(parts: Sequence[EnvPart], what: str) -> list[str]:
    """Read all rows of data sets; how many there are. Raises ConfigError naming the first that is broken."""
    from ..envs.adapters.nemo_gym import NemoGymEnv
    from ..envs.dataset.source import DatasetSource

    sources = {part.name: part.source for part in parts if isinstance(part.source, DatasetSource | NemoGymEnv)}
    for source in sources.values():
        source.check()
    return [f"{name}: {len(source)} rows {what}" for name, source in sources.items()]


def prompt(inputs: RunInputs) -> str:
    """The first prompt of every environment is shorter than `agent.max_tokens`; longer ones of data sets are counted."""
    config = inputs.config
    if config.agent.kind not in BUILT_IN_AGENTS:
        return f"only {config.agent.kind} knows it"
    if config.launch.hosts == "many":
        return "not checked: the environments run on other hosts"
    longest, long, suites = 0, list[str](), suites_of(config)
    for name, left_out in inputs.leave_out_long_prompts().items():
        key, agent = (f"evaluation.suites.{name}", suites[name].agent) if name else ("agent", config.agent)
        for part in inputs.suites[name] if name else inputs.train:
            if not part.self_played:  # its library makes its prompts
                longest = max(longest, _first_prompt(inputs, part, key, agent.max_tokens))
        where = f" in {name}" if name else ""
        long += [
            f"; {part}{where}: {n} prompts of {agent.max_tokens} tokens or more are left out"
            for part, n in left_out.items()
            if n
        ]
    return f"{longest} of {config.agent.max_tokens} tokens{''.join(long)}"


def _first_prompt(inputs: RunInputs, part: EnvPart, key: str, room: int) -> int:
    """Tokens of the prompt of task 0. Raises ConfigError: they leave no room below `room`, which `key`.max_tokens sets, or the chat
    format has no tool calls."""
    from ..envs.sandbox import closing_pools
    from .prompts import prompt_tokens

    config, renderer = inputs.config, inputs.renderer()
    opening = asyncio.run(closing_pools(_opening(part, config.rollout.step_s)))
    check_opening(config, renderer, part.name, opening)
    tokens = prompt_tokens(renderer, config.agent, opening)
    if tokens >= room:
        raise ConfigError(
            f"{key}.max_tokens: {room} leaves no room for an answer: the prompt of task 0 of {part.name} has {tokens} "
            f"tokens; allowed are {tokens + 1} and more"
        )
    if opening.tools and not getattr(renderer, "supports_tools", True):  # only `default` may not
        raise ConfigError(
            f"agent.renderer: {config.agent.renderer!r} is the model's chat template, which has no known form of tool "
            f"calls; {part.name} has the tool {opening.tools[0].name!r}; allowed are formats with tool calls, see "
            "docs/rollout.md"
        )
    return tokens


async def _opening(part: EnvPart, step_s: float) -> Observation:
    from ..envs import Observation
    from ..envs.base import check_images, checked

    env = part.source.make()
    hint = "check the environment, or raise rollout.episode_s, which limits a step, too"
    try:
        with UnawaitedLog() as unawaited:
            work = env.reset(part.source.task(0))
            opening = await with_deadline(step_s, work, who=part.name, waits_for="the reset of task 0", hint=hint)
            opening = checked(opening, Observation)
            check_images(opening.messages)
        if unawaited.lines:
            raise EnvError(unawaited.lines[0])
    except EnvError as error:
        raise ConfigError(f"env: {part.name}: the reset of task 0: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        raise ConfigError(
            f"env: {part.name} raised {type(error).__name__} in the reset of task 0: {error}{_raising_line(error)}"
        ) from error
    finally:
        with contextlib.suppress(Exception):  # episodes report it
            await with_deadline(step_s, env.close(), who=part.name, waits_for="its environment to close", hint=hint)
    if not opening.messages or opening.messages[-1].role == "assistant":
        raise ConfigError(f"env: {part.name}: the reset of task 0 returned no message for the policy to answer")
    return opening


def _raising_line(error: BaseException) -> str:
    """The user's line that raised, for the end of a message."""
    line = user_line(error)
    return f" ({line})" if line else ""
