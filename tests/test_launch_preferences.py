"""`slipstream sft sft.preferences=FILE`: a planted preference becomes a classifier, whose scores transformers computes alike, or by
`sft.loss.kind=dpo` a policy; rows that are no preference are named."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from slipstream.configs import SftConfig, load
from slipstream.launch.cli.main import main
from slipstream.launch.reward_check import check_reward_model
from slipstream.launch.run_inputs import RunInputs
from slipstream.launch.sft import RESULT_FILE, make_examples
from slipstream.learner.sft import SftResult
from slipstream.tests.test_launch_sft import HI, YES, written
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

WORDS = ("sum", "of", "the", "two", "numbers", "is", "and", "what")
COUNT, HELD_OUT = 160, 0.2


def answers(rng: random.Random) -> tuple[str, str]:
    """Two of the same words, in any order; the chosen one ends with a period, the rejected one begins with it."""
    one, other = (" ".join(rng.sample(WORDS, 4)) for _ in range(2))
    return f"{one} .", f". {other}"


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, lines = random.Random(0), []
    for index in range(COUNT):
        chosen, rejected = ({"role": "assistant", "content": text} for text in answers(rng))
        if index % 2:
            lines.append({"prompt": [HI], "chosen": [chosen], "rejected": [rejected]})
        else:
            lines.append({"chosen": [HI, chosen], "rejected": [HI, rejected], "source": "ours"})
    return written(tmp_path_factory.mktemp("data") / "preferences.jsonl", *lines)


def test_a_planted_preference_becomes_a_classifier_that_can_be_served(wide_policy, preferences, tmp_path, capsys):
    out = tmp_path / "classifier"
    keys = [
        *(f"model.path={wide_policy}", f"sft.out={out}", f"sft.preferences={preferences}", f"sft.held_out={HELD_OUT}"),
        *("sft.epochs=3", "sft.lr=1e-3"),
    ]
    assert main(["sft", "quickstart", *keys]) == 0
    result = msgspec.json.decode((out / RESULT_FILE).read_bytes(), type=SftResult)
    first, *_, last = result.held_out
    assert first.loss == pytest.approx(np.log(2))  # the head is of zeros
    assert (first.tokens, first.right) == (COUNT * HELD_OUT, 0.0)
    assert last.right is not None
    assert last.right > 0.95
    assert f"over {last.tokens} preferences, {last.right:.0%} of them right" in capsys.readouterr().out

    ids = [list(token_ids) for token_ids, _ in make_examples(load("quickstart", keys, SftConfig))[0]]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        scores = torch.tensor([model(torch.tensor([one])).logits.item() for one in ids], dtype=torch.float64)
    margins = scores[::2] - scores[1::2]
    held = np.random.default_rng(0).permutation(COUNT)[: last.tokens]
    loss = -torch.nn.functional.logsigmoid(margins[torch.from_numpy(held)]).mean()
    assert loss.item() == pytest.approx(last.loss, abs=1e-4)
    config = load("quickstart", [f"model.path={wide_policy}", "reward.kind=classifier", f"reward.path={out}"])
    assert check_reward_model(RunInputs(config)).startswith("classifier ")


def test_a_policy_is_trained_on_a_table_of_preferences_by_the_loss_that_is_reported(
    policy, preferences, tmp_path, capsys
):
    """The last loss on what was held out is that of the written model against the one before, in transformers."""
    rows, table, out = [], tmp_path / "preferences.parquet", tmp_path / "tuned"
    for line in preferences.read_text().splitlines()[:24]:
        row = msgspec.json.decode(line)
        chosen = [message | {"name": None} for message in row["chosen"]]  # as tables have what other rows have
        rows.append({"prompt": row.get("prompt"), "chosen": chosen, "rejected": row["rejected"]})
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    keys = [
        *(f"model.path={policy}", f"sft.out={out}", f"sft.preferences={table}", "sft.held_out=0.25"),
        *("sft.epochs=1", "sft.lr=1e-3", "sft.tokens_per_step=128", "sft.loss={kind: dpo, eta: 5}"),
    ]
    assert main(["sft", "quickstart", *keys]) == 0
    assert "nats per preference" in (printed := capsys.readouterr().out)
    assert f"the model is in {out}" in printed
    result = msgspec.json.decode((out / RESULT_FILE).read_bytes(), type=SftResult)
    first, last = result.held_out
    assert first.loss == pytest.approx(np.log(2), abs=1e-5)
    assert abs(last.loss - first.loss) > 1e-3

    examples, _ = make_examples(load("quickstart", keys, SftConfig))
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (out, policy)]
    gains = []
    for ids, mask in examples:
        tokens, trained = torch.tensor(ids), torch.tensor(mask)[1:]
        with torch.no_grad():
            logps = [model(tokens[None]).logits[0, :-1].log_softmax(-1) for model in models]
        now, before = (logp[range(len(ids) - 1), tokens[1:]][trained].double().sum() for logp in logps)
        gains.append(now - before)
    margins = torch.stack(gains[::2]) - torch.stack(gains[1::2])
    held = torch.from_numpy(np.random.default_rng(0).permutation(len(margins))[: last.tokens])
    loss = -torch.nn.functional.logsigmoid(margins[held] / 5).mean()
    assert loss.item() == pytest.approx(last.loss, abs=1e-4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": [HI], "chosen": [YES]}, "`rejected`"),
        ({"prompt": [HI], "chosen": [YES], "rejected": [YES]}, "chosen and rejected are the same"),
        ({"prompt": [HI], "chosen": [YES], "rejected": [HI]}, "prompt and rejected: no message is the assistant's"),
        ({"chosen": [YES], "rejected": [HI, YES]}, "prompt and chosen: messages[0] is the assistant's"),
        ({"messages": [HI, YES]}, "`chosen`"),
    ],
)
def test_a_line_that_is_no_preference_is_refused_by_its_number(policy, tmp_path, line, expected, capsys):
    good = {"prompt": [HI], "chosen": [YES], "rejected": [{"role": "assistant", "content": "no"}]}
    file = written(tmp_path / "preferences.jsonl", good, line)
    keys = [f"model.path={policy}", f"sft.out={tmp_path / 'out'}", f"sft.preferences={file}"]
    assert main(["sft", "quickstart", *keys]) == 2
    error = capsys.readouterr().err
    assert f"sft.preferences: {file}, line 2: " in error
    assert expected in error
    assert not (tmp_path / "out").exists()


def test_messages_and_preferences_are_not_learned_from_at_once(policy, preferences, tmp_path, capsys):
    conversations = written(tmp_path / "conversations.jsonl", {"messages": [HI, YES]})
    keys = [f"model.path={policy}", f"sft.out={tmp_path / 'out'}", f"sft.preferences={preferences}"]
    assert main(["sft", "quickstart", *keys, f"sft.messages={conversations}"]) == 2
    assert "sft.messages and sft.preferences: a model learns from one of them" in capsys.readouterr().err


def test_an_empty_file_is_refused(policy, tmp_path, capsys):
    file = written(tmp_path / "empty.jsonl")
    assert (
        main(["sft", "quickstart", f"model.path={policy}", f"sft.out={tmp_path / 'o'}", f"sft.preferences={file}"]) == 2
    )
    assert f"sft.preferences: {file} is empty" in capsys.readouterr().err
