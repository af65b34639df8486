"""The page in a real browser: every view opens without an error or a request to another host, and shows what the store has."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from slipstream.common.annotations import VALUES
from slipstream.configs import load
from slipstream.dashboard.runs import RUNS_LIMIT
from slipstream.launch.cli.main import main
from slipstream.monitor.annotations import AnnotationWriter
from slipstream.tests.dashboard_runs import MEMBERS, PLANTED, DashboardRun
from slipstream.tests.dashboards import Dashboard
from slipstream.tests.runs import WAIT_S, query
from slipstream.tests.servers import is_required
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.synthetic_runs import synthetic
from slipstream.tests.test_dashboard_annotations import BEHIND, annotations_of
from slipstream.tests.test_planner_explain import run_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INSTALLED = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (INSTALLED or is_required("browser")), reason="no Chromium or no Playwright; `make install-browser`"
    ),
]

VIEWS = ("now", "curves", "trajectories", "staleness", "timeline", "tokens", "environments", "processes")
SIZES = {"desktop": (1280, 900, "light"), "phone": (400, 800, "light"), "dark": (1280, 900, "dark")}
GROUPS, ANNOTATED = 7, 4
DRAWN = (
    "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))"
)
FIRST_TOKEN_S = 1.5  # from the navigation, on a quiet machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one that is over, another to compare with, and one without a step."""
    root = tmp_path_factory.mktemp("runs")
    for name, groups in (("first", GROUPS), ("second", 4), ("third", 1)):
        run = DashboardRun(root / name)
        made = run.record(groups)
        run.close()
        with AnnotationWriter(run.folder, "learner-0", 1 << 20) as writer:
            writer.record(ANNOTATED + 1, [annotations_of(one) for one in made if one.group_id == ANNOTATED])
    (root / "third" / "metrics.jsonl").unlink()
    return root


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with Dashboard(folder) as dashboard:
        yield dashboard.url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with importlib.import_module("playwright.sync_api").sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Look:
    """A page, and everything that was wrong with it."""

    def __init__(self, browser: Any, url: str, size: str = "desktop", *, waits: bool = True) -> None:
        width, height, scheme = SIZES[size]
        # The page allows no `eval`, by which Playwright `waits` for conditions.
        self.context = browser.new_context(
            bypass_csp=waits, viewport={"width": width, "height": height}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(1e3 * WAIT_S / 8)
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda line: line.type in ("error", "warning") and self.wrong.append(line.text))
        self.page.on(
            "request", lambda request: request.url.startswith((url, "data:")) or self.wrong.append(request.url)
        )
        self.page.on(
            "requestfailed", lambda request: "/api/events" in request.url or self.wrong.append(f"failed: {request.url}")
        )
        self.url = url

    def open(self, address: str) -> Any:
        self.page.goto(f"{self.url}#/{address}")
        self.page.wait_for_selector("main h1, main .card")
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []


@pytest.fixture(params=SIZES)
def look(request: pytest.FixtureRequest, browser: Any, url: str) -> Iterator[Look]:
    found = Look(browser, url, request.param, waits=False)
    yield found
    found.close()


@pytest.fixture
def desktop(browser: Any, url: str) -> Iterator[Look]:
    found = Look(browser, url)
    yield found
    found.close()


def test_every_view_opens_on_every_screen_and_is_no_wider(look: Look) -> None:
    places = [
        "",
        *(f"first/{view}" for view in VIEWS),
        "first/trajectory/4.0.1.0",
        "first/group/4",
        *(f"third/{view}" for view in VIEWS),
    ]
    for place in places:
        page = look.open(place)
        page.wait_for_selector("main .card, main .tile")
        page.evaluate(DRAWN)
        assert page.evaluate("document.title") != "owned", place
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{place} is {wide} pixels wider than the screen"
        look.page.evaluate("location.hash = ''")


def test_the_page_says_how_many_runs_it_leaves_out_and_how_to_see_one(browser: Any, tmp_path: Path) -> None:
    for number in range(RUNS_LIMIT + 2):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "config.yaml").write_text("extends: quickstart\n")
    with Dashboard(tmp_path) as dashboard:
        look = Look(browser, dashboard.url)
        said = look.open("").inner_text("#left-out")
        assert f"2 older runs are left out. To see one: slipstream dash {tmp_path}/NAME" in said
        look.close()


