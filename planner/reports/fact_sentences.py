"""Sentences for the evidence and the warnings of a plan: one function for each class of documents/facts.py.

Certificate, screen and report take their sentences from here. search/problem/reasons.py has the sentences for
reasons why an option was left out.
"""

import math
import re
from collections.abc import Iterable
from functools import singledispatch

from planner.documents import facts
from planner.documents.safety import strictest_safety
from planner.domain import KV_BLOCK_TOKENS, STEADY_FRAC, FleetLimit
from planner.errors import ways_text
from planner.policies import QUEUE, ROUTING, router_name
from planner.search.problem.reasons import left_out_text, reason_text
from planner.solvers.repeats import CONFIDENCE_FRAC, FAILS_FRAC, HOLDS_FRAC, Repeats
from planner.units import (
    count_text,
    in_unit,
    show_amount,
    show_beside,
    show_clock,
    show_digits,
    show_s,
    show_share,
    show_span,
)

LEVEL0 = "with one worker type per pool"  # How sentences call fleets of level 0.
SAME_FRAC = 1e-9  # Two costs that differ by less are the same, up to rounding.
SUM_SAME_FRAC = 1e-6  # The same for a sum of costs, or for a cost that a solver found.
SAME_USD = 0.005  # A smaller difference would be shown as 0.00.
# By objective, the words for better fleets; the braces are for how much better.
LESS = {"cost": "cost {}less", "gpus": "have {}fewer GPUs", "power": "draw {}less power"}
MOST_NAMED_GPUS = 4  # A sentence names at most this many GPUs with old prices; set by hand.

_OTHER_DRAWS, _HISTORIES = "other draws of this traffic", "histories of interruptions, drawn at random"
# What a plan may leave unsimulated when its work is used up (`facts.NotSimulated`).
_LEFT_OUT: dict[facts.LeftOut, str] = {
    "neighbours": "fleets with one worker fewer",
    "one-more": "fleets with one worker more",
    "pinned-replicas": "what pinned prefixes are worth",
    "longer-steps": "the plan with longer steps",
    "expected": "the plan for what is expected, to price the insurance",
    "longest-ttft": "the longest TTFT of other policies",
    "hours": "what it costs to hold every hour",
    "routers": "the fleet under the routers of other targets",
    "shortest-first": "what shortest prompts first would save",
    "spot-gone": "spot workers that go all at once",
    "other-draws": _OTHER_DRAWS,
    "more-draws": "more draws of this traffic",
    "histories": _HISTORIES,
}
_FINDINGS: dict[facts.FindingName, str] = {
    "caches-unused": "prefix caches save nothing here: the plan counts on no hit",
    "nothing-drawn": (
        "nothing is drawn here: the trace is replayed as it is, so other seeds give the same run"
    ),
    "no-shared-limit": "no shared limit binds: every LLM has the fleet it would have alone",
}
_ASSUMPTIONS: dict[facts.Granted, str] = {
    "monotonicity": "more workers never hurt (monotonicity), so one failure refutes every smaller fleet",
    "ttft-ends-with-prefill": (
        "TTFT ends with prefill; the KV transfer of a disaggregated request falls into its first gap"
    ),
    "first-token-of-decode": (
        "TTFT ends with the first token that the client sees; in pairs it is the decode worker's, after the "
        "KV transfer"
    ),
    # The warm-up is cut in traffic/trace.py.
    "default-link": "the link's speed is the planner's default; fleet: network in slo.yaml states yours",
    "steady-state": (
        "steady state: warm-up cut (a twentieth of the trace, at most two minutes), backlog test at the end"
    ),
    "sessions-wait": (
        "a request that waits for another arrives when this fleet has answered that one; rate and window are "
        "computed from arrivals of a run in which answers take no time; every request that arrives after the "
        "warm-up counts, to the end of the run"
    ),
    "sessions-given-up": (
        "bound: a percentile allows some requests to miss their limits, and the bound gives up the whole "
        "sessions of these; every other request begins as late as its predecessors' limits allow"
    ),
    "one-budget-per-role": "beyond level 0 every GPU and TP degree takes part with one token budget per role",
    "board-power": "power: the boards' limits, GPUs only",
    "first-use-of-blocks": (
        "the bound counts each block of a prompt once, at its first use in the trace, because no cache "
        "spares that; of memory it counts the blocks that belong to one request alone"
    ),
    "own-blocks-alone": (
        "prefixes may be pinned before the first request, so the bound counts only the blocks of a prompt "
        "that belong to one request alone, as work and as memory"
    ),
    "cold-caches": (
        "caches are cold at the start of the trace; with caches monotonicity is likely and not certain, "
        "since more workers may hit less: the lists `neighbours` and `binding` of the certificate say what "
        "was simulated with one worker fewer and one more"
    ),
    "pins-placed-quickly": (
        "every fleet was simulated with its prefixes pinned where the search's quick placement has them; the "
        "best fleet and those with a worker fewer also where the best placement found has them; after a loss "
        "they count as placed anew on the workers that are left"
    ),
    "no-shared-workers": "no worker serves two LLMs, and the fleets do not disturb each other",
    "level0-of-each": (
        "level 0: every LLM has one worker type, or one prefill and one decode type; its own "
        "certificate.json has the options, and what else is assumed"
    ),
    "bounds-add-up": "bound: the sum of the LLMs' bounds, each with all of the fleet for itself",
}
# What the search takes for granted instead of simulating (search/level0/pruning_rules.py).
_PRUNING_RULES: dict[facts.PruningRule, str] = {
    "more-mixed": "one mixed pool: what holds with n workers holds with n + 1",
    "more-decode": "beside the same prefill pool, what holds with d decode workers holds with d + 1",
    "leads": "a prefill pool that misses TTFT with unlimited decode misses it beside any decode pool",
    "follows": (
        "a decode pool whose backlog grows with instant prefill has a growing backlog behind any prefill pool"
    ),
    "seats": (
        "a decode pool that cannot make the tokens in time, even at its best batch size with every place in "
        "the batch taken at the end, has a growing backlog"
    ),
    "link": (
        "no prefill pool works with any decode pool where the link cannot carry all KV blocks in the order "
        "of their prefills, and no hand-off overtakes an earlier one that waits for room"
    ),
    "raced": "policies that save nothing near the best fleet save nothing elsewhere",
}
# The end of a clause about savings: the answer of the plan in which they are made.
_OF_ANSWER: dict[facts.AnswerName, str] = {
    "on-paper": " on paper",
    "production": " in production",
    "with-a-loss": " with a loss",
}
_CAUTIONS: dict[facts.Caution, str] = {
    "spot-nodes": "spot workers need nodes of your cloud's spot market: no manifest asks for them",
    "copies-share-prefixes": (
        "superposed copies of the trace share their prefixes, sessions included, which overstates hits; take "
        "traffic: {scale: compress}, or a trace that was recorded at the rate you ask for"
    ),
    "prompts-are-text": (
        "the LLM has an encoder for images or sound, and the trace has no column image_tokens: all prompts "
        "are taken as text of input_tokens"
    ),
    "only-ends-kept": (
        "vLLM's prefix cache keeps the state, or the KV of sliding-window attention, of this LLM only where "
        "a prompt ends and where prompts were seen to part: a shared beginning is found from its third "
        "request on. The plan counts it from the second"
    ),
    "compressed-ends-kept": (
        "since 0.27 vLLM's prefix cache keeps the sliding-window KV of this LLM only where a prompt ends and "
        "where prompts were seen to part. The plan assumes the rule before 0.27, a window at the end of each "
        "page of 256 tokens, with which less of a long prompt is found"
    ),
    "requests-bring-priority": (
        "the order of the queue goes by the `priority` that each request brings with it: clients or `plan "
        "serve` must give it, no router of a manifest does; without it prompts are served as they arrive: so "
        "are the targets' routers simulated unless slo.yaml names this order, and so plans policies: {queue: "
        "fcfs} or a deployment target (--target NAME)"
    ),
    "keep-alives-uncounted": (
        "requests of the router that keep pinned prefixes cached take over 1 % of some worker's time, which "
        "the simulated latencies leave out; `prefixes` in plan.yaml says how much. Ask for room with safety: "
        "{growth: 10 %}, or route without pins"
    ),
    "no-queue-by-tenants": (
        "slo: tenants is kept by enough workers alone, as no queue of this deployment target goes by "
        "tenants; `plan serve` has some (dlpm-held, dlpm-turns), which a plan without deploy tries and "
        "which may need fewer"
    ),
    "prompts-first": (
        "SGLang computes prompts before answers unless set otherwise, so all answers stand still "
        "while prompts come; engine: {name: sglang, mixed_steps: true} (--enable-mixed-chunk) computes them "
        "together, which may need fewer GPUs where gaps between tokens are limited"
    ),
}
# Remarks on an alternative to the plan, such as a GPU type; they follow its label.
_REMARKS: dict[facts.Remark, str] = {
    "not-searched": "none was found within the limits",
    "fails-on-other-draw": "its best fleet fails on another draw or rate of the traffic",
    "perhaps-not-cheapest": "perhaps not the cheapest, as not all of its settings were tried",
    "effort-ended": "the effort ended",
    "all-too-few": "all that are in stock or within the limits are too few",
    "is-the-plan": "the plan",
    "on-paper": "compared on paper, not planned for production",
    "cheaper-alone": (
        "cheaper than the plan, whose search over all types did not find it: name this GPU alone under "
        "fleet: gpus"
    ),
}


