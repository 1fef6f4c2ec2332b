"""Compares predictions with measurements on one GPU: what is done before and after the runs on the GPU.
docs/gpu-acceptance.md has the steps.

    python benchmarks/gpu/acceptance.py prepare OUT    the profile in OUT/table.csv becomes a fit, the fit a
                                                       capacity, and the capacity the requests to replay
    python benchmarks/gpu/acceptance.py compare OUT    compare with what benchmarks/gpu/replay.py measured
    python benchmarks/gpu/acceptance.py compare OUT --catalog    compare predictions without the profile
    python benchmarks/gpu/acceptance.py table RESULT.json ...    the errors of results as one table

In OUT: fit.yaml, fleet.yaml, slo.yaml and replay.json, which replay.py reads; a folder per run with its
trace.csv, then what `plan validate` writes; result.json at the end (result-catalog.json).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import read_fleet
from planner.documents.task import read_task
from planner.errors import InputError, PlannerError
from planner.files.checked_files import check_output_directory, read_yaml, to_yaml, write_file
from planner.models.step_tables import read_step_table
from planner.papers.goodput import Steady, find_goodput, poisson_traffic
from planner.papers.vidur_search import most_rps
from planner.runtime.analysis import ValidationSetup
from planner.runtime.engine_log import read_step_logs
from planner.runtime.workers import WorkerPlace, vllm_commands
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "traces"
LOADS = {"conversation": (0.5, 0.7, 0.85), "code": (0.7,)}  # Shares of the predicted capacity.
TOLERANCES = ("--tolerance-p50", "0.05", "--tolerance-p90", "0.09")
# The exit code of plan validate if the engines missed the SLO, which may be what was predicted.
SLO_MISSED = 5
# The engine's processes on one machine talk over the loopback interface.
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
METRICS = ("ttft", "tbt", "tpot", "e2e")


def prepare(args: argparse.Namespace) -> None:
    out, catalog = args.out, read_catalog()
    check_output_directory(out)
    table = read_step_table(out / "table.csv")
    step_tokens, sequences, context = map(int, re.findall(r"\d+", table.about["limits"]))
    gpu = ["--gpu", args.gpu] if args.gpu else []
    if args.async_scheduling:
        table.steps["t_s"] -= table.steps["host_s"]
        about = "".join(f"# {key}: {value}\n" for key, value in table.about.items())
        write_file(out / "overlapped.csv", about + table.steps.assign(host_s=0.0).to_csv(index=False))
    measured = out / ("overlapped.csv" if args.async_scheduling else "table.csv")
    plan("fit", str(measured), "-o", str(out / "fit.yaml"), "--choose", *gpu)
    worker = {
        "name": "mixed",
        "gpu": read_yaml(out / "fit.yaml")["gpu"],
        "latency": "fit.yaml",
        "kv_tokens": int(table.about["kv_cache"].split()[0]),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": step_tokens,
    }
    document = {"llm": table.about["llm"], "workers": [worker], "max_model_len": context}
    write_file(out / "fleet.yaml", to_yaml(document))
    fleet = read_fleet(out / "fleet.yaml", catalog)
    shutil.copyfile(args.slo, out / "slo.yaml")
    slo = read_task(out / "slo.yaml", catalog).slo
    runs: dict[str, Any] = {}
    for traffic, loads in LOADS.items():
        lengths = read_trace(getattr(args, traffic), seed=0)
        fits = lengths.input_tokens + lengths.output_tokens <= context
        draw = poisson_traffic(lengths.select(fits))
        guess_rps = most_rps(fleet, lengths) / 4
        capacity_rps = find_goodput(Steady(slo, draw, args.seeds), fleet, guess_rps=guess_rps).rate_rps
        if not capacity_rps:
            raise InputError(f"{args.slo}: one engine keeps this SLO at no rate of {traffic}; relax it")
        print(f"{traffic}: {capacity_rps:.3g} requests/s, {(~fits).sum()} of {len(fits)} requests too long")
        for load in loads:
            name, rate_rps = f"{traffic}-{100 * load:.0f}", load * capacity_rps
            file = out / name / "trace.csv"
            write_file(file, trace_csv(draw(rate_rps, round(rate_rps * args.seconds), args.seed)))
            setup = ValidationSetup(fleet, read_trace(file, seed=0), slo, context, config=args.config)
            runs[name] = {"rate_rps": rate_rps, "capacity_rps": capacity_rps, "identity": setup.identity()}
    is_cpu = table.about["driver"] == "none"
    place = WorkerPlace("mixed-0", fleet.pools[0], (0,), out)
    command = vllm_commands(fleet, context, model="", is_dummy=True, is_cpu=is_cpu, devices=["0"])(place, 0)
    flags = [*command.argv[5:], "--async-scheduling" if args.async_scheduling else "--no-async-scheduling"]
    if "eager" in table.about["engine"]:  # It was profiled without CUDA graphs.
        flags.append("--enforce-eager")
    found = {
        "config": str(args.config),
        "flags": flags,
        "environment": {**NO_NETWORK, **command.environment},
        "profile": table.about,
        "runs": runs,
    }
    write_file(out / "replay.json", json.dumps(found, indent=2) + "\n")
    print(f"{out}: {len(runs)} runs of {args.seconds:g} s; now benchmarks/gpu/replay.py {out}")


def trace_csv(trace: Trace) -> str:
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    lines = [f"{float(arrival_s)!r},{inputs},{outputs}" for arrival_s, inputs, outputs in rows]
    return "\n".join(["arrival_s,input_tokens,output_tokens", *lines, ""])


def compare(args: argparse.Namespace) -> None:
    """Compare every run that was replayed, by `plan validate`, which finds that all is measured already."""
    out = args.out
    asked = json.loads((out / "replay.json").read_text())
    fleet_file, steps_of = out / "fleet.yaml", "the profile"
    if args.catalog:
        fleet_file, steps_of = fleet_of_catalog(out), "the catalog"
    header = {"steps_of": steps_of, "profile": asked["profile"], "flags": asked["flags"]}
    result: dict[str, Any] = header | {"runs": {}}
    for name, run in asked["runs"].items():
        folder = out / name
        if not (folder / "engines").exists():
            print(f"{name}: not replayed yet")
            continue
        if args.catalog:
            folder = copy_for_fleet(folder, out / "by-catalog" / name, fleet_file, out, Path(asked["config"]))
        told = json.loads(
            plan(
                "validate",
                str(fleet_file),
                "--trace",
                str(folder / "trace.csv"),
                "--slo",
                str(out / "slo.yaml"),
                "--config",
                asked["config"],
                "-o",
                str(folder),
                *TOLERANCES,
                "--json",
            )
        )
        kept = (
            "agrees",
            "requests",
            "finished",
            "client_late_s",
            "stolen_frac",
            "attainment",
            "steps",
            "errors",
            "errors_undisturbed",
            "errors_corrected",
            "machine",
            "parts",
        )
        served = read_step_logs((folder / "engines").iterdir()).requests.values()
        result["runs"][name] = {
            "rate_rps": run["rate_rps"],
            "capacity_rps": run["capacity_rps"],
            "cached_tokens": sum(one.cached_tokens for one in served),
            **{key: told[key] for key in kept},
        }
        print("\n".join(rows(name, run["rate_rps"], told)))
    file = out / ("result-catalog.json" if args.catalog else "result.json")
    write_file(file, json.dumps(result, indent=1) + "\n")
    agreeing = [name for name, run in result["runs"].items() if run["agrees"]]
    said = f"{len(agreeing)} of {len(asked['runs'])} runs"
    print(f"\nwithin 5 % at P50, 9 % at P90 and 2 points of attainment: {said}")


def fleet_of_catalog(out: Path) -> Path:
    """The file of the same fleet without a fit of its own, so that the catalog's step times count."""
    document = read_yaml(out / "fleet.yaml")
    for worker in document["workers"]:
        worker.pop("latency", None)
    write_file(out / "fleet-catalog.yaml", to_yaml(document))
    return out / "fleet-catalog.yaml"


