"""`reward.png` and `report.html`, made from the run folder.

Invariants:
- The page is one file (`report.html.j2`): inline SVG, no script, no link to anything outside. Light and dark follow the browser.
- It is made from the files that exist; the page names what is missing.
- Everything that came from the run is escaped.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from ..configs import Config, dump, load
from . import charts
from .metrics import Row, read_metrics
from .series import EvaluationRecord, LedgerTotals, balance, column, elapsed, mean, read_evaluations, staleness_tokens
from .text import MISSING, count, duration, reward, share

HEALTH = {
    "mismatch_max": "mismatch max, nats",
    "canary": "canary after push, nats",
    "ess": "effective sample size",
    "kl": "KL behavior ‖ current, nats",
    "entropy": "entropy, nats",
    "clip_fraction": "clipped tokens",
    "grad_norm": "gradient norm",
    "loss": "loss",
    "episode_tokens_mean": "tokens per episode",
    "turns_mean": "turns per episode",
    "tokens_withheld": "tokens withheld",
    "mixed_tokens": "tokens of mixed policies",
    "tokens_discarded": "tokens discarded",
    "groups_refilled": "groups of equal rewards refilled",
}

Series = tuple[tuple[str, str, str], ...]
"""(metric, label, color) of each line of a chart."""

IDLE: Series = (
    ("learner_idle", "learner waits for a batch", "orange"),
    ("rollout_idle", "rollout slots are empty", "blue"),
)
GENERATION: Series = (
    ("rollout_tokens_per_s", "generated", "blue"),
    ("overlap_tokens_per_s", "generated while the learner stepped", "green"),
)
LEARNING: Series = (("learner_tokens_per_s", "learner, context included", "orange"),)
CONCURRENCY: Series = (("slots", "episodes that the workers would play at once", "blue"),)
STALENESS: Series = (("staleness_max", "maximum", "orange"), ("staleness_mean", "mean", "blue"))
PAUSE: Series = (("pause_ms", "longest pause of a replica", "orange"), ("transfer_ms", "transfer", "blue"))
PUSH: Series = (("push_s", "whole push", "green"),)
FLEET: Series = (("replicas", "took the push", "blue"), ("replicas_failed", "did not", "orange"))


class ReportPaths(msgspec.Struct, frozen=True):
    """The two files."""

    html: Path
    png: Path


class StalenessSummary(msgspec.Struct, frozen=True):
    """Staleness of all trained tokens, in versions."""

    mean: float
    max: int


class LedgerPart(msgspec.Struct, frozen=True):
    """One colored part of the ledger's bar."""

    name: str
    tokens: int
    color: str


def write_report(folder: Path, ledger: Mapping[str, Any] | None = None) -> ReportPaths:
    """Make both files in the run folder from `config.yaml`, `metrics.jsonl`, `evaluations.json` and the ledger given.

    Args:
        folder: the run folder; each of the three files may be missing.
        ledger: generated, in_flight, ready, trained (tokens), withheld, discarded (reason -> tokens), closes.

    Raises:
        ConfigError, StoreError: a file is not valid.
    """
    config_path = folder / "config.yaml"
    config = load(str(config_path)) if config_path.is_file() else None
    rows, evaluations = read_metrics(folder / "metrics.jsonl"), read_evaluations(folder / "evaluations.json")
    totals = None if ledger is None else msgspec.convert(ledger, LedgerTotals)
    report = ReportPaths(html=folder / "report.html", png=folder / "reward.png")
    charts.save_png(charts.reward(rows, evaluations), report.png)
    values = {
        "name": folder.resolve().name,
        "charts": _charts(rows, evaluations, config),
        "config": config,
        "yaml": dump(config) if config else "",
        **_training(rows, config),
        **_evaluations(evaluations),
        **_ledger(totals, rows),
    }
    report.html.write_text(_template().render(values), encoding="utf-8")
    return report


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"count": count, "duration": duration, "reward": reward, "share": share}
    environment.globals["missing_value"] = MISSING
    return environment.get_template("report.html.j2")


