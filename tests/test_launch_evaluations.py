"""What evaluations are called when a run goes on, and the policy of a step as a model folder."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from safetensors.torch import load_file
from slipstream.buffer.schema import EVALUATION_DATABASE as DATABASE
from slipstream.common.scores import EvaluationResult
from slipstream.configs import load
from slipstream.configs.environments import Dataset
from slipstream.configs.suites import suites_of
from slipstream.errors import CheckpointError, ConfigError, LearnerError, StoreError
from slipstream.launch import evaluations
from slipstream.launch.checkpoint_evaluation import FOLDER, evaluate_checkpoint
from slipstream.launch.cli.main import main
from slipstream.launch.launchers.local import LocalLauncher, ProcessHandle
from slipstream.launch.run import resume, with_absolute_paths
from slipstream.launch.supervisor.evaluations import CheckpointEvaluations
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.learner.checkpoint_folder import STATE_FILE, checkpoints, path_of, prune, read_state, step_of
from slipstream.monitor.metrics import EVALUATION, read_lines, read_metrics
from slipstream.monitor.recorder import Recorder
from slipstream.monitor.series import read_evaluations
from slipstream.monitor.terminal import LineView
from slipstream.tests.reports import evaluations_in
from slipstream.tests.runs import (
    SMALL,
    WAIT_S,
    Background,
    check_accounts,
    leftovers,
    metrics,
    slipstream,
    tiny_policy,
)
from slipstream.tests.stores import sql
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def result(label: str, version: int, step: int = 0, suite: str = "", mean: float = 0.5) -> EvaluationResult:
    score = {"tasks": 4, "reward_mean": mean, "reward_stderr": 0.25, "outcomes": {"finished": 4}}
    return EvaluationResult(**score, label=label, version=version, seconds=1.0, step=step, suite=suite)


def labels(run: Path) -> list[str]:
    return [one.label for one in read_evaluations(run / evaluations.FILE)]


def test_a_final_evaluation_is_of_its_step_once_the_run_goes_on(tmp_path: Path) -> None:
    config = load("quickstart")
    assert evaluations.label_of(0) == "warm start"
    assert evaluations.begins(tmp_path, 5)
    evaluations.append(tmp_path, result("warm start", 0))
    evaluations.append(tmp_path, result("final", 20, step=20))
    record = read_evaluations(tmp_path / evaluations.FILE)[1]
    assert (record.step, record.tasks, record.reward_mean) == (20, 4, 0.5)
    evaluations.begin(tmp_path, 20)
    assert labels(tmp_path) == ["warm start", "final"]
    evaluations.begin(tmp_path, 22)
    assert labels(tmp_path) == ["warm start", "step 20"]
    assert not evaluations.begins(tmp_path, 20)
    assert list(evaluations.missing(tmp_path, config, 20)) == []
    assert list(evaluations.missing(tmp_path, config, 22)) == [""]


NO_MODEL = "model.path=no/such/folder"
SUITES = (
    "evaluation.suites={easy: {keep_best: true}, many: {samples: 4}}",
    "evaluation.every=10",
    "learner.steps=40",
    "learner.checkpoint_every=5",
)


def test_checkpoints_stay_until_they_are_evaluated_and_the_best_one_longer(tmp_path: Path) -> None:
    config, steps = load("quickstart", SUITES), [5, 10, 20, 30, 40]
    assert evaluations.due(tmp_path, config, steps) == [10, 20, 30]  # the one of the last step comes after training
    assert evaluations.retained(tmp_path, config, steps) == {10, 20, 30}
    evaluations.append(tmp_path, result("step 10", 10, step=10, suite="easy", mean=0.7))
    assert list(evaluations.missing(tmp_path, config, 10)) == ["many"]
    assert evaluations.retained(tmp_path, config, steps) == {10, 20, 30}
    evaluations.append(tmp_path, result("step 10", 10, step=10, suite="many", mean=0.1))
    assert evaluations.due(tmp_path, config, steps) == [20, 30]
    for suite, mean in (("easy", 0.6), ("many", 0.9)):
        evaluations.append(tmp_path, result("step 20", 20, step=20, suite=suite, mean=mean))
    assert evaluations.retained(tmp_path, config, [10, 20]) == {10}
    assert evaluations.retained(tmp_path, config, [20]) == {20}  # the best of those that are there
    best = evaluations.best(tmp_path, "easy", [10, 20])
    assert best is not None
    assert best.step == 10
    assert evaluations.retained(tmp_path, load("quickstart"), [10, 20]) == set()


def test_what_was_given_up_keeps_no_checkpoint_until_the_run_goes_on(tmp_path: Path) -> None:
    config, steps = load("quickstart", SUITES), [10, 20, 30]
    evaluations.give_up(tmp_path, 20)
    evaluations.give_up(tmp_path, 10)
    assert evaluations.due(tmp_path, config, steps) == [30]
    assert evaluations.retained(tmp_path, config, steps) == {30}
    (tmp_path / evaluations.GIVEN_UP).write_bytes(b"")  # as a power cut leaves a file
    with pytest.raises(StoreError, match=r"evaluations-given-up.json: not a list of steps: .*; remove it"):
        evaluations.due(tmp_path, config, steps)
    evaluations.begin(tmp_path, 40)
    assert evaluations.due(tmp_path, config, steps) == [10, 20, 30]


EVALUATOR = """
import json, pathlib, sys
step, path = int(sys.argv[sys.argv.index("--step") + 1]), pathlib.Path({path!r})
if step == 20:
    raise ValueError("the service is away")
