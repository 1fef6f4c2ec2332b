"""A plan as tables of text, for the report and the browser."""

import math

import numpy as np

from planner.documents.certificate import Alternative
from planner.documents.fleet_file import RouterRow
from planner.domain import KV_BLOCK_TOKENS, Slo, row_of
from planner.fleet import Fleet, Pool, WorkerType
from planner.manifests.engine_command import engine_title, why_undeployable
from planner.reports.answer_sentences import workers_text
from planner.reports.curves import PERCENTILES, mean_and_percentiles, sampled_gaps_s, statistics_of
from planner.reports.fact_sentences import drawn_text, fact_sentence, prices_text, router_text, times_text
from planner.reports.screen import input_bases
from planner.reports.words import (
    HOURS_PER_YEAR,
    Rows,
    alternative_notes,
    describe_fleet,
    guarantee_text,
    limit_text,
    unpriced_text,
    usd_text,
    value_and_limit,
)
from planner.search.evidence.plan import Plan, served_s
from planner.search.problem.bill import Bill
from planner.simulator.layout import run_seconds
from planner.simulator.measured_values import measured_mask
from planner.simulator.slo_verdict import LineVerdict, Verdict, WindowResult
from planner.simulator.utilisation import PoolUse, pool_uses
from planner.slo_metrics import METRICS, verdict_word
from planner.solvers.repeats import CONFIDENCE_FRAC, FAILS_FRAC, HOLDS_FRAC, Interval
from planner.units import (
    HOURS_PER_MONTH,
    count_text,
    percentile_name,
    show_amount,
    show_beside,
    show_clock,
    show_digits,
    show_percent,
    show_s,
    show_share,
    show_w,
)

SHOWN_AS_0_FRAC = 5e-4  # A smaller difference would be shown as 0.0 %.


def simulated_routers(plan: Plan) -> list[RouterRow]:
    """Whether the SLO is kept under the router of each deployment target that can run the plan."""
    return [
        RouterRow(
            target=under.target,
            router=router_text(under),
            simulated=" and ".join(dict.fromkeys(under.simulated))
            + (f" (the router {', '.join(under.differs)})" if under.differs else ""),
            slo=fact_sentence(under),
            kept=under.keeps,
        )
        for under in plan.certificate.routers
    ]


def router_rows(plan: Plan) -> Rows:
    """A line per deployment target that can run the plan: its router, and whether it keeps the SLO."""
    rows: list[tuple[str, ...]] = [
        (row.target, row.router, row.simulated, row.slo) for row in simulated_routers(plan)
    ]
    return ("Target", "Router", "Simulated as", "SLO"), rows


def tokens_text(worker: WorkerType) -> str:
    """The most tokens of a step, and the drafted tokens of each decode in it."""
    # One of a decode's tokens in a step is the next token; the others are drafts.
    drafts = worker.step_tokens - 1
    return f"{worker.max_num_batched_tokens:,}" + (f", {drafts} drafted" if drafts else "")


def split_text(worker: WorkerType) -> str:
    """How a worker's GPUs share the LLM beside tensor parallelism: pipeline, data and expert parallelism."""
    stages = f", PP {worker.pp}" if worker.pp > 1 else ""
    ranks = f", DP {worker.dp}" if worker.dp > 1 else ""
    return stages + ranks + (", EP" if worker.ep else "")


def fleet_rows(fleet: Fleet) -> Rows:
    """A line per pool: name, role, workers, GPUs, settings."""
    rows: list[tuple[str, ...]] = [
        (
            pool.name,
            pool.role,
            str(pool.count),
            f"{pool.type.gpus} × {pool.type.gpu.name}{split_text(pool.type)}",
            f"{pool.count * pool.type.gpus}",
            tokens_text(pool.type),
            f"{pool.type.max_num_seqs:,}",
            f"{pool.type.kv_tokens:,}",
            f"{pool.count * pool.type.power_w / 1e3:,.1f}",
            f"{pool.count * pool.type.price_usd_per_h:,.2f}",
        )
        for pool in fleet.running_pools
    ]
    head = (
        "Pool",
        "Role",
        "Workers",
        "Each",
        "GPUs",
        "Tokens per step",
        "Sequences",
        "KV tokens",
        "kW",
        "USD/h",
    )
    return head, rows


