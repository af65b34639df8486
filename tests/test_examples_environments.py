"""The examples of environments: what they demonstrate is what they answer, their commands train, and the prices of the MCP server
are right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.envs import Message, ToolCall, task_source
from slipstream.tests.runs import SMALL, leftovers, metrics, slipstream

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["counting", "retool", "search_r1", "text_game"])
async def test_a_demonstration_is_an_episode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sandboxes and a real index answer word for word what is demonstrated; some demonstrations earn 1, others 0."""
    monkeypatch.chdir(ROOT)
    source = task_source(load(f"examples/{name}.yaml").env, "train", 0)
    rewards = set[float]()
    for index in range(12):
        task = source.task(index)
        demonstrated = source.demonstration(task, random.Random(index))
        assert demonstrated
        opening, messages = demonstrated
        env = source.make()
        assert await env.reset(task) == opening
        answered = list[Message]()
        for message in messages:
            if message.role != "assistant":
                assert message == answered.pop(0)
                continue
            result = await env.step(message)
            assert result.done == (message is messages[-1])
            answered += result.messages
        await env.close()
        assert answered == []
        rewards.add(result.reward)
    assert rewards == {0.0, 1.0}


async def test_the_shop_has_the_prices_of_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    monkeypatch.chdir(ROOT)
    source = task_source(load("examples/mcp_agent/train.yaml").env, "train", 0)
    env, task = source.make(), source.task(0)
    opening = await env.reset(task)
    assert [tool.name for tool in opening.tools] == ["price"]
    first, second = (word for word in opening.messages[-1].content.split() if word in task.id)
    total = 0
    for number, item in enumerate((first, second)):
        result = await env.step(Message("assistant", "", (ToolCall("price", {"item": item}, f"c{number}"),)))
        total += int("".join(filter(str.isdigit, result.messages[0].content)))
    result = await env.step(Message("assistant", str(total)))
    assert (result.reward, result.done) == (1.0, True)
    await env.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["retool", "search_r1", "text_game"])
def test_its_commands_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    example, run = f"examples/{name}.yaml", tmp_path / "run"
    slipstream("init-model", str(tmp_path / "random"), "--config", example)
    few = ("sft.demonstrations=32", "sft.epochs=1")
    slipstream("sft", example, f"model.path={tmp_path / 'random'}", f"sft.out={tmp_path / 'model'}", *few)
    small = (*SMALL, "rollout.engine.kind=transformers", "learner.steps=2", "evaluation.tasks=2")
    slipstream("train", example, f"model.path={tmp_path / 'model'}", f"run.dir={run}", *small)
    assert [row["step"] for row in metrics(run)] == [1, 2]
    assert all(set(row["outcomes"]) <= {"finished", "truncated"} for row in metrics(run))
    assert leftovers(run) == []
