"""What is special about our own server: its wire, who is refused, what ends with its client, how it is started and how it ends.

What every engine must do is in tests/conformance; the model behind the wire is in test_rollout_server_model.py.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec
import pytest
from slipstream.common import accelerator
from slipstream.configs.engines import Fake, Servers, Transformers, Vllm
from slipstream.configs.schema import Agent, Config, Model, Rollout
from slipstream.errors import ConfigError, with_deadline
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.base import EngineFailure, SamplingParams
from slipstream.rollout.engines.server import __main__ as server_process
from slipstream.rollout.engines.server import launch as own_server
from slipstream.rollout.engines.server.contract import EngineServer
from slipstream.rollout.engines.server.launch import Options
from slipstream.rollout.engines.transformers import engine as transformers_engine
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny

PROMPT = [(3 * j) % 440 + 4 for j in range(20)]
LONG = 900
"""Tokens that take a wide model seconds."""


def configure(folder: Path, engine: Servers) -> Config:
    rollout = Rollout(engine=engine)  # type: ignore[arg-type]
    return Config(seed=5, model=Model(path=str(folder)), agent=Agent(max_tokens=tiny.CONTEXT), rollout=rollout)


def client(url: str) -> VllmEngine:
    return VllmEngine("own", url, vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, initial_version=0)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that decodes two sequences at once."""
    folder = tmp_path_factory.mktemp("own")
    config = configure(tiny.tiny_qwen3(folder / "model", wide=True), Transformers(max_concurrent=2, memory="16MiB"))
    port = tiny.free_port()
    url = f"http://127.0.0.1:{port}"

    async def ready() -> None:
        engine = client(url)
        await engine.wait_ready(120.0)
        await engine.close()

    command = own_server.command(config, "127.0.0.1", port, seed=5)
    with tiny.server(command, own_server.environment(config), folder / "server.log"):
        asyncio.run(ready())
        yield url


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def request(max_tokens: int = 40, **changes: object) -> dict[str, object]:
    params = {"max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
    return {"token_ids": PROMPT, "sampling_params": params, "stream": True} | changes


async def choices(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The choice in each chunk of a stream; the stream must end as vLLM's do."""
    last = b""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])["choices"][0]
        last = line.strip() or last
    assert last == b"data: [DONE]"


async def running(http: aiohttp.ClientSession, url: str) -> int:
    """Sequences that the server has, decoding or waiting."""
    async with http.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_requests_")]
    assert len(counts) == 2
    return int(sum(counts))


async def until_idle(http: aiohttp.ClientSession, url: str) -> None:
    async def idle() -> None:
        while await running(http, url):
            pass

    await with_deadline(60.0, idle(), who="the test", waits_for="an idle server", hint="a request was not cancelled")


async def test_every_chunk_has_the_spans_so_far(http: aiohttp.ClientSession, url: str) -> None:
    for interval, sizes in ((None, [1, 16, 16, 7]), (30, [1, 30, 9])):
        params = {"max_tokens": 40, "logprobs": 0, "ignore_eos": True, "stream_interval": interval}
        async with http.post(url + "/inference/v1/generate", json=request(sampling_params=params)) as response:
            chunks = [choice async for choice in choices(response)]
        assert [len(chunk["token_ids"]) for chunk in chunks] == sizes
        assert [len(chunk["logprobs"]["content"]) for chunk in chunks] == sizes
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        assert [chunk["weight_versions"] for chunk in chunks] == [
            [{"version": "default", "start": 0, "end": end}] for end in ends
        ]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(sizes) - 1) + ["length"]


