"""Reading fleet.yaml: defaults, what overrides what, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from plans import CATALOG, LLM

from planner.documents.fits import form_document
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import Fleet, Network, Policies
from planner.models.memory import worker_memory
from planner.models.older_kernels import correct_for_version

ONE = "llm: meta-llama/Llama-3.1-70B\nworkers:\n  - {name: w, gpu: h100-80g, tp: 4, count: 2}\n"
FIT = {
    "knots_tokens": [1, 100],
    "f_s": [0.01, 0.02],
    "a_s": 1e-9,
    "b_s": 0,
    "d_s": 1e-8,
    "e_s": 0,
    "h_s": 0.001,
    "basis": "measured here",
    "mape_frac": 0.03,
}


def read(directory: Path, text: str) -> Fleet:
    path = directory / "fleet.yaml"
    path.write_text(text)
    return read_fleet(path, CATALOG)


def test_the_smallest_file_gets_vllms_defaults(tmp_path: Path) -> None:
    fleet = read(tmp_path, ONE)
    pool = fleet.pools[0]
    gpu = CATALOG.gpu("h100-80g")
    assert (pool.role, pool.count, pool.type.max_num_seqs, pool.type.max_num_batched_tokens) == (
        "mixed",
        2,
        256,
        2048,
    )
    assert (
        pool.type.kv_tokens
        == worker_memory(LLM, gpu, 4, max_num_batched_tokens=2048, max_num_seqs=256).kv_tokens
    )
    kernels = CATALOG.step_latency(LLM, gpu, 4)
    assert pool.type.latency == correct_for_version(kernels, LLM, gpu, pool.type.engine)
    assert fleet.policies == Policies()
    assert fleet.network == Network()


def test_policies_set_the_token_budget_of_workers_that_name_none(tmp_path: Path) -> None:
    text = ONE + "  - {name: v, gpu: h100-80g, tp: 4, max_num_batched_tokens: 512}\n"
    fleet = read(tmp_path, text + "policies: {max_num_batched_tokens: 8192, routing: round-robin}\n")
    assert [pool.type.max_num_batched_tokens for pool in fleet.pools] == [8192, 512]
    assert fleet.policies.routing == "round-robin"


def test_a_limit_on_chunks_is_read_and_written(tmp_path: Path) -> None:
    fleet = read(tmp_path, ONE + "policies: {long_prefill_token_threshold: 512}\n")
    assert fleet.policies.long_prefill_token_threshold == 512
    assert fleet_document(fleet)["policies"]["long_prefill_token_threshold"] == 512


def test_when_machines_change_sides_is_read_and_written(tmp_path: Path) -> None:
    """Never, unless it is said: then nothing is written either."""
    fleet = read(tmp_path, ONE + "policies: {pools: repurpose, repurpose_after: 2 min}\n")
    assert fleet.policies.repurpose_after_s == 120.0
    assert read(tmp_path, to_yaml(fleet_document(fleet))).policies == fleet.policies
    assert "repurpose_after" not in fleet_document(read(tmp_path, ONE))["policies"]


def test_network_and_prices_replace_the_defaults(tmp_path: Path) -> None:
    fleet = read(
        tmp_path,
        ONE + "network: {bandwidth: 25 GB/s, latency: 2 ms, transfer: serialised}\nprices: {h100: 2 usd/h}\n",
    )
    assert fleet.network == Network(25e9, 0.002, "serialised")
    assert fleet.price_usd_per_h == 16.0


def test_a_fit_beside_the_file_replaces_the_catalogs(tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(FIT))
    fleet = read(tmp_path, ONE.replace("count: 2", "latency: fit.yaml, kv_tokens: 100005"))
    assert fleet.pools[0].type.latency.basis == "measured here"
    assert fleet.pools[0].type.kv_tokens == 100000  # whole blocks of 16


def test_a_list_of_fits_is_searched_for_the_workers_tp_and_slowed_for_its_cap(tmp_path: Path) -> None:
    fits = {"gpu": "h100-80g", "llm": LLM.name, "fits": [{"tp": 2, **FIT}, {"tp": 4, **FIT, "a_s": 2e-9}]}
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump(fits))
    capped = CATALOG.gpu("h100-80g@350W")
    text = ONE.replace("h100-80g", capped.name).replace("count: 2", "latency: fit.yaml")
    assert read(tmp_path, text).pools[0].type.latency.a_s == pytest.approx(2e-9 * capped.prefill_slowdown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: w", "nmae: w"), r"workers\[0\]: unknown key 'nmae'; did you mean 'name'\?"),
        (("workers:", "worker:"), "fleet.yaml: unknown key 'worker'; did you mean 'workers'"),
        (("name: w", "name: w, role: prefil"), r"workers\[0\] \(w\): role: must be one of mixed, prefill"),
        (("name: w", "name: w, role: prefill"), "the fleet has no decode worker"),
        (("count: 2", "count: 0"), r"\(w\): count: must be a whole number of at least 1, found 0"),
        (("count: 2", "count: -3"), "count: must be a whole number of at least 1, found -3"),
        (("count: 2", "count: 2.5"), "count: must be a whole number of at least 1, found 2.5"),
        (("count: 2", "count: yes"), "count: must be a whole number of at least 1, found True"),
        (("count: 2", "count: 20000"), "workers: 20000 in all, must be at most"),
        (("tp: 4", "tp: 3"), "tp: must divide the"),
        (("tp: 4", "tp: 16"), "tp: a node has 8 x h100-80g, found 16"),
        (("h100-80g", "h100-81g"), "gpu: GPU 'h100-81g' is not in catalogs/gpus.yaml; nearest: h100-80g"),
        (("tp: 4", "tp: 1"), r"does not fit 1 x h100-80g: \d+\.\d GB per GPU are missing"),
        (("tp: 4", "kv_tokens: 8"), "kv_tokens: must hold one block of 16 tokens, found 8"),
        (("count: 2", "max_num_batched_tokens: 64, max_num_seqs: 128"), "must be at least max_num_seqs"),
        (("count: 2", "kv_tokens: 1000000000000000000000"), "kv_tokens: must be at most 1000000000"),
        (("count: 2", 'latency: "a\\0b"'), "latency: 'a.x00b' is no name of a file"),
        (("count: 2", "latency: nowhere.yaml"), r"\(w\): latency: .*nowhere.yaml: no such file"),
        (("count: 2", "latency: {f_s: [1, 2]}"), "latency: fit: knots_tokens: expected numbers, found None"),
        (("meta-llama/Llama-3.1-70B", "lama-3.1-70b"), "fleet.yaml: llm: LLM 'lama-3.1-70b' is not in"),
        (("workers:", "policies: {routing: fastest}\nworkers:"), "routing: must be one of jsq"),
        (("workers:", "policies: {headroom: 0}\nworkers:"), "headroom: of 0 no request would ever be packed"),
        (("workers:", "policies: {routing: best-fit, headroom: 0.0}\nworkers:"), "headroom: of 0 no request"),
        (("count: 2", "count: 010"), "line .*'010' would be read as the octal number 8; write 10"),
        (("workers:", "network: {bandwidth: 50}\nworkers:"), "bandwidth: 50 has no unit; write 50 GB/s"),
        (("workers:", "policies: {flip_after: 60}\nworkers:"), "flip_after: 60 has no unit"),
        (("workers:", "policies: {pools: mobile}\nworkers:"), "pools: must be one of static, flip"),
        (("workers:", "policies: {prefix_cache: 1}\nworkers:"), "prefix_cache: must be true or false"),
        (("workers:", "network: {bandwidth: 0 GB/s}\nworkers:"), "bandwidth: must be > 0"),
        (("workers:", "network: {transfer: pigeon}\nworkers:"), "transfer: must be one of serialised"),
        (("workers:", "prices: {h100-80g: -1}\nworkers:"), "prices: h100-80g: must be >= 0"),
        (("workers:", "prices: {foo: }\nworkers:"), "prices: GPU 'foo' is not in catalogs/gpus.yaml"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_and_field(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, ONE.replace(*change))
    assert str(caught.value).startswith(str(tmp_path / "fleet.yaml"))
    assert "\n" not in str(caught.value)


DISTSERVE: dict[str, object] = {
    "form": "distserve",
    "prefill_s": [0.01, 1e-5, 0],
    "decode_small_s": [0.02, 1e-7, 0],
    "decode_large_s": [0.02, 1e-7, 0],
    "threshold": 10,
    "per_rank_s": 0,
    "overhead_s": 0,
    "overhead_s_per_token": 0,
}
SPLITWISE: dict[str, object] = {
    "form": "splitwise-lookup",
    "knots_tokens": [128, 1024, 8192],
    "prompt_s": [0.02, 0.06, 0.5],
    "token_s": [0.02, 0.03, 0.05],
}
CORRECTED: dict[str, object] = {
    "form": "corrected",
    "formula_s": [0.01, 0, 1e-5, 0, 0, 1e-8],
    "weights": [0.1],
    "tokens": [8],
    "pairs": [0],
    "decodes": [8],
    "kv_tokens": [800],
    "prefills": [0],
}


@pytest.mark.parametrize("form", [DISTSERVE, SPLITWISE, CORRECTED], ids=lambda form: form["form"])
def test_forms_of_step_times_are_read(tmp_path: Path, form: dict[str, object]) -> None:
    document = yaml.safe_load(ONE)
    document["workers"][0]["latency"] = form
    assert read(tmp_path, yaml.safe_dump(document)).pools[0].type.form is not None


@pytest.mark.parametrize("form", [DISTSERVE, SPLITWISE, {**FIT, "simulated": CORRECTED}])
def test_forms_of_step_times_come_back_as_they_were_written(tmp_path: Path, form: dict[str, object]) -> None:
    """They were left out of what is written, so a fleet read back was simulated with other step times."""
    document = yaml.safe_load(ONE)
    document["workers"][0]["latency"] = form
    fleet = read(tmp_path, yaml.safe_dump(document))
    again = read(tmp_path, to_yaml(fleet_document(fleet)))
    ours, written = fleet.pools[0].type, again.pools[0].type
    assert ours.latency == written.latency
    assert ours.form is not None and written.form is not None
    assert form_document(ours.form) == form_document(written.form)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (DISTSERVE, {"decode_small_s": [-0.02, 0, 0]}, "decode_small_s: some step .* would take -0.02 s"),
        (DISTSERVE, {"decode_large_s": [0.02, -1e-9, 0]}, "decode_large_s: some step .* never fall with"),
        (DISTSERVE, {"prefill_s": [0, 0, 0]}, "prefill_s: some step of up to 2048 tokens .* would take 0 s"),
        (DISTSERVE, {"prefill_s": [0.01, -1e-4, 0]}, "prefill_s: some step .* must be > 0"),
        (DISTSERVE, {"prefill_s": [0.01, 0.1]}, r"prefill_s: must be three finite numbers a, b, c, found"),
        (DISTSERVE, {"decode_large_s": []}, r"decode_large_s: must be three finite numbers a, b, c, .*\[\]"),
        (DISTSERVE, {"overhead_s": -1}, "overhead_s: must be >= 0, found -1"),
        (DISTSERVE, {"threshold": 9.5}, "threshold: must be a whole number of decodes >= 0, found 9.5"),
        (DISTSERVE, {"prefill_s": [0.01, float("nan"), 0]}, "prefill_s: expected numbers, found .*nan"),
        (SPLITWISE, {"prompt_s": [0.02, 0.06]}, "prompt_s: must have a time for each of the 3 knots_tokens"),
        (SPLITWISE, {"token_s": [0.02, 0.03]}, "token_s: must have one time, or one for each of the 3"),
        (SPLITWISE, {"knots_tokens": [128, 128, 8192]}, "knots_tokens: must be two or more numbers >= 0 "),
        (SPLITWISE, {"prompt_s": [0.02, -0.06, 0.5]}, "prompt_s: some step .* would take -0.06 s"),
        (SPLITWISE, {"prompt_s": [0.02, 0.2, 0.5]}, "prompt_s: some step .* would take -"),  # of few tokens
        (SPLITWISE, {"token_s": [-0.01]}, "token_s: some step .* would take -0.01 s"),
        (SPLITWISE, {"mixed_factor": 0}, "mixed_factor: must be > 0, found 0"),
        (SPLITWISE, {"d_s": -1e-9}, "d_s: must be >= 0, found -1e-09"),
        (CORRECTED, {"weights": [0.1, 0.2]}, "must be equally long lists"),
        (CORRECTED, {"weights": [1e6]}, "weights: some step .* would take -inf s"),
        (CORRECTED, {"formula_s": [0.01, 0, 1e-5, 0, 0, -1e-8]}, "formula_s must be six numbers >= 0"),
    ],
)
def test_no_step_takes_less_than_no_time(
    tmp_path: Path, form: dict[str, object], change: dict[str, object], message: str
) -> None:
    """Negative times let the simulated clock run backwards, and a list cut short shifted all that follows."""
    document = yaml.safe_load(ONE)
    document["workers"][0]["latency"] = form | change
    with pytest.raises(InputError, match=rf"workers\[0\] \(w\): latency: .*{message}"):
        read(tmp_path, yaml.safe_dump(document))


def test_two_pools_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"workers\[1\]: name: 'w' is given twice"):
        read(tmp_path, ONE + "  - {name: w, gpu: h100-80g, tp: 8}\n")


def test_of_several_fits_that_of_whole_experts_is_taken_for_ep(tmp_path: Path) -> None:
    """Those of slices were taken whatever `ep` said, and for dp: 2 one without joint_s."""
    ranks = {**FIT, "a_s": 3e-9, "ep": True, "dp": 2, "joint_s": [0.004, 0.01]}
    rows = [{"tp": 4, **FIT}, {"tp": 4, **FIT, "a_s": 2e-9, "ep": True}, {"tp": 4, **ranks}]
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"fits": rows}))
    text = ONE.replace("meta-llama/Llama-3.1-70B", "qwen3-30b-a3b")
    for settings, pair_s in (("ep: false", 1e-9), ("ep: true", 2e-9), ("dp: 2", 3e-9)):
        fleet = read(tmp_path, text.replace("count: 2", f"latency: fit.yaml, {settings}"))
        assert fleet.pools[0].type.latency.a_s == pair_s


def test_host_overhead_is_added_to_step_times_without_the_hosts(tmp_path: Path) -> None:
    """It was dropped for every worker that names its fit. Those with h_s have the host's time already."""
    text = "host_overhead: 2 ms\n" + ONE.replace("count: 2", "latency: fit.yaml")
    for own_s, total_s in ((0, 0.002), (0.001, 0.001)):
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump({**FIT, "h_s": own_s, "kind": "kernels"}))
        assert read(tmp_path, text).pools[0].type.latency.h_s == total_s


def test_a_fit_of_another_gpu_or_tp_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"gpu": "a100-80g", "tp": 4, **FIT}))
    with pytest.raises(InputError, match="is a fit on a100-80g, this worker has h100-80g"):
        read(tmp_path, ONE.replace("count: 2", "latency: fit.yaml"))
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"tp": 8, **FIT}))
    with pytest.raises(InputError, match="has 0 fits for tp 4, need one; found tp 8"):
        read(tmp_path, ONE.replace("count: 2", "latency: fit.yaml"))
