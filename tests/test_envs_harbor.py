"""Tasks in Harbor's format in real sandboxes: what the policy leaves is scored, what it does to its tests earns nothing, and tests
that do not work here are a failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from slipstream.configs import load
from slipstream.configs.environments import Harbor, absolute_paths
from slipstream.envs import Message, StepResult, TaskFile, ToolCall, task_source
from slipstream.envs.adapters.harbor.dockerfile import CopyStep, RunStep, read_dockerfile
from slipstream.envs.adapters.harbor.env import HarborEnv
from slipstream.envs.check import CHECKS, run_check, subject_of
from slipstream.envs.sandbox import LocalPool
from slipstream.errors import ConfigError, EnvError, ToolError
from slipstream.launch.row_counts import check_row_counts, record_counts, recorded_counts
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.samplers import make_samplers

TEST = """#!/bin/bash
if [ "$(cat /app/answer.txt 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
ANSWER = {
    "instruction.md": "Write 42 to /app/answer.txt\n",
    "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 30.0\n',
    "tests/test.sh": TEST,
    "solution/solve.sh": "echo 42 > answer.txt\n",
}
SUM = {
    "instruction.md": "Make total.py print the sum of numbers.txt.",
    "task.toml": '[environment.env]\nUNIT = "cent"\n[verifier.env]\nEXPECTED = "6"\n',
    "environment/Dockerfile": """FROM python:3.11-slim
# what it works on
WORKDIR /srv/sum
ENV GREETING="hello there" \\
    # and
    OTHER=1
COPY numbers.txt total.py ./
COPY extra /root/extra
RUN echo "$GREETING" > greeting.txt && \\
    mkdir -p made/deep && touch made/deep/file
CMD ["sleep", "infinity"]
""",
    "environment/numbers.txt": "1 2 3",
    "environment/total.py": "print(0)",
    "environment/extra/note": "n",
    "tests/test.sh": "python3 /tests/check.py\n",
    "tests/check.py": """import json, os, subprocess, sys
said = subprocess.run([sys.executable, "total.py"], capture_output=True, text=True, timeout=20).stdout.strip()
whole = os.path.exists("/srv/sum/made/deep/file") and os.path.exists("/root/extra/note")
json.dump({"reward": 0.75 if said == os.environ["EXPECTED"] and whole else 0, "characters": len(said)},
          open("/logs/verifier/reward.json", "w"))
""",
    "solution/solve.sh": "echo 'print(sum(map(int, open(\"numbers.txt\").read().split())))' > total.py",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def harbor(folder: Path, **options) -> Harbor:
    return Harbor(path=str(folder), **{"evaluation": 0.0, "command_s": 5.0, "verifier_s": 10.0, **options})


def shell(*commands: str) -> Message:
    return Message("assistant", "", tuple(ToolCall("shell", {"command": c}, f"c{i}") for i, c in enumerate(commands)))


DONE = Message("assistant", "I am done.")


async def opened(config: Harbor) -> HarborEnv:
    source = task_source(config, "train", 0)
    assert isinstance(source, HarborEnv)
    env = source.make()
    await env.reset(source.task(0))
    return env


async def played(env: HarborEnv, *messages: Message) -> StepResult:
    try:
        for message in messages:
            result = await env.step(message)
        return result
    finally:
        await env.close()


async def test_the_policy_works_in_the_folder_of_the_task_and_its_files_are_scored(tmp_path: Path) -> None:
    source = task_source(harbor(write(tmp_path / "sum", SUM)), "train", 0)
    assert isinstance(source, HarborEnv)
    env, task = source.make(), source.task(0)
    opening = await env.reset(task)
    assert (task.id, opening.messages) == ("sum-train-sum", (Message("user", SUM["instruction.md"]),))
    assert [tool.name for tool in opening.tools] == ["shell"]
    assert {file.path: file.content for file in opening.files} == {
        "numbers.txt": b"1 2 3",
        "total.py": b"print(0)",
        "greeting.txt": b"hello there\n",
        "made/deep/file": b"",
    }
    looked = await env.step(
        shell("pwd; cat greeting.txt; echo $UNIT; ls /tests /solution ~/extra", "cd made; export A=5")
    )
    assert not looked.done
    text = looked.messages[0].content
    assert text.startswith("/srv/sum\nhello there\ncent\n")
    assert text.endswith("/root/extra:\nnote\n\n/solution:\n\n/tests:") or "note" in text
    assert "check.py" not in text
    assert (await env.step(shell("pwd; echo $A"))).messages[0].content == "/srv/sum/made\n5"
    solved = await played(env, shell(f"cd ..; {SUM['solution/solve.sh']}"), DONE)
    assert (solved.reward, solved.done, solved.truncated) == (0.75, True, False)
    assert solved.metrics == {"tests_characters": 1.0, "turns": 4.0, "tool_calls": 4.0, "invalid": 0.0}
    assert (await played(await opened(harbor(tmp_path / "sum")), DONE)).reward == 0.0


CHEATS = {
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 0 /logs/verifier": 0.0,
    "mkdir -p /logs/verifier; (while true; do echo 1 > /logs/verifier/reward.txt; done) & true": 0.0,
    "mkdir -p /logs/verifier/reward.txt": 0.0,
    "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json": 0.0,
    "ln -s /app /logs/verifier; echo 1 > /app/reward.txt": 0.0,
    "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh": 0.0,
    "mkdir /tests/test.sh": 0.0,
    "rm -rf /logs /tests; rmdir /app": 0.0,
    "mkdir answer.txt": 0.0,
    "ln -s /dev/zero answer.txt": 0.0,
    "mkfifo answer.txt": 0.0,
    "echo 42 > answer.txt; chmod 0 /logs /tests": 1.0,
    "echo 42 > /root/../app/answer.txt; mkdir -p /logs/verifier; echo 0 > /logs/verifier/reward.txt": 1.0,
}


async def test_what_the_policy_does_to_its_tests_earns_nothing(tmp_path: Path) -> None:
    config = harbor(write(tmp_path / "answer", ANSWER))
    source = task_source(config, "train", 0)
    assert isinstance(source, HarborEnv)

    async def score(command: str) -> float:
        env = source.make()
        await env.reset(source.task(0))
        return (await played(env, shell(command), DONE)).reward

    assert dict(zip(CHEATS, await asyncio.gather(*map(score, CHEATS)), strict=True)) == CHEATS


async def test_packages_of_the_policys_user_are_not_imported_by_the_tests(tmp_path: Path) -> None:
    reward = 'open("/logs/verifier/reward.json", "w").write("{\\"reward\\": 1}"); import os; os._exit(0)'
    site = "site=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $site"
    hack = f"{site}; echo '{reward}' > $site/usercustomize.py"
    told = await opened(harbor(write(tmp_path / "sum", SUM)))
    assert (await played(told, shell(hack), DONE)).reward == 0.0


async def test_what_the_policy_does_wrong_is_told_and_a_lost_sandbox_begins_at_the_start(tmp_path: Path) -> None:
    slow = await opened(harbor(write(tmp_path / "sum", SUM), command_s=1.0))
    told = await slow.step(shell("sleep 60"))
    assert told.messages[0].content == "[stopped: it took longer than 1 s]"
    await slow.close()
    env = await opened(harbor(tmp_path / "sum", command_s=20.0, memory="256MiB", max_turns=20))
    for wrong, told in (
        (shell("exit 3"), "[exit status 3]"),
        (Message("assistant", "", (ToolCall("bash", {"command": "ls"}, "c0"),)), "there is no tool 'bash'; use shell"),
        (Message("assistant", "", (ToolCall("shell", {"x": 1}, "c0"),)), 'the tool shell takes {"command": "..."}'),
        (Message("assistant", "", malformed="no JSON"), "error: no JSON"),
        (shell("echo 9 > numbers.txt; kill -9 -1; cat numbers.txt"), "9"),
    ):
        result = await env.step(wrong)
        assert told in result.messages[0].content
        assert not result.done
    hungry = "python3 -c 'x = b\"x\" * (150 << 20); import time; time.sleep(60)'"
    lost = await env.step(shell(f"{hungry} & {hungry} & {hungry} & wait"))
    assert "[stopped: it used more than 256 MiB of memory]; files and variables are lost" in lost.messages[0].content
    again = await env.step(shell("pwd; cat numbers.txt greeting.txt"))
    assert again.messages[0].content == "/srv/sum\n1 2 3hello there"
    solved = await played(env, shell(SUM["solution/solve.sh"]), DONE)
    assert (solved.reward, solved.metrics["invalid"]) == (0.75, 3.0)


async def test_large_files_of_the_policy_are_taken_over_in_seconds(tmp_path: Path) -> None:
    env = await opened(harbor(write(tmp_path / "answer", ANSWER)))
    result = await played(env, shell("echo 42 > answer.txt; head -c 120000000 /dev/zero > data.bin"), DONE)
    assert result.reward == 1.0


async def test_a_policy_out_of_turns_is_scored_by_what_it_has_made(tmp_path: Path) -> None:
    env = await opened(harbor(write(tmp_path / "answer", ANSWER), max_turns=2))
    result = await played(env, shell("true"), shell("echo 42 > answer.txt"))
    assert (result.reward, result.done, result.truncated) == (1.0, True, True)
    assert len(result.messages) == 1


async def test_an_agent_with_a_folder_of_its_own_is_scored_by_its_files(tmp_path: Path) -> None:
    config = harbor(write(tmp_path / "answer", ANSWER))
    for content, reward in ((b"42\n", 1.0), (b"41\n", 0.0)):
        left = Message("assistant", "done", files=(TaskFile("answer.txt", content),))
        assert (await played(await opened(config), left)).reward == reward


async def test_an_agent_whose_folder_is_the_home_leaves_no_reward_of_its_own(tmp_path: Path) -> None:
    home = {"environment/Dockerfile": "FROM x\nWORKDIR /root\n", "tests/test.sh": TEST.replace("/app", "/root")}
    config = harbor(write(tmp_path / "home", ANSWER | home))
    cheats = ("logs/verifier/reward.json", "./logs/verifier/reward.json", "solution/../logs/verifier/reward.json")
    cheats += ("/logs/verifier/reward.json", "../root/logs/verifier/reward.json")
    for content, reward in ((b"41", 0.0), (b"42", 1.0)):
        earned = b'{"reward": %d}' % (1 - reward)
        files = TaskFile("answer.txt", content), *(TaskFile(path, earned) for path in cheats)
        left = Message("assistant", "done", files=files)
        assert (await played(await opened(config), left)).reward == reward


async def test_what_makes_the_tests_hang_earns_nothing(tmp_path: Path) -> None:
    env = await opened(harbor(write(tmp_path / "sum", SUM), verifier_s=3.0))
    assert (await played(env, shell("echo 'import time; time.sleep(60)' > total.py"), DONE)).reward == 0.0


BROKEN = {
    "its own solution earned 0; it printed: .*no-such-program": {
        **ANSWER,
        "tests/test.sh": "if no-such-program; then echo 1; else echo 0; fi > /logs/verifier/reward.txt",
    },
    "its own solution earned no reward from 0 to 1; they wrote no /logs/verifier/reward.txt; it printed: alas": {
        **ANSWER,
        "tests/test.sh": "echo alas",
    },
    "its own solution earned no reward from 0 to 1; it took longer than 2 s": {**ANSWER, "tests/test.sh": "sleep 60"},
    "its tests earned no reward": {
        **{name: text for name, text in ANSWER.items() if not name.startswith("solution")},
        "tests/test.sh": "echo 7 > /logs/verifier/reward.txt",
    },
    "Dockerfile: line 2: RUN failed in the sandbox; it printed: .*Read-only": {
        **ANSWER,
        "environment/Dockerfile": "FROM x\nRUN touch /etc/made\n",
    },
}


@pytest.mark.parametrize("complaint", BROKEN, ids=range(len(BROKEN)))
async def test_tests_that_do_not_work_here_are_a_failure(tmp_path: Path, complaint: str) -> None:
    verifier_s = 2.0 if "longer than 2 s" in complaint else 30.0
    source = task_source(harbor(write(tmp_path / "broken", BROKEN[complaint]), verifier_s=verifier_s), "train", 0)
    for _ in range(2):
        env = source.make()
        with pytest.raises(EnvError, match=complaint) as failed:
            await env.reset(source.task(0))
        assert "\n" not in str(failed.value)
        await env.close()


async def test_a_sandbox_that_is_ended_from_outside_is_a_failure(tmp_path: Path) -> None:
    env = await opened(harbor(write(tmp_path / "answer", ANSWER)))
    assert env._shell is not None
    assert env._shell.sandbox is not None
    os.kill(env._shell.sandbox.pid, signal.SIGKILL)
    with contextlib.suppress(ToolError):  # it may still answer while it is ending
        await env.step(shell("true"))
        await asyncio.sleep(1)
    with pytest.raises(ToolError, match="from outside"):
        await env.step(DONE)
    await env.close()


REFUSED = {
    r"env\.path: .*/none is no folder": None,
    r"env\.path: .* holds no task": {},
    r"tests/test\.sh is missing": {"instruction.md": "x"},
    r"instruction\.md is missing": {"task.toml": "", "tests/test.sh": ""},
    r"task\.toml: ": {**ANSWER, "task.toml": "[verifier"},
    r"verifier\.timeout_sec: 'long' is no number": {**ANSWER, "task.toml": '[verifier]\ntimeout_sec = "long"'},
    r"env\.KEY asks for a variable of the host": {**ANSWER, "task.toml": '[verifier.env]\nKEY = "${API_KEY}"'},
    r"tasks of several steps": {**ANSWER, "steps/a/instruction.md": "x"},
    r"docker-compose\.yaml: tasks of several containers": {**ANSWER, "environment/docker-compose.yaml": ""},
    r"Dockerfile: line 3: RUN .*no network.*skip_installs=true": {
        **ANSWER,
        "environment/Dockerfile": "FROM x\n\nRUN mkdir x && \\\n  apt-get install -y git\n",
    },
    r"line 2: FROM b: a build of several stages": {**ANSWER, "environment/Dockerfile": "FROM a AS x\nFROM b\n"},
    r"line 2: COPY --from=x a b: copies from another image": {
        **ANSWER,
        "environment/Dockerfile": "FROM a\nCOPY --from=x a b\n",
    },
    r"line 1: COPY none: there is no such file": {**ANSWER, "environment/Dockerfile": "COPY none .\n"},
    r"line 1: COPY \.\./tests: it is not below": {**ANSWER, "environment/Dockerfile": "COPY ../tests .\n"},
    r"/usr/lib/x cannot be written": {**ANSWER, "environment/Dockerfile": "WORKDIR /usr/lib/x\n"},
    r"line 1: ONBUILD RUN true: this instruction is not supported": {
        **ANSWER,
        "environment/Dockerfile": "ONBUILD RUN true\n",
    },
    r"line 1: the instruction does not end": {**ANSWER, "environment/Dockerfile": "RUN true \\\n"},
}


@pytest.mark.parametrize("complaint", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_played_as_it_is_meant_is_refused(tmp_path: Path, complaint: str) -> None:
    files = REFUSED[complaint]
    folder = tmp_path / "none" if files is None else write(tmp_path / "tasks" / "one", files)
    folder.mkdir(parents=True, exist_ok=files is not None) if files is not None else None
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(harbor(folder if files is None else folder.parent), "train", 0)
    assert "\n" not in str(refused.value)


def test_a_dockerfile_is_followed_line_by_line() -> None:
    recipe = read_dockerfile(
        'ARG BASE=/data\nFROM x\nENV A=1 B="two words"\nENV C three\nWORKDIR $BASE/a\nCOPY --chown=me:me ["x y", "z/"]\n'
        'WORKDIR ../b\nADD one two .\nCOPY file name\nRUN ["/bin/echo", "$A"]\nRUN --mount=type=cache,target=/c pip install x\n'
        "run cd /c; true\n",
        skip_installs=True,
    )
    environ = {"BASE": "/data", "A": "1", "B": "two words", "C": "three"}
    assert (recipe.workdir, recipe.environ) == ("/data/b", environ)
    assert recipe.steps == (
        CopyStep(6, ("x y",), "/data/a/z", True),
        CopyStep(8, ("one", "two"), "/data/b", True),
        CopyStep(9, ("file",), "/data/b/name", False),
        RunStep(10, ("/bin/echo", "$A"), "/data/b", environ),
        RunStep(12, ("/bin/sh", "-c", "cd /c; true"), "/data/b", environ),
    )


def test_tasks_are_held_out_and_come_once_per_epoch(tmp_path: Path) -> None:
    for name in "abcdefgh":
        write(tmp_path / name, ANSWER)
    train, held_out = (task_source(harbor(tmp_path, evaluation=0.25), split, 3) for split in ("train", "eval"))
    names = [train.task(i).payload["task"] for i in range(12)]
    assert sorted(names[:6]) == sorted(names[6:])
    assert set(names).isdisjoint(held := {held_out.task(i).payload["task"] for i in range(2)})
    assert set(names) | held == set("abcdefgh")
    others = task_source(harbor(tmp_path / "a", evaluation=str(tmp_path / "b")), "eval", 3)
    assert others.task(5).payload == {"task": "b"}


def test_a_resumed_run_has_as_many_tasks_as_it_began_with(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in "abcd":
        write(tmp_path / "tasks" / name, ANSWER)
    config = load("quickstart", [f"env={{kind: harbor, path: {tmp_path}/tasks, evaluation: 0.25, sampler: pools}}"])
    inputs = RunInputs(config)
    assert make_samplers(inputs)[1] == [3]
    check_row_counts(inputs)
    record_counts(run, inputs.counts)
    write(tmp_path / "tasks" / "e", ANSWER)
    with pytest.raises(
        ConfigError, match=r"env.path: .*/tasks has 4 tasks to train on, and the run began with 3: .*restore"
    ):
        check_row_counts(RunInputs(config, recorded_counts(run)))


@pytest.mark.parametrize("name", CHECKS)
def test_it_keeps_the_contract(tmp_path: Path, name: str) -> None:
    for folder, files in (("sum", SUM), ("answer", ANSWER)):
        write(tmp_path / folder, files)
    assert run_check(name, subject_of(harbor(tmp_path, max_turns=6, evaluation=0.5), 0))


def test_a_config_names_folders_and_limits_that_fit_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    config = load("quickstart", ["env={kind: harbor, path: tasks, packages: ~/site}"])
    env = absolute_paths(config.env)
    assert isinstance(env, Harbor)
    assert (env.path, env.packages, env.evaluation) == (str(tmp_path / "tasks"), str(Path.home() / "site"), 0.05)
    for option, complaint in (
        ("command_s: 60", r"env\.command_s=60: a call of a tool may take 60 s"),
        ("verifier_s: 61", r"env\.verifier_s=61: .* up to 60"),
        ("memory: 1G", r"env\.memory: '1G' is not a size"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load("quickstart", [f"env={{kind: harbor, path: tasks, {option}}}"])


def test_a_sandbox_without_links_refuses_them() -> None:
    try:
        LocalPool(kind="landlock")
    except ConfigError as none:
        pytest.skip(str(none))
    with pytest.raises(ConfigError, match="landlock cannot show a folder under another name, as /app; use bubblewrap"):
        LocalPool(kind="landlock", links={"/app": "app"})
