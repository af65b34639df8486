"""The config sections of environments: the built-in kinds, each with its own options.

Invariants:
- A kind is light: no environment library is imported to read, check or show a config.
- Options of a kind are not counted by the bound on the number of fields: a run meets those of its own kinds only.
- Kinds of other packages are `PythonEnv` with another name, see `installed_kinds`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from msgspec import Meta, field, structs

from .section import AboveZero, Fraction, NonNegative, Positive, Section

GROUP = "slipstream.environments"
"""The entry point group of other packages' kinds. An entry point `theirs = "package.module:Factory"` makes
`env: {kind: theirs, a: 1}` another way to write `env: {kind: python, factory: "package.module:Factory", arguments: {a: 1}}`."""


S = TypeVar("S", bound=Section)


class Tasks(Section, frozen=True, kw_only=True):
    share: AboveZero = 1.0
    """In a mixture: its part of the groups, in the same unit as the shares of the other parts."""
    isolate: NonNegative = 0
    """Processes of its own, of each worker, in which its episodes run; 0 runs them in the worker."""
    python: str = ""
    """Python interpreter of these processes, for libraries that do not fit beside ours; empty is ours. One process unless `isolate`
    says how many."""
    address: str = ""
    """`tcp://HOST:PORT` of `slipstream env serve`, which runs the episodes instead, in `isolate` processes there."""
    keys: str = ""
    """The file of keys that this server has made, copied to here; needed where `address` is not on this host."""

    sampler: str = "sequential"
    """Which task a new group gets: `sequential`, `pools` (by how often each was solved; solved ones are retired, hopeless ones
    rare), or `package.module:Class` of your own."""

    @property
    def isolated(self) -> bool:
        """Whether its episodes run outside the worker."""
        return bool(self.isolate or self.python or self.address)


class LimitedTasks(Tasks, frozen=True, kw_only=True):
    """Of an environment that may be trained on a part of its tasks only."""

    tasks: NonNegative = 0
    """Train on its first so many tasks, again and again; 0: all of them. `pools` needs a number where they have no end."""


class EndlessTasks(LimitedTasks, frozen=True, kw_only=True):
    """Of an environment that gives tasks without end: it makes them, or it gives the same ones again and again."""


class LibraryTasks(LimitedTasks, frozen=True, kw_only=True):
    """Of an environment that gives the tasks of a folder or library, each once in an epoch."""


class ReasoningGym(EndlessTasks, frozen=True, tag_field="kind", tag="reasoning_gym"):
    """Tasks generated and verified by reasoning-gym."""

    family: str = "chain_sum"
    """A reasoning-gym dataset name."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of that family, for example `{max_digits: 3}`."""
    calculator: bool = True
    """Offer the calculator tool; without it every episode is one question and one answer."""
    max_turns: Positive = 4
    """Assistant messages before the environment ends the episode."""
    direct_answers: Fraction = 0.5
    """Share of demonstrations that answer at once without the calculator; the habit that training has to unlearn."""


class PythonEnv(EndlessTasks, frozen=True, tag_field="kind", tag="python"):
    """Your own environment."""

    factory: str
    """`package.module:Name`: called with `split` and `seed` and the arguments below, returns a task source."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


class DataSection(Tasks, frozen=True):
    path: str
    """Rows to train on: a `.jsonl` file with one JSON object a line, a `.parquet` file, or what the `datasets` package loads: a hub
    name, `modelscope:ORG/NAME` for ModelScope's hub, or a folder, each with `:SUBSET@SPLIT` or without (split `train` unless
    given)."""
    reward: str
    """`math`, `choice`, `exact`, `f1`, `gsm8k` or `code`, which compare with the reference answer, or `file.py:function` or
    `package.module:function` of your own."""
    evaluation: str | Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Rows to evaluate on: another file or name as in `path`, or the share of the rows of `path` that is held out from training, at
    least one row; 0 holds out none."""
    prompt: str = ""
    """Column of the prompt, text or a list of messages; empty finds `prompt`, `messages` or `question`. A name with dots leads into
    objects."""
    answer: str = ""
    """Column of the reference answer; empty finds `answer`, `solution`, `ground_truth` or `reward_model.ground_truth`."""
    id: str = ""
    """Column of the row's name in reports; empty finds `id`, else rows are numbered."""
    system: str = ""
    """System message before every prompt that has none."""


class Dataset(DataSection, frozen=True, tag_field="kind", tag="dataset"):
    """Your own data: every row is a task, answered once, and scored by a reward function."""

    traces: str = ""
    """Expert answers that join the groups of their tasks in training: a file or name as in `path`, each row with the prompt of a
    row of `path` in the same column, and the answer, text or one message, in `trace`, `completion` or `target`."""


class Mcp(DataSection, frozen=True, tag_field="kind", tag="mcp"):
    """Rows of your own data, answered with the tools of an MCP server. Of `command` and `url` one is set."""

    command: tuple[str, ...] = ()
    """A server that speaks MCP on its standard input and output, for example `[python, server.py]`; each episode starts its own."""
    url: str = ""
    """A server that speaks MCP over HTTP; each episode has a session of its own."""
    max_turns: Positive = 8
    """Assistant messages before the environment ends the episode."""


