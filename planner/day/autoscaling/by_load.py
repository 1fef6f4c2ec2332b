"""The rules by load of our controller (controllers/planned.py) as recording rules in PromQL.

A recording rule computes a series, called its record, from other series. The first two records below are of
all pools, the others of one pool. Each record has a constant of the same name in capitals:

prompt, output   mean tokens of a request over the window of the rules
token_work       what an output token adds to a worker's steps                             [s]
request_work     what a request of the mean lengths adds (EngineProfile.work_s)            [s]
work             what the tokens of the last span added, per second of the span            [s/s]
now              the rate expected now                                                [requests/s]
growth           the highest rate expected up to `ahead_s` from now, divided by `now`; 1 to 3
load             the 95th percentile of work over the spans of the last `memory_s` (by default the window of
                 the rules), times growth and 1 + headroom; plus the work per second that serves the waiting
                 prompts within `drain_s`
The expressions are PromQL. The workers for a load are a step function of it (`worker_steps_expr`,
LoadRule.workers_for_load).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.day.autoscaling.autoscaler import DAY_S, Autoscaler
from planner.day.autoscaling.prometheus_queries import (
    FIRST_TOKENS,
    MOST_STEPS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    llm_series,
    per_s,
    pool_series,
    waiting_beyond_one,
)
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.day.controllers.knowledge import DECODE, PEAK_FRAC, PREFILL, EngineProfile, LoadRule
from planner.day.controllers.planned import MOST_GROWTH, FleetplanSettings
from planner.domain import ROUNDING
from planner.errors import InputError
from planner.fleet import Role
from planner.manifests import monitoring

PROMPT, OUTPUT = "fleetplan:prompt_mean_tokens", "fleetplan:output_mean_tokens"
TOKEN_WORK, REQUEST_WORK = "fleetplan:pool_token_work_s", "fleetplan:pool_request_work_s"
WORK, LOAD = "fleetplan:pool_work", "fleetplan:pool_load"
NOW, GROWTH = "fleetplan:pool_now_rps", "fleetplan:pool_growth"


@dataclass(frozen=True, slots=True)
class PoolsByWork:
    """The names of the pools that compute prompts, and of those that make all output tokens but the first."""

    prefilling: Sequence[str]
    decoding: Sequence[str]


@dataclass(frozen=True, slots=True)
class PoolRule:
    """A pool's LoadRule, and the seconds that tokens add to the steps of a worker.

    A prompt token adds `prompt_token_s`; an output token adds `output_token_s`, and `context_token_s` per
    token of its context.
    """

    load_rule: LoadRule
    prompt_token_s: float
    output_token_s: float
    context_token_s: float

    def __post_init__(self) -> None:
        numbers = (self.prompt_token_s, self.output_token_s, self.context_token_s)
        if not all(math.isfinite(each) and each >= 0 for each in numbers) or not any(numbers):
            raise InputError(
                f"fleetplan: rules: work of tokens must be finite, >= 0 and not all 0: {numbers}"
            )


def pool_rule(rule: LoadRule, engine: EngineProfile, role: Role) -> PoolRule:
    """The PoolRule of a LoadRule whose workers have this engine and role."""
    prefills, decodes = role != DECODE, role != PREFILL
    return PoolRule(
        rule,
        prompt_token_s=engine.prefill_s_per_token if prefills else 0.0,
        # A decoding sequence makes one token per step.
        output_token_s=engine.decode_s_per_sequence if decodes else 0.0,
        context_token_s=engine.decode_s_per_token if decodes else 0.0,
    )


def pool_rules_of(autoscaler: Autoscaler) -> tuple[PoolRule, ...]:
    """One rule per pool; () if the controller goes by the request rate instead of the load."""
    settings, knowledge = autoscaler.settings, autoscaler.knowledge
    if not isinstance(settings, FleetplanSettings) or settings.by != "load" or not knowledge.engines:
        return ()
    rules = (rule.with_floor(settings.floor_frac) for rule in knowledge.rules)
    return tuple(map(pool_rule, rules, knowledge.engines, knowledge.roles))


def length_exprs(rules: Sequence[PoolRule], pools: PoolsByWork) -> Mapping[str, str]:
    """The expressions of PROMPT and OUTPUT, by record."""
    window_s = math.ceil(max(rule.load_rule.window_s for rule in rules))
    # Each request has one first token, so first tokens count requests.
    requests = per_s(FIRST_TOKENS, pools.prefilling, window_s)
    prompt_tokens = per_s(PROMPT_TOKENS, pools.prefilling, window_s)
    output_tokens = per_s(OUTPUT_TOKENS, pools.decoding, window_s)
    # Without a request in the window a mean counts as 0.
    return {
        PROMPT: f"{prompt_tokens} / ({requests} > 0) or vector(0)",
        OUTPUT: f"{output_tokens} / ({requests} > 0) or vector(0)",
    }


def load_exprs(
    autoscaler: Autoscaler,
    app: str,
    scale_target: ScaleTarget,
    rule: PoolRule,
    expected_expr: str,
    now_expr: str,
    pools: PoolsByWork,
) -> dict[str, str]:
    """The expressions of the pool of `scale_target`, by record; the last record is its load. `app` is the
    name of the LLM in labels.

    `expected_expr` is the highest rate expected up to `ahead_s` from now, `now_expr` the rate expected now.
    """
    settings: FleetplanSettings = autoscaler.settings
    span_s = math.ceil(whole_span_s(autoscaler, rule))
    memory_s = max(rule_memory_s(autoscaler, rule), span_s)
    prompt, output = (f"sum({llm_series(name, app)})" for name in (PROMPT, OUTPUT))
    token_work, request_work, now, growth = (
        f"sum({pool_series(name, app, scale_target)})" for name in (TOKEN_WORK, REQUEST_WORK, NOW, GROWTH)
    )
    # A rate needs two scrapes; a span and one scrape interval always have two that are a span apart.
    range_s = max(span_s, monitoring.SCRAPE_S) + monitoring.SCRAPE_S
    expr_by_record, request_terms, work_terms = {}, [], []
    # In the expressions below, `!r` writes all digits of a number.
    if rule.prompt_token_s:
        request_terms.append(f"{rule.prompt_token_s!r} * {prompt}")
        work_terms.append(f"{rule.prompt_token_s!r} * {per_s(PROMPT_TOKENS, pools.prefilling, range_s)}")
    if rule.output_token_s or rule.context_token_s:
        # The mean context of an output token is the prompt and half of the answer.
        expr_by_record[TOKEN_WORK] = (
            f"{rule.output_token_s!r} + {rule.context_token_s!r} * ({prompt} + {output} / 2)"
        )
        request_terms.append(f"{output} * {token_work}")
        work_terms.append(f"{per_s(OUTPUT_TOKENS, pools.decoding, range_s)} * {token_work}")
    # Without a rate now there is no ratio of rates, and growth is 1.
    expr_by_record |= {
        REQUEST_WORK: " + ".join(request_terms),
        WORK: " + ".join(work_terms),
        NOW: now_expr,
        GROWTH: f"clamp({expected_expr} / ({now} > 0), 1, {MOST_GROWTH:.12g}) or vector(1)",
    }
    work = pool_series(WORK, app, scale_target)
    if memory_s > span_s:
        # Prometheus takes the moments of a subquery at multiples of its step. One span ends now.
        work = f"quantile_over_time({PEAK_FRAC:g}, {work}[{memory_s}s:{span_s}s])"
    expr_by_record[LOAD] = f"{1 + settings.headroom_frac:.12g} * {growth} * sum({work})"
    if drain_s := math.ceil(settings.drain_s):
        # Negative where fewer prompts wait than there are workers.
        waiting = waiting_beyond_one(pools.prefilling)
        expr_by_record[LOAD] += f" + clamp_min({waiting}, 0) / {drain_s} * {request_work}"
    return expr_by_record


def worker_steps_expr(rule: PoolRule, load: str) -> str:
    """LoadRule.workers_for_load as PromQL, where `load` is PromQL of a vector without labels."""
    # One worker for any load, and one more for each edge below the load. Equal edges share a term. Edges at
    # the highest load or above have no effect, because the last term decides there.
    highest = rule.load_rule.highest
    edges = Counter(edge for edge in rule.load_rule.edges if edge < highest)
    if len(edges) > MOST_STEPS:
        raise InputError(f"fleetplan: rules: {len(edges)} edges, a rule holds {MOST_STEPS}")
    at_highest = 1 + edges.total()
    # Any load is above edges at 0, so these join the first term.
    terms = [f"{1 + edges.pop(0.0, 0)} * ({load} > bool 0)"]
    terms += [f"{more} * ({load} > bool {edge!r})" for edge, more in edges.items()]
    # Above the highest load workers grow in proportion to the load.
    beyond = f"(ceil({load} * {at_highest / highest!r} - {ROUNDING}) - {at_highest})"
    return " + ".join([*terms, f"({load} > bool {highest!r}) * {beyond}"])


def whole_span_s(autoscaler: Autoscaler, rule: PoolRule) -> float:
    """The rule's span, rounded up to whole intervals of the controller (`every_s`) [s]."""
    every_s: float = autoscaler.settings.every_s
    return math.ceil(rule.load_rule.span_s / every_s - ROUNDING) * every_s


