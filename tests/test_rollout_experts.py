"""Experts that a server's routers choose: recorded by position through prefix caches, preemption and changes of the weights, sent
as vLLM sends them, checked where they arrive, and joined over parts and turns."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slipstream.agents import Completion
from slipstream.agents.tree import ConversationTree, Node, cut, joined
from slipstream.common.routed_experts import RoutedExperts, RouterShape
from slipstream.configs.backends import Fsdp2
from slipstream.configs.engines import Transformers, Vllm
from slipstream.configs.schema import Agent, Config, Learner, Model, Rollout
from slipstream.errors import ConfigError
from slipstream.learner.model import read_routers
from slipstream.rollout.engines.base import FalseReply, PartialCompletion, SamplingParams
from slipstream.rollout.engines.expert_codec import decode, encode, record
from slipstream.rollout.engines.expert_codec import joined as joined_texts
from slipstream.rollout.engines.server import launch as own_server
from slipstream.rollout.engines.server.contract import Sequence
from slipstream.rollout.engines.transformers.engine import load_model
from slipstream.rollout.engines.transformers.model_runner import TransformersModelRunner
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny
from slipstream.tests.routing import chosen
from slipstream.tests.test_rollout_server_model import drain, prompts

SHAPE = RouterShape((0, 1), 2, 2, 4)
"""Of `tiny_qwen3` with experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_qwen3(tmp_path_factory.mktemp("moe") / "model", moe=True, tied=False)


def runner_of(folder: Path, *, blocks: int = 64, concurrent: int = 8) -> TransformersModelRunner:
    model = load_model(str(folder), "float32")
    return TransformersModelRunner(model, blocks=blocks, max_concurrent=concurrent, seed=0, record_experts=True)


def same(found: np.ndarray[Any, Any], expected: torch.Tensor) -> bool:
    """Whether they are the same experts; each token's have no order."""
    return found.shape == tuple(expected.shape) and np.array_equal(np.sort(found, -1), expected.numpy())


def test_the_routers_of_a_model_are_read_from_its_config(folder: Path) -> None:
    assert read_routers(str(folder)) == SHAPE


@pytest.mark.parametrize(("blocks", "concurrent"), [(64, 8), (6, 8)], ids=["roomy", "preempted"])
def test_a_runner_records_what_each_token_went_to(folder: Path, blocks: int, concurrent: int) -> None:
    """Prompts that share a prefix, of which the second one's is never computed, and requests that want the later ones only."""
    plain, runner = tiny.load(folder), runner_of(folder, blocks=blocks, concurrent=concurrent)
    (shared,) = prompts(70)
    asked = {
        "first": (*shared, 5, 6),
        "second": (*shared, 9),
        "third": (*shared[:40], 11, 12),
        "late": (*shared, 5, 6, 7, 8),
    }
    starts = {"late": 71}
    out: dict[str, Any] = {}
    for id in ("first", "second"):
        runner.add(Sequence(id, asked[id], SamplingParams(24), salt="0"))
        out |= drain(runner) if id == "first" else {}
    for id in ("third", "late"):
        runner.add(Sequence(id, asked[id], SamplingParams(24, experts_from=starts.get(id, 0)), salt="0"))
    out |= drain(runner)
    for id, prompt in asked.items():
        assert len(out[id]) == 24
        read = [*prompt, *(one.token for one in out[id])][:-1]
        found = np.concatenate([one.experts for one in out[id]])
        assert found.dtype == np.uint8
        assert [len(one.experts) for one in out[id]] == [len(prompt) - starts.get(id, 0), *[1] * 23]
        assert same(found, chosen(plain, read)[starts.get(id, 0) :])


def test_each_token_keeps_the_experts_of_the_version_that_sampled_it(folder: Path) -> None:
    runner, (prompt,) = runner_of(folder), prompts(40)
    old, new = tiny.load(folder), tiny.load(folder)
    torch.manual_seed(0)
    changed = {name: torch.randn_like(p) for name, p in new.named_parameters() if name.endswith("mlp.gate.weight")}
    assert len(changed) == 2
    runner.add(Sequence("one", prompt, SamplingParams(20)))
    out = [token for _ in range(9) for token in runner.step()]
    first = len(out)
    for model in (runner.model, new):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in changed:
                    parameter.copy_(changed[name])
    runner.recompute()
    out += drain(runner)["one"]
    assert 0 < first < len(out) == 20
    read = [*prompt, *(one.token for one in out)][:-1]
    before = len(prompt) + first - 1
    expected = torch.cat([chosen(old, read)[:before], chosen(new, read)[before:]])
    assert not torch.equal(chosen(old, read)[before:], chosen(new, read)[before:])
    assert same(np.concatenate([one.experts for one in out]), expected)


