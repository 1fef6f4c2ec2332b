"""Measures how well output lengths are predicted from a trace's other columns, on its later requests.

python benchmarks/lengths.py TRACE...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from planner.models.output_length_fit import ConditionalMean, later_accuracy
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

FITTED_FRAC = 0.7  # The share of a trace, from its beginning, that predictors are fitted to.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    for path in parser.parse_args().traces:
        trace = read_trace(path)
        print(f"{path.name}: {len(trace)} requests, the last {1 - FITTED_FRAC:.0%} held out")
        for width in (100, 200, 400):
            found = later_accuracy(trace, bucket_tokens=width, fitted_frac=FITTED_FRAC)
            print(
                f"  buckets of {width}: right {found.accuracy_frac:.1%}, commonest bucket "
                f"{found.majority_frac:.1%}, within one {found.within_one_frac:.1%}"
            )
        conditional_mean(trace)


def conditional_mean(trace: Trace) -> None:
    first = round(FITTED_FRAC * len(trace))
    lengths, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    at_start = np.column_stack([lengths, np.zeros(len(trace))])
    model = ConditionalMean(beyond="extrapolate").fit(at_start[:first], outputs[:first])
    for generated in (0, 100, 200, 400):
        later = np.flatnonzero(outputs > generated)
        later = later[later >= first]
        if len(later) < 30:
            continue
        told = model.predict(np.column_stack([lengths[later], np.full(len(later), float(generated))]))
        plain = np.maximum(outputs[:first].mean(), generated + 1)
        truth = outputs[later]
        print(
            f"  after {generated} tokens ({len(later)} requests): mean absolute error "
            f"{np.abs(told - truth).mean():.0f} tokens (plain mean {np.abs(plain - truth).mean():.0f}), "
            f"bias {told.mean() - truth.mean():+.0f} ({plain - truth.mean():+.0f})"
        )


if __name__ == "__main__":
    main()
