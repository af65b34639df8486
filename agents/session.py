"""The session: a `Policy` that never re-tokenizes what the engine sampled.

Invariants:
- A branch is one growing list of token ids. Sampled ids enter it as the engine returned them and never change.
- A later turn is rendered as an exact extension of the branch. Where the chat format cannot extend it, or the agent
  rewrote the history, a new branch opens; its earlier turns are context without loss. No sampled token is ever masked.
- Every sampled token carries its log-prob and the policy version that the engine reported for it.
- A completion that the engine interrupts (`abort`) continues from the tokens it has, within the same token budget.
- No hot loop: after an abort before the first token, the session waits before it tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import numpy as np
from renderers import Message as ChatMessage
from renderers import ParsedResponse, Renderer, ToolCallParseStatus
from renderers import ToolSpec as ChatTool

from ..buffer.trajectory import Outcome, Trajectory, Turn, VersionSpan
from ..envs.base import Message, ToolCall, ToolSpec
from ..errors import EngineError, PolicyError
from .base import Completion, ContextExhausted, Generate

RETRY_S = 0.05  # pause after a completion that was aborted before its first token; doubles after each one in a row
RETRY_LIMIT_S = 2.0  # longest such pause; the episode's deadline ends the retries


@dataclass
class Branch:
    """The tokens of one conversation; `history` holds its messages, None for raw tokens."""

    token_ids: list[int] = field(default_factory=list)
    history: list[Message] | None = None
    tools: tuple[ToolSpec, ...] = ()
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append context tokens, which carry no loss."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([False] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))

    def record(self, start: int, part: Completion) -> None:
        """Append sampled tokens to the turn that starts at `start`."""
        offset = len(self.token_ids)
        self.token_ids.extend(part.token_ids)
        self.loss_mask.extend([True] * len(part.token_ids))
        self.logprobs.extend(part.logprobs)
        for span in part.version_spans:
            self._append_span(_shifted(span, offset))
        if self.turns and self.turns[-1].start == start:
            self.turns.pop()
        self.turns.append(Turn(start, len(self.token_ids), part.finish_reason))

    def _append_span(self, span: VersionSpan) -> None:
        last = self.version_spans[-1] if self.version_spans else None
        same = last and (last.version, last.kv_version) == (span.version, span.kv_version)
        if last and same and last.end == span.start:
            self.version_spans[-1] = VersionSpan(last.start, span.end, span.version, span.kv_version)
        else:
            self.version_spans.append(span)


class Session:
    """The `Policy` of one episode. `generate` samples from an engine and stops at `renderer.get_stop_token_ids()`; token ids are
    below `vocabulary`; `max_tokens` bounds prompt and sampled tokens of one branch together."""

    def __init__(
        self, renderer: Renderer, generate: Generate, *, vocabulary: int, max_tokens_per_turn: int, max_tokens: int
    ) -> None:
        self.branches: list[Branch] = []
        self._renderer = renderer
        self._generate = generate
        self._vocabulary = vocabulary
        self._max_tokens_per_turn = max_tokens_per_turn
        self._max_tokens = max_tokens

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Reply to a conversation. See `Policy.chat`. Raises PolicyError where the history is empty or ends with an assistant
        message, EngineError where the engine returned an invalid completion."""
        if not messages or messages[-1].role == "assistant":
            raise PolicyError("chat needs a message to answer: the history is empty or ends with the assistant's own")
        branch = self._extend(messages, tuple(tools)) or self._open(messages, tuple(tools))
        prompt = list(branch.token_ids)
        completion = await self._complete(branch)
        parsed = self._renderer.parse_response(list(completion.token_ids), tools=to_tools(tools), prompt_ids=prompt)
        reply = _message(parsed, call_prefix=f"{len(self.branches)}.{len(branch.turns)}")
        branch.history = [*messages, reply]
        return reply

    async def generate(self, token_ids: Sequence[int]) -> Completion:
        """Continue raw token ids. See `Policy.generate`. Raises ContextExhausted where they leave no room for another token,
        PolicyError where there are none, or ids outside the vocabulary."""
        if not token_ids or not all(0 <= token < self._vocabulary for token in token_ids):
            raise PolicyError(f"generate needs token ids between 0 and {self._vocabulary - 1}, and at least one")
        self._require_room(len(token_ids))
        branch = self.branches[-1] if self.branches else None
        if branch and list(token_ids[: len(branch.token_ids)]) == branch.token_ids:
            branch.extend(token_ids[len(branch.token_ids) :])
            branch.history = None
        else:
            branch = self._add_branch(token_ids)
        return await self._complete(branch)

    def trajectories(
        self,
        *,
        group_id: int,
        attempt: int,
        member: int,
        task_id: str,
        env: str,
        reward: float,
        turn_rewards: Sequence[float],
        outcome: Outcome,
        timings: dict[str, float],
        metrics: dict[str, float],
    ) -> tuple[Trajectory, ...]:
        """The episode as trajectories, one per branch with sampled tokens."""
        return tuple(
            Trajectory(
                id=f"{group_id}.{attempt}.{member}.{number}",
                group_id=group_id,
                member=member,
                branch=number,
                task_id=task_id,
                env=env,
                token_ids=np.array(branch.token_ids, dtype=np.int32),
                loss_mask=np.array(branch.loss_mask, dtype=np.bool_),
                behavior_logprobs=np.array(branch.logprobs, dtype=np.float32),
                version_spans=tuple(branch.version_spans),
                turns=tuple(branch.turns),
                reward=reward,
                turn_rewards=tuple(turn_rewards),
                outcome=outcome,
                timings=timings,
                metrics=metrics,
            )
            for number, branch in enumerate(b for b in self.branches if b.turns)
        )

    def _extend(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> Branch | None:
        """The branch whose conversation `messages` continues, extended by the new messages; None where there is none."""
        for branch in reversed(self.branches):
            seen = len(branch.history or ())
            if not seen or tools != branch.tools or list(messages[:seen]) != branch.history:
                continue
            start = branch.turns[-1].start
            sampled, size, new = branch.token_ids[start:], len(branch.token_ids), to_chat(messages[seen:])
            bridged = self._renderer.bridge_to_next_turn(branch.token_ids[:start], sampled, new, tools=to_tools(tools))
            if bridged is None or bridged.token_ids[:size] != branch.token_ids:
                return None
            self._require_room(len(bridged.token_ids))
            branch.extend(bridged.token_ids[size:])
            return branch
        return None

    def _open(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...]) -> Branch:
        prompt = self._renderer.render_ids(to_chat(messages), tools=to_tools(tools), add_generation_prompt=True)
        self._require_room(len(prompt))
        return self._add_branch(prompt, tools)

    def _add_branch(self, token_ids: Sequence[int], tools: tuple[ToolSpec, ...] = ()) -> Branch:
        branch = Branch(tools=tools)
        branch.extend(token_ids)
        self.branches.append(branch)
        return branch

    def _require_room(self, prompt: int) -> None:
        if prompt >= self._max_tokens:
            raise ContextExhausted(f"the prompt has {prompt} tokens; max_tokens is {self._max_tokens}")

    async def _complete(self, branch: Branch) -> Completion:
        """Sample one completion at the end of `branch`, in as many parts as the engine returns it."""
        start = len(branch.token_ids)
        end = min(start + self._max_tokens_per_turn, self._max_tokens)
        reason = "abort"
        pause_s = RETRY_S
        while reason == "abort" and len(branch.token_ids) < end:
            room = end - len(branch.token_ids)
            part = await self._generate(tuple(branch.token_ids), room)
            _check(part, room)
            if not part.token_ids:
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_LIMIT_S, 2 * pause_s)
                continue
            branch.record(start, part)
            reason, pause_s = part.finish_reason, RETRY_S
        if reason == "abort":  # the parts have used up the budget
            reason = "length"
            branch.turns[-1] = Turn(start, end, reason)
        spans = (msgspec.structs.replace(s, start=max(s.start, start)) for s in branch.version_spans if s.end > start)
        shifted = tuple(_shifted(span, -start) for span in spans)
        return Completion(tuple(branch.token_ids[start:]), tuple(branch.logprobs[start:]), shifted, reason)


