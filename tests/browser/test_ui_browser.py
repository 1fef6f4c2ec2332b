"""The app as people use it, in Debian's Chromium by Playwright, on a desk and on a phone, light and dark.

`make test-browser`, which CI runs too. FLEETPLAN_SCREENSHOTS=DIR keeps what it saw; FLEETPLAN_AXE=axe.min.js
has every page checked by axe; FLEETPLAN_SCREENSHOTS_NEW=1 stores the pictures of tests/data/browser anew.
"""

from __future__ import annotations

import functools
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import (
    DESK,
    PHONE,
    answer,
    chosen,
    chromium,
    focused,
    go,
    looked_at,
    need_browser,
    opened,
    plan_button,
    planned,
    same_blocks,
    served,
    settled,
    tab,
    typed,
)
from live_metrics import exported
from plans import pairs
from shares import some

from planner.files.checked_files import repository_dir
from planner.simulator.replay import simulate
from planner.traffic.trace import spread_stamps
from planner.traffic.trace_reading import read_trace

need_browser("streamlit")

SAMPLE = repository_dir("examples") / "traces" / "azure-conversation-sample.csv"
DATA = Path(__file__).parents[1] / "data"
PICTURES = DATA / "browser"
TABS = ("Fleet", "SLO", "How it runs", "What binds", "Alternatives", "Proof", "Downloads")
PAGES = (
    "What if",
    "Day",
    "Schedule",
    "Prefixes and tenants",
    "Several LLMs",
    "Validation",
    "Watch",
    "Saved plans",
)
MOST_STOPS = 12  # of the keyboard, to Plan
FOREIGN = "when,who,asked_for,got\n" + "".join(
    f"2026-03-01T00:{k // 60:02d}:{k % 60:02d}Z,u{k % 3},{200 + k % 50},{20 + k % 9}\n" for k in range(240)
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("ui") / "plans") as where:
        yield where


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def test_browser_first_plan_in_three_clicks_to_a_manifest(browser: Any, address: str) -> None:
    """Plan, Downloads, manifests; then everything, and a reload on the tab that was open."""
    page = opened(browser, address)
    page.get_by_text("No row was left out").wait_for()
    looked_at(page, "start")
    same_blocks(page, PICTURES / "start.png")
    planned(page)
    page.locator("[data-knob=traffic]").wait_for()  # with them the page is drawn anew, which ends a download
    page.get_by_role("tab", name="Downloads").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download manifests.zip").click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as packed:
        assert "manifests/README.md" in packed.namelist()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download everything.zip").click()
    with zipfile.ZipFile(io.BytesIO(Path(download.value.path()).read_bytes())) as packed:
        assert {"plan.yaml", "report.html", "slo.yaml", "plan.sh"} <= set(packed.namelist())
    page.reload()
    page.get_by_role("tabpanel", name="Downloads").wait_for()
    page.get_by_text("The answer is of these inputs").wait_for()
    for name in TABS:
        page.get_by_role("tab", name=name).click()
        page.get_by_role("tabpanel", name=name).wait_for()
        looked_at(page, f"answer-{name}", "[role=tabpanel]")


@pytest.mark.slow
def test_browser_plan_pressed_while_the_page_is_drawn_keeps_the_inputs(browser: Any, address: str) -> None:
    """The run that was interrupted had set inputs that the browser did not have yet: they became empty."""
    for wait_ms in (0, 150, 400):
        page = browser.new_context(viewport={"width": DESK, "height": 900}).new_page()
        page.goto(address)
        plan_button(page).wait_for()
        page.wait_for_timeout(wait_ms)
        plan_button(page).click()
        page.get_by_text("Working").or_(page.locator(".st-key-answer_now")).first.wait_for()
        settled(page)
        rate_is(page, "20")
        assert (
            page.get_by_role("combobox", name="LLM, type to search").input_value().endswith("Llama-3.1-70B")
        )
        page.context.close()


