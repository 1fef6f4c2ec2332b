"""The result of a simulation: what became of every request, and what every worker did.

`planner/simulator/read_results.py` fills a `Simulation` from the records of the compiled engines, and
`planner/simulator/slo_verdict.py` judges it against an SLO.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.domain import Limit, selectors_of
from planner.simulator import layout
from planner.simulator.gap_counts import GapCounts
from planner.traffic.tasks import Tasks

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STATUS = ("finished", "rejected", "unfinished")  # In the order of layout.FINISHED, REJECTED, UNFINISHED.


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What happened to every request and worker. n requests, W workers, L limits, V windows, R recorded runs.

    Fields of requests are (n,), in the trace's order. Times are in seconds from the request's arrival, except
    `arrival_s`; they are NaN for what never happened. `queue_s` is the wait until it was first scheduled.
    `prefill_worker` and `decode_worker` are indices into `worker_names`, layout.NONE for no worker.

    `window_s` is the measured window, the part of the simulation that counts, without the warm-up; `end_s` is
    the end of the simulation. `counted` and `violations` are how many values each of the `limits` counted in
    it, and how many of them were above the limit; 0 for a metric that the kernel does not count. `counted_in`
    and `violations_in` are the same in each of the windows between `edges_s`, if there are any. `complete` is
    False if the simulation was stopped because a limit could no longer hold. `nominal_s` are the times at
    which requests would have arrived if no answer that a session waits for took any time.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    queue_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    tbt_max_s: Floats
    e2e_s: Floats
    prefill_worker: Ints
    decode_worker: Ints
    preemptions: Ints
    status: Ints  # An index into STATUS.
    worker_names: tuple[str, ...]
    worker_busy_s: Floats  # (W,)
    worker_steps: Ints  # (W,)
    worker_tokens: Floats  # (W,) Tokens through the dense layers.
    window_s: tuple[float, float]
    end_s: float
    limits: tuple[Limit, ...]
    violations: Ints  # (L,)
    counted: Ints  # (L,)
    complete: bool
    runs: npt.NDArray[np.void]  # (R,) layout.RUN, empty if not recorded.
    cached_tokens: Ints | None = None  # Found in a prefix cache at first admission; None without caches.
    tenant: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # An index into `tenants`.
    tenants: tuple[str, ...] = ()  # Empty if the trace names none.
    # An index into `adapters`; -1: the LLM alone.
    adapter: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    adapters: tuple[str, ...] = ()  # Empty without LoRA; numbers where they were drawn without names.
    tenant_weights: Floats = field(default_factory=lambda: np.zeros(0))  # (U,) by tenant.
    nominal_end_s: float = np.inf  # The last of `nominal_s`; infinite without sessions.
    # How much a prompt token and an output token count as service to a tenant (service_shares.py).
    token_weights: tuple[float, float] = (1.0, 1.0)
    # layout.PART: chunks of prompts and preemptions, by their step in `runs`; empty if not recorded.
    parts: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=layout.PART))
    reloaded_tokens: Ints | None = None  # Loaded from CPU memory at first admission; None without offload.
    disk_tokens: Ints | None = None  # How many of these came from the disk behind CPU memory.
    reload_s: Floats = field(default_factory=lambda: np.zeros(0))  # (n,) Seconds of waiting for that load.
    image_tokens: Ints | None = None  # Input tokens that an encoder makes of images; None if not recorded.
    nominal_s: Floats = field(default_factory=lambda: np.zeros(0))  # (n,)
    edges_s: Floats = field(default_factory=lambda: np.zeros(0))  # (V + 1,)
    counted_in: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # (L, V)
    violations_in: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # (L, V)
    # If a long trace (streaming_requests.py) was recorded: a histogram of all gaps, and start and end (S, 2)
    # of the parts of the simulation of which `runs` are kept.
    gaps: GapCounts | None = None
    sampled_s: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    tasks: Tasks | None = None  # Which requests belong to one piece of work; None without sessions.
    # (n,) an index into the selectors of `limits`, NONE for no class; empty where no limit is of a class.
    of_class: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def class_number(self, limit: Limit | None) -> int:
        """The number in `of_class` of the class to which one of the `limits` applies; layout.NONE for a limit
        on all requests, and without a limit.
        """
        if limit is None or limit.selector is None:
            return int(layout.NONE)
        return selectors_of(self.limits).index(limit.selector)

    def limited_requests(self, limit: Limit) -> npt.NDArray[np.bool_]:
        """Which requests (n,) a limit is about: those of its class, or all."""
        if limit.selector is None:
            return np.ones(len(self.arrival_s), dtype=bool)
        return np.asarray(self.of_class == self.class_number(limit))

    @property
    def served_tokens(self) -> tuple[int, int]:
        """The tokens of prompts and of outputs of the requests that finished."""
        is_served = self.status == layout.FINISHED
        return int(self.input_tokens[is_served].sum()), int(self.output_tokens[is_served].sum())

    @property
    def token_hit_frac(self) -> float | None:
        """The share of input tokens that were cached and not computed; None without prefix caches."""
        if self.cached_tokens is None:
            return None
        return float(self.cached_tokens.sum() / self.input_tokens.sum())

    @property
    def token_reload_frac(self) -> float | None:
        """The share of input tokens that came from CPU memory; None without such memory."""
        if self.reloaded_tokens is None:
            return None
        return float(self.reloaded_tokens.sum() / self.input_tokens.sum())

    @property
    def token_disk_frac(self) -> float | None:
        """The share of input tokens that came from a disk behind CPU memory; None without such memory."""
        if self.disk_tokens is None:
            return None
        return float(self.disk_tokens.sum() / self.input_tokens.sum())
