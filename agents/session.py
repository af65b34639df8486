"""The session: a `Policy` that never re-tokenizes what the engine sampled.

Invariants:
- Sampled ids enter the record as the engine returned them and never change.
- A later turn is rendered as an exact extension of the completion that it answers. Where the chat format cannot extend it, or the
  agent rewrote the history, a new branch opens; its earlier turns are context without loss. No sampled token is ever masked.
- Calls may run at the same time, and repeat each other: the record is a tree (`tree.py`). At most `REPLIES` are sampled at once.
- Every sampled token carries its log-prob and the policy version that the engine reported for it.
- A completion that the engine interrupts (`abort`) continues from the tokens it has, within the same token budget.
- No hot loop: after an abort before the first token, the session waits before it tries again.
- A lost engine is remembered (`failure`): an agent that swallows the error does not turn it into a reward.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from ..buffer.trajectory import DETAIL_LIMIT, SEGMENTS_LIMIT, EnvCall, Outcome, Segment, Trajectory
from ..common.images import PlacedImage, PromptImage, moved_images
from ..common.tasks import in_thread
from ..envs.base import Message, ToolCall, ToolSpec
from ..errors import EngineError, PolicyError, describe, encodable
from .base import Completion, ContextExhausted, Decode, Generate, Reply, SampleRequest
from .chat_images import chat_parts, placed_images
from .tree import Branch, ConversationTree, Node, conversation_keys, cut, extended_key, joined, moved, segments_of

if TYPE_CHECKING:
    from renderers import Message as ChatMessage
    from renderers import ParsedResponse, RenderedTokens, Renderer
    from renderers import ToolSpec as ChatTool

T = TypeVar("T")

RETRY_S = 0.05  # pause after a completion that was aborted before its first token; doubles after each one in a row
RETRY_LIMIT_S = 2.0  # longest such pause; the episode's deadline ends the retries
ONE_REPLY = SampleRequest()
REPLIES = 64  # of one episode that are sampled at once; the others wait
LONG_TEXT = 1 << 14  # characters of messages and tools that are rendered in a thread: about 10 ms of work


class _Prompt(NamedTuple):
    """`token_ids[start:]` follow the last token of `parent`, the completion that is continued, None for a new branch; `segments`
    name the messages in them; `images` are those of all tokens."""

    parent: Node | None
    token_ids: Sequence[int]
    start: int
    segments: Sequence[Segment] | None = None  # None for raw tokens, which are no messages
    images: Sequence[PlacedImage] = ()

    def answered(self, completion: Completion, trained: bool = True, malformed: str = "") -> Node:
        """The record of a completion after it."""
        context, said = self.token_ids[self.start :], self.segments
        why = None if said is None else encodable(malformed)[:DETAIL_LIMIT]
        own = moved_images((image for image in self.images if image.start >= self.start), -self.start)
        return Node(
            self.parent, context, completion, trained, [moved(one, -self.start) for one in said or ()], own, why
        )


class Session:
    """The `Policy` of one episode. `generate` samples from an engine and stops at `renderer.get_stop_token_ids()`; token ids are
    below `vocabulary`; `max_tokens` bounds prompt and sampled tokens of one branch together; `decode`, the text of token ids, is
    needed for requests with `stop`. `failure` is the first error of the engine, or one that is not the caller's, None while there
    was none; `exhausted` are the messages of calls that found no room for another token; `cut_short` says whether the newest reply
    ended at a limit of this session, not at the caller's; `metrics` go into the trajectories; `image_files` are those of all images
    in them, by digest."""

    def __init__(
        self,
        renderer: Renderer,
        generate: Generate,
        *,
        vocabulary: int,
        max_tokens_per_turn: int,
        max_tokens: int,
        decode: Decode | None = None,
    ) -> None:
        self.failure: Exception | None = None
        self.exhausted: list[str] = []
        self.cut_short = False
        self.metrics: dict[str, float] = {}
        self.image_files: dict[str, bytes] = {}
        self.decode = decode
        self._tree = ConversationTree()
        self._renderer = renderer
        self._generate = generate
        self._vocabulary = vocabulary
        self._max_tokens_per_turn = max_tokens_per_turn
        self.max_tokens = max_tokens
        self._turns = asyncio.Semaphore(REPLIES)

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Reply to a conversation. See `Policy.chat`. Raises what `sample` raises."""
        (reply,) = await self.sample(messages, tools)
        return reply.message

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), request: SampleRequest = ONE_REPLY
    ) -> tuple[Reply, ...]:
        """`request.n` replies to a conversation. Calls may run at the same time. Raises PolicyError where the history is empty,
        ends with an assistant message or cannot be rendered; ContextExhausted where it leaves no room for another token;
        EngineError where the engine returned an invalid completion, and what the engine raises."""
        if not messages or messages[-1].role == "assistant":
            raise PolicyError("chat needs a message to answer: the history is empty or ends with the assistant's own")
        if request.stop and self.decode is None:
            raise PolicyError("this session was made without `decode`, which requests with `stop` need")
        try:
            keys, tools = conversation_keys(messages, tools), tuple(tools)
            size = len(msgspec.json.encode((tools, [message.tool_calls for message in messages])))
        except Exception as error:  # lone surrogates, numbers of thousands of digits
            raise PolicyError(f"the conversation cannot be written as JSON: {describe(error)}") from error
        pictures = any(message.images for message in messages)
        if not pictures and size + sum(len(message.content) for message in messages) < LONG_TEXT:
            prompt = self._prompt(messages, tools, keys)
        else:
            prompt = await in_thread(lambda: self._prompt(messages, tools, keys), "rendering a prompt")
        self._require_room(len(prompt.token_ids))
        with self._remembered_failure():
            return await _together([self._reply(prompt, tools, request, keys[-1]) for _ in range(request.n)])

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        """Continue raw token ids. See `Policy.generate`. Raises ContextExhausted where they leave no room for another token,
        PolicyError where there are none, or ids outside the vocabulary, or `max_tokens` below 1."""
        if not token_ids or not all(0 <= token < self._vocabulary for token in token_ids):
            raise PolicyError(f"generate needs token ids between 0 and {self._vocabulary - 1}, and at least one")
        if max_tokens is not None and max_tokens < 1:
            raise PolicyError(f"generate with max_tokens={max_tokens}: allowed are 1 and more")
        self._require_room(len(token_ids))
        parent, size = self._tree.beginning(token_ids)
        prompt = _Prompt(parent, token_ids, size, images=() if parent is None else parent.all_images())
        with self._remembered_failure():
            completion = await self._complete(prompt, SampleRequest(max_tokens))
        self._tree.add(prompt.answered(completion))
        return completion

    @property
    def branches(self) -> list[Branch]:
        """What was sampled so far, see `ConversationTree.branches`."""
        return self._tree.branches()

    def experts_known(self, token_ids: Sequence[int]) -> int:
        """See `ConversationTree.experts_known`."""
        return self._tree.experts_known(token_ids)

    @property
    def untrained(self) -> int:
        """Completions without loss."""
        return sum(not node.trained for node in self._tree.nodes)

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
        started: float = 0.0,
        env_calls: Sequence[EnvCall] = (),
    ) -> tuple[Trajectory, ...]:
        """The episode as trajectories, one per branch; `env_calls` are on the first."""
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
                started=started,
                env_calls=() if number else tuple(env_calls),
                segments=tuple(branch.segments[:SEGMENTS_LIMIT]),
                images=tuple(branch.images),
                experts=None if branch.experts is None else branch.experts.whole(len(branch.token_ids)),
            )
            for number, branch in enumerate(self.branches)
        )

    def _prompt(self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], keys: Sequence[bytes]) -> _Prompt:
        """The whole prompt, after the completion that the conversation continues."""
        try:
            for seen in range(len(messages) - 1, 0, -1):
                for node in self._tree.ending_with(keys[seen]) if messages[seen - 1].role == "assistant" else ():
                    extended = self._extended(node, messages[seen:], tools)
                    if extended is not None:
                        return extended
            chat, wrapped = to_chat(messages), to_tools(tools)
            rendered = self._renderer.render(chat, tools=wrapped, add_generation_prompt=True)
            segments = segments_of(rendered, messages, tools=bool(tools))
            return _Prompt(None, rendered.token_ids, 0, segments, self._place_images(rendered, messages))
        except Exception as error:  # chat formats refuse conversations in different ways
            raise PolicyError(f"the chat format cannot render the conversation: {describe(error)}") from error

    def _extended(self, node: Node, new: Sequence[Message], tools: tuple[ToolSpec, ...]) -> _Prompt | None:
        """The tokens up to `node` and the new messages; None where the chat format has no exact extension."""
        before, sampled = node.token_ids(), list(node.completion.token_ids)
        prompt = before[: -len(sampled)]
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, to_chat(new), tools=to_tools(tools))
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        segments = [s for s in segments_of(bridged, new, tools=False) if s.start >= len(before)]
        images = (*node.all_images(), *self._place_images(bridged, new))
        return _Prompt(node, bridged.token_ids, len(before), segments, images)

    def _place_images(self, rendered: RenderedTokens, messages: Sequence[Message]) -> tuple[PlacedImage, ...]:
        """The images of `messages` in their tokens; their files are kept. Raises PolicyError where the chat format has none."""
        if not any(message.images for message in messages):
            return ()
        placed, files = placed_images(rendered, messages)
        self.image_files |= files
        return placed

    async def _reply(self, prompt: _Prompt, tools: tuple[ToolSpec, ...], request: SampleRequest, key: bytes) -> Reply:
        async with self._turns:
            completion = await self._complete(prompt, request)
        own = request.max_tokens is not None and len(completion.token_ids) >= request.max_tokens
        self.cut_short = completion.finish_reason == "length" and not own
        text, completion = self._stopped(completion, request.stop)
        message, content, reasoning = self._read(completion, prompt.token_ids, tools)
        shown = Message("assistant", content.partition(text)[0] if text else content, message.tool_calls)
        node = prompt.answered(completion, request.trained, message.malformed)
        self._tree.add(node, [extended_key(key, message), extended_key(key, shown)])
        return Reply(message, shown.content, reasoning, len(prompt.token_ids), completion, text)

    def _read(
        self, completion: Completion, prompt: Sequence[int], tools: tuple[ToolSpec, ...]
    ) -> tuple[Message, str, str]:
        """What a completion says: the message, its content as a client sees it, and its reasoning. It never raises: what the policy
        wrote is recorded in any case, and is malformed where it cannot be read."""
        ids = list(completion.token_ids)
        text = self.decode(ids, special=False) if self.decode is not None else ""
        try:
            parsed = self._renderer.parse_response(ids, tools=to_tools(tools), prompt_ids=list(prompt))
            message = _message(parsed, text, call_prefix=str(len(self._tree.nodes)))
            extended_key(b"", message)  # what is no JSON cannot be told to an environment, either
        except (
            Exception
        ) as error:  # JSON that is nested a thousand times, numbers of 5,000 digits, half a surrogate pair
            return Message("assistant", text, malformed=f"the reply could not be read: {describe(error)}"), text, ""
        content = message.content
        if message.malformed and not message.tool_calls:
            content = content or "".join(call.raw for call in parsed.tool_calls)
        return message, content, parsed.reasoning_content or ""

    def _stopped(self, completion: Completion, stop: Sequence[str]) -> tuple[str, Completion]:
        """The stop text that is completed first, "" for none, and the completion up to the token that completes it."""
        if not stop:
            return "", completion
        decode = self.decode
        assert decode is not None  # `sample` has refused
        ids = completion.token_ids

        def said(tokens: int) -> list[str]:
            text = decode(ids[:tokens])
            return [one for one in stop if one in text]

        if not said(len(ids)):
            return "", completion
        tokens = bisect.bisect_left(range(len(ids)), True, lo=1, key=lambda tokens: bool(said(tokens)))
        text = decode(ids[:tokens])
        return min(said(tokens), key=text.index), cut(completion, tokens)

    @contextlib.contextmanager
    def _remembered_failure(self) -> Generator[None]:
        """Keep the first error that is not the caller's."""
        try:
            yield
        except PolicyError:
            raise
        except Exception as error:
            if self.failure is None:
                self.failure = error
            raise

    def _require_room(self, prompt: int) -> None:
        if prompt >= self.max_tokens:
            self.exhausted.append(f"the prompt has {prompt} tokens; max_tokens is {self.max_tokens}")
            raise ContextExhausted(self.exhausted[-1])

    async def _complete(self, prompt: _Prompt, request: SampleRequest) -> Completion:
        """Sample one completion after `prompt`, in as many parts as the engine returns it. Parts of one that does not come to its
        end are recorded."""
        ids = prompt.token_ids
        images = [PromptImage(one.start, one.end, self.image_files[one.digest]) for one in prompt.images]
        most = min(self._max_tokens_per_turn, self.max_tokens - len(ids), request.max_tokens or self.max_tokens)
        parts, sampled, pause_s = list[Completion](), list[int](), RETRY_S
        try:
            while (not parts or parts[-1].finish_reason == "abort") and len(sampled) < most:
                room = most - len(sampled)
                part = await self._generate((*ids, *sampled), room, *([images] if images else []))
                _check(part, room)
                if not part.token_ids:
                    await asyncio.sleep(pause_s)
                    pause_s = min(RETRY_LIMIT_S, 2 * pause_s)
                    continue
                parts.append(part)
                sampled += part.token_ids
                pause_s = RETRY_S
        except BaseException:
            if parts:
                self._tree.add(prompt.answered(joined(parts), request.trained))
            raise
        completion = joined(parts)
        if completion.finish_reason == "abort":  # the parts have used up the budget
            completion = msgspec.structs.replace(completion, finish_reason="length")
        return completion


