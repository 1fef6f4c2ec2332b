"""The keys and types of the answers that commands print with --json and that the MCP server returns.

A class is one JSON object. A float that is not finite is written as null.
planner/documents/schemas/answer_schemas.py makes the JSON Schemas of these classes; answers are built where
they are computed, and tests check them against the schemas.
"""

from typing import Any, Literal, NotRequired, TypedDict

from planner.documents.certificate import Status


class TimeSpread(TypedDict):
    """Mean and percentiles of a time in seconds.

    A percentile is null if it would be the time of a request that did not end.
    """

    mean: float
    p50: float
    p90: float
    p99: float


class WorstWindow(TypedDict):
    """The window in which the SLO is kept worst."""

    start_s: float
    end_s: float
    simulated_s: NotRequired[float]
    kept_frac: float


class SloLine(TypedDict):
    """One line of the SLO: its limit, what was simulated, and the share of values within the limit.

    `judged` is the number of these values; a line without any holds.
    """

    limit: str
    limit_s: float
    simulated_s: float
    kept_frac: NotRequired[float]
    holds: NotRequired[bool]
    judged: NotRequired[int]
    worst_window: NotRequired[WorstWindow]


class TenantGuarantee(TypedDict):
    """A guarantee to tenants, and the tenant that got least of its fair share of service while its work
    waited.

    The share is null where no tenant waited for a whole window.
    """

    guarantee: str
    needed_frac: float
    tenant: str
    share_frac: float | None
    window_s: list[float] | None  # From and to.
    windows: int
    holds: bool


class SloVerdict(TypedDict):
    """Whether a simulation keeps the SLO, and by how much.

    `is_judged` is false where no value was compared with any limit. `patient_frac` is the share of the
    last requests that waited at most `patience_s` for a token; `is_steady` is false if these are fewer than
    half, because work then piles up.
    """

    holds: bool
    is_judged: bool
    lines: list[SloLine]
    attainment_frac: float
    attainment_holds: bool | None
    windows: NotRequired[int]
    attainment_worst_window: NotRequired[WorstWindow]
    tenants: NotRequired[list[TenantGuarantee]]
    is_steady: bool
    patient_frac: float
    patience_s: float
    rejected: int


class WorkerLoad(TypedDict):
    """How busy one worker was, with its steps and tokens."""

    name: str
    busy_frac: float
    steps: int
    tokens: float


class PowerUse(TypedDict):
    """Watts of the fleet's GPUs; Joules of a request and of 1,000 output tokens, in the measured window."""

    provisioned_w: float
    expected_w: float
    expected_idle_w: float
    request_j: float
    thousand_output_tokens_j: float
    basis: str


class PoolLoad(TypedDict):
    """How busy a pool's GPUs and KV caches are, and how large its batches. Figures of KV caches, decodes and
    tokens are over the time in steps.
    """

    pool: str
    workers: int
    busy_frac: float
    mfu_frac: float
    bandwidth_frac: float
    kv_mean_frac: float
    kv_most_frac: float
    decodes_mean: float
    decodes_p99: float
    decodes_most: float
    tokens_mean: float


class TenantService(TypedDict):
    """Service and latencies of one tenant."""

    tenant: str
    weight: float
    requests: int
    service_tokens_per_s: float
    least_share_frac: float | None
    ttft_s: TimeSpread | None
    e2e_s: TimeSpread | None


class Tenants(TypedDict):
    """The service of each tenant, and how equal it is (Jain's index)."""

    service_window_s: float
    jain_index: float
    each: list[TenantService]


class RoutingAtMoment(TypedDict):
    """A role's workers at one moment, and the best packing of the same requests on them.

    The packing has the fewest workers, and the least load of the fullest one. They are proved if `is_fewest`
    and `is_least`, else between bound and value. `fewest` is null if no packing was found within the limits.
    """

    time_s: float
    role: str
    requests: int
    workers: int
    used: int
    fewest: int | None
    fewest_bound: int
    largest_load_frac: float
    least_load_frac: float
    least_load_bound_frac: float
    is_fewest: bool
    is_least: bool


class ExplainedRouting(TypedDict):
    """What `--explain-routing` adds: the routing at moments of the run, and a sentence for each role."""

    moments: list[RoutingAtMoment]
    summary: list[str]


class OperatorRow(TypedDict):
    """What `--operators` says of a pool's operator; `mean_input` is null where no step runs it."""

    pool: str
    operator: str
    seconds: float
    share_frac: float
    mean_input: float | None
    unit: str


class SimulationAnswer(TypedDict):
    """`plan simulate --json`: a fleet on its traffic. Percentiles are over the measured window.

    Traffic of agents has times of turns and tasks too; `task_served_s` is without tools and pauses.
    """

    warnings: NotRequired[list[str]]
    requests: int
    measured_requests: int
    window_s: list[float]
    end_s: float
    complete: bool
    finished: int
    rejected: int
    unfinished: int
    preemptions: int
    queue_s: TimeSpread | None
    ttft_s: TimeSpread | None
    tbt_s: TimeSpread | None
    tpot_s: TimeSpread | None
    e2e_s: TimeSpread | None
    turn_s: NotRequired[TimeSpread | None]
    task_s: NotRequired[TimeSpread | None]
    task_served_s: NotRequired[TimeSpread | None]
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    token_hit_frac: float
    token_reload_frac: float
    token_disk_frac: NotRequired[float]
    reload_s: float
    tenants: Tenants | None
    tenant_costs: NotRequired[list[dict[str, Any]]]
    slo: SloVerdict | None
    workers: list[WorkerLoad]
    power: NotRequired[PowerUse | None]
    pools: NotRequired[list[PoolLoad]]
    routing: NotRequired[ExplainedRouting]
    operators: NotRequired[list[OperatorRow]]


