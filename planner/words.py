"""A plan in words and tables of text, for the report, the command line and the browser alike."""

from __future__ import annotations

from collections.abc import Sequence

from planner.curves import PERCENTILES, sampled_gaps_s, spread
from planner.domain import SPOT, Fleet, Limit, Pool
from planner.manifests.engine import is_capped, running
from planner.plan import Alternative, Plan
from planner.simulator.metrics import Line, measured
from planner.units import percentile_name, show_s

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A table of text: its head and its lines."""

HOURS_PER_MONTH = 730
WHAT = {
    "ttft": "of requests get their first token within",
    "tbt": "of the gaps between tokens are at most",
    "tpot": "of requests have a mean gap between tokens of at most",
    "e2e": "of requests are complete within",
}


def answer(plan: Plan) -> str:
    """The plan in one sentence."""
    fleet = plan.fleet
    month = fleet.price_usd_per_h * HOURS_PER_MONTH
    carried = f"{plan.throughput.rate_rps:g} requests/s on " if plan.throughput else ""
    price = f"{usd(fleet.price_usd_per_h)} per hour, about {month:,.0f} USD per month"
    return f"{carried}{describe(fleet)}: {price}."


def promise(plan: Plan) -> str:
    """Whether the simulated fleet keeps the SLO, in a sentence."""
    limits = listed([limit_text(limit) for limit in plan.slo.limits])
    if plan.slo.attainment_frac is not None:
        limits += f", and {percent(plan.slo.attainment_frac)} of requests keep all of that at once"
    if plan.verdict.holds:
        return f"In the simulation of {plan.traffic_note}, it keeps the promise: {limits}."
    return f"In the simulation of {plan.traffic_note}, it does NOT keep the promise: {limits}."


def describe(fleet: Fleet) -> str:
    """For instance '4 prefill workers of 2 × h100-80g and 3 decode workers of 8 × a100-80g'."""
    return listed([_describe_pool(pool) for pool in running(fleet)])


def _describe_pool(pool: Pool) -> str:
    role = "" if pool.role == "mixed" else f"{pool.role} "
    return f"{counted(pool.count, f'{role}worker')} of {pool.type.gpus} × {pool.type.gpu.name}"


def limit_text(limit: Limit) -> str:
    return f"{percent(limit.percentile_frac)} {WHAT[limit.metric]} {show_s(limit.limit_s)}"


def headline(plan: Plan) -> list[tuple[str, str, str]]:
    """The figures one asks for first: name, value, note."""
    fleet, certificate, power = plan.fleet, plan.certificate, plan.power
    if certificate.level0_exact and certificate.beyond_exact:
        proved, over = "proved cheapest", "over every fleet of the universe"
    elif certificate.level0_exact:
        proved, over = "proved", "best with one worker type per pool"
    else:
        proved, over = "not closed", f"gap to the bound {percent(certificate.gap_frac)}"
    month_usd = fleet.price_usd_per_h * HOURS_PER_MONTH
    return [
        ("Cost", usd(fleet.price_usd_per_h) + "/h",
         f"{month_usd:,.0f} USD per month, {plan.usd_per_million_tokens:.3g} per million tokens"),
        ("GPUs", str(fleet.gpus), counted(fleet.workers, "worker")),
        ("Power", f"{fleet.power_w / 1e3:,.1f} kW",
         "provisioned, GPUs only" + (f"; {power.mean_w / 1e3:,.1f} kW expected" if power else "")),
        ("Promise", "kept" if plan.verdict.holds else "missed",
         f"{percent(plan.verdict.attainment_frac)} of requests keep all limits"),
        ("Certificate", proved, over),
    ]  # fmt: skip


def fleet_rows(fleet: Fleet) -> Rows:
    """A line per pool."""
    rows: list[tuple[str, ...]] = [
        (
            pool.name, pool.role, str(pool.count), f"{pool.type.gpus} × {pool.type.gpu.name}",
            f"{pool.count * pool.type.gpus}", f"{pool.type.max_num_batched_tokens:,}",
            f"{pool.type.max_num_seqs:,}", f"{pool.type.kv_tokens:,}",
            f"{pool.count * pool.type.power_w / 1e3:,.1f}", f"{pool.count * pool.type.price_usd_per_h:,.2f}",
        )
        for pool in running(fleet)
    ]  # fmt: skip
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


def policies_line(fleet: Fleet) -> str:
    """How the fleet batches and routes, and what its power caps mean."""
    policies, network = fleet.policies, fleet.network
    text = f"Batching {policies.batching}; requests are routed by {policies.routing}"
    if any(pool.role == "prefill" for pool in running(fleet)):
        text += (
            f", hand-offs to decode workers by {policies.decode_routing}; KV blocks move at "
            f"{network.bandwidth_bytes_per_s / 1e9:g} GB/s, {network.transfer}"
        )
    capped = {pool.type.gpu.name: pool.type.gpu for pool in running(fleet) if is_capped(pool.type.gpu)}
    return f"{text}." + "".join(
        f" {name} means nvidia-smi -pl {gpu.power_w:g} on its nodes." for name, gpu in capped.items()
    )


def slo_rows(plan: Plan) -> Rows:
    """A line per promise: what was asked, what the simulation says, the verdict."""
    rows: list[tuple[str, ...]] = [
        (
            limit_text(line.limit), line.limit.name, show_s(line.limit.limit_s), _value(line),
            percent(line.kept_frac), _verdict_word(line.holds),
        )
        for line in plan.verdict.lines
    ]  # fmt: skip
    verdict = plan.verdict
    if plan.slo.attainment_frac is not None:
        needed, found = percent(plan.slo.attainment_frac), percent(verdict.attainment_frac)
        rows.append(
            (f"{needed} of requests keep all limits at once", "attainment", needed, found, found,
             _verdict_word(verdict.attainment_holds))
        )  # fmt: skip
    return ("Promise", "Name", "Limit", "Simulated", "Kept by", "Verdict"), rows


def node_rows(plan: Plan) -> Rows:
    """Nodes that hold the same, and what each of them holds."""
    alike: dict[tuple[str, str], int] = {}
    idle: dict[tuple[str, str], int] = {}
    gpus_per_node = {pool.type.gpu.base: int(pool.type.gpu.gpus_per_node) for pool in plan.fleet.pools}
    for node in plan.placement.nodes if plan.placement else ():
        held: dict[str, int] = {}
        for part in node.parts:
            whole = "" if part.last - part.first + 1 == part.pp else f", stages {part.first} to {part.last}"
            held[part.pool + whole] = held.get(part.pool + whole, 0) + 1
        key = (node.kind, ", ".join(f"{count} × {name}" for name, count in held.items()))
        alike[key] = alike.get(key, 0) + 1
        used = sum(len(part.gpus) for part in node.parts)
        idle[key] = gpus_per_node[node.kind.removesuffix(SPOT)] - used
    rows: list[tuple[str, ...]] = [
        (f"{count}", kind, held, f"{idle[kind, held]}") for (kind, held), count in alike.items()
    ]
    return ("Nodes", "Of", "Workers on each", "GPUs idle on each"), rows


def measured_line(plan: Plan) -> str:
    """Whether the queue grows, who was turned away, and when was measured."""
    verdict = plan.verdict
    steady = (
        "The queue does not grow: the last requests of the run are served as promptly as the first."
        if verdict.is_steady
        else "The queue grows until the end of the run, so the fleet is saturated whatever its percentiles."
    )
    rejected = f" {counted(verdict.rejected, 'request')} did not fit any worker." if verdict.rejected else ""
    start_s, end_s = plan.simulation.window_s
    window = f" Measured from {show_s(start_s)} to {show_s(end_s)} of the trace, after the warm-up."
    return steady + rejected + window


def percentile_rows(plan: Plan) -> Rows:
    """Every metric's spread, whether promised or not."""
    simulation = plan.simulation
    inside = measured(simulation)
    several = inside & (simulation.output_tokens > 1)
    gaps, seen, every = sampled_gaps_s(simulation)
    about = "≈ " if every > 1 else ""
    spreads = (
        ("Queue", "", spread(simulation.queue_s[inside])),
        ("Time to first token", "", spread(simulation.ttft_s[inside])),
        ("Gap between tokens", about, spread(gaps, seen)),
        ("Mean gap of a request", "", spread(simulation.tpot_s[several])),
        ("End-to-end time", "", spread(simulation.e2e_s[inside])),
    )
    head = ("Simulated", "Mean", *(percentile_name(p) for p in PERCENTILES))
    rows = [
        (name, *(f"{mark}{_seconds(seconds)}" for seconds in found.values())) for name, mark, found in spreads
    ]
    return head, rows


