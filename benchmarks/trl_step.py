"""TRL's GRPOTrainer as a contender of `bench learner`, run in the environment that `make install-trl` makes.

What is measured is a step of the real `GRPOTrainer.train()`: `training_step` of each micro-batch (the trainer's own loss, with its
metrics, and backward), clipping, AdamW and the learning rate's schedule. What it would do before a step is not: data loading,
generation, tokenizing, rewards and padding are done once, and `_prepare_inputs` hands out what the trainer itself would have
made of the given completions: prompts padded left, answers right, each to the longest of the batch.

The protocol is that of `learner_steps`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from ..common import accelerator
from ..common.process import set_parent_death_signal
from .learner_batch import LR, PROMPT, Job, MemoryUse, Sampled
from .learner_memory import memory_used

ANSWERS = os.fdopen(os.dup(1), "w")
"""What we answer. What libraries print on stdout must not be taken for it, and goes where errors go."""

FOREVER = 1 << 20
"""More steps than anybody asks for."""

EPSILON = 1e-4
"""What is added to the standard deviation of a group's rewards, by TRL as by our `grpo`."""


class Given(GRPOTrainer):
    """Trains on completions that it was given."""

    micro_batches: Sequence[dict[str, torch.Tensor]]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        return self.micro_batches[self._step % len(self.micro_batches)]


class Conductor(TrainerCallback):
    """Has the trainer wait before each step until it is told to go on, and says how long the step took."""

    before = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.before:
            self.before = memory_used("now")
            _write_line("ready")
        if not sys.stdin.readline():
            _write_line(msgspec.json.encode(MemoryUse(self.before, memory_used("at most"))).decode())
            os._exit(0)
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        accelerator.synchronize()
        _write_line(f"{time.perf_counter() - self._began}")


def micro_batches(batch: Sequence[Sampled], at_once: int) -> list[dict[str, torch.Tensor]]:
    """The batch as `GRPOTrainer._generate_and_score_completions` would return it, in parts of `at_once` sequences."""
    prompts = torch.tensor([one.token_ids[:PROMPT] for one in batch])
    answers = [torch.tensor(one.token_ids[PROMPT:]) for one in batch]
    completion_ids = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)
    completion_mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(a) for a in answers], batch_first=True)
    by_group: dict[int, list[float]] = {}
    for one in batch:
        by_group.setdefault(one.group, []).append(one.reward)
    rewards = torch.tensor(list(by_group.values()))
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + EPSILON)
    whole = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten(),
    }
    trained = completion_mask.sum()
    return [
        {name: tensor[start : start + at_once] for name, tensor in whole.items()} | {"num_items_in_batch": trained}
        for start in range(0, len(batch), at_once)
    ]


def main() -> None:
    """Be the contender of the job file named on the command line."""
    set_parent_death_signal(os.getppid())
    os.dup2(2, 1)
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
    longest = max(len(one.token_ids) for one in job.batch)
    # The largest part of the batch that fits the budget of tokens and divides it.
    at_once = max(
        n for n in range(1, len(job.batch) + 1) if len(job.batch) % n == 0 and (n == 1 or n * longest <= job.budget)
    )
    group_size = sum(one.group == job.batch[0].group for one in job.batch)
    arguments = GRPOConfig(
        output_dir=str(Path(sys.argv[1]).parent / "trl"),
        use_cpu=accelerator.current() is None,
        bf16=job.dtype == "bfloat16",
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=len(job.batch) // at_once,
        num_generations=group_size,
        max_completion_length=longest - PROMPT,
        learning_rate=LR,
        lr_scheduler_type="constant",
        beta=0.0,
        loss_type="dapo",  # the mean over tokens, as our token_mean
        gradient_checkpointing=False,  # TRL's default saves memory for a third of the speed
        max_steps=FOREVER,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    trainer = Given(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "-"}] * len(job.batch)),
        processing_class=tokenizer,
        callbacks=[Conductor()],
    )
    device = trainer.accelerator.device
    trainer.micro_batches = [{k: v.to(device) for k, v in part.items()} for part in micro_batches(job.batch, at_once)]
    trainer.train()


def _write_line(text: str) -> None:
    ANSWERS.write(f"{text}\n")
    ANSWERS.flush()


if __name__ == "__main__":
    main()
