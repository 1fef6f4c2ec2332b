"""The texts of the first screen of an answer: what to buy, what the fleet costs, what makes it miss the SLO,
whether it carries more traffic, and how these figures were obtained.

The report, the terminal and the browser show the same texts. All of them come from a finished plan and its
certificate; screen_charts.py draws the charts.

"As written" means the traffic and the step times of the question; the texts say to how much more of each the
fleet holds. "In scenarios" means traffic drawn anew and other step times, in which a production fleet keeps
the SLO. The two terms are never mixed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.documents.facts import (
    HEADROOM_MOST_FRAC,
    Answered,
    Assumption,
    Drafts,
    ForTargets,
    Headroom,
    IdleMisses,
    KeptIn,
    NoneTogether,
    NotCertified,
    NotShared,
    NotSimulated,
    RooflineWon,
    SeparateKept,
    ServicesApart,
    SharingSaves,
    SpotSpare,
    TooFewKept,
    Workers,
)
from planner.documents.robustness_facts import MORE_FRAC, AtWorkers, FleetRobustness, HeadroomFact, WorkerLoss
from planner.documents.safety import LEAST_KEPT_FRAC, strictest_safety
from planner.domain import OWNED, SPOT, Limit, payment_suffix
from planner.errors import MostKept, ways_text
from planner.fleet import Fleet, Pool
from planner.manifests import TARGETS
from planner.reports.answer_sentences import workers_text
from planner.reports.fact_sentences import (
    LESS,
    SAME_USD,
    decided_text,
    fact_sentence,
    misses_text,
    more_text,
    router_text,
)
from planner.reports.words import (
    TERMS,
    alternative_note,
    describe_fleet,
    idle_gpus_text,
    is_free,
    level0_line,
    list_text,
    unpriced_text,
    usd_text,
)
from planner.search.evidence.plan import Plan
from planner.search.oracle.fleet_oracle import POOL_NAMES
from planner.search.problem.bill import Bill, bill_fleet
from planner.solvers.whole_nodes import node_of
from planner.traffic.scaling import headroom_scale
from planner.units import (
    HOURS_PER_MONTH,
    count_text,
    in_unit,
    percentile_name,
    show_amount,
    show_digits,
    show_share,
    show_w,
)

# A `robustness_facts.Strain` is what may grow until the SLO is missed. STRAINS are nouns for sentences,
# STRAIN_CHANGES the labels in the chart of what breaks first.
STRAINS = {"traffic": "traffic", "steps": "step time", "prompts": "prompt length"}
STRAIN_CHANGES = {"traffic": "more traffic", "steps": "longer steps", "prompts": "longer prompts"}
# The names of a plan's answers, as headings.
NAMES = {"on-paper": "On paper", "production": "Production", "with-a-loss": "With a loss"}
SAME_COST = "costs the same"  # Said of an answer that costs as much as the plan.
# Why there is no answer "with a loss" if spot workers could be bought but the plan has none.
NO_SPOT_BOUGHT = (
    "not looked for beside spot prices: production stands the losses of spot workers, of which it has none, "
    "and the losses that slo.yaml names under spare; spare: 1 worker plans for the loss of any"
)
# A roofline may have won over GPUs with measured kernels (`won_text`). If they are more than this, the
# headline gives their number, not their names; chosen by hand.
MOST_WON_OVER = 3
# What is said if the plan's fleet carries the additional traffic, by the objective of the plan.
NOTHING_EXTRA = {"cost": "no extra cost", "power": "no extra power", "gpus": "no extra GPUs"}


@dataclass(frozen=True, slots=True)
class NextQuestions:
    """How to ask two questions that follow a plan, in a terminal or on the pages of the app.

    `another_target` asks for a plan for one deployment target. `what_if` asks what a changed question costs;
    it is a format with the field `{change}`.
    """

    another_target: str
    what_if: str


BY_COMMAND = NextQuestions(
    "--target NAME plans for one, --target each for all",
    "`plan what-if --change '{change}'` says what it costs",
)
BY_PAGE = NextQuestions(
    "the page What if plans for one, by the key deploy.target=NAME",
    "the page What if, by the key {change}, says what it costs",
)

Basis = Literal["measured", "given", "listed", "estimated", "unchecked"]


@dataclass(frozen=True, slots=True)
class Card:
    """A card with texts on one of the three answers, or on one LLM of several.

    A text is empty if nothing is known. `is_plan` marks the answer that is deployed, `has_plans_fleet` an
    answer whose fleet is the plan's.
    """

    name: str
    price: str  # "none" for an answer without a fleet; `fleet` then says why.
    fleet: str
    is_plan: bool
    difference: str = ""  # What the answer costs more or less than the plan.
    month: str = ""
    kept: str = ""
    holds: str = ""
    breaks: str = ""  # Which limit is missed first under more than `holds` says.
    has_plans_fleet: bool = False


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """A figure that a buyer asks for: its name, its value and a note on it."""

    name: str
    value: str
    note: str


def verdict_text(plan: Plan, questions: NextQuestions = BY_COMMAND) -> str:
    """In a few sentences: what to buy, what it costs, how much more it holds to and how sure that is."""
    carried = f" It carries {plan.throughput.rate_rps:g} requests/s." if plan.throughput else ""
    missed = "" if plan.verdict.holds else " In its simulation it does NOT keep the SLO."
    sentences = (
        f"{not_for_production(plan)}{buy_text(plan.fleet, plan.bill)}.{carried}{missed}",
        targets_text(plan, questions.another_target),
        _certainty_text(plan),
        basis_text(plan.fleet),
        won_text(plan),
    )
    return " ".join(filter(None, sentences))


def won_text(plan: Plan) -> str:
    """The sentence for a plan whose step times come from a roofline, and which those times made cheaper than
    plans on GPUs with measured kernels; empty for other plans.
    """
    won = next((each for each in plan.warnings if isinstance(each, RooflineWon)), None)
    if won is None:
        return ""
    # The warning RooflineWon names all these GPUs, so here their number is enough.
    kinds = list_text(won.measured) if len(won.measured) <= MOST_WON_OVER else f"{len(won.measured)} GPUs"
    return f"This roofline won over {kinds}, where kernels of this LLM were measured."


def targets_text(plan: Plan, remedy: str = BY_COMMAND.another_target) -> str:
    """The deployment targets that keep the SLO under their own routers: "For llm-d and kserve; NOT kept on
    vllm and lws: --target NAME plans for one."; empty if no router has a choice.
    """
    rows = plan.certificate.routers
    if not rows or not plan.fleet.leaves_choice:
        return ""
    apart = {each.target for each in plan.warnings if isinstance(each, ServicesApart)}
    keeping = [
        f"{row.target} behind a balancer" if row.target in apart else row.target for row in rows if row.keeps
    ]
    missed = [row.target for row in rows if not row.keeps]
    if not missed and not plan.certificate.for_targets:
        is_any = len(keeping) > 2 and not apart
        return f"For {f'any of {len(keeping)} deployment targets' if is_any else list_text(keeping)}."
    if plan.certificate.deploy is not None:  # The only row is of the target that slo.yaml names.
        return f"NOT kept on {list_text(missed)}, for which it was planned."
    for_whom = f"For {list_text(keeping)}" if keeping else "For `plan serve`, our own router, alone"
    if plan.certificate.for_targets:
        return f"{for_whom}; {'; '.join(map(for_targets_text, plan.certificate.for_targets))}."
    unable = _unable_targets(plan)
    cannot = f"; {list_text(unable)} cannot run it" if unable else ""
    return f"{for_whom}; NOT kept on {list_text(missed)}{cannot}{f': {remedy}' if remedy else ''}."


def _unable_targets(plan: Plan) -> list[str]:
    """The targets that cannot express the fleet; empty where one target, or not every router, was asked."""
    certificate = plan.certificate
    if certificate.deploy is not None or NotSimulated(("routers",)) in plan.warnings:
        return []
    simulated = {row.target for row in certificate.routers}
    return [name for name in TARGETS if name not in simulated]


def misses_targets(plan: Plan) -> bool:
    """Whether the router of some target misses the SLO, and the reader may ask for a plan for one target."""
    certificate = plan.certificate
    return (
        plan.fleet.leaves_choice
        and certificate.deploy is None
        and not certificate.for_targets
        and any(not row.keeps for row in certificate.routers)
    )


def for_targets_text(values: ForTargets) -> str:
    """What a fleet for some targets costs: "on kserve and lws 143.52 USD/h, 5 workers of 8 × h100-80g"."""
    if values.usd_per_h is None:
        status_text = ", without proof that there is none" if values.status == "not found" else ""
        return f"none found on {list_text(values.targets)}{status_text}"
    status_text = "" if values.status in ("certified", "on paper") else f", {values.status}"
    return (
        f"on {list_text(values.targets)} {usd_text(values.usd_per_h)}/h, "
        f"{workers_text(values.workers)}{status_text}"
    )


def not_for_production(plan: Plan) -> str:
    """The warning before a fleet on paper, if production was requested and no fleet for it was found."""
    is_on_paper = any(
        isinstance(text, TooFewKept | IdleMisses | NoneTogether)
        or (isinstance(text, NotCertified) and text.is_on_paper)
        for text in plan.warnings
    )
    return "NOT for production, on paper alone: " if is_on_paper else ""


def buy_text(fleet: Fleet, bill: Bill, whose: str = "") -> str:
    """What to buy and what it costs: 'Buy 3 nodes of 8 × h100-80g for chat: 71.76 USD/h (52,385 USD per
    month)', where `whose` is " for chat". With owned GPUs: 'Use 8 × a100-80g that you own and buy ...'.
    """
    owned, bought = _owned_and_bought(fleet, bill)
    parts = [f"use {list_text(owned)} that you own"] if owned else []
    parts += [f"buy {list_text(bought)}"] if bought else []
    text = " and ".join(parts)
    cost = f"{usd_text(bill.usd_per_h)}/h ({month_text(bill.usd_per_h)} per month)"
    return f"{text[:1].upper()}{text[1:]}{whose}: {cost}"


# What follows "kept in 47 of 49 scenarios", by what the test on them decided (`facts.KeptIn.decision`).
_NOT_PASSED = {"holds": "", "fails": ", too few", "open": ", undecided"}


def _certainty_text(plan: Plan) -> str:
    """In one sentence: to how much more the fleet holds, and in how many scenarios it keeps the SLO."""
    headroom, kept_in = headroom_of(plan), plan.kept_in
    parts = [] if headroom is None else [f"as written it holds to {headroom_text(headroom, plan)}"]
    if kept_in is not None and kept_in.scenario_count:
        scenarios = f"{kept_in.scenario_count} scenarios{grown_text(plan)}"
        parts.append(f"kept in {kept_in.kept} of {scenarios}{_NOT_PASSED[kept_in.decision]}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def growth_frac_of(plan: Plan) -> float:
    """The share by which the traffic of scenarios exceeds the traffic as written: `safety: growth`."""
    drawn = plan.certificate.scenarios_drawn
    return 0.0 if drawn is None else drawn.growth_frac


def grown_text(plan: Plan) -> str:
    """The words after "scenarios": " with 300 % more traffic"; empty if no growth was asked for."""
    growth_frac = growth_frac_of(plan)
    return f" with {show_share(growth_frac)} more traffic" if growth_frac else ""


def headroom_of(plan: Plan) -> Headroom | None:
    """How much more traffic and step time the plan's fleet stands, from its answer for production or else
    from the simulations of `certificate.robustness`. None if neither has both figures.
    """
    if plan.production is not None and plan.production.headroom is not None:
        return plan.production.headroom
    if plan.certificate.robustness is None:
        return None
    frac_of = {each.strain: each.frac for each in plan.certificate.robustness.holds}
    if not {"steps", "traffic"} <= frac_of.keys():
        return None
    return Headroom(steps_frac=frac_of["steps"], traffic_frac=frac_of["traffic"])


def headroom_text(headroom: Headroom, plan: Plan | None = None) -> str:
    """How much more a fleet stands: '+12 % traffic of this kind and +9 % step time'; with `plan` also how
    its requests became more traffic, "(compress)", as other figures on more traffic name it.
    """
    traffic, steps = more_text(headroom.traffic_frac), more_text(headroom.steps_frac)
    scale = "" if plan is None else f" ({headroom_scale(plan.trace)})"
    return f"{traffic} traffic of this kind{scale} and {steps} step time"


def holds_text(headroom: Headroom, *, after_loss: bool = False) -> str:
    """To how much more a fleet holds, with all of its workers or after the loss of any one."""
    return f"as written, holds{' after a loss' if after_loss else ''} to {headroom_text(headroom)}"


def bought_text(fleet: Fleet, bill: Bill) -> str:
    """What is bought: '3 nodes of 8 × h100-80g' if GPUs are sold by the node, else '24 × h100-80g'. Owned
    GPUs come last: '8 × h100-80g that you own'.
    """
    owned, bought = _owned_and_bought(fleet, bill)
    return list_text([*bought, *(f"{gpus} that you own" for gpus in owned)])


def _owned_and_bought(fleet: Fleet, bill: Bill) -> tuple[list[str], list[str]]:
    """The texts for owned GPUs ('8 × a100-80g') and for what is bought ('3 nodes of 8 × h100-80g')."""
    owned_gpus, single_gpus = Counter[str](), Counter[str]()
    for pool in fleet.running_pools:
        gpu, gpus = pool.type.gpu, pool.count * pool.type.gpus
        if payment_suffix(gpu.name) == OWNED:
            owned_gpus[gpu.name.removesuffix(OWNED)] += gpus
        elif node_of(gpu) is None:
            single_gpus[gpu.name] += gpus
    owned, single = (
        [f"{count} × {name}" for name, count in gpus.items()] for gpus in (owned_gpus, single_gpus)
    )
    nodes = [f"{count_text(each.count, 'node')} of {each.gpus_per_node} × {each.gpu}" for each in bill.nodes]
    return owned, [*nodes, *single]


def month_text(usd_per_h: float) -> str:
    """The cost of a month, for instance "52,385 USD"."""
    return f"{usd_per_h * HOURS_PER_MONTH:,.0f} USD"


# -- the three answers -------------------------------------------------------------------------------------


def answer_cards(plan: Plan) -> list[Card]:
    """A card for each of the three answers; one card for a plan on paper alone, which has no answers."""
    if not plan.certificate.answers:
        headroom = headroom_of(plan)
        card = paper_card(plan.fleet, plan.bill)
        holds = "" if headroom is None else holds_text(headroom)
        return [replace(card, difference="the plan", holds=holds, has_plans_fleet=True)]
    return [_card(plan, each) for each in plan.certificate.answers]


def losses_text(plan: Plan) -> str:
    """Why there is no answer "with a loss": production itself stands losses of spot workers. Empty if there
    is such an answer, or if no spot workers may be bought.
    """
    spot = [each for each in plan.certificate.binding if isinstance(each, SpotSpare)]
    answers = {answer.name for answer in plan.certificate.answers}
    if not answers or "with-a-loss" in answers:
        return ""
    if not spot:
        is_spot_offered = any(payment_suffix(price.gpu) == SPOT for price in plan.prices)
        return NO_SPOT_BOUGHT if is_spot_offered else ""
    return "production stands losses of spot workers already: " + "; ".join(map(fact_sentence, spot))


def paper_card(fleet: Fleet, bill: Bill, scenarios: str = "no scenarios were requested") -> Card:
    """The card of a fleet that keeps the SLO as written; `scenarios` says why none were simulated."""
    return Card(
        name=NAMES["on-paper"],
        price=f"{usd_text(bill.usd_per_h)}/h",
        month=f"{month_text(bill.usd_per_h)} per month",
        fleet=describe_fleet(fleet),
        kept=f"kept on the traffic as it is written; {scenarios}",
        is_plan=True,
    )


def most_kept_of(plans: Iterable[Plan]) -> MostKept | None:
    """The fleets that keep the SLO in the most scenarios, if none do in enough; None if nothing is known."""
    whys = [why for plan in plans for why in plan.warnings if isinstance(why, TooFewKept | NoneTogether)]
    return next((why.most_kept for why in whys if why.most_kept is not None), None)


def most_kept_text(most: MostKept) -> str:
    """What follows "no fleet within the limits was found": the nearest one, and how to plan it."""
    text = (
        f" that is kept in {show_share(most.asked_frac)} of scenarios; the most found to be kept is "
        f"{show_share(most.kept_frac)}, for {in_unit(most.value, most.unit)}"
    )
    if most.kept_frac < LEAST_KEPT_FRAC:
        return text
    # The share is of the search's scenarios, so the fleet may still fail its test in others.
    return f"{text}: {strictest_safety(most.kept_frac)} may plan it"


def _enough_text(plan: Plan) -> str:
    """How much of `limits`, or of the stock, is enough for production; empty if that is not known."""
    enough = [each.enough for each in plan.warnings if isinstance(each, TooFewKept) and each.enough]
    return f"; {ways_text(enough)} is enough" if enough else ""


def _card(plan: Plan, answer: Answered) -> Card:
    """The card of one of the three answers."""
    is_plan, name = answer.name == "production", NAMES[answer.name]
    if answer.value is None:
        why = "no fleet within the limits was found"
        if is_plan and (most := most_kept_of([plan])):
            why += most_kept_text(most) + _enough_text(plan)
        return Card(name, "none", why, is_plan)
    # Without a bill of whole nodes the price is that of the GPUs in use.
    answer_usd_per_h = answer.usd_per_h if answer.paid_usd_per_h is None else answer.paid_usd_per_h
    is_after_loss = answer.kept_in is not None and answer.kept_in.after_loss
    # A limit that is missed both with more traffic and with longer steps is named once.
    limits = dict.fromkeys((*answer.breaks_by_traffic, *answer.breaks_by_steps))
    has_plans_fleet = answer.workers == _planned_workers(plan)
    price = "" if answer_usd_per_h is None else f"{usd_text(answer_usd_per_h)}/h"
    if plan.certificate.objective == "power":
        price += f", {in_unit(answer.value, plan.certificate.unit)}"
    fleet = workers_text(answer.workers)
    # Two answers may have the same GPUs and differ in tokens per step, so that they hold to different loads.
    if not has_plans_fleet and fleet == workers_text(_planned_workers(plan)):
        budgets = list_text([f"{each.max_num_batched_tokens:,}" for each in answer.workers])
        planned = list_text([f"{each.max_num_batched_tokens:,}" for each in _planned_workers(plan)])
        fleet += f" with {budgets} tokens per step, of the plan {planned}"
    difference = against_text(answer_usd_per_h, plan.bill.usd_per_h)
    if has_plans_fleet and difference == SAME_COST:
        difference += ": it is the plan"
    elif answer.name == "with-a-loss" and difference == SAME_COST:
        difference += "; spare: 1 worker plans for it"
    return Card(
        name=name,
        price=price,
        difference="the plan" if is_plan else difference,
        month="" if answer_usd_per_h is None else f"{month_text(answer_usd_per_h)} per month",
        fleet=fleet,
        kept="" if answer.kept_in is None else _kept_text(plan, answer.name, answer.kept_in),
        holds="" if answer.headroom is None else holds_text(answer.headroom, after_loss=is_after_loss),
        breaks=f"beyond, {_any_of(tuple(limits))} is missed first" if limits else "",
        is_plan=is_plan,
        has_plans_fleet=has_plans_fleet,
    )


def _kept_text(plan: Plan, name: str, kept_in: KeptIn) -> str:
    """In how many scenarios the answer `name` keeps the SLO. For the fleet on paper these are the scenarios
    of the search; the other answers are tested on scenarios that the search had not seen.
    """
    search = plan.certificate.scenarios_drawn
    if not kept_in.scenario_count:
        return "no time was left to test it on scenarios"
    scenarios = f"{kept_in.scenario_count} scenarios"
    # With `downscale` above 1 the search drew scenarios of a scale model of the traffic (one request in
    # `downscale`). No answer is counted in those, so none of the texts calls its scenarios the search's.
    if search is not None and search.downscale == 1:
        is_of_search = name == "on-paper"
        scenarios = (
            f"the search's {scenarios}" if is_of_search else f"{kept_in.scenario_count} other scenarios"
        )
    after = " after losing any one worker" if kept_in.after_loss else ""
    not_passed = "" if name == "on-paper" else _NOT_PASSED[kept_in.decision]
    return f"kept in {kept_in.kept} of {scenarios}{grown_text(plan)}{after}{not_passed}"


def against_text(usd_per_h: float | None, planned_usd_per_h: float) -> str:
    """How much more or less than the plan a fleet costs; empty if its price is not known."""
    if usd_per_h is None:
        return ""
    more = usd_per_h - planned_usd_per_h
    if abs(more) < SAME_USD:
        return SAME_COST
    percent = f"{100 * more / planned_usd_per_h:+.0f}" if planned_usd_per_h else ""
    share = f" ({percent} %)" if percent.strip("+-0") else ""  # "+0 %" would say that there is no difference.
    return f"{usd_text(abs(more))}/h {'more' if more > 0 else 'less'}{share}"


def limit_label(limit: Limit) -> str:
    """A limit in a reader's words: "TTFT p90", of a class "TTFT p90 of chat"."""
    of_class = "" if limit.selector is None else f" of {limit.selector.name}"
    return f"{limit.metric_row.abbreviation} {percentile_name(limit.percentile_frac)}{of_class}"


