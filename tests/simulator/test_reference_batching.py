"""The step-by-step reference of the batching policies: by hand, and against Vidur request by request."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from reference_batching import POLICIES, Replica, Request, Settings, Step, VidurTables, simulate

VIDUR = Path(__file__).parents[3] / "shared" / "reference" / "vidur"
needs_vidur = pytest.mark.skipif(not VIDUR.is_dir(), reason="no shared data beside the checkout")


def step_s(step: Step) -> float:
    """One second, and one more per 100 tokens of prompt; decodes cost nothing."""
    return 1 + sum(new for new, _ in step.chunks) / 100


def requests_of(*rows: tuple[float, int, int]) -> list[Request]:
    return [Request(i, *row) for i, row in enumerate(rows)]


def run(
    policy: str, settings: Settings, *rows: tuple[float, int, int], replicas: int = 1, send_s: float = 0.0
) -> list[list[float]]:
    """When the tokens of each request left [s], without rounding errors."""
    requests = requests_of(*rows)
    simulate(requests, policy, settings, step_s, replicas=replicas, send_s=lambda step: send_s)
    return [[round(token_s, 9) for token_s in request.token_s] for request in requests]


def test_sarathi_by_hand() -> None:
    """Budget 100. 0-2: 100 of A. 2-4: the last 50 of A, 50 of B. 4-5.3: A decodes, the last 30 of B.
    5.3-6.3: both decode.
    """
    a, b = run("sarathi", Settings(blocks=100, token_budget=100), (0.0, 150, 3), (0.5, 80, 2))
    assert a == [4.0, 5.3, 6.3]
    assert b == [5.3, 6.3]


def test_sarathi_counts_decodes_against_the_budget() -> None:
    """Budget 10. 0-1.1: A's prompt. 1.1-2.19: A decodes, 9 tokens are left for B's 20. 2.19-3.28: the next 9.
    3.28-4.3: A is done, the last 2 of B.
    """
    a, b = run("sarathi", Settings(blocks=100, token_budget=10), (0.0, 10, 3), (0.0, 20, 1))
    assert a == [1.1, 2.19, 3.28]
    assert b == [4.3]


def test_sarathi_finishes_a_prompt_before_the_next_one_starts() -> None:
    """Budget 10, two prompts of 15: 0-1.1 ten of A, 1.1-2.2 five of A and five of B, 2.2-3.3 (A is done)
    ten of B.
    """
    a, b = run("sarathi", Settings(blocks=100, token_budget=10), (0.0, 15, 1), (0.0, 15, 1))
    assert a == [2.2]
    assert b == [3.3]


def test_vllm_v0_by_hand() -> None:
    """Budget 200, padded. 0-2: A's prompt. 2-4.4: B and C (2 x 80; D would make it 3 x 100). 4.4-6.4: D.
    6.4-7.4: A, B and C decode. 7.4-8.4: A.
    """
    a, b, c, d = run(
        "vllm-v0",
        Settings(blocks=100, token_budget=200),
        (0.0, 100, 3),
        (0.5, 80, 2),
        (0.5, 60, 2),
        (0.5, 100, 1),
    )
    assert a == [2.0, 7.4, 8.4]
    assert b == c == [4.4, 7.4]
    assert d == [6.4]


def test_orca_by_hand() -> None:
    """Budget 200. 0-2: A's prompt. 2-4.4: A decodes with the prompts of B and C (1 + 80 + 60; D would make it
    241). 4.4-6.4: A, B and C decode with D's prompt.
    """
    a, b, c, d = run(
        "orca",
        Settings(blocks=100, token_budget=200),
        (0.0, 100, 3),
        (0.5, 80, 2),
        (0.5, 60, 2),
        (0.5, 100, 1),
    )
    assert a == [2.0, 4.4, 6.4]
    assert b == c == [4.4, 6.4]
    assert d == [6.4]


def test_orca_that_reserves_admits_fewer() -> None:
    """20 blocks, 10 kept per request: A and B (0-1.2), then C when A is done, although A and B use 2 blocks.
    Paged, all three prompts are one step (0-1.3).
    """
    rows = ((0.0, 10, 1), (0.0, 10, 2), (0.0, 10, 1))
    reserved = run("orca", Settings(blocks=20, reserve_tokens=160), *rows)
    assert reserved == [[1.2], [1.2, 2.3], [2.3]]
    assert run("orca", Settings(blocks=20), *rows) == [[1.3], [1.3, 2.3], [1.3]]


def test_faster_transformer_by_hand() -> None:
    """25 blocks, 10 kept per request. 0-3: the prompts of A and B. A is done, but its KV stays until B is, at
    5 after two decodes. 5-7: C's prompt.
    """
    a, b, c = run(
        "faster-transformer",
        Settings(blocks=25, reserve_tokens=160),
        (0.0, 100, 1),
        (0.0, 100, 3),
        (0.5, 100, 1),
    )
    assert a == [3.0]
    assert b == [3.0, 4.0, 5.0]
    assert c == [7.0]


def test_lightllm_by_hand() -> None:
    """400 tokens of KV, new requests tried every 2 decodes. 0-2: A's prompt, 2-3-4: two decodes.
    At 4 A holds 103 with 2 to come. B (101, 0): max(103 + 2, 204) < 400, enters; C (201, 2) with them:
    max(103 + 2, 304 + 2 x 2, 405) >= 400, does not. 4-6: B's prompt. 6-7-8: decodes, B is done at 7.
    At 8: C (201, 2) and A (105, 0): max(203, 306), C enters. 8-11: its prompt. 11-12-13-14: decodes, A is
    done at 12.
    """
    a, b, c = run(
        "lightllm", Settings(blocks=25, max_waiting_steps=2), (0.0, 100, 6), (0.5, 100, 2), (0.5, 200, 4)
    )
    assert a == [2.0, 3.0, 4.0, 7.0, 8.0, 12.0]
    assert b == [6.0, 7.0]
    assert c == [11.0, 12.0, 13.0, 14.0]


def test_preempted_requests_are_prefilled_again_with_their_tokens() -> None:
    """Four blocks, two prompts of two. 0-1.64: both prompts. A's 33rd token needs a block: B, the last, goes.
    To 2.64, 3.64: A decodes; B (33 tokens, three blocks) finds one free. 3.64-4.97: A is done, B's 33 tokens,
    which make its second token. 4.97-5.97: B decodes.
    """
    rows = requests_of((0.0, 32, 3), (0.0, 32, 3))
    simulate(rows, "vllm-v0", Settings(blocks=4, watermark_frac=0.0), step_s)
    assert rows[0].token_s == pytest.approx([1.64, 2.64, 3.64])
    assert rows[1].token_s == pytest.approx([1.64, 4.97, 5.97])
    assert [request.restarts for request in rows] == [0, 1]


def test_a_decode_wants_a_free_block_even_if_it_needs_none() -> None:
    """Three blocks, all of them A's prompt of 40: tokens 41 and 42 would fit, but A preempts itself twice and
    prefills 41 and 42 tokens.
    """
    rows = requests_of((0.0, 40, 3))
    simulate(rows, "sarathi", Settings(blocks=3, watermark_frac=0.0), step_s)
    assert rows[0].token_s == pytest.approx([1.40, 1.40 + 1.41, 1.40 + 1.41 + 1.42])
    assert rows[0].restarts == 2


def test_a_prompt_preempted_halfway_starts_over() -> None:
    """Budget 32, seven blocks. 0-1.32: A. 1.32-2.63: A decodes (third block), 31 of B's 64 (four blocks, none
    left). A's next two decodes throw B out, and each time it re-enters in the same step and gets 31 tokens:
    to 3.94, 5.25. A is done. 5.25-6.57: 32 of B, 6.57-7.58: the last.
    """
    rows = requests_of((0.0, 32, 4), (0.0, 64, 1))
    settings = Settings(blocks=7, token_budget=32, watermark_frac=0.0)
    simulate(rows, "sarathi", settings, step_s)
    assert rows[0].token_s == pytest.approx([1.32, 2.63, 3.94, 5.25])
    assert rows[1].token_s == pytest.approx([7.58])
    assert rows[1].restarts == 2


def test_in_vidur_it_decodes_the_rest_of_its_prompt() -> None:
    """As above, but from 2.63 on B is a prompt of 31 (two blocks) with 34 tokens to make. 2.63-3.94: its
    prompt, and a "first token". The 33 others take 1 s each, the first with A's last.
    """
    rows = requests_of((0.0, 32, 4), (0.0, 64, 1))
    settings = Settings(blocks=7, token_budget=32, watermark_frac=0.0, vidur_restarts=True)
    simulate(rows, "sarathi", settings, step_s)
    assert rows[0].token_s == pytest.approx([1.32, 2.63, 3.94, 4.94])
    assert rows[1].token_s[0] == pytest.approx(3.94)
    assert rows[1].token_s[-1] == pytest.approx(36.94)
    assert rows[1].restarts == 1


def test_the_watermark_stays_free_at_admission() -> None:
    """Ten blocks, two of them the watermark. A takes 4; B's 5 would leave 1 and wait until A is done at 1.64;
    without a watermark both prompts are one step, to 2.44.
    """
    rows = ((0.0, 64, 1), (0.0, 80, 1))
    assert run("vllm-v0", Settings(blocks=10, watermark_frac=0.2), *rows) == [[1.64], [3.44]]
    assert run("vllm-v0", Settings(blocks=10, watermark_frac=0.0), *rows) == [[2.44], [2.44]]


@pytest.mark.parametrize("policy", ["sarathi", "vllm-v0", "orca", "faster-transformer"])
def test_pipeline_bubbles_by_hand(policy: str) -> None:
    """Two stages: 1 s each for a prompt of 100, 0.5 s for a decode.
    A's prompt: 0-1, 1-2. B arrives at 0.2, stage 1 is busy until 1: 1-2, 2-3. A decodes: 2-2.5, then waits
    for B to leave stage 2 at 3: 3-3.5. B decodes: 3-3.5, 3.5-4.
    """
    settings = Settings(blocks=100, stages=2, reserve_tokens=160 if policy == "faster-transformer" else 0)
    a, b = run(policy, settings, (0.0, 100, 2), (0.2, 100, 2))
    assert a == [2.0, 3.5]
    assert b == [3.0, 4.0]


def test_sending_between_stages_keeps_the_first_stage_busy() -> None:
    """As above with 0.1 s to send. A's prompt: 0-1.1, 1.1-2.1. B's: 1.1-2.2, 2.2-3.2. A decodes: 2.2-2.8,
    3.2-3.7. B: 3.2-3.8, 3.8-4.3.
    """
    a, b = run("sarathi", Settings(blocks=100, stages=2), (0.0, 100, 2), (0.2, 100, 2), send_s=0.1)
    assert a == [2.1, 3.7]
    assert b == [3.2, 4.3]


def test_requests_in_flight_are_neither_scheduled_nor_preempted() -> None:
    """Two stages, five blocks. A (32, two blocks) and B (32, two) are micro-batches of their own: stages of
    0.66 s, A's first token at 1.32, B's at 1.98. A decodes (third block, none left): 1.32-1.82, 1.98-2.48.
    At 1.98 B finds no block and A is in flight, so B preempts itself. At 2.48 A is done; B's 33 tokens take
    two stages of 0.665 s, to 3.81; then B decodes, to 4.81.
    """
    rows = requests_of((0.0, 32, 2), (0.2, 32, 3))
    simulate(rows, "vllm-v0", Settings(blocks=5, watermark_frac=0.0, stages=2), step_s)
    assert rows[0].token_s == pytest.approx([1.32, 2.48])
    assert rows[1].token_s == pytest.approx([1.98, 3.81, 4.81])
    assert rows[1].restarts == 1


def test_round_robin_deals_requests_out_by_number() -> None:
    """Two replicas: A and C share the first, whose steps are 0-2 (A) and 2-4 (C); B has the second, 1-3."""
    assert run("vllm-v0", Settings(blocks=100), (0.0, 100, 1), (1.0, 100, 1), (1.0, 100, 1), replicas=2) == [
        [2.0],
        [3.0],
        [4.0],
    ]


def test_what_can_never_be_scheduled_is_named() -> None:
    """A prompt of 200 does not fit into a padded budget of 100."""
    with pytest.raises(RuntimeError, match="vllm-v0: 1 requests can never be scheduled, the first is 1"):
        run("vllm-v0", Settings(blocks=100, token_budget=100), (0.0, 50, 1), (0.0, 200, 1))


@pytest.mark.parametrize(
    ("policy", "stages"),
    [(policy, stages) for policy in POLICIES for stages in (1, 3) if (policy, stages) != ("lightllm", 3)],
)
def test_tokens_in_are_tokens_out(policy: str, stages: int) -> None:
    """Little KV, so that requests are preempted: each makes its output, once, in order; each prompt token is
    computed once, and after a restart again; at the end all blocks are free.
    """
    rng = np.random.default_rng(stages)
    rows = zip(
        np.cumsum(rng.exponential(0.05, 60)).tolist(),
        rng.integers(1, 200, 60).tolist(),
        rng.integers(1, 40, 60).tolist(),
        strict=True,
    )
    requests = requests_of(*rows)
    outputs, prompts = [r.output for r in requests], sum(r.prompt for r in requests)
    reserve = 256 if policy == "faster-transformer" else 0
    settings = Settings(blocks=40, token_budget=512, reserve_tokens=reserve, stages=stages, max_num_seqs=30)
    replicas: list[Replica] = simulate(requests, policy, settings, step_s, replicas=2)

    assert [len(request.token_s) for request in requests] == outputs
    assert all((np.diff(request.token_s) > 0).all() for request in requests)
    assert all(replica.policy.free == 40 and not replica.policy.held for replica in replicas)
    steps = [step for replica in replicas for _, _, step in replica.steps]
    computed = sum(new for step in steps for new, _ in step.chunks)
    restarts = sum(request.restarts for request in requests)
    assert computed == prompts if not restarts else computed > prompts
    assert (restarts > 0) == (policy in ("sarathi", "vllm-v0", "orca"))


@pytest.mark.shared
@needs_vidur
@pytest.mark.parametrize(
    ("case", "policy", "tables", "layers"),
    [
        ("a7b_sarathi_2k", "sarathi", "vidur_sampled_a100_llama-2-7b_tp1", 32),
        ("a7b_vllm_2k", "vllm-v0", "vidur_sampled_a100_llama-2-7b_tp1", 32),
        ("a7b_sarathi_heavy_2k", "sarathi", "vidur_sampled_a100_llama-2-7b_tp1", 32),
        ("a70b_tp2_sarathi_2k", "sarathi", "vidur_a100_llama-2-70b_tp2", 80),
    ],
)
def test_vidur_request_by_request(case: str, policy: str, tables: str, layers: int) -> None:
    """2,000 requests, up to 34,359 steps: TTFT and E2E of each within 1e-6 s, and as many steps."""
    said = json.loads((VIDUR / f"{case}.json").read_text())
    with gzip.open(VIDUR / f"{case}.csv.gz", "rt") as stream:
        rows = list(csv.DictReader(stream))
    requests = requests_of(
        *((float(r["arrived_at"]), int(r["prefill_tokens"]), int(r["decode_tokens"])) for r in rows)
    )
    step_times = VidurTables.read(VIDUR / f"tables_{tables}.npz", layers)
    (replica,) = simulate(requests, policy, Settings(blocks=said["num_blocks"]), step_times)
    assert len(replica.steps) == said["batches"]
    assert [r.ttft_s for r in requests] == pytest.approx([float(r["ttft"]) for r in rows], abs=1e-6, rel=0)
    assert [r.e2e_s for r in requests] == pytest.approx([float(r["e2e"]) for r in rows], abs=1e-6, rel=0)
