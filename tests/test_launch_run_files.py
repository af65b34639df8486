"""What a run over many hosts keeps of its inputs, for hosts that do not have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from slipstream.configs import Config, load
from slipstream.configs.environments import DataSection, Harbor, parts_by_key
from slipstream.launch.run import keep_tokenizer, with_absolute_paths
from slipstream.launch.run_files import code_folder, keep_inputs, local_inputs, user_modules
from slipstream.learner.model import load_tokenizer, vocabulary_size
from slipstream.tests.runs import tiny_policy

MANY = "launch.kind=ray_cluster"
ENVIRONMENT = """
from helpers.numbers import NUMBER
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

class Env(SimpleEnv):
    def task(self, index):
        return Task(str(NUMBER + index))

    async def reset(self, task):
        return Observation((Message("user", task.id),))

    async def step(self, message):
        return StepResult(done=True)
"""
READ = """
import sys
import msgspec
from slipstream.configs import Config
from slipstream.envs import parts_of
sys.path += sys.argv[2:]
for part in parts_of(msgspec.json.decode(sys.argv[1], type=Config).env, "train", 0):
    print(part.name, part.source.task(0).id)
"""
"""What a role does with the environments of its config; the folders of modules follow."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an environment, a module that it imports, data with a reward of its own, and a task folder."""
    project = tmp_path / "project"
    (project / "helpers").mkdir(parents=True)
    (project / "my_env.py").write_text(ENVIRONMENT)
    (project / "helpers" / "__init__.py").write_text("")
    (project / "helpers" / "numbers.py").write_text("import shared\n\nNUMBER = shared.NUMBER\n")
    (project / "shared.py").write_text("import helpers\n\nNUMBER = 41\n")  # in a circle
    (project / "unused.py").write_text("this is no Python")
    (project / "rewards.py").write_text("def score(completion, **row):\n    return 1.0\n")
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(40)]
    (project / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.chdir(project)
    return project


def config_of(*keys: str) -> Config:
    env = (
        "{kind: mixture, parts: {mine: {kind: python, factory: 'my_env:Env'}, rows: {kind: dataset, path: rows.jsonl, "
    )
    return with_absolute_paths(load("quickstart", [f"env={env}reward: 'rewards.py:score'}}}}}}", *keys]))


def read(config: Config, *folders: Path) -> subprocess.CompletedProcess[str]:
    text = msgspec.json.encode(config).decode()
    command = [sys.executable, "-P", "-c", READ, text, *map(str, folders)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def test_modules_that_a_config_names_and_what_they_import(project: Path) -> None:
    named = user_modules(config_of(), project)
    assert named == [project / "helpers", project / "my_env.py", project / "shared.py"]
    assert user_modules(load("quickstart"), project) == []
    agent = load("quickstart", ["agent.kind=shared:play", "env.sampler=unused:Sampler"])
    assert user_modules(agent, project) == [project / "helpers", project / "shared.py", project / "unused.py"]
    own = [f"learner.algorithm.{part}={{kind: python, function: 'unused:{part}'}}" for part in ("advantage", "loss")]
    assert user_modules(load("quickstart", own), project) == [project / "unused.py"]


def test_a_host_without_the_users_files_has_those_of_the_run(project: Path, tmp_path: Path) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    run.mkdir()
    config = config_of(MANY, f"model.path={policy}")
    keep_tokenizer(str(policy), run)
    keep_inputs(config, run)
    keep_inputs(config, run)  # as a run does that is resumed
    assert local_inputs(config, run, "worker") == config  # this host has everything
    rows = len(load_tokenizer(str(policy))), vocabulary_size(str(policy))

    here, hidden = read(config, project, code_folder(run)), tmp_path / "hidden"
    project.rename(hidden)
    policy.rename(tmp_path / "hidden-policy")
    there = local_inputs(config, run, "worker")
    mine, data = parts_by_key(there.env).values()
    assert isinstance(data, DataSection)
    assert Path(data.path).is_relative_to(run)
    assert Path(data.path).name == "rows.jsonl"
    assert data.reward.endswith("/rewards.py:score")
    assert mine == parts_by_key(config.env)["env.parts.mine"]
    elsewhere = read(there, project, code_folder(run))
    assert (elsewhere.stdout, elsewhere.returncode) == (here.stdout, 0), elsewhere.stderr
    assert elsewhere.stdout.splitlines()[0] == "mine 41"
    # The tokenizer is enough for a worker; weights are not kept.
    assert there.model.path == str(run / "tokenizer")
    assert (len(load_tokenizer(there.model.path)), vocabulary_size(there.model.path)) == rows
    assert local_inputs(config, run, "engine").model.path == str(policy)
    assert local_inputs(config, run, "learner").model.path == str(policy)


def test_what_is_kept_is_of_the_last_start(project: Path, tmp_path: Path) -> None:
    run, config = tmp_path / "run", config_of(MANY)
    run.mkdir()
    keep_inputs(config, run)
    (project / "shared.py").write_text("NUMBER = 1\n")
    assert "41" in (code_folder(run) / "shared.py").read_text()
    keep_inputs(config, run)
    assert (code_folder(run) / "shared.py").read_text() == "NUMBER = 1\n"
    assert sorted(path.name for path in run.iterdir()) == ["inputs"]
    other = tmp_path / "other"
    other.mkdir()
    keep_inputs(config_of(), other)  # of one host
    assert list(other.iterdir()) == []
    assert local_inputs(config_of(), other, "worker") == config_of()


def test_a_folder_keeps_its_name(tmp_path: Path) -> None:
    """The name of a task folder is the name of its task."""
    tasks, run = tmp_path / "sum-of-two", tmp_path / "run"
    (tasks / "tests").mkdir(parents=True)
    (tasks / "instruction.md").write_text("Add.")
    run.mkdir()
    config = load("quickstart", [f"env={{kind: harbor, path: {tasks}}}", MANY, "rollout.episode_s=900"])
    keep_inputs(config, run)
    tasks.rename(tmp_path / "hidden")
    env = local_inputs(config, run, "worker").env
    assert isinstance(env, Harbor)
    assert Path(env.path).name == "sum-of-two"
    assert (Path(env.path) / "instruction.md").read_text() == "Add."
    assert os.listdir(Path(env.path)) != []
