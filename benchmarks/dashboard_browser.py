"""`slipstream bench dashboard`: the page in Chromium: from a navigation to the first token, a trajectory of 200,000 tokens, and a
window dragged over it.

    slipstream dash ──HTTP──> Chromium without a window, driven by Playwright

Invariants:
- Times are the page's own (`performance.now`), taken in the frame after the one in which the tokens were there.
- Neither Playwright nor Chromium is of the package: `make install-browser`, or `pip install playwright` and Debian's `chromium`.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from ..configs import dump, load
from ..errors import ConfigError
from .dashboard import LONG, write_store
from .dashboard_live import dashboard_of
from .models import make_policy
from .result import Result, Row

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FIRST_S, OPEN_MS, FRAMES = 1.5, 500.0, 30.0  # what is allowed: seconds, milliseconds, frames a second
TIMES = 7  # that each is measured, of which the median counts
TRAJECTORIES = 20_000
DRAGGED_MS = 3000
# When tokens of the trajectory that was asked for are first on the screen.
PAINTED = """(id) => new Promise(resolve => {
  const look = () => document.querySelector('h1')?.textContent === id && document.querySelector('.tokens span')
    ? requestAnimationFrame(() => resolve(performance.now())) : requestAnimationFrame(look);
  look();
})"""
# Frames a second while the window of tokens follows the pointer from one end of the strip to the other, and back.
DRAG = """(ms) => new Promise(resolve => {
  const strip = document.querySelector('canvas[role=slider]'), box = strip.getBoundingClientRect(), began = performance.now();
  strip.setPointerCapture = () => {};
  const seen = new Set(), pointer = {clientY: box.top + 5, buttons: 1, pointerId: 1, bubbles: true};
  const at = part => ({...pointer, clientX: box.left + box.width * part});
  let frames = 0;
  strip.dispatchEvent(new PointerEvent('pointerdown', at(0)));
  const move = () => {
    const share = (performance.now() - began) / ms;
    seen.add(strip.getAttribute('aria-valuenow'));
    if (share >= 1) return resolve([1000 * frames / (performance.now() - began), seen.size]);
    frames++;
    strip.dispatchEvent(new PointerEvent('pointermove', at(.12 + .88 * (share < .5 ? 2 * share : 2 - 2 * share))));
    requestAnimationFrame(move);
  };
  requestAnimationFrame(move);
})"""


def required() -> str:
    """The path of Chromium. Raises ConfigError where it or Playwright is not installed."""
    if importlib.util.find_spec("playwright") is None:
        raise ConfigError("--browser: the Python package playwright is not installed; `pip install playwright`")
    found = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if found is None:
        raise ConfigError("--browser: there is no Chromium; Debian: `apt install chromium`")
    return found


async def in_browser(folder: Path) -> Result:
    """What the page takes, over what it may take."""
    run, path = folder / "run", required()
    run.mkdir()
    make_policy(folder / "model", "1M")
    (run / "config.yaml").write_text(dump(load("quickstart", [f"model.path={folder / 'model'}", f"run.dir={run}"])))
    write_store(run, TRAJECTORIES)
    async with (
        dashboard_of(run) as dashboard,
        importlib.import_module("playwright.async_api").async_playwright() as started,
    ):
        url = dashboard.url
        launched = await started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        first = [await _first(launched, f"{url}#/run/trajectory/0.0.0.0") for _ in range(TIMES)]
        page = await launched.new_page(viewport={"width": 1280, "height": 900})
        opened = [await _open_ms(page, url) for _ in range(TIMES)]
        frames = [await page.evaluate(DRAG, DRAGGED_MS) for _ in range(3)]
        await launched.close()
    windows = min(number for _, number in frames)
    note = f"{LONG:,} tokens; floor: allowed; median of {TIMES}"
    rows = (
        Row("from the navigation to the first token", median(first), FIRST_S, "s", note),
        Row("from the list to the first token", median(opened), OPEN_MS, "ms", note),
        Row(
            "a window that is dragged over it",
            median(rate for rate, _ in frames),
            FRAMES,
            "frames/s",
            f"floor: wanted; at least {windows} places in {DRAGGED_MS / 1e3:.0f} s",
        ),
    )
    return Result("the page in Chromium, over what is allowed", "page", "allowed", rows)


async def _first(launched: Any, address: str) -> float:
    """Seconds from the navigation; with an empty cache."""
    context = await launched.new_context(viewport={"width": 1280, "height": 900})
    page = await context.new_page()
    await page.goto(address, wait_until="commit")
    seconds = await page.evaluate(PAINTED, "0.0.0.0") / 1e3
    await context.close()
    return seconds


async def _open_ms(page: Any, url: str) -> float:
    """Milliseconds from the list of trajectories, by its link."""
    await page.goto(f"{url}#/run/trajectories?tokens_min={LONG}")
    await page.wait_for_selector("tbody tr a")
    began = await page.evaluate(
        "() => { const now = performance.now(); document.querySelector('tbody tr a').click(); return now; }"
    )
    return await page.evaluate(PAINTED, "0.0.0.0") - began
