"""Takes the pictures of docs/images anew in a real Chromium: the app and the reports, for the example trace.

    python benchmarks/pictures.py [--only ui-plan ...]

Needs what `make test-browser` installs, and Debian's Chromium. Look at them before they are committed.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import browsing

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SLO, TRACE = ROOT / "examples" / "slo.yaml", ROOT / "examples" / "traces" / "azure-conversation-sample.csv"
COLOURS = 128
FLEETS = {  # of docs/compare.md
    "mixed": "- {name: mixed, gpu: h100-80g, tp: 4, count: 2}",
    "split": "- {name: pre, role: prefill, gpu: h100-80g, tp: 4, count: 2}\n"
    "- {name: dec, role: decode, gpu: h100-80g, tp: 4, count: 1}",
    "a100": "- {name: mixed, gpu: a100-80g, tp: 4, count: 4}",
}


def taken(page: Any, name: str, height: int) -> None:
    """Takes a picture of the top of a page, so many pixels high."""
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.evaluate("window.scrollTo(0, 0); document.querySelector('[data-testid=stMain]')?.scrollTo(0, 0)")
    page.wait_for_timeout(1000)  # Charts are drawn anew for the new height.
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    picture.quantize(COLOURS).save(IMAGES / f"{name}.png", optimize=True)
    print(IMAGES / f"{name}.png")


def ui_plan(browser: Any, address: str) -> None:
    page = browsing.opened(browser, address)
    browsing.planned(page)
    browsing.settled(page)
    taken(page, "ui-plan", 900)


def ui_what_if(browser: Any, address: str) -> None:
    page = browsing.opened(browser, address)
    browsing.planned(page)
    browsing.go(page, "What if")
    page.get_by_role("slider").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Keep this plan").wait_for()
    browsing.settled(page)
    taken(page, "ui-what-if", 1250)


def ui_several(browser: Any, address: str) -> None:
    page = browsing.opened(browser, address)
    browsing.go(page, "Several LLMs")
    page.get_by_role("button", name="Plan together").click()
    page.get_by_role("tab", name="Downloads").wait_for()
    browsing.settled(page)
    taken(page, "ui-several", 1250)


def report(browser: Any, _: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _plan(["--slo", str(SLO), "--trace", str(TRACE), "-o", folder])
        _page(browser, Path(folder) / "report.html", "report", (1000, 1000))


def compare(browser: Any, _: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, fleets = Path(name), list[str]()
        for each, rows in FLEETS.items():
            text = "llm: meta-llama/Llama-3.1-70B\nworkers:\n" + rows + "\n"
            (folder / f"{each}.yaml").write_text(text)
            fleets += ["--fleet", str(folder / f"{each}.yaml")]
        _plan(["compare", "--trace", str(TRACE), "--slo", str(SLO), *fleets, "-o", str(folder / "out")])
        _page(browser, folder / "out" / "compare.html", "compare", (1000, 640))


def _plan(arguments: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "planner.cli", *arguments], check=True, stdout=subprocess.DEVNULL)


def _page(browser: Any, file: Path, name: str, size: tuple[int, int]) -> None:
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme="light")
    page.goto(file.as_uri())
    taken(page, name, size[1])


PICTURES: dict[str, Callable[[Any, str], None]] = {
    "ui-plan": ui_plan,
    "ui-what-if": ui_what_if,
    "ui-several": ui_several,
    "report": report,
    "compare": compare,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), default=list(PICTURES))
    asked = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder, browsing.served(Path(folder) / "plans") as address:
        with browsing.chromium() as browser:
            for name in asked:
                PICTURES[name](browser, address)


if __name__ == "__main__":
    main()
