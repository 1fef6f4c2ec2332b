"""Prefixes and tenants: what prompts share, which worker should keep what, who sends and gets how much."""

from __future__ import annotations

import streamlit as st

from planner.errors import PlannerError
from planner.units import show_percent, show_s
from ui import draw, question
from ui.session import follow_job, open_session
from ui.store import Document

MOST_ROWS = 20  # At most this many placed prefixes are shown, the hottest first; chosen by hand.
SHARED = "shared-prefixes"  # The first sample with this in its name is the one chosen at first.
PLACING_LIMIT_S = 120.0  # The default of `plan prefixes`.


def page() -> None:
    """The page Prefixes and tenants."""
    session = open_session()
    st.title("Prefixes and tenants", anchor=False)
    st.write(
        "System prompts and conversations begin alike; a worker that keeps the beginning saves its work. "
        "Tenants share what the fleet gives."
    )
    traces = session.store.traces(session.id)
    first = next((k for k, reference in enumerate(traces) if SHARED in reference), 0)
    trace = st.selectbox(
        "Trace with block ids (Mooncake, Qwen-Bailian, RAGPulse)",
        traces,
        first,
        format_func=lambda reference: reference.partition("/")[2],
        key="prefix_trace",
    )
    st.caption("Upload others on the page Plan.")
    shown = session.plan_shown()
    is_placing = st.checkbox(
        "Place prefixes on the workers of the plan", key="prefix_place", disabled=shown is None
    )
    pools = [row["name"] for row in shown[1]["workers"] if row["role"] != "decode"] if shown else []
    pool = None
    if is_placing and len(pools) > 1:
        pool = st.selectbox("On which of its pools", pools, key="prefix_pool")
    if st.button("Show", type="primary", key="prefix_start"):
        fleet = ""
        if is_placing and shown is not None:
            fleet = session.store.files(shown[0].result, "plan.yaml")["plan.yaml"].decode()
        try:
            form = session.current_form()
            # The roles of columns that were chosen on the page Plan are those of its trace.
            roles = form["map"] if form["trace"] == trace else {}
            request = session.request(form | {"trace": trace, "source": question.UPLOAD})
            request |= {"fleet": fleet, "pool": pool, "time_limit_s": PLACING_LIMIT_S}
            request |= {"traffic": {"map": roles} if roles else {}}
            session.jobs.start(session.id, "prefixes", "prefixes", request)
        except PlannerError as error:
            draw.draw_error(error)
    answer = follow_job(session, "prefixes")
    job = session.jobs.find(session.id, "prefixes")
    if answer is None or job is None:
        return
    _draw_sharing(answer)
    if "plan" in answer:
        _draw_placement(answer["plan"])
        for name, simulated in (answer.get("simulated") or {}).items():
            loads = simulated["simulated_load"]
            st.write(
                f"Simulated from cold caches, {draw.escape_markdown(name)}: "
                f"{show_percent(simulated['simulated_hit_frac'])} hit of "
                f"{show_percent(simulated['possible_hit_frac'])} possible from cold; the busiest worker has "
                f"{max(loads):.4g} s of work per second, the idlest {min(loads):.4g} s."
            )
    draw.draw_tenants(answer["tenant_rows"])
    if shown is not None and shown[1]["simulation"]["tenants"]:
        _draw_service(shown[1]["simulation"]["tenants"])
    draw.draw_downloads(session.store, job.key, session.store.files(job.key))


def _draw_sharing(answer: Document) -> None:
    """Draw what the prompts share, with the measures of papers under their own names."""
    trace = answer["trace"]
    sharing = trace["sharing"]
    st.header("What prompts share")
    st.subheader(
        f"An endless cache would save {show_percent(sharing['token_hit_frac'])} of the prompts' tokens"
    )
    draw.draw_charts(answer["charts"])
    window = f"distinct tokens in {trace['window_s']:g} s"
    gaps = trace["reuse_gap_s"].items()
    rows = [
        ("requests", f"{trace['requests']:,}"),
        (
            "blocks",
            f"{sharing['blocks']:,} of {sharing['block_tokens']} tokens, {sharing['distinct_blocks']:,} "
            f"distinct ({trace['distinct_tokens']:,} tokens)",
        ),
        ("blocks that hit (Mooncake)", show_percent(sharing["block_hit_frac"])),
        ("mean hit of a request", show_percent(sharing["request_hit_frac"])),
        ("tokens another request has too (Preble)", show_percent(sharing["shared_token_frac"])),
        ("of a prompt, mean and spread", _spread_text(trace["shared_frac"], 100, " %")),
        ("key portion of a prompt (Preble)", _spread_text(trace["key_frac"], 100, " %")),
        ("requests of a shared key portion", _spread_text(trace["key_requests"])),
        (
            "tree",
            f"{trace['nodes']:,} nodes, {trace['roots']:,} roots, {trace['largest_depth']} deep, "
            f"at most {trace['largest_branching']:,} children",
        ),
        ("shared prefixes", f"{trace['shared_nodes']:,}, of {trace['shared_node_tokens']:,} tokens"),
        ("requests of the hottest prefix", f"{trace['hottest_node_requests']:,}"),
        ("time until a block is used again", ", ".join(f"p{p}: {show_s(gap)}" for p, gap in gaps) or "-"),
        (
            window,
            f"{_spread_text(trace['working_set_tokens'])}, "
            f"at most {trace['largest_working_set_tokens']:,.0f}",
        ),
    ]
    draw.draw_table(("what", "how much"), rows)
    st.caption(
        "A prompt is cut into blocks; a block hits where an earlier prompt had it and all before it, too. "
        "The key portion of a prompt ends with the last part that is longer than all before it (Preble)."
    )
    st.markdown("**One cache for all requests, which forgets what was used longest ago (LRU)**")
    sizes = [(f"{int(tokens):,} tokens", show_percent(frac)) for tokens, frac in trace["hit_frac"].items()]
    sizes.append(("endless", show_percent(trace["infinite_hit_frac"])))
    sizes += [
        (f"endless, round robin over {workers} workers", show_percent(frac))
        for workers, frac in trace["round_robin_hit_frac"].items()
    ]
    draw.draw_table(("cache", "tokens that hit"), sizes)


