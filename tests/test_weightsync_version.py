"""Version arithmetic, by properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.errors import StateError
from slipstream.weightsync.version import VersionClock, oldest_trainable, staleness

VERSIONS = st.integers(0, 10_000)
BOUNDS = st.integers(0, 20)


@given(VERSIONS, VERSIONS, BOUNDS)
def test_the_bound_and_staleness_agree(current: int, sampled: int, bound: int) -> None:
    if sampled > current:
        with pytest.raises(StateError, match=f"version {sampled}"):
            staleness(current, sampled)
    else:
        assert (staleness(current, sampled) <= bound) == (sampled >= oldest_trainable(current, bound))


@given(VERSIONS)
def test_a_bound_of_zero_allows_the_current_version_alone(current: int) -> None:
    assert oldest_trainable(current, 0) == current
    assert staleness(current, current) == 0


@given(VERSIONS, st.lists(VERSIONS), st.lists(st.one_of(st.just("advance"), VERSIONS)))
def test_no_version_is_handed_out_twice_nor_after_anybody_used_it(
    checkpoint: int, seen: list[int], events: list[int | str]
) -> None:
    clock = VersionClock(current=checkpoint, newest=max(seen, default=0))
    used = {checkpoint, *seen}
    for event in events:
        if isinstance(event, int):
            clock.observe(event)
            used.add(event)
        else:
            version = clock.advance()
            assert version > max(used)
            assert version == clock.current == clock.newest
            used.add(version)


def test_recovery_keeps_the_checkpoints_version_and_goes_on_above_what_was_lost() -> None:
    clock = VersionClock(current=10, newest=13)
    assert clock.current == 10
    assert clock.advance() == 14


def test_a_negative_version_is_refused() -> None:
    with pytest.raises(StateError, match="-1"):
        VersionClock(current=-1)
