"""`bench async`: one law for engine, learner, lengths and simulator; what it computes from runs; and a small one as a whole."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from slipstream.benchmarks import asynchrony
from slipstream.benchmarks.asynchrony import TURNS, Arm, arms, emulated, name_of
from slipstream.benchmarks.asynchrony_law import ANSWERS, TOOLS, EmulatedLaw, HandOvers
from slipstream.benchmarks.asynchrony_rows import MeasuredArm, compare
from slipstream.benchmarks.emulated_episodes import EmulatedTasks, prompt_of
from slipstream.envs import Message
from slipstream.launch.cli.main import main
from slipstream.planner.figures import RunFigures
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.run import SimulatedRun, simulate
from slipstream.planner.worker import PlayedEpisode
from slipstream.planner.workload import Lognormal, TurnShape
from slipstream.rollout.engines.fake.law import EngineLaw

SYSTEM = HandOvers(0.05, 0.1, 0.05, 0.02, 2.0, 1.0, 0.05, 0.02)
FIGURES = simulate(SimulationPlan.of(ANSWERS.profile(0, SYSTEM)), 2).figures


def plan_of(law: EmulatedLaw, bound: int) -> SimulationPlan:
    plan = SimulationPlan.of(law.profile(bound, SYSTEM))
    return msgspec.structs.replace(plan, drains=law.engine.drains)


def test_by_the_law_a_bound_of_two_trains_1_9_times_as_many_tokens() -> None:
    """The real runs are measured by the benchmark itself; this is what it predicts for them."""
    rates = {bound: simulate(plan_of(ANSWERS, bound), bound + 12).figures for bound in (0, 1, 2, 4)}
    ratios = {bound: one.trained_tokens_per_s / rates[0].trained_tokens_per_s for bound, one in rates.items()}
    assert 1.5 < ratios[1] < ratios[2] < ratios[4] * 1.02
    assert ratios[2] > 1.9
    assert rates[0].step_s == pytest.approx(ANSWERS.step_s, rel=0.05)


class DrainedRun(SimulatedRun):
    """Counts episodes by how many versions sampled them."""

    def _delivered(self, episode: PlayedEpisode, kept: bool) -> None:
        self.versions = getattr(self, "versions", [])
        self.versions.append(len(episode.generated))
        super()._delivered(episode, kept)


def test_replicas_that_drain_sample_no_request_by_two_versions() -> None:
    drained, kept = DrainedRun(plan_of(ANSWERS.draining(), 2), 0), DrainedRun(plan_of(ANSWERS, 2), 0)
    slow, quick = drained.run(8).figures, kept.run(8).figures
    assert set(drained.versions) == {1}
    assert set(kept.versions) > {1}
    assert slow.push_s > 10 * quick.push_s
    assert slow.trained_tokens_per_s < quick.trained_tokens_per_s


async def test_episodes_are_those_of_the_law_in_every_run() -> None:
    law = msgspec.to_builtins(TOOLS.episodes) | {"environment_s": 0.0}
    one, again = (EmulatedTasks(law=law, split="train", seed=0) for _ in range(2))
    for task in (one.task(5), one.task(6)):
        shapes = list(one._law.group(one.rng(task.payload["index"]), 4))
        for source in (one, again):
            for shape in shapes:
                env = source.make()
                (message,) = (await env.reset(task)).messages
                assert msgspec.json.decode(message.content, type=tuple[TurnShape, ...]) == shape.turns
                done = [(await env.step(Message("assistant", ""))).done for _ in shape.turns]
                assert done == [False] * (len(shape.turns) - 1) + [True]
    assert prompt_of(1, 3) != prompt_of(2, 3)


def figures(rate: float) -> RunFigures:
    return msgspec.structs.replace(FIGURES, trained_tokens_per_s=rate)


def test_rows_are_measured_over_synchronous_and_predicted_over_measured() -> None:
    measured = {
        name_of(0): MeasuredArm(figures(100.0), 0.2, 0.05, predicted=figures(110.0)),
        name_of(2): MeasuredArm(figures(240.0), 0.3, 0.05, predicted=figures(231.0)),
    }
    measured[TURNS] = MeasuredArm(figures(80.0), 0.3, 0.05, predicted=figures(80.0))
    over = dict.fromkeys((name_of(0), name_of(2)), (name_of(0), TURNS))
    ratios, errors = compare(over, measured)
    assert [row.ratio for row in ratios.rows] == pytest.approx([1.0, 2.4])
    assert ratios.rows[1].note == "simulated 2.10; 3.00 over colocated; CPU 30%, waited for 5% of the time"
    assert errors.title.endswith(", 10.0% off at most")
    assert errors.rows[1].note.startswith("-3.7%, learner waits ")
    assert [row.ratio for row in errors.rows] == pytest.approx([1.1, 231 / 240])
    assert HandOvers.mean([SYSTEM, HandOvers(*[1.05] * 8)]).once_s == pytest.approx(0.55)


def test_all_runs_of_a_law_differ_in_nothing_but_the_bound_and_how_a_push_meets_requests() -> None:
    every = arms((0, 1, 2, 4, 8))
    assert len({arm.name for arm in every}) == len(every) == 13
    answers = [arm for arm in every if arm.over == (name_of(0), TURNS)]
    assert len(answers) == 9
    for arm in answers:
        assert arm.law in (ANSWERS, ANSWERS.draining())
        settings = arm.law.settings(arm.bound) | {"weightsync.cohort": 0}
        assert settings == ANSWERS.settings(0) | {"buffer.max_staleness": arm.bound}
    assert {name for arm in every for name in arm.over} <= {arm.name for arm in every}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--steps", "3"), "--steps: 3 is not allowed; allowed are 5 and more"),
        (("--sizes", "1M"), "--sizes: only `slipstream bench rollout`, "),
        (
            ("--staleness", "1", "2"),
            "--staleness: 1 is the smallest; 0, which the others are compared with, must be among",
        ),
        (("--staleness", "-1", "0"), "--staleness: -1 is the smallest"),
        (("--config", "nothing.yaml"), "nothing.yaml: no such file, and no such preset"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "async", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


@pytest.mark.full
async def test_a_small_benchmark_from_end_to_end(tmp_path: Path) -> None:
    law = EmulatedLaw(
        Lognormal(mean=8.0, sigma=0.9, most=40, prompt=3, turns=2, environment_s=0.02),
        EngineLaw(step_s=0.01, sequence_s=1e-4, prefill_s=1e-4),
        step_s=0.3,
        replicas=1,
        groups=4,
        members=4,
        places=32,
    )
    sync = name_of(0)
    every = [Arm(sync, law, 0, (sync,)), Arm(name_of(1, "off"), law.draining(), 1, (sync,))]
    ratios, errors, published = await emulated(tmp_path, every, asynchrony.LEAST_STEPS, lambda line: None)
    assert [row.name for row in ratios.rows] == [row.name for row in errors.rows] == [sync, name_of(1, "off")]
    assert ratios.rows[0].ratio == 1.0
    assert all(row.contender > 0 for row in (*ratios.rows, *errors.rows))
    assert 0.2 < errors.rows[0].ratio < 5  # other work on this machine slows the run
    assert max(row.ratio for row in published.rows) == 2.77
