"""Our plain copy of Splitwise's simulator: by hand, and against what that program computed.

By hand, unless said otherwise: a prompt takes 1 ms a token, a step of decodes alone 100 ms, one with
prompts 1.1 times that of all its tokens as a prompt. Outputs count the prompt's token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from reference_splitwise import Cluster, Fit, Limits, Lookup, Machine, Request, Steps, Task

from benchmarks.peers import splitwise
from benchmarks.peers.compare import Array, Columns, compare, each_case
from planner.models.foreign_forms import SplitwiseLookup, interpolate_linearly

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "splitwise"
CASES = (
    "bloom_1h100_baseline_conv1",
    "bloom_1h100_baseline_conv2",
    "bloom_1h100_baseline_code2",
    "bloom_hh1p1t_kvtokenjsq_code2",
    "bloom_hh1p1t_kvtokenjsq_conv2",
    "bloom_10h100_baseline_conv15",
    "bloom_hh7p3t_mixedpool_conv15",
    "bloom_hhcap7p3t_mixedpool_conv15",
)
BY_HAND = Lookup(lambda tokens: tokens / 1000, lambda sequences: 0.1)
ALIKE = Lookup(lambda tokens: 1.0, lambda sequences: 0.1)  # every prompt step a second
ROOMY = Limits(memory_bytes=10**9, weights_bytes=0, kv_bytes_per_token=1)


def plain_steps(steps: SplitwiseLookup) -> Fit | Lookup:
    def line(times: tuple[float, ...]) -> Callable[[float], float]:
        return cache(
            lambda tokens: float(interpolate_linearly(np.array([tokens]), steps.knots_tokens, times)[0])
        )

    prompt_s = line(steps.prompt_s)
    if len(steps.token_s) == 1:
        return Fit(prompt_s, steps.token_s[0], steps.b_s, steps.d_s)
    return Lookup(prompt_s, line(steps.token_s))


def by_the_plain_one(case: splitwise.Case) -> Columns:
    weights_bytes, kv_bytes = splitwise.MODELS[case.model]
    machines = [
        Machine(
            index,
            plain_steps(splitwise.lookup_steps(case.folder, case.model, kind.hardware, kind.tensor_parallel)),
            Limits(kind.gpus * splitwise.GPU_BYTES, weights_bytes, kv_bytes),
            kind.role,
        )
        for index, kind in enumerate(case.machines)
    ]
    columns = (case.arrival_s, case.input_tokens, case.output_tokens)
    requests = [Request(arrival, int(i), int(o)) for arrival, i, o in zip(*columns, strict=True)]
    Cluster(machines, case.policy, splitwise.BYTES_PER_S[case.policy], requests).run()

    def column(name: str) -> Array:
        return np.array([getattr(request, name) for request in requests], float)

    start, first, finish = column("prompt_start_s"), column("first_token_s"), column("finish_s")
    return {
        "ttft": first - case.arrival_s,
        "tbt": (finish - first) / case.output_tokens,
        "e2e": finish - case.arrival_s,
        "queue_time": start - case.arrival_s,
        "prompt_start": start,
        "prompt_end": first,
        "token_end": finish,
        "prompt_runner": column("prompt_machine"),
        "token_runner": column("token_machine"),
    }


class Routed(Cluster):
    """Every prompt on machine 0, tokens on the machine that `targets` names, by request."""

    targets: Sequence[int] = ()

    def route(self, prompt: Task, token: Task, now: float) -> tuple[Machine, Machine]:
        return self.machines[0], self.machines[self.targets[self.requests.index(prompt.request)]]


def served(
    rows: list[tuple[float, int, int]],
    roles: Sequence[str] = ("",),
    policy: str = "token_jsq",
    *,
    steps: Steps = BY_HAND,
    limits: Limits = ROOMY,
    targets: Sequence[int] = (),
) -> Cluster:
    machines = [Machine(i, steps, limits, role) for i, role in enumerate(roles)]
    kind = Routed if targets else Cluster
    cluster = kind(machines, policy, 1000.0, [Request(*row) for row in rows])
    if isinstance(cluster, Routed):
        cluster.targets = targets
    return cluster.run()


def firsts(cluster: Cluster) -> list[float]:
    return [request.first_token_s for request in cluster.requests]


def ends(cluster: Cluster) -> list[float]:
    return [request.finish_s for request in cluster.requests]


# --- one machine


def test_the_prompt_makes_the_first_token() -> None:
    """1000 tokens: 1 s; two more tokens: 1.2 s."""
    cluster = served([(0, 1000, 3)])
    assert (firsts(cluster), ends(cluster)) == ([1.0], [1.2])


def test_an_arrival_cuts_decodes_at_the_end_of_the_step() -> None:
    """A decodes from 0.1; B (200, at 0.15) joins at 0.2 for 1.1 * 201 ms: 0.4211. Both 0.5211, which ends B
    (two tokens); A's fifth 0.6211."""
    cluster = served([(0, 100, 5), (0.15, 200, 2)])
    assert firsts(cluster) == pytest.approx([0.1, 0.4211])
    assert ends(cluster) == pytest.approx([0.6211, 0.5211])