def _value(line: Line) -> str:
    return _seconds(line.value_s) if line.value_s == line.value_s else "not recorded"


def _seconds(seconds: float) -> str:
    return "never" if seconds == float("inf") else show_s(seconds)


def _verdict_word(holds: bool) -> str:
    return "✓\u00a0kept" if holds else "✗\u00a0missed"


def alternative_rows(plan: Plan) -> Rows:
    """The plan and what else it could be."""
    certificate = plan.certificate
    head = ("Alternative", "Fleet", certificate.unit, "Against the plan", "Note")
    rows: list[tuple[str, ...]] = [
        ("This plan", describe(plan.fleet), amount(certificate.value, certificate.unit), "", "")
    ]
    rows += [
        (
            alternative.label,
            _fleet_of(alternative),
            _objective(alternative, certificate.unit),
            _difference(alternative, certificate.value),
            alternative.note,
        )
        for alternative in plan.alternatives
    ]
    return head, rows


def _fleet_of(alternative: Alternative) -> str:
    if alternative.fleet is not None:
        return describe(alternative.fleet)
    return "none for less" if alternative.at_least else "none"


def _objective(alternative: Alternative, unit: str) -> str:
    if not abs(alternative.objective) < float("inf"):
        return "–"
    return f"{'≥ ' if alternative.at_least else ''}{amount(alternative.objective, unit)}"


