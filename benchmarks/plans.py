"""Makes whole plans for the Azure traces, on paper and for production: time, value, bounds, simpler fleets.

    python benchmarks/plans.py [--traces DIR] [--kinds conv code] [--rates own 20 70 200] [--time-limit S]
                               [--cold] [--short]

Runs the `plan` command as a user would, one process per case, and prints a Markdown table, each row once it
is known. `--short` takes the first 10 minutes at 70 requests/s and the first 3 at 200, as
benchmarks/held_out.py does. `--cold` gives every process an empty compilation cache, as the very first run
after an install has. On a machine that is busy with other things a longer `--time-limit` keeps its clock from
deciding. DIR holds
AzureLLMInferenceTrace_{conv,code}.csv of AzurePublicDataset; default: ../shared/data/traces beside the clone.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

DEFAULT_TRACES = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
SHORT = {"70": "first 10 min", "200": "first 3 min"}
SLO = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}


def run_case(
    trace: Path, rate: str, *, time_limit_s: float, is_cold: bool, window: str | None = None
) -> dict[str, str]:
    """One plan on paper and one for production; the row of the table."""
    paper, paper_s, plan_yaml = _planned(trace, rate, "none", time_limit_s, is_cold=is_cold, window=window)
    made, made_s, made_yaml = _planned(trace, rate, None, time_limit_s, is_cold=is_cold, window=window)
    certificate = paper["certificate"]
    answer = next(each for each in made["certificate"]["answers"] if each["name"] == "production")
    simpler = {row["label"]: row for row in paper["alternatives"]}
    value, level0, bound = certificate["value"], certificate["level0"], certificate["bound"]

    def more(label: str) -> str:
        if label not in simpler:  # the plan is one
            return f"{value:.2f}"
        cost = simpler[label]["objective"]
        return f"{cost:.2f} ({100 * (cost / value - 1):+.1f} %)" if cost is not None else "-"

    proof = "exact" if certificate["level0_exact"] else "found"
    if not certificate["level0_exhausted"]:
        proof = "OPEN"

    return {
        "trace": trace.stem.rsplit("_", 1)[-1],
        "req/s": rate,
        "CPU s on paper": f"{paper_s:.1f}",
        "CPU s": f"{made_s:.1f} ({made_s / paper_s:.1f} x)",
        "production": _workers(made_yaml),
        "USD/h": f"{answer['value']:.2f} ({100 * (answer['value'] / value - 1):+.0f} %)",
        "kept in": f"{answer['kept_in']['kept']} of {answer['kept_in']['scenario_count']}",
        "on paper": _workers(plan_yaml),
        "USD/h on paper": f"{value:.2f}",
        "level 0": f"{level0:.2f} {proof}",
        "cheaper (simulated)": f"{certificate['cheaper']} ({certificate['cheaper_simulated']})",
        "saved beyond": f"{100 * (1 - value / level0):.1f} %",
        "bound (gap)": f"{bound:.2f} ({100 * (1 - bound / value):.0f} %)",
        "one GPU type": more("one GPU type only"),
        "mixed only": more("mixed pools only"),
        "simulations": str(certificate["simulations"]),
    }


def _workers(plan: dict[str, Any]) -> str:
    return " + ".join(
        f"{row['count']} {row['role']} {row['gpu']} tp{row['tp']} ({row['max_num_batched_tokens']})"
        for row in plan["workers"]
    )


def _planned(
    trace: Path, rate: str, safety: str | None, time_limit_s: float, *, is_cold: bool, window: str | None
) -> tuple[dict[str, Any], float, dict[str, Any]]:
    """What `plan --json` says, the CPU seconds it took, and plan.yaml."""
    question: dict[str, object] = {
        "llm": "llama-3.1-70b",
        "slo": SLO,
        "fleet": {"gpus": ["a100-80g", "h100-80g"]},
    }
    if safety is not None:
        question["safety"] = safety
    if rate != "own":
        question["traffic"] = {"rate": float(rate)} | ({} if window is None else {"window": window})
    with tempfile.TemporaryDirectory() as folder:
        slo = Path(folder) / "slo.yaml"
        slo.write_text(yaml.safe_dump(question))
        out = Path(folder) / "out"
        environment = os.environ | ({"NUMBA_CACHE_DIR": str(Path(folder) / "cache")} if is_cold else {})
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else our own modules are compiled every time
        command = [
            sys.executable,
            "-m",
            "planner.cli",
            "--slo",
            str(slo),
            "--trace",
            str(trace),
            "-o",
            str(out),
            "--time-limit",
            str(time_limit_s),
            "--json",
        ]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode not in (0, 4):
            raise SystemExit(
                f"{trace.name} at {rate}: exit {done.returncode}: {done.stderr.splitlines()[-1]}"
            )
        return json.loads(done.stdout), cpu_s, yaml.safe_load((out / "plan.yaml").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=DEFAULT_TRACES)
    parser.add_argument("--rates", nargs="+", default=["own", "20", "70", "200"])
    parser.add_argument("--kinds", nargs="+", default=["conv", "code"])
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--short", action="store_true")
    arguments = parser.parse_args()
    is_first = True
    for kind in arguments.kinds:
        trace = arguments.traces / f"AzureLLMInferenceTrace_{kind}.csv"
        if not trace.exists():
            raise SystemExit(
                f"{trace}: no such file; download AzurePublicDataset's 2023 traces, or use --traces"
            )
        for rate in arguments.rates:
            window = SHORT.get(rate) if arguments.short else None
            row = run_case(
                trace, rate, time_limit_s=arguments.time_limit, is_cold=arguments.cold, window=window
            )
            if is_first:
                print("| " + " | ".join(row) + " |")
                print("|" + "---|" * len(row))
            print("| " + " | ".join(row.values()) + " |", flush=True)
            is_first = False


if __name__ == "__main__":
    main()