def test_decodes_alone_run_to_the_first_that_is_done() -> None:
    """A batch is formed at 0 (A), 1.0 (A decodes), 1.3 (it is cut for B), 2.3 + 0.1 and 2.6 (B done, then
    A)."""
    formed = []

    class Watched(Machine):
        def form_batch(self) -> None:
            formed.append(len(self.present))
            super().form_batch()

    requests = [Request(0, 1000, 10), Request(1.25, 909, 3)]
    Cluster([Watched(0, BY_HAND, ROOMY)], "token_jsq", 1.0, requests).run()
    assert formed == [1, 1, 2, 2, 1, 0]
    assert [r.finish_s for r in requests] == pytest.approx([2.801, 2.501])


def test_prompts_fill_a_batch_first_come_first_served() -> None:
    """B, C and D wait for A (1 s). B + C and A's decode make 2001 of 2048 tokens: 1.1 * 2.001 s to 3.2011;
    then D with three decodes: 1.1 * 1.003 to 4.3044."""
    cluster = served([(0, 1000, 9), (0.1, 1000, 9), (0.2, 1000, 9), (0.3, 1000, 9)])
    assert firsts(cluster) == pytest.approx([1.0, 3.2011, 3.2011, 4.3044])


def test_a_prompt_over_the_limit_evicts_every_decode() -> None:
    """A decodes from 0.1. B (3000 tokens, at 0.15) starts at the end of A's step and alone: 0.2-3.2. Then
    both: B is done at 3.3; A has its second token of 0.2, one of 3.3, the last of 3.4."""
    cluster = served([(0, 100, 4), (0.15, 3000, 2)])
    assert firsts(cluster) == pytest.approx([0.1, 3.2])
    assert ends(cluster) == pytest.approx([3.4, 3.3])


def test_what_was_left_out_of_four_batches_comes_first() -> None:
    """A decodes; five prompts of 3 s come. A is evicted at 0.2 and left out at 3.2, 6.2 and 9.2. At 12.2 it
    goes first, no prompt fits beside it, but the decodes of the four done prompts do: 12.3. The fifth
    prompt, aged as well, 12.3-15.3, evicts A again; A and the fifth end at 15.4."""
    cluster = served([(0, 100, 4), *((0.11 + i / 100, 3000, 2) for i in range(5))])
    assert firsts(cluster) == pytest.approx([0.1, 3.2, 6.2, 9.2, 12.2, 15.3])
    assert ends(cluster) == pytest.approx([15.4, 12.3, 12.3, 12.3, 12.3, 15.4])


def test_one_batch_fewer_and_the_prompt_goes_first() -> None:
    """Four such prompts: at 9.2, left out three times, A waits for the fourth, too."""
    cluster = served([(0, 100, 4), *((0.11 + i / 100, 3000, 2) for i in range(4))])
    assert firsts(cluster) == pytest.approx([0.1, 3.2, 6.2, 9.2, 12.2])
    assert ends(cluster) == pytest.approx([12.4, *[12.3] * 4])