found = json.loads(path.read_text()) if path.exists() else []
one = dict(tasks=4, reward_mean=1 / step, reward_stderr=0.1, outcomes={{}}, label="x", version=step, seconds=1.0, step=step)
path.write_text(json.dumps(found + [one | {{"suite": suite}} for suite in ("easy", "many")]))
"""
"""An evaluator whose results are known: the older the better, and none of step 20."""


class Evaluators(LocalLauncher):
    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        code = EVALUATOR.format(path=str(self._logs.parent / evaluations.FILE))
        return await super().start(role, [sys.executable, "-c", code, *command], environment)


async def test_checkpoints_are_evaluated_as_they_come_and_one_that_fails_is_given_up(tmp_path: Path) -> None:
    config = load("quickstart", [*SUITES, "launch.restarts=1", "learner.steps=60"])
    shown, root = io.StringIO(), tmp_path / "checkpoints"
    view = LineView(config, Console(file=shown, width=1000))
    (tmp_path / "logs").mkdir()

    def save(step: int) -> None:
        path_of(root, step).mkdir(parents=True)
        (path_of(root, step) / STATE_FILE).touch()

    for step in (5, 10, 20, 30):
        save(step)
    launcher = Evaluators(tmp_path / "logs", 0)
    following = CheckpointEvaluations(config, tmp_path, ProcessManager(config, tmp_path, launcher, view), view)
    learner, evaluator = RoleProcess("learner-0"), RoleProcess("evaluator")
    following.processes.roles["evaluator"] = evaluator
    async with asyncio.timeout(WAIT_S):
        task = asyncio.create_task(following.follow(learner, evaluator))
        await asyncio.sleep(0)  # it has seen the checkpoints that are there
        save(40)
        learner.done.set()
        learner.saved.set()
        await task
    await launcher.close()
    found = read_evaluations(tmp_path / evaluations.FILE)
    assert [(one.step, one.suite) for one in found] == [(n, suite) for n in (10, 30, 40) for suite in ("easy", "many")]
    slow, again, given_up = (line for line in shown.getvalue().splitlines() if line.startswith("!"))
    assert (
        "evaluations are slower than training: 3 checkpoints stay until they are evaluated; raise evaluation.every=10"
        in slow
    )
    assert "evaluator ended with exit status 1: ValueError: the service is away; restart 1 of 1" in again
    assert "the evaluation of step 20 is given up, the run goes on: " in given_up
    assert "ValueError: the service is away; given up: a restart ended with the same error" in given_up
    following.prune()
    kept = config.learner.checkpoint_keep
    assert [step_of(path) for path in checkpoints(root)] == sorted({10, *(5, 10, 20, 30, 40)[-kept:]})


def test_a_checkpoint_that_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    checkpoint = path_of(tmp_path / "checkpoints", 3)

    def refusal() -> LearnerError:
        with pytest.raises(LearnerError, match=f"^checkpoint {checkpoint} cannot be evaluated: ") as refused:
            evaluate_checkpoint(load("quickstart"), tmp_path, "label", 3, lambda line: None)
        assert "\n" not in str(refused.value)
        return refused.value

    gone = refusal()
    assert isinstance(gone, CheckpointError)
    assert "it is gone" in str(gone)
    checkpoint.mkdir(parents=True)
    for content in (b'{"step": 3', b'{"step": 3}', b'"\xff"'):
        (checkpoint / STATE_FILE).write_bytes(content)
        damaged = refusal()
        assert isinstance(damaged, CheckpointError)
        assert "is damaged" in str(damaged)
    (checkpoint / STATE_FILE).unlink()
    (checkpoint / STATE_FILE).mkdir()
    assert not refusal().final  # a disk may recover


def test_a_suite_stays_what_it_was_in_a_run_that_goes_on(tmp_path: Path) -> None:
    before = load("quickstart", ["evaluation.suites={a: {samples: 2}, b: {}}", "evaluation.tasks=4"])
    for suites in ("{a: {samples: 4}, b: {}}", "{a: {samples: 2}, b: {env: {kind: reasoning_gym}}}"):
        with pytest.raises(ConfigError, match=r"evaluation\.suites\.[ab]: a suite stays what it was"):
            resume(load("quickstart", [f"evaluation.suites={suites}", "evaluation.tasks=4"]), before, tmp_path)
    added = load("quickstart", ["evaluation.suites={a: {samples: 2}, c: {samples: 3}}", "evaluation.tasks=4", NO_MODEL])
    with pytest.raises(ConfigError, match=r"model\.path"):  # the next thing that is checked
        resume(added, before, tmp_path)


@pytest.mark.parametrize("step", ["last", "-1", "1.5"])
def test_a_step_is_a_number_or_best(step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), f"--step={step}"])
    assert f"{step!r} is neither a learner step nor best" in capsys.readouterr().err


def test_an_older_checkpoint_goes_once_a_newer_one_is_better(tmp_path: Path) -> None:
    config, root = load("quickstart", SUITES), tmp_path / "checkpoints"

    def steps_after_pruning() -> list[int]:
        prune(root, 1, functools.partial(evaluations.retained, tmp_path, config))
        return [step_of(path) for path in checkpoints(root)]

    for step, mean in ((10, 0.7), (20, 0.6), (30, 0.9)):
        path_of(root, step).mkdir(parents=True)
        (path_of(root, step) / STATE_FILE).touch()
        for suite in ("easy", "many"):
            evaluations.append(tmp_path, result(f"step {step}", step, step=step, suite=suite, mean=mean))
        if step == 20:
            assert steps_after_pruning() == [10, 20]
    assert steps_after_pruning() == [30]


def test_a_suite_inherits_what_it_does_not_name() -> None:
    suites = {
        "mine": {},
        "other": {"env": {"kind": "reasoning_gym", "family": "leg_counting"}, "tasks": 3, "max_tokens": 100},
        "greedy": {"temperature": 0, "samples": 2, "max_tokens_per_turn": 9},
    }
    trained = "rollout.failures.tool.then=train"  # by training only
    config = load(
        "quickstart", [f"evaluation.suites={msgspec.json.encode(suites).decode()}", "evaluation.samples=5", trained]
    )
    found = suites_of(config)
    mine, other, greedy = found.values()
    assert list(found) == ["mine", "other", "greedy"]
    assert (mine.env, mine.agent, mine.evaluation.samples) == (config.env, config.agent, 5)
    assert (other.env.family, other.evaluation.tasks, other.agent.max_tokens) == ("leg_counting", 3, 100)
    assert {failure.then for failure in other.rollout.failures.values()} == {"drop"}
    assert (greedy.evaluation.temperature, greedy.evaluation.samples) == (0.0, 2)
    assert (greedy.agent.max_tokens_per_turn, greedy.agent.max_tokens) == (9, config.agent.max_tokens)
    assert list(suites_of(load("quickstart"))) == [""]
    assert suites_of(load("quickstart", ["evaluation.tasks=0"])) == {}
    assert list(suites_of(load("quickstart", ["evaluation.tasks=0", "evaluation.suites={a: {}, b: {tasks: 1}}"]))) == [
        "b"
    ]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("evaluation.every=7", "evaluation.every=7 is no multiple of learner.checkpoint_every=10"),
        ("evaluation.keep_best=easy", "evaluation.suites.NAME.keep_best=true"),
        (
            "evaluation.suites={a: {keep_best: true}, b: {keep_best: true}}",
            "evaluation.suites.b.keep_best=true: evaluation.suites.a.keep_best is true already",
        ),
        ("evaluation.suites={a b: {}}", "evaluation.suites.a b: a name of a suite consists of letters"),
        (
            "evaluation.suites={a: {max_tokens: 99999}}",
            "evaluation.suites.a.max_tokens=99999 is more than agent.max_tokens=",
        ),
        ("evaluation.suites={a: {max_tokens: 9, max_tokens_per_turn: 10}}", "allowed are 1 to 9"),
        ("evaluation.suites={a: {sample: 2}}", "evaluation.suites.a.sample: no such key; did you mean"),
        ("evaluation.suites={a: {env: {kind: reasoning}}}", "evaluation.suites.a.env.kind: 'reasoning' is unknown"),
        ("evaluation.suites={a: {env: {kind: mixture, parts: {}}}}", "evaluation.suites.a.env.parts: a mixture needs"),
        (
            "evaluation.suites={a: {tasks: 0}}",
            "evaluation.suites.a.tasks: 0 is not allowed; expected an integer >= 1 or null",
        ),
    ],
)
def test_a_wrong_evaluation_is_refused_in_one_line(override: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("quickstart", ["learner.checkpoint_every=10", override])
    assert says in str(error.value)


def test_what_would_never_be_played_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.every=10 with evaluation\.tasks=0 plays nothing"):
        load("quickstart", ["learner.checkpoint_every=10", "evaluation.every=10", "evaluation.tasks=0"])
    with pytest.raises(ConfigError, match=r"evaluation\.suites\.a\.keep_best=true with evaluation\.every=0"):
        load("quickstart", ["evaluation.suites={a: {keep_best: true}}"])


def test_a_suite_keeps_its_files_wherever_the_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    monkeypatch.chdir(tmp_path)
    suites = "evaluation.suites={a: {env: {kind: dataset, path: test.jsonl, evaluation: test.jsonl, reward: exact}}}"
    env = with_absolute_paths(load("quickstart", [suites])).evaluation.suites["a"].env
    assert isinstance(env, Dataset)
    assert env.path == env.evaluation == str(tmp_path / "test.jsonl")


def test_steps_of_a_critics_warm_up_have_places_of_their_own(tmp_path: Path) -> None:
    """They make no version; steps that are repeated after a crash make others."""
    config = load("vapo", ["run.trackers=[tensorboard]", "learner.algorithm.advantage.critic_warmup=2"])
    step = msgspec.defstruct("Step", ["step", "version", "reward_mean"])
    with Recorder(tmp_path, config, tmp_path / evaluations.FILE) as recorder:
        for number, version in ((1, 0), (2, 0), (3, 1), (4, 2), (4, 3), (5, 4)):
            recorder.step(step(number, version, 0.1 * number))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("reward_mean")] == [1, 2, 3, 4, 5, 6]


def test_every_evaluation_is_recorded_once_by_its_version(tmp_path: Path) -> None:
    """Also those that end after the last step, and not again by the learner's next process."""
    config, file = load("quickstart", ["run.trackers=[tensorboard]"]), tmp_path / evaluations.FILE
    step = msgspec.defstruct("Step", ["step", "version", "reward_mean"])
    evaluations.append(tmp_path, result("warm start", 0))
    with Recorder(tmp_path, config, file) as recorder:
        recorder.step(step(1, 1, 0.5))
        first = file.stat()
        evaluations.append(tmp_path, result("step 1", 1, step=1, suite="math", mean=0.75))
        os.utime(file, ns=(first.st_atime_ns, first.st_mtime_ns))  # written within one tick of the clock
        recorder.step(step(2, 2, 0.5))
        recorder.step(step(3, 3, 0.5))
    with Recorder(tmp_path, config, file) as recorder:
        recorder.step(step(4, 5, 0.5))
        evaluations.append(tmp_path, result("final", 5, step=4, suite="math", mean=1.0))
    lines = read_lines(tmp_path / "metrics.jsonl")
    found = [(row[EVALUATION], row["step"], row["version"], row["reward_mean"]) for row in lines if EVALUATION in row]
    assert found == [("", 0, 0, 0.5), ("math", 1, 1, 0.75), ("math", 4, 5, 1.0)]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("evaluation/math/reward_mean")] == [(1, 0.75), (5, 1.0)]
    assert [one.step for one in events.Scalars("evaluation/reward_mean")] == [0]


