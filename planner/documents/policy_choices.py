"""Reads `policies:` of slo.yaml, the policies that a plan may choose among, into `PolicyChoices`.

    policies:
      queue: [fcfs, sjf]                   # a row of planner/policies.py, a list of rows, or any
      routing: any                         # likewise decode_routing, batching, admission, pools
      prediction: [known, mean, 85 %]      # what schedulers believe of output lengths
      longest_wait: 60 s                   # no request is overtaken by one that arrives this much later
      prefix_cache: true                   # workers keep prefixes; rows that look at caches need it
      research: true                       # `any` includes rows that no target deploys
      quantum_tokens: 2000                 # and every other setting of fleet.yaml

An axis is a key with several values to choose among. Every combination of the values that a question names is
searched by itself. `any` stands for every row that the deployment target has: only the usual row (for
`routing` several) is searched, and the other rows are raced, which is to try them on the fleet that the
search finds (search/mixed/policy_search.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.documents.policy_settings import (
    POLICY_COUNTS,
    POLICY_NUMBERS,
    POLICY_SECONDS,
    POLICY_SHARES,
    parse_settings,
)
from planner.domain import Selector, Slo
from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, read_share
from planner.fleet import Policies
from planner.models.kv_offload import KvOffload
from planner.policies import (
    BATCHING,
    BY_FIELD,
    CACHE_AWARE,
    FCFS,
    MIXED_POOL,
    POOLS,
    QUEUE,
    QUEUE_OF_CLASSES,
    REPURPOSE,
    ROUTING,
    STEPWISE,
    Policy,
    default_routings,
    find_deployed_routing,
    go_together,
    is_deployed,
)

ANY = "any"
KNOWN, MEAN = "known", "mean"
# The number of ranges of prompt lengths, each with a mean output; TetriInfer has as many.
MEAN_BUCKETS = 10
# Default of `repurpose_after` where pools: `repurpose` comes from `any` and the question gives no time.
REPURPOSE_AFTER_S = 120.0
# vLLM's flag and setting of fleet.yaml: a step computes at most this many tokens of one prompt, so that
# prompts behind a long one need not wait for all of it.
CHUNK_LIMIT = "long_prefill_token_threshold"
# Raced with classes, where the long prompts of one class would hold up another. Chosen by hand: with it three
# H100 keep Azure's conversations (TTFT p90 500 ms) beside Mooncake's, without it four do (2026-11-30).
CHUNK_LIMIT_TOKENS = 512
# Each combination costs a search of its own. If there are more than this, only the first value of each axis
# is searched, and the other values are raced.
MOST_COMBINATIONS = 32
# The routings of described agents by default: they send a turn to the worker that has its session's prefix.
AGENTS_ROUTINGS = tuple(row.name for row in ROUTING.values() if row.code == CACHE_AWARE)
_USUAL = Policies()
# The fields of `Policies` that have a table of rows, and `prediction`, which has none.
_AXES = (*BY_FIELD, "prediction")
_SETTINGS = (*POLICY_SECONDS, *POLICY_COUNTS, *POLICY_SHARES, *POLICY_NUMBERS, "tenant_weights")
# Settings that are no keys of slo.yaml: `prediction` sets the first two, and --seed the last.
_NO_KEYS = ("prediction_accuracy", "prediction_buckets", "seed")
KEYS = (
    *_AXES,
    *(name for name in _SETTINGS if name not in _NO_KEYS),
    *("prefix_cache", "kv_offload", "research"),
)


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One value of one axis (or of CHUNK_LIMIT), which a race puts in place of the plan's."""

    axis: str
    value: str

    @property
    def row(self) -> Policy | None:
        """The value's row of planner/policies.py; None for `prediction` and CHUNK_LIMIT, which have none."""
        return BY_FIELD[self.axis][self.value] if self.axis in BY_FIELD else None