# --- over HTTP


def configure(folder: Path, engine: Any) -> Config:
    learner = Learner(backend=Fsdp2(options=("router_replay",)))
    model, agent = Model(path=str(folder)), Agent(max_tokens=tiny.CONTEXT)
    return Config(model=model, agent=agent, rollout=Rollout(engine=engine), learner=learner)


def client(url: str) -> VllmEngine:
    return VllmEngine(
        "own", url, vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, initial_version=0, routers=SHAPE
    )


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config, port = configure(folder, Transformers(memory="16MiB")), tiny.free_port()

    async def ready() -> None:
        engine = client(f"http://127.0.0.1:{port}")
        await engine.wait_ready(120.0)
        await engine.close()

    command = own_server.command(config, "127.0.0.1", port)
    with tiny.server(command, own_server.environment(config), tmp_path_factory.mktemp("log") / "log"):
        asyncio.run(ready())
        yield f"http://127.0.0.1:{port}"


async def test_a_completion_comes_with_the_experts_of_the_tokens_that_were_read(folder: Path, url: str) -> None:
    plain, engine, (prompt,) = tiny.load(folder), client(url), prompts(50)
    try:
        for start in (0, 30, 49, 50):
            done = await engine.generate(prompt, SamplingParams(40, experts_from=start), version=0)
            assert done.experts is not None
            assert (done.experts.start, done.experts.end) == (start, 50 + 40 - 1)
            assert same(done.experts.ids, chosen(plain, [*prompt, *done.token_ids][:-1])[start:])
        unasked = await engine.generate(prompt, SamplingParams(5), version=0)
        assert unasked.experts is None
    finally:
        await engine.close()


async def test_an_interrupted_completion_continues_with_the_experts_of_both_parts(folder: Path, url: str) -> None:
    plain, engine, (prompt,) = tiny.load(folder), client(url), prompts(30)
    begun = asyncio.Event()

    class Watched(engine.stream_type):
        def receive(self, event: bytes) -> None:
            super().receive(event)
            if len(self.tokens) >= 20:
                begun.set()

    engine.stream_type = Watched  # type: ignore[misc]
    try:
        growing = PartialCompletion()
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(900, experts_from=0), growing=growing))
        async with asyncio.timeout(60):
            await begun.wait()
            await engine.pause("abort_resume")
            first = await task
            await engine.resume()
        assert first.finish_reason == "abort"
        second = await engine.generate((*prompt, *first.token_ids), SamplingParams(10, experts_from=0))
        whole = joined([first, second])
        assert whole.experts is not None
        assert same(whole.experts.ids, chosen(plain, [*prompt, *whole.token_ids][:-1]))
        cut_off = growing.partial  # what a caller has that stopped waiting
        assert cut_off.experts is not None
        assert cut_off.experts.end == 30 + len(cut_off.token_ids) - 1
    finally:
        await engine.close()


def npy(array: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_what_vllm_sends_is_read() -> None:
    """Of a model whose first layer has no router: vLLM has a row for it, too."""
    routers = RouterShape((1, 2), 3, 2, 300)
    sent = np.arange(4 * 3 * 2, dtype=np.uint16).reshape(4, 3, 2)
    assert np.array_equal(decode("r", npy(sent), routers), sent[:, 1:])
    assert encode(sent) == npy(sent)
    assert joined_texts([]) is None
    assert joined_texts([npy(sent)]) == npy(sent)
    assert joined_texts([npy(sent[:1]), npy(sent[1:])]) == npy(sent)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("%%", "cannot be read"),
        (base64.b64encode(b"\x93NUMPY").decode(), "cannot be read"),
        (npy(np.zeros((3, 2, 3), np.uint8)), r"shape \(3, 2, 3\) .* not \(3, 2, 2\) and uint8"),
        (npy(np.zeros((3, 2, 2), np.int32)), "type int32"),
        (npy(np.asfortranarray(np.zeros((3, 2, 2), np.uint8))), "cannot be read"),
        (npy(np.zeros((3, 2, 2), np.uint8))[:-8], "10 bytes|6 bytes|cannot be read"),
        (npy(np.full((3, 2, 2), 4, np.uint8)), "it chose expert 4; the model has 4"),
        (npy(np.array(7, np.uint8)), "cannot be read"),
    ],
)
def test_experts_that_are_none_are_a_false_reply(text: str, why: str) -> None:
    with pytest.raises(FalseReply, match=why) as caught:
        decode("replica-0", text, SHAPE)
    assert "\n" not in str(caught.value)


