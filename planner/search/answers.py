"""The three answers: the cheapest fleet on paper, in production, and with a loss.

    on paper      the fleet keeps the SLO on the traffic and with the step times as they are written
    production    the fleet keeps the SLO in the share of scenarios that `safety: kept_in` asks for
    with a loss   the fleet does so after the loss of any one worker

production.py searches for the production fleet in scenarios that it sees. The fleet is then tested in other
scenarios until Wald's test (simulator/repeats.py) decides whether the share of scenarios that it keeps is
more than TEST_BELOW_FRAC below the required share. Of fleets whose prices differ by at most LIKE_PRICE_FRAC
the one with the most headroom is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.documents.facts import (
    Answered,
    AnswerName,
    FuturesDrawn,
    IdleMisses,
    KeptIn,
    NotCertified,
    TooFewKept,
)
from planner.documents.safety import Safety
from planner.errors import InfeasibleError, MostKept
from planner.fleet import Fleet, Policies
from planner.policies import ROUTING
from planner.search.best_fleet import Found, search_again
from planner.search.beyond import best_settings
from planner.search.bill import bill, bought
from planner.search.fleets import (
    FEWER_FRAC,
    Counts,
    by_gpu,
    counts_named,
    counts_of,
    in_order,
    named,
    objective,
)
from planner.search.futures import Futures, drawn_by
from planner.search.headroom import ends, holds_with
from planner.search.idle_futures import idle_misses, out_of_reach_in_futures
from planner.search.one_pool import StoppedError, in_time
from planner.search.options import OBJECTIVE_UNITS, hardware
from planner.search.oracle import Oracle
from planner.search.owned import of_machines, one_more, owned_beside, owned_first, paid, thinned, with_idle
from planner.search.problem import Problem
from planner.search.production import (
    HARDEST,
    LEAST_SEARCH,
    cheaper_kept,
    cheapest_kept,
    grown,
    in_most,
    in_production,
    limited,
    may_miss,
    with_more,
)
from planner.search.scale_model import at_full_size, scale_model
from planner.search.stages import Stage
from planner.search.waves import of_each
from planner.simulator.repeats import decision
from planner.traffic.redraw import block_s
from planner.traffic.scaling import SAME_FRAC

# Wald's test decides between two shares of kept scenarios: the lower lies this far below the required share.
TEST_BELOW = 0.05
# The upper share of the test lies this part of the way from the required share to 1.
TEST_ABOVE = 0.5
# A test may simulate this many requests in all, in at least 28 and at most 200 scenarios.
TEST_REQUESTS, TEST_LEAST, TEST_MOST = 6_000_000, 28, 200
# A test simulates 4 to 32 scenarios before it looks at the clock again, by the length of the trace.
AT_ONCE, MOST_AT_ONCE = 4, 32
# The scenarios of one such batch have about this many requests together.
AT_ONCE_REQUESTS = 1_000_000
# The fleets on paper and with a loss are simulated with about this many requests, in at least 10 scenarios.
BESIDE_REQUESTS, BESIDE_LEAST = 200_000, 10
# The fleets on paper and with a loss are simulated in at most this many scenarios.
BESIDE_FUTURES = 32
# A fleet with a loss is searched for in this many scenarios more than it may miss.
LOSS_FUTURES = 2 * HARDEST
# Each search for a fleet with a loss may simulate this many requests.
LOSS_SEARCH = LEAST_SEARCH / 2
# A fleet grown after a failed test is searched for again where its price rose by more than this share.
AGAIN_FRAC = 0.15
# At most this many tests are run. After each failed test its scenarios join the search, and the fleet grows.
TRIES = 4
# Fleets whose prices differ by at most this share count as equally expensive.
NEAR_FRAC = 0.01
# A near-feasible fleet misses at most 2 scenarios more than it may; at most 4 such fleets are tested.
NEARLY, MOST_NEARLY = 2, 4
# At most this many fleets are checked for being near feasible.
MOST_LOOKED = 64
# Beside each production pool up to 2 workers of another type are combined to stand a loss. At most 4 of these
# fleets are simulated, out of at most 1,000 combinations.
BESIDE_WORKERS, MOST_OTHERS, MOST_WAYS = 2, 4, 1_000
# A fleet with a loss may differ from production by up to 2 workers of each of up to 4 machines.
MOVED, MOST_MOVED = 2, 4
# At most 16 fleets of like price are compared by headroom, with this much simulation effort.
MOST_NEAR, NEAR_EFFORT = 16, 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """The fleet that is to be run, the answers beside it, and whether it passed its test.

    `with_loss` is the fleet that stands the loss of any worker, None where none was found or none was looked
    for. `trial` keeps the scenarios of the search and of the test, so that the same fleet can be simulated
    under other routers; it is None where the fleet is the one on paper. `on_paper` says why there is no
    production fleet where `best` is the cheapest fleet on paper.
    """

    best: Counts
    answers: tuple[Answered, ...]
    futures: FuturesDrawn
    is_tested: bool
    trial: Tried | None
    with_loss: Counts | None = None
    on_paper: TooFewKept | IdleMisses | None = None


@dataclass(slots=True, eq=False)
class Test:
    """A test of fleets in scenarios that no search has seen, those with the number `first` and above."""

    oracle: Oracle
    futures: Futures
    safety: Safety
    first: int
    out_of_time: Callable[[], bool]

    @property
    def beside(self) -> int:
        """The number of scenarios in which the fleets on paper and with a loss are simulated."""
        return int(np.clip(BESIDE_REQUESTS // len(self.oracle.trace), BESIDE_LEAST, BESIDE_FUTURES))

    def run(self, counts: Counts) -> KeptIn:
        """Simulate the fleet in one scenario after the other until the test decides, cannot be passed any
        more, or has used up its scenarios or the time.
        """
        most = int(np.clip(TEST_REQUESTS // len(self.oracle.trace), TEST_LEAST, TEST_MOST))
        kept, number, said = 0, 0, self._said(0, 0)
        may_pass = self._said(most, most).decision == "holds"
        at_once = int(np.clip(AT_ONCE_REQUESTS // len(self.oracle.trace), AT_ONCE, MOST_AT_ONCE))

        def is_over(kept: int, number: int) -> bool:
            is_hopeless = may_pass and self._said(kept + most - number, most).decision != "holds"
            return number >= most or self._said(kept, number).decision != "open" or is_hopeless

        while not is_over(kept, number) and not self.out_of_time():
            # `sure_count` scenarios are needed whatever the first of them say, so all are simulated at once.
            sure = 1
            while (
                sure < at_once
                and not is_over(kept, number + sure)
                and not is_over(kept + sure, number + sure)
            ):
                sure += 1
            kept += sum(self._hold(self.oracle, counts, range(number, number + sure)))
            number += sure
            said = self._said(kept, number)
        return said

    def under(self, policies: Policies) -> Test:
        """The same test of fleets with these policies."""
        pinning = self.oracle.pinning if ROUTING[policies.routing].pins else None
        oracle = replace(self.oracle, policies=policies, of_pairs=None, pinning=pinning)
        return replace(self, oracle=oracle)

    def of(
        self, counts: Counts, number: int, *, after_loss: bool = False, enough: int | None = None
    ) -> KeptIn:
        """Count in how many of the first `number` scenarios the fleet keeps the SLO.

        The count stops early where the time is over, and as soon as it is certain whether `enough` of all are
        kept.
        """
        oracle = replace(self.oracle, spare_workers=1) if after_loss else self.oracle
        kept = asked = 0
        while asked < number and not (asked and self.out_of_time()):
            if enough is not None and not kept < enough <= kept + number - asked:
                break
            at_once = AT_ONCE if enough is None else min(AT_ONCE, enough - kept)
            some = range(asked, min(asked + at_once, number))
            kept, asked = kept + sum(self._hold(oracle, counts, some)), some.stop
        return replace(self._said(kept, asked), after_loss=after_loss)

    def _hold(self, oracle: Oracle, counts: Counts, numbers: Sequence[int]) -> list[bool]:
        """Whether the fleet keeps the SLO in each of these scenarios."""

        def holds(number: int) -> bool:
            return oracle.within_future(self.futures[self.first + number]).holds([counts])[0]

        return of_each(holds, numbers)

    def _said(self, kept: int, number: int) -> KeptIn:
        share = self.safety.kept_in_frac
        few, most = share - TEST_BELOW, share + TEST_ABOVE * (1 - share)
        return KeptIn(kept, number, few, most, decision(kept, number, few, most))


def is_passed(kept_in: KeptIn, safety: Safety) -> bool:
    """Whether the test decided for the fleet, and the share that it kept is the required one."""
    return kept_in.decision == "holds" and kept_in.kept_frac >= safety.kept_in_frac - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A fleet for production with the result of its test, the problem in the scenarios of its last search,
    and the scale model that was searched where the problem is large.
    """

    best: Counts
    kept_in: KeptIn
    asked: Problem
    test: Test
    model: Problem | None = None

    @property
    def searched(self) -> Problem:
        return self.asked if self.model is None else self.model

    def kept_under(self, policies: Policies, fleet: Fleet) -> tuple[KeptIn, bool]:
        """In how many scenarios the fleet is kept with these policies, and whether that is enough.

        The fleet must pass the same test. Where it does worse in the test than the plan itself, it must also
        keep the SLO in as many of the search's scenarios as a search with these policies requires. The
        returned count is that of the first check that fails.
        """
        test, futures = self.test.under(policies), self.searched.searched
        counts = test.oracle.counts(fleet)
        kept_in = test.run(counts)
        if futures is None or not is_passed(kept_in, test.safety):
            return kept_in, False
        if kept_in.kept_frac >= self.kept_in.kept_frac:
            return kept_in, True
        search = Test(self.searched.oracle.alone(), futures, test.safety, 0, test.out_of_time).under(policies)
        enough = futures.count - may_miss(test.safety, futures.count)
        seen = search.of(counts, futures.count, enough=enough)
        is_kept = seen.kept >= enough
        return (kept_in if is_kept else seen), is_kept


