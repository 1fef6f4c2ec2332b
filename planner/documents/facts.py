"""What speaks for a plan, and what a reader must know of it, as values.

The search finds these facts, certificate.json holds them (documents/certificate.py), and reports/facts.py
alone makes sentences of them. A fact's kind in the file is its class's name: `LimitBinds` is "limit-binds".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.domain import FleetLimit, Limit
from planner.errors import MostKept
from planner.simulator.repeats import Decision, Repeats

# -- what a simulation says --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class At:
    """Where a percentile stands in a simulation: `kept_frac` is the share within the limit; in which window,
    None for all that was measured.
    """

    limit: Limit
    value_s: float
    kept_frac: float
    window_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Attainment:
    """Share of requests that keep all limits at once, and the share that must; in which window, as `At`."""

    frac: float
    needed_frac: float
    window_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the backlog test found: of the last requests this share waited no longer than that."""

    patient_frac: float
    patience_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a simulated fleet misses of its SLO; nothing where it keeps it."""

    missed: tuple[At, ...] = ()
    attainment: Attainment | None = None
    backlog: Backlog | None = None

    @property
    def holds(self) -> bool:
        return not self.missed and self.attainment is None and self.backlog is None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The planned fleet with one worker of one pool taken away, and how it fails.

    `outcome` is None where no worker of the pool's role is left. `on_other_draw`: what fails is another draw
    or rate of the traffic. `after_losses`: after the losses that a fleet must survive.
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
    """A limit of the SLO binds a pool: at `value_s` one worker fewer would do, which saves that much."""

    limit: Limit
    pool: str
    worker_type: str
    value_s: float
    saves: float
    unit: str


@dataclass(frozen=True, slots=True)
class CapacityBinds:
    """With one worker fewer a pool fails by more than one limit."""

    neighbour: Neighbour


@dataclass(frozen=True, slots=True)
class UsedUp:
    """Of this limit less is left than the smallest worker takes."""

    limit: FleetLimit
    used: float
    amount: float


@dataclass(frozen=True, slots=True)
class BoundPrice:
    """`step` more of a limit lowers the relaxed lower bound by `saves`: a dual."""

    limit: FleetLimit
    step: float
    saves: float
    unit: str


@dataclass(frozen=True, slots=True)
class PromisedAt:
    """Where a percentile stands in the plan's simulation, whether it binds or not."""

    limit: Limit
    value_s: float


@dataclass(frozen=True, slots=True)
class AskedAgain:
    """The best fleet where the question is changed; `value` is None where there is none then."""

    change: str  # "ttft p90 200 ms tighter"
    planned: float
    value: float | None
    unit: str
    fleet: str  # "" where the objective stays


@dataclass(frozen=True, slots=True)
class LongerSteps:
    """The plan where every step takes the fits' error longer, for step times that have no spread."""

    error_frac: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class UpperEnds:
    """The plan where step times lie at the upper ends of their spread: the largest factors of its workers."""

    prefill: float
    decode: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Between which factors of these step times 90 % of measured runs lay; `is_own`: of this engine's."""

    worker: str
    prefill: tuple[float, float]
    decode: tuple[float, float]
    source: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class Robustness:
    """What a plan was made to stand; `rates`: how many its traffic was sampled at, None where at one."""

    step_times_frac: float
    traffic_frac: float
    rates: int | None
    spread: bool = False


@dataclass(frozen=True, slots=True)
class InsuranceCosts:
    """A robust plan, and the cheapest for what is expected; None where that was not found in time."""

    robustness: Robustness
    value: float
    expected: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class AsExpected:
    """A robust plan where all comes as expected."""

    values: tuple[At, ...]


@dataclass(frozen=True, slots=True)
class ExpectedMissed:
    """A robust plan misses the SLO where all comes as expected; None where that could not be simulated."""

    robustness: Robustness
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class NoneForExpected:
    """A robust plan where none is found for what is expected, in the words of that error."""

    robustness: Robustness
    error: str


@dataclass(frozen=True, slots=True)
class SpotSpare:
    """So many spot workers of a pool may be down at once; more are so for `risk_frac` of the time at most."""

    pool: str
    workers: int
    down: int
    risk_frac: float
    interruptions_per_h: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class SpotGone:
    """The plan where those spot workers go at once in the middle of the trace."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CachesSave:
    """What the plan's prefix caches save; None where no fleet without them keeps the SLO."""

    routing: str
    value: float
    gpus: int
    value_without: float | None
    gpus_without: int | None
    unit: str


