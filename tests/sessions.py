"""Sessions of the tiny policy over an engine that says what a test scripts, and what they deliver."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from renderers import Renderer
from slipstream.agents import Completion, ForeignAgent, Gateway, Session, is_foreign, load_renderer
from slipstream.agents.base import Agent, Generate
from slipstream.agents.command import CommandAgent
from slipstream.buffer.messages import Lease
from slipstream.buffer.trajectory import FINISHED, Trajectory, VersionSpan, sampled_of
from slipstream.configs import load
from slipstream.configs.schema import Agent as AgentSettings
from slipstream.envs import EnvPart, TaskSource
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.env_guard import EpisodeLimits
from slipstream.rollout.gateway_agents import self_played, through_gateway
from slipstream.rollout.player import EpisodePlayer, EpisodeResult
from slipstream.rollout.router import Router
from transformers import PreTrainedTokenizerBase


def session_of(
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerBase,
    engine: Generate,
    max_tokens: int = 700,
    max_tokens_per_turn: int = 100,
) -> Session:
    return Session(
        renderer,
        engine,
        vocabulary=len(tokenizer),
        max_tokens_per_turn=max_tokens_per_turn,
        max_tokens=max_tokens,
        decode=lambda ids, *, special=True: str(tokenizer.decode(list(ids), skip_special_tokens=not special)),
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
        """See the function `check_exact`."""
        return check_exact(self.log, delivered(session), cut)


def check_exact(
    log: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], trajectories: Sequence[Trajectory], cut: int = 0
) -> int:
    """What the engine said, by prompts and completions, is what is trained on, once each: but for `cut` tokens each prompt and
    completion begins a branch, and the sums match. Returns the number of branches."""
    for prompt, sampled in log if not cut else ():
        begin = [*prompt, *sampled]
        holders = [t for t in trajectories if t.token_ids[: len(begin)].tolist() == begin]
        assert any(t.loss_mask[len(prompt) : len(begin)].all() for t in holders)
    assert sum(t.sampled for t in trajectories) == sum(len(sampled) for _, sampled in log) - cut
    return len(trajectories)


class Engines:
    """Stands in for the router: samples with one function."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    async def generate(
        self, episode_id: str, token_ids: Sequence[int], sampling: SamplingParams, oldest_version: int, **_: object
    ) -> Completion:
        return await self._generate(token_ids, sampling.max_tokens)

    def end_episode(self, episode_id: str) -> None:
        pass


LEASE = Lease(3, 1, (2,), 0, 0, 0, 7)
"""Of task 7; member 2 of attempt 1 of group 3."""


async def play_foreign(
    tokenizer: PreTrainedTokenizerBase,
    agent: ForeignAgent | Agent | AgentSettings | None,
    generate: Generate,
    source: TaskSource,
    *,
    max_tokens: int = 700,
    max_tokens_per_turn: int = 100,
    episode_s: float = 60.0,
    wall_s: float = 30.0,
    generated: list[int] | None = None,
    lease: Lease = LEASE,
) -> EpisodeResult:
    """One episode as a worker plays it, through a gateway where `agent` takes an endpoint or is a program, or where the
    environment plays itself, which needs no agent. `generated` receives the number of tokens of each completion."""
    renderer = load_renderer("qwen3", tokenizer, thinking=False)
    counts: list[int] = [] if generated is None else generated
    async with Gateway(agent.trained if isinstance(agent, AgentSettings) else "policy*") as gateway:
        plays_itself = bool(getattr(source, "self_played", False))
        if plays_itself:
            played = self_played(gateway)
        elif isinstance(agent, AgentSettings):
            played = CommandAgent(agent, gateway, wall_s)
        else:
            assert agent is not None
            played = through_gateway(agent, gateway) if is_foreign(agent) else cast(Agent, agent)
        player = EpisodePlayer(
            load("quickstart"),
            played,
            [EnvPart("env", 1.0, source, None, plays_itself)],
            cast(Router, Engines(generate)),
            lambda generate: session_of(renderer, tokenizer, generate, max_tokens, max_tokens_per_turn),
            (),
            1.0,
            limits=EpisodeLimits(episode_s, 60.0, 60.0),
        )
        return await player.play(lease, 2, on_tokens=lambda completion: counts.append(len(completion.token_ids)))
