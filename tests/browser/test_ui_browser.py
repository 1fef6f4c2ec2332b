"""The app as people use it, in Debian's Chromium by Playwright, on a desk and on a phone, light and dark.

Not in CI: `FLEETPLAN_BROWSER=1 python -m pytest tests/browser`, with `apt install chromium` and
`pip install playwright`. FLEETPLAN_SCREENSHOTS=DIR keeps what it saw; FLEETPLAN_AXE=axe.min.js (`npm pack
axe-core`) has every page checked by axe.
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

from planner.io.files import repository_dir

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
PATIENCE_S = 120.0  # a busy machine is slow, not wrong
DESK, PHONE = 1280, 390
TABS = ("Fleet", "Promise", "How it runs", "What binds", "Alternatives", "Proof", "Downloads")
PAGES = ("What if", "Saved plans", "Several LLMs", "Schedule", "Day", "Prefixes and tenants", "Validation")
ANSWERS = {
    "Several LLMs": ("Plan together", "One by one"),
    "Schedule": ("Schedule", "Answer"),
    "Prefixes and tenants": ("Show", "What prompts share"),
}  # page: button, and a heading of what it shows
AXE = os.environ.get("FLEETPLAN_AXE")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
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


def opened(browser: Any, address: str, width: int = DESK, scheme: str = "light") -> Any:
    """A browser of its own, with the app in it."""
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    page.goto(address)
    plan_button(page).wait_for()
    return page


def plan_button(page: Any) -> Any:
    return page.get_by_role("button", name="Plan", exact=True)


def settled(page: Any) -> None:
    """A key that is pressed while the script runs is lost with the element it was for."""
    page.wait_for_timeout(1000)
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()


def answer(page: Any) -> Any:
    return page.get_by_role("heading", name=re.compile("USD per hour"))


def looked_at(page: Any, name: str) -> None:
    """It fits the screen's width, axe finds nothing, and a picture of it is kept."""
    page.wait_for_function("!document.querySelector('[data-stale=true]')")
    page.wait_for_timeout(1000)  # what fades, fades
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
    if folder := os.environ.get("FLEETPLAN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")
    if AXE:
        page.add_script_tag(path=AXE)
        found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
        told = [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]]
        assert told == [], name


def go(page: Any, name: str) -> None:
    """Through the menu, which is on the page, so that nothing covers it afterwards."""
    page.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("heading", name=name, exact=True).wait_for()
    assert not page.get_by_test_id("stSidebar").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_browser_upload_plan_every_tab_download_reload_what_if(
    browser: Any, address: str, width: int, scheme: str
) -> None:
    page = opened(browser, address, width, scheme)
    page.locator("input[type=file]").first.set_input_files(SAMPLE)
    page.get_by_text("No row was left out").wait_for()
    looked_at(page, f"{width}-{scheme}-start")
    plan_button(page).click()
    page.get_by_role("tab", name="Downloads").wait_for()
    for name in TABS:
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        looked_at(page, f"{width}-{scheme}-{name}")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download everything.zip").click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as packed:
        assert {"plan.yaml", "report.html", "slo.yaml", "plan.sh", "manifests/README.md"} <= set(
            packed.namelist()
        )

    said = answer(page).inner_text()
    page.reload()
    assert answer(page).inner_text() == said

    go(page, "What if")
    page.get_by_role("slider").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Keep this plan").wait_for()
    looked_at(page, f"{width}-{scheme}-what-if")
    for name in PAGES[1:]:
        go(page, name)
        looked_at(page, f"{width}-{scheme}-{name}")
        if name in ANSWERS:
            button, heading = ANSWERS[name]
            page.get_by_role("button", name=button, exact=True).click()
            page.get_by_role("heading", name=heading).wait_for()
            looked_at(page, f"{width}-{scheme}-{name}-answer")
    other = opened(browser, address, width, scheme)
    other.get_by_text("None yet").wait_for()