def slo_rows(plan: Plan) -> Rows:
    """The lines of `limit_rows` for a plan: its SLO and its verdict."""
    return limit_rows(plan.slo, plan.verdict)


def limit_rows(slo: Slo, verdict: Verdict) -> Rows:
    """A line per limit: the limit, the simulated value, the verdict. If every window must keep the limit, a
    second line has the worst window.
    """
    rows: list[tuple[str, ...]] = []
    for line in verdict.lines:
        limit_s, (value, limit) = line.limit.limit_s, value_and_limit(line)
        rows.append(
            (
                limit_text(line.limit),
                line.limit.label,
                limit,
                value,
                _margin_text(line.value_s, limit_s),
                _share_text(line),
                signed_verdict(line.holds, line.judged),
            )
        )
        if (worst := line.worst) is not None:
            rows.append(
                (
                    _worst_text(verdict, worst),
                    "",
                    "",
                    show_beside(worst.value_s, limit_s).value,
                    _margin_text(worst.value_s, limit_s),
                    _share_text(worst),
                    signed_verdict(worst.holds, worst.judged),
                )
            )
    if slo.attainment_frac is not None:
        needed, attained = show_share(slo.attainment_frac), show_share(verdict.attainment_frac)
        rows.append(
            (
                f"{needed} of requests keep all limits at once",
                "attainment",
                needed,
                attained,
                "",
                attained,
                signed_verdict(verdict.attainment_holds, verdict.is_judged),
            )
        )
        if (worst := verdict.attainment_worst) is not None:
            attained = show_share(worst.kept_frac)
            text = _worst_text(verdict, worst)
            rows.append((text, "", "", attained, "", attained, signed_verdict(worst.holds, worst.judged)))
    for promised in verdict.guarantees:
        least, needed = promised.least, show_share(promised.guarantee.share_frac)
        # A guarantee is judged in the windows in which a tenant's work waits all the time, if there are any.
        least_text = (
            f"{show_share(least.share_frac)} ({least.tenant})"
            if promised.windows
            else "no work waited for a whole window"
        )
        rows.append(
            (
                guarantee_text(promised.guarantee),
                promised.guarantee.name,
                needed,
                least_text,
                "",
                "",
                signed_verdict(promised.holds, promised.windows),
            )
        )
    return ("SLO", "Name", "Limit", "Simulated", "Latency below limit", "Kept by", "Verdict"), rows


def _worst_text(verdict: Verdict, worst: WindowResult) -> str:
    """For instance "in the worst of 24 windows, from 14:00 to 15:00"."""
    windows = count_text(verdict.windows, "window")
    return f"in the worst of {windows}, from {show_clock(worst.start_s)} to {show_clock(worst.end_s)}"


def _margin_text(value_s: float, limit_s: float) -> str:
    """The distance below the limit, as a share of it: "12 % below"."""
    below_frac = 1 - value_s / limit_s
    if not np.isfinite(below_frac):
        return "–"
    percent = f"{100 * abs(below_frac):.0f}"
    # "0 % below" would say that the value is the limit, so a small distance is shown as less than 1 %.
    share = "less than 1" if percent == "0" and below_frac else percent
    return f"{share}\u00a0% {'below' if below_frac >= 0 else 'over'}"


def _share_text(line: LineVerdict | WindowResult) -> str:
    """The share of the judged values within the limit."""
    return show_share(line.kept_frac) if line.judged else "–"


def signed_verdict(holds: bool, judged: int) -> str:
    """`verdict_word` after a sign, which is left out if there was nothing to judge and nothing fails."""
    word = verdict_word(holds, judged)
    if not holds:
        return f"✗\u00a0{word}"
    return f"✓\u00a0{word}" if judged else word


