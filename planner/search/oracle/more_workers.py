"""A rule for scenarios: if a fleet keeps the SLO, the same fleet with more workers is assumed to keep it too.

A search for production simulates the same designs with one worker more, and one fewer, in dozens of
scenarios. A fifth to a quarter of all simulated requests were for fleets of which a smaller one was known to
hold in the same scenario; none of these fleets missed the SLO (2026-11-28, the sample and both Azure traces
at 20 requests/s).

The rule is used by searches, and by tests of fleets that must survive a loss: the workers that remain after a
loss are often the fleet of production, or that fleet with more workers. Neither "exact" nor "certified" rests
on the rule, because failures of cheaper fleets and all scenarios of production's own test are simulated.
`may_take_for_granted` says where the rule is not used.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from planner.fleet import Network, Policies
from planner.search.oracle.deterministic_parallel import WaveTask, current_task, is_known_here
from planner.traffic.trace import Trace

# On shorter traces more workers do hurt now and then: 11 of 511 pairs of fleets on traces of up to 400
# requests, none of 135 on longer ones (`python benchmarks/brute_force.py --rates`, 2026-11-20).
LEAST_REQUESTS = 1_000


def may_take_for_granted(trace: Trace, policies: Policies, network: Network) -> bool:
    """Whether the rule is used. More workers may hurt with prefix caches or adapters, because each worker
    then gets fewer of the requests that share one; in sessions, because an earlier answer brings the next
    request earlier; and where it matters which workers share a node.
    """
    return (
        len(trace) >= LEAST_REQUESTS
        and not policies.prefix_cache
        and not trace.after.size
        and not trace.adapters
        and network.topology is None
    )


@dataclass(slots=True, eq=False)
class KeptFleets:
    """The fleets that keep the SLO in one scenario.

    `_known` has, for each design, the counts of workers of its kept fleets, each with the task that learned
    of it. A design is everything that a simulation reads beside the counts: worker types, roles and more.
    Tasks of a wave do not see what other tasks of it learn, because that depends on which task ends first.
    """

    _known: dict[Hashable, list[tuple[tuple[int, ...], WaveTask | None]]] = field(default_factory=dict)

    def has_smaller(self, design: Hashable, counts: tuple[int, ...]) -> bool:
        """Whether a fleet of this design is known to hold that has no more workers in any pool."""
        return any(
            is_known_here(learned_by) and all(map(int.__le__, smaller, counts))
            for smaller, learned_by in tuple(self._known.get(design, ()))
        )

    def add(self, design: Hashable, counts: tuple[int, ...]) -> None:
        """Remember that this fleet holds."""
        self._known.setdefault(design, []).append((counts, current_task()))