def tried(problem: Problem, paper: Found, start: Sequence[Fleet] = (), *, tests: int = TRIES) -> Tried | None:
    """The cheapest fleet found that passes its test, or the fleet of the last test; None where the time was
    over.

    Raises InfeasibleError where no fleet within the limits was found that keeps the SLO in enough scenarios.
    """
    if (idle := idle_misses(problem)) is not None:
        raise out_of_reach_in_futures(idle)
    model = scale_model(problem, paper.best)
    found = None if model is problem else _tried(problem, model, paper, start)
    if found is not None or problem.out_of_time():
        return found
    return _tried(problem, problem, paper, start)


def _tried(problem: Problem, model: Problem, paper: Found, start: Sequence[Fleet]) -> Tried | None:
    """As `find_production_fleet`, searched on the scale model `model`, which may be the problem itself; None
    also where the scale model has no fleet.
    """
    safety, asked, first = problem.task.safety, in_production(model), 0
    asked = replace(asked, oracle=replace(asked.oracle, until=problem.deadline))
    found: Tried | None = None
    assert safety is not None and problem.tested is not None and model.tested is not None
    futures = asked.oracle.futures
    stage = f"production: the cheapest fleet that keeps the SLO in most of {len(futures)} scenarios"
    problem.progress(Stage(stage, "production"))
    asked, least = cheapest_kept(asked, paper, start)
    is_searched = True
    for attempt in range(TRIES):
        if least is None and (model is not problem or problem.out_of_time()):
            return found
        if least is None:
            raise unreachable(asked, paper)
        problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
        best = in_time(partial(_roomier, asked, paper, least), least) if is_searched else least
        test = Test(problem.oracle, problem.tested, safety, first, problem.out_of_time)
        kept_in = test.run(best)
        may_cost_less = attempt == 0 and (asked.oracle.one_in == 1 or is_passed(kept_in, safety))
        for counts in in_time(partial(_nearly, asked, paper, best), []) if may_cost_less else ():
            if is_passed(said := test.run(counts), safety):
                best, kept_in = counts, said
                break
        best, kept_in = _shrunk(asked, test, best, kept_in)
        found = Tried(best, kept_in, at_full_size(problem, asked), test, asked)
        if is_passed(kept_in, safety) or attempt + 1 == TRIES or problem.out_of_time():
            break
        futures = (*futures, *(model.tested[first + i] for i in range(kept_in.futures)))
        asked = in_most(model, futures, may_miss(safety, len(futures)))
        beside = owned_beside(asked, paper.level0, best)
        asked, least = in_time(partial(grown, asked, best, beside), (asked, None))
        is_searched = least is None or objective(least) > (1 + AGAIN_FRAC) * objective(best)
        if is_searched:
            least = cheaper_kept(asked, paper, least, start, refuted=objective(best))
        first += kept_in.futures
    return found


