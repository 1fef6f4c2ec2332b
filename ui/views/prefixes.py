"""Prefixes: what the prompts of a trace share, and which worker should keep what."""

from __future__ import annotations

import streamlit as st

from planner.errors import PlannerError
from ui import draw
from ui.session import follow, open_session
from ui.store import Document

MOST_ROWS = 20
SHARED = "shared-prefixes"  # in the name of the sample that has prefixes


def page() -> None:
    session = open_session()
    st.title("Prefixes")
    st.write(
        "System prompts and conversations begin alike; a worker that keeps the beginning saves its work."
    )
    traces = session.store.traces(session.id)
    first = next((k for k, reference in enumerate(traces) if SHARED in reference), 0)
    trace = st.selectbox(
        "Trace with block ids (Mooncake, Qwen-Bailian, RAGPulse)", traces, first,
        format_func=lambda reference: reference.partition("/")[2], key="prefix_trace",
    )  # fmt: skip
    st.caption("Upload others on the page Plan.")
    shown = session.plan_shown()
    place = st.checkbox(
        "Place prefixes on the workers of the plan", key="prefix_place", disabled=shown is None
    )
    if st.button("Show", type="primary", key="prefix_start"):
        fleet = ""
        if place and shown is not None:
            fleet = session.store.files(shown[0].result, "plan.yaml")["plan.yaml"].decode()
        try:
            request = session.request(session.asked() | {"trace": trace})
            request |= {"fleet": fleet, "time_limit_s": 15.0}
            session.jobs.start(session.id, "prefixes", "prefixes", request)
        except PlannerError as error:
            draw.error(error)
    found = follow(session, "prefixes")
    job = session.jobs.of(session.id, "prefixes")
    if found is None or job is None:
        return
    _sharing(found)
    if "plan" in found:
        _placement(found["plan"])
    draw.downloads(session.store, job.key, session.store.files(job.key))


def _sharing(found: Document) -> None:
    trace = found["trace"]
    sharing = trace["sharing"]
    st.subheader(
        f"An endless cache would spare {100 * sharing['token_hit_frac']:.1f} % of the prompts' tokens"
    )
    draw.pictures(found["charts"])
    rows = [
        ("requests", f"{trace['requests']:,}"),
        ("distinct tokens", f"{trace['distinct_tokens']:,}"),
        ("blocks that hit (Mooncake)", f"{100 * sharing['block_hit_frac']:.1f} %"),
        ("tokens another request has too (Preble)", f"{100 * sharing['shared_token_frac']:.1f} %"),
        ("shared prefixes", f"{trace['shared_nodes']:,}"),
        ("requests of the hottest prefix", f"{trace['hottest_node_requests']:,}"),
        *((f"endless caches, round robin over {workers} workers", f"{100 * frac:.1f} % spared")
          for workers, frac in trace["round_robin_hit_frac"].items()),
    ]  # fmt: skip
    draw.table(("what", "how much"), rows)


def _placement(plan: Document) -> None:
    st.subheader(
        f"On {plan['workers']} workers of {plan['pool']}: {100 * plan['hit_frac']:.1f} % of prompt tokens "
        f"hit, {100 * plan['prefill_saved_frac']:.1f} % of the prefill work is saved"
    )
    st.write(
        f"For the same load {plan['workers_needed']} workers would do, {plan['gpus_saved']} GPUs fewer. "
        f"This is {plan['basis']}."
    )
    rows = [
        (str(row["prefix"]), f"{row['tokens']:,}", f"{row['requests_per_s']:.3g}", str(row["replicas"]),
         f"{100 * row['hit_frac']:.1f} %")
        for row in plan["nodes"][:MOST_ROWS]
    ]  # fmt: skip
    if rows:
        draw.table(("prefix", "tokens", "requests/s", "replicas", "its requests that hit"), rows)


page()
