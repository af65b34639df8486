"""Runs as programs: what `slipstream train` makes, with code of one's own between; and every way to leave one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from slipstream import Run
from slipstream.configs import Config, load
from slipstream.errors import ConfigError, RoleDied, StateError
from slipstream.learner.checkpoint_folder import checkpoints, read_state
from slipstream.tests import plain
from slipstream.tests.runs import (
    SMALL,
    WAIT_S,
    check_accounts,
    ledger,
    leftovers,
    metrics,
    processes_of,
    query,
)
from slipstream.tests.test_examples import example

FAKE = ("rollout.engine.kind=fake", "rollout.engine.max_concurrent=16", "learner.checkpoint_every=100")


def configured(policy: Path, run: Path, *overrides: str) -> Config:
    return load("quickstart", [*SMALL, *FAKE, f"model.path={policy}", f"run.dir={run}", *overrides])


def roles(run: Path) -> dict[str, psutil.Process]:
    """The processes of a run by the names of their roles: the oldest of each."""
    found = dict[str, psutil.Process]()
    for line in processes_of(run):
        with contextlib.suppress(psutil.Error):  # it may end while it is looked at
            process = psutil.Process(int(line.split()[0]))
            role = process.environ()["SLIPSTREAM_ROLE"]
            found[role] = min(found.get(role, process), process, key=psutil.Process.create_time)
    return found


def saved_step(run: Path) -> int:
    return read_state(checkpoints(run / "checkpoints")[-1]).step


async def test_a_program_steps_and_discards_batches_to_the_end(policy: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = Run(configured(policy, run_dir, "learner.steps=3"))
    with pytest.raises(StateError, match="no run outside"):
        await run.step(None)  # type: ignore[arg-type]
    seen: list[int] = []
    async with run:
        with pytest.raises(StateError, match="one run at a time"):
            await Run(configured(policy, tmp_path / "other")).__aenter__()
        async for batch in run:
            assert batch.version == run.version == len(metrics(run_dir))
            seen.append(batch.version)
            if seen == [0, 1]:
                groups = await run.trajectories(batch)
                assert [[one.id for one in group] for group in groups] == [
                    [row.id for row in group] for group in batch.groups
                ]
                assert sum(len(one.token_ids) for group in groups for one in group) > 0
                discarded = sum(one.sampled for group in groups for one in group)
                with pytest.raises(StateError, match="version 1 is neither stepped nor discarded"):
                    await anext(aiter(run))
                await run.discard(batch)
                with pytest.raises(StateError, match="version 1 is not the newest"):
                    await run.step(batch)
                continue
            row, again = await asyncio.gather(run.step(batch), run.step(batch), return_exceptions=True)
            assert isinstance(again, StateError)  # and the run goes on
            assert row is not None
            assert not isinstance(row, BaseException)
            assert (row.step, row.version) == (len(metrics(run_dir)), run.version)
    assert seen == [0, 1, 1, 2]
    assert ledger(run_dir)["discarded"]["program"] == discarded
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert f"report: {run_dir / 'report.html'}" in run.summary
    assert (run_dir / "report.html").is_file()
    check_accounts(run_dir)
    assert leftovers(run_dir) == []
    with pytest.raises(StateError, match="entered once"):
        await run.__aenter__()


@pytest.mark.full
async def test_a_program_makes_the_weights_and_the_ledger_that_train_makes(tmp_path: Path) -> None:
    """One episode at a time and synchronous: every token of both runs is the same. The program is the example, which never
    finds the policy good enough."""
    policy = plain.small_policy(tmp_path / "policy")
    one_by_one = (
        "buffer.max_staleness=0",
        "buffer.group_size=1",
        "buffer.groups_per_batch=6",
        "learner.algorithm.advantage.kind=reinforce_pp",
        "rollout.max_episodes=1",
        "rollout.engine.kind=fake",
    )
    trained, made = tmp_path / "trained", tmp_path / "made"
    plain.run_system(trained, policy, *one_by_one, steps=3, versions=1, patience_s=0.0)
    config = load(str(trained / "config.yaml"), [f"run.dir={made}", f"env.arguments.metrics={made / 'metrics.jsonl'}"])
    assert len(await example("until_good_enough").train(config, enough=2.0)) == 3
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (trained, made)]
    assert plain.apart(*weights) <= plain.EQUAL
    before = load_file(policy / "model.safetensors")
    assert plain.apart(weights[0], {name: before[name] for name in weights[0]}) > 100 * plain.EQUAL
    books = [ledger(folder) for folder in (trained, made)]
    assert books[0]["trained"] == books[1]["trained"] > 0
    for version in ("0", "1", "2"):  # of version 3 episodes were played until the run ended
        assert books[0]["by_version"][version] == books[1]["by_version"][version]
    rows = [
        [{key: row[key] for key in ("loss", "grad_norm", "reward_mean", "tokens_trained")} for row in metrics(folder)]
        for folder in (trained, made)
    ]
    assert len(rows[0]) == 3
    assert rows[1] == [pytest.approx(row) for row in rows[0]]


class Boom(Exception):
    pass


@pytest.mark.full
async def test_a_program_is_left_at_any_point_and_resumed(policy: Path, tmp_path: Path) -> None:
    """By a break with a batch in hand and by an exception between batches, with two ranks that know nothing of either."""
    run_dir = tmp_path / "run"
    config = configured(policy, run_dir, "learner.steps=3", "learner.backend.ranks=2")
    async with Run(config) as run:
        async for batch in run:
            if batch.version == 1:
                break
            await run.step(batch)
    assert (saved_step(run_dir), run.summary) == (1, "")
    assert leftovers(run_dir) == []
    with pytest.raises(ConfigError, match="not empty"):
        await Run(config).__aenter__()

    async def fails() -> None:
        async with Run(config, resume=True) as run:
            async for batch in run:
                if "program" not in ledger(run_dir)["discarded"]:
                    await run.discard(batch)
                    continue
                await run.step(batch)
                raise Boom

    with pytest.raises(Boom) as raised:
        await fails()
    assert not hasattr(raised.value, "__notes__")
    assert saved_step(run_dir) == 2
    assert [row["step"] for row in metrics(run_dir)] == [1, 2]
    trained = query(run_dir, "SELECT trained_at, count(*) FROM groups WHERE state = 'trained' GROUP BY trained_at")
    assert trained == [(1, 2), (2, 2)]
    assert set(ledger(run_dir)["discarded"]) >= {"program"}
    check_accounts(run_dir)
    assert leftovers(run_dir) == []


PROGRAM = """
import asyncio, sys
from slipstream import Run
from slipstream.tests.test_launch_program import configured
from pathlib import Path

