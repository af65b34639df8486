"""Whole runs on environments of other libraries, in which one task is broken: they train, the ledger balances, no failure is a
reward, and a resumed run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from slipstream.configs.environments import Harbor, NemoGym, OpenEnv
from slipstream.envs import Message, TaskSource, ToolCall, task_source
from slipstream.tests.runs import SMALL, check_accounts, leftovers, metrics, query, slipstream, tiny_policy
from slipstream.tests.servers import needs, python_of, served

TESTS = Path(__file__).parent
ROOM = ("agent.max_tokens_per_turn=64", "agent.max_tokens=1024", "rollout.engine.memory=64MiB")
SMALLER = ("rollout.engine.kind=transformers", "rollout.engine.max_concurrent=16")
EPISODES = (
    "SELECT trajectories.header, trajectories.reward, episodes.reason FROM trajectories "
    "JOIN episodes ON episodes.id = trajectories.episode_id"
)


class Played(NamedTuple):
    """An environment that is ready for a run."""

    env: dict[str, object]  # section of the config
    broken: frozenset[str]  # ids of tasks of which every episode fails
    options: tuple[str, ...] = ()  # of the run
    conversations: Sequence[dict[str, Any]] = ()  # what the policy learns before; a random one calls no tools


async def demonstrated(source: TaskSource, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """For each call a conversation that begins with it, as the environment answers, in OpenAI's chat format."""
    found = list[dict[str, Any]]()
    for call in calls:
        env = source.make()
        opening, said = await env.reset(source.task(0)), Message("assistant", "", (call,))
        result = await env.step(said)
        await env.close()
        rest = () if result.done else (*result.messages, Message("assistant", "Done."))
        messages = [msgspec.to_builtins(message) for message in (*opening.messages, said, *rest)]
        for message in messages:
            for made in message.get("tool_calls", ()):
                made["function"] = {"name": made.pop("name"), "arguments": made.pop("arguments")}
        found.append(
            {"messages": messages, "tools": [{"function": msgspec.to_builtins(tool)} for tool in opening.tools]}
        )
    return found