def test_evicted_decodes_come_before_new_ones() -> None:
    """Two tasks a batch. A and B decode from 2.1; C's prompt (too long for company) takes 2.2-3.2 and
    evicts both. Then A and B, in that order, before C's first decode: A (4 tokens) ends at 3.3, C starts to
    decode then."""
    limits = replace(ROOMY, max_tasks=2, max_tokens=10)
    cluster = served([(0, 5, 4), (0, 5, 9), (2.15, 10, 2)], steps=ALIKE, limits=limits)
    assert ends(cluster)[0] == pytest.approx(3.3)
    assert cluster.requests[2].token_start_s == pytest.approx(3.3)


@pytest.mark.parametrize(("tokens", "first_s"), [(10, 3.2), (20, 3.3)])
def test_a_full_batch_is_cut_only_by_a_prompt_within_the_limit(tokens: int, first_s: float) -> None:
    """Two tasks a batch, ten tokens. A: 0-1; B with A's decode: 1-2.1; both decode until A is done at 2.3.
    C comes at 2.15: of ten tokens it starts at 2.2, of twenty at 2.3."""
    limits = replace(ROOMY, max_tasks=2, max_tokens=10)
    cluster = served([(0, 5, 4), (0, 5, 9), (2.15, tokens, 2)], steps=ALIKE, limits=limits)
    assert firsts(cluster) == pytest.approx([1.0, 2.1, first_s])


def test_a_long_prompt_without_its_tokens_cuts_nothing() -> None:
    """A decodes on machine 0 from 0.1 to 0.8. B's prompt (3000) comes at 0.15; its tokens go to machine 1.
    Had they come along, they would have cut A at 0.2."""
    assert firsts(served([(0, 100, 8), (0.15, 3000, 2)], ("", ""), targets=(0, 1)))[1] == pytest.approx(3.8)
    assert firsts(served([(0, 100, 8), (0.15, 3000, 2)], ("", ""), targets=(0, 0)))[1] == pytest.approx(3.2)


def test_a_prompt_waits_for_memory() -> None:
    """100 bytes, one a token. A holds 51, then 80 from 1.0 on until its 29 decodes end at 3.9. B (31) comes
    at 1.5 and starts at 3.9."""
    limits = replace(ROOMY, memory_bytes=100)
    cluster = served([(0, 50, 30), (1.5, 30, 2)], steps=ALIKE, limits=limits)
    assert firsts(cluster) == pytest.approx([1.0, 4.9])
    assert cluster.machines[0].memory_bytes == 0


def test_prompts_that_take_the_memory_of_decodes_stop_the_machine() -> None:
    """A (51 bytes) and B (31) have had their prompts by 2.0; A's decodes need 29 of the 18 left, and what
    comes after A waits for it. That program stops, too; ours leaves them without an end."""
    limits = replace(ROOMY, memory_bytes=100)
    cluster = served([(0, 50, 30), (0.5, 30, 5)], steps=ALIKE, limits=limits)
    assert firsts(cluster) == [1.0, 2.0] and np.isnan(ends(cluster)).all()


def test_contexts_grow_with_a_fitted_decode_time() -> None:
    """100 ms, 10 ms a sequence, 1 ms a token of context. A (10, out 4) decodes at contexts 11, 12, 13 from
    1.0: 0.121 + 0.122 + ... B (20, at 1.15) cuts it at 1.243; beside B a decode at 13: 1.1 * 1 s + 10 + 13
    ms: 2.366."""
    steps = Fit(lambda tokens: 1.0, 0.1, 0.01, 0.001)
    assert ends(served([(0, 10, 4)], steps=steps)) == pytest.approx([1.366])
    cluster = served([(0, 10, 4), (1.15, 20, 2)], steps=steps)
    assert firsts(cluster) == pytest.approx([1.0, 2.366])
    assert ends(cluster) == pytest.approx([2.366, 2.366 + 0.131])


