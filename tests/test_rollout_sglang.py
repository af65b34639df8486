"""What is so only of SGLang: how its server starts, what our plugin adds to it. The rest is in the conformance suite."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from slipstream.configs.engines import Sglang, Vllm
from slipstream.configs.schema import Agent, Config, Model, Partial, Rollout
from slipstream.errors import ConfigError, EngineError
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.sglang import launch as sglang_server
from slipstream.rollout.engines.sglang.client import SglangEngine
from slipstream.tests import tiny
from slipstream.weightsync.plan import BroadcastSource, FileSource, GroupPlan, TransferPlan

PROMPT = [5, 6, 7, 8, 9]
LONG = SamplingParams(max_tokens=900)


def configure(folder: Path, partial: Partial = "recompute", **engine: object) -> Config:
    return Config(
        model=Model(path=str(folder)),
        agent=Agent(max_tokens=tiny.CONTEXT),
        rollout=Rollout(engine=msgspec.structs.replace(Sglang(memory="64MiB"), **engine), partial=partial),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's address and process, killed with all its children."""
    port = tiny.free_port()
    with started(folder, port, tmp_path_factory.mktemp("log") / "server.log") as process:
        yield f"http://{servers.LOOPBACK}:{port}", process


@contextlib.contextmanager
def started(folder: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    config = configure(folder)
    with log.open("wb") as out, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            sglang_server.command(config, servers.LOOPBACK, port),
            env=os.environ | sglang_server.environment(config) | {"TMPDIR": temporary},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@pytest.fixture
async def engine(server: tuple[str, subprocess.Popen[bytes]]) -> AsyncIterator[SglangEngine]:
    client = SglangEngine(
        "sglang", server[0], vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, initial_version=0, push_s=20.0
    )
    await client.wait_ready(180.0)
    yield client
    await client.close()


async def running(engine: SglangEngine, count: int) -> None:
    """Return when exactly `count` requests decode; which only polling shows."""
    async with asyncio.timeout(60):
        while (await engine.get_load()).running != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_the_kv_cache_is_as_large_as_asked(folder: Path) -> None:
    # Two layers, keys and values, one head of 32 numbers of 4 bytes: 512 bytes per token.
    assert "--max-total-tokens=131072" in sglang_server.command(configure(folder), servers.LOOPBACK, 1)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"memory": "256KiB"}, r"holds 512 tokens of this model, but one episode may have agent.max_tokens = 1024"),
        ({"memory": "0.5"}, "write a size"),
    ],
)
def test_what_cannot_start_is_refused_before_it_starts(folder: Path, engine: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sglang_server.command(configure(folder, **engine), servers.LOOPBACK, 1)


@pytest.mark.parametrize(
    ("python", "says"),
    [("/nowhere/python", "'/nowhere/python' is not a Python that runs"), (sys.executable, "has no sglang")],
)
def test_a_python_without_sglang_is_refused_before_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, python: str, says: str
) -> None:
    monkeypatch.setenv(sglang_server.PYTHON, python)
    with pytest.raises(ConfigError, match=says):
        sglang_server.command(configure(folder), servers.LOOPBACK, 1)


@pytest.mark.parametrize(
    ("installed", "device"),
    [
        ({"torch": "2.13.0+cpu"}, "cpu"),
        ({"torch": "2.13.0+cpu", "torch_npu": "2.13.0"}, "npu"),
        ({"torch": "2.13.0+xpu"}, "xpu"),
        ({"torch": "2.13.0+rocm7.2"}, None),
        ({"torch": "2.13.0+cu130"}, None),
    ],
)
def test_it_computes_on_what_the_torch_of_its_python_is_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], device: str | None
) -> None:
    """None: SGLang finds CUDA and ROCm by itself. What stands for the Python answers as one with these packages would."""
    python = tmp_path / "python"
    answer = {"sglang": "0.5.23", "torch_npu": None, "plugin": True} | installed
    python.write_text(f"#!/bin/sh\necho '{msgspec.json.encode(answer).decode()}'\n")
    python.chmod(0o755)
    monkeypatch.setenv(sglang_server.PYTHON, str(python))
    line = sglang_server.command(configure(folder), servers.LOOPBACK, 1)
    assert [word for word in line if word.startswith("--device")] == ([f"--device={device}"] if device else [])
    assert sglang_server.serves_on_cpu(configure(folder)) == (device == "cpu")