def _any_of(limits: Sequence[Limit]) -> str:
    """The limits in a reader's words: "TTFT p90 or TPOT p95"."""
    return " or ".join(map(limit_label, limits))


def _missed_text(plan: Plan, limits: Sequence[Limit]) -> str:
    """What is missed: these limits or, if there are none, what else of an SLO a fleet may miss: attainment, a
    guarantee, the backlog test.
    """
    if limits:
        return f"{_any_of(limits)} is missed"
    others = []
    if plan.slo.attainment_frac is not None:
        others.append(f"attainment {show_share(plan.slo.attainment_frac)}")
    if plan.slo.guarantees:
        others.append("a tenant's guarantee")
    return f"{' or '.join(others)} is missed" if others else "the backlog grows or a request fits no worker"


def _lost_text(plan: Plan, lost: WorkerLoss) -> str:
    """What is missed after the loss of a worker without which the plan misses the SLO."""
    if lost.workers == 1 and not lost.missed:
        return "no such worker is left"
    return _missed_text(plan, lost.missed)


def _lost_worker_text(plan: Plan, lost: WorkerLoss) -> str:
    """Which worker is lost: "1 decode worker of 2"; if its role has several pools, with its GPU or pool."""
    pool_name, _, number = lost.pool.partition("-")  # The second prefill pool is "pre-2".
    role = next((role for role, name in POOL_NAMES.items() if name == pool_name), pool_name)
    labels = {pool.name: label for pool, label in _labelled_pools(plan.fleet)}
    label = labels.get(lost.pool, lost.pool)
    where = f" in {label}" if label == lost.pool else f" on {label}"
    return f"1 {role} worker of {lost.workers}" + (where if number else "")


