"""GRPO in one file and one process: sample a group of answers, compare them, take a clipped policy-gradient step, repeat.

    python examples/grpo_in_one_file.py [STEPS]

It uses Slipstream's environment, session and model, and none of its processes: no buffer, no workers, no inference server. Read it
first; `docs/architecture.md` then shows what each part becomes when it runs asynchronously on many machines.

    task ──> group of episodes ──> advantages ──> clipped loss ──> AdamW ──> the next version samples

The estimator is GRPO's (Shao et al. 2024, arXiv:2402.03300), A = (r - mean) / std over the group, with PPO's clipped loss
(Schulman et al. 2017, arXiv:1707.06347) averaged over all tokens. A test holds that both equal the product's.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from slipstream.agents import Completion, Session, load_renderer
from slipstream.buffer.trajectory import FINISHED, Trajectory, VersionSpan
from slipstream.configs.schema import Agent
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.launch.init_model import TinyModelShape, init_model
from slipstream.learner.model import load_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

GROUPS, GROUP_SIZE = 1, 16
MAX_TOKENS_PER_TURN, MAX_TOKENS = 8, 128
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
UPDATES_PER_BATCH = 2
LEARNING_RATE = 1e-2
EPSILON = 1e-4
"""A smaller standard deviation is rounding, not a difference between answers."""


class ManyAs(SimpleEnv):
    """One question, one answer; the reward is the share of the letter `a` among the answer's characters."""

    def task(self, index: int) -> Task:
        return Task(f"letters-{index}", {})

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "Write the letter a."),))

    async def step(self, message: Message) -> StepResult:
        text = message.content
        return StepResult(reward=text.count("a") / max(1, len(text)), done=True)

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        letters = "".join(rng.choices("abcdefghij ", k=20))  # the tokenizer is trained on these
        return Observation((Message("user", "Write the letter a."),)), (Message("assistant", letters),)


class Sampler:
    """Samples completions from the model, one token at a time, with the log-prob and the policy version of each token."""

    def __init__(self, model: PreTrainedModel, stop_token_ids: Sequence[int], seed: int) -> None:
        self.version = 0
        self._model = model
        self._stop = set(stop_token_ids)
        self._random = torch.Generator().manual_seed(seed)

    async def __call__(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        return self._sample(token_ids, max_tokens)

    @torch.no_grad()
    def _sample(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        ids, past = torch.tensor([list(token_ids)]), None
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in self._stop):
            output = self._model(ids, past_key_values=past, use_cache=True)
            past, rows = output.past_key_values, output.logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(rows.exp(), 1, generator=self._random))
            tokens.append(token)
            logprobs.append(float(rows[token]))
            ids = torch.tensor([[token]])
        reason = "stop" if tokens[-1] in self._stop else "length"
        return Completion(tuple(tokens), tuple(logprobs), (VersionSpan(0, len(tokens), self.version),), reason)


async def play(env: ManyAs, session: Session, group: int, member: int) -> Trajectory:
    """One episode. The session records the tokens that the model sampled; nothing is tokenized again."""
    task = env.task(group)
    observation = await env.reset(task)
    reply = await session.chat(observation.messages)
    reward = (await env.step(reply)).reward
    (trajectory,) = session.trajectories(
        group_id=group,
        attempt=0,
        member=member,
        task_id=task.id,
        env=env.name,
        reward=reward,
        turn_rewards=(reward,),
        outcome=FINISHED,
        timings={},
        metrics={},
    )
    return trajectory


def advantages(group: Sequence[Trajectory]) -> torch.Tensor:
    """float64[members]: (r - mean) / std of the group's rewards, 0 where all are equal."""
    rewards = torch.tensor([trajectory.reward for trajectory in group], dtype=torch.float64)
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + EPSILON)


def token_logprobs(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """float32[sampled tokens]: the log-prob of each sampled token under the model as it is now."""
    ids = torch.from_numpy(trajectory.token_ids.copy()).long()
    rows = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, ids[1:, None])[:, 0][torch.from_numpy(trajectory.loss_mask[1:].copy())]


def clipped_loss(current: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of -min(r A, clip(r) A), where r is the ratio to the policy that sampled them."""
    ratio = (current - behavior).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage).sum()


def batch_loss(model: PreTrainedModel, groups: Sequence[Sequence[Trajectory]]) -> torch.Tensor:
    """The mean of the loss over all sampled tokens of the batch."""
    total, tokens = torch.zeros(()), 0
    for group in groups:
        for trajectory, advantage in zip(group, advantages(group), strict=True):
            behavior = torch.from_numpy(trajectory.behavior_logprobs[trajectory.loss_mask].copy())
            total = total + clipped_loss(token_logprobs(model, trajectory), behavior, advantage)
            tokens += trajectory.sampled
    return total / tokens


def train(folder: Path, steps: int, seed: int = 0) -> list[float]:
    """Make a random model in `folder` and train it; returns the mean reward of each step."""
    env = ManyAs(split="train", seed=seed)
    init_model(folder, sources=[env], agent=Agent(), seed=seed, shape=TinyModelShape(hidden=64, heads=2, kv_heads=2))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    renderer = load_renderer("qwen3", load_tokenizer(str(folder)), thinking=False)
    sample = Sampler(model, renderer.get_stop_token_ids(), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    limits = {"max_tokens_per_turn": MAX_TOKENS_PER_TURN, "max_tokens": MAX_TOKENS}

    async def play_group(group: int) -> list[Trajectory]:
        sessions = [Session(renderer, sample, vocabulary=model.config.vocab_size, **limits) for _ in range(GROUP_SIZE)]
        return [await play(env, session, group, member) for member, session in enumerate(sessions)]

    async def play_batch(step: int) -> list[list[Trajectory]]:
        return [await play_group(step * GROUPS + number) for number in range(GROUPS)]

    means: list[float] = []
    for step in range(steps):
        batch = asyncio.run(play_batch(step))
        for _ in range(UPDATES_PER_BATCH):
            optimizer.zero_grad()
            loss = batch_loss(model, batch)
            loss.backward()
            optimizer.step()
        sample.version += 1
        rewards = [trajectory.reward for group in batch for trajectory in group]
        means.append(sum(rewards) / len(rewards))
        sys.stdout.write(f"step {step + 1:3}  reward {means[-1]:.3f}  loss {loss.item():+.4f}\n")
    return means


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory) / "model", int(sys.argv[1]) if len(sys.argv) > 1 else 30)
