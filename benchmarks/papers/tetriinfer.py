"""TetriInfer against vLLM v0: light and heavy prompts, light and heavy outputs.

    python benchmarks/papers/tetriinfer.py

128 requests at once (the paper names no arrival process), Llama-2-13B (theirs is OPT) on V100 with TP 2;
means of ten seeds. Light prompts have 18 tokens in the median, heavy ones 512 to 2,000; light outputs 20 to
128, heavy ones up to 1,000. vLLM: one worker, whole prompts first, 16 sequences (its "fixed batch size") or
256. TetriInfer: a prefill worker in chunks of 512, shortest first in scheduling batches of 16; a decode
worker with reserve-dynamic, lengths predicted right in 75 %; KV over 300 GB/s. Hu et al. 2024
(arXiv:2401.11181, Figures 11 to 15): TTFT 9 to 97 % lower, JCT 23 to 50 %, GPU seconds from 43 % more (HPLD)
to 38 % less (LPHD).
"""

from __future__ import annotations

import numpy as np
from common import CATALOG, Ints, log_normal, worker

from planner.fleet import Fleet, Network, Policies, Pool
from planner.simulator.replay import Simulation, simulate
from planner.traffic.trace import Trace

LLM, N = "llama-2-13b", 128
TETRI = Policies(
    batching="sarathi",
    queue="sjf",
    queue_batch=16,
    decode_routing="power-of-two",
    pools="flip",
    admission="reserve-dynamic",
    prediction_accuracy_frac=0.75,
)


def lengths(rng: np.random.Generator, prefill: str, decode: str) -> tuple[Ints, Ints]:
    light_in, heavy_in = log_normal(rng, N, 18, 1.0, 511), rng.integers(512, 2000, N)
    light_out, heavy_out = rng.integers(20, 128, N), rng.integers(128, 1000, N)
    is_heavy = {"L": np.zeros(N, bool), "H": np.ones(N, bool)}
    mix = rng.integers(2, size=(2, N)).astype(bool)
    return (
        np.where(is_heavy.get(prefill, mix[0]), heavy_in, light_in),
        np.where(is_heavy.get(decode, mix[1]), heavy_out, light_out),
    )


def kept_s(result: Simulation) -> float:
    """Seconds for which workers are kept: each until its last step."""
    runs = result.runs[result.runs["prefill_tokens"] >= 0]
    ends = runs["start_s"] + runs["first_s"] * runs["steps"]
    return float(sum(ends[runs["worker"] == w].max(initial=0.0) for w in range(len(result.worker_names))))


def main() -> None:
    llm = CATALOG.llm(LLM)
    print("mean TTFT [s], JCT [s], GPU seconds, and how much less or more TetriInfer takes")
    print("           vLLM v0, 16 sequences   vLLM v0, 256            TetriInfer              to 16, to 256")
    for prefill, decode in (("L", "L"), ("L", "H"), ("H", "L"), ("H", "H"), ("mix", "mix")):
        rows = []
        for seed in range(10):
            inputs, outputs = lengths(np.random.default_rng(seed), prefill, decode)
            trace = Trace("made", np.arange(N) * 1e-3, inputs, outputs)
            fleets = []
            for seats in (16, 256):
                pool = Pool("vllm", "mixed", worker(LLM, "v100", 2, budget=2560, seats=seats), 1)
                fleets.append(Fleet(llm, (pool,), Policies(batching="vllm-v0")))
            kind = worker(LLM, "v100", 2, budget=512)
            pools = (Pool("p", "prefill", kind, 1), Pool("d", "decode", kind, 1))
            fleets.append(Fleet(llm, pools, TETRI, Network(300e9)))
            results = [simulate(fleet, trace, record=True) for fleet in fleets]
            assert all((result.status == 0).all() for result in results)
            rows.append([(r.ttft_s.mean(), r.e2e_s.mean(), 2 * kept_s(r)) for r in results])
        mean = np.mean(rows, axis=0)
        name = f"{prefill}P{decode}D" if prefill != "mix" else "mixed"
        columns = [f"{name:9}", *(f"{ttft:6.2f} {jct:6.2f} {gpu:6.1f} " for ttft, jct, gpu in mean)]
        for vllm in mean[:2]:
            columns.append(" ".join(f"{100 * share:+.0f}%" for share in mean[2] / vllm - 1))
        print("  ".join(columns))


if __name__ == "__main__":
    main()
