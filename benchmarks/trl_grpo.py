"""TRL's GRPOTrainer as an arm of `bench learning`, run in the environment that `make install-trl` makes.

Tasks, prompts and rewards are those of our environment, through its own classes. Generation is the trainer's own (transformers'
`generate`), and counts in its seconds as rollouts count in ours.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from reasoning_gym.utils import extract_answer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from ..common import accelerator
from ..common.process import set_parent_death_signal
from ..configs import load
from .learning_arms import ANSWER_TOKENS, CLIP, GROUP_SIZE, GROUPS, LR, PRESET, Point, TrlJob, tasks


class Points(TrainerCallback):
    """Collects a point for every step, and is the reward function's notebook."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.points: list[Point] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        samples = state.global_step * GROUPS * GROUP_SIZE
        self.points.append(Point(samples, time.perf_counter() - self.began, self.reward))


def main() -> None:
    """Train as the job file named on the command line describes."""
    set_parent_death_signal(os.getppid())
    job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TrlJob)
    config = load(PRESET, job.overrides)
    source = tasks(config)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    without_thinking = {"enable_thinking": False}
    prompts = [
        [{"role": message.role, "content": message.content} for message in source.opening(index).messages]
        for index in range(job.steps * GROUPS)
    ]
    ids = tokenizer.apply_chat_template(prompts[0], add_generation_prompt=True, return_dict=True, **without_thinking)
    if ids["input_ids"] != job.prompt_ids:
        sys.exit(f"TRL's prompt is {ids['input_ids']}, ours {job.prompt_ids}: they would not train on the same task")
    points = Points()

    def rewards(completions: list[list[dict[str, str]]], index: list[int], **_: Any) -> list[float]:
        answers = [extract_answer(completion[0]["content"]) for completion in completions]
        values = [source.score(i, answer) for i, answer in zip(index, answers, strict=True)]
        points.reward = sum(values) / len(values)
        return values

    arguments = GRPOConfig(
        output_dir=job.out,
        use_cpu=accelerator.current() is None,
        bf16=False,
        seed=job.seed,
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=ANSWER_TOKENS,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        chat_template_kwargs=without_thinking,
        shuffle_dataset=False,
        max_steps=job.steps,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=config.learner.optimizer.betas[0],
        adam_beta2=config.learner.optimizer.betas[1],
        weight_decay=config.learner.optimizer.weight_decay,
        max_grad_norm=config.learner.optimizer.clip_norm,
        beta=0.0,
        epsilon=CLIP,
        loss_type="dapo",  # the mean over tokens, as our token_mean
        scale_rewards="group",
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": prompt, "index": i} for i, prompt in enumerate(prompts)]),
        processing_class=tokenizer,
        callbacks=[points],
    )
    trainer.train()
    trainer.save_model(str(Path(job.out) / "model"))
    tokenizer.save_pretrained(Path(job.out) / "model")
    (Path(job.out) / "points.json").write_bytes(msgspec.json.encode(points.points))


if __name__ == "__main__":
    main()
