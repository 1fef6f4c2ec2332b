"""Measures the app from its opening to an answer, in a real Chromium.

    python benchmarks/app.py

Prints CPU seconds of the app and its workers, and what a user notices: the number of clicks and of stops of
the Tab key, the milliseconds of a slider, the seconds until a plan is cancelled. Needs the group `browser`
(`make test-browser` installs it) and Debian's Chromium. The simulator is compiled before.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import browsing

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOVES = 20
MOVE = """
  moves => {
    const host = [...document.querySelectorAll("*")].find(one => one.shadowRoot?.querySelector(".live"))
    const root = host ? host.shadowRoot : document
    const knobs = [...root.querySelectorAll("[data-knob]")]
    const taken = []
    for (let k = 0; k < moves; k++) {
      const knob = knobs[k % knobs.length]
      const began = performance.now()
      knob.value = k % (Number(knob.max) + 1)
      knob.dispatchEvent(new Event("input"))
      root.querySelector(".said").getBoundingClientRect()
      taken.push(performance.now() - began)
    }
    return taken
  }
"""


def cpu_s(of: str) -> float:
    """User and system time of this process's descendants whose command line has `of` in it."""
    parents, times = dict[int, int](), dict[int, float]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_text()
        except OSError:  # it ended
            continue
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        times[pid] = sum(map(int, fields[11:15])) / TICKS_PER_S if of in command else 0.0

    def is_ours(pid: int) -> bool:
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    return sum(taken for pid, taken in times.items() if is_ours(pid))


@contextmanager
def counted(what: str) -> Iterator[None]:
    app, workers, began = cpu_s("streamlit"), cpu_s("ui.worker"), time.monotonic()
    yield
    print(
        f"{what}: {cpu_s('streamlit') - app:.1f} CPU s of the app, {cpu_s('ui.worker') - workers:.1f} of its "
        f"workers, {time.monotonic() - began:.1f} s by the clock"
    )


def first_plan(browser: Any, address: str) -> Any:
    """Measures a first plan in a second browser: the first browser also waited for the app to start, which is
    measured by itself.
    """
    with counted("the app starts, and its worker is warm"):
        page = browsing.opened(browser, address)
        page.get_by_text("No row was left out").wait_for()
        calm(("ui.worker", "streamlit"))
    page.context.close()
    with counted("opening, to the first plan (on paper)"):
        page = browsing.opened(browser, address)
        browsing.plan_button(page).click()
        page.locator(".st-key-answer_first .verdict, .st-key-answer_now .verdict").first.wait_for()
    with counted("from there to the plan for production, with sliders"):
        browsing.answer(page).wait_for()
        page.locator("[data-knob=traffic]").wait_for()
    return page


def calm(names: tuple[str, ...]) -> None:
    """Waits until these processes have used no CPU for two seconds."""
    before = -1.0
    while (now := sum(map(cpu_s, names))) > before + 0.05:
        before = now
        time.sleep(2.0)


def sliders(page: Any) -> None:
    taken = sorted(page.evaluate(MOVE, MOVES))
    print(f"a slider moved: {taken[len(taken) // 2]:.1f} ms, at most {taken[-1]:.1f} of {MOVES}")


def cancelled(page: Any) -> None:
    """A plan of hundreds of requests per second, ended."""
    browsing.typed(page, "Rate [requests/s]", "400")
    browsing.plan_button(page).click()
    page.get_by_text(re.compile(r"at most \d+ s left")).wait_for()
    began = time.monotonic()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled. Nothing is running any more.").wait_for()
    print(f"cancelled: {time.monotonic() - began:.2f} s by the clock")


def clicks(page: Any) -> None:
    """From the answer on; Plan was the first."""
    page.get_by_role("tab", name="Downloads").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download manifests.zip").click()
    print(f"opening to {download.value.suggested_filename}: 3 clicks")


def keyboard(browser: Any, address: str) -> None:
    page = browsing.opened(browser, address)
    page.get_by_text("No row was left out").wait_for()
    browsing.settled(page)
    stops = 0
    while browsing.focused(page) != "Plan" or page.evaluate("document.activeElement.tagName") != "BUTTON":
        page.keyboard.press("Tab")
        stops += 1
    print(f"keyboard: {stops} stops to Plan")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder, browsing.served(Path(folder) / "plans") as address:
        with browsing.chromium() as browser:
            page = first_plan(browser, address)
            sliders(page)
            clicks(page)
            cancelled(page)
            keyboard(browser, address)


if __name__ == "__main__":
    main()
