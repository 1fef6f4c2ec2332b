"""Several LLMs on one stock, planned together by the master problem of search/level0/cheapest.py.

    alone       Each LLM is planned as if it had the limits for itself. If these fleets are within the limits
                together, they are the answer.
    share       Otherwise one master problem proposes fleets for all LLMs, and the simulator judges each.
    plans       Each LLM is searched again within what the others leave of the limits.
    prices      For each limit: the least increase that makes the fleets cheaper, and by how much.
    production  Fleets that keep each SLO in enough scenarios (shared_production.py), if safety is required.
    bill        If GPUs of whole nodes idle: all stages again on fewer kinds of GPUs (shared_bill.py).

All stages but the last two are on paper (shared_paper.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

from planner.documents.catalog import Catalog
from planner.documents.facts import AnswerName, Assumption, Binding, OfLlm, OfTraffic, OthersLeave, Warned
from planner.documents.several_llms_question import LlmQuestion, SeveralLlmsQuestion
from planner.domain import row_of
from planner.fleet import Fleet, Pool
from planner.search.evidence import findings
from planner.search.evidence.certify import add_robustness, certify_plan
from planner.search.evidence.plan import Plan
from planner.search.mixed.best_fleet import best_of
from planner.search.mixed.bounds import checked_bound
from planner.search.oracle.fleet_counts import Counts, names_of
from planner.search.oracle.work_clock import USUAL_LIMIT_S, is_over, now_s, time_limit
from planner.search.problem.bill import bill_fleet
from planner.search.problem.build_problem import SearchInputs
from planner.search.problem.options import OBJECTIVE_UNITS
from planner.search.problem.owned_first import objective_paid, paid_at_least
from planner.search.problem.plan_problem import Progress, on_all_draws, report_nothing
from planner.search.production.three_answers import Production
from planner.search.several import shared_paper
from planner.search.several.joint_limits import limits_beside
from planner.search.several.shared_bill import plan_by_bill
from planner.search.several.shared_plan import AnswerTotal, LimitUse, SharedPlan
from planner.search.several.shared_production import LlmOnPaper, SharedProduction, production_or_paper_of_all
from planner.solvers.master import FleetLimits
from planner.solvers.placement import NodePlacement
from planner.solvers.whole_nodes import node_of, whole_stock


def plan_together(
    question: SeveralLlmsQuestion,
    catalog: Catalog,
    *,
    seed: int = 0,
    time_limit_s: float = USUAL_LIMIT_S,
    most_work_s: float = math.inf,
    progress: Progress = report_nothing,
    adds_robustness: bool = False,
) -> SharedPlan:
    """The cheapest fleets found that keep the SLO of every LLM within the limits that the LLMs share. With
    `adds_robustness` each plan also says what more traffic would do to its fleet (evidence/robustness.py), as
    a plan for one LLM does. `most_work_s` is a further limit on the search's clock.

    Raises InputError for what cannot be planned, and InfeasibleError if one LLM cannot be served even alone
    or all of them cannot be served together; the message names the limits and the least increase of each that
    would help. If work or time runs out (work_clock.py) the best fleets so far are returned with their bound.
    """
    with time_limit(time_limit_s) as limit_s:
        deadline = min(limit_s, now_s() + most_work_s)
        plan = partial(
            _plan_together,
            catalog=catalog,
            seed=seed,
            deadline=deadline,
            progress=progress,
            adds_robustness=adds_robustness,
        )
        return plan_by_bill(plan, _in_whole_nodes(question, catalog), lambda: is_over(deadline), progress)


def _in_whole_nodes(question: SeveralLlmsQuestion, catalog: Catalog) -> SeveralLlmsQuestion:
    """The question with each stock of GPUs that are sold as whole nodes rounded down to whole nodes, as the
    search for several LLMs counts GPUs in use. A stock of less than one node stays, and no fleet is within
    it. `sold_whole` is fixed here, because shared_bill.py plans again with less of the stock.
    """
    if len(question.entries) < 2:
        return question
    task = question.entries[0].task
    priced = task.priced_gpus(catalog)
    nodes = {gpu.name: node.gpus for gpu in priced if (node := node_of(gpu)) is not None}
    sold_whole = {**task.sold_whole, **{row_of(gpu.name): gpu.is_sold_whole for gpu in priced}}
    stock = dict(task.stock)
    for name, count in task.stock.items():
        if count is not None and name in nodes:
            owned = task.owned.get(name, 0)
            stock[name] = whole_stock(count, owned, nodes[name]) if count - owned >= nodes[name] else count
    return question.with_tasks(lambda task: replace(task, stock=stock, sold_whole=sold_whole))


def _plan_together(
    question: SeveralLlmsQuestion,
    *,
    catalog: Catalog,
    seed: int,
    deadline: float,
    progress: Progress,
    adds_robustness: bool,
    own_nodes: bool = False,
    fills_nodes: bool = False,
) -> SharedPlan:
    """All stages of the module's docstring but `bill`. LLMs pay for their GPUs in use; with `own_nodes` for
    whole nodes of their own. With `fills_nodes` a plan in which paid GPUs idle gets its `fewer_gpus`.
    """
    # `entries` has the question for each LLM. Limits and objective are the same in all of them.
    entries, task = question.entries, question.entries[0].task
    needs_production = any(entry.task.safety is not None for entry in entries)
    limits = FleetLimits(
        task.stock_and_owned,
        task.power_limit_w,
        task.cost_limit_usd_per_h,
        task.gpu_limit,
        # LLMs share nodes, so what one LLM pays is counted by its GPUs in use.
        by_gpu=len(entries) > 1 and not own_nodes,
    )
    alone, paper = shared_paper.plan_on_paper(
        entries, catalog, limits, seed=seed, deadline=deadline, progress=progress, keeps_half=needs_production
    )
    on_paper = [
        _paper_of_llm(entry, alone_searches, searches, limits, deadline)
        for entry, alone_searches, searches in zip(entries, alone, paper.searched, strict=True)
    ]
    shared = production_or_paper_of_all(on_paper, limits, deadline, progress) if needs_production else None
    searched, left_to_each = _searches_for_certificates(paper, shared, entries, limits, deadline)
    oracles = [problem.oracle for llm_searches in alone for problem, _ in llm_searches] + [*paper.oracles]
    plans = _certify_plans(entries, searched, left_to_each, shared, catalog, seed, deadline)
    if adds_robustness:
        plans = _add_robustness(plans, searched, shared, limits, deadline)
    progress("placing all workers on nodes")
    counts = [(pool.type, pool.count) for plan in plans for pool in plan.fleet.pools]
    whole = replace(limits, by_gpu=False)  # What is paid and taken from the stock are whole nodes.
    names = [entry.name for entry in entries]
    unit = OBJECTIVE_UNITS[task.objective]
    paper_values = list(map(shared_paper.best_value, paper.searched))
    alone_values = list(map(shared_paper.best_value, alone))
    # The bound of an LLM is the same under all choices of policies.
    bounds = [paid_at_least(problem, problem.bound or 0.0) for (problem, _), *_ in alone]
    if shared is not None:
        alone_values = _paid_values(on_paper, shared.alone)
    in_production = _production_facts(entries, on_paper, shared, alone_values, unit)
    plan = SharedPlan(
        plans=dict(zip(names, plans, strict=True)),
        paper=dict(zip(names, paper_values, strict=True)),
        alone=dict(zip(names, alone_values, strict=True)),
        answers=_answer_totals(on_paper, shared),
        objective=task.objective,
        unit=unit,
        level0=paper.level0.value if math.isfinite(paper.level0.value) else None,
        level0_bound=paper.level0.bound,
        bound=checked_bound(sum(bounds), sum(paper_values)),
        is_exhausted=paper.level0.is_exact,
        is_exact=paper.level0.is_exact and paper.is_walked,
        limits=tuple(LimitUse(limit, amount, whole.used(limit, counts)) for limit, amount in limits.rows()),
        binding=paper.binding,
        in_production=in_production,
        assumptions=(
            Assumption("no-shared-workers"),
            Assumption("level0-of-each"),
            Assumption("bounds-add-up"),
        ),
        warnings=(*map(OfTraffic, question.notes), *_llm_warnings(entries, plans)),
        rounds=paper.level0.rounds,
        # LLMs may share an oracle, whose simulations count once.
        simulations=sum({id(oracle): oracle.simulations for oracle in oracles}.values()),
        seed=seed,
        placement=_place_all(entries, plans),
    )
    searches = alone if shared is None else shared.scenario_searches()
    passes_test = shared.passes_test if shared is not None else lambda *_: True
    return _with_fewer_gpus(plan, searches, limits, deadline, progress, passes_test) if fills_nodes else plan


def _with_fewer_gpus(
    plan: SharedPlan,
    searches: Sequence[shared_paper.LlmSearches],
    limits: FleetLimits,
    deadline: float,
    progress: Progress,
    passes_test: Callable[[int, Counts], bool],
) -> SharedPlan:
    """The plan, with its `fewer_gpus` if paid GPUs idle in it. The search for them takes half of the
    remaining time, because planning again on these GPUs takes the other half.
    """
    if not searches or not plan.bill.idle_gpus:
        return plan
    bill, half_time = plan.bill.usd_per_h, shared_paper.share_deadline(deadline, 1)
    fewer_gpus = shared_paper.find_nodes_of_least_bill(
        searches, limits, bill, half_time, progress, passes_test
    )
    return replace(plan, fewer_gpus=fewer_gpus)


def _production_facts(
    entries: Sequence[LlmQuestion],
    on_paper: Sequence[LlmOnPaper],
    shared: SharedProduction | None,
    alone_values: Sequence[float],
    unit: str,
) -> tuple[Binding, ...]:
    """How the fleets of production were chosen, and what each LLM pays there for sharing."""
    if shared is None or shared.how_chosen is None:
        return ()
    together_values = _paid_values(on_paper, shared.fleets)
    gives_way = shared_paper.gives_way_facts(entries, alone_values, together_values, unit)
    return (shared.how_chosen, *gives_way)


def _paid_values(on_paper: Sequence[LlmOnPaper], fleets: Sequence[Counts]) -> list[float]:
    """The objective of each LLM's fleet, in its unit."""
    return [objective_paid(llm.problem, fleet) for llm, fleet in zip(on_paper, fleets, strict=True)]


