"""The report as people read it, in Debian's Chromium driven by Playwright: with and without scripts.

`make test-browser`, which CI runs too. FLEETPLAN_SCREENSHOTS=DIR keeps what it saw.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium, need_browser
from plans import a_plan, a_robustness
from shares import some

from planner.reports import report

need_browser()

EVIL = "</script><script>alert(1)</script>"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
CHARTS = 8  # The first screen has six; then come alternatives and how busy workers are.
KV = 2  # after attainment, demand
AXE = os.environ.get("FLEETPLAN_AXE")
Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the report of a plan with a hostile name, under a policy that forbids all but its own script."""
    plan = a_plan()
    plan = replace(plan, certificate=replace(plan.certificate, robustness=a_robustness()))
    pools = (replace(plan.fleet.pools[0], name=EVIL), *plan.fleet.pools[1:])
    page = report.render_report(replace(plan, fleet=replace(plan.fleet, pools=pools)))
    head = '<meta charset="utf-8">'
    file = tmp_path / "report.html"
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    file.write_text(page.replace(head, head + policy))
    with chromium() as browser:
        seen: list[str] = []

        def open_it(width: int = 1280, **more: Any) -> Any:
            context = browser.new_context(viewport={"width": width, "height": 900}, **more)
            tab = context.new_page()
            tab.on("console", lambda message: seen.append(message.text))
            tab.on("pageerror", lambda error: seen.append(str(error)))
            tab.on("dialog", lambda dialog: seen.append(dialog.message))
            tab.on("request", lambda asked: seen.extend({asked.url} - {file.as_uri()}))
            tab.goto(file.as_uri())
            if more.get("java_script_enabled", True):
                for folded in tab.query_selector_all("details.later:not([open]) > summary"):
                    folded.click()  # a phone shows the first screen alone, until one asks for more
                for figure in tab.query_selector_all("figure"):
                    figure.scroll_into_view_if_needed()
                tab.locator(".live svg.marks").nth(CHARTS - 1).wait_for()
            if folder := os.environ.get("FLEETPLAN_SCREENSHOTS"):
                tab.screenshot(path=Path(folder) / f"report-{width}.png", full_page=True)
            return tab

        yield open_it
    assert seen == []


def shown(tab: Any, what: str) -> int:
    return sum(element.is_visible() for element in tab.query_selector_all(what))


def test_charts_answer_and_tell_the_name_of_their_line_browser(opened: Open) -> None:
    tab = opened()
    assert (shown(tab, ".live svg.marks"), shown(tab, ".still svg")) == (CHARTS, 0)
    chart = tab.query_selector_all(".live")[KV]
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_selector("#vg-tooltip-element.visible")
    told = tab.inner_text("#vg-tooltip-element")
    assert told.splitlines()[0] in (EVIL, "dec")
    assert "time [s]" in told and "KV cache in use" in told


def test_a_legend_shows_one_line_alone_browser(opened: Open) -> None:
    tab = opened()
    chart = tab.query_selector_all(".live")[KV]
    faint = "path => path.getAttribute('opacity') < 1"
    count = f"chart => [...chart.querySelectorAll('.mark-line path')].filter({faint}).length"
    assert chart.evaluate(count) == 0
    chart.query_selector(".role-legend-label text").click()
    tab.wait_for_timeout(300)
    assert chart.evaluate(count) == 1


def test_print_and_pages_without_scripts_show_the_pictures_browser(opened: Open) -> None:
    tab = opened()
    tab.emulate_media(media="print", color_scheme="dark")
    assert (shown(tab, ".live svg.marks"), shown(tab, ".still svg")) == (0, CHARTS)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    plain = opened(java_script_enabled=False)
    assert (shown(plain, ".live svg.marks"), shown(plain, ".still svg")) == (0, CHARTS)


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_page_browser(opened: Open, width: int) -> None:
    tab = opened(width, color_scheme="dark")
    root = "document.documentElement"
    assert tab.evaluate(f"{root}.scrollWidth - {root}.clientWidth") == 0
    for element in tab.query_selector_all(".live svg.marks, .scroll table"):
        box = element.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


@pytest.mark.parametrize(("width", "scheme"), some([(390, "dark"), (1440, "light"), (1024, "dark")], 1))
def test_axe_finds_nothing_browser(opened: Open, width: int, scheme: str) -> None:
    """WCAG 2.1 A and AA; axe-core comes by FLEETPLAN_AXE."""
    if AXE is None:
        pytest.skip("FLEETPLAN_AXE=package/axe.min.js of `npm pack axe-core`")
    tab = opened(width, color_scheme=scheme)
    tab.evaluate(Path(AXE).read_text())
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
    found = tab.evaluate("rules => axe.run(rules)", rules)
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]] == []


def test_the_first_screen_answers_without_scrolling_browser(opened: Open) -> None:
    """At 1440 x 900: the verdict, the figures at a glance, and the card of the plan."""
    tab = opened(1440, java_script_enabled=False)
    for what in (".verdict", ".figures", ".cards .chosen"):
        box = tab.query_selector(what).bounding_box()
        assert box["y"] + box["height"] <= 900, what


@pytest.mark.parametrize(("width", "open_parts"), [(1280, True), (390, False)])
def test_a_phone_folds_what_comes_later_browser(opened: Open, width: int, open_parts: bool) -> None:
    tab = opened(width)
    tab.reload()
    parts = tab.query_selector_all("details.later")
    assert parts and {part.evaluate("part => part.open") for part in parts} == {open_parts}


def test_it_prints_on_a_few_pages_browser(opened: Open, tmp_path: Path) -> None:
    tab = opened()
    tab.emulate_media(media="print")
    written = tab.pdf(format="A4", print_background=True)
    assert 3 <= written.count(b"/Type /Page\n") + written.count(b"/Type /Page ") <= 12
