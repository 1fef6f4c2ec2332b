"""Compares TetriInfer with vLLM v0, for light and heavy prompts and light and heavy outputs.

    python benchmarks/papers/tetriinfer.py [figure3 | figure11 | figure16 to figure19 | predictor]

128 requests at once (the paper names no arrival process), OPT-13B on V100 with TP 2; means of ten seeds.
Light prompts have 18 tokens in the median, heavy ones 512 to 2,000; light outputs 20 to 128, heavy ones up to
1,000. vLLM: one worker, whole prompts first, 16 sequences (its "fixed batch size") or 256. TetriInfer: a
prefill worker in chunks of 512, shortest first in scheduling batches of 16, beside it the predictor, which
makes its steps 10 % longer; a decode worker with reserve-dynamic, lengths predicted right in 74.9 %, loads
heard every 100 ms; KV over NVLink (300 GB/s) or RoCE (200 Gb/s). Hu et al. 2024 (arXiv:2401.11181).

Figures 3 to 5, of one step: a light prompt takes 2 and 8 times as long beside 7 and 63 light ones, over 10
times beside heavy ones, a heavy one 3 times beside light ones; a decode 5 times beside one heavy prompt;
light decodes lose 16 % of their throughput where half of 128 are heavy.

Figures 11 to 15: TTFT 9 to 97 % lower, JCT 23 to 50 %, GPU seconds from 43 % more (HPLD) to 38 % less (LPHD),
the same with both links. Figure 16: chunks take 86.4 % off vLLM's prefill latency, shortest first 7.8 % more
of the wait, with batches of 128 46.5 % of TTFT. Figure 17: co-running predictor and prefill, 10 % latency.
Figure 18, 256 requests: at 74.9 % accuracy reserve-dynamic equals greedy, at 100 % it takes 12 % off JCT,
reserve-static 10 %. Figure 19, 32 requests on each of 2 to 8 decode workers: by heavy and light in less time
than at random, and than where all heavy ones go to the same worker. `predictor` needs torch: a classifier of
words on prompts that are made, in ranges of 100, 200, 400 tokens; OPT-125M on ShareGPT: 58.9, 74.9, 85 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from benchmarks.papers.common import CATALOG, Ints, log_normal, worker
from benchmarks.papers.prompt_words import PromptWords, best_accuracy, made_prompts
from planner.fleet import Fleet, Network, Policies, Pool
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
LLM, N, SEEDS = "opt-13b", 128, 10
NVLINK, ROCE = Network(300e9), Network(200e9 / 8)
TETRI = Policies(
    batching="sarathi",
    queue="sjf",
    queue_batch=16,
    decode_routing="heavy-light",
    load_period_s=0.1,
    pools="flip",
    admission="reserve-dynamic",
    prediction_accuracy_frac=0.749,
    predictor_slowdown_frac=0.1,
)


def lengths(rng: np.random.Generator, prefill: str, decode: str, n: int = N) -> tuple[Ints, Ints]:
    light_in, heavy_in = log_normal(rng, n, 18, 1.0, 511), rng.integers(512, 2000, n)
    light_out, heavy_out = rng.integers(20, 128, n), rng.integers(128, 1000, n)
    is_heavy = {"L": np.zeros(n, bool), "H": np.ones(n, bool)}
    mix = rng.integers(2, size=(2, n)).astype(bool)
    return (
        np.where(is_heavy.get(prefill, mix[0]), heavy_in, light_in),
        np.where(is_heavy.get(decode, mix[1]), heavy_out, light_out),
    )


def kept_s(result: Simulation) -> float:
    """Seconds for which workers are kept: each until its last step."""
    runs = result.runs[result.runs["prefill_tokens"] >= 0]
    ends = runs["start_s"] + runs["first_s"] * runs["steps"]
    return float(sum(ends[runs["worker"] == w].max(initial=0.0) for w in range(len(result.worker_names))))


def made(seed: int, prefill: str, decode: str, n: int = N) -> Trace:
    inputs, outputs = lengths(np.random.default_rng(seed), prefill, decode, n)
    return Trace("made", np.arange(n, dtype=np.float64) / 1000, inputs, outputs)


def vllm(seats: int) -> Fleet:
    pool = Pool("vllm", "mixed", worker(LLM, "v100", 2, budget=2560, seats=seats), 1)
    return Fleet(CATALOG.llm(LLM), (pool,), Policies(batching="vllm-v0"))


def split(policies: Policies, network: Network = NVLINK, decodes: int = 1) -> Fleet:
    kind = worker(LLM, "v100", 2, budget=512)
    pools = (Pool("p", "prefill", kind, 1), Pool("d", "decode", kind, decodes))
    return Fleet(CATALOG.llm(LLM), pools, policies, network)


def figure3() -> None:
    """Figures 3 to 5 on the catalog's step times."""
    latency = worker(LLM, "v100", 2, budget=512).latency

    def step_s(light: int = 0, heavy: int = 0, decodes: int = 0, context: int = 0) -> float:
        tokens = 18 * light + 512 * heavy
        pairs = light * 18 * 19 / 2 + heavy * 512 * 513 / 2
        return float(latency.step_s(tokens + decodes, pairs, decodes, decodes * context, light + heavy))

    for name, alone, beside in (
        ("a light prompt, 7 light ones more", {"light": 1}, {"light": 8}),
        ("63 light ones more", {"light": 1}, {"light": 64}),
        ("7 heavy ones more", {"light": 1}, {"light": 1, "heavy": 7}),
        ("a heavy prompt, 63 light ones more", {"heavy": 1}, {"heavy": 1, "light": 63}),
        (
            "a decode, a heavy prompt more",
            {"decodes": 1, "context": 60},
            {"decodes": 1, "context": 60, "heavy": 1},
        ),
        ("a light prompt, 63 decodes more", {"light": 1}, {"light": 1, "decodes": 63, "context": 60}),
        ("a heavy prompt, 63 decodes more", {"heavy": 1}, {"heavy": 1, "decodes": 63, "context": 60}),
        (
            "128 light decodes, half of them heavy",
            {"decodes": 128, "context": 60},
            {"decodes": 128, "context": 180},
        ),
    ):
        print(f"{name}: {step_s(**beside) / step_s(**alone):.2f} times as long")