def _paper_of_llm(
    entry: LlmQuestion,
    alone: shared_paper.LlmSearches,
    paper: shared_paper.LlmSearches,
    limits: FleetLimits,
    deadline: float,
) -> LlmOnPaper:
    """One LLM as the search for production needs it: its fleet on paper, and its best fleet alone under the
    policies of that fleet.
    """
    problem, best = best_of(paper)
    best_alone = next(
        (search for other, search in alone if other.oracle.policies == problem.oracle.policies), best
    )
    problem = on_all_draws(replace(problem, task=entry.task, limits=limits, deadline=deadline))
    return LlmOnPaper(entry.name, problem, best_alone, best)


def _searches_for_certificates(
    paper: shared_paper.SharedPaper,
    shared: SharedProduction | None,
    entries: Sequence[LlmQuestion],
    limits: FleetLimits,
    deadline: float,
) -> tuple[list[shared_paper.LlmSearches], list[OthersLeave | None]]:
    """For each LLM the search that its certificate describes, and what the other LLMs leave it of the limits.

    The certificate describes the search on paper, with one exception: an LLM that requires no safety is
    searched again if the other LLMs have other fleets in production, within what these fleets leave.
    """
    searched, left_to_each = list(paper.searched), list(paper.left_to_each)
    if shared is None or shared.how_chosen is None:
        return searched, left_to_each
    fleets = list(shared.fleets)
    for k, entry in enumerate(entries):
        # Where each LLM has its fleet alone in production (`is_each`), that may be its fleet on paper too.
        problem, search = best_of(searched[k])
        is_on_paper = names_of(search.best) == names_of(fleets[k])
        if entry.task.safety is None and not (shared.how_chosen.is_each and is_on_paper):
            remaining = limits_beside(limits, fleets, k)
            problem = replace(problem, task=entry.task, deadline=deadline)
            searched[k] = shared_paper.search_within(problem, remaining, fleets[k])
            fleets[k] = shared_paper.best_search(searched[k]).best
            left_to_each[k] = shared_paper.others_leave_fact(remaining)
    return searched, left_to_each


