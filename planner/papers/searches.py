"""The searches of DistServe, Vidur and Splitwise with the planner's own fitted step times: rows for people, a
document for programs.

`plan search` (planner/commands/search_commands.py) calls this module. Each paper's algorithm has a module
beside this one: distserve_search.py, vidur_search.py and splitwise_search.py.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from planner.documents.catalog import Catalog
from planner.documents.task import PlanQuestion
from planner.domain import Gpu, Metric
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet, Network, Policies, WorkerType
from planner.models.memory import worker_memory
from planner.papers import distserve_search, splitwise_search, vidur_search
from planner.papers.goodput import Steady, bisect_highest, find_goodput, poisson_traffic
from planner.search.problem.bill import bill_fleet
from planner.search.problem.options import OBJECTIVE_UNITS, objective_of_worker
from planner.simulator.simulation import Floats
from planner.traffic.trace import Trace
from planner.units import finite_or_none, show_s

MACHINE_TP = 8  # Splitwise's machines are DGX servers with eight GPUs.
# MOST_MACHINES, MOST_SPLITS and LOWEST_RATE_RPS bound the time of Splitwise's search; the paper has no such
# bounds.
MOST_MACHINES = 256  # A pool has no more machines.
MOST_SPLITS = 20  # This many splits of a budget between prompt and token machines are simulated per design.
LOWEST_RATE_RPS = 0.05  # No lower rate is tried.
RATE_TOLERANCE_FRAC = 0.02  # The bisection of a rate ends at an interval of this share of the rate.
MOST_GPUS = 1024  # A deployment of Vidur's search has no more GPUs.
# Slowdowns are judged on Poisson traffic of JUDGED_S, or longer until it has LEAST_JUDGED_REQUESTS, so that a
# p99 rests on 20 requests.
JUDGED_S = 120
LEAST_JUDGED_REQUESTS = 2000
# The engine settings of Splitwise's machines: the most tokens of a step, and of sequences that run at once.
MACHINE_BUDGET_TOKENS = 2048
MACHINE_SEATS = 512
# The engine settings that Vidur's search tries here, in the same units.
VIDUR_BUDGETS_TOKENS = (512, 2048, 8192)
VIDUR_SEATS = (128, 256)

Paper = Literal["distserve", "vidur", "splitwise"]


@dataclass(frozen=True, slots=True)
class PaperSearch:
    """What a search found: rows for people, the same for programs (`document`), the fleet for fleet.yaml."""

    rows: list[dict[str, Any]]
    document: dict[str, Any]
    best: Fleet | None


@dataclass(frozen=True, slots=True, eq=False)
class PaperQuestion:
    """The input of a paper's search.

    Only the token counts of the trace `lengths` are used: arrivals are Poisson at `rate_rps`, with `seeds`
    draws. Only DistServe's search reads `nodes`, the most nodes of an instance. Only Vidur's reads `gpus`,
    all GPUs of the deployment, and `is_offline`: all requests arrive at once, and the search minimises the
    makespan instead of maximising requests per dollar.
    """

    task: PlanQuestion
    catalog: Catalog
    lengths: Trace
    rate_rps: float
    nodes: int = 1
    gpus: int = 8
    seeds: int = 1
    is_offline: bool = False


def search_as(paper: Paper, question: PaperQuestion) -> PaperSearch:
    """The fleets that the search of this paper finds. Raises InputError for a task that the paper does not
    cover, and InfeasibleError if no fleet keeps the SLO.
    """
    if not 0 < question.rate_rps < math.inf:
        raise InputError(f"--rate: expected a number of requests/s > 0, found {question.rate_rps:g}; name it")
    return {"distserve": _distserve, "vidur": _vidur, "splitwise": _splitwise}[paper](question)


def _distserve(question: PaperQuestion) -> PaperSearch:
    """The placements at `rate_rps` by DistServe's Algorithms 1 and 2, and one whose counts of prefill and
    decode instances are free (`free_counts`).
    """
    task, catalog, rate_rps = question.task, question.catalog, question.rate_rps
    _refuse_slowdowns(task)
    if len(task.stock) != 1:
        raise InputError(
            f"fleet.gpus: distserve places one kind of GPU, found {', '.join(task.stock)}; keep one there"
        )
    (gpu,) = task.priced_gpus(catalog)
    llm = catalog.served_llm(task.llm)
    # Inside a node KV goes over a GPU's own links, so hand-offs do not share them.
    node_network = Network(gpu.link_bytes_per_s, transfer=task.network.transfer, is_shared=False)
    setting = distserve_search.ServingSetting(llm, Policies(), task.network, node_network)
    types = distserve_search.instance_types(llm, gpu, catalog, nodes=question.nodes)
    # The rules judge whole fleets at a rate, and the instances of each phase alone.
    rules = distserve_search.steady_rules(task.slo, poisson_traffic(question.lengths), seeds=question.seeds)
    # Prefill and decode instances are chosen from the same `types`.
    phases_apart = distserve_search.high_affinity(
        setting,
        types,
        types,
        rate_rps,
        distserve_search.measured_by(rules.prefill),
        distserve_search.measured_by(rules.decode),
    )
    pairs = distserve_search.low_affinity(
        setting, types, types, rate_rps, distserve_search.measured_by(rules.whole), nodes=question.nodes
    )
    free_counts_fleet = distserve_search.free_counts(
        setting, types, types, rate_rps, rules, phases_apart.fleet
    )
    fleets = {
        "Algorithm 1: phases apart": phases_apart.fleet,
        "Algorithm 2: pairs in a node": pairs.fleet,
        "free counts": free_counts_fleet,
    }
    goodput_rps = {
        name: find_goodput(rules.whole, fleet, guess_rps=rate_rps).rate_rps for name, fleet in fleets.items()
    }
    rows = [
        {
            "search": name,
            "fleet": " + ".join(
                f"{pool.count} {pool.role} of tp{pool.type.tp} pp{pool.type.pp}" for pool in fleet.pools
            ),
            "GPUs": fleet.gpus,
            "USD/h": round(bill_fleet(fleet).usd_per_h, 2),
            f"carries ({rate_rps:g} needed)": round(goodput_rps[name], 2),
        }
        for name, fleet in fleets.items()
    ]
    document = {
        "rate_rps": rate_rps,
        "placements": [
            {"search": name, "carries_rps": goodput_rps[name]} | _fleet_summary(fleet)
            for name, fleet in fleets.items()
        ],
        "neighbours": [
            {"carries": keeps_slo} | _fleet_summary(fleet)  # At `rate_rps`; true or false.
            for fleet, keeps_slo in distserve_search.smaller_neighbours(
                free_counts_fleet, rules.whole, rate_rps
            )
        ],
    }
    return PaperSearch(rows, document, free_counts_fleet)


def _vidur(question: PaperQuestion) -> PaperSearch:
    """Requests per dollar over TP x PP x batching x token budget x sequences, with Pareto frontiers."""
    task, catalog, lengths, gpus = question.task, question.catalog, question.lengths, question.gpus
    _refuse_slowdowns(task)
    if gpus > MOST_GPUS:
        raise InputError(
            f"--gpus: at most {MOST_GPUS} are searched, found {gpus}; requests per dollar are those of a part"
        )
    priced_gpus = task.priced_gpus(catalog)
    _refuse_free(priced_gpus, "vidur")
    longest_tokens = int((lengths.input_tokens + lengths.output_tokens).max())
    space = vidur_search.EngineSettingChoices(budgets=VIDUR_BUDGETS_TOKENS, seats=VIDUR_SEATS)
    fleets = vidur_search.configurations(
        catalog.served_llm(task.llm),
        priced_gpus,
        catalog,
        space,
        total_gpus=gpus,
        least_kv_tokens=longest_tokens,
    )
    if question.is_offline:
        return _vidur_offline(fleets, lengths)
    rows = vidur_search.search_configurations(
        fleets, Steady(task.slo, poisson_traffic(lengths), question.seeds), lengths
    )
    if not rows[0].rate_rps:  # The row with most requests per dollar comes first.
        raise InfeasibleError(
            f"none of {len(fleets)} configurations keeps the SLO at any rate; relax it, or take other GPUs",
            kind="latency",
            constraint="slo",
            relaxation="a looser limit",
        )
    # Frontiers of requests per dollar with the first of `values_s`, TTFT p90, and with the second, TBT p99:
    # the latencies that `search_configurations` gives by default, whatever the SLO limits.
    frontiers = [vidur_search.pareto_configurations(rows, metric) for metric in (0, 1)]
    shown = [row for row in rows if row is rows[0] or row in frontiers[0] or row in frontiers[1]]

    def shown_row(row: vidur_search.SearchedConfiguration) -> dict[str, Any]:
        """A configuration as a row of the table that is shown."""
        names = ("TTFT", "TBT")
        return {
            "configuration": row.name,
            "requests/USD": round(row.requests_per_usd, 1),
            "requests/s": round(row.rate_rps, 2),
            "TTFT p90": show_s(row.values_s[0]),
            "TBT p99": show_s(row.values_s[1]),
            "frontier of": ", ".join(
                name for name, frontier in zip(names, frontiers, strict=True) if row in frontier
            ),
        }

    document = {
        "configurations": [
            {
                "name": row.name,
                "rate_rps": row.rate_rps,
                "requests_per_usd": row.requests_per_usd,
                "ttft_p90_s": finite_or_none(row.values_s[0]),
                "tbt_p99_s": finite_or_none(row.values_s[1]),
                "on_ttft_frontier": row in frontiers[0],
                "on_tbt_frontier": row in frontiers[1],
            }
            for row in rows
        ]
    }
    return PaperSearch([shown_row(row) for row in shown], document, rows[0].fleet)


def _vidur_offline(fleets: list[Fleet], requests: Trace) -> PaperSearch:
    """The makespan of every fleet if all requests arrive at once, with the frontier of makespan and bill."""
    rows = vidur_search.search_makespans(fleets, requests)
    if not math.isfinite(rows[0].makespan_s):  # The shortest makespan comes first.
        raise InfeasibleError(
            f"none of {len(fleets)} configurations serves every request; leave out the longest, or take "
            "other GPUs",
            kind="capacity",
            constraint="fleet.gpus",
            relaxation="larger GPUs",
        )
    frontier = vidur_search.pareto_makespans(rows)
    shown = [
        {
            "configuration": row.name,
            "makespan": show_s(row.makespan_s),
            "USD": f"{row.usd:.4g}",
            "requests/USD": round(len(requests) / row.usd, 1),
        }
        for row in frontier
    ]
    document = {
        "requests": len(requests),
        "configurations": [
            {
                "name": row.name,
                "makespan_s": finite_or_none(row.makespan_s),
                "usd": finite_or_none(row.usd),
                "on_frontier": row in frontier,
            }
            for row in rows
        ],
    }
    return PaperSearch(shown, document, rows[0].fleet)


def _splitwise(question: PaperQuestion) -> PaperSearch:
    """The best counts of machines for each design. The SLO must be one of slowdowns, as `preset: splitwise`.

    With the objective cost, power or gpus it is the paper's iso-throughput search: the cheapest counts that
    serve `rate_rps`. With `objective: throughput` and one limit it is the iso-power or iso-cost search: the
    counts within the limit that serve the most requests/s.
    """
    task, catalog = question.task, question.catalog
    if task.slowdowns is None:
        raise InputError("slo: splitwise needs limits relative to a machine alone, as in `preset: splitwise`")
    if task.objective == "throughput":
        return _most_traffic_of_designs(question)
    if task.objective == "cost":
        _refuse_free(task.priced_gpus(catalog), "splitwise")
    unit = OBJECTIVE_UNITS[task.objective]
    slowdowns = _SlowdownJudge(question)
    of_designs = (_cheapest_of_design(design, question, slowdowns) for design in _designs(task, catalog))
    rows_and_fleets = sorted(
        filter(None, of_designs), key=lambda row_and_fleet: float(row_and_fleet[0][unit])
    )
    if not rows_and_fleets:
        raise InfeasibleError(
            f"no design keeps the slowdowns at {question.rate_rps:g} requests/s with {MOST_MACHINES} "
            "machines a pool",
            kind="capacity",
            constraint="slowdowns",
            relaxation="looser slowdowns, or faster GPUs",
        )
    rows = [row for row, _ in rows_and_fleets]
    _, best = rows_and_fleets[0]
    return PaperSearch(rows, {"rate_rps": question.rate_rps, "designs": rows}, best)


class _SlowdownJudge:
    """Judges fleets by the slowdowns of requests over the same requests alone on the reference machine.

    Traffic of a rate, and its times on the reference machine, are computed once for all fleets.
    """

    def __init__(self, question: PaperQuestion) -> None:
        task, catalog = question.task, question.catalog
        assert task.slowdowns is not None
        reference = _make_machine(task, catalog, catalog.gpu(task.slowdowns.gpu), tp=task.slowdowns.tp)
        self.limits = task.slowdowns.limits

        @cache  # On a function of this object: a cache of a method would outlive the object.
        def judged_traffic(rate_rps: float) -> list[tuple[Trace, Mapping[Metric, Floats]]]:
            return [
                (trace, splitwise_search.alone_on(reference, trace))
                for trace in _judged_traffic(question, rate_rps)
            ]

        self.judged_traffic = judged_traffic

    def keeps(self, fleet: Fleet, rate_rps: float) -> bool:
        """Whether the fleet keeps the slowdowns at this rate with every seed."""
        return all(
            splitwise_search.keeps_slowdowns(fleet, trace, self.limits, alone)
            for trace, alone in self.judged_traffic(rate_rps)
        )


def _most_traffic_of_designs(question: PaperQuestion) -> PaperSearch:
    """The iso-power and the iso-cost search: the most requests/s that each design serves within the one limit
    of the task, the best design first.
    """
    task, catalog = question.task, question.catalog
    limits = {
        "power": task.power_limit_w,
        "cost": task.cost_limit_usd_per_h,
        "gpus": None if task.gpu_limit is None else float(task.gpu_limit),
    }
    named = [(limit_name, value) for limit_name, value in limits.items() if value is not None]
    if len(named) != 1:
        names = ", ".join(limit_name for limit_name, _ in named) or "none"
        raise InputError(
            "limits: splitwise looks for the most traffic within one of power, cost and gpus, "
            f"found {names}; name one"
        )
    ((limit_name, budget),) = named
    if limit_name == "cost":
        _refuse_free(task.priced_gpus(catalog), "splitwise")
    slowdowns, llm, network = _SlowdownJudge(question), catalog.served_llm(task.llm), _own_links(task.network)
    rows: list[tuple[dict[str, Any], Fleet]] = []
    for design in _designs(task, catalog):
        machines = [machine for machine in (design.prompt, design.token) if machine is not None]
        costs = [objective_of_worker(machine, limit_name) for machine in machines]
        fleets = [
            design.fleet(llm, network, prompt_count, token_count)
            for prompt_count, token_count in splitwise_search.even_splits(budget, costs, most=MOST_SPLITS)
            if max(prompt_count, token_count) <= MOST_MACHINES
        ]
        best, rate_rps = None, 0.0
        for fleet in fleets:
            # A split is worth a bisection only if it keeps the slowdowns at a rate that is above the best
            # split's by the tolerance.
            rate_to_beat_rps = rate_rps * (1 + RATE_TOLERANCE_FRAC)
            if best is not None and not slowdowns.keeps(fleet, rate_to_beat_rps):
                continue
            goodput = bisect_highest(
                partial(slowdowns.keeps, fleet),
                guess_rps=rate_to_beat_rps or question.rate_rps,
                tolerance_frac=RATE_TOLERANCE_FRAC,
                lowest_rps=LOWEST_RATE_RPS,
            )
            if goodput.rate_rps > rate_rps:
                best, rate_rps = fleet, goodput.rate_rps
        if best is not None:
            rows.append((_design_row(design, best, {"requests/s": round(rate_rps, 2)}), best))
    if not rows:
        raise InfeasibleError(
            f"no design keeps the slowdowns at any rate within {budget:g} "
            f"{OBJECTIVE_UNITS.get(limit_name, limit_name)}",
            kind="capacity",
            constraint=f"limits.{limit_name}",
            relaxation="a larger limit, looser slowdowns, or faster GPUs",
        )
    rows.sort(key=lambda row_and_fleet: -float(row_and_fleet[0]["requests/s"]))
    shown = [row for row, _ in rows]
    return PaperSearch(shown, {"limit": limit_name, "budget": budget, "designs": shown}, rows[0][1])


def _judged_traffic(question: PaperQuestion, rate_rps: float) -> list[Trace]:
    """Poisson traffic at this rate, one trace for each seed, with the lengths of those requests that have
    more than one output token: TBT is not defined for a single token.
    """
    lengths = question.lengths
    has_several_tokens = lengths.output_tokens > 1
    if not has_several_tokens.any():
        raise InputError(
            f"{lengths.name}: every request has one token, splitwise judges those after the first"
        )
    traffic = poisson_traffic(lengths.select(has_several_tokens))
    requests = max(LEAST_JUDGED_REQUESTS, round(JUDGED_S * rate_rps))
    return [traffic(rate_rps, requests, seed) for seed in range(question.seeds)]


def _designs(task: PlanQuestion, catalog: Catalog) -> list[splitwise_search.MachineDesign]:
    """Each GPU's machine for both phases, and every pair of machines, one for prompts and one for tokens."""
    machines = [_make_machine(task, catalog, gpu) for gpu in task.priced_gpus(catalog)]
    designs = [splitwise_search.MachineDesign(machine.gpu.name, machine, None) for machine in machines]
    return designs + [
        splitwise_search.MachineDesign(f"{prompt.gpu.name} + {token.gpu.name}", prompt, token)
        for prompt in machines
        for token in machines
    ]