def test_requests_of_one_token_are_refused() -> None:
    with pytest.raises(ValueError, match="1 requests of one output token"):
        served([(0, 10, 1)])


# --- several machines


def test_token_jsq_counts_prompt_tokens_until_they_are_done() -> None:
    """A (100) takes machine 0, B (10) machine 1; C (5) sees loads 101 and 11. D, at 0.5, sees one decode on
    0 and two on 1."""
    cluster = served([(0, 100, 99), (0.001, 10, 99), (0.002, 5, 99), (0.5, 5, 2)], ("", ""))
    assert [request.prompt_machine for request in cluster.requests] == [0, 1, 1, 0]


def test_kv_token_jsq_stays_with_the_machine_it_used() -> None:
    """Loads are only ever subtracted: 0, then -100."""
    rows = [(0.0, 100, 2), (0.05, 100, 2), (9.0, 100, 2)]
    cluster = served(rows, ("prompt", "prompt", "token", "token"), "kv_token_jsq")
    assert {(r.prompt_machine, r.token_machine) for r in cluster.requests} == {(0, 2)}


def test_kv_moves_after_the_prompt() -> None:
    """500 tokens of one byte at 1000 bytes/s: prompt 0-0.5, transfer 0.5-1.0, two more tokens by 1.2. B's
    prompt (250, at 0.1) ends at 0.75, its transfer, beside A's, at 1.0 as well."""
    cluster = served([(0, 500, 3), (0.1, 250, 3)], ("prompt", "token"), "kv_token_jsq")
    a, b = cluster.requests
    assert (a.kv_start_s, a.kv_end_s, a.token_start_s) == pytest.approx((0.5, 1.0, 1.0))
    assert (b.kv_start_s, b.kv_end_s) == pytest.approx((0.75, 1.0))
    assert a.finish_s == pytest.approx(1.2)


def test_a_transfer_asks_for_room_every_second() -> None:
    """1000 bytes. A holds 600 on the token machine until its 99 decodes end at 10.9. B's 451 ask at 1.05,
    2.05 ... and go at 11.05."""
    limits = replace(ROOMY, memory_bytes=1000)
    rows = [(0.0, 500, 100), (0.6, 450, 2)]
    cluster = served(rows, ("prompt", "token"), "kv_token_jsq", limits=limits)
    assert cluster.requests[1].kv_start_s == pytest.approx(11.05)
    assert [machine.memory_bytes for machine in cluster.machines] == [0, 0]


def test_transfers_that_nothing_makes_room_for_are_an_error() -> None:
    """1000 bytes. A and B hold 501 and 451 on the token machine before either decodes, and neither's 99 more
    fit; C's 101 would ask for ever, as they do in that program."""
    limits = replace(ROOMY, memory_bytes=1000)
    with pytest.raises(ValueError, match="1 transfers wait for room"):
        rows = [(0.0, 500, 100), (0.01, 450, 100), (0.02, 100, 2)]
        served(rows, ("prompt", "token"), "kv_token_jsq", limits=limits)


def test_a_token_machine_takes_prompts_when_their_queue_is_long() -> None:
    """A (5000) runs on P, B (5000) waits there. C would make 10,100 waiting tokens of 8,192: the token
    machine becomes mixed and runs C whole, 0.2-0.3 and one decode. It returns to its pool, and serves A's
    and B's tokens."""
    rows = [(0.0, 5000, 2), (0.1, 5000, 2), (0.2, 100, 2)]
    cluster = served(rows, ("prompt", "token"), "mixed_pool")
    a, b, c = cluster.requests
    assert (c.prompt_machine, c.token_machine) == (1, 1)
    assert c.finish_s == pytest.approx(0.4) and np.isnan(c.kv_start_s)
    assert (a.token_machine, b.token_machine, b.first_token_s) == (1, 1, 10.0)
    assert cluster.token_pool == [cluster.machines[1]] and not cluster.mixed_pool


