"""The cheapest mix against hand arithmetic, enumeration, its own constraints and other solvers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import cli
from planner.documents.allocation_file import parse_instance
from planner.errors import InfeasibleError, InputError
from planner.solvers import allocation, backend
from planner.solvers.allocation import Allocation, AllocationInstance, allocate
from planner.solvers.backend import Engine

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "peers" / "melange.py"
MELANGE = ROOT.parent / "shared" / "reference" / "melange"
EXAMPLE = {
    "buckets": [{"name": "short", "rate_rps": 12.0}, {"name": "long", "rate_rps": 0.5}],
    "types": [{"name": "a100", "cost_usd_per_h": 3.67, "stock": None, "rate_rps": [6.0, 0.4]}],
}
TYPE = {"name": "a", "cost_usd_per_h": 1, "rate_rps": [1, 1]}


def instance(
    rate: list[float],
    sustained: list[list[float]],
    price: list[float],
    stock: list[int | None] | None = None,
    factor: int | None = None,
) -> AllocationInstance:
    """`sustained` by type, as in the file."""
    buckets, types = (
        tuple(f"{kind}{i}" for i in range(n)) for kind, n in (("b", len(rate)), ("t", len(price)))
    )
    free: list[int | None] = [None] * len(price)
    return AllocationInstance(
        buckets, types, np.array(rate), np.array(sustained).T, np.array(price), tuple(stock or free), factor
    )


def random_instance(
    rng: np.random.Generator, buckets: int, types: int, factor: int | None
) -> AllocationInstance:
    """Prices near proportional to speed, a third of the types limited, a few pairs that cannot serve."""
    sustained = rng.uniform(0.3, 6, (types, buckets)) * rng.uniform(0.5, 2, (types, 1))
    sustained[rng.random(sustained.shape) < 0.15] = 0
    sustained[0] = np.maximum(sustained[0], 0.3)
    price = np.round(sustained.mean(axis=1) * rng.uniform(0.8, 1.2, types), 2) + 0.01
    stock = [None if rng.random() < 0.67 else int(rng.integers(0, 4)) for _ in range(types)]
    stock[0] = None
    return instance(rng.uniform(0.1, 5, buckets).tolist(), sustained.tolist(), price.tolist(), stock, factor)


def assert_keeps_constraints(asked: AllocationInstance, found: Allocation) -> None:
    """served, capacity, stock and cost, from the answer alone."""
    for i, rate in enumerate(asked.rate_rps):
        assert found.share[i].sum() == pytest.approx(1 if rate else 0)
    loads = np.zeros(len(asked.types))
    for i, j in np.argwhere(found.share > 0).tolist():
        loads[j] += asked.rate_rps[i] * found.share[i, j] / asked.sustained_rps[i, j]
    assert (loads <= np.array(found.counts) + 1e-6).all()
    assert all(s is None or n <= s for n, s in zip(found.counts, asked.stock, strict=True))
    assert found.cost_usd_per_h == pytest.approx(np.dot(found.counts, asked.price_usd_per_h))


def by_slices(asked: AllocationInstance) -> float:
    """Cheapest over every way to deal whole slices."""
    f = asked.slice_factor or 1
    types = range(len(asked.types))
    ways = [way for way in itertools.product(range(f + 1), repeat=len(types)) if sum(way) == f]
    best = np.inf
    for deal in itertools.product(ways, repeat=len(asked.buckets)):
        slices = np.array(deal)
        if (slices[asked.sustained_rps == 0] > 0).any():
            continue
        work = asked.rate_rps[:, None] * slices / f
        load = np.divide(work, asked.sustained_rps, out=np.zeros_like(work), where=slices > 0).sum(axis=0)
        counts = np.ceil(load - 1e-9)
        if all(s is None or n <= s for n, s in zip(counts, asked.stock, strict=True)):
            best = min(best, float(counts @ asked.price_usd_per_h))
    return best


def by_knapsack(asked: AllocationInstance) -> float:
    """Two types: each count of the first is filled with the buckets it is relatively best at, in fractions;
    the rest says how many of the second."""
    r, (k0, k1) = asked.rate_rps, asked.sustained_rps.T
    only0, only1 = k1 == 0, k0 == 0
    both = ~only0 & ~only1
    forced = (r[only0] / k0[only0]).sum()
    rest = (r[only1] / k1[only1]).sum()
    best = np.inf
    for count in range(60):
        free = count - forced
        if free < -1e-9 or (asked.stock[0] is not None and count > asked.stock[0]):
            continue
        second = rest
        for i in sorted(np.flatnonzero(both).tolist(), key=lambda i: k1[i] / k0[i]):
            share = min(1.0, max(free, 0.0) * k0[i] / r[i])
            free -= share * r[i] / k0[i]
            second += (1 - share) * r[i] / k1[i]
        needed = int(np.ceil(second - 1e-9))
        if asked.stock[1] is None or needed <= asked.stock[1]:
            best = min(best, float(np.dot([count, needed], asked.price_usd_per_h)))
    return best


def cost(asked: AllocationInstance) -> float:
    """Infinite where there is no answer."""
    try:
        found = allocate(asked)
    except InfeasibleError:
        return np.inf
    assert found.is_optimal and found.bound_usd_per_h == found.cost_usd_per_h
    assert_keeps_constraints(asked, found)
    return found.cost_usd_per_h


def test_three_small_workers_beat_one_large() -> None:
    """10 requests/s. A: 4 requests/s, 1 USD/h. B: 20, 4 USD/h. Three A cost 3, one B costs 4."""
    assert allocate(instance([10.0], [[4.0], [20.0]], [1.0, 4.0])).counts == (3, 0)


def test_split_buckets_share_a_worker() -> None:
    """Two buckets of 0.5 workers each on A fill one A; whole buckets on different types would need two."""
    found = allocate(instance([1.0, 2.0], [[2.0, 4.0]], [3.0]))
    assert found.counts == (1,) and found.cost_usd_per_h == 3.0


@pytest.mark.long
@pytest.mark.parametrize("block", range(5))
def test_free_split_is_as_cheap_as_enumeration(block: int) -> None:
    """40 instances per block, two types: counts enumerated, the split by fractional knapsack."""
    rng = np.random.default_rng(block)
    for _ in range(40):
        asked = random_instance(rng, int(rng.integers(1, 7)), 2, None)
        assert cost(asked) == pytest.approx(by_knapsack(asked))


@pytest.mark.parametrize("block", range(5))
def test_whole_slices_are_as_cheap_as_enumeration(block: int) -> None:
    """40 instances per block, up to three types, three buckets and three slices: every deal enumerated."""
    rng = np.random.default_rng(100 + block)
    for _ in range(40):
        asked = random_instance(
            rng, int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
        )
        assert cost(asked) == pytest.approx(by_slices(asked))


def test_more_stock_never_costs_more() -> None:
    rng = np.random.default_rng(7)
    for _ in range(25):
        asked = random_instance(rng, 8, 4, None)
        few = [None if s is None else int(rng.integers(0, 3)) for s in asked.stock]
        many = [None if s is None else s + int(rng.integers(0, 3)) for s in few]
        costs = [cost(replace(asked, stock=tuple(stock))) for stock in (few, many)]
        assert costs[1] <= costs[0] * (1 + 1e-9)


def test_double_prices_keep_the_plan() -> None:
    rng = np.random.default_rng(8)
    for _ in range(25):
        asked = random_instance(rng, 8, 4, None)
        doubled = replace(asked, price_usd_per_h=2 * asked.price_usd_per_h)
        assert allocate(doubled).counts == allocate(asked).counts


@pytest.mark.long
@pytest.mark.parametrize("engine", ["cbc", "ortools"])
def test_solvers_agree(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    stock = [int(rng.integers(1, 4)) if rng.random() < 0.5 else None for _ in range(12)]
    instances = [random_instance(rng, 10, 5, each) for each in stock]
    costs = [cost(each) for each in instances]
    monkeypatch.setattr(allocation, "run_highs", partial(backend.run_highs, engine=engine))
    assert [cost(each) for each in instances] == pytest.approx(costs)


def test_a_type_that_another_replaces_is_left_out_without_changing_the_cost() -> None:
    """The last type costs what the first does and does less; the second does the same at its own stock."""
    with_it = instance([3.0], [[1.0], [1.0], [0.9]], [2.0, 1.0, 2.0], [None, 1, None])
    assert allocate(with_it).counts == (2, 1, 0)


def test_no_traffic_needs_no_worker() -> None:
    found = allocate(instance([0.0], [[0.0]], [1.0]))
    assert found.counts == (0,) and found.cost_usd_per_h == 0 and found.is_optimal


def test_bucket_that_nothing_serves_is_infeasible_by_latency() -> None:
    with pytest.raises(InfeasibleError, match="serves bucket 'b1'") as error:
        allocate(instance([1.0, 1.0], [[1.0, 0.0]], [1.0]))
    assert (error.value.kind, error.value.constraint) == ("latency", "bucket b1")


def test_short_stock_names_the_fewest_workers_that_would_help() -> None:
    """10 requests/s: 2 x 1 + 1 x 3 carry 5. Two more of the second type carry the rest, five of the first."""
    with pytest.raises(InfeasibleError) as error:
        allocate(instance([10.0], [[1.0], [3.0]], [1.0, 9.0], [2, 1]))
    assert (error.value.kind, error.value.constraint) == ("capacity", "stock of t1")
    assert error.value.relaxation == "2 more of t1"


@pytest.mark.parametrize("engine", ["highs", "cbc", "ortools"])
def test_a_stopped_solver_claims_no_more_than_it_knows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near-tied prices, six types: no proof in a hundredth of a second; bound <= optimum <= cost."""
    rng = np.random.default_rng(3)
    sustained = rng.uniform(1, 4, (6, 25))
    price = np.round(sustained.mean(axis=1) * rng.uniform(0.99, 1.01, 6), 3)
    asked = instance(rng.uniform(1, 9, 25).tolist(), sustained.tolist(), price.tolist())
    best = allocate(asked)
    monkeypatch.setattr(allocation, "run_highs", partial(backend.run_highs, engine=engine))
    stopped = allocate(asked, time_limit_s=0.01)
    assert best.is_optimal
    assert_keeps_constraints(asked, stopped)
    assert stopped.bound_usd_per_h <= best.cost_usd_per_h + 1e-6 <= stopped.cost_usd_per_h + 2e-6
    assert not stopped.is_optimal or stopped.cost_usd_per_h == pytest.approx(best.cost_usd_per_h)