def _certify_plans(
    entries: Sequence[LlmQuestion],
    searched: Sequence[shared_paper.LlmSearches],
    left_to_each: Sequence[OthersLeave | None],
    shared: SharedProduction | None,
    catalog: Catalog,
    seed: int,
    deadline: float,
) -> list[Plan]:
    """Certify the plan of each LLM; its assumptions say what the other LLMs leave it."""
    plans = []
    for k, (entry, llm_searches) in enumerate(zip(entries, searched, strict=True)):
        with_deadline = [
            search._replace(problem=replace(search.problem, deadline=deadline)) for search in llm_searches
        ]
        production = None if shared is None else shared.productions[k]
        inputs = SearchInputs(entry.task, entry.trace, catalog, seed)
        plan = certify_plan(with_deadline, inputs, deadline=deadline, production=production)
        if (others_leave := left_to_each[k]) is not None:
            certificate = replace(plan.certificate, assumptions=(others_leave, *plan.certificate.assumptions))
            plan = replace(plan, certificate=certificate)
        plans.append(plan)
    return plans


def _add_robustness(
    plans: Sequence[Plan],
    searched: Sequence[shared_paper.LlmSearches],
    shared: SharedProduction | None,
    limits: FleetLimits,
    deadline: float,
) -> list[Plan]:
    """The plans with their robustness: what more traffic would do to each fleet, and how other numbers of
    workers would do, within what the other LLMs' fleets leave of the limits.
    """
    productions = [None] * len(plans) if shared is None else shared.productions
    best = list(map(best_of, searched))
    fleets = [
        paper.best if production is None else production.best
        for (_, paper), production in zip(best, productions, strict=True)
    ]
    return [
        add_robustness(
            plan,
            search._replace(
                problem=replace(search.problem, limits=limits_beside(limits, fleets, k), deadline=deadline)
            ),
            productions[k],
        )
        for k, (plan, search) in enumerate(zip(plans, best, strict=True))
    ]