def test_a_long_prompt_may_join_a_machine_where_nothing_waits() -> None:
    """The limit on waiting tokens holds only where one waits: A and B (5000 each) both go to P."""
    cluster = served([(0, 5000, 2), (0.1, 5000, 2)], ("prompt", "token"), "mixed_pool")
    assert [request.prompt_machine for request in cluster.requests] == [0, 0]


def test_a_prompt_machine_takes_tokens_when_theirs_are_full() -> None:
    """1000 bytes. A (500 + 100 tokens) books 600 on T. B, the same, at 0.7, finds no 400: of the prompt
    machines, P0 still holds A's 501 until 1.0, so P1 becomes mixed. B's prompt goes to P0, where no prompt
    is pending either, waits there for A's 501 bytes until 1.0, ends at 1.5 and is on P1 at 2.0. P1
    returns."""
    limits = replace(ROOMY, memory_bytes=1000)
    rows = [(0.0, 500, 100), (0.7, 500, 100)]
    cluster = served(rows, ("prompt", "prompt", "token"), "mixed_pool", limits=limits)
    a, b = cluster.requests
    assert (a.prompt_machine, a.token_machine) == (0, 2)
    assert (b.prompt_machine, b.token_machine) == (0, 1)
    assert (b.kv_start_s, b.token_start_s) == pytest.approx((1.5, 2.0))
    assert cluster.prompt_pool == cluster.machines[:2] and not cluster.mixed_pool


def test_a_mixed_machine_keeps_taking_tokens_until_it_is_idle() -> None:
    """As above; C (at 3.0, 100 + 10 tokens) finds T's 400 bytes and goes there, D (500 + 100) does not, and
    finds P1, mixed and with 400 free, full as well: P0 becomes mixed and runs D whole. All are home at the
    end."""
    limits = replace(ROOMY, memory_bytes=1000)
    rows = [(0.0, 500, 100), (0.7, 500, 100), (3.0, 100, 10), (3.05, 500, 100)]
    cluster = served(rows, ("prompt", "prompt", "token"), "mixed_pool", limits=limits)
    assert [r.token_machine for r in cluster.requests] == [2, 1, 2, 0]
    assert cluster.requests[3].prompt_machine == 0
    assert set(map(id, cluster.prompt_pool)) == set(map(id, cluster.machines[:2]))
    assert all(machine.reserved_bytes == 0 for machine in cluster.machines)


def test_where_no_pool_has_room_one_machine_runs_both() -> None:
    """1000 bytes, P and T. A books 600 on T; B makes P mixed for its tokens and runs there whole. C finds P
    mixed and full, T full, and no prompt machine left: the least loaded of all takes it, P, whose prompt is
    done."""
    limits = replace(ROOMY, memory_bytes=1000)
    rows = [(0.0, 500, 100), (0.1, 500, 100), (2.0, 500, 100)]
    cluster = served(rows, ("prompt", "token"), "mixed_pool", limits=limits)
    assert [(r.prompt_machine, r.token_machine) for r in cluster.requests] == [(0, 1), (0, 0), (0, 0)]


# --- what that program computed


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
@pytest.mark.parametrize("name", CASES)
def test_every_request_ends_when_splitwise_sim_says(name: str) -> None:
    """All results of all requests, in pools too, to what nine digits of the arrivals allow: 1e-6 s.
    Machines are the same ones."""
    case = splitwise.read_case(REFERENCE / f"{name}.json")
    comparison = compare(by_the_plain_one(case), case.peer, splitwise.METRICS)
    assert max(comparison.largest.values()) <= 1e-6
    assert comparison.largest["prompt_runner"] == comparison.largest["token_runner"] == 0


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
def test_slowdowns_are_those_of_splitwise_sim() -> None:
    path = REFERENCE / "bloom_hh7p3t_mixedpool_conv15.json"
    case, document = splitwise.read_case(path), json.loads(path.read_text())
    ours = splitwise.slowdowns(case, splitwise.simulate_case(case))
    theirs = [[document[f"slow_{name}_p{q}"] for q in (50, 90, 99)] for name in splitwise.METRICS]
    assert np.array(list(ours.values())) == pytest.approx(np.array(theirs), abs=1e-4)


