"""Rewards from a model: what an episode looked like in, a score out.

Invariants:
- What the server does not answer properly is an error, never a number: nothing is guessed from half an answer.
- A server that dies under a request is waited for, as long as `reward.request_s` allows: its supervisor starts it again.
- A classifier reads the very tokens of the episode, a judge its messages as text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..configs.reward import FIELD, Classifier, Judge
from ..envs.base import Message
from ..errors import EngineError, within
from .engine import Refused
from .http import Server

SERVED_AS = "reward"
"""What the server calls its model."""

TRIES = 3
"""Servers that one request may see die: it may be what kills them."""

SCORE = re.compile(r"score: *(\d+(?:\.\d+)?)", re.ASCII | re.IGNORECASE)
"""What the last line of a judge's answer has to be, and nothing else."""

HINT = "see the log of the role `reward`; reward.request_s sets the deadline"

QUOTED = 80
"""Characters of a judge's last line that an error quotes."""


class Played(msgspec.Struct, frozen=True):
    """An episode as a reward model is shown it.

    Attributes:
        token_ids: all tokens of the branch that was opened last, sampled or not.
        opening: messages that the policy was shown first.
        said: what followed, of the policy and of the environment.
        reference: the task's `payload["reference"]`, "" where it has none.
    """

    token_ids: Sequence[int]
    opening: tuple[Message, ...]
    said: tuple[Message, ...]
    reference: str


class RewardModel(Protocol):
    """What scores episodes."""

    async def rewards(self, own: Sequence[float], played: Played) -> tuple[tuple[float, ...], float]:
        """The rewards of an episode by step, and the model's score; `own` are those of its environment.

        Raises:
            EngineError: the server does not answer, or not what it was asked for.
            DeadlineExceeded: no score within `reward.request_s`.
        """
        ...


class ServedReward:
    """The model behind the server at `url`, as `reward` in the config says."""

    def __init__(self, config: Classifier | Judge, url: str) -> None:
        self._config = config
        self._server = Server("the reward server", url, config.request_s)
        self._one_asks = asyncio.Lock()

    async def close(self) -> None:
        await self._server.close()

    async def rewards(self, own: Sequence[float], played: Played) -> tuple[tuple[float, ...], float]:
        """See `RewardModel.rewards`."""
        asked = self._ask(played)
        score = await within(self._config.request_s, asked, who="an episode", waits_for="its reward", hint=HINT)
        rewards = [self._config.environment * reward for reward in own] or [0.0]
        rewards[-1] += self._config.weight * score
        return tuple(rewards), score

    async def _ask(self, played: Played) -> float:
        if isinstance(self._config, Judge):
            answer = await self._post("/v1/chat/completions", question(self._config, played))
            return score_of(self._server.decode(answer, Answer))
        body = {"model": SERVED_AS, "input": list(played.token_ids), "use_activation": False}
        return logit_of(self._server.decode(await self._post("/classify", body), Classified))

    async def _post(self, path: str, body: object) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                return await self._server.call("POST", path, body=body, reuse=True)
            except Refused:
                raise
            except EngineError:
                if not left:
                    raise
                async with self._one_asks:  # not hundreds at once, whether it is back
                    await self._server.answers("/health", self._config.request_s)
        raise AssertionError("the last try returns or raises")


class Class(msgspec.Struct):
    """Logits of one input, where no activation was asked for."""

    probs: list[float]


class Classified(msgspec.Struct):
    """What vLLM's `/classify` answers."""

    data: list[Class]


class Said(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    message: Said
    finish_reason: str | None = None


class Answer(msgspec.Struct):
    """What `/v1/chat/completions` answers."""

    choices: list[Choice]


def logit_of(answer: Classified) -> float:
    """The one logit of the one input. Raises EngineError where there are others."""
    logits = [logit for data in answer.data for logit in data.probs]
    if len(logits) != 1:
        raise EngineError(f"the classifier answered {len(logits)} scores; it must have one label")
    return logits[0]


def question(config: Judge, played: Played) -> dict[str, object]:
    """The request that shows `played` to a judge. It answers greedily, so that equal answers get equal scores."""
    spoken = [message for message in played.said if message.role == "assistant"]
    everything = (*played.opening, *played.said)
    values = {
        "question": "\n\n".join(message.content for message in played.opening),
        "answer": spoken[-1].content if spoken else "",
        "conversation": "\n\n".join(f"{message.role}: {_text(message)}" for message in everything),
        "reference": played.reference,
    }
    messages = [{"role": "user", "content": fill(config.template, values)}]
    return {"model": SERVED_AS, "messages": messages, "temperature": 0.0, "max_tokens": config.max_tokens}


def fill(template: str, values: dict[str, str]) -> str:
    """`template` with `values` in place of its fields; what a value holds is never taken for a field."""
    return FIELD.sub(lambda found: values.get(found[1], found[0]), template)


def score_of(answer: Answer) -> float:
    """The score in a judge's answer: its last line that is not empty is `Score: X` and nothing else, in whatever case, X a decimal
    number from 0 to 1.

    Raises:
        EngineError: it is not, or the answer was cut off.
    """
    if len(answer.choices) != 1 or answer.choices[0].message.content is None:
        raise EngineError("the judge answered no text")
    choice = answer.choices[0]
    if choice.finish_reason != "stop":
        raise EngineError(
            f"the judge's answer was cut off ({choice.finish_reason}); raise reward.max_tokens, or ask for a shorter one"
        )
    last = ((choice.message.content or "").strip().splitlines() or [""])[-1].strip()
    found = SCORE.fullmatch(last)
    if found is None or float(found[1]) > 1:
        raise EngineError(f"the judge ended with {last:.{QUOTED}}, not with `Score: X`, X from 0 to 1")
    return float(found[1])


def _text(message: Message) -> str:
    calls = [f"calls {call.name} with {msgspec.json.encode(call.arguments).decode()}" for call in message.tool_calls]
    return "\n".join([message.content, *calls] if message.content else calls)
