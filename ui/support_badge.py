"""What is known of an LLM on the catalog's GPUs, in a word: the badge beside its name."""

from __future__ import annotations

import streamlit as st

from planner.documents.catalog import Catalog
from planner.errors import PlannerError
from planner.studies.support import Colour, support_badge, support_rows


@st.cache_data(show_spinner=False)
def badge_of(_catalog: Catalog, name: str) -> tuple[str, Colour, str]:
    """A word, its colour and its reason, as `plan catalog support` says it. An app has one catalog, so `name`
    alone tells answers apart.
    """
    try:
        llm = _catalog.llm(name)
        uncapped = [gpu for gpu in _catalog.gpus.values() if gpu.name == gpu.base]
        return support_badge(row for gpu in uncapped if (row := next(support_rows(_catalog, llm, gpu), None)))
    except PlannerError as error:
        return "cannot be read", "red", str(error)