# -- key figures --------------------------------------------------------------------------------------------


def key_figures(plan: Plan, questions: NextQuestions = BY_COMMAND) -> list[KeyFigure]:
    """What a buyer asks for first: cost per month, what breaks first, more traffic, measured inputs."""
    paid, tokens = plan.bill.usd_per_h, plan.usd_per_million_tokens
    per_million = f"{show_digits(tokens, 3)} USD per million tokens, prompts and answers"
    if (agents := plan.agent_figures) is not None:
        of_fleet = "" if agents.agents is None else f"{count_text(agents.agents, 'agent')} on the fleet, "
        # A trace that names no tasks has sessions; those of agents are tasks.
        work = "task" if plan.trace.task.size or agents.agents is not None else "session"
        per_million += f"; {of_fleet}{show_digits(agents.usd_per_task, 3)} USD per {work}"
    if idle := idle_gpus_text(plan.bill):
        per_million += f"; {idle}"
    per_million += f"; {show_w(plan.fleet.power_w)} provisioned"
    if plan.power is not None and plan.power.requests:
        joules = f"{plan.power.thousand_tokens_j:,.0f} J per 1,000 output tokens"
        per_million += f", {show_w(plan.power.mean_w)} expected: {joules}"
    return [
        *_gpu_count_figures(plan),
        KeyFigure("Cost per month", month_text(paid), per_million),
        *_one_gpu_type_figures(plan),
        *_separate_figures(plan),
        *_contexts_figures(plan),
        *_prefix_cache_figures(plan),
        *_drafts_figures(plan),
        *_commitment_figures(plan),
        breaks_first(plan),
        _more_traffic_figure(plan, questions),
        measured_inputs_figure([input_bases(plan)]),
        *_router_figures(plan),
        KeyFigure("Status", plan.status, STATUS_WORDS[plan.status]),
    ]


