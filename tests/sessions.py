"""Sessions of the tiny policy over an engine that says what a test scripts, and what they deliver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from renderers import Renderer
from slipstream.agents import Completion, Session
from slipstream.agents.base import Generate
from slipstream.buffer.trajectory import FINISHED, Trajectory, VersionSpan, sampled_of
from transformers import PreTrainedTokenizerBase


def session_of(
    renderer: Renderer, tokenizer: PreTrainedTokenizerBase, engine: Generate, max_tokens: int = 700
) -> Session:
    return Session(
        renderer,
        engine,
        vocabulary=len(tokenizer),
        max_tokens_per_turn=100,
        max_tokens=max_tokens,
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids))),
    )


def delivered(session: Session) -> tuple[Trajectory, ...]:
    """The trajectories of the session's episode, checked as the buffer checks them."""
    trajectories = session.trajectories(
        group_id=3, attempt=1, member=2, task_id="t", env="e", reward=1.0, turn_rewards=(1.0,), outcome=FINISHED,
        timings={}, metrics={},
    )  # fmt: skip
    sampled_of("3.1.2", trajectories)
    return trajectories


def call(name: str, **arguments: object) -> str:
    """A tool call as the policy writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """An engine that says what `say` gives for its completions by their number, as text or once an awaitable has it; `log` has
    each prompt and what was sampled after it, `calls` the number of each completion that begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[int], str | Awaitable[str]]) -> None:
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.calls: asyncio.Queue[int] = asyncio.Queue()
        self.asked = 0
        self.cancelled = 0
        self._tokenizer, self._say = tokenizer, say

    async def __call__(self, token_ids: Sequence[int], max_tokens: int) -> Completion:
        number, self.asked = self.asked, self.asked + 1
        self.calls.put_nowait(number)
        said = self._say(number)
        try:
            text = said if isinstance(said, str) else await said
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        whole: list[int] = self._tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        ids = tuple(whole[:max_tokens])
        self.log.append((tuple(token_ids), ids))
        reason = "stop" if len(whole) <= max_tokens else "length"
        return Completion(
            ids, tuple(-0.01 * (i + 1) for i in range(len(ids))), (VersionSpan(0, len(ids), number),), reason
        )

    def check_exact(self, session: Session, cut: int = 0) -> int:
        """What the engine said is what is trained on, once each: but for `cut` tokens each prompt and completion begins a branch,
        and the sums match. Returns the number of branches."""
        trajectories = delivered(session)
        for prompt, sampled in self.log if not cut else ():
            begin = [*prompt, *sampled]
            holders = [t for t in trajectories if t.token_ids[: len(begin)].tolist() == begin]
            assert any(t.loss_mask[len(prompt) : len(begin)].all() for t in holders)
        assert sum(t.sampled for t in trajectories) == sum(len(sampled) for _, sampled in self.log) - cut
        return len(trajectories)
