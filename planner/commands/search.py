"""`plan goodput` and `plan search`: the highest rate of a fleet, and the papers' searches over fleets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.commands.common import (
    CatalogOption,
    DropOption,
    JsonOption,
    Progress,
    RateOption,
    ScaleOption,
    SeedOption,
    WindowOption,
    asked_of,
    keep_inputs,
    out_file,
    print_json,
    print_mapping,
    print_rows,
    read_requests,
    stopped_after,
)
from planner.commands.whatif import SloArgument, TraceArgument
from planner.documents.catalog import Catalog, read_catalog
from planner.errors import InfeasibleError, InputError
from planner.units import show_s

if TYPE_CHECKING:
    from planner.documents.task import Task
    from planner.domain import Gpu
    from planner.fleet import Fleet
    from planner.papers.goodput import Traffic
    from planner.papers.vidur import Row
    from planner.traffic.trace import Trace

LEAST_REQUESTS = 100  # of a trace at the lowest rate that is tried
MACHINE_TP = 8
MOST_MACHINES = 256
MOST_GPUS = 1024  # of a deployment in Vidur's search


class Arrivals(StrEnum):
    trace = "trace"
    poisson = "poisson"


class Formulation(StrEnum):
    distserve = "distserve"
    vidur = "vidur"
    splitwise = "splitwise"


SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, max=1000, help="A rate counts if it holds with each of these seeds.")
]
ToleranceOption = Annotated[
    float,
    typer.Option("--tolerance", min=1e-4, max=1.0, help="How close to the rate that fails, as a share."),
]


TimeOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="Seconds after which the search is given up.")
]
LONGEST_S = 1800.0


def find_goodput(
    fleet: Annotated[Path, typer.Option("--fleet", readable=False, help="fleet.yaml, or a plan.yaml.")],
    trace: TraceArgument,
    slo: SloArgument,
    arrivals: Annotated[
        Arrivals, typer.Option("--arrivals", help="The trace's own, rescaled, or Poisson of its lengths.")
    ] = Arrivals.trace,
    scale: ScaleOption = "superpose",
    window: WindowOption = None,
    seeds: SeedsOption = 3,
    tolerance: ToleranceOption = 0.02,
    catalog: CatalogOption = None,
    drop_invalid: DropOption = False,
    time_limit: TimeOption = LONGEST_S,
    json_output: JsonOption = False,
) -> None:
    """Find the highest rate at which a fleet keeps an SLO, in steady state.

    The rate in the SLO's traffic section is not used. Exit code 3: no rate is kept. 4: not found in time.
    """
    from planner.documents.fleet import read_fleet
    from planner.papers.goodput import Steady, highest, poisson, residences
    from planner.papers.vidur import most_rps
    from planner.simulator.metrics import value_s
    from planner.traffic.scaling import Asked
    from planner.traffic.trace import spread

    tried: dict[float, bool] = {}
    with Progress() as progress, stopped_after(time_limit, lambda: _bracket(tried)):
        known = read_catalog(catalog)
        engines = read_fleet(fleet, known)
        promise, asked = asked_of(slo, known, rate=None, scale=scale, window=window, command="goodput")
        assert promise is not None
        requests = read_requests(trace, seed=None, drop_invalid=drop_invalid)

        def replayed(rate_rps: float, least: int, seed: int) -> Trace:
            return Asked(rate_rps, asked.how, asked.part).of(spread(requests, seed=seed), seed=seed)

        traffic: Traffic = replayed
        lowest_rps = LEAST_REQUESTS / requests.duration_s if requests.duration_s else 0.0
        if arrivals == Arrivals.poisson:
            traffic, lowest_rps = poisson(spread(requests, seed=0)), 0.0
        rule = Steady(promise, traffic, seeds)
        progress(f"searching the goodput of {engines.workers} workers")

        def carries(rate_rps: float) -> bool:
            progress(f"{rate_rps:.4g} requests/s")
            tried[rate_rps] = rule.carries(engines, rate_rps)
            return tried[rate_rps]

        found = highest(
            carries,
            guess_rps=most_rps(engines, requests) / 4,
            tolerance_frac=tolerance,
            lowest_rps=max(lowest_rps, 1e-4),
        )
        run = rule.run(engines, found.rate_rps or max(lowest_rps, 1e-4))
    values = {limit: value_s(run, limit.metric, limit.percentile_frac) for limit in promise.limits}
    if not found.rate_rps:
        worst = max(promise.limits, key=lambda limit: (_number(values[limit]) or 0.0) / limit.limit_s)
        raise InfeasibleError(
            f"the fleet keeps the SLO at no rate down to {found.fails_rps:.3g} requests/s: {worst.name} is "
            f"{show_s(values[worst])} there, promised {show_s(worst.limit_s)}; relax the SLO, or take other "
            "workers",
            kind="latency",
            constraint=worst.name,
            relaxation=f"{worst.name} of {show_s(values[worst])}",
        )
    answer = {
        "rate_rps": found.rate_rps,
        "fails_rps": _number(found.fails_rps),
        "rates_tried": found.rates,
        "seeds": seeds,
        "arrivals": arrivals.value,
        "gpus": engines.gpus,
        "gpu_rate_rps": found.rate_rps / engines.gpus,
        "usd_per_1000_requests": engines.price_usd_per_h / 3.6 / found.rate_rps,
        "requests": len(run.arrival_s),
        "residences": residences(run),
        "slo": [
            {"limit": limit.name, "limit_s": limit.limit_s, "simulated_s": _number(values[limit])}
            for limit in promise.limits
        ],
    }
    if json_output:
        print_json(answer, requests.warnings)
        return
    print_mapping(
        {
            "goodput": f"{found.rate_rps:.4g} requests/s on {engines.gpus} GPUs, "
            f"{found.rate_rps / engines.gpus:.3g} per GPU",
            "fails at": f"{found.fails_rps:.4g} requests/s",
            "cost": f"{answer['usd_per_1000_requests']:.3g} USD per 1000 requests",
        },
        "",
    )
    if residences(run) < rule.residences:
        print_mapping(
            {"mind": f"the trace is only {residences(run):.1f} mean residences long; it flatters"}, ""
        )
    rows = [
        {"limit": limit.name, "promised": show_s(limit.limit_s), "simulated": show_s(values[limit])}
        for limit in promise.limits
    ]
    print_rows(rows, f"at {found.rate_rps:.4g} requests/s, {len(run.arrival_s)} requests")


def _bracket(tried: dict[float, bool]) -> str:
    """Between which rates it lies, as far as they were tried."""
    kept = [rate for rate, holds in tried.items() if holds]
    failed = [rate for rate, holds in tried.items() if not holds]
    said = [f"{max(kept):.4g} requests/s hold"] if kept else []
    said += [f"{min(failed):.4g} do not"] if failed else []
    return f" ({', '.join(said)})" if said else ""


@dataclass(frozen=True, slots=True)
class Found:
    """Rows for people, the same for programs, and the fleet to write down, if there is a best one."""

    rows: list[dict[str, Any]]
    document: dict[str, Any]
    best: Fleet | None


def search(
    formulation: Annotated[Formulation, typer.Argument(help="distserve, vidur or splitwise.")],
    slo: SloArgument,
    trace: TraceArgument,
    rate: RateOption = None,
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, help="distserve: an instance may lie on so many nodes.")
    ] = 1,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="vidur: GPUs of the deployment.")] = 8,
    seeds: SeedsOption = 1,
    out: Annotated[Path | None, out_file("Write the best fleet to this fleet.yaml.")] = None,
    catalog: CatalogOption = None,
    seed: SeedOption = 0,
    drop_invalid: DropOption = False,
    time_limit: TimeOption = LONGEST_S,
    json_output: JsonOption = False,
) -> None:
    """Search fleets as the papers do, on the planner's fits, and in steady state.

    distserve: Algorithms 1 and 2, and free counts of prefill and decode instances, for the rate asked.
    vidur: requests per dollar over TP x PP x batching x token budget x sequences, with Pareto frontiers.
    splitwise: machines of each design for the rate asked; needs an SLO of slowdowns, `preset: splitwise`.
    Arrivals are Poisson, lengths those of the trace. Exit code 4: not found in time.
    """
    from planner.documents.fleet import fleet_document
    from planner.documents.task import read_task
    from planner.io import files

    if out is not None:
        files.check_output_file(out)
        keep_inputs([out], slo, trace)
    with Progress() as progress, stopped_after(time_limit, str):
        known = read_catalog(catalog)
        task = read_task(slo, known)
        requests = read_requests(trace, seed=seed, drop_invalid=drop_invalid)
        rate_rps = rate or task.rate_rps or requests.rate_rps
        if not 0 < rate_rps < math.inf:
            raise InputError(f"--rate: expected a number of requests/s > 0, found {rate_rps:g}; name it")
        progress(f"searching as {formulation.value} does")
        if formulation == Formulation.distserve:
            found = _distserve(task, known, requests, rate_rps, nodes, seeds)
        elif formulation == Formulation.vidur:
            found = _vidur(task, known, requests, gpus, seeds)
        else:
            found = _splitwise(task, known, requests, rate_rps, seeds)
    if out is not None:
        if found.best is None:
            raise InputError(f"{out}: no fleet keeps the SLO, so there is none to write")
        files.write_file(out, files.to_yaml(fleet_document(found.best)))
    if json_output:
        print_json({"formulation": formulation.value} | found.document, requests.warnings)
    else:
        print_rows(found.rows, f"{formulation.value}: {task.llm}")


def _distserve(task: Task, known: Catalog, lengths: Trace, rate_rps: float, nodes: int, seeds: int) -> Found:
    from planner.fleet import Network, Policies
    from planner.papers import distserve
    from planner.papers.goodput import goodput, poisson

    _needs_seconds(task)
    if len(task.stock) != 1:
        raise InputError(
            f"fleet.gpus: distserve places one kind of GPU, found {', '.join(task.stock)}; keep one there"
        )
    (gpu,) = task.gpus(known)
    llm = known.llm(task.llm)
    within = Network(gpu.link_bytes_per_s, transfer=task.network.transfer, is_shared=False)
    setting = distserve.Setting(llm, Policies(), task.network, within)
    types = distserve.instance_types(llm, gpu, known, nodes=nodes)
    rules = distserve.steady_rules(task.slo, poisson(lengths), seeds=seeds)
    apart = distserve.high_affinity(
        setting,
        types,
        types,
        rate_rps,
        distserve.measured_by(rules.prefill),
        distserve.measured_by(rules.decode),
    )
    pairs = distserve.low_affinity(
        setting, types, types, rate_rps, distserve.measured_by(rules.whole), nodes=nodes
    )
    free = distserve.free_counts(setting, types, types, rate_rps, rules, apart.fleet)
    fleets = {
        "Algorithm 1: phases apart": apart.fleet,
        "Algorithm 2: pairs in a node": pairs.fleet,
        "free counts": free,
    }
    kept = {name: goodput(rules.whole, fleet, guess_rps=rate_rps).rate_rps for name, fleet in fleets.items()}
    rows = [
        {
            "search": name,
            "fleet": _shape(fleet),
            "GPUs": fleet.gpus,
            "USD/h": round(fleet.price_usd_per_h, 2),
            f"carries ({rate_rps:g} asked)": round(kept[name], 2),
        }
        for name, fleet in fleets.items()
    ]
    document = {
        "rate_rps": rate_rps,
        "placements": [
            {"search": name, "carries_rps": kept[name]} | _fleet_json(fleet) for name, fleet in fleets.items()
        ],
        "neighbours": [
            {"carries": carries} | _fleet_json(fleet)
            for fleet, carries in distserve.neighbours(free, rules.whole, rate_rps)
        ],
    }
    return Found(rows, document, free)


def _vidur(task: Task, known: Catalog, lengths: Trace, gpus: int, seeds: int) -> Found:
    from planner.papers.goodput import Steady, poisson
    from planner.papers.vidur import configurations, frontier
    from planner.papers.vidur import search as over

    _needs_seconds(task)
    if gpus > MOST_GPUS:
        raise InputError(
            f"--gpus: at most {MOST_GPUS} are searched, found {gpus}; requests per dollar are those of a part"
        )
    longest = int((lengths.input_tokens + lengths.output_tokens).max())
    fleets = configurations(
        known.llm(task.llm),
        task.gpus(known),
        known,
        total_gpus=gpus,
        least_kv_tokens=longest,
        budgets=(512, 2048, 8192),
        seats=(128, 256),
    )
    rows = over(fleets, Steady(task.slo, poisson(lengths), seeds), lengths)
    if not rows[0].rate_rps:
        raise InfeasibleError(
            f"none of {len(fleets)} configurations keeps the SLO at any rate; relax it, or take other GPUs",
            kind="latency",
            constraint="slo",
            relaxation="a looser limit",
        )
    on = [frontier(rows, i) for i in (0, 1)]
    shown = [row for row in rows if row is rows[0] or row in on[0] or row in on[1]]

    def line(row: Row) -> dict[str, Any]:
        names = ("TTFT", "TBT")
        return {
            "configuration": row.name,
            "requests/USD": round(row.requests_per_usd, 1),
            "requests/s": round(row.rate_rps, 2),
            "TTFT p90": show_s(row.values_s[0]),
            "TBT p99": show_s(row.values_s[1]),
            "frontier of": ", ".join(name for name, rows_on in zip(names, on, strict=True) if row in rows_on),
        }

    document = {
        "configurations": [
            {
                "name": row.name,
                "rate_rps": row.rate_rps,
                "requests_per_usd": row.requests_per_usd,
                "ttft_p90_s": _number(row.values_s[0]),
                "tbt_p99_s": _number(row.values_s[1]),
                "on_ttft_frontier": row in on[0],
                "on_tbt_frontier": row in on[1],
            }
            for row in rows
        ]
    }
    return Found([line(row) for row in shown], document, rows[0].fleet)


def _splitwise(task: Task, known: Catalog, lengths: Trace, rate_rps: float, seeds: int) -> Found:
    from planner.papers import splitwise
    from planner.papers.goodput import poisson
    from planner.search.options import OBJECTIVE_UNITS, weight

    if task.slowdowns is None:
        raise InputError("slo: splitwise needs limits relative to a machine alone, as in `preset: splitwise`")
    if task.objective not in OBJECTIVE_UNITS:
        raise InputError(f"objective: splitwise knows {', '.join(OBJECTIVE_UNITS)}, found {task.objective}")
    llm = known.llm(task.llm)
    machines = [_machine(task, known, gpu) for gpu in task.gpus(known)]
    reference = _machine(task, known, known.gpu(task.slowdowns.gpu), tp=task.slowdowns.tp)
    several = lengths.output_tokens > 1
    if not several.any():
        raise InputError(
            f"{lengths.name}: every request has one token, splitwise judges those after the first"
        )
    traffic = poisson(lengths.select(several))
    traces = [traffic(rate_rps, max(2000, round(120 * rate_rps)), seed) for seed in range(seeds)]
    alone_s = [splitwise.alone_on(reference, trace) for trace in traces]
    network = replace(task.network, is_shared=False)  # each machine has a link of its own
    designs = [splitwise.Design(machine.gpu.name, machine, None) for machine in machines]
    designs += [splitwise.Design(f"{p.gpu.name} + {t.gpu.name}", p, t) for p in machines for t in machines]
    rows: list[dict[str, Any]] = []
    best, best_value = None, math.inf
    limits = task.slowdowns.limits
    for design in designs:

        def holds(p: int, t: int, design: splitwise.Design = design) -> bool:
            fleet = design.fleet(llm, network, p, t)
            return all(
                splitwise.keeps(fleet, trace, limits, alone)
                for trace, alone in zip(traces, alone_s, strict=True)
            )

        costs = [weight(type_, task.objective) for type_ in (design.prompt, design.token) if type_]
        found = splitwise.cheapest(
            holds, costs[0], costs[-1], most=MOST_MACHINES, splits=design.token is not None
        )
        if not found.counts:
            continue
        fleet = design.fleet(llm, network, *found.counts[0])
        if found.value < best_value:
            best, best_value = fleet, found.value
        rows.append(
            {
                "design": design.name,
                "prompt": found.counts[0][0],
                "token": found.counts[0][1],
                OBJECTIVE_UNITS[task.objective]: found.value,
                "USD/h": round(fleet.price_usd_per_h, 2),
                "kW": round(fleet.power_w / 1000, 1),
                "as good": len(found.counts) - 1,
            }
        )
    if best is None:
        raise InfeasibleError(
            f"no design keeps the slowdowns at {rate_rps:g} requests/s with {MOST_MACHINES} machines a pool",
            kind="capacity",
            constraint="slowdowns",
            relaxation="looser slowdowns, or faster GPUs",
        )
    rows.sort(key=lambda row: row[OBJECTIVE_UNITS[task.objective]])
    return Found(rows, {"rate_rps": rate_rps, "designs": rows}, best)


def _machine(task: Task, known: Catalog, gpu: Gpu, *, tp: int = MACHINE_TP) -> Any:
    """A whole machine as one worker, as Splitwise has it: TP 8, prompts up to 2048 tokens a batch."""
    from planner.fleet import WorkerType
    from planner.models.memory import kv_cache_tokens

    llm = known.llm(task.llm)
    kv_tokens = kv_cache_tokens(llm, gpu, tp, max_num_batched_tokens=2048, max_num_seqs=512)
    if not kv_tokens:
        raise InputError(f"{llm.name} does not fit a machine of {tp} x {gpu.name}; take larger GPUs")
    return WorkerType(gpu, tp, known.latency(llm, gpu, tp), kv_tokens, 2048, 512)


def _shape(fleet: Fleet) -> str:
    return " + ".join(
        f"{pool.count} {pool.role} of tp{pool.type.tp} pp{pool.type.pp}" for pool in fleet.pools
    )


def _needs_seconds(task: Task) -> None:
    if task.slowdowns is not None:
        raise InputError(f"slo: needs limits in seconds here, found the relative preset {task.preset!r}")


def _fleet_json(fleet: Fleet) -> dict[str, Any]:
    pools = [
        {
            "role": pool.role,
            "gpu": pool.type.gpu.name,
            "tp": pool.type.tp,
            "pp": pool.type.pp,
            "count": pool.count,
        }
        for pool in fleet.pools
    ]
    return {"gpus": fleet.gpus, "usd_per_h": fleet.price_usd_per_h, "pools": pools}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
