"""A run as one HTML file: the page of the dashboard, and in it the answers to what it asks.

    READS, RunSample ──answers, as JSON──┐
    static/, every file inlined ─────────┴──> one file, which opens without a server

Invariants:
- The page's code is the server's, and the answers are what the server would say; `static/recorded.js` gives them out.
- The file loads nothing: its own policy allows only what is in it. Text of the run stands in a block of JSON without `<`.
- Its size is bounded: curves and gauges have at most `STEPS` and `POINTS` points, trajectories are a sample.
- A view whose files cannot be read says so; the others are there.
"""

from __future__ import annotations

import base64
import html
import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from ..common.fsio import write_atomic
from ..errors import SlipstreamError
from ..planner.explain.findings import Explanation
from .answers import READS, Question
from .explanation import shown_explanation
from .runs import WatchedRun
from .sample import RunSample, thinned

STATIC = Path(__file__).parent / "static"
WHOLE = ("now", "staleness", "ratios", "tokens", "environments", "processes")  # answers that are taken as they are
STEPS = 2000
POINTS, LEAST_POINTS = 600, 60
GAUGE_BYTES = 1 << 20
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}' data:; style-src 'nonce-{nonce}'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)


class RecordedPage(msgspec.Struct, frozen=True):
    """What `static/recorded.js` reads."""

    time: float  # seconds since the epoch
    active: bool  # whether the run went on
    runs: list[dict[str, Any]]  # the answer of /api/runs
    answers: dict[str, msgspec.Raw]  # by the path behind /api/runs/RUN/
    refused: dict[str, str]  # why there is no answer
    trajectories: dict[str, Any]  # the list, whose rows are the sample


def export_run(run: WatchedRun, path: Path, explanation: Explanation, seconds: float) -> RecordedPage:
    """Write `path`; nothing more is sampled after about `seconds`. Raises SlipstreamError or OSError."""
    recorded = record(run, explanation, time.monotonic() + seconds)
    write_atomic(path, page(run.name, recorded).encode())
    return recorded


def record(run: WatchedRun, explanation: Explanation, until: float) -> RecordedPage:
    """The answers; nothing more is sampled after `until` on the monotonic clock. Raises SlipstreamError or OSError."""
    active, found, refused = run.is_active(), dict[str, Any](), dict[str, str]()
    sample = RunSample(run, until)
    works = {name: lambda name=name: READS[name](run, Question()) for name in WHOLE}
    works |= {
        "curves": lambda: _curves(run),
        "timeline": lambda: _timeline(run),
        "trajectories": lambda: _list(run, sample),
    }
    for name, work in works.items():
        try:
            found[name] = work()
        except (SlipstreamError, OSError) as error:
            refused[name] = str(error)
    if "now" in found:
        found["now"] |= {"active": False}
    if "processes" in found:
        found["processes"] |= {"logs": []}  # a file answers no request for one
    found["explanation"] = shown_explanation(explanation, active=False)
    listed = found.pop("trajectories", {"total": 0, "indexed": 0, "rows": [], "next": "", "outcomes": [], "envs": []})
    answers = {name: msgspec.Raw(msgspec.json.encode(answer)) for name, answer in found.items()} | sample.answers
    return RecordedPage(time.time(), active, [run.summary() | {"active": False}], answers, refused, listed)


def page(title: str, recorded: RecordedPage) -> str:
    """The file."""
    nonce = secrets.token_urlsafe(16)
    source = (STATIC / "index.html").read_text()
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(nonce=nonce)}">'
    source = source.replace("<title>Slipstream</title>", f"{policy}\n<title>{html.escape(title)} · Slipstream</title>")
    source = re.sub(r'href="/static/(\S+\.svg)"', lambda found: f'href="{_url(found[1], "image/svg+xml")}"', source)
    source = re.sub(
        r'<link rel="stylesheet" href="/static/(\S+)">', lambda found: _inline("style", found[1], nonce), source
    )
    source = re.sub(
        r'<script src="/static/(\S+)" defer></script>', lambda found: _inline("script", found[1], nonce), source
    )
    data = msgspec.json.encode(recorded).decode().replace("<", "\\u003c")
    blocks = (
        f'<script type="importmap" nonce="{nonce}">{_modules()}</script>',
        f'<script type="application/json" id="recorded">{data}</script>',
    )
    module = '<script src="/static/app.js" type="module"></script>'
    started = f'<script type="module" nonce="{nonce}">import \'static/app.js\';</script>'
    return source.replace(module, "\n".join((*blocks, started)))


def _modules() -> str:
    """Every module under its name, which replaces its address on the server."""
    files = (path for path in sorted(STATIC.rglob("*.js")) if ".iife." not in path.name)
    names = (path.relative_to(STATIC).as_posix() for path in files)
    return msgspec.json.encode(
        {"imports": {f"static/{name}": _url(name, "text/javascript") for name in names}}
    ).decode()


def _url(name: str, kind: str) -> str:
    data = (STATIC / name).read_text().replace("'/static/", "'static/").encode()
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _inline(tag: str, name: str, nonce: str) -> str:
    return f'<{tag} nonce="{nonce}">{(STATIC / name).read_text()}</{tag}>'


def _curves(run: WatchedRun) -> dict[str, Any]:
    return thinned(run.metrics.columns(run.metrics.columns([])["names"]), STEPS)


def _timeline(run: WatchedRun) -> dict[str, Any]:
    """Of the whole run."""
    (t0, t1), points = run.timeline.window(0.0, 0.0, 1)["bounds"] or (None, None), POINTS
    while True:
        found = run.timeline.window(t0, t1, points)
        size = len(msgspec.json.encode(found["series"]))
        if size <= GAUGE_BYTES or points <= LEAST_POINTS:
            return found
        points = max(LEAST_POINTS, points * GAUGE_BYTES // size)


def _list(run: WatchedRun, sample: RunSample) -> dict[str, Any]:
    sample.take()
    first = READS["trajectories"](run, Question({}, {"limit": "1"}))
    return msgspec.to_builtins(first) | {"total": len(sample.rows), "rows": sample.rows, "next": ""}