def test_browser_sliders_answer_without_the_server(browser: Any, address: str) -> None:
    """In one task of the browser: what is said and drawn changes before anything could have been asked."""
    page = opened(browser, address)
    planned(page)
    page.locator("[data-knob=traffic]").wait_for()
    moved = page.evaluate(
        """() => {
          const host = [...document.querySelectorAll('*')].find(one => one.shadowRoot?.querySelector('.live'))
          const root = host ? host.shadowRoot : document
          const knob = root.querySelector('[data-knob=traffic]')
          const before = root.querySelector('.said').textContent
          const marker = () => root.querySelector('.kept .marker').getAttribute('cx')
          const at = marker()
          const began = performance.now()
          knob.value = knob.max
          knob.dispatchEvent(new Event('input'))
          return { before, after: root.querySelector('.said').textContent, moved: marker() !== at,
                   ms: performance.now() - began }
        }"""
    )
    assert "keeps its SLO on paper" in moved["before"]
    assert "misses its SLO" in moved["after"] and moved["moved"]
    page.locator(".reset").click()
    page.get_by_text("The plan keeps its SLO on paper.").wait_for()


def test_browser_an_answer_of_earlier_inputs_is_marked_and_so_are_its_downloads(
    browser: Any, address: str
) -> None:
    page = opened(browser, address)
    planned(page)
    typed(page, "Rate [requests/s]", "21")
    page.get_by_text("Inputs changed").wait_for()
    page.get_by_text("traffic.rate: 20.0, now 21.0").wait_for()
    page.locator(".st-key-answer_stale").wait_for()
    page.get_by_role("tab", name="Downloads").click()
    page.get_by_text("Not of the inputs as they stand, but of").wait_for()
    looked_at(page, "stale")
    page.get_by_role("button", name="Back to the inputs of this answer").click()
    page.locator(".st-key-answer_now").wait_for()
    rate_is(page, "20")


@pytest.mark.slow
def test_browser_a_log_with_columns_of_its_own_is_read_by_a_map(
    browser: Any, address: str, tmp_path: Path
) -> None:
    log = tmp_path / "gateway.csv"
    log.write_text(FOREIGN)
    page = opened(browser, address)
    page.get_by_role("radio", name="Upload").click()
    page.locator("input[type=file]").first.set_input_files(log)
    page.get_by_text("Which column is what?").wait_for()
    settled(page)
    for label, name in (("Tokens of the prompt", "asked_for"), ("Tokens of the answer", "got")):
        chosen(page, label, name)
    if not page.get_by_role("combobox", name="When a request arrives").input_value():
        chosen(page, "When a request arrives", "when")
    page.get_by_role("button", name="Read it so").click()
    page.get_by_text("240 requests in 239 s").wait_for()
    looked_at(page, "map")
    page.get_by_text("slo.yaml: the question as text").click()
    assert "asked_for" in page.get_by_role("textbox", name="slo.yaml").input_value()


def test_browser_described_traffic_is_planned(browser: Any, address: str) -> None:
    page = opened(browser, address)
    page.get_by_role("radio", name="Describe").click()
    settled(page)
    typed(page, "Rate [requests/s]", "3")
    typed(page, "Duration [min]", "2")
    page.get_by_role("radio", name="on paper").click()
    settled(page)
    planned(page)
    page.get_by_role("tab", name="Downloads").click()
    page.get_by_text("described traffic. TTFT p90").wait_for()
    assert "--trace" not in page.get_by_text("plan --slo slo.yaml").first.inner_text()