@dataclass(frozen=True, slots=True)
class PolicyChoices:
    """The values of each axis that are searched in every combination, and the changes that are raced.

    The usual value of an axis comes first; an axis that is not in `axes` has the default of
    `planner.fleet.Policies`. All choices have the same `settings`.
    """

    axes: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"queue": (_USUAL.queue,), "routing": (_USUAL.routing,)}
    )
    raced_changes: tuple[PolicyChange, ...] = ()
    settings: Policies = _USUAL
    longest_wait_s: float = math.inf
    prefix_cache: bool = False
    # Whether fleets without prefix caches are searched too. They are not for agents: every turn repeats its
    # whole session, which such a fleet would compute again.
    compares_without_caches: bool = True
    kv_offload: KvOffload | None = None
    # Whether the same caches without `kv_offload` are searched too, as loads over a slow link may cost more
    # than they save. studies/tier_study.py compares with a plan of its own and sets False.
    may_leave_offload: bool = True
    # The question names no queue, so nothing says that requests carry the priority that some queues need;
    # under the routers of targets they are simulated without one.
    is_queue_assumed: bool = False

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that are searched, the usual one first."""
        return self.axes["queue"]

    @property
    def routings(self) -> tuple[str, ...]:
        """The routings that are searched, the usual one first."""
        return self.axes["routing"]

    @property
    def may_pin(self) -> bool:
        """Whether a routing that pins prefixes is searched or raced."""
        raced = [change.value for change in self.raced_changes if change.axis == "routing"]
        return any(ROUTING[name].pins for name in (*self.routings, *raced))

    def combinations(self, slo: Slo, target: str | None) -> tuple[Policies, ...]:
        """Every combination of the searched values that goes together.

        Those without prefix caches come first, if they are compared; those with caches but without the
        offload that the question names come last.
        """
        routings_without = [name for name in self.routings if not ROUTING[name].needs_caches]
        if not self.compares_without_caches:
            routings_without = []
        elif not routings_without and not self._needs_caches():
            # Without caches the named routings cannot run; the usual one shows what caches save.
            routings_without = [_USUAL.routing]
        # (has prefix caches, the offload behind them, routing)
        cachings: list[tuple[bool, KvOffload | None, str]] = [
            (False, None, name) for name in routings_without
        ]
        if self.prefix_cache:
            cachings += [(True, self.kv_offload, name) for name in self.routings]
            cachings += [(True, None, name) for name in self.routings] if self.may_leave_offload else []
        other_axes = {axis: values for axis, values in self.axes.items() if axis != "routing"}
        choices = []
        for has_caches, kv_offload, routing in cachings:
            for values in itertools.product(*other_axes.values()):
                policies = replace(self.settings, prefix_cache=has_caches, kv_offload=kv_offload)
                policies = self._with_value(policies, "routing", routing, slo)
                for axis, value in zip(other_axes, values, strict=True):
                    policies = self._with_value(policies, axis, value, slo)
                if go_together(policies):  # By the rules of planner/policies.py.
                    choices.append(_as_deployed(policies, target))
        return tuple(dict.fromkeys(choices))  # Without `kv_offload` the two lists with caches are equal.

    def without_classes(self) -> PolicyChoices:
        """The choices for requests of at most one class: the usual queue replaces queues by deadline, which
        are not raced either. Among requests of one class such a queue is first come, first served.
        """
        queues = dict.fromkeys(_USUAL.queue if QUEUE[name].by_deadline else name for name in self.queues)
        not_raced = {*queues, *(row.name for row in QUEUE.values() if row.by_deadline)}
        raced = [each for each in self.raced_changes if each.axis != "queue" or each.value not in not_raced]
        return replace(self, axes={**self.axes, "queue": tuple(queues)}, raced_changes=tuple(raced))

    def _needs_caches(self) -> bool:
        """Whether all rows of an axis other than routing need caches."""
        for axis, values in self.axes.items():
            if axis in BY_FIELD and axis != "routing":
                rows = [BY_FIELD[axis][value] for value in values]
                if all(row.needs_caches for row in rows):
                    return True
        return False

    def with_change(
        self, policies: Policies, change: PolicyChange, slo: Slo, target: str | None
    ) -> Policies | None:
        """These policies with another value of one axis, and with or without prefix caches, whichever that
        value needs. None if nothing changes, or if the policies do not go together.
        """
        if change.row is not None and change.row.needs_caches and not policies.prefix_cache:
            if not self.prefix_cache:
                return None
            policies = replace(policies, prefix_cache=True, kv_offload=self.kv_offload)
        other = self._with_value(policies, change.axis, change.value, slo)
        if not go_together(other):  # A row may refuse prefix caches, so it is tried without them.
            other = replace(other, prefix_cache=False, kv_offload=None)
        if not go_together(other):
            return None
        other = _as_deployed(other, target)
        return None if other == policies else other

    def _with_value(self, policies: Policies, axis: str, value: str, slo: Slo) -> Policies:
        """The policies with a value of one axis, and with the settings that follow from it."""
        if axis == "prediction":
            buckets = MEAN_BUCKETS if value == MEAN else 0
            accuracy_frac = None if value in (KNOWN, MEAN) else float(value)
            return replace(policies, prediction_buckets=buckets, prediction_accuracy_frac=accuracy_frac)
        if axis == CHUNK_LIMIT:
            return replace(policies, long_prefill_token_threshold=int(value))
        changes: dict[str, Any] = {axis: value}
        if axis == "queue":
            row = QUEUE[value]
            changes["due"] = due_of(slo) if row.by_deadline else ()
            changes["queue_window_s"] = self.longest_wait_s if row.has_longest_wait else math.inf
        elif axis == "routing" and ROUTING[value].by_formula:
            changes |= _limits_of(slo, policies)
        elif axis == "pools":
            needs_time = POOLS[value].code in (REPURPOSE, MIXED_POOL)
            is_given = self.settings.repurpose_after_s < math.inf
            after_s = self.settings.repurpose_after_s if is_given else REPURPOSE_AFTER_S
            changes["repurpose_after_s"] = after_s if needs_time else math.inf
        return replace(policies, **changes)


def due_of(slo: Slo) -> tuple[tuple[Selector, float], ...]:
    """The classes of the SLO with the seconds from a request's arrival to its deadline."""
    return tuple((selector, slo.due_s(selector)) for selector in slo.selectors)