@dataclass(frozen=True, slots=True)
class PinnedReplicas:
    """The best fleet with pinned prefixes against the best whose caches are all LRU, both by simulation.

    `pinned_hit_frac` of the input tokens are in pinned prefixes; `hit_frac` hit in all.
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
class WorkerMore:
    """The plan with one worker more of a pool, where caches may hit less then."""

    pool: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GivesWay:
    """An LLM whose fleet costs `more` than it would with all of the fleet for itself."""

    llm: str
    value: float
    more: float
    unit: str


@dataclass(frozen=True, slots=True)
class ProductionShared:
    """How the fleets of several LLMs for production were chosen.

    `is_each`: each is the one that its LLM would have alone, and they fit together. Else they were chosen
    together: by so many `rounds` of the master in its last search, which came to its end if it `is_exact`,
    and in so many `tries`, as what failed its test was chosen again.
    """

    is_each: bool
    rounds: int
    is_exact: bool
    tries: int


@dataclass(frozen=True, slots=True)
class MoreSaves:
    """The least more of a shared limit that saves something: `saves`; any amount of it saves `saves_most`.

    `is_least`: it is proved that less saves nothing.
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
    """More of a shared limit alone saves nothing; where not `is_known`, that was not found out in time."""

    limit: FleetLimit
    is_known: bool