def _cheapest_of_design(
    design: splitwise_search.MachineDesign, question: PaperQuestion, slowdowns: _SlowdownJudge
) -> tuple[dict[str, Any], Fleet] | None:
    """The row and the fleet of this design's cheapest counts that keep the slowdowns at the question's rate;
    None if there are none.

    "as good" in the row is how many other counts cost the same and keep the slowdowns too.
    """
    task = question.task
    llm, network = question.catalog.served_llm(task.llm), _own_links(task.network)
    machines = [machine for machine in (design.prompt, design.token) if machine is not None]
    costs = [objective_of_worker(machine, task.objective) for machine in machines]
    cheapest_counts = splitwise_search.find_cheapest_splits(
        lambda p, t: slowdowns.keeps(design.fleet(llm, network, p, t), question.rate_rps),
        costs[0],
        costs[-1],  # The same if there is no machine for tokens alone.
        most=MOST_MACHINES,
        splits=design.token is not None,
    )
    if not cheapest_counts.counts:
        return None
    fleet = design.fleet(llm, network, *cheapest_counts.counts[0])
    row = _design_row(design, fleet, {OBJECTIVE_UNITS[task.objective]: cheapest_counts.value})
    return row | {"as good": len(cheapest_counts.counts) - 1}, fleet


def _design_row(
    design: splitwise_search.MachineDesign, fleet: Fleet, answer: dict[str, Any]
) -> dict[str, Any]:
    """A design's row for people; `answer` is the value that the search optimised, by its unit."""
    counts = [pool.count for pool in fleet.pools] + [0]  # A fleet of one pool has no token machines.
    price = {"USD/h": round(bill_fleet(fleet).usd_per_h, 2), "kW": round(fleet.power_w / 1000, 1)}
    return {"design": design.name, "prompt": counts[0], "token": counts[1]} | answer | price


