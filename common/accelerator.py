"""The accelerator: the kind of device on which torch computes here beside the CPU, and what differs between the kinds.

    kind    torch's type    collectives          a process sees the devices that these variables name
    CUDA    cuda            nccl                 CUDA_VISIBLE_DEVICES
    ROCm    cuda            nccl, which is RCCL  HIP_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES
    NPU     npu             hccl                 ASCEND_RT_VISIBLE_DEVICES
    XPU     xpu             xccl                 ZE_AFFINITY_MASK

Invariants:
- Code that means any of these devices asks this file. Code elsewhere that says `cuda` needs CUDA itself, or ROCm as torch presents
  it: Triton kernels, FlashAttention, Megatron-core.
- Devices are numbered from 0 as this process sees them. `visible_devices` translates numbers into the names that the user's
  environment has for the devices.
- `torch.accelerator` says which kind there is, and how many. What a device does is asked of its own module (`torch.cuda`,
  `torch.npu`): of those functions of `torch.accelerator` a plugin of torch implements few.
- torch is imported by the functions that ask it, not by this file.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

CollectiveBackend = Literal["gloo", "nccl", "hccl", "xccl"]
ANYWHERE = ("auto", "cpu")  # values of `learner.backend.device` that need no accelerator


class AcceleratorKind(msgspec.Struct, frozen=True):
    """A kind of device. `type` is torch's name for it, and a value of `learner.backend.device`."""

    name: str
    type: str
    collectives: CollectiveBackend
    visible: tuple[str, ...]  # variables that name the devices of a process; all get the same value, the first wins
    needs: str  # what must be installed for torch to see it
    kubernetes: str  # what the vendor's device plugin calls it
    resource: str = "GPU"  # what Ray calls it
    adds_float64: bool = True  # whether its collectives do


CUDA = AcceleratorKind("CUDA", "cuda", "nccl", ("CUDA_VISIBLE_DEVICES",), "a build of torch for CUDA", "nvidia.com/gpu")
ROCM = AcceleratorKind(
    name="ROCm",
    type="cuda",
    collectives="nccl",
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    needs="a build of torch for ROCm",
    kubernetes="amd.com/gpu",
)
NPU = AcceleratorKind(
    name="NPU",
    type="npu",
    collectives="hccl",
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    needs="the package torch-npu",
    kubernetes="huawei.com/Ascend910",
    resource="NPU",
    adds_float64=False,
)
XPU = AcceleratorKind("XPU", "xpu", "xccl", ("ZE_AFFINITY_MASK",), "a build of torch for XPU", "gpu.intel.com/xe")
KINDS = (CUDA, ROCM, NPU, XPU)


def current() -> AcceleratorKind | None:
    """The kind of the devices that torch sees here; None where it sees none, or one of a kind that is not in `KINDS`."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    if found.type == "cuda":
        return ROCM if torch.version.hip else CUDA
    return next((kind for kind in KINDS if kind.type == found.type), None)


def count() -> int:
    """How many devices torch sees here."""
    import torch

    return torch.accelerator.device_count() if current() else 0


def named(device: str) -> AcceleratorKind | None:
    """The kind that `device`, a value of `learner.backend.device`, names: for `auto` the one here, for `cpu` none."""
    here = current() if device != "cpu" else None
    if device in ANYWHERE or (here and here.type == device):
        return here
    return next(kind for kind in KINDS if kind.type == device)


def require(device: str, key: str) -> None:
    """Raises ConfigError where `device`, the value of config key `key`, is a type that torch does not see here."""
    here = current()
    if device in ANYWHERE or (here and here.type == device):
        return
    kinds = [kind for kind in KINDS if kind.type == device]
    allowed = [*ANYWHERE, *([here.type] if here else [])]
    raise ConfigError(
        f"{key}: {device}, but torch sees no {' or '.join(kind.name for kind in kinds)} device here, for which it needs a driver "
        f"and {' or '.join(kind.needs for kind in kinds)}; allowed here are {', '.join(allowed[:-1])} and {allowed[-1]}"
    )


def device_of_rank(rank: int) -> torch.device:
    """Device number `rank` of this process, or the CPU where torch sees no accelerator."""
    import torch

    here = current()
    return torch.device(here.type, rank) if here else torch.device("cpu")


def device_names(kind: AcceleratorKind, devices: int, environment: Mapping[str, str]) -> list[str]:
    """What the `devices` of a process with `environment` are called there, in its own order: numbers of the driver, UUIDs, names of
    MIG devices. Raises ConfigError where its variable names fewer."""
    variable = next((name for name in kind.visible if environment.get(name)), "")
    if not variable:
        return [str(number) for number in range(devices)]
    names = [name.strip() for name in environment[variable].split(",")]
    if devices > len(names):
        raise ConfigError(
            f"{variable}: {environment[variable]} names {len(names)} devices, and torch sees {devices}; name each of them"
        )
    return names


def visible_devices(kind: AcceleratorKind, numbers: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a process sees the devices `numbers` only, of those that a process with `environment` sees. Raises
    ConfigError as `device_names`."""
    names = device_names(kind, max(numbers) + 1, environment)
    return dict.fromkeys(kind.visible, ",".join(names[number] for number in numbers))


def has_been_used() -> bool:
    """Whether this process has a context on the accelerator already: variables that choose devices come too late then."""
    module = _module()
    return module is not None and bool(getattr(module, "is_initialized", lambda: False)())


def select(device: torch.device) -> None:
    """Make `device` the one that this process uses where none is named; nothing for a CPU."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of the memory of `device`, other processes included."""
    import torch

    return torch.get_device_module(device).mem_get_info(device)


def empty_cache() -> None:
    """Give the memory that torch keeps of freed tensors back to the device."""
    if (module := _module()) is not None:
        module.empty_cache()


def allocated_memory(*, peak: bool = False) -> int:
    """Bytes of this process's tensors on the current device, now or at most so far; 0 without an accelerator."""
    module = _module()
    if module is None:
        return 0
    return module.max_memory_allocated() if peak else module.memory_allocated()


def synchronize() -> None:
    """Wait for all that this process has asked of the current device."""
    if (module := _module()) is not None:
        module.synchronize()


def synchronize_stream(device: torch.device) -> None:
    """Wait for the current stream of `device` only; nothing for a CPU."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Work inside this context has a stream of its own, the same for the life of the process; nothing for a CPU."""
    import torch

    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.get_device_module(device).stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> Any:
    """One for the life of the process: torch's allocator keeps freed memory per stream, and the KV cache leaves no room."""
    import torch

    return torch.get_device_module(device).Stream(device)


def _module() -> Any:
    """torch's module for the accelerator, `torch.cuda` for example; None without one."""
    import torch

    here = current()
    return torch.get_device_module(here.type) if here else None
