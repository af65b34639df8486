"""`reward.png` and `report.html`, made from the run folder.

Invariants:
- The page is one file (`report.html.j2`): inline SVG, no script, no link to anything outside. Light and dark follow the browser.
- It is made from the files that exist; the page names what is missing.
- Everything that came from the run is escaped.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from ..common.outcomes import WARN_SHARE, failed_share, failures_text
from ..common.scores import EvaluationResult
from ..configs import RUN_CONFIG, Config, dump, load
from . import charts
from .metrics import METRICS, Row, read_metrics
from .series import (
    EVALUATIONS,
    alike_text,
    by_suite,
    column,
    elapsed,
    mean,
    name_of,
    outcomes,
    read_evaluations,
    staleness_tokens,
)
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
    "groups_alike": "groups of equal rewards in the batch",
    "groups_refilled": "groups of equal rewards refilled",
    "truncated": "share of truncated episodes",
}

CORRECTION = {
    "ess": "effective sample size",
    "kl": "KL behavior ‖ current, nats",
    "clip_fraction": "clipped share",
    "weight": "importance weight of a token",
}
"""The metrics `*_by_staleness`."""

LINES = (
    ("idle", "%", "learner_idle", "learner waits for a batch", "orange"),
    ("idle", "%", "rollout_idle", "rollout slots are empty", "blue"),
    ("generation", "tokens/s", "rollout_tokens_per_s", "generated", "blue"),
    ("generation", "tokens/s", "overlap_tokens_per_s", "generated while the learner stepped", "green"),
    ("learning", "tokens/s", "learner_tokens_per_s", "learner, context included", "orange"),
    ("concurrency", "episodes", "slots", "episodes that the workers would play at once", "blue"),
    ("staleness_by_step", "versions", "staleness_max", "maximum", "orange"),
    ("staleness_by_step", "versions", "staleness_mean", "mean", "blue"),
    ("pause", "ms", "pause_ms", "longest pause of a replica", "orange"),
    ("pause", "ms", "transfer_ms", "transfer", "blue"),
    ("push", "seconds", "push_s", "whole push", "green"),
    ("fleet", "replicas", "replicas", "took the push", "blue"),
    ("fleet", "replicas", "replicas_failed", "did not", "orange"),
)
"""Chart, unit, and of each of its lines the metric, label and color."""


class ReportPaths(msgspec.Struct, frozen=True):
    html: Path
    png: Path
    explanation: tuple[str, ...] = ()  # the lines of `slipstream explain`, which the page has, too


def write_report(folder: Path, ledger: Mapping[str, Any] | None = None, explanation: Sequence[str] = ()) -> ReportPaths:
    """Make both files in the run folder from its `config.yaml`, `metrics.jsonl` and `evaluations.json`, each of which may be
    missing, from the ledger given: generated, in_flight, ready, trained (tokens), withheld, discarded (reason -> tokens),
    closes, and from the lines of `slipstream explain`. Raises ConfigError or StoreError where a file is not valid."""
    config_path = folder / RUN_CONFIG
    config = load(str(config_path)) if config_path.is_file() else None
    rows, evaluations = read_metrics(folder / METRICS), read_evaluations(folder / EVALUATIONS)
    report = ReportPaths(folder / "report.html", folder / "reward.png", tuple(explanation))
    charts.save_png(charts.reward(rows, evaluations), report.png)
    values = {
        "name": folder.resolve().name,
        "charts": _charts(rows, evaluations, config),
        "config": config,
        "yaml": dump(config) if config else "",
        "explanation": list(explanation),
        **_training(rows),
        **_evaluations(evaluations),
        **_ledger(ledger, rows),
    }
    report.html.write_text(_template().render(values), encoding="utf-8")
    return report


@functools.cache
def _template() -> jinja2.Template:
    loader, undefined = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.StrictUndefined
    environment = jinja2.Environment(
        loader=loader, undefined=undefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"count": count, "duration": duration, "reward": reward, "share": share, "name_of": name_of}
    environment.globals["missing_value"] = MISSING
    return environment.get_template("report.html.j2")


def _charts(rows: Sequence[Row], evaluations: Sequence[EvaluationResult], config: Config | None) -> dict[str, Markup]:
    """Every chart as SVG, empty where it would show nothing."""
    figures = {
        "reward": charts.reward(rows, evaluations),
        "step_time": charts.step_time(rows),
        "staleness": charts.staleness(rows, config.buffer.max_staleness if config else None),
        "correction": charts.correction(rows, CORRECTION),
        "health": charts.small_multiples(rows, HEALTH),
    }
    for (name, unit), series in itertools.groupby(LINES, operator.itemgetter(0, 1)):
        figures[name] = charts.lines(rows, [line[2:] for line in series], unit)
    if not column(rows, "replicas_failed").any() and len(set(column(rows, "replicas"))) == 1:
        figures["fleet"] = None  # the same servers in every step
    return {name: Markup("" if figure is None else charts.to_svg(figure)) for name, figure in figures.items()}


def _training(rows: Sequence[Row]) -> dict[str, Any]:
    tokens, canary, ended = staleness_tokens(rows), column(rows, "canary"), outcomes(rows)
    total = sum(tokens.values())
    average = sum(staleness * number for staleness, number in tokens.items()) / max(total, 1)
    largest = max((staleness for staleness, number in tokens.items() if number), default=0)
    rollout, overlap = mean(column(rows, "rollout_tokens_per_s")), mean(column(rows, "overlap_tokens_per_s"))
    speed = {"rollout": rollout, "learner": mean(column(rows, "learner_tokens_per_s"))}
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "seconds": float(elapsed(rows)[-1]) if rows else 0.0,
        "speed": speed | {"overlap": overlap / rollout if rollout and overlap is not None else None},
        "canary": float(canary.max()) if mean(canary) is not None else None,
        "alike": alike_text(rows),
        "played": ended,
        "failures": failures_text(ended),
        "many_failed": failed_share(ended) > WARN_SHARE,
        "staleness": {"mean": average, "max": largest} if total else None,
    }


def _evaluations(evaluations: Sequence[EvaluationResult]) -> dict[str, Any]:
    """The evaluations, and of each suite the first, the last and the change between them with its standard error."""
    progress = []
    for results in by_suite(evaluations).values():
        first, last = results[0], results[-1]
        error = (first.reward_stderr**2 + last.reward_stderr**2) ** 0.5
        change = (last.reward_mean - first.reward_mean, error)
        progress.append({"first": first, "last": last, "change": change, "single": len(results) == 1})
    outcomes = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.outcomes))
    sampled = [evaluation for evaluation in evaluations if evaluation.samples > 1]
    ks = sorted({k for evaluation in sampled for k in evaluation.pass_at}, key=int)
    return {"evaluations": evaluations, "progress": progress, "outcomes": outcomes, "sampled": sampled, "ks": ks}


def _ledger(ledger: Mapping[str, Any] | None, rows: Sequence[Row]) -> dict[str, Any]:
    """The accounts, the parts of the bar, and by how many tokens they differ from `generated`."""
    if ledger is None:
        return {"ledger": None, "tokens": sum(row.get("tokens_trained") or 0 for row in rows)}
    trained, rest = {"trained": ledger["trained"]}, {"ready": ledger["ready"], "in flight": ledger["in_flight"]}
    discarded = {f"discarded: {reason}": tokens for reason, tokens in ledger["discarded"].items()}
    withheld = {f"withheld: {reason}": tokens for reason, tokens in ledger["withheld"].items()}
    bar = trained | {"withheld": sum(withheld.values())} | rest | discarded
    colors = {"trained": "green", "withheld": "orange", "ready": "blue", "in flight": "muted"}
    parts = [{"name": name, "tokens": n, "color": colors.get(name, "red")} for name, n in bar.items()]
    return {
        "ledger": ledger,
        "tokens": ledger["generated"],
        "parts": parts,
        "accounts": trained | withheld | rest | discarded,
        "difference": sum(bar.values()) - ledger["generated"],
    }
