"""The rules by which searches leave fleets out without simulating them, and how often each was wrong.

The report shows two figures for each rule. One is from the question itself: among the fleets that were
simulated, how many pairs contradict the rule; only the first two rules have it. The other, IN_TESTS, is from
random questions all of whose fleets were simulated (`python benchmarks/brute_force.py --rates`, 2026-11-20),
for SEATS from single decode pools (`benchmarks/decode_pools.py`, 2026-11-23).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.documents.facts import Assumed, PruningRule, RuleTest
from planner.search.oracle.fleet_counts import Verdicts

# The texts are names in certificate.json.
MORE_MIXED: PruningRule = "more-mixed"
"""One mixed pool: what holds with n workers holds with n + 1."""

MORE_DECODE: PruningRule = "more-decode"
"""Beside the same prefill pool, what holds with d decode workers holds with d + 1."""

PREFILL_ALONE: PruningRule = "leads"
"""A prefill pool that misses TTFT with unlimited decode misses it beside any decode pool."""

DECODE_ALONE: PruningRule = "follows"
"""A decode pool whose backlog grows with instant prefill has a growing backlog behind any prefill pool."""

SEATS: PruningRule = "seats"
"""A decode pool has a growing backlog if it has less than 0.8 (`level0_search.FEW_FRAC`) of the workers that
could just admit all requests in time, each at its batch size of the most tokens/s
(`master.fewest_decode_workers`).
"""

LINK: PruningRule = "link"
"""A prefill pool and a decode pool fail if the link between them cannot transfer the KV blocks, in the order
of the prefills, before the backlog test needs them (problem/link.py). The rule assumes that no hand-off
overtakes an earlier one that waits for a free KV cache.
"""

POLICY_RACE: PruningRule = "raced"
"""If no cheaper fleet near the best one holds with given policies, no cheaper fleet at all holds with them
(mixed/policy_search.py).
"""

# How often each rule was wrong, of how many comparisons. Measured with routing jsq and queues in order of
# arrival, on traces of at most 400 requests and, for the rows with `least_requests`, of 1,000 to 5,000. An
# empty row says that the rule was not measured.
IN_TESTS: Mapping[PruningRule, tuple[RuleTest, ...]] = {
    MORE_MIXED: (RuleTest(11, 511, most_requests=400), RuleTest(0, 135, least_requests=400)),
    MORE_DECODE: (RuleTest(9, 511, most_requests=400), RuleTest(0, 135, least_requests=400)),
    PREFILL_ALONE: (RuleTest(0, 646),),
    DECODE_ALONE: (RuleTest(0, 150),),
    SEATS: (RuleTest(0, 197, of_pools=True),),
    LINK: (),
    POLICY_RACE: (),
}


def with_counts(assumed: Iterable[PruningRule], verdicts: Verdicts) -> tuple[Assumed, ...]:
    """Each rule that was used, with how often it was wrong on this traffic and in tests."""
    counts = _count_contradictions(verdicts)
    return tuple(Assumed(name, *counts[name], tested) for name, tested in IN_TESTS.items() if name in assumed)


def _count_contradictions(verdicts: Verdicts) -> dict[PruningRule, tuple[int, int]]:
    """(failures, comparisons) of each rule among the fleets that were simulated on this traffic.

    A comparison is a fleet that holds and the same fleet with more workers in its last pool; the rule fails
    if the larger fleet fails. Only MORE_MIXED and MORE_DECODE are compared.
    """
    # A fleet is ((option, workers), ...), its last pool being the mixed or the decode pool. Fleets that
    # differ in the workers of the last pool alone share a key: (option,), or (prefill option and workers,
    # decode option).
    verdicts_by_key: dict[tuple[object, ...], list[tuple[int, bool]]] = defaultdict(list)
    for (*other_pools, (last_option, workers)), holds in verdicts.items():
        if len(other_pools) <= 1:  # Fleets of level 0.
            verdicts_by_key[(*other_pools, last_option)].append((workers, holds))
    counts_of_rule: dict[PruningRule, tuple[int, int]] = dict.fromkeys(IN_TESTS, (0, 0))
    for key, verdicts_by_workers in verdicts_by_key.items():
        name = MORE_MIXED if len(key) == 1 else MORE_DECODE
        failed, tested = counts_of_rule[name]
        for (_, holds), (_, more_hold) in itertools.combinations(sorted(verdicts_by_workers), 2):
            tested += holds
            failed += holds and not more_hold
        counts_of_rule[name] = (failed, tested)
    return counts_of_rule
