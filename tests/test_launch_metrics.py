"""`/metrics` of a real run while it goes on: what Prometheus would scrape, and what the board and the rules ask it for."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from slipstream.launch.launchers.local import free_ports
from slipstream.launch.supervisor.metrics_endpoint import all_metrics
from slipstream.monitor.gpus import gpu_gauges
from slipstream.monitor.metrics_server import MetricsServer
from slipstream.monitor.prometheus import PREFIX
from slipstream.tests.promtool import promtool
from slipstream.tests.runs import ENDLESS, SMALL, WAIT_S, Background, metrics, slipstream

MONITOR = Path(__file__).parent.parent / "monitor"
NAME = re.compile(r"\b(?:slipstream_\w+|up)\b")
THEIRS = {"up"}  # Prometheus makes it for each target
ENGINE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16")
# Without a sample in a small run that is well: nothing was compared, reported, withheld, discarded or drafted; no episode ended in
# a step.
SELDOM = {
    "step_mismatch_max",
    "step_router_disagreement",
    "step_outcomes",
    "step_environment",
    "withheld_tokens_total",
    "discarded_tokens_total",
    "engine_drafted_tokens_total",
    "engine_accepted_tokens_total",
}


def board_expressions() -> Iterator[str]:
    board = json.loads((MONITOR / "grafana.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def rule_expressions() -> Iterator[str]:
    for group in yaml.safe_load((MONITOR / "prometheus_rules.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return answer.read().decode()


def targets_of(run: Path) -> dict[str, dict[str, Any]]:
    return {entry["labels"]["role"]: entry for entry in json.loads((run / "targets.json").read_text())}


def accounts_of(text: str) -> list[float]:
    """The tokens in each account of the ledger."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [sample.value for sample in samples if sample.name == "slipstream_ledger_tokens"]


def asked() -> set[str]:
    """Metrics of ours that the board or the rules name."""
    return {name for expr in (*board_expressions(), *rule_expressions()) for name in NAME.findall(expr)} - THEIRS


def missing(text: str) -> set[str]:
    """Metrics that the board, the rules or the documentation name, and that have no sample in `text`."""
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    named = asked() | {f"{PREFIX}{metric.name}" for metric in all_metrics()}
    if not gpu_gauges(None):  # this machine has no GPU
        named = {name for name in named if not name.startswith(f"{PREFIX}gpu_")}
    return named - names - {f"{PREFIX}{one}" for one in SELDOM}


@pytest.mark.full
def test_a_running_run_exports_what_board_and_rules_ask_for(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE, "evaluation.tasks=4")
    with Background(*arguments, ENDLESS, "launch.ports.metrics=0") as going:
        going.until_step(3)
        going.until(lambda: {"supervisor", "engine-0"} == targets_of(run).keys(), "its engine as a target")
        targets = targets_of(run)
        (address,) = targets["supervisor"]["targets"]
        assert address.startswith("127.0.0.1:")
        assert targets["supervisor"]["labels"] == {"run": "run", "role": "supervisor", "server": "slipstream"}
        engine = f"{targets['engine-0']['targets'][0]}{targets['engine-0']['labels']['__metrics_path__']}"
        assert engine == f"{address}/metrics/engine-0"
        with pytest.raises(HTTPError, match="404"):
            scraped(f"http://{address}/metrics/engine-9")
        # Gauges are recorded once a second, so the newest may be older than the first step.
        going.until(lambda: sum(accounts_of(scraped(f"http://{address}/metrics"))) > 0, "the tokens of its ledger")
        # A metric is there after the first event that makes it, which need not be one of the first steps; and a later step may be
        # without it again.
        text = ""

        def whole() -> bool:
            nonlocal text
            text = scraped(f"http://{address}/metrics")
            return not missing(text)

        going.until(whole, "all metrics")
        families = list(text_string_to_metric_families(text))
        assert {f.name for f in text_string_to_metric_families(scraped(f"http://{engine}"))} > {
            "vllm:num_requests_running"
        }
        going.process.send_signal(signal.SIGINT)
        output = going.output()
        assert going.process.returncode == 130, output
    assert f"! metrics: http://{address}/metrics\n" in output
    assert not (run / "targets.json").exists()
    with pytest.raises(OSError, match="refused"):
        scraped(f"http://{address}/metrics")

    assert len(asked()) > 40

    samples = [sample for family in families for sample in family.samples]
    assert len({(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples}) == len(samples)
    values = {sample.name: sample.value for sample in samples if not sample.labels}
    assert values["slipstream_step_reward_mean"] == metrics(run)[int(values["slipstream_step"]) - 1]["reward_mean"]
    assert sum(accounts_of(text)) == values["slipstream_generated_tokens_total"]
    types = {family.name: family.type for family in families}
    assert types["slipstream_generated_tokens"] == "counter"
    assert types["slipstream_step_reward_mean"] == "gauge"
    assert all(family.documentation for family in families)


@pytest.mark.full
def test_rules_and_the_boards_expressions_are_promql(tmp_path: Path) -> None:
    program = promtool()
    checked = subprocess.run(
        [program, "check", "rules", MONITOR / "prometheus_rules.yaml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "SUCCESS: 17 rules found" in checked.stdout
    expressions = [expr.replace("$__rate_interval", "1m") for expr in board_expressions()]
    records = [{"record": f"board:{i}", "expr": expr} for i, expr in enumerate(expressions)]
    (tmp_path / "board.yaml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": records}]}))
    checked = subprocess.run(
        [program, "check", "rules", tmp_path / "board.yaml"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.full
def test_a_port_that_is_taken_is_refused_before_anything_is_written(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with MetricsServer("127.0.0.1", free_ports(1)[0], "") as other:
        wanted = f"launch.ports.metrics={other.port}"
        done = slipstream(
            "train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE, wanted, check=False
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slipstream: launch.ports.metrics: {other.port} on 127.0.0.1 cannot be listened on")
    assert not run.exists()