def _answer_totals(
    on_paper: Sequence[LlmOnPaper], shared: SharedProduction | None
) -> tuple[AnswerTotal, ...]:
    """The three answers summed over all LLMs; empty unless production was searched for every LLM. An answer
    without a fleet for some LLMs has no value, and names these LLMs.
    """
    if shared is None:
        return ()
    pairs = zip(on_paper, shared.productions, strict=True)
    llms = [(llm, production) for llm, production in pairs if production]
    if len(llms) < len(on_paper):
        return ()
    totals: list[AnswerTotal] = []
    for name in get_args(AnswerName):
        if any(name not in [answer.name for answer in production.answers] for _, production in llms):
            continue  # Some LLM was not searched for this answer.
        fleets = [(llm, _fleet_of_answer(llm, production, name)) for llm, production in llms]
        if llms_without := tuple(llm.name for llm, counts in fleets if counts is None):
            totals.append(AnswerTotal(name, None, None, llms_without))
            continue
        value, pools = 0.0, list[Pool]()
        for llm, counts in fleets:
            assert counts is not None
            value += objective_paid(llm.problem, counts)
            pools += llm.problem.oracle.fleet(counts).pools
        bill = bill_fleet(Fleet(on_paper[0].problem.llm, tuple(pools)))
        totals.append(AnswerTotal(name, value, bill.usd_per_h))
    return tuple(totals)


def _fleet_of_answer(llm: LlmOnPaper, production: Production, name: AnswerName) -> Counts | None:
    """The fleet of one LLM in one of the three answers, None if it has none."""
    if name == "on-paper":
        return llm.paper.best
    if name == "with-a-loss":
        return production.with_loss
    return production.best if production.why_on_paper is None else None


def _llm_warnings(entries: Sequence[LlmQuestion], plans: Sequence[Plan]) -> list[OfLlm]:
    """The warnings of all plans. A warning of several LLMs is listed once and names them all."""
    warnings_by_llm = {entry.name: plan.warnings for entry, plan in zip(entries, plans, strict=True)}
    different: list[Warned] = []
    for warnings in warnings_by_llm.values():
        different += [warning for warning in warnings if warning not in different]
    return [
        OfLlm(", ".join(llm for llm, warnings in warnings_by_llm.items() if warning in warnings), warning)
        for warning in different
    ]


def _place_all(entries: Sequence[LlmQuestion], plans: Sequence[Plan]) -> NodePlacement | None:
    """All workers on the fewest nodes, which LLMs may share. All pools count as mixed here, so hand-offs
    between nodes are not minimised.
    """
    pools = tuple(
        Pool(f"{entry.name}-{pool.name}", "mixed", pool.type, pool.count)
        for entry, plan in zip(entries, plans, strict=True)
        for pool in plan.fleet.pools
    )
    return findings.place_workers(Fleet(plans[0].fleet.llm, pools))