def with_classes(
    choices: PolicyChoices, slo: Slo, target: str | None, *, names_queue: bool, may_limit_chunks: bool
) -> PolicyChoices:
    """The choices with the queue that suits this SLO.

    With classes the queue `edf` is searched and the usual queue is raced, unless the question names a queue.
    A limit on the tokens of a prompt per step is raced if `may_limit_chunks`.
    With a deployment target the choices stay as they are, because requests get a priority there only if the
    question names a queue that needs one. Without classes there are no deadlines to go by: `edf` is no longer
    raced, and an InputError is raised if the question names it.

    With guarantees to tenants and no target, those queues by tenants are raced that `plan serve` has.
    """
    if slo.guarantees and not names_queue and target is None:
        by_tenant = tuple(
            PolicyChange("queue", row.name)
            for row in QUEUE.values()
            if row.counts_tenants and is_deployed(row, target)
        )
        choices = replace(choices, raced_changes=(*by_tenant, *choices.raced_changes), is_queue_assumed=True)
    if slo.selectors:
        batchings = choices.axes.get("batching", (_USUAL.batching,))
        if may_limit_chunks and _USUAL.batching in batchings:
            limit = PolicyChange(CHUNK_LIMIT, str(CHUNK_LIMIT_TOKENS))
            choices = replace(choices, raced_changes=(limit, *choices.raced_changes))
        if names_queue or target is not None:
            return choices
        usual = [PolicyChange("queue", name) for name in choices.queues if not QUEUE[name].by_deadline]
        axes = {**choices.axes, "queue": (QUEUE_OF_CLASSES.name,)}
        return replace(
            choices, axes=axes, raced_changes=(*usual, *choices.raced_changes), is_queue_assumed=True
        )
    if any(QUEUE[name].by_deadline for name in choices.queues):
        raise InputError(
            "policies: queue: edf goes by the limits of classes, and slo has none; add slo: {classes: ...}, "
            "or take fcfs or sjf"
        )
    raced = tuple(
        change
        for change in choices.raced_changes
        if change.axis != "queue" or not QUEUE[change.value].by_deadline
    )
    return replace(choices, raced_changes=raced)