def test_an_old_build_in_the_working_directory_hides_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "slipstream_rl.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: slipstream-rl\nVersion: 0\n")
    (old / "entry_points.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    sglang_server._device.cache_clear()
    assert "-P" in sglang_server.command(configure(folder), servers.LOOPBACK, 1)


def test_another_kinds_config_is_refused(folder: Path) -> None:
    config = msgspec.structs.replace(configure(folder), rollout=Rollout(engine=Vllm()))
    with pytest.raises(ConfigError, match="not sglang"):
        sglang_server.command(config, servers.LOOPBACK, 1)


def test_spans_are_exact_with_kept_kv_only_without_overlap(folder: Path) -> None:
    def overlaps(partial: Partial) -> bool:
        command = sglang_server.command(configure(folder, partial), servers.LOOPBACK, 1)
        return "--disable-overlap-schedule" not in command

    assert [overlaps("recompute"), overlaps("keep_kv"), overlaps("abort_resume")] == [True, False, True]


def test_ranks_on_cpus_compile_nothing_and_the_callers_own_python_path_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    variables = sglang_server.environment(configure(folder, options={"tensor_parallel_size": 2}))
    assert variables["PYTHONPATH"] == f"{sglang_server.SHIM}{os.pathsep}/mine"
    assert variables["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert variables["TORCH_COMPILE_DISABLE"] == "1"  # what a server compiles before it is ready takes half a minute


def test_a_server_whose_port_is_taken_ends(folder: Path, tmp_path: Path) -> None:
    """The process that has the port accepts connections and never answers, as a scheduler's own sockets do."""
    log = tmp_path / "server.log"
    with (
        socket.create_server((servers.LOOPBACK, 0)) as taken,
        started(folder, taken.getsockname()[1], log) as process,
    ):
        assert process.wait(180) == 1
        assert f"cannot listen at 127.0.0.1:{taken.getsockname()[1]}" in log.read_text()


async def test_generation_goes_on_while_the_server_waits_for_a_group(engine: SglangEngine) -> None:
    """The learner that it was told to meet never comes."""
    with socket.create_server((servers.LOOPBACK, 0)) as silent:
        port = silent.getsockname()[1]
        plan = GroupPlan("silent", "gloo", servers.LOOPBACK, port, rank_offset=1, world_size=2, timeout_s=6.0)
        await engine.generate(
            PROMPT, SamplingParams(max_tokens=64)
        )  # what a server does at its first request only is done
        await engine.join_group(plan)
        began = time.monotonic()
        completion = await engine.generate(PROMPT, SamplingParams(max_tokens=64))
        assert len(completion.token_ids) == 64
        assert time.monotonic() - began < plan.timeout_s
    transfer = TransferPlan(7, (), (), (), 1 << 20, BroadcastSource(), "", False, "tcp://127.0.0.1:9", "sglang")
    with pytest.raises(EngineError, match="group"):
        await engine.receive_weights(transfer)
    assert await engine.version() == 0


async def test_a_version_that_is_not_staged_is_refused_and_the_old_one_serves_on(
    engine: SglangEngine, tmp_path: Path
) -> None:
    waiting = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=300)))
    await engine.pause("recompute")
    with pytest.raises(EngineError, match="version 3 is not staged here, nothing is"):
        await engine.swap_weights(3)
    plan = TransferPlan(
        3,
        ("x",),
        ("float32",),
        ((1,),),
        1 << 20,
        FileSource(str(tmp_path / "x")),
        "",
        False,
        "tcp://127.0.0.1:9",
        "sglang",
    )
    await engine.receive_weights(plan)
    with pytest.raises(EngineError, match="the model has no tensor 'x'"):
        await engine.swap_weights(3)
    await engine.resume()
    completion = await waiting
    assert [span.version for span in completion.version_spans] == [0]
    assert await engine.version() == 0


@pytest.mark.parametrize("mode", ["recompute", "keep_kv", "abort_resume"])
async def test_a_request_that_came_in_a_pause_and_was_cancelled_never_runs(engine: SglangEngine, mode: Partial) -> None:
    await engine.pause(mode)
    held = asyncio.create_task(engine.generate(PROMPT, LONG))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(held, 0.3)
    await engine.resume()
    (token,) = (await engine.generate(PROMPT, SamplingParams(max_tokens=1))).token_ids
    assert 0 <= token < tiny.VOCABULARY
    await running(engine, 0)


async def test_a_pause_that_aborts_takes_milliseconds(engine: SglangEngine) -> None:
    """The shortest of a few: on a busy machine any may take longer."""
    took = list[float]()
    while len(took) < 5 and min(took, default=1.0) >= 1.0:  # SGLang itself waits a second first
        requests = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(4)]
        await running(engine, 4)
        began = time.monotonic()
        await engine.pause("abort_resume")
        took.append(time.monotonic() - began)
        partials = await asyncio.gather(*requests)
        assert {partial.finish_reason for partial in partials} == {"abort"}
        assert all(partial.token_ids for partial in partials)
        await engine.resume()
    assert min(took) < 1.0
    await engine.resume()


async def test_one_abort_ends_one_request(engine: SglangEngine) -> None:
    """SGLang aborts by prefix: of ids of one length none is another's."""
    requests = [asyncio.create_task(engine.generate(PROMPT, LONG)) for _ in range(6)]
    await running(engine, 6)
    requests[0].cancel()
    await running(engine, 5)
    completions = await asyncio.gather(*requests[1:])
    assert {(len(c.token_ids), c.finish_reason) for c in completions} == {(900, "length")}


async def test_an_abort_in_the_queue_repeats_no_token(engine: SglangEngine, folder: Path) -> None:
    """A retracted request is queued; SGLang then answers its abort with the last token once more."""
    request = asyncio.create_task(engine.generate(PROMPT, LONG))
    await running(engine, 1)
    await engine.pause("recompute")
    await engine.pause("abort_resume")
    partial = await asyncio.wait_for(request, 60)
    await engine.resume()
    model = tiny.load(folder)
    rows = tiny.logprobs(model, [*PROMPT, *partial.token_ids])[len(PROMPT) - 1 :]
    expected = [float(row[token]) for row, token in zip(rows, partial.token_ids, strict=True)]
    assert partial.logprobs == pytest.approx(expected, abs=1e-4)
    assert partial.version_spans[-1].end == len(partial.token_ids) > 0


async def test_the_server_ends_with_its_scheduler_and_leaves_no_process(
    engine: SglangEngine, server: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """The last test: it kills the server."""
    family = psutil.Process(server[1].pid).children(recursive=True)
    scheduler = max(family, key=lambda process: process.memory_info().rss)
    scheduler.kill()
    assert await asyncio.to_thread(server[1].wait, 60) != 0
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 60)
    assert alive == []
