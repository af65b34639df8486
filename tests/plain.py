"""Reinforcement learning without Slipstream: a loop in one process, with transformers and torch's AdamW, over what a run sampled.

It reads from a run's store which trajectories each commit was made of, in order, and nothing else: log-probs, advantages, loss and
masks are computed here from the formulas of the papers, one sequence at a time. What the run trained on is what makes its weights
come out as this loop's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs.algorithm import DecoupledPpo, Truncated
from slipstream.configs.environments import PythonEnv
from slipstream.configs.schema import Agent, Optimizer
from slipstream.envs import task_source
from slipstream.launch.init_model import TinyModelShape, init_model
from slipstream.tests.runs import query, slipstream, stored_trajectory
from transformers import AutoModelForCausalLM, PreTrainedModel

EPSILON = 1e-4
"""Added to the standard deviation of a group's rewards."""

PPO, CAP = DecoupledPpo(), Truncated().bounds[1]

SHAPE = TinyModelShape(hidden=64, heads=2, kv_heads=2, intermediate=128, vocabulary=512)
"""A tenth of a million parameters."""

GROUPS, MEMBERS = 2, 4
"""Groups in a batch, episodes in a group."""

OPTIMIZER = Optimizer(lr=1e-4, warmup_steps=2, weight_decay=0.01, clip_norm=1e-3)
"""Clipped so hard that AdamW's epsilon, 1e-8, is far above the rounding of a gradient's elements (1e-3 / sqrt(parameters) x 1e-6 is
3e-12): without it AdamW makes up to a whole step of the rounding of those that are nearly 0."""

EQUAL = 1e-6
"""Largest difference of two weights that are the same, absolute: they are about 0.1 in size, where float32 has steps of 7e-9. A
relative bound would mean nothing for weights near 0, and AdamW moves all of them by the same size."""

SAME_POLICY = 1e-4
"""Nats, float32, between two implementations of one policy."""

Weights = dict[str, torch.Tensor]


class Sample(msgspec.Struct, frozen=True):
    """A trajectory of a committed batch, and what the store says of its episode: why it is `withheld`, if it is, and from
    which version on its tokens carried loss."""

    trajectory: Trajectory
    withheld: str | None
    loss_from: int | None


class Batch(msgspec.Struct, frozen=True):
    """What the step from `version` to `version + 1` was made of: samples group by group, the oldest group first."""

    version: int
    groups: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group]


class Trained(msgspec.Struct):
    """What a loop made: `weights[v]` are those of version v; loss and gradient norm of each step."""

    weights: list[Weights]
    losses: list[float]
    norms: list[float]


def small_policy(folder: Path) -> Path:
    """A random model, small enough for a loop of one sequence at a time, with a tokenizer."""
    source = task_source(
        PythonEnv(
            factory="slipstream.tests.crossing:Crossing", arguments={"metrics": "", "versions": 1, "patience_s": 0.0}
        ),
        "train",
        0,
    )
    init_model(folder, sources=[source], agent=Agent(), seed=0, shape=SHAPE)
    return folder


def run_system(
    run_dir: Path,
    policy: Path,
    *overrides: str,
    steps: int,
    versions: int,
    patience_s: float,
    optimizer: Optimizer = OPTIMIZER,
) -> None:
    """A whole run on real parts: `slipstream train` with environment `Crossing`, batches of 2 groups of `MEMBERS`."""
    settings = {
        "learner.steps": steps,
        "learner.checkpoint_every": steps,
        **{
            f"learner.optimizer.{key}": list(value) if isinstance(value, tuple) else value
            for key, value in msgspec.to_builtins(optimizer).items()
        },
        "buffer.groups_per_batch": GROUPS,
        "buffer.group_size": MEMBERS,
        "env.kind": "python",
        "env.factory": "slipstream.tests.crossing:Crossing",
        "env.arguments.metrics": run_dir / "metrics.jsonl",
        "env.arguments.versions": versions,
        "env.arguments.patience_s": patience_s,
        "agent.max_tokens_per_turn": 8,
        "agent.max_tokens": 640,
        "rollout.engine.kind": "transformers",
        "rollout.engine.memory": "64MiB",
        "evaluation.tasks": 0,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run_dir}", *words, *overrides)