def without_pins(choices: PolicyChoices, section: Section) -> PolicyChoices:
    """The choices for a fleet that must stand losses; `section` is `policies` of the question.

    The prefixes pinned on a lost worker alone are missing until a request brings them again. A loss is
    simulated as a smaller fleet with all prefixes placed, which overlooks this. So routings that pin are left
    out. Raises InputError if the question names one.
    """
    routings = tuple(name for name in choices.routings if not ROUTING[name].pins)
    raced = tuple(
        change
        for change in choices.raced_changes
        if not (change.axis == "routing" and ROUTING[change.value].pins)
    )
    had_pins = (routings, raced) != (choices.routings, choices.raced_changes)
    if had_pins and section.get("routing", ANY) != ANY:
        possible = [
            row.name for row in ROUTING.values() if row.is_planned and row.needs_caches and not row.pins
        ]
        raise section.error(
            "routing",
            "pinned-prefix is not planned with spare or spot workers: what a "
            f"lost worker had pinned is nowhere else; take of {', '.join(possible)}, or drop spare and spot",
        )
    return replace(choices, axes={**choices.axes, "routing": routings}, raced_changes=raced)


def _limits_of(slo: Slo, policies: Policies) -> dict[str, float]:
    """The limits that the routing best-fit keeps on every worker [s].

    They are `ttft_s` and `tbt_s` of the policies if the question gives them, else the tightest of the SLO.
    """
    ttft = [limit.limit_s for limit in slo.limits if limit.metric == "ttft"]
    pace = [limit.limit_s for limit in slo.limits if limit.metric_row.is_pace]
    return {
        "ttft_s": min(ttft, default=math.inf) if math.isinf(policies.ttft_s) else policies.ttft_s,
        "tbt_s": min(pace, default=math.inf) if math.isinf(policies.tbt_s) else policies.tbt_s,
    }


def _as_deployed(policies: Policies, target: str | None) -> Policies:
    """The policies with the target's own routing for mixed workers.

    `PlanQuestion.policies_of_pairs` does the same for pairs of prefill and decode workers.
    """
    return policies if target is None else find_deployed_routing(policies, target, is_pair=False).policies


# -- reading slo.yaml ----------------------------------------------------------------------------------------


def parse_policy_choices(
    section: Section,
    target: str | None,
    kv_offload: KvOffload | None,
    *,
    has_agents: bool = False,
    has_ranks: bool = False,
) -> PolicyChoices:
    """The section `policies`, with `kv_offload` as already read from it. For described agents (`has_agents`)
    the default is prefix caches and routings that look for prefixes. Routers do not look into workers with
    data-parallel ranks (`has_ranks`), so with prefix caches the usual routing is searched too. Raises
    InputError with the key, what was found and what is possible.
    """
    prefix_cache, research = section.flag("prefix_cache", has_agents), section.flag("research", False)
    searched_routings = default_routings(with_caches=prefix_cache)
    beside_caches = (_USUAL.routing,) if prefix_cache and has_ranks else ()
    axes: dict[str, tuple[str, ...]] = {}
    raced: list[PolicyChange] = []
    for axis in _AXES:
        if axis == "routing" and axis not in section:
            is_of_agents = has_agents and prefix_cache
            axes[axis] = AGENTS_ROUTINGS if is_of_agents else searched_routings
            axes[axis] += beside_caches
            continue
        if axis not in section and axis != "queue":  # A queue is always among the axes.
            continue
        first, *others = _values_of(section, axis, target, prefix_cache=prefix_cache, research=research)
        if section.get(axis) == ANY:
            searched = (*searched_routings, *beside_caches) if axis == "routing" else (first,)
            axes[axis] = searched
            raced += [PolicyChange(axis, value) for value in (first, *others) if value not in searched]
        else:
            axes[axis] = (first, *others)
    # With a target, `research` also allows the question to name rows that the target lacks.
    if research and target is None and ANY not in [section.get(axis) for axis in _AXES]:
        raise section.error(
            "research",
            "adds to what `any` stands for, and no policy is any; write queue: any, for one, or drop it",
        )
    for name in axes.get("batching", ()):
        if BATCHING[name].needs_reserve and not section.get("reserve_tokens"):
            raise section.error("batching", f"{name} needs reserve_tokens, the KV per request; add it")
    if math.prod(map(len, axes.values())) > MOST_COMBINATIONS:
        not_first = [PolicyChange(axis, value) for axis in axes for value in axes[axis][1:]]
        raced = [*not_first, *raced]
        axes = {axis: values[:1] for axis, values in axes.items()}
    settings = parse_settings(section)
    # `longest_wait` of the file. `_with_value` sets it for the queues that have such a bound.
    longest_wait_s = settings.pop("queue_window_s", math.inf)
    queues = (*axes["queue"], *(change.value for change in raced if change.axis == "queue"))
    if math.isfinite(longest_wait_s) and not any(QUEUE[name].has_longest_wait for name in queues):
        row = QUEUE[axes["queue"][0]]
        reason = "has no such bound" if row.code != FCFS else "overtakes nobody"
        raise section.error("longest_wait", f"{row.name} {reason}; drop it, or queue: [fcfs, sjf]")
    choices = PolicyChoices(
        axes=axes,
        raced_changes=tuple(raced),
        settings=Policies(**settings),
        longest_wait_s=longest_wait_s,
        prefix_cache=prefix_cache,
        compares_without_caches=not (has_agents and prefix_cache),
        kv_offload=kv_offload,
    )
    # Which policies go together depends on neither the SLO nor the target, so an SLO without limits will do.
    if not choices.combinations(Slo(()), None):
        together = ", ".join(f"{axis} {' or '.join(values)}" for axis, values in axes.items())
        raise InputError(
            f"{section.where}: {together} do not go together{' with prefix caches' if prefix_cache else ''}; "
            "drop one of them"
        )
    return choices


