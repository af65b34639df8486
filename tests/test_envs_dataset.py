"""The user's own data: rows, columns, rewards of three forms, splits, epochs, and what is wrong with them, by file and line."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from slipstream.configs import load
from slipstream.configs.environments import Dataset, Mixture, ReasoningGym
from slipstream.envs import Message, Observation, ToolCall, parts_of, task_source
from slipstream.envs.dataset.source import TEMPLATE_TOKENS
from slipstream.errors import ConfigError, EnvError

REWARDS = """
import asyncio
import numpy as np

def score(completion, row):
    return float(completion.strip() == row["answer"])

async def later(completion):
    await asyncio.sleep(0)
    return {"reward": np.float32(0.5), "length": len(completion), "note": "text"}

def endless(completion): return {"reward": 1, "mean": float("nan")}
def array(completions): return np.array([0.25])
def text_of_trl(completions, **columns): return [float(c.startswith("<think>") and c.endswith("</tool_call>")) for c in completions]
def text_of_verl(solution_str, ground_truth, extra_info):
    return {"reward": 0.25, "score": float(solution_str.startswith("<think>")), "index": extra_info.get("index", -1)}

def trl(prompts, completions, answer, **columns):
    assert columns["level"] == ["easy"]
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text == a) for text, a in zip(texts, answer)]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str, "from": len(data_source)}

def text(completion, row): return "1.0"
def nan(completion, row): return float("nan")
def nothing(completion, row): pass
def unnamed(completion, row): return {"accuracy": 1.0}
def several(completion, row): return np.array([1.0, 2.0])
def raises(completion, row):
    return row["no such column"]