def figure11() -> None:
    """Print the figures of figures 11 to 15, one row for each mix of heavy and light prompts and outputs."""
    print("mean TTFT [s], JCT [s], GPU seconds, and how much less or more TetriInfer takes")
    print("           vLLM v0, 16 sequences   vLLM v0, 256            TS-NVLink               to 16, to 256,")
    print("           TS-RoCE to TS-NVLink")
    fleets = (vllm(16), vllm(256), split(TETRI), split(TETRI, ROCE))
    for prefill, decode in (("L", "L"), ("L", "H"), ("H", "L"), ("H", "H"), ("mix", "mix")):
        rows = []
        for seed in range(SEEDS):
            results = [simulate(fleet, made(seed, prefill, decode), record=True) for fleet in fleets]
            assert all((result.status == 0).all() for result in results)
            rows.append([(r.ttft_s.mean(), r.e2e_s.mean(), 2 * kept_s(r)) for r in results])
        mean = np.mean(rows, axis=0)
        name = f"{prefill}P{decode}D" if prefill != "mix" else "mixed"
        columns = [f"{name:9}", *(f"{ttft:6.2f} {jct:6.2f} {gpu:6.1f} " for ttft, jct, gpu in mean[:3])]
        for one, other in ((2, 0), (2, 1), (3, 2)):
            columns.append(" ".join(f"{100 * share:+.0f}%" for share in mean[one] / mean[other] - 1))
        print("  ".join(columns))


def figure16() -> None:
    """The time to the first token, of prompts alone: outputs of one token."""
    orders = [("vLLM v0, 16 sequences", vllm(16))]
    for queue in ("fcfs", "sjf", "ljf"):
        orders.append((f"chunks, {queue}", split(replace(TETRI, queue=queue))))
    for batch in (32, 64, 128):
        orders.append((f"chunks, sjf, batches of {batch}", split(replace(TETRI, queue_batch=batch))))
    for name, fleet in orders:
        found = [simulate(fleet, made(seed, "mix", "mix")) for seed in range(SEEDS)]
        ttft_s = np.mean([one.ttft_s.mean() for one in found])
        queue_s = np.mean([one.queue_s.mean() for one in found])
        print(f"{name:28} mean TTFT {ttft_s:6.2f} s, wait {queue_s:6.2f} s")


