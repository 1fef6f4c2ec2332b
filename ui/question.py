"""From the inputs of a page to slo.yaml and the command that gives the same plan, and back to defaults.

`asked` is a mapping of plain values, one per input: what a session keeps, and a plan with it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.catalog import Catalog
from planner.domain import Limit
from planner.slo import METRICS, SloPreset
from planner.units import percentile_name
from ui.store import SAMPLES

Asked = dict[str, Any]

OWN_LIMITS = "own limits"
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "p100")
WINDOWS = ("whole", "busiest 10 min", "busiest 1 h", "first 10 min", "first 1 h")
WHAT = {
    "ttft": "Time to first token (TTFT)",
    "tbt": "Gap between tokens (TBT)",
    "tpot": "Mean gap of a request (TPOT)",
    "e2e": "End-to-end time (E2E)",
}


def sample(catalog: Catalog) -> Asked:
    """The question of examples/slo.yaml."""
    stock = {"a100-80g": 64, "h100-80g": 32, "h100-80g@350W": 32}
    asked: Asked = {
        "trace": f"{SAMPLES}/azure-conversation-sample.csv",
        "rate": 20.0, "scale": "superpose", "window": "whole",
        "llm": catalog.llm("llama-3.1-70b").name,
        "preset": OWN_LIMITS,
        "attainment": None,
        "objective": "cost", "power_kw": 80.0, "cost": 500.0, "gpu_limit": None, "spare": 0,
        "bandwidth": 50.0, "host_overhead": 0.0, "seed": 0, "time_limit": 120,
    }  # fmt: skip
    for metric in METRICS:
        asked[f"{metric}_percentile"] = "p90" if metric == "ttft" else "p99"
        asked[f"{metric}_ms"] = {"ttft": 2000.0, "tbt": 200.0}.get(metric)
    return asked | {
        "gpus": [
            {"use": name in stock, "GPU": name, "USD/h": gpu.price_usd_per_h, "stock": stock.get(name)}
            for name, gpu in catalog.gpus.items()
        ]
    }


def of_preset(preset: SloPreset) -> Asked | None:
    """A preset's limits as inputs; None where they are relative, or two of one metric."""
    limits = {limit.metric: limit for limit in preset.slo.limits}
    named = all(percentile_name(limit.percentile_frac) in PERCENTILES for limit in limits.values())
    if preset.slowdowns is not None or len(limits) < len(preset.slo.limits) or not named:
        return None
    asked: Asked = {}
    for metric in METRICS:
        limit: Limit | None = limits.get(metric)
        asked[f"{metric}_ms"] = 1e3 * limit.limit_s if limit else None
        if limit:
            asked[f"{metric}_percentile"] = percentile_name(limit.percentile_frac)
    share = preset.slo.attainment_frac
    return asked | {"attainment": None if share is None else 100 * share}


def document(asked: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """slo.yaml; what is left empty is left out. `slo.parse_task` refuses what makes no sense."""
    used = [row for row in asked["gpus"] if row["use"]]
    traffic = {"rate": asked["rate"], "scale": asked["scale"]}
    if asked["window"] != WINDOWS[0]:
        traffic["window"] = asked["window"]
    limits = {
        "power": _with_unit(asked["power_kw"], "kW"),
        "cost": _with_unit(asked["cost"], "usd/h"),
        "gpus": asked["gpu_limit"],
    }
    fleet: dict[str, Any] = {"gpus": {row["GPU"]: _stock(row["stock"]) for row in used}}
    if prices := _prices(used, catalog):
        fleet["prices"] = prices
    fleet["network"] = {"bandwidth": _with_unit(asked["bandwidth"], "GB/s")}
    if asked["host_overhead"]:
        fleet["host_overhead"] = _with_unit(asked["host_overhead"], "ms")
    found: dict[str, Any] = {"llm": asked["llm"]}
    preset = catalog.slos.get(asked["preset"])
    if preset is not None and of_preset(preset) is None:
        found["preset"] = preset.name
    else:
        found["slo"] = _slo(asked)
    found |= {"traffic": _given(traffic), "fleet": fleet, "objective": asked["objective"]}
    if given := _given(limits):
        found["limits"] = given
    if asked["spare"]:
        found["spare"] = f"{asked['spare']} worker{'s' if asked['spare'] > 1 else ''}"
    return found


def command(asked: Mapping[str, Any], catalog_folder: Path | None = None) -> str:
    """What gives the same plan on a command line, beside slo.yaml and the trace."""
    words = ["plan", "--slo", "slo.yaml", "--trace", asked["trace"].partition("/")[2], "-o", "out/"]
    words += ["--seed", str(asked["seed"])] if asked["seed"] else []
    words += ["--time-limit", str(asked["time_limit"])] if asked["time_limit"] != 120 else []
    words += ["--catalog", str(catalog_folder)] if catalog_folder else []
    return shlex.join(words)


def _slo(asked: Mapping[str, Any]) -> dict[str, Any]:
    lines: dict[str, Any] = {
        metric: {asked[f"{metric}_percentile"]: _with_unit(asked[f"{metric}_ms"], "ms")}
        for metric in METRICS
        if asked[f"{metric}_ms"] is not None
    }
    if asked["attainment"] is not None:
        lines["attainment"] = round(asked["attainment"] / 100, 12)
    return lines


def _prices(used: Sequence[Mapping[str, Any]], catalog: Catalog) -> dict[str, str]:
    """Prices that are not the catalog's, and those of their capped kin, which would follow them."""
    own = {row["GPU"] for row in used if row["USD/h"] != catalog.gpus[row["GPU"]].price_usd_per_h}
    return {
        row["GPU"]: _with_unit(row["USD/h"], "usd/h")
        for row in used
        if row["GPU"] in own or catalog.gpus[row["GPU"]].base in own
    }


def _stock(count: float | None) -> int | None:
    return None if count is None or count != count else int(count)


def _given(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not None}


def _with_unit(value: Any, unit: str) -> Any:
    return (
        None if value is None else f"{value!r} {unit}" if isinstance(value, int) else f"{value:.12g} {unit}"
    )
