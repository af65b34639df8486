"""The examples run, and what they compute by themselves is what the product computes."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from slipstream.buffer.trajectory import FINISHED, Trajectory, Turn, VersionSpan
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Grpo, Ppo
from slipstream.configs.environments import ReasoningGym
from slipstream.configs.schema import Agent as AgentSettings
from slipstream.envs import Message, TaskSource, task_source
from slipstream.envs.dataset.source import DatasetSource
from slipstream.envs.reasoning_gym import ReasoningGymEnv
from slipstream.envs.sandbox import local_pool
from slipstream.learner.algorithms import advantage_of, loss_of
from slipstream.learner.algorithms.estimators import assign_advantages
from slipstream.learner.batch import flatten, trainable
from slipstream.learner.model import load_tokenizer
from slipstream.learner.packing import microbatches
from slipstream.tests.runs import tiny_policy
from slipstream.tests.sessions import LEASE, Script, call, play_foreign
from transformers import PreTrainedTokenizerBase

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    return example("grpo_in_one_file")


def made_up(group: int, member: int, reward: float, rng: random.Random) -> Trajectory:
    """An episode with one turn of random length."""
    prompt, sampled = 5, rng.randint(1, 9)
    mask = np.array([False] * prompt + [True] * sampled)
    logprobs = np.where(mask, [-rng.expovariate(1.0) for _ in mask], 0.0).astype(np.float32)
    return Trajectory(
        id=f"{group}.0.{member}.0",
        group_id=group,
        member=member,
        branch=0,
        task_id="t",
        env="e",
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=logprobs,
        version_spans=(VersionSpan(prompt, len(mask), 3),),
        turns=(Turn(prompt, len(mask), "stop"),),
        reward=reward,
        turn_rewards=(reward,),
        outcome=FINISHED,
    )


def test_its_advantages_and_losses_are_the_products(grpo: ModuleType) -> None:
    """GRPO advantages and the clipped loss of ppo, averaged over tokens, on the same batch with the same log-probs."""
    rng = random.Random(0)
    rewards = ((0.0, 1.0, 0.25, 1.0), (0.5, 0.5, 0.5, 0.5))
    groups = [[made_up(g, m, r, rng) for m, r in enumerate(group)] for g, group in enumerate(rewards)]
    algorithm = Algorithm(advantage=Grpo(), loss=Ppo(clip=(grpo.CLIP_LOW, grpo.CLIP_HIGH)))
    batch = trainable(assign_advantages(flatten([tuple(g) for g in groups], 3), advantage_of(algorithm)), 0)
    (row,) = microbatches(batch, 0, 1, 10_000)

    drift = torch.tensor([rng.gauss(0.0, 0.3) for _ in row.token_ids])
    current = torch.where(row.loss_mask, row.behavior_logprobs + drift, 0.0)
    loss = loss_of(algorithm, 64)([row], lambda values: values)(current, torch.zeros_like(current), row)
    theirs = loss.loss_sum / row.loss_mask.sum()

    # Sequences may be packed in any order: each is found by its own log-probs.
    total, tokens = torch.zeros(()), 0
    found = dict(
        zip(
            (
                tuple(row.behavior_logprobs[a:b].tolist())
                for a, b in zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False)
            ),
            zip(row.cu_seqlens, row.cu_seqlens[1:], strict=False),
            strict=True,
        )
    )
    for group in groups:
        for trajectory, advantage in zip(group, grpo.advantages(group), strict=True):
            start, end = found[tuple(trajectory.behavior_logprobs.tolist())]
            mask = row.loss_mask[start:end]
            assert row.advantages[start:end][mask].tolist() == pytest.approx(
                [float(advantage)] * int(mask.sum()), abs=1e-6
            )
            behavior = torch.from_numpy(trajectory.behavior_logprobs[trajectory.loss_mask].copy())
            total = total + grpo.clipped_loss(current[start:end][mask], behavior, advantage)
            tokens += trajectory.sampled
    assert float(total / tokens) == pytest.approx(float(theirs), abs=1e-6)
    assert abs(float(theirs)) > 1e-3


def test_the_example_runs_and_learns(grpo: ModuleType, tmp_path: Path) -> None:
    means = grpo.train(tmp_path / "model", steps=10)
    assert len(means) == 10
    assert np.mean(means[-3:]) > 1.5 * np.mean(means[:3])


async def test_the_agent_with_an_sdk_plays_the_quickstart(tmp_path: Path) -> None:
    """It calls its calculator, wrongly at first, and answers."""
    config = load("quickstart")
    assert isinstance(config.env, ReasoningGym)
    source = ReasoningGymEnv(config.env, "train", config.seed)
    entry = source.entry(source.task(LEASE.task).payload["index"])
    texts = [call("calculator", expression=one) for one in ("1 +", entry["metadata"]["expression"])]
    tokenizer = load_tokenizer(str(tiny_policy(tmp_path / "policy")))
    script = Script(tokenizer, [*texts, f"<answer>{entry['answer']}</answer>"].__getitem__)
    module = example("openai_agent")
    result = await play_foreign(tokenizer, module.solve, script, source)
    await module.HTTP.aclose()
    assert (result.outcome.kind, result.reward) == ("finished", 1.0)
    (trajectory,) = result.trajectories
    assert len(trajectory.turns) == 3
    told = [tokenizer.decode(prompt) for prompt, _ in script.log]
    assert "error: '1 +' is not arithmetic" in told[1]
    assert f"<tool_response>\n{entry['answer']}\n</tool_response>" in told[2]


async def test_the_example_of_own_data_scores_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent)
    env = load("examples/own_data/train.yaml").env
    source = task_source(env, "train", 0)
    assert isinstance(source, DatasetSource)
    source.check()
    assert len(source) == 90
    task = source.task(0)
    right = int(task.payload["reference"])
    for answer, reward in ((f"It is {right}", 1.0), (str(right + 4), 0.6), (str(right + 50), 0.0), ("none", 0.0)):
        episode = source.make()
        await episode.reset(task)
        assert (await episode.step(Message("assistant", answer))).reward == pytest.approx(reward)


def command(config_file: str, monkeypatch: pytest.MonkeyPatch) -> tuple[AgentSettings, TaskSource]:
    """The agent and the tasks of an example, as the run would have them."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(EXAMPLES / "repair")
    config = load(config_file)
    return config.agent, task_source(config.env, "train", 0)


