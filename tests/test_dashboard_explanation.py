"""What to change in a run, on its page: found off the requests, once for each state of the run, with commands to copy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from slipstream.dashboard import explanation, feed
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.explanation import shown_explanation
from slipstream.dashboard.runs import RunAccess, RunFolder
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.launch.watched import ACCESS
from slipstream.planner.explain.findings import Explanation, Finding, Measurement
from slipstream.tests.dashboard_runs import DashboardRun
from slipstream.tests.dashboards import Asked, no_status
from slipstream.tests.runs import WAIT_S

PATH = "/api/runs/run/explanation"


def test_findings_come_with_the_commands_that_make_and_simulate_them() -> None:
    one = Finding(
        rule="lower_bound",
        severity="hint",
        text="old",
        evidence=(Measurement("staleness", 1.9, "steps 1–9", "versions"),),
        change="buffer.max_staleness=1",
        live=True,
        cost="free",
        gain=None,
    )
    prose = {"change": "make the tool faster", "live": False}
    after = {"change": "learner.backend.ranks=2 rollout.engine.replicas=1", "live": False}
    added = {"change": "rollout.engine.replicas=2"}
    unknown = {"change": "weightsync.transport=shared", "live": False}  # to a simulation
    others = (_replaced(one, changes) for changes in (prose, added, after, unknown))
    explanation = Explanation(run="runs/a b", active=True, alerts=(), findings=(one, *others))
    commands = [line for line in explanation.lines() if "while the run goes on" in line]
    assert commands == [
        "     while the run goes on: slipstream set 'runs/a b' buffer.max_staleness=1",
        "     while the run goes on: slipstream replicas 'runs/a b' add",
    ]
    shown = shown_explanation(explanation, active=True).findings
    assert [found.command for found in shown] == [
        "slipstream set 'runs/a b' buffer.max_staleness=1",  # a live key
        "",
        "slipstream replicas 'runs/a b' add",
        "slipstream resume 'runs/a b' learner.backend.ranks=2 rollout.engine.replicas=1",
        "slipstream resume 'runs/a b' weightsync.transport=shared",
    ]
    assert shown[0].simulate == "slipstream simulate 'runs/a b' buffer.max_staleness=1"
    assert shown[0].evidence == ("staleness 1.9",)
    assert shown[1].simulate == shown[4].simulate == ""
    assert shown[2].simulate == "slipstream simulate 'runs/a b' rollout.engine.replicas=2"
    over = [found.command for found in shown_explanation(explanation, active=False).findings]
    assert over[:3] == ["buffer.max_staleness=1", "", "rollout.engine.replicas=2"]


def _replaced(finding: Finding, changes: dict[str, Any]) -> Finding:
    return msgspec.structs.replace(finding, **changes)


class Explainer:
    """Says how often it was asked, when it may."""

    def __init__(self) -> None:
        self.times, self.ended = 0, 0
        self.may = asyncio.Event()

    async def __call__(self, run: Path) -> Explanation:
        self.times += 1
        try:
            await self.may.wait()
        finally:
            self.ended += 1
        if self.times == 3:
            raise ConfigError("no run any more")
        return Explanation(run=str(run), alerts=(), note=f"number {self.times}")


async def test_it_is_found_once_for_each_state_of_the_run_and_no_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanation, "LEAST_S", 0.0)
    monkeypatch.setattr(explanation, "AGAIN", 0.0)
    monkeypatch.setattr(feed, "LOOK_S", 0.05)
    run = DashboardRun(tmp_path / "run")
    run.record(3)
    run.close()
    explainer = Explainer()
    runs = RunFolder(run.folder, RunAccess(lambda _: False, no_status, explainer))
    async with DashServer(runs, "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        async with client.get(f"http://127.0.0.1:{server.port}/api/events") as stream:

            async def changed() -> None:
                await asyncio.wait_for(stream.content.readuntil(b"\n\n"), WAIT_S)

            await changed()
            first = await asked(PATH)
            assert (first["known"], first["working"]) == (False, True)
            explainer.may.set()
            await changed()
            for _ in range(3):  # of the same state nothing is found again
                found = await asked(PATH)
                assert (found["note"], found["working"]) == ("number 1", False)
            assert explainer.times == 1
            for note in ("number 2", "not explained: no run any more"):
                with (run.folder / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": 9, "reward_mean": 0.5, "time": 1.8e9}) + "\n")
                await changed()
                while (found := await asked(PATH))["working"]:
                    await changed()
                assert found["note"] == note
        explainer.may.clear()
        (run.folder / "metrics.jsonl").unlink()
        assert (await asked(PATH))["working"]
    assert (explainer.times, explainer.ended) == (4, 4)  # the last was abandoned with the server


@pytest.mark.full
async def test_it_is_what_the_command_says(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.record(3)
    run.close()
    found = await ACCESS.explain(run.folder)
    assert found.note.startswith("2 steps so far: what to change is said from 10 on; `slipstream resume ")
    with pytest.raises(SlipstreamError, match="holds no run"):
        await ACCESS.explain(tmp_path)
