"""Facts about a plan, as values: why to believe it, and what a reader must know of it.

The search computes these facts, documents/certificate.py writes them to certificate.json, and only
reports/fact_sentences.py makes sentences of them, and of the names in a Literal. The `kind` of a fact in the
file is the name of its class: `LimitBinds` is "limit-binds". If a fact has a `unit`, its costs and savings
are in that unit, the one of the plan's objective (USD/h, GPUs, ...).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.domain import FleetLimit, Limit
from planner.errors import Change, LeastWorker, MostKept
from planner.solvers.repeats import Decision, Repeats

# The keys that older versions of certificate.json have for these fields; such files are still read.
OLDER_KEYS = {
    "scenario_count": "futures",
    "scenarios_drawn": "futures",
    "routing_names": "told",
    "sentence": "said",
    "tightest": "decides",
    "downscale": "one_in",
    "half_width": "half",
}

# -- results of a simulation -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class At:
    """One line of an SLO in a simulation: the value of its percentile, and the share of values within the
    limit.

    Both are of the window `window_s`, or of everything that was measured (None).
    """

    limit: Limit
    value_s: float
    kept_frac: float
    window_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of requests that keep all limits at once, and the share that the SLO needs.

    Requests are those of the window `window_s`, or all that were measured (None).
    """

    frac: float
    needed_frac: float
    window_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """A failed backlog test (solvers/required_work.py): only the share `patient_frac` of the last requests
    waited no longer than `patience_s`.
    """

    patient_frac: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class ShareMissed:
    """The tenant that got the least part of its fair share of service while its work waited, and when."""

    tenant: str
    share_frac: float
    needed_frac: float
    window_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Every line of the SLO that a simulated fleet misses; all fields are empty if it keeps the SLO."""

    missed: tuple[At, ...] = ()
    attainment: Attainment | None = None
    backlog: Backlog | None = None
    shares: tuple[ShareMissed, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the fleet keeps the SLO."""
        return not self.missed and self.attainment is None and self.backlog is None and not self.shares


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The planned fleet without one worker of one pool: whether it `holds` the SLO, and how it fails.

    `outcome` is None if the pool's role has no worker left. With `on_other_draw` the fleet fails only on
    another draw or rate of the traffic, with `after_losses` only after the losses that a fleet must survive.
    """

    pool: str
    worker_type: str
    holds: bool
    outcome: Outcome | None = None
    on_other_draw: bool = False
    after_losses: bool = False


# -- what binds, and what more would save ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LimitBinds:
    """A limit of the SLO binds a pool: were it `value_s`, one worker fewer would do and save `saves`."""

    limit: Limit
    pool: str
    worker_type: str
    value_s: float
    saves: float
    unit: str


@dataclass(frozen=True, slots=True)
class CapacityBinds:
    """A pool with one worker fewer misses more than one limit."""

    neighbour: Neighbour


@dataclass(frozen=True, slots=True)
class UsedUp:
    """A limit of which the fleet takes `used` of `amount`; the smallest worker takes more than is left."""

    limit: FleetLimit
    used: float
    amount: float


@dataclass(frozen=True, slots=True)
class BoundPrice:
    """`step` more of a limit lowers the relaxed lower bound by `saves`; this is the limit's dual value."""

    limit: FleetLimit
    step: float
    saves: float
    unit: str


@dataclass(frozen=True, slots=True)
class PromisedAt:
    """The value of a percentile in the plan's simulation, whether or not its limit binds."""

    limit: Limit
    value_s: float


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """`planned` is what the plan costs, `value` what the best fleet for a changed question would.

    `value` is None if no such fleet was found.
    """

    change: str  # For instance "ttft p90 200 ms tighter".
    planned: float
    value: float | None
    unit: str
    fleet: str  # Empty if the objective does not change.


@dataclass(frozen=True, slots=True)
class LongerSteps:
    """The plan if every step takes `error_frac` longer, for step times without a measured spread."""

    error_frac: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class UpperEnds:
    """The plan if step times lie at the upper ends of their spread.

    `prefill` and `decode` are factors on step times, the largest of the plan's worker types.
    """

    prefill: float
    decode: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StepSpread:
    """The factors (measured over predicted step times) between which 90 % of runs lay.

    `is_own`: these were runs of this engine.
    """

    worker: str
    prefill: tuple[float, float]
    decode: tuple[float, float]
    source: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class Robustness:
    """What a plan must withstand by `robust` of slo.yaml: longer steps, more traffic.

    `rates` is the number of rates at which traffic was sampled, None for one. With `spread`, step times are
    at the ends of their measured spread.
    """

    step_times_frac: float
    traffic_frac: float
    rates: int | None
    spread: bool = False


