"""Simulates one fleet with many seeds, to show how much of a simulated figure is chance.

The seed decides what is random in the policies (samples of workers, predictions) and in the traffic:

    superposed trace    the shift of each copy, and which requests of the last, partial copy are kept
    thinned trace       which requests are kept
    coarse clock        when exactly the requests with the same time stamp arrive

If nothing is random, every seed gives the same run, and the answer says so. Each run is the one that
`plan simulate --seed` makes with that seed.

The interval of a figure (`repeats.confidence_interval`) is for its mean over all seeds. It covers the chance
of the seed, but not how the trace of another day would differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.domain import Slo
from planner.errors import InputError
from planner.fleet import Fleet
from planner.parallel.executors import SERIAL, Executor, run_items
from planner.reports import output
from planner.reports.simulated_run import simulate_recorded
from planner.slo_metrics import latency_columns
from planner.solvers.repeats import CONFIDENCE_FRAC, confidence_interval
from planner.traffic.scaling import RateRequest
from planner.traffic.trace import Trace, spread_stamps

# The note of an answer in which all runs are the same.
SAME_FOR_ALL = (
    "the seed changed nothing: the trace is replayed as it is and no policy draws; a --rate above the "
    "trace's superposes shifted copies of it, which differ from seed to seed"
)


@dataclass(frozen=True, slots=True, eq=False)
class SeedsQuestion:
    """What to simulate, without the seed.

    `trace` is that of `read_trace(path, seed=None)`, in which requests still share coarse time stamps; the
    seed spreads them. `traffic_request` scales the trace to the wanted rate. `closed_loop` keeps that many
    requests in flight, whatever their arrival times; with 0 requests are sent at their arrival times.
    """

    fleet: Fleet
    trace: Trace
    traffic_request: RateRequest
    slo: Slo | None = None
    closed_loop: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SeedRun:
    """One run: its `SimulatedOutcome.summary`, and the text of its requests.csv, which only the first run
    has.
    """

    seed: int
    summary: output.Document
    requests_csv: str


def over_seeds(
    question: SeedsQuestion, seeds: Sequence[int], *, executor: Executor | None = SERIAL
) -> list[SeedRun]:
    """One run per seed, in the order of `seeds`.

    If `executor` is None, the one set by `executors.working_on` does the work. Raises InputError for seeds
    that are not different, or for none.
    """
    if len(set(seeds)) < len(seeds) or not seeds:
        raise InputError(f"seeds: expected different ones, at least one, found {list(seeds)}")
    items = [(seed, seed == seeds[0]) for seed in seeds]
    return run_items(simulate_seed, items, shared=question, executor=executor)


def simulate_seed(question: SeedsQuestion, item: tuple[int, bool]) -> SeedRun:
    """Simulate the question with one seed. `item` is the seed, and whether to keep its requests.csv."""
    seed, with_requests = item
    requests = question.traffic_request.apply_to(spread_stamps(question.trace, seed=seed), seed=seed)
    simulated = simulate_recorded(
        question.fleet, requests, question.slo, seed=seed, closed_loop=question.closed_loop
    )
    csv = output.requests_csv(simulated.simulation) if with_requests else ""
    return SeedRun(seed, simulated.summary(), csv)


def seeds_document(runs: Sequence[SeedRun]) -> output.Document:
    """What `plan simulate --seeds --json` prints: every figure over the seeds, then the runs one by one."""
    summaries = [run.summary for run in runs]
    first = summaries[0]
    return {
        "seeds": [run.seed for run in runs],
        "confidence_frac": CONFIDENCE_FRAC,
        **{
            metric: {
                name: _interval_document([summary[metric][name] for summary in summaries])
                for name in first[metric]
            }
            for metric in latency_columns()
            # A metric is left out if it is null in some run, as metrics of tasks are in traffic without
            # tasks.
            if all(summary[metric] for summary in summaries)
        },
        **{
            name: _interval_document([summary[name] for summary in summaries])
            for name in ("requests", "rejected", "unfinished", "preemptions", "output_tokens_per_s")
        },
        "expected_w": _interval_document(
            [(summary["power"] or {}).get("expected_w") for summary in summaries]
        ),
        "slo": _slo_document([summary["slo"] for summary in summaries]) if first["slo"] else None,
        "notes": [SAME_FOR_ALL] if len(runs) > 1 and all(summary == first for summary in summaries) else [],
        # Each run without the rows of its workers.
        "runs": [
            {"seed": run.seed} | {key: value for key, value in run.summary.items() if key != "workers"}
            for run in runs
        ],
    }


def _slo_document(verdicts: Sequence[output.Document]) -> output.Document:
    """How many seeds keep the SLO, and each of its lines over the seeds; terms as in `slo_verdict.Verdict`.

    `kept_by` and `steady` (no backlog grows) count seeds. `is_judged` says whether some value was compared
    with a limit in any seed; the `judged` of a line counts the values that were, over all seeds.
    """
    lines_over_seeds = list(zip(*(verdict["lines"] for verdict in verdicts), strict=True))
    return {
        "kept_by": sum(verdict["holds"] for verdict in verdicts),
        "is_judged": any(verdict["is_judged"] for verdict in verdicts),
        "steady": sum(verdict["is_steady"] for verdict in verdicts),
        "attainment_frac": _interval_document([verdict["attainment_frac"] for verdict in verdicts]),
        "lines": [
            {
                "limit": lines[0]["limit"],
                "limit_s": lines[0]["limit_s"],
                "kept_by": sum(line["holds"] for line in lines),
                "judged": sum(line["judged"] for line in lines),
                "simulated_s": _interval_document([line["simulated_s"] for line in lines]),
                "kept_frac": _interval_document([line["kept_frac"] for line in lines]),
            }
            for lines in lines_over_seeds
        ],
    }


def _interval_document(values: Sequence[float | None]) -> dict[str, Any]:
    """The mean of these values (one per seed), the ends of its confidence interval, and the least and the
    largest value, for JSON: NaN and infinity become null.

    If a value is None, as for a run without power figures, all five are null.
    """
    bounds = confidence_interval(values)
    numbers = {
        "mean": bounds.mean,
        "low": bounds.mean - bounds.half_width,
        "high": bounds.mean + bounds.half_width,
        "least": bounds.least,
        "most": bounds.most,
    }
    return {name: output.plain_value(number) for name, number in numbers.items()}
