"""Environments of plain functions: schemas from signatures, calls, answers, and who is at fault when one fails."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Annotated, Literal

import pytest
from jsonschema import Draft202012Validator
from msgspec import Meta
from slipstream.envs import CALCULATOR, InvalidCall, Message, Task, ToolCall, ToolEnv
from slipstream.envs.tool_env import as_tool
from slipstream.errors import ToolError

PRICES = {"tea": 3, "milk": 2}


class Shop(ToolEnv):
    turns = 3

    def task(self, index):
        return Task(f"price-{index}", {"item": self.rng(index).choice(list(PRICES))})

    def question(self, task):
        return f"What does {task.payload['item']} cost?"

    def tools(self):
        return [self.price, self.stock, CALCULATOR]

    def price(self, item: str, currency: Literal["EUR", "USD"] = "EUR") -> dict[str, object]:
        """The price of an item
        in the shop.

        What is below is for programmers.
        """
        if item not in PRICES:
            raise InvalidCall(f"there is no {item}; there are {', '.join(PRICES)}")
        return {"price": PRICES[item], "currency": currency, "asked": self._task.payload["item"]}

    async def stock(self, count: Annotated[int, Meta(ge=0, description="how many")]) -> str:
        await asyncio.sleep(0)
        if count == 13:
            raise OSError("the shop is closed")
        return str(count)

    def score(self, task, answer):
        assert threading.current_thread() is not threading.main_thread()  # it may block
        return float(answer == str(PRICES[task.payload["item"]]))


@pytest.fixture
async def shop():
    env = Shop(split="train", seed=0).make()
    env.opened = await env.reset(env.task(0))
    return env


def calls(*made):
    return Message(
        "assistant", "", tuple(ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(made))
    )


async def test_the_policy_is_told_the_question_and_the_signatures(shop):
    assert shop.opened.messages == (Message("user", f"What does {shop._task.payload['item']} cost?"),)
    price, stock, calculator = shop.opened.tools
    assert calculator == CALCULATOR.spec
    assert (price.name, price.description) == ("price", "The price of an item in the shop.")
    assert price.parameters == {
        "type": "object",
        "properties": {"item": {"type": "string"}, "currency": {"enum": ["EUR", "USD"], "default": "EUR"}},
        "required": ["item"],
        "additionalProperties": False,
    }
    assert stock.parameters["properties"]["count"] == {"type": "integer", "minimum": 0, "description": "how many"}
    for spec in shop.opened.tools:
        Draft202012Validator.check_schema(spec.parameters)


async def test_calls_are_answered_in_their_order_and_the_first_message_without_one_is_the_answer(shop):
    item = shop._task.payload["item"]
    told = await shop.step(
        calls(("price", {"item": item}), ("stock", {"count": 2}), ("calculator", {"expression": "1 + 1"}))
    )
    assert [message.content for message in told.messages] == [
        f'{{"price":{PRICES[item]},"currency":"EUR","asked":"{item}"}}', "2", "2",
    ]  # fmt: skip
    assert [message.tool_call_id for message in told.messages] == ["0", "1", "2"]
    ended = await shop.step(Message("assistant", str(PRICES[item])))
    assert (ended.reward, ended.done, ended.truncated) == (1.0, True, False)
    assert told.metrics == ended.metrics == {"tool_calls": 3.0, "tool_errors": 0.0}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (("price", {}), "Object missing required field `item`"),
        (("price", {"item": 3}), "Expected `str`, got `int` - at `$.item`"),
        (("price", {"item": "tea", "colour": "red"}), "unknown field `colour`"),
        (("price", {"item": "tea", "currency": "DM"}), "Invalid enum value 'DM'"),
        (("stock", {"count": -1}), "Expected `int` >= 0"),
        (("price", {"item": "beer"}), "there is no beer; there are tea, milk"),
        (("prices", {"item": "tea"}), "there is no tool 'prices'; use calculator, price, stock"),
    ],
)
async def test_a_wrong_call_is_told_and_the_episode_goes_on(shop, call, says):
    told = await shop.step(calls(call))
    assert re.match(f"error: .*{re.escape(says)}", told.messages[0].content)
    assert not told.done


async def test_a_tool_that_raises_is_a_failure_and_no_reward(shop):
    with pytest.raises(
        ToolError, match=r"the tool 'stock' failed: OSError: the shop is closed \(test_envs_tool_env.py:\d+ in stock"
    ):
        await shop.step(calls(("stock", {"count": 13})))


async def test_an_episode_without_an_answer_ends_truncated(shop):
    for _ in range(2):
        assert not (await shop.step(Message("assistant", "", malformed="no JSON"))).done
    ended = await shop.step(calls(("stock", {"count": 1})))
    assert (ended.done, ended.truncated, ended.reward) == (True, True, 0.0)
    assert ended.metrics == {"tool_calls": 0.0, "tool_errors": 2.0}


async def test_a_score_may_be_a_coroutine_and_a_question_messages():
    class Chat(Shop):
        def question(self, task):
            return [Message("system", "Be brief."), Message("user", "?")]

        async def score(self, task, answer):
            return 0.5

    env = Chat(split="train", seed=0).make()
    assert [message.role for message in (await env.reset(env.task(0))).messages] == ["system", "user"]
    assert (await env.step(Message("assistant", ""))).reward == 0.5


async def test_episodes_at_once_do_not_share_what_they_were_asked():
    source = Shop(split="train", seed=0)
    envs = [source.make() for _ in range(8)]
    await asyncio.gather(*(env.reset(source.task(i)) for i, env in enumerate(envs)))
    told = await asyncio.gather(*(env.step(calls(("price", {"item": "tea"}))) for env in envs))
    for i, result in enumerate(told):
        assert f'"asked":"{source.task(i).payload["item"]}"' in result.messages[0].content


def untyped(a, b: int = 1): ...


def variadic(*values: int): ...


def unknown(a: Nowhere): ...  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def not_json(a: complex): ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (untyped, "the tool untyped: its parameter a has no type"),
        (variadic, "the tool variadic: .*a policy can name"),
        (unknown, "the tool unknown: name 'Nowhere' is not defined, which is the type of a parameter"),
        (not_json, "the tool not_json: its parameter a has the type <class 'complex'>, which JSON has not; take str"),
        ("look", "`tools` returned 'look', which is no function; name one without calling it"),
    ],
)
def test_what_cannot_be_a_tool_is_named(function, says):
    with pytest.raises(TypeError, match=says):
        as_tool(function)
