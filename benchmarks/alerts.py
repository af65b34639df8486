"""`slipstream bench alerts`: healthy runs of the quickstart, in which no critical alert may fire."""

from __future__ import annotations

from pathlib import Path

from ..monitor.alerts import ALERTS, Alert, read_alerts
from .commands import Notify, make_empty, slipstream, warm_model
from .result import Result, Row

PRESET = "quickstart"
SEEDS, STEPS = 20, 60


async def healthy(out: Path, seeds: int, steps: int, notify: Notify) -> Result:
    """Train `PRESET` with the seeds 0 to `seeds` - 1, from one model, in `out`, which must be empty or new. Raises ConfigError."""
    make_empty(out)
    model = await warm_model(out, PRESET, (), (), notify)
    rows = list[Row]()
    for seed in range(seeds):
        run = out / f"seed-{seed}"
        notify(f"seed {seed}")
        fixed = (f"model.path={model}", f"run.dir={run}", f"learner.steps={steps}", "evaluation.tasks=0")
        await slipstream("train", PRESET, f"seed={seed}", *fixed, log=out / f"seed-{seed}.log")
        rows.append(row_of(seed, read_alerts(run / ALERTS), steps))
    return Result("steps without a critical alert, over all", "silent", "steps", tuple(rows))


def row_of(seed: int, alerts: list[Alert], steps: int) -> Row:
    """The note has every rule that fired."""
    fired = [alert for alert in alerts if alert.active]
    silent = min((alert.step for alert in fired if alert.severity == "critical"), default=steps)
    note = ", ".join(dict.fromkeys(f"{alert.severity} {alert.rule}" for alert in fired)) or "no alert"
    return Row(f"seed {seed}", silent, steps, "steps", note)
