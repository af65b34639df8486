"""One role as the supervisor sees it, and what its end says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..configs import Config
from ..configs.reward import ModelReward
from ..waits import Wait
from .processes import Process
from .resources import ranks_by_kind

FINAL = 3
"""Exit status of a role that need not be started again: what went wrong would go wrong again."""

LOG_TAIL = 64 << 10
"""Bytes of a log that are searched for a last error."""

ERROR_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")


def nothing() -> None:
    """What most roles have to do with their starts and ends."""


@dataclass
class Member:
    """One role as the supervisor sees it.

    Attributes:
        deadline: when silence becomes death.
        heard: when it last gave a sign of life; its start counts.
        waits: what it said that it waits for, at `told`.
        stuck: where its event loop was stuck at `told`; empty while it turns.
        stopping: it was told to end.
        changing: held while its process is started or ended, so that neither happens in the middle of the other.
        asked: asks a server that is not ours how it is: True if well, False if it says that it is not, None if it says nothing. Its
            answers stand for heartbeats, which all other roles send by themselves.
        on_start, on_end: called as soon as a process of it runs, and as soon as one has ended.
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    process: Process | None = None
    restarts: int = 0
    deadline: float = float("inf")
    heard: float = 0.0
    waits: tuple[Wait, ...] = ()
    told: float = 0.0
    stuck: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    last_words: str = ""
    stopping: bool = False
    exit_status: int | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: Callable[[], Awaitable[bool | None]] | None = None
    on_start: Callable[[], None] = nothing
    on_end: Callable[[], None] = nothing

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


def role_names(config: Config) -> list[str]:
    """The processes of a training run; each listens on one port at most, ranks meet at one more."""
    engines = [f"engine-{i}" for i in range(config.rollout.engine.replicas)]
    models = [f"{kind}-{i}" for kind, ranks in ranks_by_kind(config).items() for i in range(ranks)]
    workers = [f"worker-{i}" for i in range(config.rollout.workers)]
    reward = ["reward"] if isinstance(config.reward, ModelReward) else []
    return [*engines, "buffer", *models, *workers, "evaluator", *reward]


def last_error(log_file: Path) -> str:
    """The last line of a log that names an error, for servers that are not ours and have no other last words."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - LOG_TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((found[0][:300] for line in reversed(lines) if (found := ERROR_LINE.search(line))), "")


def describe(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "running"
    if status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return "exit 0" if status == 0 else f"exit status {status}"