def _difference(alternative: Alternative, value: float) -> str:
    if not abs(alternative.objective) < float("inf") or not value:
        return "–"
    more = alternative.objective / value - 1
    if abs(more) < 5e-4:
        return "no less" if alternative.at_least else "the same"
    return f"{'at least ' if alternative.at_least else ''}{more:+.1%}".replace("%", " %")


def proof_lines(plan: Plan) -> list[str]:
    """What was found, what was proved over what, and by how many simulations."""
    certificate = plan.certificate
    unit = certificate.unit
    value, level0, bound = (
        amount(v, unit) for v in (certificate.value, certificate.level0, certificate.bound)
    )
    lines = [
        f"Plan: {value} {unit}. Status: {plan.status}.",
        f"Fleets with one worker type per pool: the best is {level0} {unit}, "
        + (
            "exactly: every cheaper one was simulated and fails, or cannot hold by a valid bound."
            if certificate.level0_exact
            else "as far as the search came; it was not exhausted in time."
        ),
        "Fleets of several types per pool: "
        + ("exhausted too, none is better." if certificate.beyond_exact else "searched, not exhausted."),
    ]
    if plan.throughput:
        lines.append(
            f"Most traffic within the limits: {plan.throughput.rate_rps:g} requests/s. At "
            f"{plan.throughput.refuted_rps:g} no fleet with one worker type per pool holds; that more "
            "traffic is never easier to carry is assumed. All else is about the cheapest fleet at this rate."
        )
    if certificate.level0_gap_frac > 0:
        lines.append(
            f"The plan saves {percent(certificate.level0_gap_frac)} against the best of one type per pool."
        )
    lines += [
        f"No policy whatever serves this traffic for less than {bound} {unit}: a gap of "
        f"{percent(certificate.gap_frac)} to the plan.",
        f"{counted(certificate.simulations, 'simulation')}, {counted(certificate.cuts, 'cut')}, seed "
        f"{certificate.seed}.",
    ]
    return lines


def neighbour_rows(plan: Plan) -> Rows:
    """Every fleet with one worker fewer, and why it fails."""
    head = ("One worker fewer of", "Type", "Holds", "Why")
    return head, [
        (n.pool, n.worker_type, "still holds" if n.holds else "✗\u00a0fails", n.reason)
        for n in plan.certificate.neighbours
    ]


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """0.9 -> '90 %', 0.9987 -> '99.87 %'; never rounds up to 100 %."""
    if share == share and share < 1 and f"{share * 100:.4g}" == "100":
        return "> 99.99 %"
    return f"{share * 100:.4g} %"


def usd(dollars: float) -> str:
    return f"{dollars:,.2f} USD"


def amount(value: float, unit: str) -> str:
    return f"{value:,.2f}" if unit == "USD/h" else f"{value:,.6g}"
