"""Makes a log of Inspect of rows that `slipstream export` wrote.

    python inspect_log.py HEAD ROWS OUT      HEAD is JSON: name, model, active, created; ROWS a file of `TrajectoryRow`s as JSONL

A task of a group is a sample, its members are epochs, the reward is the score, and what else was recorded is metadata. It needs
Python's standard library and inspect-ai, and runs in an interpreter that has the library.
"""

# pyright: reportMissingImports=false
# The library is in the interpreter that runs this, not in ours.

from __future__ import annotations

import datetime
import json
import math
import sys
from typing import Any

METADATA = (
    "id", "group_id", "env", "outcome", "version_spans", "turns", "env_calls", "turn_rewards", "metrics", "timings",
    "account", "withheld", "reason", "leased_at", "trained_at", "step",
    "evaluation",
)  # fmt: skip
SCORER = "reward"


def moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def message_of(one: dict[str, Any], model: str) -> Any:
    """A message as Inspect has it; what has no role of its own was given by a user."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser

    match one["role"]:
        case "assistant" | "model":
            return ChatMessageAssistant(
                content=one["text"], model=model, source="generate" if one["turn"] is not None else None
            )
        case "system" | "developer" | "tools":  # the last is the list of tools
            return ChatMessageSystem(content=one["text"])
        case "tool" | "ipython" | "function":
            return ChatMessageTool(content=one["text"], function=one["name"] or None)
        case _:
            return ChatMessageUser(content=one["text"])


def sample_of(row: dict[str, Any], model: str) -> Any:
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import ModelOutput
    from inspect_ai.scorer import Score

    given = row["messages"] or []
    messages = [message_of(one, model) for one in given]
    turns = [at for at, one in enumerate(given) if one["turn"] is not None]
    last = messages[turns[-1]].text if turns else ""
    outcome, total = row["outcome"], row["timings"].get("total")
    failed = outcome["kind"] == "failed"
    detail = f"{outcome['reason']}: {outcome['detail']}"
    attempt = f" attempt {row['attempt']}" if row["attempt"] else ""
    branch = f" branch {row['branch']}" if row["branch"] else ""
    return EvalSample(
        id=f"{row['task_id']} [{row['group_id']}]{attempt}{branch}",
        epoch=row["member"] + 1,
        input=messages[: turns[0]] if turns and turns[0] else "",
        target="",
        messages=messages,
        output=ModelOutput.from_content(model, last),
        scores={} if failed else {SCORER: Score(value=row["reward"])},
        error=EvalError(message=detail, traceback=detail, traceback_ansi=detail) if failed else None,
        metadata={name: row[name] for name in METADATA},
        started_at=moment(row["started"]) if row["started"] else None,
        completed_at=moment(row["started"] + (total or 0.0)) if row["started"] else None,
        total_time=total,
        working_time=total,
    )


def log_of(head: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalScore,
        EvalSpec,
        EvalStats,
    )
    from inspect_ai.model import ModelUsage

    model = f"slipstream/{head['model']}"
    samples = [sample_of(row, model) for row in rows]
    rewards = [row["reward"] for row in rows if row["outcome"]["kind"] != "failed"]
    metrics = {"mean": EvalMetric(name="mean", value=math.fsum(rewards) / len(rewards))} if rewards else {}
    began = min((row["started"] for row in rows if row["started"]), default=head["created"])
    ended = max((row["started"] + row["timings"].get("total", 0.0) for row in rows if row["started"]), default=began)
    sampled = sum(span["end"] - span["start"] for row in rows for span in row["version_spans"])
    ids = list(dict.fromkeys(sample.id for sample in samples))
    return EvalLog(
        status="started" if head["active"] else "success",
        eval=EvalSpec(
            created=moment(head["created"]),
            task=f"{head['name']}, {', '.join(sorted({row['evaluation'] or 'training' for row in rows}))}",
            dataset=EvalDataset(name=", ".join(sorted({row["env"] for row in rows})), samples=len(ids), sample_ids=ids),
            model=model,
            config=EvalConfig(epochs=max(row["member"] for row in rows) + 1),
        ),
        stats=EvalStats(
            started_at=moment(began),
            completed_at=moment(ended),
            model_usage={model: ModelUsage(output_tokens=sampled, total_tokens=sampled)},
        ),
        results=EvalResults(
            total_samples=len(samples),
            completed_samples=len(rewards),
            scores=[EvalScore(name=SCORER, scorer="environment", metrics=metrics)],
        ),
        samples=samples,
    )


def main(head: str, source: str, out: str) -> None:
    from inspect_ai.log import write_eval_log

    with open(source, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    write_eval_log(log_of(json.loads(head), rows), out, format="eval")


if __name__ == "__main__":
    main(*sys.argv[1:])
