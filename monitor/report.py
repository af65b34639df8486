"""`reward.png` and `report.html`: what a person looks at after a run, made from the run folder.

Invariants:
- The page is one file: charts are inline SVG, no script, no link to anything outside. Light and dark follow the reader.
- It is made from whatever is there; what is missing is named in its place.
- Everything that came from the run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec
from matplotlib.figure import Figure

from ..configs import Config, dump, load
from . import charts
from .metrics import Row, read_metrics
from .page import card, grid, ledger_bar, page, section, table, tile
from .summary import Evaluation, Ledger, Score, balance, column, elapsed, mean, read_evaluations, staleness_tokens
from .text import MISSING, count, duration, reward, share

HEALTH = {
    "mismatch_max": "mismatch max, nats",
    "canary": "canary after push, nats",
    "ess": "effective sample size",
    "kl": "KL behaviour ‖ current, nats",
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


class Report(msgspec.Struct, frozen=True):
    """Where the two files lie."""

    html: Path
    png: Path


class _Material(msgspec.Struct, frozen=True):
    """Everything that there is to show."""

    name: str
    rows: Sequence[Row]
    evaluations: Sequence[Evaluation]
    config: Config | None
    ledger: Ledger | None


def write_report(folder: Path, ledger: Mapping[str, Any] | None = None) -> Report:
    """Make both files in the run folder from `config.yaml`, `metrics.jsonl`, `evaluations.json` and the ledger given.

    Args:
        folder: the run folder; each of the three files may be missing.
        ledger: generated, in_flight, ready, trained (tokens), withheld, discarded (reason -> tokens), closes.

    Raises:
        ConfigError, StoreError: a file is there and not valid.
    """
    config_path = folder / "config.yaml"
    run = _Material(
        name=folder.resolve().name,
        rows=read_metrics(folder / "metrics.jsonl"),
        evaluations=read_evaluations(folder / "evaluations.json"),
        config=load(str(config_path)) if config_path.is_file() else None,
        ledger=None if ledger is None else msgspec.convert(ledger, Ledger),
    )
    report = Report(html=folder / "report.html", png=folder / "reward.png")
    charts.save_png(charts.reward(run.rows, run.evaluations), report.png)
    report.html.write_text(_html(run), encoding="utf-8")
    return report


def _html(run: _Material) -> str:
    body = [
        _headline(run),
        section("Reward", card(charts.to_svg(charts.reward(run.rows, run.evaluations))), _evaluations(run.evaluations)),
        _waiting(run),
        _staleness(run),
        _push(run),
        section(
            "Learning health", card(_chart(charts.small_multiples(run.rows, HEALTH), "No step has been recorded."))
        ),
        _ledger(run.ledger),
        _config(run.config),
    ]
    return page(f"Slipstream: {run.name}", "".join(body))


def _headline(run: _Material) -> str:
    rows, evaluations = run.rows, run.evaluations
    wanted = f" of {run.config.learner.steps}" if run.config else ""
    tokens = run.ledger.generated if run.ledger else sum(row.get("tokens_trained") or 0 for row in rows)
    tiles = [
        _outcome(evaluations),
        tile("steps", f"{rows[-1]['step'] if rows else 0}{wanted}"),
        tile("wall time", duration(float(elapsed(rows)[-1])) if rows else MISSING),
        tile("tokens generated" if run.ledger else "tokens trained", count(tokens)),
        tile("staleness of trained tokens", _staleness_range(run)),
    ]
    notes = ""
    if not rows:
        notes = '<p class="warn">This run stopped before its first step was finished: there is no training to show.</p>'
    elif run.config and rows[-1]["step"] < run.config.learner.steps:
        notes = f'<p class="warn">This run stopped at step {rows[-1]["step"]} of {run.config.learner.steps}.</p>'
    return f'<header><h1>{escape(run.name)}</h1>{notes}<div class="tiles">{"".join(tiles)}</div></header>'


def _outcome(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return tile("reward on fresh tasks", MISSING, "no evaluation was recorded")
    first, last = evaluations[0], evaluations[-1]
    now = f"{reward(last.reward_mean)} <small>± {last.reward_stderr:.3f}</small>"
    tasks = f"{last.tasks} fresh tasks"
    if len(evaluations) == 1:
        return tile(f"reward, {escape(first.label)}", now, f"{tasks}; no later evaluation was recorded", wide=True)
    before = f"{reward(first.reward_mean)} <small>± {first.reward_stderr:.3f}</small>"
    error = (first.reward_stderr**2 + last.reward_stderr**2) ** 0.5
    change = f"{last.reward_mean - first.reward_mean:+.3f} ± {error:.3f} on {tasks} (± is one standard error)"
    return tile(f"reward, {escape(first.label)} → {escape(last.label)}", f"{before} → {now}", change, wide=True)


def _staleness_range(run: _Material) -> str:
    tokens = staleness_tokens(run.rows)
    total = sum(tokens.values())
    if not total:
        return MISSING
    average = sum(staleness * number for staleness, number in tokens.items()) / total
    bound = f", bound {run.config.buffer.max_staleness}" if run.config else ""
    worst = max(staleness for staleness, number in tokens.items() if number)
    return f"{average:.2f} <small>mean, max {worst}{bound}</small>"


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    if not evaluations:
        return '<p class="missing">No evaluation was recorded.</p>'
    kinds = list(dict.fromkeys(kind for evaluation in evaluations for kind in evaluation.outcomes))

    def cells(score: Evaluation | Score) -> list[str]:
        earned = score.reward_mean is not None and score.reward_stderr is not None
        shown = f"{score.reward_mean:.3f} ± {score.reward_stderr:.3f}" if earned else MISSING
        return [str(score.tasks), shown, *(str(score.outcomes.get(kind, 0)) for kind in kinds)]

    lines: list[list[str]] = []
    for e in evaluations:
        lines.append([escape(e.label), str(e.version), *cells(e), duration(e.seconds)])
        lines += [[f"– {escape(name)}", "", *cells(score), ""] for name, score in e.environments.items()]
    return table(["evaluation", "version", "tasks", "reward", *map(escape, kinds), "took"], lines)


def _waiting(run: _Material) -> str:
    sentence = ""
    if run.config and (found := balance(run.rows, run.config)):
        sentence = f'<p class="lead">{escape(found.sentence)}</p>'
    missing = "No step has been recorded."
    idle = (
        ("learner_idle", "learner waits for a batch", "orange"),
        ("rollout_idle", "rollout slots stand empty", "blue"),
    )
    overlap = (
        ("rollout_tokens_per_s", "generated", "blue"),
        ("overlap_tokens_per_s", "generated while the learner stepped", "green"),
    )
    learner = (("learner_tokens_per_s", "learner, context included", "orange"),)
    slots = (("slots", "episodes that the workers would play at once", "blue"),)
    speeds = [mean(column(run.rows, name)) for name, _, _ in (*overlap, *learner)]
    caption = ""
    if speeds[0] and speeds[1] is not None:
        caption = f"On average {count(speeds[0])} tokens/s; while the learner stepped, {share(speeds[1] / speeds[0])} of that."
    return section(
        "Who waited for whom",
        sentence,
        grid(
            card(_chart(charts.lines(run.rows, idle, "%"), missing), "Idle, share of the time"),
            card(_chart(charts.step_time(run.rows), missing), "Where the time of a step goes"),
            card(
                _chart(charts.lines(run.rows, overlap, "tokens/s"), missing), "Generation", caption if run.rows else ""
            ),
            card(
                _chart(charts.lines(run.rows, learner, "tokens/s"), missing),
                "Learning",
                f"On average {count(speeds[2])} tokens/s of stepping." if run.rows else "",
            ),
            card(
                _chart(charts.lines(run.rows, slots, "episodes"), missing),
                "Concurrency",
                "It grows until requests queue at the servers or their caches fill." if run.rows else "",
            ),
        ),
    )


def _staleness(run: _Material) -> str:
    bound = run.config.buffer.max_staleness if run.config else None
    histogram = _chart(charts.staleness(run.rows, bound), "No token has been trained on.")
    series = (("staleness_max", "maximum", "orange"), ("staleness_mean", "mean", "blue"))
    over = _chart(charts.lines(run.rows, series, "versions", trend=False), "No step has been recorded.")
    return section(
        "Staleness", grid(card(histogram, "Trained tokens by staleness"), card(over, "Staleness over the run"))
    )


def _push(run: _Material) -> str:
    pause = (("pause_ms", "longest pause of a replica", "orange"), ("transfer_ms", "transfer", "blue"))
    total = (("push_s", "push, all told", "green"),)
    fleet = (("replicas", "took the push", "blue"), ("replicas_failed", "did not", "orange"))
    canary = column(run.rows, "canary")
    worst = f"Largest canary difference: {count(float(canary.max()))} nats." if mean(canary) is not None else ""
    missing = "No push has been recorded."
    return section(
        "Weight pushes",
        grid(
            card(_chart(charts.lines(run.rows, pause, "ms", trend=False), missing), "Pause and transfer", worst),
            card(_chart(charts.lines(run.rows, total, "seconds"), missing), "Whole push"),
            card(
                _chart(charts.lines(run.rows, fleet, "replicas", trend=False), missing),
                "Fleet",
                "Servers that join, leave, die or are late." if run.rows else "",
            ),
        ),
    )


def _ledger(ledger: Ledger | None) -> str:
    if ledger is None:
        return section("Token ledger", '<p class="missing">The ledger was not available.</p>')
    parts = {
        "trained": ledger.trained,
        "withheld": sum(ledger.withheld.values()),
        "ready": ledger.ready,
        "in flight": ledger.in_flight,
    }
    parts |= {f"discarded: {reason}": tokens for reason, tokens in ledger.discarded.items()}
    whole = max(1, ledger.generated)
    reasons = {f"withheld: {reason}": tokens for reason, tokens in ledger.withheld.items()}
    told = {"trained": ledger.trained, **reasons, **{name: n for name, n in parts.items() if name != "withheld"}}
    lines = [[escape(name), f"{tokens:,}", share(tokens / whole)] for name, tokens in told.items()]
    lines.append(["<b>generated</b>", f"<b>{ledger.generated:,}</b>", "<b>100 %</b>"])
    difference = sum(parts.values()) - ledger.generated
    verdict = '<p class="good">The ledger closes: every generated token is in exactly one place.</p>'
    if not ledger.closes or difference:
        verdict = (
            f'<p class="warn">The ledger does not close: its parts differ from generated by {difference:+,} tokens.</p>'
        )
    return section("Token ledger", verdict, ledger_bar(parts), table(["tokens", "number", "share"], lines))


def _config(config: Config | None) -> str:
    if config is None:
        return section("Config", '<p class="missing">config.yaml is not in the run folder.</p>')
    return section("Config", f"<details><summary>config.yaml</summary><pre>{escape(dump(config))}</pre></details>")


def _chart(figure: Figure | None, missing: str) -> str:
    return f'<p class="missing">{escape(missing)}</p>' if figure is None else charts.to_svg(figure)
