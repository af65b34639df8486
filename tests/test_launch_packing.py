"""On which host each role should be."""

from __future__ import annotations

from slipstream.launch.launchers.packing import pack

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
