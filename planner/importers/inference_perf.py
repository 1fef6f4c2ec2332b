"""Reads inference-perf (kubernetes-sigs): a stage_N_lifecycle_metrics.json, and so a run, per stage of load.

Times are in seconds. The program's time_per_output_token is, for an answer of n tokens, the time from the
first to the last token over n - 1: our tpot. Its inter_token_latency is a gap between tokens: our tbt. The
file names neither LLM nor GPU. A summary_lifecycle_metrics.json mixes all stages, so it states no load.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.document_values import check_mapping
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, MeasuredRuns, runs_of_files
from planner.importers.foreign_fields import StatedSetup

MARKS = ("load_summary", "successes", "failures")  # Keys by which such a file is recognised.
# The name that inference-perf has for each of our metrics.
METRICS = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "tbt": "inter_token_latency",
    "e2e": "request_latency",
}
# Our name for each of inference-perf's statistics, in which the median may stand as "median" or "p50".
STATISTICS = {"mean": "mean", "max": "max", "median": "p50"} | {
    f"p{p}": f"p{p}" for p in foreign_fields.PERCENTILES
}
BEHIND_FRAC = 0.05  # A client whose rate is this much below the planned one did not keep up; set by hand.


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> MeasuredRuns:
    """The runs of these files, all of one engine. Raises InputError for a file that is not of this form."""
    return runs_of_files("inference-perf", paths, stated, catalog, _parse_file)


def _parse_file(name: str, path: Path) -> tuple[list[MeasuredRun], None]:
    """The one run of a file, and None for the name of its LLM, which these files do not have."""
    return [_parse_run(name, check_mapping(foreign_fields.read_json(path), path))], None


def _parse_run(name: str, document: Mapping[str, Any]) -> MeasuredRun:
    """The run of one file, from its statistics: no file has single requests."""
    succeeded = check_mapping(document.get("successes"), f"{name}: successes")
    times = check_mapping(succeeded.get("latency"), f"{name}: successes.latency")
    latency_s: dict[str, dict[str, float]] = {}
    for metric, key in METRICS.items():
        statistics = check_mapping(times.get(key) or {}, f"{name}: {key}")
        statistics_s = {
            ours: foreign_fields.read_number(statistics[theirs], f"{name}: {key} {theirs}")
            for theirs, ours in STATISTICS.items()
            if statistics.get(theirs)  # 0 as well as null stands for a latency that was not measured.
        }
        if statistics_s:
            latency_s[metric] = statistics_s
    requests = foreign_fields.read_count(succeeded.get("count"), f"{name}: successes.count", least=0)
    if not requests or not latency_s:
        raise InputError(f"{name}: no request succeeded; there is nothing to import")
    failures = check_mapping(document.get("failures") or {}, f"{name}: failures")
    failed = foreign_fields.read_count(failures.get("count") or 0, f"{name}: failures.count", least=0)
    gaps_s = latency_s.get("tbt", {})
    notes = list(
        foreign_fields.run_remarks(
            failed=failed, is_summary=True, gap_p50=gaps_s.get("p50"), gap_mean=gaps_s.get("mean")
        )
    )
    # Older versions write prompt_len and output_len.
    prompt_tokens, output_tokens = (
        check_mapping(
            succeeded.get(f"{side}_tokens") or succeeded.get(f"{side}_len"), f"{name}: {side}_tokens"
        )
        for side in ("prompt", "output")
    )
    if cached := foreign_fields.read_optional(prompt_tokens, "cached", f"{name}: prompt_tokens"):
        notes.append(f"{cached:g} prompt tokens came from the prefix cache, which is not simulated")
    concurrency, rate_rps = _parse_load(name, document, notes)
    return MeasuredRun(
        name=name,
        requests=requests,
        # One mean stands for the lengths of all requests.
        input_tokens=(_mean_tokens(prompt_tokens, f"{name}: prompt_tokens"),),
        output_tokens=(_mean_tokens(output_tokens, f"{name}: output_tokens"),),
        latency_s=latency_s,
        concurrency=concurrency,
        rate_rps=rate_rps,
        failed=failed,
        notes=tuple(notes),
    )


def _parse_load(name: str, document: Mapping[str, Any], notes: list[str]) -> tuple[int | None, float | None]:
    """The concurrency of a closed loop, or the rate [requests/s] of an open one; the other is None. Both are
    None if the file states no load. Remarks on the load are added to `notes`.
    """
    load = check_mapping(document.get("load_summary") or {}, f"{name}: load_summary")
    if (concurrency := load.get("concurrency")) is not None:
        return foreign_fields.read_count(concurrency, f"{name}: load_summary.concurrency"), None
    requested_rps, sent_rps = (
        foreign_fields.read_optional(load, f"{key}_rate", f"{name}: load_summary")
        for key in ("requested", "achieved")
    )
    if not requested_rps:
        notes.append("the load is not known: give the files of single stages, or --rate or --concurrency")
        return None, None
    if sent_rps and sent_rps < (1 - BEHIND_FRAC) * requested_rps:
        notes.append(
            f"of {requested_rps:g} requested requests/s the client sent {sent_rps:.3g}; the latter counts"
        )
        return None, sent_rps
    return None, requested_rps


def _mean_tokens(statistics: Mapping[str, Any], where: str) -> float:
    """The mean of the statistics of a length [tokens]. It must be at least 1, because a simulated request has
    at least one token of prompt and of answer.
    """
    return foreign_fields.read_number(statistics.get("mean"), f"{where}: mean", least=1)