@singledispatch
def fact_sentence(fact: object) -> str:
    """A fact in words, without a capital or a full stop; TypeError for an object that has no sentence.

    Objects of classes without a function below must be reasons why an option was left out (reasons.py).
    """
    return reason_text(fact)


def left_out_words(label: str) -> str:
    """The label of a worker that was left out; a number at its end is a budget of tokens per step."""
    return re.sub(r" (\d+)$", r" with \1 tokens per step", label)


def fact_sentences_of(facts_to_tell: Iterable[object]) -> list[str]:
    """The `fact_sentence` of each fact."""
    return [fact_sentence(fact) for fact in facts_to_tell]


def capitalise_first(text: str) -> str:
    """The text with its first letter as a capital. (str.capitalize also changes the other letters.)"""
    return f"{text[0].upper()}{text[1:]}"


def prices_text(prices: Iterable[facts.Price]) -> str:
    """What each GPU costs, with sources, in one line."""
    return "; ".join(fact_sentences_of(prices))


def backlog_text(patient_frac: float, patience_s: float) -> str:
    """The result of the backlog test (slo_verdict.Verdict), in the same words on all screens and in files."""
    values = (
        f"of the requests that arrived in the last tenth of the run {show_share(patient_frac)} waited "
        f"no longer than {show_s(patience_s)}, {show_share(STEADY_FRAC)} must"
    )
    if patient_frac >= STEADY_FRAC:
        return f"the backlog test holds: {values}"
    return f"the backlog grows: {values}"


def drawn_text(repeats: Repeats) -> str:
    """Words for what `repeats` draw at random, for instance "other draws of this traffic"."""
    losses = ", with all workers and after the losses it must survive (the figures are with all workers)"
    drawn = _HISTORIES if repeats.what == "histories" else _OTHER_DRAWS
    return drawn + (losses if repeats.after_losses else "")


def times_text(low: float, high: float) -> str:
    """The factors between which step times lie: 'x0.76-1.43'."""
    return f"x{low:.2f}-{high:.2f}"


def headroom_percent(frac: float) -> str:
    """Headroom as a percentage, rounded down, because the fleet holds no further: 0.828 -> '82 %'. Below 10 %
    it has one decimal.
    """
    # `round` before `floor`: in floating point 1000 * 0.29 is a little below 290.
    tenths = math.floor(round(1000 * frac, 6))
    return f"{tenths / 10:.1f} %" if tenths < 100 else f"{tenths // 10} %"


def more_text(frac: float) -> str:
    """An increase in words: '+12 %', '+0.8 %', or 'at least +100 %' (no more is simulated)."""
    if frac >= facts.HEADROOM_MOST_FRAC:
        return f"at least +{100 * facts.HEADROOM_MOST_FRAC:.0f} %"
    if frac < facts.HEADROOM_STEP_FRAC:
        return f"less than +{100 * facts.HEADROOM_STEP_FRAC:g} %"
    return f"+{headroom_percent(frac)}"


def _percent_more(frac: float) -> str:
    """A signed difference in percent without its unit: "+1.2"; from 100 % on in whole percents, "+2681"."""
    return f"{100 * frac:+.{1 if abs(frac) < 1 else 0}f}"


def relative_cost_text(cost: float, value: float) -> str:
    """How far the cost of a fleet is above `value`: "+1.2 %". `cost` is infinite if no fleet was found."""
    if not math.isfinite(cost):
        return "not found"
    if value <= 0:  # All GPUs of the plan are owned.
        return "the same" if cost <= 0 else "costs more"
    more_frac = cost / value - 1
    if abs(more_frac) < SAME_FRAC:
        return "the same"
    percent = _percent_more(more_frac)
    if percent.strip("+-0."):
        return f"{percent} %"
    return f"{'more' if more_frac > 0 else 'less'} by under 0.1 %"


# -- what a simulation says --------------------------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.Outcome) -> str:
    reasons = [_slo_line_text(line) for line in fact.missed]
    if fact.attainment is not None:
        reasons.append(
            f"{show_share(fact.attainment.frac)} of requests keep all limits "
            f"({100 * fact.attainment.needed_frac:g} % needed){_window_text(fact.attainment.window_s)}"
        )
    reasons += [
        f"tenant {each.tenant} gets {show_share(each.share_frac)} of its fair share of service while its "
        f"work waits ({100 * each.needed_frac:g} % needed){_window_text(each.window_s)}"
        for each in fact.shares
    ]
    if fact.backlog is not None:
        reasons.append(backlog_text(fact.backlog.patient_frac, fact.backlog.patience_s))
    return "; ".join(reasons) or "keeps the SLO"


