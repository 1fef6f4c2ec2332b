"""Our plain copy of DistServe's simulator: by hand, and against what that program computed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_distserve import Coefficients, DistServe, Placement, Request

from benchmarks.peers import distserve
from benchmarks.peers.compare import compare, each_case
from planner.files.checked_files import read_json

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "distserve"
CASES = ("disagg_opt13b_tp2_tp1_r4", "disagg_opt66b_tp4_tp2pp2_r3", "vllm_opt13b_tp1_r1")
MUCH = 10**6


def finished(
    rows: list[tuple[float, int, int]],
    placement: Placement,
    *,
    prefill: tuple[float, float, float] = (0, 0, 0),
    per_rank_ms: float = 0,
    decode: tuple[float, float, float] = (0, 0, 0),
    overhead_ms: float = 0,
    large: tuple[float, float, float] | None = None,
    threshold: int = 95,
) -> list[Request]:
    coefficients = Coefficients(prefill, per_rank_ms, decode, large or decode, threshold, overhead_ms, 0.0)
    return DistServe(placement, coefficients, [Request(*row) for row in rows]).run().requests


def times(requests: list[Request], name: str) -> list[float]:
    return [getattr(request, name) for request in requests]


def test_a_shared_instance_prefills_before_it_decodes() -> None:
    """Prefill 10 + tokens, decode 5 + sequences. A (10 tokens) runs 0-20; B (20), there since 5, 20-50; then
    both decode 50-57, which ends B; A's second token takes 57-63."""
    placement = Placement(1, 1, 0, 1, MUCH, MUCH)
    a, b = finished([(0, 10, 2), (5, 20, 1)], placement, prefill=(10, 1, 0), decode=(5, 0, 1))
    assert (a.prefill_end_ms, b.prefill_end_ms) == (20, 50)
    assert (a.decode_start_ms, b.finish_ms, a.finish_ms) == (50, 57, 63)


def test_squares_contexts_and_the_engine_cost_time() -> None:
    """Prefill of 3 and 4 tokens: 1 + 7 + (9 + 16) = 33, and 2 for the engine: 35. Decode of contexts 3 and 4,
    each with its new token: 0.5 * 9, and 2: 41.5."""
    placement = Placement(1, 1, 0, 1, MUCH, MUCH)
    both = finished([(0, 3, 1), (0, 4, 1)], placement, prefill=(1, 1, 1), decode=(0, 0.5, 0), overhead_ms=2)
    assert times(both, "prefill_end_ms") == [35, 35]
    assert times(both, "finish_ms") == [41.5, 41.5]


def test_from_the_threshold_on_the_other_coefficients_hold() -> None:
    """One sequence: 7 ms. Two, of a threshold of two: 100 ms."""
    placement = Placement(1, 1, 0, 1, MUCH, MUCH)
    rows = [(0.0, 1, 1), (0.0, 1, 2)]
    both = finished(rows, placement, decode=(7, 0, 0), large=(100, 0, 0), threshold=2)
    assert times(both, "finish_ms") == [100, 107]


def test_a_prefill_batch_takes_what_fits_first_come_first_served() -> None:
    """10 ms a batch of at most 30 tokens. A runs 0-10 alone. Then B + C make 30; D (5) waits for 20-30."""
    placement = Placement(1, 1, 1, 1, 30, MUCH)
    rows = [(0.0, 10, 1), (1.0, 20, 1), (2.0, 10, 1), (3.0, 5, 1)]
    assert times(finished(rows, placement, prefill=(10, 0, 0)), "prefill_end_ms") == [10, 20, 20, 30]


def test_a_decode_batch_stops_at_its_limit_and_goes_round() -> None:
    """At most 20 tokens of context with the new ones: A and B (9 + 1 each) fit, C waits; then C comes before
    the others, with one of them: A has 11 now, C 10, so C alone, then A, then B."""
    placement = Placement(1, 1, 1, 1, MUCH, 20)
    rows = [(0.0, 9, 2), (0.0, 9, 2), (0.0, 9, 1)]
    assert times(finished(rows, placement, decode=(1, 0, 0)), "finish_ms") == [3, 4, 2]


