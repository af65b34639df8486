"""What `/metrics` of a run exports: the table of metrics, and the samples of each from what a run has recorded. Pure.

Invariants:
- Names and types are Prometheus's: counters end in `_total`, times are in seconds, sizes in bytes, shares from 0 to 1.
- Each field of a step's row is `slipstream_step_NAME`; the parts of a field that is a mapping are told apart by one label.
- A metric has at most `SERIES` series, so that names from an environment cannot flood a server; the others are counted.
- A counter never falls. Where an account of the ledger falls, because a learner's restart rolled commits back, its counter stays
  and counts what is repeated again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..common.scores import EvaluationResult
from .metrics import Row

SERIES = 2000  # of one metric: a fleet's replicas and workers fit, names that never end do not
PARTS = 64  # of one mapping of a step's row: names of an environment's metrics, ages
LONGEST = 200  # characters of a label's value
FRESH_S = 30.0  # a process that recorded nothing for so long is gone; it records once a second
PREFIX, STEP = "slipstream_", "slipstream_step_"
REPLICA_STATES = ("starting", "serving", "draining")
GROUP_STATES = ("open", "leased", "ready", "batched")
ROLE_GPU = ("role", "gpu")
Family = GaugeMetricFamily | CounterMetricFamily
Gauges = Mapping[str, Any]  # a line of a process's series


class Metric(msgspec.Struct, frozen=True):
    """A line of the table. The name is without `slipstream_`."""

    name: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def type(self) -> Literal["counter", "gauge"]:
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS = (
    Metric("build_info", "1; the labels say which version runs, on which Python", ("version", "python")),
    Metric(
        "run_info",
        "1; the labels name the run's kinds of servers and learner, and its seed",
        ("engine", "backend", "seed"),
    ),
    Metric(
        "snapshot_timestamp_seconds", "when these numbers were read; it stands still while the disk of the run hangs"
    ),
    Metric("series_dropped", "series that are not exported, because their metric has too many"),
    Metric("episodes_total", "episodes that ended, by outcome", ("outcome",)),
    Metric("groups_total", "groups that were trained on"),
    Metric("groups_alike_total", "those of them whose episodes all had the same reward"),
    Metric("evaluation_reward_mean", "mean reward of the newest evaluation of each suite", ("suite",)),
    Metric("evaluation_reward_stderr", "its standard error", ("suite",)),
    Metric("evaluation_step", "learner steps in the weights that it evaluated", ("suite",)),
    Metric("evaluation_tasks", "tasks that it is over: those with an episode that did not fail", ("suite",)),
    Metric(
        "ledger_tokens",
        "tokens in each account of the ledger now; their sum is generated_tokens_total",
        ("account", "reason"),
    ),
    Metric("generated_tokens_total", "tokens that workers accepted from servers and reported"),
    Metric("trained_tokens_total", "tokens that carried loss in a committed step"),
    Metric("withheld_tokens_total", "tokens of committed steps without loss, by reason", ("reason",)),
    Metric("discarded_tokens_total", "tokens that were discarded, by reason", ("reason",)),
    Metric("buffer_groups", "groups in the buffer, by state", ("state",)),
    Metric("learner_version", "policy version of the learner's weights"),
    Metric("served_version", "oldest policy version that a serving replica serves"),
    Metric("learner_phase", "1 for what each rank of the learner does now", ("role", "phase")),
    Metric("worker_slots", "episodes that a worker may play at once", ("role",)),
    Metric("worker_episodes", "episodes that it plays", ("role",)),
    Metric("worker_queued_requests", "requests that wait in it for a replica", ("role",)),
    Metric("worker_received_tokens_total", "sampled tokens that it received", ("role",)),
    Metric("worker_delivered_episodes_total", "episodes that it delivered to the buffer", ("role",)),
    Metric("engine_running_requests", "sequences that a replica decodes", ("role",)),
    Metric("engine_waiting_requests", "requests that wait in it", ("role",)),
    Metric("engine_kv_cache_ratio", "share of its cache of keys and values that is in use", ("role",)),
    Metric("engine_sampled_tokens_total", "tokens that it sampled; SGLang does not say", ("role",)),
    Metric("engine_drafted_tokens_total", "tokens that its speculative decoding drafted; absent without it", ("role",)),
    Metric("engine_accepted_tokens_total", "drafted tokens that the model accepted", ("role",)),
    Metric("engine_version", "policy version that a replica serves; absent while it serves none", ("role",)),
    Metric("replicas", "replicas by state", ("state",)),
    Metric("engine_false_replies_total", "replies of a replica that failed the check of replies", ("role",)),
    Metric("process_up", "1 where the process of a role runs, else 0", ("role",)),
    Metric("process_restarts_total", "restarts of a role by the supervisor", ("role",)),
    Metric(
        "process_cpu_seconds_total", "CPU time of a process; of a server with the processes that it started", ("role",)
    ),
    Metric("process_resident_memory_bytes", "memory of a process, likewise", ("role",)),
    Metric(
        "gpu_utilization_ratio", "share of the time in which a GPU of a process computed, for any process", ROLE_GPU
    ),
    Metric("gpu_memory_used_bytes", "memory of a GPU of a process that is in use, by all processes", ROLE_GPU),
    Metric("gpu_memory_total_bytes", "memory that the GPU has", ROLE_GPU),
    Metric("gpu_power_watts", "power that it draws", ROLE_GPU),
    Metric("gpu_temperature_celsius", "its temperature", ROLE_GPU),
    Metric("process_dropped_lines_total", "lines of spans and series that were not written", ("role",)),
    Metric("alert", "1 while an alert of the run is active, else 0", ("rule", "severity")),
)
"""All but those of a step's row, which `step_metrics` makes from its fields."""