def test_browser_a_broken_file_and_an_impossible_promise_are_one_line_each(
    browser: Any, address: str, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("timestamp,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    page = opened(browser, address)
    typed(page, "Time to first token (TTFT) at most [ms]", "0.5")
    plan_button(page).click()
    page.get_by_role("alert").get_by_text(re.compile("ttft", re.IGNORECASE)).first.wait_for()
    assert page.locator(".st-key-answer_now, .st-key-answer_stale").count() == 0
    page.get_by_role("radio", name="Upload").click()
    page.locator("input[type=file]").first.set_input_files(broken)
    page.get_by_role("alert").get_by_text("broken.csv, line 3, column input_tokens").wait_for()
    looked_at(page, "bad")


def rate_is(page: Any, value: str) -> None:
    from playwright.sync_api import expect

    expect(page.get_by_role("spinbutton", name="Rate [requests/s]")).to_have_value(value, timeout=60_000)


def long_plan(page: Any) -> None:
    """A question of many simulations: this sample at hundreds of requests per second, any number of GPUs."""
    typed(page, "Rate [requests/s]", "400")
    page.get_by_text("Goal and limits", exact=True).click()
    for name in ("Cost at most [USD/h]", "Power at most [kW]"):
        typed(page, name, "100000")
    plan_button(page).click()
    page.get_by_text("Working").wait_for()


def test_browser_a_long_plan_survives_a_reload_and_ends_when_cancelled(browser: Any, address: str) -> None:
    """Meanwhile another tab on the same address is a session of its own, and neither disturbs the other."""
    page = opened(browser, address)
    long_plan(page)
    page.get_by_text(re.compile(r"at most \d+ s left")).wait_for()
    where = page.url
    page.reload()
    page.get_by_text("Working").wait_for()
    assert page.url == where
    other = tab(page.context, where)
    settled(other)
    assert other.url != where
    rate_is(other, "400")
    typed(other, "Rate [requests/s]", "20")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled. Nothing is running any more.").wait_for()
    page.reload()
    settled(page)
    rate_is(page, "400")


def test_browser_back_returns_to_the_answer_and_the_bare_address_remembers(
    browser: Any, address: str
) -> None:
    page = opened(browser, address)
    planned(page)
    settled(page)
    go(page, "What if")
    page.go_back()
    answer(page).wait_for()
    again = tab(page.context, address)
    answer(again).wait_for()
    stranger = opened(browser, address)
    stranger.get_by_text("None yet: press Plan.").wait_for()


def test_browser_a_shared_link_brings_question_and_answer(browser: Any, address: str) -> None:
    page = opened(browser, address)
    typed(page, "Rate [requests/s]", "20")
    planned(page)
    page.get_by_role("button", name="Share", exact=True).click()
    link = page.get_by_text(re.compile(r"\?plan=[0-9a-f]{32}")).inner_text().strip()
    other = opened(browser, link)
    answer(other).wait_for()
    settled(other)
    assert "session=" in other.url and "plan=" not in other.url
    rate_is(other, "20")
    dead = opened(browser, f"{address}/?plan={'0' * 32}")
    dead.get_by_text("The plan of this link is not here any more").wait_for()


def test_browser_the_keyboard_alone_plans_and_lands_on_the_answer(browser: Any, address: str) -> None:
    page = opened(browser, address)
    page.get_by_text("No row was left out").wait_for()
    settled(page)
    stops: list[str] = []
    while not stops or stops[-1] != "BUTTON Plan":
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.tagName") + " " + focused(page))
        assert len(stops) <= MOST_STOPS, stops
    page.keyboard.press("Enter")
    page.locator(".st-key-answer_now").get_by_role("tab", name="Downloads").wait_for()
    page.wait_for_function("document.activeElement.id === 'answer'")
    settled(page)
    page.keyboard.press("Tab")  # the heading's own link
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('.st-key-answer_now').contains(document.activeElement)")


def test_browser_a_phone_shows_the_answer_within_one_screen(browser: Any, address: str) -> None:
    page = opened(browser, address, PHONE)
    page.get_by_text("No row was left out").wait_for()
    looked_at(page, "phone-start")
    same_blocks(page, PICTURES / "phone-start.png")
    planned(page)
    settled(page)
    heading = page.get_by_role("heading", name="Answer")
    page.wait_for_function("document.activeElement.id === 'answer'")
    assert 0 <= heading.bounding_box()["y"] < 450
    looked_at(page, "phone-answer")
    page.reload()
    answer(page).wait_for()
    settled(page)
    assert heading.bounding_box()["y"] < 900


@pytest.mark.parametrize(("width", "scheme"), some([(PHONE, "dark"), (DESK, "light"), (1024, "light")], 1))
def test_browser_every_page_fits_and_has_no_finding(
    browser: Any, address: str, width: int, scheme: str
) -> None:
    page = opened(browser, address, width, scheme)
    planned(page)
    looked_at(page, f"{width}-{scheme}-plan")
    for name in PAGES:
        go(page, name)
        looked_at(page, f"{width}-{scheme}-{name}")


@pytest.mark.parametrize(("width", "scheme"), some([(PHONE, "light"), (DESK, "dark")], 1))
def test_browser_answers_of_the_other_pages_fit_and_have_no_finding(
    browser: Any, address: str, width: int, scheme: str
) -> None:
    """Schedule, Prefixes, Validation, Watch and Day with what they answer."""
    page = opened(browser, address, width, scheme)
    planned(page)
    go(page, "Schedule")
    page.get_by_role("button", name="Schedule", exact=True).click()
    page.get_by_text("USD per hour on average").wait_for()
    looked_at(page, f"{width}-{scheme}-schedule-answer")
    go(page, "Prefixes and tenants")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("An endless cache would save").first.wait_for()
    looked_at(page, f"{width}-{scheme}-prefixes-answer")
    go(page, "Validation")
    page.locator("input[type=file]").first.set_input_files(DATA / "validation.json")
    page.get_by_role("heading", name="Predicted and measured").wait_for()
    looked_at(page, f"{width}-{scheme}-validation-answer")
    go(page, "Watch")
    page.locator("input[type=file]").first.set_input_files(
        {"name": "metrics.json", "mimeType": "application/json", "buffer": measured()}
    )
    page.get_by_text("metrics.json").wait_for()
    settled(page)
    page.get_by_role("button", name="Look").click()
    page.get_by_role("heading", name="Answer").wait_for()
    looked_at(page, f"{width}-{scheme}-watch-answer")
    go(page, "Day")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("button", name="Download day.html").wait_for()
    looked_at(page, f"{width}-{scheme}-day-answer")


@pytest.mark.slow
def test_browser_a_phone_shows_the_answer_for_several_llms_before_the_question(
    browser: Any, address: str
) -> None:
    """While it is worked on, too."""
    page = opened(browser, address, PHONE)
    go(page, "Several LLMs")
    assert chips_fit(page)
    page.get_by_role("button", name="Plan together").click()
    page.get_by_text("Working").wait_for()
    assert page.get_by_role("heading", name="Answer").bounding_box()["y"] < 600
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled. Nothing is running any more.").wait_for()


@functools.cache
def measured() -> bytes:
    """What engines of some fleet would tell Prometheus of the sample."""
    simulation = simulate(pairs(), spread_stamps(read_trace(SAMPLE), seed=0))
    return json.dumps(exported(simulation)).encode()


def chips_fit(page: Any) -> bool:
    """Every GPU that may be chosen is within the screen's width."""
    right = "chips => Math.max(...chips.map(chip => chip.getBoundingClientRect().right))"
    found: float = page.locator(".st-key-shared_use button").evaluate_all(right)
    width: int = page.viewport_size["width"]
    return found <= width


@pytest.mark.slow
def test_browser_labels_of_charts_fit_beside_the_question(browser: Any, address: str) -> None:
    """At 1024 pixels, where charts in pairs cut them."""
    page = opened(browser, address, 1024)
    planned(page)
    page.locator("[data-testid=stVegaLiteChart] svg").nth(6).wait_for()
    settled(page)
    cut = page.locator("[data-testid=stVegaLiteChart] svg").evaluate_all(
        """found => found.flatMap(svg => {
          const box = svg.getBoundingClientRect()
          return [...svg.querySelectorAll('text')]
            .filter(text => text.textContent && text.getBoundingClientRect().right > box.right + 1)
            .map(text => text.textContent)
        })"""
    )
    assert cut == []


def test_browser_every_input_has_a_label(browser: Any, address: str) -> None:
    page = opened(browser, address)
    for name in ("Goal and limits", "Policies and losses", "slo.yaml: the question as text"):
        page.get_by_text(name, exact=True).click()
    page.get_by_role("spinbutton", name="Seed").wait_for()
    page.get_by_role("spinbutton", name="Losses to survive").wait_for()
    names = page.locator("input:not([type=file]), textarea, button[role=combobox]").evaluate_all(
        "found => found.filter(one => one.offsetParent).map(one => one.ariaLabel || "
        "one.labels?.[0]?.innerText || one.getAttribute('aria-labelledby') || '')"
    )
    assert names and all(names), names
    assert page.locator("canvas").count() == 0
