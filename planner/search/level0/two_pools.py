"""Level 0 with two pools: the cheapest fleet of p workers of a prefill option and d of a decode option.

More prefill workers hand requests over in larger bursts. So a pair that holds with p prefill workers may fail
with p + 1, and p + 1 may need more decode workers than p. Since the least d may rise and fall as p grows,
every prefill count is searched by itself:

    for each pair of options, for each p from the least that can keep TTFT:
        do the most decode workers below the best price hold beside p?     no: p is out for this pair
        yes: the least d that holds beside p, by bisection

The search takes for granted

    MORE_DECODE    beside the same prefill pool, what holds with d decode workers holds with d + 1
    PREFILL_ALONE  a prefill pool that misses TTFT when every request ends with its first token
                   (`prefill_alone`) misses it beside any decode pool, and so do smaller ones

and in large questions (`are_many` in `pair_up`)

    DECODE_ALONE   a decode pool whose backlog grows when every prompt arrives prefilled (`decode_alone`) has
                   a growing backlog behind any prefill pool, and so have smaller ones
    SEATS          fewer decode workers than `BoundedOption.assumed_least` fall behind. This count is above 1
                   in questions with many requests: level0_search.py takes a share of the workers that could
                   just admit all requests if each worker made tokens at its best batch size and ended with
                   all seats (places in its batch) taken

These are assumptions (planner/search/level0/pruning_rules.py says how often they failed in tests). In a
session the next request comes later if an answer is decoded slowly, so decode workers may also relieve
prefill: there `prefill_alone` and `decode_alone` are None, and p begins at the least number of workers for
the work that the SLO requires.

The search always works on the pairs whose next p has the lowest price, and ends when no such price is below
that of the best fleet. cheapest.py does this for one LLM or for several; here it is called for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.domain import ROUNDING
from planner.search.level0 import pruning_rules
from planner.search.level0.cheapest import cheapest_designs, shared_limits
from planner.search.level0.designs import DesignPool, FleetDesign, record_why_not
from planner.search.level0.one_pool import BoundedOption, Holds, Level0Search
from planner.search.oracle.fleet_counts import objective_of
from planner.solvers.master import Option

# Decode pools are simulated by themselves too (DECODE_ALONE) if there are more than MANY_PAIRS pairs, or if
# the least prefill counts of all pairs add up to more than MANY_WORKERS: each prefill count is a search, and
# the least count is a guess of how many searches a pair needs. Both numbers are set by hand.
MANY_PAIRS = 1000
MANY_WORKERS = 10_000


@dataclass(frozen=True, slots=True)
class PairSimulations:
    """Functions that simulate pairs, and their pools alone; None where a pool must not be judged alone.

    `holds`: whether a fleet, given by its counts, keeps the SLO. `prefill_alone`: whether a prefill pool
    keeps the limits on TTFT with unlimited decode. `decode_alone`: whether a decode pool keeps up if every
    prompt arrives prefilled.
    """

    holds: Holds
    prefill_alone: Holds | None = None
    decode_alone: Holds | None = None


def search_two_pools(
    prefills: Sequence[BoundedOption],
    decodes: Sequence[BoundedOption],
    simulations: PairSimulations,
    search: Level0Search,
    out_of_time: Callable[[], bool],
    allowed: Callable[[Option, Option], bool] = lambda prefill, decode: True,
) -> None:
    """Search the cheapest fleet of one prefill and one decode option, of the `allowed` pairs; the answer is
    in `search`. If prices are equal, the fleet of the earlier pair is kept.
    """
    pairs = pair_up(prefills, decodes, simulations, search, allowed)
    likely = _likely_pairs(pairs)
    # The likeliest pair comes first, then all with its prefill option. Once a good fleet is known, one
    # simulation rules out most of the other pairs. Designs keep their answers: no simulation is repeated.
    for designs in (likely[:1], likely, pairs):
        answer = cheapest_designs(
            [designs],
            shared_limits(search.limits),
            below_value=search.value,
            out_of_time=out_of_time,
            leaping=search.best is None,  # Prefill counts grow by a factor until some fleet holds.
        )
        # Fleets that hold were offered to `search` on the way, so the answer's own choice is not needed.
        if not answer.is_exact:
            search.is_exhausted = False  # Out of time, or no proof that the fleet is the cheapest.
            return
    for bounded in (*prefills, *decodes):
        record_why_not(bounded, search)


def _likely_pairs(pairs: Sequence[FleetDesign]) -> list[FleetDesign]:
    """All pairs that share their prefill option with the likeliest pair, which comes first. The likeliest
    pair is the one that costs least with the counts that are guessed for it.
    """

    def likely_value(design: FleetDesign) -> float:
        # If there is a guess `likely_decode`, it is better than `likely`.
        return objective_of(
            (pool.bounded.option, pool.bounded.likely_decode or pool.bounded.likely) for pool in design.pools
        )

    likeliest = min(pairs, key=likely_value, default=None)
    if likeliest is None:
        return []
    prefill_pool = likeliest.pools[0]
    others = [pair for pair in pairs if pair.pools[0] is prefill_pool and pair is not likeliest]
    return [likeliest, *others]


def pair_up(
    prefills: Sequence[BoundedOption],
    decodes: Sequence[BoundedOption],
    simulations: PairSimulations,
    search: Level0Search,
    allowed: Callable[[Option, Option], bool] = lambda prefill, decode: True,
) -> list[FleetDesign]:
    """The `allowed` pairs as designs, with what `search` has learned of their pools. Pairs that cost as much
    as the best fleet even with their least counts are left out.
    """
    pairs = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if allowed(prefill.option, decode.option)
    ]
    are_many = len(pairs) > MANY_PAIRS or sum(prefill.least for prefill, _ in pairs) > MANY_WORKERS
    prefill_alone = simulations.prefill_alone
    decode_alone = simulations.decode_alone if are_many else None
    prefill_pools = {
        bounded.option.name: DesignPool(bounded, search, prefill_alone, pruning_rules.PREFILL_ALONE)
        for bounded in prefills
    }
    decode_pools = {
        bounded.option.name: DesignPool(bounded, search, decode_alone, pruning_rules.DECODE_ALONE)
        for bounded in decodes
    }
    if decode_alone is not None:
        for pool in decode_pools.values():
            pool.assume_few_fail()
    designs = []
    for prefill, decode in pairs:
        pools = (prefill_pools[prefill.option.name], decode_pools[decode.option.name])
        # `pool.least` is at least `bounded.least`, and grows as counts fail.
        least_value = objective_of((pool.bounded.option, pool.least) for pool in pools)
        if least_value < search.value * (1 - ROUNDING):
            designs.append(FleetDesign(pools, simulations.holds, search))
    return designs