def test_browser_the_keyboard_alone_uploads_plans_and_downloads(browser: Any, address: str) -> None:
    page = opened(browser, address)

    def tab_to(name: str, among: str = "button, [role=tab]") -> None:
        """As a reader hears it; the app has fewer than 200 places to go to."""
        for _ in range(200):
            page.keyboard.press("Tab")
            here = page.evaluate(
                "among => (one => one.matches(among) ? one.innerText : '')(document.activeElement)", among
            )
            if name in here.splitlines():
                return
        raise AssertionError(f"the keyboard does not reach {name}")

    page.get_by_text("No row was left out").wait_for()
    settled(page)
    tab_to("Upload")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(SAMPLE)
    page.get_by_text("No row was left out").wait_for()
    settled(page)
    page.evaluate("document.querySelector('main').focus()")
    tab_to("Plan")
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Downloads").wait_for()
    settled(page)
    tab_to("Fleet")
    for _ in TABS[1:]:
        page.keyboard.press("ArrowRight")
    page.get_by_role("tabpanel", name="Downloads").wait_for()
    tab_to("Download plan.yaml")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert b"status: certified" in Path(download.value.path()).read_bytes()


def test_browser_every_input_has_a_label(browser: Any, address: str) -> None:
    page = opened(browser, address)
    for name in ("Goal and limits", "Policies and safety", "slo.yaml: the question as text"):
        page.get_by_text(name, exact=True).click()
    page.get_by_role("spinbutton", name="Seed").wait_for()
    page.get_by_role("spinbutton", name="Losses to survive").wait_for()
    names = page.locator("input:not([type=file]), textarea, button[role=combobox]").evaluate_all(
        "found => found.filter(one => one.offsetParent).map(one => "
        "one.ariaLabel || one.labels?.[0]?.innerText || one.getAttribute('aria-labelledby') || '')"
    )
    assert names and all(names), names


def long_plan(page: Any, rate: str) -> None:
    """A question of many simulations: this sample at hundreds of requests per second, any number of GPUs."""
    page.get_by_role("spinbutton", name="Rate [requests/s]").fill(rate)
    page.keyboard.press("Tab")
    page.get_by_text("Goal and limits", exact=True).click()
    for name in ("Cost at most [USD/h]", "Power at most [kW]"):
        page.get_by_role("spinbutton", name=name).fill("100000")
        page.keyboard.press("Tab")
    page.wait_for_timeout(1500)
    plan_button(page).click()


def test_browser_a_long_plan_tells_how_far_it_is_survives_a_reload_and_ends_when_cancelled(
    browser: Any, address: str
) -> None:
    """Meanwhile another browser makes a plan of its own, and neither sees the other's."""
    page = opened(browser, address)
    long_plan(page, "400")
    page.get_by_text("Working").wait_for()
    page.get_by_text(
        re.compile(r"best fleet so far [\d,.]+, no fleet below [\d,.]+, \d+ simulations")
    ).wait_for()
    where = page.url
    page.reload()
    page.get_by_text("Working").wait_for()
    other = opened(browser, address)
    other.get_by_text("None yet").wait_for()
    plan_button(other).click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled").wait_for()
    answer(other).wait_for()
    assert page.url == where != other.url
    assert page.get_by_role("tab").count() == 0 and other.get_by_role("tab").count() == len(TABS)


def test_browser_a_million_rows_and_a_broken_file_do_not_end_the_app(
    browser: Any, address: str, tmp_path: Path
) -> None:
    large, broken = tmp_path / "large.csv", tmp_path / "broken.csv"
    rows = "".join(f"{k * 0.01:.2f},{100 + k % 900},{20 + k % 80}\n" for k in range(ONE_MILLION))
    large.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    broken.write_text("timestamp,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    page = opened(browser, address)
    page.locator("input[type=file]").first.set_input_files(large)
    page.get_by_text("1,000,000 requests").wait_for()
    page.locator("input[type=file]").first.set_input_files(broken)
    page.get_by_role("alert").get_by_text("broken.csv, line 3, column input_tokens").wait_for()