@dataclass(frozen=True, slots=True)
class InsuranceCosts:
    """The objective of a robust plan, and of the cheapest plan for the expected case (`expected`).

    `expected` is None if no such plan was found in time.
    """

    robustness: Robustness
    value: float
    expected: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class AsExpected:
    """The simulated percentiles of a robust plan if everything comes as expected."""

    values: tuple[At, ...]


@dataclass(frozen=True, slots=True)
class ExpectedMissed:
    """A robust plan misses the SLO even in the expected case; `outcome` is None if not simulated."""

    robustness: Robustness
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class NoneForExpected:
    """No fleet was found for the expected case; `error` is the message of that search."""

    robustness: Robustness
    error: str


@dataclass(frozen=True, slots=True)
class SpotSpare:
    """At most `down` spot workers of a pool are down at once, except for `risk_frac` of the time."""

    pool: str
    workers: int
    down: int
    risk_frac: float
    interruptions_per_h: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class SpotGone:
    """The plan if as many spot workers as it tolerates leave at once in the middle of the trace."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CachesSave:
    """What prefix caches save; `_without` fields are None if no fleet without caches keeps the SLO."""

    routing: str
    value: float
    gpus: int
    value_without: float | None
    gpus_without: int | None
    unit: str


@dataclass(frozen=True, slots=True)
class PolicyGains:
    """What policies save: the best fleet with them against the best before, on paper or in production."""

    label: str
    value: float
    saves: float
    unit: str
    of: AnswerName


@dataclass(frozen=True, slots=True)
class ClassAlone:
    """The value, in the objective's unit, of a fleet for class `name` of requests alone."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class SharingSaves:
    """What one fleet for all classes of the SLO saves against a fleet for each, whose values are `alone`."""

    value: float
    saves: float
    alone: tuple[ClassAlone, ...]
    unit: str


@dataclass(frozen=True, slots=True)
class SeparateKept:
    """The values `alone` of fleets for production of each class, where none within the limits was found for
    all classes together.
    """

    alone: tuple[ClassAlone, ...]
    unit: str


@dataclass(frozen=True, slots=True)
class NotShared:
    """One fleet was not compared with a fleet for each class: `why`, or none was found for class `name`."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class PoliciesRaced:
    """Policies compared on fleets near the best one.

    The policies in `nothing` save nothing; `rivals` save less than the policies of the plan; `unasked` were
    not compared, because they do not go with that fleet or the effort was spent.
    """

    nothing: tuple[str, ...]
    rivals: tuple[str, ...]
    unasked: tuple[str, ...]
    of: AnswerName


@dataclass(frozen=True, slots=True)
class PinnedReplicas:
    """The best fleet with pinned prefixes beside the best fleet with LRU caches alone, both simulated.

    `hit_frac` is the share of input tokens that hit a cache, `pinned_hit_frac` that of those in pinned
    prefixes.
    """

    is_chosen: bool
    value: float
    gpus: int
    pinned_hit_frac: float
    hit_frac: float
    routing: str
    value_lru: float
    gpus_lru: int
    hit_frac_lru: float
    unit: str


@dataclass(frozen=True, slots=True)
class PinsPlaced:
    """How evenly a placement of pinned prefixes spreads a pool's work over its `workers`.

    A load is the seconds of work per second of the busiest worker (solvers/prefix_replication.py).

    `load` is that of the plan's placement, `quick_load` that of the heuristic which the search applies to
    every fleet, `best_load` the least found. No placement is below `bound`; `gap_frac` is the share of `load`
    above it. The plan keeps the quick placement unless the best one simulates better. If another routing is
    chosen (`is_chosen` false), the figures are of the best fleet on paper with pinned prefixes.
    """

    is_chosen: bool
    pool: str
    workers: int
    load: float
    quick_load: float
    best_load: float
    bound: float
    gap_frac: float


@dataclass(frozen=True, slots=True)
class WorkerMore:
    """The plan with one more worker in a pool, which may lower the hit rate of every cache."""

    pool: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GivesWay:
    """An LLM whose fleet costs `value`: `more` than if this LLM had the whole stock alone."""

    llm: str
    value: float
    more: float
    unit: str


@dataclass(frozen=True, slots=True)
class NodesFilled:
    """What lowers the bill of several LLMs, as whole nodes are paid: all are planned `without` these GPUs,
    and with at most the amounts `on` of others. If both are empty, each LLM has nodes of its own.

    `usd_per_h` is the bill, and `with_loss_usd_per_h` that with a loss (None: no such fleet is known). Fields
    with `was_` are the bills if every GPU may be used and the least price by the GPU decides.
    """

    without: tuple[str, ...]
    usd_per_h: float
    with_loss_usd_per_h: float | None
    was_usd_per_h: float
    was_with_loss_usd_per_h: float | None
    on: tuple[Remainder, ...] = ()


@dataclass(frozen=True, slots=True)
class ProductionShared:
    """How the production fleets of several LLMs were chosen.

    With `is_each` every LLM has the fleet that it would have alone, and together these fit the limits.
    Otherwise they were chosen jointly in `tries` searches, one more each time that fleets failed their test.
    The last search took `rounds` of the master problem, and came to its end if it `is_exact`.
    """

    is_each: bool
    rounds: int
    is_exact: bool
    tries: int


@dataclass(frozen=True, slots=True)
class MoreSaves:
    """Raising a shared limit from `amount` to `enough` saves `saves`; without the limit it would be
    `saves_most`.

    With `is_least` no smaller raise saves anything; otherwise there was no time to find out.
    """

    limit: FleetLimit
    amount: float
    enough: float
    saves: float
    saves_most: float
    unit: str
    is_least: bool


@dataclass(frozen=True, slots=True)
class MoreSavesNothing:
    """Raising this shared limit alone saves nothing, or (not `is_known`) there was no time to find out."""

    limit: FleetLimit
    is_known: bool


FindingName = Literal["caches-unused", "nothing-drawn", "no-shared-limit"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding that needs no figures."""

    name: FindingName


