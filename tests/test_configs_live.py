"""The keys that may change while a run goes on: what is refused, and that the docs and the command list all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.configs import LIVE, changed, changed_live, load, presets
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main

DOCS = Path(__file__).parent.parent / "docs" / "operation.md"


@pytest.mark.parametrize("preset", presets())
def test_a_config_without_changes_is_the_same(preset: str) -> None:
    config = load(preset)
    assert changed(config, []) == config
    assert changed_live(config, [f"{live.key}={live.value(config)}" for live in LIVE.values()]) == (config, ())


def test_a_change_names_the_values_before_and_after() -> None:
    config, changes = changed_live(load("quickstart"), ["buffer.max_staleness=0", "learner.optimizer.lr=1e-5"])
    assert [(one.key, one.old, one.new) for one in changes] == [
        ("buffer.max_staleness", 2, 0),
        ("learner.optimizer.lr", 3e-4, 1e-5),
    ]
    assert config == load("quickstart", ["buffer.max_staleness=0", "learner.optimizer.lr=1e-5"])


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("buffer.max_stalenes=1", "did you mean buffer.max_staleness?"),
        ("buffer.max_staleness=-1", "buffer.max_staleness: -1 is not allowed; expected an integer >= 0"),
        ("buffer.max_staleness=x", "'x' is not allowed"),
        ("buffer.min_members=1", "allowed are 0, which waits for all, and 2 to"),
        ("rollout.max_episodes=3", "leaves no room for a group in each worker"),
        ("seed=1", "seed: cannot be changed while the run goes on; live keys are buffer.max_staleness, "),
        ("seed=x", "seed: 'x' is not allowed"),
        ("buffer.max_staleness", "is not of the form key.sub=value"),
        ("learner.checkpoint_every=3", "evaluation.every=10 is no multiple of learner.checkpoint_every=3"),
        ("buffer.max_staleness=1", "learner.algorithm.correction.kind=none"),
    ],
)
def test_what_a_config_may_not_be_a_run_may_not_become(override: str, why: str) -> None:
    base = [
        "buffer.max_staleness=0",
        "learner.algorithm.correction.kind=none",
        "learner.checkpoint_every=5",
        "evaluation.every=10",
    ]
    with pytest.raises(ConfigError) as refused:
        changed_live(load("quickstart", base), [override])
    assert why in str(refused.value)


def test_the_docs_and_the_command_list_every_live_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCS.read_text()
    rows = [f"| `{live.key}` | {live.applied_by} | {live.takes_effect} |" for live in LIVE.values()]
    assert [line for line in text.splitlines() if line in rows] == rows
    with pytest.raises(SystemExit):
        main(["set", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {live.key}\n      {live.takes_effect}\n" in shown for live in LIVE.values())
