"""All policies in one table; no other module lists them.

A row gives the kind of policy, its name in files, its number in compiled code, a description, which engines
and caches it works with, whether a plan may choose it, and its name at each deployment target: a router
without a name in the row lacks the policy, and the manifests say so (`find_router_difference`).

To add a routing by score, write one row, and a function that returns the weights of its score.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from planner.files.document_values import did_you_mean
from planner.fleet import Policies, Role, WorkerType

# Compiled code identifies policies by these numbers.
VLLM_V1, SARATHI, VLLM_V0, ORCA, FASTER_TRANSFORMER, LIGHTLLM, DISTSERVE, SPLITWISE = range(8)
# Queues up to DLPM_HELD are heaps in engines, with a fixed key per request. For the queues from LPM on
# engines look at caches or tenants; for DLPM_HELD the router does.
FCFS, SJF, LJF, SRPT, EDF, DLPM_HELD, LPM, VTC, DLPM, PREBLE, TURNS = range(11)
GREEDY, RESERVE_STATIC, RESERVE_DYNAMIC = range(3)
SCORE, ROUND_ROBIN, RANDOM, POWER_OF_TWO, BEST_FIT, TWO_BY_REQUESTS, LOWEST_BY_LOT = range(7)
HEAVY_LIGHT, REBALANCED, SAME_PLACE, DEFERRED = range(7, 11)
# Routings from 16 on look at caches or tenants, which compiled code tests by `policy < AFFINITY`. The numbers
# 11 to 15 are free for routings that look at neither.
AFFINITY, MIN_TTFT, CACHE_AWARE, E2, D2LPM, TENANT_TURNS, PINNED, E2_DYNAMIC = range(16, 24)
STATIC, FLIP, MIXED_POOL, REPURPOSE = range(4)

# The simulator's engines: one for all batching in steps, as in vLLM, and those of two papers' programs.
STEPWISE, OF_DISTSERVE, OF_SPLITWISE = "stepwise", "distserve", "splitwise"
SIMULATORS = (STEPWISE, OF_DISTSERVE, OF_SPLITWISE)
STEPWISE_ONLY = (STEPWISE,)


@dataclass(frozen=True, slots=True)
class RouterDifference:
    """The rule of a router (or vLLM's scheduler) that stands for a policy of the table.

    `name` is its own name for the rule; `differs` is a clause that continues "NAME ..." and is empty if the
    rule equals the policy. If the policy `is_lacking` there, `name` is the rule that replaces it.
    """

    name: str
    differs: str = ""
    is_lacking: bool = False


def substitute_rule(name: str) -> RouterDifference:
    """A difference of a router that lacks the policy and applies its rule `name` instead."""
    return RouterDifference(name, is_lacking=True)


@dataclass(frozen=True, slots=True)
class DeployedRouter:
    """A router of a deployment target; `otherwise` names its rule for policies that it lacks. With
    `is_single` one rule routes both arrivals and hand-offs.
    """

    title: str
    otherwise: str
    is_single: bool = False
    like: str | None = None  # Rows without an entry for this router use the entry of this other router.


# Keys of ROUTERS. A router with other rules for pairs of prefill and decode workers has two keys.
VLLM_ROUTER, VLLM_ROUTER_PAIRS = "vllm-router", "vllm-router pairs"
ENDPOINT_PICKER, ENDPOINT_PICKER_DECODE, KSERVE = "endpoint-picker", "endpoint-picker decode", "kserve"
DYNAMO, RAY_SERVE, STACK, STACK_PAIRS = "dynamo", "ray-serve", "production-stack", "production-stack pairs"
SKYSERVE = "skyserve"
OURS, VLLM = "plan serve", "vllm"  # Our own router, and the scheduler in every worker.

# The routers' own names of their rules; the first two are our words for rules without a name.
EMPTIER_OF_TWO = "the emptier of two drawn at random"  # Ray Serve's default.
GATEWAY = "the gateway"  # KServe without an endpoint picker.
STACK_PAIR_ROUTING = "disaggregated_prefill_orchestrated"
FEWEST_TOKENS, FEWEST_REQUESTS, FEWEST_WAITING = "token-load-scorer", "active-request-scorer", "queue-scorer"
LONGEST_MATCH, NEAR_MATCH = "prefix-cache-scorer", "prefix-cache-affinity-filter"
NEAR_AND_FREE = f"{NEAR_MATCH}, {FEWEST_TOKENS}"

ROUTERS: Mapping[str, DeployedRouter] = MappingProxyType(
    {
        VLLM_ROUTER: DeployedRouter("vllm-router", "power_of_two"),
        # For pairs vllm-router counts no load, so its power_of_two would compare zeros.
        VLLM_ROUTER_PAIRS: DeployedRouter("vllm-router", "round_robin"),
        ENDPOINT_PICKER: DeployedRouter("llm-d's endpoint picker", FEWEST_TOKENS),
        ENDPOINT_PICKER_DECODE: DeployedRouter("llm-d's endpoint picker", FEWEST_REQUESTS),
        KSERVE: DeployedRouter("KServe", FEWEST_TOKENS, like=ENDPOINT_PICKER),
        DYNAMO: DeployedRouter("Dynamo's frontend", "least-loaded", is_single=True),
        RAY_SERVE: DeployedRouter("Ray Serve", EMPTIER_OF_TWO),
        STACK: DeployedRouter("production-stack", "roundrobin"),
        STACK_PAIRS: DeployedRouter("production-stack", STACK_PAIR_ROUTING),
        SKYSERVE: DeployedRouter("SkyServe", "least_load"),
        OURS: DeployedRouter("plan serve", ""),
        VLLM: DeployedRouter("vLLM", "fcfs"),
    }
)
_OF_VLLM = (VLLM_ROUTER, VLLM_ROUTER_PAIRS, VLLM_ROUTER_PAIRS)
_OF_LLM_D = (ENDPOINT_PICKER, ENDPOINT_PICKER_DECODE)
# Deployment target -> the routers of its mixed workers, its prefill workers and its decode workers.
ROUTERS_OF: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "vllm": _OF_VLLM,
        "compose": _OF_VLLM,
        "kubernetes": _OF_VLLM,
        "lws": _OF_VLLM,
        "disaggregatedset": _OF_VLLM,
        "llm-d": (ENDPOINT_PICKER, *_OF_LLM_D),
        "kserve": (KSERVE, *_OF_LLM_D),
        "dynamo": (DYNAMO, DYNAMO, DYNAMO),
        "ray-serve": (RAY_SERVE, RAY_SERVE, RAY_SERVE),
        "production-stack": (STACK, STACK_PAIRS, STACK_PAIRS),
        "skypilot": (SKYSERVE, SKYSERVE, SKYSERVE),
    }
)
# Words that users may write for a target -> the target.
TARGET_WORDS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("k8s", "helm", "kubectl", "eks", "gke", "aks", "openshift"), "kubernetes"),
        **{"docker": "compose", "docker-compose": "compose", "sky": "skypilot", "terraform": "skypilot"},
        **{
            "ray": "ray-serve",
            "nvidia-dynamo": "dynamo",
            "leaderworkerset": "lws",
            "systemd": "vllm",
            "slurm": "vllm",
        },
    }
)


def advise_target(word: str, targets: Iterable[str]) -> str:
    """The middle of an error about `word`, which is no target, before the list of all targets: "did you mean
    'kubernetes'? ", what that target brings along, and "There are"; or just "there are".
    """
    what_it_brings = {
        "helm": "It brings a Helm chart, in chart/. ",
        "terraform": "It rents the machines too. ",
        "slurm": "It brings a script for each pool, which srun can start. ",
    }.get(word.lower(), "")
    hint = did_you_mean(word.lower(), (*TARGET_WORDS, *targets), TARGET_WORDS) + what_it_brings
    return f"{hint}There are" if hint else "there are"


# ONE_KIND targets run either mixed workers or pairs, never both; ONLY_PAIRS targets run pairs alone;
# ONE_POOL targets run mixed workers of one type.
ONE_KIND, ONLY_PAIRS, ONE_POOL = ("llm-d", "production-stack"), ("disaggregatedset",), ("skypilot",)
# Serving programs other than vLLM -> the targets that start them, with mixed workers only.
TARGETS_OF_ENGINE: Mapping[str, tuple[str, ...]] = MappingProxyType({"sglang": ("kubernetes",)})
HUB_TARGETS = ("llm-d", "kserve")  # They load LLMs from the Hugging Face hub alone, by their names there.


class ScoreWeights(NamedTuple):
    """What each pending prompt token, each request, each KV token of its requests and each waiting request
    adds to a worker's score. The worker with the lowest score takes the request.
    """

    prompt_token: float = 0.0
    request: float = 0.0
    kv_token: float = 0.0
    waiting_request: float = 0.0


def _weigh_seconds(worker_type: WorkerType, decode: bool) -> ScoreWeights:
    """The weights that turn a worker's load into the seconds until it can serve one more request. With
    `decode` it is a decode worker.

    A worker that prefills needs the time of its pending prompt tokens, and of one token per request
    (Splitwise, section IV-A, counts tokens; seconds make workers on different GPUs comparable). A decode
    worker needs the time of its step, which depends on its sequences and KV tokens.
    """
    worker_type = worker_type.as_one  # All its data-parallel ranks together.
    latency, budget = worker_type.latency, worker_type.max_num_batched_tokens
    if not decode:
        # The step is of one prompt that fills the budget: each token attends to itself and all before it.
        token_s = float(latency.step_s(budget, pairs=budget * (budget + 1) / 2)) / budget
        return ScoreWeights(prompt_token=token_s, request=token_s)
    sequences = worker_type.max_num_seqs
    # A sequence makes a step longer in two ways (models/latency.py): by a token in the dense layers, which is
    # the slope of f (here `step_s` gets no decodes), and by a decode, which costs b. Each of its KV tokens
    # costs d.
    sequence_s = float(latency.step_s(sequences) - latency.step_s(1)) / sequences + latency.b_s
    # 1e-12 keeps the weight above 0, so that of workers with equal steps the one with fewer requests wins.
    return ScoreWeights(request=sequence_s + 1e-12, kv_token=latency.d_s)


def _weigh_requests(worker_type: WorkerType, decode: bool) -> ScoreWeights:
    return ScoreWeights(request=1.0)


def _weigh_tokens(worker_type: WorkerType, decode: bool) -> ScoreWeights:
    """Pending prompt tokens, and one more for each request, as in Splitwise."""
    return ScoreWeights(prompt_token=1.0, request=1.0)


def _weigh_pending_tokens(worker_type: WorkerType, decode: bool) -> ScoreWeights:
    return ScoreWeights(prompt_token=1.0)


def _weigh_waiting_requests(worker_type: WorkerType, decode: bool) -> ScoreWeights:
    return ScoreWeights(waiting_request=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A row of the table. `words` describe the policy; `simulators` are the simulator's engines that have it.

    It works with prefix caches unless `with_caches` is False, and `needs_caches` if it looks at them. It
    `counts_tenants` if it depends on the service of each tenant, which is part of the state of caches
    (simulator/cache_layout.py): a fleet without caches then has this state too, with empty caches.

    A plan may choose a policy that `is_planned`. If the question names none, it considers those that are
    `is_default`; of routings, those that need caches if the question allows caches, else the others.
    """

    kind: ClassVar[str] = ""
    name: str
    code: int
    words: str
    simulators: tuple[str, ...] = SIMULATORS
    with_caches: bool = True
    needs_caches: bool = False
    counts_tenants: bool = False
    is_planned: bool = False
    is_default: bool = False

    @property
    def reads_cache_state(self) -> bool:
        """Whether it looks at prefix caches or counts tenants."""
        return self.needs_caches or self.counts_tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching(Policy):
    """Which requests are in an engine's next step."""

    kind: ClassVar[str] = "batching"
    simulators: tuple[str, ...] = STEPWISE_ONLY
    is_chunked: bool = False  # Prompts are computed in chunks of the token budget.
    is_reserving: bool = False  # Each request reserves KV for `reserve_tokens` tokens.
    needs_reserve: bool = False  # `reserve_tokens` has no default.
    is_one_stage: bool = False  # It works only without pipeline parallelism.
    is_whole_life: bool = False  # It works only for mixed workers.
    is_watermarked: bool = False  # A prompt is admitted only if `watermark_frac` of the blocks stay free.
    takes_predictions: bool = True  # It can be simulated with (wrong) predictions of output lengths.

    @property
    def simulator(self) -> str:
        """The engine of the simulator that simulates this batching: the first of `simulators`."""
        return self.simulators[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue(Policy):
    """Which prompt is next.

    vLLM's priority is `rank` of the tokens of the prompt, of the output, and of the longest prompt. With
    `by_turns` it is a number that the router gives each request as it sends it. If prompts are
    `held_by_router`, engines serve them as they come, and the router decides when each comes.
    """

    kind: ClassVar[str] = "queue"
    simulators: tuple[str, ...] = STEPWISE_ONLY
    rank: Callable[[int, int, int], int] | None = None
    by_turns: bool = False
    held_by_router: bool = False
    by_deadline: bool = False  # Its order depends on when requests are due, which their class decides.
    at: Mapping[str, RouterDifference] = field(default_factory=dict)

    @property
    def has_rank(self) -> bool:
        """Whether a request's priority in vLLM follows from the request alone, whoever sends it."""
        return self.rank is not None or self.by_deadline

    @property
    def is_of_our_router(self) -> bool:
        """Whether only `plan serve` gives this order: it alone numbers prompts, or holds them."""
        return self.by_turns or self.held_by_router

    @property
    def is_by_priority(self) -> bool:
        """Whether engines order prompts by a number, from the request or from the router."""
        return self.has_rank or self.by_turns

    @property
    def has_longest_wait(self) -> bool:
        """Whether `longest_wait` bounds the waits in this queue: it does in orders by length."""
        return self.code != FCFS and not self.reads_cache_state and not self.by_deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission(Policy):
    """Whether a sequence may join the running ones, by predicted KV (kv_blocks.foreseen_blocks)."""

    kind: ClassVar[str] = "admission"
    simulators: tuple[str, ...] = STEPWISE_ONLY
    with_caches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(Policy):
    """Which worker takes a request. Routings that need no caches can also route hand-offs to decode workers.

    `setting_grid` has the fields of `Policies` that a search fits to the traffic, with the values to try; the
    most influential field comes first.
    """

    kind: ClassVar[str] = "routing"
    # By worker type, and whether it decodes.
    weights: Callable[[WorkerType, bool], ScoreWeights] = _weigh_seconds
    setting_grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    draws: bool = False  # It draws at random, so results depend on the seed.
    pins: bool = False  # It goes by pinned prefixes, which a plan chooses with the fleet.
    has_window: bool = False  # It considers the requests of the last `share_window_s`.
    counts_added: bool = True  # False: simulator/splitwise.py adds no new requests to loads.
    by_formula: bool = False  # It needs step times of f, b and d (models/latency.py), in no other form.
    holds_back: bool = False  # Requests may wait at the router, first come, first served.
    at: Mapping[str, RouterDifference] = field(default_factory=dict)

    @property
    def is_of_whole_workers(self) -> bool:
        """Whether it judges a worker by sums over all its data-parallel ranks."""
        return self.code in (SCORE, ROUND_ROBIN, TWO_BY_REQUESTS, LOWEST_BY_LOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools(Policy):
    """Whether workers change their role."""

    kind: ClassVar[str] = "pools"
    with_caches: bool = False


# vLLM's rule for a queue in which each request brings a priority.
_PRIORITY = {VLLM: RouterDifference("priority", "goes by the number that each request brings with it")}
# The rule by caches that a router applies in place of a routing by caches that it lacks.
_CACHES = {
    VLLM_ROUTER: substitute_rule("cache_aware"),
    VLLM_ROUTER_PAIRS: substitute_rule("cache_aware"),
    ENDPOINT_PICKER: substitute_rule(NEAR_AND_FREE),
    DYNAMO: substitute_rule("kv"),
    RAY_SERVE: substitute_rule("PrefixCacheAffinityRouter"),
}
_ROUND_ROBIN_NAMES = {  # Round robin, by the routers' own names.
    VLLM_ROUTER: "round_robin",
    VLLM_ROUTER_PAIRS: "round_robin",
    DYNAMO: "round-robin",
    RAY_SERVE: "RoundRobinRouter",
    STACK: "roundrobin",
    STACK_PAIRS: STACK_PAIR_ROUTING,
    SKYSERVE: "round_robin",
}

TABLE: tuple[Policy, ...] = (
    Batching(
        name="vllm-v1",
        code=VLLM_V1,
        words="all decodes, then prompts in chunks, as vLLM V1 does it",
        is_planned=True,
        is_default=True,
        is_chunked=True,
    ),
    Batching(
        name="sarathi",
        code=SARATHI,
        words="all decodes, then prompts in chunks, as Vidur's Sarathi does it",
        is_chunked=True,
        is_watermarked=True,
    ),
    Batching(
        name="vllm-v0",
        code=VLLM_V0,
        words="whole prompts before all decodes, as vLLM V0 did it",
        with_caches=False,
        is_watermarked=True,
    ),
    Batching(
        name="orca",
        code=ORCA,
        words="all decodes and whole prompts in one step",
        with_caches=False,
        is_reserving=True,
        is_watermarked=True,
    ),
    Batching(
        name="faster-transformer",
        code=FASTER_TRANSFORMER,
        words="a group of prompts, then its decodes until the last is done",
        with_caches=False,
        is_reserving=True,
        needs_reserve=True,
        is_whole_life=True,
    ),
    Batching(
        name="lightllm",
        code=LIGHTLLM,
        words="prompts and decodes in steps of their own, admitted by the peak of KV",
        with_caches=False,
        is_one_stage=True,
        is_whole_life=True,
    ),
    Batching(
        name="distserve",
        code=DISTSERVE,
        words="DistServe's engine: a batch for each pipeline stage",
        simulators=(OF_DISTSERVE,),
        with_caches=False,
    ),
    Batching(
        name="splitwise",
        code=SPLITWISE,
        words="Splitwise's machines: prompts before decodes, with ageing",
        simulators=(OF_SPLITWISE,),
        with_caches=False,
        is_one_stage=True,
        takes_predictions=False,
    ),
    Queue(
        name="fcfs",
        code=FCFS,
        words="first come, first served",
        simulators=SIMULATORS,
        is_planned=True,
        is_default=True,
        at={VLLM: RouterDifference("fcfs")},
    ),
    Queue(
        name="sjf",
        code=SJF,
        words="shortest prompt first",
        is_planned=True,
        rank=lambda prompt, output, longest: prompt,
        at=_PRIORITY,
    ),
    Queue(
        name="ljf",
        code=LJF,
        words="longest prompt first",
        is_planned=True,
        rank=lambda prompt, output, longest: longest - prompt,
        at=_PRIORITY,
    ),
    Queue(
        name="srpt",
        code=SRPT,
        words="shortest prompt and output first",
        is_planned=True,
        rank=lambda prompt, output, longest: prompt + output,
        at=_PRIORITY,
    ),
    Queue(
        name="edf",
        code=EDF,
        words="the request that is due first: its arrival plus the limit of its class",
        is_planned=True,
        by_deadline=True,
        at=_PRIORITY,
    ),
    Queue(name="lpm", code=LPM, words="longest cached prefix first", needs_caches=True),
    Queue(name="vtc", code=VTC, words="the tenant that was served least first", counts_tenants=True),
    Queue(
        name="dlpm",
        code=DLPM,
        words="longest cached prefix first, of the tenants with credit",
        counts_tenants=True,
    ),
    Queue(
        name="dlpm-turns",
        code=TURNS,
        words="as dlpm, by a number that each prompt is given when it is sent",
        counts_tenants=True,
        by_turns=True,
        at={VLLM: RouterDifference("priority", "goes by the number that `plan serve` gives each request")},
    ),
    Queue(
        name="dlpm-held",
        code=DLPM_HELD,
        words="as dlpm, at the router, which keeps two prompts or two steps of prompts at each engine",
        counts_tenants=True,
        held_by_router=True,
        at={VLLM: RouterDifference("fcfs", "takes prompts as they come; `plan serve` holds and orders them")},
    ),
    Queue(
        name="preble",
        code=PREBLE,
        words="longest cached prefix first, in priority groups that share the turns",
        needs_caches=True,
    ),
    Admission(
        name="greedy",
        code=GREEDY,
        words="if its KV fits now",
        simulators=SIMULATORS,
        with_caches=True,
        is_planned=True,
        is_default=True,
    ),
    Admission(
        name="reserve-static",
        code=RESERVE_STATIC,
        words="if all KV that it is predicted to need fits beside what is used now",
    ),
    Admission(
        name="reserve-dynamic",
        code=RESERVE_DYNAMIC,
        words="if all KV fits when the first running decode is predicted to end",
    ),
    Routing(
        name="jsq",
        code=SCORE,
        words="join the shortest queue, in seconds of work",
        is_planned=True,
        is_default=True,
        at={
            ENDPOINT_PICKER: RouterDifference(
                FEWEST_TOKENS, "counts tokens of prompts until their first token, not seconds of work"
            )
        },
    ),
    Routing(
        name="least-outstanding",
        code=SCORE,
        words="the fewest requests in flight",
        weights=_weigh_requests,
        is_planned=True,
        at={
            ENDPOINT_PICKER: RouterDifference(FEWEST_REQUESTS),
            ENDPOINT_PICKER_DECODE: RouterDifference(FEWEST_REQUESTS),
            DYNAMO: RouterDifference("least-loaded"),
            SKYSERVE: RouterDifference("least_load"),
        },
    ),
    Routing(
        name="power-of-two",
        code=POWER_OF_TWO,
        words="the shorter queue of two workers drawn at random",
        simulators=(STEPWISE, OF_DISTSERVE),
        is_planned=True,
        draws=True,
        at={
            VLLM_ROUTER: RouterDifference("power_of_two", "compares requests in flight, not seconds of work"),
            DYNAMO: RouterDifference("power-of-two", "compares requests in flight, not seconds of work"),
            RAY_SERVE: RouterDifference(EMPTIER_OF_TWO, "is by requests in flight, not by seconds of work"),
        },
    ),
    Routing(
        name="power-of-two-requests",
        code=TWO_BY_REQUESTS,
        words="the fewer requests in flight of two workers drawn at random",
        simulators=STEPWISE_ONLY,
        weights=_weigh_requests,
        is_planned=True,
        draws=True,
        at={
            VLLM_ROUTER: RouterDifference("power_of_two"),
            DYNAMO: RouterDifference("power-of-two"),
            RAY_SERVE: RouterDifference(EMPTIER_OF_TWO),
            KSERVE: RouterDifference(GATEWAY, "spreads requests over the workers by its own setting"),
        },
    ),
    Routing(
        name="heavy-light",
        code=HEAVY_LIGHT,
        words="of two drawn that have room, the one with fewer outputs as long or short as predicted",
        simulators=STEPWISE_ONLY,
        draws=True,
    ),
    Routing(
        name="pending-tokens",
        code=LOWEST_BY_LOT,
        words="the fewest tokens of prompts without a first token, by lot among equals",
        simulators=STEPWISE_ONLY,
        weights=_weigh_pending_tokens,
        is_planned=True,
        draws=True,
        at={ENDPOINT_PICKER: RouterDifference(FEWEST_TOKENS)},
    ),
    Routing(
        name="round-robin",
        code=ROUND_ROBIN,
        words="each worker in turn",
        simulators=(STEPWISE, OF_DISTSERVE),
        is_planned=True,
        at={
            **{router: RouterDifference(name) for router, name in _ROUND_ROBIN_NAMES.items()},
            ENDPOINT_PICKER: substitute_rule(FEWEST_REQUESTS),
            KSERVE: RouterDifference(GATEWAY, "spreads requests over the workers by its own setting"),
        },
    ),
    Routing(
        name="random",
        code=RANDOM,
        words="a worker drawn at random",
        simulators=(STEPWISE, OF_DISTSERVE),
        draws=True,
        at={
            VLLM_ROUTER: RouterDifference("random"),
            VLLM_ROUTER_PAIRS: RouterDifference("random"),
            ENDPOINT_PICKER: RouterDifference("random-picker"),
            ENDPOINT_PICKER_DECODE: RouterDifference("random-picker"),
            DYNAMO: RouterDifference("random"),
        },
    ),
    Routing(
        name="best-fit",
        code=BEST_FIT,
        words="the fullest worker that keeps its limits",
        simulators=STEPWISE_ONLY,
        by_formula=True,
    ),
    Routing(
        name="best-fit-rebalanced",
        code=REBALANCED,
        words="as best-fit, or another worker within its limits, if that evens out errors of predictions",
        simulators=STEPWISE_ONLY,
        by_formula=True,
    ),
    Routing(
        name="same-node",
        code=SAME_PLACE,
        words="the shortest queue; of hand-offs on the prefill worker's nodes, if there is room",
        simulators=(STEPWISE, OF_DISTSERVE),
    ),
    Routing(
        name="deferred",
        code=DEFERRED,
        words="the fewest requests in flight, once a worker has less than two steps of prompts to compute",
        simulators=STEPWISE_ONLY,
        weights=_weigh_requests,
        holds_back=True,
    ),
    Routing(
        name="token-jsq",
        code=SCORE,
        words="the fewest pending prompt tokens, each request counted as one more",
        weights=_weigh_tokens,
    ),
    Routing(
        name="kv-token-jsq",
        code=SCORE,
        words="as Splitwise's program: the fewest pending tokens, to which it never adds new requests",
        simulators=(OF_SPLITWISE,),
        weights=_weigh_tokens,
        counts_added=False,
    ),
    Routing(
        name="least-waiting",
        code=SCORE,
        words="as DistServe's program: the fewest waiting requests",
        simulators=(OF_DISTSERVE,),
        weights=_weigh_waiting_requests,
        at={
            ENDPOINT_PICKER: RouterDifference(FEWEST_WAITING),
            ENDPOINT_PICKER_DECODE: RouterDifference(FEWEST_WAITING),
        },
    ),
    Routing(
        name="prefix-affinity",
        code=AFFINITY,
        words="the longest cached prefix",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        is_planned=True,
        at={
            **_CACHES,
            ENDPOINT_PICKER: RouterDifference(LONGEST_MATCH),
            STACK: RouterDifference("prefixaware"),
        },
    ),
    Routing(
        name="min-ttft",
        code=MIN_TTFT,
        words="the least seconds to the first token, counting what is cached",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        is_planned=True,
        at=_CACHES,
    ),
    Routing(
        name="cache-aware",
        code=CACHE_AWARE,
        words="a long cached prefix, else the smallest cache; the fewest requests while load is uneven",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        is_planned=True,
        is_default=True,
        setting_grid={
            # The defaults of `Policies` and values around them. High thresholds are for agents whose system
            # prompt is half of many prompts: at a low one the router would follow this match and send all to
            # one worker.
            "cache_threshold_frac": (0.1, 0.3, 0.5, 0.65, 0.8, 0.9),
            "balance_requests": (2, 8, 32, 64),
            "balance_ratio": (1.1, 1.5, 2.0),
        },
        at={
            **_CACHES,
            VLLM_ROUTER: RouterDifference("cache_aware"),
            VLLM_ROUTER_PAIRS: RouterDifference(
                "cache_aware", "sees no load there, so it always goes by the match"
            ),
            RAY_SERVE: RouterDifference("PrefixCacheAffinityRouter", "knows no ratio of loads"),
        },
    ),
    Routing(
        name="e2",
        code=E2,
        words="the longest cached prefix where it is most of the prompt, else the least load",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        is_planned=True,
        is_default=True,
        # The defaults of `Policies`, and values below and above them.
        setting_grid={"balance_ratio": (1.1, 1.5, 3.0), "share_window_s": (60.0, 180.0, 600.0)},
        has_window=True,
        at=_CACHES,
    ),
    Routing(
        name="e2-dynamic",
        code=E2_DYNAMIC,
        words="as e2, but the less there is to do, the longer must the cached prefix be",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        has_window=True,
        at=_CACHES,
    ),
    Routing(
        name="d2lpm",
        code=D2LPM,
        words="the longest cached prefix of the workers where the tenant has credit",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        counts_tenants=True,
        is_planned=True,
        at=_CACHES,
    ),
    Routing(
        name="tenant-round-robin",
        code=TENANT_TURNS,
        words="each worker in turn, for each tenant by itself",
        simulators=STEPWISE_ONLY,
        counts_tenants=True,
        at={
            **{router: substitute_rule(name) for router, name in _ROUND_ROBIN_NAMES.items()},
            ENDPOINT_PICKER: substitute_rule(FEWEST_REQUESTS),
        },
    ),
    Routing(
        name="pinned-prefix",
        code=PINNED,
        words="the least seconds to the first token, among the workers where the prefix is pinned",
        simulators=STEPWISE_ONLY,
        needs_caches=True,
        is_planned=True,
        is_default=True,
        pins=True,
        at=_CACHES,
    ),
    Pools(
        name="static",
        code=STATIC,
        words="workers keep their role",
        with_caches=True,
        is_planned=True,
        is_default=True,
    ),
    Pools(
        name="flip",
        code=FLIP,
        words="an idle worker takes the other role where that is busy",
        simulators=STEPWISE_ONLY,
    ),
    Pools(
        name="repurpose",
        code=REPURPOSE,
        words="the least busy worker drains and takes the role that has long been short of workers",
        simulators=STEPWISE_ONLY,
    ),
    Pools(
        name="splitwise",
        code=MIXED_POOL,
        words="machines join a mixed pool where queues are long, and may change sides for good",
        simulators=(OF_SPLITWISE,),
    ),
)


AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def _rows_by_name(kind: type[AnyPolicy]) -> Mapping[str, AnyPolicy]:
    return MappingProxyType({row.name: row for row in TABLE if isinstance(row, kind)})


BATCHING, QUEUE, ADMISSION = _rows_by_name(Batching), _rows_by_name(Queue), _rows_by_name(Admission)
ROUTING, POOLS = _rows_by_name(Routing), _rows_by_name(Pools)
QUEUE_OF_CLASSES = next(row for row in QUEUE.values() if row.by_deadline)
TIES_BY = ROUTING["jsq"]  # Workers with equal scores: the fastest by these weights comes first.
# The fields of `Policies` that name a row of the table.
BY_FIELD: Mapping[str, Mapping[str, Policy]] = MappingProxyType(
    {
        "batching": BATCHING,
        "routing": ROUTING,
        "decode_routing": ROUTING,
        "queue": QUEUE,
        "admission": ADMISSION,
        "pools": POOLS,
    }
)


def routes_to_ranks(policies: Policies, role: Role) -> bool:
    """Whether workers of this role may have data-parallel ranks. Routers see a worker as a whole, and the
    engine chooses the rank, so routings that look into workers are not simulated with ranks.
    """
    routing = policies.decode_routing if role == "decode" else policies.routing
    return ROUTING[routing].is_of_whole_workers


def by_tenant(policies: Policies) -> bool:
    """Whether the router must know the tenant of each request."""
    row = QUEUE[policies.queue]
    is_due_by_tenant = row.by_deadline and any(selector.tenants for selector, _ in policies.due)
    return ROUTING[policies.routing].counts_tenants or row.is_of_our_router or is_due_by_tenant


# The policies that a plan may choose for any SLO; EDF is left out because it needs classes. Routings that
# need prefix caches are added if the question allows caches.
PLANNED_QUEUES = tuple(row.name for row in QUEUE.values() if row.is_planned and not row.by_deadline)
PLANNED_ROUTINGS = tuple(row.name for row in ROUTING.values() if row.is_planned and not row.needs_caches)
PLANNED_WITH_CACHES = tuple(row.name for row in ROUTING.values() if row.is_planned and row.needs_caches)


def default_routings(*, with_caches: bool) -> tuple[str, ...]:
    """The routings that a plan considers if the question names none: with caches those that need caches."""
    return tuple(row.name for row in ROUTING.values() if row.is_default and row.needs_caches == with_caches)


def is_deployed(row: Policy, target: str | None) -> bool:
    """Whether vLLM and the routers of `target` (None: `plan serve`) do what the row says. vLLM decides on
    batching, admission and roles as the default rows do.
    """
    if isinstance(row, Queue):
        is_lacking = find_router_difference(row, VLLM).is_lacking
        return not is_lacking and not (row.is_of_our_router and target is not None)
    if isinstance(row, Routing):
        is_lacking = find_router_difference(row, OURS).is_lacking
        return not (is_lacking if target is None else lacks_routing(row.name, target))
    return row.is_default


def counts_tenants(policies: Policies) -> bool:
    """Whether one of the policies depends on the service of each tenant."""
    return any(rows[getattr(policies, name)].counts_tenants for name, rows in BY_FIELD.items())


def go_together(policies: Policies) -> bool:
    """Whether these policies can be combined: with `prefix_cache` all must work with caches, without it none
    may need them.

    Beside a policy that counts tenants all must work with caches, as their state has these counts.
    """
    rows = [table[getattr(policies, name)] for name, table in BY_FIELD.items()]
    if ROUTING[policies.decode_routing].reads_cache_state:  # simulator/policy_checks.py says why.
        return False
    if (policies.prefix_cache or counts_tenants(policies)) and not all(row.with_caches for row in rows):
        return False
    return policies.prefix_cache or not any(row.needs_caches for row in rows)


def find_router_difference(row: Queue | Routing, router: str) -> RouterDifference:
    """What `router` (a key of ROUTERS) does if a plan has this routing, or this order of prompts.

    A router without an entry in `row.at` does as the router that it is `like`. Without such a router it lacks
    the policy.
    """
    if router == OURS:
        if isinstance(row, Queue):
            return find_router_difference(row, VLLM)
        return RouterDifference(row.name) if STEPWISE in row.simulators else substitute_rule("")
    if router in row.at:
        return row.at[router]
    entry = ROUTERS[router]
    return find_router_difference(row, entry.like) if entry.like else substitute_rule(entry.otherwise)


# -- a plan's routing as it is deployed --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """The simulator's nearest equivalent of a router's rule: `routing`, and how the rule `differs` from it.

    `settings` are fields of `Policies` that the router fixes. `defaults` are the router's own values of
    others, used if the plan has another routing, because then it has no values that were fitted to this one.
    `hand_off_routing` routes hand-offs if `routing` looks at caches, which decode workers lack. With
    `differs_in_pairs` the difference is about hand-offs, so fleets of mixed workers do not have it.
    """

    routing: str
    differs: str = ""
    settings: Mapping[str, float] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    hand_off_routing: str = "least-outstanding"
    differs_in_pairs: bool = False


# A value of `balance_requests`: the loads of two workers never differ by so many requests, so uneven load
# never overrides the routing by caches.
_UNBOUNDED = 10**9
_ROUND_ROBIN_RULE = RoutingRule("round-robin")
_POWER_OF_TWO_RULE = RoutingRule("power-of-two-requests")
_RANDOM_RULE = RoutingRule("random", "takes workers without room for the KV too")
_COMPARES_CHARACTERS = "compares characters of prompts, not blocks of tokens"
_OF_VLLM_ROUTER: Mapping[str, RoutingRule] = {
    "power_of_two": _POWER_OF_TWO_RULE,
    "round_robin": _ROUND_ROBIN_RULE,
    "random": _RANDOM_RULE,
    "cache_aware": RoutingRule("cache-aware", _COMPARES_CHARACTERS),
}
_OF_PICKER: Mapping[str, RoutingRule] = {
    FEWEST_TOKENS: RoutingRule(
        "pending-tokens", "counts hand-offs until the decode worker's first token", differs_in_pairs=True
    ),
    FEWEST_REQUESTS: RoutingRule("least-outstanding", "draws among equals"),
    FEWEST_WAITING: RoutingRule(
        "pending-tokens", "counts waiting requests, as they were at the last scrape of its metrics"
    ),
    "random-picker": _RANDOM_RULE,
    LONGEST_MATCH: RoutingRule("prefix-affinity", "draws among equals"),
    NEAR_AND_FREE: RoutingRule(
        "e2", "keeps to what holds the prompt's beginning, unless more is queued there"
    ),
}
RULES: Mapping[str, Mapping[str, RoutingRule]] = MappingProxyType(
    {
        VLLM_ROUTER: _OF_VLLM_ROUTER,
        VLLM_ROUTER_PAIRS: {
            **_OF_VLLM_ROUTER,
            "cache_aware": RoutingRule(
                "cache-aware", _COMPARES_CHARACTERS, settings={"balance_requests": _UNBOUNDED}
            ),
        },
        ENDPOINT_PICKER: _OF_PICKER,
        ENDPOINT_PICKER_DECODE: _OF_PICKER,
        KSERVE: {
            **_OF_PICKER,
            GATEWAY: RoutingRule(
                _POWER_OF_TWO_RULE.routing, "is Envoy's least request unless you set another"
            ),
        },
        DYNAMO: {
            "least-loaded": RoutingRule("least-outstanding"),
            "power-of-two": _POWER_OF_TWO_RULE,
            "round-robin": _ROUND_ROBIN_RULE,
            "random": _RANDOM_RULE,
            "kv": RoutingRule("min-ttft", "weighs blocks to compute and blocks in use, not seconds"),
        },
        RAY_SERVE: {
            EMPTIER_OF_TWO: RoutingRule(
                _POWER_OF_TWO_RULE.routing, "draws among replicas on its own node first"
            ),
            "RoundRobinRouter": _ROUND_ROBIN_RULE,
            "PrefixCacheAffinityRouter": RoutingRule(
                "cache-aware",
                _COMPARES_CHARACTERS,
                settings={"balance_ratio": 1.0},
                defaults={"balance_requests": _UNBOUNDED, "cache_threshold_frac": 0.1},
            ),
        },
        STACK: {
            "roundrobin": _ROUND_ROBIN_RULE,
            "prefixaware": RoutingRule("prefix-affinity", "never forgets what it sent"),
        },
        STACK_PAIRS: {STACK_PAIR_ROUTING: _ROUND_ROBIN_RULE},
        SKYSERVE: {
            "least_load": RoutingRule("least-outstanding", "takes turns among equals"),
            "round_robin": _ROUND_ROBIN_RULE,
        },
    }
)


def rule_of(router: str, rule_name: str) -> RoutingRule:
    """The rule of `router` with this name, which `find_router_difference` returned."""
    return RULES[router][rule_name]


@dataclass(frozen=True, slots=True)
class Deployed:
    """The routing of a deployed fleet: the names of the router's rules for arrivals and, in pairs, for
    hand-offs. `policies` are the closest that the simulator has to them; `differs` says what still differs.
    """

    router: str
    rule_names: tuple[str, ...]
    policies: Policies
    differs: tuple[str, ...]


def router_name(router: str, rule_names: Iterable[str]) -> str:
    """The name of a router with its rules, each once: "vllm-router by round_robin"."""
    return f"{router} by {' and '.join(dict.fromkeys(rule_names))}"


def find_deployed_routing(policies: Policies, target: str, *, is_pair: bool) -> Deployed:
    """The routing of a plan with these policies at a deployment target, for mixed workers or for pairs."""
    mixed_router, prefill_router, decode_router = ROUTERS_OF[target]
    router = prefill_router if is_pair else mixed_router
    arrivals = find_router_difference(ROUTING[policies.routing], router)
    rule = rule_of(router, arrivals.name)
    changed: dict[str, Any] = {"routing": rule.routing, **rule.settings}
    if arrivals.is_lacking:
        # The plan's settings were fitted to the routing that the target lacks. They are replaced by our
        # defaults, these by the router's own values, and these by what the router fixes (in `changed`).
        our_defaults = Policies()
        unfitted = {name: getattr(our_defaults, name) for name in ROUTING[rule.routing].setting_grid}
        changed = {**unfitted, **rule.defaults, **changed}
    rule_names = [arrivals.name]
    differs = [rule.differs if is_pair or not rule.differs_in_pairs else ""]
    if is_pair:
        hand_offs = find_router_difference(ROUTING[policies.decode_routing], decode_router)
        hand_off_name = arrivals.name if ROUTERS[decode_router].is_single else hand_offs.name
        hand_off_rule = rule_of(decode_router, hand_off_name)
        needs_caches = ROUTING[hand_off_rule.routing].needs_caches  # Decode workers have none.
        changed["decode_routing"] = hand_off_rule.hand_off_routing if needs_caches else hand_off_rule.routing
        rule_names.append(hand_off_name)
        differs.append("" if needs_caches else hand_off_rule.differs)
    differences = tuple(dict.fromkeys(each for each in differs if each))
    return Deployed(ROUTERS[router].title, tuple(rule_names), replace(policies, **changed), differences)


def lacks_routing(routing: str, target: str) -> bool:
    """Whether the target replaces this routing by another rule, for mixed workers as well as for pairs."""
    row = ROUTING[routing]
    mixed_router, prefill_router, _ = ROUTERS_OF[target]
    return all(find_router_difference(row, each).is_lacking for each in (mixed_router, prefill_router))
