"""The search for the best fleet: the loop between the master problem and the simulator.

    pose      question, trace -> worker types, limits, what the SLO obliges       (a Problem)
    search    level 0, exact (solvers/level0.py); beyond it, master with cuts     (what was Found)

A search may start from fleets that are known, and know what other searches simulated
(planner/studies/whatif.py).
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.task import Objective, Task
from planner.domain import KV_BLOCK_TOKENS, SPOT, Gpu, Limit, Llm, Slo
from planner.errors import BoundError, InfeasibleError, InputError
from planner.fleet import MAX_NUM_SEQS, Fleet, Policies, WorkerType
from planner.models.memory import kv_cache_tokens
from planner.obliged import Obliged, due, obliged, steady, usual
from planner.options import (
    Left,
    decode_options,
    floor_s,
    judged,
    mixed_options,
    prefill_options,
    unreachable,
    worker_types,
)
from planner.oracle import LEAST_EFFORT, Answers, Oracle, side_by_side
from planner.prefixes.hits import PrefixHits
from planner.prefixes.router_fit import fitted
from planner.simulator.replay import measured_window
from planner.solvers import assumed, master
from planner.solvers.demand import demand
from planner.solvers.level0 import (
    Bounded,
    Counts,
    Holds,
    Search,
    StoppedError,
    first_incumbent,
    largest_below,
    least_that_holds,
    objective,
    search_one_pool,
)
from planner.solvers.master import Limits, Option, bound, least_workers, promising
from planner.solvers.two_pools import search_two_pools
from planner.solvers.walk import every_mix, known, note_cheaper, walk
from planner.traffic.scaling import rescale, same_requests, window
from planner.traffic.sessions import nominal
from planner.traffic.trace import Trace, no_edges, spread
from planner.traffic.workload import Lengths, coarser, distinct_lengths, to_classes
from planner.units import show_s

Progress = Callable[[str], None]
BEYOND_REQUESTS = 4_000_000  # simulated requests that the search beyond level 0 may cost
BEYOND_MOST = 24  # fleets it may try at most
RATES_REQUESTS = 1_000_000  # requests of all the rates that stand for an interval of traffic
RATES_LEAST, RATES_MOST = 5, 41
DEEPER = (2, 4)  # pipeline stages, tried where nothing fits without
WALK_EFFORT = 4_000_000  # simulated requests that it may cost to simulate every cheaper fleet of level 0
FAR_SOONER = 8
MIX_EFFORT = 1_000_000  # ... or every cheaper fleet of any mix
ANY_REQUESTS = 20_000_000  # ... and fleets of several types, where level 0 has none that holds,
ANY_MOST = 100  # of which so many are tried at most,
ANY_SHARE = 0.6  # and none that is expected to carry less of the traffic
RELAXED = (1.05, 1.25, 1.6, 2.0, 3.0, 5.0)  # times what a limit cannot be below, tried in turn
RELAX_S = 20.0  # for so long at most
BOUND_SHARE = 0.25  # of the time that is left: the search needs the rest
BEYOND_SHARE = 0.9  # expected share of the traffic below which a fleet is not tried


def silent(_: str) -> None:
    """A progress reporter that reports nothing."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a search has come, in the objective's unit; None where nothing is known yet."""

    best: float | None
    bound: float | None
    simulations: int


Watch = Callable[[Standing], None]
"""Is told the standing after every simulation, from whichever thread ran it."""


def unwatched(_: Standing) -> None:
    """Lets the standings pass."""


def asked_traffic(trace: Trace, task: Task, *, seed: int) -> tuple[Trace, str]:
    """The requests that must be served, and a sentence on how they came out of the trace.

    Stamps of a coarse clock, as `read_trace(path, seed=None)` leaves them, are spread by the seed as well.
    Of an interval of traffic (robust) it is the upper end; `further_traffic` has the rest.
    """
    return _asked_at(trace, task, task.robust.traffic_frac, seed=seed)


def further_traffic(trace: Trace, task: Task, requests: Trace, *, seed: int) -> tuple[Trace, ...]:
    """What must be served beside `requests`, which is `asked_traffic` of this seed: `task.draws` draws, and
    of each all `rates_frac`, the highest first. Neighbouring rates that give the same requests count once.
    """
    found, last = [], requests
    for draw in range(task.draws):
        for frac in reversed(rates_frac(task, requests)):
            at, _ = _asked_at(trace, task, frac, seed=seed + draw)
            if draw == 1 and frac == task.robust.traffic_frac and same_requests(at, requests):
                raise InputError(
                    f"traffic: draws: {trace.name} is replayed as it is, so all {task.draws} draws are the "
                    "same; leave draws out, or ask for a rate that is not the trace's"
                )
            if not same_requests(at, last):
                found.append(at)
            last = at
    return tuple(found)


