"""`SharedPlan`, the answer for several LLMs on one stock: a plan for each LLM, and the totals of all.

`planner/search/several/several_llms.py` builds it, and the reports read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.documents.certificate import Status
from planner.documents.facts import AnswerName, Assuming, Binding, OfLlm, Warned
from planner.domain import FleetLimit
from planner.fleet import Fleet
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import Bill, bill_fleet
from planner.solvers.placement import NodePlacement


@dataclass(frozen=True, slots=True)
class LimitUse:
    """A limit that all LLMs share: the `amount` that it allows and how much all fleets together have `used`,
    both in the unit of the limit.
    """

    limit: FleetLimit
    amount: float
    used: float


@dataclass(frozen=True, slots=True)
class AnswerTotal:
    """One of the three answers (on paper, production, with a loss) for all LLMs.

    `value` is the sum of their fleets' objectives, and `paid_usd_per_h` the bill on nodes that they share.
    Both are None if some LLM has no such fleet within the limits; `lacks` names these LLMs.
    """

    name: AnswerName
    value: float | None
    paid_usd_per_h: float | None
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SharedPlan:
    """A plan for every LLM, within limits that they share.

    `plans`, `paper` and `alone` have an entry per LLM, by its name. `paper` is the objective of its fleet on
    paper within the shared limits, and `alone` the objective of its fleet with all of the limits for itself:
    the production fleet if such fleets were found, else the fleet on paper. `answers` are the three answers
    for all LLMs, empty unless every LLM requires safety. `in_production` says how the fleets of production
    were chosen, and which LLMs pay more there than they would alone. The fields of the next paragraph are
    about the fleets on paper.

    A value is the sum of the LLMs' objectives, in `unit`. `level0` is the least value found of fleets with
    one worker type per pool; None if it was not computed, because fleets of several types have a lower value.
    No fleets with one worker type per pool have a value below `level0_bound`. The search `is_exhausted` if it
    came to its end, so that only its pruning rules are taken for granted, and `is_exact` if it also simulated
    all cheaper fleets of each LLM. No fleets at all have a value below `bound`. `binding` are the limits that
    make the fleets dearer. `rounds` counts how often the master problem (planner/solvers/master.py) chose a
    fleet for each LLM.

    `placement` says which workers are on which nodes; it is None where GPUs are not placed on nodes.
    `fewer_gpus` has the GPUs of each stock that are enough for fleets with a smaller bill; None if no such
    fleets are known.
    """

    plans: Mapping[str, Plan]
    paper: Mapping[str, float]
    alone: Mapping[str, float]
    answers: tuple[AnswerTotal, ...]
    objective: str
    unit: str
    level0: float | None
    level0_bound: float
    bound: float
    is_exhausted: bool
    is_exact: bool
    limits: tuple[LimitUse, ...]
    binding: tuple[Binding, ...]
    in_production: tuple[Binding, ...]
    assumptions: tuple[Assuming, ...]
    warnings: tuple[Warned | OfLlm, ...]
    rounds: int
    simulations: int
    seed: int
    placement: NodePlacement | None
    fewer_gpus: Mapping[str, int] | None = None

    @property
    def value(self) -> float:
        """The sum of the objectives of the fleets that are to be run."""
        return sum(plan.value for plan in self.plans.values())

    @property
    def value_on_paper(self) -> float:
        """The sum of the objectives of the fleets on paper."""
        return sum(self.paper.values())

    @property
    def status(self) -> Status:
        """The status of all plans together. "not for production" if a plan is that; else "best found" if a
        plan is that, or the search did not come to its end; else the one status that all plans have, or "not
        certified" if they differ.
        """
        statuses = {plan.status for plan in self.plans.values()}
        if "not for production" in statuses:
            return "not for production"
        if not self.is_exhausted or "best found" in statuses:
            return "best found"
        return statuses.pop() if len(statuses) == 1 else "not certified"

    @property
    def gap_frac(self) -> float:
        """The share of the value on paper that the bound leaves open; 0 if that value is 0."""
        return (self.value_on_paper - self.bound) / self.value_on_paper if self.value_on_paper else 0.0

    @property
    def bill(self) -> Bill:
        """What is paid for all fleets, on the nodes that they share."""
        return bill_fleet(self.as_one_fleet, self.placement)

    @property
    def as_one_fleet(self) -> Fleet:
        """The pools of all LLMs as one fleet, to bill and to place. It must not be used for what depends on
        the LLM: a fleet has one, and this one has the first.
        """
        return Fleet(self.fleets[0].llm, tuple(pool for fleet in self.fleets for pool in fleet.pools))

    @property
    def fleets(self) -> tuple[Fleet, ...]:
        """The fleet of each LLM, in the order of the LLMs."""
        return tuple(plan.fleet for plan in self.plans.values())