def _one_gpu_type_figures(plan: Plan) -> list[KeyFigure]:
    """The cost of the best fleet of each GPU type alone; empty if such fleets were not planned."""
    unit = plan.certificate.unit
    alone = [each for each in plan.alternatives if each.is_of_one_gpu_type]
    if not alone:
        return []
    first, *others = [
        f"{each.label} {unpriced_text(each, unit)}"
        if not each.is_priced
        else f"{each.label} {in_unit(each.objective, unit)}: {alternative_note(each, plan)}"
        for each in sorted(alone, key=lambda each: not each.is_priced)
    ]
    value, _, note = first.partition(": ")
    return [KeyFigure("One GPU type", value, "; ".join(filter(None, [note, *others])))]


def _separate_figures(plan: Plan) -> list[KeyFigure]:
    """A fleet for each class, where that costs less than one for all or is the only one for production."""
    figures = []
    for fact in plan.certificate.binding:
        if isinstance(fact, SeparateKept):
            against = "each kept in enough scenarios, which no fleet within the limits for all is"
        elif isinstance(fact, SharingSaves) and fact.saves < -SAME_USD:
            against = f"{in_unit(-fact.saves, fact.unit)} less than one fleet for all"
        else:
            continue
        total = in_unit(sum(each.value for each in fact.alone), fact.unit)
        by_class = ", ".join(f"{each.name} {show_amount(each.value, fact.unit)}" for each in fact.alone)
        figures.append(KeyFigure("Separate fleets", total, f"{by_class}; {against}"))
    return figures


