"""What new users met, and met nowhere a word about: failures that are seen, and returns that are checked where they arrive."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console
from slipstream.agents import ContextExhausted
from slipstream.agents.base import Agent
from slipstream.common.scores import EvaluationResult
from slipstream.configs import load
from slipstream.envs import EnvPart, Message, SimpleEnv, StepResult, Task
from slipstream.errors import EvaluationError
from slipstream.launch.run import write_report
from slipstream.monitor.metrics import MetricsWriter
from slipstream.monitor.series import evaluation_line
from slipstream.monitor.terminal import open_view
from slipstream.planner.explain.evidence import Hardware
from slipstream.planner.explain.explain import explain
from slipstream.rollout.evaluation import evaluate
from slipstream.rollout.player import EpisodePlayer
from slipstream.rollout.router import Router
from slipstream.tests.episodes import Once
from slipstream.tests.reports import recorded_in
from slipstream.tests.runs import SMALL, check_accounts, metrics, slipstream, tiny_policy
from slipstream.tests.sessions import Engines, Script, play_foreign, session_of
from transformers import PreTrainedTokenizerBase

OUTCOMES = {"finished": 15, "failed_environment": 40, "failed_tool": 9}
TEXT = "49 of 64 episodes failed (40 environment, 9 tool)"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_says_how_many_episodes_failed_and_why(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)
    with open_view(load("quickstart"), console) as view:
        view.step({"step": 1, "reward_mean": 0.5, "outcomes": OUTCOMES})
    assert TEXT in console.file.getvalue()
    quiet = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)
    with open_view(load("quickstart"), quiet) as view:
        view.step({"step": 1, "reward_mean": 0.5, "outcomes": {"finished": 64}})
    assert "failed" not in quiet.file.getvalue()


def test_the_line_of_an_evaluation_says_how_many_failed() -> None:
    score = {"tasks": 15, "reward_mean": 0.2, "reward_stderr": 0.1, "outcomes": OUTCOMES}
    line = evaluation_line(EvaluationResult(**score, label="warm start", version=0, seconds=1.0))
    assert line.endswith(f"over 15 held-out tasks; {TEXT} and count in no mean")


def test_how_many_failed_is_said_before_any_advice(tmp_path: Path) -> None:
    """Where many episodes fail that is an alert, which comes first and leaves no room for advice on speed."""
    rows = [{"step": step, "time": float(step), "reward_mean": 0.5, "outcomes": OUTCOMES} for step in (1, 2)]
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for row in rows:
            writer.append(row)
    (tmp_path / "config.yaml").write_text(f"{{extends: quickstart, run: {{dir: {tmp_path}}}}}")
    said = explain(tmp_path, Hardware("cores", 2, 0, 2), active=False)
    total = "98 of 128 episodes failed (80 environment, 18 tool)"
    first = f"{total}: mend that first, the tracebacks are in {tmp_path}/logs/worker-*.log"
    assert first in said.lines()[0]
    assert said.findings == ()
    present = recorded_in(write_report(tmp_path, said).path)["answers"]["now"]["now"]
    assert present["failures"] == total  # in a place of its own


def player(tokenizer: PreTrainedTokenizerBase, renderer: Any, agent: Agent, source: SimpleEnv) -> EpisodePlayer:
    script = Script(tokenizer, lambda number: "x")
    config = load("quickstart")
    return EpisodePlayer(
        config,
        agent,
        [EnvPart("env", 1.0, source, None)],
        cast(Router, Engines(script)),
        lambda generate: session_of(renderer, tokenizer, generate),
        (),
        1.0,
    )


async def answers(env: Any, policy: Any, task: Task) -> None:
    opening = await env.reset(task)
    await env.step(await policy.chat(opening.messages))


class Sometimes(Once):
    """Fails in `failing` of 8 tasks."""

    failing = 0

    async def step(self, message: Message) -> StepResult:
        if self.number < self.failing:
            raise KeyError("row")
        return StepResult(reward=1.0, done=True)

    async def reset(self, task: Task) -> Any:
        self.number = int(task.id.rpartition("-")[2])
        return await super().reset(task)


@pytest.mark.parametrize("failing", [3, 6])
async def test_an_evaluation_tells_its_first_failure_at_once_and_ends_when_most_failed(
    failing: int, tokenizer: PreTrainedTokenizerBase, renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sometimes, "failing", failing)
    playing = player(tokenizer, renderer, answers, Sometimes(split="eval", seed=0))
    told: list[str] = []
    if failing == 3:
        result = await evaluate(playing, "warm start", 8, tell=told.append)
        assert result.outcomes == {"failed_environment": 3, "finished": 5}
        assert (result.reward_mean, result.tasks) == (1.0, 5)
    else:
        with pytest.raises(EvaluationError, match=r"6 of 8 episodes failed \(6 environment\), the first by .*'row'"):
            await evaluate(playing, "warm start", 8, tell=told.append)
    assert len(told) == 1  # of one kind
    assert re.search(
        r"failed by environment: env: step: KeyError: 'row' \(test_first_contact\.py:\d+ in step\)", told[0]
    )


class Counts(Once):
    """Two steps, each with metrics."""

    async def step(self, message: Message) -> StepResult:
        self.steps = getattr(self, "steps", 0) + 1
        metrics = {"last": float(self.steps)} | ({"first_only": 1.0} if self.steps == 1 else {})
        return StepResult((Message("user", "and?"),), 1.0, done=self.steps == 2, metrics=metrics)


async def test_metrics_of_several_steps_are_merged_and_the_last_value_counts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    async def twice(env: Any, policy: Any, task: Task) -> None:
        messages = list((await env.reset(task)).messages)
        for _ in range(2):
            reply = await policy.chat(messages)
            messages += [reply, *(await env.step(reply)).messages]

    script = Script(tokenizer, lambda number: "x")
    result = await play_foreign(tokenizer, twice, script, Counts(split="train", seed=0))
    assert result.trajectories[0].metrics == {"last": 2.0, "first_only": 1.0}


async def test_an_agent_that_samples_nothing_or_swallows_a_full_context_is_told_so(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    async def silent(env: Any, policy: Any, task: Task) -> None:
        await env.reset(task)

    async def swallows(env: Any, policy: Any, task: Task) -> None:
        opening = await env.reset(task)
        with pytest.raises(ContextExhausted):
            await policy.chat(opening.messages)

    ends: dict[Callable[..., Any], str] = {silent: "the agent sampled no token", swallows: "max_tokens is 3"}
    for agent, why in ends.items():
        script = Script(tokenizer, lambda number: "x")
        result = await play_foreign(tokenizer, agent, script, Once(split="train", seed=0), max_tokens=3)
        assert result.outcome.detail.endswith(why)
        assert result.trajectories == ()


FAILS_OFTEN = """
import random
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

