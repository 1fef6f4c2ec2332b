"""How a given fleet stands: in how many futures it keeps the SLO, how far it holds, what it misses first.

What `plan` says of its answers (search/answers.py), of fleets that were not searched for. Fleets that are
held against each other are simulated in the same futures.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.documents.facts import KeptIn
from planner.documents.task import Task
from planner.domain import Slo
from planner.fleet import Fleet
from planner.search.answers import Test
from planner.search.futures import TESTED, Futures
from planner.search.headroom import ends
from planner.search.oracle import Ends, Oracle
from planner.traffic.trace import Trace

MOST_REQUESTS = 300_000  # of traffic: of more, whose futures take minutes, only what is written is simulated


@dataclass(frozen=True, slots=True)
class Standing:
    """`kept_in` is None where no futures are asked for, `ends` where the fleet misses what is written.
    `asked_frac` is the share of futures that `safety: kept_in` asks for.
    """

    kept_in: KeptIn | None
    ends: Ends | None
    asked_frac: float = 0.0

    @property
    def is_kept_in_enough(self) -> bool:
        """Of those that were simulated: no test, which takes as many as it needs."""
        return self.kept_in is not None and self.kept_in.kept_frac >= self.asked_frac - 1e-9


def standing(fleet: Fleet, requests: Trace, slo: Slo, futures: Futures | None) -> Standing | None:
    """Of a fleet on `requests`, drawn as they are asked for, and in `futures` where there are some; None
    where there are too many requests, or the fleet is given with disturbances or pinned prefixes, which no
    future has.
    """
    if len(requests) > MOST_REQUESTS or fleet.disturbances or fleet.pinned:
        return None
    oracle = Oracle(fleet.llm, requests, slo, fleet.network, fleet.policies)
    counts = oracle.counts(fleet)
    kept_in, asked_frac = None, 0.0
    if futures is not None and (safety := futures.task.safety) is not None:
        test, asked_frac = Test(oracle, futures, safety, 0, lambda: False), safety.kept_in_frac
        kept_in = test.of(counts, test.beside)
    return Standing(kept_in, ends(oracle, counts) if oracle.holds([counts])[0] else None, asked_frac)


def futures_for(task: Task, trace: Trace, seed: int) -> Futures | None:
    """Those in which fleets are held against each other; None with `safety: none`. `trace` is the whole one,
    as it was read.
    """
    return None if task.safety is None else Futures(task, trace, seed, TESTED, requests=len(trace))