def _contexts_figures(plan: Plan) -> list[KeyFigure]:
    """How many agents' contexts the KV caches hold at once; empty for traffic without agents."""
    if plan.agent_figures is None:
        return []
    # Counted by rank, because a context cannot be split between the KV caches of two ranks.
    caches = [
        (pool.count * pool.type.dp, pool.type.kv_tokens)
        for pool in plan.fleet.running_pools
        if pool.role != "prefill"
    ]
    kv_tokens = sum(count * tokens for count, tokens in caches)
    contexts = plan.trace.input_tokens + plan.trace.output_tokens
    capacities = [
        f"{sum(count * int(cache // tokens) for count, cache in caches):,} of {tokens:,.0f} tokens, {which}"
        for tokens, which in ((contexts.mean(), "the mean of requests"), (contexts.max(), "the longest"))
    ]
    return [
        KeyFigure("KV caches", f"room for {kv_tokens:,} tokens", f"contexts at once: {'; '.join(capacities)}")
    ]


def _prefix_cache_figures(plan: Plan) -> list[KeyFigure]:
    """The share of prompt tokens that were found in prefix caches in the simulation; empty without caches."""
    if (hit_frac := plan.simulation.token_hit_frac) is None:
        return []
    note = "the engines must have them on; policies: {prefix_cache: false} plans without"
    hits = f"{show_share(hit_frac)} of prompt tokens hit"
    if (reload_frac := plan.simulation.token_reload_frac) is not None:
        hits += f", {show_share(reload_frac)} come back from KV offload"
    return [KeyFigure("Prefix caches", hits, note)]


def _drafts_figures(plan: Plan) -> list[KeyFigure]:
    """How many tokens are drafted per step, and how many a step is assumed to yield; empty without drafts."""
    drafts = [fact for fact in plan.certificate.assumptions if isinstance(fact, Drafts)]
    if not drafts:
        return []
    texts = [f"{count_text(each.tokens, 'token')} per step by {each.method}" for each in drafts]
    names = ["a step"] if len(drafts) == 1 else [each.worker for each in drafts]
    pairs = zip(names, drafts, strict=True)
    yields = list_text([f"{name} is taken to yield {each.mean_tokens:.3g}" for name, each in pairs])
    note = f"{yields}, if your traffic accepts as many as was assumed"
    return [KeyFigure("Drafts", list_text([*dict.fromkeys(texts)]), note)]


def _gpus_by_type(workers: Iterable[Workers]) -> Counter[str]:
    """How many GPUs of each type the workers have; GPUs with a power cap count with their uncapped type."""
    counts = Counter[str]()
    for pool in workers:
        counts[pool.gpu.partition("@")[0]] += pool.gpus
    return counts


def _gpu_count_figures(plan: Plan) -> list[KeyFigure]:
    """How many GPUs the traffic as written takes, and how many more the scenarios take; empty if none.

    The note says what certainty about step times and traffic would save: at most the price of those GPUs,
    because no fleet for production costs less than the one on paper.
    """
    paper, planned = plan.certificate.find_answer("on-paper"), plan.production
    if paper is None or planned is None or not paper.workers:
        return []
    by_type = [_gpus_by_type(each.workers) for each in (paper, planned)]
    paper_gpus, planned_gpus = (sum(counts.values()) for counts in by_type)
    more_gpus = planned_gpus - paper_gpus
    if more_gpus <= 0:
        return []
    growth = growth_frac_of(plan)
    reserve = f"{show_share(growth)} more traffic, other traffic" if growth else "other traffic"
    reserve += " of this kind and step times that may be longer"
    if by_type[0].keys() == by_type[1].keys():
        value = f"{paper_gpus} + {count_text(more_gpus, 'GPU')}"
        parts = f"{paper_gpus} for the traffic as written, {more_gpus} more for {reserve}"
    else:  # The types differ, so the difference of the two numbers would mean nothing.
        paper_text, value = (
            list_text([f"{count} × {gpu}" for gpu, count in counts.items()]) for counts in by_type
        )
        parts = f"{paper_text} for the traffic as written; these instead for {reserve}"
    paper_usd_per_h, planned_usd_per_h = paper.paid_usd_per_h, planned.paid_usd_per_h
    if paper_usd_per_h is None or planned_usd_per_h is None:
        more_usd_per_h = 0.0
    else:
        more_usd_per_h = planned_usd_per_h - paper_usd_per_h
    if more_usd_per_h < SAME_USD:
        return [KeyFigure("Why this many", value, f"{parts}; on the bill both are the same")]
    # With growth a part of the difference pays for more traffic, so certainty would not save all of it.
    if growth:
        return [KeyFigure("Why this many", value, f"{parts}: {usd_text(more_usd_per_h)}/h")]
    is_own = all(
        pool.type.latency.spread is None or pool.type.latency.spread.is_own
        for pool in plan.fleet.running_pools
    )
    remedy = "" if is_own else " (`plan profile` on your GPUs measures the steps)"
    return [
        KeyFigure(
            "Why this many", value, f"{parts}; certainty saves up to {usd_text(more_usd_per_h)}/h{remedy}"
        )
    ]