_LABELS = {"staleness_tokens": "staleness", "outcomes": "outcome", "environment": "metric"}
_STEP_NAMES = {"step": "slipstream_step", "time": "slipstream_step_timestamp_seconds"}


def step_name(field: str) -> str:
    """`pause_ms` -> `slipstream_step_pause_seconds`: Prometheus's units are spelled out and have no prefix."""
    field = re.sub(r"_per_s$", "_per_second", re.sub(r"(?<!per)_m?s$", "_seconds", field))
    return _STEP_NAMES.get(field, STEP + field)


def step_metrics(docs: Mapping[str, str], mappings: Iterable[str]) -> list[Metric]:
    """The table's lines of a step's row, whose fields `docs` explains; those in `mappings` are mappings."""
    labels = {field: (_label_of(field),) for field in mappings}
    return [Metric(step_name(field).removeprefix(PREFIX), text, labels.get(field, ())) for field, text in docs.items()]


def _label_of(field: str) -> str:
    return "staleness" if field.endswith("_by_staleness") else _LABELS.get(field, "key")


class Exposition:
    """The samples of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._samples: dict[str, dict[tuple[str, ...], float]] = {}
        self.dropped = 0

    def set(self, name: str, value: object, *labels: str, most: int = SERIES) -> None:
        """A sample of metric `name`, in place of an earlier one with the same labels. None and what is not finite is left out."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            return
        samples = self._samples.setdefault(name, {})
        if labels not in samples and (len(samples) >= most or any(len(label) > LONGEST for label in labels)):
            self.dropped += 1
            return
        samples[labels] = float(value)

    def step(self, row: Row) -> None:
        """The newest step's row; a field that the table lacks, as of an older version, is left out."""
        for field, value in row.items():
            name = step_name(field).removeprefix(PREFIX)
            if name not in self._metrics:
                continue
            if not isinstance(value, Mapping):
                self.set(name, value / 1000 if field.endswith("_ms") and value is not None else value)
                continue
            for part, number in value.items():
                self.set(name, number, str(part), most=PARTS)

    def families(self) -> Iterator[Family]:
        """All of the table in its order; one without samples has its type and its HELP."""
        self.set("series_dropped", self.dropped)
        for metric in self._metrics.values():
            kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = kind(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in self._samples.get(metric.name, {}).items():
                family.add_metric(labels, value)
            yield family


class RowTotals:
    """Sums over the steps of a run; a step that is repeated after a restart counts again."""

    def __init__(self) -> None:
        self.newest: Row = {}
        self._outcomes: dict[str, int] = {}
        self._groups = self._alike = 0

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.newest = row
            self._groups += row.get("groups") or 0
            self._alike += row.get("groups_alike") or 0
            for outcome, number in (row.get("outcomes") or {}).items():
                self._outcomes[outcome] = self._outcomes.get(outcome, 0) + number

    def export(self, exposition: Exposition) -> None:
        """Set the samples of the newest step and of the totals in `exposition`."""
        exposition.step(self.newest)
        for outcome, number in sorted(self._outcomes.items()):
            exposition.set("episodes_total", number, outcome)
        exposition.set("groups_total", self._groups)
        exposition.set("groups_alike_total", self._alike)


class CommittedTokens:
    """The accounts of the ledger as counters, which never fall."""

    def __init__(self) -> None:
        self._seen: dict[
            tuple[str, str], tuple[float, float]
        ] = {}  # account and reason -> as last seen, and the counter

    def export(self, buffer: Gauges, exposition: Exposition) -> None:
        """Set their samples in `exposition`; `buffer` is a line of the buffer's series."""
        exposition.set("generated_tokens_total", self._count("generated", "", buffer.get("generated")))
        exposition.set("trained_tokens_total", self._count("trained", "", buffer.get("trained_tokens")))
        for account in ("in_flight", "ready", "trained"):
            exposition.set("ledger_tokens", buffer.get(f"{account}_tokens"), account, "")
        for account in ("withheld", "discarded"):
            for reason, tokens in sorted((buffer.get(f"{account}_tokens") or {}).items()):
                exposition.set("ledger_tokens", tokens, account, reason, most=PARTS)
                counted = self._count(account, reason, tokens)
                exposition.set(f"{account}_tokens_total", counted, reason, most=PARTS)

    def _count(self, account: str, reason: str, tokens: float | None) -> float | None:
        if tokens is None:
            return None
        before, counted = self._seen.get((account, reason), (0.0, 0.0))
        counted += max(0.0, tokens - before)
        self._seen[account, reason] = tokens, counted
        return counted


def export_evaluations(evaluations: Iterable[EvaluationResult], exposition: Exposition) -> None:
    """Set the samples of the newest evaluation of each suite, by step."""
    newest = {result.suite: result for result in sorted(evaluations, key=lambda result: result.step)}
    for suite, result in newest.items():
        exposition.set("evaluation_reward_mean", result.reward_mean, suite)
        exposition.set("evaluation_reward_stderr", result.reward_stderr, suite)
        exposition.set("evaluation_step", result.step, suite)
        exposition.set("evaluation_tasks", result.tasks, suite)


def export_processes(series: Mapping[str, Gauges], exposition: Exposition) -> None:
    """Set the samples of the newest line of each process, by role."""
    for role, line in sorted(
        series.items(), key=lambda pair: pair[1]["t"]
    ):  # of two that know a replica the newer one counts
        _export_usage(role, line, exposition)
        exposition.set("process_dropped_lines_total", line.get("dropped"), role)
        match role.partition("-")[0]:
            case "worker":
                _export_worker(role, line, exposition)
            case "learner" if "phase" in line:
                exposition.set("learner_phase", 1, role, str(line["phase"]))
            case "supervisor":
                for server, usage in (line.get("servers") or {}).items():
                    _export_usage(server, usage, exposition)
    buffer = buffer_gauges(series)
    for state in GROUP_STATES:
        exposition.set("buffer_groups", buffer.get(state), state)
    exposition.set("learner_version", buffer.get("version"))
    exposition.set("served_version", buffer.get("served"))


def buffer_gauges(series: Mapping[str, Gauges]) -> Gauges:
    """The newest line of the buffer; of one with shards the sums of all its processes, and the versions of their clock. Empty where
    one of them has no line: a sum that falls for a while would be counted again when it is back."""
    lines = {role: line for role, line in series.items() if role.partition("-")[0] == "buffer"}
    clock = lines.get("buffer", {})
    shards = clock.get("shards", 1)
    if shards == 1:
        return clock
    if len(lines) <= shards:
        return {}
    total: dict[str, Any] = {"version": clock.get("version"), "served": clock.get("served")}
    for line in lines.values():
        for name, value in line.items():
            if isinstance(value, dict):
                own = total.setdefault(name, {})
                own.update({reason: own.get(reason, 0) + tokens for reason, tokens in value.items()})
            elif name in GROUP_STATES or name == "generated" or name.endswith("_tokens"):
                total[name] = total.get(name, 0) + value
    return total


def _export_usage(role: str, usage: Gauges, exposition: Exposition) -> None:
    exposition.set("process_cpu_seconds_total", usage.get("cpu_s"), role)
    exposition.set("process_resident_memory_bytes", usage.get("rss"), role)
    for gpu, gauges in (usage.get("gpus") or {}).items():
        exposition.set("gpu_utilization_ratio", gauges.get("utilization"), role, gpu)
        exposition.set("gpu_memory_used_bytes", gauges.get("memory"), role, gpu)
        exposition.set("gpu_memory_total_bytes", gauges.get("memory_total"), role, gpu)
        exposition.set("gpu_power_watts", gauges.get("power_w"), role, gpu)
        exposition.set("gpu_temperature_celsius", gauges.get("temperature_c"), role, gpu)


def _export_worker(role: str, line: Gauges, exposition: Exposition) -> None:
    exposition.set("worker_slots", line.get("slots"), role)
    exposition.set("worker_episodes", line.get("playing"), role)
    exposition.set("worker_queued_requests", line.get("queued"), role)
    exposition.set("worker_received_tokens_total", line.get("tokens"), role)
    exposition.set("worker_delivered_episodes_total", line.get("delivered"), role)
    for replica, load in (line.get("replicas") or {}).items():
        exposition.set("engine_running_requests", load.get("running"), replica)
        exposition.set("engine_waiting_requests", load.get("waiting"), replica)
        exposition.set("engine_kv_cache_ratio", load.get("kv"), replica)
        exposition.set("engine_sampled_tokens_total", load.get("tokens"), replica)
        exposition.set("engine_drafted_tokens_total", load.get("drafted"), replica)
        exposition.set("engine_accepted_tokens_total", load.get("accepted"), replica)
