"""`/metrics`: names, types and values of what is exported, read back with Prometheus's own parser, and the server's limits."""

from __future__ import annotations

import gzip
import http.client
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from slipstream.common.scores import EvaluationResult
from slipstream.configs import load
from slipstream.errors import ConfigError, StoreError
from slipstream.launch.supervisor.metrics_endpoint import all_metrics
from slipstream.learner.metric_docs import metric_docs
from slipstream.learner.metrics import StepMetrics
from slipstream.monitor import metrics_server
from slipstream.monitor.alerts import DISK, FALSE_REPLIES, NO_STEP, alert_rules, severities
from slipstream.monitor.metrics_server import MetricsServer
from slipstream.monitor.prometheus import (
    LONGEST,
    PARTS,
    PREFIX,
    CommittedTokens,
    Exposition,
    RowTotals,
    buffer_gauges,
    export_evaluations,
    export_processes,
    step_name,
)
from slipstream.monitor.timeline import TimelineWriter, newest_gauges

ROOT = Path(__file__).parent.parent
WAIT_S = 30.0
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Collected(Collector):
    def __init__(self, exposition: Exposition) -> None:
        self.exposition = exposition

    def collect(self) -> Iterator[Any]:
        return self.exposition.families()


def parsed(text: str) -> Samples:
    """By name and labels. Prometheus refuses a scrape that has one twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def exported(exposition: Exposition) -> Samples:
    registry = CollectorRegistry()
    registry.register(Collected(exposition))
    return parsed(generate_latest(registry).decode())


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((PREFIX + name, tuple(sorted(labels.items()))))


def exposition() -> Exposition:
    return Exposition(all_metrics())


# --- the table ----------------------------------------------------------------------------------------------------


def test_every_field_of_a_step_is_explained_where_it_is_declared_and_exported() -> None:
    docs = metric_docs()
    assert list(docs) == list(StepMetrics.__struct_fields__)
    assert [field for field, text in docs.items() if len(text) < 8] == []
    assert docs["reward_mean"] == "mean return of the batch's episodes"
    assert docs["slots"].endswith(
        "mean; follows how busy the servers are, over the newest steps of 10 s together at least"
    )
    assert docs["mismatch_max"].startswith("Largest difference in nats between the learner's proximal and the engine's")
    names = {metric.name for metric in all_metrics()}
    assert {step_name(field).removeprefix(PREFIX) for field in docs} <= names


def test_names_and_types_are_prometheus_own() -> None:
    metrics = all_metrics()
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name), metric
        assert not re.search(r"(_s|_ms|_mib|_pct|_percent)(_total)?$", metric.name), metric
        assert metric.help, metric
        assert (metric.type == "counter") == metric.name.endswith("_total")
    assert step_name("pause_ms") == "slipstream_step_pause_seconds"
    assert step_name("rollout_tokens_per_s") == "slipstream_step_rollout_tokens_per_second"
    assert step_name("idle_slot_s") == "slipstream_step_idle_slot_seconds"
    assert step_name("groups") == "slipstream_step_groups"


def test_the_page_lists_every_metric() -> None:
    """A row that is missing or wrong is shown as it must be."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    listed = [line for line in page.splitlines() if line.startswith("| `slipstream_")]
    wanted = [
        f"| `{PREFIX}{one.name}` | {one.type} | {', '.join(one.labels)} | {one.help.replace('|', chr(92) + '|')} |".replace(
            "|  |", "| |"
        )
        for one in all_metrics()
    ]
    assert "\n".join(listed) == "\n".join(wanted)


# --- values -------------------------------------------------------------------------------------------------------


def test_a_row_becomes_gauges_of_its_fields() -> None:
    totals, to = RowTotals(), exposition()
    row = {"step": 3, "time": 5.0, "reward_mean": 0.5, "pause_ms": 40.0, "mismatch_max": None, "ess": float("nan")}
    mappings = {"staleness_tokens": {"0": 7, "1": 9}, "outcomes": {"finished": 5, "failed_tool": 1}, "gone": 1}
    totals.add([row | {"groups": 8, "groups_alike": 3} | mappings, row | {"groups": 8, "groups_alike": 1} | mappings])
    totals.export(to)
    found = exported(to)
    assert value(found, "step") == 3
    assert value(found, "step_reward_mean") == 0.5
    assert value(found, "step_pause_seconds") == 0.04
    assert value(found, "step_staleness_tokens", staleness="1") == 9
    assert value(found, "step_outcomes", outcome="failed_tool") == 1
    assert value(found, "episodes_total", outcome="failed_tool") == 2
    assert (value(found, "groups_total"), value(found, "groups_alike_total")) == (16, 4)
    assert value(found, "step_mismatch_max") is value(found, "step_ess") is value(found, "step_gone") is None


def test_names_that_never_end_are_bounded_and_counted() -> None:
    totals, to = RowTotals(), exposition()
    names = {f"name {i}\n\"'\\": 1.0 for i in range(PARTS + 36)} | {"x" * (LONGEST + 1): 1.0}
    totals.add([{"step": 1, "environment": names}])
    totals.export(to)
    found = exported(to)
    assert sum(name == "slipstream_step_environment" for name, _ in found) == PARTS
    assert value(found, "series_dropped") == 37
    assert value(found, "step_environment", metric="name 0\n\"'\\") == 1


def test_accounts_are_gauges_and_their_counters_never_fall() -> None:
    tokens = CommittedTokens()
    found: Samples = {}
    for trained, withheld in (
        (100, {"stale": 5}),
        (60, {}),
        (90, {"stale": 2}),
    ):  # commits are rolled back, and repeated
        to = exposition()
        tokens.export(
            {
                "generated": 200,
                "in_flight_tokens": 1,
                "ready_tokens": 2,
                "trained_tokens": trained,
                "withheld_tokens": withheld,
            },
            to,
        )
        found = exported(to)
        assert value(found, "ledger_tokens", account="trained", reason="") == trained
    assert value(found, "trained_tokens_total") == 130
    assert value(found, "generated_tokens_total") == 200
    assert value(found, "ledger_tokens", account="withheld", reason="stale") == 2
    empty = exposition()
    CommittedTokens().export({}, empty)  # the buffer has not begun
    assert value(exported(empty), "trained_tokens_total") is None


def test_a_buffer_with_shards_is_one() -> None:
    groups, tokens = dict.fromkeys(("open", "leased", "ready", "batched"), 1), {"trained_tokens": 5, "generated": 9}
    shard = {"version": 3, "served": 3, "t": 1.0, **groups, **tokens, "discarded_tokens": {"stale": 2}}
    clock = {"version": 4, "served": None, "shards": 2, "generated": 0, "ready": 0, "discarded_tokens": {}}
    series = {"buffer": clock, "buffer-1": shard, "buffer-2": shard, "worker-0": {"t": 0.0}}
    found = buffer_gauges(series)
    assert (found["version"], found["served"], found["ready"], found["generated"]) == (4, None, 2, 18)
    assert (found["trained_tokens"], found["discarded_tokens"]) == (10, {"stale": 4})
    del series["buffer-2"]
    assert buffer_gauges(series) == {}  # it starts again: nothing is said rather than too little
    assert buffer_gauges({"buffer": shard}) == shard
    assert buffer_gauges({}) == {}


def test_processes_are_told_by_role() -> None:
    to = exposition()
    load_0 = {"running": 3, "waiting": 1, "kv": 0.5, "tokens": None, "version": 4, "sent": 3}
    usage = {"t": 10.0, "cpu_s": 2.5, "rss": 1000, "dropped": 0}
    busy = {"utilization": 0.5, "memory": 3, "memory_total": 8, "power_w": 300.5, "temperature_c": 61}
    worker = {"slots": 64, "playing": 60, "queued": 2, "tokens": 900, "delivered": 12}
    export_processes(
        {
            "worker-0": {**usage, **worker, "replicas": {"engine-0": load_0}},
            "worker-1": {
                **usage,
                **worker,
                "t": 9.0,
                "replicas": {"engine-0": {**load_0, "running": 9}},
            },  # before it was the other's
            "supervisor": {**usage, "servers": {"engine-0": {"cpu_s": 7.0, "rss": 5000, "gpus": {"2": busy}}}},
            "buffer": {**usage, "open": 1, "leased": 2, "ready": 3, "batched": 4, "version": 7, "served": None},
            "learner-0": {**usage, "phase": "train", "version": 7, "gpus": {"0": busy, "1": {"memory": 5}}},
            "critic-0": usage,
        },
        to,
    )
    found = exported(to)
    assert value(found, "engine_running_requests", role="engine-0") == 3
    assert value(found, "engine_kv_cache_ratio", role="engine-0") == 0.5
    assert value(found, "engine_sampled_tokens_total", role="engine-0") is None
    assert value(found, "process_resident_memory_bytes", role="engine-0") == 5000
    assert value(found, "process_cpu_seconds_total", role="critic-0") == 2.5
    assert value(found, "gpu_utilization_ratio", role="engine-0", gpu="2") == 0.5
    assert value(found, "gpu_memory_used_bytes", role="learner-0", gpu="1") == 5
    assert value(found, "gpu_memory_total_bytes", role="learner-0", gpu="0") == 8
    assert value(found, "gpu_power_watts", role="learner-0", gpu="0") == 300.5
    assert value(found, "gpu_temperature_celsius", role="learner-0", gpu="0") == 61
    assert value(found, "gpu_utilization_ratio", role="learner-0", gpu="1") is None
    assert value(found, "buffer_groups", state="batched") == 4
    assert value(found, "learner_phase", role="learner-0", phase="train") == 1
    assert (value(found, "learner_version"), value(found, "served_version")) == (7, None)


def test_the_newest_evaluation_of_each_suite_is_exported() -> None:
    def result(step: int, suite: str) -> EvaluationResult:
        return EvaluationResult(
            label="",
            version=step,
            suite=suite,
            step=step,
            reward_mean=step / 10,
            reward_stderr=0.1,
            seconds=1.0,
            tasks=5,
            outcomes={},
        )

    to = exposition()
    export_evaluations([result(4, ""), result(2, ""), result(1, "math")], to)
    found = exported(to)
    assert value(found, "evaluation_step", suite="") == 4
    assert value(found, "evaluation_reward_mean", suite="math") == 0.1


def test_gauges_are_the_newest_of_a_process_that_still_records(tmp_path: Path) -> None:
    assert newest_gauges(tmp_path, 0.0) == {}
    with TimelineWriter(tmp_path, "worker-0", lambda: {"slots": 5}):
        pass
    now = time.time()
    folder = tmp_path / "series"
    (folder / "worker-0.1.jsonl").write_text(f'{{"t": {now - 20}, "slots": 1}}\n')  # of a process before it
    (folder / "worker-1.2.jsonl").write_text(f'{{"t": {now}, "slots": 2}}\n{{"t": {now + 1}, "slo')  # being written
    (folder / "buffer.3.jsonl").write_text(f'{{"t": {now - 100}}}\n')  # gone
    (folder / "learner-0.4.jsonl").write_text("torn")
    (folder / "critic-0.5.jsonl").write_text(f'{{"t": {now}}}\n')
    os.utime(folder / "critic-0.5.jsonl", (1.0, 1.0))
    found = newest_gauges(tmp_path, now - 30)
    assert {role: line["slots"] for role, line in found.items()} == {"worker-0": 5, "worker-1": 2}


# --- the server ---------------------------------------------------------------------------------------------------


def get(server: MetricsServer, headers: Mapping[str, str] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", "/metrics", headers=dict(headers or {}))
    return connection.getresponse()


def test_it_serves_prometheus_and_openmetrics_and_compresses() -> None:
    with MetricsServer("127.0.0.1", 0, "key") as server:
        server.start(lambda: list(exposition().families()))
        answer = get(server)
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert parsed(answer.read().decode())[("slipstream_series_dropped", ())] == 0
        assert get(server, {"Accept": "application/openmetrics-text"}).read().endswith(b"# EOF\n")
        packed = get(server, {"Accept-Encoding": "gzip"})
        assert b"slipstream_series_dropped" in gzip.decompress(packed.read())
    with pytest.raises(OSError, match="refused"):
        get(server)


def test_a_port_that_is_taken_is_one_line() -> None:
    with MetricsServer("127.0.0.1", 0, "key") as server:
        expected = (
            rf"launch\.ports\.metrics: {server.port} on 127\.0\.0\.1 cannot be listened on \(Address already in use\)"
        )
        with pytest.raises(ConfigError, match=expected):
            MetricsServer("127.0.0.1", server.port, "launch.ports.metrics")
    with pytest.raises(ConfigError, match="cannot be listened on"):
        MetricsServer("no.such.host.invalid", 0, "launch.ports.metrics")


def test_a_read_that_hangs_gives_what_was_read_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "READ_S", 0.2)
    monkeypatch.setattr(metrics_server, "AGAIN_S", 0.0)
    going_on, reads = threading.Event(), list[float]()

    def read() -> list[Any]:
        reads.append(time.monotonic())
        assert len(reads) not in (1, 3) or going_on.wait(WAIT_S)
        return list(exposition().families())

    with MetricsServer("127.0.0.1", 0, "key") as server:
        server.start(read)
        answer = get(server)
        assert (answer.status, b"does its disk hang?" in answer.read()) == (503, True)
        going_on.set()
        monkeypatch.setattr(metrics_server, "READ_S", WAIT_S)
        assert get(server).status == 200
        monkeypatch.setattr(metrics_server, "READ_S", 0.2)
        going_on.clear()
        answers = [get(server) for _ in range(3)]  # the read of the first goes on
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert len(reads) <= 3
        going_on.set()


def test_an_error_is_an_answer_and_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "AGAIN_S", 0.0)

    def read() -> list[Any]:
        raise StoreError("metrics.jsonl, line 3: not a row")

    with MetricsServer("127.0.0.1", 0, "key") as server, caplog.at_level(logging.WARNING):
        server.start(read)
        answers = [get(server) for _ in range(3)]
    assert {answer.status for answer in answers} == {500}
    assert answers[0].read() == b"StoreError: metrics.jsonl, line 3: not a row\n"
    assert caplog.text.count("a scrape failed") == 1


def test_scrapes_beyond_those_that_may_go_on_at_once_are_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SCRAPES", 1)
    monkeypatch.setattr(metrics_server, "READ_S", WAIT_S)
    begun, going_on = threading.Event(), threading.Event()

    def read() -> list[Any]:
        begun.set()
        assert going_on.wait(WAIT_S)
        return list(exposition().families())

    with MetricsServer("127.0.0.1", 0, "key") as server:
        server.start(read)
        first = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        first.request("GET", "/metrics")
        assert begun.wait(WAIT_S)
        for _ in range(10):
            beyond = get(server)
            assert beyond.status == 503
            assert beyond.read() == b"1 scrapes go on, as many as may at once; scrape from fewer places or less often\n"
        going_on.set()
        assert first.getresponse().status == 200
        assert get(server).status == 200


def test_clients_that_send_nothing_keep_nothing_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.5)
    with MetricsServer("127.0.0.1", 0, "key") as server:
        server.start(lambda: list(exposition().families()))
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) for _ in range(20)]
        assert [client.recv(1) for client in silent] == [b""] * 20  # at once, or after the handler's patience
        assert get(server).status == 200
        for client in silent:
            client.close()


def test_a_client_that_sends_byte_by_byte_keeps_nothing_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "SCRAPE_S", 0.3)
    with MetricsServer("127.0.0.1", 0, "key") as server:
        server.start(lambda: list(exposition().families()))
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as client:
            closed, deadline = False, time.monotonic() + metrics_server.SILENT_S / 2
            while not closed:
                assert time.monotonic() < deadline
                try:
                    client.send(b"x")
                    closed = not client.recv(1)
                except TimeoutError:
                    continue
                except ConnectionError:
                    closed = True


# --- what is shipped ----------------------------------------------------------------------------------------------


def test_every_alert_has_a_rule_of_its_severity() -> None:
    import yaml

    config = load("quickstart")
    (group,) = yaml.safe_load((ROOT / "monitor" / "prometheus_rules.yaml").read_text())["groups"]
    wanted = {f'slipstream_alert{{rule="{rule}"}} == 1': severity for rule, severity in severities(config).items()}
    assert severities(config).keys() == {rule.name for rule in alert_rules(config)} | {NO_STEP, DISK, FALSE_REPLIES}
    rules = {rule["expr"]: rule["labels"]["severity"] for rule in group["rules"]}
    assert {expr: rules.get(expr) for expr in wanted} == wanted
    assert len(rules) == len(wanted) + 2  # a supervisor that is gone, and a process that is restarted again and again


def test_the_board_is_one_that_grafana_imports() -> None:
    board = json.loads((ROOT / "monitor" / "grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [
        (x, y)
        for panel in board["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel covers another
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["targets"], panel["title"]
        assert all('run=~"$run"' in target["expr"] for target in panel["targets"]), panel["title"]