def _slo_line_text(line: facts.At) -> str:
    """A line of the SLO with its value: "ttft p90 is 6 s, 85 % within 5 s (90 % needed)"."""
    limit = line.limit
    value, limit_text = show_beside(line.value_s, limit.limit_s)
    return (
        f"{limit.label} is {value}, {show_share(line.kept_frac)} within "
        f"{limit_text} ({100 * limit.percentile_frac:g} % needed){_window_text(line.window_s)}"
    )


def _window_text(window_s: tuple[float, float] | None) -> str:
    """Words for a window, ", from 14:00 to 15:00 of the trace"; empty without one."""
    if window_s is None:
        return ""
    return f", from {show_clock(window_s[0])} to {show_clock(window_s[1])} of the trace"


@fact_sentence.register
def _(fact: facts.Neighbour) -> str:
    when = "on another draw or rate of the traffic, " if fact.on_other_draw else ""
    when += "after the losses it must survive, " if fact.after_losses else ""
    return when + ("no worker of this role is left" if fact.outcome is None else fact_sentence(fact.outcome))


# -- under the routers of deployment targets ---------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.RoutersMiss) -> str:
    """For instance "the SLO is not kept under the router of lws (vllm-router by random): ttft p90 6 s"."""
    targets: dict[tuple[str, str], list[str]] = {}
    for each in fact.missed:
        targets.setdefault((router_text(each), decided_text(each)), []).append(each.target)
    return "the SLO is not kept under the router of " + "; of ".join(
        f"{', '.join(names)} ({router}): {text}" for (router, text), names in targets.items()
    )


def router_text(under: facts.UnderRouter) -> str:
    """The router and its routing, in the target's own names (`routing_names`): "vllm-router by random"."""
    return router_name(under.router, under.routing_names)


def decided_text(under: facts.UnderRouter) -> str:
    """The figures that decide: "ttft p90 6.36 s, limit 5 s, 1 of 4 scenarios"; without scenarios if none were
    asked for.
    """
    kept_in = under.kept_in
    # Only the scenarios decide against the fleet, so a figure within its limit would say nothing.
    if kept_in is not None and under.outcome.holds and not under.passes:
        return (
            f"as written kept, but the test not passed: {kept_in.kept} of {kept_in.scenario_count} scenarios"
        )
    scenarios = "" if kept_in is None else f", {kept_in.kept} of {kept_in.scenario_count} scenarios"
    return _written_text(under) + scenarios


def _written_text(under: facts.UnderRouter) -> str:
    """The figure of the SLO that decides under this router, with the traffic as written."""
    outcome, line = under.outcome, under.tightest
    # The fleet fails although every line holds: by its attainment, its backlog or a tenant's share.
    if not outcome.holds and not outcome.missed:
        return fact_sentence(outcome)
    if line is None:
        return "no limit has a figure"
    value, limit = show_beside(line.value_s, line.limit.limit_s)
    return f"{line.limit.label} {value}, limit {limit}{_window_text(line.window_s)}"


@fact_sentence.register
def _(fact: facts.UnderRouter) -> str:
    return f"{decided_text(fact)}: {'kept' if fact.keeps else 'not kept'}"


@fact_sentence.register
def _(fact: facts.ServicesApart) -> str:
    return (
        f"deploy: {fact.target} makes {fact.services} services with an address each: the SLO is kept only "
        "behind a balancer that routes among all workers as was simulated; put one in front, which no "
        "manifest does"
    )


@fact_sentence.register
def _(fact: facts.NotDeployable) -> str:
    return f"deploy: {fact.target} cannot run this plan: {fact.because.removeprefix(f'{fact.target}: ')}"


# -- what binds --------------------------------------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.LimitBinds) -> str:
    value, limit = show_beside(fact.value_s, fact.limit.limit_s)
    return (
        f"{fact.limit.label} binds the {fact.pool} pool: at {value} instead of {limit} "
        f"one worker of {fact.worker_type} fewer would do, which saves "
        f"{in_unit(fact.saves, fact.unit)}"
    )


@fact_sentence.register
def _(fact: facts.CapacityBinds) -> str:
    fewer = fact.neighbour
    return f"capacity binds the {fewer.pool} pool: with one worker fewer, {fact_sentence(fewer)}"


@fact_sentence.register
def _(fact: facts.UsedUp) -> str:
    return f"{fact.limit.name} is used up: {show_amount(fact.used, '')} of {show_amount(fact.amount, '')}"


@fact_sentence.register
def _(fact: facts.BoundPrice) -> str:
    one_more = {"power": "one more kW", "cost": "one more USD/h allowed", "gpus": "one more GPU"}
    return (
        f"{one_more.get(fact.limit.of, f'one more {fact.limit.gpu}')} lowers the bound, which allows "
        f"fractions of a worker, by {show_digits(fact.saves, 3)} {fact.unit}; the plan itself may not change"
    )


@fact_sentence.register
def _(fact: facts.PromisedAt) -> str:
    value, limit = show_beside(fact.value_s, fact.limit.limit_s)
    return f"{fact.limit.label} is {value} where the limit is {limit}"


@fact_sentence.register
def _(fact: facts.AskedAgain) -> str:
    return f"{fact.change}: {moved_text(fact.planned, fact.value, fact.unit)}" + (
        f", {fact.fleet}" if fact.fleet else ""
    )


def is_same_value(planned: float, value: float | None) -> bool:
    """Whether two values of the objective are equal up to rounding; False if there is no fleet."""
    return value is not None and abs(value - planned) <= SAME_FRAC * planned


def moved_text(planned: float, value: float | None, unit: str) -> str:
    """The difference that a change makes to a value: "+2.99 USD/h (+12.5 %)"."""
    if value is None:
        return "no fleet"
    if is_same_value(planned, value):
        return "the same"
    more = value - planned
    amount = in_unit(abs(more), unit)
    if amount == in_unit(0.0, unit):  # Less than half a cent.
        return f"{'more' if more > 0 else 'less'} by under 0.01 {unit}"
    # A plan with only owned GPUs may cost nothing.
    percent = _percent_more(more / planned) if planned else ""
    share = f" ({percent} %)" if percent.strip("+-0.") else ""
    return f"{'+' if more > 0 else '-'}{amount}{share}"


@fact_sentence.register
def _(fact: facts.LongerSteps) -> str:
    share = f"{100 * fact.error_frac:.2g} %"
    return f"if every step took {share} longer, the error of the fits: {fact_sentence(fact.outcome)}"


@fact_sentence.register
def _(fact: facts.UpperEnds) -> str:
    return (
        f"if prefills took {fact.prefill:.2f} and decodes {fact.decode:.2f} times as long, the upper ends of "
        f"their spread: {fact_sentence(fact.outcome)}"
    )


