"""`slipstream chaos`: a small one for real, and an audit that finds what was planted in the folder that it left."""

from __future__ import annotations

import ast
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.store import Store
from slipstream.chaos import audit as chaos_audit
from slipstream.chaos import audit_checks, audit_log, hosted
from slipstream.chaos import hosts as hosts_module
from slipstream.chaos.audit import audit
from slipstream.chaos.changes import make_changes
from slipstream.chaos.hosted import HostedFaultRunner, cpus_of
from slipstream.chaos.hosts import Hosts
from slipstream.chaos.plan import SUPERVISOR, make_plan
from slipstream.configs import LIVE, changed_live, load
from slipstream.errors import ConfigError, DeadlineExceeded
from slipstream.monitor.settings import SETTINGS, read_changes
from slipstream.tests.runs import leftovers, metrics, query, slipstream, tiny_policy

FEW = ("rollout.engine.replicas=1", "rollout.workers=1", "learner.backend.ranks=1", "learner.checkpoint_every=2")
KILLS, CHANGES, SEED = 4, 8, 3
"""Kills of the learner, the supervisor, a worker and the buffer, and a learner that is stopped for longer than a lease."""


@pytest.fixture(scope="module")
def chaos_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A run folder, and the report of the command."""
    root = tmp_path_factory.mktemp("chaos")
    policy = tiny_policy(root / "policy")
    arguments = (
        "chaos",
        f"--kills={KILLS}",
        f"--set-changes={CHANGES}",
        f"--seed={SEED}",
        "--json",
        f"model.path={policy}",
        f"run.dir={root / 'runs' / 'run'}",  # in a folder that is not there
    )
    done = slipstream("chaos", *arguments, *FEW, check=False)
    assert done.stdout, done.stderr
    return root / "runs" / "run", json.loads(done.stdout)


class SilentHosts(Hosts):
    """Whatever is started on them goes on for long, and says nothing."""

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        return ["sleep", "60"]


def test_a_node_of_ray_starts_without_ray_serve() -> None:
    code = "import slipstream.chaos.ray_node, sys; sys.exit(any(one in sys.modules for one in ('ray.serve', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_command_on_a_host_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "START_S", 0.5)
    monkeypatch.setattr(hosted, "SET_S", 0.5)
    monkeypatch.setattr(hosts_module, "may_make_namespaces", lambda: False)
    hosts = SilentHosts([1], tmp_path)
    with pytest.raises(DeadlineExceeded, match=r"Ray's nodes at 127\.0\.0\.2"), hosts:
        pass
    runner = HostedFaultRunner(hosts, (), tmp_path, 1.0, print)
    with pytest.raises(DeadlineExceeded, match="`slipstream set` of learner"):
        runner._set("learner.optimizer.lr=1e-3")


def test_a_small_chaos_leaves_nothing_to_complain_of(chaos_run: tuple[Path, dict]) -> None:
    run, report = chaos_run
    assert report["problems"] == []
    assert report["faults"] == {"kill": KILLS, "stop": 1}
    assert report["changes"] == CHANGES
    assert len(read_changes(run / SETTINGS)) == CHANGES
    assert report["resumes"] == 1
    assert leftovers(run) == []
    assert len(report["plan"]) == KILLS + 1
    assert all(check["examined"] > 0 for check in report["checks"])
    assert 0 < report["steps"] <= len(metrics(run))


def test_the_same_seed_makes_the_same_plan() -> None:
    config = load("chaos")
    plan = make_plan(config, 300, 7)
    assert plan == make_plan(config, 300, 7)
    assert plan != make_plan(config, 300, 8)
    assert sum(fault.kind == "kill" for fault in plan) == 300
    roles = {"buffer", "learner-0", "learner-1", "worker-0", "worker-1", "engine-0", "engine-1", SUPERVISOR}
    for kind in ("kill", "stop"):
        assert {fault.victim for fault in plan if fault.kind == kind} == roles
    assert {fault.victim for fault in plan if fault.kind == "disk"} == {"buffer", "learner-0", "learner-1"}
    stops = [fault.seconds for fault in plan if fault.kind == "stop"]
    assert min(stops) < config.launch.lease_s < config.launch.heartbeat_s < max(stops)
    assert any(config.launch.lease_s < s < config.launch.heartbeat_s for s in stops)


def test_hosts_and_links_are_hit_too() -> None:
    config = load("chaos")
    plan = make_plan(config, 60, 7, hosts=3, links=20)
    assert plan == make_plan(config, 60, 7, hosts=3, links=20)
    assert plan != make_plan(config, 60, 7, hosts=4, links=20)
    kinds = [fault.kind for fault in plan]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"kill": 60, "stop": 15, "disk": 6},
        **{"lost": 6, "frozen": 3, "cut": 10, "slow": 10},
    }
    assert {fault.host for fault in plan if fault.kind in ("lost", "frozen")} == {1, 2}  # not the supervisor's
    assert {fault.host for fault in plan if fault.kind == "cut"} == {0, 1, 2}
    assert cpus_of(config, 3) == [2, 4, 4]


def test_the_processes_that_vllm_computes_in_are_hit_too() -> None:
    plan = make_plan(load("chaos", ["rollout.engine.kind=vllm", "rollout.engine.replicas=2"]), 100, 0)
    assert {"engine-0 core", "engine-1 core"} <= {fault.victim for fault in plan}
    assert all(not fault.role.endswith("core") for fault in plan)


def test_changes_of_settings_are_allowed_one_after_the_other() -> None:
    config = load("chaos")
    changes = make_changes(config, 100, 10, 7)
    assert changes == make_changes(config, 100, 10, 7)
    assert {change.override.partition("=")[0] for change in changes} == set(LIVE)
    assert {change.after_fault for change in changes} == set(range(11))
    for change in changes:
        config, made = changed_live(config, [change.override])
        assert len(made) == 1


def test_the_audit_shares_no_code_with_the_buffer() -> None:
    for module in (chaos_audit, audit_checks, audit_log):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}
        assert imported <= {"", "configs", "errors", "audit_checks", "audit_log"}, module


def test_runs_that_chaos_cannot_reach_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, why in (
        ((f"run.dir={tmp_path}",), "is not empty"),
        (("--kills", "-1"), "allowed are 0 and more"),
        (("--set-changes", "-1"), "allowed are 0 and more"),
        (("--hosts", "0"), "allowed are 1 and more"),
        (("--links", "3"), "there is one host"),
        (("launch.kind=ray",), "allowed here are local, colocated"),
        (("env.tasks=5",), "env.sampler: the audit expects every task once"),
    ):
        done = slipstream("chaos", "chaos", *arguments, check=False)
        assert done.returncode == ConfigError.exit_code
        assert why in done.stderr


# --- planted faults -----------------------------------------------------------------------------------------------

Plant = Callable[[sqlite3.Connection, Path], object]

ONE = (
    "(SELECT e.id FROM episodes e JOIN groups g ON g.id = group_id JOIN told ON told.id = e.id"
    " JOIN commits c ON c.version = trained_at WHERE account = 'trained' AND NOT rolled_back"
    " AND trained_at - 1 > c.max_staleness LIMIT 1)"
)
"""An episode that is in the weights, whose batch might hold no tokens of version 0 any more, and whose worker lived to hear that
it is stored."""


def sql(*statements: str) -> Plant:
    return lambda db, run: [db.execute(statement) for statement in statements]


def stale(db: sqlite3.Connection, run: Path) -> None:
    """All that the store says of an episode agrees that it was sampled by version 0 and carried loss."""
    ((episode, length, kept),) = db.execute(
        "SELECT id, length, (SELECT sum(value) FROM json_each(kept)) FROM episodes WHERE id = " + ONE
    )
    db.execute(
        "UPDATE episodes SET generated = ?, kept = ?, loss_from = 0 WHERE id = ?",
        (json.dumps({"0": length}), json.dumps({"0": kept}), episode),
    )
    for trajectory, header in db.execute(
        "SELECT id, header FROM trajectories WHERE episode_id = ?", (episode,)
    ).fetchall():
        values = msgspec.msgpack.decode(header[1:])
        values["version_spans"] = [[start, end, 0] for start, end, *_ in values["version_spans"]]
        row = (header[:1] + msgspec.msgpack.encode(values), trajectory)
        db.execute("UPDATE trajectories SET header = ? WHERE id = ?", row)


def one_bit_of_a_mask(db: sqlite3.Connection, run: Path) -> None:
    ((position, length),) = db.execute("SELECT arrays, length FROM trajectories WHERE arrays IS NOT NULL LIMIT 1")
    segments = {int(path.name, 16): path for path in (run / "buffer.arrays").iterdir()}
    start = max(start for start in segments if start <= position)
    with segments[start].open("r+b") as file:
        mask = position - start + 8 * length
        file.seek(mask)
        (old,) = file.read(1)
        file.seek(mask)
        file.write(bytes([1 - old]))


def taken_again(db: sqlite3.Connection, run: Path) -> None:
    """The learner's own last batch holds, beside what it held, an episode of its first."""
    (path,) = sorted((run / "audit").glob("learner-0.*.jsonl"), key=lambda path: path.stat().st_mtime)[-1:]
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    made = {line["version"] for line in lines if line["type"] == "CommitFinished"}
    took = [line for line in lines if line["type"] == "BatchTaken" and line["version"] in made]
    took[-1]["episodes"] |= dict(list(took[0]["episodes"].items())[:1])
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