def _router_figures(plan: Plan) -> list[KeyFigure]:
    """On how many targets the SLO is kept, and the targets grouped by their routers; empty if routers have
    nothing to choose.
    """
    rows = plan.certificate.routers
    if not rows or not plan.fleet.leaves_choice:
        return []
    targets_by_text: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: not row.keeps):  # Targets that keep the SLO come first.
        text = router_text(row) if row.keeps else f"NOT kept, {router_text(row)}: {decided_text(row)}"
        targets_by_text.setdefault(text, []).append(row.target)
    kept_count = sum(row.keeps for row in rows)
    note = "; ".join(f"{', '.join(targets)} ({text})" for text, targets in targets_by_text.items())
    if unable := _unable_targets(plan):
        note += f"; {', '.join(unable)} (cannot run this fleet, manifests/README.md says why)"
    if any(row.needs_priority for row in rows):
        note = f"if every request brings its priority: {note}"
    return [KeyFigure("Routers", f"kept on {kept_count} of {count_text(len(rows), 'target')}", note)]


def _commitment_figures(plan: Plan) -> list[KeyFigure]:
    """The fleet's price under each commitment, and the share of use above which it is cheaper."""
    offered = [each for each in plan.certificate.commitments if each.term != "on-demand"]
    if not offered:
        return []
    value = list_text([f"{usd_text(each.usd_per_h)}/h for {TERMS[each.term]}" for each in offered])
    conditions = [
        f"{TERMS[each.term]} if needed more than {show_share(each.needed_frac)} of the time"
        for each in offered
        if each.needed_frac is not None and each.needed_frac < 1
    ]
    note = (
        f"cheaper than on demand: {', '.join(conditions)}" if conditions else "never cheaper than on demand"
    )
    return [KeyFigure("Committed", value, note)]


STATUS_WORDS = {
    "certified": "tested on scenarios that the search had not seen, step times with a measured spread",
    "not certified": "the test on unseen scenarios or the step times do not say enough; see the warnings",
    "on paper": "kept on the traffic as it is written; nothing is known of other traffic",
    "not for production": "no fleet was found for production; this is the cheapest on paper",
    "best found": "the search is NOT exhausted, the most work or time came first: a cheaper fleet may exist",
}


def holds_of(plan: Plan) -> list[HeadroomFact]:
    """The plan's headroom for each strain for which it is known. A headroom that comes from the plan's answer
    does not say which limits are missed beyond it.
    """
    headroom, robustness = headroom_of(plan), plan.certificate.robustness
    if robustness is not None and robustness.holds:
        return list(robustness.holds)
    if headroom is None:
        return []
    return [
        HeadroomFact("traffic", headroom.traffic_frac, ()),
        HeadroomFact("steps", headroom.steps_frac, ()),
    ]


def breaks_first(plan: Plan) -> KeyFigure:
    """The loss of a worker with which the plan misses the SLO, if there is one; else the strain (more
    traffic, longer steps or prompts) of which it stands the smallest increase.
    """
    robustness, headroom = plan.certificate.robustness, holds_of(plan)
    if not headroom:
        if not_for_production(plan):
            return KeyFigure("Breaks first", "not simulated", "this plan is not for production")
        return KeyFigure("Breaks first", "not simulated", "plan again to know, with a longer --time-limit")
    first = min(headroom, key=lambda each: each.frac)
    stands_all = first.frac >= HEADROOM_MOST_FRAC
    limit = _missed_text(plan, first.missed)
    strained = f"{more_text(first.frac)} {STRAINS[first.strain]}"
    twice = f"{list_text([f'twice the {STRAINS[each.strain]}' for each in headroom])}, the most simulated"
    losses = () if robustness is None else robustness.losses
    missed_loss = next((each for each in losses if not each.holds), None)
    if missed_loss is not None:
        missed = _lost_text(plan, missed_loss)
        value = f"{_lost_worker_text(plan, missed_loss)} lost"
        whole = f"it holds to {twice}" if stands_all else f"at {strained}: {limit}"
        return KeyFigure("Breaks first", value, f"as written, then {missed}; with all workers {whole}")
    spare = "; any one worker may be lost on the traffic as written" if losses else ""
    if stands_all:
        return KeyFigure("Breaks first", "nothing simulated", f"as written it holds to {twice}{spare}")
    return KeyFigure("Breaks first", strained, f"as written, beyond that {limit}{spare}")


def _more_traffic_figure(plan: Plan, questions: NextQuestions) -> KeyFigure:
    """Whether this fleet carries MORE_FRAC more traffic, tested as a plan for that traffic would be. If it
    does not, the note is how to ask for the price of a fleet that does.
    """
    robustness, name = plan.certificate.robustness, more_traffic_name(growth_frac_of(plan))
    if plan.throughput is not None:
        rate = f"{plan.throughput.rate_rps:g} requests/s"
        kept_text = "is kept in enough scenarios" if plan.certificate.answers else "holds"
        return KeyFigure(name, "none found", f"{rate} is the most found that {kept_text} within the limits")
    more = None if robustness is None else robustness.more_traffic
    if more is None:
        return KeyFigure(name, "not simulated, as it takes long", _priced_by(plan, questions))
    kept_text = (
        f"kept in {more.kept} of {more.scenario_count} scenarios with so much more"
        if more.scenario_count
        else ""
    )
    if more.is_carried:
        # Without scenarios the cost is not mentioned: the bursts of denser traffic come at other times, so
        # even a smaller fleet may carry it.
        if not kept_text:
            return KeyFigure(name, "carried", "by this fleet, on the traffic as it is written")
        return KeyFigure(name, NOTHING_EXTRA[plan.certificate.objective], f"this fleet is {kept_text}")
    # "Another plan", not "more GPUs": with other engine settings the same GPUs may be enough.
    kept_frac = more.kept / more.scenario_count if more.scenario_count else 0.0
    refused = _refusal_text(kept_frac, more.asked_frac)
    why = f"this one is {kept_text}, {refused}" if kept_text else "as written this one misses the SLO with it"
    return KeyFigure(name, "takes another plan", f"{why}; {_priced_by(plan, questions)}")


