"""Where a process that holds environments hung, from the stacks that faulthandler wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+) in (?P<name>.+)')
STANDARD_LIBRARY = re.compile(r"/lib/python\d[\d.]*/(?!site-packages/|dist-packages/)|^<")
OURS = tuple(f"{ROOT / room}/" for room in ("common", "configs", "envs", "rpc"))  # the rooms that a host runs


def innermost(lines: Sequence[str]) -> str:
    """`my_env.py:12 in step`: a frame that is neither ours nor of the standard library; "" where there is none. A thread that runs
    such a frame comes before those that wait below one, the current thread before the others."""
    frames: list[str] = []
    threads: list[
        list[str]
    ] = []  # each innermost frame first, as faulthandler writes them; "" for ours and the library's
    for line in lines:
        if line.startswith("Current thread "):
            threads.insert(0, frames := [])
        elif line.startswith("Thread "):
            threads.append(frames := [])
        elif threads and (frame := FRAME.fullmatch(line)):
            frames.append(_user_line(frame["path"], frame["line"], frame["name"]))
    running = [frames[0] for frames in threads if frames and frames[0]]
    waiting = [line for frames in threads for line in frames if line]
    return next(iter(running + waiting), "")


def _user_line(path: str, line: str, name: str) -> str:
    if path.startswith(OURS) or STANDARD_LIBRARY.search(path):
        return ""
    return f"{path.rpartition('/')[2]}:{line} in {name}"