def test_evaluations_of_earlier_versions_of_this_program_are_read(tmp_path: Path) -> None:
    entry = msgspec.to_builtins(result("final", 3))
    for field in ("step", "suite", "versions"):
        del entry[field]
    (tmp_path / evaluations.FILE).write_bytes(msgspec.json.encode([entry]))
    assert read_evaluations(tmp_path / evaluations.FILE)[0].step == 0


def weights(folder: Path) -> dict[str, object]:
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["fsdp2", "megatron"])
def test_a_run_that_goes_on_is_evaluated_once_per_step_and_any_checkpoint_is_exported(
    backend: str, tmp_path: Path
) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    small = (
        *SMALL,
        "rollout.engine.kind=transformers",
        f"learner.backend.kind={backend}",
        "learner.backend.device=cpu",
    )
    slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, "learner.steps=2")
    assert not (run / evaluations.FILE).exists()
    exported = slipstream("export", str(run))
    assert f"the model is in {run}/model-step-2" in exported.stdout
    assert weights(run / "model-step-2") == weights(run / "model")
    again = slipstream("export", str(run), check=False)
    assert again.returncode == 2
    assert again.stderr == f"slipstream: {run}/model-step-2 exists; remove it, or name another folder with --out\n"
    # An evaluation that the run did not begin with is not of its warm start, and a finished run has one final evaluation.
    slipstream("resume", str(run), "evaluation.tasks=2", "learner.steps=4")
    assert labels(run) == ["step 2", "final"]
    answer = slipstream("eval", str(run), "--step", "2", "--json")
    assert msgspec.json.decode(answer.stdout, type=EvaluationResult).tasks == 2
    if backend != "fsdp2":
        return  # the rest is of no backend
    slipstream("resume", str(run))
    assert labels(run) == ["step 2", "final"]
    wrong = slipstream("eval", str(run), "--step", "3", check=False)
    assert wrong.returncode == 2
    assert f"--step: {run} has no checkpoint of step 3; it has 2, 4" in wrong.stderr
    resumed = slipstream("resume", str(run), "evaluation.tasks=0", "learner.steps=5")
    assert labels(run) == ["step 2", "step 4"]
    assert f"report: {run}/report.html\n" in resumed.stdout
    assert evaluations_in(run / "report.html") == ["step 2", "step 4"]