@fact_sentence.register
def _(fact: facts.StepSpread) -> str:
    prefill, decode = (times_text(*ends) for ends in (fact.prefill, fact.decode))
    how = "measured" if fact.is_own else "estimated"  # A spread of other engines' steps is an estimate.
    return f"step times of {fact.worker} {how}: prefill {prefill}, decode {decode} of {fact.source}"


@fact_sentence.register
def _(fact: facts.Robustness) -> str:
    sampled = "" if fact.rates is None else f", sampled at {fact.rates} rates"
    than = " than the upper end of their spread" if fact.spread else ""
    return (
        f"planned for steps {100 * fact.step_times_frac:g} % longer{than} and all traffic up to "
        f"{100 * fact.traffic_frac:g} % more than expected{sampled}"
    )


@fact_sentence.register
def _(fact: facts.InsuranceCosts) -> str:
    if fact.expected is None:
        return f"{fact_sentence(fact.robustness)}; what that costs was not found in time"
    more = in_unit(fact.value - fact.expected, fact.unit)
    share = relative_cost_text(fact.value, fact.expected)
    return f"{fact_sentence(fact.robustness)}; this insurance costs {more} ({share})"


@fact_sentence.register
def _(fact: facts.AsExpected) -> str:
    values = ", ".join(f"{line.limit.label} is {show_s(line.value_s)}" for line in fact.values)
    return f"if all comes as expected, {values}"


@fact_sentence.register
def _(fact: facts.ExpectedMissed) -> str:
    missed = f"{fact_sentence(fact.robustness)}, but if all comes as expected it misses the SLO"
    return missed if fact.outcome is None else f"{missed}: {fact_sentence(fact.outcome)}"


@fact_sentence.register
def _(fact: facts.NoneForExpected) -> str:
    return f"{fact_sentence(fact.robustness)}, but for what is expected no fleet was found: {fact.error}"


@fact_sentence.register
def _(fact: facts.SpotSpare) -> str:
    return (
        f"{fact.pool}: of {fact.workers} spot workers {fact.down} may be down at once, and more than that at "
        f"most {100 * fact.risk_frac:g} % of the time ({fact.interruptions_per_h:g} interruptions per worker "
        f"and hour, each independent of the others, back after {show_s(fact.restart_s)}); the SLO holds "
        "without them"
    )


@fact_sentence.register
def _(fact: facts.SpotGone) -> str:
    loss = "if so many spot workers leave together in the middle of the trace, their requests begin anew"
    return f"{loss}: {fact_sentence(fact.outcome)}"


@fact_sentence.register
def _(fact: facts.CachesSave) -> str:
    now = f"with prefix caching and {fact.routing} routing {in_unit(fact.value, fact.unit)}"
    if fact.value_without is None:
        return f"{now}; without, no fleet within the limits keeps the SLO"
    gpus = f"{count_text(fact.gpus, 'GPU')} instead of {fact.gpus_without}"
    return f"{now} instead of {show_amount(fact.value_without, fact.unit)}, {gpus}"


@fact_sentence.register
def _(fact: facts.PolicyGains) -> str:
    value = in_unit(fact.value, fact.unit)
    return f"{fact.label}: {in_unit(fact.saves, fact.unit)} less{_OF_ANSWER[fact.of]} ({value})"


@fact_sentence.register
def _(fact: facts.SharingSaves) -> str:
    alone, shared = sum(each.value for each in fact.alone), show_amount(fact.value, fact.unit)
    by_class = ", ".join(f"{each.name} {show_amount(each.value, fact.unit)}" for each in fact.alone)
    separate = f"separate fleets for {len(fact.alone)} classes: {in_unit(alone, fact.unit)} ({by_class})"
    if abs(fact.saves) <= SUM_SAME_FRAC * alone:
        return f"{separate}; one fleet for all costs the same"
    if fact.saves < 0:
        return f"{separate}, {in_unit(-fact.saves, fact.unit)} less than one fleet for all ({shared})"
    share = f"{100 * fact.saves / alone:.0f} %"
    return (
        f"one fleet for all classes saves {in_unit(fact.saves, fact.unit)} ({share}): {shared} instead of "
        f"{show_amount(alone, fact.unit)} ({by_class})"
    )


@fact_sentence.register
def _(fact: facts.SeparateKept) -> str:
    by_class = ", ".join(f"{each.name} {show_amount(each.value, fact.unit)}" for each in fact.alone)
    total = in_unit(sum(each.value for each in fact.alone), fact.unit)
    return (
        f"separate fleets for {len(fact.alone)} classes: {total} ({by_class}), each kept in enough scenarios"
    )


@fact_sentence.register
def _(fact: facts.NotShared) -> str:
    if fact.name:
        return f"what sharing saves is not known: no fleet for {fact.name} alone was found"
    return f"separate fleets {fact.why} are not planned, so what sharing saves is not known"


@fact_sentence.register
def _(fact: facts.PoliciesRaced) -> str:
    parts = []
    if fact.nothing:
        parts.append(f"save nothing near the best fleet{_OF_ANSWER[fact.of]}: {'; '.join(fact.nothing)}")
    if fact.rivals:
        parts.append(f"save something near it, and no more than what was taken: {'; '.join(fact.rivals)}")
    if fact.unasked:
        parts.append(f"not simulated: {'; '.join(fact.unasked)}")
    return "policies tried: " + ("; ".join(parts) or "none beside those searched")


@fact_sentence.register
def _(fact: facts.PinnedReplicas) -> str:
    pinned = (
        f"{100 * fact.pinned_hit_frac:.1f} % of the input tokens are in them and {100 * fact.hit_frac:.1f} % "
        f"hit in all, {in_unit(fact.value, fact.unit)}, {count_text(fact.gpus, 'GPU')}"
    )
    lru = (
        f"LRU caches with {fact.routing} routing hit {100 * fact.hit_frac_lru:.1f} %, "
        f"{in_unit(fact.value_lru, fact.unit)}, {count_text(fact.gpus_lru, 'GPU')}"
    )
    verdict = "pinned prefixes pay" if fact.is_chosen else "pinned prefixes do not pay"
    return f"{verdict}: {pinned}; {lru}"


@fact_sentence.register
def _(fact: facts.PinsPlaced) -> str:
    comparison = ""
    if fact.load < fact.quick_load:
        less_frac = 1 - fact.load / fact.quick_load
        comparison = f", {100 * less_frac:.1f} % less than by the search's quick placement"
    elif (best_load := f"{fact.best_load:.4g}") != f"{fact.load:.4g}":
        # The plan has the quick placement if the better one simulates no better.
        comparison = f"; a placement with {best_load} is known, and simulates no better"
    pool = f"{fact.pool} pool" + ("" if fact.is_chosen else " of the best fleet that has them")
    return (
        f"pins of the {pool}: the busiest of {count_text(fact.workers, 'worker')} has {fact.load:.4g} s "
        f"of work per second{comparison}; no placement has less than {fact.bound:.4g}: a gap of "
        f"{100 * fact.gap_frac:.2f} %"
    )