def copy_for_fleet(folder: Path, copy: Path, fleet_file: Path, out: Path, config: Path) -> Path:
    """A copy of the measurements of a run, whose journal names this fleet; the requests are the same."""
    catalog = read_catalog()
    fleet, trace = read_fleet(fleet_file, catalog), read_trace(folder / "trace.csv", seed=0)
    context = int(read_yaml(fleet_file)["max_model_len"])
    setup = ValidationSetup(fleet, trace, read_task(out / "slo.yaml", catalog).slo, context, config=config)
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    shutil.copytree(folder / "engines", copy / "engines")
    shutil.copyfile(folder / "trace.csv", copy / "trace.csv")
    first, rest = (folder / "journal.jsonl").read_text().split("\n", 1)
    line = {"run": json.loads(first)["run"] | setup.identity()}
    write_file(copy / "journal.jsonl", json.dumps(line) + "\n" + rest)
    return copy


def print_table(args: argparse.Namespace) -> None:
    """Prints the errors of each run as a table in Markdown: as predicted, then with step times that are
    corrected by the run's measured steps.
    """
    names = ", ".join(METRICS)
    print(f"| steps of | scheduling | run | all steps | {names} | corrected: {names} |\n" + 6 * "|---" + "|")
    for file in args.results:
        result = json.loads(file.read_text())
        scheduling = "asynchronous" if result["flags"][-1] == "--async-scheduling" else "synchronous"
        for name, run in result["runs"].items():
            bias = ", ".join(f"{100 * one['bias_frac']:+.1f}" for one in run["steps"])
            errors = [
                ", ".join(both_percentiles(run[key], metric) for metric in METRICS)
                for key in ("errors", "errors_corrected")
            ]
            print(f"| {result['steps_of']} | {scheduling} | {name} | {bias} | {' | '.join(errors)} |")