@contextlib.contextmanager
def harbor(folder: Path) -> Iterator[Played]:
    """42 in a file is right; the solution of one task does not pass its tests."""
    files = {
        "instruction.md": "Write 42 to answer.txt",
        "tests/test.sh": "grep -qx 42 /app/answer.txt; echo $((1 - $?)) > /logs/verifier/reward.txt",
        "solution/solve.sh": "echo 42 > answer.txt",
    }
    config = Harbor(path=str(folder / "tasks"), evaluation=0.0, max_turns=3)
    for name in "abcde":
        for path, text in files.items():
            (folder / "tasks" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tasks" / name / path).write_text(text)
    source = task_source(config, "train", 0)
    broken = source.task(1)  # a run looks at task 0 before it starts
    (folder / "tasks" / broken.payload["task"] / "solution" / "solve.sh").write_text("echo 41 > answer.txt")
    calls = [ToolCall("shell", {"command": f"echo {number} > answer.txt"}) for number in (42, 41)]
    conversations = asyncio.run(demonstrated(source, calls))
    yield Played(msgspec.to_builtins(config), frozenset((broken.id,)), conversations=conversations)


@contextlib.contextmanager
def openenv(folder: Path) -> Iterator[Played]:
    """A number from 1 to 9 is guessed, once; the environment raises where it is that of task 1."""
    config = OpenEnv(url="http://127.0.0.1:1", max_turns=1, tasks=5)
    source = task_source(config, "train", 0)
    tasks = [source.task(index) for index in range(5)]
    numbers = [random.Random(task.payload["seed"]).randint(1, 9) for task in tasks]
    assert numbers[0] != numbers[1]
    assert numbers[2] == numbers[4] not in numbers[:2]
    broken = frozenset(task.id for task, number in zip(tasks, numbers, strict=True) if number == numbers[1])
    with served(python_of("openenv"), "openenv_server.py", str(numbers[1])) as (url, _):
        config = msgspec.structs.replace(config, url=url)
        calls = [
            ToolCall("act", {"number": numbers[index]}) for index in (0, 2, 4, 4)
        ]  # right in three tasks of the four
        conversations = asyncio.run(demonstrated(task_source(config, "train", 0), calls))
        yield Played(msgspec.to_builtins(config), broken, conversations=conversations)


@contextlib.contextmanager
def nemo_gym(folder: Path) -> Iterator[Played]:
    """Numbers are handed in by a tool of one of the library's own servers; it cannot verify row 3, which does not say which."""
    module = "example_multi_step"
    (data,) = python_of("nemo_gym").parent.parent.glob(
        f"lib/python3*/site-packages/resources_servers/{module}/data/example.jsonl"
    )
    row = json.loads(data.read_text().splitlines()[0])
    (tool,) = (tool for tool in row["responses_create_params"]["tools"] if tool["name"] == "extract_synonym_values")
    row["responses_create_params"] = {"input": [{"role": "user", "content": "Hand in 4 and 2."}], "tools": [tool]}
    row["expected_synonym_values"] = [4, 2]
    rows = [dict(row) for _ in range(5)]
    del rows[3]["expected_synonym_values"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(python_of("nemo_gym"), "nemo_gym_server.py", module, "ExampleMultiStepResourcesServer") as (url, _):
        config = NemoGym(url=url, path=str(folder / "rows.jsonl"), evaluation=0.0, max_turns=3)
        calls = [ToolCall("extract_synonym_values", {"synonym_values": values}) for values in ([4, 2], [2, 4])]
        conversations = asyncio.run(demonstrated(task_source(config, "train", 0), calls))
        yield Played(msgspec.to_builtins(config), frozenset(("nemo_gym-train-3",)), conversations=conversations)


@contextlib.contextmanager
def verifiers(folder: Path) -> Iterator[Played]:
    """Any text is an answer, and one of odd length is right, but to a task that is sure: a random policy earns something."""
    env = {"kind": "verifiers", "taskset": "parity_taskset", "python": str(python_of("verifiers")), "evaluation": 0.0}
    # Few episodes, and none ahead of the learner: the library starts a program for each, which takes more than a second of CPU. The
    # first epoch begins with tasks 2, 4 and 3.
    groups = ("buffer.groups_per_batch=1", "buffer.group_size=2")
    few = ("buffer.max_staleness=0", *groups, "rollout.failures.environment.retries=0")
    yield Played(env, frozenset(("parity_taskset-train-4",)), few)


@pytest.mark.full
@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(harbor, id="harbor"),
        pytest.param(nemo_gym, marks=needs("nemo_gym"), id="nemo_gym"),
        pytest.param(openenv, marks=needs("openenv"), id="openenv"),
        pytest.param(verifiers, marks=needs("verifiers"), id="verifiers"),
    ],
)
def test_a_run_on_the_environment_of_a_library_trains_and_resumes(
    begin: Callable[[Path], contextlib.AbstractContextManager[Played]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TESTS / "tasksets")  # where a taskset is found
    with begin(tmp_path) as played:
        policy, run = taught(tiny_policy(tmp_path / "random"), played.conversations), tmp_path / "run"
        env = f"env={json.dumps(played.env)}"
        options = (f"model.path={policy}", f"run.dir={run}", *SMALL, *ROOM, *SMALLER, *played.options, env)
        slipstream("train", "quickstart", *options, "learner.steps=2")
        check_run(run, 2, played.broken)
        slipstream("resume", str(run), "learner.steps=3")
        # Not earlier: of 24 episodes, half of them right, all are alike in one run of 8 million, of 16 in one of 30,000. Where
        # there are fewer, the tasks of the first epoch see to it.
        assert check_run(run, 3, played.broken) == {0.0, 1.0}


def taught(policy: Path, conversations: Sequence[dict[str, Any]]) -> Path:
    """The policy, fine-tuned to say one of these at random."""
    if not conversations:
        return policy
    messages, tuned = policy.with_name("conversations.jsonl"), policy.with_name("tuned")
    messages.write_text("".join(json.dumps(line) + "\n" for line in conversations) * 64)
    options = (f"model.path={policy}", f"sft.out={tuned}", f"sft.messages={messages}", "sft.epochs=1", "sft.held_out=0")
    slipstream("sft", "quickstart", *options, *ROOM)
    return tuned


def check_run(run: Path, steps: int, broken: frozenset[str]) -> set[float]:
    """It has so many steps, and no reward is of a failure; the rewards."""
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["mismatch_max"] or 0 for row in rows) < 1e-4
    check_accounts(run)
    assert leftovers(run) == []
    found = query(run, EPISODES)
    assert [reason for _, _, reason in found if reason.startswith("failed")] == []
    tasks = {msgspec.msgpack.decode(header[1:])["task_id"] for header, _, _ in found}
    assert len(tasks) > 1
    assert not tasks & broken
    ((failed,),) = query(run, "SELECT count(*) FROM episodes WHERE reason = 'failed_environment'")
    assert failed > 0
    return {reward for _, reward, _ in found}
