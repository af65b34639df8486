"""What a config names and is not there: said first, once, with the key, the value and what is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.errors import OUR_FOLDERS, ConfigError
from slipstream.launch import preflight
from slipstream.launch.cli.main import main
from slipstream.launch.preflight import CHECKS
from slipstream.launch.run_inputs import RunInputs
from slipstream.rollout.engines.registry import canary_tolerance
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests.test_imports import ALLOWED
from slipstream.tests.tiny import tiny_qwen3

HEAVY = ("torch", "transformers", "vllm", "ray", "reasoning_gym", "datasets", "pyarrow", "matplotlib", "mcp")
"""What takes seconds to import, or a part of one."""

COMMANDS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from slipstream.launch.cli.main import main

for arguments in json.loads(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
        status = main(arguments)
    print(json.dumps([status, said.getvalue(), [name for name in json.loads(sys.argv[2]) if name in sys.modules]]))
"""
"""Runs commands in one process; says of each its status, its lines, and what has been imported by then."""

DATA = "env={kind: dataset, path: rows.jsonl, reward: 'my.py:score'}"
PYTHON = "env={kind: python, factory: 'my_env:Env'}"

TYPOS = {
    "env.path: there is no file row.jsonl; did you mean rows.jsonl?": ("train", DATA, "env.path=row.jsonl"),
    "env.path: there is no file data/rows.jsonl; relative paths begin in": ("train", DATA, "env.path=data/rows.jsonl"),
    "env.evaluation: there is no file test.parquet": ("train", DATA, "env.evaluation=test.parquet"),
    "env.reward: there is no file mine.py; did you mean my.py?": ("train", DATA, "env.reward=mine.py:score"),
    "env.reward: cannot import 'rewards' of 'rewards:score': there is no such module in": (
        "train",
        DATA,
        "env.reward=rewards:score",
    ),
    "env.factory: cannot import 'my_envs' of 'my_envs:Env': there is no such module in": (
        "train",
        PYTHON,
        "env.factory=my_envs:Env",
    ),
    "env.factory: cannot import 'slipstream.examples.none'": (
        "train",
        PYTHON,
        "env.factory=slipstream.examples.none:E",
    ),
    "env.python: there is no file /": ("train", PYTHON, "env.python=none/bin/python"),
    "env.sampler: cannot import 'my_sampler'": ("train", "env.sampler=my_sampler:Own"),
    "evaluation.suites.hard.env.path: there is no file hard.jsonl": (
        "train",
        "evaluation.suites={hard: {env: {kind: dataset, path: hard.jsonl, reward: exact}}}",
    ),
    "env.path: there is no folder tasks; relative": ("train", "env={kind: harbor, path: tasks}"),
    "env.task: there is no file quiz.py": ("train", "env={kind: inspect, task: quiz.py@sums}"),
    "run.on_alert: 'no-such-program' is no program: relative paths begin in": (
        "train",
        "run.on_alert=[no-such-program, --now]",
    ),
    "rollout.engine.replicas: /": ("train", "rollout.engine.replicas={https://box1:8000: none.json}"),
    "agent.kind: cannot import 'my_agents' of 'my_agents:solve'": ("train", "agent.kind=my_agents:solve"),
    "model.path: 'no/such/model' is no folder in": ("train", "model.path=no/such/model"),
    "model.path: folder '/": ("eval", "model.path=empty"),
    "reward.path: 'judges' is no folder in": ("train", "reward={kind: judge, path: judges}"),
    "sft.messages: there is no file talk.jsonl": ("sft", "sft.messages=talk.jsonl"),
}


