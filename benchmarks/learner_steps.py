"""The contenders of `bench learner`, each in a process of its own that steps on request: `python -m ... < lines > seconds`.

    full      what the training loop does with a batch: credit, rows, loss, FSDP2 step; a look at fresh trajectories if it is small
    unshared  the same, but a prompt is computed for each member of its group
    recorded  as full, every second step with the spans and gauges of a run
    compiled  as full, with compiled layers
    bare      transformers and torch.optim.AdamW over the same rows with the same attention, nothing around them
    padded    the same again, but over the batch padded to its longest sequence, with an attention mask and standard SDPA

Invariants:
- A process prints `ready`, then for each line that it reads the seconds which a step took, and at the end of
  its input the memory that it used, as JSON (`MemoryUse`).
- Vocabulary is computed at trained tokens only, by all of them: the floors are the best that plain code does. In bfloat16 they
  keep no float32 weights, so that their AdamW moves half as many bytes as ours.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from ..common import accelerator
from ..common.process import set_parent_death_signal
from ..common.spans import timed
from ..configs.algorithm import Algorithm
from ..configs.backends import Fsdp2, Option
from ..configs.schema import Config, Learner, Model, Optimizer
from ..launch.supervisor.factory import make_backend
from ..learner.algorithms import advantage_of
from ..learner.algorithms.estimators import assign_advantages
from ..learner.batch import TrainBatch, flatten, trainable
from ..learner.batch_trainer import lacks_comparable
from ..learner.checkpoint_folder import CheckpointState
from ..learner.fsdp2 import attention
from ..learner.fsdp2.backend import Fsdp2Backend
from ..learner.packing import microbatches
from ..learner.step import PolicyStepper
from ..monitor.timeline import TimelineWriter
from .learner_batch import LR, Job, MemoryUse, to_groups
from .learner_memory import memory_used

FRESH_EVERY = 8
"""One sequence in so many is scored once more, in place of what the loop scores of the newest trajectories: 8 per batch of the
quickstart's 64."""


class Full:
    """The training loop's step without the buffer."""

    options: tuple[Option, ...] = ()

    def __init__(self, job: Job) -> None:
        algorithm = Algorithm()
        self._groups = to_groups(job.batch)
        self._advantage = advantage_of(algorithm)
        config = Config(
            model=Model(path=job.model, dtype=job.dtype),
            learner=Learner(
                algorithm=algorithm,
                backend=Fsdp2(tokens_per_microbatch=job.budget, options=self.options),
                optimizer=Optimizer(lr=LR),
            ),
        )
        self._backend = make_backend(config, temperature=1.0)
        longest = max(len(one.token_ids) for one in job.batch)
        self._stepper = PolicyStepper(config.learner, self._backend, longest)
        one_by_one = [trajectory for group in self._groups for trajectory in group]
        self._fresh = one_by_one[::FRESH_EVERY] if self._backend.rank == 0 else []

    def step(self) -> None:
        sequences = trainable(assign_advantages(flatten(self._groups, 0), self._advantage), 0)
        fresh = self._fresh if lacks_comparable(sequences) else []
        self._stepper.step(sequences, self._stepper.plan(sequences), fresh, CheckpointState(step=0, version=0))


class Recorded(Full):
    """Every second step has the spans of a step of the loop and its push, and a line of gauges a second, with the start and the end
    of their thread. Two processes differ by more than that: in what memory they got."""

    phases = "take", "train", "commit", "stage", "pause", "swap", "canary", "publish", "checkpoint"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._folder, self._steps = Path(job.model), 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % 2:
            super().step()
            return
        with TimelineWriter(self._folder, "learner-0", lambda: {"phase": "train", "version": 0}) as timeline:
            for phase in self.phases:
                with timed(timeline.record, phase, version=0, replica="engine-0"):
                    if phase == "train":
                        super().step()


