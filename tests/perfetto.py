"""Reading a trace by the protos that Perfetto publishes: strictly, and its flows, too, which the build of Perfetto's own program
in `trace_processor` is too old for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

BEGIN, END, COUNTER = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_COUNTER


class ReadSlice(NamedTuple):
    track: str  # names of the tracks above it and its own: `worker-0/group 3/episode 3.0.1`
    name: str
    category: str
    begin: int
    end: int
    above: tuple[str, ...]  # names of the slices that it lies in
    flows: frozenset[int]
    ended: frozenset[int]  # flows that end in it
    notes: dict[str, Any]


class PerfettoTrace(NamedTuple):
    slices: list[ReadSlice]
    counters: dict[str, list[tuple[int, float]]]


def read_perfetto(path: Path) -> PerfettoTrace:
    """Fails where a field is unknown, a track is not declared, or slices do not nest."""
    trace = Trace()
    data = path.read_bytes()
    assert trace.ParseFromString(data) == len(data)
    trace.DiscardUnknownFields()
    assert trace.ByteSize() == len(data)
    names: dict[int, str] = {}
    counters: dict[int, list[tuple[int, float]]] = {}
    events: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for packet in trace.packet:
        assert packet.trusted_packet_sequence_id
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in names
            names[track.uuid] = f"{names[track.parent_uuid]}/{track.name}" if track.parent_uuid else track.name
            if track.HasField("counter"):
                counters[track.uuid] = []
        elif packet.HasField("track_event"):
            event = packet.track_event
            if event.type == COUNTER:
                counters[event.track_uuid].append((packet.timestamp, event.double_counter_value))
            else:
                events[event.track_uuid].append((packet.timestamp, event))
    slices = [one for track, found in events.items() for one in _slices(names[track], found)]
    return PerfettoTrace(slices, {names[track]: values for track, values in counters.items()})


def _slices(track: str, events: list[tuple[int, Any]]) -> list[ReadSlice]:
    found: list[ReadSlice] = []
    opened: list[tuple[int, Any]] = []
    assert [time for time, _ in events] == sorted(time for time, _ in events)
    for time, event in events:
        if event.type == BEGIN:
            opened.append((time, event))
            continue
        assert event.type == END
        began, of = opened.pop()
        notes = {note.name: _value(note) for note in of.debug_annotations}
        above = tuple(outer.name for _, outer in opened)
        (category,) = of.categories
        ends = frozenset(of.terminating_flow_ids)
        found.append(ReadSlice(track, of.name, category, began, time, above, frozenset(of.flow_ids), ends, notes))
    assert not opened
    return found


def _value(note: Any) -> Any:
    (field,) = [descriptor.name for descriptor, _ in note.ListFields() if descriptor.name != "name"] or ["string_value"]
    return getattr(note, field)