def _refusal_text(kept_frac: float, asked_frac: float | None) -> str:
    """Why a fleet that keeps the SLO in the share `kept_frac` of scenarios did not pass their test."""
    if asked_frac is None or kept_frac < asked_frac:
        return "too few"
    return f"too near {show_share(asked_frac)} to pass their test"


def more_traffic_name(growth_frac: float) -> str:
    """The name of the row on more traffic, for instance "380 % more traffic" with 300 % growth. The
    percentage is relative to the traffic as written, so it includes the growth of the scenarios.
    """
    return f"{show_share(more_than_written_frac(growth_frac))} more traffic"


def more_than_written_frac(growth_frac: float) -> float:
    """By how much MORE_FRAC more than the traffic of scenarios exceeds the traffic as written."""
    return (1 + growth_frac) * (1 + MORE_FRAC) - 1


def _priced_by(plan: Plan, questions: NextQuestions) -> str:
    """The command or page that says what a fleet for MORE_FRAC more traffic costs."""
    if plan.certificate.scenarios_drawn is None:
        return "a plan at that traffic: rate says what it costs"
    growth_frac = more_than_written_frac(growth_frac_of(plan))
    return questions.what_if.format(change=f"safety.growth={100 * growth_frac:.6g} %")


def input_bases(plan: Plan) -> dict[str, Basis]:
    """The basis of each input: measured, given, listed, estimated or unchecked."""
    values: dict[str, Basis] = {"traffic": "given" if plan.trace.drawn_from is not None else "measured"}
    kinds: dict[Basis, list[str]] = {}
    for pool, label in _labelled_pools(plan.fleet):
        kinds.setdefault(_basis_of_steps(pool), []).append(label)
    for steps, names in kinds.items():
        values["step times" + (f" of {list_text(names)}" if len(kinds) > 1 else "")] = steps
    values["KV memory"] = "estimated"  # By planner/models/memory.py, in every plan.
    bought = {pool.type.gpu.name for pool in plan.fleet.running_pools}
    is_listed = any(price.date for price in plan.prices if price.gpu in bought)
    values["prices"] = "listed" if is_listed else "given"
    if plan.fleet.is_disaggregated:
        is_default = Assumption("default-link") in plan.certificate.assumptions
        values["the KV link"] = "estimated" if is_default else "given"
    if plan.power is not None:
        values["power"] = "estimated"
    return values


def _basis_of_steps(pool: Pool) -> Basis:
    """The basis of a pool's step times; a roofline is unchecked, as none of its kernels was measured."""
    of_kind: dict[str, Basis] = {"steps": "measured", "roofline": "unchecked"}
    return of_kind.get(pool.type.latency.kind, "estimated")


def _labelled_pools(fleet: Fleet) -> list[tuple[Pool, str]]:
    """The running pools and their labels: the names of their GPUs if all differ, else the pools' names."""
    gpus = Counter(pool.type.gpu.name for pool in fleet.running_pools)
    is_by_gpu = all(count == 1 for count in gpus.values())
    return [(pool, pool.type.gpu.name if is_by_gpu else pool.name) for pool in fleet.running_pools]


def basis_text(fleet: Fleet) -> str:
    """Whether step times were measured, in a short sentence for each basis."""
    basis_by_pool = {label: _basis_of_steps(pool) for pool, label in _labelled_pools(fleet)}
    parts = []
    for basis, text in BASIS_WORDS.items():
        names = [name for name, basis_of_pool in basis_by_pool.items() if basis_of_pool == basis]
        is_of_all = len(names) == len(basis_by_pool)
        # "Measured" is said only if all pools are; else a reader must know which pools were not.
        if names and (basis != "measured" or is_of_all):
            pools = "" if is_of_all else f" of {list_text(names)}"
            parts.append(f"Step times{pools} {text}.")
    return " ".join(parts)


BASIS_WORDS: dict[Basis, str] = {
    "measured": "measured",
    "estimated": "estimated, not measured here",
    "unchecked": "unchecked: a roofline, no kernel of this LLM was measured on such workers",
}


def measured_inputs_figure(bases: Sequence[Mapping[str, str]]) -> KeyFigure:
    """How many of the inputs of all plans were measured, and which inputs have which basis."""
    inputs = [item for basis_by_input in bases for item in basis_by_input.items()]
    measured = sum(kind == "measured" for _, kind in inputs)
    inputs_by_basis: dict[str, dict[str, None]] = {}
    for name, kind in inputs:
        inputs_by_basis.setdefault(kind, {})[name] = None
    note = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in inputs_by_basis.items())
    return KeyFigure("Measured", f"{measured} of {len(inputs)} inputs", note)


def why_title(plan: Plan) -> str:
    """The question that `why_nothing_cheaper` answers: by what was minimised, or, for a plan that maximises
    throughput, why not more.
    """
    if plan.throughput is not None:
        return "Why not more"
    if _is_plan_free(plan):
        return "Why not smaller"
    return {"gpus": "Why not fewer", "power": "Why not less"}.get(
        plan.certificate.objective, "Why not cheaper"
    )


def _is_plan_free(plan: Plan) -> bool:
    """Whether cost was minimised, and the plan costs nothing, as on owned GPUs."""
    return plan.certificate.objective == "cost" and plan.bill.usd_per_h < SAME_USD


