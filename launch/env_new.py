"""`slipstream env new NAME`: the files from which an environment of one's own begins."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ..errors import ConfigError

ENVIRONMENT = '''"""Tell how many letters a word has."""

from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

WORDS = ("apple", "cherry", "fig", "lemon", "banana", "pear", "plum", "raspberry")


class {CLASS}(SimpleEnv):
    def task(self, index):  # the same in every process; endless
        return Task(f"{NAME}-{{self.split}}-{{index}}", {{"word": self.rng(index).choice(WORDS)}})

    async def reset(self, task):  # what the policy sees first
        self.word = task.payload["word"]
        return Observation((Message("user", f"How many letters has {{self.word}}? Answer with a number."),))

    async def step(self, message):  # the policy's message; must not block, see `in_thread`
        return StepResult(reward=reward(message.content, self.word), done=True)


def reward(answer, word):
    return float(answer.strip() == str(len(word)))
'''

CONFIG = """extends: quickstart   # `slipstream config quickstart` explains every key
run: {{dir: runs/{NAME}}}
env: {{kind: python, factory: "{NAME}:{CLASS}"}}
agent: {{kind: single_turn}}
"""

TEST = """import pytest
from slipstream.configs.environments import PythonEnv
from slipstream.envs.check import CHECKS, run_check, subject_of
from {NAME} import reward


def test_only_the_number_of_letters_is_rewarded():
    assert [reward(answer, "pear") for answer in ("4", " 4\\n", "5", "four", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_contract(name):
    run_check(name, subject_of(PythonEnv(factory="{NAME}:{CLASS}"), seed=0))
"""


def write_environment(name: str, folder: Path) -> tuple[Path, ...]:
    """Write a module, a config and a test; returns their paths. Raises ConfigError: no name of a module, or a file exists."""
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"NAME: {name!r} is no name of a module; use small letters, digits and _, for example my_env")
    class_name = "".join(part.capitalize() for part in re.split("_+", name) if part) or "Env"
    texts = {f"{name}.py": ENVIRONMENT, f"{name}.yaml": CONFIG, f"test_{name}.py": TEST}
    paths = tuple(folder / file for file in texts)
    if existing := [str(path.name) for path in paths if path.exists()]:
        raise ConfigError(f"NAME: {', '.join(existing)} exists already; take another name, or remove it")
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text.format(NAME=name, CLASS=class_name), encoding="utf-8")
    return paths
