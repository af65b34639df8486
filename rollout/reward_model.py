"""Rewards from a model: scores whole episodes.

Invariants:
- An invalid response of the server is an error, never a number.
- A request outlives the death of its server, within `score_s` seconds: the supervisor restarts the server.
- A classifier reads the exact tokens of the episode, a judge its messages as text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import msgspec

from ..configs.reward import FIELD, Classifier, Judge
from ..envs.base import Message
from ..errors import EngineError, with_deadline
from .engines.access import ServerAccess
from .engines.base import RequestRejected
from .engines.http_client import HttpClient

SERVED_AS = "reward"  # the name of the model on its server
TRIES = 3  # tries of one request: it may be the cause of the server's death
SCORE = re.compile(r"score: *(\d+(?:\.\d+)?)", re.ASCII | re.IGNORECASE)  # the whole last line of a judge's answer
HINT = "see the log of the role `reward`; rollout.episode_s sets the deadline"

QUOTED = 80  # characters of a judge's last line that an error quotes


class ScoredConversation(msgspec.Struct, frozen=True):
    """An episode as input of a reward model: all tokens of the newest branch, sampled or not; the messages that `reset` returned
    and all since; the task's `payload["reference"]`, "" where it has none."""

    token_ids: Sequence[int]
    opening: tuple[Message, ...]
    transcript: tuple[Message, ...]
    reference: str


class RewardModel:
    """A client of the reward model at `url`, with the settings of the config's `reward` section."""

    def __init__(
        self, config: Classifier | Judge, url: str, score_s: float, access: ServerAccess | None = None
    ) -> None:
        self._config = config
        self._score_s = score_s
        self._server = HttpClient("the reward server", url, score_s, access)
        self._health_lock = asyncio.Lock()

    def trust(self, certificate: str) -> None:
        """Talk only to the server with this certificate: another process has another one."""
        self._server.trust(certificate)

    async def close(self) -> None:
        await self._server.close()

    async def rewards(
        self, environment: Sequence[float], conversation: ScoredConversation
    ) -> tuple[tuple[float, ...], float]:
        """The rewards of an episode by step, and the model's score; `environment` are the environment's rewards. Raises
        EngineError: the server does not answer, or its answer is invalid; DeadlineExceeded: no score within `score_s` seconds."""
        request = self._score(conversation)
        score = await with_deadline(self._score_s, request, who="an episode", waits_for="its reward", hint=HINT)
        rewards = [self._config.weights["environment"] * reward for reward in environment] or [0.0]
        rewards[-1] += self._config.weights["model"] * score
        return tuple(rewards), score

    async def _score(self, conversation: ScoredConversation) -> float:
        if isinstance(self._config, Judge):
            answer = await self._post("/v1/chat/completions", judge_request(self._config, conversation))
            return parse_score(self._server.decode(answer, JudgeResponse))
        body = {"model": SERVED_AS, "input": list(conversation.token_ids), "use_activation": False}
        return parse_logit(self._server.decode(await self._post("/classify", body), ClassifyResponse))

    async def _post(self, path: str, body: object) -> bytes:
        for left in reversed(range(TRIES)):
            try:
                return await self._server.call("POST", path, body=body)
            except RequestRejected:
                raise
            except EngineError:
                if not left:
                    raise
                async with self._health_lock:  # one health check at a time, not one per episode
                    await self._server.wait_for_answer("/health", self._score_s)
        raise AssertionError("the last try returns or raises")


class ClassProbability(msgspec.Struct):
    """The logits of one input; `use_activation` is off."""

    probs: list[float]


class ClassifyResponse(msgspec.Struct):
    """The response of vLLM's `/classify`."""

    data: list[ClassProbability]


class JudgeMessage(msgspec.Struct):
    content: str | None = None


class JudgeChoice(msgspec.Struct):
    message: JudgeMessage
    finish_reason: str | None = None


class JudgeResponse(msgspec.Struct):
    """The response of `/v1/chat/completions`."""

    choices: list[JudgeChoice]


def parse_logit(answer: ClassifyResponse) -> float:
    """The logit of the only input. Raises EngineError unless there is exactly one."""
    logits = [logit for data in answer.data for logit in data.probs]
    if len(logits) != 1:
        raise EngineError(f"the classifier answered {len(logits)} scores; it must have one label")
    return logits[0]


def judge_request(config: Judge, conversation: ScoredConversation) -> dict[str, object]:
    """The request to a judge. It samples greedily, so that equal conversations get equal scores."""
    replies = [message for message in conversation.transcript if message.role == "assistant"]
    messages = (*conversation.opening, *conversation.transcript)
    values = {
        "question": "\n\n".join(message.content for message in conversation.opening),
        "answer": replies[-1].content if replies else "",
        "conversation": "\n\n".join(f"{message.role}: {_text(message)}" for message in messages),
        "reference": conversation.reference,
    }
    prompt = [{"role": "user", "content": fill_template(config.template, values)}]
    return {"model": SERVED_AS, "messages": prompt, "temperature": 0.0, "max_tokens": config.max_tokens}


def fill_template(template: str, values: dict[str, str]) -> str:
    """`template` with its fields replaced by `values`; fields inside a value are not replaced."""
    return FIELD.sub(lambda found: values.get(found[1], found[0]), template)


def parse_score(answer: JudgeResponse) -> float:
    """The score in a judge's answer: its last non-empty line is exactly `Score: X`, in any case, X a decimal number from 0 to 1.
    Raises EngineError: it is not, or the answer was truncated."""
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
