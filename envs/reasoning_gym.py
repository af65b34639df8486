"""Any reasoning-gym family as an environment, with or without a calculator.

Invariants:
- The reward comes only from the family's verifier, once, at the final answer: the assistant message without a tool call.
- Errors of the policy (a malformed call, an unknown tool, a division by zero) become messages to the policy, never exceptions.
- Task `i` is the same in every process: it is generated from a seed that depends on the config seed, the split and `i`.
- Train and eval never share a seed: their seeds are in different halves of the 32-bit range.
- Tasks are generated and answers verified in threads: either takes seconds in some families.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import random
import threading
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from ..configs.environments import ReasoningGym
from ..errors import ConfigError, EnvError
from .base import JSON, Message, Observation, StepResult, Task, ToolCall
from .simple import SimpleEnv, Split
from .tools import CALCULATOR, InvalidCall, ToolUse, calculate, in_thread

CHUNK = 500  # tasks generated from one seed: the default dataset size of the families
SYSTEM = "Answer as <answer>...</answer>."
SYSTEM_WITH_CALCULATOR = "Answer as <answer>...</answer>. You may calculate first."


class ReasoningGymEnv(SimpleEnv):
    """One family's tasks. An episode is question, calls if there is a calculator, answer."""

    def __init__(self, config: ReasoningGym, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError, naming `key`, where the family or a parameter does not exist or the family rejects it."""
        _check(config, key)
        super().__init__(split=split, seed=seed)
        self.config = config
        self.name = config.family
        self._tools = {CALCULATOR.spec.name: CALCULATOR} if config.calculator else {}
        self._max_turns = config.max_turns if config.calculator else 1
        self._index = self._turns = 0
        self._lock = threading.RLock()  # all members of a group need the same task at the same time
        self._chunk = lru_cache(maxsize=8)(self._make_chunk)
        # The members of a group use each several times.
        self._entry = lru_cache(maxsize=1024)(lambda index: self._chunk(index // CHUNK)[index % CHUNK])
        try:
            self.entry(0)
        except Exception as error:  # families raise different errors for wrong parameters, some only when generating
            raise ConfigError(f"{key}.parameters: {config.family} refuses {config.parameters}: {error!r}") from error

    def task(self, index: int) -> Task:
        """See `TaskSource.task`. The payload holds the question so that `reset` can check that this process generates the same."""
        question = self.entry(index)["question"]
        return Task(f"{self.name}-{self.split}-{self.seed}-{index}", {"index": index, "question": question})

    def entry(self, index: int) -> dict[str, Any]:
        """The family's entry: `question`, `answer`, `metadata`."""
        with self._lock:
            return self._entry(index)

    def score(self, index: int, answer: str | None) -> float:
        """The verifier's score; 0 for no answer, and for one that makes the verifier raise. Raises EnvError: the verifier raises on
        the family's own answer, too."""
        if answer is None:
            return 0.0
        entry = self.entry(index)
        with self._lock:
            verifier = self._chunk(index // CHUNK)
        try:
            return float(verifier.score_answer(answer, entry))
        except Exception as unreadable:  # some verifiers raise on text in another format
            try:
                verifier.score_answer(entry["answer"], entry)
            except Exception:
                raise EnvError(f"{self.name}: the verifier of task {index} is broken: {unreadable!r}") from unreadable
            return 0.0

    def opening(self, index: int) -> Observation:
        question = Message("user", self.entry(index)["question"])
        if self.config.calculator:
            return Observation((Message("system", SYSTEM_WITH_CALCULATOR), question), (CALCULATOR.spec,))
        return Observation((Message("system", SYSTEM), question))

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        """Calculate, then answer; or, in the share `direct_answers` of the conversations, guess without calculating. A guess has
        the sign and the number of digits of the answer and is otherwise random: a bad habit that training has to unlearn. Where the
        task has no arithmetic expression whose value is the answer, the demonstration answers directly."""
        index = task.payload["index"]
        entry = self.entry(index)
        answer, expression = str(entry["answer"]), _expression(entry)
        opening = self.opening(index)
        if not self.config.calculator or expression is None:
            return opening, (_answer(answer),)
        if rng.random() < self.config.direct_answers:
            return opening, (_answer(_guess(answer, rng)),)
        call = ToolCall(CALCULATOR.spec.name, {"expression": expression})
        result = Message("tool", calculate(expression), name=call.name)
        return opening, (Message("assistant", "", (call,)), result, _answer(result.content))

    def _make_chunk(self, chunk: int) -> ProceduralDataset:
        digest = hashlib.blake2b(f"{self.name}/{self.seed}/{chunk}".encode(), digest_size=4).digest()
        half = 1 << 31
        # Families seed item i of a dataset with seed + i: the whole chunk must stay inside its half.
        seed = int.from_bytes(digest) % (half - CHUNK) + (half if self.split == "eval" else 0)
        return reasoning_gym.create_dataset(self.name, **self.config.parameters, seed=seed, size=CHUNK)

    async def reset(self, task: Task) -> Observation:
        """Raises EnvError where this process generates another question than the task holds."""
        self._index, self._use = task.payload["index"], ToolUse(self._tools)
        return await in_thread(self._open, task)

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if not self._tools or not (message.malformed or message.tool_calls):
            answer = extract_answer(message.content)
            reward = await in_thread(self.score, self._index, answer)
            return self._end(reward, answered=answer is not None)
        replies = await self._use.answers(message)
        return StepResult(replies) if self._turns < self._max_turns else self._end(0.0, answered=False, truncated=True)

    def _open(self, task: Task) -> Observation:
        if self.entry(self._index)["question"] != task.payload["question"]:
            raise EnvError(
                f"{task.id}: this process generates another question than the task holds; "
                "start every process with the same PYTHONHASHSEED and env section"
            )
        return self.opening(self._index)

    def _end(self, reward: float, *, answered: bool, truncated: bool = False) -> StepResult:
        metrics = {"answered": float(answered)} | self._use.metrics
        return StepResult(reward=reward, done=True, truncated=truncated, metrics=metrics)


def _answer(text: str) -> Message:
    return Message("assistant", f"<answer>{text}</answer>")


def _guess(answer: str, rng: random.Random) -> str:
    digits = len(answer.lstrip("-").partition(".")[0])
    sign = "-" if answer.startswith("-") else ""
    return f"{sign}{rng.randint(10 ** (digits - 1), 10**digits - 1)}"


def _expression(entry: JSON) -> str | None:
    """The task's arithmetic expression; None where it has none or its value is not the answer."""
    expression = entry["metadata"].get("expression")
    if not isinstance(expression, str):
        return None
    try:
        return expression if calculate(expression) == str(entry["answer"]) else None
    except InvalidCall:
        return None


def _check(config: ReasoningGym, where: str) -> None:
    if config.family not in DATASETS:
        raise ConfigError(
            f"{where}.family: {config.family!r} is not a reasoning-gym family; {_allowed(config.family, list(DATASETS))}"
        )
    settable = [f.name for f in dataclasses.fields(DATASETS[config.family][1]) if f.name not in ("seed", "size")]
    for key in config.parameters:
        if key not in settable:
            raise ConfigError(f"{where}.parameters: {config.family} has no {key!r}; {_allowed(key, settable)}")


def _allowed(wrong: str, names: list[str]) -> str:
    close = difflib.get_close_matches(wrong, names, n=5)
    return f"allowed are {', '.join(close + sorted(set(names) - set(close)))}"
