"""`slipstream env new NAME`: the files from which an environment of one's own begins."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from ..errors import ConfigError

ENVIRONMENT = '''"""Tell how many letters a word has, with a tool that counts them."""

from slipstream.envs import Task, ToolEnv

WORDS = ("apple", "cherry", "fig", "lemon", "banana", "pear", "plum", "raspberry")


class {CLASS}(ToolEnv):
    def task(self, index):  # the same in every process; endless
        return Task(f"{NAME}-{{self.split}}-{{index}}", {{"word": self.rng(index).choice(WORDS)}})

    def question(self, task):  # what the policy sees first
        return f"How many letters has {{task.payload['word']}}? Answer with a number."

    def tools(self):  # functions, or methods of this object
        return [count_letters]

    def score(self, task, answer):  # the reward of the policy's first message without a call
        return float(answer.strip() == str(len(task.payload["word"])))


def count_letters(word: str) -> int:
    """How many letters a word has."""
    return len(word)
'''

CONFIG = """extends: quickstart   # `slipstream config quickstart` explains every key
run: {{dir: runs/{NAME}}}
env: {{kind: python, factory: "{NAME}:{CLASS}"}}
"""

TEST = """import pytest
from slipstream.configs.environments import PythonEnv
from slipstream.envs import Task
from slipstream.envs.check import CHECKS, run_check, subject_of
from {NAME} import {CLASS}


def test_only_the_number_of_letters_is_rewarded():
    env, task = {CLASS}(split="train", seed=0), Task("pear", {{"word": "pear"}})
    assert [env.score(task, answer) for answer in ("4", " 4\\n", "5", "four", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]


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