def _shrunk(asked: Problem, test: Test, best: Counts, kept_in: KeptIn) -> tuple[Counts, KeptIn]:
    """Remove workers, the most expensive first, while the fleet keeps the SLO in enough scenarios and passes
    its test.

    Growth doubles its step each time, so a fleet may have grown too far. In a scale model one worker stands
    for `downscale` workers, and as many are removed at once.
    """
    step = asked.oracle.one_in
    while is_passed(kept_in, test.safety):
        for k in sorted(range(len(best)), key=lambda k: -best[k][0].objective):
            fewer = with_more(best, -step, [k])
            if best[k][1] <= step or not in_time(partial(asked.oracle.holds, [fewer]), [False])[0]:
                continue
            if is_passed(said := test.run(fewer), test.safety):
                best, kept_in = fewer, said
                break
        else:
            break
    return best, kept_in


def tested(asked: Problem, paper: Found, best: Counts, test: Test) -> tuple[Counts, KeptIn]:
    """Of fleets at about the price of `best` the one with the most headroom, with as few workers as pass the
    test, and the result of its test.
    """
    best = _roomier(asked, paper, best)
    return _shrunk(asked, test, best, test.run(best))


def tested_alone(problem: Problem, paper: Found, fleet: Fleet) -> Tried | None:
    """The test of a fleet that is known to keep enough of the search's scenarios, or of a fleet at about its
    price with more headroom; None where the problem does not have such workers.
    """
    counts = counts_of(fleet, paper.level0.options)
    if not counts:
        return None
    assert problem.task.safety is not None and problem.tested is not None
    problem.progress(Stage("production: on scenarios that the search has not seen", "test"))
    asked = in_production(problem)
    asked = replace(asked, oracle=replace(asked.oracle, until=problem.deadline))
    test = Test(problem.oracle, problem.tested, problem.task.safety, 0, problem.out_of_time)
    best = in_time(partial(_roomier, asked, paper, counts), counts)
    best, kept_in = _shrunk(asked, test, best, test.run(best))
    return Tried(best, kept_in, asked, test)


