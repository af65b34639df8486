"""The memory of a host that four ranks of one model fill: while they load it, at the start of training and during a push.

What counts is memory that the kernel cannot take back (`Pss_Anon` and `Pss_Shmem` of /proc/PID/smaps_rollup, in which a page that
several processes share counts once in all), over what the processes had before. Files that are mapped or cached do not count.

`python test_learner_memory.py FOLDER KIND` measures the model in FOLDER by hand; `make FOLDER` writes one of 300 M parameters.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from slipstream.tests.ranks import reserved_ports

RANKS, BOUND, DEADLINE_S = 4, 1.3, 400
PHASES = ("loading", "training start", "pushing")


def memory() -> int:
    """Bytes of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon", "Pss_Shmem")))


class Samples:
    """Times and bytes of this process over what it had `before`, a sample every few milliseconds within the block. To look takes
    long where much is held: a quarter of the time at most."""

    def __init__(self, before: int) -> None:
        self.before, self.taken, self._stop = before, list[tuple[float, int]](), threading.Event()

    def __enter__(self) -> Samples:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            self.taken.append((began, memory() - self.before))
            if self._stop.wait(max(0.003, 3 * (time.monotonic() - began))):
                break
        self.taken.append((time.monotonic(), memory() - self.before))


def peak_of(samples: list[list[tuple[float, int]]]) -> int:
    """The most that all ranks had together, each what it had at its last sample."""
    latest, most = [0] * len(samples), 0
    for _, rank, held in sorted((at, rank, held) for rank, taken in enumerate(samples) for at, held in taken):
        latest[rank] = held
        most = max(most, sum(latest))
    return most


def make(folder: Path, *, layers: int, hidden: int, vocabulary: int) -> Path:
    """A Qwen3 of random weights in bfloat16, as models come, in several files."""
    import torch
    from slipstream.tests.test_learner_families import PreTrainedTokenizerFast, Tokenizer, WordLevel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


def measure(folder: Path, kind: str) -> dict[str, float]:
    """The peak of each phase over four ranks, divided by the model's parameters in float32."""
    if not (folder.parent / "small").is_dir():
        make(folder.parent / "small", layers=2, hidden=256, vocabulary=256)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "PORTS": ",".join(map(str, reserved_ports(2))),
    }
    command = [sys.executable, __file__, "rank", str(folder), kind]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(i)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(RANKS)
    ]
    try:
        answers = [process.communicate(timeout=DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [p.returncode for p in ranks] == [0] * RANKS, "\n".join(e.decode()[-2000:] for _, e in answers)
    found = [json.loads(out.splitlines()[-1]) for out, _ in answers]
    return {phase: peak_of([one[phase] for one in found]) / found[0]["model"] for phase in PHASES}


def rank(folder: Path, kind: str) -> None:
    """Print what this rank held in each phase, after it has done the same with a small model: imports do not count."""
    first, second = os.environ["PORTS"].split(",")
    os.environ["MASTER_PORT"] = first
    phases(folder.parent / "small", kind)
    gc.collect()
    os.environ["MASTER_PORT"] = second
    sys.stdout.write(json.dumps(phases(folder, kind)) + "\n")
    sys.stdout.flush()


def phases(folder: Path, kind: str) -> dict[str, Any]:
    from slipstream.configs.backends import Fsdp2, Megatron
    from slipstream.configs.schema import Model, Optimizer
    from slipstream.learner.fsdp2.backend import Fsdp2Backend
    from slipstream.weightsync.snapshot import layout_of, take_snapshot

    model, optimizer = Model(path=str(folder)), Optimizer()
    before, taken = memory(), dict[str, Any]()
    with Samples(before) as samples:
        if kind == "megatron":
            from slipstream.learner.megatron.backend import MegatronBackend

            layout = Megatron(ranks=RANKS, device="cpu", parallel={"tensor": 2, "pipeline": 2})
            backend = MegatronBackend(model, optimizer, layout, temperature=1.0, timeout_s=DEADLINE_S)
        else:
            held = Fsdp2(device="cpu", ranks=RANKS)
            backend = Fsdp2Backend(model, optimizer, held, temperature=1.0, timeout_s=DEADLINE_S)
        backend.maximum(0.0)
    taken["loading"] = samples.taken
    with Samples(before) as samples:
        backend.maximum(0.0)
    taken["training start"] = samples.taken
    with Samples(before) as samples:
        taken["model"] = 0
        if backend.rank == 0:
            snapshot = asyncio.run(take_snapshot(0, backend.named_weights(), folder))
            taken["model"] = sum(4 * tensor.numel() for tensor in layout_of(snapshot.tensors))
        else:
            assert not list(backend.named_weights())
        backend.maximum(0.0)
    taken["pushing"] = samples.taken
    backend.close()
    return taken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "model", layers=24, hidden=1024, vocabulary=16384)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_four_ranks_of_a_model_take_little_more_than_its_weights(model: Path, kind: str) -> None:
    found = measure(model, kind)
    assert max(found.values()) < BOUND, found


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "rank":
        rank(where, sys.argv[3])
    elif what == "make":
        make(where, layers=24, hidden=1024, vocabulary=16384)
    else:
        sys.stdout.write(f"{measure(Path(what), sys.argv[2])}\n")
