"""The app in a real Chromium, for the tests of tests/browser."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = os.environ.get("FLEETPLAN_AXE")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
PATIENCE_S = 240.0  # a busy machine is slow, not wrong
LOST_S = 20.0  # a click after which nothing runs by then was lost
DESK, PHONE = 1440, 390
CELLS = (36, 25)  # of a picture that is compared
FAR, MOST_FAR_FRAC = 40, 0.08  # of 255: a cell this far off is another; so many may be

STILL = """
  new MutationObserver((_, seen) => {
    if (!document.head) return
    const style = document.createElement("style")
    style.textContent = "*, *::before, *::after { animation: none !important; transition: none !important }"
    document.head.append(style)
    seen.disconnect()
  }).observe(document, { childList: true, subtree: true })
"""
"""Nothing moves: without a graphics card a spinner takes a core, which the plan then lacks."""
QUIET_MS = 200
QUIET = """
  quiet_ms => {
    const app = document.querySelector("[data-testid=stApp]")
    const isRunning = app?.dataset.testScriptState !== "notRunning"
    const isBusy = isRunning || document.querySelector("[data-stale=true]")
    const now = performance.now()
    window.quietSince = isBusy ? undefined : window.quietSince ?? now
    return !isBusy && now - window.quietSince >= quiet_ms
  }
"""
NO_TEXT = """
  * { color: transparent !important; caret-color: transparent !important; transition: none !important;
      animation: none !important }
  svg, img, canvas { visibility: hidden !important }
"""


def need_browser(*modules: str) -> None:
    """Skip a test module where there is no browser, or it was not asked for."""
    for missing, why in (
        (os.environ.get("FLEETPLAN_BROWSER") != "1", "only on demand: make test-browser"),
        (CHROMIUM is None, "no Chromium: apt install chromium"),
        *(
            (importlib.util.find_spec(name) is None, f"no {name}: make test-browser installs it")
            for name in ("playwright", *modules)
        ),
    ):
        if missing:
            pytest.skip(why, allow_module_level=True)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`plan ui` on a free port of loopback; ends with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "planner.cli", "ui", "--folder", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = monotonic() + PATIENCE_S
        while process.poll() is None and monotonic() < until:
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=5).close()
                break
            except OSError:
                sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, address: str, width: int = DESK, scheme: str = "light") -> Any:
    """A browser of its own, with the app in it, in which nothing moves."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.add_init_script(STILL)
    return tab(context, address)


def tab(context: Any, address: str) -> Any:
    """One more tab of a browser."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(address)
    plan_button(page).wait_for()
    return page


def plan_button(page: Any) -> Any:
    return page.get_by_role("button", name="Plan", exact=True)


def answer(page: Any) -> Any:
    return page.locator(".st-key-answer_now, .st-key-answer_stale").get_by_role("tab", name="Downloads")


def planned(page: Any) -> None:
    """Press Plan and wait for the answer of the inputs; again where the click came while the script ran."""
    from playwright.sync_api import TimeoutError

    ready = page.locator(".st-key-answer_now").get_by_role("tab", name="Downloads")
    running = page.get_by_role("button", name="Cancel")
    plan_button(page).click()
    try:
        running.or_(ready).first.wait_for(timeout=LOST_S * 1000)
    except TimeoutError:
        plan_button(page).click()
    ready.wait_for()


def settled(page: Any) -> None:
    """A key that is pressed while the script runs is lost with the element it was for."""
    page.evaluate("window.quietSince = undefined")
    page.wait_for_function(QUIET, arg=QUIET_MS)


def typed(page: Any, name: str, value: str) -> None:
    """Fill a number or a text and leave it, which tells the app."""
    page.get_by_role("spinbutton", name=name).fill(value)
    page.keyboard.press("Tab")
    settled(page)


def chosen(page: Any, label: str, name: str) -> None:
    """Choose from a list, which closes again where the page scrolls after the click."""
    box = page.get_by_role("combobox", name=label)
    box.scroll_into_view_if_needed()
    settled(page)
    box.click()
    page.get_by_role("option", name=name, exact=True).click()
    settled(page)


def go(page: Any, name: str) -> None:
    """Through the menu."""
    page.locator(".st-key-menu").get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", name=name, exact=True).wait_for()
    settled(page)


def looked_at(page: Any, name: str, part: str = "html") -> None:
    """It fits the screen's width, axe finds nothing in `part`; a picture is kept where one is asked for."""
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
    if folder := os.environ.get("FLEETPLAN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
    if AXE:
        if not page.evaluate("Boolean(window.axe)"):
            page.add_script_tag(path=AXE)
        found = page.evaluate("([part, rules]) => axe.run(part, {runOnly: rules})", [part, RULES])
        told = [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]]
        assert told == [], name


def blocks(page: Any) -> np.ndarray:
    """The screen without letters and drawings, which differ between machines: mean grey (rows, columns) of
    cells of the page.
    """
    from PIL import Image

    style = page.add_style_tag(content=NO_TEXT)
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("L")
    style.evaluate("style => style.remove()")
    return np.asarray(picture.resize(CELLS, Image.Resampling.BOX), dtype=float)


def same_blocks(page: Any, stored: Path) -> None:
    """The screen looks as the stored picture, up to a few cells, which FLEETPLAN_SCREENSHOTS_NEW=1 stores."""
    from PIL import Image

    found = blocks(page)
    if os.environ.get("FLEETPLAN_SCREENSHOTS_NEW") == "1":
        stored.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(found.astype("uint8")).save(stored)
    wanted = np.asarray(Image.open(stored), dtype=float)
    far = np.abs(found - wanted) > FAR
    assert far.mean() <= MOST_FAR_FRAC, f"{stored.name}: {100 * far.mean():.0f} % of it looks otherwise"


def focused(page: Any) -> str:
    """What the keyboard is at, as a reader hears it."""
    said: str = page.evaluate(
        "() => (at => at.ariaLabel || at.innerText || at.id || at.tagName)(document.activeElement)"
    )
    return re.sub(r"\s+", " ", said).strip()
