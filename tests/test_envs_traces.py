"""Expert traces of a data set: which task each answers, and what is wrong with them, by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slipstream.configs.environments import Dataset, absolute_paths, map_files
from slipstream.envs import task_source
from slipstream.envs.dataset.source import DatasetSource
from slipstream.errors import ConfigError

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "id": f"sum-{i}"} for i in range(20)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(name: str, rows: list) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def source(**options) -> DatasetSource:
    options = {"evaluation": 0.0, "traces": "experts.jsonl"} | options
    found = task_source(Dataset(path="rows.jsonl", reward="exact", **options), "train", 0)
    assert isinstance(found, DatasetSource)
    return found


def answers(found: DatasetSource) -> dict[str, list[str]]:
    """The traces by the tasks that they answer."""
    by_task: dict[str, list[str]] = {}
    for one in found.traces():
        by_task.setdefault(found.task(one.index).id, []).append(one.trace.text)
    return by_task


def test_a_trace_answers_the_row_whose_prompt_it_repeats_and_a_task_may_have_several() -> None:
    message = [{"role": "assistant", "content": "It is 6."}]
    write(
        "experts.jsonl",
        [
            {"question": "What is 3 + 3?", "trace": "6"},
            {"question": "What is 5 + 5?", "completion": "ten", "answer": "no reference of ours"},
            {"question": [{"role": "user", "content": "What is 3 + 3?"}], "target": message},
        ],
    )
    expected = {"rows-train-sum-3": ["6", "It is 6."], "rows-train-sum-5": ["ten"]}
    assert answers(source()) == expected
    assert answers(source(system="Be brief.")) == expected
    assert [one.trace.place for one in source().traces()][-1] == "experts.jsonl, line 2"
    assert source(traces="").traces() == []


def test_traces_may_be_in_the_rows_themselves_and_those_of_rows_that_are_held_out_are_left_out() -> None:
    write("rows.jsonl", [row | {"target": row["answer"]} for row in ROWS])
    found = source(traces="rows.jsonl", evaluation=0.2)
    tasks = {found.task(index).id: found.task(index).payload["reference"] for index in range(len(found))}
    assert len(tasks) == 16
    assert answers(found) == {name: [reference] for name, reference in tasks.items()}
    # Tasks that are too long are no tasks of the run, and neither are their traces.
    found.leave_out_long_prompts(lambda opening: "3" not in opening.messages[0].content, 0)
    left = {name: [reference] for name, reference in tasks.items() if "3" not in name}
    assert len(left) < 16
    assert answers(found) == left


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"question": "What is 3 + 4?", "trace": "7"},
            "no row of rows.jsonl has its 'question'; a trace answers a row",
        ),
        ({"prompt": "What is 3 + 3?", "trace": "6"}, "it has no 'question'; it has prompt, trace"),
        (
            {"question": "What is 3 + 3?", "answer": "6"},
            "it has no answer; call its column trace or completion or target",
        ),
        (
            {"question": "What is 3 + 3?", "trace": " "},
            "its 'trace' is ' '; allowed are text, and a list of one message",
        ),
        ({"question": "What is 3 + 3?", "trace": 6}, "its 'trace' is 6; allowed are text"),
        (
            {"question": "What is 3 + 3?", "trace": [{"role": "user", "content": "6"}]},
            "its 'trace' is [{'role': 'user'",
        ),
        (
            {"question": "What is 3 + 3?", "trace": [{"role": "assistant", "content": "6"}] * 2},
            "and a list of one message",
        ),
    ],
)
def test_a_trace_that_cannot_be_used_is_one_line_with_file_and_line(row: dict, complaint: str) -> None:
    write("experts.jsonl", [{"question": "What is 3 + 3?", "trace": "6"}, row])
    with pytest.raises(ConfigError) as caught:
        source().traces()
    assert str(caught.value).startswith("env.traces: experts.jsonl, line 2: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_holds_nothing_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.traces: there is no file experts.jsonl"):
        source().traces()
    Path("experts.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"env.traces: experts.jsonl is empty"):
        source().traces()


def test_the_file_comes_with_the_others_of_the_environment(folder: Path) -> None:
    write("experts.jsonl", ROWS[:1])
    config = absolute_paths(Dataset(path="rows.jsonl", reward="exact", traces="experts.jsonl"))
    assert isinstance(config, Dataset)
    assert config.traces == str((folder / "experts.jsonl").resolve())
    seen: list[str] = []
    map_files(config, lambda path: seen.append(path) or path)
    assert config.traces in seen