def test_a_run_says_how_far_it_came_and_how_much_it_gained(desktop: Look, folder: Path) -> None:
    page = desktop.open("first/now")
    page.wait_for_selector(".card.warn")
    assert (
        page.inner_text(".card.warn") == f"This run stopped at step {GROUPS - 1} of {load('quickstart').learner.steps}."
    )
    gained = page.inner_text(".tile.wide")
    assert "warm start → final" in gained
    assert "0.421 → 0.891" in gained
    assert "+0.470 ± 0.052 on 128 held-out tasks" in gained
    page = desktop.open("third/now")
    page.wait_for_function("document.querySelector('main .card').textContent === 'No step yet. The run is not active.'")


def test_an_evaluation_shows_every_environment_of_a_mixture(browser: Any, tmp_path: Path) -> None:
    synthetic(tmp_path / "run", 2)
    path = tmp_path / "run" / "evaluations.json"
    evaluations = json.loads(path.read_text())
    failed = {"tasks": 0, "reward_mean": None, "reward_stderr": None, "outcomes": {"failed_tool": 3}}
    solved = {"tasks": 16, "reward_mean": 0.875, "reward_stderr": 0.125, "outcomes": {"finished": 16}}
    evaluations[-1]["environments"] = {"sums": solved, "games": failed}
    path.write_text(json.dumps(evaluations))
    with Dashboard(tmp_path / "run") as dashboard:
        look = Look(browser, dashboard.url)
        page = look.open("run/now")
        page.wait_for_selector("h2:has-text('evaluations')")
        rows = page.eval_on_selector_all(
            ".card:has(h2:has-text('evaluations')) tbody tr", "all => all.map(row => row.innerText.split('\\t'))"
        )
        look.close()
    assert [row[0] for row in rows] == ["warm start", "final", "– sums", "– games"]
    assert rows[2][2:5] == ["16", "0.875 ± 0.125", "16 finished"]
    assert rows[3][2:5] == ["0", "–", "3 failed_tool"]


def test_tokens_have_the_colors_of_their_staleness(desktop: Look, folder: Path) -> None:
    began = time.monotonic()
    page = desktop.open("first/trajectory/4.0.1.0")
    page.wait_for_selector(".tokens span")
    assert time.monotonic() - began < 10 * FIRST_TOKEN_S  # a machine that does other things is slower
    sql = "SELECT t.header, g.trained_at, t.length FROM trajectories t JOIN groups g ON g.id = t.group_id WHERE t.id = '4.0.1.0'"
    ((header, trained_at, length),) = query(folder / "first", sql)
    wanted: Counter[str] = Counter()
    for start, end, version, *_ in msgspec.msgpack.decode(header[1:])["version_spans"]:
        wanted[str(trained_at - 1 - version)] += end - start
    cells = page.eval_on_selector_all(
        ".tokens span", "all => all.map(one => [one.dataset.staleness ?? null, one.style.background])"
    )
    assert len(cells) == length
    assert Counter(age for age, _ in cells if age is not None) == wanted
    assert len({color for age, color in cells if age is not None}) == len(wanted)
    sampled = sum(wanted.values())
    for by in ("mask", "staleness", "version", "logprob", "log_ratio", "entropy", "advantage"):
        page.click(f"button[data-by={by}]")
        page.wait_for_selector(f"button.on[data-by={by}]")
        page.evaluate(DRAWN)
        backgrounds = page.eval_on_selector_all(
            ".tokens span", "all => all.map(one => [one.className, one.style.background])"
        )
        # Nothing is colored that was not sampled, or that the learner did not compute.
        assert all(name != "context" for name, color in backgrounds if color), by
        computed = sampled - (BEHIND if by in VALUES else 0)
        assert sum(color != "" for _, color in backgrounds) == computed, by
    page.hover(".tokens span[data-staleness='2']")
    page.wait_for_function("document.querySelector('.detail').textContent.includes('staleness 2')")
    page.keyboard.press("Tab")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    assert page.query_selector(".tokens span.at")