def test_a_path_that_leads_nowhere_is_said_before_anything_that_takes_long_is_imported(tmp_path: Path) -> None:
    """In a process of its own, since this one has imported everything."""
    (tmp_path / "my.py").write_text("def score(completion, row):\n    return 1.0\n")
    (tmp_path / "my_env.py").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    commands = [[command, "quickstart", "model.path=policy", *keys] for command, *keys in TYPOS.values()]
    commands.append(["init-model", "new", DATA, "env.path=row.jsonl"])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands), json.dumps(HEAVY)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(commands)
    for says, (status, line, imported) in zip([*TYPOS, "env.path: there is no file row.jsonl"], found, strict=True):
        assert status == 2
        assert line.startswith(f"slipstream: {says}"), line
        assert line.count("\n") == 1
        assert imported == [], f"{says}: {imported}"


def test_a_model_that_is_missing_is_said_once_and_what_needs_it_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "quickstart", "model.path=no/such/model"]) == 2
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    (wrong,) = (text for mark, text in lines if mark == "WRONG")
    assert wrong.startswith("model files")
    assert "model.path: 'no/such/model'" in wrong
    assert "allowed are a folder with a model" in wrong
    left = [text for mark, text in lines if mark == "-"]
    assert all(text.endswith("not checked, after model files") for text in left)
    assert {"model", "learner", "chat", "prompt"} <= {text.split()[0] for text in left}
    assert {text.split()[0] for mark, text in lines if mark == "ok"} >= {"environment", "devices", "trackers"}


def test_a_program_for_alerts_may_be_executed(tmp_path: Path) -> None:
    program = tmp_path / "page"
    program.write_text("#!/bin/sh\n")
    inputs = RunInputs(load("quickstart", [f"run.on_alert=[{program}]"]))
    with pytest.raises(
        ConfigError, match=rf"^run\.on_alert: '{program}' is no program that may be executed; run chmod"
    ):
        CHECKS["alert program"].run(inputs)
    program.chmod(0o755)
    assert CHECKS["alert program"].run(inputs) == str(program)
    assert CHECKS["alert program"].run(RunInputs(load("quickstart"))) == "none"


def test_two_faults_are_two_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent is looked at without the model."""
    (tmp_path / "forgets_chat.py").write_text(
        "async def play(env, policy, task):\n    seen = await env.reset(task)\n    policy.chat(seen.messages)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["doctor", "quickstart", "model.path=no/such/model", "agent.kind=forgets_chat:play"]) == 2
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG"))
    assert "model.path" in first
    assert "`policy.chat(...)` is called without `await` (forgets_chat.py:3 in play)" in second


def test_every_need_of_a_check_is_one_before_it() -> None:
    names = list(CHECKS)
    for number, name in enumerate(names):
        assert set(CHECKS[name].needs) <= set(names[:number])


def test_our_folders_are_those_of_the_package() -> None:
    assert set(OUR_FOLDERS) == set(ALLOWED)


FP8 = ("model.dtype=bfloat16", "weightsync.canary_tolerance=0.5", "rollout.engine.options.quantization=fp8")


def test_servers_to_which_nothing_is_pushed_serve_what_they_load(tmp_path: Path) -> None:
    config = load(
        "quickstart", ["rollout.engine.kind=vllm", f"model.path={tiny_qwen3(tmp_path / 'm', wide=True)}", *FP8]
    )
    with pytest.raises(ConfigError, match="vLLM computes in fp8 on GPUs only"):
        preflight.engine(RunInputs(config))
    assert "vllm on CPU" in preflight.engine(RunInputs(config, pushed=False))


@pytest.mark.parametrize(
    ("on_cpu", "dtype", "tolerance"), [(True, "float32", 0.002), (False, "float32", 0.02), (False, "bfloat16", 0.2)]
)
def test_vllms_float32_on_a_gpu_has_a_wider_tolerance(
    on_cpu: bool, dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda *_: on_cpu)
    asked = 0.2 if dtype == "bfloat16" else 0.002
    words = ["rollout.engine.kind=vllm", f"model.dtype={dtype}", f"weightsync.canary_tolerance={asked}"]
    assert canary_tolerance(load("quickstart", words)) == tolerance
