"""Alerts of a real run: a server that lies, rewards whose sign is flipped and a learning rate 100 times too high are each seen
within ten steps."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from slipstream.monitor.alerts import ALERTS, Alert, read_alerts
from slipstream.rollout.engines.fake.faults import VARIABLE, Fault
from slipstream.tests.runs import ENDLESS, Background, check_accounts, leftovers, metrics, slipstream
from slipstream.tests.signed_rewards import SignedRewards

WITHIN = 10  # steps
LIES = Fault(at="token", do="lie", nats=-0.5, times=500)  # tokens of the first steps
LR = 3e-4
SETTINGS = (
    "agent.kind=single_turn",
    "agent.max_tokens_per_turn=12",
    "rollout.engine.kind=fake",
    "rollout.engine.max_concurrent=16",
    "buffer.groups_per_batch=2",
    "buffer.group_size=4",
    "buffer.max_staleness=0",
    f"learner.optimizer.lr={LR}",
    "learner.checkpoint_every=1000",
    ENDLESS,
    "evaluation.tasks=0",
)


@pytest.mark.full
def test_what_is_planted_is_an_alert_within_ten_steps(
    wide_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flipped = tmp_path / "run", tmp_path / "flipped"
    monkeypatch.setenv(VARIABLE, msgspec.json.encode([LIES]).decode())
    factory = f"{SignedRewards.__module__}:{SignedRewards.__name__}"
    env = {"kind": "python", "factory": factory, "arguments": {"flipped": str(flipped)}}
    on_alert = f"run.on_alert={json.dumps(['sh', '-c', 'cat >> $0', str(tmp_path / 'told')])}"
    words = (
        "train",
        "quickstart",
        f"env={json.dumps(env)}",
        f"model.path={wide_policy}",
        f"run.dir={run}",
        on_alert,
        *SETTINGS,
    )

    def fired(*rules: str, since: int = 0) -> Alert | None:
        alerts = read_alerts(run / ALERTS)
        return next((one for one in alerts if one.rule in rules and one.active and one.step >= since), None)

    def critical() -> list[tuple[str, bool]]:
        return [(one.rule, one.active) for one in read_alerts(run / ALERTS) if one.severity == "critical"]

    with Background(*words) as going:

        def until_fired(*rules: str, since: int = 0) -> int:
            """The step of the first alert of one of `rules`."""
            going.until(lambda: fired(*rules, since=since) is not None, f"the alert {' or '.join(rules)}")
            alert = fired(*rules, since=since)
            assert alert is not None
            assert alert.severity == "critical"
            return alert.step

        assert 0 < until_fired("mismatch") <= WITHIN
        # Idle sides of a synchronous run are warnings.
        going.until(lambda: len(critical()) > 1, "the end of the lies")
        assert critical() == [("mismatch", True), ("mismatch", False)]
        flipped.touch()
        collapsed = until_fired("reward_collapse")
        planted = next(row["step"] for row in metrics(run) if row["reward_mean"] < 0.6)  # less than any reward before
        assert planted <= collapsed < planted + WITHIN
        changes = ("buffer.max_staleness=2", f"learner.optimizer.lr={100 * LR}")
        changed = json.loads(slipstream("set", str(run), *changes, "--json").stdout)
        # Some policies collapse in two steps, fewer than an explosion has to last; then ratios are 1 and the entropy is gone, which
        # is seen when the mean of five steps has been low for three.
        step = changed[0]["step"]
        assert until_fired("ratio_explosion", "entropy_collapse", since=step) - step < WITHIN + 5
        going.process.terminate()
        going.output()
    assert leftovers(run) == []
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert told == [{"run": str(run), **json.loads(line)} for line in (run / ALERTS).read_text().splitlines()]
    check_accounts(run)
