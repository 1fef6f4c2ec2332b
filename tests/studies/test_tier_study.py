"""How much memory behind KV caches to buy: prices, sizes, break-even; against all sizes on small cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import CATALOG
from shares import some
from simulations import make_latency, make_pool

from planner.commands.tiers_command import best_line
from planner.documents.kv_tiers import KvTier, read_kv_tiers
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import CatalogError, InfeasibleError, InputError
from planner.search.problem.bill import bill_fleet
from planner.studies import tier_study
from planner.studies.tier_study import (
    TierChoice,
    TierSizes,
    TierStudy,
    break_even_tokens,
    choose_tiers,
    tier_grid,
    with_tiers,
)
from planner.studies.what_if import Study
from planner.traffic.trace import Trace

TIERS = {
    tier.name: tier
    for tier in (
        KvTier("cpu", "memory", 25e9, 8e9, 64e9, 30.0, "made up"),
        KvTier("nvme", "disk", 3e9, 50e9, 50e9, 1.0, "made up"),
        KvTier("store", "store", 25e9, 0.0, 1e12, 3.0, "made up"),
    )
}


def documents(seed: int, requests: int = 200) -> Trace:
    """Questions about documents of 2,048 tokens, more of them than the KV cache of an L40S holds."""
    rng = np.random.default_rng(seed)
    about, blocks = rng.integers(int(rng.choice([60, 120, 240])), size=requests), 8
    return Trace(
        name="documents",
        arrival_s=np.cumsum(rng.exponential(1 / float(rng.choice([8.0, 16.0])), requests)),
        input_tokens=np.full(requests, 256 * blocks + 60),
        output_tokens=rng.integers(5, 40, requests),
        prefix_offsets=blocks * np.arange(requests + 1),
        prefix_ids=(1000 * about[:, None] + np.arange(blocks)).ravel(),
        prefix_block_tokens=256,
    )


def question(**more: Any) -> PlanQuestion:
    document: dict[str, Any] = {
        "safety": "none",
        "llm": "meta-llama/Llama-3.1-8B",
        "slo": {"ttft": {"p90": "1 s"}},
        "fleet": {"gpus": ["l40s-48g"], "max_num_batched_tokens": [2048]},
        "policies": {"prefix_cache": True, "routing": ["cache-aware"]},
    }
    return parse_task(document | more, CATALOG)


def test_what_comes_with_a_node_is_free() -> None:
    """24 GB are 16 beyond the 8 of a node: 480 USD in 730 hours; a store is paid from its first byte."""
    assert tier_study.gpu_usd_per_h(TierSizes(8e9), TIERS) == 0
    assert tier_study.gpu_usd_per_h(TierSizes(24e9, 50e9), TIERS) == pytest.approx(480 / 730)
    assert tier_study.store_usd_per_h(TierSizes(store_bytes=730e9), TIERS) == pytest.approx(3.0)


def test_every_gpu_pays_for_its_memory() -> None:
    """In the price that the search sees, of rented and of capped rows alike."""
    asked = with_tiers(question(), TierSizes(24e9), TIERS)
    before, after = (each.priced_gpus(CATALOG)[0].price_usd_per_h for each in (question(), asked))
    assert after - before == pytest.approx(480 / 730)
    assert asked.policies.kv_offload == tier_study.to_offload(TierSizes(24e9), TIERS)


def test_idle_gpus_of_whole_nodes_pay_for_their_memory() -> None:
    """On a node of 8 GPUs all pay for 16 GB more; the table counted those that run a worker."""
    study = Study(documents(0), CATALOG, time_limit_s=600)
    asked = question(
        fleet={"gpus": ["l40s-48g"], "max_num_batched_tokens": [2048], "sold_as": {"l40s-48g": "node"}}
    )
    found = tier_study._choose_with_tiers(study, asked, TierSizes(24e9), TIERS, 60.0)
    assert found.fleet is not None and found.fleet.gpus < 8
    assert found.tiers_usd_per_h == pytest.approx(8 * 480 / 730)


def test_a_prefix_is_loaded_from_where_that_is_sooner() -> None:
    """A token takes a second per 1,024 to compute, in steps of 64; 10 us to load, or 3 ms."""
    worker = make_pool(make_latency((1 / 1024, 1.0)), kv_tokens=10_000, budget=64).type
    assert break_even_tokens(worker, 1e-5, 4096) == 16
    assert break_even_tokens(worker, 3e-3, 4096) is None


def test_the_catalog_is_read_and_what_cannot_be_is_refused(tmp_path: Path) -> None:
    assert {tier.kind for tier in read_kv_tiers().values()} == {"memory", "disk", "store"}
    (tmp_path / "kv_tiers.yaml").write_text("cpu: {kind: tape}\n")
    with pytest.raises(CatalogError, match="cpu: kind"):
        read_kv_tiers(tmp_path)


def test_a_question_without_caches_is_refused() -> None:
    study = Study(documents(0), CATALOG)
    with pytest.raises(InputError, match="tiers keep what leaves prefix caches"):
        choose_tiers(study, question(policies={}), TIERS)


def test_what_is_not_simulated_with_tiers_is_refused() -> None:
    """Pipelines were left out of the search in silence."""
    with pytest.raises(InputError, match="fleet: pp: is not simulated with KV tiers"):
        choose_tiers(
            Study(documents(0), CATALOG), question(fleet={"gpus": ["l40s-48g"], "pp": [1, 2]}), TIERS
        )


def test_the_best_tiers_are_said_in_words() -> None:
    none, some_tier = TierChoice(TierSizes(), 4.0, 0.0), TierChoice(TierSizes(16e9), 3.0, 0.1)
    assert best_line(TierStudy((none,), none, ())).startswith("Best: no tier, 4.00 USD/h")
    assert best_line(TierStudy((none, some_tier), some_tier, ())) == (
        "Best: 16 GB of memory per GPU, 3.00 USD/h, 25 % less than without tiers"
    )


def test_the_best_of_searches_that_were_cut_short_is_called_so() -> None:
    """It said that none of the tiers saves, where most of them were hardly searched."""
    none, cut = TierChoice(TierSizes(), 4.0, 0.0), TierChoice(TierSizes(16e9), math.inf, 0.0)
    cut = replace(cut, is_exhausted=False)
    assert best_line(TierStudy((none, cut), none, ())) == (
        "Best: no tier, 4.00 USD/h; no tier was found that saves more than it costs; 1 of 2 searches were "
        "cut short, raise --time-limit"
    )


def test_searches_that_are_cut_short_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(study: Study, task: PlanQuestion, sizes: TierSizes, *_: object) -> TierChoice:
        return TierChoice(sizes, math.inf, 0.0, is_exhausted=False)

    monkeypatch.setattr(tier_study, "_choose_with_tiers", stopped)
    with pytest.raises(InfeasibleError, match="searches were cut short") as caught:
        choose_tiers(Study(documents(0), CATALOG), question(), TIERS)
    assert not caught.value.is_proved


@pytest.mark.long
def test_idle_gpus_of_a_node_are_paid_with_their_memory() -> None:
    """One of 8 GPUs is in use: the price had all of them, the share of the tiers one, and nothing said so."""
    node = {"gpus": ["h100-80g"], "sold_as": {"h100-80g": "node"}, "max_num_batched_tokens": [2048]}
    study = Study(documents(0), CATALOG, time_limit_s=600)
    answer = tier_study._choose_with_tiers(study, question(fleet=node), TierSizes(24e9), TIERS, 10.0)
    assert answer.fleet is not None and (answer.fleet.gpus, answer.idle_gpus) == (1, 7)
    assert answer.tiers_usd_per_h == pytest.approx(8 * 480 / 730)
    assert answer.usd_per_h == pytest.approx(bill_fleet(answer.fleet).usd_per_h)


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(2), 1))
def test_the_choice_is_the_best_of_all_sizes_and_never_dearer_than_none(seed: int) -> None:
    trace = documents(seed)
    study = Study(trace, CATALOG, time_limit_s=600)
    found = choose_tiers(study, question(), TIERS)
    grid = tier_grid(TIERS, may_share=False)
    everything = [
        tier_study._choose_with_tiers(study, question(), TierSizes(memory, disk), TIERS, 60.0)
        for memory, disk in itertools.product(grid.memory_bytes, grid.disk_bytes)
    ]
    assert found.best.usd_per_h <= found.without.usd_per_h
    assert found.best.usd_per_h == pytest.approx(min(each.usd_per_h for each in everything))


def test_sizes_are_searched_one_tier_at_a_time() -> None:
    """Of a made-up cost with its least at 16 GB and the whole disk; equal costs go to the least memory."""
    grid = tier_grid(TIERS, may_share=True)
    asked = []

    def answer(sizes: TierSizes) -> tier_study.TierChoice:
        asked.append(sizes)
        cost = 10 + abs(sizes.memory_bytes - 16e9) / 1e9 + abs(sizes.disk_bytes - 50e9) / 1e10
        return tier_study.TierChoice(sizes, cost + sizes.store_bytes, 0.0)

    assert tier_study.search_sizes(grid, answer).sizes == TierSizes(16e9, 50e9)
    assert replace(asked[0]) == TierSizes()


def test_a_size_beyond_one_that_saves_nothing_is_found() -> None:
    """A second GPU is spared from 32 GB of memory on, or from 25 GB of disk on, which costs less. 16 GB spare
    nothing, and the search stopped there: the answer was that no tier saves more than it costs.
    """

    def answer(sizes: TierSizes) -> TierChoice:
        gpus = 1 if sizes.memory_bytes >= 32e9 or sizes.disk_bytes >= 25e9 else 2
        tiers_usd_per_h = gpus * (max(sizes.memory_bytes - 8e9, 0) / 64e9 + sizes.disk_bytes / 250e9)
        return TierChoice(sizes, gpus + tiers_usd_per_h, tiers_usd_per_h)

    assert tier_study.search_sizes(tier_grid({"cpu": TIERS["cpu"]}, may_share=False), answer).sizes == (
        TierSizes(32e9)
    )
    disk = replace(TIERS["nvme"], free_bytes=0.0)
    grid = tier_grid({"cpu": TIERS["cpu"], "nvme": disk}, may_share=False)
    assert tier_study.search_sizes(grid, answer).sizes == TierSizes(0.0, 25e9)


def test_tiers_that_alone_make_a_fleet_possible_are_found() -> None:
    """Without a tier, and with less than 32 GB, there is no fleet: an infinite price counted as equal to
    every other, and the answer was that no fleet keeps the SLO with any tier.
    """
    grid = tier_grid({"cpu": TIERS["cpu"]}, may_share=False)

    def answer(sizes: TierSizes) -> tier_study.TierChoice:
        has_fleet = sizes.memory_bytes >= 32e9
        return tier_study.TierChoice(sizes, 2.0 + sizes.memory_bytes / 64e9 if has_fleet else math.inf, 0.0)

    assert tier_study.search_sizes(grid, answer).sizes == TierSizes(32e9)


def test_every_size_is_searched_before_none_is_said_to_hold() -> None:
    """Less memory or disk than 16 and 25 GB holds nothing, more exceeds a limit on cost: neither tier alone
    leads there, and the answer was that no fleet keeps the SLO with any, proved.
    """
    grid = tier_grid({"cpu": TIERS["cpu"], "nvme": replace(TIERS["nvme"], free_bytes=0.0)}, may_share=False)

    def answer(sizes: TierSizes) -> TierChoice:
        return TierChoice(sizes, 2.0 if sizes == TierSizes(16e9, 25e9) else math.inf, 0.0)

    assert tier_study.search_sizes(grid, answer).sizes == TierSizes(16e9, 25e9)


def test_a_limit_on_cost_is_of_gpus_and_store_together() -> None:
    """A store of 365 GB costs 1.50 USD/h: 0.50 of 2 USD/h is left for GPUs, and nothing of 1.50."""
    limits: list[float | None] = []

    class Searched:
        def find_paper_fleet(self, task: PlanQuestion, work_s: float) -> Any:
            limits.append(task.cost_limit_usd_per_h)
            raise InfeasibleError("none", kind="capacity", constraint="cost", is_proved=True)

    study: Any = Searched()
    for limit in ("2 usd/h", "1.5 usd/h"):
        asked = question(limits={"cost": limit})
        store = TierSizes(store_bytes=365e9)
        assert tier_study._choose_with_tiers(study, asked, store, TIERS, 1.0).usd_per_h == math.inf
    assert limits == [pytest.approx(0.5)]
