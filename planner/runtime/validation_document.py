"""Turns a validation into one document of plain values, which is validation.json and what --json prints; and
into the sentences and the rows of errors that report.html and the screen show.

"Stolen" is the share of an engine's step times in which other processes had the core of its thread.
"Undisturbed" times are by a clock of the engine that stands still while they have it, and `after` and
"corrected" stand for predictions with step times corrected by this run (`Validation` in analysis.py).
"""

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.fleet import Fleet
from planner.reports.output import plain_value
from planner.reports.words import describe_fleet
from planner.runtime.analysis import Validation
from planner.runtime.live_replay import lateness_s
from planner.runtime.measured_against_simulated import outside_s
from planner.runtime.own_clock import stolen_frac
from planner.runtime.prediction_errors import MeasuredComparison, PercentileRow
from planner.runtime.replanned import MOST_TIMES, Replanned
from planner.runtime.step_fits import includes_other_processes
from planner.simulator.layout import FINISHED
from planner.slo_metrics import METRICS, verdict_word
from planner.traffic.trace import Trace
from planner.units import percentile_name, show_error, show_s, show_share

Floats = npt.NDArray[np.float64]
# If other processes took a larger share of an engine's step times, the verdict says so. Even a small share
# matters, because queues multiply delays. Set by hand.
MOST_STOLEN_FRAC = 0.03
# The summary of single requests counts those whose error is at most this share. The key of JSON names it.
GOOD_ERROR_FRAC = 0.2
REHEARSAL_SENTENCE = (
    "A rehearsal: its engines take as long as the fits say, so what was checked is batching, routing and the "
    "chain, not the plan on a GPU."
)
STATUSES = ("finished", "rejected", "failed", "unsent")  # `RequestOutcome.status` of live_replay.py.


def validation_document(validation: Validation) -> dict[str, Any]:
    """All results of a validation in JSON's own types; null where there is none or no finite figure."""
    run, comparison = validation.measurement, validation.comparison
    outcomes = list(run.journal.outcomes.values())
    outside_engine_s = outside_s(run)
    document = {
        "verdict": verdict_text(validation),
        "agrees": comparison.agrees,
        "slo_kept": _is_kept(comparison),
        "slo_kept_by_client": _is_kept(_client_comparison(validation)),
        "requests": len(run.trace),
        **{status: sum(outcome.status == status for outcome in outcomes) for status in STATUSES},
        "compared": int(comparison.chosen.sum()),
        # How many requests did not finish for each reason.
        "reasons": dict(Counter(outcome.reason for outcome in outcomes if outcome.reason)),
        "times": "engines' step logs" if run.is_timed_by_engines else "client",
        "outside_engine_s": {
            "p50": _quantile_or_none(outside_engine_s, 0.5),
            "p99": _quantile_or_none(outside_engine_s, 0.99),
        },
        "client_late_s": lateness_s(outcomes),
        "stolen_frac": stolen_frac_by_engine(validation),
        "prefix_hits": {
            "predicted_frac": comparison.predicted.requests.token_hit_frac,
            "measured_frac": comparison.measured.requests.token_hit_frac,
        },
        "tolerances": asdict(comparison.tolerances),
        "errors": _errors_of(comparison),
        "errors_undisturbed": _errors_of(validation.undisturbed),
        "errors_corrected": _errors_of(validation.after),
        "attainment": {
            "predicted": comparison.predicted_verdict.attainment_frac,
            "measured": comparison.measured_verdict.attainment_frac,
            "client": _client_comparison(validation).measured_verdict.attainment_frac,
        },
        "slo": _slo_lines(comparison),
        "scatter": {
            metric: _scatter_summary(*comparison.scatter(metric))
            for metric, row in METRICS.items()
            # A request has no single value of a metric of gaps or of agents.
            if not (row.is_of_gaps or row.is_of_agents)
        },
        "steps": [
            {
                "pool": steps.pool,
                "steps": len(steps.table.y),
                "bias_frac": steps.bias_frac,
                "mean_error_frac": dict(steps.errors),
            }
            for steps in validation.steps
        ],
        "corrections": [
            {
                "pool": correction.pool,
                "held_out_before_frac": correction.held_out_before_frac,
                "held_out_after_frac": correction.held_out_after_frac,
                **correction.calibrated.as_dict(),
            }
            for correction in validation.corrections
        ],
        "replanned": None
        if validation.replanned is None
        else _replanned_document(validation.replanned, validation.plan_fleet),
        "parts": [dict(record) for record in validation.records],
        "endpoint": endpoint_document(validation),
        "machine": dict(validation.machine),
        "notes": reader_notes(validation),
        "run": validation.setup.identity(),
    }
    as_json: dict[str, Any] = plain_value(document)
    return as_json


