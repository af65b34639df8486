"""The benchmarks of explain and of alerts: what they compute from runs, and what they refuse."""

from __future__ import annotations

import msgspec
import pytest
from slipstream.benchmarks.alerts import row_of
from slipstream.benchmarks.emulated_episodes import EmulatedTasks
from slipstream.benchmarks.explanation import LAW, PLANTED, PlantedRun, TrainedRun, gain_row, rule_row
from slipstream.envs import Message
from slipstream.launch.cli.main import main
from slipstream.monitor.alerts import Alert
from slipstream.planner.explain.findings import Explanation, Finding, Gain, Interval
from slipstream.planner.explain.rules import RULES


def test_seven_faults_are_planted_and_none_and_each_is_of_one_rule() -> None:
    rules = [one.rule for one in PLANTED if one.rule]
    assert len(set(rules)) == len(rules) == 7
    assert set(rules) <= {rule.__name__ for rule in RULES}
    assert [one.law for one in PLANTED if not one.rule] == [LAW]


def finding(rule: str, change: str, tokens: float = 0.5, age: float = 0.0, *, of_signal: bool = False) -> Finding:
    gain = Gain(Interval(tokens, tokens, tokens), Interval(age, age, age), 3, of_signal=of_signal)
    return Finding(rule=rule, severity="hint", text="", evidence=(), change=change, live=True, cost="free", gain=gain)


def test_the_right_rule_must_come_first_and_nothing_may_be_said_of_a_run_in_which_nothing_is_wrong() -> None:
    low, right = PlantedRun("low", "higher_bound"), finding("higher_bound", "buffer.max_staleness=1")
    other = finding("more_sequences", "rollout.engine.max_concurrent=4")

    def row(planted: PlantedRun, *findings: Finding, note: str = "") -> tuple[float, str]:
        found = rule_row(planted, Explanation(run="x", alerts=(), findings=findings, note=note, missed=0.031))
        return found.ratio, found.note

    missed = "; the simulation misses the run's cycle by +3%"
    assert row(low, right, other) == (1.0, f"higher_bound: buffer.max_staleness=1{missed}")
    assert row(low, other, right) == (0.0, f"more_sequences: rollout.engine.max_concurrent=4{missed}")
    assert row(low)[0] == 0.0
    assert row(PlantedRun("nothing", "")) == (1.0, f"nothing to change{missed}")
    assert row(PlantedRun("nothing", ""), other)[0] == 0.0
    assert row(low, right, note="no gain is claimed") == (
        0.0,
        f"higher_bound: buffer.max_staleness=1{missed}; no gain is claimed",
    )


def run_of(tokens: int, lag: int = 0, alike: int = 0, compared: int = 8) -> TrainedRun:
    row = {"wait_s": 0.5, "step_s": 0.4, "push_s": 0.1, "staleness_tokens": {str(lag): tokens}, "tokens_withheld": 0}
    row |= {"tokens_generated": tokens, "slot_s": 8.0, "idle_slot_s": 1.0, "learner_tokens_per_s": 1.0}
    rows = [row | {"groups": 2, "groups_alike": alike, "mismatch_tokens": n % 2 * compared} for n in range(10)]
    return TrainedRun(None, rows)  # type: ignore[arg-type]


def test_what_a_change_gave_is_over_what_was_promised() -> None:
    more = gain_row(PlantedRun("x", "higher_bound"), finding("higher_bound", "c"), run_of(100), run_of(140))
    assert more.ratio == pytest.approx(0.8)
    signal = finding("alike", "c", of_signal=True)
    assert gain_row(PlantedRun("x", "alike"), signal, run_of(100, alike=1), run_of(100)).ratio == pytest.approx(2.0)
    younger = finding("lower_bound", "c", -0.02, -4.0)
    low = gain_row(PlantedRun("x", "lower_bound", promise="staleness"), younger, run_of(100, 5), run_of(97, 2))
    assert (low.contender, low.ratio, low.note) == (-3.0, 0.75, "trained tok/s -3%, promised -2%")
    blind = PlantedRun("x", "blind", promise="fresh")
    fresh = gain_row(blind, finding("blind", "c", -0.3), run_of(100, compared=0), run_of(70))
    assert (fresh.ratio, fresh.note) == (0.5, "trained tok/s -30%, promised -30%; 0% of the steps before the change")


async def test_of_a_share_of_the_tasks_all_members_earn_the_same_and_lengths_stay() -> None:
    law = msgspec.to_builtins(LAW.episodes)

    async def played(alike: float) -> list[tuple[str, float]]:
        source, found = EmulatedTasks(law=law, alike=alike, split="train", seed=0), []
        for index in range(40):
            for _ in range(4):
                env = source.make()
                (message,) = (await env.reset(source.task(index))).messages
                found.append((str(message.content), (await env.step(Message("assistant", ""))).reward))
        return found

    half, none = await played(0.5), await played(0.0)
    assert [text for text, _ in half] == [text for text, _ in none]

    def same(rows: list[tuple[str, float]]) -> int:
        return sum(len({reward for _, reward in rows[4 * n : 4 * n + 4]}) == 1 for n in range(40))

    assert same(none) < 12 < 15 < same(half) < 30


def test_a_critical_alert_ends_the_silence_of_a_seed() -> None:
    def alert(rule: str, severity: str, step: int) -> Alert:
        return Alert(rule, severity, "", "", step, 1.0)  # type: ignore[arg-type]

    row = row_of(3, [alert("rollout_idle", "warning", 5), alert("mismatch", "critical", 12)], 60)
    assert (row.name, row.contender, row.floor, row.note) == (
        "seed 3",
        12,
        60,
        "warning rollout_idle, critical mismatch",
    )
    assert (row_of(3, [alert("rollout_idle", "warning", 5)], 60).ratio, row_of(3, [], 60).note) == (1.0, "no alert")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("explain", "--steps", "3"), "--steps: 3 is not allowed; allowed are 10 and more"),
        (
            ("explain", "--seeds", "3"),
            "--seeds: only `slipstream bench learning`, `slipstream bench distillation` and `slipstream bench alerts` know it",
        ),
        (("alerts", "--seeds", "0"), "--seeds: 0 is not allowed; allowed are 1 and more"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
