"""The trace of a run, sent to a collector of OpenTelemetry (OTLP over HTTP), by its SDK, under the names that it has for generative
AI.

Invariants:
- An episode is one trace of OpenTelemetry, its root the span of the episode; so is each version of what a process did beside them.
- Identifiers follow from the run's folder and the span: sent twice, a span is the same one.
- Every span is sent and acknowledged, or an error says what the collector answered.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...common.spans import Id
from ...errors import ConfigError, SlipstreamError
from ..timeline import PHASES
from .trace import RunTrace, Slice, TrackKey, lanes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

NAMES = {"episode": "invoke_agent", "turn": "chat", "tool": "execute_tool"}
ATTRIBUTES = {
    "episode": "gen_ai.conversation.id",
    "tool": "gen_ai.tool.name",
    "prompt": "gen_ai.usage.input_tokens",
    "cached": "gen_ai.usage.cache_read.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "error": "error.type",
}
"""The names of OpenTelemetry's conventions for generative AI, which are not final, by those of our spans and their ids. Others are
`slipstream.NAME`, and spans without a name here keep theirs."""
OPERATION, MODEL, FIRST = "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.time_to_first_chunk"
PATH = "/v1/traces"  # of a collector, where the URL names none
AT_ONCE = 512  # spans of a request
TIMEOUT_S = 10.0  # of a request, its repetitions included
LOGGER = "opentelemetry"


def check_url(url: str) -> str:
    """The URL that spans are sent to. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, fits = None, False
    if parts is None or not fits:
        raise ConfigError(f"--otlp {url}: is no URL of a collector; name one like http://localhost:4318")
    return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()


def send_otlp(trace: RunTrace, run: str, model: str, url: str) -> int:
    """Send all spans to `url`; `run` tells runs apart, `model` is the name of the policy. Gives their number. Raises ConfigError
    where the SDK is missing, SlipstreamError where the collector does not take them."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise ConfigError(
            f"--otlp: cannot import {error.name}; run `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"
        ) from None
    exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
    spans = _SpanMaker(run, model).make(trace)
    try:
        with _captured_log() as said:
            for at in range(0, len(spans), AT_ONCE):
                if exporter.export(spans[at : at + AT_ONCE]) is not SpanExportResult.SUCCESS:
                    why = " ".join(dict.fromkeys([*said[-1:], *said[:1]])) or "it gives no reason"
                    raise SlipstreamError(f"--otlp {url}: the collector took {at} of {len(spans)} spans: {why}")
    finally:
        exporter.shutdown()
    return len(spans)


@contextlib.contextmanager
def _captured_log() -> Iterator[list[str]]:
    """What the SDK logs in this block, instead of printing it."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(LOGGER)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


class _SpanMaker:
    """Makes the SDK's spans: its tracer with times and identifiers of ours."""

    def __init__(self, run: str, model: str) -> None:
        from opentelemetry.sdk.trace import SpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        self._run, self._model = run, model
        made: list[ReadableSpan] = []
        next_ids = {"trace": 0, "span": 0}

        class Ids(IdGenerator):
            def generate_span_id(self) -> int:
                return next_ids["span"]

            def generate_trace_id(self) -> int:
                return next_ids["trace"]

        class Collect(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                made.append(span)

        self._ids, self._collect, self._made, self._next_ids = Ids(), Collect(), made, next_ids

    def make(self, trace: RunTrace) -> Sequence[ReadableSpan]:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        for role in sorted({key.role for key in trace.tracks}):
            resource = Resource.create({"service.name": "slipstream", "service.instance.id": role})
            limits = SpanLimits(max_span_attributes=SpanLimits.UNSET)
            provider = TracerProvider(
                ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids, span_limits=limits
            )
            provider.add_span_processor(self._collect)
            tracer = provider.get_tracer("slipstream")
            phases: list[tuple[Slice, Any]] = []
            for key in sorted(key for key in trace.tracks if key.role == role):
                made = self._track(tracer, key, trace.tracks[key], phases)
                if not key.episode and not key.replica:
                    phases = sorted(((o, s) for o, s in made if o.what in PHASES), key=lambda pair: pair[0].begin)
        return self._made

    def _track(
        self, tracer: Any, key: TrackKey, slices: Sequence[Slice], phases: Sequence[tuple[Slice, Any]]
    ) -> list[tuple[Slice, Any]]:
        """Its spans; the parent of each is the one that it lies in, else the episode or the phase of the learner."""
        made: list[tuple[Slice, Any]] = []
        root = None
        for lane in lanes(one for one in slices if not one.is_part):
            opened: list[tuple[Slice, Any]] = []
            for one in lane:
                while opened and opened[-1][0].end <= one.begin:
                    opened.pop()
                parent = opened[-1][1] if opened else root if key.episode else _phase_around(phases, one)
                span = self._span(tracer, key, one, parent)
                root = span if one.what == "episode" else root
                opened.append((one, span))
                made.append((one, span))
        return made

    def _span(self, tracer: Any, key: TrackKey, one: Slice, parent: Any) -> Any:
        from opentelemetry import context
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        trace = key.episode or f"{key.role} {one.ids.get('version')}"
        which = f"{key.role} {key.episode} {key.replica} {one.what} {one.begin} {one.end} {one.ids.get('tool')}"
        self._next_ids["trace"] = _number(f"{self._run} {trace}", 16)
        self._next_ids["span"] = _number(f"{self._run} {which}", 8)
        around = context.Context() if parent is None else set_span_in_context(parent, context.Context())
        kind = SpanKind.CLIENT if one.what == "turn" else SpanKind.INTERNAL
        span = tracer.start_span(
            _name(one, self._model), around, kind, _attributes(one, self._model), start_time=one.begin
        )
        if one.ids.get("error") or str(one.ids.get("outcome", "")).startswith("failed"):
            span.set_status(StatusCode.ERROR)
        span.end(one.end)
        return span


def _phase_around(phases: Sequence[tuple[Slice, Any]], one: Slice) -> Any:
    """The last phase that begins before `one` and lasts until then."""
    at = bisect.bisect_right(phases, one.begin, key=lambda pair: pair[0].begin) - 1
    return phases[at][1] if at >= 0 and phases[at][0].end >= one.begin else None


def _name(one: Slice, model: str) -> str:
    of = {"turn": model, "tool": one.ids.get("tool")}.get(one.what)
    return f"{NAMES.get(one.what, one.what)} {of}" if of else NAMES.get(one.what, one.what)


def _attributes(one: Slice, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in one.ids.items():
        if value is not None:
            found[ATTRIBUTES.get(key, f"slipstream.{key}")] = [value] if key == "finish" else value
    if one.what in NAMES:
        found[OPERATION] = NAMES[one.what]
    if one.what == "turn":
        found |= {MODEL: model, FIRST: _seconds(one.ids.get("queued_s")) + _seconds(one.ids.get("first_s"))}
    return found


def _seconds(value: Id) -> float:
    return float(value) if isinstance(value, float | int) else 0.0


def _number(text: str, size: int) -> int:
    """Not zero, which the SDK takes for none."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big") or 1
