"""Sentences and short texts about a plan, for the report, the command line and the browser."""

import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from planner.documents.certificate import Alternative, Certificate, Throughput
from planner.documents.facts import (
    CachesSave,
    CapacityBinds,
    LimitBinds,
    PinnedReplicas,
    Remarked,
    RequestTooLong,
    UsedUp,
)
from planner.domain import SPOT, Limit, ServiceGuarantee, payment_suffix, row_of
from planner.fleet import Fleet
from planner.manifests.engine_command import is_capped
from planner.policies import BATCHING, ROUTING
from planner.reports.fact_sentences import (
    SAME_FRAC,
    SAME_USD,
    backlog_text,
    capitalise_first,
    fact_sentence,
    fact_sentences_of,
    left_out_words,
    relative_cost_text,
)
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import Bill
from planner.simulator.layout import REJECTED
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import LineVerdict
from planner.units import HOURS_PER_MONTH, count_text, in_unit, show_beside, show_s, show_share, show_span

# Facts that are about the best fleet on paper even if the plan is for production.
OF_PAPER = LimitBinds | CapacityBinds | UsedUp | CachesSave | PinnedReplicas

Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""A table of text: the names of its columns, then its rows."""

HOURS_PER_YEAR = 8760  # A year has 365 days here.
MOST_NAMED = 6  # A sentence names at most this many worker types, and counts the others; chosen by hand.
# The words for terms of payment.
TERMS = {"on-demand": "On demand", "reserved-1y": "1 year", "reserved-3y": "3 years"}


def answer_sentence(plan: Plan) -> str:
    """The fleet and its price in one sentence, with the rate that it carries if that was maximised."""
    carried = f"{plan.throughput.rate_rps:g} requests/s on " if plan.throughput else ""
    return f"{carried}{describe_fleet(plan.fleet)}: {price_text(plan.bill)}."


def price_text(bill: Bill) -> str:
    """The price of a fleet per hour and per month, with notes on its bill."""
    month = bill.usd_per_h * HOURS_PER_MONTH
    price = f"{usd_text(bill.usd_per_h)} per hour, about {month:,.0f} USD per month"
    return "; ".join([price, *bill_lines(bill)])


def commitment_rows(plan: Plan) -> Rows:
    """The fleet's price under each term of payment (TERMS), and the share of hours above which the fleet must
    be needed so that the term costs less than GPUs on demand.
    """
    rows: list[tuple[str, ...]] = []
    for each in plan.certificate.commitments:
        needed_frac = each.needed_frac
        # The row "on demand" has no such share. A term with a share of 1 or more never costs less.
        cheaper_if = ""
        if needed_frac is not None and needed_frac < 1:
            cheaper_if = f"if needed more than {show_share(needed_frac)} of the time"
        note = "; ".join(each.sources)
        if each.at_planned:
            note += f"; as planned: {', '.join(each.at_planned)}"
        month = f"{each.usd_per_h * HOURS_PER_MONTH:,.0f} USD"
        rows.append((TERMS[each.term], usd_text(each.usd_per_h), month, cheaper_if, note))
    return ("Term", "Per hour", "Per month", "Cheaper than on demand", "Prices"), rows


def bill_lines(bill: Bill) -> list[str]:
    """Notes on a bill: owned GPUs, idle GPUs of whole nodes, electricity; empty for rented GPUs alone."""
    lines = []
    if bill.owned_gpus:
        lines.append(f"{count_text(bill.owned_gpus, 'GPU')} owned, {bill.rented_gpus} rented")
    if bill.idle_gpus:
        nodes = list_text([f"{count_text(each.count, 'whole node')} of {each.gpu}" for each in bill.nodes])
        idle = f"{count_text(bill.idle_gpus, 'GPU')} of them " + ("idles" if bill.idle_gpus == 1 else "idle")
        lines.append(
            f"that is for {nodes}, {idle}; by the GPU it would be {usd_text(bill.by_gpu_usd_per_h)} per hour"
        )
    if bill.electricity_usd_per_h:
        lines.append(
            f"{usd_text(bill.electricity_usd_per_h)} per hour of what is paid is electricity at "
            "provisioned power"
        )
    return lines


def slo_sentence(plan: Plan) -> str:
    """Whether the simulated fleet keeps the SLO, in a sentence."""
    limits = list_text([limit_text(limit) for limit in plan.slo.limits])
    if plan.slo.attainment_frac is not None:
        limits += f", and {show_share(plan.slo.attainment_frac)} of requests keep all of that at once"
    for each in plan.slo.guarantees:
        limits += f", and {guarantee_text(each)}"
    if plan.slo.every_s is not None:
        limits += f", in every window of {show_span(plan.slo.every_s)} (fixed, one after the other)"
    if plan.verdict.holds:
        return f"In the simulation of {plan.traffic_note}, it keeps the SLO: {limits}."
    return f"In the simulation of {plan.traffic_note}, it does NOT keep the SLO: {limits}."


def guarantee_text(guarantee: ServiceGuarantee) -> str:
    """'each tenant gets 90 % of its fair share of service while its work waits'."""
    who = "each tenant" if guarantee.tenant is None else f"tenant {guarantee.tenant}"
    return f"{who} gets {show_share(guarantee.share_frac)} of its fair share of service while its work waits"


def option_flags(**requested: bool | None) -> list[str]:
    """The requested flags of a command line: `explain=True` gives "--explain"; None and False give none."""
    return [f"--{name.replace('_', '-')}" for name, is_set in requested.items() if is_set]


def command_line(
    slo: Path | None,
    trace: Path | None,
    catalog: Path | None,
    *,
    seed: int,
    time_limit_s: float,
    flags: Sequence[str] = (),
) -> str:
    """The command that makes the same plan from these files. It names the files without their folders,
    because it is written into the report and folders may be private.
    """
    words = ["plan", *(["--slo", slo.name] if slo else []), *(["--trace", trace.name] if trace else [])]
    words += ["-o", "out/", "--seed", str(seed), "--time-limit", f"{time_limit_s:g}", *flags]
    return shlex.join([*words, *(["--catalog", catalog.name] if catalog else [])])


def describe_fleet(fleet: Fleet) -> str:
    """For instance '4 prefill workers of 2 × h100-80g and 3 decode workers of 8 × a100-80g'."""
    return list_text(
        [pool_text(pool.role, pool.count, pool.type.gpus, pool.type.gpu.name) for pool in fleet.running_pools]
    )


def pool_text(role: str, count: int, gpus: int, gpu: str) -> str:
    """For instance '4 prefill workers of 2 × h100-80g'; `gpus` are those of one worker."""
    kind = "worker" if role == "mixed" else f"{role} worker"
    return f"{count_text(count, kind)} of {gpus} × {gpu}"


def limit_text(limit: Limit) -> str:
    """For instance "of class chat 90 % of requests get their first token within 2 s"."""
    of_class = "" if limit.selector is None else f"of class {limit.selector.name} "
    return (
        f"{of_class}{show_share(limit.percentile_frac)} {limit.metric_row.sentence} {show_s(limit.limit_s)}"
    )


def level0_proof(*, is_exact: bool, is_exhausted: bool) -> str:
    """The words for what is proved about the best fleet found with one worker type per pool.

    "Exact": every cheaper fleet was simulated or is ruled out by a valid bound. "Found by search": the search
    ended, but left out some fleets by an assumption.
    """
    if is_exact:
        return "exact"
    return "found by search" if is_exhausted else "NOT exhausted"


def policies_line(fleet: Fleet) -> str:
    """The policies of the fleet, and the commands that set its power caps."""
    policies, network = fleet.policies, fleet.network
    batching, routing = BATCHING[policies.batching], ROUTING[policies.routing]
    text = (
        f"Batching {batching.name} ({batching.words}); requests are routed by {routing.name} "
        f"({routing.words})"
    )
    if fleet.is_disaggregated:
        text += (
            f", hand-offs to decode workers by {policies.decode_routing}; KV blocks move at "
            f"{network.bandwidth_bytes_per_s / 1e9:g} GB/s, {network.transfer}"
        )
    capped = {pool.type.gpu.name: pool.type.gpu for pool in fleet.running_pools if is_capped(pool.type.gpu)}
    return f"{text}." + "".join(
        f" {name} means nvidia-smi -pl {gpu.power_w:g} on its nodes." for name, gpu in capped.items()
    )


def rejected_text(simulation: Simulation, fleet: Fleet) -> str:
    """How many requests are rejected, and why; empty if none is."""
    rejected = simulation.status == REJECTED
    if not rejected.any():
        return ""
    longest_tokens = int((simulation.input_tokens + simulation.output_tokens)[rejected].max())
    most_tokens = max(pool.type.kv_tokens for pool in fleet.running_pools)
    why = (
        f"the longest has {longest_tokens:,} tokens, and the KV memory of the largest worker holds "
        f"{most_tokens:,}"
        if longest_tokens > most_tokens
        else "they, or requests that they wait for, find no worker whose memory or step holds them"
    )
    return f"{int(rejected.sum()):,} of {len(rejected):,} requests are rejected and miss every limit: {why}"


def measured_line(plan: Plan) -> str:
    """The result of the backlog test, the number of rejected requests, and the measured window."""
    verdict = plan.verdict
    backlog = capitalise_first(backlog_text(verdict.patient_frac, verdict.patience_s)) + "."
    rejected = (
        f" {count_text(verdict.rejected, 'request')} did not fit any worker." if verdict.rejected else ""
    )
    start_s, end_s = plan.simulation.window_s
    window = f" Measured from {show_s(start_s)} to {show_s(end_s)} of the trace, after the warm-up."
    return backlog + rejected + window


def is_free(certificate: Certificate) -> bool:
    """Whether the fleet on paper costs nothing, as on owned GPUs. Texts then say "smaller", not "cheaper"."""
    return certificate.objective == "cost" and certificate.value < SAME_USD


def cheaper_text(certificate: Certificate) -> str:
    """How many of the cheaper fleets of level 0 the plan's search simulated (`excluded_text`)."""
    # Nothing costs less than the bound: fleets below one that costs as much leave more of its nodes idle.
    is_at_bound = certificate.objective == "cost" and certificate.level0 < certificate.bound + SAME_USD
    less = "smaller" if is_free(certificate) or is_at_bound else "cheaper"
    return excluded_text(certificate.cheaper, certificate.cheaper_simulated, less)