def production(problem: Problem, paper: Found) -> Production | None:
    """The three answers, where `paper` is the cheapest fleet on paper; None where the time was over.

    Raises InfeasibleError as `find_production_fleet` does.
    """
    found = tried(problem, paper)
    return None if found is None else with_answers(problem, paper, found)


def with_answers(problem: Problem, paper: Found, found: Tried) -> Production:
    """The production fleet with the answers beside it. The fleet with a loss is searched for within the
    limits of the trial's problem.
    """
    answer, lossy = None, None
    if not problem.oracle.has_losses and not problem.out_of_time():
        answer, lossy = _with_a_loss(found, paper)
        found = _if_cheaper(found, lossy)
    best, kept_in, on_paper = found.best, found.kept_in, _kept_on_paper(problem, paper, found)
    how_far = _bought if found.searched.oracle.one_in > 1 else _answered
    answers = (
        how_far(problem, "on-paper", paper.best, on_paper),
        _answered(problem, "production", best, kept_in),
        *([] if answer is None else [answer]),
    )
    assert problem.task.safety is not None
    is_tested = is_passed(kept_in, problem.task.safety)
    drawn = _drawn(problem, best, found.searched.oracle)
    return Production(best, answers, drawn, is_tested, found, lossy)


def production_or_paper(problem: Problem, paper: Found) -> Production | None:
    """As `plan_production`; the cheapest fleet on paper, with the reason, where none keeps enough."""
    try:
        return production(problem, paper)
    except InfeasibleError as error:
        idle = idle_misses(problem)
        if idle is None and error.most_kept is None:
            raise
        why = TooFewKept(error.most_kept) if idle is None and error.most_kept is not None else idle
    assert problem.searched is not None and problem.task.safety is not None
    test = Test(problem.oracle, problem.searched, problem.task.safety, 0, problem.out_of_time)
    is_small = scale_model(problem, paper.best) is problem
    kept_in = test.of(paper.best, problem.searched.count if is_small else test.beside)
    answers = (
        _answered(problem, "on-paper", paper.best, kept_in),
        Answered("production", (), None, None, None),
    )
    drawn = _drawn(problem, paper.best, in_production(problem).oracle)
    return Production(paper.best, answers, drawn, is_tested=False, trial=None, on_paper=why)


