"""How often chance lets a fleet keep its SLO: errors of the test, draws of traffic, interruptions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plans import CATALOG
from questions import question, traffic
from scipy.stats import binom

from planner.documents.facts import Finding
from planner.documents.task import Spot
from planner.domain import SPOT
from planner.errors import InputError
from planner.fleet import Fleet, Pool
from planner.reports.fact_sentences import fact_sentence, fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.mixed.best_fleet import best_of
from planner.search.mixed.policy_search import search_policies
from planner.search.oracle.traffic_request import requested_traffic
from planner.search.problem import draws
from planner.search.problem.build_problem import build_problem
from planner.simulator import judge_slo, simulate
from planner.simulator.slo_verdict import Verdict
from planner.solvers.repeats import (
    CONFIDENCE_FRAC,
    FAILS_FRAC,
    HOLDS_FRAC,
    decide_sequentially,
    run_until_decided,
)
from planner.studies.seeds import SeedsQuestion, simulate_seed
from planner.traffic.scaling import RateRequest

ON_SPOT = {"spot": 1.0, "spot_interruptions_per_h": 30.0, "spot_restart": "20 s"}
SUPERPOSED = {"rate": 25}


def test_so_many_runs_decide() -> None:
    """1.1^k 0.1^m >= 20: k = 31.4 without a miss; with one, (ln 20 + ln 10) / ln 1.1 = 55.6 kept beside it.
    Two misses take a factor of 100: below 1/20 as long as 1.1^k < 5, which 16 kept runs keep."""
    assert [decide_sequentially(31, 31), decide_sequentially(32, 32)] == ["open", "holds"]
    assert [decide_sequentially(55, 56), decide_sequentially(56, 57)] == ["open", "holds"]
    assert [
        decide_sequentially(16, 18),
        decide_sequentially(17, 19),
        decide_sequentially(0, 1),
        decide_sequentially(0, 2),
    ] == ["fails", "open", "open", "fails"]


@pytest.mark.parametrize(("share", "wrong"), [(FAILS_FRAC, "holds"), (HOLDS_FRAC, "fails")])
def test_a_wrong_decision_is_as_rare_as_it_says(share: float, wrong: str) -> None:
    """At most 5 % of 4000 sequences at the share itself, and a standard error or three."""
    rng = np.random.default_rng(1)
    decided = []
    for _ in range(4000):
        kept = runs = 0
        while (found := decide_sequentially(kept, runs)) == "open":
            kept, runs = kept + (rng.random() < share), runs + 1
        decided.append(found)
    error = 1 - CONFIDENCE_FRAC
    assert decided.count(wrong) / len(decided) <= error + 3 * np.sqrt(error / len(decided))  # type: ignore[arg-type]
    assert len(set(decided)) == 2


def test_runs_end_when_they_decide_or_when_there_are_enough() -> None:
    verdict = Verdict((), 0.9, True, True, 0)
    sure = run_until_decided("runs", lambda _: (True, verdict), 100)
    assert (sure.runs, sure.kept, sure.decision) == (32, 32, "holds")
    few = run_until_decided("runs", lambda _: (True, verdict), 7)
    assert (few.runs, few.decision) == (7, "open") and "too few" in fact_sentence(few)
    doomed = run_until_decided("runs", lambda _: (False, verdict), 100)
    assert (doomed.runs, doomed.kept, doomed.decision) == (2, 0, "fails")


def test_a_plan_is_simulated_on_the_draws_that_follow() -> None:
    """Each further draw is the run that `plan simulate --seed` makes of the plan's fleet."""
    trace = traffic(requests=300)
    found = plan(question(traffic=SUPERPOSED), trace, CATALOG)
    (repeats,) = found.certificate.repeats
    assert repeats.what == draws.OTHER_DRAWS and repeats.runs >= 2
    asked = SeedsQuestion(found.fleet, trace, RateRequest(25.0), found.slo)
    verdicts = [simulate_seed(asked, (seed, False)).summary["slo"] for seed in range(1, 1 + repeats.runs)]
    assert repeats.kept == sum(verdict["holds"] for verdict in verdicts)
    for k, (name, value) in enumerate(repeats.limits.items()):
        simulated_s = [verdict["lines"][k]["simulated_s"] for verdict in verdicts]
        assert verdicts[0]["lines"][k]["limit"] == name
        assert (value.mean, value.most) == pytest.approx((np.mean(simulated_s), max(simulated_s)))
    assert any(
        line.startswith(f"the SLO is kept on {repeats.kept} of")
        for line in fact_sentences_of(found.certificate.binding)
    )


