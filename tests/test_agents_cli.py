"""Claude Code and Codex, unchanged, as docs/environments.md configures them: they play episodes in a sandbox whose only exit is the
gateway, and what is trained on is what the engine sampled."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from slipstream.agents import Completion
from slipstream.configs import load
from slipstream.configs.schema import Agent as AgentSettings
from slipstream.envs import CALCULATOR, Message, Observation, StepResult, Task, TaskFile, call_tool
from slipstream.errors import EngineError
from slipstream.rollout.player import EpisodeResult
from slipstream.tests.episodes import Once
from slipstream.tests.npm_packages import CLI_AGENTS
from slipstream.tests.sessions import Script, call, check_exact, play_foreign
from transformers import PreTrainedTokenizerBase

PAGE = Path(__file__).parent.parent / "docs" / "environments.md"
BOTH = ("claude", "codex")
WALL_S = 120.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CLI_AGENTS.installed()


def settings_of(name: str, folder: Path, tmp_path: Path) -> AgentSettings:
    """The agent of the page, whose folder is `folder`."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if f".bin/{name}" in block]
    (tmp_path / "config.yaml").write_text(f"extends: quickstart\n{block}")
    agent = load(str(tmp_path / "config.yaml")).agent
    return msgspec.structs.replace(agent, sandbox=msgspec.structs.replace(agent.sandbox, folder=str(folder)))


class Reader(Script):
    """An engine that says what `answer` makes of the text of a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answer: Callable[[str], str]) -> None:
        super().__init__(tokenizer, lambda number: answer(self.prompt))
        self.prompt = ""

    async def __call__(self, token_ids: object, max_tokens: int) -> Completion:
        self.prompt = str(self._tokenizer.decode(token_ids))
        return await super().__call__(token_ids, max_tokens)


async def play(
    tokenizer: PreTrainedTokenizerBase, settings: AgentSettings, engine: object, source: Once, **options: object
) -> EpisodeResult:
    limits = {"max_tokens": 1 << 18, "max_tokens_per_turn": 1000, "episode_s": 2 * WALL_S, "wall_s": WALL_S}
    return await play_foreign(tokenizer, settings, engine, source, **(limits | options))


COMMAND = "cat numbers.txt; echo MARK$((6 * 7)) > made.txt; cat made.txt"


def works_in_a_shell(prompt: str) -> str:
    """Asks for the command once, then answers with what it has printed."""
    if "MARK42" in prompt:
        return "The answer is 42."
    if '"name": "Bash"' in prompt:
        return "I run it." + call("Bash", command=COMMAND, description="compute")
    return call("exec_command", cmd=COMMAND)


class Numbers(Once):
    """A file is read and another one made, in the folder of the task."""

    async def reset(self, task: Task) -> Observation:
        messages = (Message("system", "Be brief."), Message("user", "Compute 6 * 7 in a shell; write it to made.txt."))
        return Observation(messages, files=(TaskFile("numbers.txt", b"6 7\n"),))

    async def step(self, message: Message) -> StepResult:
        files = {file.path: file.content for file in message.files or ()}
        done = files == {"numbers.txt": b"6 7\n", "made.txt": b"MARK42\n"}
        return StepResult((), 0.5 * done + 0.5 * (message.content == "The answer is 42."), done=True)


@pytest.mark.parametrize("name", BOTH)
async def test_it_works_in_its_shell_and_all_that_was_sampled_is_one_branch(
    name: str, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = Reader(tokenizer, works_in_a_shell)
    source = Numbers(split="train", seed=0)
    result = await play(tokenizer, settings_of(name, folder, tmp_path), engine, source)
    assert (result.outcome.kind, result.reward) == ("finished", 1.0), result.outcome.detail
    assert check_exact(engine.log, result.trajectories) == 1
    assert len(result.trajectories[0].turns) == 2


class Calculates(Once):
    """A call of the environment's tool earns something."""

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", "Compute 6 * 7 with the tool calculator."),), (CALCULATOR.spec,))

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult((), float(message.content == "It is 42."), done=True)
        reply, _ = await call_tool({"calculator": CALCULATOR}, message.tool_calls[0])
        return StepResult((reply,), 0.25)


def calls_the_calculator(prompt: str) -> str:
    (name,) = set(re.findall(r'"name": "(\w*calculator)"', prompt)) or {"calculator"}
    return "It is 42." if "<tool_response>" in prompt else call(name, expression="6*7")


@pytest.mark.parametrize("name", BOTH)
async def test_it_calls_the_tools_of_the_environment(
    name: str, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = Reader(tokenizer, calls_the_calculator)
    source = Calculates(split="train", seed=0)
    result = await play(tokenizer, settings_of(name, folder, tmp_path), engine, source)
    assert result.outcome.kind == "finished", result.outcome.detail
    assert result.trajectories[0].turn_rewards == (0.25, 1.0)
    assert check_exact(engine.log, result.trajectories) == 1


@pytest.mark.parametrize("name", BOTH)
async def test_a_lost_engine_fails_the_episode_and_too_few_tokens_truncate_it(
    name: str, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    async def lost(token_ids: object, max_tokens: int) -> Completion:
        raise EngineError("no replica answers")

    settings, source = settings_of(name, folder, tmp_path), Numbers(split="train", seed=0)
    outcome = (await play(tokenizer, settings, lost, source)).outcome
    assert (outcome.kind, outcome.reason, outcome.detail) == ("failed", "engine", "no replica answers")
    talks_on = Reader(tokenizer, lambda prompt: "word " * 900 + works_in_a_shell(prompt.replace("MARK42", "")))
    result = await play(tokenizer, settings, talks_on, source, max_tokens=60_000)
    assert result.outcome.kind == "truncated", result.outcome
    assert check_exact(talks_on.log, result.trajectories) == 1
    never_ends = Reader(tokenizer, lambda prompt: "word " * 1000)
    result = await play(tokenizer, settings, never_ends, source, max_tokens_per_turn=500)
    assert result.outcome.kind == "truncated", result.outcome
    check_exact(never_ends.log, result.trajectories)
