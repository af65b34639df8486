"""The supervisor: starts the roles of a run in order, keeps them alive, ends them all.

    engines, reward, buffer, learner ──> warm-start evaluation ──> workers ──> the learner is done ──> final evaluation
          └──────── heartbeats and probes; a role that dies or falls silent is restarted, `launch.restarts` times each

    who waits         for what                                   until
    workflow          the learner's first version to be served   start_s + push_s + a minute; then the run fails
    workflow          the learner's last step                    the learner's own deadlines
    workflow          the reward server to answer                start_s + a minute; then the run fails
    workflow          the evaluations                            their own deadlines, inside the episodes
    CheckpointEvaluations  a checkpoint, or the learner's last step   the run's end
    workflow          the ranks of a fine-tuning                 their own deadlines, in the collectives
    ProcessManager    the end of a process                       the run's end
    HealthMonitor     a heartbeat, or a server's answer          heartbeat_s; then the process is killed and restarted
    ControlServer     a command                                  the run's end
    a command         those before it that change the run        120 s; then it is refused
    AlertCommand      the program of `run.on_alert`              30 s, 5 s at the run's end; then it is killed
    MetricsServer     a scrape, in threads of its own            the run's end

Invariants:
- However a run ends, no process that it started is left. Servers that others started go on.
- The ranks of the learner and of the placed auxiliary models are one failure domain: a critic that died has lost steps that the
  policy has seen, so all resume from the last checkpoint.
- A role that ends with a ConfigError ends the run, a replica only if it is the last: a restart would not help.
- A role whose host is lost starts on another one; with a rank, the others start again and learn where it is.
- A first interrupt lets the learner write a checkpoint; a second one ends all processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...buffer.schema import BUFFER, process_names
from ...common.accelerator import CollectiveBackend
from ...common.owned_folders import SHARED_MEMORY, WEIGHTS, sweep
from ...common.replica_names import replica_of
from ...common.tasks import Stopped, run_or_stop
from ...configs import Config
from ...configs.engines import Fake
from ...errors import Interrupted, first_cause, with_deadline
from ...learner.checkpoint_folder import checkpoints, read_state
from ...monitor.log import logged_to
from ...monitor.metrics_server import MetricsServer
from ...monitor.output import discard_output
from ...monitor.terminal import View
from ...monitor.timeline import TimelineWriter
from ...rollout.engines import registry as servers
from .. import evaluations
from ..launchers.local import Launcher, Placement, PlacementLost
from ..resources import AUX_MODEL_KINDS, RANKED, needs_rendezvous_port, role_environment
from ..run_context import Addresses, RunContext
from .alert_monitor import AlertMonitor
from .control import ControlServer
from .evaluations import CheckpointEvaluations
from .external import external_servers
from .factory import make_engine
from .health import HealthMonitor
from .metrics_endpoint import MetricsEndpoint
from .processes import ProcessManager, RoleProcess, role_names
from .replicas import END_S, ReplicaManager, Spawn
from .server_usage import ServerUsage
from .settings import SettingsManager
from .sockets import SupervisorSockets
from .workers import WorkerManager

IMPORT_S = 60.0  # beyond `start_s`: what the learner may take to import torch and load the model on a busy machine
LEASELESS_S = 2.0  # how long workers may take to close their environments where no buffer takes their leases back
Workflow = Callable[[Spawn], Coroutine[Any, Any, None]]
"""Starts the roles of one command in order, and returns when they are done."""


@dataclass(eq=False)
class Supervisor:
    """One run: `train` to the learner's last step, `evaluate` the model in `model.path`, or `fine_tune` it. All raise RoleDied
    where a role cannot be restarted any more, ConfigError where a role found its config to be wrong (both for a replica only if
    none is left), and Interrupted where SIGINT, SIGTERM or SIGHUP came."""

    config: Config
    run_dir: Path
    launcher: Launcher
    view: View
    gpus: Mapping[str, int]  # that each role needs, by name; none for the others
    backend: CollectiveBackend  # of collectives between learner and replicas
    recorded: bool = True  # all processes write their spans and series; without them benchmarks compare
    evaluated_dir: str = ""  # see `RunContext`

    def __post_init__(self) -> None:
        self._processes = ProcessManager(self.config, self.run_dir, self.launcher, self.view)
        self._interrupted = asyncio.Event()
        self._metrics: MetricsServer | None = None
        self._exit_message = "interrupted"
        self._placements: dict[str, Placement] = {}
        self._rendezvous_ports: dict[str, int] = {}

    async def train(self, metrics: MetricsServer | None = None) -> None:
        """`metrics` listens already, and serves the run's until the end."""
        self._metrics = metrics
        resume = f"continue with `slipstream resume {shlex.quote(self.config.run.dir)}`"
        self._exit_message = f"interrupted; {resume}"
        usage = ServerUsage(self._processes, {name.partition("-")[0] for name, number in self.gpus.items() if number})
        with TimelineWriter(self.run_dir if self.recorded else None, "supervisor", usage.gauges):
            try:
                await self._run(role_names(self.config), self._train)
            except PlacementLost as error:
                raise PlacementLost(f"{error}; {resume} when there is room") from error

    async def evaluate(self, label: str, step: int = 0) -> None:
        """Serve `model.path` as it is, the policy after `step`, and add its evaluation to the run's."""
        engines = [name for name in role_names(self.config) if name.startswith("engine-")]
        await self._run([*engines, "evaluator"], lambda spawn: self._evaluate(label, step))

    async def rate(self) -> None:
        """Serve `model.path` as it is, and let the role `rater` measure pass rates by the `RatingPlan` in the run folder."""
        engines = [name for name in role_names(self.config) if name.startswith("engine-")]

        async def workflow(spawn: Spawn) -> None:
            raters = self._processes.of_kind("rater")
            await self._processes.start(*raters)
            await self._processes.watch(raters)

        await self._run([*engines, "rater"], workflow)

    async def fine_tune(self) -> None:
        self._exit_message = "interrupted; no model was written"

        async def workflow(spawn: Spawn) -> None:
            ranks = self._processes.of_kind("sft")
            await self._processes.start(*ranks)
            await self._processes.watch(ranks)

        await self._run([f"sft-{i}" for i in range(self.config.learner.backend.ranks)], workflow)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """End the run when the learner has written a checkpoint; on the second call, at once."""
        if number == signal.SIGHUP:  # the terminal is gone: writing to it would fail
            for stream in (sys.stdout, sys.stderr):
                if stream.isatty():
                    discard_output(stream)
        again = self._interrupted.is_set()
        self._interrupted.set()
        if again:
            self._processes.kill_now.set()
            self.view.event("interrupted again: ending all processes now, without a checkpoint")
        elif any(role.running and role.ready.is_set() for role in self._processes.of_kind("learner")):
            seconds = self.config.launch.stop_s
            self.view.event(
                f"interrupted: waiting up to {seconds:g} s for the learner to write a checkpoint; interrupt again to end at once"
            )
        else:
            self.view.event("interrupted: waiting for the processes to end; interrupt again to end them at once")

    async def _run(self, names: Sequence[str], workflow: Workflow) -> None:
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signals.append(signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self.interrupt, number)
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
                background: set[asyncio.Task[None]] = set()

                def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                    task = tasks.create_task(work)
                    background.add(task)
                    task.add_done_callback(background.discard)
                    return task

                try:
                    with contextlib.suppress(Stopped):
                        await run_or_stop(self._carry_out(names, stack, workflow, spawn), self._interrupted)
                    if self._interrupted.is_set():
                        raise Interrupted(self._exit_message)
                finally:
                    for task in background:
                        task.cancel()
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def _carry_out(
        self, names: Sequence[str], stack: contextlib.AsyncExitStack, workflow: Workflow, spawn: Spawn
    ) -> None:
        """Place all roles, start the supervisor's services, then the replicas, then `workflow`. `stack` ends it all."""
        stack.enter_context(logged_to(self.run_dir / "logs" / "supervisor.log", "supervisor"))
        if isinstance(self.config.rollout.engine, Fake):
            self.view.event("rollout.engine.kind=fake is for fault injection: it fails as its script says")
        if self.config.weightsync.transport == "shared":
            stack.push_async_callback(asyncio.to_thread, sweep, SHARED_MEMORY, WEIGHTS)  # of a learner that was killed
        stack.push_async_callback(self.launcher.close)
        self._placements = await self.launcher.place({name: self.gpus.get(name, 0) for name in names})
        for kind in needs_rendezvous_port(self.config):
            if f"{kind}-0" in self._placements:
                self._rendezvous_ports[kind] = await self.launcher.reserve_port(f"{kind}-0")
        await self.launcher.check_links()
        sockets = SupervisorSockets(self.launcher.host, self.config, lambda *told: replicas.certified(*told))
        stack.push_async_callback(sockets.close)
        access = sockets.access
        self.launcher.authorize = access.authorize
        self._processes.access, self._processes.revoke = access.access, access.revoke
        external = external_servers(self.config, self.view.event) if "buffer" in names else {}
        for name, server in external.items():
            access.admit_server(name, server.keys)
        alerts = AlertMonitor(self.run_dir, self.config, self.view)
        stack.push_async_callback(alerts.close)  # last of all: the others end meanwhile
        stack.push_async_callback(self._end)
        context = self._context(sockets.addresses)

        def environment(name: str, placement: Placement) -> dict[str, str]:
            return self._environment(changing.context, name, placement)

        replicas = ReplicaManager(
            self._processes,
            self.launcher,
            sockets.fleet.publish,
            self.view,
            environment=environment,
            make_engine=functools.partial(make_engine, context, access.servers),
            probe_path=servers.probe_path(self.config),
            gpus=self.gpus.get("engine-0", 0),
            pushed=context.pushed,
            scheme=self.config.launch.scheme,
        )
        stack.push_async_callback(alerts.finish)
        health = HealthMonitor(self._processes, replicas, self.config.launch.heartbeat_s, self.view, alerts)
        changing = SettingsManager(
            context,
            sockets.settings,
            self._processes,
            self.view,
            last_step=lambda: health.last_step,
            followers=(self.view.configure, alerts.configure),
            trusting=access.trusting,
            pair=access.pair,
        )
        self._workers = WorkerManager(
            self._processes, self.launcher, self.view, environment, changing.set_workers, changing.require_slots
        )
        self._processes.moved = functools.partial(self._moved, changing, replicas)
        live, workers = (changing, self._workers) if "buffer" in names else (None, None)
        control = ControlServer(
            self.run_dir, replicas, sockets.fleet.address, health.waits, live, workers, access.pair, access.admit
        )
        services = health.listen(sockets.signals), health.watch(), alerts.watch(), control.serve()
        for service in (*sockets.services(), *services):
            spawn(service)
        if self._metrics is not None:
            spawn(MetricsEndpoint(self._metrics, self.run_dir, self._processes, replicas, alerts).serve())
        for name in names:
            if not name.startswith(("engine-", "worker-")):
                role = RoleProcess(name, environment(name, self._placements[name]))
                self._processes.roles[name] = role
                if name == "reward":
                    role.probe = context.addresses.reward, "/health"
        self._workers.prepare({name: self._placements[name] for name in names if name.startswith("worker-")})
        engines = {name: self._placements[name] for name in names if name.startswith("engine-")}
        replicas.names(len({replica_of(name) for name in engines}))
        await replicas.begin(engines, spawn)
        await replicas.attach(external)
        await workflow(spawn)

    def _context(self, sockets: Addresses) -> RunContext:
        """The context of roles; `sockets` are the supervisor's own."""
        buffer, reward = self._placements.get(BUFFER), self._placements.get("reward")
        shards = process_names(self.config.buffer.shards)[1:]
        addresses = msgspec.structs.replace(
            sockets,
            buffer=f"tcp://{buffer.address}#" if buffer else "",
            buffer_shards=tuple(f"tcp://{self._placements[name].address}#" for name in shards if buffer),
            reward=f"{self.config.launch.scheme}://{reward.address}" if reward else "",
        )
        return RunContext(
            self.config,
            self._with_ranks(addresses),
            str(self.run_dir),
            self.backend,
            started_in=os.getcwd(),
            pushed="learner-0" in self._placements,
            recorded=self.recorded,
            workers=tuple(name for name in self._placements if name.startswith("worker-")),
            evaluated_dir=self.evaluated_dir,
        )

    def _with_ranks(self, addresses: Addresses) -> Addresses:
        """`addresses` with those of the learner's ranks and of auxiliary models, where they are placed now."""
        learner = self._placements.get("learner-0")
        aux_models = {
            kind: tuple(f"tcp://{p.address}#" for name, p in self._placements.items() if name.startswith(f"{kind}-"))
            for kind in AUX_MODEL_KINDS
        }
        host = learner.host if learner else ""
        return msgspec.structs.replace(addresses, learner_host=host, aux_models=aux_models)

    async def _moved(
        self, settings: SettingsManager, replicas: ReplicaManager, name: str, placement: Placement
    ) -> None:
        """`name`, which does not run now, starts next at `placement`. Ranks that are to meet it start again with it."""
        self._placements[name] = placement
        kind = name.partition("-")[0]
        if kind == "engine":
            await replicas.moved(name, placement)
        elif kind == "worker":
            self._workers.placements[name] = placement
        elif kind in RANKED:
            if kind in self._rendezvous_ports and name == f"{kind}-0":
                self._rendezvous_ports[kind] = await self.launcher.reserve_port(name)
            settings.relocate(self._with_ranks(settings.context.addresses))
            for role in self._processes.of_kind(*RANKED):
                role.environment = self._environment(settings.context, role.name, self._placements[role.name])
        self.view.event(f"{name} moves to {placement.host}")

    def _environment(self, context: RunContext, name: str, placement: Placement) -> dict[str, str]:
        variables = context.environment(name) | role_environment(self.config, name, placement.gpus)
        kind, _, rank = name.partition("-")
        ranks = sum(other.startswith(f"{kind}-") for other in self._placements)
        if kind in RANKED and ranks > 1:
            first = self._placements[f"{kind}-0"]
            variables |= {
                "MASTER_ADDR": first.host,
                "MASTER_PORT": str(self._rendezvous_ports.get(kind, first.port)),
                "WORLD_SIZE": str(ranks),
                "RANK": rank,
                "LOCAL_RANK": "0",  # each rank sees only its own GPU
            }
        return variables

    # --- plans ----------------------------------------------------------------------------------------------------

    async def _train(self, spawn: Spawn) -> None:
        processes = self._processes
        complete = checkpoints(self.run_dir / "checkpoints")
        began = read_state(complete[-1]).step if complete else 0
        ends = max(began, self.config.learner.steps)
        evaluations.begin(self.run_dir, ends)
        for role in processes.of_kind("reward", "buffer"):
            await processes.start(role)
            spawn(processes.watch([role]))
        domain = processes.of_kind("learner", *AUX_MODEL_KINDS)
        await processes.start(*domain)
        spawn(processes.watch(domain))
        learner = processes.roles["learner-0"]
        engine_s = self.config.rollout.engine.start_s + IMPORT_S
        until, logs = functools.partial(with_deadline, who="the supervisor"), self.run_dir / "logs"
        first_s, waits_for = engine_s + self.config.push_s, "the learner's first version to be served"
        await until(
            first_s, learner.ready.wait(), waits_for=waits_for, hint=f"see {logs}/learner-0.log and engine-0.log"
        )
        if evaluations.begins(self.run_dir, began):
            await self._evaluate(evaluations.label_of(began), began)
        for role in processes.of_kind("reward"):
            waits_for = "the reward server to answer"
            await until(engine_s, role.ready.wait(), waits_for=waits_for, hint=f"see {logs}/reward.log")
        await self._workers.begin(spawn)
        checkpoint_evaluations = CheckpointEvaluations(self.config, self.run_dir, processes, self.view)
        evaluating = spawn(checkpoint_evaluations.follow(learner, processes.roles["evaluator"]))
        await learner.done.wait()
        await self._workers.end(END_S)
        await evaluating
        await self._evaluate(evaluations.FINAL, ends)
        checkpoint_evaluations.prune()

    async def _evaluate(self, label: str, step: int) -> None:
        """Evaluate the version that the run's servers serve, where a suite has no result of `step`."""
        if not evaluations.missing(self.run_dir, self.config, step):
            return
        role = self._processes.roles["evaluator"]
        role.arguments, role.restarts = ("--label", label, "--step", str(step)), 0
        await self._processes.start(role)
        await self._processes.watch([role])

    async def _end(self) -> None:
        """End everything: first the learner, with a checkpoint, while the buffer and the auxiliary models still answer. Where the
        buffer has ended, workers cannot return their leases, and have `LEASELESS_S`."""
        buffers = self._processes.of_kind("buffer")
        await self._stop(self.config.launch.stop_s, "learner")
        leaving_s = END_S if all(role.running for role in buffers) else LEASELESS_S
        await asyncio.gather(self._stop(leaving_s, "worker"), self._stop(END_S, "evaluator", "rater", "sft"))
        await self._stop(END_S, "buffer", "engine", "reward", *AUX_MODEL_KINDS)

    async def _stop(self, seconds: float, *kinds: str) -> None:
        await asyncio.gather(*(self._processes.stop(role, seconds) for role in self._processes.of_kind(*kinds)))
