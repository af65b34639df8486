"""A mixture of experts with an untied head: vLLM's reload on CPU would serve unpacked experts without a word."""

from pathlib import Path

import torch
from slipstream.rollout.engine import Sampling
from slipstream.rollout.vllm import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.publisher import Publisher

PROMPT = [(7 * j) % 440 + 4 for j in range(20)]


async def test_experts_are_packed_again_after_a_push(tmp_path: Path) -> None:
    folders = [tiny.tiny_qwen3(tmp_path / f"m{seed}", seed, tied=False, moe=True) for seed in range(2)]
    port = tiny.free_port()
    with tiny.vllm(folders[0], port, tmp_path / "log"):
        engine = VllmEngine(
            "moe", f"http://127.0.0.1:{port}", vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, initial_version=0
        )
        await engine.wait_ready(180)
        publisher = Publisher(
            [engine],
            host="127.0.0.1",
            backend="gloo",
            device=torch.device("cpu"),
            bucket_bytes=1 << 20,
            push_s=60,
            canary_tolerance=1e-4,
            dtype="float32",
        )
        for version, seed in enumerate((1, 0, 1), start=1):
            model = tiny.load(folders[seed])
            report = await publisher.publish(version, tiny.weights(folders[seed]).items(), *tiny.canary(model))
            assert report.pushed == ("moe",)
            completion = await engine.generate(PROMPT, Sampling(max_tokens=16, temperature=0.0))
            rows = tiny.logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
            assert list(completion.token_ids) == rows.argmax(-1).tolist()
        publisher.close()
        await engine.close()
