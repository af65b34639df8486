"""Kinds of accelerators: a table of what differs between them, and a process that has one which is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from slipstream.common import accelerator
from slipstream.common.accelerator import CUDA, KINDS, NPU, ROCM, XPU, AcceleratorKind, visible_devices
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.launch.preflight import devices
from slipstream.launch.resources import assign_gpus, collectives_of, needed_gpus, role_environment
from slipstream.launch.run_inputs import RunInputs
from slipstream.learner.distributed import choose_device

TABLE = {
    CUDA: ("cuda", "nccl", ("CUDA_VISIBLE_DEVICES",), "GPU", "no CUDA or ROCm device here"),
    ROCM: ("cuda", "nccl", ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "GPU", "no CUDA or ROCm device here"),
    NPU: ("npu", "hccl", ("ASCEND_RT_VISIBLE_DEVICES",), "NPU", "no NPU device here, .* the package torch-npu"),
    XPU: ("xpu", "xccl", ("ZE_AFFINITY_MASK",), "GPU", "no XPU device here, .* a build of torch for XPU"),
}
HERE = accelerator.current()
KEYS = ("rollout.engine.kind=transformers", "rollout.engine.replicas=1", "learner.backend.device=auto")
VARIABLES = {name for kind in KINDS for name in kind.visible}


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's environment names no devices."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def a_host_with(monkeypatch: pytest.MonkeyPatch, kind: AcceleratorKind, count: int) -> None:
    monkeypatch.setattr(accelerator, "current", lambda: kind)
    monkeypatch.setattr(accelerator, "count", lambda: count)


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_device_table(kind: AcceleratorKind, monkeypatch: pytest.MonkeyPatch) -> None:
    type_, collectives, variables, resource, refusal = TABLE[kind]
    assert (kind.type, kind.collectives, kind.visible, kind.resource) == (type_, collectives, variables, resource)
    if HERE is None or HERE.type != type_:
        with pytest.raises(ConfigError, match=rf"^learner\.backend\.device: {type_}, but torch sees {refusal}"):
            choose_device(type_)
    config = load("qwen3-0.6b", [f"learner.backend.device={type_}"])
    a_host_with(monkeypatch, kind, 2)
    if kind is not NPU:  # whose name torch learns by a plugin; see the last test
        assert str(choose_device("auto")) == str(choose_device(type_)) == f"{type_}:0"
    assert str(choose_device("cpu")) == "cpu"
    assert collectives_of(config) == collectives
    wanted = needed_gpus(config, engines=True, learners=True)
    assert assign_gpus(wanted, 2, collectives).backend == collectives
    assert assign_gpus(wanted, 1, collectives).backend == "gloo"  # which shares a device
    chosen = role_environment(config, "engine-0", (1,))
    assert {name: chosen[name] for name in VARIABLES & set(chosen)} == dict.fromkeys(variables, "1")
    other = next(one for one in ("cuda", "npu", "xpu") if one != type_)
    with pytest.raises(ConfigError, match=rf"{other}, but .*; allowed here are auto, cpu and {type_}$"):
        choose_device(other)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (CUDA, {}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "4,5,7"}, {"CUDA_VISIBLE_DEVICES": "4,7"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "GPU-89, GPU-1c, GPU-77"}, {"CUDA_VISIBLE_DEVICES": "GPU-89,GPU-77"}),
        (CUDA, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-GPU-c/1/0"}, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-GPU-c/1/0"}),
        (CUDA, {"HIP_VISIBLE_DEVICES": "4,5,6"}, {"CUDA_VISIBLE_DEVICES": "0,2"}),
        (ROCM, {"HIP_VISIBLE_DEVICES": "4,5,6"}, dict.fromkeys(ROCM.visible, "4,6")),
        (ROCM, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, dict.fromkeys(ROCM.visible, "4,6")),
        (ROCM, {"HIP_VISIBLE_DEVICES": "1,2,3", "CUDA_VISIBLE_DEVICES": ""}, dict.fromkeys(ROCM.visible, "1,3")),
        (ROCM, {"ROCR_VISIBLE_DEVICES": "4,5,6"}, dict.fromkeys(ROCM.visible, "0,2")),  # HIP counts those that are left
        (NPU, {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}, {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}),
        (XPU, {"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, {"ZE_AFFINITY_MASK": "0.0,1.0"}),
    ],
)
def test_a_process_sees_its_own_of_the_devices_that_the_user_has_chosen(
    kind: AcceleratorKind, given: Mapping[str, str], expected: Mapping[str, str]
) -> None:
    assert visible_devices(kind, (0, 2), given) == expected


def test_a_variable_that_names_fewer_devices_than_there_are_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^ZE_AFFINITY_MASK: 0 names 1 devices, and torch sees 2; name each of them$"
    ):
        visible_devices(XPU, (1,), {"ZE_AFFINITY_MASK": "0"})


def test_roles_get_the_gpus_that_the_user_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first two of the host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    a_host_with(monkeypatch, CUDA, 2)
    config = load("quickstart", KEYS)
    gpus = assign_gpus(needed_gpus(config, engines=True, learners=True), 2, "nccl").gpus
    seen = {role: role_environment(config, role, its)["CUDA_VISIBLE_DEVICES"] for role, its in gpus.items()}
    assert seen == {"learner-0": "4", "engine-0": "5"}
    assert "CUDA_VISIBLE_DEVICES" not in role_environment(config, "worker-0")
    assert "learner-0 on GPU 4, engine-0 on GPU 5; collectives run on nccl" in devices(RunInputs(config))


def test_a_process_with_npus_asks_for_npus() -> None:
    """A process in which torch has a backend of that name (`tests/npu.py`), and the code that a role runs."""
    environment = os.environ | {accelerator.NPU.visible[0]: "4,5"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("npu.py"))],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["kind"], found["count"], found["device"]) == ("NPU", 2, "npu:0")
    assert found["refused"].endswith("; allowed here are auto, cpu and npu")
    assert found["gpus"] == {"learner-0": 1, "engine-0": 1}
    assert found["devices"].endswith("learner-0 on GPU 4, engine-0 on GPU 5; collectives run on hccl")
    assert found["visible"] == "5"
    assert "megatron computes on CUDA devices and on CPUs, and torch sees an NPU here" in found["megatron"]
    assert found["free"] == 1 << 30
    assert "npu:hccl" in found["backends"]
    assert found["maximum"] == 1.5  # of float64, on the CPU
    assert found["rows"] == [[1.0, 1.0, 1.0]] * 2
    assert found["received"]
    assert found["streams"] == ["npu:1"]
