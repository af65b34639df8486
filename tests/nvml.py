"""A stand-in for NVML, the library of NVIDIA's driver, at the functions of the module pynvml that reach it."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
from slipstream.monitor import gpus

MIB = 1 << 20


class NVMLError(Exception):
    pass


class StandInNvml(ModuleType):
    """GPU number N computes N tenths of the time, uses N GiB of 80, draws 100 N W at 30 + N degrees; `refused` has the names of
    functions that fail, `lost` the numbers of GPUs that are gone."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, count: int, *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.count = count
        self.driver = driver
        self.refused = set[str]()
        self.lost = set[int]()
        self.begun = 0

    def _reach(self, name: str) -> None:
        if name in self.refused:
            raise NVMLError(f"{name}: Unknown Error")

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")
        self.begun += 1

    def nvmlDeviceGetCount(self) -> int:
        self._reach("nvmlDeviceGetCount")
        return self.count

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        if number in self.lost or not 0 <= number < self.count:
            raise NVMLError("GPU is lost")
        return number

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("MIG-"):
            raise NVMLError("Invalid Argument")
        return int(uuid.rpartition("-")[2])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}234abcd-0000"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        self._reach("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=10 * handle, memory=1)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._reach("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=handle * 1024 * MIB, total=80 * 1024 * MIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._reach("nvmlDeviceGetPowerUsage")
        return 100_000 * handle

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._reach("nvmlDeviceGetTemperature")
        return 30 + handle


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None) -> None:
    """Have `import pynvml` find `module`, or nothing, until the test ends."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpus, "library", functools.cache(gpus.library.__wrapped__))


def expected(number: int) -> dict[str, float]:
    """The gauges of a GPU of the stand-in."""
    memory = {"memory": number * 1024 * MIB, "memory_total": 80 * 1024 * MIB}
    return {"utilization": number / 10, **memory, "power_w": 100.0 * number, "temperature_c": 30 + number}