def excluded_text(cheaper: int | None, simulated: int, less: str = "cheaper") -> str:
    """How many of the `cheaper` fleets of level 0 were simulated. `cheaper` counts those with enough workers
    for the work, and is None if there are infinitely many. `less` is the adjective in the text.
    """
    # More were simulated than counted if the search also tried fleets that are too small for the work.
    if cheaper is None or simulated > cheaper:
        return f"{simulated:,} {less} ones were simulated and fail"
    if cheaper == 0:
        return f"no {less} one is large enough for the work"
    if cheaper == simulated:
        return f"all {cheaper:,} {less} ones that are large enough for the work were simulated and fail"
    simulated_text = f"{simulated:,} were simulated and fail"
    return f"of {cheaper:,} {less} ones that are large enough for the work {simulated_text}"


def too_small_text(certificate: Certificate) -> str:
    """The worker types that were left out because the longest request does not fit into their KV memory."""
    too_small = [each.label for each in certificate.refuted if isinstance(each.because, RequestTooLong)]
    if not too_small:
        return ""
    more = f" and {len(too_small) - MOST_NAMED} more" if len(too_small) > MOST_NAMED else ""
    named = [left_out_words(label) for label in too_small[:MOST_NAMED]]
    return f" (without those whose KV cache is too small for the longest request: {', '.join(named)}{more})"