def batches(run_dir: Path) -> list[Batch]:
    """The committed batches in the order of their versions."""
    sql = (
        "SELECT commits.version - 1, groups.id, withheld, loss_from, header, arrays, trajectories.length"
        " FROM commits JOIN groups ON trained_at = commits.version JOIN episodes ON episodes.group_id = groups.id"
        " JOIN trajectories ON episode_id = episodes.id"
        " WHERE NOT rolled_back AND account = 'trained'"
    )
    found: dict[int, dict[int, list[Sample]]] = {}
    for version, group, withheld, loss_from, header, position, tokens in query(run_dir, sql):
        sample = Sample(stored_trajectory(run_dir, header, position, tokens), withheld, loss_from)
        found.setdefault(version, {}).setdefault(group, []).append(sample)
    for groups in found.values():
        for samples in groups.values():
            samples.sort(key=lambda s: (s.trajectory.member, s.trajectory.branch))
    return [Batch(version, [found[version][g] for g in sorted(found[version])]) for version in sorted(found)]


def carries_loss(sample: Sample, version: int, bound: int) -> torch.Tensor:
    """bool[T]: sampled tokens that are at most `bound` versions old in the step from `version`."""
    carries = np.zeros(len(sample.trajectory), dtype=np.bool_)
    for span in sample.trajectory.version_spans:
        carries[span.start : span.end] = sample.withheld is None and version - span.version <= bound
    return torch.from_numpy(carries)


def logprobs(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """float32[T]: log-prob of each token after those before it, 0 for the first. Temperature 1."""
    ids = torch.from_numpy(trajectory.token_ids.copy()).long()
    rows = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), rows.gather(1, ids[1:, None])[:, 0]])


def advantages(group: Sequence[Sample]) -> dict[int, float]:
    """GRPO's, by member: (r - mean) / (std + epsilon) over the members, each counted once."""
    rewards = {s.trajectory.member: s.trajectory.reward for s in group}
    values = np.array(list(rewards.values()))
    return {member: float((r - values.mean()) / (values.std() + EPSILON)) for member, r in rewards.items()}


def train(folder: Path, data: Sequence[Batch], bound: int, optimizer: Optimizer = OPTIMIZER) -> Trained:
    """One AdamW step for each batch from the model in `folder`, with decoupled PPO on tokens of at most `bound` versions ago."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=optimizer.betas,
    )
    trained = Trained([_copy(model)], [], [])
    for step, batch in enumerate(data):
        loss = _backward(model, batch, bound)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = optimizer.lr * min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
        adamw.step()
        adamw.zero_grad()
        trained.weights.append(_copy(model))
        trained.losses.append(loss)
        trained.norms.append(float(norm))
    return trained


def _backward(model: PreTrainedModel, batch: Batch, bound: int) -> float:
    """Gradients of the mean loss over the tokens that carry it; returns that loss."""
    carry = {s.trajectory.id: carries_loss(s, batch.version, bound) for s in batch.samples}
    tokens = sum(int(mask.sum()) for mask in carry.values())
    total = 0.0
    for group in batch.groups:
        estimates = advantages(group)
        for sample in group:
            trajectory, mask = sample.trajectory, carry[sample.trajectory.id]
            if not mask.any():
                continue
            current = logprobs(model, trajectory)[mask]
            proximal = current.detach()  # one step per batch: the policy at its start is the one that steps
            behavior = torch.from_numpy(trajectory.behavior_logprobs.copy())[mask]
            advantage = estimates[trajectory.member]
            weight = (proximal - behavior).exp().clamp(max=CAP)
            ratio = (current - proximal).exp()
            clipped = ratio.clamp(1 - PPO.clip[0], 1 + PPO.clip[1])
            loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum() / tokens
            loss.backward()
            total += loss.item()
    return total


def _copy(model: PreTrainedModel) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def apart(one: Weights, other: Weights) -> float:
    """The largest difference between two numbers of the same place."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def logprob_errors(folder: Path, data: Sequence[Batch], weights: Sequence[Weights]) -> tuple[float, float, int]:
    """Over all sampled tokens: the largest difference in nats between the log-prob that the engine reported and the one under the
    version that the token's span names; the median over spans of the same under the version before; the number of tokens.

    Tokens of version 0 have none before and count in the first and third only.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    samples = [sample for batch in data for sample in batch.samples]
    worst, tokens, others = 0.0, 0, []
    for version, named in enumerate(weights):
        model.load_state_dict(named, strict=False)
        for trajectory in (s.trajectory for s in samples):
            spans = [s for s in trajectory.version_spans if s.version in (version, version + 1)]
            if not spans:
                continue
            with torch.no_grad():
                gaps = (logprobs(model, trajectory) - torch.from_numpy(trajectory.behavior_logprobs.copy())).abs()
            for span in spans:
                gap = float(gaps[span.start : span.end].max())
                if span.version == version:
                    worst, tokens = max(worst, gap), tokens + span.end - span.start
                else:
                    others.append(gap)
    return worst, float(np.median(others)), tokens
