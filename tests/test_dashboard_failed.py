"""Failed episodes on the dashboard: a list of their own, with why; their tokens as those of any other trajectory."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
from slipstream.buffer.store import WriteBatch
from slipstream.buffer.trajectory import Outcome, Trajectory, by_version
from slipstream.dashboard.app import DashServer
from slipstream.dashboard.runs import RunFolder
from slipstream.tests.dashboard_runs import PLANTED, DashboardRun
from slipstream.tests.dashboards import IDLE, Asked
from slipstream.tests.stores import new_trajectory

DETAIL = f"ToolError: {PLANTED} (shop.py:12 price)"


def fail(run: DashboardRun) -> list[Trajectory]:
    """Lease a group whose episodes all fail."""
    lease = run.replay.leases.grant("worker-0", 0.0)
    assert lease is not None
    made = []
    for member in lease.members:
        one = run.trajectory(lease.episode(member))
        one = msgspec.structs.replace(one, outcome=Outcome("failed", "tool", DETAIL), reward=0.0, turn_rewards=())
        counts = by_version(one.version_spans)
        assert not run.replay.leases.deliver(one.episode, one.outcome, counts, {})
        made.append(one)
    new = [new_trajectory(one.episode, one) for one in made]
    run.store.save(WriteBatch.of(run.replay.table.counters, run.replay.table.drain(), failed=new))
    return made


async def test_failed_episodes_are_listed_apart_with_the_reason_and_the_users_line(tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    kept, failed = run.record(2), fail(run)
    run.close()
    async with DashServer(RunFolder(run.folder, IDLE), "127.0.0.1", 0, "") as server, aiohttp.ClientSession() as client:
        asked = Asked(server, client)
        base = "/api/runs/run/trajectories"
        assert {row["id"] for row in (await asked(base))["rows"]} == {one.id for one in kept}
        page = await asked(base, source="failed")
        assert [row["id"] for row in page["rows"]] == [one.id for one in reversed(failed)]
        assert {(row["outcome"], row["detail"]) for row in page["rows"]} == {("failed_tool", DETAIL)}
        assert all(not row["detail"] for row in (await asked(base))["rows"])
        assert (await asked(base, source="failed", outcome="failed_engine"))["total"] == 0
        for one in failed:
            path = f"{base}/{one.id}"
            shown, window = await asked(path, bins=20), await asked(f"{path}/tokens", start=3, end=len(one))
            assert (shown["account"], shown["reason"], shown["outcome"]["detail"]) == (
                "discarded",
                "failed_tool",
                DETAIL,
            )
            assert shown["has_tokens"]
            assert window["ids"] == one.token_ids[3:].tolist()
            assert window["loss"] == [2 if mask else 0 for mask in one.loss_mask[3:]]  # sampled, and without loss
            assert any(f"{one.group_id}" in m["text"] for m in await asked(f"{path}/messages"))
        group = await asked(f"/api/runs/run/groups/{failed[0].group_id}")
        assert [(m["id"], m["detail"]) for m in group["members"]] == [(one.id, DETAIL) for one in failed]
        assert all(len(m["texts"]) == 2 for m in group["members"])
        status, error = await asked.refused(base, source="nothing")
    assert (status, "nothing" in error) == (400, True)
