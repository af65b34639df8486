"""Bad input: one line that names the key and what is allowed, exit status 2, before anything starts."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import LedgerReport
from slipstream.configs import Config, describe, dump, load
from slipstream.configs.environments import PythonEnv
from slipstream.launch.cli.ledger import print_report
from slipstream.launch.cli.main import main
from slipstream.launch.run import with_absolute_paths
from slipstream.launch.run_lock import run_lock
from slipstream.monitor.alerts import alert_rules
from slipstream.monitor.settings import SettingChange, append_changes
from slipstream.tests.runs import tiny_policy

ROOT = Path(__file__).parent.parent


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert main(arguments) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("slipstream: ")
    return line


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("learner.stepz=3", ("learner.stepz", "learner.steps")),
        ("learner.steps=many", ("learner.steps", "many", "integer")),
        ("buffer.max_staleness=-1", ("buffer.max_staleness", "-1")),
        ("agent.max_tokens_per_turn=100000", ("agent.max_tokens_per_turn", "agent.max_tokens")),
        ("agent.kind=single_turn", ("agent.kind", "env.calculator")),
        ("env.family=chain_sums", ("env.family", "chain_sums", "chain_sum")),
        ("env.parameters={digits: 3}", ("env.parameters", "digits", "max_digits")),
        ("agent.kind=nowhere:agent", ("agent.kind", "nowhere")),
        ("agent.renderer=klingon", ("agent.renderer", "klingon")),
        ("rollout.engine.kind=abacus", ("rollout.engine.kind", "abacus", "vllm")),
        ("rollout.engine.memory=0.5", ("rollout.engine.memory", "0.5", "128MiB")),
        ("rollout.engine.memory=4000GiB", ("rollout.engine.memory", "4000GiB", "free")),
        ("agent.max_tokens=1000000", ("agent.max_tokens", "2048")),
        ("rollout.engine.memory=1KiB", ("rollout.engine.memory", "1KiB", "MiB and more")),
        (
            "rollout.engine.options.tensor_parallel_size=5",
            ("rollout.engine.options.tensor_parallel_size", "5", "2 attention heads"),
        ),
        ("model.dtype=bfloat16", ("model.dtype", "weightsync.canary_tolerance", "0.2")),
        ("seed=-1", ("seed", "-1")),
        ("launch.hosts=many", ("launch.hosts", "launch.kind=ray_cluster")),
        ("weightsync.transport=pigeon", ("weightsync.transport", "pigeon", "broadcast")),
        ("rollout.partial=whole", ("rollout.partial", "whole", "recompute")),
        ("rollout.episodes_per_worker=8", ("rollout.episodes_per_worker",)),
        ("launch.kind=slurm", ("launch.kind", "slurm", "ray")),
        ("model.path=models/none-of-this-name", ("model.path", "models/none-of-this-name")),
        ("learner.backend.device=cuda", ("learner.backend.device", "cuda")),
    ],
)
def test_a_bad_key_is_one_line(
    override: str, names: tuple[str, ...], policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={run}", override)
    for name in names:
        assert name in line
    assert not run.exists()


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (
            ("launch.kind=ray_cluster", "weightsync.transport=shared"),
            ("weightsync.transport=shared", "launch.kind=ray_cluster", "disk"),
        ),
        (
            ("rollout.engine.kind=transformers", "rollout.engine.options.tensor_parallel_size=2"),
            ("rollout.engine.options.tensor_parallel_size", "quantization"),
        ),
        (
            ("rollout.engine.kind=fake", "rollout.engine.memory=0.85"),
            ("rollout.engine.memory", "0.85", "128MiB"),
        ),
    ],
)
def test_keys_that_do_not_go_together_are_one_line(
    overrides: tuple[str, ...], names: tuple[str, ...], policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={run}", *overrides)
    for name in names:
        assert name in line
    assert not run.exists()


@pytest.mark.parametrize(
    ("kind", "variable", "value", "names"),
    [
        ("sglang", "SLIPSTREAM_SGLANG_PYTHON", "/nowhere/python", ("/nowhere/python",)),
        ("fake", "SLIPSTREAM_FAULTS", "[{at: lunch, do: die}]", ("lunch",)),
        ("fake", "SLIPSTREAM_FAULTS", "[{at: token, do: refuse}]", ("do=refuse", "at=token")),
        ("fake", "SLIPSTREAM_ENGINE_LAW", "{step_s: 0}", ("step_s", "> 0")),
        ("fake", "SLIPSTREAM_ENGINE_LAW", "{step_s: 0.1, sequences_s: 1}", ("sequences_s",)),
    ],
)
def test_a_wrong_environment_variable_is_one_line_that_names_it(
    kind: str,
    variable: str,
    value: str,
    names: tuple[str, ...],
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    run = tmp_path / "run"
    given = (f"model.path={policy}", f"run.dir={run}", f"rollout.engine.kind={kind}")
    line = refused(capsys, "train", "quickstart", *given)
    for name in (variable, *names):
        assert name in line
    assert not run.exists()


def test_a_vocabulary_that_does_not_match_its_tokenizer(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    line = refused(capsys, "train", "quickstart", f"model.path={broken}", f"run.dir={tmp_path / 'run'}")
    assert "model.path" in line
    assert "tokenizer" in line


def test_half_a_weights_file(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy, broken)
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    line = refused(capsys, "train", "quickstart", f"model.path={broken}", f"run.dir={tmp_path / 'run'}")
    assert str(weights) in line


CUSTOM = """
from slipstream.envs import SimpleEnv