@fact_sentence.register
def _(fact: facts.WorkerMore) -> str:
    return f"with one worker more in the {fact.pool} pool: {fact_sentence(fact.outcome)}"


@fact_sentence.register
def _(fact: Repeats) -> str:
    confidence_percent, figures = 100 * CONFIDENCE_FRAC, []
    # Wald's test rejects one hypothesis: "kept on at most FAILS_FRAC" or "kept on at least HOLDS_FRAC".
    verdict = {
        "holds": f"with {confidence_percent:g} % confidence on more than {100 * FAILS_FRAC:g} % of all",
        "fails": f"with {confidence_percent:g} % confidence on less than {100 * HOLDS_FRAC:g} % of all",
        "open": f"too few to say more with {confidence_percent:g} % confidence",
    }[fact.decision]
    for name, seconds in fact.limits.items():
        if math.isfinite(seconds.mean):
            half_width = f" ± {seconds.half_width:.2g}" if math.isfinite(seconds.half_width) else ""
            figures.append(
                f"{name} {seconds.mean:.3g}{half_width} s on average, {seconds.most:.3g} s at most"
            )
    kept = f"the SLO is kept on {fact.kept} of {fact.runs} {drawn_text(fact)}, {verdict}"
    return "; ".join([kept, *figures])


@fact_sentence.register
def _(fact: facts.GivesWay) -> str:
    by_gpu = ", whole nodes not counted" if fact.unit == "USD/h" else ""
    return (
        f"{fact.llm} gives way: {in_unit(fact.value, fact.unit)}, which is "
        f"{show_amount(fact.more, fact.unit)} more than with all of the fleet for itself{by_gpu}"
    )


@fact_sentence.register
def _(fact: facts.NodesFilled) -> str:
    now_usd_per_h: float | None = fact.usd_per_h
    was_usd_per_h: float | None = fact.was_usd_per_h
    plan_is_cheaper = fact.usd_per_h < fact.was_usd_per_h * (1 - SUM_SAME_FRAC)
    # Filling nodes made the plan cheaper, or only the fleet with a loss.
    if not plan_is_cheaper:
        now_usd_per_h, was_usd_per_h = fact.with_loss_usd_per_h, fact.was_with_loss_usd_per_h
    cost = ""
    if now_usd_per_h is not None:
        instead = "" if was_usd_per_h is None else f" instead of {was_usd_per_h:.2f}"
        cost = f": {now_usd_per_h:.2f}{instead} USD/h{'' if plan_is_cheaper else ' with a loss'}"
    how = f"planned without {', '.join(fact.without)}" if fact.without else "each LLM has nodes of its own"
    if fact.on:
        stock = ", ".join(f"{left.amount:g} {left.limit.gpu}" for left in fact.on)
        how = f"{how}, on {stock}" if fact.without else f"planned on {stock}"
    return f"{how}, as whole nodes are paid{cost}; not every choice of GPUs was tried"


@fact_sentence.register
def _(fact: facts.ProductionShared) -> str:
    if fact.is_each:
        return "every LLM has the fleet for production that it would have alone"
    how = "came to its end" if fact.is_exact else "was stopped"
    again = f", {fact.tries} times, as some failed their tests" if fact.tries > 1 else ""
    return (
        "the fleets for production that the LLMs would have alone do not fit together; they were chosen "
        f"together{again}: by the LLMs in turn on what is left, by a search over one worker type per pool of "
        f"every LLM ({fact.rounds} rounds; it {how}), then each within what the others leave"
    )


@fact_sentence.register
def _(fact: facts.MoreSaves) -> str:
    limit, unit = fact.limit, {"W": " W", "USD/h": " USD/h"}.get(fact.limit.unit, "")
    more = (
        f"{show_amount(fact.enough - fact.amount, '')}{unit} more {_resource_name(limit)} "
        f"({show_amount(fact.enough, '')} instead of {show_amount(fact.amount, '')})"
    )
    less = "less saves nothing" if fact.is_least else "less was not tried in time"
    return (
        f"{LEVEL0}, {more} would save {in_unit(fact.saves, fact.unit)}; {less}, and an unlimited amount "
        f"would save {in_unit(fact.saves_most, fact.unit)}"
    )


@fact_sentence.register
def _(fact: facts.MoreSavesNothing) -> str:
    if fact.is_known:
        return f"{LEVEL0}, more {_resource_name(fact.limit)} alone saves nothing"
    return f"what more {_resource_name(fact.limit)} would save was not found within the time limit"


def _resource_name(limit: FleetLimit) -> str:
    """The limited resource: the name of a GPU, or power, cost or GPUs."""
    return limit.gpu or limit.name


@fact_sentence.register
def _(fact: facts.Finding) -> str:
    return _FINDINGS[fact.name]


# -- what is taken for granted -----------------------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.Assumption) -> str:
    return _ASSUMPTIONS[fact.name]


@fact_sentence.register
def _(fact: facts.StepTimes) -> str:
    return "step times: " + "; ".join(fact.bases)


@fact_sentence.register
def _(fact: facts.HostOverheads) -> str:
    shown = sorted({f"{seconds * 1e3:g} ms" for seconds in fact.overheads_s})
    return "host overhead per step, on top of the engine's own: " + ", ".join(shown)


@fact_sentence.register
def _(fact: facts.EngineModelled) -> str:
    return f"simulated as {fact.engine}; {fact.basis}; the lower bound leaves this out"


@fact_sentence.register
def _(fact: facts.UncheckedEngine) -> str:
    return f"nobody checked the scheduler or constants of {fact.engine} here; vLLM's are used"


@fact_sentence.register
def _(fact: facts.Drafts) -> str:
    cost = f"{100 * fact.draft_frac:.2g} % of a step of the LLM"
    cost += f" and {show_s(fact.draft_s)}" if fact.draft_s else ""
    return (
        f"{fact.worker} drafts {fact.tokens} tokens per step by {fact.method} and is taken to yield "
        f"{fact.mean_tokens:.3g} ({fact.basis}); a pass of the drafter takes {cost}, not measured; what your "
        "traffic accepts, the engine's metrics say (vllm:spec_decode_num_accepted_tokens)"
    )


@fact_sentence.register
def _(fact: facts.Adapters) -> str:
    source = "drawn, each as likely as the next" if fact.drawn else "as the trace names them"
    in_host = min(fact.max_cpu_loras, fact.adapters)
    disk = f", {show_s(fact.disk_s)} more from disk" if in_host < fact.adapters else ""
    return (
        f"{fact.worker} serves {fact.adapters} LoRA adapters ({source}) of rank {fact.max_rank} in "
        f"{fact.max_loras} slots of {fact.slot_bytes / 1e9:.3g} GB per GPU, {in_host} in the host's memory; "
        f"a step with one token of one adapter takes {show_s(fact.step_s)} longer, a load "
        f"{show_s(fact.load_s)}{disk}: estimated, not measured"
    )