def _errors_of(comparison: MeasuredComparison | None) -> list[dict[str, Any]] | None:
    """The predicted and the measured percentiles, with their errors; None without a comparison."""
    return None if comparison is None else [row.as_dict() for row in comparison.rows]


def _client_comparison(validation: Validation) -> MeasuredComparison:
    """The comparison by the client's clock. Without step logs of engines it is `validation.comparison`."""
    return validation.by_client or validation.comparison


def endpoint_document(validation: Validation) -> dict[str, Any] | None:
    """The endpoint that was measured, how it was reached, and its engines' counts.

    None if the validation started its own engines.
    """
    if validation.lengths is None:  # They are None for our own engines only.
        return None
    # A run that was interrupted and resumed has a record for each part; that of the last part is shown. The
    # notes of all parts are in `reader_notes`.
    last_record: dict[str, Any] = next(
        (record["endpoint"] for record in reversed(validation.records) if "endpoint" in record), {}
    )
    details = {key: value for key, value in last_record.items() if key != "notes"}
    counted = validation.engine_times
    engines = None
    if counted is not None:
        engines = {
            "requests": counted.requests,
            "preemptions": counted.preemptions,
            "prefix_hit_frac": counted.hit_frac,
            "times": engine_rows(validation),
        }
    return {**details, "lengths": validation.lengths.as_dict(), "engines": engines}


def engine_rows(validation: Validation) -> list[dict[str, Any]]:
    """A row per metric that an endpoint's engines count, in seconds; none for our own engines.

    A row has three means: by the engines' clock, as predicted, and by the client's clock. It also has upper
    bounds of percentiles by the engines' clock: the edges of the buckets of their histograms.
    """
    if validation.engine_times is None:
        return []
    # At an endpoint the measured times are by the client's clock.
    sides = {"predicted": validation.comparison.predicted, "client": validation.comparison.measured}
    rows = []
    for metric, times_s in validation.engine_times.times_s.items():
        row: dict[str, Any] = {"metric": metric, "engine_mean_s": times_s["mean"]}
        for name, side in sides.items():
            if metric == "tbt":  # The only metric of gaps; equal gaps are counted together, with a weight.
                values, weights = side.gap_s, side.gap_weight
            else:
                of_finished = getattr(side.requests, f"{metric}_s")[side.requests.status == FINISHED]
                values = of_finished[np.isfinite(of_finished)]
                weights = np.ones_like(values)
            row[f"{name}_mean_s"] = float(np.average(values, weights=weights)) if len(values) else None
        rows.append(row | {f"engine_{key}_s": value for key, value in times_s.items() if key != "mean"})
    return rows


def verdict_text(validation: Validation) -> str:
    """The result in a few sentences: errors, attainment, requests that did not finish, SLO, corrected fits,
    and how much of the engines' time other processes took.
    """
    comparison = validation.comparison
    if not comparison.judged_rows:
        text = "Nothing was measured that could be compared."
    else:
        worst = max(comparison.judged_rows, key=_tolerances_used)
        agrees_text = "The prediction agrees" if comparison.agrees else "The prediction does NOT agree"
        text = (
            f"{agrees_text} with the measurement: the largest error relative to its tolerance is "
            f"{show_error(worst.error_frac, worst.tolerance_frac)} "
            f"({worst.metric} {percentile_name(worst.percentile_frac)}; "
            f"allowed {100 * (worst.tolerance_frac or 0):g} %)."
        )
    if not comparison.attainment_agrees:
        predicted, measured = comparison.predicted_verdict, comparison.measured_verdict
        text += (
            f" Attainment was predicted as {show_share(predicted.attainment_frac)} and measured as "
            f"{show_share(measured.attainment_frac)} (allowed "
            f"{100 * comparison.tolerances.attainment_frac:g} points)."
        )
    if validation.setup.engine == "rehearsal":
        text = f"{REHEARSAL_SENTENCE} {text}"
    outcomes = validation.measurement.journal.outcomes.values()
    if unfinished := sum(outcome.status != "finished" for outcome in outcomes):
        text += f" {unfinished} of {len(validation.measurement.trace)} requests did not finish"
        unsent = sum(outcome.status == "unsent" for outcome in outcomes)
        text += f", {unsent} of them unsent because they wait for such a one." if unsent else "."
    if validation.setup.slo.limits:
        on_engines, in_simulation = (
            verdict_word(verdict.holds, verdict.is_judged)
            for verdict in (comparison.measured_verdict, comparison.predicted_verdict)
        )
        text += f" The SLO was {on_engines.replace('missed', 'MISSED')} on the engines"
        text += f", and {in_simulation} in the simulation."
        client = validation.by_client
        if client is not None and client.measured_verdict.holds != validation.slo_holds:
            kept_word = "kept" if client.measured_verdict.holds else "MISSED"
            text += f" By the client's clock, router and network included, it was {kept_word}."
    if validation.replanned is not None:
        text += f" {_replanned_sentence(validation.replanned, validation.plan_fleet, validation.plan_trace)}"
    largest_frac = max(stolen_frac_by_engine(validation).values(), default=0.0)
    if largest_frac > MOST_STOLEN_FRAC:
        text += (
            " The engines did not have the machine to themselves: others, API servers, router and client "
            f"among them, ran in {100 * largest_frac:.0f} % of the time of an engine's steps"
        )
        undisturbed_frac = _worst_error_frac(validation.undisturbed) if validation.undisturbed else math.nan
        if undisturbed_frac < _worst_error_frac(comparison):  # False if either is NaN.
            text += (
                "; queues multiply such delays. Without interruptions the largest error is "
                f"{100 * undisturbed_frac:.1f} %"
            )
        text += "."
    return text