def why_nothing_cheaper(plan: Plan) -> list[str]:
    """Why nothing cheaper is planned, in a few sentences."""
    certificate, robustness = plan.certificate, plan.certificate.robustness
    texts = []
    fewer = None if robustness is None else _largest_smaller_fleet(plan, robustness)
    tested = None if certificate.scenarios_drawn is None else certificate.scenarios_drawn.fewer
    if tested is not None:
        workers = f"{count_text(sum(tested.counts), 'worker')}{_counts_text(plan, tested.counts)}"
        kept_text = f"{tested.kept_in.kept} of {tested.kept_in.scenario_count} scenarios{grown_text(plan)}"
        refused = _refusal_text(tested.kept_in.kept_frac, tested.asked_frac)
        texts.append(f"with {workers} the SLO is kept in {kept_text}, {refused}")
    elif robustness is not None and fewer is not None:
        how_often = "not kept"
        if robustness.scenario_count:
            scenarios = f"the test's first {robustness.scenario_count} scenarios{grown_text(plan)}"
            how_often = f"kept in {fewer.kept} of {scenarios}"
        workers = f"{count_text(fewer.workers, 'worker')}{_counts_text(plan, fewer.counts)}"
        first, last = fewer.workers + 1, plan.fleet.workers - 1
        skipped = f" ({first} was not simulated)" if first == last else ""
        if first < last:
            skipped = f" ({first} to {last} were not simulated)"
        texts.append(f"with {workers} the SLO is {how_often}{skipped}")
    paper = certificate.find_answer("on-paper")
    if (
        paper is not None
        and paper.kept_in
        and paper.kept_in.scenario_count
        and paper.workers != _planned_workers(plan)
    ):
        price = "" if paper.value is None else f", {in_unit(paper.value, certificate.unit)}"
        kept_text = _kept_text(plan, "on-paper", paper.kept_in)
        least = "smallest" if is_free(certificate) else "cheapest"
        texts += [f"the {least} fleet on paper{price}, is {kept_text}", *_unmeasured_step_texts(plan)]
    if certificate.scenarios_drawn is not None and certificate.scenarios_drawn.cheaper is not None:
        cheaper = certificate.scenarios_drawn.cheaper
        less = "are smaller" if _is_plan_free(plan) else LESS[certificate.objective]
        texts.append(misses_text(cheaper, less))
    texts += [
        fact_sentence(each) for each in certificate.binding if isinstance(each, SharingSaves | NotShared)
    ]
    at_rate = "" if plan.throughput is None else f" for {plan.throughput.rate_rps:g} requests/s"
    return [*texts, f"on paper, of fleets with one worker type per pool{at_rate} {level0_line(certificate)}"]


def _unmeasured_step_texts(plan: Plan) -> list[str]:
    """How much the scenarios vary the step times if nobody measured them on this fleet's GPUs: a text for
    each spread that its pools have.
    """
    texts = []
    for spread in dict.fromkeys(pool.type.latency.spread for pool in plan.fleet.running_pools):
        if spread is not None and not spread.is_own:
            ends = [f"{each.low:.2f} to {each.high:.2f}" for each in (spread.prefill, spread.decode)]
            texts.append(
                f"on engines that were measured prefills took {ends[0]} times as long as estimated and "
                f"decodes {ends[1]} times, and scenarios draw such times: "
                "`plan profile` on your GPUs narrows them"
            )
    return texts


def _planned_workers(plan: Plan) -> tuple[Any, ...]:
    """The workers of the answer for production, which is the one to deploy; empty if there is none."""
    return () if plan.production is None else plan.production.workers


def _largest_smaller_fleet(plan: Plan, robustness: FleetRobustness) -> AtWorkers | None:
    """The largest simulated fleet with fewer workers than the plan's. None if there is no such fleet, or if
    it keeps the SLO in enough scenarios.
    """
    smaller = [row for row in robustness.at_workers if row.workers < plan.fleet.workers]
    largest = max(smaller, key=lambda row: row.workers, default=None)
    # Without scenarios `kept` is 0 or 1, of one simulation, on the traffic as it is written.
    required = max(robustness.scenario_count, 1) - robustness.may_miss
    return largest if largest is not None and largest.kept < required else None


def _counts_text(plan: Plan, worker_counts: tuple[int, ...]) -> str:
    """The workers of each running pool if there are several, and a note if the price is the plan's, as it may
    be if nodes are paid whole: " (3 prefill + 2 decode), for the same price,".
    """
    labelled, roles = _labelled_pools(plan.fleet), Counter(pool.role for pool in plan.fleet.running_pools)
    parts = [
        f"{count} {pool.role if roles[pool.role] == 1 else label}"
        for count, (pool, label) in zip(worker_counts, labelled, strict=True)
    ]
    of_pools = f" ({' + '.join(parts)})" if len(parts) > 1 else ""
    counts = iter(worker_counts)  # They skip pools without workers, and so does the line below.
    pools = tuple(replace(pool, count=next(counts)) if pool.count else pool for pool in plan.fleet.pools)
    fewer_usd_per_h = bill_fleet(replace(plan.fleet, pools=pools)).usd_per_h
    is_same = abs(fewer_usd_per_h - plan.bill.usd_per_h) < SAME_USD
    return of_pools + (", for the same price," if is_same else "")


@dataclass(frozen=True, slots=True)
class Breaks:
    """A strain, loss or price, the increase of it that the plan stands, and what happens beyond that."""

    label: str
    frac: float
    text: str
    kind: Literal["slo", "loss", "price"]


def find_breaks(plan: Plan) -> list[Breaks]:
    """What makes the plan miss its SLO or cost more than another, sorted by the increase that it takes."""
    robustness = plan.certificate.robustness
    if robustness is None:
        return sorted((_break_by_strain(plan, each) for each in holds_of(plan)), key=lambda each: each.frac)
    rows = [_break_by_strain(plan, each) for each in robustness.holds]
    rows += [_break_by_loss(plan, each) for each in _worst_loss(robustness.losses)]
    rows += [
        Breaks(f"price of {turn.gpu}", turn.more_frac, f"then “{turn.instead}” costs less", "price")
        for turn in robustness.prices
    ]
    return sorted(rows, key=lambda each: each.frac)


def _break_by_strain(plan: Plan, headroom: HeadroomFact) -> Breaks:
    """The row of a strain: to how much more of it the plan holds, and what is missed beyond that."""
    still_holds = headroom.frac >= HEADROOM_MOST_FRAC  # Larger increases are not simulated.
    text = "and still holds" if still_holds else f"then {_missed_text(plan, headroom.missed)}"
    label = STRAIN_CHANGES[headroom.strain]
    return Breaks(label, headroom.frac, f"{more_text(headroom.frac)}, {text}", "slo")


def _worst_loss(losses: Sequence[WorkerLoss]) -> list[WorkerLoss]:
    """The loss, as a list of at most one, with which the SLO is missed; else that of the smallest pool."""
    failing = [each for each in losses if not each.holds]
    return (failing or sorted(losses, key=lambda each: each.workers))[:1]


def _break_by_loss(plan: Plan, lost: WorkerLoss) -> Breaks:
    """The row of a lost worker. If the plan holds without it, the bar is as long as its share of its pool."""
    label = f"loss of {_lost_worker_text(plan, lost)}"
    if lost.holds:
        return Breaks(label, 1 / lost.workers, "still holds", "loss")
    # With 0 the row comes first and has no bar.
    return Breaks(label, 0.0, _lost_text(plan, lost), "loss")
