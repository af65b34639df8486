"""The wire format: what goes in comes out, and what is not ours is a WireError, never another crash."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.buffer import messages as m
from slipstream.buffer.encoded import DeliveredTrajectory, EncodedTrajectory, with_arrays
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.trajectory import FINISHED, TRUNCATED, Outcome, Trajectory, TrajectoryHeader, Turn, VersionSpan
from slipstream.errors import WireError
from slipstream.rpc import wire
from slipstream.rpc.wire import RpcRefusal
from slipstream.tests.tiers import examples


@st.composite
def trajectories(draw: st.DrawFn, branch: int = 0) -> Trajectory:
    """A valid trajectory: runs of context and of sampled tokens, each sampled run by one version."""
    runs = draw(st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 9)), min_size=1, max_size=6))
    mask, spans, turns, logprobs = [], [], [], []
    for length, sampled, version in runs:
        start = len(mask)
        mask += [sampled] * length
        if sampled:
            kv_version = draw(st.one_of(st.none(), st.integers(0, version)))
            spans.append(VersionSpan(start, start + length, version, kv_version))
            turns.append(Turn(start, start + length, draw(st.sampled_from(["stop", "length", "abort"]))))
            logprobs += draw(st.lists(st.floats(-50, 0, width=32), min_size=length, max_size=length))
        else:
            logprobs += [0.0] * length
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
    number = st.floats(allow_nan=False, allow_infinity=False)
    return Trajectory(
        id=f"3.1.2.{branch}",
        group_id=3,
        member=2,
        branch=branch,
        task_id=draw(st.text(max_size=8)),
        env=draw(st.text(max_size=8)),
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.bool_),
        behavior_logprobs=np.array(logprobs, dtype=np.float32),
        version_spans=tuple(spans),
        turns=tuple(turns),
        reward=draw(number),
        turn_rewards=tuple(draw(st.lists(number, max_size=3))),
        outcome=draw(st.sampled_from([FINISHED, TRUNCATED])),
        timings=draw(st.dictionaries(st.text(max_size=4), number, max_size=2)),
        metrics=draw(st.dictionaries(st.text(max_size=4), number, max_size=2)),
    )


def deliver(*branches: Trajectory) -> m.Envelope:
    encoded = tuple(map(EncodedTrajectory.of, branches))
    return m.Envelope(7, m.DeliverEpisode("w", "3.1.2", {5: sum(t.sampled for t in branches)}, FINISHED, encoded))


EXAMPLE = Trajectory(
    id="3.1.2.0",
    group_id=3,
    member=2,
    branch=0,
    task_id="task",
    env="env",
    token_ids=np.arange(4, dtype=np.int32),
    loss_mask=np.array([False, True, True, False]),
    behavior_logprobs=np.array([0, -1, -2, 0], dtype=np.float32),
    version_spans=(VersionSpan(1, 3, 5),),
    turns=(Turn(1, 3, "stop"),),
    reward=1.0,
    turn_rewards=(1.0,),
    outcome=FINISHED,
)


def as_bytes(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def same(a: Trajectory, b: Trajectory) -> bool:
    arrays = ("token_ids", "loss_mask", "behavior_logprobs")
    for name in arrays:
        x, y = getattr(a, name), getattr(b, name)
        if x.dtype != y.dtype or not np.array_equal(x, y):
            return False
    return all(getattr(a, f) == getattr(b, f) for f in a.__struct_fields__ if f not in arrays)


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(*[trajectories(branch=i) for i in range(n)])))
@settings(max_examples=examples(60), deadline=None)
def test_a_delivery_survives_the_wire(branches: tuple[Trajectory, ...]) -> None:
    sent = deliver(*branches)
    frames = wire.encode(sent)
    assert len(frames) == 1 + len(branches)
    for ours in (frames, as_bytes(frames)):
        got = wire.decode(m.Envelope, ours)
        assert isinstance(got.message, m.DeliverEpisode)
        assert got.number == 7
        assert got.message.generated == {5: sum(t.sampled for t in branches)}
        trajectories = [encoded.decode() for encoded in got.message.trajectories]
        assert all(same(a, b) for a, b in zip(branches, trajectories, strict=True))
        for trajectory in trajectories:
            trajectory.check()


def test_a_batch_survives_the_wire() -> None:
    stats = m.Stats(3, Ledger(generated=9, ready=3, withheld={"late": 1}, discarded={"stale": 5}), 1, 2, 3.5, 0.5)
    example = EncodedTrajectory.of(EXAMPLE)
    row = example.row
    sent = m.ReplyEnvelope(1, m.BatchPlan(3, 2, ((row,), (row, row)), {"3.1.2": "late"}, stats))
    got = wire.decode(m.ReplyEnvelope, wire.encode(sent)).message
    assert isinstance(got, m.BatchPlan)
    assert got.stats == stats
    assert got.withheld == {"3.1.2": "late"}
    assert [len(group) for group in got.groups] == [1, 2]
    for row in (row.decode() for group in got.groups for row in group):
        assert len(row) == len(EXAMPLE)
        assert all(getattr(row, name) == getattr(EXAMPLE, name) for name in TrajectoryHeader.__struct_fields__)
        assert row.versions().tolist() == EXAMPLE.versions().tolist()
        assert same(with_arrays(row, example.arrays), EXAMPLE)
    sent = m.ReplyEnvelope(2, m.TrajectoriesReply((example, example)))
    got = wire.decode(m.ReplyEnvelope, wire.encode(sent)).message
    assert isinstance(got, m.TrajectoriesReply)
    assert all(same(one.decode(), EXAMPLE) for one in got.trajectories)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_go_with_the_arrays_of_their_tokens(dtype: type) -> None:
    experts = np.arange(4 * 3 * 2).reshape(4, 3, 2).astype(dtype)
    sent = msgspec.structs.replace(EXAMPLE, experts=experts)
    encoded = EncodedTrajectory.of(sent)
    assert encoded.arrays.nbytes == 4 * (9 + 3 * 2 * experts.itemsize)
    held = DeliveredTrajectory.of(EXAMPLE.episode, sent, encoded)
    assert (held.id, held.row) == (EXAMPLE.id, encoded.row)
    row = encoded.row.decode()
    others = msgspec.structs.replace(EXAMPLE, experts=experts + (np.arange(4) > 0).astype(dtype)[:, None, None])
    changed = msgspec.structs.replace(EXAMPLE, experts=experts + dtype(1))
    assert row.length == 4
    assert row.prompt == EncodedTrajectory.of(others).row.prompt  # those of the prompt's one token are the same
    assert len({row.prompt, *(EncodedTrajectory.of(one).row.prompt for one in (changed, EXAMPLE))}) == 3
    for got in (encoded.decode(), with_arrays(row, encoded.arrays)):
        got.check()
        assert got.experts is not None
        assert got.experts.dtype == dtype
        assert np.array_equal(got.experts, experts)
        again = EncodedTrajectory.of(got)
        assert (again.header, again.arrays.tobytes()) == (encoded.header, encoded.arrays.tobytes())
    for arrays in (encoded.arrays[:-1], encoded.arrays[: 9 * 4]):
        with pytest.raises(WireError, match=r"bytes of arrays (are not|came for)"):
            msgspec.structs.replace(encoded, arrays=arrays[:-1]).decode()
        with pytest.raises(WireError, match="bytes of arrays came for 4 tokens"):
            with_arrays(row, arrays)


@pytest.mark.parametrize("layout", [(0, 2, 1), (1, 1, 1), (1, 2, 4), (1 << 20, 2, 1), (2, 1 << 20, 1), (-1, 2, 1)])
def test_a_forged_layout_of_experts_is_refused(layout: tuple[int, ...]) -> None:
    encoded = EncodedTrajectory.of(msgspec.structs.replace(EXAMPLE, experts=np.zeros((4, 3, 2), np.uint8)))
    header = msgspec.msgpack.decode(encoded.header[1:]) | {"expert_layout": layout}
    forged = msgspec.structs.replace(encoded, header=wire.FORMAT + msgspec.msgpack.encode(header))
    with pytest.raises(WireError, match="not a trajectory") as caught:
        forged.decode()
    assert "\n" not in str(caught.value)


def test_arrays_are_read_only_views_of_their_frames() -> None:
    frames = as_bytes(wire.encode(EXAMPLE))
    got = wire.decode(Trajectory, frames)
    assert np.shares_memory(got.token_ids, np.frombuffer(frames[1], dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        got.token_ids[0] = 1


def test_a_strided_array_is_sent_as_its_values() -> None:
    strided = msgspec.structs.replace(EXAMPLE, token_ids=np.arange(8, dtype=np.int32)[::2])
    assert wire.decode(Trajectory, wire.encode(strided)).token_ids.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: [], "no frame"),
        (lambda f: [b""], "format"),
        (lambda f: [b"\x00" + f[0][1:], *f[1:]], "format '00'"),
        (lambda f: [b"\x01" + f[0][1:], *f[1:]], "format '01'; this side speaks 09"),  # without VersionSpan.kv_version
        (lambda f: [b"\x0a" + f[0][1:], *f[1:]], "format '0a'"),
        (lambda f: [f[0][:1], *f[1:]], "truncated"),
        (lambda f: [f[0][:-1], *f[1:]], "truncated"),
        (lambda f: [f[0] + b"\x00", *f[1:]], "trailing"),
        (lambda f: f[:-1], "bad array index 2"),
        (lambda f: f[:1], "bad array index 0"),
        (lambda f: [*f, b"\x00"], "4 array frames came, 3 are named"),
        (lambda f: [f[0], f[1][:-1], *f[2:]], "multiple of element size"),
        (lambda f: [*f[:2], b"\x00\x02\x01\x00", f[3]], "neither 0 nor 1"),
        (lambda f: [*f[:2], b"\x00\xff\x01\x00", f[3]], "neither 0 nor 1"),
    ],
)
def test_a_frame_that_does_not_fit_is_refused_in_one_line(change, says: str) -> None:
    with pytest.raises(WireError, match=says) as caught:
        wire.decode(Trajectory, change(as_bytes(wire.encode(EXAMPLE))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("index", [3, -1, 2**40, 1.0, "0", None, [0]])
def test_an_array_index_out_of_place_is_refused(index: object) -> None:
    fields = msgspec.msgpack.decode(wire.encode(EXAMPLE)[0][1:])
    for name in ("token_ids", "loss_mask", "behavior_logprobs"):
        header = wire.FORMAT + msgspec.msgpack.encode(fields | {name: index})
        with pytest.raises(WireError):
            wire.decode(Trajectory, [header, *wire.encode(EXAMPLE)[1:]])


def test_an_array_frame_is_used_once() -> None:
    fields = msgspec.msgpack.decode(wire.encode(EXAMPLE)[0][1:])
    header = wire.FORMAT + msgspec.msgpack.encode(fields | {"behavior_logprobs": fields["token_ids"]})
    with pytest.raises(WireError, match="bad array index 0"):
        wire.decode(Trajectory, [header, *wire.encode(EXAMPLE)[1:]])


def progress(generated: object) -> dict[str, object]:
    return {"type": "ReportProgress", "worker": "w", "generated": generated, "slot_s": 0.0, "idle_slot_s": 0.0}


def failed(reason: str, detail: str = "") -> dict[str, object]:
    outcome = {"kind": "failed", "reason": reason, "detail": detail}
    return {
        "type": "DeliverEpisode",
        "worker": "w",
        "episode_id": "0.0.0",
        "generated": {},
        "outcome": outcome,
        "trajectories": [],
    }


def test_what_the_hostile_headers_are_made_of_is_accepted() -> None:
    for good in (progress({"0.0.0": {0: 1 << 40}}), failed("tool", "x" * 4000)):
        assert wire.decode(m.Envelope, [wire.FORMAT + msgspec.msgpack.encode([1, good])]).number == 1


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x92\x01\x82\xa4type\xacRequestStats\xa1x" + b"\x91" * 200_000,  # deeper than the stack
        b"\x92\x01\x81\xa4type\xa4Nope",
        b"\x92\x01\x81\xa4type\xa8Register",
        b"\x92\x01\x83\xa4type\xa8Register\xa6worker\xa2\xff\xff\xabincarnation\xa1x",  # not UTF-8
        msgspec.msgpack.encode([1, {"type": "ReportProgress", "worker": "w", "generated": {"0.0.0": {0: 2**63}}}]),
        msgspec.msgpack.encode(
            [1, {"type": "ReportProgress", "worker": "w", "generated": {}, "slot_s": float("nan"), "idle_slot_s": 0.0}]
        ),
        msgspec.msgpack.encode([1, {"type": "Recover", "version": -1}]),
        msgspec.msgpack.encode([1, {"type": "CommitBatch", "version": 1 << 31}]),
        msgspec.msgpack.encode([1, {"type": "Ack"}]),
        msgspec.msgpack.encode([-1, {"type": "RequestStats"}]),
        msgspec.msgpack.encode([1 << 63, {"type": "RequestStats"}]),
        msgspec.msgpack.encode([1, {"type": "Deregister", "worker": "w" * 101}]),
        msgspec.msgpack.encode([1, {"type": "Deregister", "worker": ""}]),
        msgspec.msgpack.encode([1, {"type": "RequestFresh", "version": 0, "limit": -1}]),
        msgspec.msgpack.encode(
            [1, {"type": "ReportProgress", "worker": "w", "generated": {}, "slot_s": float("inf"), "idle_slot_s": 0.0}]
        ),
        msgspec.msgpack.encode([1, progress({"9" * 65: {}})]),
        msgspec.msgpack.encode([1, progress({"0.0.0": {-1: 1}})]),
        msgspec.msgpack.encode([1, progress({"0.0.0": {1 << 31: 1}})]),
        msgspec.msgpack.encode([1, progress({"0.0.0": {0: -1}})]),
        msgspec.msgpack.encode([1, progress({"0.0.0": {0: (1 << 40) + 1}})]),
        msgspec.msgpack.encode([1, failed("UPPER")]),
        msgspec.msgpack.encode([1, failed("x" * 41)]),
        msgspec.msgpack.encode([1, failed("tool", "x" * 4001)]),
    ],
)
def test_a_hostile_header_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(m.Envelope, [wire.FORMAT + header])


@given(st.lists(st.binary(max_size=64), max_size=4), st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_random_bytes_are_refused(frames: list[bytes], ours: bool) -> None:
    frames = [wire.FORMAT + frames[0], *frames[1:]] if ours and frames else frames
    with pytest.raises(WireError):
        wire.decode(m.Envelope, frames)


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_a_damaged_delivery_is_refused_or_still_valid(data: st.DataObject) -> None:
    frames = as_bytes(wire.encode(deliver(EXAMPLE, msgspec.structs.replace(EXAMPLE, id="3.1.2.1", branch=1))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(frames) - 1))
        frame = bytearray(frames[at])
        match data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "repeat", "swap"])):
            case "flip" if frame:
                frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
                frames[at] = bytes(frame)
            case "cut":
                frames[at] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
            case "grow":
                frames[at] = bytes(frame) + data.draw(st.binary(min_size=1, max_size=8))
            case "drop" if len(frames) > 1:
                del frames[at]
            case "repeat":
                frames.append(frames[at])
            case "swap":
                frames[0], frames[at] = frames[at], frames[0]
    try:
        message = wire.decode(m.Envelope, frames).message
        for encoded in message.trajectories if isinstance(message, m.DeliverEpisode) else ():
            trajectory = encoded.decode()
            trajectory.check()
            assert (trajectory.versions() >= 0).tolist() == trajectory.loss_mask.tolist()
    except WireError:
        return


def test_what_cannot_be_encoded_raises() -> None:
    with pytest.raises(NotImplementedError, match="cannot encode"):
        wire.encode(RpcRefusal(reason=object()))  # pyright: ignore[reportArgumentType]


def test_outcomes_survive_the_wire() -> None:
    sent = m.Envelope(1, m.DeliverEpisode("w", "0.0.0", {0: 3}, Outcome("failed", "tool", "it fell over\n"), ()))
    assert wire.decode(m.Envelope, wire.encode(sent)) == sent