PLANTED: dict[str, tuple[Plant, str]] = {
    "an episode is deleted": (sql(f"DELETE FROM episodes WHERE id = {ONE}"), "acknowledged delivery"),
    "a trajectory is deleted": (sql(f"DELETE FROM trajectories WHERE episode_id = {ONE}"), "acknowledged delivery"),
    "a delivery counts as running": (
        sql(f"UPDATE episodes SET account = 'in_flight', settled = 0 WHERE id = {ONE}"),
        "acknowledged delivery",
    ),
    "a group is deleted": (
        sql("DELETE FROM groups WHERE id = 3", "DELETE FROM episodes WHERE group_id = 3"),
        "every task",
    ),
    "a task is issued again": (sql("UPDATE groups SET task = 1 WHERE id = 2"), "every task"),
    "a task is skipped": (sql("UPDATE counters SET value = json_set(value, '$.cursors[0]', 100000)"), "every task"),
    "a member is kept twice": (
        sql(
            "CREATE TEMP TABLE copy AS SELECT * FROM episodes WHERE id = " + ONE,
            "UPDATE copy SET id = group_id || '.99.' || substr(id, -1)",
            "INSERT INTO episodes SELECT * FROM copy",
        ),
        "beyond its attempts",
    ),
    "tokens appear": (
        sql("UPDATE episodes SET generated = json_object('0', 1000) WHERE id = " + ONE),
        "as the workers",
    ),
    "kept tokens change": (sql("UPDATE episodes SET kept = json_object('0', 1) WHERE id = " + ONE), "ledger closes"),
    "a group is unusable that no learner took": (
        sql(
            "UPDATE groups SET state = 'discarded' WHERE id = (SELECT max(id) FROM groups)",
            "UPDATE episodes SET account = 'discarded', reason = 'unusable' WHERE group_id = (SELECT max(id) FROM groups)",
        ),
        "ledger closes",
    ),
    "an account is unknown": (sql(f"UPDATE episodes SET account = 'elsewhere' WHERE id = {ONE}"), "ledger closes"),
    "a mask changes": (one_bit_of_a_mask, "ledger closes"),
    "a group would be trained again": (
        sql("UPDATE groups SET state = 'ready', trained_at = NULL WHERE state = 'trained' AND trained_at > 4"),
        "trained twice",
    ),
    "a batch holds what an earlier one held": (taken_again, "trained twice"),
    "a commit is rolled back and still in the weights": (
        sql("UPDATE commits SET rolled_back = 1 WHERE NOT rolled_back AND version > 2"),
        "trained twice",
    ),
    "a stale token is trained": (stale, "max_staleness"),
    "a commit names a bound that was never set": (
        sql("UPDATE commits SET max_staleness = 9 WHERE version = (SELECT max(version) FROM commits)"),
        "max_staleness",
    ),
    "the learner's own count differs": (
        sql(f"UPDATE episodes SET loss_from = NULL WHERE group_id = CAST({ONE} AS INTEGER)"),
        "max_staleness",
    ),
}


