"""The report of a synthetic run: written to real files, parsed again, with pieces missing, and honest in every case."""

import json
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from slipstream.configs import dump, load
from slipstream.errors import StoreError
from slipstream.learner.metrics import StepMetrics
from slipstream.monitor.metrics import MetricsWriter
from slipstream.monitor.report import write_report
from slipstream.monitor.series import by_staleness, elapsed, smooth

LEDGER = {
    "generated": 1_000_000,
    "in_flight": 20_000,
    "ready": 30_000,
    "trained": 900_000,
    "withheld": {"stale": 30_000, "late": 10_000},
    "discarded": {"episode failed": 6_000, "no signal <in> group": 4_000},
    "closes": True,
}
STARVED = {"learner": (0.45, 0.02), "rollout": (0.01, 0.4), "none": (0.05, 0.03), "both": (0.3, 0.3)}


def synthetic(
    folder: Path, steps: int, starved: str = "learner", overrides: tuple[str, ...] = (), slots: float = 70.0
) -> None:
    """A run of `steps` steps that learns, in the files that a real run writes."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    config = load("quickstart", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(dump(config))
    learner_idle, rollout_idle = STARVED[starved]
    now = 1.8e9
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            work, push = rng.uniform(0.8, 1.1), rng.uniform(0.1, 0.2)
            wait = (work + push) * learner_idle / (1 - learner_idle)
            now += wait + work + push
            lags = {"0": 1000 if step > 2 else 4000, "1": 2200 * (step > 1), "2": 800 * (step > 2)}
            writer.append(
                StepMetrics(
                    step=step,
                    version=step,
                    time=now,
                    reward_mean=float(0.4 + 0.5 * (1 - np.exp(-step / 25)) + rng.normal(0, 0.04)),
                    reward_std=0.45,
                    staleness_mean=sum(int(s) * n for s, n in lags.items()) / sum(lags.values()),
                    staleness_max=max(int(s) for s, n in lags.items() if n),
                    staleness_tokens=lags,
                    tokens_trained=4000,
                    tokens_withheld=int(rng.integers(0, 200)),
                    mixed_tokens=10 * step,
                    tokens_discarded=int(rng.integers(0, 50)),
                    messages_dropped=0,
                    peers_refused=0,
                    groups=8,
                    groups_alike=3,
                    episodes=64,
                    episode_tokens_mean=62 + rng.normal(),
                    turns_mean=1.5 + step / 100,
                    environment={"tool_calls": 0.8},
                    rollout_tokens_per_s=3100 + rng.normal(0, 200),
                    overlap_tokens_per_s=2700 + rng.normal(0, 200),
                    learner_tokens_per_s=5200 + rng.normal(0, 300),
                    learner_idle=float(np.clip(learner_idle + rng.normal(0, 0.05), 0, 1)),
                    rollout_idle=float(np.clip(rollout_idle + rng.normal(0, 0.02), 0, 1)),
                    slot_s=slots * (wait + work + push),
                    idle_slot_s=rollout_idle * slots * (wait + work + push),
                    slots=slots,
                    replicas=config.rollout.engine.replicas,
                    replicas_failed=int(step == 2),
                    wait_s=wait,
                    step_s=work,
                    push_s=push,
                    pause_ms=45 + rng.normal(0, 5),
                    transfer_ms=12 + rng.normal(0, 2),
                    canary=float(abs(rng.normal(0, 2e-5))),
                    mismatch_max=None if step == 3 else float(abs(rng.normal(0, 1e-4))),
                    mismatch_tokens=1000 * (step != 3),
                    ess_by_staleness={s: 0.99 - 0.1 * int(s) for s, n in lags.items() if n},
                    kl_by_staleness={s: 0.001 * int(s) for s, n in lags.items() if n},
                    clip_fraction_by_staleness={s: 0.0 for s, n in lags.items() if n},
                    weight_by_staleness={s: n / sum(lags.values()) for s, n in lags.items() if n},
                    loss=rng.normal(0, 0.02),
                    ess=0.97 - step / 1000,
                    kl=0.002 + step / 1e5,
                    entropy=0.9 * float(np.exp(-step / 80)),
                    clip_fraction=0.01,
                    grad_norm=0.4 + abs(rng.normal(0, 0.1)),
                    lr=3e-4,
                )
            )
    evaluations = [
        {"label": "warm start", "version": 0, "reward_mean": 0.421, "reward_stderr": 0.044, "seconds": 6.2},
        {"label": "final", "version": steps, "reward_mean": 0.891, "reward_stderr": 0.027, "seconds": 5.9},
    ]
    for evaluation in evaluations:
        evaluation |= {"tasks": 128, "outcomes": {"finished": 125, "truncated": 3}}
    (folder / "evaluations.json").write_text(json.dumps(evaluations))


class Page(HTMLParser):
    """Collects what the assertions need: tags, visible text, and anything that would load from elsewhere."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.external: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        links = [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        self.external += links + [tag] * (tag in ("script", "link", "iframe"))

    def handle_data(self, data):
        self.text += data


