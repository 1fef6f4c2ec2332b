"""Reads a written plan: the certificate from its file, everything else by simulating its fleet again."""

from pathlib import Path

import numpy as np

from planner.documents.catalog import Catalog
from planner.documents.plan_folder import WrittenPlan, read_written
from planner.search.evidence.certify import MOST_PREFIXES_S
from planner.search.evidence.findings import place_workers
from planner.search.evidence.plan import Plan
from planner.search.prefixes.keep_alive import with_keep_alive
from planner.search.prefixes.pinning import Pinning
from planner.search.prefixes.prefix_placing import PoolPrefixes, pool_prefixes
from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo


def read_plan(path: Path, catalog: Catalog) -> tuple[Plan, str]:
    """The plan in a folder, or that of a plan.yaml at `path`, and the command that made it.

    Raises InputError if a file is missing or does not belong to the same plan.
    """
    written = read_written(path, catalog)
    simulation = simulate(written.fleet, written.trace, limits=written.slo.limits, record=True)
    verdict = judge_slo(simulation, written.slo)
    for k, line in enumerate(verdict.lines):
        written.check_percentile(line.limit, k, line.value_s)  # InputError if the file says another value.
    plan = Plan(
        status=written.status,
        fleet=written.fleet,
        slo=written.slo,
        trace=written.trace,
        traffic_note=written.traffic_note,
        simulation=simulation,
        verdict=verdict,
        certificate=written.certificate,
        alternatives=written.alternatives,
        max_model_len=written.max_model_len,
        prices=written.prices,
        warnings=written.warnings,
        throughput=written.throughput,
        placement=place_workers(written.fleet),
        prefixes=_prefixes(written, simulation),
        made=written.made,
        requested_rps=written.requested_rps,
    )
    return plan, written.command


def _prefixes(plan: WrittenPlan, simulation: Simulation) -> tuple[PoolPrefixes, ...]:
    """The prefixes of each pool. If prefixes are pinned, their placement is the quick one if it gives the
    pinned prefixes of the written fleet, else the polished one.
    """
    fleet, trace = plan.fleet, plan.trace
    rng = np.random.default_rng(plan.certificate.seed)
    if not fleet.pinned:
        return pool_prefixes(fleet, simulation, trace, time_limit_s=MOST_PREFIXES_S, rng=rng)
    pinning = Pinning(trace)
    pinning.polish(fleet.pools)
    if pinning.pinned_prefixes(fleet.pools) != fleet.pinned:
        pinning.use(fleet.pools)
    pinned = pinning.with_session_hits(fleet.pools)
    prefixes = pool_prefixes(fleet, simulation, trace, time_limit_s=MOST_PREFIXES_S, rng=rng, pinned=pinned)
    return with_keep_alive(prefixes, fleet, simulation, trace)