class GoodputAnswer(TypedDict):
    """`plan goodput --json`: the highest rate at which a fleet keeps the SLO, the lowest that fails, and one
    above it that is kept all the same, if any. The simulation lasts `residences` times as long as a request
    stays.
    """

    warnings: NotRequired[list[str]]
    rate_rps: float
    fails_rps: float | None
    kept_above_rps: float | None
    rates_tried: int
    seeds: int
    arrivals: Literal["poisson", "trace"]
    gpus: int
    gpu_rate_rps: float
    usd_per_1000_requests: float
    requests: int
    residences: float
    slo: list[SloLine]


class PoolSize(TypedDict):
    """The workers of one pool."""

    role: str
    gpu: str
    tp: int
    count: int
    max_num_batched_tokens: int


class NamedAnswer(TypedDict):
    """One of the three answers: its price, and in how many scenarios it keeps the SLO."""

    name: Literal["on-paper", "production", "with-a-loss"]
    value: float
    cost_usd_per_h: float | None
    kept: int | None
    scenario_count: int | None


class QuestionAnswer(TypedDict):
    """The best fleet for one question.

    `level0_exhausted`: level 0 came to its end; `level0_exact`: so did the walk over all cheaper fleets.
    """

    fleet: str
    workers: list[PoolSize]
    objective: str
    value: float
    level0_exact: bool
    level0_exhausted: bool
    cost_usd_per_h: float
    usd_per_million_tokens: float
    power_w: float
    gpus: int
    slo: list[SloLine]
    requests: int
    rate_rps: float
    answers: list[NamedAnswer]
    bound: NotRequired[float]


class WhatIfAnswer(TypedDict):
    """`plan what-if --json`: the best fleet before and after a change.

    `kept` says whether the fleet from before still keeps the SLO after the change, with the policies that
    `kept_under` names if they are not its own. With `kept_as_written` it is not kept because of scenarios
    alone: on the traffic as written it is.
    """

    warnings: NotRequired[list[str]]
    before: QuestionAnswer | None
    after: QuestionAnswer | None
    change: str
    kept: bool | None
    kept_under: str | None
    kept_as_written: bool
    difference: float | None
    why: str


class ComparedFleet(TypedDict):
    """One fleet of a comparison; further keys are the percentiles of its latencies.

    `cost_usd_per_h` is what is paid, for whole nodes; `by_gpu_usd_per_h` the price of the GPUs in use.
    """

    variant: str
    llm: str
    cost_usd_per_h: float
    by_gpu_usd_per_h: float
    workers: int
    gpus: int
    verdict: str
    fleet: dict[str, Any]
    simulation: SimulationAnswer


class ComparedTraffic(TypedDict):
    """The requests that all fleets of a comparison served."""

    trace: str
    requests: int
    duration_s: float
    rate_rps: float
    seed: int
    notes: list[str]


class CompareAnswer(TypedDict):
    """`plan compare --json`: several fleets, or policies, on the same requests."""

    warnings: NotRequired[list[str]]
    traffic: ComparedTraffic
    slo: dict[str, Any] | None
    notes: list[str]
    variants: list[ComparedFleet]


class PlannedWorker(TypedDict):
    """One pool of the plan."""

    name: str
    role: Literal["mixed", "prefill", "decode"]
    gpu: str
    tp: int
    pp: NotRequired[int]
    ep: NotRequired[bool]
    dp: NotRequired[int]
    count: int
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    speculative: NotRequired[dict[str, Any]]


class PerMillion(TypedDict):
    """USD per million tokens served, and per million of output."""

    tokens: float
    output_tokens: float


class PlanAnswer(TypedDict):
    """`plan --json`: the cheapest fleet that keeps the SLO, with its certificate."""

    status: Status
    llm: str
    cost_usd_per_h: float
    bill: dict[str, Any]
    power_w: float
    power: PowerUse | None
    gpus: int
    usd_per_million: PerMillion
    throughput: NotRequired[dict[str, Any]]
    placement: dict[str, Any] | None
    prefixes: NotRequired[list[dict[str, Any]]]
    workers: list[PlannedWorker]
    policies: dict[str, Any]
    network: dict[str, Any]
    prices: str
    sold_as: dict[str, str]
    electricity: NotRequired[dict[str, str]]
    slo: dict[str, Any]
    certificate: dict[str, Any]
    facts: dict[str, list[dict[str, Any]]]
    alternatives: list[dict[str, Any]]
    traffic: str
    warnings: list[str]
    max_model_len: int
    simulation: SimulationAnswer
    directory: NotRequired[str]


class ErrorAnswer(TypedDict):
    """Any command with --json that cannot answer: bad input (exit code 1), or no time was left (4)."""

    status: Literal["error"]
    message: str


class InfeasibleAnswer(TypedDict):
    """Any plan with --json and exit code 3 or 4: no fleet keeps the SLO, what binds, and what would help."""

    status: Literal["infeasible", "not found"]
    kind: str
    constraint: str
    relaxation: str | None
    message: str
    ways: list[list[dict[str, Any]]]
    most_kept: dict[str, Any] | None