async def main():
    async with Run(configured(Path(sys.argv[1]), Path(sys.argv[2]), "learner.steps=1000"), resume=True) as run:
        async for batch in run:
            await run.step(batch)
            print(run.version, flush=True)

asyncio.run(main())
"""


@pytest.mark.full
def test_a_program_that_is_killed_and_one_that_is_interrupted_leave_no_process(policy: Path, tmp_path: Path) -> None:
    """Either happens at any moment after a step."""
    run_dir = tmp_path / "run"

    def end(number: int) -> str:
        with (tmp_path / "stderr").open("w") as stderr:
            command = [sys.executable, "-c", PROGRAM, str(policy), str(run_dir)]
            program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert program.stdout is not None
            assert int(program.stdout.readline()) > 0, (tmp_path / "stderr").read_text()
            # A batch that was ready is stepped before the worker is there.
            until = time.monotonic() + WAIT_S
            while not (living := roles(run_dir).keys()) >= {"buffer", "engine-0", "worker-0"}:
                assert time.monotonic() < until, living
                time.sleep(0.05)
            assert living.isdisjoint({"program", "learner-0"})
            below = psutil.Process(program.pid).children(recursive=True)
            program.send_signal(number)
            program.communicate(timeout=WAIT_S)
            assert psutil.wait_procs(below, WAIT_S)[1] == []
            assert program.returncode == -number  # a shell's status is 130 after Ctrl-C
            return (tmp_path / "stderr").read_text()
        finally:
            program.kill()

    end(signal.SIGKILL)
    assert "KeyboardInterrupt" in end(signal.SIGINT)
    assert leftovers(run_dir) == []
    check_accounts(run_dir)
    assert saved_step(run_dir) == metrics(run_dir)[-1]["step"]


def supervisors() -> list[psutil.Process]:
    """Those that this process has started."""
    found = list[psutil.Process]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            found += [child] * ("program" in child.cmdline())
    return found


async def test_a_run_that_is_left_while_it_starts_leaves_no_process(policy: Path, tmp_path: Path) -> None:
    entering = asyncio.create_task(Run(configured(policy, tmp_path / "run")).__aenter__())
    while not (started := supervisors()):  # noqa: ASYNC110 - a child has its command line a moment after its start
        await asyncio.sleep(0.01)
    with pytest.raises(StateError, match="one run at a time"):
        await Run(configured(policy, tmp_path / "other")).__aenter__()
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    again = asyncio.create_task(Run(configured(policy, tmp_path / "run")).__aenter__())
    await asyncio.sleep(0)  # its process is being started
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    started += supervisors()
    assert [process for process in started if process.is_running()] == []


async def test_what_is_wrong_is_said_before_anything_starts(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.kind: 'ray' is not allowed in a program"):
        Run(configured(policy, tmp_path / "run", "launch.kind=ray"))
    with pytest.raises(ConfigError, match=r"model\.path"):
        async with Run(configured(tmp_path / "missing", tmp_path / "run")):
            raise AssertionError
    assert not (tmp_path / "run").exists()


@pytest.mark.full
async def test_a_run_that_fails_ends_the_program_with_its_error(policy: Path, tmp_path: Path) -> None:
    """Its only server is killed and may not start again."""
    run_dir = tmp_path / "run"
    config = configured(policy, run_dir, "launch.restarts=0", "learner.steps=8")

    async def loses_its_server() -> None:
        async with Run(config) as run:
            async for batch in run:
                await run.step(batch)
                if batch.version == 0:
                    roles(run_dir)["engine-0"].kill()

    with pytest.raises(RoleDied, match="engine-0 ended with SIGKILL"):
        await loses_its_server()
    assert leftovers(run_dir) == []
    check_accounts(run_dir)
    assert saved_step(run_dir) == metrics(run_dir)[-1]["step"]