def percentile_rows(plan: Plan) -> Rows:
    """Mean and percentiles of the wait in queues and of every metric, whether the SLO limits it or not."""
    simulation = plan.simulation
    inside = measured_mask(simulation)
    gaps, requests_of_gap, sample_stride = sampled_gaps_s(simulation)
    about = "≈ " if sample_stride > 1 else ""
    spreads = [("Queue", "", mean_and_percentiles(simulation.queue_s[inside]))]
    for row in METRICS.values():
        if row.is_of_gaps:
            spreads.append((row.name.capitalize(), about, mean_and_percentiles(gaps, requests_of_gap)))
            continue
        spread = statistics_of(row, simulation, inside)
        if spread is not None:
            spreads.append((row.name.capitalize(), "", spread))
    head = ("Simulated", "Mean", *(percentile_name(p) for p in PERCENTILES))
    rows = [
        (name, *(f"{mark}{show_s(seconds)}" for seconds in values.values())) for name, mark, values in spreads
    ]
    return head, rows


def cost_rows(plan: Plan) -> Rows:
    """The fleet's cost, power and energy, each with a note on how it was computed."""
    paid, power = plan.bill, plan.power
    price = paid.usd_per_h
    how = "the GPUs' prices, all of them all the time"
    if paid.nodes:
        idle = count_text(paid.idle_gpus, "GPU") if paid.idle_gpus else "no GPU"
        how = f"whole nodes all the time, with {idle} that no worker uses"
    if paid.owned_gpus:
        owned_cost = "electricity alone" if paid.electricity_usd_per_h else "nothing here"
        how += f"; {count_text(paid.owned_gpus, 'GPU')} owned, for {owned_cost}, {paid.rented_gpus} rented"
    tokens, output_tokens = plan.usd_per_million_tokens, plan.usd_per_million_output_tokens
    over = "price" + (", idle GPUs among it," if paid.idle_gpus else "") + " over the tokens of this traffic"
    # If requests wait for the answers of others, the fleet is paid until the last token, not only until the
    # last arrival.
    if plan.trace.after.size:
        paid_s = served_s(plan.trace, plan.simulation)
        over = f"price of the {show_s(paid_s)} to the last token, over the tokens of this traffic"
    values: list[tuple[str, ...]] = [
        ("Price per hour", usd_text(price), how),
        *(
            [("By the GPU, per hour", usd_text(paid.by_gpu_usd_per_h), "those in use; not sold so here")]
            if paid.idle_gpus
            else []
        ),
        *_electricity_rows(paid),
        (f"Price per month of {HOURS_PER_MONTH}\u00a0h", f"{price * HOURS_PER_MONTH:,.0f} USD", "likewise"),
        (f"Price per year of {HOURS_PER_YEAR:,}\u00a0h", f"{price * HOURS_PER_YEAR:,.0f} USD", "likewise"),
        ("Price per million tokens", f"{show_digits(tokens, 3)} USD", f"{over}, prompts and answers"),
        ("Price per million output tokens", f"{show_digits(output_tokens, 3)} USD", f"{over}, answers alone"),
        (
            "Power, provisioned",
            show_w(plan.fleet.power_w),
            "the GPUs' limits; hosts, network, cooling on top",
        ),
    ]
    if power is not None:
        at_rest = f"{show_share(power.idle_w / power.mean_w)} of it at rest; {power.basis}"
        month = f"{power.mean_w * HOURS_PER_MONTH / 1e3:,.0f} kWh"
        values += [
            ("Power, expected", show_w(power.mean_w), at_rest),
            (f"Energy per month of {HOURS_PER_MONTH}\u00a0h", month, "expected power all the time"),
        ]
    if power is not None and power.requests:
        share = "expected power, shared among the requests of the measured window"
        values += [
            ("Energy per request", f"{power.request_j:,.0f} J", share),
            ("Energy per 1000 output tokens", f"{power.thousand_tokens_j:,.0f} J", share),
        ]
    return ("Figure", "Value", "How we know"), values


