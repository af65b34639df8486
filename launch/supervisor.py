"""The supervisor: starts the roles of a run in order, keeps them alive, ends them all.

    engines, buffer, learner ──> warm-start evaluation ──> workers ──> the learner is done ──> final evaluation
          └──────── heartbeats and health; what dies or falls silent is started again, `launch.restarts` times each

    who waits         for what                                   until
    plan              the learner to publish its first version   start_s + push_s + a minute; then the run fails
    plan              the learner's last step                    the learner's own deadlines
    plan              the evaluations                            their own deadlines, inside the episodes
    watch             the end of a process                       the run's end
    pulse             a heartbeat, or an answer to /health       heartbeat_s; then the process is killed and restarted

Invariants:
- Whatever way `run` ends, no process that it started is left.
- The ranks of the learner live and die together.
- A role that ends with a ConfigError ends the run; trying again would not help.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ..configs import Config
from ..errors import ConfigError, Interrupted, RoleDied, first_cause, within
from ..monitor.live import View
from .job import Cluster, Job
from .member import FINAL, Member, describe, last_error, role_names
from .processes import Launcher
from .resources import Placement, role_environment
from .vitals import Vitals

END_S = 5.0
"""How long a role other than the learner may take to end in good order."""

IMPORT_S = 60.0
"""Beyond `start_s`: what the learner may take to import torch and load the model on a busy machine."""


FINISHING = ("evaluator",)
"""Kinds of roles that have an end of their own; the others serve until they are stopped, the learner in case a replica that
comes back needs its weights."""

Keep = Callable[[Coroutine[Any, Any, None]], None]
"""Takes work that goes on in the background until the plan is done; its failure ends the run."""


class Supervisor:
    """One run: `train` to the learner's last step, or `evaluate` what `model.path` holds.

    Both raise:
        RoleDied: a role ended more often than `launch.restarts` allows.
        Interrupted: SIGINT or SIGTERM came.
        ConfigError: a role found its config to be wrong.
    """

    def __init__(self, config: Config, run_dir: Path, launcher: Launcher, placement: Placement, view: View) -> None:
        self._config = config
        self._dir = run_dir
        self._launcher = launcher
        self._placement = placement
        self._view = view
        self._interrupted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._farewell = "interrupted"
        self._members: dict[str, Member] = {}

    async def train(self) -> None:
        """From the first process to the last evaluation."""
        self._farewell = f"interrupted; continue with `slipstream resume {self._config.run.dir}`"
        await self._see_through(role_names(self._config), self._train)

    async def evaluate(self, label: str) -> None:
        """Serve `model.path` as it is, and append one evaluation of it to `evaluations.json`."""
        names = [n for n in role_names(self._config) if n.startswith("engine-")]

        async def serve_and_play(keep: Keep) -> None:
            for member in self._all("engine"):
                await self._start(member)
                keep(self._watch([member]))
            await self._evaluate(label)

        await self._see_through([*names, "evaluator"], serve_and_play)

    def interrupt(self) -> None:
        """Stop as soon as the learner has written its checkpoint; asked again, at once."""
        if self._interrupted.is_set():
            self._hurry.set()
        self._interrupted.set()

    async def _see_through(self, names: Sequence[str], plan: Callable[[Keep], Coroutine[Any, Any, None]]) -> None:
        """Carry out `plan` with the roles `names` while listening, probing and restarting; leave nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.interrupt)
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PULL)
        try:
            async with asyncio.TaskGroup() as tasks:
                background: list[asyncio.Task[Any]] = []
                work = asyncio.create_task(
                    self._carry_out(names, socket, plan, lambda c: background.append(tasks.create_task(c))), name="plan"
                )
                interrupted = asyncio.create_task(self._interrupted.wait(), name="interrupt")
                try:
                    await asyncio.wait({work, interrupted}, return_when=asyncio.FIRST_COMPLETED)
                    if self._interrupted.is_set():
                        raise Interrupted(self._farewell)
                    await work
                finally:
                    for task in (*background, work, interrupted):
                        task.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            await self._end()
            socket.close(linger=0)
            context.term()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _carry_out(
        self,
        names: Sequence[str],
        socket: zmq.asyncio.Socket,
        plan: Callable[[Keep], Coroutine[Any, Any, None]],
        keep: Keep,
    ) -> None:
        engines = await self._place(names, socket)
        vitals = Vitals(self._members, engines, self._config.launch.heartbeat_s, self._view)
        keep(vitals.listen(socket))
        keep(vitals.pulse())
        await plan(keep)

    def _all(self, kind: str) -> list[Member]:
        return [m for m in self._members.values() if m.kind == kind]

    # --- the order of things --------------------------------------------------------------------------------------

    async def _place(self, names: Sequence[str], socket: zmq.asyncio.Socket) -> Sequence[str]:
        """Find a host and a port for everybody, and write them into the job that every role is given; the engines' URLs."""
        places = await self._launcher.place(names, ports=1)
        at = {name: f"{host}:{ports[0]}" for name, (host, ports) in places.items()}
        host = self._launcher.host
        listening = socket.bind_to_random_port(f"tcp://{host}")
        self._members = {name: Member(name) for name in names}
        learner_host, _, learner_port = at.get("learner-0", "").rpartition(":")
        cluster = Cluster(
            supervisor=f"tcp://{host}:{listening}",
            buffer=f"tcp://{at['buffer']}" if "buffer" in at else "",
            engines=tuple(f"http://{at[m.name]}" for m in self._all("engine")),
            learner_host=learner_host,
        )
        job = Job(
            self._config,
            cluster,
            run_dir=str(self._dir),
            transport=self._placement.transport,
            started_in=os.getcwd(),
            pushed="learner-0" in names,
        )
        for member in self._members.values():
            gpus = self._placement.gpus.get(member.name, ())
            member.environment = job.environment(member.name) | role_environment(self._config, member.name, gpus)
        ranks = self._all("learner")
        if len(ranks) > 1:
            meeting = {"MASTER_ADDR": learner_host, "MASTER_PORT": learner_port, "WORLD_SIZE": str(len(ranks))}
            for rank, member in enumerate(ranks):
                member.environment |= meeting | {"RANK": str(rank), "LOCAL_RANK": "0"}  # each rank sees its GPU alone
        return cluster.engines

    async def _train(self, keep: Keep) -> None:
        for member in (*self._all("engine"), *self._all("buffer")):
            await self._start(member)
            keep(self._watch([member]))
        learners = self._all("learner")
        await asyncio.gather(*(self._start(m) for m in learners))
        keep(self._watch(learners))
        await within(
            self._config.rollout.engine.start_s + self._config.weightsync.push_s + IMPORT_S,
            learners[0].ready.wait(),
            who="the supervisor",
            waits_for="the learner's first version to be served",
            hint=f"see {self._dir}/logs/learner-0.log and engine-0.log",
        )
        evaluates = self._config.evaluation.tasks > 0
        if evaluates and not (self._dir / "evaluations.json").exists():
            await self._evaluate("warm start")
        for member in self._all("worker"):
            await self._start(member)
            keep(self._watch([member]))
        await learners[0].done.wait()
        await asyncio.gather(*(self._stop(m, END_S) for m in self._all("worker")))
        if evaluates:
            await self._evaluate("final")

    async def _evaluate(self, label: str) -> None:
        member = self._members["evaluator"]
        member.arguments = ("--label", label)
        await self._start(member)
        await self._watch([member])

    # --- one role -------------------------------------------------------------------------------------------------

    async def _start(self, member: Member) -> None:
        member.ready.clear()
        member.last_words, member.exit_status = "", None
        command = [sys.executable, "-P", "-m", "slipstream.launch.cli", "role", member.name, *member.arguments]
        grace = self._config.rollout.engine.start_s if member.kind == "engine" else self._config.launch.heartbeat_s
        member.deadline = time.monotonic() + grace
        member.process = await self._launcher.start(member.name, command, member.environment)
        self._view.status(member.name, f"started, pid {member.process.pid}")

    async def _watch(self, gang: Sequence[Member]) -> None:
        """Return when all of `gang` ended well; start all of it again when one did not."""
        while True:
            failed = await self._failure(gang)
            if failed is None:
                return
            why = f"{failed.name} ended with {describe(failed.exit_status)}"
            said = failed.last_words
            if not said and (failed.exit_status or 0) > 0:
                said = last_error(self._dir / "logs" / f"{failed.name}.log")
            if said:
                why += f": {said}"
            if failed.exit_status == ConfigError.exit_code:
                raise ConfigError(failed.last_words or why)
            failed.restarts += 1
            final = failed.exit_status == FINAL
            if final or failed.restarts > self._config.launch.restarts:
                budget = "" if final else f"; given up after {self._config.launch.restarts} restarts"
                raise RoleDied(f"{why}{budget}. See {self._dir / 'logs' / failed.name}.log")
            self._view.event(f"{why}; restart {failed.restarts} of {self._config.launch.restarts}")
            await asyncio.gather(*(self._start(m) for m in gang))

    async def _failure(self, gang: Sequence[Member]) -> Member | None:
        """Wait until all of `gang` ended well, or one did not and the others were killed; that one."""
        ends = [asyncio.create_task(self._ended(m)) for m in gang]
        try:
            for end in asyncio.as_completed(ends):
                if (failed := await end) is not None:
                    await asyncio.gather(*(m.process.kill() for m in gang if m.process))
                    await asyncio.gather(*ends)
                    return failed
            return None
        finally:
            for end in ends:
                end.cancel()

    async def _ended(self, member: Member) -> Member | None:
        """Wait for the end of a process; the member if that was a failure. A server that ends by itself has failed, even
        with exit status 0: vLLM's says 0 when its engine core was killed."""
        assert member.process is not None
        member.exit_status = await member.process.wait()
        member.deadline = float("inf")
        self._view.status(member.name, describe(member.exit_status))
        well = member.stopping or (member.exit_status == 0 and member.kind in FINISHING)
        return None if well else member

    async def _stop(self, member: Member, seconds: float) -> None:
        """Ask a role to end; after `seconds` end it."""
        if member.process is None or member.exit_status is not None:
            return
        member.deadline, member.stopping = float("inf"), True
        await member.process.terminate()
        ways = [asyncio.create_task(member.process.wait()), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(ways, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await member.process.kill()

    async def _end(self) -> None:
        """End everything: first the learner, with its checkpoint, while the buffer still answers."""
        await asyncio.gather(*(self._stop(m, self._config.launch.stop_s) for m in self._all("learner")))
        await asyncio.gather(*(self._stop(m, END_S) for m in (*self._all("worker"), *self._all("evaluator"))))
        await asyncio.gather(*(self._stop(m, END_S) for m in (*self._all("buffer"), *self._all("engine"))))
        await self._launcher.close()