# -- what is taken for granted -----------------------------------------------------------------------------

Granted = Literal[
    "monotonicity",
    "ttft-ends-with-prefill",
    "first-token-of-decode",
    "default-link",
    "steady-state",
    "sessions-wait",
    "sessions-given-up",
    "one-budget-per-role",
    "board-power",
    "first-use-of-blocks",
    "own-blocks-alone",
    "cold-caches",
    "pins-placed-quickly",
    "no-shared-workers",
    "level0-of-each",
    "bounds-add-up",
]


@dataclass(frozen=True, slots=True)
class Assumption:
    """An assumption that needs no figures."""

    name: Granted


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The sources of step times, each in words."""

    bases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostOverheads:
    """Seconds that the host adds to each step, one value per worker type."""

    overheads_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EngineModelled:
    """The simulated engine and version, and the source of its constants."""

    engine: str
    basis: str


@dataclass(frozen=True, slots=True)
class UncheckedEngine:
    """An engine whose behaviour has not been compared with the engine simulated in its place."""

    engine: str


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of a worker type: the method, how many tokens, and how many tokens a step is assumed to
    yield. One pass of the drafter takes `draft_frac` of a step of the LLM plus `draft_s`.
    """

    worker: str
    method: str
    tokens: int
    mean_tokens: float
    draft_frac: float
    draft_s: float
    basis: str


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA on a worker type: vLLM's settings, the bytes of all adapter slots on one GPU, and what takes time.

    `step_s` is what one token with an adapter adds to a step. An adapter is loaded into a slot in `load_s`
    from the host's memory, and into that memory in `disk_s`. With `drawn` the trace names no adapters, so
    they are drawn at random.
    """

    worker: str
    adapters: int
    max_loras: int
    max_rank: int
    max_cpu_loras: int
    slot_bytes: float
    step_s: float
    load_s: float
    disk_s: float
    drawn: bool


@dataclass(frozen=True, slots=True)
class Offloaded:
    """KV blocks of a worker type in CPU memory: tokens there and on its GPUs, and the time to load 1000
    tokens.

    Memory and bandwidth are one GPU's share; if the store `is_shared`, they are those of the one store of all
    workers. The `_frac` fields are shares of all prompt tokens.
    """

    worker: str
    memory_tokens: int
    kv_tokens: int
    gpu_bytes: float
    gpu_bytes_per_s: float
    thousand_tokens_s: float
    hit_frac: float
    reload_frac: float
    computed_frac: float
    reload_s: float  # Time that all requests together waited for loads.
    is_shared: bool = False
    disk_bytes: float = 0.0  # One GPU's share of a disk behind the memory.
    disk_frac: float = 0.0  # What share of reloaded tokens came from the disk.


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How engines batch and how requests reach them; `queue_window_s` is None for queues that do not age."""

    max_num_seqs: tuple[int, ...]
    prefix_cache: bool
    queue: str
    queue_window_s: float | None
    routing: str


@dataclass(frozen=True, slots=True)
class KvLink:
    """The link that carries KV blocks from prefill to decode workers; `transfer` as in `fleet.Network`."""

    bandwidth_bytes_per_s: float
    transfer: str


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """The length of the measured window, in seconds and in residence times (the mean E2E of a request)."""

    window_s: float
    residences: float


@dataclass(frozen=True, slots=True)
class ObligedWork:
    """The work that the lower bound counts, because the SLO requires it.

    Counted are all work of the share `whole_frac` of requests, done at most `whole_after_s` after the end of
    the trace, and only the prefill of the share `prefill_frac`. With `tail`, all work of half of the requests
    that arrive in the last tenth of the trace counts too (solvers/required_work.py says why).
    """

    whole_frac: float
    whole_after_s: float
    prefill_frac: float
    tail: bool


