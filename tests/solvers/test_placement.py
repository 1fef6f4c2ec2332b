"""Workers onto nodes against enumeration, a MIP with numbered nodes, and the rules checked on the answer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pulp
import pytest

from planner.domain import Gpu
from planner.errors import InfeasibleError, PlannerError
from planner.fleet import Fleet, Pool, Role, WorkerType
from planner.models.latency import StepLatency
from planner.models.llm import Llm
from planner.solvers import placement
from planner.solvers.backend import Engine, cp_solver, run_highs
from planner.solvers.placement import NodePlacement, place_fleet
from planner.solvers.whole_nodes import fewest_nodes

GPU = Gpu("g", 80e9, 2e12, 3e14, "nvlink", 3e11, 400.0, 8, 1.0, "g", "g")
LATENCY = StepLatency((1.0, 1000.0), (0.01, 0.1), 0.0, 1e-5, 1e-7, 0.0, 0.0, basis="by hand")
LLM = Llm("l", 32, 4096, 32, 8, 128, 14336, 128256, 8192)


def pool(name: str, role: Role, count: int, tp: int, pp: int = 1, gpu: Gpu = GPU) -> Pool:
    return Pool(name, role, WorkerType(gpu, tp, LATENCY, 160_000, 2048, 256, pp), count)


def fleet(*pools: Pool) -> Fleet:
    return Fleet(LLM, pools)


def pair(prefill: int, decode: int, tp: int = 2, pp: int = 1, decode_tp: int | None = None) -> Fleet:
    return fleet(pool("p", "prefill", prefill, tp, pp), pool("d", "decode", decode, decode_tp or tp, pp))


def assert_keeps_rules(asked: Fleet, found: NodePlacement) -> None:
    """Every stage of every worker once; TP groups whole and on one node; no GPU used twice."""
    stages: Counter[tuple[str, int, int]] = Counter()
    pools = {each.name: each for each in asked.pools}
    for node in found.nodes:
        gpus = [gpu for part in node.parts for gpu in part.gpus]
        assert len(gpus) == len(set(gpus)) and set(gpus) <= set(range(8)) and gpus
        for part in node.parts:
            tp = pools[part.pool].type.tp
            assert pools[part.pool].type.gpu.base == node.kind
            assert len(part.gpus) == tp * (part.last - part.first + 1)
            for stage in range(part.first, part.last + 1):
                stages[part.pool, part.worker, stage] += 1
    wanted = {(p.name, w, s) for p in asked.pools for w in range(p.count) for s in range(p.type.pp)}
    assert set(stages) == wanted and set(stages.values()) == {1}


def partitions(workers: Sequence[Pool], room: int) -> Iterator[list[list[Pool]]]:
    """Every way to put workers on nodes of `room` GPUs."""
    if not workers:
        yield []
        return
    first, *rest = workers
    for nodes in partitions(rest, room):
        yield [[first], *nodes]
        for i, node in enumerate(nodes):
            if sum(each.type.gpus for each in node) + first.type.gpus <= room:
                yield [*nodes[:i], [first, *node], *nodes[i + 1 :]]


def enumerated(asked: Fleet) -> tuple[int, float] | None:
    """Fewest nodes, then the least share of KV between them, over all partitions."""
    workers = [each for each in asked.pools for _ in range(each.count)]
    total = Counter(each.role for each in workers)
    best = None
    for nodes in partitions(workers, 8):
        roles = [Counter(each.role for each in node) for node in nodes]
        inside = 0.0
        if total["prefill"]:
            inside = sum(min(r["prefill"] / total["prefill"], r["decode"] / total["decode"]) for r in roles)
        value = (len(nodes), round(1 - inside, 9))
        best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("block", range(4))
def test_as_few_nodes_and_as_little_kv_between_them_as_enumeration(block: int) -> None:
    """12 fleets per block of up to seven workers in up to three pools."""
    rng = np.random.default_rng(block)
    for _ in range(12):
        tps = [int(tp) for tp in rng.choice([1, 2, 3, 4, 8], 3)]
        counts = rng.integers([0, 1, 1], [3, 4, 4])
        named: list[tuple[str, Role]] = [("m", "mixed"), ("p", "prefill"), ("d", "decode")]
        asked = fleet(*(pool(*name, int(n), tp) for name, n, tp in zip(named, counts, tps, strict=True)))
        expected = enumerated(asked)
        assert expected is not None
        found = place_fleet(asked)
        assert found.is_optimal and found.bound == len(found.nodes)
        assert_keeps_rules(asked, found)
        assert len(found.nodes) == expected[0]
        assert found.cross_frac == pytest.approx(expected[1], abs=1e-8)


@pytest.mark.parametrize("engine", ["highs", "cbc", "ortools"])
def test_mip_solvers_agree_with_cp_sat(engine: Engine) -> None:
    """Numbered nodes of 8 GPUs: fewest in use."""
    rng = np.random.default_rng(3)
    for _ in range(4):
        asked = fleet(
            *(pool(f"m{i}", "mixed", int(rng.integers(1, 4)), int(tp)) for i, tp in enumerate((1, 3, 5)))
        )
        workers = [each.type.tp for each in asked.pools for _ in range(each.count)]
        problem = pulp.LpProblem("nodes")
        used = [problem.add_variable(f"used_{n}", 0, 1, cat="Integer") for n in range(len(workers))]
        x = {
            (w, n): problem.add_variable(f"x_{w}_{n}", 0, 1, cat="Integer")
            for w in range(len(workers))
            for n in range(len(workers))
        }
        problem += pulp.lpSum(used)
        for w in range(len(workers)):
            problem += pulp.lpSum(x[w, n] for n in range(len(workers))) == 1
        for n in range(len(workers)):
            problem += pulp.lpSum(tp * x[w, n] for w, tp in enumerate(workers)) <= 8 * used[n]
        assert run_highs(problem, engine=engine).status == "optimal"
        found = place_fleet(asked)
        assert_keeps_rules(asked, found)
        assert len(found.nodes) == round(pulp.value(problem.objective))


def test_pairs_share_nodes_where_that_costs_no_node() -> None:
    """Four prefill and four decode workers of two GPUs fill two nodes: two of each on both, no KV between."""
    found = place_fleet(pair(4, 4))
    assert len(found.nodes) == 2 and found.cross_frac == 0
    for node in found.nodes:
        assert Counter(part.pool for part in node.parts) == {"p": 2, "d": 2}


def test_fewer_nodes_come_before_less_kv_between_them() -> None:
    """Two prefill workers of 4 GPUs, one decode of 8: two nodes, all KV between them."""
    found = place_fleet(fleet(pool("p", "prefill", 2, 4), pool("d", "decode", 1, 8)))
    assert len(found.nodes) == 2 and found.cross_frac == 1


def test_a_worker_larger_than_a_node_is_cut_between_stages() -> None:
    """TP 8 x PP 2: two nodes, a stage on each. Without a PP to cut at there is no placement."""
    asked = fleet(pool("m", "mixed", 1, 8, 2))
    found = place_fleet(asked)
    assert_keeps_rules(asked, found)
    assert [node.parts[0].first for node in found.nodes] == [0, 1]
    assert [str(node.parts[0]) for node in found.nodes] == ["m-0 stages 0-0", "m-0 stages 1-1"]
    with pytest.raises(InfeasibleError, match="a node of g has 8"):
        place_fleet(fleet(pool("m", "mixed", 1, 16)))


def test_a_search_that_finds_nothing_in_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cp_solver", lambda time_limit_s: cp_solver(0.0))
    with pytest.raises(PlannerError, match="nothing was found in 30 s"):
        place_fleet(pair(4, 4))


def test_kinds_have_nodes_of_their_own_and_caps_share_them() -> None:
    """A capped GPU lives in the nodes of its base; another kind does not."""
    capped, other = replace(GPU, name="g@300W"), replace(GPU, name="h", base="h")
    asked = fleet(
        pool("a", "mixed", 1, 4), pool("b", "mixed", 1, 4, gpu=capped), pool("c", "mixed", 1, 4, gpu=other)
    )
    assert Counter(node.kind for node in place_fleet(asked).nodes) == {"g": 1, "h": 1}


def test_hundreds_of_workers_are_placed_in_seconds() -> None:
    """300 + 200 + 100 workers of 2, 4 and 1 GPUs are 1500 GPUs: 188 nodes at least."""
    asked = fleet(pool("p", "prefill", 300, 2), pool("d", "decode", 200, 4), pool("m", "mixed", 100, 1))
    found = place_fleet(asked, time_limit_s=120)
    assert_keeps_rules(asked, found)
    assert len(found.nodes) == found.bound == 188


@pytest.mark.parametrize("tp", (1, 2, 4, 8))
def test_workers_of_several_nodes_take_the_nodes_that_are_counted(tp: int) -> None:
    """Two workers of tp 2 x pp 6, 24 GPUs, were put on four nodes of 8, in parts of 6; the bill counts three.
    So for any pipeline, also beside workers that fill what is left."""
    for pp, count, others in itertools.product((3, 5, 6, 7, 10, 12), (1, 2, 3), (0, 2)):
        if tp * pp <= 8:
            continue
        asked = fleet(pool("w", "mixed", count, tp, pp), pool("x", "mixed", others, 4))
        found = place_fleet(asked)
        assert_keeps_rules(asked, found)
        assert len(found.nodes) == fewest_nodes(8, [(tp * pp, count), (4, others)])