def _draw_placement(plan: Document) -> None:
    """Draw which prefixes the workers of a pool should keep, and what that saves by the model's estimate."""
    st.subheader(
        f"On {plan['workers']} workers of {plan['pool']}: {show_percent(plan['hit_frac'])} of prompt "
        f"tokens hit, {show_percent(plan['prefill_saved_frac'])} of the prefill work is saved"
    )
    st.caption(f"{str(plan['basis']).capitalize()}.")
    load, warm_up = plan["load"], plan["warm_up_tokens"]
    rows = [
        (
            "tokens for prefixes per worker",
            f"{plan['prefix_tokens_per_worker']:,}, of which sessions keep "
            f"{min(plan['session_tokens']):,.0f} or more",
        ),
        (
            "expected hit ratio",
            f"{show_percent(plan['stable_hit_frac'])} stable, "
            f"{show_percent(plan['session_hit_frac'])} in sessions",
        ),
        (
            "work per second of the busiest worker",
            f"{max(load):.4g} s; {plan['load_without_caches']:.4g} s without caches, no less than "
            f"{plan['load_bound']:.4g} s in any way",
        ),
        (
            "workers for the same load",
            f"{plan['workers_needed']} instead of {plan['workers']}, {plan['gpus_saved']} GPUs fewer",
        ),
        ("warm-up", f"{sum(warm_up.values()):,} tokens on {len(warm_up)} workers"),
    ]
    draw.draw_table(("what", "how much"), rows)
    nodes = [
        (
            str(row["prefix"]),
            f"{row['tokens']:,}",
            f"{row['requests_per_s']:.3g}",
            str(row["replicas"]),
            show_percent(row["hit_frac"]),
        )
        for row in plan["nodes"][:MOST_ROWS]
    ]
    if nodes:
        draw.draw_table(("prefix", "tokens", "requests/s", "replicas", "its requests that hit"), nodes)
        if len(plan["nodes"]) > MOST_ROWS:
            st.caption(f"The hottest {MOST_ROWS} of {len(plan['nodes'])}; prefixes.json has all.")


def _spread_text(quantiles: Document, factor: float = 1.0, unit: str = "") -> str:
    """The mean and the standard deviation; a single value has only the mean."""
    if quantiles["mean"] is None:
        return "-"
    mean, sd = (_figure_text(factor * quantiles[key]) for key in ("mean", "sd"))
    return f"{mean}{unit} (standard deviation {sd}{unit})"


def _figure_text(value: float) -> str:
    """A number with commas from 1000 on, else with four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _seconds_or_never(value_s: float | None) -> str:
    """A percentile; None stands for an infinite one, which requests that never got that far have."""
    return "never" if value_s is None else show_s(value_s)


def _draw_service(answer: Document) -> None:
    """Draw the service that each tenant of the plan's traffic gets in the plan's simulation."""
    st.subheader("What the plan gives each tenant")
    st.write(f"Jain's index of their service is {answer['jain_index']:.3g}; 1 is equal.")
    rows = [
        (
            tenant["tenant"],
            f"{tenant['weight']:g}",
            f"{tenant['requests']:,}",
            f"{tenant['service_tokens_per_s']:,.0f}",
            *(_seconds_or_never(tenant[key]["p90"]) for key in ("ttft_s", "e2e_s")),
        )
        for tenant in answer["each"]
    ]
    draw.draw_table(("tenant", "weight", "requests", "tokens/s", "TTFT p90", "E2E p90"), rows)


page()
