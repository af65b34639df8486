"""What a row of `metrics.jsonl` says of time and of comparisons, on a clock of its own."""

import pytest
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import BatchPlan, Stats
from slipstream.learner.backend import BackendStepResult
from slipstream.learner.checkpoint_folder import CheckpointState
from slipstream.learner.metrics import RATE_S, AuxModelsResult, PolicyStepResult, StepMetrics, StepTimer, summarize
from slipstream.tests.columns import joined
from slipstream.weightsync.plan import PushReport

MEANS = dict.fromkeys(("importance", "importance_square", "kl", "entropy", "clip_fraction", "dropped"), 1.0)
REPORT_S = 0.5  # between two reports of a worker


class Reports:
    """Workers that play 64 slots, a quarter of them empty, and sample 1000 tokens a second, reported every half second."""

    def __init__(self) -> None:
        self.now = 0.0

    def stats(self, scale: float = 1.0) -> Stats:
        reported = self.now // REPORT_S * REPORT_S * scale
        ledger = Ledger(generated=int(1000 * reported))
        return Stats(0, ledger, leased_groups=0, ready_groups=0, slot_s=64 * reported, idle_slot_s=16 * reported)


def rows(steps: int, step_s: float, compared: int = 1) -> list[StepMetrics]:
    reports, made = Reports(), []
    timer = StepTimer(reports.stats(), lambda: reports.now)
    done = PolicyStepResult((BackendStepResult(0.0, 0.0, 1, MEANS),), 0.1, 0.5 * bool(compared), compared)
    for step in range(1, steps + 1):
        timer.asks()
        reports.now += 0.2 * step_s
        timer.took(BatchPlan(step, 0, (), {}, reports.stats()))
        reports.now += 0.7 * step_s
        timer.stepped(reports.stats(), 70)
        reports.now += 0.1 * step_s
        summary, push = summarize([], joined([])), PushReport(step, ("engine-0",), {})
        made.append(timer.row(CheckpointState(step, step), summary, done, AuxModelsResult(), push))
    return made


@pytest.mark.parametrize("step_s", [0.31, 0.73, 1.01, 4.0, 30.0])
def test_a_rate_does_not_follow_the_moments_of_reports(step_s: float) -> None:
    """Workers do the same all the time, so every row says the same once `RATE_S` have passed."""
    made = rows(int(4 * RATE_S / step_s) + 4, step_s)
    for row in made[int(RATE_S / step_s) + 1 :]:
        assert row.rollout_tokens_per_s == pytest.approx(1000, rel=0.06)
        assert row.slots == pytest.approx(64, rel=0.06)
        assert row.rollout_idle == pytest.approx(0.25)
        assert row.learner_tokens_per_s == pytest.approx(70 / (0.7 * step_s))


def test_what_single_steps_report_adds_up_to_the_whole() -> None:
    made = rows(40, 0.73)
    assert len({row.tokens_generated for row in made}) > 1  # a step of 0.73 s has one report or two
    passed = 0.9 * 0.73 + 39 * 0.73
    assert sum(row.tokens_generated for row in made) == pytest.approx(1000 * passed, abs=501)
    assert sum(row.idle_slot_s for row in made) / sum(row.slot_s for row in made) == pytest.approx(0.25)


def test_totals_of_a_buffer_that_began_anew_make_no_negative_time() -> None:
    reports = Reports()
    reports.now = 100.0
    timer = StepTimer(reports.stats(), lambda: reports.now)
    timer.asks()
    reports.now = 101.0
    timer.took(BatchPlan(0, 0, (), {}, reports.stats()))
    reports.now = 102.0
    timer.stepped(reports.stats(scale=0.01), 70)
    done = PolicyStepResult((BackendStepResult(0.0, 0.0, 1, MEANS),), 0.1, 0.0, 0)
    row = timer.row(CheckpointState(1, 1), summarize([], joined([])), done, AuxModelsResult(), PushReport(1, (), {}))
    assert (row.slot_s, row.idle_slot_s, row.rollout_idle) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("compared", "shown"), [(0, None), (3, 0.5)])
def test_nothing_compared_is_no_agreement(compared: int, shown: float | None) -> None:
    assert rows(1, 1.0, compared)[0].mismatch_max == shown