def both_percentiles(errors: Sequence[dict[str, Any]] | None, metric: str) -> str:
    """Predicted over measured minus one [%] at P50 and P90."""
    at = {row["percentile"]: row["error_frac"] for row in errors or () if row["metric"] == metric}
    return "; ".join(f"{100 * at[percentile]:+.0f}" for percentile in ("p50", "p90") if percentile in at)


def rows(name: str, rate_rps: float, told: dict[str, Any]) -> list[str]:
    """The results of a run as lines of Markdown; errors are predicted over measured minus one."""
    lines = [
        f"\n{name}: {rate_rps:.2f} requests/s, {told['finished']} of {told['requests']} finished; attainment "
        f"predicted {100 * told['attainment']['predicted']:.1f} %, measured "
        f"{100 * told['attainment']['measured']:.1f} %; {'agrees' if told['agrees'] else 'DOES NOT AGREE'}",
        *(
            f"steps: all seconds {100 * one['bias_frac']:+.1f} %, each "
            + ", ".join(f"{kind} {100 * error:.1f} %" for kind, error in one["mean_error_frac"].items())
            for one in told["steps"]
        ),
        "\n| | P50 | P90 | P99 |\n|---|---|---|---|",
    ]
    for side in ("errors", "errors_undisturbed", "errors_corrected"):
        for metric in METRICS:
            cells = [
                f"{1e3 * row['predicted_s']:.1f} / {1e3 * row['measured_s']:.1f} ms, "
                f"{100 * row['error_frac']:+.1f} %"
                for row in told[side] or ()
                if row["metric"] == metric and row["error_frac"] is not None
            ]
            if cells:
                kind = side.removeprefix("errors").replace("_", ", ")
                lines.append(f"| {metric}{kind} | {' | '.join(cells)} |")
    return lines


def plan(*words: str) -> str:
    """A command of the planner; its output. Ends this program with the command's own message if it fails."""
    done = subprocess.run([sys.executable, "-m", "planner.cli", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, SLO_MISSED):
        sys.exit(f"plan {' '.join(words)}: exit code {done.returncode}")
    return done.stdout


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(required=True)
    one = steps.add_parser("prepare")
    one.set_defaults(run=prepare)
    one.add_argument("--config", type=Path, default=HERE / "llama-3.1-8b.json", help="the profiled LLM's")
    one.add_argument("--slo", type=Path, default=HERE / "slo.yaml")
    for traffic in LOADS:
        sample = EXAMPLES / f"azure-{traffic}-sample.csv"
        one.add_argument(f"--{traffic}", type=Path, default=sample, help="trace to draw lengths from")
    one.add_argument("--seconds", type=float, default=60.0, help="of arrivals per run")
    one.add_argument("--gpu", help="the catalog's name, where the table has none")
    one.add_argument("--async-scheduling", action="store_true", help="vLLM's default; host time is hidden")
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--seeds", type=int, default=3, help="a rate counts if it holds with each")
    two = steps.add_parser("compare")
    two.set_defaults(run=compare)
    two.add_argument("--catalog", action="store_true", help="predict by the catalog's step times")
    three = steps.add_parser("table")
    three.set_defaults(run=print_table)
    three.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    for step in (one, two):
        step.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args(words)
    try:
        args.run(args)
    except PlannerError as error:
        sys.exit(f"acceptance: {error}")


if __name__ == "__main__":
    main()