def _own_links(network: Network) -> Network:
    """The network with a link for each machine, as Splitwise has it, not one that all machines share."""
    return replace(network, is_shared=False)


def _make_machine(task: PlanQuestion, catalog: Catalog, gpu: Gpu, *, tp: int = MACHINE_TP) -> WorkerType:
    """A whole machine as one worker with TP over all of its GPUs, as Splitwise has it."""
    llm = catalog.served_llm(task.llm)
    kv_tokens = worker_memory(
        llm, gpu, tp, max_num_batched_tokens=MACHINE_BUDGET_TOKENS, max_num_seqs=MACHINE_SEATS
    ).kv_tokens
    if not kv_tokens:
        raise InputError(f"{llm.name} does not fit a machine of {tp} x {gpu.name}; take larger GPUs")
    latency = catalog.step_latency(llm, gpu, tp)
    machine = WorkerType(
        gpu, tp, latency, kv_tokens, max_num_batched_tokens=MACHINE_BUDGET_TOKENS, max_num_seqs=MACHINE_SEATS
    ).with_llm(llm)
    if machine.extra_kv.is_any:
        raise InputError(
            f"llm: {llm.name} has layers with windows or states, and Splitwise counts KV by tokens "
            "alone; ask `plan` or another search"
        )
    return machine


def _refuse_slowdowns(task: PlanQuestion) -> None:
    """Raise InputError if the SLO limits slowdowns, which this paper's search does not cover."""
    if task.slowdowns is not None:
        raise InputError(f"slo: needs limits in seconds here, found the relative preset {task.preset!r}")


def _refuse_free(gpus: Iterable[Gpu], paper: Paper) -> None:
    """Raise InputError for a GPU that costs nothing, where the paper's search divides by what GPUs cost."""
    if free := [gpu.name for gpu in gpus if not gpu.usd_per_h]:
        raise InputError(
            f"fleet: {', '.join(free)}: costs nothing, and {paper} weighs GPUs by their prices; leave out "
            "owned, or name a price (fleet.prices)"
        )


def _fleet_summary(fleet: Fleet) -> dict[str, Any]:
    """A fleet's GPUs, what is paid for it and its pools, for a document."""
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
    return {"gpus": fleet.gpus, "usd_per_h": bill_fleet(fleet).usd_per_h, "pools": pools}
