"""What a Dockerfile asks for that a sandbox without images can do: files, commands, variables and a working folder.

Invariants:
- An instruction is followed, is without meaning here (`FROM`, `CMD`, `EXPOSE` and such: programs are the host's), or is refused
  with its line. None is left out silently.
- A `RUN` that installs needs a network, which no sandbox has: it is refused, or left out where the caller says so.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator

import msgspec

WITHOUT_MEANING = frozenset(
    ("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "USER", "MAINTAINER", "STOPSIGNAL", "VOLUME", "HEALTHCHECK", "SHELL")
)
"""Instructions that say nothing about the files and commands of a sandbox, whose user and shell are given."""

INSTALLS = re.compile(
    r"(?:^|[\s;&|(])(?:apt-get|apt|apk|yum|dnf|microdnf|pacman|pip3?|pipx|uvx?|conda|mamba|npm|yarn|pnpm|cargo|gem|curl|wget|"
    r"git clone)\s"
)
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")  # which ADD unpacks
DEFAULT_FOLDER = "/app"  # where a task without WORKDIR is played: / cannot be written


class CopyStep(msgspec.Struct, frozen=True):
    """`COPY`: files and folders below the build's folder, to a path; a path of a folder where `into`."""

    line: int
    sources: tuple[str, ...]
    target: str
    into: bool


class RunStep(msgspec.Struct, frozen=True):
    """`RUN`: a command, the folder in which it runs and the variables that it has."""

    line: int
    argv: tuple[str, ...]
    workdir: str
    environ: dict[str, str]


class Recipe(msgspec.Struct, frozen=True):
    """How a sandbox becomes what the Dockerfile describes."""

    workdir: str = DEFAULT_FOLDER
    environ: dict[str, str] = {}
    steps: tuple[CopyStep | RunStep, ...] = ()


def read_dockerfile(text: str, *, skip_installs: bool = False) -> Recipe:
    """Raises ValueError, which names the line, where an instruction cannot be followed."""
    workdir, environ, stages = DEFAULT_FOLDER, dict[str, str](), 0
    steps: list[CopyStep | RunStep] = []
    for line, name, rest in _instructions(text):
        try:
            if name == "FROM":
                stages += 1
                if stages > 1:
                    raise ValueError("a build of several stages is not supported")
            elif name in ("ENV", "ARG"):
                environ |= _assignments(_filled(rest, environ))
            elif name == "WORKDIR":
                workdir = posixpath.normpath(posixpath.join(workdir, _filled(rest, environ)))
            elif name in ("COPY", "ADD"):
                steps.append(_copy(line, name, _filled(rest, environ), workdir))
            elif name == "RUN":
                if (run := _run(line, rest, workdir, environ, skip_installs=skip_installs)) is not None:
                    steps.append(run)
            elif name not in WITHOUT_MEANING:
                raise ValueError("this instruction is not supported")
        except ValueError as error:
            raise ValueError(f"line {line}: {name} {rest:.60}: {error}") from None
    return Recipe(workdir, environ, tuple(steps))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, the name and the rest of each."""
    begin, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):  # these may stand within an instruction
            continue
        begin = begin if parts else number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            name, _, rest = " ".join(parts).strip().partition(" ")
            parts = []
            yield begin, name.upper(), rest.strip()
    if parts:
        raise ValueError(f"line {begin}: the instruction does not end")


def _filled(text: str, environ: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: environ.get(match[1] or match[2], ""), text)


def _assignments(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # `ENV NAME the value`; an ARG without a default
        return {words[0]: rest.partition(" ")[2].strip()} if len(words) > 1 else {}
    if not words or any("=" not in word for word in words):
        raise ValueError("is not of the form NAME=VALUE")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _copy(line: int, name: str, rest: str, workdir: str) -> CopyStep:
    words = rest.split(" ")
    flags = [word for word in words if word.startswith("--")]
    rest = " ".join(word for word in words if not word.startswith("--"))
    if any(flag.startswith("--from") for flag in flags):
        raise ValueError("copies from another image, and there are no images")
    if "<<" in rest:
        raise ValueError("a text within the Dockerfile is not supported")
    given = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(given) < 2:
        raise ValueError("needs a source and a target")
    *sources, target = map(str, given)
    for source in sources:
        if name == "ADD" and (source.endswith(ARCHIVES) or re.match(r"\w+://|git@", source)):
            raise ValueError("archives are not unpacked, and nothing is fetched")
    whole = posixpath.normpath(posixpath.join(workdir, target))
    into = target.endswith(("/", ".")) or len(sources) > 1 or whole == workdir
    return CopyStep(line, tuple(sources), whole, into)


def _run(line: int, rest: str, workdir: str, environ: dict[str, str], *, skip_installs: bool) -> RunStep | None:
    """None where it is left out."""
    while rest.startswith("--"):  # options of the build, such as mounts of caches
        rest = rest.partition(" ")[2].strip()
    if "<<" in rest:
        raise ValueError("a text within the Dockerfile is not supported")
    argv = tuple(map(str, json.loads(rest))) if rest.startswith("[") else ("/bin/sh", "-c", rest)
    if INSTALLS.search(" ".join(argv) + " "):
        if skip_installs:
            return None
        raise ValueError(
            "it installs or fetches something, and sandboxes have no network; install on this host what it would bring, and set "
            "skip_installs=true"
        )
    return RunStep(line, argv, workdir, dict(environ))