FindingName = Literal["caches-unused", "nothing-drawn", "no-shared-limit"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding without figures."""

    name: FindingName


# -- what is taken for granted -----------------------------------------------------------------------------

Granted = Literal[
    "monotonicity",
    "ttft-ends-with-prefill",
    "steady-state",
    "sessions-wait",
    "sessions-given-up",
    "one-budget-per-role",
    "board-power",
    "first-use-of-blocks",
    "cold-caches",
    "no-shared-workers",
    "level0-of-each",
    "bounds-add-up",
]


@dataclass(frozen=True, slots=True)
class Assumption:
    """What is taken for granted, without figures."""

    name: Granted


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where step times come from, and what a host adds to each."""

    bases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HostOverheads:
    """What the host adds to each step, of all worker types."""

    overheads_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EngineModelled:
    """Which engine the simulations are of, and where its constants are from."""

    engine: str
    basis: str


@dataclass(frozen=True, slots=True)
class UncheckedEngine:
    """Nobody compared this engine with what is simulated in its place."""

    engine: str


@dataclass(frozen=True, slots=True)
class Drafts:
    """What workers of a type draft and how many tokens a step is taken to yield; a pass of the drafter takes
    `draft_frac` of a step of the LLM and `draft_s` more.
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
    """LoRA on a worker type: slots, their bytes on one GPU, what one token with an adapter adds to a step,
    and what an adapter takes to be loaded. `drawn`: no trace says who asks for which.
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
    """KV blocks in CPU memory of a worker type: tokens that it holds there and on its GPUs, the memory of one
    GPU's share, its bandwidth, seconds in which 1000 tokens come back; and shares of all prompt tokens. Where
    it `is_shared` memory and bandwidth are those of the one store of all workers.
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
    reload_s: float  # waited for loads by all requests
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How engines batch and requests reach them; the queue's window is None where nobody waits for it."""

    max_num_seqs: tuple[int, ...]
    prefix_cache: bool
    queue: str
    queue_window_s: float | None
    routing: str


@dataclass(frozen=True, slots=True)
class KvLink:
    """What carries KV blocks from prefill to decode workers."""

    bandwidth_bytes_per_s: float
    transfer: str


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """How long was measured, and how many mean residence times of a request that is."""

    window_s: float
    residences: float


@dataclass(frozen=True, slots=True)
class ObligedWork:
    """What the lower bound counts: all work of a share of the requests until `whole_after_s` after the trace,
    else the prefill of a share. `tail`: and of half of the last tenth all work.
    """

    whole_frac: float
    whole_after_s: float
    prefill_frac: float
    tail: bool


@dataclass(frozen=True, slots=True)
class SmallCaches:
    """Worker types of the bound that cannot hold the longest request, and so are not searched."""

    workers: tuple[str, ...]
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class UncheckedLeftOut:
    """GPUs of the catalog that were not considered: nobody measured what their step times rest on."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpusConsidered:
    """The GPUs of the catalog that were considered, as none was named: of which step times of this LLM were
    measured, and of which they are estimated.
    """

    measured: tuple[str, ...]
    estimated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PrefixesUncounted:
    """The trace says which prompts begin alike, and the plan counts on no prefix cache: so many of the input
    tokens stand at the beginning of an earlier prompt.
    """

    alike_frac: float


@dataclass(frozen=True, slots=True)
class NotOffered:
    """GPUs of the catalog that were not considered: the provider asked for has no such price of them."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ElectricityCounted:
    """Prices have electricity in them, at provisioned power: of "owned" GPUs alone, or of "all"."""

    usd_per_kwh: float
    pue: float
    of: str


@dataclass(frozen=True, slots=True)
class SloInSeconds:
    """A relative SLO was turned into seconds, by an idle worker of this kind."""

    gpu: str
    tp: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a limit."""

    limit: FleetLimit
    amount: float


@dataclass(frozen=True, slots=True)
class OthersLeave:
    """What the fleets of the other LLMs leave of the shared limits."""

    left: tuple[Remainder, ...]


Shortcut = Literal["more-mixed", "more-decode", "leads", "follows", "seats", "link"]


@dataclass(frozen=True, slots=True)
class Tested:
    """How often a shortcut hid a cheaper fleet in tests, of traces with up to `most_requests`, or with more
    than `least_requests`; None: of any. `of_pools`: how often it was false of a pool, with no fleet sought.
    """

    failed: int
    tests: int
    most_requests: int | None = None
    least_requests: int | None = None
    of_pools: bool = False


@dataclass(frozen=True, slots=True)
class Assumed:
    """A shortcut of the search: on this traffic false in `failed` of `compared` comparisons; and in tests."""

    name: Shortcut
    failed: int
    compared: int
    tested: tuple[Tested, ...]


# -- what a reader must know first -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OfTraffic:
    """What was found doubtful when the traffic or the question was read, in the reader's words."""

    said: str


@dataclass(frozen=True, slots=True)
class FewKeepAll:
    """Every limit holds, and yet few requests keep all of them; the longest waits."""

    attainment_frac: float
    first_token_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class WorstHour:
    """Where each limit stands in its worst hour, of a plan whose SLO is of the whole trace alone.

    Where one is missed: with how many of the plan's workers, in their proportion, every hour holds, and what
    is paid for them and for the plan; none where so many are not within the limits, or there was no time.
    """

    hours: tuple[At, ...]
    holding: tuple[Workers, ...] = ()
    holding_usd_per_h: float | None = None
    planned_usd_per_h: float | None = None

    @property
    def missed(self) -> tuple[At, ...]:
        return tuple(at for at in self.hours if at.value_s > at.limit.limit_s)


@dataclass(frozen=True, slots=True)
class OverTheWhole:
    """A long trace was planned by a part of it, after so many attempts: what the plan does on all requests,
    None where there was no time to see. `smaller` keeps the SLO over the whole too, and is paid less.
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
    """Too few mean residence times were measured."""

    window: MeasuredWindow
    enough: int


@dataclass(frozen=True, slots=True)
class OneTraceRedrawn:
    """All futures are redrawn from one trace, which is short, or whose quarters differ in kind: by so large a
    share of requests their prompts and outputs are apart, 0 where they are alike.
    """

    duration_s: float
    is_short: bool
    prompts_frac: float
    outputs_frac: float


@dataclass(frozen=True, slots=True)
class GuessedSteps:
    """Step times that nobody measured."""

    gpu: str
    tp: int
    basis: str


@dataclass(frozen=True, slots=True)
class NearestEngine:
    """A version of an engine that has no constants of its own."""

    engine: str
    basis: str


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
class OldPrices:
    """Prices that were listed more than `enough_days` ago; the oldest on `date`, `days` ago at most."""

    gpus: tuple[str, ...]
    date: str
    days: int
    enough_days: int


@dataclass(frozen=True, slots=True)
class NotSimulated:
    """What there was no time for."""

    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class MissedOnDraws:
    """The SLO is missed on some of these runs."""

    repeats: Repeats


@dataclass(frozen=True, slots=True)
class WorkerMoreFails:
    """One worker more of a pool breaks the SLO."""

    pool: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class DyingAway:
    """A share of the requests arrives after all sessions have begun."""

    late_frac: float


@dataclass(frozen=True, slots=True)
class EncoderUntimed:
    """Prompts hold tokens of images, this share of all prompt tokens, whose encoder takes no time in our
    steps: at least `encoder_s` for the mean request that has some, on one such GPU at its peak.
    """

    image_frac: float
    image_tokens: float  # of the mean request that has some
    encoder_s: float
    gpu: str


Caution = Literal["spot-nodes", "copies-share-prefixes", "prompts-are-text"]


@dataclass(frozen=True, slots=True)
class Cautioned:
    """A warning without figures."""

    name: Caution


@dataclass(frozen=True, slots=True)
class Price:
    """What a GPU costs, and who says so; a price of the user's own has no date."""

    gpu: str
    usd_per_h: float
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Commitment:
    """What is paid for the plan's fleet by one term: "on-demand", "reserved-1y" or "reserved-3y".

    It pays from `needed_frac` of the hours on that one would rent on demand; None where that costs nothing.
    `sources` say whose price of which GPU; `at_planned` are GPUs without this term, at the planned price.
    """

    term: str
    usd_per_h: float
    needed_frac: float | None
    sources: tuple[str, ...]
    at_planned: tuple[str, ...]


HEADROOM_STEP_FRAC, HEADROOM_MOST_FRAC = 0.005, 1.0  # how finely, and how far, headroom is looked for


@dataclass(frozen=True, slots=True)
class Headroom:
    """How far a plan's fleet holds on its own: shares that steps take longer, that traffic is more.

    To HEADROOM_STEP_FRAC, up to HEADROOM_MOST_FRAC. It carries all rates up to that which were sampled,
    those of `asked.rates_frac`.
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
    gpus: int  # of all workers
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class KeptIn:
    """In how many futures that no search has seen the SLO was kept, `after_loss` of any one worker.

    `decision` is of the sequential test on the share: "holds" rejects that it is at most `least_frac`, with
    95 % confidence, "fails" that it is at least `most_frac`.
    """

    kept: int
    futures: int
    least_frac: float
    most_frac: float
    decision: Decision
    after_loss: bool = False

    @property
    def kept_frac(self) -> float:
        return self.kept / self.futures if self.futures else 0.0


AnswerName = Literal["on-paper", "production", "with-a-loss"]
DrawnBy = Literal["copies", "part", "blocks", "description"]


@dataclass(frozen=True, slots=True)
class Answered:
    """The cheapest fleet found by which the SLO is kept on what is written ("on-paper"), in the share of
    futures that was asked for ("production"), and after the loss of any one worker ("with-a-loss").

    `value` is in the unit of the objective, None where no fleet within the limits was found. `headroom` is on
    what is written, after the loss where there is one; `breaks_by_` are the limits missed first beyond.
    """

    name: AnswerName
    workers: tuple[Workers, ...]
    value: float | None
    usd_per_h: float | None
    kept_in: KeptIn | None
    headroom: Headroom | None = None
    breaks_by_traffic: tuple[Limit, ...] = ()
    breaks_by_steps: tuple[Limit, ...] = ()
    paid_usd_per_h: float | None = None  # whole nodes where they are sold so; usd_per_h is by the GPU


@dataclass(frozen=True, slots=True)
class FuturesDrawn:
    """What kind of futures: how traffic is drawn anew ("copies" laid over each other, a "part" of the trace,
    "blocks" of it of `block_s`, or a "description" drawn again), its growth, and whether all step times of
    the fleet have a spread.
    """

    traffic: DrawnBy
    block_s: float
    growth_frac: float
    have_spread: bool
    searched: int  # futures that the search has seen,
    one_in: int = 1  # with one request and one worker in so many


# -- under the routers of deployment targets ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnderRouter:
    """The plan's fleet on its traffic, routed as where it is deployed: what the target's router is `told` of
    arrivals and, where there are pairs, of hand-offs, and the routings `simulated` in its place, from which
    it `differs`. `decides` is the limit that is missed by most, or that has the least room; None where none
    has a figure. `kept_in` is of the futures that the plan has passed its test in, and whether it `passes`
    there under this router; None where there was no such test, or the SLO is missed before it.
    """

    target: str
    router: str
    told: tuple[str, ...]
    simulated: tuple[str, ...]
    differs: tuple[str, ...]
    decides: At | None
    outcome: Outcome
    kept_in: KeptIn | None = None
    passes: bool = True

    @property
    def keeps(self) -> bool:
        """Whether the plan is kept there: on what is written, and in as many futures as asked for."""
        return self.outcome.holds and self.passes


@dataclass(frozen=True, slots=True)
class RoutersMiss:
    """Under these routers the plan's fleet is not kept."""

    missed: tuple[UnderRouter, ...]


@dataclass(frozen=True, slots=True)
class ForTargets:
    """What `plan` answers with `deploy: {target}` of one of these, whose routers are alike: the fleet and
    what is paid for it. `usd_per_h` is None where no fleet keeps the SLO there, or none of them can run it.
    """

    targets: tuple[str, ...]
    status: str
    workers: tuple[Workers, ...]
    usd_per_h: float | None


@dataclass(frozen=True, slots=True)
class ServicesApart:
    """The target makes so many services with an address each; the plan was simulated behind one router."""

    target: str
    services: int


@dataclass(frozen=True, slots=True)
class NotDeployable:
    """The target that was asked for cannot run the plan, and why, in its own words."""

    target: str
    because: str


# -- what cannot beat the plan -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvHeadsNotStored:
    """KV heads do not split over so many GPUs, so blocks of these in a store are no use to other degrees."""

    kv_heads: int
    tp: int


@dataclass(frozen=True, slots=True)
class HeadsNotShared:
    heads: int
    tp: int


@dataclass(frozen=True, slots=True)
class LayersNotCut:
    layers: int
    stages: int


@dataclass(frozen=True, slots=True)
class RanksNotOnNodes:
    """Why so many ranks are not dealt out to several nodes, in words."""

    why: str


@dataclass(frozen=True, slots=True)
class WeightsTooLarge:
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class NoRoomForKv:
    """So large a step leaves none."""


@dataclass(frozen=True, slots=True)
class RequestTooLong:
    kv_tokens: int
    longest_tokens: int


@dataclass(frozen=True, slots=True)
class WorkersMissing:
    """The work alone takes more workers than there are."""

    least: int
    available: float


@dataclass(frozen=True, slots=True)
class WorkTooDear:
    """The work alone takes workers that cost as much as the best fleet."""

    least: int
    least_value: float
    best_value: float


@dataclass(frozen=True, slots=True)
class WorkersFail:
    """So many fail in simulation, and no more were tried: nobody did, there are none, or they cost as much as
    the best fleet.
    """

    workers: int
    more: Literal["not-tried", "not-available", "too-dear"]


@dataclass(frozen=True, slots=True)
class AloneFails:
    """So many workers of a pool fail even beside a perfect other pool."""

    role: Literal["prefill", "decode"]
    workers: int


@dataclass(frozen=True, slots=True)
class SeatsTooFew:
    """So many decode workers are taken to fall behind: they could not make the tokens at their best."""

    workers: int


@dataclass(frozen=True, slots=True)
class PairFails:
    """A pair of pools fails with so many prefill workers, and more were not tried."""

    prefill_workers: int


@dataclass(frozen=True, slots=True)
class NoDecodeBeside:
    """Beside so many prefill workers, or fewer, no count of decode workers that costs less holds."""

    prefill_workers: int


@dataclass(frozen=True, slots=True)
class LinkTooSlow:
    """KV blocks need more of the link than it has; `earlier`: those before the last tenth of the trace."""

    needed_bytes_per_s: float
    bandwidth_bytes_per_s: float
    earlier: bool


@dataclass(frozen=True, slots=True)
class SmallerHolds:
    """A fleet holds although a larger one of its kind does not."""


Reason = (
    HeadsNotShared
    | KvHeadsNotStored
    | LayersNotCut
    | RanksNotOnNodes
    | WeightsTooLarge
    | NoRoomForKv
    | RequestTooLong
    | WorkersMissing
    | WorkTooDear
    | WorkersFail
    | AloneFails
    | SeatsTooFew
    | PairFails
    | NoDecodeBeside
    | LinkTooSlow
    | SmallerHolds
)


@dataclass(frozen=True, slots=True)
class Refuted:
    """A worker type, or pair of types, of level 0 that cannot beat the plan, and how we know."""

    label: str
    because: Reason


# -- what is said of alternatives --------------------------------------------------------------------------

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
    """A remark without figures."""

    name: Remark


@dataclass(frozen=True, slots=True)
class NoneUpTo:
    """None holds up to so many times the plan."""

    times: float


@dataclass(frozen=True, slots=True)
class LongestTtft:
    """The longest wait for a first token; `planned_s` is the plan's, where other policies would save."""

    longest_s: float
    planned_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoneAlone:
    """No fleet of this GPU type alone keeps the SLO, by these limits; or none was found in time."""

    for_want_of: Literal["latency", "capacity"]
    limits: tuple[str, ...]
    is_proved: bool


Note = Remarked | NoneUpTo | NoneAlone | LongestTtft

Binding = (
    LimitBinds
    | CapacityBinds
    | UsedUp
    | BoundPrice
    | PromisedAt
    | AskedAgain
    | LongerSteps
    | UpperEnds
    | InsuranceCosts
    | AsExpected
    | ExpectedMissed
    | NoneForExpected
    | SpotSpare
    | SpotGone
    | CachesSave
    | PinnedReplicas
    | WorkerMore
    | Repeats
    | GivesWay
    | MoreSaves
    | MoreSavesNothing
    | WorstHour
    | OverTheWhole
    | Finding
    | ProductionShared
)
"""What binds, and what relaxing it would save."""

Assuming = (
    Assumption
    | StepTimes
    | StepSpread
    | HostOverheads
    | EngineModelled
    | UncheckedEngine
    | Drafts
    | Adapters
    | Offloaded
    | EngineSettings
    | KvLink
    | MeasuredWindow
    | ObligedWork
    | SmallCaches
    | UncheckedLeftOut
    | GpusConsidered
    | NotOffered
    | ElectricityCounted
    | SloInSeconds
    | OthersLeave
)
"""What a plan takes for granted."""


@dataclass(frozen=True, slots=True)
class NotCertified:
    """Futures were asked for, and the fleet's test does not say enough, or its step times have no spread."""

    kept_in: KeptIn | None
    asked_frac: float
    have_spread: bool

    @property
    def is_on_paper(self) -> bool:
        """Whether the time was over before a fleet for production was found."""
        return self.kept_in is None and self.have_spread


@dataclass(frozen=True, slots=True)
class TooFewKept:
    """No fleet within the limits was found that keeps the SLO in enough futures: the plan is on paper."""

    most_kept: MostKept


@dataclass(frozen=True, slots=True)
class IdleMisses:
    """Even an idle worker misses a limit in `missed` of `futures`, more than may be missed: no number of
    workers keeps the SLO in the share of futures that was asked for, and the plan is on paper. The fastest
    worker type is named; with a limit of `enough_s` it keeps that limit in enough of them.
    """

    limit: Limit
    missed: int
    futures: int
    asked_frac: float
    enough_s: float
    fastest: str


Warned = (
    NotCertified
    | TooFewKept
    | IdleMisses
    | RoutersMiss
    | NotDeployable
    | ServicesApart
    | OfTraffic
    | FewKeepAll
    | WorstHour
    | OverTheWhole
    | ShortTrace
    | OneTraceRedrawn
    | GuessedSteps
    | NearestEngine
    | UncheckedEngine
    | OldPrices
    | NotSimulated
    | LongerSteps
    | UpperEnds
    | SpotGone
    | MissedOnDraws
    | WorkerMoreFails
    | DyingAway
    | EncoderUntimed
    | PrefixesUncounted
    | Cautioned
    | ExpectedMissed
    | NoneForExpected
)
"""What a reader must know before trusting the figures."""


@dataclass(frozen=True, slots=True)
class OfLlm:
    """A warning of one of several LLMs."""

    llm: str
    warning: Warned


Fact = Binding | Assuming | Assumed | Warned | OfLlm | Reason | Note | Neighbour | Outcome | Price | Headroom

NULL_STANDS_FOR = {At: math.inf, PromisedAt: math.inf, WorkersMissing: math.inf}
"""What null in the file was, where a figure need not be finite."""
