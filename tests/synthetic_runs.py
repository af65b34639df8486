"""A run of so many steps that learns, in the files that a real run writes; without a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from slipstream.configs import dump, load
from slipstream.learner.metrics import StepMetrics
from slipstream.monitor.metrics import MetricsWriter


def synthetic(folder: Path, steps: int, overrides: tuple[str, ...] = ()) -> None:
    """A run of `steps` steps that learns, in the files that a real run writes."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = load("quickstart", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(dump(config))
    learner_idle, rollout_idle, slots = 0.45, 0.02, 70.0
    now = 1.8e9
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            work, push = rng.uniform(0.8, 1.1), rng.uniform(0.1, 0.2)
            wait = (work + push) * learner_idle / (1 - learner_idle)
            now += wait + work + push
            lags = {"0": 1000 if step > 2 else 4000, "1": 2200 * (step > 1), "2": 800 * (step > 2)}
            writer.append(
                StepMetrics(
                    step=step,
                    version=step,
                    time=now,
                    reward_mean=float(0.4 + 0.5 * (1 - np.exp(-step / 25)) + rng.normal(0, 0.04)),
                    reward_std=0.45,
                    staleness_mean=sum(int(s) * n for s, n in lags.items()) / sum(lags.values()),
                    staleness_max=max(int(s) for s, n in lags.items() if n),
                    staleness_tokens=lags,
                    tokens_trained=4000,
                    tokens_withheld=int(rng.integers(0, 200)),
                    mixed_tokens=10 * step,
                    tokens_discarded=int(rng.integers(0, 50)),
                    messages_dropped=0,
                    peers_refused=0,
                    groups=8,
                    groups_alike=3,
                    episodes=64,
                    episode_tokens_mean=62 + rng.normal(),
                    turns_mean=1.5 + step / 100,
                    environment={"tool_calls": 0.8},
                    rollout_tokens_per_s=3100 + rng.normal(0, 200),
                    overlap_tokens_per_s=2700 + rng.normal(0, 200),
                    learner_tokens_per_s=5200 + rng.normal(0, 300),
                    learner_idle=float(np.clip(learner_idle + rng.normal(0, 0.05), 0, 1)),
                    rollout_idle=float(np.clip(rollout_idle + rng.normal(0, 0.02), 0, 1)),
                    slot_s=slots * (wait + work + push),
                    idle_slot_s=rollout_idle * slots * (wait + work + push),
                    slots=slots,
                    replicas=config.rollout.engine.replicas,
                    replicas_failed=int(step == 2),
                    wait_s=wait,
                    step_s=work,
                    push_s=push,
                    pause_ms=45 + rng.normal(0, 5),
                    transfer_ms=12 + rng.normal(0, 2),
                    canary=float(abs(rng.normal(0, 2e-5))),
                    mismatch_max=None if step == 3 else float(abs(rng.normal(0, 1e-4))),
                    mismatch_tokens=1000 * (step != 3),
                    ess_by_staleness={s: 0.99 - 0.1 * int(s) for s, n in lags.items() if n},
                    kl_by_staleness={s: 0.001 * int(s) for s, n in lags.items() if n},
                    clip_fraction_by_staleness={s: 0.0 for s, n in lags.items() if n},
                    weight_by_staleness={s: n / sum(lags.values()) for s, n in lags.items() if n},
                    loss=rng.normal(0, 0.02),
                    ess=0.97 - step / 1000,
                    kl=0.002 + step / 1e5,
                    entropy=0.9 * float(np.exp(-step / 80)),
                    clip_fraction=0.01,
                    grad_norm=0.4 + abs(rng.normal(0, 0.1)),
                    lr=3e-4,
                )
            )
    evaluations = [
        {"label": "warm start", "version": 0, "reward_mean": 0.421, "reward_stderr": 0.044, "seconds": 6.2},
        {"label": "final", "version": steps, "reward_mean": 0.891, "reward_stderr": 0.027, "seconds": 5.9},
    ]
    for evaluation in evaluations:
        evaluation |= {"tasks": 128, "outcomes": {"finished": 125, "truncated": 3}}
    (folder / "evaluations.json").write_text(json.dumps(evaluations))
