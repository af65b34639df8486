"""The supervisor: starts the roles of a run in order, keeps them alive, ends them all.

    engines, reward, buffer, learner ──> warm-start evaluation ──> workers ──> the learner is done ──> final evaluation
          └──────── heartbeats and health; what dies or falls silent is started again, `launch.restarts` times each

    who waits         for what                                   until
    plan              the learner to publish its first version   start_s + push_s + a minute; then the run fails
    plan              the learner's last step                    the learner's own deadlines
    plan              the reward server to answer                start_s + a minute; then the run fails
    plan              the evaluations                            their own deadlines, inside the episodes
    plan              the ranks of a fine-tuning                 their own deadlines, in the collectives
    keeper            the end of a process                       the run's end
    pulse             a heartbeat, or an answer of a server      heartbeat_s; then the process is killed and restarted
    control           a wish about the replicas                  the run's end

Invariants:
- Whatever way `run` ends, no process that it started is left.
- The ranks of the learner and of the models placed beside it live and die together: a critic that died has lost steps that the
  policy has seen, so all resume from the last checkpoint.
- A role that ends with a ConfigError ends the run, a replica that does so only if it is the last; trying again would not help.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio

from ..configs import Config
from ..configs.schema import Fake
from ..curve import Guard, make_keys
from ..errors import Interrupted, first_cause, within
from ..monitor.live import View
from ..monitor.log import logged_to
from ..rollout import servers
from ..weightsync.fleet import FleetBoard
from .control import Control
from .job import Cluster, Job
from .keeper import Keeper
from .member import Member, role_names
from .probe import Probe
from .processes import Launcher, Spot
from .replicas import END_S, Keep, Replicas
from .resources import BESIDE, RANKED, met_apart, role_environment
from .reward import reward_member
from .vitals import Vitals
from .wiring import make_engine

IMPORT_S = 60.0
"""Beyond `start_s`: what the learner may take to import torch and load the model on a busy machine."""

Plan = Callable[[Keep], Coroutine[Any, Any, None]]
"""The order of things: starts roles and returns when the run is done."""


class Supervisor:
    """One run: `train` to the learner's last step, `evaluate` what `model.path` holds, or `fine_tune` it.

    All raise:
        RoleDied: a role ended more often than `launch.restarts` allows, and for a replica: none is left.
        Interrupted: SIGINT or SIGTERM came.
        ConfigError: a role found its config to be wrong, and for a replica: none is left.

    Args:
        gpus: how many each role needs, by name; none for the others.
        backend: what collectives between learner and replicas run on.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        launcher: Launcher,
        view: View,
        *,
        gpus: Mapping[str, int],
        backend: Literal["gloo", "nccl"],
    ) -> None:
        self._config = config
        self._dir = run_dir
        self._launcher = launcher
        self._view = view
        self._gpus = gpus
        self._backend: Literal["gloo", "nccl"] = backend
        self._keys = make_keys() if config.launch.hosts == "many" else None
        self._keeper = Keeper(config, run_dir, launcher, view)
        self._interrupted = asyncio.Event()
        self._farewell = "interrupted"
        self._spots: dict[str, Spot] = {}
        self._meetings: dict[str, int] = {}

    async def train(self) -> None:
        """From the first process to the last evaluation."""
        self._farewell = f"interrupted; continue with `slipstream resume {self._config.run.dir}`"
        await self._see_through(role_names(self._config), self._train)

    async def evaluate(self, label: str) -> None:
        """Serve `model.path` as it is, and append one evaluation of it to `evaluations.json`."""
        names = [n for n in role_names(self._config) if n.startswith("engine-")]

        async def play(keep: Keep) -> None:
            await self._evaluate(label)

        await self._see_through([*names, "evaluator"], play)

    async def fine_tune(self) -> None:
        """The ranks of a supervised fine-tuning, to their end."""
        self._farewell = "interrupted; no model was written"

        async def work(keep: Keep) -> None:
            ranks = self._keeper.all("sft")
            await asyncio.gather(*(self._keeper.start(m) for m in ranks))
            await self._keeper.watch(ranks)

        await self._see_through([f"sft-{i}" for i in range(self._config.learner.backend.ranks)], work)

    def interrupt(self) -> None:
        """Stop as soon as the learner has written its checkpoint; asked again, at once."""
        if self._interrupted.is_set():
            self._keeper.hurry.set()
        self._interrupted.set()

    async def _see_through(self, names: Sequence[str], plan: Plan) -> None:
        """Carry out `plan` with the roles `names` while listening, probing and restarting; leave nothing behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.interrupt)
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                background: set[asyncio.Task[None]] = set()

                def keep(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                    task = tasks.create_task(work)
                    background.add(task)
                    task.add_done_callback(background.discard)
                    return task

                work = asyncio.create_task(self._carry_out(names, stack, plan, keep), name="plan")
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
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _carry_out(self, names: Sequence[str], stack: contextlib.AsyncExitStack, plan: Plan, keep: Keep) -> None:
        """Find a place for everybody, start what listens, then the replicas, then `plan`. `stack` ends it all."""
        stack.enter_context(logged_to(self._dir / "logs" / "supervisor.log", "supervisor"))
        if isinstance(self._config.rollout.engine, Fake):
            self._view.event(
                "rollout.engine.kind=fake is for fault injection: what it generates is slow and fails as told"
            )
        if self._config.weightsync.transport == "shared":
            from ..weightsync.files import sweep  # here, because it loads torch

            stack.push_async_callback(asyncio.to_thread, sweep)  # what a learner that was killed has left
        stack.push_async_callback(self._launcher.close)
        self._spots = await self._launcher.place({name: self._gpus.get(name, 0) for name in names})
        for kind in met_apart(self._config):
            if f"{kind}-0" in self._spots:
                self._meetings[kind] = await self._launcher.another_port(f"{kind}-0")
        host = self._launcher.host
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        socket = context.socket(zmq.PULL)
        stack.callback(socket.close, linger=0)
        guard = Guard(context, self._keys)
        stack.callback(guard.close)
        guard.protect(socket)
        port = socket.bind_to_random_port(f"tcp://{host}")
        board = FleetBoard(host, self._keys)
        stack.push_async_callback(board.close)
        stack.push_async_callback(self._end)
        job = self._job(f"tcp://{host}:{port}", board.address)
        probe = await stack.enter_async_context(Probe(servers.probe_path(self._config)))
        replicas = Replicas(
            self._keeper,
            self._launcher,
            board,
            probe,
            self._view,
            environment=functools.partial(self._environment, job),
            make_engine=functools.partial(make_engine, job),
            gpus=self._gpus.get("engine-0", 0),
            pushed=job.pushed,
        )
        vitals = Vitals(self._keeper, replicas, self._config.launch.heartbeat_s, self._view)
        for work in (
            board.serve(),
            vitals.listen(socket),
            vitals.pulse(),
            Control(self._dir, replicas, board.address, vitals.waits, self._keys).serve(),
        ):
            keep(work)
        for name in names:
            spot = self._spots[name]
            if name == "reward":
                asked = await stack.enter_async_context(Probe("/health"))
                member = reward_member(self._environment(job, name, spot), spot, asked, keep, self._view)
                self._keeper.members[name] = member
            elif not name.startswith("engine-"):
                self._keeper.members[name] = Member(name, self._environment(job, name, spot))
        engines = replicas.names(sum(name.startswith("engine-") for name in names))
        await replicas.begin({name: self._spots[name] for name in engines}, keep)
        await plan(keep)

    # --- the order of things --------------------------------------------------------------------------------------

    def _job(self, supervisor: str, fleet: str) -> Job:
        """What every role is told."""
        buffer, learner, reward = (self._spots.get(name) for name in ("buffer", "learner-0", "reward"))
        cluster = Cluster(
            supervisor=supervisor,
            fleet=fleet,
            buffer=f"tcp://{buffer.address}" if buffer else "",
            learner_host=learner.host if learner else "",
            reward=f"http://{reward.address}" if reward else "",
            beside={
                kind: tuple(
                    f"tcp://{spot.address}" for name, spot in self._spots.items() if name.startswith(f"{kind}-")
                )
                for kind in BESIDE
            },
        )
        return Job(
            self._config,
            cluster,
            run_dir=str(self._dir),
            backend=self._backend,
            started_in=os.getcwd(),
            pushed=learner is not None,
        )

    def _environment(self, job: Job, name: str, spot: Spot) -> dict[str, str]:
        """What the process of role `name` is given at its place."""
        variables = job.environment(name) | role_environment(self._config, name, spot.gpus)
        variables |= self._keys.environment() if self._keys else {}
        kind, _, rank = name.partition("-")
        ranks = sum(other.startswith(f"{kind}-") for other in self._spots)
        if kind in RANKED and ranks > 1:
            first = self._spots[f"{kind}-0"]
            port = self._meetings.get(kind, first.port)
            meeting = {"MASTER_ADDR": first.host, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
            variables |= meeting | {"RANK": rank, "LOCAL_RANK": "0"}  # each rank sees its GPU alone
        return variables

    async def _train(self, keep: Keep) -> None:
        keeper = self._keeper
        for member in (*keeper.all("reward"), *keeper.all("buffer")):
            await keeper.start(member)
            keep(keeper.watch([member]))
        learners = keeper.all("learner")
        gang = [*learners, *(member for kind in BESIDE for member in keeper.all(kind))]
        await asyncio.gather(*(keeper.start(m) for m in gang))
        keep(keeper.watch(gang))
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
        for member in keeper.all("reward"):
            start_s, hint = self._config.rollout.engine.start_s + IMPORT_S, f"see {self._dir}/logs/reward.log"
            waits_for = "the reward server to answer"
            await within(start_s, member.ready.wait(), who="the supervisor", waits_for=waits_for, hint=hint)
        for member in keeper.all("worker"):
            await keeper.start(member)
            keep(keeper.watch([member]))
        await learners[0].done.wait()
        await asyncio.gather(*(keeper.stop(m, END_S) for m in keeper.all("worker")))
        if evaluates:
            await self._evaluate("final")

    async def _evaluate(self, label: str) -> None:
        member = self._keeper.members["evaluator"]
        member.arguments = ("--label", label)
        await self._keeper.start(member)
        await self._keeper.watch([member])

    async def _end(self) -> None:
        """End everything: first the learner, with its checkpoint, while the buffer and what is beside it still answer."""
        every, stop = self._keeper.all, self._keeper.stop
        await asyncio.gather(*(stop(m, self._config.launch.stop_s) for m in every("learner")))
        await asyncio.gather(*(stop(m, END_S) for m in (*every("worker"), *every("evaluator"), *every("sft"))))
        served = ("buffer", "engine", "reward", *BESIDE)
        await asyncio.gather(*(stop(m, END_S) for kind in served for m in every(kind)))