def reader_notes(validation: Validation) -> list[str]:
    """Notes that a reader needs before the figures: those of the setup, that engines on a CPU had no core to
    spare, and that engines had less KV memory than planned.
    """
    sentences = list(validation.setup.notes)
    recorded = (record.get("spare_cores") for record in validation.records)
    spare_cores = [cores for cores in recorded if cores is not None]  # Only runs of CPU engines record them.
    if (
        validation.setup.engine == "vllm"
        and min(spare_cores, default=1) <= 0  # Without a record nothing is known to be lacking.
        and not includes_other_processes(validation.setup.fleet)
    ):
        sentences.append(
            "The engines take every core of this machine, and their API servers, the router and the client "
            "take from the same: steps last longer than a profile of one engine says (docs/validation.md)."
        )
    planned_kv_tokens = {pool.name: pool.type.kv_tokens for pool in validation.setup.fleet.pools}
    smaller_kv_tokens = {
        engine["worker"]: engine["kv_tokens"]
        for record in validation.records
        for engine in record["engines"]
        if engine.get("kv_tokens", math.inf) < planned_kv_tokens[pool_of_worker(engine["worker"])]
    }
    sentences += [
        f"{worker} holds {tokens:,} KV tokens, where the plan assumes "
        f"{planned_kv_tokens[pool_of_worker(worker)]:,}: it takes fewer requests at once than was predicted."
        for worker, tokens in smaller_kv_tokens.items()
    ]
    return sentences


def pool_of_worker(worker: str) -> str:
    """The pool of a worker, which is named POOL-NUMBER, such as "decode-3"."""
    return worker.rpartition("-")[0]


def _tolerances_used(row: PercentileRow) -> float:
    """The error as a multiple of the row's tolerance. With a tolerance of 0 any error counts as infinite."""
    if row.tolerance_frac:
        return abs(row.error_frac) / row.tolerance_frac
    return math.inf if row.error_frac else 0.0


def _replanned_sentence(replanned: Replanned, fleet: Fleet, traffic: Trace) -> str:
    """A sentence on whether the plan's `fleet` keeps the SLO on `traffic` with corrected step times, and on
    the smallest fleet that does. Fields of `replanned` with `before` are by the plan's own step times, with
    `after` by the corrected.
    """
    keeps_word = "keeps" if replanned.kept_after else "MISSES"
    rate_text = f" at {traffic.rate_rps:.3g}/s" if traffic.duration_s > 0 else ""
    by_own_fits = "as by its own fits"
    if replanned.kept_before != replanned.kept_after:
        by_own_fits = f"by its own fits it {'keeps' if replanned.kept_before else 'misses'} it"
    by_corrected, by_own = (
        f"more than {MOST_TIMES} times the plan's" if smallest is None else describe_fleet(smallest)
        for smallest in (replanned.fewest_after, replanned.fewest_before)
    )
    fewest_text = (
        "the fewest workers that keep it" if replanned.is_exact else "workers of which no pool can spare one"
    )
    return (
        f"With the corrected fits the plan ({describe_fleet(fleet)}) {keeps_word} the SLO on "
        f"{len(traffic):,} requests{rate_text} in the simulation, {by_own_fits}; {fewest_text}: "
        f"{by_corrected}, by its own fits {by_own}."
    )