def value_and_limit(line: LineVerdict) -> tuple[str, str]:
    """A line's simulated percentile, or a word for why there is none, and its limit."""
    value, limit = show_beside(line.value_s, line.limit.limit_s)
    if not line.judged:
        return "not judged", limit
    return "not recorded" if math.isnan(line.value_s) else value, limit


def level0_line(certificate: Certificate) -> str:
    """The value of the best fleet found with one worker type per pool, and what is proved about it."""
    ruled_out = cheaper_text(certificate) + too_small_text(certificate)
    if not certificate.has_level0:
        return f"none was found; {ruled_out}"
    best = f"the best is {in_unit(certificate.level0, certificate.unit)}"
    if certificate.level0_exact:
        return f"{best}, exactly: {ruled_out}"
    if certificate.level0_exhausted:
        # If all fleets under the plan's policies were simulated, those left out have other policies.
        all_simulated = certificate.cheaper == certificate.cheaper_simulated
        others = "fleets under other policies" if all_simulated else "the others"
        return f"{best}, found by search: {ruled_out}; {others} were left out by what is assumed"
    return f"{best}, as far as the search came; it was not exhausted in time"


def throughput_line(values: Throughput) -> str:
    """The highest rate at which a fleet was found: on paper, and with safety in production as well."""
    assumed = "that more traffic is never easier to carry is assumed"
    if values.on_paper_rps is None:
        none_found = "the search over one worker type per pool found none"
        most = _rates_text(values.rate_rps, values.refuted_rps, none_found)
        return f"Most traffic within the limits: {most}; {assumed}."
    most = _rates_text(values.rate_rps, values.refuted_rps, "no fleet was found")
    on_paper = _rates_text(values.on_paper_rps, values.on_paper_refuted_rps, "none")
    return (
        f"Most traffic within the limits that is kept in enough scenarios: {most}; {assumed}. "
        f"On paper: {on_paper}."
    )


