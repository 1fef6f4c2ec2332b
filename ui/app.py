"""The app's frame: `plan ui` runs this file. Pages are the files of views/."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from planner.errors import PlannerError
from planner.files.checked_files import package_text

HERE = Path(__file__).parent
PAGES = {
    "plan": "Plan",
    "what_if": "What if",
    "day": "Day",
    "schedule": "Schedule",
    "prefixes": "Prefixes and tenants",
    "several": "Several LLMs",
    "validation": "Validation",
    "watch": "Watch",
    "saved": "Saved plans",
}
st.set_page_config("Fleet planner", layout="wide")
try:
    from ui import live
    from ui.session import open_session

    session = open_session()
except PlannerError as error:
    st.error(str(error))
    st.stop()
pages = {
    name: st.Page(
        HERE / "views" / f"{name}.py",
        title=title,
        default=name == "plan",
        url_path="" if name == "plan" else name.replace("_", "-"),
    )
    for name, title in PAGES.items()
}
chosen = st.navigation(list(pages.values()), position="hidden")
st.html(f"<style>{package_text('reports/parts.css')}{(HERE / 'style.css').read_text()}</style>")
if st.context.theme.type == "dark":
    st.html(HERE / "dark.css")
live.keep_session(session.id)
# Our menu is a row of links. Streamlit's own menu would stay unfolded on a phone.
with st.container(horizontal=True, gap="small", key="menu"):
    for name, page in pages.items():
        st.page_link(page, label=PAGES[name], query_params={"session": session.id})
chosen.run()