def test_the_file_of_the_design_is_read_as_written() -> None:
    """12/6 + 0.5/0.4 = 3.25 workers: four at 3.67 USD/h."""
    found = allocate(parse_instance(EXAMPLE))
    assert found.counts == (4,) and found.cost_usd_per_h == pytest.approx(14.68)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"buckets": []}, "buckets: expected a list with at least one"),
        ({"slices": 4}, "unknown key 'slices'"),
        ({"slice_factor": 0}, "slice_factor: expected a whole number >= 1"),
        (
            {"buckets": [{"name": "a", "rate_rps": -1}, {"name": "b", "rate_rps": 1}]},
            "rate_rps: expected a number",
        ),
        ({"buckets": [{"name": "a", "rate_rps": 1}] * 2}, "'a' is given twice"),
        ({"types": [TYPE | {"rate_rps": [1]}]}, "a list of 2 rates"),
        ({"types": [TYPE | {"cost_usd_per_h": "1"}]}, "cost_usd_per_h: expected a number"),
        ({"types": [TYPE | {"stock": 1.5}]}, "stock: expected a whole"),
        ({"types": [TYPE | {"rate_rps": [1e-7, 1]}]}, "write 0 if"),
        ({"types": [TYPE | {"price": 1}]}, "unknown key 'price'"),
        ({"types": [4]}, "expected an object"),
    ],
)
def test_bad_field_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_instance(EXAMPLE | change)