def _rates_text(rate_rps: float, refuted_rps: float | None, none_found: str) -> str:
    """A rate that a fleet carries, and the lowest one at which none was found (the text `none_found`)."""
    if refuted_rps is None:
        return f"{rate_rps:g} requests/s, time ran out before a higher rate was refuted"
    return f"{rate_rps:g} requests/s, at {refuted_rps:g} {none_found}"


def proof_lines(plan: Plan) -> list[str]:
    """The plan's value, what was proved over which fleets, and how many simulations were run."""
    certificate = plan.certificate
    value, bound = (in_unit(each, certificate.unit) for each in (certificate.value, certificate.bound))
    subject = "the fleet on paper" if certificate.answers else "the plan"
    lines = [
        f"Status: {plan.status}. On paper: {value}.",
        f"Fleets with one worker type per pool: {level0_line(certificate)}.",
        *(f"{capitalise_first(text)}." for text in fact_sentences_of(certificate.assumed)),
        "Fleets of several types per pool: "
        + (
            "every cheaper one was simulated and fails."
            if certificate.beyond_exact
            else "searched, not exhausted."
        ),
    ]
    if plan.throughput:
        lines.append(f"{throughput_line(plan.throughput)} All else is about the cheapest fleet at this rate.")
    if certificate.level0_gap_frac > 0:
        lines.append(
            f"{subject.capitalize()} saves {show_share(certificate.level0_gap_frac)} against the best of "
            "one type per pool."
        )
    lines += [
        f"Lower bound over all fleets of these worker types, under any policy: {bound}, a gap of "
        f"{show_share(certificate.gap_frac)} to {subject}; the assumptions say what it takes for granted.",
        f"{'On paper, scenarios not counted: ' if certificate.answers else ''}"
        f"{count_text(certificate.simulations, 'simulation')}, {count_text(certificate.cuts, 'cut')}, "
        f"seed {certificate.seed}.",
    ]
    return lines