def _kept_on_paper(problem: Problem, paper: Found, found: Tried) -> KeptIn:
    """In how many scenarios the fleet on paper keeps the SLO.

    These are the scenarios in which production was searched. Beside a scale model they are the first ones of
    the test, because the search's scenarios at full size would have to be drawn for this count alone.
    """
    assert problem.searched is not None
    if found.searched.oracle.one_in > 1:
        return found.test.of(paper.best, found.test.beside)
    return replace(found.test, futures=problem.searched, first=0).of(paper.best, problem.searched.count)


def _if_cheaper(found: Tried, lossy: Counts | None) -> Tried:
    """The trial of the fleet with a loss, where that fleet costs no more than the production fleet and passes
    the test; else the given trial.

    A fleet with a loss that costs less is cut down to as few workers as pass the test. One that costs the
    same is kept whole: its workers stand on nodes that are paid for anyway.
    """
    if lossy is None or objective(lossy) > objective(found.best) * (1 + 2 * FEWER_FRAC):
        return found
    is_less = objective(lossy) < objective(found.best) * (1 - 2 * FEWER_FRAC)
    said = found.test.run(lossy)
    if not is_passed(said, found.test.safety):
        return found
    best, kept_in = _shrunk(found.searched, found.test, lossy, said) if is_less else (lossy, said)
    return replace(found, best=best, kept_in=kept_in)


def _nearly(asked: Problem, paper: Found, best: Counts) -> list[Counts]:
    """Cheaper fleets that hold on paper and miss slightly too many of the search's scenarios, cheapest first,
    at most MOST_NEAR_FEASIBLE.

    At most MOST_NEAR_CHECKED fleets are checked, the most expensive first. The search that refuted these
    fleets has simulated most of the scenarios that they miss, so the check is cheap.
    """
    asked = replace(asked, most_effort=asked.oracle.effort() + NEAR_EFFORT)
    below, most = objective(best) * (1 - NEAR_FRAC), asked.oracle.may_miss + NEARLY
    known = [counts_named(fleet, paper.level0.options) for fleet in list(asked.oracle.told)]
    cheaper = [counts for counts in known if counts and paper.value < objective(counts) < below]
    as_written = asked.oracle.alone()
    found: list[Counts] = []
    for counts in sorted(cheaper, key=lambda counts: -objective(counts))[:MOST_LOOKED]:
        if asked.out_of_time():
            break
        is_near = asked.allows(counts) and asked.oracle.missed(counts, most) <= most
        if is_near and as_written.holds([counts])[0]:
            found.append(counts)
    return sorted(found, key=objective)[:MOST_NEARLY]


def not_certified(
    problem: Problem, made: Production | None
) -> tuple[NotCertified | TooFewKept | IdleMisses, ...]:
    """A warning where production was required and the plan cannot be called certified."""
    if (safety := problem.task.safety) is None:
        return ()
    if made is None:
        return (NotCertified(None, safety.kept_in_frac, have_spread=True),)
    if made.on_paper is not None:
        return (made.on_paper,)
    if made.is_tested and made.futures.have_spread:
        return ()
    kept_in = next(each.kept_in for each in made.answers if each.name == "production")
    return (NotCertified(kept_in, safety.kept_in_frac, made.futures.have_spread),)


