"""The learner's benchmarks: what they compute from what they measured, and one round of every contender, as small as it gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from slipstream.benchmarks import learner, learning, learning_plot
from slipstream.benchmarks.learner_batch import (
    PROMPT,
    Job,
    MemoryUse,
    Shape,
    fill_of,
    make_batch,
    make_long_prompt,
    to_groups,
    tokens_of,
)
from slipstream.benchmarks.learner_processes import NO_TRL, stepping
from slipstream.benchmarks.learner_steps import Bare, Full, Padded, Unshared
from slipstream.benchmarks.learning_arms import PRESET, TASK, TRAINING, TRL, Arm, Point, Run, arms
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Uncorrected
from slipstream.errors import ConfigError, LearnerError
from slipstream.launch.cli import main as cli
from slipstream.tests import tiny
from slipstream.tests.columns import to_train_batch

BATCH = Shape(groups=2, group_size=2, longest=48)


def job(folder: Path, contender: str, shape: Shape = BATCH, budget: int = 96) -> Job:
    return Job(contender, str(folder), make_batch(shape, tiny.VOCABULARY), budget)


# --- the batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [0.2, 0.3, 0.5])
def test_a_batch_is_filled_as_it_says(fill: float) -> None:
    batch = make_batch(Shape(groups=8, group_size=8, longest=512, fill=fill), 400)
    assert fill_of(batch) == pytest.approx(fill, abs=0.02)
    assert max(len(one.token_ids) for one in batch) == 512
    assert tokens_of(batch) == pytest.approx(fill * 64 * 512, rel=0.1)


def test_a_batch_is_what_the_learner_trains_on() -> None:
    groups = to_groups(make_batch(BATCH, 400))
    assert [len(group) for group in groups] == [2, 2]
    for group in groups:
        for trajectory in group:
            trajectory.check()
        assert len({tuple(t.token_ids[:PROMPT].tolist()) for t in group}) == 1
        assert {t.reward for t in group} == {0.0, 1.0}  # unequal rewards: the loss is not zero
    sequences = to_train_batch(groups, Algorithm(), 0, 0)
    assert len(sequences.token_ids) == tokens_of(make_batch(BATCH, 400))


# --- the contenders -------------------------------------------------------------------------------------------------


def gradients(contender: Bare | Padded) -> dict[str, torch.Tensor]:
    """Of one step, which the optimizer does not take."""
    contender._optimizer.step = lambda: None  # type: ignore[method-assign]
    contender._optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    contender.step()
    return {name: parameter.grad.clone() for name, parameter in contender.model.named_parameters()}


def test_packed_and_padded_floors_do_the_same_work(folders: list[Path]) -> None:
    packed = gradients(Bare(job(folders[0], "bare")))
    padded = gradients(Padded(job(folders[0], "padded")))  # two sequences at once
    assert packed.keys() == padded.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, padded[name], atol=1e-6, rtol=1e-4, msg=name)
    assert sum(float(gradient.abs().sum()) for gradient in packed.values()) > 1.0


@pytest.mark.parametrize(("contender", "tokens"), [(Full, 64 + 4 * 8), (Unshared, 4 * (64 + 8))])
def test_what_a_prompt_is_computed_for(folders: list[Path], contender: type[Full], tokens: int) -> None:
    batch = make_long_prompt(tiny.VOCABULARY, prompt=64, answers=4, tokens=8)
    made, read = contender(Job("", str(folders[0]), batch, 8192)), list[int]()
    try:
        made._backend._model.model.embed_tokens.register_forward_hook(lambda _, ids, __: read.append(ids[0].shape[1]))
        made.step()
    finally:
        made._backend.close()
    assert max(read) == tokens


def test_the_full_step_trains(folders: list[Path]) -> None:
    full = Full(job(folders[0], "full"))
    try:
        before = {name: tensor.clone() for name, tensor in full._backend.named_weights()}
        full.step()
        after = dict(full._backend.named_weights())
    finally:
        full._backend.close()
    assert any(not torch.equal(before[name], after[name]) for name in before)


async def test_a_contender_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"bare ended; the end of its log: [\s\S]*nowhere"):
        async with stepping("bare", job(tmp_path / "nowhere", "bare"), tmp_path):
            pass


def test_bench_learner_end_to_end(tmp_path: Path) -> None:
    """Real processes, one round, and no TRL, wherever this runs."""
    code = (
        "import asyncio, sys, pathlib, slipstream.tests;"
        "from slipstream.benchmarks import learner, learner_batch, learner_processes, result;"
        "learner.TRL = pathlib.Path('/nowhere');"
        "import msgspec;"
        "r = asyncio.run(learner.learner(pathlib.Path(sys.argv[1]), '1M', learner_batch.Shape(2, 2, 64), rounds=1));"
        "print(msgspec.json.encode(result.Report('learner', '', r)).decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    step, padding, ranks, trl, memory, prompt = results
    assert [row["name"] for row in step["rows"]] == ["full over bare"]
    for row in [*step["rows"], *padding["rows"], *ranks["rows"], *memory["rows"], *prompt["rows"]]:
        assert row["contender"] > 0
        assert row["ratio"] == pytest.approx(row["contender"] / row["floor"])
    assert {row["note"] for row in trl["rows"]} == {NO_TRL}
    assert [row["name"] for row in memory["rows"]] == [
        "one rank over bare",
        "one rank over padded",
        "one rank over two ranks",
    ]
    assert all(100 < row["contender"] < 10_000 for row in memory["rows"])  # MiB of a process with torch in it


# --- what is computed from what was measured ------------------------------------------------------------------------


def test_ratios_are_of_rates_by_round() -> None:
    seconds = {
        "full": [2.0, 4.0],
        "bare": [1.0, 1.0],
        "padded": [4.0, 4.0],
        "two ranks": [1.0, 1.0],
        "two threads": [1.0, 2.0],
        "trl": [8.0, 8.0],
    }
    held = {
        "full": [MemoryUse(1 << 20, 4 << 20)],
        "bare": [MemoryUse(1 << 20, 2 << 20)],
        "two ranks": [MemoryUse(0, 1 << 20), MemoryUse(0, 2 << 20)],
    }
    long = {"full": [1.0, 2.0], "unshared": [4.0, 4.0]}
    step, padding, ranks, trl, memory, prompt = learner.results(learner.Measured(100, 0.3, seconds, held, long), "1M")
    (full,) = step.rows
    assert (full.contender, full.floor) == (37.5, 100.0)  # mean of 50 and 25 tokens per second
    assert full.note.endswith("0.25 to 0.50 by round")
    assert [row.ratio for row in padding.rows] == [4.0, 1.5]
    assert ranks.rows[0].contender == 100.0
    assert trl.rows[0].ratio == 3.0
    assert (prompt.rows[0].contender, prompt.rows[0].ratio) == (0.75 * 8 * (512 + 64), 3.0)
    assert {row.name: row.ratio for row in memory.rows} == {"one rank over bare": 2.0, "one rank over two ranks": 2.0}


def test_a_gpu_has_a_small_batch_too() -> None:
    one = {"full": [4.0], "bare": [2.0]}
    small = {"full": [4.0], "compiled": [1.0], "bare": [2.0]}
    measured = learner.Measured(
        100, 0.3, one, {"full": [MemoryUse(0, 1)]}, {"full": [1.0], "unshared": [1.0]}, 10, small
    )
    ratios = {r.title: r.rows[0].ratio for r in learner.results(measured, "1M") if r.rows}
    assert ratios["1M: full over the bare packed step, 10 tokens"] == 0.5
    assert ratios["1M: compiled over the bare packed step, 10 tokens"] == 2.0


def run(arm: Arm, seed: int, reward: float, lag: float = 0.0) -> Run:
    points = tuple(Point(64 * n, 2.0 * n, reward * n / 3) for n in range(1, 4))
    return Run(arm=arm, seed=seed, reward=reward, stderr=0.03, lag=lag, points=points)


RUNS = [
    *[run(TRL, seed, reward) for seed, reward in enumerate((0.5, 0.7))],
    *[run(Arm(0), seed, reward) for seed, reward in enumerate((0.6, 0.8))],
    *[run(Arm(4), seed, reward, lag=3.5) for seed, reward in enumerate((0.6, 0.7))],
    *[run(Arm(4, corrected=False), seed, reward, lag=3.9) for seed, reward in enumerate((0.1, 0.2))],
]


def test_arms_are_every_bound_with_correction_and_every_stale_one_without() -> None:
    names = [arm.name for arm in arms((0, 4), trl=True)]
    assert names == ["trl", "staleness-0", "staleness-4", "staleness-4-uncorrected"]
    assert [arm.name for arm in arms((0,), trl=False)] == ["staleness-0"]


def test_arms_differ_in_staleness_and_correction_only() -> None:
    configs = {arm.name: load(PRESET, [*TASK, *TRAINING, *arm.overrides]) for arm in arms((0, 4), trl=False)}
    assert [config.buffer.max_staleness for config in configs.values()] == [0, 4, 4]
    algorithms = [config.learner.algorithm for config in configs.values()]
    assert algorithms[0] == algorithms[1]
    assert algorithms[2] == msgspec.structs.replace(algorithms[0], correction=Uncorrected())


def test_rewards_are_compared_with_trl_and_with_synchronous_training() -> None:
    over_trl, over_synchronous, rates = learning.tables(RUNS)
    assert [row.name for row in over_trl.rows] == [
        "max_staleness 0",
        "max_staleness 4",
        "max_staleness 4, not corrected",
    ]
    assert over_trl.rows[0].ratio == pytest.approx(0.7 / 0.6)
    assert "not below within spread; lag 0.0" in over_trl.rows[0].note
    assert "below; lag 3.9" in over_trl.rows[2].note
    corrected, uncorrected = over_synchronous.rows
    assert (corrected.contender, corrected.floor) == (pytest.approx(0.65), pytest.approx(0.7))
    assert "not below within spread; lag 3.5" in corrected.note
    assert ": below" in uncorrected.note
    assert rates.rows[0].contender == pytest.approx(32.0)  # 192 samples in 6 seconds
    assert "after 192 samples, mean of 2 seeds" in over_trl.title


def test_without_trl_there_are_only_our_own_comparisons() -> None:
    (only,) = learning.tables([one for one in RUNS if not one.arm.trl])
    assert "synchronous" in only.title


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ((0.5,), (0.5,), None),
        ((0.5, 0.7), (0.6, 0.8), True),
        ((0.5, 0.51), (0.7, 0.71), False),
        ((0.9, 0.91), (0.1, 0.2), True),
    ],
)
def test_not_below_allows_for_the_spread_of_seeds(
    one: tuple[float, ...], other: tuple[float, ...], verdict: bool | None
) -> None:
    assert learning.not_below(one, other) is verdict


async def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    learning._prepare(tmp_path, learning.Settings(steps=60))
    with pytest.raises(ConfigError, match="--steps 60"):
        await learning.learning(tmp_path, 1, (0,), 20, print)


async def test_complete_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "TRL_PYTHON", tmp_path / "nowhere")
    learning._prepare(tmp_path, learning.Settings(steps=3))
    (tmp_path / "model").mkdir()
    for one in RUNS[2:]:
        folder = tmp_path / one.arm.name / f"seed-{one.seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_bytes(msgspec.json.encode(one))
    tables = await learning.learning(tmp_path, 2, (0, 4), 3, lambda _: None)  # of no model: a run would fail
    assert tables == learning.tables(RUNS[2:])
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_the_plot_shows_every_arm(tmp_path: Path) -> None:
    learning_plot.draw(RUNS, tmp_path / "all.png")
    learning_plot.draw(RUNS[:4], tmp_path / "few.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("all.png", "few.png")]
    assert sizes[0] > sizes[1] > 10_000


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ("learner", "--seeds", "2"),
            "--seeds: only `slipstream bench learning`, `slipstream bench distillation` and `slipstream bench alerts` know it",
        ),
        (("learning", "--sizes", "1M"), "--sizes: only `slipstream bench rollout`"),
        (("learning", "--steps", "0"), "--steps: 0 is not allowed; allowed are 1 and more"),
        (("learning", "--staleness", "0", "-1"), "--staleness: -1 is not allowed; allowed are 0 and more"),
    ],
)
def test_options_of_the_wrong_benchmark_are_refused(
    arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == ConfigError.exit_code
    assert what in capsys.readouterr().err
