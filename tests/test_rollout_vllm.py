"""The vLLM client against a real server: what it samples, what it refuses, and weights that change under running requests."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.configs.schema import Config, Model, Rollout, Vllm
from slipstream.errors import ConfigError, DeadlineExceeded, EngineError, PolicyError, WeightSyncError
from slipstream.rollout import vllm_server
from slipstream.rollout.engine import Sampling
from slipstream.rollout.vllm import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.plan import PushReport
from slipstream.weightsync.publisher import Publisher
from transformers import PreTrainedModel

START_S = 180.0
TOLERANCE = 1e-4
VERSION = itertools.count(1)
GREEDY = Sampling(max_tokens=24, temperature=0.0)
PROMPTS = [[(7 * i + 3 * j) % 440 + 4 for j in range(20 + i)] for i in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny.tiny_qwen3(root / f"m{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    return [tiny.load(folder) for folder in folders]


@pytest.fixture(scope="module")
def url(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = tiny.free_port()
    with tiny.vllm(folders[0], port, tmp_path_factory.mktemp("log") / "server.log"):
        yield f"http://127.0.0.1:{port}"


def client(url: str, **changes: object) -> VllmEngine:
    settings = {"vocab_size": tiny.VOCABULARY, "max_model_len": tiny.CONTEXT, "request_s": 60.0, "push_s": 60.0}
    return VllmEngine("replica0", url, **(settings | changes))  # type: ignore[arg-type]


@pytest.fixture
async def engine(url: str) -> AsyncIterator[VllmEngine]:
    engine = client(url)
    await engine.wait_ready(START_S)
    yield engine
    await engine.close()


@pytest.fixture
def publisher(engine: VllmEngine) -> Iterator[Publisher]:
    publisher = make_publisher(engine)
    yield publisher
    publisher.close()


def make_publisher(*replicas: VllmEngine, push_s: float = 60.0, bucket_bytes: int = 64 << 10) -> Publisher:
    return Publisher(
        replicas,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=bucket_bytes,
        push_s=push_s,
        canary_tolerance=TOLERANCE,
        dtype="float32",
    )


async def push(publisher: Publisher, folder: Path, model: PreTrainedModel) -> PushReport:
    report = await publisher.publish(next(VERSION), tiny.weights(folder).items(), *tiny.canary(model))
    assert report.failed == {}
    return report


def worst(
    model: PreTrainedModel, prompt: list[int], completion: Completion, start: int = 0, end: int | None = None
) -> float:
    """Largest difference in nats between the completion's log-probs and the model's over its tokens `[start, end)`."""
    rows = tiny.logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
    pairs = list(zip(rows, completion.token_ids, completion.logprobs, strict=True))[start:end]
    return max(abs(float(row[token]) - logprob) for row, token, logprob in pairs)


async def test_a_server_without_a_version_labels_nothing_unless_told(engine: VllmEngine, url: str) -> None:
    assert await engine.version() is None
    with pytest.raises(EngineError, match="has no policy version yet"):
        await engine.generate(PROMPTS[0], GREEDY)
    told = client(url, initial_version=0)
    completion = await told.generate(PROMPTS[0], GREEDY)
    assert completion.version_spans == (VersionSpan(0, 24, 0),)
    assert await told.version() == 0
    await told.close()


async def test_tokens_and_logprobs_are_those_of_transformers(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    report = await push(publisher, folders[1], models[1])
    assert report.pushed == ("replica0",)
    assert report.canary <= TOLERANCE
    assert await engine.version() == report.version
    greedy = await asyncio.gather(*(engine.generate(p, GREEDY) for p in PROMPTS))
    for prompt, completion in zip(PROMPTS, greedy, strict=True):
        rows = tiny.logprobs(models[1], [*prompt, *completion.token_ids])[len(prompt) - 1 :]
        assert list(completion.token_ids) == rows.argmax(-1).tolist()
        assert worst(models[1], prompt, completion) <= TOLERANCE
        assert completion.version_spans == (VersionSpan(0, 24, report.version),)
    sampled = await engine.generate(PROMPTS[0], Sampling(max_tokens=40, temperature=1.0, seed=5), salt="a")
    assert worst(models[1], PROMPTS[0], sampled) <= TOLERANCE
    again = await engine.generate(PROMPTS[0], Sampling(max_tokens=40, temperature=1.0, seed=5), salt="b")
    assert again == sampled


async def test_only_named_tokens_stop_and_they_belong_to_the_completion(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    await push(publisher, folders[0], models[0])
    free = await engine.generate(PROMPTS[0], Sampling(max_tokens=600, seed=1))
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 600
    assert 3 in free.token_ids  # the model's own end-of-sequence token
    stop = free.token_ids[5]
    stopped = await engine.generate(PROMPTS[0], Sampling(max_tokens=600, seed=1, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_scores_are_exact_and_fresh(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    for folder, model in zip(folders, models, strict=True):
        await push(publisher, folder, model)
        ids, expected = tiny.canary(model)
        assert await engine.score(ids) == pytest.approx(expected, abs=TOLERANCE)


async def test_a_push_under_running_requests_has_exact_spans(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    before = (await push(publisher, folders[0], models[0])).version
    long = Sampling(max_tokens=400, temperature=0.0)
    first = asyncio.gather(*(engine.generate(p, Sampling(max_tokens=40, temperature=0.0)) for p in PROMPTS))
    running = [asyncio.create_task(engine.generate(p, long)) for p in PROMPTS]
    await first  # short requests came back: the long ones, sent after them, have sampled tokens too
    after = (await push(publisher, folders[1], models[1])).version
    for prompt, completion in zip(PROMPTS, await asyncio.gather(*running), strict=True):
        old, new = completion.version_spans
        assert (old.version, new.version, new.end) == (before, after, 400)
        assert worst(models[0], prompt, completion, 0, old.end) <= TOLERANCE
        assert worst(models[1], prompt, completion, new.start) <= TOLERANCE


async def test_a_second_push_reuses_the_group_and_is_quick(
    publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    await push(publisher, folders[0], models[0])
    group = publisher._group
    report = await push(publisher, folders[1], models[1])
    assert publisher._group is group
    assert 0 < report.transfer_ms <= report.pause_ms


async def test_the_canary_finds_one_wrong_tensor(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    weights = tiny.weights(folders[0])
    name = "model.layers.1.mlp.down_proj.weight"
    corrupted = weights | {name: -weights[name]}
    version = next(VERSION)
    with pytest.raises(WeightSyncError, match=rf"replica0 does not hold version {version}: after two pushes .* nats"):
        await publisher.publish(version, corrupted.items(), *tiny.canary(models[0]))
    assert (await push(publisher, folders[0], models[0])).pushed == ("replica0",)


@pytest.mark.parametrize("change", ["unknown", "missing", "shape"])
async def test_weights_that_do_not_fit_leave_the_old_ones_serving(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel], change: str
) -> None:
    served = (await push(publisher, folders[0], models[0])).version
    weights = tiny.weights(folders[1])
    if change == "unknown":
        weights["model.layers.9.mlp.down_proj.weight"] = torch.zeros(4)
    elif change == "missing":
        del weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = torch.zeros(65)
    report = await publisher.publish(next(VERSION), weights.items(), *tiny.canary(models[1]))
    assert report.pushed == ()
    assert {"unknown": "no tensor", "missing": "lacks", "shape": "the model has"}[change] in report.failed["replica0"]
    assert await engine.version() == served
    assert worst(models[0], PROMPTS[0], await engine.generate(PROMPTS[0], GREEDY)) <= TOLERANCE
    assert (await push(publisher, folders[1], models[1])).pushed == ("replica0",)


async def test_a_cancelled_request_no_longer_runs(engine: VllmEngine, url: str) -> None:
    async def requests_on_the_server() -> int:
        answer = await engine._call("POST", "/abort_requests", body={})  # with no ids: all, and says how many
        return int(answer.split(b'"aborted":')[1].strip(b"} "))

    started = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=900)))
    await engine.generate(PROMPTS[1], Sampling(max_tokens=1))
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await started
    assert await requests_on_the_server() == 0

    hasty = client(url, request_s=0.2)
    with pytest.raises(DeadlineExceeded, match=r"replica0 waited 0.2 s for answer to /inference/v1/generate"):
        await hasty.generate(PROMPTS[0], Sampling(max_tokens=900))
    assert await requests_on_the_server() == 0
    await hasty.close()


async def test_pausing_in_abort_mode_returns_what_was_sampled(
    engine: VllmEngine, publisher: Publisher, folders: list[Path], models: list[PreTrainedModel]
) -> None:
    await push(publisher, folders[0], models[0])
    short = asyncio.gather(*(engine.generate(p, GREEDY) for p in PROMPTS))
    running = asyncio.create_task(engine.generate(PROMPTS[0], Sampling(max_tokens=900, temperature=0.0)))
    await short
    await engine.pause("abort")
    partial = await running
    await engine.resume()
    assert partial.finish_reason == "abort"
    assert 0 < len(partial.token_ids) < 900
    rest = await engine.generate([*PROMPTS[0], *partial.token_ids], GREEDY)
    whole = Completion(partial.token_ids + rest.token_ids, partial.logprobs + rest.logprobs, (), "length")
    assert worst(models[0], PROMPTS[0], whole) <= TOLERANCE


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([4, tiny.VOCABULARY], f"token id {tiny.VOCABULARY} is outside the vocabulary, 0 to {tiny.VOCABULARY - 1}"),
        ([-1], "token id -1 is outside"),
        ([4] * tiny.CONTEXT, f"a prompt of {tiny.CONTEXT} tokens; allowed are 1 to {tiny.CONTEXT - 1}"),
        ([], "a prompt of 0 tokens"),
    ],
)
async def test_what_would_kill_a_server_is_refused_before_it_is_sent(
    engine: VllmEngine, prompt: list[int], says: str
) -> None:
    with pytest.raises(PolicyError, match=says):
        await engine.generate(prompt, GREEDY)
    with pytest.raises(PolicyError, match=says):
        await engine.score(prompt)
    assert await engine.version() is not None


async def test_what_the_server_refuses_is_an_engine_error(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"answered 400: .*top_p"):
        await engine.generate(PROMPTS[0], Sampling(max_tokens=1, top_p=7.0))


async def test_nobody_listening_is_an_engine_error_at_once() -> None:
    nobody = client(f"http://127.0.0.1:{tiny.free_port()}")
    with pytest.raises(EngineError, match=r"replica0 at .* is not reachable"):
        await asyncio.wait_for(nobody.generate(PROMPTS[0], GREEDY), 5)
    with pytest.raises(DeadlineExceeded, match=r"replica0 waited 0.3 s for its server to start"):
        await nobody.wait_ready(0.3)
    await nobody.close()


@pytest.mark.parametrize("memory", ["0.85", "1.5", "lots", "-1"])
def test_a_bad_memory_setting_names_the_key(memory: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.memory: "):
        vllm_server.command(Config(rollout=Rollout(engine=Vllm(memory=memory))), vllm_server.LOOPBACK, 1)


def test_a_local_folder_is_served_offline_and_nothing_is_reported(tmp_path: Path) -> None:
    local = vllm_server.environment(Config(model=Model(path=str(tmp_path))))
    assert local["HF_HUB_OFFLINE"] == "1"
    hub = vllm_server.environment(Config(model=Model(path="Qwen/Qwen3-0.6B")))
    assert "HF_HUB_OFFLINE" not in hub
    assert local["VLLM_NO_USAGE_STATS"] == local["DO_NOT_TRACK"] == "1"
