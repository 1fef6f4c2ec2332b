"""The test of a fleet in scenarios that no search has seen.

The fleet is simulated in one scenario after another until Wald's test (solvers/repeats.py) decides whether
the share of scenarios that it keeps is more than TEST_BELOW_FRAC below the required share. A fleet that is
chosen among several because it passes is tested twice (`decide_picked`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.documents.facts import CheaperMiss, KeptIn
from planner.documents.safety import Safety
from planner.domain import ROUNDING, Slo
from planner.fleet import Fleet, Policies
from planner.policies import ROUTING
from planner.search.oracle.deterministic_parallel import run_each
from planner.search.oracle.fleet_counts import Counts, NamedCounts, names_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.oracle.scenarios import TEST_BLOCK, Scenario, Scenarios
from planner.search.problem.plan_problem import Problem
from planner.solvers.repeats import decide_sequentially

# Wald's test decides between two shares of kept scenarios: the lower one is TEST_BELOW_FRAC less than the
# required share, the upper one lies TEST_ABOVE_FRAC of the way from the required share to 1.
TEST_BELOW_FRAC, TEST_ABOVE_FRAC = 0.05, 0.5
# A test simulates at most about TEST_REQUESTS, in LEAST_TEST_SCENARIOS to MOST_TEST_SCENARIOS scenarios. If
# all are kept, 27 decide for a required share of 90 %.
TEST_REQUESTS = 6_000_000
LEAST_TEST_SCENARIOS = 28
MOST_TEST_SCENARIOS = 200
# The second test of a chosen fleet begins this many scenarios (1,024) after the first. No first test of a
# plan comes so far: all first tests have at most production_fleet.MOST_TESTS x MOST_TEST_SCENARIOS scenarios
# together (800).
PICKED_LATER = 32 * TEST_BLOCK
# A test simulates its scenarios in batches, and checks its time between them. A batch has about
# AT_ONCE_REQUESTS requests, in LEAST_AT_ONCE to MOST_AT_ONCE scenarios.
AT_ONCE_REQUESTS = 1_000_000
LEAST_AT_ONCE = 4
MOST_AT_ONCE = 32
# The fleets on paper and with a loss are only shown beside the plan, so they are simulated with fewer
# requests, in LEAST_SIDE_SCENARIOS to MOST_SIDE_SCENARIOS scenarios.
SIDE_REQUESTS = 200_000
LEAST_SIDE_SCENARIOS = 10
MOST_SIDE_SCENARIOS = 32


@dataclass(slots=True, eq=False)
class ScenarioTest:
    """A test of fleets in `scenarios` that no search has seen, from the number `first` on. With
    `is_after_loss` the oracle removes a worker, and results are marked as after a loss. `refused` has the
    last result of each fleet that did not pass.
    """

    oracle: Oracle
    scenarios: Scenarios
    safety: Safety
    first: int
    out_of_time: Callable[[], bool]
    is_after_loss: bool = False
    refused: dict[NamedCounts, KeptIn] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, first: int = 0) -> ScenarioTest:
        """The test of fleets of this problem, which must require safety, until its time is over."""
        assert problem.task.safety is not None and problem.test_scenarios is not None
        return cls(problem.oracle, problem.test_scenarios, problem.task.safety, first, problem.out_of_time)

    @property
    def side_scenarios(self) -> int:
        """The number of scenarios in which the fleets on paper and with a loss are simulated."""
        return int(
            np.clip(SIDE_REQUESTS // len(self.oracle.trace), LEAST_SIDE_SCENARIOS, MOST_SIDE_SCENARIOS)
        )

    def decide(self, counts: Counts) -> KeptIn:
        """Simulate the fleet in one scenario after another until the test decides, the fleet cannot pass it
        any more, or the scenarios or the time are used up.
        """
        return self.decide_and_split(counts)[0]

    def decide_and_split(self, counts: Counts) -> tuple[KeptIn, list[Scenario], list[Scenario]]:
        """Like `decide`, with the scenarios that the fleet missed and those that it kept."""
        most_scenarios = int(
            np.clip(TEST_REQUESTS // len(self.oracle.trace), LEAST_TEST_SCENARIOS, MOST_TEST_SCENARIOS)
        )
        missed, kept = list[Scenario](), list[Scenario]()
        # Few scenarios may leave the test open even for a fleet that keeps them all. Then no fleet counts
        # as hopeless.
        may_pass = self._kept_in(most_scenarios, most_scenarios).decision == "holds"
        at_once = int(np.clip(AT_ONCE_REQUESTS // len(self.oracle.trace), LEAST_AT_ONCE, MOST_AT_ONCE))

        def is_over(kept_count: int, number: int) -> bool:
            if_others_kept = self._kept_in(kept_count + most_scenarios - number, most_scenarios)
            is_hopeless = may_pass and if_others_kept.decision != "holds"
            is_decided = self._kept_in(kept_count, number).decision != "open"
            return number >= most_scenarios or is_decided or is_hopeless

        while not is_over(len(kept), number := len(missed) + len(kept)) and not self.out_of_time():
            # A batch has no scenario that could turn out to be unnecessary. So another one is added only if
            # the test would go on if all before it in the batch were missed, and also if all were kept.
            batch_size = 1
            while (
                batch_size < at_once
                and not is_over(len(kept), number + batch_size)
                and not is_over(len(kept) + batch_size, number + batch_size)
            ):
                batch_size += 1
            batch = range(number, number + batch_size)
            for k, is_kept in zip(batch, self._are_kept(counts, batch), strict=True):
                (kept if is_kept else missed).append(self.scenarios[self.first + k])
        kept_in = self._kept_in(len(kept), len(missed) + len(kept))
        if not is_test_passed(kept_in, self.safety):
            self.refused[names_of(counts)] = kept_in
        return kept_in, missed, kept

    def decide_picked(self, counts: Counts) -> tuple[ScenarioTest, KeptIn]:
        """The test and result of a fleet that is chosen if it passes, after other fleets were tested in the
        same scenarios.

        A fleet that keeps too few scenarios may pass a test by chance, and the cheapest of several that pass
        is the likeliest to have done so (the winner's curse). So a fleet that passes is tested once more in
        other scenarios, and the second result counts.
        """
        kept_in = self.decide(counts)
        if not is_test_passed(kept_in, self.safety):
            return self, kept_in
        second = replace(self, first=self.first + PICKED_LATER)
        return second, second.decide(counts)

    def after_a_loss(self) -> ScenarioTest:
        """The same test, in which a fleet must keep the SLO after the loss of any one worker.

        If production, or another fleet that is known to hold in a scenario, has no more workers than the
        tested fleet, the tested fleet is not simulated there (more_workers.py).
        """
        oracle = replace(self.oracle, spare_workers=1, infers_kept=True)
        return replace(self, oracle=oracle, is_after_loss=True, refused={})

    def with_policies(self, policies: Policies) -> ScenarioTest:
        """The same test of fleets with these policies."""
        pinning = self.oracle.pinning if ROUTING[policies.routing].pins else None
        oracle = replace(self.oracle, policies=policies, of_pairs=None, pinning=pinning)
        return replace(self, oracle=oracle, refused={})

    def with_slo(self, slo: Slo) -> ScenarioTest:
        """The same test of another SLO."""
        return replace(self, oracle=replace(self.oracle, slo=slo), refused={})

    def count_kept(self, counts: Counts, number: int, *, enough: int | None = None) -> KeptIn:
        """Count in how many of the first `number` scenarios the fleet keeps the SLO.

        The count stops early if the time is over, and as soon as it is certain whether `enough` of them are
        kept.
        """
        kept_count = simulated = 0
        # One batch is simulated even if the time is over, so that there is a share to report.
        while simulated < number and not (simulated and self.out_of_time()):
            if enough is not None and not kept_count < enough <= kept_count + number - simulated:
                break
            # The count cannot reach `enough` before `enough - kept_count` further scenarios, so a batch of
            # them has no unnecessary one.
            at_once = LEAST_AT_ONCE if enough is None else min(LEAST_AT_ONCE, enough - kept_count)
            batch = range(simulated, min(simulated + at_once, number))
            kept_count, simulated = kept_count + sum(self._are_kept(counts, batch)), batch.stop
        return self._kept_in(kept_count, simulated)

    def _are_kept(self, counts: Counts, numbers: Sequence[int]) -> list[bool]:
        """Whether the fleet keeps the SLO in each of these scenarios."""

        def is_kept(number: int) -> bool:
            return self.oracle.in_scenario(self.scenarios[self.first + number]).holds(counts)

        return run_each(is_kept, numbers)

    def _kept_in(self, kept: int, number: int) -> KeptIn:
        """The fact that `kept` of `number` scenarios are kept, with the decision of Wald's test."""
        required_frac = self.safety.kept_in_frac
        lower_frac = required_frac - TEST_BELOW_FRAC
        upper_frac = required_frac + TEST_ABOVE_FRAC * (1 - required_frac)
        return KeptIn(
            kept,
            scenario_count=number,
            least_frac=lower_frac,
            most_frac=upper_frac,
            decision=decide_sequentially(kept, number, lower_frac, upper_frac),
            after_loss=self.is_after_loss,
        )


def untimed_test(problem: Problem) -> ScenarioTest | None:
    """The test of fleets of this problem from its first scenario on, however long it takes; None for a
    question on paper.
    """
    if problem.task.safety is None or problem.test_scenarios is None:
        return None
    return replace(ScenarioTest.of(problem), out_of_time=lambda: False)


def is_test_passed(kept_in: KeptIn, safety: Safety) -> bool:
    """Whether the test decided for the fleet, and the fleet kept at least the required share."""
    return kept_in.decision == "holds" and kept_in.kept_frac >= safety.kept_in_frac - ROUNDING


@dataclass(frozen=True, slots=True, eq=False)
class FleetTrial:
    """A fleet for production with the result of its test.

    `problem` is in the scenarios of the last search. `model` is the scale model that was searched instead if
    the problem is large (scale_model.py). `cheaper` is the fact on cheaper fleets. `is_cut_short`: the time
    was over before all cheaper fleets of two worker types were searched.
    """

    best: Counts
    kept_in: KeptIn
    problem: Problem
    test: ScenarioTest
    model: Problem | None = None
    cheaper: CheaperMiss | None = None
    is_cut_short: bool = False

    @property
    def searched_problem(self) -> Problem:
        """The problem that was searched: the scale model, if there is one."""
        return self.problem if self.model is None else self.model

    @property
    def is_passed(self) -> bool:
        """Whether the fleet passed its test."""
        return is_test_passed(self.kept_in, self.test.safety)

    def retest(self, counts: Counts) -> FleetTrial:
        """The trial of another fleet, which is chosen if it passes (`ScenarioTest.decide_picked`). It has no
        fact on cheaper fleets yet.
        """
        test, kept_in = self.test.decide_picked(counts)
        return replace(self, best=counts, test=test, kept_in=kept_in, cheaper=None)

    def kept_with_policies(self, policies: Policies, fleet: Fleet) -> tuple[KeptIn, bool]:
        """In how many scenarios the fleet is kept with these policies, and whether that is enough.

        The fleet must pass the same test. If it keeps a smaller share there than the plan, it must also keep
        the SLO in as many of the search's scenarios as a search requires. The returned count is from the
        first check that fails.
        """
        test, scenarios = self.test.with_policies(policies), self.searched_problem.search_scenarios
        counts = test.oracle.counts(fleet)
        kept_in = test.decide(counts)
        if scenarios is None or not is_test_passed(kept_in, test.safety):
            return kept_in, False
        if kept_in.kept_frac >= self.kept_in.kept_frac:
            return kept_in, True
        search = ScenarioTest(
            self.searched_problem.oracle.as_written(), scenarios, test.safety, 0, test.out_of_time
        ).with_policies(policies)
        enough = scenarios.count - test.safety.most_missed(scenarios.count)
        in_seen_scenarios = search.count_kept(counts, scenarios.count, enough=enough)
        is_kept = in_seen_scenarios.kept >= enough
        return (kept_in if is_kept else in_seen_scenarios), is_kept