async def test_an_answer_in_one_piece_is_the_stream_put_together(http: aiohttp.ClientSession, url: str) -> None:
    params = {"max_tokens": 40, "logprobs": 0, "ignore_eos": True, "seed": 3}
    async with http.post(url + "/inference/v1/generate", json=request(sampling_params=params)) as response:
        streamed = [token async for choice in choices(response) for token in choice["token_ids"]]
    async with http.post(
        url + "/inference/v1/generate", json=request(sampling_params=params, stream=False)
    ) as response:
        (whole,) = (await response.json())["choices"]
    assert whole["token_ids"] == streamed
    assert whole["weight_versions"] == [{"version": "default", "start": 0, "end": 40}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": []}, "a prompt of 0 tokens"),
        ({"token_ids": [1] * tiny.CONTEXT}, f"allowed are 1 to {tiny.CONTEXT - 1}"),
        ({"token_ids": [5, tiny.VOCABULARY]}, "512 is outside the vocabulary"),
        ({"token_ids": [-1, 5]}, "-1 is outside the vocabulary"),
        ({"token_ids": ["a"]}, "Expected `int`"),
        ({"sampling_params": {"min_p": 0.1}}, "unknown field `min_p`"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"max_tokens": 8, "prompt_logprobs": 0}}, "max_tokens=1"),
        ({"lora": "x"}, "unknown field `lora`"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_nothing_else_happens(
    http: aiohttp.ClientSession, url: str, changes: dict[str, object], why: str
) -> None:
    async with http.post(url + "/inference/v1/generate", json=request(**changes)) as response:
        assert response.status == 400
        assert why in (await response.json())["error"]["message"]
    assert await running(http, url) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=wait", {}),
        ("/pause?clear_cache=perhaps", {}),
        ("/finish_weight_update", {"weight_version": "latest"}),
        ("/update_weights", {"update_info": {"plan": {"version": 1}}}),
        ("/init_weight_transfer_engine", {}),
    ],
)
async def test_a_control_call_that_makes_no_sense_is_refused(
    http: aiohttp.ClientSession, url: str, path: str, body: dict[str, object]
) -> None:
    async with http.post(url + path, json=body) as response:
        assert response.status == 400
    async with http.get(url + "/is_paused") as response:
        assert await response.json() == {"is_paused": False}


async def test_a_swap_to_what_is_not_staged_is_refused(http: aiohttp.ClientSession, url: str) -> None:
    async with http.post(url + "/finish_weight_update", json={"weight_version": "9"}) as response:
        assert response.status == 500
        assert "version 9 is not staged" in (await response.json())["error"]["message"]
    async with http.get(url + "/weight_info") as response:
        assert await response.json() == {"weight_version": "default"}


async def test_a_request_ends_with_its_client(http: aiohttp.ClientSession, url: str) -> None:
    engine = client(url)
    for stream in (True, False):
        before = (await engine.get_load()).tokens or 0
        task = asyncio.create_task(
            http.post(url + "/inference/v1/generate", json=request(LONG, stream=stream)).__aenter__()
        )
        if stream:
            response = await task
            await response.content.readline()
            assert await running(http, url) == 1
            response.close()
        else:
            while not await running(http, url):
                assert not task.done()
            task.cancel()
        await until_idle(http, url)
        assert ((await engine.get_load()).tokens or 0) - before < LONG
    await engine.close()


async def test_an_id_belongs_to_one_request_at_a_time(http: aiohttp.ClientSession, url: str) -> None:
    body = request(LONG, request_id="one")
    async with http.post(url + "/inference/v1/generate", json=body) as first:
        await first.content.readline()
        async with http.post(url + "/inference/v1/generate", json=body) as second:
            assert second.status == 400
            assert "'one' is in use" in await second.text()
        ids = {"request_ids": ["generate-tokens-one", "one", "generate-tokens-two"]}
        async with http.post(url + "/abort_requests", json=ids) as response:
            assert (await response.json())["aborted"] == 1
        rest = [choice async for choice in choices(first)]
        assert rest[-1]["finish_reason"] == "abort"
        assert rest[-1]["weight_versions"][0]["end"] < LONG
    assert await running(http, url) == 0


async def test_a_score_waits_for_no_slot(http: aiohttp.ClientSession, url: str) -> None:
    engine = client(url)
    busy = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=LONG))) for _ in range(4)]
    while await running(http, url) < 4:
        assert not any(task.done() for task in busy)
    scores = await engine.score(PROMPT)
    assert len(scores) == len(PROMPT) - 1
    assert not any(task.done() for task in busy)
    async with http.post(url + "/abort_requests", json={}) as response:  # none named: all
        assert (await response.json())["aborted"] == 4
    assert {completion.finish_reason for completion in await asyncio.gather(*busy)} == {"abort"}
    await engine.close()