def test_a_header_that_claims_more_than_was_sent_takes_no_memory() -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 50, 2, 2)})
    with pytest.raises(FalseReply, match="cannot be read"):
        decode("replica-0", base64.b64encode(header.getvalue() + b"\x00").decode(), SHAPE)


def test_a_whole_completion_has_the_experts_of_all_tokens_that_were_read() -> None:
    rows = np.ones((6, 2, 2), np.uint8)
    done = record("r", [rows[:4], rows[4:]], 3, 10, whole=True)
    assert done is not None
    assert (done.start, done.end) == (3, 9)
    with pytest.raises(FalseReply, match="it sent the experts of 4 tokens, 6 were read"):
        record("r", [rows[:4]], 3, 10, whole=True)
    with pytest.raises(FalseReply, match="it sent the experts of 0 tokens"):
        record("r", [], 3, 10, whole=True)
    assert record("r", [], 3, 10, whole=False) is None
    part = record("r", [rows], 3, 8, whole=False)  # its last tokens' version was not reported
    assert part is not None
    assert part.end == 7


# --- over parts, turns and branches


def experts(start: int, end: int, mark: int) -> RoutedExperts:
    return RoutedExperts(start, np.full((end - start, 1, 2), mark, np.uint8))


def completion(tokens: int, recorded: RoutedExperts | None) -> Completion:
    return Completion((1,) * tokens, (-1.0,) * tokens, (), "stop", None, recorded)


def marks(recorded: RoutedExperts | None, tokens: int) -> list[int]:
    assert recorded is not None
    return recorded.whole(tokens)[:, 0, 0].tolist()


def test_a_branch_has_of_each_position_the_first_record() -> None:
    """Two turns of 4 and 3 tokens after prompts of 5 and 2; the second request begins where the first one's record ends."""
    tree = ConversationTree()
    first = Node(None, [1] * 5, completion(4, experts(0, 8, 1)))
    tree.add(first)
    assert tree.experts_known([1] * 11) == 8
    tree.add(Node(first, [1] * 2, completion(3, experts(8, 13, 2))))
    (branch,) = tree.branches()
    assert marks(branch.experts, 14) == [1] * 8 + [2] * 5 + [0]
    assert tree.experts_known([1] * 14) == 13


def test_what_a_stop_text_cut_off_leaves_no_experts() -> None:
    tree = ConversationTree()
    first = Node(None, [1] * 5, cut(completion(6, experts(0, 10, 1)), 3))
    tree.add(first)
    assert tree.experts_known([1] * 8) == 8
    tree.add(Node(first, [2] * 2, completion(2, experts(8, 11, 2))))
    (branch,) = tree.branches()
    assert marks(branch.experts, 12) == [1] * 8 + [2] * 3 + [0]


def test_a_branch_that_opens_later_has_the_experts_of_its_context() -> None:
    tree = ConversationTree()
    first = Node(None, [1] * 5, completion(4, experts(0, 8, 1)))
    tree.add(first)
    tree.add(Node(first, [2], completion(2, experts(8, 11, 2))))
    tree.add(Node(first, [3], completion(2, experts(8, 11, 3))))
    one, other = tree.branches()
    assert marks(one.experts, 12) == [1] * 8 + [2] * 3 + [0]
    assert marks(other.experts, 12) == [1] * 8 + [3] * 3 + [0]


def test_a_part_that_came_without_experts_gets_those_of_the_next_request() -> None:
    parts = [completion(4, None), completion(3, experts(0, 11, 2))]
    assert marks(joined(parts).experts, 12) == [2] * 11 + [0]
    parts = [completion(4, experts(0, 8, 1)), completion(3, experts(0, 11, 2))]
    assert marks(joined(parts).experts, 12) == [1] * 8 + [2] * 3 + [0]


def test_a_server_of_vllm_on_cpu_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"options=\[router_replay\]: vLLM reports experts on GPUs only; .*transformers"
    ):
        vllm_server.command(configure(folder, Vllm()), "127.0.0.1", 1)


def test_a_server_of_vllm_on_gpus_is_asked_to_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda _=None: False)
    config = configure(folder, Vllm(memory="0.8"))
    assert "--enable-return-routed-experts" in vllm_server.command(config, "127.0.0.1", 1)