class Broken(SimpleEnv):
    def __init__(self, *, where, **given):
        super().__init__(**given)
        self.where = where
        if where == "init":
            raise RuntimeError("no licence")

    def task(self, index):
        raise KeyError("row 0")

    async def reset(self, task): ...
    async def step(self, message): ...
"""


@pytest.mark.parametrize(("where", "names"), [("init", ("env.factory", "no licence")), ("task", ("env", "row 0"))])
def test_an_environment_that_cannot_begin(
    where: str,
    names: tuple[str, ...],
    policy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "custom_broken.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ("env.kind=python", "env.factory=custom_broken:Broken", f"env.arguments={{where: {where}}}")
    line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={tmp_path / 'run'}", *overrides)
    for name in names:
        assert name in line


@pytest.mark.parametrize("command", ["train", "sft", "init-model"])
def test_a_folder_below_a_file(command: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "folder")
    arguments = {
        "train": ("train", "quickstart", f"model.path={policy}", f"run.dir={below}"),
        "sft": ("sft", "quickstart", f"model.path={policy}", f"sft.out={below}"),
        "init-model": ("init-model", below),
    }[command]
    assert below in refused(capsys, *arguments)


def test_a_busy_port(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        line = refused(
            capsys,
            "train",
            "quickstart",
            f"model.path={policy}",
            f"run.dir={tmp_path / 'run'}",
            f"launch.ports.first={port}",
        )
    assert "launch.ports.first" in line
    assert str(port) in line


def test_the_folder_of_a_run_that_is_active(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_lock(tmp_path):
        line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={tmp_path}")
        assert "active" in line
        assert "not empty" not in line
        (tmp_path / "config.yaml").write_text(dump(load("quickstart", [f"model.path={policy}"])))
        assert "active" in refused(capsys, "resume", str(tmp_path))


def test_a_folder_that_holds_a_run_already(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={tmp_path}")
    assert "run.dir" in line
    assert "resume" in line


def test_a_printed_command_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "mein läuf" / "a b"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(load("quickstart", [f"run.dir={run}"])))
    assert f"`slipstream resume '{run}'`" in refused(capsys, "train", "quickstart", f"run.dir={run}")
    assert f"`slipstream resume '{run}' 'run.trackers=[a, b]'`" in refused(
        capsys, "set", str(run), "run.trackers=[a, b]"
    )
    advice = " ".join(rule.advice for rule in alert_rules(load("quickstart", [f"run.dir={run}"])))
    assert f"`slipstream explain '{run}'`" in advice


def test_train_resumes_where_there_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ("train", "quickstart", "--resume", f"run.dir={tmp_path}")
    assert "model.path: 'of-the-command'" in refused(capsys, *train, "model.path=of-the-command")
    began = dump(load("quickstart", ["model.path=of-the-run", "buffer.max_staleness=3"]))
    (tmp_path / "config.yaml").write_text(began)
    assert "model.path: 'of-the-run'" in refused(capsys, *train, "model.path=of-the-run", "buffer.max_staleness=3")
    assert "is not empty" in refused(capsys, *train[:2], train[3], "model.path=of-the-run")


def test_train_resumes_with_what_its_command_changes_as_resume_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(dump(load("quickstart", ["model.path=of-the-run"])))
    train = ("train", "quickstart", "--resume", f"run.dir={tmp_path}")
    assert "model.path: 'of-the-command'" in refused(capsys, *train, "model.path=of-the-command")
    changed = "model.path=of-the-run", "buffer.group_size=2"
    assert refused(capsys, *train, *changed) == refused(capsys, "resume", str(tmp_path), *changed)
    assert "learner.steps" in refused(capsys, *train, "learner.steps=0")


def test_a_requeued_job_takes_back_no_changed_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Config]()
    monkeypatch.setattr("slipstream.launch.run.resume", lambda config, *_: asked.append(config))
    monkeypatch.setattr("slipstream.launch.run.summary", str)
    keys = "buffer.max_staleness=3", "learner.optimizer.lr=0.1", "run.on_alert=[./tell]"
    train = ("train", "quickstart", "--resume", f"run.dir={tmp_path}", *keys)
    (tmp_path / "config.yaml").write_text(dump(with_absolute_paths(load("quickstart", keys))))
    assert main(train) == 0
    assert capsys.readouterr().err == ""
    append_changes(tmp_path / "settings.jsonl", [SettingChange(0.0, 1, 0, "buffer.max_staleness", 3, 5)])
    assert main((*train, "learner.optimizer.lr=0.2", "learner.steps=9")) == 0
    line = capsys.readouterr().err
    assert "the run keeps its own buffer.max_staleness; " in line
    assert line.count("\n") == 1
    before, after = asked
    assert (before.buffer.max_staleness, before.learner.optimizer.lr) == (3, 0.1)
    assert (after.buffer.max_staleness, after.learner.optimizer.lr, after.learner.steps) == (5, 0.2, 9)
    assert after.run.on_alert == (str(Path("tell").absolute()),)


def test_a_resumed_run_keeps_what_its_buffer_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump(load("quickstart")))
    line = refused(capsys, "resume", str(tmp_path), "buffer.group_size=4")
    assert "buffer.group_size" in line
    assert "8" in line


def test_a_run_is_resumed_in_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(dump(load("quickstart", ["model.path=of-the-run"])))
    line = refused(capsys, "resume", str(tmp_path), "learner.steps=9", "run.dir=other")
    assert line.startswith("slipstream: run.dir=other: ")
    assert str(tmp_path) in line


@pytest.mark.parametrize("command", ["resume", "eval", "ledger"])
def test_a_run_that_is_none(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(tmp_path) in refused(capsys, command, str(tmp_path))


@pytest.mark.parametrize("asked", [("list",), ("add",), ("remove", "engine-0")])
def test_replicas_of_a_run_that_is_none(
    asked: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{tmp_path} holds no run" in refused(capsys, "replicas", str(tmp_path), *asked)


def test_doctor_names_what_is_wrong_and_goes_on(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "quickstart", f"model.path={policy}"]) == 0
    assert "WRONG" not in capsys.readouterr().out
    assert main(["doctor", f"model.path={policy}", "env.family=nonsense"]) == 2  # CONFIG may be left out
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("WRONG")] == ["environment"]
    assert len(lines) >= 10


def test_train_help_shows_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    keys = {field.key for field in (*describe(Config()), *describe(Config(env=PythonEnv(factory="a:B"))))}
    keys |= {"env.family", "env.factory", "env.parts.NAME.family", "rollout.engine.options"}
    keys |= {"reward.path", "reward.template", "learner.backend.parallel", "learner.algorithm.advantage.lam"}
    keys |= {"learner.algorithm.loss.eta", "learner.algorithm.kl.coefficient", "rollout.failures.NAME.retries"}
    for key in keys:
        assert f"\n{key} = " in text
    assert "of kind vllm, sglang)" in text
    assert "No token older than this many policy versions is trained on." in " ".join(text.split())
    docs = [line for line in text.partition("seed = 0")[2].splitlines()[1:] if " = " not in line]
    assert all(line.startswith("    ") and len(line) <= 80 for line in docs if line)


def test_a_run_folder_whose_name_is_too_long(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "train", "quickstart", f"model.path={policy}", f"run.dir={tmp_path / ('x' * 300)}")
    assert "run.dir" in line
    assert "too long" in line


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (("--help",), ("slipstream init-model", "slipstream train quickstart"), ("plugin entry point", "folders")),
        (("eval", "--help"), ("CONFIG|RUN", "run folder"), ()),
        (("init-model", "--help"), ("random Qwen3 model of about a million", "default: quickstart"), ()),
    ],
)
def test_help_is_for_users(
    arguments: tuple[str, ...], shown: tuple[str, ...], hidden: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    text = " ".join(capsys.readouterr().out.split())
    assert all(part in text for part in shown)
    assert not any(part in text for part in hidden)


def test_train_without_arguments_asks_for_the_config_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert "required: CONFIG\n" in capsys.readouterr().err


def test_overrides_do_not_leak_into_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", "--yaml", "learner.steps=7"]) == 0
    assert "steps: 7" in capsys.readouterr().out
    assert main(["config", "quickstart", "--yaml"]) == 0
    assert "steps: 7" not in capsys.readouterr().out


def test_doctor_sees_a_package_of_ours_that_is_missing(tmp_path: Path) -> None:
    """As in a wheel that leaves a folder out."""
    package = tmp_path / "slipstream"
    rooms = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    for room in rooms:
        shutil.copytree(room, package / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("*.py"):
        shutil.copy(file, package)

    def doctor() -> tuple[int, str]:
        command = [sys.executable, "-m", "slipstream.launch.cli", "doctor", "quickstart"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr
        return done.returncode, next(line for line in done.stdout.splitlines() if " installation " in line)

    assert doctor()[1].startswith("ok")
    shutil.rmtree(package / "learner" / "aux_models")
    status, line = doctor()
    assert status == 2
    assert line.startswith("WRONG")
    assert "slipstream.learner.aux_models" in line


def test_a_dependency_that_cannot_be_imported_is_one_line(
    policy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "slipstream.monitor.trackers", None)
    assert main(["doctor", "quickstart", f"model.path={policy}"]) == 2
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG"))
    assert "trackers" in line


def test_a_weights_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        policy = tiny_policy(tmp_path / "policy")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in policy.iterdir()} == {0o644}


def test_a_ledger_is_whole_at_80_columns() -> None:
    reasons = {"attempt_replaced": 12, "failed_environment": 3456, "no_signal": 789, "past_the_deadline": 1}
    total = Ledger(123456, 1000, 2000, 3000, withheld={"stale": 4, "late": 5}, discarded=reasons)
    report = LedgerReport(total, {1: total}, {64: total}, 60.0, 61.0, 0)
    console = Console(file=io.StringIO(), width=80)
    print_report(report, "length", console)
    text = console.file.getvalue()
    assert "…" not in text
    for word in ("generated", "flight", "environment", "deadline", "123,456", "64 to 127", "mean episode length"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "quickstart", "run.dir={tmp}/run"), "checks the config, then trains in {tmp}/run"),
        (("eval", "quickstart"), "checks the config, then evaluates {tmp}/none"),
        (("sft", "quickstart", "sft.out={tmp}/out"), "checks the config, then fine-tunes {tmp}/none"),
    ],
)
def test_the_first_line_comes_before_the_checks(
    arguments: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (argument.format(tmp=tmp_path) for argument in (*arguments, "model.path={tmp}/none"))
    assert main(list(given)) == 2
    assert line.format(tmp=tmp_path) in capsys.readouterr().out.splitlines()[0]
