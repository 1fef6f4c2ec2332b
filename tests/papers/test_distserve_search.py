"""DistServe's placement search: by hand, against brute force, and against what its own program found."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import distserve_search as benchmark
from benchmarks.distserve_search import FirstRequests, highest_on_grid
from planner.documents.catalog import read_catalog
from planner.domain import Gpu, Limit, Slo
from planner.errors import InputError
from planner.files.checked_files import read_json, read_yaml
from planner.fleet import Fleet, Network, Policies, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.papers import distserve_search
from planner.papers.goodput import find_goodput, poisson_traffic
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

SHARED = Path(__file__).parents[3] / "shared"
GPU = Gpu("paper", 1e3, 100.0, 1000.0, "wire", 10.0, 1.0, 4, 1.0, "paper", "paper")
LLM = Llm("paper", layers=4, hidden=4, heads=2, kv_heads=1, head_dim=1, ffn=8, vocab=10, context_tokens=64)
SETTING = distserve_search.ServingSetting(LLM, Policies(), Network(math.inf), Network(math.inf))


def instance(tp: int, pp: int = 1, step_s: float = 1.0) -> WorkerType:
    latency = StepLatency((1.0, 2.0), (step_s, step_s), 0.0, 0.0, 0.0, 0.0, 0.0, "made up")
    return WorkerType(GPU, tp, latency, 1600, 64, 4, pp)


def by_type(rates: dict[tuple[int, int], float]) -> distserve_search.Measure:
    """Goodput told by the TP and PP of the last pool."""
    return lambda fleet, to_beat_rps: rates[fleet.pools[-1].type.tp, fleet.pools[-1].type.pp]


def test_algorithm_1_takes_each_phase_by_its_rate_per_gpu() -> None:
    """Prefill 2 on one GPU, 5 on two: 2.5 each, the two; decode 3 and 4: the one. 11 requests/s: ceil(11 / 5)
    = 3 and ceil(11 / 3) = 4.
    """
    types = [instance(1), instance(2)]
    found = distserve_search.high_affinity(
        SETTING, types, types, 11.0, by_type({(1, 1): 2.0, (2, 1): 5.0}), by_type({(1, 1): 3.0, (2, 1): 4.0})
    )
    assert [(pool.type.tp, pool.count) for pool in found.fleet.pools] == [(2, 3), (1, 4)]
    assert [row.gpu_rate_rps for row in found.measured[1]] == [3.0, 2.0]  # the instant prefill is no GPU


def test_a_whole_number_of_instances_is_not_rounded_up() -> None:
    """0.3 = 3 x 0.1, which is 0.30000000000000004."""
    types = [instance(1)]
    measure = by_type({(1, 1): 0.1})
    found = distserve_search.high_affinity(SETTING, types, types, 3 * 0.1, measure, measure)
    assert [pool.count for pool in found.fleet.pools] == [3, 3]


def test_algorithm_2_keeps_a_stage_of_both_in_a_node() -> None:
    """Four GPUs a node. One stage: 1 + 1, 1 + 2, 2 + 1, 2 + 2. The pipelines of two stages take 2 GPUs a node
    each on two nodes: 4 + 4 on eight. Not 1 + the pipeline, whose stages would have nothing beside them.
    """
    types = [instance(1), instance(2), instance(2, 2)]
    for nodes, pairs in ((1, 4), (2, 5)):
        found = distserve_search.low_affinity(
            SETTING, types, types, 1.0, lambda fleet, to_beat_rps: 1.0, nodes=nodes
        )
        assert len(found.measured[0]) == pairs


def test_algorithm_2_replicates_the_best_pair() -> None:
    """Per GPU: 2 / 2 of the small pair, 4 / 3 of 1 + 2, 2 / 3 of 2 + 1, 4 / 4 of the large. 10 / 4: 3."""
    types = [instance(1), instance(2)]
    rates = {(1, 1): 2.0, (2, 1): 4.0}
    found = distserve_search.low_affinity(SETTING, types, types, 10.0, by_type(rates), nodes=1)
    assert [(pool.type.tp, pool.count) for pool in found.fleet.pools] == [(1, 3), (2, 3)]


def test_pairs_that_cannot_win_are_not_measured() -> None:
    """The best is asked first; the others carry less per GPU, which one run each shows."""

    class Carries:
        def __init__(self) -> None:
            self.asked: list[tuple[int, float]] = []

        def carries(self, fleet: Fleet, rate_rps: float) -> bool:
            self.asked.append((fleet.gpus, rate_rps))
            return rate_rps <= (4.0 if fleet.gpus == 2 else 5.0)

        def run(self, fleet: Fleet, rate_rps: float) -> Simulation:
            raise NotImplementedError

    rule = Carries()
    types = [instance(1), instance(2)]
    found = distserve_search.low_affinity(
        SETTING, types, types, 1.0, distserve_search.measured_by(rule), nodes=1
    )
    assert [row.rate_rps > 0 for row in found.measured[0]] == [True, False, False, False]
    assert [gpus for gpus, _ in rule.asked][-3:] == [3, 3, 4]


def test_types_that_carry_nothing_are_said_so() -> None:
    with pytest.raises(InputError, match="no instance keeps the SLO at any rate"):
        distserve_search.low_affinity(
            SETTING, [instance(1)], [instance(1)], 1.0, lambda fleet, to_beat_rps: 0.0, nodes=1
        )


def test_a_search_of_phases_needs_a_limit_on_each() -> None:
    with pytest.raises(InputError, match="a limit on ttft and one on"):
        distserve_search.split_slo(Slo((Limit("ttft", 0.9, 1.0),)))


@pytest.mark.parametrize("rate_rps", [6.0, 11.0, 15.0])
def test_free_counts_are_those_of_all_fleets(rate_rps: float) -> None:
    """A prompt takes a step of 0.4 s or 0.15 s (on two GPUs), a token 0.1 s or 0.06 s, four at once: some 5
    requests/s an instance. Every smaller fleet is simulated; none holds.
    """
    prefills = [instance(1, step_s=0.4), instance(2, step_s=0.15)]
    decodes = [instance(1, step_s=0.1), instance(2, step_s=0.06)]
    slo = Slo((Limit("ttft", 0.9, 1.0), Limit("tpot", 0.9, 0.3)))
    lengths = Trace("made", np.arange(3.0), np.array([10, 20, 30]), np.array([4, 8, 12]))
    rules = distserve_search.steady_rules(slo, poisson_traffic(lengths), seeds=1)
    start = distserve_search.pair_fleet(SETTING, prefills[0], decodes[0])
    found = distserve_search.free_counts(SETTING, prefills, decodes, rate_rps, rules, start)
    assert rules.whole.carries(found, rate_rps)
    fewer = distserve_search.smaller_neighbours(found, rules.whole, rate_rps)
    assert all(one.workers == found.workers - 1 and not carries for one, carries in fewer)
    counts = range(1, found.gpus)
    smaller = [
        fleet
        for p, d, n, m in itertools.product(prefills, decodes, counts, counts)
        if (fleet := distserve_search.pair_fleet(SETTING, p, d, counts=(n, m))).gpus < found.gpus
    ]
    assert smaller and not any(rules.whole.carries(fleet, rate_rps) for fleet in smaller)


def test_the_planners_own_fits_make_instances() -> None:
    """Llama-3.1-8B has 32 layers and fits one A100; OPT-66B (132 GB) needs two, however they share it."""
    catalog = read_catalog()
    gpu = catalog.gpu("a100-80g")
    small = distserve_search.instance_types(catalog.llm("llama-3.1-8b"), gpu, catalog, nodes=1)
    assert {(type_.tp, type_.pp) for type_ in small} == {
        (tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8
    }
    large = distserve_search.instance_types(catalog.llm("opt-66b"), gpu, catalog, nodes=1)
    assert min(type_.gpus for type_ in large) == 2 and (2, 1) in {(t.tp, t.pp) for t in large}


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize(("llm", "gpus"), [("facebook/opt-13b", 4), ("facebook/opt-66b", 8)])
def test_every_pair_has_the_goodput_that_distserve_found(llm: str, gpus: int) -> None:
    """Its own rule, requests and step times: all its configurations, so its winners too, ties included."""
    document = read_json(SHARED / "reference" / "distserve" / "search_results.json")
    asked = {"model": llm, "backend": "distserve", "gpn": gpus}
    searches = document["simdistserve_searches"]
    (theirs,) = [search for search in searches if search["args"].items() >= asked.items()]
    catalog = read_catalog()
    shape, gpu = catalog.llm(llm), catalog.gpu("a100-80g")
    types = {
        (type_.tp, type_.pp): type_
        for type_ in benchmark.instances(read_yaml(benchmark.FITS)[llm], shape, gpu, memory=False)
    }
    setting = distserve_search.ServingSetting(shape, benchmark.POLICIES, benchmark.FREE, benchmark.FREE)
    lengths = benchmark.lengths_of(SHARED / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv")
    assert len(lengths) == 16_519
    ttft_s, tpot_s = benchmark.LIMITS_S[llm]
    slo = Slo((Limit("ttft", 0.9, ttft_s), Limit("tpot", 0.9, tpot_s)))
    rule = FirstRequests(slo, benchmark.as_drawn_by_distserve(lengths))

    def gpu_rate_rps(fleet: Fleet) -> float:
        return highest_on_grid(lambda rate: rule.carries(fleet, rate * fleet.gpus), 5.0, 0.25).rate_rps

    compared = 0
    for (_, tp_p, pp_p, tp_d, pp_d), rate_rps, _ in theirs["per_config"]:
        if rate_rps is not None:
            fleet = distserve_search.pair_fleet(setting, types[tp_p, pp_p], types[tp_d, pp_d])
            assert gpu_rate_rps(fleet) == rate_rps
            compared += 1
    assert compared == theirs["configs_ok"]


def test_free_counts_carry_what_they_were_asked_for_and_little_more() -> None:
    slo = Slo((Limit("ttft", 0.9, 1.0), Limit("tpot", 0.9, 0.3)))
    rules = distserve_search.steady_rules(
        slo, poisson_traffic(Trace("one", np.arange(2.0), np.array([9, 9]), np.array([5, 5]))), seeds=1
    )
    types = [instance(1, step_s=0.2)]
    found = distserve_search.free_counts(
        SETTING, types, types, 6.0, rules, distserve_search.pair_fleet(SETTING, *types, *types)
    )
    assert find_goodput(rules.whole, found, guess_rps=6.0).rate_rps >= 6.0


def test_opt_175b_gets_at_least_the_papers_own_placement() -> None:
    """Section 6.2: prefill tp3 pp3 and decode tp4 pp3 on ShareGPT within 4 s and 200 ms. It is among the
    pairs, and what the search takes carries no less per GPU.
    """
    catalog = read_catalog()
    llm, gpu = catalog.llm("opt-175b"), catalog.gpu("a100-80g")
    rng = np.random.default_rng(0)
    n, m = (np.clip(rng.lognormal(np.log(k), 0.9, 2000), 4, most) for k, most in ((500, 1500), (135, 500)))
    lengths = Trace("made", np.arange(2000.0), n.astype(np.int64), m.astype(np.int64))
    within = Network(gpu.link_bytes_per_s, is_shared=False)
    setting = distserve_search.ServingSetting(llm, Policies(), within, within)
    slo = Slo((Limit("ttft", 0.9, 4.0), Limit("tpot", 0.9, 0.2)))
    whole = distserve_search.steady_rules(slo, poisson_traffic(lengths), seeds=1).whole
    types = {(kind.tp, kind.pp): kind for kind in distserve_search.instance_types(llm, gpu, catalog, nodes=3)}
    some = [types[key] for key in ((3, 3), (4, 3), (3, 2), (4, 2), (2, 4))]
    found = distserve_search.low_affinity(
        setting, some, some, 1.0, distserve_search.measured_by(whole), nodes=3
    )
    pairs = [tuple((pool.type.tp, pool.type.pp) for pool in row.fleet.pools) for row in found.measured[0]]
    assert ((3, 3), (4, 3)) in pairs
    own = distserve_search.pair_fleet(setting, types[3, 3], types[4, 3], network=within)
    theirs = find_goodput(whole, own, guess_rps=4.0).rate_rps / own.gpus
    assert theirs > 0.1
    assert found.measured[0][0].gpu_rate_rps >= theirs