class Gymnasium(EndlessTasks, frozen=True, tag_field="kind", tag="gymnasium"):
    """A gymnasium environment with actions that can be written down; the policy acts by the tool `act`."""

    id: str
    """A registered id, for example `FrozenLake-v1`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, for example `{is_slippery: false}`."""
    prompt: str = ""
    """What the policy is told first, before the first observation; empty names the environment and its actions."""
    max_turns: Positive = 50
    """Assistant messages before the environment ends the episode."""


class TextArena(EndlessTasks, frozen=True, tag_field="kind", tag="textarena"):
    """A textarena game for one player; the policy's messages are its moves."""

    id: str
    """A registered id. Take one that ends in `-raw`: the others repeat the whole game in each turn."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `textarena.make`."""
    max_turns: Positive = 50
    """Assistant messages before the environment ends the episode."""


class OpenEnv(EndlessTasks, frozen=True, tag_field="kind", tag="openenv"):
    """An environment that a server of the OpenEnv library runs; the policy acts by the tool `act`."""

    url: str
    """Of the server, for example `http://10.0.0.7:8000`; each episode has a session of its own there."""
    name: str = ""
    """What reports call it; empty is `openenv`."""
    prompt: str = ""
    """What the policy is told first, before the first observation."""
    max_turns: Positive = 50
    """Assistant messages before the environment ends the episode."""


class Harbor(LibraryTasks, frozen=True, tag_field="kind", tag="harbor"):
    """Task folders in Harbor's format, played in our sandbox; the policy acts by the tool `shell`, and tests score the files that
    it leaves."""

    path: str
    """A folder of task folders, each with `instruction.md` and `tests/test.sh`; or one of these."""
    evaluation: str | Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Tasks to evaluate on: another such folder, or the share of those in `path` that is held out from training, at least one; 0
    holds out none."""
    max_turns: Positive = 30
    """Assistant messages before the environment ends the episode; what was made by then is scored."""
    command_s: AboveZero = 30.0
    """Longest command of the policy in seconds; one that takes longer is stopped, and the policy is told."""
    verifier_s: AboveZero = 60.0
    """Longest run of a task's tests, and of its solution, in seconds; a task may ask for less. Tests that take longer earn 0."""
    memory: str = "1GiB"
    """Memory of all processes of a sandbox together."""
    disk: str = "256MiB"
    """Files of a sandbox, which are in memory, too."""
    processes: Positive = 64
    """Processes and threads of a sandbox."""
    packages: str = ""
    """A folder of Python packages for the sandboxes, for example with pytest (`pip install --target FOLDER pytest`)."""
    skip_installs: bool = False
    """Leave out what a Dockerfile's RUN lines install, instead of refusing such tasks: this host has it."""


class NemoGym(LibraryTasks, frozen=True, tag_field="kind", tag="nemo_gym"):
    """An environment that a resources server of NeMo-Gym runs, with the rows of its data."""

    url: str
    """Of the resources server, for example `http://10.0.0.7:8080`; each episode has a session of its own there."""
    path: str
    """Its rows, each with `responses_create_params`: a `.jsonl` or `.parquet` file, or what the `datasets` package loads."""
    evaluation: str | Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Rows to evaluate on: another such file, or the share of the rows of `path` that is held out from training, at least one; 0
    holds out none."""
    name: str = ""
    """What reports call it; empty is `nemo_gym`."""
    max_turns: Positive = 20
    """Assistant messages before the environment ends the episode; what was done by then is verified."""


class Verifiers(LibraryTasks, frozen=True, tag_field="kind", tag="verifiers"):
    """A taskset of the verifiers library, which plays its episodes itself; set `python` to an interpreter that has the library."""

    taskset: str
    """Its id: a module that is installed there, or in the folder in which the command is given."""
    settings: dict[str, Any] = field(default_factory=dict)
    """More of the library's settings of an environment, for example `{taskset: {split: train}, agent: {harness: {id: bash}}}`."""
    evaluation: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Share of the tasks that is held out from training to evaluate on, at least one; 0 holds out none."""


class Inspect(LibraryTasks, frozen=True, tag_field="kind", tag="inspect"):
    """A task of Inspect (inspect-ai), which plays its samples itself; set `python` to an interpreter that has the library."""

    task: str
    """As the library's own command names it: `file.py@name`, or `package/name`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the task."""
    score: str = ""
    """Which score is the reward: the name of a scorer, with `.KEY` where its score has several; empty is the only one."""
    evaluation: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.05
    """Share of the samples that is held out from training to evaluate on, at least one; 0 holds out none."""


EnvironmentKind = (
    ReasoningGym | PythonEnv | Dataset | Mcp | Gymnasium | TextArena | OpenEnv | Harbor | NemoGym | Verifiers | Inspect
)


