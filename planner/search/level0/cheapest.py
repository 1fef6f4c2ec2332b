"""Finds the cheapest fleets of level 0, for one LLM or for several LLMs within limits that they share.

A design is the worker types of a fleet, one per pool; with a count of workers for each pool it is a fleet. A
row of a design is its fleets that differ only in the count of the last pool; the corner of a row is its least
fleet that is not known to fail (designs.py). For each LLM one corner, or one fleet known to hold, is chosen
from one of its designs, so that the chosen fleets are within the limits and together cheapest. For one LLM
the choice is a minimum, for several LLMs solvers/multiple_choice.py makes it. Chosen corners are simulated
until every chosen fleet is known to hold.

This is the master of a logic-based Benders decomposition. LLMs share no worker, so there is one subproblem
for each: the simulator says whether the chosen fleet keeps the SLO of its LLM. Corners that fail move up in
their row. A design begins at the least counts that the SLO requires (master.least_workers). So no choice of
designs and counts has a smaller sum than the optimum of the master, on two assumptions: in a row more workers
never hurt, and a pool that fails beside a perfect partner also fails beside a real one.

For one LLM the next cheapest corners are simulated as well, WAVE (one_pool.py) at a time: one answer seldom
makes another needless, because all corners below the best fleet must be ruled out. For several LLMs one
corner of each is simulated at a time, because the corner that is worth simulating depends on what is chosen
for the other LLMs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.domain import COST, ROUNDING, FleetLimit
from planner.search.level0.designs import (
    DesignPool,
    DesignQuestion,
    DesignTerms,
    FleetDesign,
    RowQuestion,
    Vector,
)
from planner.search.level0.one_pool import WAVE
from planner.search.oracle.deterministic_parallel import run_wave
from planner.search.oracle.fleet_counts import Counts, count_below, largest_below, objective_of, workers_of
from planner.search.oracle.work_clock import StoppedError
from planner.solvers.master import FleetLimits, Option, largest_that_fits
from planner.solvers.multiple_choice import GroupChoice, NodesOfKind, NodeStock, choose_within_limits
from planner.solvers.whole_nodes import idle_usd_per_h, node_of, packing_rows

Weigh = Callable[[Option], float]  # What one worker of an option adds to a sum that is minimised or limited.
# The next WAVE questions are chosen among this many of the cheapest corners of one LLM, several of which may
# belong to one design. Set by hand.
MOST_LOOKED_AT = 4 * WAVE


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """A limit `amount` on what the workers of all LLMs use together. If `limit` is None, it is on their
    objective.

    `use` is what one worker uses. If nodes are sold whole, a fleet uses more than the sum of its workers;
    then `total` gives what a fleet uses. Several LLMs share nodes: all of their workers are one fleet here.
    """

    limit: FleetLimit | None
    amount: float
    use: Weigh
    total: Callable[[Counts], float] | None = None


def shared_limits(limits: FleetLimits, *, of_all: bool = False) -> tuple[SharedLimit, ...]:
    """The limits as SharedLimits. A limit that counts whole nodes is no sum over pools, so it has a `total`.
    With `of_all` the limits are for all LLMs together, and the stock counts whole nodes even if GPUs are paid
    singly.
    """
    whole = replace(limits, by_gpu=False)

    def shared(limit: FleetLimit, amount: float) -> SharedLimit:
        def total(counts: Counts) -> float:
            return whole.used(limit, workers_of(counts))

        return SharedLimit(
            limit,
            amount,
            lambda option: limits.use_per_worker(limit, option.type),
            total if limits.counts_nodes(limit) or (of_all and limit.of == "stock") else None,
        )

    return tuple(shared(limit, amount) for limit, amount in limits.rows())


def _packed_stocks(
    llms: Sequence[Sequence[FleetDesign]], limits: Sequence[SharedLimit], *, by_bill: bool
) -> tuple[list[SharedLimit], list[NodeStock]]:
    """The stocks of whole nodes that several LLMs share, and the sums over workers that they refer to.

    The sums are SharedLimits without an amount. A stock has their positions in the list of `limits` followed
    by the sums. With `by_bill` a node weighs its price, and nodes in no stock count too.
    """
    designs = itertools.chain.from_iterable(llms)
    options = dict.fromkeys(pool.bounded.option for design in designs for pool in design.pools)
    sums: list[SharedLimit] = []
    stocks: list[NodeStock] = []

    def add_sum(weight_of: Weigh) -> int:
        """Add a sum; returns its position after the limits."""
        sums.append(SharedLimit(None, math.inf, weight_of))
        return len(limits) + len(sums) - 1

    def add_stock(amount: float, of_stock: Sequence[Option]) -> None:
        kinds: dict[str, list[Option]] = {}  # By the kind of node; "" for GPUs that are sold singly.
        for option in of_stock:
            node = node_of(option.type.gpu)
            kinds.setdefault(node.kind if node else "", []).append(option)
        singly = frozenset(kinds.pop("", ()))
        nodes = []
        for alike in map(frozenset, kinds.values()):
            priced = [node for option in alike if (node := node_of(option.type.gpu)) is not None]
            # All nodes of a kind have the same GPUs; their prices may differ.
            gpus, usd_per_h = priced[0].gpus, min(node.idle_usd_per_h for node in priced)
            packed = packing_rows(gpus, tuple(sorted({option.type.gpus for option in alike})))
            rows = tuple((add_sum(_row_weight(alike, weights)), k) for weights, k in packed)
            nodes.append(NodesOfKind(gpus, rows, gpus * usd_per_h if by_bill else 0.0))
        if nodes:
            stocks.append(NodeStock(amount, add_sum(_row_weight(singly, None)), tuple(nodes)))

    stocked = set[Option]()
    for limit in limits:
        if limit.total is not None and limit.limit != COST:
            of_stock = [option for option in options if limit.use(option)]
            stocked.update(of_stock)
            add_stock(limit.amount, of_stock)
    if by_bill:
        add_stock(math.inf, [option for option in options if option not in stocked])
    return sums, stocks


def _row_weight(options: frozenset[Option], weights: npt.NDArray[np.int64] | None) -> Weigh:
    """What a worker of `options` adds to a row of `packing_rows`; without `weights` its GPUs."""

    def weight_of(option: Option) -> float:
        if option not in options:
            return 0.0
        return float(option.type.gpus if weights is None else weights[option.type.gpus])

    return weight_of


@dataclass(frozen=True, slots=True)
class CheapestChoice:
    """The best choice found and its value; None and infinite if there is none. No choice of these designs has
    a value below `bound`. `is_exact`: the search came to its end; `bound` is then the value, or without a
    choice the `below_value` of the search.
    """

    best: tuple[tuple[FleetDesign, Vector], ...] | None
    value: float
    bound: float
    is_exact: bool
    rounds: int


def cheapest_designs(
    llms: Sequence[Sequence[FleetDesign]],
    limits: Sequence[SharedLimit],
    *,
    weigh: Weigh | Literal["bill"] | None = None,
    below_value: float = math.inf,
    out_of_time: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda _: None,
    unit: str = "",
    leaping: bool = False,
) -> CheapestChoice:
    """The choice of one fleet for each LLM with the smallest sum of weights. The sum must be strictly less
    than `below_value`. `llms` has the designs of each LLM.

    `weigh` gives the weight of a worker; without it the weight of a fleet is its objective with whole nodes.
    With "bill" several LLMs also pay for idle GPUs of the nodes that they share. `unit` is the unit of
    weights in messages. The answers of simulations stay in the designs, so another search of the same designs
    costs little. With `leaping` prefill counts without an upper limit grow by a factor until a choice is
    known. The counts that were passed over are simulated afterwards, and only then `bound` is valid.
    """
    by_bill, of_worker = weigh == "bill", None if isinstance(weigh, str) else weigh
    stocks: list[NodeStock] = []
    if len(llms) > 1:
        sums, stocks = _packed_stocks(llms, limits, by_bill=by_bill)
        limits = [*limits, *sums]
    tables = [_DesignTable(designs, limits, of_worker, stocks, is_shared=len(llms) > 1) for designs in llms]
    least = [0.0] * len(tables)  # The least that each LLM adds to any choice below `upper`.
    best: Sequence[_Column] | None = None
    upper, bound = below_value, 0.0
    rounds, shown_text, is_stopped = 0, "", False

    def ended(*, is_exact: bool) -> CheapestChoice:
        choice = None if best is None else tuple((column.design, column.vector) for column in best)
        return CheapestChoice(choice, math.inf if best is None else upper, bound, is_exact, rounds)

    while True:
        # The best choice among fleets that are known to hold is an upper bound.
        holding = _choose_columns([table.holding() for table in tables], limits, stocks)[0]
        value = math.inf if holding is None else _value_of(holding, by_bill=by_bill)
        if value < upper * (1 - ROUNDING):
            best, upper = holding, value
        for table in tables:
            table.leaping = leaping and math.isinf(upper)
        # In a better choice the fleet of an LLM weighs at most its ceiling: what is left of `upper` if the
        # fleets of all other LLMs weigh their `least`.
        ceilings = [upper - (sum(least) - own_least) for own_least in least]
        columns = [table.columns(ceiling) for table, ceiling in zip(tables, ceilings, strict=True)]
        if not all(columns):  # Some LLM has no fleet that could be part of a better choice.
            bound = upper
            return ended(is_exact=True)
        least = [min(column.value for column in llm_columns) for llm_columns in columns]
        chosen, at_least = _choose_columns(columns, limits, stocks)
        if chosen is None or at_least >= upper * (1 - ROUNDING):
            bound = upper
            return ended(is_exact=True)
        bound = max(bound, at_least)
        # The LLMs for which a corner was chosen, whose fleet is not known to hold.
        unknown = [i for i, column in enumerate(chosen) if not column.holds]
        if not unknown:
            if (value := _value_of(chosen, by_bill=by_bill)) < upper:
                best, upper = chosen, value
            # The solver of `_choose_columns` may have stopped before it proved its choice to be the best.
            is_optimal = upper <= bound + ROUNDING * abs(upper)
            bound = upper if is_optimal else bound
            return ended(is_exact=is_optimal)
        if is_stopped or out_of_time():  # What the last simulations found has been used above.
            return ended(is_exact=False)
        rounds += 1
        best_text = "none found yet" if math.isinf(upper) else f"best so far {upper:,.2f}"
        text = f"at least {f'{bound:,.2f} {unit}'.rstrip()}, {best_text}"
        if text != shown_text:
            progress(text)
            shown_text = text
        questions: list[DesignQuestion] = []
        for i in unknown:
            candidates = [chosen[i]]
            if len(tables) == 1:
                candidates = heapq.nsmallest(MOST_LOOKED_AT, columns[i], key=lambda column: column.weight)
            questions += tables[i].questions(candidates, ceilings[i])
        is_stopped = not _answer_all(questions)


def _answer_all(questions: Sequence[DesignQuestion]) -> bool:
    """Simulate all questions and record their answers. Returns False if the time limit comes first; then only
    the fleets that were already found to hold are recorded.
    """
    try:
        run_wave([question.simulate for question in questions])
    except StoppedError:
        for question in questions:
            if isinstance(question, RowQuestion) and question.least_fleet is not None:
                question.record_answer()
        return False
    for question in questions:
        question.record_answer()
    return True


@dataclass(frozen=True, slots=True)
class _Column(GroupChoice):
    """A corner of a design, or a fleet of the design that is known to hold (`holds`), with its counts
    `vector` and the weight `value` of all its workers. The inherited `weight` leaves out what nodes weigh;
    the inherited `uses` are the workers' uses of each limit.
    """

    value: float
    design: FleetDesign
    vector: Vector
    holds: bool


class _DesignTable:
    """The designs of one LLM in one search, with their workers' weights and uses of limits."""

    def __init__(
        self,
        designs: Sequence[FleetDesign],
        limits: Sequence[SharedLimit],
        weigh: Weigh | None,
        stocks: Sequence[NodeStock],
        *,
        is_shared: bool,
    ) -> None:
        self.designs, self.weigh = designs, weigh
        # By kind of node: the position, among a fleet's uses, of its GPUs on such nodes; a GPU's weight.
        kinds = [kind for stock in stocks for kind in stock.kinds]
        self.node_weights = [(kind.rows[0][0], kind.weight / kind.gpus) for kind in kinds]
        self.is_shared = is_shared  # Other LLMs share the limits: then uses are sums over workers.
        # By limit: the function `total` or None, and the amount, raised by what sums may be off by rounding.
        self.totals = [limit.total for limit in limits]
        self.amounts = [limit.amount * (1 + ROUNDING) for limit in limits]
        self.terms: dict[DesignPool, DesignTerms] = {}  # For each pool of any design.
        for pool in dict.fromkeys(pool for design in designs for pool in design.pools):
            option = pool.bounded.option
            uses = tuple(limit.use(option) for limit in limits)
            by_limit = zip(self.amounts, uses, strict=True)
            # The most workers of this option that the limits allow if the fleet has no others.
            fitting = [math.floor(amount / use) for amount, use in by_limit if use > 0 and amount < math.inf]
            most = min(fitting, default=math.inf)
            self.terms[pool] = DesignTerms(weigh(option) if weigh else option.objective, uses, most)
        self.leaping = False
        # For each design, its version and `leaping` when its columns were made.
        self.versions: list[tuple[int, bool]] = [(-1, False)] * len(designs)
        self.columns_by_design: list[list[_Column]] = [[] for _ in designs]
        self.all_columns: list[_Column] = []

    def _current_columns(self) -> list[_Column]:
        """All columns. A design's columns are made again if an answer has changed the design since."""
        versions = [(design.version, self.leaping) for design in self.designs]
        if versions != self.versions:
            for k, design in enumerate(self.designs):
                if versions[k] != self.versions[k]:
                    self.columns_by_design[k] = self._make_columns(design)
            self.versions = versions
            self.all_columns = list(itertools.chain.from_iterable(self.columns_by_design))
        return self.all_columns

    def _make_columns(self, design: FleetDesign) -> list[_Column]:
        """The columns of one design that are within the limits."""

        def has_too_many(vector: Vector) -> bool:
            """Whether a count is so high that the search gives up there (`BoundedOption.too_many`)."""
            return any(
                count > pool.bounded.too_many for count, pool in zip(vector, design.pools, strict=True)
            )

        fleets = design.fleets()
        corners = design.corners(leaping=self._leaps(design))
        vectors = [(vector, True) for vector in fleets]
        vectors += [
            (vector, False) for vector in corners if vector not in fleets and not has_too_many(vector)
        ]
        columns = []
        for vector, holds in vectors:
            value, uses = self._weight_and_uses(design, vector)
            weight = value - sum(gpu_weight * uses[row] for row, gpu_weight in self.node_weights)
            is_within = all(used <= amount for used, amount in zip(uses, self.amounts, strict=True))
            if is_within and self._is_within_totals(design, vector):
                columns.append(_Column(weight, uses, value, design, vector, holds))
        return columns

    def _is_within_totals(self, design: FleetDesign, vector: Vector) -> bool:
        """Whether a fleet alone is within the limits that count whole nodes. Without other LLMs its uses have
        been compared with them already.
        """
        return not self.is_shared or all(
            total is None or total(design.counts(vector)) <= amount
            for total, amount in zip(self.totals, self.amounts, strict=True)
        )

    def _leaps(self, design: FleetDesign) -> bool:
        """Whether the prefill counts of this design, those of the first of its two pools, grow by leaps."""
        return self.leaping and len(design.pools) == 2 and math.isinf(self.terms[design.pools[0]].most)

    def _weight_and_uses(self, design: FleetDesign, vector: Vector) -> tuple[float, tuple[float, ...]]:
        """The weight of a fleet, and what it uses of each limit."""
        pool_counts = [(self.terms[pool], count) for pool, count in zip(design.pools, vector, strict=True)]
        weight = sum(terms.weight * count for terms, count in pool_counts)
        if self.weigh is None:  # The objective may count whole nodes: then it is no sum over workers.
            weight = objective_of(design.counts(vector))

        def use_of_limit(k: int) -> float:
            if (total := self.totals[k]) is not None and not self.is_shared:
                return total(design.counts(vector))
            return sum(terms.uses[k] * count for terms, count in pool_counts)

        return weight, tuple(map(use_of_limit, range(len(self.totals))))

    def holding(self) -> list[_Column]:
        """The columns of fleets that are known to hold."""
        return [column for column in self._current_columns() if column.holds]

    def columns(self, ceiling: float) -> list[_Column]:
        """Corners, and fleets that hold, within the limits and of a weight strictly below `ceiling`."""
        below = ceiling * (1 - ROUNDING)
        return [column for column in self._current_columns() if column.value < below]

    def questions(self, columns: Sequence[_Column], ceiling: float) -> list[DesignQuestion]:
        """Questions about the designs of these columns, WAVE or a few more. First the pools of a design are
        simulated alone (all of them for a single design, else one at a time); once their least counts are
        known, the row of the first column of the design is simulated.
        """
        questions: list[DesignQuestion] = []
        has_question: set[FleetDesign | DesignPool] = set()
        for column in columns:
            design = column.design
            if column.holds or design in has_question:
                continue
            terms = [self.terms[pool] for pool in design.pools]
            leasts = tuple(pool.least for pool in design.pools)
            most_of = partial(self._most_workers, design, leasts, ceiling)
            pool_questions = design.pool_questions(terms, most_of, all_unknown=len(self.designs) == 1)
            if not pool_questions:
                has_question.add(design)
                most = self._most_workers(design, column.vector, ceiling, len(design.pools) - 1)
                questions.append(RowQuestion(design, column.vector, most, self._leaps(design)))
            questions += [question for question in pool_questions if question.pool not in has_question]
            has_question.update(question.pool for question in pool_questions)
            if len(questions) >= WAVE:
                break
        return questions

    def _most_workers(self, design: FleetDesign, vector: Vector, ceiling: float, k: int) -> float:
        """The most workers that the k-th pool may have beside the other pool's count in `vector`, within the
        limits and with a weight of the fleet below `ceiling`. If no limit bounds the count, it is also at
        most `BoundedOption.too_many`: of GPUs that are almost free the weight allows any number.
        """
        other_weight, other_uses = self._weight_and_uses(design, (*vector[:k], 0, *vector[k + 1 :]))
        terms, counts = self.terms[design.pools[k]], design.counts(vector)
        option, others = counts[k][0], (*counts[:k], *counts[k + 1 :])
        if self.weigh is None:
            most = min(terms.most, largest_below(option, ceiling, others))
        else:
            most = min(terms.most, count_below(terms.weight, ceiling, other_weight))
        by_limit = zip(self.amounts, terms.uses, other_uses, self.totals, strict=True)
        # Limits with a `total` need a bisection, so they come last, when the other limits have lowered the
        # count.
        for amount, use, other_use, total in sorted(by_limit, key=lambda limit: limit[-1] is not None):
            if (total is None or self.is_shared) and use > 0 and amount < math.inf:
                most = min(most, math.floor((amount - other_use) / use + ROUNDING))
            if total is not None and 0 < most < math.inf:
                most = _most_within(total, amount, others, option, int(most))
        is_unlimited = math.isinf(terms.most) and math.isfinite(most)
        return min(most, design.pools[k].bounded.too_many) if is_unlimited else most