@dataclass(frozen=True, slots=True)
class SmallCaches:
    """Worker types whose cache cannot hold the longest request: only the bound admits them."""

    workers: tuple[str, ...]
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class UncheckedLeftOut:
    """GPUs of the catalog that were not considered, because their step times are estimates."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpusConsidered:
    """The GPUs of the catalog that were considered because the question names none: those with measured step
    times of this LLM, and those with estimated ones (if none has measured ones, or the question has their
    price).
    """

    measured: tuple[str, ...]
    estimated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SmallWorker:
    """The largest worker of a GPU: room for `kv_tokens` beside the weights, 0 where these do not fit."""

    label: str
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class GpusTooSmall:
    """GPUs that were not considered, as no worker on them holds the LLM's weights and the longest request.

    The question names no GPUs, so all of the catalog were candidates.
    """

    weight_bytes: float
    longest_tokens: int
    workers: tuple[SmallWorker, ...]


@dataclass(frozen=True, slots=True)
class PrefixesUncounted:
    """The trace says which prompts share a prefix, but the plan uses no prefix cache. `alike_frac` of the
    input tokens repeat the beginning of an earlier prompt.
    """

    alike_frac: float


@dataclass(frozen=True, slots=True)
class NotOffered:
    """GPUs that were not considered, because the chosen provider has no price of them for the chosen term."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ElectricityCounted:
    """Prices include electricity at provisioned power: that of "owned" GPUs alone, or of "all"."""

    usd_per_kwh: float
    pue: float
    of: str


@dataclass(frozen=True, slots=True)
class SloInSeconds:
    """A relative SLO was converted to seconds, with an idle worker of this kind as the reference."""

    gpu: str
    tp: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """The amount that is left of a limit."""

    limit: FleetLimit
    amount: float


@dataclass(frozen=True, slots=True)
class OthersLeave:
    """What the fleets of the other LLMs leave of each shared limit for this one."""

    left: tuple[Remainder, ...]


PruningRule = Literal["more-mixed", "more-decode", "leads", "follows", "seats", "link", "raced"]


@dataclass(frozen=True, slots=True)
class RuleTest:
    """Tests of a pruning rule: it hid a cheaper fleet in `failed` of our `tests`.

    The traces had at most `most_requests` and more than `least_requests` requests (None: no such bound). With
    `of_pools`, `failed` counts tests in which the rule was false for a single pool; no fleet was searched.
    """

    failed: int
    tests: int
    most_requests: int | None = None
    least_requests: int | None = None
    of_pools: bool = False


@dataclass(frozen=True, slots=True)
class Assumed:
    """The pruning rule `name` of search/level0/pruning_rules.py.

    It was false in `failed` of `compared` comparisons on this traffic; `tested` has our own tests of it.
    """

    name: PruningRule
    failed: int
    compared: int
    tested: tuple[RuleTest, ...]


# -- what a reader must know first -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfTraffic:
    """A doubt that arose when the traffic or the question was read, as a sentence for the reader."""

    sentence: str


@dataclass(frozen=True, slots=True)
class LateRequests:
    """The share of measured requests that exceed a limit (for tbt by their longest gap), and the longest."""

    limit: Limit
    late_frac: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class NodesBeyondStock:
    """The fewest nodes are within the stock, but the network's topology places the workers on more."""

    gpu: str
    nodes: int
    gpus_per_node: int
    stock_gpus: int


@dataclass(frozen=True, slots=True)
class OwnedUnused:
    """The plan rents GPUs while `unused` of the `owned` GPUs of this type do no work."""

    gpu: str
    unused: int
    owned: int


@dataclass(frozen=True, slots=True)
class FewKeepAll:
    """Every limit holds, yet few requests keep all of them; `late` has the limits that the others exceed."""

    attainment_frac: float
    late: tuple[LateRequests, ...]


@dataclass(frozen=True, slots=True)
class WorstHour:
    """The value of each limit in its worst hour, for a plan whose SLO is of the whole trace only.

    If a limit is missed in some hour, `holding` is a multiple of the plan's fleet that keeps every hour,
    given with its cost and the plan's. It is empty if such a fleet exceeds the limits or time ran out.
    """

    hours: tuple[At, ...]
    holding: tuple[Workers, ...] = ()
    holding_usd_per_h: float | None = None
    planned_usd_per_h: float | None = None

    @property
    def missed(self) -> tuple[At, ...]:
        """The limits that are missed in their worst hour."""
        return tuple(row for row in self.hours if row.value_s > row.limit.limit_s)


@dataclass(frozen=True, slots=True)
class OverTheWhole:
    """A long trace was planned on a part of it, after `attempts` choices of that part.

    `outcome` is of the plan on all requests, None if there was no time to simulate it. `smaller` is a cheaper
    fleet that also keeps the SLO over the whole trace.
    """

    requests: int
    part_requests: int
    part_from_s: float
    part_s: float
    attempts: int
    outcome: Outcome | None = None
    smaller: tuple[Workers, ...] = ()
    smaller_usd_per_h: float | None = None
    planned_usd_per_h: float | None = None


