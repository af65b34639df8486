"""What a config names outside of the run folder, kept in it for hosts that do not have it: files of environments, and the user's
modules.

    train, resume ──keep_inputs──> run.dir/inputs/{files, code} ──local_inputs──> a role on a host that has them nowhere else

Invariants:
- Only runs over many hosts keep inputs. A host that has something at its own path uses it there.
- The copies are those of the last start of the run.
- Weights and keys are not kept: engines and ranks have the model's folder or its name on the hub, workers have `env.keys`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import structs

from ..common.fsio import replace_directory
from ..configs import Config
from ..configs.algorithm import PythonFunction
from ..configs.environments import DataSection, EnvironmentKind, Mixture, PythonEnv, map_files, parts_by_key
from ..configs.suites import suites_of

INPUTS, FILES, CODE = "inputs", "files", "code"
WITHOUT_WEIGHTS = (
    "buffer",
    "worker",
    "evaluator",
    "rater",
)  # kinds of roles that need of the model its tokenizer and its config


def keep_inputs(config: Config, run_dir: Path) -> None:
    """Copy what `config`, whose paths are absolute, names outside of `run_dir`, into it; what is on the same file system is linked,
    but for code."""
    if config.launch.hosts != "many":
        return
    written = run_dir / f".{INPUTS}.part"
    shutil.rmtree(written, ignore_errors=True)
    for name in (FILES, CODE):
        (written / name).mkdir(parents=True)

    def keep(path: str) -> str:
        kept = written / FILES / _place_of(path)
        if Path(path).exists() and not kept.exists():
            kept.parent.mkdir()
            _copy(Path(path), kept, _link)
        return path

    _map_inputs(config, keep)
    for module in user_modules(config, Path.cwd()):
        _copy(module, written / CODE / module.name, shutil.copy2)
    replace_directory(run_dir / INPUTS, written)


def local_inputs(config: Config, run_dir: Path, kind: str) -> Config:
    """`config` for a role of `kind` on this host: what is not at its path here, and was kept, is in `run_dir`."""
    if config.launch.hosts != "many":
        return config

    def find(path: str) -> str:
        kept = run_dir / INPUTS / FILES / _place_of(path)
        return str(kept) if not Path(path).exists() and kept.exists() else path

    from ..dashboard.texts import TOKENIZER

    config, tokenizer = _map_inputs(config, find), run_dir / TOKENIZER
    absent = Path(config.model.path).is_absolute() and not Path(config.model.path).exists()
    if kind in WITHOUT_WEIGHTS and absent and (tokenizer / "config.json").is_file():
        config = structs.replace(config, model=structs.replace(config.model, path=str(tokenizer)))
    return config


def code_folder(run_dir: Path) -> Path:
    """Where the kept modules are."""
    return run_dir / INPUTS / CODE


def user_modules(config: Config, folder: Path) -> list[Path]:
    """The modules and packages in `folder` that a config names, and those there that these import: files and folders."""
    found, names = dict[str, Path](), list(_module_names(config))
    while names:
        name = names.pop().partition(".")[0]
        path = next((p for p in (folder / name, folder / f"{name}.py") if p.is_dir() or p.is_file()), None)
        if not name or name in found or path is None:
            continue
        found[name] = path
        for file in path.rglob("*.py") if path.is_dir() else (path,):
            names += _imported(file)
    return sorted(found.values())


def _module_names(config: Config) -> Iterator[str]:
    sections = [*parts_by_key(config.env).values()]
    for suite in suites_of(config).values():
        sections += parts_by_key(suite.env).values()
    algorithm = config.learner.algorithm
    own = [part.function for part in (algorithm.advantage, algorithm.loss) if isinstance(part, PythonFunction)]
    targets = [config.agent.kind, *own]
    for section in sections:
        targets.append(section.sampler)
        targets += [section.factory] if isinstance(section, PythonEnv) else []
        targets += [section.reward] if isinstance(section, DataSection) else []
    for target in targets:
        module, colon, _ = target.partition(":")
        if colon and not module.endswith(".py"):
            yield module


def _imported(file: Path) -> Iterator[str]:
    """The absolute names that a file imports. One that is no Python is left to those who import it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _map_inputs(config: Config, change: Callable[[str], str]) -> Config:
    """`config` with every path of a file that its environments and its agent read passed through `change`."""

    def changed(env: EnvironmentKind | Mixture) -> EnvironmentKind | Mixture:
        return map_files(env, change)

    evaluation, sandbox = config.evaluation, config.agent.sandbox
    suites = {
        name: structs.replace(suite, env=changed(suite.env)) if suite.env else suite
        for name, suite in evaluation.suites.items()
    }
    config = structs.replace(config, env=changed(config.env), evaluation=structs.replace(evaluation, suites=suites))
    if sandbox.folder:
        sandbox = structs.replace(sandbox, folder=change(sandbox.folder))
        config = structs.replace(config, agent=structs.replace(config.agent, sandbox=sandbox))
    return config


def _place_of(path: str) -> Path:
    """Of a copy below the folder of files: another one for each path, with the same name at its end."""
    return Path(hashlib.sha256(path.encode()).hexdigest()[:16]) / Path(path).name


def _copy(source: Path, target: Path, copy: Callable[[str, str], object]) -> None:
    if source.is_dir():
        shutil.copytree(source, target, copy_function=copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    else:
        copy(str(source), str(target))


def _link(source: str, target: str) -> None:
    """A hard link, or a copy where the file systems differ."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