def test_a_prefill_pipeline_overlaps_batches() -> None:
    """(4 / 2) + 1 * 2 = 4 ms a rank, 1 more on the first. A: 0-5, 5-9. B (arrives 1): 5-10, 10-14. C and D
    (6, 7): one batch, 10-15, 15-19."""
    placement = Placement(1, 2, 1, 1, MUCH, MUCH)
    rows = [(0.0, 1, 1), (1.0, 1, 1), (6.0, 1, 1), (7.0, 1, 1)]
    requests = finished(rows, placement, prefill=(4, 0, 0), per_rank_ms=1, overhead_ms=1)
    assert times(requests, "prefill_end_ms") == [9, 14, 19, 19]


def test_a_decode_pipeline_works_on_two_micro_batches() -> None:
    """Prefill 1 + 3 ms; decode (8 + 2) / 2 = 5 a rank, 3 more on the first. A is prefilled at 4, B (arrives
    5) at 9. A: 4-12, 12-17. B: 12-20, 20-25. A waits for the first rank: 20-28, 28-33."""
    placement = Placement(1, 1, 1, 2, MUCH, MUCH)
    a, b = finished([(0, 1, 2), (5, 1, 1)], placement, prefill=(1, 0, 0), decode=(8, 0, 2), overhead_ms=3)
    assert (a.finish_ms, b.finish_ms) == (33, 25)


def test_micro_batches_that_meet_become_one() -> None:
    """5 ms a sequence and rank. Four at 0: 0-20, 20-40. X (21): 21-26, Y (27): 27-32 on the first rank; on
    the second they wait until 40 and then run together, 40-50."""
    placement = Placement(1, 1, 1, 2, MUCH, MUCH)
    rows = [(0.0, 1, 1)] * 4 + [(21.0, 1, 1), (27.0, 1, 1)]
    assert times(finished(rows, placement, decode=(0, 0, 10)), "finish_ms") == [40] * 4 + [50, 50]


def test_a_shared_pipeline_returns_decodes_to_its_first_rank() -> None:
    """Prefill 2, decode 4 a rank (halves of 4 and 8). A: prefilled 0-2, 2-4; decode 4-8, 8-12."""
    (a,) = finished([(0, 1, 1)], Placement(1, 2, 0, 2, MUCH, MUCH), prefill=(4, 0, 0), decode=(8, 0, 0))
    assert (a.prefill_end_ms, a.finish_ms) == (4, 12)


def test_prefills_go_where_fewest_wait_and_run() -> None:
    """10 ms each. A to the first instance, B (1) to the second; C (2) waits behind A, D (3) behind B."""
    rows = [(float(t), 1, 1) for t in range(4)]
    requests = finished(rows, Placement(2, 1, 1, 1, MUCH, MUCH), prefill=(10, 0, 0))
    assert times(requests, "prefill_end_ms") == [10, 11, 20, 21]


def test_decodes_go_where_fewest_wait_though_they_run() -> None:
    """10 ms each. A runs on the first decode instance, where nothing waits: B (1) goes there too, 10-20. C
    (2) sees B waiting and takes the second at once, 2-12."""
    rows = [(float(t), 1, 1) for t in range(3)]
    requests = finished(rows, Placement(1, 1, 2, 1, MUCH, MUCH), decode=(10, 0, 0))
    assert times(requests, "finish_ms") == [10, 20, 12]


def test_what_fits_no_batch_is_refused() -> None:
    """The program itself would turn without end."""
    with pytest.raises(ValueError, match="fit no prefill batch"):
        finished([(0, 31, 1)], Placement(1, 1, 1, 1, 30, MUCH))
    with pytest.raises(ValueError, match="fits no decode batch"):
        finished([(0, 20, 1)], Placement(1, 1, 1, 1, 30, 20), decode=(1, 0, 0))


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_when_distserve_says(name: str) -> None:
    """Start, end of prefill and end of all requests, to 1e-9 s: its arithmetic is the plain ring's."""
    path = REFERENCE / f"{name}.json"
    case = distserve.read_case(path, read_json(path))
    steps = case.steps
    coefficients = Coefficients(
        steps.prefill_s,
        steps.per_rank_s,
        steps.decode_small_s,
        steps.decode_large_s,
        steps.threshold,
        steps.overhead_s,
        steps.overhead_s_per_token,
    )
    rows = zip(case.arrival_ms / 1000, case.input_tokens, case.output_tokens, strict=True)
    requests = [Request(float(arrival), int(i), int(o)) for arrival, i, o in rows]
    DistServe(Placement(**asdict(case.placement)), coefficients, requests).run()
    first, finish = (np.array(times(requests, f"{stamp}_ms")) for stamp in ("prefill_end", "finish"))
    assert np.abs(np.array(times(requests, "prefill_start_ms")) - case.peer["prefill_start"]).max() < 1e-9
    assert np.abs(first - case.arrival_ms / 1000 - case.peer["ttft"]).max() < 1e-9
    assert np.abs(finish - case.peer["finish"]).max() < 1e-9


