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

    def gpus_of(*kinds: str) -> list[str]:
        """The GPUs whose step times are of one of these kinds."""
        return [gpu for gpu, kind in kind_by_gpu.items() if kind in kinds]

    measured, computed = gpus_of("kernels", "steps"), gpus_of("roofline")
    # Of step times that are given nobody knows more than of derived ones.
    carried = gpus_of("derived", "given")
    beginnings = (
        ("Step times measured on", measured),
        ("Carried over from another GPU", carried),
        ("Computed from the GPU's figures", computed),
    )
    why = " ".join(f"{beginning}: {', '.join(gpus)}." for beginning, gpus in beginnings if gpus)
    if measured:
        return f"measured on {len(measured)} GPU types", "green", why
    if carried:
        return f"estimated on {len(carried)} GPU types", "orange", why
    if computed:
        return "computed, nothing measured", "red", why
    return "fits on no node", "red", "No node of the catalog holds it."


def _splits(catalog: Catalog, llm: Llm, gpu: Gpu, tp: int) -> Iterator[Split]:
    """The splits (`fits.Split`) that get a row: those with one rank, with several ranks on a node as far as
    they have a fit, and with ranks on several nodes.
    """
    yield from (Split(tp, ep) for ep in catalog.expert_splits(llm, gpu, tp))
    yield from (Split(tp, True, dp) for dp in catalog.rank_counts(llm, gpu, tp) or ())
    yield from (Split(tp, True, dp, kind) for dp, kind in catalog.rank_counts_on_nodes(llm, gpu, tp))


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
        # Blocks that a sequence of full context takes beside those of its tokens (models/kv_layout.py).
        "extra_kv_blocks": kv_layout(llm, tp).extra.sequence_blocks(llm.context_tokens),
        "step_times": latency.kind,
        "error_frac": latency.mape_frac,
        "spread": None
        if spread is None
        else [spread.prefill.at_sigmas(INTERVAL_SIGMAS), spread.decode.at_sigmas(INTERVAL_SIGMAS)],
        "basis": latency.basis,
        "unchecked": "" if catalog.is_checked(llm, gpu) else gpu.unchecked,
    }