MELANGE_CONFIG = {
    "gpu_info": {
        "A10G": {"cost": 1.01, "tputs": [[2, 1], [5, 0.001]]},
        "A100": {"cost": 3.67, "tputs": [[20, 20], [40, 20]]},
    },
    "workload_distribution": [[0.2, 0.1], [0.5, 0.2]],
    "total_request_rate": 30.0,
    "availability": {"A10G": 2},
}


def test_melanges_configuration_is_an_instance() -> None:
    """30 requests/s in four buckets; an A10G serves no "1, 1", and there are two."""
    asked = parse_instance(MELANGE_CONFIG | {"slice_factor": 4})
    assert asked.buckets == ("0, 0", "0, 1", "1, 0", "1, 1") and asked.types == ("A10G", "A100")
    assert asked.rate_rps == pytest.approx([6, 3, 15, 6])
    assert asked.sustained_rps.T.tolist() == [[2, 1, 5, 0], [20, 20, 40, 20]]
    assert (asked.stock, asked.slice_factor) == ((2, None), 4)
    assert parse_instance(MELANGE_CONFIG).slice_factor is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu_info": {"A10G": 4}}, "gpu_info, availability|gpu_info: A10G: expected an object"),
        ({"gpu_info": {"A10G": {"cost": 1.0, "tputs": [[2, 1]]}}}, "expected a list of 4 rates"),
        ({"gpu_info": {"A10G": {"cost": 1.0, "tputs": [2, 1]}}}, "tputs: expected a list of lists"),
        ({"workload_distribution": [[20, 10], [50, 121]]}, "must sum to 1, found a sum of 201"),
        ({"workload_distribution": [[0.2, 0.1], [0.5, 0]]}, "must sum to 1, found a sum of 0.8"),
        ({"gpu_info": {"A10G": {"cost": 1.0, "tput": [[2]]}}}, "unknown key 'tput'"),
        ({"availability": {"B10": 1}}, "for some of them a count"),
        ({"total_request_rate": -3}, "total_request_rate: expected a number >= 0"),
        ({"total_request_rat": 3}, "unknown key 'total_request_rat'"),
    ],
)
def test_a_bad_field_of_melanges_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_instance(MELANGE_CONFIG | change)


