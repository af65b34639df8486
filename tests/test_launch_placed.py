"""Models beside the policy as roles of a run: placed, watched, started again with the learner, resumed where they are put next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slipstream.chaos.plan import make_plan
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch import preflight
from slipstream.launch.launchers.local import LocalLauncher
from slipstream.launch.resources import assign_gpus, needed_gpus, role_environment
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.supervisor.processes import role_names
from slipstream.tests.ranks import reserved_ports
from slipstream.tests.runs import SMALL, Background, check_accounts, leftovers, metrics, slipstream, tiny_policy

PLACED = (
    "learner.algorithm={advantage: {kind: gae, lr: 1e-3}, kl: {kind: loss}}",
    "learner.aux_models={reference: 1, critic: 2}",
)


def test_a_critic_that_is_killed_and_one_that_is_put_elsewhere(tmp_path: Path) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    keys = (
        "rollout.engine.kind=transformers",
        "learner.steps=14",
        "learner.checkpoint_every=6",
        "learner.algorithm.overlong=250",  # so that something is earned
        "launch.heartbeat_s=600",  # more than the learner is suspended
    )
    with Background("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *PLACED, *keys) as going:
        going.until_step(1)
        learner = going.roles()["learner-0"]
        learner.suspend()  # while it is asked for waits, which takes as long as several steps
        going.until(
            lambda: "the learner's next request" in slipstream("waits", str(run), "--json").stdout, "idle roles"
        )
        learner.resume()
        going.until_step(7)
        before = {role: process.pid for role, process in going.roles().items()}
        going.kill("critic-1")
        going.until(lambda: [row["step"] for row in metrics(run)].count(7) == 2, "step 7 for the second time")
        after = {role: process.pid for role, process in going.roles().items()}
        output = going.output()
        assert going.process.returncode == 0, output
    gang = {"learner-0", "reference-0", "critic-0", "critic-1"}
    # The supervisor may see the end of critic-0 first, which has lost critic-1.
    first = r"critic-1 ended with SIGKILL|critic-0 ended with exit status 1: LearnerError: .* lost the others .*"
    assert re.search(rf"({first}); restart 1 of 3", output), output
    assert before.keys() == after.keys() > gang
    assert {role for role in before if before[role] != after[role]} == gang
    assert leftovers(run) == []
    rows = metrics(run)
    again = [row["step"] for row in rows].index(7, 7)
    assert [row["step"] for row in rows[:7]] == list(range(1, 8))
    assert [row["step"] for row in rows[again:]] == list(range(7, 15))
    assert all(row["value_loss"] > 0 for row in rows)
    assert all(row["kl_reference"] > 0 for row in rows[1:])
    check_accounts(run)
    beside = run / "checkpoints" / "beside"
    assert sorted(path.name for path in beside.iterdir()) == ["step-00000012", "step-00000014"]
    slipstream("resume", str(run), "learner.steps=16", "learner.aux_models={critic: 0, reference: 0}")
    assert [row["step"] for row in metrics(run)][-2:] == [15, 16]
    check_accounts(run)
    assert leftovers(run) == []


def test_they_are_roles_with_gpus_ports_and_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, config = load("qwen3-0.6b"), load("qwen3-0.6b", [*PLACED, "rollout.engine.replicas=1"])
    assert [name for name in role_names(config) if name not in role_names(plain)] == [
        "reference-0",
        "critic-0",
        "critic-1",
    ]
    wanted = needed_gpus(config, engines=True, learners=True)
    assert assign_gpus(wanted, 5, "nccl").gpus == {
        "learner-0": (0,),
        "engine-0": (1,),
        "reference-0": (2,),
        "critic-0": (3,),
        "critic-1": (4,),
    }
    shared = assign_gpus(
        wanted, 2, "nccl"
    )  # the ranks of one model do not share, others may, and weights need not pass them
    assert {shared.gpus["critic-0"], shared.gpus["critic-1"]} == {(0,), (1,)}
    assert shared.backend == "nccl"
    with pytest.raises(ConfigError, match=r"learner\.aux_models\.critic: 2 ranks need a GPU each"):
        assign_gpus(wanted, 1, "nccl")
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert {role_environment(config, role)["OMP_NUM_THREADS"] for role in ("learner-0", "critic-1")} == {"2"}
    assert role_environment(config, "sft-0")["OMP_NUM_THREADS"] == "9"
    plan = make_plan(load("chaos", [*PLACED]), 100, 0)
    assert {"reference-0", "critic-0", "critic-1"} <= {fault.victim for fault in plan}


async def test_ranks_meet_at_a_port_that_no_other_role_has(tmp_path: Path) -> None:
    first = reserved_ports(12)[0]
    launcher = LocalLauncher(tmp_path, first)
    spots = await launcher.place({"critic-0": 0, "critic-1": 0})
    assert [spot.port for spot in spots.values()] == [first, first + 1]
    assert await launcher.reserve_port("critic-0") == first + 2
    config = load("quickstart", [*PLACED, f"launch.ports.first={first}"])
    assert preflight.ports(RunInputs(config)) == f"{first} to {first + len(role_names(config))} are free"
