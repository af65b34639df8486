"""On which host each role should be."""

from __future__ import annotations

from slipstream.launch.launchers.packing import assign, pack

CPU = {"CPU": 1.0}
GPU = {"CPU": 1.0, "GPU": 1.0}


def test_a_host_is_filled_before_the_next_and_pinned_roles_come_first() -> None:
    roles = ["engine-0", "engine-1", "buffer", "learner-0", "learner-1", "worker-0", "worker-1"]
    free = {"a": {"CPU": 1.0}, "b": {"CPU": 3.0}, "c": {"CPU": 4.0}}
    hosts = pack(dict.fromkeys(roles, CPU), free, {"buffer": "a"})
    assert hosts == {
        "buffer": "a",
        **dict.fromkeys(["engine-0", "engine-1", "learner-0", "learner-1"], "c"),
        **dict.fromkeys(["worker-0", "worker-1"], "b"),
    }
    assert free["c"] == {"CPU": 4.0}  # is only read


def test_ranks_share_the_host_with_the_most_gpus() -> None:
    free = {"big": {"CPU": 64.0}, "four": {"CPU": 8.0, "GPU": 4.0}, "eight": {"CPU": 9.0, "GPU": 8.0}}
    ranks = {f"learner-{i}": GPU for i in range(8)}
    assert set(pack(ranks, free, {}).values()) == {"eight"}
    assert pack(ranks | {"engine-0": GPU}, free, {})["engine-0"] == "four"


def test_a_pinned_role_without_room_is_placed_like_the_others_and_one_without_any_is_left() -> None:
    assert pack({"buffer": CPU}, {"a": {}, "b": {"CPU": 1.0}}, {"buffer": "a"}) == {"buffer": "b"}
    assert pack({"x": CPU, "y": CPU, "z": GPU}, {"a": {"CPU": 1.0}}, {}) == {"x": "a"}


def test_places_that_were_left_are_taken_over_and_a_replica_that_spans_hosts_is_not_put_on_one_for_them() -> None:
    parts, room = ["engine-2", "engine-2.1"], {"CPU": 4.0, "GPU": 4.0}
    two, gpu = dict.fromkeys(parts, GPU), dict.fromkeys(["worker-0", "engine-0", "engine-1"], GPU) | {"worker-0": CPU}
    left = [("a", 1.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)]
    assert assign(gpu, {"c": room}, left, {}) == ({"worker-0": 2, "engine-0": 0, "engine-1": 1}, {})
    # Of the places that others have left the second process takes one on another host,
    assert assign(two, {"c": room}, left, {}) == ({"engine-2": 0, "engine-2.1": 3}, {})
    # else a new one on another host, though the first one's host has more room,
    assert assign(two, {"a": room, "c": GPU}, left[:2], {}) == ({"engine-2": 0}, {"engine-2.1": "c"})
    # and one that was left beside the first where no other host has room.
    assert assign(two, {"a": room, "c": CPU}, left[:2], {}) == ({"engine-2": 0, "engine-2.1": 1}, {})
    assert assign(two, {}, left[:2], {}) == ({"engine-2": 0, "engine-2.1": 1}, {})
