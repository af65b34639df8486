"""`/metrics` of a run, `/metrics/NAME` of its inference servers, which answer only the run itself, and `targets.json`: where
Prometheus finds all of them, as they come and go.

Invariants:
- A scrape runs in threads of its own. It copies what the event loop changes, and reads what other processes have recorded from the
  run folder: it asks no process but the server that it is for, and the event loop does nothing for it.
- `targets.json` is replaced as a whole, and removed when the run ends. After a supervisor that was killed it stays, so that
  Prometheus sees a target that is down.
- A file that cannot be written is a line in the log.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import platform
import time
from pathlib import Path

import msgspec

from ... import __version__
from ...common.fsio import write_atomic
from ...common.tasks import in_thread
from ...configs import Config
from ...errors import DeadlineExceeded, with_deadline
from ...learner.metric_docs import metric_docs
from ...learner.metrics import StepMetrics
from ...monitor.alerts import severities
from ...monitor.metrics import METRICS as ROWS
from ...monitor.metrics import MetricsTail
from ...monitor.metrics_server import READ_S, MetricsServer
from ...monitor.prometheus import (
    FRESH_S,
    METRICS,
    REPLICA_STATES,
    CommittedTokens,
    Exposition,
    Family,
    Metric,
    RowTotals,
    buffer_gauges,
    export_evaluations,
    export_processes,
    step_metrics,
)
from ...monitor.series import EVALUATIONS, read_evaluations
from ...monitor.timeline import newest_gauges
from ...rollout.engines.http_client import HttpClient
from .alert_monitor import AlertMonitor
from .processes import ProcessManager
from .replicas import ReplicaManager

log = logging.getLogger(__name__)

TARGETS = "targets.json"  # in the folder of a run, in the format of Prometheus's `file_sd_configs`
PERIOD_S = 1.0  # between two looks at the fleet
WRITE_S = 30.0  # longest wait for the disk


@functools.cache
def all_metrics() -> tuple[Metric, ...]:
    """The whole table: what `/metrics` may have, with the types and HELP texts."""
    fields = msgspec.structs.fields(StepMetrics)
    mappings = [field.name for field in fields if str(field.type).startswith("dict")]
    return (*step_metrics(metric_docs(), mappings), *METRICS)


class MetricsEndpoint:
    """Serves the run in `run_dir` at `server`."""

    def __init__(
        self,
        server: MetricsServer,
        run_dir: Path,
        processes: ProcessManager,
        replicas: ReplicaManager,
        alerts: AlertMonitor,
    ) -> None:
        self._server = server
        self._run_dir = run_dir
        self._processes = processes
        self._replicas = replicas
        self._alerts = alerts
        self._config: Config = processes.config
        self._severities = severities(self._config)
        self._tail = MetricsTail(run_dir / ROWS)
        self._totals = RowTotals()
        self._committed = CommittedTokens()

    async def serve(self) -> None:
        """Until cancelled."""
        self._server.start(self.read, self._read_server)
        self._processes.view.event(f"metrics: {self._server.url}")
        path, written, warned = self._run_dir / TARGETS, b"", ""
        try:
            while True:
                targets = msgspec.json.encode(self._targets())
                if targets != written:
                    try:
                        writing = in_thread(functools.partial(write_atomic, path, targets), "targets")
                        hint = f"is the disk of {self._run_dir} gone?"
                        await with_deadline(WRITE_S, writing, who="the supervisor", waits_for=f"{path}", hint=hint)
                        written, warned = targets, ""
                    except (OSError, DeadlineExceeded) as error:
                        if str(error) != warned:
                            warned = str(error)
                            log.warning("%s is not written: %s", path, error)
                await asyncio.sleep(PERIOD_S)
        finally:
            path.unlink(missing_ok=True)

    def read(self) -> list[Family]:
        """The samples of a scrape. In one thread at a time. Raises StoreError where a file of the run is damaged."""
        to, now = Exposition(all_metrics()), time.time()
        to.set("build_info", 1, __version__, platform.python_version())
        to.set("run_info", 1, *map(str, _kinds(self._config)))
        to.set("snapshot_timestamp_seconds", now)
        self._totals.add(self._tail.read())
        self._totals.export(to)
        export_evaluations(read_evaluations(self._run_dir / EVALUATIONS), to)
        series = newest_gauges(self._run_dir, now - FRESH_S)
        self._committed.export(buffer_gauges(series), to)
        export_processes(series, to)
        self._export_supervised(to)
        return list(to.families())

    def _read_server(self, name: str) -> bytes | None:
        """The metrics of an inference server that answers, asked in this thread. Raises EngineError, DeadlineExceeded."""
        replica = self._replicas.fleet.replica(name)
        if replica is None or not replica.answers:
            return None
        client = HttpClient(name, replica.url, READ_S, self._processes.access(name))

        async def read() -> bytes:
            try:
                return await client.call("GET", "/metrics")
            finally:
                await client.close()

        return asyncio.run(read())

    def _export_supervised(self, to: Exposition) -> None:
        """What the supervisor itself knows."""
        fleet = self._replicas.fleet
        for state in REPLICA_STATES:
            to.set("replicas", sum(replica.state == state for replica in fleet.replicas), state)
        for replica in fleet.replicas:
            to.set("engine_version", replica.version, replica.name)
        for name, count in ({one.name: 0 for one in fleet.replicas} | self._replicas.suspicion.counts).items():
            to.set("engine_false_replies_total", count, name)
        to.set("process_up", 1, "supervisor")
        for name, role in self._processes.roles.copy().items():
            to.set("process_up", role.running and (role.external is None or role.ready.is_set()), name)
            to.set("process_restarts_total", role.restarts, name)
        active = self._alerts.active
        for rule, severity in self._severities.items():
            to.set("alert", rule in active, rule, severity)

    def _targets(self) -> list[Target]:
        """The supervisor, and through it the servers that answer: each kind has metrics of its own."""
        run, kind = self._run_dir.name, str(_kinds(self._config)[0])
        supervisor = Target((self._server.address,), {"run": run, "role": "supervisor", "server": "slipstream"})
        answering = [replica for replica in self._replicas.fleet.replicas if replica.answers]
        labels = {"run": run, "server": kind}
        through = (labels | {"role": one.name, "__metrics_path__": f"/metrics/{one.name}"} for one in answering)
        return [supervisor, *(Target((self._server.address,), one) for one in through)]


class Target(msgspec.Struct, frozen=True):
    """An entry of `targets.json`."""

    targets: tuple[str, ...]
    labels: dict[str, str]


def _kinds(config: Config) -> tuple[object, object, int]:
    engine, backend = config.rollout.engine, config.learner.backend
    return engine.__struct_config__.tag, backend.__struct_config__.tag, config.seed
