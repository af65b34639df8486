"""Who gets which GPU is arithmetic: tried here without one."""

from __future__ import annotations

import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.resources import needed_gpus, place, role_environment


def test_a_gpu_each_while_there_are_enough() -> None:
    config = load(
        "qwen3-0.6b", ["learner.backend.ranks=2", "rollout.engine.replicas=2", "rollout.engine.tensor_parallel=2"]
    )
    wanted = needed_gpus(config, engines=True, learners=True)
    placement = place(wanted, 8)
    used = [gpu for gpus in placement.gpus.values() for gpu in gpus]
    assert sorted(used) == list(range(6))
    assert placement.gpus["engine-1"] == (4, 5)
    assert placement.transport == "nccl"


def test_one_gpu_is_shared_and_weights_go_through_the_host() -> None:
    placement = place(needed_gpus(load("qwen3-0.6b"), engines=True, learners=True), 1)
    assert set(placement.gpus.values()) == {(0,)}
    assert placement.transport == "gloo"


def test_without_gpus_nobody_asks_for_one() -> None:
    placement = place(needed_gpus(load("quickstart"), engines=False, learners=False), 0)
    assert placement.gpus == {}
    assert placement.transport == "gloo"


def test_a_replica_that_does_not_fit_is_named() -> None:
    config = load("qwen3-0.6b", ["rollout.engine.tensor_parallel=4"])
    with pytest.raises(ConfigError, match=r"rollout\.engine\.tensor_parallel: a process wants 4 GPUs, torch sees 2"):
        place(needed_gpus(config, engines=True, learners=True), 2)


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("quickstart", ["seed=7"])
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    chosen = role_environment(config, "learner-0", (1, 2))
    assert chosen["OMP_NUM_THREADS"] == "3"
    assert chosen["OMP_WAIT_POLICY"] == "PASSIVE"
    assert chosen["PYTHONHASHSEED"] == "7"
    assert chosen["CUDA_VISIBLE_DEVICES"] == "1,2"