def unreachable(asked: Problem, paper: Found) -> InfeasibleError:
    """The error that no fleet within the limits keeps enough scenarios, with the largest share that some
    fleet keeps and the price of that fleet, by bisection over the share.
    """
    assert asked.task.safety is not None
    count = len(asked.oracle.futures)
    best, low = paper.best, asked.oracle.may_miss
    high = in_time(lambda: asked.oracle.missed(paper.best, count), count)
    while high - low > 1 and not asked.out_of_time():
        middle = (low + high) // 2
        weaker = in_most(asked, asked.oracle.futures, middle)
        found = in_time(partial(search_again, weaker, [], is_mixed=False), None)
        if found is None:
            low = middle
        else:
            best, high = found, in_time(partial(_fewest, middle, weaker.oracle, found, count), middle)
    kept_frac, wanted = 1 - high / count, asked.task.safety.kept_in_frac
    unit = OBJECTIVE_UNITS[asked.task.objective]
    return InfeasibleError(
        f"safety: kept_in: no fleet within the limits was found that keeps the SLO in {100 * wanted:g} % of "
        f"scenarios; the most that one does is {100 * kept_frac:.0f} %, for {paid(asked, best):.2f} {unit} "
        f"(on paper: {paid(asked, paper.best):.2f} {unit})",
        kind="capacity",
        constraint="safety: kept_in",
        relaxation=f"safety: {{kept_in: {int(100 * kept_frac) / 100:g}}}, more stock, or safety: none",
        is_proved=False,
        most_kept=MostKept(wanted, kept_frac, paid(asked, best), paid(asked, paper.best), unit),
    )


def _fewest(most: int, oracle: Oracle, counts: Counts, count: int) -> int:
    """The number of scenarios that a fleet misses, which is known to be at most `most`."""
    return min(most, oracle.missed(counts, count))


def _with_a_loss(production: Tried, paper: Found) -> tuple[Answered, Counts | None]:
    """The answer "with a loss", and its fleet.

    Production with one more worker of each machine stands any loss. What costs less is searched for in this
    order: fewer workers on owned GPUs that idle, and known fleets; one worker type per pool; a few workers
    more or fewer than production; a few workers of other types beside production. The scenarios that
    production finds hardest are given up first, so that one missed scenario refutes a fleet.

    A scale model cannot tell one worker from none. So where one was searched, no other fleet with a loss is
    looked for, and its headroom is not computed.
    """
    asked = production.searched
    if asked.oracle.one_in > 1:
        more = one_more(asked, production.best)
        if not asked.allows(more):
            return Answered("with-a-loss", (), None, None, None), None
        said = production.test.of(more, production.test.beside, after_loss=True)
        return _bought(production.asked, "with-a-loss", more, said), more
    futures, may_miss = asked.oracle.futures, asked.oracle.may_miss
    hard = in_most(asked, futures[: may_miss + LOSS_FUTURES], may_miss)
    lossy = replace(hard, oracle=replace(hard.oracle, spare_workers=1))
    strict = in_most(lossy, lossy.oracle.futures[may_miss:], 0)
    least = objective(production.best)
    found = in_time(lambda: _spared(strict, asked, paper, production.best), None)
    if found is None or objective(found) > least * (1 + 2 * FEWER_FRAC):
        for question in (strict, lossy):
            found = cheaper_kept(question, paper, found, any_mix=False, most=LOSS_SEARCH, refuted=least)
        for look in (_moved, _with_other_types):
            found = in_time(partial(look, lossy, paper, production.best, found), found)
    if found is None:
        return Answered("with-a-loss", (), None, None, None), None
    kept_in = production.test.of(found, production.test.beside, after_loss=True)
    return _answered(lossy, "with-a-loss", found, kept_in), found


