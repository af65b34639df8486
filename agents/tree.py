"""The record of a session: a tree whose nodes are completions, and the branches that it is delivered as.

             system, user
             /          \\              two calls with the same prompt (`n`, or a repeated one)
        completion    completion
         /      \\                      the agent continued one of them twice
    completion  completion

Invariants:
- A node never changes: context tokens after its parent's last token, then a completion as the engine returned it.
- Calls that run at the same time, repeat a prompt or continue the same node each add a node of their own.
- Every token of a trained completion has loss in exactly one branch: that of the node's chain of first children. In branches that
  fork off later it is context.
- An untrained completion has no loss. It is context where a trained one follows it, and otherwise in no branch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ..buffer.trajectory import NAME_LIMIT, Segment, Turn, VersionSpan
from ..common.images import PlacedImage, digest_of, moved_images
from ..common.routed_experts import RoutedExperts, merged
from ..envs.base import Message, ToolSpec
from ..errors import encodable
from .base import Completion, RequestTiming

if TYPE_CHECKING:
    from renderers import RenderedTokens


@dataclass(eq=False)
class Node:
    """One completion: `context` are the tokens between the last one of `parent` and its first, `messages` and `images` those in
    them, by positions in `context`; `malformed` says why the completion could not be read; `children` continue the conversation."""

    parent: Node | None
    context: Sequence[int]
    completion: Completion
    trained: bool = True
    messages: Sequence[Segment] = ()
    images: Sequence[PlacedImage] = ()
    malformed: str | None = None  # None where it is no message: raw tokens
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """From the first completion of the conversation to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def own_token_ids(self) -> list[int]:
        """The tokens that follow its parent's."""
        return [*self.context, *self.completion.token_ids]

    def segments(self, at: int) -> list[Segment]:
        """What its own tokens say, which begin at position `at`."""
        found = [moved(segment, at) for segment in self.messages]
        start = at + len(self.context)
        if self.malformed is not None and self.completion.token_ids:
            found.append(Segment(start, start + len(self.completion.token_ids), "assistant", malformed=self.malformed))
        return found

    def token_ids(self) -> list[int]:
        """All tokens of the conversation up to the completion's last."""
        return [token for node in self.path() for token in node.own_token_ids()]

    def all_images(self) -> list[PlacedImage]:
        """Those of the conversation, by positions in its tokens."""
        found, at = list[PlacedImage](), 0
        for node in self.path():
            found += moved_images(node.images, at)
            at += len(node.context) + len(node.completion.token_ids)
        return found


@dataclass
class Branch:
    """The tokens of one conversation, T in all lists; a `Turn` for each completion with loss."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)
    experts: RoutedExperts | None = None

    def show(self, node: Node) -> None:
        """Take over what the tokens of `node` say and show, which come next."""
        at = len(self.token_ids)
        self.segments += node.segments(at)
        self.images += moved_images(node.images, at)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append context tokens, which carry no loss."""
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([False] * len(token_ids))
        self.logprobs.extend([0.0] * len(token_ids))

    def record(self, completion: Completion) -> None:
        """Append a completion, which carries loss."""
        start = len(self.token_ids)
        self.token_ids.extend(completion.token_ids)
        self.loss_mask.extend([True] * len(completion.token_ids))
        self.logprobs.extend(completion.logprobs)
        append_spans(self.version_spans, completion.version_spans, start)
        took = () if completion.timing is None else msgspec.structs.astuple(completion.timing)
        self.turns.append(Turn(start, len(self.token_ids), completion.finish_reason, *took))

    def know(self, completion: Completion) -> None:
        """Take over the experts of the conversation that ends with `completion`, whose last token is the branch's last one, where
        none are known yet."""
        if completion.experts is not None:
            known = merged(self.experts, completion.experts)
            self.experts = known and known.until(len(self.token_ids))


