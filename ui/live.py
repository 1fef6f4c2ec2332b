"""What runs in the browser itself: sliders beside a plan, the keyboard's focus, the session's cookie."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

from ui.session import COOKIE
from ui.store import Document

HERE = Path(__file__).parent
FOCUS = """
export default function ({ data }) {
  const heading = document.getElementById(data.id)
  if (!heading) return
  heading.tabIndex = -1
  heading.focus({ preventScroll: true })
  heading.scrollIntoView({ block: "start" })
}
"""
KEEP = """
export default function ({ data }) {
  document.cookie = `${data.name}=${data.value}; path=/; max-age=31536000; SameSite=Lax`
}
"""


@cache
def _component(name: str) -> Any:
    """The component "sliders", "focus" or "keep". Cached, because Streamlit registers a name only once."""
    if name == "sliders":
        return st.components.v2.component(
            "fleetplan_sliders",
            html=(HERE / "live.html").read_text(),
            css=(HERE / "live.css").read_text(),
            js=(HERE / "live.js").read_text(),
        )
    return st.components.v2.component(f"fleetplan_{name}", js={"focus": FOCUS, "keep": KEEP}[name])


def sliders(document: Document, key: str) -> None:
    """Draw sliders for traffic, step times and limits over what the job `sliders` simulated."""
    data = document | {"is_dark": st.context.theme.type == "dark"}
    _component("sliders")(data=data, key=f"sliders_{key}")


def focus_heading(anchor: str, key: str) -> None:
    """Scroll to a heading and give it the keyboard's focus, once for every key."""
    if st.session_state.get("focused") != key:
        st.session_state.focused = key
        _component("focus")(data={"id": anchor}, key=f"focus_{key}")


def keep_session(session: str) -> None:
    """Store the session in a cookie of this browser, which finds it again at an address without a session."""
    _component("keep")(data={"name": COOKIE, "value": session}, key="keep_session")