@pytest.mark.slow
def test_draws_on_which_a_loss_is_not_survived_say_so() -> None:
    """The figures are of the whole fleet, so alone they would not explain a miss."""
    found = plan(replace(question(traffic=SUPERPOSED), spare_workers=1), traffic(requests=300), CATALOG)
    (repeats,) = found.certificate.repeats
    assert (
        "other draws of this traffic, with all workers and after the losses it must survive (the figures are "
        "with all workers)"
    ) in fact_sentence(repeats)


def test_a_trace_as_it_is_has_no_other_draws() -> None:
    found = plan(question(), traffic(requests=300), CATALOG)
    assert found.certificate.repeats == () and Finding("nothing-drawn") in found.certificate.binding
    with pytest.raises(InputError, match="all 4 draws are the same"):
        build_problem(question(traffic={"draws": 4}), traffic(requests=300), CATALOG)


@pytest.mark.long
def test_a_plan_for_several_draws_is_the_cheapest_that_holds_on_each() -> None:
    """Against every number of workers of every type, simulated on every draw; one pool of one type."""
    count, trace = 6, traffic(requests=250)
    task = question(
        slo={"ttft": {"p90": "500 ms"}},
        fleet={"gpus": ["a100-80g"], "sold_as": {"a100-80g": "gpu"}},
        traffic={"rate": 26, "draws": count},
        engine="none",
    )
    single = plan(replace(task, draws=1), trace, CATALOG)
    drawn = [requested_traffic(trace, task, seed=seed)[0] for seed in range(count)]

    def holds(fleet: Fleet) -> bool:
        return all(judge_slo(simulate(fleet, each, limits=task.slo.limits), task.slo).holds for each in drawn)

    assert not holds(single.fleet)
    problem, found = best_of(search_policies(build_problem(task, trace, CATALOG)))
    assert 1 <= len(problem.oracle.draws) < count
    assert holds(problem.oracle.fleet(found.best)) and found.value > single.certificate.value
    for worker in problem.types:
        most = int(np.ceil(found.value / worker.price_usd_per_h)) - 1  # cheaper than what was found
        if most > 0:
            assert not holds(Fleet(problem.llm, (Pool("mixed", "mixed", worker, most),)))


def test_interruptions_are_a_binomial_number_at_any_time() -> None:
    """Six workers, each down for 120 / (600 + 120) of the time, counted at three times of 4000 histories."""
    terms = Spot(1.0, 6.0, 120.0)
    found = plan(question(), traffic(requests=300), CATALOG)
    worker = found.fleet.pools[0].type
    spot = replace(worker, gpu=replace(worker.gpu, name=worker.gpu.name + SPOT))
    fleet = Fleet(found.fleet.llm, (Pool("firm", "mixed", worker, 2), Pool("spot", "mixed", spot, 6)))
    times_s, histories = (0.5, 700.0, 1999.0), 4000
    down = np.zeros((len(times_s), 7))
    interrupted = 0
    for seed in range(histories):
        events = draws.interruptions(fleet, {spot.gpu.name: terms}, 2000.0, np.random.default_rng(seed))
        assert {event.worker for event in events} <= set(range(2, 8))
        interrupted += sum(event.kind == "down" and event.time_s > 0 for event in events)
        for i, time_s in enumerate(times_s):
            change = {"down": 1, "up": -1}
            down[i, sum(change[event.kind] for event in events if event.time_s <= time_s)] += 1
    expected = binom.pmf(np.arange(7), 6, terms.down_frac)
    assert down / histories == pytest.approx(np.tile(expected, (3, 1)), abs=0.025)
    assert interrupted / histories == pytest.approx(6 * 2000 / (600 + 120), rel=0.03)


@pytest.mark.long
def test_spot_workers_are_interrupted_at_random_and_the_plan_says_what_comes_of_it() -> None:
    """Each is away for 20 s of every 140: all of the histories are simulated, and counted, here as well."""
    task = question(fleet={"gpus": ["h100-80g"], "prices": {"h100-80g": {"reserved": 9.0, **ON_SPOT}}})
    found = plan(task, traffic(requests=300), CATALOG)
    (repeats,) = found.certificate.repeats
    assert repeats.what.startswith("histories") and f"{repeats.kept} of {repeats.runs} histories" in str(
        fact_sentences_of(found.certificate.binding)
    )
    terms = {pool.type.gpu.name: Spot(1.0, 30.0, 20.0) for pool in found.fleet.pools}
    verdicts = []
    for number in range(repeats.runs):
        events = draws.interruptions(
            found.fleet, terms, found.trace.duration_s, np.random.default_rng([0, number])
        )
        disturbed = replace(found.fleet, disturbances=events)
        verdicts.append(judge_slo(simulate(disturbed, found.trace, limits=found.slo.limits), found.slo))
    assert repeats.kept == sum(verdict.holds for verdict in verdicts)
    assert repeats.attainment_frac.mean == pytest.approx(np.mean([each.attainment_frac for each in verdicts]))