def _charts(rows: Sequence[Row], evaluations: Sequence[EvaluationRecord], config: Config | None) -> dict[str, Markup]:
    """Every chart as SVG, empty where it has no data."""
    bound = config.buffer.max_staleness if config else None
    figures = {
        "reward": charts.reward(rows, evaluations),
        "idle": charts.lines(rows, IDLE, "%"),
        "step_time": charts.step_time(rows),
        "generation": charts.lines(rows, GENERATION, "tokens/s"),
        "learning": charts.lines(rows, LEARNING, "tokens/s"),
        "concurrency": charts.lines(rows, CONCURRENCY, "episodes"),
        "staleness": charts.staleness(rows, bound),
        "staleness_by_step": charts.lines(rows, STALENESS, "versions", trend=False),
        "pause": charts.lines(rows, PAUSE, "ms", trend=False),
        "push": charts.lines(rows, PUSH, "seconds"),
        "fleet": charts.lines(rows, FLEET, "replicas", trend=False),
        "health": charts.small_multiples(rows, HEALTH),
    }
    return {name: Markup("" if figure is None else charts.to_svg(figure)) for name, figure in figures.items()}


def _training(rows: Sequence[Row], config: Config | None) -> dict[str, Any]:
    """What the rows of metrics amount to."""
    tokens, found = staleness_tokens(rows), balance(rows, config) if config else None
    total, canary = sum(tokens.values()), column(rows, "canary")
    rollout, overlap = mean(column(rows, "rollout_tokens_per_s")), mean(column(rows, "overlap_tokens_per_s"))
    speed = {"rollout": rollout, "learner": mean(column(rows, "learner_tokens_per_s"))}
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "seconds": float(elapsed(rows)[-1]) if rows else 0.0,
        "speed": speed | {"overlap": overlap / rollout if rollout and overlap is not None else None},
        "canary": float(canary.max()) if mean(canary) is not None else None,
        "advice": found.sentence if found else "",
        "staleness": StalenessSummary(
            sum(staleness * number for staleness, number in tokens.items()) / total,
            max(staleness for staleness, number in tokens.items() if number),
        )
        if total
        else None,
    }


def _evaluations(evaluations: Sequence[EvaluationRecord]) -> dict[str, Any]:
    """The evaluations, the first and the last, and the change between them with its standard error."""
    first, last = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
    change = (0.0, 0.0)
    if first and last:
        error = (first.reward_stderr**2 + last.reward_stderr**2) ** 0.5
        change = (last.reward_mean - first.reward_mean, error)
    outcomes = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.outcomes))
    return {"evaluations": evaluations, "first": first, "last": last, "change": change, "outcomes": outcomes}


def _ledger(ledger: LedgerTotals | None, rows: Sequence[Row]) -> dict[str, Any]:
    """The accounts, the parts of the bar, and by how many tokens they differ from `generated`."""
    if ledger is None:
        return {"ledger": None, "tokens": sum(row.get("tokens_trained") or 0 for row in rows)}
    rest = {"ready": ledger.ready, "in flight": ledger.in_flight}
    discarded = {f"discarded: {reason}": tokens for reason, tokens in ledger.discarded.items()}
    withheld = {f"withheld: {reason}": tokens for reason, tokens in ledger.withheld.items()}
    bar = {"trained": ledger.trained, "withheld": sum(ledger.withheld.values())} | rest
    colors = zip(bar.items(), ("green", "orange", "blue", "muted"), strict=True)
    parts = [LedgerPart(name, tokens, color) for (name, tokens), color in colors]
    parts += [LedgerPart(name, tokens, "red") for name, tokens in discarded.items()]
    return {
        "ledger": ledger,
        "tokens": ledger.generated,
        "parts": parts,
        "accounts": {"trained": ledger.trained} | withheld | rest | discarded,
        "difference": sum(part.tokens for part in parts) - ledger.generated,
    }