def rule_memory_s(autoscaler: Autoscaler, rule: PoolRule) -> int:
    """The time before now over which the load is a percentile of work [s]; by default the rule's window."""
    memory_s: float | None = autoscaler.settings.memory_s
    if memory_s is None:
        return math.ceil(rule.load_rule.window_s)
    return autoscaler.whole_seconds("memory_s", memory_s, least=1, most=DAY_S)


def limit_lines(autoscaler: Autoscaler, rules: Sequence[PoolRule]) -> tuple[str, ...]:
    """Lines for the README.md of the manifests: where these rules differ from the simulated controller."""
    spans_s = sorted({whole_span_s(autoscaler, rule) for rule in rules})
    spans = ", ".join(f"{span_s:g} s" for span_s in spans_s)
    return (
        f"It goes by load, in spans of {spans}. Work was counted as requests came; vLLM counts a prompt with "
        "its first token and an output token when it is made. What comes beyond what the workers serve shows "
        "as prompts that wait. Tokens of prompts that were cached count, as in the simulation.",
        "Seconds of work per prompt token and per output token are written into the rules. The context of an "
        "output token is the mean of the last window; the simulation took that of each span. Another GPU, "
        "model or engine setting needs other rules: plan again.",
        f"Metrics come every {monitoring.SCRAPE_S} s. A span no longer than that lies between two scrapes: "
        "if one of them is lost, the worker's load is missing from that span.",
    )