@fact_sentence.register
def _(fact: facts.Offloaded) -> str:
    place, whose = "CPU memory", "per GPU"
    if fact.is_shared:
        place, whose = "a store that all workers share", "in all"
    disk = ""
    if fact.disk_bytes:
        place += " and on the disk behind it"
        disk = f", {100 * fact.disk_frac:.1f} % of the tokens from a disk of {fact.disk_bytes / 1e9:.4g} GB"
    return (
        f"{fact.worker} keeps KV of {fact.memory_tokens:,} tokens in {place} "
        f"({fact.gpu_bytes / 1e9:.4g} GB {whose}) behind {fact.kv_tokens:,} on its GPUs; 1,000 tokens come "
        f"back in {show_s(fact.thousand_tokens_s)} ({fact.gpu_bytes_per_s / 1e9:.4g} GB/s {whose}, as it was "
        f"given). Of all prompt tokens {100 * fact.hit_frac:.1f} % are found on the GPUs, "
        f"{100 * fact.reload_frac:.1f} % in {place}{disk}, {100 * fact.computed_frac:.1f} % are computed; "
        f"requests wait {show_s(fact.reload_s)} in all for loads"
    )


@fact_sentence.register
def _(fact: facts.EngineSettings) -> str:
    seats = " or ".join(map(str, fact.max_num_seqs))
    caches = "prefix caches" if fact.prefix_cache else "no prefix cache"
    order = QUEUE[fact.queue].words
    if fact.queue_window_s is not None:
        order += f" (nobody overtaken by what arrives {show_s(fact.queue_window_s)} later)"
    routed = f"routing {fact.routing} ({ROUTING[fact.routing].words})"
    blocks = f"{KV_BLOCK_TOKENS}-token KV blocks"
    return f"at most {seats} sequences per worker, {blocks}, {caches}, {order}, {routed}"


@fact_sentence.register
def _(fact: facts.KvLink) -> str:
    return (
        f"KV blocks move over one shared link of {fact.bandwidth_bytes_per_s / 1e9:g} GB/s, {fact.transfer}"
    )


@fact_sentence.register
def _(fact: facts.MeasuredWindow) -> str:
    return (
        f"the measured window lasts {show_s(fact.window_s)}, {fact.residences:.0f} times a request's mean "
        "residence"
    )


@fact_sentence.register
def _(fact: facts.ObligedWork) -> str:
    if fact.whole_frac > 0:
        work = (
            f"all work of {100 * fact.whole_frac:.3g} % of the requests, by {fact.whole_after_s:.4g} s after "
            "the trace"
        )
    elif fact.prefill_frac > 0:
        work = f"the prefill of {100 * fact.prefill_frac:.3g} % of the requests"
    else:
        work = "no request"
    if fact.tail:
        steady = show_share(STEADY_FRAC)
        work += f", and all work of {steady} of the requests of the last tenth, by the backlog test"
    return (
        f"bound: a fleet must do {work}, to keep the SLO; a percentile of gaps adds nothing, since a few "
        "gaps are allowed to be long; work is counted at its cheapest rate per token, for engines that batch "
        "as vLLM V1, under any routing, order and admission"
    )


@fact_sentence.register
def _(fact: facts.SmallCaches) -> str:
    return (
        f"with some or all settings the KV cache of {', '.join(fact.workers)} is too small for the longest "
        f"request ({fact.longest_tokens} tokens). The bound allows such workers, since a percentile lets a "
        "fleet turn some requests away; the search does not, since a plan turns none away"
    )


@fact_sentence.register
def _(fact: facts.UncheckedLeftOut) -> str:
    return left_out_text(fact.gpus)


@fact_sentence.register
def _(fact: facts.GpusConsidered) -> str:
    by_basis = [
        f"{basis}: {', '.join(names)}"
        for basis, names in (("of measured kernels", fact.measured), ("of a roofline", fact.estimated))
        if names
    ]
    return f"GPUs that were considered, with step times {'; '.join(by_basis)}"


@fact_sentence.register
def _(fact: facts.GpusTooSmall) -> str:
    no_room = f"no room beside {fact.weight_bytes / 1e9:.0f} GB of weights"
    rooms = [f"{worker.kv_tokens:,} KV tokens" if worker.kv_tokens else no_room for worker in fact.workers]
    workers = [
        f"{left_out_words(worker.label)} ({room})" for worker, room in zip(fact.workers, rooms, strict=True)
    ]
    return (
        f"too small for this LLM and the longest request, {fact.longest_tokens:,} tokens: "
        f"{', '.join(workers)}"
    )


@fact_sentence.register
def _(fact: facts.PrefixesUncounted) -> str:
    return (
        f"prefix caches are not counted: {show_share(fact.alike_frac)} of the input tokens stand at the "
        "beginning of an earlier prompt, by their block ids; `policies: {prefix_cache: true}` "
        "counts what is found cached"
    )


@fact_sentence.register
def _(fact: facts.NotOffered) -> str:
    return f"GPUs that the provider does not offer at these terms were not considered: {', '.join(fact.gpus)}"


@fact_sentence.register
def _(fact: facts.SloInSeconds) -> str:
    return (
        f"the relative SLO was turned into seconds: each factor times that percentile of an idle {fact.gpu} "
        f"tp{fact.tp}, one limit for all requests"
    )


@fact_sentence.register
def _(fact: facts.OthersLeave) -> str:
    amounts = ", ".join(f"{left.amount:.6g} of {left.limit.name}" for left in fact.left)
    return f"the other LLMs have their fleets, which leave {amounts}"


@fact_sentence.register
def _(fact: facts.Assumed) -> str:
    here = f"on this traffic false in {fact.failed} of {fact.compared} comparisons; " if fact.compared else ""
    return f"assumed: {_PRUNING_RULES[fact.name]} ({here}{_test_failures_text(fact.tested)})"


def _test_failures_text(tested: tuple[facts.RuleTest, ...]) -> str:
    """The failures of a pruning rule in tests (search/level0/pruning_rules.py): "hid a cheaper fleet in 0 of
    90 tests with up to 400 requests, 1 of 25 with more". A rule on pools has one test.
    """
    if not tested:
        return "not measured"
    if tested[0].of_pools:
        return f"false of {tested[0].failed} of {tested[0].tests} pools in tests"
    texts: list[str] = []
    for each in tested:
        text = f"{each.failed} of {each.tests}"
        if each.least_requests is not None:
            text += " with more"
        else:
            text += " tests" if not texts else ""  # The word comes only once, after the first figures.
            text += "" if each.most_requests is None else f" with up to {each.most_requests} requests"
        texts.append(text)
    return f"hid a cheaper fleet in {', '.join(texts)}"


# -- what a reader must know first -------------------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.OfTraffic) -> str:
    return fact.sentence


@fact_sentence.register
def _(fact: facts.NodesBeyondStock) -> str:
    return (
        f"these workers leave gaps in nodes and take {fact.nodes} nodes of {fact.gpus_per_node} × "
        f"{fact.gpu}, more than the stock of {fact.stock_gpus} GPUs has; take workers whose GPUs divide a "
        f"node (tp × pp × dp of 1, 2, 4 or 8), or a stock of {fact.nodes * fact.gpus_per_node}"
    )