class Mixture(Section, frozen=True, tag_field="kind", tag="mixture"):
    """Several environments in one run, each with its share of every batch."""

    parts: dict[str, EnvironmentKind]
    """The environments by the names that trajectories and reports call them; each of the other kinds, with a `share`."""


PLACES = ("python", "keys")
"""Options of every kind that are files."""

FILES: dict[type[Section], tuple[str, ...]] = {
    Dataset: ("traces",),
    Harbor: ("path", "evaluation", "packages"),
    NemoGym: ("path", "evaluation"),
}
"""Options of one kind that are files, beside those of data; of a hub name only what exists is one."""

BUILT_IN = frozenset(str(kind.__struct_config__.tag) for kind in (*get_args(EnvironmentKind), Mixture))


def parts_by_key(env: EnvironmentKind | Mixture, key: str = "env") -> dict[str, EnvironmentKind]:
    """The environments of the section `key` by their own sections, `env` or `env.parts.NAME`, in the order in which leases number
    them."""
    return {f"{key}.parts.{name}": part for name, part in env.parts.items()} if isinstance(env, Mixture) else {key: env}


def shares_of(env: EnvironmentKind | Mixture) -> tuple[float, ...]:
    """The share of each environment of a run, in the order in which leases number them."""
    return tuple(part.share for part in parts_by_key(env).values())


def traced_sections(env: EnvironmentKind | Mixture, key: str = "env") -> dict[str, Dataset]:
    """The environments of the section `key` that have expert traces, by their own sections."""
    return {name: part for name, part in parts_by_key(env, key).items() if isinstance(part, Dataset) and part.traces}


def absolute_paths(env: EnvironmentKind | Mixture) -> EnvironmentKind | Mixture:
    """`env` with absolute paths of its files, so that it means the same in any directory."""
    if isinstance(env, Mixture):
        return structs.replace(env, parts={name: absolute_paths(part) for name, part in env.parts.items()})
    # Not resolved: an interpreter of a virtual environment is a link, and is itself only by its own path.
    env = structs.replace(env, **{name: os.path.abspath(path) for name in PLACES if (path := getattr(env, name))})
    return map_files(env, _resolved)


def without_placement(env: S) -> S:
    """An environment, or a mixture, without where it runs."""
    if isinstance(env, Mixture):
        return structs.replace(env, parts={name: without_placement(part) for name, part in env.parts.items()})
    return structs.replace(env, isolate=0, python="", address="", keys="")


def map_files(env: EnvironmentKind | Mixture, change: Callable[[str], str]) -> EnvironmentKind | Mixture:
    """`env` with each path of a file or folder that its tasks are made of passed through `change`; so are names on the hub."""
    if isinstance(env, Mixture):
        return structs.replace(env, parts={name: map_files(part, change) for name, part in env.parts.items()})
    if isinstance(env, Inspect):
        file, at, name = env.task.rpartition("@")
        env = structs.replace(env, task=f"{change(file) if file else ''}{at}{name}")
    files = {name: getattr(env, name) for name in FILES.get(type(env), ())}
    env = structs.replace(env, **{name: change(path) for name, path in files.items() if path and isinstance(path, str)})
    if not isinstance(env, DataSection):
        return env
    file, colon, function = env.reward.rpartition(":")
    reward = f"{change(file)}:{function}" if file.endswith(".py") and colon else env.reward
    evaluation = change(env.evaluation) if isinstance(env.evaluation, str) else env.evaluation
    return structs.replace(env, path=change(env.path), evaluation=evaluation, reward=reward)


def _resolved(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def installed_kinds() -> dict[str, str]:
    """The kinds that installed packages add: name -> `package.module:Name` of its factory."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def is_installed(kind: object) -> bool:
    """Whether an installed package adds this kind; a built-in kind of the same name comes first."""
    return isinstance(kind, str) and kind not in BUILT_IN and kind in installed_kinds()


def replace_installed_kinds(tree: dict[str, Any]) -> None:
    """Write every section `env` of a raw config, and every part of a mixture, as kind `python` where a package adds its kind."""
    evaluation = tree.get("evaluation")
    suites = evaluation.get("suites") if isinstance(evaluation, dict) else None
    for section in (tree, *(suites.values() if isinstance(suites, dict) else ())):
        if isinstance(section, dict) and isinstance(section.get("env"), dict):
            _replace_installed_kind(section["env"])


def _replace_installed_kind(env: dict[str, Any]) -> None:
    parts = env.get("parts")
    for section in (env, *(parts.values() if isinstance(parts, dict) else ())):
        if isinstance(section, dict) and is_installed(section.get("kind")):
            factory = installed_kinds()[section["kind"]]
            own = ("kind", *EndlessTasks.__struct_fields__)  # keys of every environment that makes tasks without end
            arguments = {name: value for name, value in section.items() if name not in own}
            ours = {name: section[name] for name in own[1:] if name in section}
            section.clear()
            section |= {"kind": "python", "factory": factory, "arguments": arguments, **ours}