# --- the script that reads a folder of cases


def document() -> dict[str, Any]:
    """A case of one request: prefill 10 + 1 * 1, engine 2: 13; decode (5 + 2) + 2 = 9 a token."""
    request = {"arrival_ms": 0.0, "prompt_len": 1, "output_len": 2, "prefill_start_ms": 0.0, "ttft_ms": 13.0}
    request |= {"first_decode_start_ms": 13.0, "decode_latency_ms": 18.0, "tpot_ms": 9.0}
    request |= {"finish_ms": 31.0, "total_ms": 31.0}
    return {
        "backend": "vllm",
        "placement": {"tp": 1, "pp": 1, "n_instances": 1},
        "coefficients": {
            "units": "ms",
            "prefill_tp": 1,
            "prefill": [10, 0, 0],
            "decode_tp": 1,
            "decode": {"threshold_bs": 95, "small_bs": [5, 0, 2], "large_bs": [0, 0, 0]},
        },
        "latency_model": {
            "prefill_iter": "(a + b*sum(len_i) + c*sum(len_i^2))/pp + 1*pp  [ms]",
            "decode_iter": "(a + b*sum(ctx_i + 1) + c*bs)/pp, (a,b,c)=small_bs if bs<threshold else large_bs",
            "engine_overhead": "2 + 0.0*sum(context tokens in batch) ms added on pipeline rank 0 only",
        },
        "limits": {"prefill_batch_max_tokens": 100, "decode_batch_max_context_tokens": 100},
        "sim_cpu_s": 1.5,
        "requests": [request],
    }


def run(folder: Path, *documents: dict[str, Any]) -> int:
    for number, content in enumerate(documents):
        (folder / f"case{number}.json").write_text(json.dumps(content))
    return each_case(folder, distserve.run)


def test_a_folder_that_agrees_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two cases, and a file of search results that is named as such."""
    searches: dict[str, Any] = {key: [] for key in distserve.SEARCHES}
    assert run(tmp_path, document(), document(), searches) == 0
    out = capsys.readouterr().out
    assert "2 of 2 cases agree" in out and "case2: results of searches, no case" in out and "peer 1.50" in out


@pytest.mark.parametrize("column", ["ttft_ms", "tpot_ms", "finish_ms"])
def test_a_result_that_is_two_microseconds_off_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    off = document()
    off["requests"][0][column] += 0.002
    assert run(tmp_path, document(), off) == 1
    assert "MISS case1" in (out := capsys.readouterr().out) and "ok   case0" in out


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("backend",), "sglang", "backend is 'sglang'"),
        (("placement",), {"tp": 1, "pp": 1}, "has no n_instances"),
        (("placement", "tp"), 2, "tp is 2, but the coefficients are those of 1"),
        (("coefficients", "units"), "s", "coefficients are in s"),
        (("latency_model", "prefill_iter"), "a * len", "latency_model is not the one known"),
        (("latency_model", "decode_iter"), "(a)/pp + 1*pp, and so on", "latency_model is not the one known"),
        (("requests",), [], "holds no requests"),
        (("requests",), [{"arrival_ms": 0}], "a request has no 'prefill_start_ms'"),
        (("requests",), 3, "is not a case"),
        (("limits", "prefill_batch_max_tokens"), "all", "is not a case"),
    ],
)
def test_a_case_that_cannot_be_read_is_one_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: tuple[str, ...], value: Any, message: str
) -> None:
    """And the other case runs all the same."""
    broken = place = document()
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    assert run(tmp_path, broken, document()) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and "1 of 2 cases agree" in captured.out


def test_an_empty_or_missing_folder_exits_1(tmp_path: Path) -> None:
    assert run(tmp_path) == 1
    assert run(tmp_path / "none") == 1


def test_a_value_that_only_one_side_has_deviates_without_bound() -> None:
    nothing, something = np.array([math.nan, 1.0]), np.array([2.0, 1.0])
    assert compare({"x": nothing}, {"x": something}, ()).largest["x"] == math.inf
    assert compare({"x": nothing}, {"x": nothing}, ()).largest["x"] == 0
