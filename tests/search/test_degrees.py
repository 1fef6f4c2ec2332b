"""How an LLM is dealt out to GPUs: TP that its heads allow, whole experts or slices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from manifest_commands import commands
from plans import CATALOG
from questions import question, traffic

from planner import manifests
from planner.documents.facts import GpusTooSmall
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.errors import InfeasibleError, InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet
from planner.models.kv_layout import kv_layout
from planner.models.llm import GroupedAttention, LatentAttention, LayerGroup, Llm
from planner.reports.fact_sentences import fact_sentence
from planner.search.evidence.assumptions import find_gpus_too_small
from planner.search.mixed.infeasible import with_relaxation
from planner.search.problem.build_problem import build_problem
from planner.search.problem.options import worker_types

MIXTURE = CATALOG.llm("openai/gpt-oss-120b")
H100 = CATALOG.gpu("h100-80g")


def fleet(directory: Path, rows: str) -> Fleet:
    path = directory / "fleet.yaml"
    path.write_text(f"llm: {MIXTURE.name}\nworkers:\n  - {{name: w, gpu: h100-80g, {rows}}}\n")
    return read_fleet(path, CATALOG)


def test_degrees_divide_heads_and_kv_heads() -> None:
    """OPT-66B has 72 heads of keys too; Llama's 8 KV heads are dealt out or copied, never cut."""
    opt, llama = CATALOG.llm("facebook/opt-66b"), CATALOG.llm("llama-3.1-70b")
    assert [tp for tp in range(1, 9) if opt.splits_over(tp)] == [1, 2, 3, 4, 6, 8]
    assert [tp for tp in range(1, 17) if llama.splits_over(tp)] == [1, 2, 4, 8, 16]
    six = Llm("six", 2, 768, 12, 6, 64, 100, 100, 100)
    assert [tp for tp in range(1, 13) if six.splits_over(tp)] == [1, 2, 3, 6, 12]
    latent = LayerGroup(2, LatentAttention(12, 0, 64, 64, 32, 64), None)
    assert [tp for tp in range(1, 13) if replace(six, groups=(latent,)).splits_over(tp)] == [
        1,
        2,
        3,
        4,
        6,
        12,
    ]


def test_the_search_takes_every_degree() -> None:
    opt = replace(CATALOG.llm("facebook/opt-66b"), context_tokens=2048)
    types, left = worker_types(opt, [H100], CATALOG, 100)
    assert {worker.tp for worker in types} == {2, 3, 4, 6, 8}
    assert {name.name for name in left} == {"h100-80g tp1"}  # 133 GB of weights; nobody asks about tp 5 and 7


def test_steps_between_powers_of_two_follow_the_nearest_fit() -> None:
    """Of 3 GPUs: a fit of 2 or 4, moved by the ratio of rooflines, and called a roofline."""
    groups = (LayerGroup(36, GroupedAttention(48, 24, 64, 64), MIXTURE.layer_groups[0].feed_forward),)
    llm = replace(MIXTURE, heads=48, kv_heads=24, groups=groups)
    three = CATALOG.step_latency(llm, H100, 3)
    assert three.kind == "roofline"
    two, four = (float(CATALOG.step_latency(llm, H100, tp).step_s(512)) for tp in (2, 4))
    assert four < float(three.step_s(512)) < two


def test_mixtures_are_dealt_out_both_ways() -> None:
    assert CATALOG.expert_splits(MIXTURE, H100, 4) == (False, True)
    assert CATALOG.expert_splits(MIXTURE, H100, 1) == (False,)
    assert CATALOG.expert_splits(CATALOG.llm("llama-3.1-70b"), H100, 4) == (False,)
    types, _ = worker_types(MIXTURE, [H100], CATALOG, 4096)
    names = {worker.name for worker in types if worker.tp == 4 and worker.max_num_batched_tokens == 2048}
    assert names == {"h100-80g tp4 2048", "h100-80g tp4 ep 2048"}


def test_slices_never_cut_blocks_of_fp8() -> None:
    """1536 wide experts: slices of 768, 384 and 192; the last is no multiple of 128."""
    llm = CATALOG.llm("MiniMaxAI/MiniMax-M2.5")
    assert llm.ffn == 1536
    assert [llm.slices_cut_blocks(tp) for tp in (2, 4, 8)] == [False, False, True]
    assert CATALOG.expert_splits(llm, H100, 8) == (True,)


def test_the_file_says_it_and_gives_it_back(tmp_path: Path) -> None:
    sliced, whole = fleet(tmp_path, "tp: 4"), fleet(tmp_path, "tp: 4, ep: true")
    assert (sliced.pools[0].type.ep, whole.pools[0].type.ep) == (False, True)
    assert sliced.pools[0].type.latency != whole.pools[0].type.latency
    for each in (sliced, whole):
        path = tmp_path / "again.yaml"
        path.write_text(to_yaml(fleet_document(each)))
        assert read_fleet(path, CATALOG) == each


def test_whole_experts_on_one_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ep: needs a mixture of experts on several GPUs, found tp 1"):
        fleet(tmp_path, "tp: 1, ep: true")


def test_every_command_says_it(tmp_path: Path) -> None:
    whole, sliced = fleet(tmp_path, "tp: 4, ep: true"), fleet(tmp_path, "tp: 4")
    for found in commands(manifests.render(whole, 4096).files).values():
        assert all("--enable-expert-parallel" in command.args for command in found)
    for found in commands(manifests.render(sliced, 4096).files).values():
        assert all("--enable-expert-parallel" not in command.args for command in found)


def test_kernels_of_latent_attention_choose_their_own_blocks(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("llm: deepseek-ai/DeepSeek-V3\nworkers:\n  - {name: w, gpu: h200-141g, tp: 8}\n")
    for found in commands(manifests.render(read_fleet(path, CATALOG), 4096).files).values():
        assert all("--block-size" not in command.args for command in found)
    assert (
        json.dumps(kv_layout(CATALOG.llm("deepseek-ai/DeepSeek-V3"), 8).block_bytes) == "1124352.0"
    )  # 16 x 61 x 1152


def test_gpus_that_cannot_hold_the_llm_are_named_with_the_reason() -> None:
    """DeepSeek-V3 has 671 GB of weights in FP8: eight H100 have 640 GB."""
    asked = question(llm="deepseek-v3", fleet={"gpus": ["h100-80g", "h200-141g"]})
    problem = build_problem(asked, traffic(requests=20), CATALOG)
    small = find_gpus_too_small(problem)
    assert [(each.label, each.kv_tokens) for each in small] == [("h100-80g tp8", 0)]
    said = fact_sentence(GpusTooSmall(problem.llm.weight_bytes, 2_000, small))
    assert "the longest request, 2,000 tokens: h100-80g tp8 (no room beside 6" in said


def test_a_stock_too_small_for_one_worker_is_said_beside_a_limit_out_of_reach() -> None:
    """Llama-3.1-70B has 141 GB of weights, two L40S 96 GB: relaxing TTFT alone leads to another refusal."""
    fleet = {"gpus": {"l40s-48g": 2}}
    asked = question(llm="llama-3.1-70b", slo={"ttft": {"p90": "1 ms"}}, fleet=fleet)
    with pytest.raises(InfeasibleError) as failed:
        with_relaxation(lambda: build_problem(asked, traffic(requests=20), CATALOG))
    assert str(failed.value).endswith(
        "Within the limits (stock of l40s-48g 2) there is no room for a worker either: the smallest that "
        "holds meta-llama/Llama-3.1-70B takes 4 × l40s-48g"
    )