def _values_of(
    section: Section, axis: str, target: str | None, *, prefix_cache: bool, research: bool
) -> tuple[str, ...]:
    """The values of one axis: those that the section names, or all that `any` stands for, the usual one
    first. Raises InputError for a value that cannot be planned with.
    """
    if axis == "prediction":
        return _predictions(section)
    rows, usual = BY_FIELD[axis], str(getattr(_USUAL, axis))
    # A plan is simulated by the kernel that batches step by step, so it takes rows of that kernel alone.
    possible = [
        row for row in rows.values() if STEPWISE in row.simulators and (prefix_cache or not row.needs_caches)
    ]
    if axis == "decode_routing":  # Decode workers keep no prefixes.
        possible = [row for row in possible if not row.reads_cache_state]
    value = section.get(axis, usual)
    if value == ANY:
        names = [row.name for row in possible if research or is_deployed(row, target)]
        return tuple(dict.fromkeys((usual, *names)))
    names = value if isinstance(value, list) and value else [value]
    stepwise_names = tuple(row.name for row in rows.values() if STEPWISE in row.simulators)
    if unplanned := [row for row in rows.values() if row.name in names and row.name not in stepwise_names]:
        raise section.error(
            axis,
            f"`plan simulate` has {unplanned[0].name} ({unplanned[0].words}), and "
            f"no plan; take of {', '.join(row.name for row in possible)}",
        )
    chosen = tuple(check_one_of(name, (*stepwise_names, ANY), section.path_of(axis)) for name in names)
    if ANY in chosen:
        raise section.error(axis, f"any stands alone; write {axis}: any, or drop it")
    if len(set(chosen)) < len(chosen):
        raise section.error(axis, f"found one twice in {value!r}; name each once")
    _check_caches(section, axis, [rows[name] for name in chosen], possible, prefix_cache=prefix_cache)
    if target is not None and not research:
        _check_target(section, axis, [rows[name] for name in chosen], possible, target)
    return chosen


def _check_caches(
    section: Section, axis: str, chosen: Sequence[Policy], possible: Sequence[Policy], *, prefix_cache: bool
) -> None:
    """Raise InputError for a row that needs prefix caches where there are none, and for a decode routing that
    needs caches or tenants, which routers to decode workers do not know.
    """
    if axis == "decode_routing" and (refused := [row for row in chosen if row not in possible]):
        looked_at = (
            "prefix caches, and decode workers keep none"
            if refused[0].needs_caches
            else "tenants, which routers know of prompts alone"
        )
        raise section.error(
            axis, f"{refused[0].name} looks at {looked_at}; take of {', '.join(row.name for row in possible)}"
        )
    cache_aware = [row.name for row in chosen if row.needs_caches and row not in possible]
    if cache_aware and not prefix_cache:
        raise section.error(
            axis,
            f"{cache_aware[0]} looks at prefix caches; add prefix_cache: true, "
            "which takes a trace that says which prompts share a prefix (hash_ids or prefix_ids), or take of "
            f"{', '.join(row.name for row in possible)}",
        )