class ConversationTree:
    """All completions of one episode, found by the conversation that ends with them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # in the order in which the completions ended
        self._roots: list[Node] = []
        self._by_key: dict[bytes, list[Node]] = {}

    def add(self, node: Node, keys: Sequence[bytes] = ()) -> None:
        """`keys` are those of the conversations that end with it, see `extended_key`; none for raw tokens."""
        self.nodes.append(node)
        (self._roots if node.parent is None else node.parent.children).append(node)
        for key in dict.fromkeys(keys):
            self._by_key.setdefault(key, []).append(node)

    def ending_with(self, key: bytes) -> Iterator[Node]:
        """The completions that end a conversation, the newest first."""
        return reversed(self._by_key.get(key, ()))

    def experts_known(self, token_ids: Sequence[int]) -> int:
        """Tokens at the beginning of a conversation whose experts the completions in it have recorded."""
        node, _ = self.beginning(token_ids)
        known = size = 0
        for one in () if node is None else node.path():
            size += len(one.context) + len(one.completion.token_ids)
            if one.completion.experts is not None:
                known = max(known, min(size, one.completion.experts.end))  # of one that was cut it goes on
        return known

    def beginning(self, token_ids: Sequence[int]) -> tuple[Node | None, int]:
        """The completion with the most tokens whose conversation begins `token_ids`, and the number of its tokens; the newest of
        several; None and 0 where there is none."""
        best: tuple[Node | None, int] = (None, 0)
        ids, left = list(token_ids), [(root, 0) for root in self._roots]
        while left:
            node, start = left.pop()  # later siblings first: the newest is found before the others
            own = node.own_token_ids()
            end = start + len(own)
            if ids[start:end] == own:
                best = (node, end) if end > best[1] else best
                left += ((child, end) for child in node.children)
        return best

    def branches(self) -> list[Branch]:
        """What is trained on: every completion with loss in one branch, and every branch ends with such a completion. A branch is a
        completion that is not the first child of another, and first children from there on; ordered by that completion."""
        kept: set[Node] = set()
        for node in reversed(self.nodes):  # children come after their parents
            if node.trained or node in kept:
                kept.add(node)
                if node.parent is not None:
                    kept.add(node.parent)
        nexts = {node: next((child for child in node.children if child in kept), None) for node in kept}
        continued = set(nexts.values())
        return [self._branch(node, nexts) for node in self.nodes if node in kept and node not in continued]

    @staticmethod
    def _branch(first: Node, nexts: dict[Node, Node | None]) -> Branch:
        branch = Branch()
        for before in () if first.parent is None else first.parent.path():
            branch.show(before)
            branch.extend(before.own_token_ids())
            branch.know(before.completion)
        node: Node | None = first
        while node is not None:
            branch.show(node)
            branch.extend(node.context)
            if node.trained:
                branch.record(node.completion)
            else:
                branch.extend(node.completion.token_ids)
            branch.know(node.completion)
            node = nexts[node]
        return branch


def conversation_keys(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[bytes]:
    """A key for each prefix of a conversation, of 0 to all messages."""
    keys = [_digest(b"", tools)]
    for message in messages:
        keys.append(extended_key(keys[-1], message))
    return keys


def extended_key(key: bytes, message: Message) -> bytes:
    """The key of a conversation by what it says and not by how a client spells it: ids of calls, the order of keys in their
    arguments, and blanks around an assistant's content make no difference."""
    content = message.content.strip() if message.role == "assistant" else message.content
    images = [(image.at, digest_of(image.data)) for image in message.images]
    return _digest(key, (message.role, content, [(call.name, call.arguments) for call in message.tool_calls], images))


def _digest(before: bytes, value: object) -> bytes:
    return hashlib.blake2b(before + msgspec.json.encode(value, order="sorted"), digest_size=16).digest()


def moved(segment: Segment, by: int) -> Segment:
    return msgspec.structs.replace(segment, start=segment.start + by, end=segment.end + by)


def segments_of(rendered: RenderedTokens, messages: Sequence[Message], *, tools: bool) -> list[Segment]:
    """Which tokens say which of `messages`; none where the chat format does not tell. `tools`: it wrote a list of tools, which is
    the longest run of no message before the second message that says something."""
    indices, content = np.asarray(rendered.message_indices), np.asarray(rendered.is_content, dtype=np.bool_)
    told = len(indices) == len(rendered.token_ids) and len(content) in (0, len(indices))
    if not told or not 0 <= indices.max(initial=-1) < len(messages):
        return []
    # What a message says has its number; what the chat format writes around it has another number below 0 for each message.
    own = np.where(content, indices, -2 - indices) if len(content) else indices
    edges = np.flatnonzero(np.diff(own, prepend=own[0] - 1, append=own[-1] - 1))
    runs = [(start, end, int(own[start])) for start, end in pairwise(edges.tolist())]
    found: dict[int, Segment] = {}
    for start, end, index in runs:
        if index >= 0:
            message, begun = messages[index], found.get(index)
            # A message may have scaffolding inside, for example around calls.
            begin = start if begun is None else begun.start
            found[index] = Segment(begin, end, message.role, encodable(message.name)[:NAME_LIMIT])
    first, second = (*sorted(segment.start for segment in found.values()), len(own), len(own))[:2]
    listed = [(end - start, start, end) for start, end, index in runs if index < 0 and end <= max(first, second)]
    if tools and listed:
        _, start, end = max(listed)
        found[-1] = Segment(start, end, "tools")
    ordered = sorted(found.values(), key=lambda segment: segment.start)
    return [one for at, one in enumerate(ordered) if all(one.end <= later.start for later in ordered[at + 1 : at + 2])]


def append_spans(spans: list[VersionSpan], more: Sequence[VersionSpan], offset: int) -> None:
    """Append `more`, moved by `offset`; neighbors of the same versions become one."""
    for span in more:
        new = msgspec.structs.replace(span, start=span.start + offset, end=span.end + offset)
        last = spans[-1] if spans else None
        same = last and (last.version, last.kv_version) == (new.version, new.kv_version)
        if last and same and last.end == new.start:
            spans[-1] = msgspec.structs.replace(last, end=new.end)
        else:
            spans.append(new)


def joined(parts: Sequence[Completion]) -> Completion:
    """One completion of the parts in which the engine returned it; ended by the last one's reason."""
    spans: list[VersionSpan] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    experts: RoutedExperts | None = None
    for part in parts:
        append_spans(spans, part.version_spans, len(tokens))
        tokens += part.token_ids
        logprobs += part.logprobs
        experts = merged(experts, part.experts)
    timings = [part.timing for part in parts if part.timing is not None]
    timing = functools.reduce(RequestTiming.then, timings) if timings else None
    return Completion(tuple(tokens), tuple(logprobs), tuple(spans), parts[-1].finish_reason, timing, experts)


def cut(completion: Completion, tokens: int) -> Completion:
    """The first `tokens` tokens of a completion, ended by `stop`."""
    spans = [msgspec.structs.replace(s, end=min(s.end, tokens)) for s in completion.version_spans if s.start < tokens]
    ids, logprobs = completion.token_ids[:tokens], completion.logprobs[:tokens]
    return Completion(ids, logprobs, tuple(spans), "stop", completion.timing, completion.experts)