def _spared(lossy: Problem, asked: Problem, paper: Found, best: Counts) -> Counts | None:
    """The cheapest of these fleets that stand a loss: production with one more worker of each machine; the
    same with as few workers on idle owned GPUs as suffice; the fleet on paper with one more worker of each
    machine; and MOST_OTHER_FLEETS known fleets that keep enough scenarios.
    """
    lossy = limited(lossy, LOSS_SEARCH)
    more = one_more(asked, best)
    known = [more] if asked.allows(more) else []
    filled = with_idle(asked, paper.level0, more)
    is_more = sorted(named(filled)) != sorted(named(more))
    if is_more and asked.allows(filled) and lossy.oracle.holds([filled])[0]:
        known.append(owned_first(asked, thinned(filled, lossy)))
    below = min(map(objective, known), default=math.inf)
    told = [counts_named(fleet, paper.level0.options) for fleet, holds in asked.oracle.told.items() if holds]
    cheapest = sorted((each for each in told if each and asked.allows(each)), key=objective)
    likely = [each for each in cheapest if objective(each) > objective(best) * (1 + SAME_FRAC)]
    for counts in (one_more(asked, paper.best), *likely[:MOST_OTHERS]):
        is_open = objective(counts) < below and asked.allows(counts) and not lossy.out_of_time()
        if is_open and lossy.oracle.holds([counts])[0]:
            known.append(counts)
    return min(known, key=objective, default=None)


def _moved(lossy: Problem, paper: Found, best: Counts, known: Counts | None) -> Counts | None:
    """The cheapest fleet found that stands a loss and has up to MOST_WORKERS_CHANGED workers more or fewer
    than production of each machine, or of owned GPUs that production leaves idle.

    Only fleets that cost less than `known` and to which no other such fleet adds workers are simulated: if
    one fails, all smaller fleets fail too.
    """
    lossy = limited(lossy, LOSS_SEARCH)
    own = of_machines(best)
    idle = [(option, 0) for option, _ in owned_beside(lossy, paper.level0, best)]
    pools = [*own, *idle[: max(MOST_MOVED - len(own), 0)]]
    options = [option for option, _ in pools]
    ranges = [range(max(count - MOVED, 0), count + MOVED + 1) for _, count in pools]
    fleets: dict[tuple[int, ...], Counts] = {}
    for vector in itertools.islice(itertools.product(*ranges), MOST_WAYS):
        counts = owned_first(lossy, in_order(zip(options, vector, strict=True), paper.level0.options))
        if _roles(counts) == _roles(best) and lossy.allows(counts):
            fleets[vector] = counts
    while not lossy.out_of_time():
        below = math.inf if known is None else objective(known) * (1 - SAME_FRAC)
        fleets = {vector: counts for vector, counts in fleets.items() if objective(counts) < below}
        if not fleets:
            break
        vector = min(_largest([*fleets]), key=lambda vector: objective(fleets[vector]))
        if lossy.oracle.holds([fleets[vector]])[0]:
            known = owned_first(lossy, thinned(fleets[vector], lossy))
        else:
            fleets = {each: fleets[each] for each in fleets if np.any(np.array(each) > vector)}
    return known


def _roles(counts: Counts) -> set[str]:
    """The roles that these pools have."""
    return {option.role for option, _ in counts}