def _value_of(columns: Sequence[_Column], *, by_bill: bool) -> float:
    """The weight of these fleets, with `by_bill` also the price of idle GPUs of the nodes that they share."""
    value = sum(column.value for column in columns)
    if not by_bill:
        return value
    workers = [pool for column in columns for pool in column.design.counts(column.vector)]
    return value + float(
        idle_usd_per_h(
            (node_of(option.type.gpu), option.type.gpus, count) for option, count in workers if count
        )
    )


def _most_within(
    total: Callable[[Counts], float], amount: float, others: Counts, option: Option, most: int
) -> int:
    """The largest count of `option`, up to `most`, with which its fleet with `others` has a total of at most
    `amount`.
    """
    return largest_that_fits(most, lambda n: total((*others, (option, n))) <= amount)


def _choose_columns(
    columns: Sequence[Sequence[_Column]], limits: Sequence[SharedLimit], stocks: Sequence[NodeStock]
) -> tuple[list[_Column] | None, float]:
    """The columns chosen, one for each LLM, or None if no choice is within the limits; and a lower bound on
    the weight of any choice.
    """
    if not all(columns):
        return None, math.inf
    if len(columns) == 1:  # Every column is within the limits by itself.
        first = min(columns[0], key=lambda column: column.weight)
        return [first], first.weight
    columns = [_undominated(llm_columns) for llm_columns in columns]
    indices, bound = choose_within_limits(columns, [limit.amount for limit in limits], stocks)
    if indices is None:
        return None, bound
    return [llm_columns[i] for llm_columns, i in zip(columns, indices, strict=True)], bound


def _undominated(columns: Sequence[_Column]) -> list[_Column]:
    """The columns that no other column dominates. A column dominates another if its fleet is known to hold,
    weighs no more and uses no more of any limit. One of the columns with equal figures stays: the first
    that holds, or else the first.
    """
    by_figures: dict[tuple[float, ...], _Column] = {}
    for column in columns:
        figures = (column.weight, *column.uses)
        if figures not in by_figures or (column.holds and not by_figures[figures].holds):
            by_figures[figures] = column
    columns, figures_of = list(by_figures.values()), np.array(list(by_figures))
    keep = np.ones(len(columns), bool)
    for k, column in enumerate(columns):
        if column.holds and keep[k]:
            # Only columns with a smaller figure than this one are not dominated by it.
            keep &= (figures_of < figures_of[k]).any(axis=1)
            keep[k] = True
    return [column for column, is_kept in zip(columns, keep, strict=True) if is_kept]