async def test_the_program_as_an_agent_plays_the_quickstart(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the environment's calculator over MCP, uses it wrongly at first, and answers."""
    agent, source = command("examples/command_agent/train.yaml", monkeypatch)
    assert isinstance(source, ReasoningGymEnv)
    entry = source.entry(source.task(LEASE.task).payload["index"])
    texts = [call("calculator", expression=one) for one in ("1 +", entry["metadata"]["expression"])]
    script = Script(tokenizer, [*texts, f"<answer>{entry['answer']}</answer>"].__getitem__)
    result = await play_foreign(tokenizer, agent, script, source)
    assert (result.outcome.kind, result.reward) == ("finished", 1.0), result.outcome
    (trajectory,) = result.trajectories
    assert len(trajectory.turns) == 3
    told = [tokenizer.decode(prompt) for prompt, _ in script.log]
    assert "error: '1 +' is not arithmetic" in told[1]
    assert f"<tool_response>\n{entry['answer']}\n</tool_response>" in told[2]


FIX = (
    "sed -i -e 's/total = entry/total += entry/' -e 's/if entry </if entry >/' "
    "-e 's/entries) .. 2/entries) \\/\\/ len(entries)/' ledger.py"
)
REPAIRS = {
    FIX: 1.0,
    "cat ledger.py; ls -a": 0.0,
    "rm ledger.py": 0.0,
    f"{FIX}; echo 'raise SystemExit(0)' >> ledger.py": 0.0,
    "echo 'import os; print({}); os._exit(0)' > ledger.py": 0.0,
    "echo 'def load(file): return []' > json.py": 0.0,
    "mkdir -p more; mv ledger.py more; ln -s more/ledger.py ledger.py": 0.0,
}
"""By what the policy does in the folder: its reward."""


async def test_the_repair_of_a_program_is_scored_by_tests_that_the_agent_never_sees(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, source = command("examples/repair/train.yaml", monkeypatch)
    broken = {source.task(index).payload["broken"] for index in range(30)}
    assert broken == {"balance", "largest", "average"}

    async def reward(did: str) -> float:
        script = Script(tokenizer, [call("shell", command=f"{did} && echo 'it''s done'"), "Bye."].__getitem__)
        result = await play_foreign(tokenizer, agent, script, source, max_tokens=4000, max_tokens_per_turn=1000)
        assert result.outcome.kind == "finished", result.outcome
        (_, _), (seen, _) = script.log
        assert "its done" in tokenizer.decode(seen)  # it did run
        return result.reward

    assert {did: await reward(did) for did in REPAIRS} == REPAIRS
    await local_pool().close()
