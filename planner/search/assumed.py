"""What the searches take for granted where they do not simulate, and how often that was wrong.

Two figures go with each: on the traffic of this question, from pairs of fleets that were both simulated; and
in random questions, all of whose fleets were (`python benchmarks/brute_force.py --rates`, 2026-11-20).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.search.fleets import Told

MORE_MIXED = "one mixed pool: what holds with n workers holds with n + 1"

MORE_DECODE = "beside the same prefill pool, what holds with d decode workers holds with d + 1"

LEADS = "a prefill pool that misses TTFT with unlimited decode misses it beside any decode pool"

FOLLOWS = (
    "a decode pool whose backlog grows with instant prefill has a growing backlog behind any prefill pool"
)

LINK = (
    "no pairs, as the link cannot carry all KV blocks in the order of their prefills, and no hand-off passes "
    "an earlier one that waits for room"
)

# with jsq and first come first served; the longer tests had 1,000 to 5,000 requests
IN_TESTS: Mapping[str, str] = {
    MORE_MIXED: "hid a cheaper fleet in 11 of 511 tests with up to 400 requests, 0 of 135 with more",
    MORE_DECODE: "hid a cheaper fleet in 9 of 511 tests with up to 400 requests, 0 of 135 with more",
    LEADS: "hid a cheaper fleet in 0 of 646 tests",
    LINK: "not measured",
    FOLLOWS: "hid a cheaper fleet in 0 of 150 tests",
}


def sentences(assumed: Iterable[str], told: Told) -> tuple[str, ...]:
    """Each assumption with what speaks against it."""
    here = _here(told)
    return tuple(
        f"assumed: {text} ({_counted(*here[text])}{IN_TESTS[text]})"
        for text in (MORE_MIXED, MORE_DECODE, LEADS, FOLLOWS, LINK)
        if text in assumed
    )


def _counted(failed: int, tested: int) -> str:
    return f"on this traffic false in {failed} of {tested} comparisons; " if tested else ""


def _here(told: Told) -> dict[str, tuple[int, int]]:
    """(failures, comparisons) among the fleets that were simulated: more workers than one that holds."""
    rows: dict[tuple[object, ...], list[tuple[int, bool]]] = defaultdict(list)
    for fleet, holds in told.items():
        if len(fleet) <= 2:
            rows[(*fleet[:-1], fleet[-1][0])].append((fleet[-1][1], holds))
    found = {text: (0, 0) for text in IN_TESTS}
    for row, answers in rows.items():
        text = MORE_MIXED if len(row) == 1 else MORE_DECODE
        failed, tested = found[text]
        for (_, holds), (_, more_hold) in itertools.combinations(sorted(answers), 2):
            tested += holds
            failed += holds and not more_hold
        found[text] = (failed, tested)
    return found
