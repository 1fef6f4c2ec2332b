"""What is known of an LLM on the catalog's GPUs, in a word: the badge beside its name."""

from __future__ import annotations

from typing import Literal

import streamlit as st

from planner.documents.catalog import Catalog
from planner.errors import PlannerError
from planner.models.memory import memory

MEASURED, CARRIED = ("kernels", "steps"), ("derived", "given")  # of `StepLatency.kind`
Colour = Literal["green", "orange", "red"]


@st.cache_data(show_spinner=False)
def badge(_catalog: Catalog, name: str) -> tuple[str, Colour, str]:
    """A word, its colour and its reason, as `plan catalog support` has them row by row. An app has one
    catalog, so `name` alone tells answers apart.
    """
    by_kind: dict[str, list[str]] = {}
    try:
        llm = _catalog.llm(name)
        for gpu in _catalog.gpus.values():
            if gpu.name != gpu.base:
                continue
            for tp in filter(llm.splits_over, range(1, gpu.gpus_per_node + 1)):
                if memory(llm, gpu, tp).kv_tokens:
                    kind = _catalog.latency(llm, gpu, tp).kind
                    by_kind.setdefault(kind, []).append(gpu.name)
                    break
    except PlannerError as error:
        return "cannot be read", "red", str(error)
    measured, carried = (
        [gpu for kind in kinds for gpu in by_kind.get(kind, ())] for kinds in (MEASURED, CARRIED)
    )
    computed = by_kind.get("roofline", [])
    parts = [
        f"{words}: {', '.join(found)}"
        for words, found in (
            ("Step times measured on", measured),
            ("carried over from another GPU", carried),
            ("computed from the GPU's figures", computed),
        )
        if found
    ]
    why = ". ".join(parts) + "." if parts else "No node of the catalog holds it."
    if measured:
        return f"measured on {len(measured)} GPU types", "green", why
    if carried:
        return f"estimated on {len(carried)} GPU types", "orange", why
    return ("computed, nothing measured", "red", why) if computed else ("fits on no node", "red", why)
