"""In scenarios, what keeps the SLO is taken to keep it with more workers, too.

A search for production simulates the same designs with one worker more, and one fewer, in dozens of
scenarios. A fifth to a quarter of all requests simulated there were of fleets of which a smaller one was
known to hold in the same scenario; none of these fleets missed the SLO (2026-11-28, the sample and both Azure
traces at 20 requests/s).

Searches do this, and the tests of fleets that must survive a loss: what a loss leaves of such a fleet is
often production, or production with more workers. That cheaper fleets fail is simulated, and so is every
scenario of production's own test, so neither "exact" nor "certified" rests on it. It is not done where a
worker more may hurt (`may_take_for_granted`).
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
    """Whether more workers are taken to keep what fewer keep. With prefix caches or adapters they are not,
    because each worker then sees fewer of the requests that share something; nor in sessions, where an answer
    that comes sooner brings the next request sooner; nor where it matters which workers share a node.
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

    `_known` has for each design (worker types with their roles, and all that a simulation reads beside the
    numbers of workers) these numbers, each with the task that learned of it. Tasks of a wave do not see what
    the others learn, because that depends on which of them ends first.
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