@fact_sentence.register
def _(fact: facts.OwnedUnused) -> str:
    return (
        f"{fact.unused} of the {fact.owned} × {fact.gpu} that you own are not used; "
        "no cheaper fleet with more of them was found"
    )


@fact_sentence.register
def _(fact: facts.FewKeepAll) -> str:
    return (
        f"only {show_share(fact.attainment_frac)} of the requests keep all limits at once, though every line "
        f"holds: {', '.join(map(_late_text, fact.late))}; if more must, ask for it with "
        "slo: {attainment: 0.9}"
    )


def _late_text(late: facts.LateRequests) -> str:
    """For instance '57.2 % exceed 200 ms (tbt p99) in their longest gap, the worst takes 278.3 ms'."""
    limit = late.limit
    longest = " in their longest gap" if limit.metric_row.is_of_gaps else ""
    worst, limit_text = show_beside(late.longest_s, limit.limit_s)
    exceeded = f"{100 * late.late_frac:.1f} % exceed {limit_text} ({limit.label}){longest}"
    return f"{exceeded}, the worst takes {worst}"


@fact_sentence.register
def _(fact: facts.WorstHour) -> str:
    if not fact.missed:
        worst = "; ".join(map(_slo_line_text, fact.hours))
        return f"every hour of the trace keeps the SLO; the worst: {worst}"
    return (
        "the SLO is judged over the whole trace, and its worst hour misses it: "
        f"{'; '.join(map(_slo_line_text, fact.missed))}; {_holding_text(fact)}"
        "slo: {every: 1 h} plans for it"
    )


def _holding_text(fact: facts.WorstHour) -> str:
    """The size and the price of the fleet with which every hour holds; empty if it is not known."""
    paid, planned = fact.holding_usd_per_h, fact.planned_usd_per_h
    if paid is None or planned is None:
        return ""
    fleet = " + ".join(f"{each.count} {each.role}" for each in fact.holding)
    more = f"{paid - planned:,.2f} USD/h more" if paid - planned > SAME_USD else "no more"
    return f"with {fleet} workers instead, every hour holds, for {more}; "


@fact_sentence.register
def _(fact: facts.OverTheWhole) -> str:
    part = (
        f"planned for {fact.part_requests:,} of the {fact.requests:,} requests, those of the "
        f"{show_span(fact.part_s)} from {show_clock(fact.part_from_s)} of the trace on"
    )
    if fact.outcome is None:
        return f"{part}; there was no time to simulate all of them: give more --time-limit"
    if not fact.outcome.holds:
        return f"{part}; over all of them the plan misses the SLO: {fact_sentence(fact.outcome)}"
    text = f"{part}, which need the most; simulated on all of them the plan keeps the SLO"
    if fact.smaller_usd_per_h is None or fact.planned_usd_per_h is None:
        return text
    fleet = " + ".join(f"{each.count} {each.role}" for each in fact.smaller)
    saved = fact.planned_usd_per_h - fact.smaller_usd_per_h
    return (
        f"{text}; if only percentiles over the whole trace are limited, {fleet} workers keep it too, for "
        f"{saved:,.2f} USD/h less"
    )


@fact_sentence.register
def _(fact: facts.ShortTrace) -> str:
    return (
        f"the trace is short: {show_s(fact.window.window_s)} measured, {fact.window.residences:.1f} times a "
        f"request's mean residence where {fact.enough} make a steady state; plan on a longer trace"
    )


@fact_sentence.register
def _(fact: facts.OneTraceRedrawn) -> str:
    why = [f"lasts {show_s(fact.duration_s)}"] if fact.is_short else []
    changed_lengths = [
        f"{what} of {show_share(round(frac, 2))} of requests"
        for what, frac in (("the prompts", fact.prompts_frac), ("the outputs", fact.outputs_frac))
        if frac
    ]
    if changed_lengths:
        why.append(f"changes in kind between its quarters ({' and '.join(changed_lengths)})")
    advice = "plan on a longer trace"
    if fact.growth_frac:
        advice = f"beyond the {show_share(fact.growth_frac)} growth that is planned for, {advice}"
    else:
        advice += ", or leave room with safety: {growth: 20 %}"
    return (
        f"scenarios are redrawn from this trace alone, which {' and '.join(why)}: they say nothing of other "
        f"hours and days; {advice}"
    )


@fact_sentence.register
def _(fact: facts.GuessedSteps) -> str:
    return f"step times of {fact.gpu} tp{fact.tp} are unchecked: {fact.basis}"


@fact_sentence.register
def _(fact: facts.RooflineWon) -> str:
    won = f"{', '.join(fact.gpus)} won by a roofline, the step times of a data sheet, over"
    # A name with a space also has the size of the GPU group, so `fleet: gpus` does not accept it.
    names_for_fleet = [name for name in fact.measured if " " not in name]
    if len(names_for_fleet) < len(fact.measured):
        return (
            f"{won} {', '.join(fact.measured)}, where kernels of this LLM were measured: `plan profile` "
            "measures it on your GPUs"
        )
    return (
        f"{won} GPUs where kernels of this LLM were measured: "
        f"fleet: {{gpus: [{', '.join(names_for_fleet)}]}} says what those cost"
    )


@fact_sentence.register
def _(fact: facts.NearestEngine) -> str:
    return f"engine {fact.engine}: {fact.basis}"


@fact_sentence.register
def _(fact: facts.OldPrices) -> str:
    named = ", ".join(fact.gpus) if len(fact.gpus) <= MOST_NAMED_GPUS else f"{len(fact.gpus)} GPUs"
    return (
        f"prices of {named} were listed more than {fact.enough_days} days ago, the oldest {fact.date}: look "
        "them up and give them in fleet: prices, or read a list with `plan catalog prices`"
    )


@fact_sentence.register
def _(fact: facts.NotCertified) -> str:
    requested = show_share(fact.asked_frac)
    if not fact.have_spread:
        return (
            "not certified: how far these step times are from measured ones is not known, so every scenario "
            "has them as predicted"
        )
    if fact.kept_in is None or not fact.kept_in.scenario_count:
        return "not certified: no time was left to test it on scenarios"
    return (
        f"not certified: kept in {fact.kept_in.kept} of {fact.kept_in.scenario_count} scenarios that the "
        f"search had not seen, which does not say that it is kept in {requested} of all"
    )


@fact_sentence.register
def _(fact: facts.TooFewKept) -> str:
    most = fact.most_kept  # The fleet that is kept in the most scenarios.
    kept = show_share(most.kept_frac)
    raised = f"raise {ways_text([fact.enough])} for one that is, " if fact.enough else ""
    or_raised = "" if fact.enough else "raise limits that are set, "
    return (
        f"not for production: no fleet within the limits was found that keeps the SLO in "
        f"{show_share(most.asked_frac)} of scenarios; the most that one does is {kept}, for "
        f"{in_unit(most.value, most.unit)}. Planned is the cheapest on paper: {raised}allow other GPUs or "
        f"more of them, {or_raised}ask for {strictest_safety(most.kept_frac)}, or relax the SLO"
    )