@pytest.mark.shared
@pytest.mark.skipif(not MELANGE.is_dir(), reason="no reference data beside the checkout")
def test_melanges_instances_cost_no_more_than_any_split_of_theirs() -> None:
    """Its 29 instances: benchmarks/peers/melange.py compares costs and recomputes every constraint."""
    done = subprocess.run([sys.executable, BENCHMARK, MELANGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "29 cases, 29 proven cheapest, 0 failed" in done.stdout


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", "allocate", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_command_prints_the_answer_of_the_design(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(EXAMPLE))
    assert run(monkeypatch, path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "status": "optimal",
        "cost_usd_per_h": 14.68,
        "bound_usd_per_h": 14.68,
        "counts": {"a100": 4},
        "shares": {"short": {"a100": 1.0}, "long": {"a100": 1.0}},
    }
    assert run(monkeypatch, path) == 0
    assert "14.68 USD/h, the cheapest" in capsys.readouterr().out


def test_names_with_brackets_are_printed_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets were taken for markup: "chat [eu]" was printed as "chat", and "[/x]" ended in a traceback."""
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(EXAMPLE).replace("short", "chat [eu]").replace("long", "[/x]"))
    assert run(monkeypatch, path) == 0
    printed = capsys.readouterr().out
    assert "chat [eu]" in printed and "[/x]" in printed


def test_command_ends_with_3_where_nothing_carries_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(json.dumps(EXAMPLE).replace("null", "1"))
    assert run(monkeypatch, path, "--json") == 3
    assert json.loads(capsys.readouterr().out)["relaxation"] == "3 more of a100"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "the top level is a list"),
        ("{", "is not valid JSON"),
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"a": NaN}', "NaN is no number"),
    ],
)
def test_command_names_the_file_that_is_no_instance(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "instance.json"
    path.write_text(text)
    assert run(monkeypatch, path) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"plan: {path}: ") and says in error