@dataclass(frozen=True, slots=True)
class ShortTrace:
    """The trace covers too few mean residence times of a request."""

    window: MeasuredWindow
    enough: int


@dataclass(frozen=True, slots=True)
class OneTraceRedrawn:
    """All scenarios are drawn from one trace that is short, or whose quarters differ.

    `prompts_frac` and `outputs_frac` are the largest distances (Kolmogorov's D) of two quarters' lengths, 0
    if they are alike. Each scenario has `growth_frac` more traffic.
    """

    duration_s: float
    is_short: bool
    prompts_frac: float
    outputs_frac: float
    growth_frac: float = 0.0


@dataclass(frozen=True, slots=True)
class GuessedSteps:
    """No measurement supports step times of a worker on `tp` of these GPUs; `basis` says what they are."""

    gpu: str
    tp: int
    basis: str


@dataclass(frozen=True, slots=True)
class RooflineWon:
    """A fleet on `gpus`, whose step times are a roofline, is the cheapest, though kernels of this LLM were
    measured on `measured`, which the question allows too. A GPU that is in both is named with its
    tensor-parallel degree: "h100-80g tp1".
    """

    gpus: tuple[str, ...]
    measured: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NearestEngine:
    """A version of an engine without constants of its own; those of the nearest one (`basis`) are used."""

    engine: str
    basis: str


@dataclass(frozen=True, slots=True)
class OldPrices:
    """Prices listed more than `enough_days` ago; the oldest was listed on `date`, `days` ago."""

    gpus: tuple[str, ...]
    date: str
    days: int
    enough_days: int


LeftOut = Literal[
    "neighbours",
    "one-more",
    "pinned-replicas",
    "longer-steps",
    "expected",
    "longest-ttft",
    "shortest-first",
    "spot-gone",
    "other-draws",
    "more-draws",
    "histories",
    "hours",
    "routers",
]


@dataclass(frozen=True, slots=True)
class NotSimulated:
    """Evidence that was left out because the work that a plan may take was used up."""

    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class EndedByClock:
    """The limit in wall-clock time ended the search before its limit of work did."""


@dataclass(frozen=True, slots=True)
class MissedOnDraws:
    """The SLO is missed on some of these simulated runs."""

    repeats: Repeats


@dataclass(frozen=True, slots=True)
class WorkerMoreFails:
    """The plan misses the SLO with one worker more in a pool."""

    pool: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DyingAway:
    """The share `late_frac` of requests arrives after the end of a run in which answers take no time.

    By then sessions only go on and none begins, so the load dies away.
    """

    late_frac: float


@dataclass(frozen=True, slots=True)
class EncoderUntimed:
    """Prompts hold image tokens, `image_frac` of all prompt tokens, but our steps leave out the encoder's
    time.

    The encoder takes at least `encoder_s` for the mean request with images, on one such GPU at its peak.
    """

    image_frac: float
    image_tokens: float  # The mean of requests with images.
    encoder_s: float
    gpu: str


Caution = Literal[
    "spot-nodes",
    "copies-share-prefixes",
    "prompts-are-text",
    "requests-bring-priority",
    "prompts-first",
    "only-ends-kept",
    "compressed-ends-kept",
    "keep-alives-uncounted",
    "no-queue-by-tenants",
]