def _electricity_rows(bill: Bill) -> list[tuple[str, ...]]:
    """The part of the price that is electricity; empty if electricity is not counted."""
    if not bill.electricity_usd_per_h:
        return []
    how = "of the price; at provisioned power"
    if (expected := bill.expected_electricity_usd_per_h) is not None:
        how += f", {usd_text(expected)} at the power that is expected"
    return [("Electricity per hour", usd_text(bill.electricity_usd_per_h), how)]


def usage_rows(plan: Plan) -> Rows:
    """How busy each pool is, with batches and KV cache if the simulation recorded its steps."""
    simulation, power = plan.simulation, plan.power
    span_s = simulation.end_s - float(simulation.arrival_s[0])
    head = (
        "Pool",
        "Time in a step",
        "Worker most in one",
        "Tokens per step",
        "Decodes in a step",
        "Fullest KV cache",
        "Expected of provisioned power",
        "KV cache in use",
        "FLOP in use (MFU)",
        "Memory bandwidth in use",
    )
    rows: list[tuple[str, ...]] = []
    uses = {use.pool: use for use in pool_uses(plan.fleet, simulation)}
    for pool, numbers in plan.fleet.workers_by_pool:
        workers = slice(numbers.start, numbers.stop)
        busy = simulation.worker_busy_s[workers] / span_s
        steps = simulation.worker_steps[workers].sum()
        tokens = simulation.worker_tokens[workers].sum() / steps if steps else 0.0
        decodes = fullest_kv = power_share = "–"
        if power is not None:  # The simulation recorded its steps (Plan.power).
            runs = simulation.runs
            runs = runs[(runs["worker"] >= workers.start) & (runs["worker"] < workers.stop)]
            runs = runs[runs["prefill_tokens"] >= 0]  # The other rows are gaps of single requests, not steps.
            seconds = run_seconds(runs)
            if seconds.sum() > 0:
                decodes = f"{np.average(runs['decodes'], weights=seconds):,.1f}"
                fullest_kv = show_percent(runs["blocks"].max() * KV_BLOCK_TOKENS / pool.type.kv_tokens)
            power_share = show_percent(power.worker_w[workers].sum() / (pool.count * pool.type.power_w))
        rows.append(
            (
                pool.name,
                show_percent(busy.mean()),
                show_percent(busy.max()),
                f"{tokens:,.0f}",
                decodes,
                fullest_kv,
                power_share,
                *_use_cells(uses.get(pool.name)),
            )
        )
    return head, rows


def _use_cells(use: PoolUse | None) -> tuple[str, str, str]:
    """The shares of a pool's KV cache, FLOP and memory bandwidth that are in use in the measured window."""
    if use is None:
        return "–", "–", "–"
    kv = "–" if math.isnan(use.kv_mean_frac) else show_percent(use.kv_mean_frac)
    return kv, show_percent(use.mfu_frac), show_percent(use.bandwidth_frac)


def node_rows(plan: Plan) -> Rows:
    """A line per group of nodes with the same workers: how many nodes, which workers, idle GPUs of each."""
    # The keys of both mappings: the kind of node, and the text that lists its workers.
    nodes: dict[tuple[str, str], int] = {}
    idle_gpus: dict[tuple[str, str], int] = {}
    gpus_per_node = {pool.type.gpu.base: pool.type.gpu.gpus_per_node for pool in plan.fleet.pools}
    for node in plan.placement.nodes if plan.placement else ():
        workers: dict[str, int] = {}
        for part in node.parts:
            whole = "" if part.last - part.first + 1 == part.pp else f", stages {part.first} to {part.last}"
            workers[part.pool + whole] = workers.get(part.pool + whole, 0) + 1
        key = (node.kind, ", ".join(f"{count} × {name}" for name, count in workers.items()))
        nodes[key] = nodes.get(key, 0) + 1
        used_gpus = sum(len(part.gpus) for part in node.parts)
        # A node's kind may end with how it is obtained, such as "@spot".
        idle_gpus[key] = gpus_per_node[row_of(node.kind)] - used_gpus
    rows: list[tuple[str, ...]] = [
        (kind, f"{count}", text, f"{idle_gpus[kind, text]}") for (kind, text), count in nodes.items()
    ]
    return ("Nodes of", "Nodes", "Workers on each", "GPUs idle on each"), rows