def rendered(folder: Path, ledger=None) -> Page:
    return Page(write_report(folder, ledger).html.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    synthetic(folder, 60)
    return folder, rendered(folder, LEDGER)


def test_the_headline_says_from_what_to_what_on_how_many_tasks(whole):
    text = " ".join(whole[1].text.split())
    for part in ("0.421 ± 0.044 → 0.891 ± 0.027", "+0.470 ± 0.052 on 128 fresh tasks", "60 of 60", "1M"):
        assert part in text


def test_the_page_is_one_file_that_loads_nothing(whole):
    assert whole[1].external == []
    assert whole[1].tags.count("svg") == 13
    source = (whole[0] / "report.html").read_text()
    assert "url(http" not in source
    assert "prefers-color-scheme: dark" in source


def test_every_chart_is_well_formed_and_themed(whole):
    source = (whole[0] / "report.html").read_text()
    for part in source.split("<svg")[1:]:
        svg = "<svg" + part.split("</svg>")[0] + "</svg>"
        ElementTree.fromstring(svg)
        assert "var(--ink)" in svg or "var(--muted)" in svg
        assert "#000000" not in svg


def test_the_ledger_and_the_bound_are_shown_and_escaped(whole):
    text = whole[1].text
    for part in (
        "max_staleness = 2",
        "The ledger closes",
        "900,000",
        "withheld: late",
        "no signal <in> group",
        "groups_per_batch: 8",
    ):
        assert part in text


def test_reward_png_is_a_picture_with_something_on_it(whole):
    pixels = np.asarray(Image.open(whole[0] / "reward.png").convert("RGB"))
    assert pixels.shape[1] > 1000
    assert (
        pixels.reshape(-1, 3).astype(int).ptp(axis=1) if hasattr(pixels, "ptp") else np.ptp(pixels, axis=2)
    ).max() > 60


def test_what_explain_says_is_on_the_page_and_escaped(tmp_path):
    synthetic(tmp_path / "run", 3)
    report = write_report(tmp_path / "run", None, ["hint: <b> & more", "  -> buffer.max_staleness=1"])
    assert report.explanation == ("hint: <b> & more", "  -> buffer.max_staleness=1")
    assert "hint: <b> & more\n  -> buffer.max_staleness=1" in Page(report.html.read_text()).text
    assert "The ledger was not available" in rendered(tmp_path / "run").text


def test_a_smoothed_curve_starts_and_ends_where_the_run_did():
    values = np.arange(200.0)
    assert np.allclose(smooth(values), values)
    assert smooth(np.array([1.0, np.nan, 3.0]))[1] == 2.0
    assert len(smooth(np.zeros(0))) == 0


def test_time_between_two_processes_counts():
    rows = [{"time": 10.0, "wait_s": 1.0, "step_s": 2.0, "push_s": None}, {"time": 14.0}, {"time": 114.0}]
    assert elapsed(rows).tolist() == [3.0, 7.0, 107.0]


def test_a_run_that_stopped_before_its_first_step_says_so(tmp_path):
    synthetic(tmp_path / "run", 0)
    (tmp_path / "run" / "evaluations.json").unlink()
    text = rendered(tmp_path / "run").text
    assert "stopped before its first step" in text
    assert "No evaluation was recorded" in text
    assert (tmp_path / "run" / "reward.png").exists()


def test_a_run_that_stopped_early_says_where(tmp_path):
    synthetic(tmp_path / "run", 1)
    assert "stopped at step 1 of 60" in rendered(tmp_path / "run").text


def test_an_empty_folder_still_gives_a_report(tmp_path):
    text = rendered(tmp_path).text
    assert "config.yaml is not in the run folder" in text


def test_a_ledger_that_does_not_close_is_said_with_the_difference(tmp_path):
    assert "differ from generated by -5 tokens" in rendered(tmp_path, LEDGER | {"generated": 1_000_005}).text


def test_evaluations_that_are_not_valid_are_refused_by_name(tmp_path):
    (tmp_path / "evaluations.json").write_text('[{"label": "x"}]')
    with pytest.raises(StoreError, match=r"evaluations\.json"):
        write_report(tmp_path)


def test_an_evaluation_of_a_mixture_shows_every_environment(tmp_path):
    environments = {
        "sums": {"tasks": 6, "reward_mean": 0.875, "reward_stderr": 0.125, "outcomes": {"finished": 6}},
        "games": {"tasks": 0, "reward_mean": None, "reward_stderr": None, "outcomes": {"failed_tool": 2}},
    }
    whole = {"label": "final", "version": 3, "tasks": 6, "reward_mean": 0.875, "reward_stderr": 0.125, "seconds": 1.0}
    whole |= {"outcomes": {"finished": 6, "failed_tool": 2}, "environments": environments}
    (tmp_path / "evaluations.json").write_bytes(msgspec.json.encode([whole]))
    text = rendered(tmp_path).text
    assert text.index("– sums") < text.index("– games")
    assert text.count("0.875 ± 0.125") >= 2


def test_charts_that_would_show_nothing_are_left_out(tmp_path):
    synthetic(tmp_path / "run", 9)
    source = (write_report(tmp_path / "run").html).read_text()
    assert "gradient norm" in source
    assert "clipped share" not in source  # 0 at every staleness
    assert "share of truncated episodes" not in source  # 0 in every step
    assert ">Fleet<" in source  # a replica missed a push
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().replace('"replicas_failed":1', '"replicas_failed":0')
    (tmp_path / "run" / "metrics.jsonl").write_text(rows)
    assert ">Fleet<" not in (write_report(tmp_path / "run").html).read_text()


def test_groups_that_taught_nothing_are_said(whole):
    assert "180 of 480 groups had equal rewards" in whole[1].text


def test_what_age_does_is_a_mean_over_the_tokens_of_each_age():
    rows = [
        {
            "staleness_tokens": {"0": 10, "2": 30},
            "kl_by_staleness": {"0": 0.0, "2": 0.5},
            "weight_by_staleness": {"2": 0.5},
        },
        {
            "staleness_tokens": {"0": 10, "2": 10},
            "kl_by_staleness": {"0": 1.0, "2": 0.1},
            "weight_by_staleness": {"2": 1.0},
        },
        {"staleness_tokens": {"0": 10}, "kl_by_staleness": {"0": None}},
        {},
    ]
    assert by_staleness(rows, "kl") == {0: 0.5, 2: pytest.approx(0.4)}
    assert by_staleness(rows, "weight") == {2: pytest.approx((0.5 * 40 + 1.0 * 20) / 40)}


def test_rows_with_unknown_and_missing_names_are_drawn(tmp_path):
    rows = [{"step": 1, "time": 1.0, "reward_mean": 0.5, "new": 3}, {"step": 2, "time": 3.0, "reward_mean": None}]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    text = rendered(tmp_path).text
    assert "Learning health" in text
    assert "Weight pushes" not in text  # none was recorded
