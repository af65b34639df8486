"""Task folders as Harbor lays them out, read and checked before anything starts.

    NAME/instruction.md            what the policy is told
    NAME/task.toml                 time limits and variables; may be missing
    NAME/environment/Dockerfile    files and commands of the start; may be missing
    NAME/tests/test.sh             writes /logs/verifier/reward.txt, or reward.json
    NAME/solution/solve.sh         may be missing

Invariants:
- A folder that cannot be played as it is meant is refused, with its file; nothing of it is left out silently.
- Absolute paths of a task are folders at the root of its sandbox, which lead to its home: see `links_of`.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....errors import ConfigError
from .dockerfile import CopyStep, Recipe, read_dockerfile

TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
HOME = "/root"  # of the user that a container has; it is the home of the sandbox
OWN = {HOME: "", "/tmp": ".tmp"}  # folders of the root that have another name below home
READ_ONLY = ("bin", "box", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "sbin", "sys", "usr")
"""Folders of the root that a sandbox has of its own, and nothing can be written to."""

USUAL = ("/app", "/data", "/home", "/mnt", "/repo", "/srv", "/testbed", "/var", "/workspace")
"""Folders of the root that tasks write to without saying so in a WORKDIR."""

SECRET = re.compile(r"\$\{?\w")
VERIFIER_S = 600.0  # longest run of tests where task.toml names none, as in Harbor


class HarborTask(msgspec.Struct, frozen=True):
    """One folder. `verifier_s` is how long its tests may run; `verifier_environ` and `solution_environ` are variables of its tests
    and of its solution beside those of the recipe."""

    name: str
    folder: str
    instruction: str
    recipe: Recipe
    verifier_s: float
    verifier_environ: dict[str, str]
    solution_environ: dict[str, str]
    has_solution: bool


def read_tasks(key: str, path: str, *, skip_installs: bool) -> tuple[HarborTask, ...]:
    """The tasks in a folder, by their names; a folder with an instruction.md is one task. Raises ConfigError naming `key`, the file
    and what is wrong with it."""
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"{key}: {path} is no folder; allowed is a folder of task folders")
    found = [root] if (root / "instruction.md").is_file() else sorted(root.glob("*/"))
    folders = [folder for folder in found if (folder / "instruction.md").is_file() or (folder / "task.toml").is_file()]
    if not folders:
        raise ConfigError(f"{key}: {path} holds no task: a task is a folder with instruction.md and tests/test.sh")
    return tuple(_read_task(key, folder, skip_installs=skip_installs) for folder in folders)


def _read_task(key: str, folder: Path, *, skip_installs: bool) -> HarborTask:
    settings = _settings(key, folder)
    environment, docker = folder / "environment", folder / "environment" / "Dockerfile"
    if settings.get("steps") or (folder / "steps").is_dir():
        raise ConfigError(f"{key}: {folder}: tasks of several steps are not supported")
    if composed := [file for file in environment.glob("docker-compose.y*ml")]:
        raise ConfigError(f"{key}: {composed[0]}: tasks of several containers are not supported")
    for needed in ("instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise ConfigError(f"{key}: {folder / needed} is missing")
    try:
        recipe = (
            read_dockerfile(docker.read_text(encoding="utf-8"), skip_installs=skip_installs)
            if docker.is_file()
            else Recipe()
        )
        for step in recipe.steps:
            if isinstance(step, CopyStep) and not list(copied(environment, step)):
                raise ValueError(
                    f"line {step.line}: COPY {' '.join(step.sources)}: there is no such file below {environment}"
                )
        for place in (recipe.workdir, *(step.target for step in recipe.steps if isinstance(step, CopyStep))):
            _require_writable(place)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}: {docker}: {error}") from None
    verifier, solution = settings.get("verifier", {}), settings.get("solution", {})
    environ = _environ(key, folder, settings.get("environment", {}))
    return HarborTask(
        name=folder.resolve().name,
        folder=str(folder),
        instruction=(folder / "instruction.md").read_text(encoding="utf-8").strip(),
        recipe=msgspec.structs.replace(recipe, environ=recipe.environ | environ),
        verifier_s=float(verifier.get("timeout_sec", VERIFIER_S)),
        verifier_environ=_environ(key, folder, verifier),
        solution_environ=_environ(key, folder, solution),
        has_solution=(folder / "solution" / "solve.sh").is_file(),
    )


def _settings(key: str, folder: Path) -> dict[str, Any]:
    path = folder / "task.toml"
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path}: {error}") from None
    for section in ("verifier", "solution", "environment"):
        if not isinstance(settings.get(section, {}), dict):
            raise ConfigError(f"{key}: {path}: {section} is no section")
    if settings.get("environment", {}).get("os", "linux") != "linux":
        raise ConfigError(f"{key}: {path}: environment.os: only linux is supported")
    seconds = settings.get("verifier", {}).get("timeout_sec", VERIFIER_S)
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"{key}: {path}: verifier.timeout_sec: {seconds!r} is no number above 0")
    return settings


def _environ(key: str, folder: Path, section: dict[str, Any]) -> dict[str, str]:
    environ = section.get("env", {})
    if not isinstance(environ, dict):
        raise ConfigError(f"{key}: {folder / 'task.toml'}: env is no section")
    for name, value in environ.items():
        if SECRET.search(str(value)):
            raise ConfigError(
                f"{key}: {folder / 'task.toml'}: env.{name} asks for a variable of the host; no sandbox is given any"
            )
    return {str(name): str(value) for name, value in environ.items()}


def _require_writable(place: str) -> None:
    top = place.split("/")[1]
    if not top or top in READ_ONLY:
        raise ValueError(f"{place} cannot be written in a sandbox; allowed are other folders, such as /app and /root")


def links_of(tasks: Sequence[HarborTask]) -> dict[str, str]:
    """The folders at the root of the sandboxes that these tasks are played in, by the folders below home that they lead to."""
    places = [TESTS, LOGS, SOLUTION, *USUAL]
    for task in tasks:
        places += [task.recipe.workdir, *(step.target for step in task.recipe.steps if isinstance(step, CopyStep))]
    tops = {f"/{place.split('/')[1]}" for place in places} - OWN.keys()
    return {HOME: ""} | {top: top[1:] for top in sorted(tops)}


def below_home(place: str) -> str:
    """An absolute path of a task, as a path below the home of its sandbox."""
    for folder, name in OWN.items():
        if place == folder or place.startswith(f"{folder}/"):
            return posixpath.normpath(f"{name}{place[len(folder) :]}".lstrip("/") or ".")
    return place[1:]


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The regular files in a folder and below it, by their paths in it."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def copied(environment: Path, step: CopyStep) -> Iterator[tuple[str, Path]]:
    """The files that a COPY makes, by their absolute paths. Raises ValueError: a source is not below the folder."""
    for source in step.sources:
        pattern = source.lstrip("/").removeprefix("./").rstrip("/")
        if ".." in Path(pattern).parts:
            raise ValueError(f"line {step.line}: COPY {source}: it is not below {environment}")
        for found in [environment] if pattern in ("", ".") else sorted(environment.glob(pattern)):
            if found.is_dir():
                for name, file in files_below(found):
                    yield f"{step.target}/{name}", file
            else:
                yield (f"{step.target}/{found.name}" if step.into else step.target), found