def unpriced_text(alternative: Alternative, unit: str) -> str:
    """The note on an alternative without a price, with its lower bound if known; empty if it has a price."""
    if alternative.is_priced:
        return ""
    # With `at_least` the objective is a lower bound.
    is_bounded = alternative.at_least and math.isfinite(alternative.objective)
    least = f", at least {in_unit(alternative.objective, unit)}" if is_bounded else ""
    notes = "; ".join(fact_sentences_of(alternative.notes))
    return f"not priced{least}" + (f": {notes}" if notes else "")


def binding_lines(plan: Plan) -> list[str]:
    """A line for each thing that binds; in a plan for production, marked if it is of the fleet on paper."""
    certificate = plan.certificate
    return [
        ("on paper: " if certificate.answers and isinstance(fact, OF_PAPER) else "") + fact_sentence(fact)
        for fact in certificate.binding
    ]


def alternative_notes(alternative: Alternative, plan: Plan) -> list[str]:
    """The notes on an alternative. If its workers are the plan's and only their engine settings differ, the
    first note says so, because tables of fleets do not show settings.
    """
    fleet = alternative.fleet
    is_alike = (
        fleet is not None and fleet != plan.fleet and describe_fleet(fleet) == describe_fleet(plan.fleet)
    )
    alike = ["the plan's workers with other settings"] if is_alike else []
    return [*alike, *fact_sentences_of(alternative.notes)]


def alternative_note(alternative: Alternative, plan: Plan) -> str:
    """How much more than the plan an alternative costs, and the notes on it. An alternative on paper is
    compared with the fleet on paper; the note says so if the plan has another value.
    """
    difference = []
    if alternative.fleet is not None:
        value = plan.certificate.value if Remarked("on-paper") in alternative.notes else plan.value
        difference = [relative_cost_text(alternative.objective, value)]
        if abs(value - plan.value) > SAME_FRAC * plan.value:
            difference.append(f"against the fleet on paper, {in_unit(value, plan.certificate.unit)}")
    return "; ".join(filter(None, [" ".join(difference), *alternative_notes(alternative, plan)]))


def list_text(parts: Sequence[str]) -> str:
    """The parts in a sentence: "a, b and c"."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def sold_singly_text(gpus: Iterable[str], *, is_of_fleet_file: bool = False) -> str:
    """What to write into slo.yaml, or into a fleet's file, if a user rents GPUs singly that the catalog sells
    by the node.
    """
    sold_as = f"sold_as: {{{', '.join(f'{gpu}: gpu' for gpu in dict.fromkeys(map(row_of, gpus)))}}}"
    where = f"{sold_as} into the fleet's file" if is_of_fleet_file else f"fleet: {{{sold_as}}}"
    return f"where single GPUs are rented, write {where}"


def idle_gpus_text(bill: Bill, *, is_of_fleet_file: bool = False) -> str:
    """How many GPUs of whole nodes are paid and idle, and what to write to avoid it; empty if none are."""
    if not bill.idle_gpus:
        return ""
    gpus = [each.gpu for each in bill.nodes if each.idle_gpus]
    singly = sold_singly_text(gpus, is_of_fleet_file=is_of_fleet_file)
    return f"{count_text(bill.idle_gpus, 'GPU')} of whole nodes paid and idle; {singly}"


def spot_caveat(fleet: Fleet) -> str:
    """The note that a simulation of one fleet interrupts no spot worker; empty if the fleet has none."""
    if not any(payment_suffix(pool.type.gpu.name) == SPOT for pool in fleet.running_pools):
        return ""
    return "spot workers are all up here; a plan keeps its SLO without those that may be down"


def usd_text(dollars: float) -> str:
    """An amount of money to the cent."""
    return f"{dollars:,.2f} USD"