def _check_target(
    section: Section, axis: str, chosen: Sequence[Policy], possible: Sequence[Policy], target: str
) -> None:
    """Raise InputError for a row that the deployment target lacks, naming those that it has."""
    lacking = [row for row in chosen if not is_deployed(row, target)]
    if axis == "decode_routing" or not lacking:  # `is_deployed` knows the routers of prompts alone.
        return
    has = ", ".join(row.name for row in possible if is_deployed(row, target))
    if axis == "routing":
        policies = Policies(routing=lacking[0].name)
        nearest = find_deployed_routing(policies, target, is_pair=False).rule_names[0]
        raise section.error(
            axis,
            f"{target} (deploy) cannot route by {lacking[0].name}, it has {has}; "
            f"{nearest} would be in its place: leave routing out to plan with that, or take one of those",
        )
    raise section.error(axis, f"{target} (deploy) lacks {lacking[0].name}, it has {has}; take one of those")


def _predictions(section: Section) -> tuple[str, ...]:
    """The values of `prediction`, what schedulers know of a request's output length: the length itself
    (`known`), the `mean` output of prompts of about the same length, or, for a share, a prediction that is
    right to a bucket of 200 tokens for this share of requests.
    """
    value, where = section.get("prediction"), section.path_of("prediction")
    if value == ANY:
        return KNOWN, MEAN
    predictions = []
    for item in value if isinstance(value, list) and value else [value]:
        if item in (KNOWN, MEAN):
            predictions.append(str(item))
            continue
        if isinstance(item, str) and not item[:1].isdigit():
            # Refuses every other word; the error lists "85 %" as an example of a share.
            check_one_of(item, (KNOWN, MEAN, ANY, "85 %"), where)
        predictions.append(repr(read_share(item, where)))  # Values of an axis are texts.
    if len(set(predictions)) < len(predictions):
        raise InputError(f"{where}: found one twice in {value!r}; name each once")
    return tuple(predictions)


# -- names for reports ---------------------------------------------------------------------------------------


def name_policies(policies: Policies, choices: Sequence[Policies]) -> str:
    """How these policies differ from the other choices: "queue sjf", "prefix caches, routing e2"."""
    return ", ".join(_differences(policies, choices))


def _differences(policies: Policies, choices: Sequence[Policies]) -> Iterator[str]:
    """A phrase for each policy by which `policies` differ from some of the choices."""

    def differs(name: str) -> bool:
        return len({getattr(choice, name) for choice in choices}) > 1

    if differs("prefix_cache"):
        yield "prefix caches" if policies.prefix_cache else "no prefix caches"
    if policies.prefix_cache and len({each.kv_offload for each in choices if each.prefix_cache}) > 1:
        yield "no KV offload" if policies.kv_offload is None else "KV offload"
    for name in dict.fromkeys(("routing", "queue", *BY_FIELD)):
        if differs(name):
            yield f"{name.replace('_', ' ')} {getattr(policies, name)}"
            if name == "queue" and math.isfinite(policies.queue_window_s):
                yield f"at most {policies.queue_window_s:g} s of waiting"
    if differs(CHUNK_LIMIT):
        tokens = policies.long_prefill_token_threshold
        yield f"at most {tokens:,} tokens of a prompt per step" if tokens else "as many tokens of a prompt"
    if differs("prediction_buckets") or differs("prediction_accuracy_frac"):
        accuracy_frac = policies.prediction_accuracy_frac
        if accuracy_frac is not None:
            yield f"outputs predicted to {100 * accuracy_frac:g} %"
        else:
            yield "outputs predicted by mean" if policies.prediction_buckets else "outputs known"
