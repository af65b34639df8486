"""Runs whose servers sleep while the learner steps: to their end, as a program, and with kills in every state of the cycle."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from slipstream import Run
from slipstream.configs import Config, load
from slipstream.errors import ConfigError
from slipstream.launch.supervisor.factory import BACKEND_FACTORY
from slipstream.monitor.timeline import read_spans
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.fake.faults import VARIABLE, Fault
from slipstream.rollout.engines.sglang import launch as sglang_server
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests.killing_backend import KILLS
from slipstream.tests.runs import (
    SMALL,
    Background,
    check_accounts,
    ledger,
    leftovers,
    metrics,
    query,
    slipstream,
)
from slipstream.tests.whole_run import check_staleness

COLOCATED = ("launch.kind=colocated", "weightsync.transport=shared", "rollout.engine.kind=transformers")


def overrides_of(policy: Path, run: Path, bound: int, *more: str) -> tuple[str, ...]:
    return (*SMALL, *COLOCATED, f"buffer.max_staleness={bound}", f"model.path={policy}", f"run.dir={run}", *more)


def check_slept(run: Path, lost: frozenset[int] = frozenset()) -> None:
    """In every step all replicas slept from before the model stepped until the push, by the metrics and by the spans.

    Spans of the steps `lost` need not be there: a process that is killed loses those of its last second.
    """
    rows = metrics(run)
    assert all(0 < row["asleep_s"] < row["step_s"] + row["push_s"] + 0.1 for row in rows)
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-3  # the weights that returned are those of the learner
    assert max(row["canary"] for row in rows) < 1e-3
    spans = [span for role, span in read_spans(run) if role == "learner-0"]
    ends = {span.ids["version"]: span.t1 for span in spans if span.what == "sleep"}
    begins = {span.ids["version"]: span.t0 for span in spans if span.what == "train"}
    recorded = ends.keys() & begins.keys()
    assert all(ends[version] <= begins[version] for version in recorded)
    assert {row["version"] for row in rows} - {version + 1 for version in recorded} <= lost


async def test_a_synchronous_program_whose_servers_sleep(policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    discarded = 0
    async with Run(load("quickstart", [*overrides_of(policy, run_dir, 0, "learner.steps=3")])) as run:
        async for batch in run:
            if batch.version == 1 and not discarded:
                discarded = sum(row.sampled for group in batch.groups for row in group)
                await run.discard(batch)
                continue
            row = await run.step(batch)
            assert row is not None
            assert row.asleep_s > 0
    assert [row["step"] for row in metrics(run_dir)] == [1, 2, 3]
    assert all(row["staleness_max"] == 0 for row in metrics(run_dir))
    check_slept(run_dir)
    assert ledger(run_dir)["discarded"]["program"] == discarded
    check_accounts(run_dir)
    check_staleness(run_dir, 0)
    assert leftovers(run_dir) == []


def test_every_role_may_be_killed_while_the_servers_sleep(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = {2: "worker-0", 3: "engine-0", 4: "buffer", 5: "engine-1", 6: "learner-0"}
    monkeypatch.setenv(BACKEND_FACTORY, "slipstream.tests.killing_backend:make")
    monkeypatch.setenv(KILLS, ",".join(f"{step}:{victim}" for step, victim in victims.items()))
    run = tmp_path / "run"
    more = ("rollout.engine.replicas=2", "learner.steps=8", "evaluation.tasks=2")
    done = slipstream("train", "quickstart", *overrides_of(policy, run, 1, *more))
    for victim in victims.values():
        assert f"{victim} ended with SIGKILL" in done.stdout
    assert "final: reward" in done.stdout  # by servers that are awake
    assert {row["step"] for row in metrics(run)} == set(range(1, 9))
    assert leftovers(run) == []
    check_slept(run, lost=frozenset(range(3, 6)))  # the learner is killed where it begins the sixth
    check_accounts(run)
    check_staleness(run, 1)
    versions = [version for (version,) in query(run, "SELECT version FROM commits ORDER BY time")]
    assert versions == sorted(set(versions))


@pytest.mark.full
@pytest.mark.parametrize("bound", [0, 1])
def test_servers_that_die_on_the_way_to_sleep_and_back_return(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """Each of four dies in another state of its second cycle; the fifth lives. `wake` counts weights and cache, twice a cycle."""
    faults = [
        Fault(at="sleep", do="die", nth=2, replica=0),
        Fault(at="wake", do="die", nth=5, replica=1),
        Fault(at="swap", do="die", nth=3, replica=2),
        Fault(at="wake", do="die", nth=6, replica=3),
        Fault(at="sleep", do="refuse", nth=2, replica=4),
    ]
    monkeypatch.setenv(VARIABLE, msgspec.json.encode(faults).decode())
    run = tmp_path / "run"
    more = ("rollout.engine.kind=fake", "rollout.engine.replicas=5", "learner.steps=8", "launch.restarts=20")
    with Background("train", "quickstart", *overrides_of(policy, run, bound, *more)) as going:
        output = going.output()
        assert going.process.returncode == 0, output
    for replica in range(4):
        assert f"engine-{replica} ended with SIGKILL" in output
    assert [row["step"] for row in metrics(run)] == list(range(1, 9))
    assert leftovers(run) == []
    check_slept(run)
    check_accounts(run)
    check_staleness(run, bound)


def test_vllm_and_sglang_sleep_on_gpus_only(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def configured(kind: str) -> Config:
        return load("quickstart", [*overrides_of(policy, tmp_path, 1), f"rollout.engine.kind={kind}"])

    monkeypatch.setattr(sglang_server, "_python", lambda: "python")
    for kind, name, module, asked, answers, switch in (
        ("vllm", "vLLM", vllm_server, "serves_on_cpu", (True, False), "--enable-sleep-mode"),
        ("sglang", "SGLang", sglang_server, "_device", ("cpu", "cuda"), "--enable-memory-saver"),
    ):
        config = configured(kind)
        monkeypatch.setattr(module, asked, lambda *_, answer=answers[0]: answer)
        with pytest.raises(ConfigError, match=f"launch.kind=colocated: {name} sleeps on GPUs only.*kind=transformers"):
            servers.command(config, servers.LOOPBACK, 1, seed=0)
        monkeypatch.setattr(module, asked, lambda *_, answer=answers[1]: answer)
        assert switch in servers.command(config, servers.LOOPBACK, 1, seed=0)
        local = msgspec.structs.replace(config, launch=msgspec.structs.replace(config.launch, kind="local"))
        assert switch not in servers.command(local, servers.LOOPBACK, 1, seed=0)