def copied(run: Path, folder: Path) -> Path:
    """What the audit reads of a run, to be changed."""
    shutil.copytree(run, folder / "run", ignore=shutil.ignore_patterns("checkpoints", "weights", "logs"))
    return folder / "run"


@pytest.mark.parametrize("what", PLANTED)
def test_the_audit_finds(what: str, chaos_run: tuple[Path, dict], tmp_path: Path) -> None:
    run = copied(chaos_run[0], tmp_path)
    assert not any(check.wrong for check in audit(run))
    plant, name = PLANTED[what]
    lines = [
        msgspec.json.decode(line) for log in (run / "audit").glob("worker-*") for line in log.read_bytes().splitlines()
    ]
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute("CREATE TEMP TABLE told (id TEXT)")
        told = [(line["episode"],) for line in lines if line["type"] == "DeliveryAcknowledged"]
        db.executemany("INSERT INTO told VALUES (?)", told)
        plant(db, run)
    db.close()
    (check,) = (check for check in audit(run) if name in check.name)
    assert check.wrong > 0
    assert check.problems


def test_groups_that_were_archived_are_held_against_the_archive(chaos_run: tuple[Path, dict], tmp_path: Path) -> None:
    run = copied(chaos_run[0], tmp_path)
    store = Store(run / "buffer.sqlite")
    clock, _ = store.load()
    over = min(clock.checkpointed, clock.served or 0)
    while store.shrink(1 << 10, over):
        pass
    store.close()
    assert query(run, "SELECT count(*) FROM archive")[0][0] > 0
    assert query(run, "SELECT count(*) FROM groups")[0][0] < clock.next_group
    assert not any(check.wrong for check in audit(run))
    with sqlite3.connect(run / "buffer.sqlite") as db:
        db.execute("DELETE FROM archive WHERE version = 0")
    db.close()
    (check,) = (check for check in audit(run) if check.wrong)
    assert "acknowledged tokens of archived groups" in check.problems[0]


def test_a_line_of_an_evaluation_is_no_step(chaos_run: tuple[Path, dict], tmp_path: Path) -> None:
    run = copied(chaos_run[0], tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"evaluation":"math","step":4,"version":4,"reward_mean":0.5}\n')
    assert not any(check.wrong for check in audit(run))


def test_a_torn_last_line_of_an_audit_log_is_ignored(chaos_run: tuple[Path, dict], tmp_path: Path) -> None:
    run = copied(chaos_run[0], tmp_path)
    path = next((run / "audit").glob("worker-0.*"))
    path.write_bytes(path.read_bytes() + b'{"type":"Delivery')
    assert not any(check.wrong for check in audit(run))
    assert query(run, "SELECT count(*) FROM episodes")[0][0] > 0