def _largest(vectors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other vector reaches in every component."""
    every = np.array(vectors)
    return [
        vector for vector, row in zip(vectors, every, strict=True) if (every >= row).all(axis=1).sum() == 1
    ]


def _with_other_types(lossy: Problem, paper: Found, best: Counts, known: Counts | None) -> Counts | None:
    """The cheapest fleet below the price of `known` that stands a loss and is production with one more worker
    of each pool, or with up to MOST_OTHER_WORKERS workers of another GPU or degree in that pool's role. At
    most MOST_OTHER_FLEETS are simulated.
    """
    settings = best_settings(lossy, paper.level0, {})
    ways = [
        [
            ((option, 1),),
            *(
                ((other, count),)
                for other in settings
                if other.role == option.role and hardware(other) != hardware(option)
                for count in range(1, BESIDE_WORKERS + 1)
            ),
        ]
        for option, _ in best
    ]
    below = math.inf if known is None else objective(known) * (1 - SAME_FRAC)
    fleets: list[Counts] = []
    for way in itertools.islice(itertools.product(*ways), MOST_WAYS):
        workers = dict(best)
        for option, more in itertools.chain(*way):
            workers[option] = workers.get(option, 0) + more
        fleets.append(owned_first(lossy, in_order(workers.items(), paper.level0.options)))
    fleets = [counts for counts in fleets if objective(counts) < below and lossy.allows(counts)]
    for counts in sorted(fleets, key=objective)[:MOST_OTHERS]:
        if lossy.out_of_time():
            break
        if lossy.oracle.holds([counts])[0]:
            return counts
    return known


def _answered(problem: Problem, name: AnswerName, counts: Counts, kept_in: KeptIn) -> Answered:
    """An answer with the fleet's headroom, which is left out where the time is over."""
    bought = _bought(problem, name, counts, kept_in)
    try:
        end = ends(problem.oracle, counts, before_each=lambda: _stop_in_time(problem))
    except StoppedError:
        return bought
    return replace(
        bought, headroom=end.headroom, breaks_by_traffic=end.by_traffic, breaks_by_steps=end.by_steps
    )


def _stop_in_time(problem: Problem) -> None:
    if problem.out_of_time():
        raise StoppedError


def _bought(problem: Problem, name: AnswerName, counts: Counts, kept_in: KeptIn) -> Answered:
    """An answer with the fleet's price and bill, without its headroom."""
    fleet = problem.oracle.fleet(counts)
    value, paid_usd_per_h = paid(problem, counts), bill(fleet).usd_per_h
    return Answered(name, bought(fleet), value, fleet.price_usd_per_h, kept_in, paid_usd_per_h=paid_usd_per_h)


def _drawn(problem: Problem, best: Counts, searched: Oracle) -> FuturesDrawn:
    """The fact that says how the scenarios were drawn and how many the search saw."""
    assert problem.task.safety is not None and problem.searched is not None
    trace = problem.searched.trace
    how = drawn_by(problem.task, trace)
    return FuturesDrawn(
        how,
        block_s(trace) if how == "blocks" else 0.0,
        problem.task.safety.growth_frac,
        all(option.type.latency.spread is not None for option, _ in best),
        len(searched.futures),
        searched.one_in,
    )


def _roomier(problem: Problem, paper: Found, best: Counts) -> Counts:
    """Of fleets at about this price the one with the most headroom; `best` where no other has more.

    Headroom is computed first, because checking whether a fleet keeps enough scenarios takes many more
    simulations. A fleet replaces `best` only if its headroom is a tenth larger.
    """
    if problem.out_of_time():
        return best
    problem = replace(problem, most_effort=problem.oracle.effort() + NEAR_EFFORT)
    end = ends(problem.oracle, best).headroom
    room, further = min(end.traffic_frac, end.steps_frac), list[Counts]()
    for counts in itertools.islice(_near(problem, paper, best), MOST_NEAR):
        beyond = room * 1.1 + SAME_FRAC
        if problem.out_of_time() or not holds_with(problem.oracle, counts, beyond):
            continue
        end = ends(problem.oracle, counts, least_frac=beyond).headroom
        further.append(counts)
        room = min(end.traffic_frac, end.steps_frac)
    return next((counts for counts in reversed(further) if problem.oracle.holds([counts])[0]), best)


def _held(problem: Problem, paper: Found) -> Iterator[Counts]:
    """Fleets that keep the SLO in some of the search's scenarios at least."""
    for fleet, holds in list(problem.oracle.told.items()):
        counts = counts_named(fleet, paper.level0.options) if holds else None
        if counts and problem.allows(counts):
            yield counts


def _near(problem: Problem, paper: Found, best: Counts) -> Iterator[Counts]:
    """Fleets at about this price: the same GPUs with other engine settings, then fleets that hold."""
    options = paper.level0.options
    alike = [
        [each for each in options if each.role == option.role and hardware(each) == hardware(option)]
        for option, _ in best
    ]
    counted = [count for _, count in best]
    seen = {named(best)}
    others = (tuple(zip(each, counted, strict=True)) for each in itertools.product(*alike))
    for counts in itertools.chain(others, _held(problem, paper)):
        is_near = all(
            abs(price(counts) - price(best)) <= NEAR_FRAC * price(best) for price in (objective, by_gpu)
        )
        if named(counts) not in seen and is_near and problem.allows(counts):
            seen.add(named(counts))
            yield counts
