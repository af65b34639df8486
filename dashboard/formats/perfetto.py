"""The trace of a run that `slipstream trace` writes, in Perfetto's format: TrackEvent protobuf, whose few fields need no library.

    process ROLE ── track per replica that is pushed to, group 3 ── track episode 3.0.1: episode > turn > queue, prefill, decode
            └────── counter per gauge
    flow: a slice `episode` ──> the slice `train` of the step that trained on it

Field numbers are those of protos/perfetto/trace in Perfetto's repository. Times are on the trace's own clock, which a snapshot
equates with the time of day.

Invariants:
- Slices of a track begin and end in the order of a call stack; times of a lane never go back.
- The file is written packet by packet.
"""

from __future__ import annotations

import math
import struct
from typing import IO

from ...common.spans import Id
from ...planner.run_spans import LEARNER
from ..gauges import COUNTERS, GaugeTable, rates
from .trace import NS, RunTrace, Slice, TrackKey, lanes

BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type
REALTIME, BOOTTIME = 1, 6  # builtin clocks
CHRONOLOGICAL = 2  # TrackDescriptor.ChildTracksOrdering
SPAN, PART = "span", "part"  # categories
SEQUENCE = 1  # all packets are of one writer


def varint(number: int) -> bytes:
    """Base 128, the lowest part first; a negative number as its 64-bit complement."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A field of a message: whole numbers as varints, floats as doubles, texts and messages by their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode("utf-8", "replace") if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fixed64(number: int, value: int) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<Q", value)


class PerfettoWriter:
    """Packets of a trace, into a file that is open."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._tracks = 0

    def packet(self, content: bytes, timestamp: int | None = None) -> None:
        head = b"" if timestamp is None else field(8, timestamp)
        self._file.write(field(1, head + field(10, SEQUENCE) + content))

    def clocks(self, now: int) -> None:
        """The clock of the trace shows `now` at that time of day."""
        both = b"".join(field(1, field(1, clock) + field(2, now)) for clock in (BOOTTIME, REALTIME))
        self.packet(field(6, both), now)

    def track(self, name: str, parent: int = 0, *, process: int = 0, counter: bool = False) -> int:
        """Declare a track, gives its number. `process` is a number for a process of its own."""
        self._tracks += 1
        content = field(1, self._tracks) + field(2, name)
        content += field(5, parent) if parent else b""
        content += field(3, field(1, process) + field(6, name)) if process else b""
        content += field(8, b"") if counter else b""
        self.packet(field(60, content + field(11, CHRONOLOGICAL)))
        return self._tracks

    def begin(self, track: int, one: Slice, name: str, flows: bytes) -> None:
        notes = b"".join(field(4, _annotation(key, value)) for key, value in one.ids.items() if value is not None)
        content = field(9, BEGIN) + field(11, track) + field(22, PART if one.is_part else SPAN) + field(23, name)
        self.packet(field(11, content + notes + flows), one.begin)

    def end(self, track: int, time: int) -> None:
        self.packet(field(11, field(9, END) + field(11, track)), time)

    def count(self, track: int, time: int, value: float) -> None:
        self.packet(field(11, field(9, COUNTER) + field(11, track) + field(44, value)), time)


def write_perfetto(trace: RunTrace, gauges: GaugeTable, file: IO[bytes]) -> tuple[int, int]:
    """Gives the numbers of slices and of counters. Raises OSError."""
    writer = PerfettoWriter(file)
    first, last = trace.bounds
    writer.clocks(first)
    series = gauges.roles()
    roles = sorted({key.role for key in trace.tracks} | series.keys())
    processes = {role: writer.track(role, process=number) for number, role in enumerate(roles, 1)}
    flows = {episode: number for number, episode in enumerate(sorted(trace.trained), 1)}
    batches: dict[int, list[int]] = {}  # version -> the flows that end in its batch
    shown = {key.episode for key in trace.tracks}
    for episode, version in trace.trained.items():
        if episode in shown:
            batches.setdefault(version, []).append(flows[episode])
    groups: dict[tuple[str, str], int] = {}
    slices = 0
    for key in sorted(trace.tracks, key=_order):
        parent, name = processes[key.role], key.replica or "main"
        if key.episode:
            group = key.episode.partition(".")[0]
            if (key.role, group) not in groups:
                groups[key.role, group] = writer.track(f"group {group}", parent)
            parent, name = groups[key.role, group], f"episode {key.episode}"
        for number, lane in enumerate(lanes(trace.tracks[key]), 1):
            track = writer.track(f"{name} ({number})" if number > 1 else name, parent)
            _write_lane(writer, track, lane, key, flows if key.episode in trace.trained else {}, batches)
            slices += len(lane)
    counters = 0
    for role, one in series.items():
        times = [round(t * NS) for t in one.times]
        for name, column in one.columns.items():
            per_second = name.rpartition(".")[2] in COUNTERS
            values = rates(one.times, column).tolist() if per_second else column
            track = writer.track(f"{name} per second" if per_second else name, processes[role], counter=True)
            counters += 1
            for time, value in zip(times, values, strict=True):
                if first <= time <= last and math.isfinite(value):
                    writer.count(track, time, value)
    return slices, counters


def _write_lane(
    writer: PerfettoWriter,
    track: int,
    lane: list[Slice],
    key: TrackKey,
    flows: dict[str, int],
    batches: dict[int, list[int]],
) -> None:
    opened: list[int] = []  # ends, the innermost last
    for one in lane:
        while opened and opened[-1] <= one.begin:
            writer.end(track, opened.pop())
        flow = b""
        if one.what == "episode" and key.episode in flows:
            flow = fixed64(47, flows[key.episode])
        elif one.what == "train" and key.role == LEARNER:
            version = one.ids.get("version")
            ends = batches.get(version + 1, []) if isinstance(version, int) else []
            flow = b"".join(fixed64(48, number) for number in ends)
        tool = one.ids.get("tool")
        writer.begin(track, one, f"{one.what} {tool}" if tool else one.what, flow)
        opened.append(one.end)
    while opened:
        writer.end(track, opened.pop())


def _annotation(name: str, value: Id) -> bytes:
    """A DebugAnnotation."""
    number = 4 if isinstance(value, int) else 5 if isinstance(value, float) else 6
    return field(10, name) + field(number, "" if value is None else value)


def _order(key: TrackKey) -> tuple[object, ...]:
    """Groups and episodes by their numbers."""
    return key.role, key.replica, [int(part) for part in key.episode.split(".") if part.isdecimal()]
