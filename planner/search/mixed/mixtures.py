"""Searches cheaper fleets of up to four worker types. An estimate, which is corrected by every simulation,
says which fleet to simulate next.

The share of the traffic that a fleet can serve is estimated from the shares s_j that one worker of each
option can serve:

    share = sum_mixed s_j n_j + min(sum_prefill s_j n_j, sum_decode s_j n_j)

where n_j is the number of workers. The first s_j come from level 0. If a fleet fails although its estimate is
above 1, the s_j of its options are lowered; if one holds although its estimate is below 1, they are raised.
Only the largest fleets are simulated: those to which no worker can be added within the limits and below the
objective of the best fleet. If one of them fails, smaller ones are assumed to fail too.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, get_args

import numpy as np
import numpy.typing as npt

from planner.domain import ROUNDING
from planner.fleet import Role
from planner.search.level0.filling import CountArray, list_filled_fleets
from planner.search.oracle import fleet_counts
from planner.search.oracle.fleet_oracle import Oracle, without_needless_workers
from planner.search.problem.options import by_hardware, hardware_of
from planner.solvers.master import FleetLimits, Option

# All numbers here are set by hand.

# Fleets of up to FIRST_TYPES worker types are searched first, and then those of up to MOST_TYPES.
FIRST_TYPES, MOST_TYPES = 3, 4
LEAST_SHARE = 0.5  # Fleets that are expected to serve a smaller share of the traffic are not simulated.
# A simulation with a wrong estimate multiplies the shares of the fleet's options by (target / estimate) to
# the power LEARNING_RATE. For other engine settings of the same role and hardware the exponent is ALIKE_FRAC
# of that.
LEARNING_RATE, ALIKE_FRAC = 0.5, 0.5
# The target, which the estimate should have been: 1 plus this share for a fleet that holds, 1 less this share
# for one that fails.
MARGIN_FRAC = 0.03
NEARBY = range(-2, 2)  # A neighbour's pools differ from the best fleet's by -2, -1, 0 or 1 workers.

Passed = TypeVar("Passed")
Shares = npt.NDArray[np.float64]


def improve_mixture(
    best: fleet_counts.Counts,
    options: Sequence[Option],
    shares: Mapping[str, float],
    limits: FleetLimits,
    oracle: Oracle,
    may_go_on: Callable[[], bool],
    *,
    one_setting: bool = False,
) -> fleet_counts.Counts:
    """The best fleet found as long as `may_go_on` allows; `best` itself if none is cheaper.

    `options` are all options, in the order of a fleet's pools; `shares` holds the share of the traffic that
    one worker of each can serve. With `one_setting` no fleet has two options of one role and hardware. If
    there are too many fleets (`filling.MOST_CANDIDATES`), the options that cost most for their share are left
    out.
    """
    options, places, learned = _promising_first(best, options, shares)
    failed: list[CountArray] = []
    kinds = [(option.role, hardware_of(option)) for option in options] if one_setting else None
    most_types = FIRST_TYPES
    while may_go_on():
        value = fleet_counts.objective_of(best)
        if one_setting:
            # Here a fleet must be cheaper by a factor above SAME_PRICE: one GPU fewer on nodes that are paid
            # whole saves nothing, and leaves less room for more traffic.
            value /= fleet_counts.SAME_PRICE
        candidates = list_filled_fleets(options, limits, value, most_types, kinds)

        def holds(vector: CountArray) -> bool:
            return oracle.holds(_counts(vector, options, places))

        best_fleet = _first_that_holds(options, candidates, learned, failed, holds, may_go_on)
        if best_fleet is None and most_types < MOST_TYPES:
            most_types += 1
            continue
        if best_fleet is None:
            return best
        best = without_needless_workers(_counts(best_fleet, options, places), oracle)
    return best


def find_cheaper_pair(
    best: fleet_counts.Counts,
    below_value: float,
    options: Sequence[Option],
    shares: Mapping[str, float],
    limits: FleetLimits,
    passing: Callable[[fleet_counts.Counts], Passed | None],
    may_go_on: Callable[[], bool],
) -> Passed | None:
    """What `passing` returns for the first fleet of at most two options below `below_value` for which it is
    not None; None if there is no such fleet, or as soon as `may_go_on` ends the search.

    The fleets are ordered as in `improve_mixture`, whose parameters the others are. `shares` need only be in
    proportion: they are scaled so that `best` serves all of the traffic.
    """
    options, places, learned = _promising_first(best, options, shares)
    workers = dict(best)
    best_vector = np.array([[workers.get(option, 0) for option in options]], np.int32)
    learned /= CandidateFleets(options, best_vector).estimate_shares(learned)
    passed: Passed | None = None

    def is_passed(vector: CountArray) -> bool:
        nonlocal passed
        passed = passing(_counts(vector, options, places))
        return passed is not None

    _first_that_holds(
        options, list_filled_fleets(options, limits, below_value, 2), learned, [], is_passed, may_go_on
    )
    return passed


def _promising_first(
    best: fleet_counts.Counts, options: Sequence[Option], shares: Mapping[str, float]
) -> tuple[list[Option], list[int], Shares]:
    """All options, the most promising first; the place of each in the order of pools; and its share (J,).

    The most promising are those of the best fleet, then for each role and hardware the one with the lowest
    price for its share, then those with the second lowest, and so on. The order of pools is that of
    `options`; an option of `best` that is not among them comes last.
    """

    def price(option: Option) -> float:
        return option.objective / shares[option.name]

    ranked = []
    for alike in by_hardware(options).values():
        ranked += [(rank, price(option), option) for rank, option in enumerate(sorted(alike, key=price))]
    ranked.sort(key=lambda row: row[:2])  # By rank and price only, because options cannot be compared.
    ordered = list(dict.fromkeys([*fleet_counts.options_of(best), *(option for *_, option in ranked)]))
    position = {option.name: k for k, option in enumerate(options)}
    places = [position.get(option.name, len(position)) for option in ordered]
    return ordered, places, np.array([shares[option.name] for option in ordered])


def _counts(vector: CountArray, options: Sequence[Option], places: Sequence[int]) -> fleet_counts.Counts:
    """The fleet with the counts `vector` (J,) of the J options, without those whose count is 0. Its pools are
    in the order of `places`.
    """
    used_options = sorted(np.flatnonzero(vector).tolist(), key=places.__getitem__)
    return tuple((options[j], int(vector[j])) for j in used_options)


def _first_that_holds(
    options: Sequence[Option],
    candidates: CountArray,
    learned_shares: Shares,
    failed: list[CountArray],
    holds: Callable[[CountArray], bool],
    may_go_on: Callable[[], bool],
) -> CountArray | None:
    """The first of the candidates (C, J) that holds. The one with the highest estimate is always simulated
    next. Every simulation changes `learned_shares` (J,), the shares of the traffic that one worker of each
    option serves, and adds a fleet that fails to `failed`.

    None if `may_go_on` ends the search, or if no candidate is expected to serve LEAST_SHARE.
    """
    kinds = [(option.role, hardware_of(option)) for option in options]
    alike = np.array([[kind == other for other in kinds] for kind in kinds])
    fleets = CandidateFleets(options, candidates)
    # A candidate may hold unless some failed fleet has at least as many workers of each option.
    may_hold = np.ones(len(candidates), bool)
    for failed_fleet in failed:
        may_hold &= fleets.exceed(failed_fleet)
    while len(candidates) and may_go_on():
        estimates = np.where(may_hold, fleets.estimate_shares(learned_shares), 0.0)
        chosen = int(np.argmax(estimates))
        if estimates[chosen] < LEAST_SHARE:
            return None
        vector: CountArray = candidates[chosen]
        is_kept = holds(vector)
        _learn(learned_shares, alike, vector, float(estimates[chosen]), holds=is_kept)
        if is_kept:
            return vector
        failed.append(vector)
        may_hold &= fleets.exceed(vector)
    return None


class CandidateFleets:
    """C fleets, given as workers per option (C, J). Each has only a few of many options, so only counts above
    0 are stored, as one entry for each fleet and option, which makes the methods much quicker.
    """

    def __init__(self, options: Sequence[Option], counts: CountArray) -> None:
        roles = get_args(Role)
        self.fleets = len(counts)
        # For each entry: the number of the fleet, that of the option, and the count of workers.
        self.fleet, self.option = np.nonzero(counts)
        self.count = counts[self.fleet, self.option]
        role = np.array([roles.index(option.role) for option in options])
        self.fleet_and_role = self.fleet * len(roles) + role[self.option]

    def estimate_shares(self, learned_shares: Shares) -> Shares:
        """The share of the traffic (C,) that each fleet is expected to serve; `learned_shares` (J,) holds
        that of one worker of each option.
        """
        roles = len(get_args(Role))
        served = np.bincount(
            self.fleet_and_role, self.count * learned_shares[self.option], minlength=roles * self.fleets
        )
        mixed, prefill, decode = served.reshape(self.fleets, roles).T
        return np.asarray(mixed + np.minimum(prefill, decode))

    def exceed(self, vector: CountArray) -> npt.NDArray[np.bool_]:
        """Whether each fleet (C,) has more workers of some option than the fleet `vector` (J,)."""
        is_more = self.count > vector[self.option]
        return np.bincount(self.fleet[is_more], minlength=self.fleets) > 0


def _learn(
    learned_shares: Shares, alike: npt.NDArray[np.bool_], vector: CountArray, estimate: float, *, holds: bool
) -> None:
    """Correct the shares `learned_shares` (J,) after a simulation of the fleet `vector` (J,), whose estimate
    was `estimate`. `alike` (J, J) marks options of the same role and hardware.
    """
    target = 1 + MARGIN_FRAC if holds else 1 - MARGIN_FRAC
    is_wrong = estimate < target if holds else estimate > target
    if is_wrong:
        weights = np.where(vector > 0, 1.0, ALIKE_FRAC * alike[vector > 0].any(axis=0))
        learned_shares *= (target / estimate) ** (LEARNING_RATE * weights)


def improve_nearby(
    best: fleet_counts.Counts, limits: FleetLimits, oracle: Oracle, may_go_on: Callable[[], bool]
) -> fleet_counts.Counts:
    """The cheapest fleet that this search finds near `best`, or `best` itself. In a neighbour each pool has
    up to two workers fewer, or one more (NEARBY).

    More workers can hurt, so a neighbour may hold although a fleet with more workers fails. The most
    expensive of the cheaper neighbours is simulated first. If a neighbour holds, the search goes on from it.
    """
    simulated: set[fleet_counts.NamedCounts] = set()
    while True:
        value = fleet_counts.objective_of(best)
        neighbours = []
        for changes in itertools.product(NEARBY, repeat=len(best)):
            changed = [(option, n + more) for (option, n), more in zip(best, changes, strict=True)]
            neighbours.append(tuple((option, n) for option, n in changed if n > 0))
        cheaper = [
            counts
            for counts in neighbours
            if fleet_counts.objective_of(counts) < value * (1 - ROUNDING)
            and fleet_counts.names_of(counts) not in simulated
            and fleet_counts.names_of(counts) not in oracle.verdicts
            and fleet_counts.can_serve(fleet_counts.options_of(counts))
            and fleet_counts.is_within(limits, counts)
        ]
        for counts in sorted(cheaper, key=lambda counts: -fleet_counts.objective_of(counts)):
            if not may_go_on():
                return best
            simulated.add(fleet_counts.names_of(counts))
            if oracle.holds(counts):
                best = counts
                break
        else:
            return best
