"""Messages that no honest client sends, each by a seed: what a broken, a foreign or a malicious peer could put on the wire."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec
from slipstream.buffer import messages as m
from slipstream.buffer.admission import LiveRules
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.trajectory import FINISHED, Outcome
from slipstream.rpc import wire
from slipstream.rpc.wire import RpcRefusal
from slipstream.tests.episodes import trajectory

Frames = list[bytes]

PAST = 1 << 50
"""Number of the requests in the sender's own name: those about groups that are over are answered, and change nothing."""

ABSURD = (-1, -(1 << 63), (1 << 31), (1 << 40) + 1, (1 << 63), (1 << 64) - 1, 1e308, float("nan"), float("inf"), 0.5)
WRONG = (None, "", "x" * 1000, [], {}, [[]], {"a": 1}, b"\x00\xff", True, "\x00", "🙂")


def frames_of(envelope: m.Envelope | m.ReplyEnvelope) -> Frames:
    return [bytes(frame) for frame in wire.encode(envelope)]


def random_bytes(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    frames = [rng.randbytes(rng.choice([0, 1, 7, 100, 2000])) for _ in range(rng.randint(1, 5))]
    return [wire.FORMAT + frames[0], *frames[1:]] if rng.random() < 0.5 else frames


def truncated(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    frames = list(rng.choice(captured))
    at = rng.randrange(len(frames))
    if rng.random() < 0.3 and len(frames) > 1:
        return frames[:at] or [b""]
    frames[at] = frames[at][: rng.randrange(max(1, len(frames[at])))]
    return frames


def flipped(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    frames = [bytearray(frame) for frame in rng.choice(captured)]
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice([f for f in frames if f])
        frame[rng.randrange(len(frame))] ^= rng.randint(1, 255)
    return [bytes(frame) for frame in frames]


def replayed(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    return list(rng.choice(captured))


def other_version(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    first, *others = rng.choice(captured)
    version = rng.choice([v for v in range(256) if v != wire.FORMAT[0]])
    return [bytes([version]) + first[1:], *others]


def more_frames(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    extra = 20_000 if rng.random() < 0.01 else rng.randint(1, 50)
    return [*rng.choice(captured), *[rng.choice([b"", b"x", bytes(64)])] * extra]


def empty(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    return [b""] * rng.choice([1, 2, 3, 100])


def forged_ids(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    """A well-formed request about episodes of others, for workers that the sender is not, or as a learner that it is not."""
    number, version = rng.randrange(1 << 40), rng.choice([0, rng.randrange(100)])
    known = [captured_id for frames in captured if (captured_id := _episode(frames))]
    episode = f"{rng.choice([0, 1, 5, 10**9, 10**18])}.{rng.choice([0, 1, 7])}.{rng.choice([0, 1, 2, 10**6])}"
    episode = rng.choice([episode, *known[-50:]])
    worker = rng.choice(["worker-0", "worker-1", "learner-0", "mallory", "nobody", "worker-0/", "\U0001f600"])
    tokens = {version: rng.choice([0, 3, 1 << 40])}
    requests: list[m.Request] = [
        m.Register(worker, "forged"),
        m.RequestLease("worker-0"),
        m.Deregister("worker-0"),
        m.ReportProgress("worker-0", {episode: tokens}, 1.0, 1.0),
        m.ReportProgress("mallory", {episode: tokens}, 1e12, 1e12),
        m.DeliverEpisode(
            "worker-0", episode, tokens, FINISHED, (EncodedTrajectory.of(trajectory(episode, version=version)),)
        ),
        m.DeliverEpisode("mallory", episode, tokens, Outcome("failed", "tool"), ()),
        m.CommitBatch(version),
        m.MarkCheckpointed(version),
        m.Recover(version),
        m.TakeBatch(version),
        m.RequestFresh(version, 1 << 16),
        m.Configure(1 << 40, LiveRules(0, 1, 2, "drop")),
        m.SetAside(version, (0, rng.randrange(100)), "forged"),
        m.StepFailed(version, "forged"),
    ]
    request = rng.choice(requests)
    own = isinstance(request, m.ReportProgress | m.DeliverEpisode) and request.worker == "mallory"
    return frames_of(m.Envelope(PAST if own else number, request))


def _episode(frames: Frames) -> str:
    """Whose progress or end a message tells."""
    message = wire.decode(m.Envelope, frames).message
    match message:
        case m.DeliverEpisode():
            return message.episode_id
        case m.ReportProgress(generated=generated):
            return next(iter(generated), "")
    return ""


def absurd(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    """A request in which one value is another: a number out of bounds, or something that is no number."""
    first, *arrays = rng.choice(captured)
    number, message = msgspec.msgpack.decode(first[1:])
    value = rng.choice([*ABSURD, *WRONG])
    if rng.random() < 0.1:
        number = rng.choice([-1, 1 << 63, "1", None, 1.5])
    else:
        _replace(rng, message, value)
    return [wire.FORMAT + msgspec.msgpack.encode([number, message]), *arrays]


def _replace(rng: random.Random, inside: dict | list, value: object) -> None:
    """One value, somewhere, is `value`."""
    keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
    while keys:
        key = rng.choice(keys)
        if isinstance(inside[key], dict | list) and inside[key] and rng.random() < 0.8:
            return _replace(rng, inside[key], value)
        inside[key] = value
        return None
    return None


def huge(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    """A header that claims, or is, more than anybody should read."""
    word = rng.choice(["worker", "generated", "episode_id"])
    return [
        wire.FORMAT
        + rng.choice(
            [
                lambda: b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
                lambda: b"\xdf\xff\xff\xff\xff",
                lambda: b"\xc6\xff\xff\xff\xff",
                lambda: b"\xdb\xff\xff\xff\xff",
                lambda: b"\x92\x01" + b"\x91" * 100_000,
                lambda: b"\x92\x01\x82\xa4type\xacRequestStats\xa1x" + b"\x91" * 100_000,
                lambda: msgspec.msgpack.encode(
                    [1, {"type": "ReportProgress", word: {str(i): {} for i in range(20_000)}}]
                ),
                lambda: msgspec.msgpack.encode([1, {"type": "Register", "worker": "w" * 100_000, "incarnation": "x"}]),
                lambda: msgspec.msgpack.encode([1, {"type": "Deregister", "worker": "w" * 101}]),
                lambda: msgspec.msgpack.encode(
                    [
                        PAST,
                        {
                            "type": "ReportProgress",
                            "worker": "mallory",
                            "slot_s": 0.0,
                            "idle_slot_s": 0.0,
                            "generated": {"0.0.0": many},
                        },
                    ]
                ),
            ]
        )()
    ]


many = {version: 1 for version in range(20_000)}


def replies(rng: random.Random, captured: Sequence[Frames]) -> Frames:
    """What only the buffer says."""
    stats = m.Stats(1, Ledger(), 0, 0, 0.0, 0.0)
    messages: list[m.Reply] = [
        m.Ack(),
        RpcRefusal("no"),
        m.BatchPlan(0, 0, ((EncodedTrajectory.of(trajectory("0.0.0")).row,),), {}, stats),
    ]
    return frames_of([m.ReplyEnvelope(rng.randrange(100), rng.choice(messages))])


KINDS: tuple[Callable[[random.Random, Sequence[Frames]], Frames], ...] = (
    random_bytes,
    truncated,
    flipped,
    replayed,
    other_version,
    more_frames,
    empty,
    forged_ids,
    absurd,
    huge,
    replies,
)
"""Each makes one message from a source of chance and messages of honest clients."""