def test_what_a_run_says_is_text(desktop: Look) -> None:
    for place in ("first/trajectory/4.0.1.0", "first/group/4", "first/trajectories", "first/now", "first/environments"):
        page = desktop.open(place)
        page.wait_for_function("document.body.textContent.includes('onerror=')")
        assert page.query_selector("main img, main script") is None
        assert page.evaluate("document.title") != "owned"
    page = desktop.open("first/trajectory/4.0.1.0")
    page.click("button[role=tab]:nth-of-type(2)")
    page.wait_for_selector(".message.sampled")
    assert PLANTED in page.inner_text(".message.sampled:last-of-type")


def test_ratios_of_single_tokens_are_bars_by_staleness(desktop: Look) -> None:
    page = desktop.open("first/staleness")
    page.wait_for_selector("h2:has-text('log-ratio of trained tokens')")
    rows = page.eval_on_selector_all(
        ".card:has(h2:has-text('log-ratio')) tbody tr",
        "all => all.map(one => [one.cells[0].textContent, one.querySelectorAll('i').length])",
    )
    assert [name for name, _ in rows] == ["-1 to -0.3", "-0.01 to 0.01", "0.3 to 1"]
    assert {parts for _, parts in rows} == {3}  # a color for each staleness
    assert "engine-0" in page.inner_text(".card:has(h2:has-text('largest difference'))")
    page = desktop.open("third/staleness")
    page.wait_for_selector("main .card")


def test_from_a_point_of_the_reward_to_a_sibling(desktop: Look) -> None:
    page = desktop.open("first/curves")
    over = page.wait_for_selector("[data-chart=reward] .u-over")
    assert page.query_selector("[data-chart=loss]")
    assert page.query_selector("[data-chart='truncated share']") is None  # a chart of nothing but 0
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    page.wait_for_function("location.hash.includes('trained_at=')")
    page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {MEMBERS}")
    page.click("tbody tr:first-child")
    page.wait_for_function("location.hash.includes('/trajectory/')")
    page.wait_for_selector(".tokens span")
    before = page.evaluate("location.hash")
    page.wait_for_function("document.querySelector('h1 ~ a, .row a')?.textContent.includes(' of ')")
    page.keyboard.press("[")
    page.wait_for_function(f"location.hash !== {json.dumps(before)}")
    page.click("a[href*='/group/']")
    page.wait_for_selector(".members .card")
    assert len(page.query_selector_all(".members > .card")) == MEMBERS


def test_a_list_is_filtered_sorted_and_continued(desktop: Look) -> None:
    page = desktop.open("first/trajectories")
    page.wait_for_selector("tbody tr")
    page.select_option("label:has-text('outcome') select", "truncated")
    page.wait_for_function(f"document.querySelector('p.small b').textContent === '{GROUPS}'")
    page.fill("label:has-text('task contains') input", "sum-3")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('p.small b').textContent === '1'")
    page.click("text=show all")
    page.wait_for_function(f"document.querySelector('p.small b').textContent === '{GROUPS * MEMBERS}'")
    page.evaluate("location.hash = '#/first/trajectories?limit=5'")
    page.click("text=show more")
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 10")


