"""What is wrong with environments and prompts is one line before anything starts; mixtures are shown, warmed up on and modelled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from slipstream.configs import SftConfig, load
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.launch.preflight import preflight
from slipstream.launch.sft import make_examples
from slipstream.learner.model import load_tokenizer

CUSTOM = """
import asyncio
import time
from slipstream.envs import CALCULATOR, Message, Observation, SimpleEnv, StepResult, Task

class Long(SimpleEnv):
    closed = []

    def task(self, index):
        return {"id": "long"} if self.arguments.get("does") == "makes no task" else Task(f"long-{index}")

    async def reset(self, task):
        match self.arguments.get("does"):
            case "hangs":
                await asyncio.Event().wait()
            case "fails":
                raise RuntimeError("no sandbox")
            case "returns text":
                return "Say a number."
            case "returns one message":
                return Observation(Message("user", "Say a number."))
            case "returns a tool":
                return Observation((Message("user", "Say a number."),), (CALCULATOR,))
            case "returns no message":
                return Observation(())
        return Observation((Message("user", "0123456789 " * self.arguments.get("words", 1)),))

    async def step(self, message):
        return StepResult(done=True)

    async def close(self):
        self.closed.append(1)

class Priced(Long):
    penalty = -1.0

async def play(env, policy, task): ...
"""

MIXTURE = (
    "env.kind=mixture",
    "env.parts.sums={kind: reasoning_gym, share: 3, parameters: {min_digits: 2, max_digits: 2}}",
    "env.parts.spelling={kind: reasoning_gym, family: spell_backward}",
    "env.parts.long={kind: python, factory: 'custom_long:Long', share: 4}",
)


@pytest.fixture(autouse=True)
def _custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "custom_long.py").write_text(CUSTOM)
    (tmp_path / "custom_unreadable.py").write_text("class Env(")
    monkeypatch.syspath_prepend(tmp_path)


LONG = ("env.kind=python", "env.factory=custom_long:Long")
TINY = ("agent.max_tokens=16", "agent.max_tokens_per_turn=8")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            (*LONG, "env.arguments={words: 40}"),
            ("agent.max_tokens: 256 leaves no room", "task 0 of Long has", "allowed"),
        ),
        (TINY, ("agent.max_tokens: 16 leaves no room", "task 0 of chain_sum has ")),
        ((*LONG, "env.arguments={does: fails}"), ("Long raised RuntimeError in the reset of task 0: no sandbox",)),
        (
            (*LONG, "env.arguments={does: hangs}", "rollout.episode_s=0.2"),
            ("Long waited 0.2 s for the reset of task 0", "rollout.episode_s"),
        ),
        ((*LONG, "env.arguments={does: makes no task}"), ("Long returned {'id': 'long'} for task 0", "return Task(")),
        (
            (*LONG, "env.arguments={does: returns text}"),
            ("Long: the reset of task 0", "no valid Observation", "got `str`"),
        ),
        (
            (*LONG, "env.arguments={does: returns one message}"),
            ("no valid Observation", "Expected `array`", "$.messages", "Say a number."),
        ),
        ((*LONG, "env.arguments={does: returns a tool}"), ("no valid Observation", "function")),
        ((*LONG, "env.arguments={does: returns no message}"), ("returned no message for the policy to answer",)),
        (
            ("env.kind=python", "env.factory=custom_unreadable:Env"),
            ("env.factory: cannot import", "SyntaxError", "line 1"),
        ),
        ((*MIXTURE, "env.parts.long.arguments={words: 40}"), ("task 0 of long has",)),
        ((*MIXTURE, "env.parts.sums.family=chain_sums"), ("env.parts.sums.family: 'chain_sums'",)),
        (
            ("rollout.failures.timeout.then=train",),
            ("rollout.failures.timeout.then: train needs the penalty", "chain_sum declares none", "drop"),
        ),
        ((*MIXTURE, "rollout.failures.tool.then=train"), ("rollout.failures.tool.then", "sums declares none")),
        (("rollout.failures.tol.retries=3",), ("rollout.failures.tol: no such key", "rollout.failures.tool")),
    ],
)
def test_what_cannot_be_played_is_one_line(
    overrides: tuple[str, ...], names: tuple[str, ...], policy: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight(load("quickstart", [f"model.path={policy}", f"run.dir={tmp_path / 'run'}", *overrides]))
    line = str(refused.value)
    assert "\n" not in line
    for name in names:
        assert name in line


def test_doctor_shows_a_mixture_and_the_longest_prompt(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "quickstart", f"model.path={policy}", *MIXTURE]) == 0
    shown = capsys.readouterr().out
    assert "sums 38%, spelling 12%, long 50%" in shown
    assert "of 256 tokens" in shown
    overrides = ("env.kind=python", "env.factory=custom_long:Priced", "rollout.failures.timeout.then=train")
    assert main(["doctor", "quickstart", f"model.path={policy}", *overrides]) == 0


def test_a_prompt_of_an_agent_of_ones_own_is_its_own_matter(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ("agent.kind=custom_long:play", *TINY)
    assert main(["doctor", "quickstart", f"model.path={policy}", *mine]) == 0
    assert "only custom_long:play knows it" in capsys.readouterr().out


def test_a_mixture_is_warmed_up_on_by_the_shares_of_those_that_demonstrate(policy: Path) -> None:
    config = load("quickstart", [f"model.path={policy}", "sft.demonstrations=40", *MIXTURE], SftConfig)
    tokenizer = load_tokenizer(str(policy))
    texts = [tokenizer.decode(ids) for ids, _ in make_examples(config)[0]]
    kinds = Counter("spelling" if "Spell this word backward" in text else "sums" for text in texts)
    assert kinds == {"sums": 30, "spelling": 10}


def test_the_tokenizer_of_a_mixture_knows_every_part(tmp_path: Path) -> None:
    assert main(["init-model", str(tmp_path / "model"), *MIXTURE]) == 0
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert len(tokenizer.encode("Spell this word backward", add_special_tokens=False)) < 6
    assert len(tokenizer.encode("You may calculate first.", add_special_tokens=False)) < 6
