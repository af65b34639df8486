"""The law of replicas, found in the completions of servers whose law is known: they decode step by step, as real ones do."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from slipstream.planner.replica_law import replica_law
from slipstream.planner.run_spans import Floats, RecordedTurn, ReplicaSpans, read_run_spans
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.test_planner_explain import run_of

PLACES = 48
PREFILL_S, REQUEST_S, BLOCK = 2e-4, 0.004, 16
NO_STEPS = np.empty((0, 2))  # of the learner
Law = Callable[[int], float]  # running sequences -> seconds of a step


def straight(running: int) -> float:
    return 0.006 + 3e-4 * running


def saturating(running: int) -> float:
    """Flat up to 24 sequences, as of a server that is bound by memory, then in proportion."""
    return 0.01 * max(1.0, running / 24)


def serve(
    law: Law,
    seconds: float,
    rng: random.Random,
    *,
    pause_every: float = 0.0,
    steps: Floats = NO_STEPS,
    slower: float = 1.0,
) -> ReplicaSpans:
    """Groups of four requests arrive in waves: the numbers of running sequences come and go. Whole steps: what is new is prefilled
    in the step that makes its first token. A pause of 0.1 s voids nothing. In the learner's `steps` decoding is `slower`."""
    arrivals: list[tuple[float, int, int]] = []  # when, prompt, tokens
    at = 0.0
    while at < seconds:
        wave = 0.3 + 0.25 * np.sin(at / 2)
        at += rng.expovariate(1 / wave)
        arrivals += [(at + REQUEST_S, rng.randrange(20, 90), rng.randrange(4, 60)) for _ in range(4)]
    heapq.heapify(arrivals)
    clock, next_pause, running, turns, pauses = 0.0, pause_every, [], [], []
    while arrivals or running:
        if not running:
            clock = max(clock, arrivals[0][0])
        if pause_every and clock >= next_pause:
            pauses.append((clock, clock + 0.1))
            clock, next_pause = clock + 0.1, next_pause + pause_every
        uncached = 0
        while arrivals and arrivals[0][0] <= clock and len(running) < PLACES:
            sent, prompt, tokens = heapq.heappop(arrivals)
            cached = (prompt - 1) // BLOCK * BLOCK if rng.random() < 0.5 else 0
            uncached += prompt - cached
            running.append([sent - REQUEST_S, 0.0, tokens, tokens, prompt, cached])
        beside = any(t0 <= clock < t1 for t0, t1 in steps)
        clock += (slower if beside else 1.0) * (law(len(running)) + PREFILL_S * uncached)
        for one in running:
            one[1] = one[1] or clock
            one[2] -= 1
            if not one[2]:
                turns.append(RecordedTurn(one[0], one[1], clock, one[3], one[4], one[5]))
        running = [one for one in running if one[2]]
    return ReplicaSpans(np.array(turns, dtype=np.float64), np.array(pauses, dtype=np.float64).reshape(-1, 2))


@pytest.mark.parametrize("law", [straight, saturating])
def test_the_law_of_a_server_is_found(law: Law) -> None:
    rng = random.Random(1)
    replicas = tuple(serve(law, 120.0, rng, pause_every=1.5) for _ in range(2))
    found = replica_law(replicas, PLACES, NO_STEPS, recompute=False)
    assert found is not None
    for running in (2, 8, 16, 24, 32, 40):
        assert found.decode.step_s(running) == pytest.approx(law(running), rel=0.15), running  # most at a kink
    assert found.prefill_s == pytest.approx(PREFILL_S, rel=0.2)
    assert found.block == BLOCK
    # Half of a step is under way.
    assert found.request_steps * law(8) == pytest.approx(REQUEST_S + law(8) / 2, rel=0.5)


@pytest.mark.parametrize("slower", [1.0, 1.6])
def test_how_much_the_learner_slows_a_replica_is_found(slower: float) -> None:
    """It computes three quarters of the time, at times when few sequences run and when many do."""
    steps = np.array([(at, at + 1.5) for at in np.arange(0.0, 120.0, 2.0)])
    spans = serve(straight, 120.0, random.Random(4), steps=steps, slower=slower)
    found = replica_law((spans,), PLACES, steps, recompute=False)
    assert found is not None
    assert found.contention == pytest.approx(slower, abs=0.1)
    for running in (4, 16, 32):
        assert found.decode.step_s(running) == pytest.approx(straight(running), rel=0.12), running
    assert 0.6 < found.beside < 0.95  # now and then it has no request


def test_prefill_that_costs_nothing_is_not_taken_for_the_decoding(tmp_path: Path) -> None:
    """Prompts come in bursts with the groups, so that their number follows that of running sequences."""
    truth = run_of(bound=6)
    RecordedRun(truth, tmp_path / "run", seed=5).record(50)
    found = replica_law(read_run_spans(tmp_path / "run").replicas, 24, NO_STEPS, recompute=True)
    assert found is not None
    assert found.prefill_s < 1e-4
    for running, seconds in found.decode.points:
        assert seconds == pytest.approx(truth.engine.decode.step_s(running), rel=0.05)


def test_without_the_cached_tokens_prefill_is_a_part_of_the_steps() -> None:
    spans = serve(straight, 60.0, random.Random(2))
    spans.turns[:, 5] = np.nan
    found = replica_law((spans,), PLACES, NO_STEPS, recompute=False)
    assert found is not None
    assert (found.prefill_s, found.block) == (0.0, 1)
    assert straight(16) < found.decode.step_s(16) < 2 * straight(16)


def test_a_few_completions_are_no_curve() -> None:
    assert replica_law((), PLACES, NO_STEPS, recompute=True) is None
    few = serve(straight, 1.0, random.Random(3))
    assert replica_law((few,), PLACES, NO_STEPS, recompute=True) is None
    short = serve(straight, 60.0, random.Random(3))
    short.turns[:, 2:4] = np.stack(
        [short.turns[:, 1], np.ones(len(short.turns))], axis=1
    )  # they end with their first token
    assert replica_law((short,), PLACES, NO_STEPS, recompute=True) is None