def repeat_rows(plan: Plan) -> Rows:
    """How often the plan's fleet keeps the SLO in runs with other random draws, and its latencies there."""
    repeats = plan.certificate.repeats
    names = list(dict.fromkeys(name for each in repeats for name in each.limits))
    few, most = (show_percent(frac, ".0f") for frac in (FAILS_FRAC, HOLDS_FRAC))
    decisions = {"holds": f"✓\u00a0more than {few}", "fails": f"✗\u00a0less than {most}", "open": "undecided"}
    values: list[tuple[str, ...]] = [
        (
            drawn_text(each),
            f"{each.kept} of {each.runs}",
            decisions[each.decision],
            *(_interval_text(each.limits[name]) if name in each.limits else "–" for name in names),
        )
        for each in repeats
    ]
    sure = f"{100 * CONFIDENCE_FRAC:.0f} % sure of"
    return ("On", "SLO kept", sure, *(f"{name}, mean (most)" for name in names)), values


def _interval_text(value: Interval) -> str:
    """A figure over several runs, such as "1.2 s ± 0.1 s (1.5 s)": the mean, half the width of its confidence
    interval, and the largest value.
    """
    if not np.isfinite(value.mean):
        return "–"
    half_s = float(f"{value.half_width:.2g}")
    plus_minus = f" ± {show_s(half_s)}" if np.isfinite(half_s) else ""
    return f"{show_s(value.mean)}{plus_minus} ({show_s(value.most)})"


def prefix_rows(plan: Plan) -> Rows:
    """Shared prefixes of each pool that prefills: hits as planned, as simulated, with an endless cache."""
    head = (
        "Pool",
        "Prefixes kept",
        "Copies on workers",
        "Prompt tokens found cached, planned",
        "Simulated",
        "With one endless cache",
        "Prefill work saved, planned",
    )
    values: list[tuple[str, ...]] = []
    for pool in plan.prefixes:
        # Row 0 is left out: it is the root of the prefix tree, a prefix without tokens.
        replicas = pool.plan.replication.placed.sum(axis=1)[1:]
        shares = (
            pool.plan.hit_frac,
            pool.simulated_hit_frac,
            pool.possible_hit_frac,
            pool.plan.prefill_saved_frac,
        )
        values.append(
            (
                pool.plan.pool.name,
                f"{(replicas > 0).sum():,}",
                f"{replicas.sum():,}",
                *map(show_percent, shares),
            )
        )
    return head, values


def alternative_rows(plan: Plan) -> Rows:
    """A line for the plan and for each alternative: its fleet, its objective, and how much more that is."""
    certificate = plan.certificate
    against = "Against the plan on paper" if certificate.answers else "Against the plan"
    unit = certificate.unit + (" by the GPU" if plan.bill.idle_gpus else "")
    head = ("Alternative", "Fleet", unit, against, "Note")
    rows: list[tuple[str, ...]] = [
        ("This plan", describe_fleet(plan.fleet), show_amount(plan.value, certificate.unit), "", "")
    ]
    if (paper := certificate.find_answer("on-paper")) is not None:
        # The certificate's value is that of the fleet on paper, with which all alternatives are compared.
        value = show_amount(certificate.value, certificate.unit)
        rows.append(("The cheapest on paper", workers_text(paper.workers), value, "", "as all that follow"))
    rows += [
        (
            alternative.label,
            "none" if alternative.fleet is None else describe_fleet(alternative.fleet),
            show_amount(alternative.objective, certificate.unit) if alternative.is_priced else "–",
            _difference_text(alternative, certificate.value),
            unpriced_text(alternative, certificate.unit) or "; ".join(alternative_notes(alternative, plan)),
        )
        for alternative in plan.alternatives
    ]
    return head, rows


