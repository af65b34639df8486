"""Plays samples of one Inspect task, each in a process that is forked once the library and the task are loaded: in a process the
library evaluates one task at a time, and it takes seconds to import. Half of that is imported by the first evaluation only, so one
of a task of ours shows what it is before the first sample is played.

    python player.py SPEC      SPEC is JSON: task, arguments, score (the name of the one that is the reward), folder (for logs)
    out  {"samples": [TEXT, ...]} or {"error": TEXT}, once
    in   {"number": N, "sample": I, "url": URL, "key": KEY, "model": NAME}, {"cancel": N}
    out  {"number": N, "reward": R, "metrics": {...}, "error": TEXT}, for each that was not cancelled

It needs Python's standard library and inspect-ai. It ends, with all that it has started, when its standard input does.
"""

# pyright: reportMissingImports=false
# The library is in the interpreter that runs this, not in ours.

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from typing import Any

# prctl: orphans among its descendants become children of this process; a signal when the parent ends. Each process of a sample has
# its own orphans, so those of the player are of samples that have ended.
SUBREAPER, DEATH_SIGNAL = 36, 1
CHUNK = 1 << 16
SHOWN = 1000  # characters of an error
out = 1  # where answers go; standard output itself belongs to the library


def load(task: str, arguments: dict[str, Any]) -> Any:
    """The task, its samples in their order. Raises ValueError: there is not exactly one of this name."""
    from inspect_ai._eval.loader import load_tasks

    found = load_tasks([task], arguments)
    if len(found) != 1:
        raise ValueError(f"{task} names {len(found)} tasks; name one, for example file.py@name")
    return found[0]


def model(url: str, key: str, name: str) -> Any:
    """The policy."""
    from inspect_ai.model import get_model

    # Chat Completions: the client's Responses mode begins with a probe, which is no part of the task.
    return get_model(f"openai/{name}", base_url=url, api_key=key, responses_api=False, memoize=False)


