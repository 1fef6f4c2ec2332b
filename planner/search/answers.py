"""The three answers: the cheapest fleet on paper, in production, and with a loss.

    on paper      the SLO is kept on the traffic and with the step times as they are written
    production    ... in the share of futures that `safety: kept_in` asks for
    with a loss   ... in that share after the loss of any one worker

Production is searched for by production.py on futures that it sees, and tested on others until Wald's test
(simulator/repeats.py) decides: whether the share of futures that it keeps is above TEST_BELOW less than what
was asked. Of fleets that cost the same, or up to NEAR_FRAC more, the one that holds furthest is taken.
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

TEST_BELOW = 0.05  # under the share asked for, and
TEST_ABOVE = 0.5  # of the way from it to all: between these the test decides
TEST_REQUESTS, TEST_LEAST, TEST_MOST = 6_000_000, 28, 200
AT_ONCE, MOST_AT_ONCE = 4, 32  # futures that a test simulates before it looks at the clock: so many requests,
AT_ONCE_REQUESTS = 1_000_000  # within these
BESIDE_REQUESTS, BESIDE_LEAST = 200_000, 10
BESIDE_FUTURES = 32  # of those tested at most, in which the fleet that stands a loss is simulated
LOSS_FUTURES = 2 * HARDEST  # beside those that may be missed in which one that stands a loss is looked for
LOSS_SEARCH = LEAST_SEARCH / 2  # simulated requests that each of its searches may cost
AGAIN_FRAC = 0.15  # above one that failed: what is dearer is searched for again
TRIES = 4  # tests; what failed one joins the futures, and the fleet grows until it keeps enough of them
NEAR_FRAC = 0.01
NEARLY, MOST_NEARLY = 2, 4  # futures too many, and fleets tested that miss no more,
MOST_LOOKED = 64  # of so many
BESIDE_WORKERS, MOST_OTHERS, MOST_WAYS = 2, 4, 1_000  # of other types, beside production, that stand a loss
MOVED, MOST_MOVED = 2, 4  # workers more or fewer of up to so many machines, in a fleet that stands a loss
MOST_NEAR, NEAR_EFFORT = 16, 1_000_000  # fleets of about one price among which the roomiest is looked for


@dataclass(frozen=True, slots=True, eq=False)
class Production:
    """The fleet that is to be run, the answers beside it, and whether it passed its test.

    `with_loss` is the fleet that stands the loss of any worker, None where none was found or looked for.
    `trial` has the futures of its search and of that test, for other routers of the same fleet; None
    on paper.
    `on_paper` says why there is no fleet for production, where `best` is the cheapest on paper.
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
    """Fleets in futures that no search has seen, from the number `first` on."""

    oracle: Oracle
    futures: Futures
    safety: Safety
    first: int
    out_of_time: Callable[[], bool]

    @property
    def beside(self) -> int:
        """In how many futures the fleets beside production are simulated."""
        return int(np.clip(BESIDE_REQUESTS // len(self.oracle.trace), BESIDE_LEAST, BESIDE_FUTURES))

    def run(self, counts: Counts) -> KeptIn:
        """Until it is decided, or can no longer be passed; TEST_MOST futures at most."""
        most = int(np.clip(TEST_REQUESTS // len(self.oracle.trace), TEST_LEAST, TEST_MOST))
        kept, number, said = 0, 0, self._said(0, 0)
        may_pass = self._said(most, most).decision == "holds"
        at_once = int(np.clip(AT_ONCE_REQUESTS // len(self.oracle.trace), AT_ONCE, MOST_AT_ONCE))

        def is_over(kept: int, number: int) -> bool:
            is_hopeless = may_pass and self._said(kept + most - number, most).decision != "holds"
            return number >= most or self._said(kept, number).decision != "open" or is_hopeless

        while not is_over(kept, number) and not self.out_of_time():
            sure = 1  # futures that are asked whatever the others say
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
        """The same test of fleets that work by these policies."""
        pinning = self.oracle.pinning if ROUTING[policies.routing].pins else None
        oracle = replace(self.oracle, policies=policies, of_pairs=None, pinning=pinning)
        return replace(self, oracle=oracle)

    def of(
        self, counts: Counts, number: int, *, after_loss: bool = False, enough: int | None = None
    ) -> KeptIn:
        """In the first so many of them, fewer where the time ends before, or it is sure whether `enough` of
        all are kept.
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
        """Whether the fleet holds in each of these futures."""

        def holds(number: int) -> bool:
            return oracle.within_future(self.futures[self.first + number]).holds([counts])[0]

        return of_each(holds, numbers)

    def _said(self, kept: int, number: int) -> KeptIn:
        share = self.safety.kept_in_frac
        few, most = share - TEST_BELOW, share + TEST_ABOVE * (1 - share)
        return KeptIn(kept, number, few, most, decision(kept, number, few, most))


def is_passed(kept_in: KeptIn, safety: Safety) -> bool:
    return kept_in.decision == "holds" and kept_in.kept_frac >= safety.kept_in_frac - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """The fleet for production, how it did in futures that no search has seen, the last question asked, and
    the scale model that was searched where that is large.
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
        """In how many futures a fleet is kept that works by these policies, and whether those are enough: it
        must pass the same test and, where it does worse there than the plan itself, hold in as many of the
        futures of the search as a search under these policies asks for. The first that are too few are what
        is told.
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
    """The cheapest fleet found that passes its test, or that of the last try; None where the time was over.

    Raises InfeasibleError where no fleet within the limits was found that keeps the SLO in enough futures.
    """
    if (idle := idle_misses(problem)) is not None:
        raise out_of_reach_in_futures(idle)
    model = scale_model(problem, paper.best)
    found = None if model is problem else _tried(problem, model, paper, start)
    if found is not None or problem.out_of_time():
        return found
    return _tried(problem, problem, paper, start)


def _tried(problem: Problem, model: Problem, paper: Found, start: Sequence[Fleet]) -> Tried | None:
    """As `tried`, searched on a scale model of the question, or on the question itself; None also where the
    model has no fleet.
    """
    safety, asked, first = problem.task.safety, in_production(model), 0
    asked = replace(asked, oracle=replace(asked.oracle, until=problem.deadline))
    found: Tried | None = None
    assert safety is not None and problem.tested is not None and model.tested is not None
    futures = asked.oracle.futures
    stage = f"production: the cheapest fleet that keeps the SLO in most of {len(futures)} futures"
    problem.progress(Stage(stage, "production"))
    asked, least = cheapest_kept(asked, paper, start)
    is_searched = True
    for attempt in range(TRIES):
        if least is None and (model is not problem or problem.out_of_time()):
            return found
        if least is None:
            raise unreachable(asked, paper)
        problem.progress(Stage("production: on futures that the search has not seen", "test"))
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
    """Workers are taken away, the dearest first, while the fleet holds in enough futures and passes its test:
    what grew by twice as many each time may have grown too far. As many as one of a scale model stands for.
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
    """Of fleets at about the price of `best` the one that holds furthest, with as few workers as pass the
    test, and how it did there.
    """
    best = _roomier(asked, paper, best)
    return _shrunk(asked, test, best, test.run(best))


def tested_alone(problem: Problem, paper: Found, fleet: Fleet) -> Tried | None:
    """How a fleet that is known to keep enough of the futures that a search sees does in others, or one of
    about its price that holds further; None where this question has no such workers.
    """
    counts = counts_of(fleet, paper.level0.options)
    if not counts:
        return None
    assert problem.task.safety is not None and problem.tested is not None
    problem.progress(Stage("production: on futures that the search has not seen", "test"))
    asked = in_production(problem)
    asked = replace(asked, oracle=replace(asked.oracle, until=problem.deadline))
    test = Test(problem.oracle, problem.tested, problem.task.safety, 0, problem.out_of_time)
    best = in_time(partial(_roomier, asked, paper, counts), counts)
    best, kept_in = _shrunk(asked, test, best, test.run(best))
    return Tried(best, kept_in, asked, test)


def production(problem: Problem, paper: Found) -> Production | None:
    """The three answers; `paper` is the cheapest fleet on what is written. None where the time was over.

    Raises InfeasibleError as `tried` does.
    """
    found = tried(problem, paper)
    return None if found is None else with_answers(problem, paper, found)


def with_answers(problem: Problem, paper: Found, found: Tried) -> Production:
    """The fleet for production with the answers beside it; one that stands a loss is looked for within the
    limits of `found.asked`.
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
    """As `production`; where no fleet keeps enough futures the cheapest on paper, and why it is that one."""
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
    """In the futures that production was searched in, and the fleet on paper was not; beside a scale model in
    the first ones of the test, as those it was searched in are drawn as a whole for nothing else.
    """
    assert problem.searched is not None
    if found.searched.oracle.one_in > 1:
        return found.test.of(paper.best, found.test.beside)
    return replace(found.test, futures=problem.searched, first=0).of(paper.best, problem.searched.count)


def _if_cheaper(found: Tried, lossy: Counts | None) -> Tried:
    """The fleet that stands a loss where it costs no more than what was found, and passes the test: with as
    few workers as do where it costs less, as it is where it costs the same, as in nodes that are paid anyway.
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
    """Cheaper fleets that miss a few too many of the futures that the search has seen and hold on paper, the
    cheapest first, MOST_NEARLY at most. MOST_LOOKED are looked at, the dearest first: a search that refuted
    them has simulated most of what they miss.
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
    """A warning where production was asked for and the word certified is not earned."""
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
    """No fleet within the limits keeps enough; the largest share that one does, and its price."""
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
        f"futures; the most that one does is {100 * kept_frac:.0f} %, for {paid(asked, best):.2f} {unit} (on "
        f"paper: {paid(asked, paper.best):.2f} {unit})",
        kind="capacity",
        constraint="safety: kept_in",
        relaxation=f"safety: {{kept_in: {int(100 * kept_frac) / 100:g}}}, more stock, or safety: none",
        is_proved=False,
        most_kept=MostKept(wanted, kept_frac, paid(asked, best), paid(asked, paper.best), unit),
    )


def _fewest(most: int, oracle: Oracle, counts: Counts, count: int) -> int:
    """Of the futures that a fleet misses, known to be `most` at most."""
    return min(most, oracle.missed(counts, count))


def _with_a_loss(production: Tried, paper: Found) -> tuple[Answered, Counts | None]:
    """Production with one worker more of each machine stands any loss; searched is what does and costs less:
    with fewer of them beside owned GPUs that idle, and fleets that are known; with one worker type per pool;
    with a few workers more or fewer than production, then with a few of other types beside it.

    First the futures are given up that are hardest for production, so that one simulation refutes a fleet.
    Of a question that is searched on a scale model, which cannot tell one worker, nothing else is looked for,
    nor how far it holds.
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
    """The cheapest of: production with a worker more of each machine; the same and owned GPUs that idle, with
    as few as stand a loss; the fleet on paper with a worker more; MOST_OTHERS that keep enough of `asked`.
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
    """The cheapest fleet found that stands a loss and has up to MOVED workers more or fewer of each machine
    of production, or of owned GPUs that it leaves idle. Of those that cost less than what is known only the
    largest are tried: if one fails, so do all below it.
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
    return {option.role for option, _ in counts}


def _largest(vectors: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those to which none of the others adds workers alone."""
    every = np.array(vectors)
    return [
        vector for vector, row in zip(vectors, every, strict=True) if (every >= row).all(axis=1).sum() == 1
    ]


def _with_other_types(lossy: Problem, paper: Found, best: Counts, known: Counts | None) -> Counts | None:
    """The cheapest fleet that stands a loss of these: production with a worker more of each pool, or up to
    BESIDE_WORKERS of another GPU or degree in its role, that cost less than what is known. MOST_OTHERS are
    tried.
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
    fleet = problem.oracle.fleet(counts)
    value, paid_usd_per_h = paid(problem, counts), bill(fleet).usd_per_h
    return Answered(name, bought(fleet), value, fleet.price_usd_per_h, kept_in, paid_usd_per_h=paid_usd_per_h)


def _drawn(problem: Problem, best: Counts, searched: Oracle) -> FuturesDrawn:
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
    """Of fleets at about this price the one that holds furthest; `best` where none beats it. How far they
    hold is asked first, as whether they keep enough futures takes many more simulations.
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
    """Fleets that were found to hold, in some futures at least."""
    for fleet, holds in list(problem.oracle.told.items()):
        counts = counts_named(fleet, paper.level0.options) if holds else None
        if counts and problem.allows(counts):
            yield counts


def _near(problem: Problem, paper: Found, best: Counts) -> Iterator[Counts]:
    """The same GPUs with other settings of the engine, then fleets that hold on paper at about this price."""
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