@pytest.mark.shared
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no shared data beside the checkout")
def test_the_honest_fit_is_near_the_measured_batches() -> None:
    """Measured at a prompt of 512: 36.1 ms for one sequence, 63.8 ms for 64 (BLOOM, H100); looked up: 35.3,
    35.5."""
    arguments = (REFERENCE, "bloom-176b", "h100-80gb", 8)
    fit, looked_up = (plain_steps(of(*arguments)) for of in (splitwise.honest_steps, splitwise.lookup_steps))
    for sequences, measured_s, looked_up_s in ((1, 0.0361, 0.0353), (64, 0.0638, 0.0355)):
        assert fit.step_s(0, sequences, sequences * 576) == pytest.approx(measured_s, rel=0.06)
        assert looked_up.step_s(0, sequences, 0) == pytest.approx(looked_up_s, abs=5e-5)


# --- the script that reads a folder of cases

OVERRIDES = {
    "applications.0.model_architecture": "bloom-176b",
    "applications.0.model_size": "bloom-176b-fp16",
    "performance_model": "db",
    "trace.filename": "made_up",
    "seed": "0",
    "applications.0.scheduler": "token_jsq",
    "cluster": "half_half",
    "cluster.servers.0.count": "0",
    "cluster.servers.1.count": "1",
    "start_state": "baseline",
}
POOLS = {"applications.0.scheduler": "mixed_pool", "start_state": "splitwise"}


def folder_of(
    tmp_path: Path, overrides: dict[str, str], requests: dict[str, Any] | None = None, name: str = "case"
) -> Path:
    """A case of one request: 1000 tokens at 1 ms; knots of 100 ms make two more tokens by 1.2 s."""
    row: dict[str, Any] = {
        "arrival_timestamp": 2.0,
        "prompt_size": 1000,
        "token_size": 3,
        "ttft": 1.0,
        "tbt": 0.2 / 3,
    }
    row |= {"e2e": 1.2, "queue_time": 0.0, "prompt_start": 2.0, "prompt_end": 3.0}
    row |= {"token_end": 3.2}
    row |= {"prompt_runner": "h100-80gb_0", "token_runner": "h100-80gb_0"} | (requests or {})
    pd.DataFrame([row]).to_csv(tmp_path / f"{name}.csv.gz", index=False)
    command = [f"{key}={value}" for key, value in overrides.items()]
    (tmp_path / f"{name}.json").write_text(json.dumps({"overrides": command, "user_s": 1.5}))
    knots = [
        ("bloom-176b", hw, 8, x, x / 1000, 0.1) for hw in ("a100-80gb", "h100-80gb") for x in (100, 2000)
    ]
    columns = ["model", "hardware", "tensor_parallel", "batch_tokens", "prompt_time_s", "token_time_s"]
    pd.DataFrame(knots, columns=columns).to_csv(tmp_path / "perf_knots.csv", index=False)
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["splitwise.py", str(folder)])
    return splitwise.main()


def test_a_folder_that_agrees_exits_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder_of(tmp_path, OVERRIDES), monkeypatch) == 0
    assert "peer 1.50" in (out := capsys.readouterr().out) and "1 of 1 cases agree" in out