def test_a_list_that_was_continued_loses_no_row_to_newer_ones(browser: Any, tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    old = {one.id for _ in range(3) for one in (run.play(), run.step())[0]}
    with Dashboard(run.folder) as dashboard:
        look = Look(browser, dashboard.url)
        page = look.open("run/trajectories?limit=5")
        page.click("text=show more")
        page.wait_for_function("document.querySelectorAll('tbody tr').length === 10")
        new = {one.id for one in run.play()}
        page.wait_for_selector(f"text=show {MEMBERS} newer")
        page.click("text=show more")
        ids = "[...document.querySelectorAll('tbody tr td:first-child')].map(one => one.textContent)"
        page.wait_for_function(f"{ids}.length === {len(old)}")
        assert set(page.evaluate(ids)) == old
        page.click(f"text=show {MEMBERS} newer")
        page.wait_for_function("document.querySelectorAll('tbody tr').length === 5")
        assert new < set(page.evaluate(ids))
        look.context.close()
    run.close()


def see(page: Any, *, hidden: bool) -> None:
    """As if the user turned to another tab, or back."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {str(hidden).lower()}}});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def test_a_run_under_way_is_followed(browser: Any, tmp_path: Path) -> None:
    run = DashboardRun(tmp_path / "run")
    run.play()
    with Dashboard(run.folder) as dashboard:
        look = Look(browser, dashboard.url)
        page = look.open("run/trajectories")
        page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {MEMBERS}")
        run.step()
        run.play()
        page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {2 * MEMBERS}")
        page.wait_for_function("document.body.textContent.includes('trained')")
        other, asked = Look(browser, dashboard.url), list[str]()
        other.open("run/trajectories")
        see(page, hidden=True)
        page.on("request", lambda request: asked.append(request.url))
        run.play()
        other.page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {3 * MEMBERS}")
        assert asked == []  # a hidden page costs the run nothing
        see(page, hidden=False)
        page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {3 * MEMBERS}")
        other.context.close()
        dashboard.process.kill()  # the page says so, and the run goes on
        page.wait_for_function("document.querySelector('.live').textContent === 'the server is gone'")
        run.step()
        look.context.close()
    run.close()


# --- the same page as a file --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(folder: Path) -> str:
    path = folder.parent / "first.html"
    assert main(["dash", str(folder / "first"), "--export", str(path)]) == 0
    return path.as_uri()


@pytest.mark.parametrize("size", SIZES)
def test_a_file_shows_the_same_views_without_a_server(browser: Any, file: str, size: str) -> None:
    look = Look(browser, file, size, waits=False)
    for place in ("", *(f"first/{view}" for view in (*VIEWS, "all")), "first/trajectory/4.0.1.0", "first/group/4"):
        page = look.open(place)
        page.wait_for_selector(".tokens span" if "trajectory/" in place else "main .card")
        assert page.evaluate("document.title") == "first · Slipstream", place
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, place
        assert page.query_selector("main .card.bad") is None, place
        assert page.query_selector("main img, main script") is None
    look.open("first/all")
    look.page.wait_for_selector("section.part:nth-of-type(7) .card")
    look.page.emulate_media(media="print")
    assert look.page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert look.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert len(look.page.pdf(format="A4")) > 50_000
    look.close()


def test_a_file_leads_from_a_point_of_the_reward_to_a_sibling_and_says_what_it_lacks(browser: Any, file: str) -> None:
    look = Look(browser, file)
    page = look.open("first/now")
    box = page.wait_for_selector("[data-chart=reward] .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    page.wait_for_function("location.hash.includes('trained_at=')")
    page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {MEMBERS}")
    page.click("tbody tr:first-child")
    page.wait_for_selector(".tokens span[data-staleness='2']")
    before = page.evaluate("location.hash")
    page.wait_for_function("document.querySelector('h1 ~ a, .row a')?.textContent.includes(' of ')")
    page.keyboard.press("[")
    page.wait_for_function(f"location.hash !== {json.dumps(before)}")
    page = look.open("first/trajectories")
    page.select_option("label:has-text('outcome') select", "truncated")
    page.wait_for_function(f"document.querySelector('p.small b').textContent === '{GROUPS - 1}'")
    page = look.open("first/trajectory/99.0.0.0")
    page.wait_for_function("document.querySelector('.card.bad').textContent.includes('This is not in the file')")
    look.close()


def test_what_to_change_is_on_the_page_with_its_command(browser: Any, tmp_path: Path) -> None:
    run = RecordedRun(run_of(bound=0), tmp_path / "run")
    run.record(20)
    with Dashboard(tmp_path / "run") as dashboard:
        look = Look(browser, dashboard.url)
        look.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page = look.open("run/now")
        page.wait_for_selector(".finding", timeout=1e3 * WAIT_S)
        assert "buffer.max_staleness=1" in page.inner_text(".finding .change")
        page.click(".finding button:has-text('why')")
        assert "learner waits" in page.inner_text(".finding .why")
        page.click(".finding button:has-text('copy')")
        page.wait_for_selector("button:has-text('copied')")
        assert page.evaluate("navigator.clipboard.readText()") == "buffer.max_staleness=1"
        page.click(".finding button:has-text('simulate')")
        assert "slipstream simulate" in page.inner_text(".finding .why")
        look.close()
