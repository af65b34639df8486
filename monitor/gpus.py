"""Gauges of the GPUs of a process, by NVML, the library beside NVIDIA's driver, through the package nvidia-ml-py where there is
one.

Invariants:
- Nothing here begins CUDA: a process that only looks takes no memory of a GPU.
- Without the package, the library or a driver there are no gauges, and one line at level DEBUG says why.
- What a GPU does not answer is missing for this second, and nothing else is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
GpuUsage = dict[str, float]


def gpu_gauges(visible: str | None) -> dict[str, dict[str, GpuUsage]]:
    """`gpus`, those that `visible`, a value of CUDA_VISIBLE_DEVICES, names, None all of them; empty where there are none. By the
    driver's number, a part of a GPU by its name `MIG-...`:

    `utilization`, the share of the time in which it computed, 0 to 1; `memory` in use and `memory_total`, bytes; `power_w`, watts;
    `temperature_c`, degrees Celsius. They are of the whole GPU, whichever processes use it.
    """
    nvml = library()
    if nvml is None:
        return {}
    try:
        handles = _handles(nvml, visible)
    except nvml.NVMLError:
        return {}
    gpus = {name: usage for name, handle in handles.items() if (usage := _usage(nvml, handle))}
    return {"gpus": gpus} if gpus else {}


@functools.cache
def library() -> Any:
    """The module pynvml, after it has found a driver; None without."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        log.debug("no gauges of GPUs: %s", error)
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no gauges of GPUs: %s", error)
        return None
    return nvml


def _handles(nvml: Any, visible: str | None) -> dict[str, Any]:
    """As CUDA reads it: the GPUs before the first entry that names none. Numbers are those of CUDA_DEVICE_ORDER=PCI_BUS_ID, which
    are CUDA's own where all GPUs are alike. Raises NVMLError."""
    count, found = nvml.nvmlDeviceGetCount(), dict[str, Any]()
    for entry in map(str, range(count)) if visible is None else map(str.strip, visible.split(",")):
        if entry.startswith("MIG-"):
            name, find, argument = entry, nvml.nvmlDeviceGetHandleByUUID, entry
        else:
            number = int(entry) if entry.isdecimal() else _number_of(nvml, entry, count)
            if number is None or number >= count:
                break
            name, find, argument = str(number), nvml.nvmlDeviceGetHandleByIndex, number
        with contextlib.suppress(nvml.NVMLError):  # this one is lost
            found[name] = find(argument)
    return found


def _number_of(nvml: Any, uuid: str, count: int) -> int | None:
    """Of the GPU whose UUID begins with `uuid`, for example `GPU-8932f937`."""
    for number in range(count if uuid.startswith("GPU-") else 0):
        with contextlib.suppress(nvml.NVMLError):
            if str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(number))).startswith(uuid):
                return number
    return None


def _usage(nvml: Any, handle: Any) -> GpuUsage:
    usage, missing = GpuUsage(), contextlib.suppress(nvml.NVMLError, AttributeError)
    with missing:
        usage["utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with missing:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        usage |= {"memory": memory.used, "memory_total": memory.total}
    with missing:
        usage["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with missing:
        usage["temperature_c"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return usage