@dataclass(frozen=True, slots=True)
class Cautioned:
    """A warning that needs no figures."""

    name: Caution


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU costs and the source of that price; a price that the user gives has no date."""

    gpu: str
    usd_per_h: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Commitment:
    """What the plan's fleet costs under one term: "on-demand", "reserved-1y" or "reserved-3y".

    The term pays off if GPUs would be rented on demand for more than `needed_frac` of the hours (None if
    on-demand costs nothing). `sources` name the provider of each price. GPUs `at_planned` have no such term
    and count at the planned price.
    """

    term: str
    usd_per_h: float
    needed_frac: float | None
    sources: tuple[str, ...]
    at_planned: tuple[str, ...]


# Headroom is bisected to 0.5 %, up to twice the traffic or twice the step times. Both were set by hand: a
# reader needs no finer figure, and a fleet that stands twice as much is far from any limit.
HEADROOM_STEP_FRAC, HEADROOM_MOST_FRAC = 0.005, 1.0


@dataclass(frozen=True, slots=True)
class Headroom:
    """How far a plan's fleet keeps the SLO beyond the question: how much longer steps, how much more traffic.

    Both shares are exact to HEADROOM_STEP_FRAC, and HEADROOM_MOST_FRAC at most. The fleet keeps the SLO at
    every share up to them that was simulated.
    """

    steps_frac: float
    traffic_frac: float


# -- the three answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workers:
    """A pool of a fleet, as it is bought."""

    role: str
    gpu: str
    tp: int
    pp: int
    count: int
    gpus: int  # GPUs of all workers.
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class KeptIn:
    """The SLO was kept in `kept` of `scenario_count` scenarios. The fleet on paper is judged in the search's
    scenarios, every other fleet in those of a test, which the search has not seen.

    With `after_loss` a scenario counts only if the SLO is kept without any one worker.

    `decision` is that of the sequential test on the share: "holds" rejects, with 95 % confidence, that it is
    at most `least_frac`; "fails" rejects that it is at least `most_frac`.
    """

    kept: int
    scenario_count: int
    least_frac: float
    most_frac: float
    decision: Decision
    after_loss: bool = False

    @property
    def kept_frac(self) -> float:
        """The share of scenarios in which the SLO was kept; 0 without scenarios."""
        return self.kept / self.scenario_count if self.scenario_count else 0.0


AnswerName = Literal["on-paper", "production", "with-a-loss"]
DrawnBy = Literal["copies", "part", "blocks", "sessions", "description"]


@dataclass(frozen=True, slots=True)
class Answered:
    """The cheapest fleet that keeps the SLO: on the traffic as written ("on-paper"), in the wanted share of
    scenarios ("production"), or after the loss of any one worker ("with-a-loss").

    `value` is in the objective's unit, None if no fleet within the limits was found. `headroom` is on the
    traffic as written, after the loss if there is one; `breaks_by_...` are the first limits missed beyond it.
    """

    name: AnswerName
    workers: tuple[Workers, ...]
    value: float | None
    usd_per_h: float | None
    kept_in: KeptIn | None
    headroom: Headroom | None = None
    breaks_by_traffic: tuple[Limit, ...] = ()
    breaks_by_steps: tuple[Limit, ...] = ()
    paid_usd_per_h: float | None = None  # Whole nodes where GPUs are sold so; usd_per_h counts GPUs.


@dataclass(frozen=True, slots=True)
class CheaperMiss:
    """How level-0 fleets fail that are cheaper than the production fleet by more than `less_frac`.

    `cheaper` such fleets have enough workers for the work (None: too many to count). `simulated` of these
    were simulated, and each misses the SLO on the traffic as written, or in more than `may_miss` of
    `scenarios`. `is_exact`: all were simulated.
    """

    less_frac: float
    scenarios: int
    may_miss: int
    cheaper: int | None
    simulated: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class FewerTested:
    """The production fleet with one worker fewer (`counts` per pool), which did not pass its test.

    The SLO has to be kept in `asked_frac` of scenarios; a fleet that keeps hardly more does not pass either.
    """

    counts: tuple[int, ...]
    kept_in: KeptIn
    asked_frac: float


@dataclass(frozen=True, slots=True)
class ScenariosDrawn:
    """How scenarios differ: how traffic is drawn anew, its growth, and whether all step times have a spread.

    Traffic is drawn from "copies" of the trace laid over each other, a "part" of it, "blocks" of it of
    `block_s`, its "sessions" where they begin together, or a "description" that is drawn again.
    """

    traffic: DrawnBy
    block_s: float
    growth_frac: float
    have_spread: bool
    searched: int  # Scenarios that the search has seen.
    downscale: int = 1  # The scale of those simulations: they keep one request and one worker of this many.
    prefix_drift_frac: float = 0.0  # The share of the popularity of prefixes that moves to other prefixes.
    cheaper: CheaperMiss | None = None  # None: none was looked at, as with a scale model (scale_model.py).
    fewer: FewerTested | None = None  # None: no such fleet was tested.


# -- under the routers of deployment targets ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnderRouter:
    """The plan's fleet on its traffic, with the router of a deployment target.

    `routing_names` are the target's own names of its routing policies, for arrivals and, for pairs, for
    hand-offs. `simulated` are our routings in their place, and `differs` says how the two are unlike.
    `tightest` is the limit that is missed by most, or, if none is missed, the one nearest to it; None if no
    limit has a figure. `kept_in` counts the scenarios of the plan's own test; it is None without such a test,
    or if the SLO is missed on the traffic as written. `passes`: the SLO is kept in enough scenarios.
    `needs_priority`: every request must bring the priority by which its prompt is queued.
    """

    target: str
    router: str
    routing_names: tuple[str, ...]
    simulated: tuple[str, ...]
    differs: tuple[str, ...]
    tightest: At | None
    outcome: Outcome
    kept_in: KeptIn | None = None
    passes: bool = True
    needs_priority: bool = False

    @property
    def keeps(self) -> bool:
        """Whether the plan is kept with this router, as written and in enough scenarios."""
        return self.outcome.holds and self.passes


@dataclass(frozen=True, slots=True)
class RoutersMiss:
    """The routers of targets under which the plan's fleet misses the SLO."""

    missed: tuple[UnderRouter, ...]


