"""The rules by which searches leave fleets out without simulating them, and how often each was wrong.

Each rule comes with two figures. One is of the question's traffic: how many pairs of fleets, both simulated,
contradict the rule. The other, IN_TESTS, is of random questions of which all fleets were simulated (`python
benchmarks/brute_force.py --rates`, 2026-11-20); for SEATS of decode pools alone
(`benchmarks/decode_pools.py`, 2026-11-23).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.documents.facts import Assumed, Shortcut, Tested
from planner.search.oracle.fleet_counts import Verdicts

MORE_MIXED: Shortcut = "more-mixed"
"""One mixed pool: what holds with n workers holds with n + 1."""

MORE_DECODE: Shortcut = "more-decode"
"""Beside the same prefill pool, what holds with d decode workers holds with d + 1."""

LEADS: Shortcut = "leads"
"""A prefill pool that misses TTFT with unlimited decode misses it beside any decode pool."""

FOLLOWS: Shortcut = "follows"
"""A decode pool whose backlog grows with instant prefill has a growing backlog behind any prefill pool."""

SEATS: Shortcut = "seats"
"""A decode pool falls behind if it has less than 0.8 (`level0_search.FEW_FRAC`) of the workers that could
just make all tokens, at their best batch size and with full batches at the end
(`master.fewest_decode_workers`).
"""

LINK: Shortcut = "link"
"""A pair fails if its link cannot carry all KV blocks in the order of the prefills. That assumes that no
hand-off overtakes an earlier one that waits for room.
"""

RACED: Shortcut = "raced"
"""Policies with which no cheaper fleet near the best one holds make no fleet hold that costs less
(mixed/policy_search.py).
"""

# (wrong, comparisons) of each rule. Measured with routing jsq and queues in order of arrival; the rows with
# `least_requests` had 1,000 to 5,000 requests.
IN_TESTS: Mapping[Shortcut, tuple[Tested, ...]] = {
    MORE_MIXED: (Tested(11, 511, most_requests=400), Tested(0, 135, least_requests=400)),
    MORE_DECODE: (Tested(9, 511, most_requests=400), Tested(0, 135, least_requests=400)),
    LEADS: (Tested(0, 646),),
    FOLLOWS: (Tested(0, 150),),
    SEATS: (Tested(0, 197, of_pools=True),),
    LINK: (),  # Not measured.
    RACED: (),
}


def with_counts(assumed: Iterable[Shortcut], verdicts: Verdicts) -> tuple[Assumed, ...]:
    """Each rule that was used, with how often it was wrong on this traffic and in tests."""
    here = _here(verdicts)
    return tuple(Assumed(name, *here[name], tested) for name, tested in IN_TESTS.items() if name in assumed)


def _here(verdicts: Verdicts) -> dict[Shortcut, tuple[int, int]]:
    """(failures, comparisons) of each rule among the fleets that were simulated on this traffic.

    A comparison is a fleet that holds and one with more workers of its last pool; it fails if that one fails.
    """
    rows: dict[tuple[object, ...], list[tuple[int, bool]]] = defaultdict(list)
    for fleet, holds in verdicts.items():
        if len(fleet) <= 2:
            rows[(*fleet[:-1], fleet[-1][0])].append((fleet[-1][1], holds))
    counts_of_rule: dict[Shortcut, tuple[int, int]] = {name: (0, 0) for name in IN_TESTS}
    for row, answers in rows.items():
        name = MORE_MIXED if len(row) == 1 else MORE_DECODE
        failed, tested = counts_of_rule[name]
        for (_, holds), (_, more_hold) in itertools.combinations(sorted(answers), 2):
            tested += holds
            failed += holds and not more_hold
        counts_of_rule[name] = (failed, tested)
    return counts_of_rule
