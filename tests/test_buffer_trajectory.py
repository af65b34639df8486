"""A trajectory's invariants: what holds is accepted, each thing that does not is refused by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.buffer import trajectory as module
from slipstream.buffer.client import BufferClient
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.trajectory import FINISHED, TRUNCATED, Outcome, Trajectory, Turn, VersionSpan, sampled_of
from slipstream.errors import WireError

VALID = Trajectory(
    id="0.0.1.0",
    group_id=0,
    member=1,
    branch=0,
    task_id="task",
    env="env",
    token_ids=np.array([5, 6, 7, 8, 9], dtype=np.int32),
    loss_mask=np.array([False, True, True, False, True]),
    behavior_logprobs=np.array([0, -1, -2, 0, -0.5], dtype=np.float32),
    version_spans=(VersionSpan(1, 2, 3), VersionSpan(2, 3, 4), VersionSpan(4, 5, 4)),
    turns=(Turn(1, 3, "stop"), Turn(4, 5, "length")),
    reward=0.5,
    turn_rewards=(0.0, 0.5),
    outcome=FINISHED,
)


def float32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_a_valid_trajectory_is_accepted() -> None:
    VALID.check()
    assert len(VALID) == 5
    assert VALID.sampled == 3
    assert VALID.versions().tolist() == [-1, 3, 4, -1, 4]


def test_context_alone_is_valid_and_has_no_version() -> None:
    context = msgspec.structs.replace(
        VALID,
        loss_mask=np.zeros(5, dtype=np.bool_),
        behavior_logprobs=np.zeros(5, np.float32),
        version_spans=(),
        turns=(),
    )
    context.check()
    assert (context.versions() == -1).all()
    assert context.sampled == 0


def test_an_engine_that_said_nothing_leaves_an_empty_turn() -> None:
    msgspec.structs.replace(VALID, turns=(Turn(1, 3, "stop"), Turn(3, 3, "stop"), Turn(4, 5, "stop"))).check()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task_id": "x" * 1001}, "1000 characters"),
        ({"env": "x" * 1001}, "1000 characters"),
        ({"token_ids": np.zeros(0, np.int32)}, "0 tokens; allowed are 1 to"),
        ({"token_ids": VALID.token_ids.astype(np.int64)}, "int32"),
        ({"token_ids": VALID.token_ids.reshape(5, 1)}, "int32"),
        ({"token_ids": np.array([5, 6, -7, 8, 9], dtype=np.int32)}, "negative"),
        ({"loss_mask": VALID.loss_mask[:4]}, "loss_mask must be bool"),
        ({"loss_mask": VALID.loss_mask.astype(np.int8)}, "loss_mask must be bool"),
        ({"loss_mask": np.ones(5, np.bool_)}, "cover exactly"),
        ({"behavior_logprobs": VALID.behavior_logprobs[1:]}, "float32"),
        ({"behavior_logprobs": VALID.behavior_logprobs.astype(np.float64)}, "float32"),
        ({"behavior_logprobs": float32(0, -1, np.nan, 0, -1)}, "finite"),
        ({"behavior_logprobs": float32(0, -1, -np.inf, 0, -1)}, "finite"),
        ({"behavior_logprobs": float32(0, -1, 0.1, 0, -1)}, "positive"),
        ({"behavior_logprobs": float32(-1, -1, -1, 0, -1)}, "0 where nothing was sampled"),
        ({"reward": float("nan")}, "rewards must be finite"),
        ({"reward": float("inf")}, "rewards must be finite"),
        ({"turn_rewards": (0.0, float("nan"))}, "rewards must be finite"),
        ({"version_spans": VALID.version_spans[:2]}, "cover exactly"),
        ({"version_spans": (VersionSpan(1, 3, 3), VersionSpan(2, 3, 4), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(4, 5, 4), VersionSpan(1, 3, 3))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 3, 3), VersionSpan(4, 6, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 3, 3), VersionSpan(4, 2**70, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 3, -1), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 3, 3, -1), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 3, 3, 4), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(1, 1, 3), VersionSpan(1, 3, 3), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"version_spans": (VersionSpan(-1, 3, 3), VersionSpan(4, 5, 4))}, "bad version span"),
        ({"turns": (Turn(1, 6, "stop"),)}, "bad turn"),
        ({"turns": (Turn(3, 1, "stop"),)}, "bad turn"),
        ({"turns": (Turn(4, 5, "stop"), Turn(1, 3, "stop"))}, "bad turn"),
        ({"turns": (Turn(-2, 5, "stop"),)}, "bad turn"),
    ],
)
def test_a_broken_invariant_is_refused_by_name(change: dict[str, object], says: str) -> None:
    with pytest.raises(WireError, match=says) as caught:
        msgspec.structs.replace(VALID, **change).check()
    assert "0.0.1.0" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["asked", "queued_s", "first_s", "decode_s"])
@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -0.5])
def test_a_time_of_a_turn_that_is_none_cannot_be_decoded(field: str, seconds: float) -> None:
    turn = msgspec.structs.replace(VALID.turns[0], **{field: seconds})
    sent = EncodedTrajectory.of(msgspec.structs.replace(VALID, turns=(turn, VALID.turns[1])))
    with pytest.raises(WireError, match=r"not a trajectory: Expected `float` .* at `\$.turns\[0\]"):
        sent.decode()


def test_a_trajectory_has_a_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LENGTH_LIMIT", 4)
    with pytest.raises(WireError, match="5 tokens; allowed are 1 to 4"):
        VALID.check()


@given(st.lists(st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(0, 6))), min_size=1, max_size=8))
def test_counts_by_version_agree_with_the_arrays(runs: list[tuple[int, int | None]]) -> None:
    versions = [version for length, version in runs for _ in range(length)]
    spans, at = [], 0
    for length, version in runs:
        if version is not None:
            spans.append(VersionSpan(at, at + length, version))
        at += length
    n = len(versions)
    t = msgspec.structs.replace(
        VALID,
        token_ids=np.zeros(n, np.int32),
        loss_mask=np.array([v is not None for v in versions]),
        behavior_logprobs=np.zeros(n, np.float32),
        version_spans=tuple(spans),
        turns=(),
    )
    t.check()
    assert t.versions().tolist() == [-1 if v is None else v for v in versions]
    assert t.sampled == sum(v is not None for v in versions)


def test_a_failure_is_not_trainable() -> None:
    assert FINISHED.trainable
    assert TRUNCATED.trainable
    assert not Outcome("failed", "tool").trainable


def test_the_branches_of_an_episode_are_counted_by_version() -> None:
    second = msgspec.structs.replace(VALID, id="0.0.1.1", branch=1)
    assert sampled_of("0.0.1", (VALID,)) == {3: 1, 4: 2}
    assert sampled_of("0.0.1", (VALID, second)) == {3: 2, 4: 4}
    assert sampled_of("0.0.1", ()) == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group_id": 1}, "group 1, member 1, branch 0 came with episode '0.0.1'"),
        ({"member": 0}, "member 0"),
        ({"branch": 1}, "branch 1"),
        ({"id": "0.0.1.1"}, "trajectory '0.0.1.1'"),
        ({"reward": float("nan")}, "finite"),
    ],
)
def test_a_trajectory_of_another_episode_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(WireError, match=says):
        sampled_of("0.0.1", (msgspec.structs.replace(VALID, **change),))
    with pytest.raises(WireError, match="the same branch twice"):
        sampled_of("0.0.1", (VALID, VALID))


async def test_text_without_an_encoding_is_told_before_anything_is_sent() -> None:
    bad = msgspec.structs.replace(VALID, task_id="\ud800")
    with pytest.raises(WireError, match=r"a text in the trajectories of episode 0\.0\.1: .*surrogates not allowed"):
        await BufferClient("tcp://127.0.0.1:1", "worker-0").deliver("0.0.1", {}, FINISHED, (bad,))