class Unshared(Full):
    """What backends do that cannot compute a prompt once."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        assert isinstance(self._backend, Fsdp2Backend)
        self._backend.shares_prefixes = False


class Compiled(Full):
    options = ("compile",)


class Plain(ABC):
    """A floor: transformers, AdamW, and a loss of two lines. Its step is forward, backward and AdamW."""

    attention: str

    def __init__(self, job: Job) -> None:
        self.device = accelerator.device_of_rank(0)
        # By a name that pyright does not follow into transformers' lazily made annotations.
        loader: Any = AutoModelForCausalLM
        self.model = loader.from_pretrained(
            job.model, dtype=getattr(torch, job.dtype), attn_implementation=self.attention
        )
        self.model.to(self.device).eval()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        credited = assign_advantages(flatten(to_groups(job.batch), 0), advantage_of(Algorithm()))
        self.sequences = trainable(credited, 0)
        self.budget = job.budget
        self._tokens = int(self.sequences.loss_mask.sum())

    @abstractmethod
    def passes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each pass: logits [K, V] that predict its trained tokens, those tokens int64[K], their advantages float32[K]."""

    def step(self) -> None:
        for logits, targets, advantages in self.passes():
            logprobs = -functional.cross_entropy(logits.float(), targets, reduction="none")
            (-(logprobs * advantages).sum() / self._tokens).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class Bare(Plain):
    """Packed: the learner's own rows and attention."""

    attention = attention.PACKED

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._rows = microbatches(self.sequences, rank=0, world_size=1, budget=job.budget)

    def passes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for row in self._rows:
            trained = row.loss_mask.nonzero().squeeze(1).to(self.device)
            token_ids = row.token_ids.to(self.device)
            output = self.model(
                input_ids=token_ids[None],
                position_ids=row.position_ids.to(self.device)[None],
                logits_to_keep=trained - 1,
                **attention.forward_arguments(row.cu_seqlens, self.device),
            )
            yield output.logits[0], token_ids[trained], row.advantages.to(self.device)[trained]


class Padded(Plain):
    """Right-padded to the longest of the batch, as many sequences at once as the budget of tokens holds."""

    attention = "sdpa"

    def passes(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        longest = int(self.sequences.sizes.max())
        at_once = max(1, self.budget // longest)
        for start in range(0, len(self.sequences), at_once):
            part = self.sequences.select(range(start, min(start + at_once, len(self.sequences))))
            token_ids, mask, trained, advantages = _pad(part, longest, self.device)
            hidden = self.model.model(input_ids=token_ids, attention_mask=mask, use_cache=False).last_hidden_state
            # Position t predicts token t + 1.
            logits = self.model.lm_head(hidden[:, :-1][trained[:, 1:]])
            yield logits, token_ids[trained], advantages[trained]


def _pad(part: TrainBatch, longest: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """int64, int64, bool and float32 [B, longest]: token ids, attention mask, trained tokens, advantages."""
    token_ids = torch.zeros(len(part), longest, dtype=torch.int64)
    mask, trained = torch.zeros_like(token_ids), torch.zeros_like(token_ids, dtype=torch.bool)
    advantages = torch.zeros(len(part), longest)
    for row, sequence in enumerate(part):
        length = len(sequence.token_ids)
        token_ids[row, :length] = torch.from_numpy(sequence.token_ids.astype("int64"))
        mask[row, :length] = 1
        trained[row, :length] = torch.from_numpy(sequence.loss_mask)
        advantages[row, :length] = torch.from_numpy(sequence.advantages)
    return tuple(tensor.to(device) for tensor in (token_ids, mask, trained, advantages))


CONTENDERS: dict[str, Callable[[Job], Full | Plain]] = {
    "full": Full,
    "recorded": Recorded,
    "unshared": Unshared,
    "compiled": Compiled,
    "bare": Bare,
    "padded": Padded,
}


def main() -> None:
    """Be the contender of the job file named on the command line."""
    set_parent_death_signal(os.getppid())
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    contender = CONTENDERS[job.contender](job)
    before = memory_used("now")
    _write_line("ready")
    for _ in sys.stdin:
        began = time.perf_counter()
        contender.step()
        accelerator.synchronize()
        _write_line(f"{time.perf_counter() - began}")
    _write_line(msgspec.json.encode(MemoryUse(before, memory_used("at most"))).decode())
    sys.stdout.flush()
    os._exit(0)  # with a process group an orderly exit aborts now and then, and there is nothing left to put in order


def _write_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
