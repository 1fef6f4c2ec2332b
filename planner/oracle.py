"""Asks the simulator whether fleets keep the SLO, and remembers the answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planner.domain import Fleet, Llm, Network, Policies, Pool, Slo, WorkerType
from planner.models.latency import StepLatency
from planner.simulator.metrics import Verdict, judge
from planner.simulator.replay import Simulation, fresh_requests, keeps, simulate
from planner.solvers.level0 import Counts
from planner.solvers.master import Option
from planner.traces import Trace

# Stands for prefill that takes no time and a link that never delays.
_INSTANT = StepLatency((1.0, 2.0), (1e-12, 1e-12), 0.0, 0.0, 0.0, 0.0, 0.0, basis="instant")
_NO_LINK = Network(bandwidth_bytes_per_s=1e30)
POOL_NAMES = {"mixed": "mixed", "prefill": "pre", "decode": "dec"}


@dataclass(slots=True)
class Oracle:
    """The subproblem of the decomposition: a fleet holds if its simulation on `trace` keeps `slo`.

    With `spare_workers` > 0 it must hold after losing that many workers of any one pool. Answers are
    remembered by fleet. The kernel releases the GIL, so threads use the cores.
    """

    llm: Llm
    trace: Trace
    slo: Slo
    network: Network
    policies: Policies
    spare_workers: int = 0
    _answers: dict[tuple[object, ...], bool] = field(default_factory=dict, init=False)
    _verdicts: int = field(default=0, init=False)
    _prompts: Trace = field(init=False)
    _fresh: npt.NDArray[np.void] = field(init=False)
    _fresh_prompts: npt.NDArray[np.void] = field(init=False)

    def __post_init__(self) -> None:
        self._prompts = replace(self.trace, output_tokens=np.ones_like(self.trace.output_tokens))
        self._fresh, self._fresh_prompts = fresh_requests(self.trace), fresh_requests(self._prompts)

    def fleet(self, counts: Counts) -> Fleet:
        """The fleet of these options; pools of one role are numbered if there are several."""
        counts = tuple((option, count) for option, count in counts if count > 0)
        pools = []
        for option, count in counts:
            alike = [other for other, _ in counts if other.role == option.role]
            suffix = f"-{alike.index(option)}" if len(alike) > 1 else ""
            pools.append(Pool(POOL_NAMES[option.role] + suffix, option.role, option.type, count))
        return Fleet(self.llm, tuple(pools), self.policies, self.network)

    @property
    def simulations(self) -> int:
        """How many different simulations were asked for (threads may have run one of them twice)."""
        return len(self._answers) + self._verdicts

    def holds(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether fleets keep the SLO, after any loss that must be survived."""
        return [all(self._simulated(left) for left in self._losses(counts)) for counts in fleets]

    def leads(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether prefill pools keep the limits on TTFT if every request leaves with its first token.

        Its answer bounds the prefill pool of a pair from below: hand-offs can only hold it up.
        """
        return [self._leads_alone(option, count - self.spare_workers) for ((option, count),) in fleets]

    def follows(self, fleets: Sequence[Counts]) -> list[bool]:
        """Whether decode pools keep the limits other than TTFT if every prompt arrives prefilled at once."""
        return [self._follows_alone(option, count - self.spare_workers) for ((option, count),) in fleets]

    def verdict(self, fleet: Fleet, *, record: bool) -> tuple[Simulation, Verdict]:
        """The whole simulation, to the end, with its judgement."""
        self._verdicts += 1
        simulation = simulate(fleet, self.trace, limits=self.slo.limits, record=record)
        return simulation, judge(simulation, self.slo)

    def _losses(self, counts: Counts) -> list[Counts]:
        """What is left of a fleet after losing the spare workers of one pool."""
        if not self.spare_workers:
            return [counts]
        return [
            (*counts[:i], (option, count - self.spare_workers), *counts[i + 1 :])
            for i, (option, count) in enumerate(counts)
            if count > 0
        ]

    def _simulated(self, counts: Counts) -> bool:
        roles = {option.role for option, count in counts if count > 0}
        if not roles or ("prefill" in roles) != ("decode" in roles):
            return False
        key = tuple((option.name, count) for option, count in counts if count > 0)
        return self._answer(key, lambda: self.fleet(counts), self.trace, self._fresh, self.slo)

    def _leads_alone(self, option: Option, count: int) -> bool:
        slo = Slo(tuple(limit for limit in self.slo.limits if limit.metric == "ttft"))

        def fleet() -> Fleet:
            return Fleet(self.llm, (Pool("pre", "mixed", option.type, count),), self.policies, self.network)

        key = ("leads", option.name, count)
        return count > 0 and self._answer(key, fleet, self._prompts, self._fresh_prompts, slo)

    def _follows_alone(self, option: Option, count: int) -> bool:
        slo = Slo(tuple(limit for limit in self.slo.limits if limit.metric != "ttft"))

        def fleet() -> Fleet:
            instant = WorkerType(option.type.gpu, 1, _INSTANT, 10**12, 8192, 256)
            pools = (Pool("pre", "prefill", instant, 1), Pool("dec", "decode", option.type, count))
            return Fleet(self.llm, pools, self.policies, _NO_LINK)

        key = ("follows", option.name, count)
        return count > 0 and self._answer(key, fleet, self.trace, self._fresh, slo)

    def _answer(
        self,
        key: tuple[object, ...],
        fleet: Callable[[], Fleet],
        trace: Trace,
        fresh: npt.NDArray[np.void],
        slo: Slo,
    ) -> bool:
        if key not in self._answers:
            simulation = keeps(fleet(), trace, slo.limits, fresh)
            self._answers[key] = simulation is not None and judge(simulation, slo, values=False).holds
        return self._answers[key]


def side_by_side(tasks: Sequence[Callable[[], None]]) -> None:
    """Run closures on all cores; the first exception is raised here."""
    if len(tasks) == 1:
        tasks[0]()
        return
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
