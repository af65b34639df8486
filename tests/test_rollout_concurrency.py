"""The cap against a queueing model of the servers: it fills them, queues little, shares fairly, and settles. And
the account of slots."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.rollout.concurrency import Concurrency, SlotTime
from slipstream.rollout.engines.base import EngineLoad

GROUP = 8
TICKS = 10
"""Steps of the model per second."""

IDLE = EngineLoad(1, 0, 0.0)


@dataclass
class Model:
    """Workers on servers that decode `slots` requests at once, as long as `kv_share` each still fits into the cache.

    An episode is three times a request of `generates` ticks and then `tools` ticks away from the servers.
    """

    slots: int
    workers: list[Concurrency]
    generates: tuple[int, int] = (5, 40)
    tools: tuple[int, int] = (0, 0)
    kv_share: float = 0.0
    admitted: int = 1 << 30

    def __post_init__(self) -> None:
        self.random = random.Random(0)
        self.queue: deque[tuple[int, int]] = deque()
        self.decoding: list[list[int]] = []  # [ticks left, worker, turns left]
        self.away: list[list[int]] = []
        self.playing = [0] * len(self.workers)

    def run(self, seconds: int) -> list[tuple[list[int], int, int]]:
        """Per second: caps, requests that decode, requests that queue."""
        seen = []
        for tick in range(seconds * TICKS):
            for worker, concurrency in enumerate(self.workers):
                while concurrency.cap - self.playing[worker] >= GROUP and sum(self.playing) + GROUP <= self.admitted:
                    self.playing[worker] += GROUP
                    self.queue.extend([(worker, 3)] * GROUP)
            self._step()
            if tick % TICKS == 0:
                sample = EngineLoad(len(self.decoding), len(self.queue), len(self.decoding) * self.kv_share)
                for worker, concurrency in enumerate(self.workers):
                    concurrency.observe([sample], 0, self.playing[worker])
                seen.append(([c.cap for c in self.workers], sample.running, sample.waiting))
        return seen

    def _step(self) -> None:
        for item in (*self.decoding, *self.away):
            item[0] -= 1
        for item in [i for i in self.decoding if i[0] <= 0]:
            self.decoding.remove(item)
            _, worker, turns = item
            if turns == 1:
                self.playing[worker] -= 1
            else:
                self.away.append([self.random.randint(*self.tools), worker, turns - 1])
        for item in [i for i in self.away if i[0] <= 0]:
            self.away.remove(item)
            self.queue.append((item[1], item[2]))
        room = min(self.slots, int(1 / self.kv_share) if self.kv_share else self.slots)
        while self.queue and len(self.decoding) < room:
            worker, turns = self.queue.popleft()
            self.decoding.append([self.random.randint(*self.generates), worker, turns])


def worker(max_concurrent: int = 64, workers: int = 1) -> Concurrency:
    made = Concurrency(GROUP, max_concurrent, workers)
    made.set_replicas(1)
    return made


def settled(seen: list[tuple[list[int], int, int]]) -> tuple[list[int], float, float]:
    """Of the second half: sums of caps, mean decoding, mean queue."""
    half = seen[len(seen) // 2 :]
    return [sum(caps) for caps, _, _ in half], sum(s[1] for s in half) / len(half), sum(s[2] for s in half) / len(half)


@pytest.mark.parametrize(
    ("generates", "tools"),
    [((5, 40), (0, 0)), ((5, 40), (0, 100)), ((100, 600), (0, 0)), ((100, 600), (0, 1000))],
    ids=["short", "short, tools", "long", "long, tools"],
)
def test_servers_are_full_queues_short_and_the_cap_comes_to_rest(generates, tools) -> None:
    caps, decoding, queueing = settled(Model(64, [worker()], generates, tools).run(800))
    assert decoding >= 0.9 * 64
    assert queueing <= 0.1 * 64
    mean = sum(caps) / len(caps)
    assert max(caps) <= 1.2 * mean
    assert min(caps) >= 0.8 * mean
    if tools[1]:
        assert mean > 1.5 * 64  # those that use tools do not decode


def test_a_full_cache_limits_like_a_queue() -> None:
    caps, decoding, queueing = settled(Model(64, [worker()], kv_share=1 / 40).run(400))
    assert 0.75 * 40 <= decoding < 40  # of 40 that fit
    assert queueing < 1
    assert max(caps) < 64


@pytest.mark.parametrize("tools", [(0, 0), (0, 100)])
def test_workers_that_share_servers_come_to_equal_caps(tools: tuple[int, int]) -> None:
    first, second = worker(workers=2), worker(workers=2)
    first._cap = 150.0  # pyright: ignore[reportPrivateUsage]  # had the servers for itself until now
    second._cap = float(GROUP)  # pyright: ignore[reportPrivateUsage]
    seen = Model(64, [first, second], tools=tools).run(600)
    for caps, _, _ in seen[300:]:
        assert abs(caps[0] - caps[1]) <= 0.2 * sum(caps)
    _, decoding, _ = settled(seen)
    assert decoding >= 0.9 * 64


def test_it_grows_back_when_the_congestion_is_gone() -> None:
    concurrency = worker()
    for _ in range(40):
        concurrency.observe([EngineLoad(64, 500, 1.0)], 500, concurrency.cap)
    assert concurrency.cap == GROUP
    for _ in range(45):
        concurrency.observe([IDLE], 0, concurrency.cap)
    assert concurrency.cap >= 64


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("replicas"), st.integers(0, 9)),
            st.tuples(st.just("limit"), st.none() | st.integers(1, 400)),
            st.tuples(
                st.just("second"),
                st.lists(st.builds(EngineLoad, st.integers(0, 99), st.integers(0, 999), st.floats(0, 1)), max_size=3),
            ),
        )
    ),
    st.integers(1, 64),
    st.integers(1, 300),
    st.integers(1, 8),
)
def test_a_group_always_fits(events, group_size: int, max_concurrent: int, workers: int) -> None:
    concurrency, limit = Concurrency(group_size, max_concurrent, workers), None
    for kind, value in events:
        before = concurrency.cap
        if kind == "replicas":
            concurrency.set_replicas(value)
        elif kind == "limit":
            concurrency.set_limit(limit := value)
        else:
            concurrency.observe(value, 3, before)
            assert concurrency.cap >= int(0.7 * before)
        assert concurrency.cap >= group_size
        assert limit is None or concurrency.cap <= max(group_size, limit)


def test_a_limit_holds_and_what_it_held_down_starts_again_with_its_share() -> None:
    concurrency = Concurrency(GROUP, 64, 1, 20)
    concurrency.set_replicas(2)
    assert concurrency.cap == 20
    for _ in range(100):
        concurrency.observe([IDLE, IDLE], 0, concurrency.cap)
    assert concurrency.cap == 20
    concurrency.set_limit(40)
    assert concurrency.cap == 40
    concurrency.set_limit(None)
    assert concurrency.cap == 128
    concurrency.observe([EngineLoad(64, 64, 1.0)] * 2, 0, 128)
    cut = concurrency.cap
    assert cut < 128
    concurrency.set_limit(400)  # it was not this that held the cap down
    assert concurrency.cap == cut


def test_it_follows_the_fleet_and_back() -> None:
    concurrency = Concurrency(GROUP, 64, 2)
    assert concurrency.cap == 32
    for replicas, cap in ((2, 64), (3, 96), (2, 64), (0, 64), (2, 64), (1, 32)):
        concurrency.set_replicas(replicas)
        assert concurrency.cap == cap


def test_it_does_not_grow_while_admission_is_the_limit_nor_shrink_before_the_last_cut_was_felt() -> None:
    model = Model(64, [worker()], admitted=24)
    assert {sum(caps) for caps, _, _ in model.run(100)} == {64}
    concurrency = worker()
    crowd = [EngineLoad(64, 64, 0.5)]
    concurrency.observe(crowd, 0, 64)
    cut = concurrency.cap
    assert cut < 64
    for _ in range(20):
        concurrency.observe(crowd, 0, 64)  # no episode ends
    assert concurrency.cap == cut
    concurrency.observe(crowd, 0, cut)
    assert concurrency.cap < cut


@pytest.mark.parametrize("load", [IDLE, EngineLoad(64, 4, 0.5), EngineLoad(64, 40, 0.9)], ids=str)
def test_a_sample_of_the_replicas_moves_the_cap_as_all_of_them_do(load: EngineLoad) -> None:
    caps = []
    for samples, each in ((96, 1.0), (32, 3.0)):
        concurrency = worker()
        concurrency.set_replicas(96)
        for _ in range(10):
            concurrency.observe([load] * samples, 96, concurrency.cap, each)
        caps.append(concurrency.cap)
    assert caps[0] == caps[1]


def test_a_replica_that_is_paused_is_not_crowded() -> None:
    concurrency = worker()
    concurrency.observe([EngineLoad(0, 64, 0.5)], 0, 64)
    assert concurrency.cap == 64
    concurrency.observe([], 100, 64)
    assert concurrency.cap == 64


def test_slots_count_as_long_as_they_were_so() -> None:
    time = SlotTime(4, 100.0)
    time.account(101.0, 8, 0)  # room for two groups
    assert (time.slot_s, time.idle_slot_s) == (8.0, 8.0)
    time.account(103.0, 8, 4)  # room for one
    assert (time.slot_s, time.idle_slot_s) == (24.0, 16.0)
    time.account(104.0, 8, 5)  # three free slots are no room for a group
    time.account(104.5, 8, 8)
    assert (time.slot_s, time.idle_slot_s) == (36.0, 16.0)
    time.account(106.5, 4, 8)  # the cap fell: what plays above it has slots, too
    assert (time.slot_s, time.idle_slot_s) == (52.0, 16.0)