def rates_frac(task: Task, requests: Trace) -> tuple[float, ...]:
    """The rates that stand for an interval of traffic, evenly from end to end, as shares more than expected.

    A fleet may hold at both ends and fail between them: each rate draws other requests.
    """
    lowest, highest = task.robust.traffic_from_frac, task.robust.traffic_frac
    if lowest == highest:
        return (highest,)
    points = int(np.clip(RATES_REQUESTS // len(requests), RATES_LEAST, RATES_MOST))
    return tuple(np.linspace(lowest, highest, points).tolist())


def _asked_at(trace: Trace, task: Task, more_frac: float, *, seed: int) -> tuple[Trace, str]:
    asked = spread(trace, seed=seed)
    note = trace.name
    rate_rps = task.rate_rps
    if more_frac:
        rate_rps = (asked.rate_rps if rate_rps is None else rate_rps) * (1 + more_frac)
    if rate_rps is not None:
        asked = rescale(asked, rate_rps, how=task.scale, rng=np.random.default_rng(seed))
        note += f", scaled to {rate_rps:g} requests/s ({task.scale})"
    asked = window(asked, task.window or "whole")
    if (robust := task.robust).traffic_frac != robust.traffic_from_frac:
        note += (
            f", up to {100 * robust.traffic_frac:g} % more than expected (robust: sampled at "
            f"{len(rates_frac(task, asked))} rates, this is the highest)"
        )
    elif more_frac:
        note += f", {abs(100 * more_frac):g} % {'more' if more_frac > 0 else 'less'} than expected"
    if asked.after.size:
        asked = nominal(asked)  # a clock that was turned is off by its last bit
    note += f", {task.window or 'whole trace'}: {len(asked)} requests in {show_s(asked.duration_s)}"
    if not asked.duration_s > 0:
        instant = "one instant, if answers took no time" if asked.after.size else "one instant"
        raise InputError(
            f"{trace.name}: {len(asked)} request(s) at {instant}; a plan needs traffic over time"
        )
    return asked, note


@dataclass(frozen=True, slots=True)
class Problem:
    """What stays the same through all stages of one search."""

    task: Task
    llm: Llm
    slo: Slo
    slo_note: str | None  # how a relative SLO became seconds
    trace: Trace
    traffic_note: str
    longest_tokens: int
    lengths: Lengths
    hits: PrefixHits | None  # where prefix caches may be counted on
    gpus: tuple[Gpu, ...]
    types: tuple[WorkerType, ...]  # that hold the longest request: what the search ranges over
    left: tuple[Left, ...]
    limits: Limits
    oracle: Oracle
    obliged: Obliged  # under any policy: what bounds and level 0 start from
    deadline: float
    progress: Progress
    watch: Watch
    draws: tuple[Trace, ...] = ()  # beside `trace`, on which the SLO must be kept too
    lower: float | None = None  # what any fleet costs at least, None if none is within the limits
    bounded: bool = False  # `lower` has been looked for

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


@dataclass(frozen=True, slots=True)
class Found:
    """The best fleet, and how far the search came."""

    best: Counts
    value: float
    level0: Level0
    cuts: int
    beyond_exact: bool


def pose(
    task: Task,
    trace: Trace,
    catalog: Catalog,
    *,
    seed: int = 0,
    deadline: float = math.inf,
    progress: Progress = silent,
    watch: Watch = unwatched,
    answers: Answers | None = None,
    asked: tuple[Trace, str] | None = None,
    further: tuple[Trace, ...] | None = None,
) -> Problem:
    """The question, ready to be searched; `deadline` is on time.monotonic's clock.

    `answers` are those of earlier questions; `asked` and `further` are what `asked_traffic` and
    `further_traffic` gave for one of them, where the traffic is the same. Raises InputError, and
    InfeasibleError for what no number of workers could cure.
    """
    llm = catalog.llm(task.llm)
    requests, note = asked or asked_traffic(trace, task, seed=seed)
    draws = further_traffic(trace, task, requests, seed=seed) if further is None else further
    longest = max(int((each.input_tokens + each.output_tokens).max()) for each in (requests, *draws))
    if longest > llm.context_tokens:
        raise InputError(
            f"{trace.name}: its longest request has {longest} tokens (prompt + output), {llm.name} accepts "
            f"{llm.context_tokens}; drop such requests or choose an LLM with a longer context"
        )
    gpus = task.gpus(catalog)
    left: tuple[Left, ...] = ()
    for stages in (task.stages, DEEPER) if task.stages == (1,) else (task.stages,):
        types, others = worker_types(
            llm,
            gpus,
            catalog,
            longest,
            host_overhead_s=task.host_overhead_s,
            longer_frac=task.robust.step_times_frac,
            stages=stages,
            node_bytes_per_s=task.network.bandwidth_bytes_per_s,
            budgets=task.max_num_batched_tokens,
            seats=task.max_num_seqs,
        )
        left += others
        if types:
            break
    if not types:
        raise _no_room(llm, left)
    hits = _prefix_hits(task, requests)
    lengths = distinct_lengths(requests)
    slo, slo_note = _in_seconds(task, llm, lengths, catalog)
    broken = unreachable(slo, types, judged(slo, requests, hits.shared_tokens if hits else None))
    limits = Limits(task.stock, task.power_limit_w, task.cost_limit_usd_per_h, task.gpu_limit)
    spot = {gpu.name: terms for gpu in gpus if gpu.name.endswith(SPOT) and (terms := task.spot_terms(gpu))}
    oracle = Oracle(
        llm,
        requests,
        slo,
        task.network,
        Policies(),
        task.spare_workers,
        task.spare_nodes,
        spot,
        answers or Answers(),
    )
    problem = Problem(
        task,
        llm,
        slo,
        slo_note,
        requests,
        note,
        longest,
        lengths,
        hits,
        gpus,
        types,
        left,
        limits,
        oracle,
        obliged(slo, requests),
        deadline,
        progress,
        watch,
        draws,
    )
    if broken:
        raise _out_of_reach(problem, broken)
    return problem


def search(problem: Problem, start: Sequence[Fleet] = (), *, prove: bool = False) -> Found:
    """The best fleet. Those of `start` that still hold are what others must beat.

    With `prove` every cheaper fleet of level 0 is simulated, as far as the time allows. Raises
    InfeasibleError if no fleet within the limits was found, which says whether that is proved.
    """
    level0 = search_level0(problem, start, prove=prove)
    if level0.search.best is not None and not problem.out_of_time():
        _prefer_uncapped(problem, level0)
        _check_minimal(level0.search, problem.oracle)
    beyond = search_beyond(problem, level0)
    if beyond.best is None:
        raise _infeasible(problem, level0, beyond)
    return Found(beyond.best, beyond.value, level0, beyond.cuts, beyond.is_exact)


def _prefix_hits(task: Task, trace: Trace) -> PrefixHits | None:
    if not task.prefix_cache:
        return None
    if not trace.has_prefixes:
        raise InputError(
            f"{trace.name}: has no block ids, which policies: prefix_cache needs; drop it from slo.yaml, or "
            "give a trace with hash_ids or prefix_ids, as Mooncake's"
        )
    return PrefixHits.of(trace)


def with_policies(problem: Problem, policies: Policies) -> Problem:
    """The same question to a fleet that works in this way."""
    lengths = problem.lengths
    if policies.prefix_cache and not problem.oracle.policies.prefix_cache:
        assert problem.hits is not None
        lengths = problem.hits.lengths()
    elif problem.oracle.policies.prefix_cache and not policies.prefix_cache:
        lengths = distinct_lengths(problem.trace)
    return replace(problem, lengths=lengths, oracle=replace(problem.oracle, policies=policies))


def search_policies(
    problem: Problem, start: Sequence[Fleet] = (), *, prove: bool = False
) -> list[tuple[Problem, Found]]:
    """`search` under each choice of policies there is, where it finds a fleet.

    Of the draws on which the SLO must be kept, only those count on which a best fleet failed: the search
    begins anew with them. It asks for less than all draws do, so its answer, once it holds on all of them, is
    the best for all. Raises InfeasibleError if no choice finds a fleet.
    """
    while True:
        answers = _each_policy(problem, start, prove=prove)
        chosen, found = best_of(answers)
        failed = next(
            (draw for draw in problem.draws if not _holds_on(chosen.oracle, found.best, draw)), None
        )
        if failed is None:
            return answers
        draws = (*problem.oracle.draws, failed)
        problem.progress(
            f"the best fleet fails on another draw or rate of the traffic; now with {len(draws)} more"
        )
        problem = replace(problem, oracle=replace(problem.oracle, draws=draws))


def on_all_draws(problem: Problem) -> Problem:
    """The same question of all draws of the traffic at once; `search_policies` asks for as few as will do."""
    if not problem.draws:
        return problem
    oracle = replace(problem.oracle, draws=problem.draws)
    oracle.told.update({fleet: False for fleet, holds in problem.oracle.told.items() if not holds})
    return replace(problem, oracle=oracle)


def _holds_on(oracle: Oracle, best: Counts, draw: Trace) -> bool:
    return (
        any(draw is known for known in oracle.draws) or replace(oracle, trace=draw, draws=()).holds([best])[0]
    )


def _each_policy(problem: Problem, start: Sequence[Fleet], *, prove: bool) -> list[tuple[Problem, Found]]:
    """Each choice's search begins with the best fleets of those before."""
    answers: list[tuple[Problem, Found]] = []
    errors: list[InfeasibleError] = []
    choices = problem.task.policies()
    for policies in choices:
        asked = with_policies(problem, policies)
        if policies.prefix_cache and answers:  # its settings are fitted to the best fleet so far
            asked = with_policies(problem, fitted(asked.oracle, best_of(answers)[1].best))
        if len(choices) > 1:
            problem.progress(policies_label(policies, choices))
        known = [*start, *(asked.oracle.fleet(found.best) for _, found in answers)]
        try:
            answers.append((asked, search(asked, known, prove=prove)))
        except InfeasibleError as error:
            errors.append(error)
    if not answers:
        raise errors[0]
    return answers


def policies_label(policies: Policies, choices: Sequence[Policies]) -> str:
    """What sets these policies apart from the other choices: "queue sjf", "prefix caches, routing e2"."""
    parts = []
    if len({each.prefix_cache for each in choices}) > 1:
        parts.append("prefix caches" if policies.prefix_cache else "no prefix caches")
    parts += [
        f"{name} {getattr(policies, name)}"
        for name in ("routing", "queue")
        if len({getattr(each, name) for each in choices}) > 1
    ]
    return ", ".join(parts)


def best_of(answers: Sequence[tuple[Problem, Found]]) -> tuple[Problem, Found]:
    """The cheapest answer, of equal ones the first."""
    return min(answers, key=lambda answer: answer[1].value)


def lower_bound(problem: Problem) -> float | None:
    """What any fleet within the limits costs at least, whatever its policy; None if no fleet is within them.

    It ranges over all worker types that hold the weights, those too that are too small for the longest
    request: a fleet may turn that away, where a percentile allows it. It takes BOUND_SHARE of the time that
    is left at most; where that runs out, it is lower.
    """
    envelopes, in_bursts = _any_fleet(problem), 0.0
    now = time.monotonic()
    deadline = now + BOUND_SHARE * (problem.deadline - now)
    if problem.hits is None:
        slo, trace = problem.slo, problem.trace
        dues = [each for each in (due(slo, trace), steady(slo, trace)) if each is not None]
        in_bursts = demand(envelopes, trace, problem.lengths, dues, deadline).least_objective
    if time.monotonic() > deadline:
        return in_bursts
    return bound(
        envelopes,
        problem.hits.classes() if problem.hits else to_classes(problem.trace),
        problem.limits,
        obliged=problem.obliged,
        kv_bytes_per_token=problem.llm.kv_bytes_per_token,
        link_bytes_per_s=problem.task.network.bandwidth_bytes_per_s,
        at_least=in_bursts,
        is_cached=problem.hits is not None,
        deadline=deadline,
    )


def checked_bound(lower: float | None, value: float) -> float:
    """The bound that may stand beside a fleet of this value that holds; raises BoundError if it is above.

    None is the bound of "no fleet is within the limits".
    """
    if lower is None or lower > value * (1 + 1e-6):
        claim = "no fleet is within the limits" if lower is None else f"no fleet costs less than {lower:.6g}"
        raise BoundError(
            f"internal error: the lower bound says that {claim}, and a fleet of {value:.6g} keeps the SLO. "
            "The bound is wrong, so no certificate is written. Please report it with the trace and slo.yaml"
        )
    return min(lower, value)  # above by no more than the solver rounds


def shadow_prices(problem: Problem) -> dict[str, float]:
    """By how much a GPU, Watt or USD/h more of each limit lowers that bound, without bursts or integers.

    Empty where there is no time left to find out.
    """
    left_s = problem.deadline - time.monotonic()
    if left_s <= 0 or not problem.limits.rows():
        return {}
    return master.shadow_prices(
        _any_fleet(problem),
        problem.hits.classes() if problem.hits else to_classes(problem.trace),
        problem.limits,
        obliged=problem.obliged,
        kv_bytes_per_token=problem.llm.kv_bytes_per_token,
        link_bytes_per_s=problem.task.network.bandwidth_bytes_per_s,
        is_cached=problem.hits is not None,
        time_limit_s=min(left_s, 20.0),
    )


def _any_fleet(problem: Problem) -> list[Option]:
    """The options of the bound: every worker type that holds the weights, in every role."""
    wanted = problem.task.objective
    types = (*problem.types, *(worker for item in problem.left for worker in item.workers))
    return _envelopes(
        [*mixed_options(types, wanted), *prefill_options(types, wanted), *decode_options(types, wanted)]
    )


def counts_of(fleet: Fleet, options: Sequence[Option]) -> Counts | None:
    """A fleet as counts of these options; None if one of its pools is none of them."""
    named = {option.name: option for option in options}
    names = [(f"{pool.role} {pool.type.name}", pool.count) for pool in fleet.pools if pool.count]
    if any(name not in named for name, _ in names):
        return None
    return tuple((named[name], count) for name, count in names)


@dataclass(frozen=True, slots=True)
class Level0:
    """The exhausted (or interrupted) search at level 0, and the best of each kind on the way."""

    search: Search
    options: tuple[Option, ...]
    bounded: dict[str, Bounded]
    mixed: tuple[Counts | None, float]
    one_gpu: tuple[Counts | None, float]


def search_level0(
    problem: Problem, start: Sequence[Fleet] = (), *, any_will_do: bool = False, prove: bool = False
) -> Level0:
    """Search level 0, to its end or, where `any_will_do`, to the first fleet that holds.

    With `prove` every cheaper fleet is simulated, however many there are.
    """
    task = problem.task
    mixed = mixed_options(problem.types, task.objective)
    prefill = prefill_options(problem.types, task.objective)
    decode = decode_options(problem.types, task.objective)
    # for guesses no whole session is let go because its first request may be late
    guess = usual(problem.slo, replace(problem.trace, after=no_edges()))
    bounded = {option.name: _bounded(problem, option, guess) for option in (*mixed, *prefill, *decode)}

    def promising_first(option: Option) -> tuple[float, int, int]:
        """By the lower bound; token budgets that would break the tightest limit on gaps last."""
        worker = option.type
        full_step_s = float(worker.latency.step_s(worker.max_num_batched_tokens))
        gaps_s = [limit.limit_s for limit in problem.slo.limits if limit.metric == "tbt"]
        late = full_step_s > 0.9 * min(gaps_s, default=math.inf)
        likely = bounded[option.name].likely * option.objective
        return likely * (1.5 if late else 1.0), -worker.max_num_batched_tokens, -worker.max_num_seqs

    oracle, search = problem.oracle, Search(problem.limits)

    def enough() -> bool:
        return problem.out_of_time() or (any_will_do and search.best is not None)

    def timed(ask: Holds) -> Holds:
        """Simulations one by one, none of which begins once the time is over."""

        def answer(fleets: Sequence[Counts]) -> list[bool]:
            answers: list[bool] = []
            for counts in fleets:
                if problem.out_of_time():
                    raise StoppedError
                answers += ask([counts])
            best = search.value if search.best is not None else None
            problem.watch(Standing(best, problem.lower, oracle.simulations))
            return answers

        return answer

    holds = timed(oracle.holds)
    ordered = [bounded[option.name] for option in sorted(mixed, key=promising_first)]
    ordered_prefill = [bounded[option.name] for option in sorted(prefill, key=promising_first)]
    ordered_decode = [bounded[option.name] for option in decode]
    pairs = list(itertools.product(ordered_prefill, ordered_decode))
    too_slow = _link_too_slow(problem)
    if reason := too_slow or (None if prove else _link_falls_behind(problem)):
        search.refuted["prefill + decode"] = reason
        search.assumed |= set() if too_slow else {assumed.LINK}
        pairs = []
    best_mixed = best_one_gpu = (search.best, search.value)
    try:
        _offer_known(problem, start, (*mixed, *prefill, *decode), holds, search)
        problem.progress(f"level 0: {len(mixed)} mixed pools")
        _search_mixed(ordered, holds, search, enough)
        best_mixed = best_one_gpu = (search.best, search.value)
        # answers that take no time bring the next requests of a session earlier: nothing to learn from them
        is_open_loop = not problem.trace.after.size
        leads, follows = (timed(oracle.leads), timed(oracle.follows)) if is_open_loop else (None, None)
        for label, compare in (("one GPU type", operator.eq), ("two GPU types", operator.ne)):
            if not pairs:
                break
            problem.progress(f"level 0: prefill and decode pools of {label}; best so far {search.value:.6g}")

            def allowed(p: Option, d: Option, compare: Callable[[str, str], bool] = compare) -> bool:
                return compare(p.type.gpu.name, d.type.gpu.name)

            search_two_pools(
                ordered_prefill, ordered_decode, holds, leads, search, side_by_side, enough, allowed, follows
            )
            if label == "one GPU type":
                best_one_gpu = (search.best, search.value)
        if search.is_exhausted and not enough():
            _walk(problem, search, ordered, pairs, holds, prove=prove)
    except StoppedError:
        search.is_exhausted = False
    note_cheaper(ordered, pairs, oracle.told, search)
    options = (*mixed, *prefill, *decode) if pairs else tuple(mixed)
    return Level0(search, options, bounded, best_mixed, best_one_gpu)


def _offer_known(
    problem: Problem, start: Sequence[Fleet], options: Sequence[Option], holds: Holds, search: Search
) -> None:
    """Those fleets of level 0 that still hold are what others must beat."""
    for fleet in start:
        counts = counts_of(fleet, options)
        if (
            counts
            and len({option.role for option, _ in counts}) == len(counts) <= 2
            and not any(len(counts) == 2 and option.role == "mixed" for option, _ in counts)
        ):
            within = problem.limits.broken([(option.type, count) for option, count in counts]) is None
            if within and holds([counts])[0]:
                search.offer(counts)


def _search_mixed(ordered: list[Bounded], holds: Holds, search: Search, enough: Callable[[], bool]) -> None:
    """One mixed pool; `ordered` begins with the most promising, of equal offers the first stays."""
    first_of_kind: dict[tuple[str, int, int], Bounded] = {}
    for item in ordered:
        first_of_kind.setdefault(_shape(item.option), item)
    if search.best is None:
        first_incumbent(list(first_of_kind.values()), holds, search, side_by_side, enough)
    if search.best is not None:
        leader = search.best[0][0]
        ordered.sort(key=lambda item: _shape(item.option) != _shape(leader))
    search_one_pool(ordered, holds, search, side_by_side, enough)


def _walk(
    problem: Problem,
    search: Search,
    mixed: Sequence[Bounded],
    pairs: Sequence[tuple[Bounded, Bounded]],
    holds: Holds,
    *,
    prove: bool,
) -> None:
    """Simulate every cheaper fleet, where they are few enough or `prove` is asked for."""
    oracle = problem.oracle
    spent = oracle.effort()
    # those far too small end sooner than what a search looks at
    guess = max(spent / max(oracle.simulations, 1) / FAR_SOONER, LEAST_EFFORT)

    def may_go_on(done: int, left: int) -> bool:
        """By what the fleets so far have cost, the first of them being a sample of all."""
        if prove or problem.out_of_time():
            return not problem.out_of_time()
        effort = oracle.effort() - spent
        return effort + left * (max(effort / done, LEAST_EFFORT) if done else guess) <= WALK_EFFORT

    problem.progress("level 0: every cheaper fleet, one by one")
    walk(mixed, pairs, holds, known(oracle.told), search, side_by_side, may_go_on)
    if not search.is_exact and problem.out_of_time():
        raise StoppedError  # what was begun depends on the clock


def _shape(option: Option) -> tuple[str, int, int]:
    """GPU, TP and PP: what a worker type is but for its engine settings."""
    return option.type.gpu.name, option.type.tp, option.type.pp


def _link_too_slow(problem: Problem) -> str | None:
    """Whether the link cannot carry the KV blocks of those requests that the SLO obliges pairs to decode.

    Of all measured ones until their whole work must be done; of half of the last tenth (the backlog test)
    until their second token is due. Those with the fewest blocks are taken.
    """
    trace, bandwidth = problem.trace, problem.task.network.bandwidth_bytes_per_s
    blocks = np.ceil(trace.input_tokens / KV_BLOCK_TOKENS) * (trace.output_tokens > 1)
    needs = [(blocks, int(np.ceil(problem.obliged.whole_frac * len(trace) - 1e-9)), problem.obliged.whole_s)]
    if tested := steady(problem.slo, trace):
        start_s, end_s = tested.window_s
        last = (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
        until_s = end_s - start_s + tested.prefill_s + tested.gap_s
        needs.append((blocks[last], int(np.ceil(last.sum() / 2)), until_s))
    for each, least, seconds in needs:
        carried = float(np.partition(each, least - 1)[:least].sum()) if least else 0.0
        bytes_per_s = carried * KV_BLOCK_TOKENS * problem.llm.kv_bytes_per_token / seconds
        if bytes_per_s > bandwidth * (1 + 1e-9):
            return (
                f"KV blocks need at least {bytes_per_s / 1e9:.4g} GB/s on the link, fleet.network.bandwidth "
                f"is {bandwidth / 1e9:g} GB/s"
            )
    return None


def _link_falls_behind(problem: Problem) -> str | None:
    """Whether the link is still busy with earlier hand-offs when the last tenth of the requests hands over.

    Those whose limit on TTFT ends before, and that keep it, are prefilled before any of the last tenth, half
    of which must have a second token soon (the backlog test). Those with the fewest blocks are taken. That
    the link serves in the order of the prefills is an assumption: assumed.LINK.
    """
    trace, network, tested = problem.trace, problem.task.network, steady(problem.slo, problem.trace)
    limits = [limit for limit in problem.slo.limits if limit.metric == "ttft"]
    if not network.is_shared or tested is None or not limits or trace.after.size:
        return None
    start_s, end_s = tested.window_s
    last = (trace.arrival_s >= start_s) & (trace.arrival_s <= end_s)
    if (trace.output_tokens[last] > 1).mean() <= 0.5:
        return None
    from_s, to_s = measured_window(trace)
    measured = (trace.arrival_s >= from_s) & (trace.arrival_s <= to_s)
    until_s = end_s + tested.prefill_s + tested.gap_s - float(trace.arrival_s[0])
    blocks = np.ceil(trace.input_tokens / KV_BLOCK_TOKENS) * (trace.output_tokens > 1)
    for limit in limits:
        before = measured & (trace.arrival_s < start_s - limit.limit_s)
        kept = int(np.ceil(limit.percentile_frac * measured.sum())) - int((measured & ~before).sum())
        if kept <= 0:
            continue
        carried = float(np.partition(blocks[before], kept - 1)[:kept].sum())
        bytes_per_s = carried * KV_BLOCK_TOKENS * problem.llm.kv_bytes_per_token / until_s
        if bytes_per_s > network.bandwidth_bytes_per_s:
            return (
                f"earlier KV blocks need {bytes_per_s / 1e9:.4g} GB/s on the link until the last tenth hands "
                f"over, fleet.network.bandwidth is {network.bandwidth_bytes_per_s / 1e9:g} GB/s"
            )
    return None


def _bounded(problem: Problem, option: Option, guess: Obliged) -> Bounded:
    """With the least count that the SLO obliges, and a likely one from what it takes by that guess."""
    oracle, lengths = problem.oracle, coarser(problem.lengths)
    least = oracle.enough(option, least_workers(option, lengths, problem.obliged))
    likely = least_workers(option, lengths, guess)
    if oracle.policies.prefix_cache and problem.hits is not None:  # with the hits that so many can keep
        lengths = coarser(problem.hits.lengths(likely * option.type.kv_tokens))
        likely = least_workers(option, lengths, guess)
    likely = oracle.enough(option, likely)
    return Bounded(option, least, problem.limits.most(option.type), likely)


@dataclass(frozen=True, slots=True)
class Beyond:
    """What fleets of any mix brought: the best fleet, None if none was found, and how the search ended.

    `is_exact`: every fleet that is within the limits and cheaper was simulated. `is_exhausted`: every fleet
    of the options that took part is below one that failed. `is_hopeless`: what is left is expected to carry
    far less than the traffic. None of them: time or effort was spent.
    """

    best: Counts | None
    value: float
    cuts: int
    is_exact: bool
    is_exhausted: bool
    is_hopeless: bool


def search_beyond(problem: Problem, level0: Level0) -> Beyond:
    """Search fleets of any mix under level 0's value, or for any fleet where level 0 has none.

    Each GPU and TP degree takes part with the settings that did best. The master proposes the fleet expected
    to carry most for less than the incumbent; a fleet that fails is cut away with everything below it, one
    that holds is stripped to a minimal fleet and becomes the incumbent. The effort is counted in simulated
    requests, not in seconds, so that the answer does not depend on the machine.
    """
    oracle = problem.oracle
    best, value = level0.search.best, level0.search.value
    if best is None and any(math.isinf(problem.limits.most(worker)) for worker in problem.types):
        return Beyond(None, math.inf, 0, False, False, False)  # there may be any number, and none is enough
    capacities = _stock_bound_counts(problem, level0)
    options = _best_settings(problem, level0, capacities)
    shares = [expected_share(option, level0, capacities) for option in options]
    cuts: list[tuple[int, ...]] = []
    is_exhausted = is_hopeless = False
    tries, wasted = int(np.clip(BEYOND_REQUESTS / len(problem.trace), 4, BEYOND_MOST)), 0
    tries_for_any = int(np.clip(ANY_REQUESTS / len(problem.trace), 4, ANY_MOST))
    while not problem.out_of_time():
        if wasted == (tries if best is not None else tries_for_any):
            break
        wasted += 1
        problem.progress(f"beyond level 0: {len(cuts)} cuts, best {value:.6g}")
        below = value * (1 - 1e-6) if math.isfinite(value) else None
        proposal = promising(options, shares, problem.limits, below=below, cuts=cuts)
        if proposal is None:
            is_exhausted = True
            break
        counts, share = proposal
        if share < (BEYOND_SHARE if best is not None else ANY_SHARE):
            is_hopeless = True
            break
        fleet = tuple(zip(options, counts, strict=True))
        if oracle.holds([fleet])[0]:
            wasted = wasted if best is not None else 0
            best = stripped(fleet, oracle)
            value = objective(best)
        else:
            cuts.append(counts)
        problem.watch(Standing(value if best is not None else None, problem.lower, oracle.simulations))
    if best is not None:
        best = _moved(problem, tuple((option, count) for option, count in best if count), options, tries)
    best, is_exact = _every_mix(problem, level0, best)
    value = math.inf if best is None else objective(best)
    return Beyond(best, value, len(cuts), is_exact, is_exhausted, is_hopeless)


def _every_mix(problem: Problem, level0: Level0, best: Counts | None) -> tuple[Counts | None, bool]:
    """Simulate every cheaper fleet of any mix, where they are few; the best, and whether all were."""
    oracle = problem.oracle
    budget = WALK_EFFORT if best is None else MIX_EFFORT
    value = math.inf if best is None else objective(best)
    fleets = every_mix(level0.options, problem.limits, value, most=budget // LEAST_EFFORT)
    if fleets is None or problem.out_of_time():
        return best, False
    problem.progress(f"beyond level 0: all {len(fleets)} cheaper fleets, one by one")
    before = oracle.effort()
    for counts in sorted(fleets, key=objective):  # the first that holds is the cheapest
        if problem.out_of_time() or oracle.effort() - before > budget:
            return best, False
        if oracle.holds([counts])[0]:
            return counts, True
    return best, True


def _moved(problem: Problem, best: Counts, options: Sequence[Option], tries: int) -> Counts:
    """Exchange one worker for a cheaper one of its role, the largest saving first, as long as that holds."""
    oracle = problem.oracle
    failed: set[frozenset[tuple[str, int]]] = set()
    while tries > 0 and not problem.out_of_time():
        swaps = sorted(
            (
                (old.objective - new.objective, old, new)
                for old, _ in best
                for new in options
                if new.role == old.role and new.objective < old.objective * (1 - 1e-9)
            ),
            key=lambda swap: (-swap[0], swap[1].name, swap[2].name),
        )
        for _, old, new in swaps:
            counts = {option: count for option, count in best}
            counts[old] -= 1
            counts[new] = counts.get(new, 0) + 1
            fleet = tuple((option, count) for option, count in counts.items() if count)
            known = frozenset((option.name, count) for option, count in fleet)
            within = problem.limits.broken([(option.type, count) for option, count in fleet]) is None
            if known in failed or not within:
                continue
            tries -= 1
            if oracle.holds([fleet])[0]:
                best = stripped(fleet, oracle)
                break
            failed.add(known)
            if tries <= 0 or problem.out_of_time():
                return best
        else:
            return best
    return best


def _stock_bound_counts(problem: Problem, level0: Level0) -> dict[str, int]:
    """Least counts that hold, by option, of mixed workers of which there are too few to serve all alone.

    They are simulated as if there were more: their share of a fleet of several types follows from that, and
    which settings suit them.
    """
    search, limits = level0.search, problem.limits
    if not limits.rows():
        return {}
    found: dict[str, int] = {}
    for alike in _by_shape(option for option in level0.options if option.role == "mixed").values():
        most = limits.most(alike[0].type)
        if any(o.name in search.smallest for o in alike) or not 1 <= most < math.inf:
            continue
        if largest_below(alike[0], search.value) <= most:
            continue  # it is the price that leaves it out
        least = math.inf
        for option in sorted(alike, key=lambda o: _rank_late(problem, o)):
            if problem.out_of_time():
                return found
            item = replace(level0.bounded[option.name], most=math.inf)
            failed = max(item.least - 1, search.beyond.get(option.name, 0))
            n = least_that_holds(_holds_alone(problem.oracle, option), failed + 1, least - 1, item)
            if n is not None:
                found[option.name], least = n, n
    return found


def _holds_alone(oracle: Oracle, option: Option) -> Callable[[int], bool]:
    return lambda count: oracle.holds([((option, count),)])[0]


def _by_shape(options: Iterable[Option]) -> dict[tuple[str, tuple[str, int, int]], list[Option]]:
    groups: dict[tuple[str, tuple[str, int, int]], list[Option]] = {}
    for option in options:
        groups.setdefault((option.role, _shape(option)), []).append(option)
    return groups


def _envelopes(options: Sequence[Option]) -> list[Option]:
    """One option per role, GPU, TP and PP that is at least as good as each of its engine settings.

    The largest budget has the least u, min f(N)/N being over more N, and so have the most sequences; the most
    KV tokens are the smallest's.
    """
    return [
        replace(
            alike[0],
            type=replace(
                alike[0].type,
                max_num_batched_tokens=max(option.type.max_num_batched_tokens for option in alike),
                max_num_seqs=max(option.type.max_num_seqs for option in alike),
                kv_tokens=max(option.type.kv_tokens for option in alike),
            ),
        )
        for alike in _by_shape(options).values()
    ]


def _best_settings(problem: Problem, level0: Level0, capacities: Mapping[str, int]) -> list[Option]:
    """One option per role, GPU, TP and PP: the settings that need fewest workers, as far as known.

    Where nothing is known, the largest steps that keep the limits on gaps.
    """
    smallest = level0.search.smallest

    def rank(option: Option) -> tuple[float, bool, int]:
        known = smallest.get(option.name, capacities.get(option.name, math.inf))
        return known, *_rank_late(problem, option)

    return [min(alike, key=rank) for alike in _by_shape(level0.options).values()]


def _rank_late(problem: Problem, option: Option) -> tuple[bool, int]:
    """Whether a full step of a mixed worker breaks the tightest limit on gaps; larger budgets first."""
    gaps_s = [limit.limit_s for limit in problem.slo.limits if limit.metric in ("tbt", "tpot")]
    worker = option.type
    full_step_s = float(worker.latency.step_s(worker.max_num_batched_tokens))
    is_late = full_step_s > 0.9 * min(gaps_s, default=math.inf)
    return is_late and option.role == "mixed", -worker.max_num_batched_tokens


def expected_share(option: Option, level0: Level0, capacities: Mapping[str, int]) -> float:
    """Share of the traffic one worker is expected to carry, from what level 0 learned."""
    search, bounded = level0.search, level0.bounded
    if (known := search.smallest.get(option.name, capacities.get(option.name))) is not None:
        return 1.0 / known
    ratios = [search.smallest[name] / bounded[name].likely for name in search.smallest]
    typical = float(np.median(ratios)) if ratios else 1.5
    least = max(typical * bounded[option.name].likely, search.beyond.get(option.name, 0) + 0.5)
    return 1.0 / least


def stripped(fleet: Counts, oracle: Oracle) -> Counts:
    """Take workers away, the dearest first, while the fleet still holds."""
    counts = {option.name: count for option, count in fleet}
    options = sorted((option for option, _ in fleet), key=lambda option: (-option.objective, option.name))
    for option in options:
        while counts[option.name] > 0:
            fewer = tuple((o, counts[o.name] - (o is option)) for o, _ in fleet)
            if not oracle.holds([fewer])[0]:
                break
            counts[option.name] -= 1
    return tuple((option, counts[option.name]) for option, _ in fleet if counts[option.name])


def _prefer_uncapped(problem: Problem, level0: Level0) -> None:
    """Of equal offers take the GPUs without a power cap: they are never slower, and cost the same."""
    search = level0.search
    assert search.best is not None
    named = {option.name: option for option in level0.options}
    counts = tuple(
        (named.get(f"{option.role} {replace(option.type, gpu=uncapped).name}", option), count)
        if (uncapped := _uncapped(option, level0)) is not None
        else (option, count)
        for option, count in search.best
    )
    is_equal = abs(objective(counts) - search.value) <= 1e-9 * search.value
    if counts == search.best or not is_equal:
        return
    if problem.limits.broken([(option.type, count) for option, count in counts]) is None:
        if problem.oracle.holds([counts])[0]:
            search.best = counts


def _uncapped(option: Option, level0: Level0) -> Gpu | None:
    """The GPU of which this option's is a capped variant, if it may be used as well."""
    base = option.type.gpu.base
    gpus = {other.type.gpu.name: other.type.gpu for other in level0.options}
    return gpus.get(base) if base != option.type.gpu.name else None


def _check_minimal(search: Search, oracle: Oracle) -> None:
    """Hold the best fleet of level 0 against its smaller neighbours.

    If one of them holds, more workers have hurt somewhere: the search cannot claim to be exact.
    """
    assert search.best is not None
    smaller = stripped(search.best, oracle)
    if objective(smaller) < search.value * (1 - 1e-9):
        search.offer(smaller)
        search.is_exhausted = False
        search.refuted["monotonicity"] = "a fleet holds although a larger one of its kind does not"


def _in_seconds(task: Task, llm: Llm, lengths: Lengths, catalog: Catalog) -> tuple[Slo, str | None]:
    """The SLO with limits in seconds; relative ones against an idle reference worker.

    A slowdown is defined per request; here it becomes one limit for all: the factor times the same percentile
    of the reference's times. That is stricter for short requests and milder for long ones.
    """
    if task.slowdowns is None:
        return task.slo, None
    gpu = catalog.gpu(task.slowdowns.gpu)
    kv_tokens = kv_cache_tokens(llm, gpu, task.slowdowns.tp)
    if kv_tokens == 0:
        raise InputError(
            f"{llm.name} does not fit the SLO's reference worker, {gpu.name} tp{task.slowdowns.tp}"
        )
    reference = WorkerType(
        gpu, task.slowdowns.tp, catalog.latency(llm, gpu, task.slowdowns.tp), kv_tokens, 8192, MAX_NUM_SEQS
    )
    limits = tuple(
        Limit(
            line.metric,
            line.percentile_frac,
            line.factor * floor_s(Limit(line.metric, line.percentile_frac, math.inf), reference, lengths),
        )
        for line in task.slowdowns.limits
    )
    note = (
        f"the relative SLO was turned into seconds: each factor times that percentile of an idle {gpu.name} "
        f"tp{task.slowdowns.tp}, one limit for all requests"
    )
    return replace(task.slo, limits=limits), note


def _no_room(llm: Llm, left: Sequence[object]) -> InfeasibleError:
    reasons = "; ".join(f"{getattr(item, 'name', '')}: {getattr(item, 'reason', '')}" for item in left[-4:])
    return InfeasibleError(
        f"{llm.name} ({llm.weight_bytes / 1e9:.0f} GB of weights) fits on no worker in stock: {reasons}. "
        "Add a GPU with more memory or more GPUs per node, or allow more pipeline stages (fleet: pp)",
        kind="capacity",
        constraint="memory of one worker",
        relaxation="a GPU with more memory",
    )


def _out_of_reach(problem: Problem, floors: Sequence[tuple[Limit, float, str]]) -> InfeasibleError:
    """Limits that nothing keeps, and how far they must be relaxed for a fleet to be found.

    `floors` are what an idle worker needs, mostly more than the limit.
    """
    limit, best_s, name = floors[0]
    also = (
        f" (also out of reach: {', '.join(other.name for other, _, _ in floors[1:])})" if floors[1:] else ""
    )
    found_s = _relaxed_s(problem, floors)
    enough = " and ".join(f"{other} to {show_s(limit_s)}" for other, limit_s in found_s.items())
    least = show_s(max(best_s, limit.limit_s))
    help_ = (
        f"relax {enough}, with which a fleet was found"
        if found_s
        else f"relax {limit.name} to {least} or more (how much more was not found)"
    )
    why = (
        f"is below what any worker can do even when idle: the fastest ({name}) needs {show_s(best_s)}{also}"
        if best_s > limit.limit_s
        else f"is kept by none of the fleets within the limits, all of which were simulated{also}"
    )
    changes = [f"{other} >= {limit_s:.9g} s" for other, limit_s in found_s.items()]
    return InfeasibleError(
        f"latency: {limit.name} <= {show_s(limit.limit_s)} {why}. No number of workers cures that; {help_}, "
        "or add a faster GPU",
        kind="latency",
        constraint=limit.name,
        relaxation=" and ".join(changes) or f"{limit.name} > {best_s:.6g} s, how much more is unknown",
    )


def _floors(problem: Problem) -> list[tuple[Limit, float, str]]:
    """Of every limit what its percentile is at least if each request has an idle worker, and of which type.

    Those that are above their limit, else all.
    """
    floors: list[tuple[Limit, float, str]] = []
    for limit in problem.slo.limits:
        of_types = [(floor_s(limit, worker, problem.lengths), worker.name) for worker in problem.types]
        floors.append((limit, *min(of_types)))
    return [each for each in floors if each[1] > each[0].limit_s] or floors


def _relaxed_s(problem: Problem, floors: Sequence[tuple[Limit, float, str]]) -> dict[str, float]:
    """Limits [s] by name at which some fleet holds, each as far above its floor; empty if none was found."""
    deadline = min(problem.deadline, time.monotonic() + RELAX_S)
    for more in RELAXED:
        relaxed_s = {
            limit.name: _rounded_up(more * max(best_s, limit.limit_s)) for limit, best_s, _ in floors
        }
        slo = replace(
            problem.slo,
            limits=tuple(
                replace(limit, limit_s=relaxed_s.get(limit.name, limit.limit_s))
                for limit in problem.slo.limits
            ),
        )
        problem.progress("out of reach; looking for what is not")
        oracle = replace(problem.oracle, slo=slo)
        wider = replace(
            problem, slo=slo, oracle=oracle, obliged=obliged(slo, problem.trace), deadline=deadline
        )
        wider = on_all_draws(wider)
        asked = [with_policies(wider, policies) for policies in problem.task.policies()]
        if any(search_level0(each, any_will_do=True).search.best is not None for each in asked):
            return relaxed_s
        if wider.out_of_time():
            break
    return {}


def _rounded_up(seconds: float) -> float:
    """To three digits, so that it can be written down."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 2)
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.6g}")


def _infeasible(problem: Problem, level0: Level0, beyond: Beyond) -> InfeasibleError:
    """Name what binds and the smallest relaxation, and say whether that no fleet holds is proved.

    Each limit is lifted alone, and the fleet that needs least of it looked for; if no single one is enough,
    all are lifted. What is found is a fleet that was simulated, so the question with that much more has a
    plan. Proved is what the bound over all fleets proves; else the searches say it that came to their end.
    """
    rows = problem.limits.rows()
    names = ", ".join(name for name, _ in rows)
    is_proved = problem.lower is None and problem.bounded
    has_ended = level0.search.is_exhausted and (
        beyond.is_exact
        # what a fleet carries after a loss, the master does not know
        or ((beyond.is_exhausted or beyond.is_hopeless) and not problem.oracle.has_losses)
    )
    ways, constraints = _relaxations(problem) if is_proved or has_ended else ([], [])
    if not ways:
        if not is_proved and not beyond.is_exact:
            return _not_found(problem, level0, names)
        return _out_of_reach(problem, _floors(problem))
    relaxation = ", or ".join(dict.fromkeys(ways))
    how = (
        "not even the least work that the SLO obliges fits within the limits"
        if is_proved
        else "every fleet was simulated"
        if beyond.is_exact
        else f"all {problem.oracle.simulations} fleets that were simulated miss it, of one worker type per "
        "pool and of several"
    )
    return InfeasibleError(
        f"capacity: no fleet within the limits keeps the SLO ({how}). Raise {relaxation}",
        kind="capacity",
        constraint=", ".join(dict.fromkeys(constraints)),
        relaxation=relaxation,
    )


def _not_found(problem: Problem, level0: Level0, names: str) -> InfeasibleError:
    """Neither a fleet was found nor that there is none."""
    within = f"within the limits ({names}) " if names else ""
    if problem.out_of_time():
        why, help_ = "the time limit came first", "raise --time-limit"
    else:
        failing = "; ".join(f"{name}: {reason}" for name, reason in list(level0.search.refuted.items())[:3])
        why = f"nothing proves that there is none ({failing})"
        help_ = "relax a limit of the SLO, add a faster GPU" + (" or raise the limits" if names else "")
    return InfeasibleError(
        f"no fleet {within}was found that keeps the SLO: {problem.oracle.simulations} were simulated, and "
        f"{why}; {help_}",
        kind="capacity" if names else "latency",
        constraint=names or ", ".join(limit.name for limit in problem.slo.limits),
        relaxation=f"unknown: {help_}",
        is_proved=False,
    )


def _relaxations(problem: Problem) -> tuple[list[str], list[str]]:
    """The least more of each limit alone, else of all, with which a fleet was found; and which limits."""
    rows = problem.limits.rows()
    lifted = [(problem.limits.without(name), name) for name, _ in rows]
    if len(rows) > 1:
        lifted.append((Limits({name: None for name in problem.limits.stock}), "cost"))
    ways: list[str] = []
    constraints: list[str] = []
    for limits, name in lifted:
        if (ways and limits.rows() == []) or problem.out_of_time():
            break
        problem.progress("infeasible; looking for the smallest relaxation")
        wanted: Objective = "power" if name == "power" else "cost" if name == "cost" else "gpus"
        wider = replace(problem, limits=limits, task=replace(problem.task, objective=wanted))
        level0 = search_level0(wider)
        best = search_beyond(wider, level0).best
        if best is None:
            continue
        broken = _beyond_limits(problem.limits, best)
        constraints += [limit for limit, _ in broken]
        ways.append(" and ".join(change for _, change in broken))
    return ways, constraints


def _beyond_limits(limits: Limits, best: Counts) -> list[tuple[str, str]]:
    """The limits that a fleet exceeds: their names, and "power from 2000 to 5600 W"."""
    changes = []
    for name, amount in limits.rows():
        used = sum(limits.use(name, option.type) * count for option, count in best)
        if used > amount:
            unit = {"power": " W", "cost": " USD/h"}.get(name, "")
            changes.append((name, f"{name} from {amount:g} to {used:g}{unit}"))
    return changes
