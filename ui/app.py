"""The app's frame: `plan ui` runs this file. Pages are the files of views/."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from planner.errors import PlannerError

VIEWS = Path(__file__).parent / "views"
PAGES = {
    "plan": "Plan",
    "what_if": "What if",
    "saved": "Saved plans",
    "schedule": "Schedule",
    "prefixes": "Prefixes and tenants",
    "validation": "Validation",
}

st.set_page_config("Fleet planner", layout="wide")
try:
    from ui.session import open_session

    open_session()
except PlannerError as error:
    st.error(str(error))
    st.stop()
pages = [
    st.Page(VIEWS / f"{name}.py", title=title, url_path="" if name == "plan" else name.replace("_", "-"),
            default=name == "plan")
    for name, title in PAGES.items()
]  # fmt: skip
st.navigation(pages, position="top").run()