def play(task: Any, request: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """What came of one sample. The score of an episode with an error counts for nothing."""
    from inspect_ai import eval as evaluate
    from inspect_ai.dataset import MemoryDataset

    task.dataset = MemoryDataset([task.dataset[request["sample"]]])
    with tempfile.TemporaryDirectory(dir=spec["folder"]) as folder:
        (log,) = evaluate(
            task,
            model=model(request["url"], request["key"], request["model"]),
            epochs=1,
            max_retries=0,
            fail_on_error=False,  # else the library draws the traceback of the sample's error, for seconds
            display="none",
            log_dir=folder,
            score_display=False,
        )
        sample = log.samples[0] if log.samples else None
        error = sample.error if sample is not None and sample.error is not None else log.error
        if error is not None or sample is None or log.status != "success":
            return {
                "error": str(error.message if error is not None else f"the evaluation ended as {log.status!r}")[:SHOWN]
            }
        return scored(sample.scores or {}, spec["score"])


def import_what_playing_imports(folder: str) -> None:
    """Play a sample of no consequence in a process of its own, and import here what that process had to import for it."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    told, tells = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(told)
            before = set(sys.modules)
            task = Task(dataset=[Sample(input="1 + 1?", target="2")], solver=generate(), scorer=match())
            with socket.socket() as nobody:  # bound, so that it is no other's, and not listening: the call is refused
                nobody.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
                play(task, {"sample": 0, "url": url, "key": "none", "model": "none"}, {"folder": folder, "score": ""})
            with os.fdopen(tells, "w") as told_names:
                told_names.write("\n".join(sorted(set(sys.modules) - before)))
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(told) as names:
        found = names.read().splitlines()
    os.waitpid(pid, 0)
    for name in (*found, "numpy"):  # which a sample needs for its scores, and this one has none
        with contextlib.suppress(ImportError):  # names that are no modules of files, as six makes them
            importlib.import_module(name)
    model("http://127.0.0.1:9/v1", "none", "none")  # reads what the library knows of models


def scored(scores: dict[str, Any], wanted: str) -> dict[str, Any]:
    """The reward and all numbers of a sample's scores, by the names of their scorers."""
    from inspect_ai.scorer import value_to_float

    number, found = value_to_float(), dict[str, float]()
    for name, score in scores.items():
        values = score.value.items() if isinstance(score.value, dict) else [("", score.value)]
        for key, value in values:
            if isinstance(value, str | int | float):
                found[f"{name}.{key}" if key else name] = float(number(value))
    found = {name: value for name, value in found.items() if math.isfinite(value)}
    names = ", ".join(found) or "none"
    if wanted and wanted not in found:
        return {"error": f"the sample has no score {wanted!r}; it has {names}"}
    if not wanted and len(found) != 1:
        return {"error": f"the sample has the scores {names}; name the one that is the reward by env.score"}
    return {"reward": found[wanted] if wanted else next(iter(found.values())), "metrics": found}


class Player:
    """The processes of the samples that are played."""

    def __init__(self, task: Any, spec: dict[str, Any]) -> None:
        self.task, self.spec = task, spec
        self.running: dict[int, tuple[int, int]] = {}  # by the number of the request: process, pipe
        self.written: dict[int, bytes] = {}
        self.imported = False

    def start(self, request: dict[str, Any]) -> None:
        if not self.imported:
            self.imported = True
            import_what_playing_imports(self.spec["folder"])
        told, tells = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tells)
            self.running[request["number"]], self.written[request["number"]] = (pid, told), b""
            return
        status = 1
        try:
            ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
            os.close(told)
            try:
                result = play(self.task, request, self.spec)
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"[:SHOWN]}
            os.write(tells, json.dumps(result).encode())
            status = 0
        finally:
            os._exit(status)

    def read(self, number: int) -> None:
        """More of an answer, or its end."""
        pipe = self.running[number][1]
        piece = os.read(pipe, CHUNK)
        if piece:
            self.written[number] += piece
            return
        written = self.written[number]
        status = self.end(number)
        tell(
            {
                "number": number,
                **(json.loads(written) if written else {"error": f"its process ended with status {status}"}),
            }
        )

    def end(self, number: int) -> int:
        """End a sample's process and what it has started; returns its status."""
        pid, pipe = self.running.pop(number)
        del self.written[number]
        os.close(pipe)
        try:
            os.kill(pid, signal.SIGKILL)  # one that has answered has nothing left to do
        except ProcessLookupError:
            pass
        _, status = os.waitpid(pid, 0)
        while orphans := set(children()) - {pid for pid, _ in self.running.values()}:  # their own children become ours
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        return status

    def serve(self) -> None:
        lines = b""
        while True:
            pipes = {pipe: number for number, (_, pipe) in self.running.items()}
            ready, _, _ = select.select([0, *pipes], [], [])
            for fd in ready:
                if fd:
                    self.read(pipes[fd])
                    continue
                piece = os.read(0, CHUNK)
                if not piece:
                    return
                *whole, lines = (lines + piece).split(b"\n")
                for line in whole:
                    self.handle(json.loads(line))

    def handle(self, request: dict[str, Any]) -> None:
        if "cancel" not in request:
            self.start(request)
        elif request["cancel"] in self.running:
            self.end(request["cancel"])


def children() -> list[int]:
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def tell(line: dict[str, Any]) -> None:
    os.write(out, json.dumps(line).encode() + b"\n")


def main() -> None:
    spec = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        task = load(spec["task"], spec["arguments"])
        samples = [
            str(sample.input if isinstance(sample.input, str) else sample.input[-1].text) for sample in task.dataset
        ]
    except Exception as error:
        return tell({"error": f"{type(error).__name__}: {error}"[:SHOWN]})
    tell({"samples": samples})
    player = Player(task, spec)
    try:
        player.serve()
    finally:
        for number in list(player.running):
            player.end(number)
        shutil.rmtree(spec["folder"], ignore_errors=True)


if __name__ == "__main__":
    os.environ["INSPECT_EVAL_CTL_SERVER"] = (
        "false"  # an HTTP server of every evaluation, which an end by a signal leaves behind
    )
    sys.path.pop(0)  # this file's folder, whose modules would be taken for others
    out = os.dup(1)
    os.dup2(2, 1)  # what the library and the task print belongs into the log
    main()