@dataclass(frozen=True, slots=True)
class ForTargets:
    """The fleet and its cost that `plan` finds with `deploy:` set to one of these targets.

    The routers of the targets are alike. `status` is that of the plan; without a plan it is "infeasible",
    "not found" (nothing proves that there is none) or "not possible". `usd_per_h` is None without a plan, and
    if none of the targets can run the fleet.
    """

    targets: tuple[str, ...]
    status: str
    workers: tuple[Workers, ...]
    usd_per_h: float | None


@dataclass(frozen=True, slots=True)
class ServicesApart:
    """The target creates `services` services with an address each; the plan was simulated with one router."""

    target: str
    services: int


@dataclass(frozen=True, slots=True)
class NotDeployable:
    """The requested target cannot run the plan; `because` is the target's own reason."""

    target: str
    because: str


# -- what cannot beat the plan -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvHeadsNotStored:
    """Workers of this TP degree share no KV blocks in a store with those of others (kv_offload.is_common)."""

    kv_heads: int
    tp: int


@dataclass(frozen=True, slots=True)
class HeadsNotShared:
    """Attention heads do not split evenly over `tp` GPUs."""

    heads: int
    tp: int


@dataclass(frozen=True, slots=True)
class LayersNotCut:
    """The LLM has fewer layers than a pipeline would have stages."""

    layers: int
    stages: int


@dataclass(frozen=True, slots=True)
class RanksNotOnNodes:
    """This number of data-parallel ranks cannot be spread over several nodes; `why` as a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class NotSimulatedWith:
    """Workers that are not simulated with the policies; `why` as a sentence."""

    why: str


@dataclass(frozen=True, slots=True)
class WeightsTooLarge:
    """The part of the weights that one GPU would hold does not fit into its memory."""

    weight_bytes: float


@dataclass(frozen=True, slots=True)
class NoRoomForKv:
    """The weights and the activations of a full step leave no memory for the KV cache."""


@dataclass(frozen=True, slots=True)
class RequestTooLong:
    """The longest request of the traffic does not fit into a worker's KV cache."""

    kv_tokens: int
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class WorkersMissing:
    """The work alone needs at least `least` workers, more than there are."""

    least: int
    available: float


@dataclass(frozen=True, slots=True)
class WorkTooDear:
    """The work alone needs workers that cost at least as much as the best fleet."""

    least: int
    least_value: float
    best_value: float


@dataclass(frozen=True, slots=True)
class WorkersFail:
    """This many workers fail in simulation, and `more` says why no larger number was simulated.

    A larger number was not tried, not available, or at least as dear as the best fleet.
    """

    workers: int
    more: Literal["not-tried", "not-available", "too-dear"]


@dataclass(frozen=True, slots=True)
class AloneFails:
    """This many workers of a pool fail even if the other pool were infinitely fast."""

    role: Literal["prefill", "decode"]
    workers: int


@dataclass(frozen=True, slots=True)
class SeatsTooFew:
    """This many decode workers fall behind: even with full batches they make fewer tokens than are needed."""

    workers: int


@dataclass(frozen=True, slots=True)
class PairFails:
    """A pair fails with this many prefill workers, and larger numbers were not tried."""

    prefill_workers: int


@dataclass(frozen=True, slots=True)
class NoDecodeBeside:
    """With this many prefill workers or fewer, no cheaper number of decode workers keeps the SLO."""

    prefill_workers: int


@dataclass(frozen=True, slots=True)
class LinkTooSlow:
    """KV blocks need more bandwidth than the link has.

    `earlier`: that is so even without the hand-offs of the last tenth of the trace.
    """

    needed_bytes_per_s: float
    bandwidth_bytes_per_s: float
    earlier: bool


@dataclass(frozen=True, slots=True)
class SmallerHolds:
    """A fleet holds although a larger fleet of the same design does not."""


Reason = (
    (HeadsNotShared | KvHeadsNotStored | LayersNotCut | RanksNotOnNodes | NotSimulatedWith)
    | (WeightsTooLarge | NoRoomForKv | RequestTooLong)
    | (WorkersMissing | WorkTooDear | WorkersFail | AloneFails | SeatsTooFew | PairFails | NoDecodeBeside)
    | (LinkTooSlow | SmallerHolds)
)


@dataclass(frozen=True, slots=True)
class Refuted:
    """A worker type, or pair of types, of level 0 that cannot beat the plan, and the reason."""

    label: str
    because: Reason


# -- remarks on alternatives -------------------------------------------------------------------------------

Remark = Literal[
    "not-searched",
    "fails-on-other-draw",
    "perhaps-not-cheapest",
    "effort-ended",
    "all-too-few",
    "is-the-plan",
    "cheaper-alone",
    "on-paper",
]