def figure17() -> None:
    """What the predictor beside the prefills costs."""
    for slowdown in (0.0, 0.1, 0.25):
        fleet = split(replace(TETRI, predictor_slowdown_frac=slowdown))
        found = [simulate(fleet, made(seed, "mix", "mix")) for seed in range(SEEDS)]
        ttft_s, jct_s = (np.mean([each.mean() for each in rows]) for rows in _times(found))
        print(f"steps of prefill {slowdown:4.0%} longer: mean TTFT {ttft_s:5.2f} s, JCT {jct_s:5.2f} s")


def _times(found: list[Simulation]) -> tuple[list[Floats], list[Floats]]:
    return [one.ttft_s for one in found], [one.e2e_s for one in found]


def figure18() -> None:
    """256 requests, one decode worker."""
    for accuracy in (0.749, 1.0):
        base_s = None
        for admission in ("greedy", "reserve-static", "reserve-dynamic"):
            fleet = split(replace(TETRI, admission=admission, prediction_accuracy_frac=accuracy))
            found = [simulate(fleet, made(seed, "mix", "mix", 256)) for seed in range(SEEDS)]
            jct_s = float(np.mean([one.e2e_s.mean() for one in found]))
            base_s = base_s or jct_s
            restarts = np.mean([one.preemptions.sum() for one in found])
            print(
                f"accuracy {accuracy:5.1%} {admission:16} JCT {jct_s:6.2f} s ({jct_s / base_s - 1:+.1%}), "
                f"{restarts:4.1f} preemptions"
            )


def figure19() -> None:
    """32 requests of mixed lengths per decode worker: until all have ended, and decodes on the slowest."""
    rules = (
        ("heavy and light", TETRI),
        ("... loads fresh", replace(TETRI, load_period_s=0.0)),
        ("... loads of 1 s", replace(TETRI, load_period_s=1.0)),
        ("power of two, jsq", replace(TETRI, decode_routing="power-of-two")),
        ("random", replace(TETRI, decode_routing="random")),
    )
    for decodes in (2, 4, 8):
        for name, policies in rules:
            rows = []
            for seed in range(SEEDS):
                trace = made(seed, "L", "mix", 32 * decodes)
                found = simulate(split(policies, decodes=decodes), trace)
                rows.append(_slowest(found.arrival_s + found.e2e_s, found.decode_worker, trace.output_tokens))
            end_s, heavy, light = np.mean(rows, axis=0)
            print(
                f"{decodes} workers, {name:18} {end_s:6.2f} s, slowest: {heavy:4.1f} heavy {light:4.1f} light"
            )
        # the worst: all heavy ones on the same worker, or on as few as hold 32 requests each
        ends = []
        for seed in range(SEEDS):
            trace = made(seed, "L", "mix", 32 * decodes)
            order = np.argsort(-trace.output_tokens, kind="stable")
            part_s = []
            for w in range(decodes):
                part = trace.select(np.sort(order[32 * w : 32 * (w + 1)]))
                part_s.append(float((part.arrival_s + simulate(split(TETRI), part).e2e_s).max()))
            ends.append(max(part_s))
        print(f"{decodes} workers, imbalance          {np.mean(ends):6.2f} s, slowest: 32.0 heavy  0.0 light")


def _slowest(end_s: Floats, decode_worker: Ints, outputs: Ints) -> tuple[float, int, int]:
    last = decode_worker[np.argmax(end_s)]
    heavy = outputs[decode_worker == last] > TETRI.heavy_tokens
    return float(end_s.max()), int(heavy.sum()), int((~heavy).sum())


def predictor() -> None:
    """10,000 made prompts, the last fifth held out."""
    prompts, outputs, _ = made_prompts(10_000, np.random.default_rng(1))
    for tokens, buckets in ((100, 20), (200, 10), (400, 5)):
        model = PromptWords(bucket_tokens=tokens, buckets=buckets).fit(prompts[:8000], outputs[:8000])
        start_s = time.process_time()
        right = model.score(prompts[8000:], outputs[8000:])
        each_ms = 1e3 * (time.process_time() - start_s) / 2000
        print(
            f"ranges of {tokens} tokens: right {right:.1%}, at best {best_accuracy(tokens, buckets):.1%}, "
            f"{each_ms:.2f} ms of CPU per prompt"
        )


FIGURES: tuple[Callable[[], None], ...] = (
    figure3,
    figure11,
    figure16,
    figure17,
    figure18,
    figure19,
    predictor,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    figures = {each.__name__: each for each in FIGURES}
    parser.add_argument("figure", nargs="?", choices=list(figures), default="figure11")
    figures[parser.parse_args().figure]()


if __name__ == "__main__":
    main()
