"""`plan schedule`: reserved, on-demand and spot workers per window for demand that changes over the week."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands.common import (
    JsonOption,
    Progress,
    SeedOption,
    keep_inputs,
    print_json,
    print_rows,
    stdout_console,
)
from planner.errors import InputError

if TYPE_CHECKING:
    from planner.solvers.schedule import Demand, Market, Schedule


def schedule(
    market: Annotated[Path, typer.Argument(readable=False, help="schedule.yaml: prices, capacity, limits.")],
    demand: Annotated[
        Path | None,
        typer.Option(
            "--demand", readable=False, help="CSV: a row per window, a column of requests/s per LLM."
        ),
    ] = None,
    trace: Annotated[
        list[str] | None, typer.Option("--trace", help="LLM=FILE, once per LLM, in place of --demand.")
    ] = None,
    window: Annotated[str, typer.Option("--window", help="Length of a window.")] = "1 h",
    gap: Annotated[
        float, typer.Option("--gap", min=0.0, max=1.0, help="Stop this close to the bound, as a share.")
    ] = 0.005,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0.1, help="Seconds after which the best schedule is given.")
    ] = 60.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", readable=False, help="Write workers per window to this CSV.")
    ] = None,
    seed: SeedOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Schedule workers over a day or a week: reserved for the base, on demand and spot for the rest.

    Compares with a fleet for the peak and with Aladdin's linear rule. Exit code 3: a limit is too tight.
    4: the gap was not closed in time.
    """
    from planner import files, schedulefile
    from planner.solvers.schedule import at_peak, by_rule
    from planner.solvers.schedule import schedule as solve
    from planner.tracefile import read_trace
    from planner.units import quantity

    window_s = quantity(window, "s", where="--window")
    if window_s < 1:
        raise InputError(f"--window: expected at least 1 s, found {window!r}")
    if (demand is None) == (not trace):
        raise InputError(
            "the demand is missing: give --demand FILE, or --trace LLM=FILE for every LLM, not both"
        )
    if out is not None:
        files.check_output_file(out)
        keep_inputs([out], market, demand)
    with Progress() as progress:
        sold = schedulefile.read_market(market)
        if demand is not None:
            asked = schedulefile.read_demand(demand, window_s=window_s)
        else:
            pairs = [text.partition("=") for text in trace or ()]
            if bad := next((text for text, (llm, _, file) in zip(trace or (), pairs, strict=True)
                            if not (llm and file)), None):  # fmt: skip
                raise InputError(f"--trace: expected LLM=FILE, found {bad!r}")
            traces = {llm: read_trace(Path(file), seed=seed) for llm, _, file in pairs}
            asked = schedulefile.demand_of(traces, window_s=window_s)
        progress(f"scheduling {len(asked.llms)} LLMs over {asked.rate_rps.shape[1]} windows")
        found = solve(sold, asked, gap_frac=gap, time_limit_s=time_limit)
        others = {"peak": at_peak(sold, asked), "linear rule": by_rule(sold, asked)}
    answer = to_json(sold, asked, found, others, gap)
    if out is not None:
        files.write_file(out, to_csv(sold, found))
    if json_output:
        print_json(answer)
    else:
        _print(answer)
    if answer["status"] != "optimal":
        raise typer.Exit(4)


def to_json(
    sold: Market, asked: Demand, found: Schedule, others: dict[str, Schedule | None], gap: float
) -> dict[str, Any]:
    """The answer as one object; "optimal" to the gap asked for."""
    gpus = [offer.gpu for offer in sold.offers]
    return {
        "status": "optimal" if found.gap_frac <= gap + 1e-4 else "best found",
        "cost_usd_per_h": found.cost_usd_per_h,
        "bound_usd_per_h": found.bound_usd_per_h,
        "gap_frac": found.gap_frac,
        "windows": asked.rate_rps.shape[1],
        "window_s": asked.window_s,
        "reserved_gpus": dict(zip(gpus, found.reserved_gpus.tolist(), strict=True)),
        "on_demand_gpus": dict(zip(gpus, found.on_demand_gpus.tolist(), strict=True)),
        "workers": [
            {
                "llm": capacity.llm,
                "worker": capacity.name,
                "firm": found.workers[c].tolist(),
                "spot": found.spot_workers[c].tolist(),
            }
            for c, capacity in enumerate(sold.capacities)
        ],
        "compared": {name: other and other.cost_usd_per_h for name, other in others.items()},
    }


def to_csv(sold: Market, found: Schedule) -> str:
    """window, llm, worker, firm, spot: a row for every worker type in use in a window."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("window", "llm", "worker", "firm", "spot"))
    for t in range(found.workers.shape[1]):
        for c, capacity in enumerate(sold.capacities):
            if found.workers[c, t] or found.spot_workers[c, t]:
                rows.writerow((t, capacity.llm, capacity.name, found.workers[c, t], found.spot_workers[c, t]))
    return text.getvalue()


def _print(answer: dict[str, Any]) -> None:
    rows = [
        {
            "GPU": gpu,
            "reserved": reserved,
            "on demand, mean": round(sum(answer["on_demand_gpus"][gpu]) / answer["windows"], 1),
            "on demand, most": max(answer["on_demand_gpus"][gpu]),
        }
        for gpu, reserved in answer["reserved_gpus"].items()
    ]
    print_rows(rows, "GPUs")
    rows = [
        {
            "LLM": row["llm"],
            "worker": row["worker"],
            "firm": f"{min(row['firm'])} to {max(row['firm'])}",
            "spot": f"{min(row['spot'])} to {max(row['spot'])}",
        }
        for row in answer["workers"]
        if any(row["firm"]) or any(row["spot"])
    ]
    print_rows(rows, f"workers over {answer['windows']} windows")
    console = stdout_console(soft_wrap=True)
    console.print(
        f"{answer['cost_usd_per_h']:.2f} USD/h on average, bound {answer['bound_usd_per_h']:.2f} "
        f"(gap {100 * answer['gap_frac']:.2f} %)",
        markup=False,
    )
    for name, cost in answer["compared"].items():
        if cost is None:
            console.print(f"{name}: exceeds a limit", markup=False)
        else:
            saved = 100 * (1 - answer["cost_usd_per_h"] / cost) if cost else 0.0
            console.print(f"{name}: {cost:.2f} USD/h; the schedule saves {saved:.1f} %", markup=False)