class Env(SimpleEnv):
    def task(self, index):
        return Task(str(index))

    async def reset(self, task):
        self.number = int(task.id)
        return Observation((Message("user", f"{self.number}?"),))

    async def step(self, message):
        if self.number % 3 == 0 if self.split == "eval" else random.random() < 0.4:
            raise KeyError("row")
        return StepResult(reward=random.random(), done=True)
"""


@pytest.mark.full
def test_a_run_whose_episodes_crash_says_so_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    (tmp_path / "fails_often.py").write_text(FAILS_OFTEN)
    monkeypatch.chdir(tmp_path)
    own = ("env={kind: python, factory: 'fails_often:Env'}", "agent.kind=single_turn")
    small = [one for one in SMALL if not one.startswith("evaluation")]
    engine = ("rollout.engine.kind=transformers", "learner.backend.device=cpu", "evaluation.tasks=8", "learner.steps=5")
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, *own, *engine)
    where = r"Env: step: KeyError: 'row' \(fails_often\.py:15 in step\)"
    assert re.search(f"an episode failed by environment: {where}", done.stdout)
    assert re.search(r"warm start: .* over 5 held-out tasks; 3 of 8 episodes failed \(3 environment\)", done.stdout)
    assert re.search(r"step \d/5 .* \d+ of \d+ episodes failed \(\d+ environment\)", done.stdout)
    assert sum(row["outcomes"].get("failed_environment", 0) for row in metrics(run)) > 0
    shown = recorded_in(run / "report.html")["answers"]
    assert re.search(r"\d+ of \d+ episodes failed \(\d+ environment\)", shown["now"]["now"]["failures"])
    assert any("mend that first" in one["advice"] for one in shown["explanation"]["alerts"])
    log = (run / "logs" / "worker-0.log").read_text()
    assert log.count("Traceback") == 2  # the user's exception, and the EnvError that it became; once
    assert 'fails_often.py", line 15, in step' in log
    check_accounts(run)
