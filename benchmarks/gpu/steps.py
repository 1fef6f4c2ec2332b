"""Compares the catalog's step times with steps that `plan profile` measured on a GPU, by kind of step.

    python benchmarks/gpu/steps.py [TABLE]      # default: benchmarks/gpu/h100/table.csv

The host's part of a measured step is subtracted, as sums of kernels do not have it. Predictions are for the
version of vLLM that was profiled, with its kernel launches (planner/models/older_kernels.py). "Without C" is
the prediction without the time of reading cached tokens (planner/models/latency.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from planner.documents.catalog import read_catalog
from planner.models.engine import Engine
from planner.models.older_kernels import captured_tokens, correct_for_version
from planner.models.step_tables import read_step_table

SEATS = 256  # Sequences per step, as the table's line `limits` says.
LONG_TOKENS = 8000  # In steps with so many cached tokens, reading them takes noticeable time.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "h100" / "table.csv"
    parser.add_argument("table", type=Path, nargs="?", default=default, metavar="TABLE")
    table, catalog = read_step_table(parser.parse_args().table), read_catalog()
    llm, gpu = catalog.llm(table.about["llm"]), catalog.gpu(table.about["gpu"])
    engine = Engine("vllm", table.about["vllm"], async_scheduling=False)
    kernels = catalog.step_latency(llm, gpu, int(table.about["tp"]))
    latency = correct_for_version(kernels, llm, gpu, engine, captured_tokens(SEATS))
    measured_s = table.y - table.steps.host_s.to_numpy(float)
    cached, has_prompts = table.steps.cached_tokens.to_numpy(float), table.steps.n_prefill.to_numpy() > 0
    kinds = {
        "decodes alone": ~has_prompts,
        f"prompts, fewer than {LONG_TOKENS} cached tokens": has_prompts & (cached < LONG_TOKENS),
        f"prompts, {LONG_TOKENS} cached tokens and more": has_prompts & (cached >= LONG_TOKENS),
    }
    print("| steps | number | mean error, with sign | seconds in sum | without C | seconds in sum |")
    print("|---|---|---|---|---|---|")
    for kind, rows in kinds.items():
        cells = [kind, str(rows.sum())]
        for predicted_s in (latency.steps_s(table.X), latency.step_s(*table.X.T)):
            ratio = predicted_s[rows] / measured_s[rows] - 1
            in_sum = predicted_s[rows].sum() / measured_s[rows].sum() - 1
            cells += [
                f"{100 * np.abs(ratio).mean():.1f} % ({100 * ratio.mean():+.1f})",
                f"{100 * in_sum:+.1f} %",
            ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
