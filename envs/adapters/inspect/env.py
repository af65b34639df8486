"""Tasks of Inspect, in an interpreter that has the library. It owns its loop: it plays a sample with the policy at an endpoint, see
`self_played.py`.

Invariants:
- Every sample is played in a process of its own, which ends with its episode. The program that starts them (`player.py`) ends with
  this process.
- A sample that the library reports with an error is a failure, whatever its score; so is one without the score that is the reward.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import select
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import IO

import msgspec

from ....common.owned_folders import OwnedFolder
from ....configs.environments import Inspect
from ....errors import ConfigError, DeadlineExceeded, EnvError
from ...base import JSON, Message, Observation, StepResult, Task
from ...epochs import EpochOrder, numbers_of_split
from ...loading import load_foreign_library
from ...self_played import PolicyEndpoint, endpoint_of
from ...simple import SimpleEnv, Split

PROGRAM = str(Path(__file__).with_name("player.py"))
FOLDERS = "slipstream-inspect-"  # prefix of the folder of a player's logs, which are thrown away
START_S = 240.0  # longest import of the library and loading of the task
END_S = 10.0  # longest end of a player before it is killed


class InspectEnv(SimpleEnv):
    """The samples of one split of a task, and the episode on one of them."""

    self_played = True

    def __init__(self, config: Inspect, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: this interpreter has no inspect-ai, or the library cannot load the task."""
        super().__init__(split=split, seed=seed)
        if importlib.util.find_spec("inspect_ai") is None:
            load_foreign_library(key, "inspect_ai", "inspect")
        self.name = config.task.rpartition("@")[2].rpartition("/")[2]
        self._player = SamplePlayer(config, key)
        what = f"samples of {config.task}"
        numbers = numbers_of_split(len(self._player.samples), config.evaluation, split, key=key, what=what)
        self._order = EpochOrder(numbers, split, seed)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._order.numbers)

    def task(self, index: int) -> Task:
        number = self._order.number(index)
        return Task(f"{self.name}-{self.split}-{number}", {"sample": number})

    async def reset(self, task: Task) -> Observation:
        self._sample: int = task.payload["sample"]
        return Observation((Message("user", self._player.samples[self._sample]),))

    async def step(self, message: Message) -> StepResult:
        found = await self._player.play(self._sample, endpoint_of(message))
        if found.get("error"):
            raise EnvError(f"inspect: {found['error']}")
        return StepResult((), found["reward"], done=True, metrics=found["metrics"])


class SamplePlayer:
    """The program that plays samples of a task. Answers come in a thread, for whichever event loop awaits them."""

    def __init__(self, config: Inspect, key: str) -> None:
        """Raises ConfigError: the library cannot load the task; DeadlineExceeded."""
        folder = OwnedFolder(Path(tempfile.gettempdir()), FOLDERS)
        spec = {"task": config.task, "arguments": config.arguments, "score": config.score, "folder": str(folder.path)}
        process = subprocess.Popen(
            (sys.executable, PROGRAM, json.dumps(spec)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[JSON]] = {}
        self._lock = threading.Lock()  # one line at a time
        weakref.finalize(self, _end, process, folder)
        if not select.select((process.stdout,), (), (), START_S)[0]:
            raise DeadlineExceeded(
                "an environment", f"Inspect to load {config.task}", START_S, "its output is in the log"
            )
        first = json.loads(process.stdout.readline() or '{"error": "its process ended; its output is in the log"}')
        if "error" in first:
            raise ConfigError(f"{key}.task: Inspect cannot load {config.task!r}: {' '.join(first['error'].split())}")
        self.samples: list[str] = first["samples"]
        threading.Thread(
            target=_read, args=(process.stdout, self._waiting), name="samples of Inspect", daemon=True
        ).start()

    async def play(self, sample: int, endpoint: PolicyEndpoint) -> JSON:
        """What the program reports. Raises EnvError: it has ended."""
        number = next(self._numbers)
        answer = self._waiting[number] = concurrent.futures.Future()
        try:
            self._send({"number": number, "sample": sample} | msgspec.structs.asdict(endpoint))
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, line: JSON) -> None:
        try:
            with self._lock:
                self._stdin.write(json.dumps(line).encode() + b"\n")
                self._stdin.flush()
        except OSError as error:
            raise EnvError(f"the process that plays Inspect's samples has ended: {error}") from None


def _read(lines: IO[bytes], waiting: dict[int, concurrent.futures.Future[JSON]]) -> None:
    """Hand each answer to its episode, until the program ends."""
    for line in lines:
        found = json.loads(line)
        answer = waiting.get(found["number"])
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(found)
    for answer in list(waiting.values()):
        if answer.set_running_or_notify_cancel():
            answer.set_exception(EnvError("the process that plays Inspect's samples has ended"))


def _end(process: subprocess.Popen[bytes], folder: OwnedFolder) -> None:
    with contextlib.suppress(OSError):
        process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]  (it is a pipe)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_S)
    folder.close()
