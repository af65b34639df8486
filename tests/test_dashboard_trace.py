"""`slipstream trace`: every span once, nested as it was, in Perfetto's format and at a collector of OpenTelemetry."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.common.spans import Span
from slipstream.configs import load
from slipstream.dashboard.formats.perfetto import field, varint
from slipstream.dashboard.formats.trace import Slice, lanes
from slipstream.launch.cli.main import main
from slipstream.monitor.timeline import read_spans
from slipstream.tests import trace_processor
from slipstream.tests.dashboard_runs import BEGAN, MEMBERS, DashboardRun
from slipstream.tests.perfetto import read_perfetto
from slipstream.tests.runs import WAIT_S

GROUPS = 3
PHASES = (("take", 0.0, 0.1), ("train", 0.1, 0.5), ("commit", 0.5, 0.6), ("publish", 0.6, 0.9))


def spans_of(made: list[Any]) -> dict[str, list[Span]]:
    """What processes record of the episodes of a `DashboardRun`, two of whose turns overlap, and of its steps."""
    worker, learner = list[Span](), list[Span]()
    for one in made:
        ids = {"episode": one.episode}
        for turn in one.turns:
            took = turn.queued_s + turn.first_s + turn.decode_s
            given = {
                "replica": "engine-0",
                "prompt": turn.start,
                "cached": turn.cached,
                "tokens": turn.end - turn.start,
            }
            given |= {"version": 0, "queued_s": turn.queued_s, "first_s": turn.first_s, "finish": "stop"}
            worker.append(Span(turn.asked, turn.asked + took, "turn", ids | given))
        began = one.started
        worker.append(Span(began + 0.25, began + 0.45, "tool", ids | {"tool": "calculator", "error": "invalid"}))
        worker.append(Span(began + 0.6, began + 0.9, "turn", ids | {"queued_s": 0.0, "first_s": 0.05, "cached": None}))
        worker.append(
            Span(began, began + 2.0, "episode", ids | {"env": 0, "outcome": "finished", "reward": one.reward})
        )
    for version in range(GROUPS):
        at = BEGAN + 1.5 + version
        learner += [Span(at + t0, at + t1, what, {"version": version}) for what, t0, t1 in PHASES]
        push = {"version": version + 1}
        learner += [
            Span(at + 0.65, at + 0.7, "stage", push | {"replicas": "engine-0, engine-1"}),
            Span(at + 0.7, at + 0.8, "pause", push | {"replica": "engine-0"}),
            Span(at + 0.75, at + 0.85, "pause", push | {"replica": "engine-1"}),
        ]
    return {"worker-0": worker, "learner-0": learner}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = DashboardRun(tmp_path_factory.mktemp("trace") / "run")
    spans = spans_of(made.record(GROUPS + 1))
    made.close()
    for folder in ("spans", "series"):
        (made.folder / folder).mkdir()
    for role, found in spans.items():
        lines = [msgspec.json.encode(span) for span in found]
        (made.folder / "spans" / f"{role}.17.jsonl").write_bytes(b"\n".join([*lines, b'{"t0": 1.8e9, "t1"']))  # killed
    series = [
        {"t": BEGAN + t, "slots": 4 + t, "tokens": 100 * t, "replicas": {"engine-0": {"kv": 0.5}}} for t in range(4)
    ]
    (made.folder / "series" / "worker-0.17.jsonl").write_bytes(
        b"".join(msgspec.json.encode(line) + b"\n" for line in series)
    )
    return made.folder


def test_perfetto_has_every_span_as_a_slice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run)]) == 0
    spans = list(read_spans(run))
    out = capsys.readouterr().out
    assert out.startswith(f"{len(spans)} spans as ")
    assert f"3 counters, are in {run}/trace.perfetto-trace" in out
    trace = read_perfetto(run / "trace.perfetto-trace")
    slices = [one for one in trace.slices if one.category == "span"]
    times = Counter((round(span.t0 * 1e9), round(span.t1 * 1e9), role) for role, span in spans)
    assert Counter((one.begin, one.end, one.track.partition("/")[0]) for one in slices) == times
    one = [s for s in trace.slices if "episode 1.0.2" in s.track]
    assert {s.track for s in one if s.category == "span"} == {
        "worker-0/group 1/episode 1.0.2",
        "worker-0/group 1/episode 1.0.2 (2)",
    }
    parts = Counter((s.name, s.above) for s in one if s.category == "part")
    assert parts["queue", ("episode", "turn")] == 2
    assert parts["decode", ("episode", "turn")] == 2
    (tool,) = (s for s in one if s.name == "tool calculator")
    assert (tool.above, tool.notes["error"], tool.end - tool.begin) == (
        ("episode",),
        "invalid",
        pytest.approx(2e8, abs=300),
    )
    (episode,) = (s for s in one if s.name == "episode")
    assert episode.notes | {"reward": 0.0, "env": 0, "outcome": "finished"} == episode.notes
    assert {s.track for s in slices if s.name == "pause"} == {"learner-0/engine-0", "learner-0/engine-1"}
    assert {s.above for s in slices if s.name == "stage"} == {("publish",)}
    # An episode's flow ends where the learner trains on it; those of the last group are not trained on yet.
    flows = {s.track: s.flows for s in slices if s.name == "episode"}
    for train in (s for s in slices if s.name == "train"):
        of = {flow for track, found in flows.items() if f"/group {train.notes['version']}/" in track for flow in found}
        assert len(of) == MEMBERS
        assert train.ended == of
    assert not any(found for track, found in flows.items() if f"group {GROUPS}/" in track)
    assert [v for _, v in trace.counters["worker-0/slots"]] == [4, 5, 6, 7]
    assert [v for _, v in trace.counters["worker-0/tokens per second"]] == [100, 100, 100]
    assert [v for _, v in trace.counters["worker-0/replicas.engine-0.kv"]] == [0.5] * 4


@pytest.mark.full  # npm installs the program
def test_perfettos_own_program_finds_every_span(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace"
    assert main(["trace", str(run), "-o", str(out)]) == 0
    found = trace_processor.rows(
        out,
        "select slice.ts, slice.dur, process.name, slice.name from slice join process_track on slice.track_id = process_track.id "
        "join process using (upid) where slice.category = 'span'",
    )
    spans = list(read_spans(run))
    assert len(found) == len(spans)
    assert Counter((began, began + took, role) for began, took, role, _ in found) == Counter(
        (round(span.t0 * 1e9), round(span.t1 * 1e9), role) for role, span in spans
    )
    assert {name for *_, name in found} == {span.what for _, span in spans} - {"tool"} | {"tool calculator"}
    assert trace_processor.rows(out, "select name, value from stats where severity <> 'info' and value > 0") == []
    values = (
        "select value from counter join counter_track on track_id = counter_track.id where name = 'slots' order by ts"
    )
    assert trace_processor.rows(out, values) == [(4.0,), (5.0,), (6.0,), (7.0,)]


def test_steps_have_their_time_and_their_episodes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "two"
    assert main(["trace", str(run), "--steps", "2", "-o", str(out)]) == 0
    slices = [one for one in read_perfetto(out).slices if one.category == "span"]
    assert [one.notes["version"] for one in slices if one.name == "train"] == [1]
    whole = {one.track for one in slices if one.name == "episode"}
    assert {f"worker-0/group 1/episode 1.0.{member}" for member in range(MEMBERS)} <= whole
    assert sum(one.name == "turn" and "episode 1.0.0" in one.track for one in slices) == 3
    assert main(["trace", str(run), "-o", str(out)]) == 2
    assert capsys.readouterr().err == f"slipstream: {out} exists; remove it, or name another file with -o\n"
    for steps, line in (("7-9", "--steps 7-9: {} has not trained that; it has trained steps 1 to 3"),):
        assert main(["trace", str(run), "--steps", steps]) == 2
        assert capsys.readouterr().err == f"slipstream: {line.format(run)}\n"


def test_a_run_without_spans_is_one_line_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("extends: quickstart\n")
    assert main(["trace", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"slipstream: {tmp_path} has no spans: none were recorded, or they are gone\n"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_lanes_hold_every_slice_once_and_nest(edges: list[tuple[int, int]]) -> None:
    slices = [Slice(min(pair), max(pair), str(at), {}) for at, pair in enumerate(edges)]
    found = list(lanes(slices))
    assert sorted(one.what for lane in found for one in lane) == sorted(one.what for one in slices)
    for lane in found:
        for at, one in enumerate(lane):
            for other in lane[:at]:
                apart = other.end <= one.begin
                assert other.begin <= one.begin
                assert apart or other.end >= one.end


def test_the_wire_format_is_protobufs() -> None:
    """The examples of its documentation."""
    assert varint(150) == b"\x96\x01"
    assert varint(-2) == b"\xfe" + 8 * b"\xff" + b"\x01"
    assert field(1, 150) == b"\x08\x96\x01"
    assert field(2, "testing") == b"\x12\x07testing"
    assert field(3, field(1, 150)) == b"\x1a\x03\x08\x96\x01"
    assert field(1, 1.0) == b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f"


# --- OpenTelemetry ------------------------------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Takes what is sent to it, or answers with another status."""

    daemon_threads = True

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Any]:
        wire = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for body in self.bodies:
            request = wire.ExportTraceServiceRequest.FromString(body)
            for one in request.resource_spans:
                (role,) = (a.value.string_value for a in one.resource.attributes if a.key == "service.instance.id")
                found += [(role, span) for scope in one.scope_spans for span in scope.spans]
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status == 200:
            self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(WAIT_S)


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_collector_gets_every_span_under_the_names_of_opentelemetry(
    run: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run), "--otlp", collector.url]) == 0
    spans = list(read_spans(run))
    assert capsys.readouterr().out == f"{len(spans)} spans were sent to {collector.url}/v1/traces\n"
    assert set(collector.paths) == {"/v1/traces"}
    sent = collector.spans()
    wanted = Counter((role, round(span.t0 * 1e9), round(span.t1 * 1e9)) for role, span in spans)
    assert Counter((role, s.start_time_unix_nano, s.end_time_unix_nano) for role, s in sent) == wanted
    by_id = {span.span_id: span for _, span in sent}
    assert len(by_id) == len(spans)
    above: Counter[tuple[str, str]] = Counter()
    for _, span in sent:
        parent = by_id[span.parent_span_id] if span.parent_span_id else None
        above[span.name, parent.name if parent else ""] += 1
        assert parent is None or parent.trace_id == span.trace_id
    episodes = MEMBERS * (GROUPS + 1)
    model = Path(load(str(run / "config.yaml")).model.path).name
    assert above == {
        ("invoke_agent", ""): episodes,
        (f"chat {model}", "invoke_agent"): 3 * episodes,
        ("execute_tool calculator", "invoke_agent"): episodes,
        **{(what, ""): GROUPS for what, _, _ in PHASES},
        ("stage", "publish"): GROUPS,
        ("pause", "publish"): 2 * GROUPS,
    }
    chat = next(
        attributes(s) for _, s in sent if s.name.startswith("chat") and "gen_ai.usage.output_tokens" in attributes(s)
    )
    assert (chat["gen_ai.operation.name"], chat["gen_ai.request.model"]) == ("chat", model)
    assert chat["gen_ai.usage.input_tokens"] > 0
    assert chat["gen_ai.response.time_to_first_chunk"] == pytest.approx(0.03)
    assert [v.string_value for v in chat["gen_ai.response.finish_reasons"].values] == ["stop"]
    (tool,) = {msgspec.json.encode(attributes(s)) for _, s in sent if "tool" in s.name and "0.0.0" in str(s)}
    assert b'"gen_ai.tool.name":"calculator"' in tool
    assert b'"error.type":"invalid"' in tool
    collector.bodies.clear()
    assert main(["trace", str(run), "--otlp", f"{collector.url}/custom/traces"]) == 0
    assert collector.paths[-1] == "/custom/traces"
    assert {span.span_id for _, span in collector.spans()} == by_id.keys()


def test_what_a_collector_refuses_is_one_line(
    run: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    collector.status = 400
    assert main(["trace", str(run), "--otlp", collector.url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"--otlp {collector.url}/v1/traces: the collector took 0 of " in err
    assert "400" in err
    for url in ("localhost:4318", "ftp://x", "http://", "http://[1"):
        assert main(["trace", str(run), "--otlp", url]) == 2
        assert f"--otlp {url}: is no URL of a collector" in capsys.readouterr().err