async def _together(work: Sequence[Awaitable[T]]) -> tuple[T, ...]:
    """The results of `work`, which runs at the same time. When one part fails or the caller is cancelled, all end."""
    if len(work) == 1:
        return (await work[0],)
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


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


def _message(parsed: ParsedResponse, text: str, call_prefix: str) -> Message:
    """The assistant message, `text` being all of it. A call that cannot be parsed makes the whole message malformed."""
    from renderers import ToolCallParseStatus

    calls: list[ToolCall] = []
    malformed = "" if parsed.reasoning_complete is not False else "the thinking was not closed"
    for number, call in enumerate(parsed.tool_calls):
        if call.status is ToolCallParseStatus.OK and call.name and isinstance(call.arguments, dict):
            calls.append(ToolCall(call.name, call.arguments, id=call.id or f"call-{call_prefix}-{number}"))
        elif call.status is ToolCallParseStatus.OK:
            malformed = malformed or "the arguments of a tool call must be a JSON object"
        else:
            malformed = malformed or f"a tool call could not be read ({call.status.value.replace('_', ' ')})"
    written = "" if text == parsed.content else text
    return Message("assistant", parsed.content, tuple(calls), malformed=malformed, written=written)


def to_chat(messages: Sequence[Message]) -> list[ChatMessage]:
    """Messages in the format of `renderers`, OpenAI's chat format."""
    return [_chat(message) for message in messages]


def to_tools(tools: Sequence[ToolSpec]) -> list[ChatTool] | None:
    """Tools wrapped as `{"type": "function", "function": ...}`, the form in which models were trained on them; None for none."""
    wrapped = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    return cast("list[ChatTool]", wrapped) or None


def _chat(message: Message) -> ChatMessage:
    content = chat_parts(message) if message.images else message.content
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        chat |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return cast("ChatMessage", chat)