# ---- how it is started, and how it ends


def test_the_command_line_has_every_option() -> None:
    config = configure(Path("m"), Fake(max_concurrent=3, memory="1GiB"))
    python, _, module, argument = own_server.command(config, "127.0.0.1", 4000, seed=7)
    assert (python, module) == (sys.executable, "slipstream.rollout.engines.server")
    options = msgspec.json.decode(argument, type=Options)
    assert (options.kind, options.model, options.host, options.port) == ("fake", "m", "127.0.0.1", 4000)
    assert (options.memory, options.max_concurrent, options.max_tokens) == (1 << 30, 3, tiny.CONTEXT)
    assert (options.seed, options.replica) == (7, 2)
    with pytest.raises(ConfigError, match="vllm"):
        own_server.command(configure(Path("m"), Vllm()), "127.0.0.1", 4000)


def test_a_share_of_memory_is_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    share = configure(Path("m"), Transformers(memory="0.85"))
    monkeypatch.setattr(accelerator, "current", lambda: accelerator.CUDA)
    (*_, argument) = own_server.command(share, "127.0.0.1", 4000)
    assert msgspec.json.decode(argument, type=Options).memory == 0.85
    monkeypatch.setattr(accelerator, "current", lambda: None)
    for refused in (share, configure(Path("m"), Fake(memory="0.85"))):
        with pytest.raises(ConfigError, match=r"^rollout\.engine\.memory: '0\.85' is not allowed here; .*128MiB$"):
            own_server.command(refused, "127.0.0.1", 4000)


@pytest.mark.parametrize("engine", [Vllm(), Transformers(), Fake()], ids=servers.kind_of)
def test_no_module_of_the_folder_a_run_was_started_in_gets_into_a_server(engine: Servers, tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    environment = os.environ | servers.environment(configure(Path("m"), engine))
    below = "import subprocess, sys, queue; subprocess.run([sys.executable, '-c', 'import queue'], check=True)"
    subprocess.run([sys.executable, "-c", below], cwd=tmp_path, env=environment, check=True, timeout=60)


def test_a_model_that_is_not_there_ends_the_server_with_one_line(tmp_path: Path) -> None:
    config = configure(tmp_path, Transformers())
    environment = os.environ | own_server.environment(config)
    arguments = own_server.command(config, "127.0.0.1", tiny.free_port())
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "ConfigError: model.path" in ended.stderr.splitlines()[-1]


FAILING = "from slipstream.tests.test_rollout_server import serve_and_fail; serve_and_fail()"


def serve_and_fail() -> NoReturn:
    """Be a server whose engine thread fails in its first step."""
    serve = transformers_engine.serve

    def failing(options: Options) -> EngineServer:
        served = serve(options)
        served.runner.step = lambda: 1 / 0  # type: ignore[method-assign,return-value]
        return served

    transformers_engine.serve = failing
    sys.exit(server_process.main(sys.argv[1:]))


@pytest.mark.parametrize("end", ["engine thread", "SIGTERM"])
async def test_how_a_server_ends(tmp_path: Path, http: aiohttp.ClientSession, end: str) -> None:
    config = configure(tiny.tiny_qwen3(tmp_path / "model", wide=True), Transformers(memory="16MiB"))
    port = tiny.free_port()
    command = own_server.command(config, "127.0.0.1", port)
    if end == "engine thread":
        command[1:3] = ["-c", FAILING]
    url = f"http://127.0.0.1:{port}"
    engine = client(url)
    with tiny.server(command, own_server.environment(config), tmp_path / "log") as process:
        await engine.wait_ready(120.0)
        # A request under way keeps neither end waiting.
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=LONG)))
        if end == "SIGTERM":
            while not await running(http, url):
                assert not task.done()
            process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == (0 if end == "SIGTERM" else 1)
        with pytest.raises(EngineFailure):
            await task
    await engine.close()
    lines = (tmp_path / "log").read_text().splitlines()
    if end == "SIGTERM":
        assert not lines
    else:
        assert "its engine thread failed with ZeroDivisionError" in lines[-1]
