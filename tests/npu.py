"""A stand-in for NPUs: a backend of torch under the name `npu`, as torch-npu registers one, whose devices are this host.

    torch.npu        how many devices there are, by ASCEND_RT_VISIBLE_DEVICES; streams and memory
    tensors          a shell on the device `npu` around a tensor in the host's memory, in which everything is computed
    hccl             gloo over these tensors, in the groups of pushes

As a program it says, as JSON, what Slipstream makes of such a host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as trees
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

HOST = 8  # devices of a host whose variable names none
MEMORY = 1 << 30
PUSH = "push"  # the name of its group
KEYS = ("rollout.engine.kind=transformers", "rollout.engine.replicas=1", "learner.backend.device=auto")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


class NpuModule:
    """`torch.npu`."""

    def __init__(self) -> None:
        self.current = 0
        self.streams: list[torch.device] = []  # on which streams of their own were made

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return len(os.environ[VISIBLE].split(",")) if os.environ.get(VISIBLE) else HOST

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: torch.device) -> None:
        self.current = device.index or 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return MEMORY, MEMORY

    def empty_cache(self) -> None:
        pass

    def Stream(self, device: torch.device) -> object:
        self.streams.append(device)
        return object()

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


class NpuTensor(torch.Tensor):
    """A shell on the device around `inside`."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> NpuTensor:
        made = torch._C._acc.create_empty_tensor(inside.shape, inside.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        made.__class__ = NpuTensor
        return made

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


def register() -> NpuModule:
    """Once in a process."""
    module = NpuModule()
    _setup_privateuseone_for_python_backend("npu", backend_module=module)

    def compute(operator: Any, *arguments: Any, **named: Any) -> Any:
        """Any operator, inside of the shells."""
        inside, names = trees.tree_map_only(NpuTensor, lambda shell: shell.inside, (arguments, named))
        if "device" in names:
            names["device"] = torch.device("cpu")
        made = operator(*inside, **names)
        shells = {id(shell.inside): shell for shell in trees.tree_leaves(arguments) if isinstance(shell, NpuTensor)}
        return trees.tree_map_only(torch.Tensor, lambda one: shells.get(id(one)) or NpuTensor(one), made)

    library = torch.library.Library("_", "IMPL", "PrivateUse1")
    library.fallback(compute)
    kept.append(library)
    own = torch.library.Library("aten", "IMPL", "PrivateUse1")
    kept.append(own)

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return NpuTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
        return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        there = target.inside if isinstance(target, NpuTensor) else target
        there.copy_(source.inside if isinstance(source, NpuTensor) else source)
        return target

    own.impl("empty.memory_format", empty)
    own.impl("empty_strided", empty_strided)
    own.impl("_copy_from", copy_from)
    dist.Backend.register_backend("hccl", make_hccl, extended_api=True, devices=["npu"])
    return module


kept: list[Any] = []  # a registration lasts as long as its object


class HcclStandIn(dist.ProcessGroup):
    """HCCL for the group of a push: gloo over the insides."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._inside = gloo(options)

    def broadcast(self, tensors: list[Any], options: Any = None) -> Any:
        return self._inside.broadcast([tensor.inside for tensor in tensors], options or dist.BroadcastOptions())


def gloo(options: Any) -> dist.ProcessGroupGloo:
    store = dist.PrefixStore("hccl", options.store)
    return dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)


def make_hccl(options: Any, _: Any) -> dist.ProcessGroup:
    """In torch's own groups, which take no group of Python beside another backend, gloo, which refuses tensors of the device."""
    return HcclStandIn(options) if options.group_id == PUSH else gloo(options)


# --- what Slipstream makes of it


def report(module: NpuModule) -> dict[str, Any]:
    from slipstream.common import accelerator
    from slipstream.configs import load
    from slipstream.launch.preflight import devices
    from slipstream.launch.resources import gpus_of, role_environment
    from slipstream.launch.run_inputs import RunInputs
    from slipstream.learner.distributed import choose_device

    config = load("quickstart", KEYS)
    kind = accelerator.current()
    return {
        "kind": kind.name if kind else "",
        "count": accelerator.count(),
        "device": str(choose_device("auto")),
        "refused": _error(lambda: choose_device("cuda")),
        "gpus": gpus_of(config),
        "devices": devices(RunInputs(config)),
        "visible": role_environment(config, "engine-0", (1,)).get(VISIBLE),
        "megatron": _error(_check_megatron),
        "free": accelerator.free_memory(choose_device("npu"))[0],
        **_collectives(),
        "received": _broadcast(torch.arange(100, dtype=torch.uint8)),
        "streams": [str(device) for device in module.streams],
    }


def _check_megatron() -> None:
    from slipstream.configs.backends import Megatron
    from slipstream.learner.megatron.fit import check_installed

    check_installed(Megatron())


def _collectives() -> dict[str, Any]:
    """A learner's rank, with the collectives that it joins, and what it adds over ranks."""
    from slipstream.learner.distributed import choose_device, gather_rows, join, maximum_of

    device = choose_device("auto")
    join(device, 30.0)
    rows = gather_rows(torch.ones(2, 3, dtype=torch.float64), device)
    found = {"backends": str(dist.get_backend_config()), "maximum": maximum_of(1.5, device), "rows": rows.tolist()}
    dist.destroy_process_group()
    return found


def _broadcast(data: torch.Tensor) -> bool:
    """Whether rank 1 of a group of a push holds on its device what rank 0 has sent from its own."""
    from slipstream.common import accelerator
    from slipstream.weightsync.broadcast import BroadcastGroup, Rendezvous
    from slipstream.weightsync.plan import GroupPlan

    rendezvous = Rendezvous("127.0.0.1", 30.0)
    plan = GroupPlan(PUSH, "hccl", "127.0.0.1", rendezvous.port, 1, world_size=2, timeout_s=30.0)
    into = torch.zeros_like(data).to("npu:1")

    def receive() -> None:
        device = torch.device("npu", 1)
        with accelerator.own_stream(device):
            BroadcastGroup(plan, 1, device).broadcast(into)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    BroadcastGroup(plan, 0, torch.device("npu", 0), rendezvous).broadcast(data.to("npu:0"))
    thread.join(30.0)
    return into.device.type == "npu" and torch.equal(into.cpu(), data)


def _error(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    json.dump(report(register()), sys.stdout)