# Any answer scores something else, so that two policies hardly score the same.
REWARD = "def score(completion, row):\n    return sum(map(ord, completion)) % 1009 / 1009\n"

PLAYED = "SELECT DISTINCT g.request FROM groups g JOIN trajectories t ON t.group_id = g.id"
PERIODIC = (
    "env={kind: dataset, path: rows.jsonl, reward: 'my.py:score', evaluation: 0.5}",
    *(one for one in SMALL if not one.startswith("evaluation")),
    "rollout.engine.kind=transformers",
    "learner.backend.device=cpu",
    "learner.checkpoint_keep=1",
    "agent.max_tokens_per_turn=12",
    "learner.optimizer.lr=1e-3",
    "learner.steps=30",
    "evaluation.tasks=6",
    "evaluation.every=10",
    "evaluation.suites={greedy: {temperature: 0, keep_best: true}, short: {samples: 3, max_tokens_per_turn: 8}}",
)


@pytest.mark.full
def test_checkpoints_are_evaluated_once_each_while_training_goes_on_though_the_run_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a checkpoint scored while the run went on is what it scores when it is served alone: a greedy suite has one result."""
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}."}}\n' for n in range(12)))
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *PERIODIC)

    def recorded() -> bool:  # a result does not wait for the record of its episodes
        done = (run / FOLDER / "evaluations.json").exists()
        return done and bool(sql(run / DATABASE, f"{PLAYED} WHERE g.request = 'step 10, greedy'"))

    with Background(*arguments) as going:
        going.until(recorded, "a result of the first checkpoint, and its episodes")
        during = metrics(run)
        going.process.kill()
        going.process.wait()
        assert leftovers(run) == []
    assert during[-1]["step"] > 10  # the learner did not wait
    shutil.rmtree(run / "model", ignore_errors=True)  # of a learner that was through its steps before the kill
    unfinished = slipstream("eval", str(run), "--json", "evaluation.suites={greedy: {temperature: 0}}")
    assert msgspec.json.decode(unfinished.stdout, type=EvaluationResult).tasks == 6
    slipstream("resume", str(run))
    assert leftovers(run) == []
    found = read_evaluations(run / evaluations.FILE)
    wanted = [(step, suite) for step in (0, 10, 20, 30) for suite in ("greedy", "short")]
    assert [(one.step, one.suite) for one in found] == wanted
    assert [one.label for one in found[::2]] == ["warm start", "step 10", "step 20", "final"]
    version_of = {row["step"]: row["version"] for row in metrics(run)}
    assert all(one.version == version_of[one.step] for one in found if one.step)
    assert all(one.versions == () for one in found)
    # Those of a checkpoint's own server, of the evaluation that was killed if it had an episode by then, and of the first and the
    # last one.
    played = sql(run / DATABASE, PLAYED)
    assert {str(row[0]).removesuffix(" (interrupted)") for row in played} == {
        f"{one.label}, {one.suite}" for one in found
    }
    assert [one.samples for one in found] == [1, 3] * 4
    assert set(found[1].pass_at) == {"1", "2", "3"}
    lines = [row for row in read_lines(run / "metrics.jsonl") if EVALUATION in row]
    assert sorted((row["step"], row[EVALUATION], row["version"]) for row in lines) == [
        (one.step, one.suite, one.version) for one in found
    ]
    assert len({one.reward_mean for one in found if one.suite == "greedy"}) > 2
    best = max(
        (one for one in found if one.suite == "greedy" and one.step), key=lambda one: (one.reward_mean, one.step)
    )
    kept = {read_state(path).step for path in checkpoints(run / "checkpoints")}
    assert kept == {best.step, 30}
    assert not (run / FOLDER).exists()
    again = slipstream("eval", str(run), "--step", "best", "--json", "evaluation.suites={greedy: {temperature: 0}}")
    assert msgspec.json.decode(again.stdout, type=EvaluationResult).reward_mean == best.reward_mean
    assert f"{run}/model-step-{best.step}" in slipstream("export", str(run), "--step", "best").stdout
    assert {"warm start, greedy", "step 20, short", "final, greedy"} <= set(evaluations_in(run / "report.html"))
    check_accounts(run)


@pytest.mark.full
def test_an_evaluation_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a suite raises once the first step is done."""
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "import pathlib\n\ndef score(completion, row):\n"
        "    if pathlib.Path('run/metrics.jsonl').exists() and pathlib.Path('run/metrics.jsonl').stat().st_size:\n"
        "        raise OSError('the service is away')\n    return 1.0\n"
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    suite = "{env: {kind: dataset, path: rows.jsonl, evaluation: rows.jsonl, reward: 'my.py:score'}}"
    (tmp_path / "steady.py").write_text("def score(completion, row):\n    return len(completion) % 2\n")  # of training
    steps = ("env.reward=steady.py:score", "learner.steps=3", "evaluation.every=2")
    small = (*PERIODIC[:-2], f"evaluation.suites={{away: {suite}}}", *steps)
    done = slipstream("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *small, check=False)
    assert "the evaluation of step 2 is given up, the run goes on: " in done.stdout
    assert "my.py:score raised OSError: the service is away (my.py:5 in score)" in done.stdout
    assert "evaluator ended with exit status 1: " not in done.stdout  # it is not begun again in the same way
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    assert (run / "model").is_dir()