@dataclass(frozen=True, slots=True)
class Remarked:
    """A remark that needs no figures."""

    name: Remark


@dataclass(frozen=True, slots=True)
class NoneUpTo:
    """No fleet of this kind holds at up to `times` the plan's objective."""

    times: float


@dataclass(frozen=True, slots=True)
class LongestTtft:
    """The longest TTFT with this alternative; `planned_s` is the plan's, where other policies save money."""

    longest_s: float
    planned_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoneAlone:
    """No fleet of this GPU type alone keeps the SLO because of these limits; or none was found in time. If a
    limit has no room for one worker, `least_worker` says so.
    """

    for_want_of: Literal["latency", "capacity"]
    limits: tuple[str, ...]
    is_proved: bool
    least_worker: LeastWorker | None = None


Note = Remarked | NoneUpTo | NoneAlone | LongestTtft

Binding = (
    (LimitBinds | CapacityBinds | UsedUp | BoundPrice | PromisedAt | AskedAgain)
    | (LongerSteps | UpperEnds | InsuranceCosts | AsExpected | ExpectedMissed | NoneForExpected)
    | (SpotSpare | SpotGone)
    | (
        CachesSave
        | PolicyGains
        | PoliciesRaced
        | SharingSaves
        | SeparateKept
        | NotShared
        | PinnedReplicas
        | PinsPlaced
    )
    | (WorkerMore | Repeats)
    | (GivesWay | NodesFilled | MoreSaves | MoreSavesNothing)
    | (WorstHour | OverTheWhole | Finding | ProductionShared)
)
"""What binds, and what relaxing it would save."""

Assuming = (
    (Assumption | StepTimes | StepSpread | HostOverheads | EngineModelled | UncheckedEngine)
    | (Drafts | Adapters | Offloaded | EngineSettings | KvLink)
    | (MeasuredWindow | ObligedWork)
    | (SmallCaches | UncheckedLeftOut | GpusConsidered | GpusTooSmall | NotOffered)
    | (ElectricityCounted | SloInSeconds | OthersLeave)
)
"""What a plan takes for granted."""


@dataclass(frozen=True, slots=True)
class NotCertified:
    """The plan is not certified: too few scenarios were kept in its test, or step times have no spread."""

    kept_in: KeptIn | None
    asked_frac: float
    have_spread: bool

    @property
    def is_on_paper(self) -> bool:
        """Whether time ran out before a production fleet was found."""
        return self.kept_in is None and self.have_spread


@dataclass(frozen=True, slots=True)
class TooFewKept:
    """No fleet within the limits keeps the SLO in enough scenarios, so the plan is the fleet on paper. With
    the changes `enough` of `limits` one does; empty if none is known.
    """

    most_kept: MostKept
    enough: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class IdleMisses:
    """Even an idle worker misses a limit in `missed` of `scenario_count` scenarios, which is more than may be
    missed.

    So no number of workers keeps the SLO in the wanted share, and the plan is the fleet on paper. `fastest`
    is the fastest worker type; it would keep a limit of `enough_s` in enough scenarios.
    """

    limit: Limit
    missed: int
    scenario_count: int
    asked_frac: float
    enough_s: float
    fastest: str


@dataclass(frozen=True, slots=True)
class NoneTogether:
    """No fleets were found that keep the SLOs of several LLMs in enough scenarios within their shared limits.

    So each plan is the fleet on paper. `reason` says how far they get, `relaxation` what would help.
    `most_kept` has the fleets that all LLMs keep in the most scenarios; None if those are the ones on paper.
    """

    reason: str
    relaxation: str
    most_kept: MostKept | None = None


Warned = (
    (NotCertified | TooFewKept | IdleMisses | NoneTogether)
    | (RoutersMiss | NotDeployable | ServicesApart)
    | (
        OfTraffic
        | NodesBeyondStock
        | OwnedUnused
        | FewKeepAll
        | WorstHour
        | OverTheWhole
        | ShortTrace
        | OneTraceRedrawn
    )
    | (GuessedSteps | RooflineWon | NearestEngine | UncheckedEngine | OldPrices)
    | (NotSimulated | EndedByClock)
    | (LongerSteps | UpperEnds | SpotGone | MissedOnDraws | WorkerMoreFails)
    | (DyingAway | EncoderUntimed | PrefixesUncounted | Cautioned | ExpectedMissed | NoneForExpected)
)
"""What a reader must know before trusting the figures."""


@dataclass(frozen=True, slots=True)
class OfLlm:
    """A warning about one of several LLMs."""

    llm: str
    warning: Warned


Fact = Binding | Assuming | Assumed | Warned | OfLlm | Reason | Note | Neighbour | Outcome | Price | Headroom

NULL_STANDS_FOR = {At: math.inf, PromisedAt: math.inf, WorkersMissing: math.inf}
"""The value that null in the file stands for, for facts whose figures may be infinite."""