@fact_sentence.register
def _(fact: facts.NoneTogether) -> str:
    help_text = f". Ask for {fact.relaxation}" if fact.relaxation else ""
    return f"not for production: {fact.reason}. Planned are the cheapest fleets on paper{help_text}"


@fact_sentence.register
def _(fact: facts.IdleMisses) -> str:
    enough, limit = show_beside(fact.enough_s, fact.limit.limit_s)
    return (
        f"not for production: even an idle worker misses {fact.limit.label} <= {limit} in "
        f"{fact.missed} of {fact.scenario_count} scenarios, as steps may take longer than predicted. No "
        f"number of workers cures that; relax the limit to {enough} or more (what "
        f"{fact.fastest}, the fastest, needs), measure the steps (plan profile), or add a faster GPU. "
        "Planned is the cheapest fleet on paper"
    )


@fact_sentence.register
def _(fact: facts.NotSimulated) -> str:
    left_out = "; ".join(_LEFT_OUT[name] for name in fact.left_out)
    return (
        f"not simulated, as the work that a plan may take was used up: {left_out}; a longer --time-limit "
        "allows more"
    )


@fact_sentence.register
def _(fact: facts.CheaperMiss) -> str:
    return misses_text(fact)


def misses_text(fact: facts.CheaperMiss, less: str = LESS["cost"]) -> str:
    """How far cheaper fleets are known to fail; `less` are the words for cheaper (LESS)."""
    over = f"over {show_share(fact.less_frac)} " if fact.less_frac else ""
    cheaper_fleets = f"fleets with one worker type per pool that {less.format(over)}"
    misses = f"misses the SLO as written or in more than {fact.may_miss} of {fact.scenarios} scenarios"
    if fact.is_exact and not fact.cheaper:
        why = "each misses the SLO as written or has too few workers for the work"
        return f"none of the {cheaper_fleets} is left: {why}"
    if fact.is_exact:
        all_of_them = f"all {fact.cheaper:,} were simulated, as written or in those scenarios"
        return f"each of the {cheaper_fleets} {misses}, exactly: {all_of_them}"
    if not fact.simulated:
        return f"the {cheaper_fleets} were not simulated one by one: that is more work than a plan may take"
    simulated = f"{fact.simulated:,}" if fact.cheaper is None else f"{fact.simulated:,} of {fact.cheaper:,}"
    return f"of the {cheaper_fleets} {simulated} were simulated, and each {misses}"


@fact_sentence.register
def _(fact: facts.EndedByClock) -> str:
    return (
        "the time limit ended the search before its work was done, so another run may answer otherwise; "
        "raise --time-limit"
    )


@fact_sentence.register
def _(fact: facts.MissedOnDraws) -> str:
    ask = "; ask for a fleet that keeps it on several draws with traffic: {draws: 8}"
    return fact_sentence(fact.repeats) + (ask if fact.repeats.what == "other-draws" else "")


@fact_sentence.register
def _(fact: facts.WorkerMoreFails) -> str:
    more = f"with one worker more in the {fact.pool} pool: {fact_sentence(fact.outcome)}"
    return f"{more}; do not scale it up without a new plan"


@fact_sentence.register
def _(fact: facts.DyingAway) -> str:
    return (
        f"{100 * fact.late_frac:.0f} % of the requests arrive later than any would if answers took no time: "
        "sessions run on while none begins, so the fleet is judged on a load that dies away; plan on a "
        "longer trace"
    )


@fact_sentence.register
def _(fact: facts.EncoderUntimed) -> str:
    return (
        f"{100 * fact.image_frac:.3g} % of the prompt tokens are of images: they count in the KV cache, in "
        "steps and in TTFT, but the encoder that makes them takes no time here; at least "
        f"{show_s(fact.encoder_s)} for {fact.image_tokens:.0f} tokens on one {fact.gpu}"
    )


@fact_sentence.register
def _(fact: facts.Cautioned) -> str:
    return _CAUTIONS[fact.name]


@fact_sentence.register
def _(fact: facts.OfLlm) -> str:
    return f"{fact.llm}: {fact_sentence(fact.warning)}"


@fact_sentence.register
def _(fact: facts.ElectricityCounted) -> str:
    whose = "owned GPUs" if fact.of == "owned" else "all GPUs"
    return (
        f"cost has the electricity of {whose} in it, at provisioned power, their limits: "
        f"{fact.usd_per_kwh:g} USD/kWh, PUE {fact.pue:g}; hosts and network on top"
    )


@fact_sentence.register
def _(fact: facts.Price) -> str:
    if fact.date:
        source = f"{fact.source}, {fact.date}"
    else:
        source = f"from {fact.source}" if fact.source else ""
    return f"{fact.gpu} {fact.usd_per_h:g} USD/h ({source})"


@fact_sentence.register
def _(fact: facts.Headroom) -> str:
    longer = _headroom_text(fact.steps_frac, "twice as long", "longer")
    more = _headroom_text(fact.traffic_frac, "twice the traffic", "more traffic")
    return (
        f"as written, the plan holds if steps take {longer}, and it carries {more} of this kind: the same "
        "requests in less time, as --scale compress makes them, or more agents"
    )


def _headroom_text(headroom_frac: float, twice: str, more: str) -> str:
    """For instance "up to 30 % longer". `twice` names an increase of 100 %, the most that is simulated."""
    if headroom_frac >= facts.HEADROOM_MOST_FRAC:
        return f"at least {twice}"
    if not headroom_frac:
        return f"less than {100 * facts.HEADROOM_STEP_FRAC:g} % {more}"
    return f"up to {headroom_percent(headroom_frac)} {more}"


# -- what is said of alternatives --------------------------------------------------------------------------


@fact_sentence.register
def _(fact: facts.Remarked) -> str:
    return _REMARKS[fact.name]


@fact_sentence.register
def _(fact: facts.NoneUpTo) -> str:
    return f"no fleet up to {fact.times:g} times the plan's value holds"


@fact_sentence.register
def _(fact: facts.NoneAlone) -> str:
    if fact.least_worker is not None:
        too = "too dear" if fact.least_worker.change.unit == "USD/h" else "too large"
        return f"{too}: {fact.least_worker}"
    if not fact.is_proved:
        return "no fleet was found, and nothing proves that there is none"
    return f"no fleet of it keeps the SLO (what binds: {', '.join(fact.limits)})"


@fact_sentence.register
def _(fact: facts.LongestTtft) -> str:
    longest = f"longest TTFT {show_s(fact.longest_s)}"
    if fact.planned_s is None:
        return longest
    return f"{longest} instead of {show_s(fact.planned_s)}; ask for it with policies: {{queue: [fcfs, sjf]}}"
