"""Asking a dashboard's server, and what must hold of every run that it shows."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from slipstream.buffer.ledger_report import ledger_report
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.runs import RunAccess, RunFolder
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.monitor.timeline import read_spans
from slipstream.planner.explain.findings import Explanation
from slipstream.tests.perfetto import read_perfetto
from slipstream.tests.runs import query


async def no_status(_: Path) -> None:
    raise ConfigError("the run is not active")


async def no_explanation(run: Path) -> Explanation:
    return Explanation(run=str(run), alerts=(), note="nothing to say")


IDLE = RunAccess(lambda _: False, no_status, no_explanation)
ACTIVE = RunAccess(lambda _: True, no_status, no_explanation)


class Dashboard:
    """`slipstream dash FOLDER` in a process of its own, which is ended with the context."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "slipstream.launch.cli", "dash", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().rpartition(" ")[2].strip()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Asked:
    def __init__(self, server: DashServer, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.client = client

    async def __call__(self, path: str, **given: object) -> Any:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.client.get(url, params={name: str(value) for name, value in given.items()}) as response:
            body = await response.json()
            assert response.status == 200, body
            return body

    async def refused(self, path: str, **given: object) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with self.client.get(url, params={name: str(value) for name, value in given.items()}) as response:
            return response.status, (await response.json())["error"]


def check_dashboard(run: Path) -> None:
    """Of a real run that is over: what the page shows of its tokens is what the learner says it trained on."""

    async def look() -> None:
        async with DashServer(RunFolder(run, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
            asked = Asked(server, client)
            page = await asked(f"/api/runs/{run.name}/trajectories", limit=200)
            assert page["total"] == query(run, "SELECT count(*) FROM trajectories")[0][0] > 0
            found: Counter[str] = Counter()
            for row in page["rows"]:
                path = f"/api/runs/{run.name}/trajectories/{row['id']}"
                one = await asked(path)
                tokens = await asked(f"{path}/tokens", start=0, end=one["tokens"])
                if one["account"] == "trained" and one["trained_at"] is not None:
                    found.update(
                        str(s) for s, loss in zip(tokens["staleness"], tokens["loss"], strict=True) if loss == 1
                    )
                    check_annotations(tokens)
                messages = await asked(f"{path}/messages")
                assert [m["role"] for m in messages[:3]] == ["system", "tools", "user"]
                assert [m["turn"] for m in messages if m["role"] == "assistant"] == list(range(len(one["turns"])))
                assert any("calculator" in m["text"] for m in messages)
                assert (await asked(f"/api/runs/{run.name}/groups/{row['group']}"))["members"]
            await check_views(asked, run)
            await check_evaluations(asked, run)
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            trained: Counter[str] = Counter()
            for row in rows:
                trained.update({s: n for s, n in row.get("staleness_tokens", {}).items() if n})
            assert found == trained

    asyncio.run(look())


def check_annotations(tokens: dict[str, Any]) -> None:
    """A small run records all of its tokens; those of the learner's own version have its log-probs. A trajectory that is too stale
    as a whole has none."""
    if tokens["annotations"] is None:
        assert 1 not in tokens["loss"]
        return
    ratios = tokens["annotations"]["log_ratio"]
    for ratio, loss, staleness in zip(ratios, tokens["loss"], tokens["staleness"], strict=True):
        assert (ratio is not None) == (loss == 1)
        assert loss != 1 or staleness or abs(ratio) < 0.01


def check_written(run: Path) -> None:
    """Of a real run that is over: `export` writes its trajectories, `trace` its spans, and `show` prints one."""
    assert main(["export", str(run), "--to", "jsonl"]) == 0
    rows = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    assert [(row["id"],) for row in rows] == query(run, "SELECT id FROM trajectories ORDER BY rowid")
    assert {row["step"] for row in rows if row["account"] == "trained"} == {
        version for (version,) in query(run, "SELECT version FROM commits")
    }
    assert all(row["messages"] and len(row["token_ids"]) == len(row["loss_mask"]) for row in rows)
    assert main(["trace", str(run)]) == 0
    spans = list(read_spans(run))
    slices = [one for one in read_perfetto(run / "trace.perfetto-trace").slices if one.category == "span"]
    assert len(slices) == len(spans)
    assert all("episode" in one.above for one in slices if one.name in ("turn", "step", "reset"))
    ended = set[int]().union(*(one.ended for one in slices))
    trained = [row["episode_id"] for row in rows if row["account"] == "trained"]
    assert len(ended) == len(set(trained)) > 0
    assert main(["show", str(run), "--worst"]) == 0


async def check_evaluations(asked: Asked, run: Path) -> None:
    """Every episode of an evaluation is there, with what it got."""
    base = f"/api/runs/{run.name}/trajectories"
    rows = (await asked(base, source="evaluation", limit=200))["rows"]
    failed = (await asked(base, source="evaluation_failed", limit=200))["rows"]
    for one in json.loads((run / "evaluations.json").read_text()):
        rewards = [row["reward"] for row in rows if row["evaluation"] == one["label"] and row["id"].endswith(".0")]
        assert len(rewards) + sum(row["evaluation"] == one["label"] for row in failed) == sum(one["outcomes"].values())
        assert sum(rewards) / len(rewards) == pytest.approx(one["reward_mean"])
    shown = await asked(f"{base}/{rows[0]['id']}", source="evaluation")
    assert await asked(f"{base}/{shown['id']}/messages", source="evaluation")


async def check_views(asked: Asked, run: Path) -> None:
    """Accounts are those of the ledger, times those of the spans."""
    base = f"/api/runs/{run.name}"
    ledger = ledger_report(run / "buffer.sqlite").total
    accounts = await asked(f"{base}/tokens")
    assert accounts["generated"] == ledger.generated
    assert accounts["accounts"].get("trained", 0) == ledger.trained
    assert sum(accounts["accounts"].get(f"withheld_{why}", 0) for why in ledger.withheld) == sum(
        ledger.withheld.values()
    )
    line = await asked(f"{base}/timeline", t0=0, t1=4e9)
    first, last = line["bounds"]
    spans = [span for role, span in read_spans(run) if role == "learner-0"]
    whole = await asked(f"{base}/timeline", t0=first, t1=last)
    assert len(whole["phases"]) + len(whole["pushes"]) == len(spans)
    assert {"train", "take", "publish"} <= {one["what"] for one in whole["phases"]}
    assert {"buffer", "worker-0", "learner-0"} <= whole["series"].keys()
    assert any(value for value in whole["series"]["worker-0"]["tokens"] if value)
    commits = query(run, "SELECT version, time FROM commits ORDER BY version")
    for version, time in commits:
        batch = await asked(f"{base}/batches/{version}")
        assert batch["commit"]["time"] == time
        assert len(batch["episodes"]) == 8
        for one in batch["episodes"]:
            assert one["started"] <= one["ended"] <= one["taken"] + 0.1
            assert one["parts"]
        # An answer of one token takes no time to decode.
        assert {"decode", "prefill"} <= {part[2] for one in batch["episodes"] for part in one["parts"]}
    found = await asked(f"{base}/environments")
    assert (
        sum(row["episodes"] for row in found["environments"])
        == query(run, "SELECT count(DISTINCT episode_id) FROM trajectories")[0][0]
    )
    assert {"task", "reset", "step"} <= {row["what"] for row in found["calls"]}
    found = await asked(f"{base}/processes")
    assert {"buffer", "worker-0", "learner-0"} <= {one["role"] for one in found["processes"]}
    assert (await asked(f"{base}/logs/{found['logs'][0]['name']}"))["bytes"] > 0
