"""Simulates a day of several LLMs whose pools change and share one stock of GPUs.

`JointRuns` has the methods of `DayRuns` (day/search/day_runs.py), so that the search for the optimum
(day/search/day_optimum.py) works for several LLMs as for one. The pools of all LLMs, one LLM after another,
are the columns of one problem, and the windows of all LLMs are numbered in the same order. Each LLM is
simulated by itself, because LLMs share only GPUs and paid nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.day.search.day_runs import DayRun, DayRuns, step_edges_s
from planner.domain import ROUNDING
from planner.solvers.master import paid_usd_per_h
from planner.solvers.paid_work import LeastPaid
from planner.solvers.pool_sizes import DayTerms, Ints, billed_usd, lives_within_stock
from planner.units import HOUR_S

_EDGE_DECIMALS = 6  # Edges of windows [s] that are the same after rounding to these decimals are one edge.


def joint_terms(llm_terms: Sequence[DayTerms], stock: Mapping[str, int], step_s: float) -> DayTerms:
    """The day of all LLMs together: their pools, the stock of GPUs that they share, and steps of `step_s`
    that end with the longest traffic. The billing is that of the first LLM's terms.
    """
    last_s = max(float(terms.edges_s[-1]) for terms in llm_terms)
    edges_s = step_edges_s(last_s, step_s)
    pools = tuple(pool for terms in llm_terms for pool in terms.pools)
    return DayTerms(edges_s, pools, llm_terms[0].unit_s, dict(stock), llm_terms[0].is_paid_all_day)


class JointRuns:
    """Simulates the days of several LLMs with the sizes (T, P) of all P pools of all LLMs, in T steps.

    `llm_runs` simulates each LLM by itself, in the steps of `terms`, and without a stock, because the LLMs
    share the stock of `terms`. `columns` has, for each LLM, which of the P columns are its pools.
    """

    def __init__(self, llm_runs: Sequence[DayRuns], terms: DayTerms):
        self.terms = terms
        self.llm_runs = tuple(
            DayRuns(
                runs.fleet,
                runs.trace,
                runs.slo,
                runs.given_pools,
                replace(runs.terms, edges_s=terms.edges_s, stock={}),
            )
            for runs in llm_runs
        )
        counts = [len(runs.fleet.pools) for runs in llm_runs]
        self.columns = [
            range(end - count, end) for count, end in zip(counts, np.cumsum(counts).tolist(), strict=True)
        ]
        # For each window the number of its LLM, and its number among the windows of this LLM.
        self._llm_and_window = [
            (llm, own_window) for llm, runs in enumerate(llm_runs) for own_window in range(runs.window_count)
        ]
        # For each LLM the number of its first window.
        self._first_window = [0, *np.cumsum([runs.window_count for runs in llm_runs[:-1]]).tolist()]

    @property
    def window_count(self) -> int:
        """How many windows all LLMs have together."""
        return len(self._llm_and_window)

    @property
    def request_count(self) -> int:
        """How many requests all LLMs have together."""
        return sum(runs.request_count for runs in self.llm_runs)

    def own_steps(self, window: int) -> range:
        """The steps of a window, as in `DayRuns`."""
        llm, own_window = self._llm_and_window[window]
        return self.llm_runs[llm].own_steps(own_window)

    def later_steps(self, window: int) -> range:
        """The steps after a window that may still decide it, as in `DayRuns`."""
        llm, own_window = self._llm_and_window[window]
        return self.llm_runs[llm].later_steps(own_window)

    def pools_of(self, window: int) -> range:
        """The pools of the LLM to which a window belongs."""
        return self.columns[self._llm_and_window[window][0]]

    def is_first(self, window: int) -> bool:
        """Whether this is the first window of its LLM."""
        return self._llm_and_window[window][1] == 0

    def least_paid(self) -> LeastPaid:
        """A lower bound on the bill for all LLMs.

        Each LLM's work is done by its own workers, so the bounds of the LLMs add up. The nodes of the least
        workers of all pools are paid in any case. Where the most GPUs in use are paid all day, the bill is at
        least the cost per second of the busiest window, for the whole day. The LLMs' bounds for single
        stretches of the day do not add up, so the result has no stretches.
        """
        each_llm = [runs.least_paid(shares_nodes=True) for runs in self.llm_runs]
        least_usd_per_h = paid_usd_per_h(
            (pool.type, given.least)
            for runs in self.llm_runs
            for pool, given in zip(runs.fleet.pools, runs.given_pools, strict=True)
        )
        least_usd = least_usd_per_h * float(self.terms.edges_s[-1]) / HOUR_S * (1 - ROUNDING)
        total_usd = max(sum(llm.usd for llm in each_llm), least_usd)
        of_slo_usd = max(sum(llm.of_slo_usd for llm in each_llm), least_usd)
        if self.terms.is_paid_all_day:
            all_day_usd = _busiest_usd_per_s(each_llm) * float(self.terms.edges_s[-1])
            total_usd, of_slo_usd = max(total_usd, all_day_usd), max(of_slo_usd, all_day_usd)
        return LeastPaid(
            total_usd,
            of_slo_usd,
            edges_s=np.zeros(1),
            in_stretch_usd=np.zeros(0),
            from_stretch_usd=np.zeros(0),
        )

    def simulate_day(self, workers: Ints) -> DayRun:
        """Simulate each LLM with its own columns of `workers` (T, P): one bill for all, and one stock."""
        llm_days = [
            runs.simulate_day(np.ascontiguousarray(workers[:, columns.start : columns.stop]))
            for runs, columns in zip(self.llm_runs, self.columns, strict=True)
        ]
        lives = [
            (columns.start + span.pool, span.requested_s, span.gone_s)
            for day, columns in zip(llm_days, self.columns, strict=True)
            for span in day.run.spans
        ]
        numbered_days = zip(self._first_window, llm_days, strict=True)
        missed = [first + own_window for first, day in numbered_days for own_window in day.missed]
        return DayRun(
            workers,
            run=llm_days[0].run,  # The first LLM's, as DayRun defines it; `llm_days` has all.
            usd=billed_usd(self.terms, lives),
            missed=tuple(missed),
            holds=all(day.holds for day in llm_days),
            fits=lives_within_stock(self.terms, lives),
            llm_days=tuple(llm_days),
        )

    def misses_window(self, workers: Ints, window: int, first: int) -> bool:
        """Whether the window is missed with its LLM's columns of `workers` (T, P), as in `DayRuns`."""
        llm, own_window = self._llm_and_window[window]
        columns = self.columns[llm]
        own_workers = np.ascontiguousarray(workers[:, columns.start : columns.stop])
        return self.llm_runs[llm].misses_window(own_workers, own_window, first)


def _busiest_usd_per_s(each_llm: Sequence[LeastPaid]) -> float:
    """The most USD per second that must be paid in a window: for one LLM, or for all LLMs together in a
    window that all have. 0 if there are no windows.
    """
    # For each LLM the USD per second of each window, by its edges.
    llm_rates: list[dict[tuple[float, float], float]] = [
        {
            (round(begin_s, _EDGE_DECIMALS), round(end_s, _EDGE_DECIMALS)): float(usd) / (end_s - begin_s)
            for begin_s, end_s, usd in zip(
                llm.edges_s[:-1].tolist(), llm.edges_s[1:].tolist(), llm.in_stretch_usd, strict=True
            )
        }
        for llm in each_llm
    ]
    common = set.intersection(*(set(rates) for rates in llm_rates))
    alone = [rate for rates in llm_rates for rate in rates.values()]
    return max([*alone, *(sum(rates[window] for rates in llm_rates) for window in common)], default=0.0)
