"""Shows how well the catalog knows an LLM on a GPU: a row per split over GPUs, and a badge for all rows."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from planner.documents.catalog import Catalog
from planner.documents.fits import Split
from planner.domain import Gpu
from planner.models.all2all import LOW_LATENCY, MOST_LOW_LATENCY_TOKENS, Exchange
from planner.models.kv_layout import kv_layout
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.spread import INTERVAL_SIGMAS

STEP_TIMES = {
    "kernels": "sums of measured kernels; off: the fit's mean error on steps held out",
    "steps": "of a measured engine; off: the fit's mean error on steps held out",
    "derived": "measured on another GPU and carried over by rooflines",
    "given": "written down by somebody who did not say how they were found",
    "roofline": "computed from figures of the GPU; nothing of this LLM was measured there",
}
"""What step times of each `StepLatency.kind` rest on; "off" explains the row's `error_frac`."""
# The beginning of each sentence of the badge, and the kinds of step times that it counts; the kind "given"
# counts as carried over. The best known come first. `support_badge` unpacks the three in this order.
BADGE_SENTENCES = {
    "Step times measured on": ("kernels", "steps"),
    "carried over from another GPU": ("derived", "given"),
    "computed from the GPU's figures": ("roofline",),
}
USUAL_BATCHED_TOKENS = 8192  # The default max_num_batched_tokens of vLLM on large GPUs.
Colour = Literal["green", "orange", "red"]


def support_rows(catalog: Catalog, llm: Llm, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """One row for each TP and split of the experts with which a worker holds the LLM, at vLLM's usual
    settings; the smallest TP first.
    """
    for tp in filter(llm.splits_over, range(1, gpu.gpus_per_node + 1)):
        for split in _splits(catalog, llm, gpu, tp):
            if (row := _row(catalog, llm, gpu, split)) is not None:
                yield row


def support_badge(rows: Iterable[dict[str, Any]]) -> tuple[str, Colour, str]:
    """How well step times are known, the badge's colour, and why.

    The first row of each GPU counts, which is the row of the smallest TP that holds the LLM.
    """
    kind_by_gpu: dict[str, str] = {}
    for row in rows:
        kind_by_gpu.setdefault(row["gpu"], row["step_times"])
    gpus_of = {
        beginning: [gpu for gpu, kind in kind_by_gpu.items() if kind in kinds]
        for beginning, kinds in BADGE_SENTENCES.items()
    }
    measured, carried, computed = gpus_of.values()
    sentences = [f"{beginning}: {', '.join(gpus)}" for beginning, gpus in gpus_of.items() if gpus]
    why = ". ".join(f"{sentence[0].upper()}{sentence[1:]}" for sentence in sentences)
    if measured:
        return f"kernels measured on {len(measured)} GPU types", "green", f"{why}."
    if carried:
        return f"estimated on {len(carried)} GPU types", "orange", f"{why}."
    if computed:
        return "computed, nothing measured", "red", f"{why}."
    return "fits on no node", "red", "No node of the catalog holds it."


def _splits(catalog: Catalog, llm: Llm, gpu: Gpu, tp: int) -> Iterator[Split]:
    """The splits (TP, whether experts are split, data-parallel ranks, all-to-all kernels) that get a row."""
    yield from ((tp, ep, 1, "") for ep in catalog.expert_splits(llm, gpu, tp))
    yield from ((tp, True, dp, "") for dp in catalog.rank_counts(llm, gpu, tp) or ())
    yield from ((tp, True, dp, kind) for dp, kind in catalog.rank_counts_on_nodes(llm, gpu, tp))


def _row(catalog: Catalog, llm: Llm, gpu: Gpu, split: Split) -> dict[str, Any] | None:
    """The row of one worker; None if the weights leave no room for a KV block."""
    tp, ep, dp, all2all = split
    # Low-latency kernels take no step with more than MOST_LOW_LATENCY_TOKENS; models/all2all.py says why.
    budget_tokens = MOST_LOW_LATENCY_TOKENS if all2all == LOW_LATENCY else USUAL_BATCHED_TOKENS
    memory = worker_memory(llm, gpu, tp, dp=dp, max_num_batched_tokens=budget_tokens)
    if memory.kv_tokens == 0:
        return None
    latency = catalog.step_latency(llm, gpu, tp, ep=ep, dp=dp, exchange=Exchange(all2all))
    spread = latency.spread
    return {
        "gpu": gpu.name,
        "tp": tp,
        "ep": ep,
        "usd_per_h": round(tp * dp * gpu.price_usd_per_h, 2),
        "dp": dp,
        "all2all": all2all,
        "weight_gb": round(memory.weight_bytes / 1e9, 2),
        "kv_tokens": memory.kv_tokens,
        "extra_kv_blocks": kv_layout(llm, tp).extra.sequence_blocks(llm.context_tokens),
        "step_times": latency.kind,
        "error_frac": latency.mape_frac,
        "spread": None
        if spread is None
        else [spread.prefill.at_sigmas(INTERVAL_SIGMAS), spread.decode.at_sigmas(INTERVAL_SIGMAS)],
        "basis": latency.basis,
        "unchecked": "" if catalog.is_checked(llm, gpu) else gpu.unchecked,
    }
