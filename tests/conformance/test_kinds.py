"""The table of offers is the one that the manual prints, and leaves out no kind; what a kind may be off by is what a run allows."""

from pathlib import Path

import pytest
from slipstream.configs.fields import root, variants
from slipstream.rollout.engines.registry import GPU_NOISE, canary_tolerance
from slipstream.rollout.engines.vllm import launch as vllm_server
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import KINDS, table
from slipstream.tests.conformance.replica import Weights
from slipstream.tests.conformance.servers import configure

MANUAL = (Path(__file__).parents[2] / "docs" / "rollout.md").read_text()


def test_the_manual_prints_what_the_suite_tests() -> None:
    assert table() in MANUAL, "docs/rollout.md: replace its table by what `kinds.table()` returns"


def test_every_kind_of_engine_is_in_the_suite_and_in_the_manual() -> None:
    rollout = next(f.type for f in root().fields if f.name == "rollout")
    engine = next(f.type for f in variants(rollout)[0].fields if f.name == "engine")
    kinds = {str(section.tag) for section in variants(engine)}
    assert kinds == {kind.name for kind in KINDS}
    assert all(f"| `{kind}` |" in MANUAL for kind in kinds)


@pytest.mark.parametrize(("on_cpu", "noise"), [(True, reference.TOLERANCE), (False, GPU_NOISE)])
def test_only_vllm_on_a_gpu_may_be_off_by_more(on_cpu: bool, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "serves_on_cpu", lambda *_: on_cpu)
    found = {kind.name: canary_tolerance(configure(kind, Path())) for kind in KINDS}
    assert found == dict.fromkeys(found, reference.TOLERANCE) | {"vllm": noise}


def test_the_widest_tolerance_tells_the_two_policies_apart(weights: Weights) -> None:
    """By their log-probs, and by what is likeliest."""
    (ids, first), (_, second) = (tiny.canary(model) for model in weights.models)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 50 * GPU_NOISE
    rows, others = (tiny.logprobs(model, ids) for model in weights.models)
    likeliest = others.argmax(-1).tolist()
    assert reference.greedy(others, likeliest, GPU_NOISE)
    assert not any(reference.greedy(rows[at : at + 8], likeliest[at : at + 8], 10 * GPU_NOISE) for at in range(40))
