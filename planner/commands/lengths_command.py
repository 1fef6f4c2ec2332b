"""`plan lengths`: how well output lengths can be predicted from what a log has before the output. Imports
within functions keep other commands fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, print_warnings
from planner.commands.printed_tables import print_json, print_rows
from planner.errors import InputError
from planner.units import show_percent

if TYPE_CHECKING:
    from planner.models.output_length_fit import LengthAccuracy, MeanAccuracy

LEAST_REQUESTS = 100  # With fewer the shares on held-out requests scatter by ten percentage points and more.


def judge_length_predictors(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", readable=False, help="A trace, or logs that `plan trace` reads."),
    ],
    seed: shared_options.SeedOption = 0,
    drop_invalid: shared_options.DropOption = False,
    json_output: shared_options.JsonOption = False,
) -> None:
    """Fit predictors of output lengths to a log's first 70 %, and say how right they are on the rest.

    They see lengths of prompts, times, tenants and prefixes, no words. Also prints what to write into
    slo.yaml (policies: prediction) for a plan that counts on predictions this good.
    """
    from planner.documents.policy_choices import MEAN_BUCKETS
    from planner.models.output_length_fit import later_accuracy, later_mean_error
    from planner.traffic.logs.log_reading import LogOptions
    from planner.traffic.trace_reading import read_files

    with Progress() as progress:
        trace = read_files(files, seed=seed, drop_invalid=drop_invalid, log_options=LogOptions()).trace
        if len(trace) < LEAST_REQUESTS:
            raise InputError(
                f"{trace.name}: found {len(trace)} requests, expected {LEAST_REQUESTS} or more: "
                "the last 30 % are held out"
            )
        progress(f"fitting to {len(trace):,} requests")
        buckets, mean = later_accuracy(trace), later_mean_error(trace, input_buckets=MEAN_BUCKETS)
    print_warnings(trace.warnings)
    document = lengths_document(buckets, mean)
    if json_output:
        print_json(document, trace.warnings)
        return
    print_rows(
        [{"predictor": row["predictor"], **_accuracy_cells(row)} for row in document["predictors"]],
        f"Output lengths of {buckets.later:,} later requests, by fits to {buckets.fitted:,} earlier ones",
    )
    (prediction,) = document["slo"]["policies"].values()
    typer.echo(f"{document['note']}. In slo.yaml, what schedulers believe of output lengths:")
    typer.echo(f"policies: {{prediction: [{', '.join(prediction)}]}}")


def lengths_document(buckets: LengthAccuracy, mean: MeanAccuracy) -> dict[str, Any]:
    """The predictors with their errors on later requests, and the keys of slo.yaml to plan with them."""
    from planner.models.output_length import BUCKET_TOKENS

    more = "more" if buckets.accuracy_frac > buckets.majority_frac else "no more"
    share = max(buckets.accuracy_frac, buckets.majority_frac)
    means = (
        ("mean of prompts of such a length", mean.error_tokens, mean.bias_tokens),
        ("mean of all", mean.plain_error_tokens, mean.plain_bias_tokens),
    )
    return {
        "fitted_requests": buckets.fitted,
        "later_requests": buckets.later,
        "bucket_tokens": BUCKET_TOKENS,
        "predictors": [
            {
                "predictor": "trees on what the log says",
                "right_frac": buckets.accuracy_frac,
                "within_one_frac": buckets.within_one_frac,
            },
            {"predictor": "always the commonest bucket", "right_frac": buckets.majority_frac},
            *(
                {"predictor": name, "mean_error_tokens": error, "bias_tokens": bias}
                for name, error, bias in means
            ),
        ],
        "slo": {"policies": {"prediction": ["mean", show_percent(share, ".0f")]}},
        "note": f"the trees tell {more} than always naming the commonest bucket",
    }


def _accuracy_cells(row: dict[str, Any]) -> dict[str, str]:
    """The cells of a predictor's row: those of buckets or those of means are empty."""
    from planner.models.output_length import BUCKET_TOKENS

    def cell_text(key: str, text: str) -> str:
        return text.format(row[key]) if key in row else ""

    return {
        f"right bucket of {BUCKET_TOKENS} tokens": cell_text("right_frac", "{:.1%}"),
        "within one": cell_text("within_one_frac", "{:.1%}"),
        "off by, mean": cell_text("mean_error_tokens", "{:,.0f} tokens"),
        "too long by, mean": cell_text("bias_tokens", "{:+,.0f} tokens"),
    }