def _worst_error_frac(comparison: MeasuredComparison) -> float:
    """The largest relative error, without sign, of the judged rows; NaN without any."""
    return max((abs(row.error_frac) for row in comparison.judged_rows), default=math.nan)


def stolen_frac_by_engine(validation: Validation) -> dict[str, float]:
    """The share of step time that others took, by engine, for engines whose log has a clock of its own."""
    run = validation.measurement
    # Steps before the start of the first part of the run were warm-up, and are left out.
    return {
        name: stolen_frac(log, run.journal.parts[0].start_s)
        for name, log in run.logs.items()
        if log.has_own_clock
    }


def _is_kept(comparison: MeasuredComparison) -> bool | None:
    """Whether the measured run kept the SLO; None where no SLO was given, or nothing was judged."""
    verdict = comparison.measured_verdict
    return verdict.holds if verdict.lines and verdict.is_judged else None


def _replanned_document(replanned: Replanned, fleet: Fleet) -> dict[str, Any]:
    """Whether the plan's `fleet` keeps the SLO by its own and by corrected step times, and the smallest
    fleets that do: for each fleet its workers per pool, or None if it was not found.
    """
    fleets = {"plan": fleet, "fewest_by_own_fits": replanned.fewest_before, "fewest": replanned.fewest_after}
    return {
        "kept_by_own_fits": replanned.kept_before,
        "kept": replanned.kept_after,
        "is_exact": replanned.is_exact,
        **{
            key: None if smallest is None else {pool.name: pool.count for pool in smallest.running_pools}
            for key, smallest in fleets.items()
        },
    }


def _slo_lines(comparison: MeasuredComparison) -> list[dict[str, Any]]:
    """A row per line of the SLO: the share of requests that kept its limit, and whether the line holds, both
    as predicted and as measured; and how many measured values it was judged by.
    """
    return [
        {
            "limit": predicted.limit.name,
            "limit_s": predicted.limit.limit_s,
            "predicted_kept_frac": predicted.kept_frac,
            "measured_kept_frac": measured.kept_frac,
            "predicted_holds": predicted.holds,
            "measured_holds": measured.holds,
            "measured_judged": measured.judged,
        }
        for predicted, measured in zip(
            comparison.predicted_verdict.lines, comparison.measured_verdict.lines, strict=True
        )
    ]


def _scatter_summary(predicted: Floats, measured: Floats) -> dict[str, float | None]:
    """The relative errors of single requests, without signs: their median, and the share of requests with an
    error of at most GOOD_ERROR_FRAC. The arrays have a value per request.
    """
    if not len(measured):
        return {"median_error_frac": None, "within_20_percent_frac": None}
    errors = np.abs(predicted / measured - 1)
    return {
        "median_error_frac": float(np.median(errors)),
        "within_20_percent_frac": float((errors <= GOOD_ERROR_FRAC).mean()),
    }


def _quantile_or_none(values: Floats, frac: float) -> float | None:
    return float(np.quantile(values, frac)) if len(values) else None


def error_rows(validation: Validation) -> list[dict[str, str]]:
    """The errors as rows of text by column, for the tables of report.html and of `plan validate`.

    If there are comparisons without interruptions, or with corrected fits, each adds a column of errors. If
    engines have a clock of their own (`Validation.as_run`), the column of corrected fits is without
    interruptions too.
    """
    undisturbed, corrected = "without interruptions", "with corrected fits"
    if validation.undisturbed:
        corrected = "and corrected fits"  # This heading continues that of the column before.
    elif validation.as_run:
        corrected = f"{undisturbed}, {corrected}"
    comparisons = {undisturbed: validation.undisturbed, corrected: validation.after}
    further_columns = {heading: each for heading, each in comparisons.items() if each is not None}
    table = []
    for row in validation.comparison.rows:
        texts = {
            "metric": f"{row.metric} {percentile_name(row.percentile_frac)}",
            "predicted": show_s(row.predicted_s),
            "measured": show_s(row.measured_s),
            "error": show_error(row.error_frac, row.tolerance_frac),
            "allowed": "-" if row.tolerance_frac is None else f"{100 * row.tolerance_frac:g} %",
        }
        for heading, compared in further_columns.items():
            error_frac = {(each.metric, each.percentile_frac): each.error_frac for each in compared.rows}
            further_frac = error_frac.get((row.metric, row.percentile_frac), math.nan)
            texts[heading] = show_error(further_frac, row.tolerance_frac)
        table.append(texts)
    return table