def needs_ids(prompts, completions, completion_ids): return [0.0]
def other(text): return 0.0
"""

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "level": "easy", "id": f"sum-{i}"} for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(REWARDS)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(name: str, rows: list) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def dataset(path: str = "rows.jsonl", reward: str = "my.py:score", **options) -> Dataset:
    return Dataset(path=path, reward=reward, **options)


async def answered(config: Dataset, answer: str | Message, index: int = 0):
    source = task_source(config, "train", 0)
    env, task = source.make(), source.task(index)
    observation = await env.reset(task)
    result = await env.step(answer if isinstance(answer, Message) else Message("assistant", answer))
    await env.close()
    assert result.done
    return observation, result


async def test_a_row_is_a_task_and_the_function_scores_the_answer(folder: Path) -> None:
    source = task_source(dataset(system="Be brief."), "train", 0)
    task = source.task(5)
    number = int(task.payload["row"]["id"].removeprefix("sum-"))
    assert (task.id, task.payload["reference"]) == (f"rows-train-sum-{number}", str(2 * number))
    env = source.make()
    observation = await env.reset(task)
    assert observation == Observation(
        (Message("system", "Be brief."), Message("user", f"What is {number} + {number}?"))
    )
    assert (await env.step(Message("assistant", f" {2 * number}\n"))).reward == 1.0
    assert (await env.step(Message("assistant", "no"))).reward == 0.0


async def test_every_row_comes_once_per_epoch_in_an_order_of_its_own(folder: Path) -> None:
    source = task_source(dataset(evaluation=0.1), "train", 3)
    assert len(source) == 36
    epochs = [[source.task(36 * epoch + i).id for i in range(36)] for epoch in range(3)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    assert max(Counter(epochs[0]).values()) == 1
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = task_source(dataset(evaluation=0.1), "train", 3)
    assert [again.task(i).id for i in reversed(range(108))][::-1] == [task for epoch in epochs for task in epoch]
    assert [task_source(dataset(evaluation=0.1), "train", 4).task(i).id for i in range(36)] != epochs[0]


async def test_what_is_held_out_is_not_trained_on_and_the_same_for_every_seed(folder: Path) -> None:
    def ids(split, seed, **options):
        source = task_source(dataset(**options), split, seed)
        return {source.task(i).payload["row"]["id"] for i in range(len(source))}

    assert len(ids("eval", 0)) == 2
    for share in (0.001, 0.05, 0.5):
        held_out = ids("eval", 0, evaluation=share)
        assert held_out == ids("eval", 7, evaluation=share)
        assert len(held_out) == max(1, round(40 * share))
        assert not held_out & ids("train", 0, evaluation=share)
        assert len(held_out | ids("train", 7, evaluation=share)) == 40
    assert len(ids("train", 0, evaluation=0.0)) == 40
    write("test.jsonl", [{"question": "2 + 2?", "answer": "4", "id": "other"}])
    assert ids("eval", 0, evaluation="test.jsonl") == {"other"}
    assert len(ids("train", 0, evaluation="test.jsonl")) == 40
    with pytest.raises(ConfigError, match=r"env.evaluation: 0 of the 40 rows of rows.jsonl leaves none for evaluation"):
        ids("eval", 0, evaluation=0.0)


async def test_trl_and_verl_functions_are_called_their_way(folder: Path) -> None:
    source = task_source(dataset(), "train", 0)
    right = source.task(0).payload["reference"]
    for answer, reward in ((right, 1.0), ("no", 0.0)):
        assert (await answered(dataset(reward="my.py:trl"), answer))[1].reward == reward
    chat = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "2 + 2?"}]
    write("chat.jsonl", [{"prompt": chat, "answer": "4", "level": "easy"}] * 3)
    observation, result = await answered(dataset("chat.jsonl", "my.py:trl"), "4")
    assert [m.role for m in observation.messages] == ["system", "user"]
    assert result.reward == 1.0
    theirs = {"data_source": "gsm8k", "prompt": chat, "reward_model": {"style": "rule", "ground_truth": "4"}}
    write("verl.jsonl", [{**theirs, "extra_info": {"index": i}} for i in range(3)])
    _, result = await answered(dataset("verl.jsonl", "my.py:verl"), "4")
    assert (result.reward, result.metrics) == (1.0, {"acc": 1.0, "from": 5.0})
    assert (await answered(dataset(reward="my.py:array"), "4"))[1].reward == 0.25


async def test_trl_and_verl_functions_read_all_that_the_policy_wrote_and_ours_its_answer(folder: Path) -> None:
    call = '<think>Let us see.</think>4 <tool_call>{"name": "t"}</tool_call>'
    answer = Message("assistant", "4", (ToolCall("t", {}),), written=call)
    for reward, metrics in (("text_of_trl", {}), ("text_of_verl", {"reward": 0.25, "index": -1.0})):
        _, result = await answered(dataset(reward=f"my.py:{reward}"), answer)
        assert (result.reward, result.metrics) == (1.0, metrics)
    _, result = await answered(dataset(reward="my.py:later"), answer)
    assert result.metrics["length"] == 1


@pytest.mark.parametrize(
    ("reward", "reference", "right", "wrong"),
    [
        ("exact", ["Paris", "City of Paris"], "<answer>paris.</answer>", "Paris or Rome"),
        ("f1", "the red car", "red car", "bus"),
        ("choice", "B", "The answer is (B).", "The answer is (C)."),
        ("gsm8k", "1 + 2 = 3\n#### 3", "So #### 3", "So #### 4"),
        ("math", "1/2", "\\boxed{0.5}", "\\boxed{2}"),
    ],
)
async def test_a_verifier_is_named(folder: Path, reward: str, reference, right: str, wrong: str) -> None:
    write("rows.jsonl", [{"question": "?", "answer": reference}] * 3)
    assert (await answered(dataset(reward=reward), right))[1].reward == 1.0
    assert (await answered(dataset(reward=reward), wrong))[1].reward < 1.0


@pytest.mark.parametrize(("reward", "bad"), [("choice", "none"), ("gsm8k", "x"), ("code", {"inputs": [1]})])
def test_a_reference_that_a_verifier_cannot_read_is_named_by_file_and_line(folder: Path, reward: str, bad) -> None:
    good = {"inputs": ["1"], "outputs": ["1"]} if reward == "code" else "B" if reward == "choice" else "3"
    write("rows.jsonl", [{"question": "?", "answer": answer} for answer in (good, good, bad, good)])
    source = task_source(dataset(reward=reward, evaluation=0.0), "train", 0)
    with pytest.raises(ConfigError, match=r"env.path: rows.jsonl, line 3: the (reference|verifier)"):
        source.check()


async def test_a_coroutine_function_and_metrics(folder: Path) -> None:
    _, result = await answered(dataset(reward="my.py:later"), "four")
    assert (result.reward, result.metrics) == (0.5, {"length": 4.0})


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        ("text", "my.py:text: a reward of '1.0'; allowed are numbers"),
        ("nan", "my.py:nan: a reward of nan; allowed are numbers up to 1e\\+30"),
        ("nothing", "my.py:nothing: a reward of None"),
        ("endless", "my.py:endless: the metric 'mean' is nan; allowed are finite numbers"),
        ("unnamed", r"my.py:unnamed: it returned \{'accuracy': 1.0\} without reward or score"),
        ("several", r"my.py:several: a reward of array"),
        ("raises", r"my.py:raises raised KeyError: 'no such column' \(my.py:\d+ in raises\)"),
    ],
)
async def test_a_function_that_gives_no_reward_is_an_error_and_not_a_zero(folder: Path, function, complaint) -> None:
    with pytest.raises(EnvError, match=complaint):
        await answered(dataset(reward=f"my.py:{function}"), "4")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (dataset(reward="score"), "env.reward: 'score' is none of math, .*code, and not of the form file.py:function"),
        (dataset(reward="none.py:score"), "env.reward: there is no file none.py"),
        (dataset(reward="my.py:scores"), "env.reward: my.py has no function 'scores'; it has .*score"),
        (
            dataset(reward="broken.py:score"),
            r"env.reward: cannot import broken.py: SyntaxError: .*\(broken.py, line 1\)",
        ),
        (
            dataset(reward="raising.py:score"),
            r"cannot import raising.py: RuntimeError: no key \(raising.py:2 in <module>\)",
        ),
        (
            dataset(reward="my.py:other"),
            r"env.reward: my.py:other takes \(text\); allowed are \(completion, row\), TRL",
        ),
        (
            dataset(reward="my.py:needs_ids"),
            "my.py:needs_ids needs completion_ids, of which the first row has no column",
        ),
        (dataset("none.jsonl"), "env.path: there is no file none.jsonl"),
        (dataset("my.py"), "env.path: my.py is neither of .jsonl"),
        (dataset("empty.jsonl"), "env.path: empty.jsonl is empty"),
        (dataset("blank.jsonl"), "env.path: blank.jsonl has no rows"),
        (dataset("list.json"), "env.path: list.json holds one JSON list"),
        (dataset(evaluation="none.jsonl"), None),
        (dataset(prompt="problem"), "env.prompt: there is no column 'problem'; the first row has question, answer"),
        (dataset(answer="gold.value"), "env.answer: there is no column 'gold.value'"),
        (dataset(id="uid"), "env.id: there is no column 'uid'"),
        (
            dataset("bare.jsonl"),
            "env.prompt: no prompt column was found; name it, or call it prompt or messages or question",
        ),
        (dataset("bare.jsonl", "my.py:verl", prompt="text"), "env.answer: no answer column was found"),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_the_key(folder: Path, config, complaint) -> None:
    (folder / "broken.py").write_text("def score(:")
    (folder / "raising.py").write_text("\nraise RuntimeError('no key')")
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "list.json").write_text(json.dumps(ROWS, indent=2))
    write("bare.jsonl", [{"text": "2 + 2?"}] * 2)
    if complaint is None:  # what only evaluations read is found when they are set up
        task_source(config, "train", 0)
        with pytest.raises(ConfigError, match=r"env.evaluation: there is no file none.jsonl"):
            task_source(config, "eval", 0)
        return
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(config, "train", 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("isolate", [0, 1])
def test_a_later_row_without_a_column_of_the_reward_is_named_by_file_and_line(folder: Path, isolate: int) -> None:
    lacking = [{name: value for name, value in ROWS[0].items() if name != "answer"}]
    write("lacking.jsonl", ROWS[:7] + lacking + ROWS[8:])
    source = task_source(dataset("lacking.jsonl", "my.py:trl", evaluation=0.0, isolate=isolate), "train", 0)
    complaint = (
        r"lacking.jsonl, line 8: it has no 'answer', which the reward my.py:trl needs; it has question, level, id"
    )
    with pytest.raises(ConfigError, match=f"env.path: {complaint}"):
        source.check()
    with pytest.raises(EnvError, match=complaint):  # as `env check` meets it
        [source.task(index) for index in range(len(source))]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"question": "x", "answer": ', "no JSON object"),
        ('["x"]', "no JSON object"),
        ('{"question": "\xff"}', "no JSON object"),
        ('{"answer": "4"}', "it has no 'question'; it has answer"),
        ('{"question": null, "answer": "4"}', "it has no 'question'"),
        ('{"question": " ", "answer": "4"}', "its 'question' is empty"),
        ('{"question": 5, "answer": "4"}', "its 'question' is 5; allowed are text and a list of messages"),
        ('{"question": [], "answer": "4"}', "its 'question' is \\[\\]"),
        ('{"question": [{"role": "human", "content": "x"}], "answer": "4"}', "which is no message"),
        ('{"question": [{"role": "user", "content": ["x"]}], "answer": "4"}', "which is no message"),
        ('{"question": [{"role": "assistant", "content": "x"}], "answer": "4"}', "leaves nothing to answer"),
        ('{"question": "x"}', "it has no 'answer', which the reward compares with"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(folder: Path, line: str, complaint: str) -> None:
    rows = [json.dumps(row) for row in ROWS]
    text = "\n".join([*rows[:20], "", line, *rows[20:]])
    (folder / "rows.jsonl").write_bytes(text.encode("latin-1"))
    source = task_source(dataset(reward="my.py:verl", evaluation=0.0), "train", 0)
    with pytest.raises(ConfigError, match=rf"env.path: rows.jsonl, line 22: .*{complaint}"):
        source.check()
    bad = next(i for i in range(41) if source.row_number(i) == 20)
    with pytest.raises(EnvError, match=r"rows.jsonl, line 22: "):
        source.task(bad)


def test_line_ends_marks_and_blank_lines_are_no_rows(folder: Path) -> None:
    lines = [json.dumps(row) for row in ROWS[:3]]
    (folder / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    source = task_source(dataset(evaluation=0.0), "train", 0)
    source.check()
    assert len(source) == 3
    assert {source.task(i).payload["row"]["id"] for i in range(3)} == {"sum-0", "sum-1", "sum-2"}


def test_long_prompts_are_left_out_and_only_they_are_measured(folder: Path) -> None:
    write("rows.jsonl", [{"question": "x" * length, "answer": ""} for length in (5, 300, 800, 10, 600)])
    source, measured = task_source(dataset(evaluation=0.0), "train", 0), []

    def fits(observation: Observation) -> bool:
        measured.append(len(observation.messages[0].content))
        return measured[-1] < 500

    assert source.leave_out_long_prompts(fits, 500) == 2
    assert sorted(measured) == [600, 800]
    assert len(source) == 3
    assert {len(source.task(i).payload["row"]["question"]) for i in range(6)} == {5, 10, 300}
    with pytest.raises(ConfigError, match=r"agent.max_tokens: 4 leaves no room for an answer: every prompt of rows"):
        source.leave_out_long_prompts(lambda observation: False, 4)


def test_a_mixture_of_data_and_another_kind(folder: Path) -> None:
    mixed = Mixture(parts={"mine": dataset(share=3.0), "sums": ReasoningGym()})
    mine, sums = parts_of(mixed, "train", 0)
    assert (mine.name, mine.share, sums.name) == ("mine", 3.0, "sums")
    with pytest.raises(ConfigError, match=r"env.parts.mine.path: there is no file none.jsonl"):
        parts_of(Mixture(parts={"mine": dataset("none.jsonl")}), "train", 0)


def test_paths_of_data_are_expanded_and_shares_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/somewhere")
    base = ["env.kind=dataset", "env.path=$DATA/rows.jsonl", "env.reward=my.py:score"]
    env = load("quickstart", base).env
    assert env == Dataset(path="/somewhere/rows.jsonl", reward="my.py:score", evaluation=0.05)
    assert load("quickstart", [*base, "env.evaluation=~/test.jsonl"]).env.evaluation == str(Path.home() / "test.jsonl")
    assert load("quickstart", [*base, "env.evaluation=0.25"]).env.evaluation == 0.25
    for value in ("1", "1.5", "-0.1"):
        with pytest.raises(ConfigError, match=r"env.evaluation"):
            load("quickstart", [*base, f"env.evaluation={value}"])
    with pytest.raises(ConfigError, match=r"env.reward: must be set"):
        load("quickstart", base[:2])


@pytest.mark.full
def test_a_million_rows_give_their_first_task_within_two_seconds(folder: Path) -> None:
    row = '{"prompt": [{"role": "user", "content": "What is %d + %d? ' + "pad " * 60 + '"}], "answer": "%d"}\n'
    with (folder / "million.jsonl").open("w") as file:
        file.writelines(row % (i, i, 2 * i) for i in range(1_000_000))
    started = time.process_time()  # of this process alone: tests run beside others
    source = task_source(dataset("million.jsonl"), "train", 0)
    task = source.task(0)
    seconds = time.process_time() - started
    number = int(task.payload["row"]["answer"]) // 2
    assert task.id == f"million-train-{number}"
    assert len(source) == 950_000
    assert seconds < 2.0, f"{seconds:.2f} s"
    started = time.process_time()
    source.check()
    assert time.process_time() - started < 20.0
    assert (
        source.leave_out_long_prompts(lambda observation: False, 1000) == 0
    )  # no row has so much text: none is rendered


def test_parquet_rows_are_those_of_json_lines(folder: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), "rows.parquet")
    lines, table = (task_source(dataset(name), "train", 0) for name in ("rows.jsonl", "rows.parquet"))
    table.check()
    assert [lines.task(i) for i in range(38)] == [table.task(i) for i in range(38)]
    longest = len("What is 10 + 10?")
    long = sum(len(table.task(i).payload["row"]["question"]) == longest for i in range(38))
    assert table.leave_out_long_prompts(lambda observation: False, TEMPLATE_TOKENS + longest) == long
    (folder / "bad.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"env.path: bad.parquet cannot be read as Parquet"):
        task_source(dataset("bad.parquet"), "train", 0)


def test_a_folder_is_read_by_the_datasets_package(folder: Path) -> None:
    (folder / "local").mkdir()
    write("local/train.jsonl", ROWS)
    write("local/test.jsonl", ROWS[:3])
    source = task_source(dataset("local", evaluation="local@test"), "train", 0)
    held_out = task_source(dataset("local", evaluation="local@test"), "eval", 0)
    source.check()
    assert (source.name, len(source), len(held_out)) == ("local", 40, 3)
    assert source.task(0).payload["row"] in ROWS
    with pytest.raises(ConfigError, match=r"env.path: local@other is no file, and `datasets` cannot load it: .*other"):
        task_source(dataset("local@other"), "train", 0)


@pytest.mark.usefixtures("folder")
def test_without_its_package_a_hub_name_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=r"env.path: openai/gsm8k is no file, and a hub name: needs the package datasets; run `pip install -e .\[data\]`",
    ):
        task_source(dataset("openai/gsm8k"), "train", 0)