@pytest.mark.parametrize("column", ["ttft", "tbt", "token_end"])
def test_a_result_that_is_two_microseconds_off_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    right = {"ttft": 1.0, "tbt": 0.2 / 3, "token_end": 3.2}
    folder_of(tmp_path, OVERRIDES)
    folder_of(tmp_path, OVERRIDES, {column: right[column] + 2e-6}, name="off")
    assert run(tmp_path, monkeypatch) == 1
    assert "MISS off" in (out := capsys.readouterr().out) and "ok   case" in out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"applications.0.scheduler": "random"}, "scheduler is random, must be one of token_jsq"),
        ({"cluster": "isocost_a100"}, "cluster is isocost_a100"),
        ({"cluster.servers.1.count": "many"}, "cluster.servers.1.count is many"),
        ({"cluster.servers.1.count": "0"}, "has no machine"),
        ({"applications.0.model_architecture": "gpt3-175b"}, "model_architecture is gpt3-175b"),
        ({"applications.0.model_size": "bloom-176b-int8"}, "model_size is bloom-176b-int8"),
        ({"start_state": "splitwise"}, "start_state splitwise does not go with scheduler token_jsq"),
        ({"start_state.instance.max_batch_tokens": "4096"}, "not known: start_state.instance.max_b"),
        ({"start_state.instance.tensor_parallelism": "4"}, "has no bloom-176b on 4 x h100-80gb"),
        (POOLS | {"start_state.split_type": "heterogeneous"}, "the cluster has no token machine"),
        (POOLS | {"cluster.servers.1.count": "1"}, "1 + 1 machines asked of 1 servers"),
        (
            POOLS
            | {"start_state.split_type": "heterogeneous", "cluster": "hhcap_half_half"}
            | {"cluster.servers.0.count": "1"},
            "no role for dgx-h100-pcap",
        ),
        ({"cluster.servers.0.count": "1"}, "is not a table"),
    ],
)
def test_a_case_that_cannot_be_read_is_one_line_and_exit_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, str],
    message: str,
) -> None:
    """The last: with an A100 before it, the H100 machine would be number 1, not 0. The other case runs."""
    folder_of(tmp_path, OVERRIDES)
    folder_of(tmp_path, OVERRIDES | overrides, name="odd")
    assert run(tmp_path, monkeypatch) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and "1 of 2 cases agree" in captured.out


def test_a_case_without_its_table_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder_of(tmp_path, OVERRIDES) / "case.csv.gz").unlink()
    assert run(tmp_path, monkeypatch) == 1
    assert "case.csv.gz: no such file" in capsys.readouterr().err


def test_a_table_without_its_case_exits_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder_of(tmp_path, OVERRIDES) / "lost.csv.gz").touch()
    assert run(tmp_path, monkeypatch) == 1
    assert "lost.csv.gz: has no command line" in capsys.readouterr().err


def test_each_pool_machine_gets_its_kind_role_and_memory(tmp_path: Path) -> None:
    """HA: the A100 servers come first and decode. With TP 4 for prompts a server makes two machines."""
    settings = {"split_type": "heterogeneous", "prompt.tensor_parallelism": "4"}
    overrides = OVERRIDES | POOLS | {f"start_state.{key}": value for key, value in settings.items()}
    overrides |= {"cluster.servers.0.count": "2", "cluster.servers.1.count": "1"}
    runners = {"prompt_runner": "h100-80gb_2", "token_runner": "a100-80gb_1"}
    case = splitwise.read_case(folder_of(tmp_path, overrides, runners) / "case.json")
    kinds = [(kind.hardware, kind.role, kind.tensor_parallel, kind.gpus) for kind in case.machines]
    assert kinds == [("a100-80gb", "token", 8, 8)] * 2 + [("h100-80gb", "prompt", 4, 4)] * 2
    assert [case.peer[name].tolist() for name in splitwise.RUNNERS] == [[2.0], [1.0]]
    assert case.bounds == splitwise.POOLED


def test_times_go_on_beyond_the_knots(tmp_path: Path) -> None:
    """1 ms a token between 100 and 2000, and so at 1 and 5000."""
    steps = splitwise.lookup_steps(folder_of(tmp_path, OVERRIDES), "bloom-176b", "h100-80gb", 8)
    assert [plain_steps(steps).step_s(tokens, 0, 0) for tokens in (1, 5000)] == pytest.approx([0.001, 5.0])


def test_no_case_is_no_success(tmp_path: Path) -> None:
    assert each_case(tmp_path, lambda path: True) == 1