def _shifted(span: VersionSpan, by: int) -> VersionSpan:
    return msgspec.structs.replace(span, start=span.start + by, end=span.end + by)


def _check(part: Completion, room: int) -> None:
    tokens = len(part.token_ids)
    covered = [position for span in part.version_spans for position in range(span.start, span.end)]
    if tokens > room or len(part.logprobs) != tokens or covered != list(range(tokens)):
        raise EngineError(
            f"the engine returned {tokens} tokens where {room} were requested, with {len(part.logprobs)} log-probs and "
            f"version spans over {len(covered)}; check that its version is supported"
        )
    if not tokens and part.finish_reason != "abort":
        what = f"no token but `{part.finish_reason}`"
        raise EngineError(f"the engine returned {what}; check that its version is supported")


def _message(parsed: ParsedResponse, call_prefix: str) -> Message:
    """The assistant message. A call that cannot be parsed makes the whole message malformed."""
    calls: list[ToolCall] = []
    malformed = "" if parsed.reasoning_complete is not False else "the thinking was not closed"
    for number, call in enumerate(parsed.tool_calls):
        if call.status is ToolCallParseStatus.OK and call.name and isinstance(call.arguments, dict):
            calls.append(ToolCall(call.name, call.arguments, id=call.id or f"call-{call_prefix}.{number}"))
        elif call.status is ToolCallParseStatus.OK:
            malformed = malformed or "the arguments of a tool call must be a JSON object"
        else:
            malformed = malformed or f"a tool call could not be read ({call.status.value.replace('_', ' ')})"
    return Message("assistant", parsed.content, tuple(calls), malformed=malformed)


def to_chat(messages: Sequence[Message]) -> list[ChatMessage]:
    """Messages in the format of `renderers`, OpenAI's chat format."""
    return [_chat(message) for message in messages]


def to_tools(tools: Sequence[ToolSpec]) -> list[ChatTool] | None:
    """Tools wrapped as `{"type": "function", "function": ...}`, the form in which models were trained on them; None for none."""
    wrapped = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    return cast(list[ChatTool], wrapped) or None


def _chat(message: Message) -> ChatMessage:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        chat |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return cast(ChatMessage, chat)
