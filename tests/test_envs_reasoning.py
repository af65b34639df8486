import random
import subprocess
import sys

import pytest
from reasoning_gym.factory import DATASETS
from slipstream.configs.environments import ReasoningGym
from slipstream.envs import Message, Task, ToolCall, task_source
from slipstream.envs.tools import calculate
from slipstream.errors import ConfigError, EnvError

CHAIN = ReasoningGym(parameters={"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3})


def call(expression, name="calculator"):
    return Message("assistant", "", (ToolCall(name, {"expression": expression}),))


def answer(text):
    return Message("assistant", f"<answer>{text}</answer>")


async def opened(config=CHAIN, index=0):
    source = task_source(config, "train", 0)
    env = source.make()
    observation = await env.reset(source.task(index))
    return source, env, observation


async def test_calculate_read_answer():
    source, env, observation = await opened()
    entry = source.entry(0)
    assert observation.messages[-1] == Message("user", entry["question"])
    assert "<answer>" in observation.messages[0].content
    assert [tool.name for tool in observation.tools] == ["calculator"]
    step = await env.step(call(entry["metadata"]["expression"]))
    assert (step.done, step.reward) == (False, 0.0)
    assert step.messages[0].content == entry["answer"]
    end = await env.step(answer(step.messages[0].content))
    assert (end.done, end.reward) == (True, 1.0)
    assert end.metrics == {"answered": 1.0, "tool_calls": 1.0, "tool_errors": 0.0}


async def test_wrong_and_missing_answers_earn_nothing():
    for message in (answer("12345678"), Message("assistant", "no idea")):
        _, env, _ = await opened()
        end = await env.step(message)
        assert (end.done, end.reward) == (True, 0.0)


async def test_errors_of_the_policy_become_messages_and_the_episode_continues():
    source, env, _ = await opened()
    malformed = await env.step(Message("assistant", "", malformed="a tool call could not be read (invalid json)"))
    assert malformed.messages == (Message("user", "error: a tool call could not be read (invalid json)"),)
    unknown = await env.step(call("1 + 1", name="search"))
    assert "there is no tool 'search'" in unknown.messages[0].content
    undefined = await env.step(call("1 / 0"))
    assert undefined.messages[0].content == "error: division by zero"
    end = await env.step(answer(source.entry(0)["answer"]))
    assert (end.done, end.reward, end.metrics["tool_errors"]) == (True, 1.0, 3.0)


async def test_the_turn_limit_ends_the_episode_without_reward():
    _, env, _ = await opened(ReasoningGym(parameters=CHAIN.parameters, max_turns=2))
    assert not (await env.step(call("1 + 1"))).done
    end = await env.step(call("1 + 1"))
    assert (end.done, end.reward, end.metrics["answered"]) == (True, 0.0, 0.0)


async def test_without_the_calculator_there_is_one_turn_and_no_tool():
    source, env, observation = await opened(ReasoningGym(family="gcd", calculator=False))
    assert observation.tools == ()
    assert "calculate" not in observation.messages[0].content
    end = await env.step(answer(source.entry(0)["answer"]))
    assert (end.done, end.reward) == (True, 1.0)
    _, env, _ = await opened(ReasoningGym(family="gcd", calculator=False))
    assert (await env.step(call("1 + 1"))).done


def test_tasks_are_endless_and_the_splits_disjoint():
    train, again = (task_source(CHAIN, "train", 0) for _ in range(2))
    evaluation, other = task_source(CHAIN, "eval", 0), task_source(CHAIN, "train", 1)
    indices = (0, 1, 499, 500, 1_000_000)
    assert [train.task(i) for i in indices] == [again.task(i) for i in indices]
    assert len({train.task(i).payload["question"] for i in range(200)}) > 190
    seeds = [source._chunk(c).seed for source in (train, other) for c in range(50)]
    assert max(seeds) + 500 <= 1 << 31 <= min(evaluation._chunk(c).seed for c in range(50))
    assert train.task(0).payload != other.task(0).payload


def test_another_process_makes_the_same_tasks():
    program = (
        "from slipstream.envs import task_source; from slipstream.configs.environments import ReasoningGym;"
        "print(task_source(ReasoningGym(), 'train', 7).task(501).payload['question'])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert shown.strip() == task_source(ReasoningGym(), "train", 7).task(501).payload["question"]


async def test_a_task_that_this_process_generates_differently_is_refused():
    _, env, _ = await opened()
    with pytest.raises(EnvError, match="PYTHONHASHSEED"):
        await env.reset(Task("chain_sum-train-0-0", {"index": 0, "question": "another"}))


async def test_demonstrations_play_out_in_the_environment():
    source = task_source(CHAIN, "train", 0)
    rng = random.Random(0)
    called, rewards = 0, []
    for index in range(200):
        opening, messages = source.demonstration(source.task(index), rng)
        env = source.make()
        assert await env.reset(source.task(index)) == opening
        called += len(messages) > 1
        for position, message in enumerate(messages):
            if message.role == "assistant":
                result = await env.step(message)
                assert result.done == (position == len(messages) - 1)
                if not result.done:
                    assert result.messages == (messages[position + 1],)
        rewards.append((len(messages) > 1, result.reward))
    assert 70 < called < 130
    assert all(reward == 1.0 for used, reward in rewards if used)
    guesses = [reward for used, reward in rewards if not used]
    assert sum(guesses) / len(guesses) < 0.1


def test_direct_answers_are_never_or_always_given():
    for share, turns in ((0.0, 3), (1.0, 1)):
        source = task_source(ReasoningGym(parameters=CHAIN.parameters, direct_answers=share), "train", 0)
        for index in range(20):
            assert len(source.demonstration(source.task(index), random.Random(index))[1]) == turns


def test_a_family_without_an_expression_demonstrates_its_own_answer():
    source = task_source(ReasoningGym(family="spell_backward"), "train", 0)
    _, messages = source.demonstration(source.task(0), random.Random(0))
    assert messages == (answer(source.entry(0)["answer"]),)


@pytest.mark.parametrize("family", sorted(set(DATASETS) - {"composite"}))
async def test_every_family_plays(family):
    source, env, observation = await opened(ReasoningGym(family=family))
    assert observation.messages[-1].content == source.entry(0)["question"]
    end = await env.step(Message("assistant", ""))
    assert (end.done, end.reward) == (True, 0.0)


@pytest.mark.parametrize("family", ["boxnet", "game_of_life", "prime_factorization", "pool_matrix"])
@pytest.mark.parametrize("text", ["", "abc", "[[1]]", '{"a": 1}', "null", "9" * 5000])
def test_an_answer_that_the_verifier_cannot_read_is_wrong(family, text):
    assert task_source(ReasoningGym(family=family), "train", 0).score(0, text) <= 0.01


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (ReasoningGym(family="chain_sums"), r"env.family: 'chain_sums' is not .* allowed are chain_sum"),
        (
            ReasoningGym(parameters={"max_digit": 3}),
            r"env.parameters: chain_sum has no 'max_digit'; allowed are max_digits",
        ),
        (ReasoningGym(parameters={"seed": 3}), r"env.parameters: chain_sum has no 'seed'"),
        (
            ReasoningGym(parameters={"max_terms": 1}),
            r"env.parameters: chain_sum refuses .*max_terms must be >= min_terms",
        ),
        (ReasoningGym(parameters={"max_terms": "two"}), r"env.parameters: chain_sum refuses"),
        (ReasoningGym(family="composite"), r"env.parameters: composite refuses"),
    ],
)
def test_wrong_configs_are_named_before_anything_starts(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        task_source(config, "train", 0)


def test_calculator_agrees_with_the_family():
    source = task_source(ReasoningGym(family="basic_arithmetic"), "train", 0)
    agreed = [calculate(e["metadata"]["expression"]) == e["answer"] for e in map(source.entry, range(100))]
    assert sum(agreed) > 60
