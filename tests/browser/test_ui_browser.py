"""The app as people use it, in Debian's Chromium driven by Playwright, at the width of a desk and of a phone.

Not in CI: `FLEETPLAN_BROWSER=1 python -m pytest tests/browser`, with `apt install chromium` and
`pip install playwright`. FLEETPLAN_SCREENSHOTS=DIR keeps what it saw.
"""

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
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from planner.files import repository_dir

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
for missing, why in (
    (os.environ.get("FLEETPLAN_BROWSER") != "1", "only on demand: FLEETPLAN_BROWSER=1"),
    (CHROMIUM is None, "no Chromium: apt install chromium"),
    (importlib.util.find_spec("playwright") is None, "no Playwright: pip install playwright"),
    (importlib.util.find_spec("streamlit") is None, "no Streamlit: pip install 'fleetplan[ui]'"),
):
    if missing:
        pytest.skip(why, allow_module_level=True)

SAMPLE = repository_dir("examples") / "traces" / "azure-conversation-sample.csv"
PATIENCE_S = 240.0  # a busy machine is slow, not wrong
TABS = ("Fleet", "Promise", "How it runs", "What binds", "Alternatives", "Proof", "Downloads")
ONE_MILLION = 1_000_000


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


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("ui") / "plans") as where:
        yield where


@pytest.fixture
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def opened(browser: Any, address: str, width: int) -> Any:
    page = browser.new_page(viewport={"width": width, "height": 1000})
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(address)
    page.get_by_role("button", name="Plan", exact=True).wait_for()
    return page


def screenshot(page: Any, name: str) -> None:
    if folder := os.environ.get("FLEETPLAN_SCREENSHOTS"):
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(folder) / f"{name}.png")


def fits(page: Any) -> bool:
    """Nothing but what scrolls by itself is wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def go(page: Any, name: str) -> None:
    """Through the menu, which a phone folds away."""
    folded = page.get_by_test_id("stExpandSidebarButton")
    if folded.is_visible():
        folded.click()
    page.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", name=name, exact=True).wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_browser_upload_plan_every_tab_what_if_download_reload(
    browser: Any, address: str, width: int
) -> None:
    page = opened(browser, address, width)
    page.locator("input[type=file]").first.set_input_files(SAMPLE)
    page.get_by_text("No row was left out").wait_for()
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("tab", name="Downloads").wait_for()
    for name in TABS:
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        assert fits(page), name
        screenshot(page, f"{width}-{name}")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download everything.zip").click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as packed:
        assert {"plan.yaml", "report.html", "slo.yaml", "manifests/README.md"} <= set(packed.namelist())

    said = page.get_by_role("heading", name=re.compile("USD per hour")).inner_text()
    page.reload()
    assert page.get_by_role("heading", name=re.compile("USD per hour")).inner_text() == said

    go(page, "What if")
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Keep this plan").wait_for()
    assert fits(page)
    screenshot(page, f"{width}-what-if")
    for name in ("Saved plans", "Schedule", "Prefixes", "Validation"):
        go(page, name)
        assert fits(page), name
        screenshot(page, f"{width}-{name}")
    other = opened(browser, address, width)
    other.get_by_text("None yet").wait_for()


def test_browser_every_input_has_a_label(browser: Any, address: str) -> None:
    page = opened(browser, address, 1280)
    page.get_by_text("Goal and limits").click()
    page.get_by_label("Seed").wait_for()
    names = page.locator("input:not([type=file]), button[role=combobox]").evaluate_all(
        "found => found.filter(one => one.offsetParent).map(one => "
        "one.ariaLabel || one.labels?.[0]?.innerText || one.getAttribute('aria-labelledby') || '')"
    )
    assert names and all(names), names


def test_browser_a_plan_is_cancelled_and_nothing_runs_on(browser: Any, address: str) -> None:
    page = opened(browser, address, 1280)
    page.get_by_role("spinbutton", name="Rate [requests/s]").fill("400")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled").wait_for()


def test_browser_a_million_rows_and_a_broken_file_do_not_end_the_app(
    browser: Any, address: str, tmp_path: Path
) -> None:
    large, broken = tmp_path / "large.csv", tmp_path / "broken.csv"
    rows = "".join(f"{k * 0.01:.2f},{100 + k % 900},{20 + k % 80}\n" for k in range(ONE_MILLION))
    large.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    broken.write_text("timestamp,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    page = opened(browser, address, 1280)
    page.locator("input[type=file]").first.set_input_files(large)
    page.get_by_text("1,000,000 requests").wait_for()
    page.locator("input[type=file]").first.set_input_files(broken)
    page.get_by_role("alert").get_by_text("broken.csv, line 3, column input_tokens").wait_for()
