"""Gauges of GPUs: those of a process alone, and nothing where NVML does not answer. NVML itself is a stand-in, see `nvml.py`."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
from slipstream.monitor.gpus import gpu_gauges
from slipstream.monitor.timeline import TimelineWriter, read_series
from slipstream.tests.nvml import StandInNvml, expected, install
from slipstream.tests.servers import needs, python_of


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,1", [3, 1]),
        (" 0 , 2", [0, 2]),
        ("GPU-1234abcd-0000,3", [1, 3]),
        ("GPU-2,GPU-0", [2, 0]),
        ("1,7,2", [1]),
        ("-1,2", []),
        ("NoDevFiles", []),
        ("0,GPU-9,1", [0]),
    ],
)
def test_the_gpus_are_those_that_cuda_would_see(
    visible: str | None, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, StandInNvml(4))
    found = {str(number): expected(number) for number in numbers}
    assert gpu_gauges(visible) == ({"gpus": found} if numbers else {})


def test_a_part_of_a_gpu_has_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml(4)
    nvml.refused = {"nvmlDeviceGetUtilizationRates"}  # as NVML has it of parts
    install(monkeypatch, nvml)
    (usage,) = gpu_gauges("MIG-3")["gpus"].values()
    assert "utilization" not in usage
    assert usage["memory"] == expected(3)["memory"]


def test_what_a_gpu_does_not_answer_is_missing_for_that_second(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml(2)
    install(monkeypatch, nvml)
    nvml.refused = {"nvmlDeviceGetPowerUsage"}
    without = {name: value for name, value in expected(1).items() if name != "power_w"}
    assert gpu_gauges("1") == {"gpus": {"1": without}}
    nvml.lost = {1}
    assert gpu_gauges("0,1")["gpus"].keys() == {"0"}
    assert gpu_gauges("GPU-1") == {}
    nvml.refused = {"nvmlDeviceGetCount"}
    assert gpu_gauges("0") == {}
    nvml.refused, nvml.lost = set(), set()
    assert gpu_gauges("0,1") == {"gpus": {"0": expected(0), "1": expected(1)}}
    assert nvml.begun == 1


@pytest.mark.parametrize("module", [None, StandInNvml(1, driver=False)])
def test_without_the_package_or_a_driver_there_are_none_and_one_line(
    module: StandInNvml | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, module)
    with caplog.at_level(logging.DEBUG, "slipstream.monitor.gpus"):
        assert [gpu_gauges(None) for _ in range(3)] == [{}] * 3
    assert caplog.text.count("no gauges of GPUs: ") == 1


@needs("trackers")
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_the_real_package_without_a_driver_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (file,) = (python_of("trackers").parent.parent / "lib").glob("python3*/site-packages/pynvml.py")
    spec = importlib.util.spec_from_file_location("pynvml", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    install(monkeypatch, module)
    spec.loader.exec_module(module)
    with caplog.at_level(logging.DEBUG, "slipstream.monitor.gpus"):
        assert [gpu_gauges(None) for _ in range(3)] == [{}] * 3
    assert caplog.text.count("no gauges of GPUs: NVML Shared Library Not Found") == 1


def test_they_are_in_the_series_beside_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, StandInNvml(2))
    with TimelineWriter(tmp_path, "learner-0", lambda: {"phase": "train"} | gpu_gauges("1")):
        pass
    (_, line) = list(read_series(tmp_path))[-1]
    assert (line["gpus"], line["phase"]) == ({"1": expected(1)}, "train")
    assert line["rss"] > 0