def _difference_text(alternative: Alternative, value: float) -> str:
    """By how many percent an alternative's objective exceeds `value`; a dash if that is not known."""
    if not alternative.is_priced or not value:
        return "–"
    more_frac = alternative.objective / value - 1
    return "the same" if abs(more_frac) < SHOWN_AS_0_FRAC else f"{more_frac:+.1%}".replace("%", " %")


def neighbour_rows(plan: Plan) -> Rows:
    """Every fleet with one worker fewer than the one on paper, and why it fails."""
    head = ("One worker fewer of", "Type", "Holds", "Why")
    return head, [
        (each.pool, each.worker_type, "still holds" if each.holds else "✗\u00a0fails", fact_sentence(each))
        for each in plan.certificate.neighbours
    ]


def source_rows(plan: Plan) -> Rows:
    """The source of every kind of figure: given, catalog, measured, fitted, simulated or solved."""
    trace, certificate = plan.trace, plan.certificate
    start_s, end_s = plan.simulation.window_s
    # Requests of sessions wait for answers, so their rate depends on the fleet.
    rate = (
        ""
        if trace.after.size
        else f" over {show_s(trace.duration_s)}, {show_digits(trace.rate_rps, 3)} requests/s"
    )
    traffic = (
        f"{plan.traffic_note}: {count_text(len(trace), 'request')}{rate}; prompts of "
        f"{trace.input_tokens.mean():,.0f} tokens and answers of {trace.output_tokens.mean():,.0f} on "
        f"average, {plan.max_model_len:,} tokens the longest request"
    )
    simulated = (
        f"every request and engine step, seed {certificate.seed}; measured from {show_s(start_s)} to "
        f"{show_s(end_s)} of the trace"
    )
    memory = f"the catalog's GPU memory less weights and activations, in blocks of {KV_BLOCK_TOKENS}"
    values: list[tuple[str, ...]] = [
        ("Traffic", input_bases(plan)["traffic"], traffic),
        ("Prices", "catalog, or your own", prices_text(plan.prices)),
        *(_step_times_row(pool) for pool in plan.fleet.running_pools),
        ("KV tokens of a worker", "computed", memory),
        ("Latencies, shares, load", "simulated", simulated),
        (
            "Lower bound",
            "solved",
            "a mixed-integer program over all fleets and policies; see docs/formulations.md",
        ),
    ]
    if plan.power is not None:
        values.append(("Expected power", "modelled", f"{plan.power.basis}; see docs/power-and-lengths.md"))
    why = why_undeployable(plan.fleet)
    values.append(
        ("Deployment", "none", why) if why else ("Deployment", "rendered", f"for {engine_title(plan.fleet)}")
    )
    return ("Figure", "How", "From"), values


def _step_times_row(pool: Pool) -> tuple[str, ...]:
    """The line on a pool's step times: what they were computed from, and how far off they may be."""
    latency = pool.type.latency
    if latency.kind == "steps":
        how = "fitted to your measured steps"
    elif latency.kind == "kernels":
        how = "estimated from measured kernels"
    elif latency.mape_frac is None and latency.kind in ("roofline", "derived"):
        how = "⚠ computed from catalog figures, nothing was profiled"
    else:
        how = "fitted to measurements"
    error = "no measured error"
    if latency.mape_frac is not None:
        error = f"held-out error {show_share(latency.mape_frac)}"
    if (spread := latency.spread) is not None:
        prefill, decode = (times_text(part.low, part.high) for part in (spread.prefill, spread.decode))
        error += f"; 90 % of what was measured: prefill {prefill}, decode {decode} ({spread.source})"
    else:
        error += "; nobody knows how far they may be from the truth"
    return f"Step times of {pool.name} ({pool.type.name})", how, f"{latency.basis}; {error}"
