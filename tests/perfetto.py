"""Reading a trace of Perfetto by Google's protobuf library, with the fields of Perfetto's own protos that we write."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

U64, DOUBLE, FIXED64, STRING, INT32, INT64, MESSAGE = 4, 1, 6, 9, 5, 3, 11  # FieldDescriptorProto.Type
PROTOS: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "Trace": {"packet": (1, "TracePacket", True)},
    "TracePacket": {
        "clock_snapshot": (6, "ClockSnapshot", False),
        "timestamp": (8, U64, False),
        "trusted_packet_sequence_id": (10, INT64, False),
        "track_event": (11, "TrackEvent", False),
        "track_descriptor": (60, "TrackDescriptor", False),
    },
    "ClockSnapshot": {"clocks": (1, "Clock", True)},
    "Clock": {"clock_id": (1, INT64, False), "timestamp": (2, U64, False)},
    "TrackEvent": {
        "debug_annotations": (4, "DebugAnnotation", True),
        "type": (9, INT32, False),
        "track_uuid": (11, U64, False),
        "categories": (22, STRING, True),
        "name": (23, STRING, False),
        "double_counter_value": (44, DOUBLE, False),
        "flow_ids": (47, FIXED64, True),
        "terminating_flow_ids": (48, FIXED64, True),
    },
    "DebugAnnotation": {
        "int_value": (4, INT64, False),
        "double_value": (5, DOUBLE, False),
        "string_value": (6, STRING, False),
        "name": (10, STRING, False),
    },
    "TrackDescriptor": {
        "uuid": (1, U64, False),
        "name": (2, STRING, False),
        "process": (3, "ProcessDescriptor", False),
        "parent_uuid": (5, U64, False),
        "counter": (8, "CounterDescriptor", False),
        "child_ordering": (11, INT32, False),
    },
    "ProcessDescriptor": {"pid": (1, INT32, False), "process_name": (6, STRING, False)},
    "CounterDescriptor": {},
}


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


def _trace_class() -> Any:
    protobuf = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = protobuf.FileDescriptorProto(name="perfetto.proto", package="perfetto", syntax="proto2")
    for name, fields in PROTOS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            of = {"type": kind} if isinstance(kind, int) else {"type": MESSAGE, "type_name": f".perfetto.{kind}"}
            message.field.add(name=field, number=number, label=3 if repeated else 1, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.Trace"))


def read_perfetto(path: Path) -> PerfettoTrace:
    """Fails where a field is unknown, a track is not declared, or slices do not nest."""
    trace = _trace_class()()
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
            if event.type == 4:
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
        if event.type == 1:
            opened.append((time, event))
            continue
        assert event.type == 2
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
