"""Two questions of which one says what the other's answer must be: nothing needs to know the right one.

    permuted    rows of `gpus`, of the catalog and of settings in another order     the same answer
    renamed     every GPU has another name, whose order is another                  the same
    duplicated  a GPU of which there is any number is listed twice                  the same
    reseeded    another seed, where nothing is drawn                                the same
    dearer      one GPU costs more                                                  no less is paid
    budget      money, power and GPUs limited to what the answer takes, or a little more: no more is paid

"The same" is meant where both answers are called exact; one that is not must not be below one that is. A
question that has an answer must not be called infeasible in its other form, whatever either is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from random_questions import Question

from planner.documents.task import parse_task
from planner.domain import COST, GPUS, POWER
from planner.errors import InfeasibleError
from planner.policies import ROUTING
from planner.search.evidence.certify import search_llm
from planner.search.mixed.best_fleet import best_of
from planner.search.oracle.fleet_counts import workers_of
from planner.search.problem.build_problem import SearchInputs

CLOSE = 1e-6  # relative; costs are sums of floats, and whole nodes weigh GPUs in use by a hair
PROVED_INFEASIBLE = 3  # exit code


@dataclass(frozen=True, slots=True)
class FleetAnswer:
    """The cheapest fleet on paper; infinite values and `exit_code` where none was found."""

    value: float = math.inf
    level0: float = math.inf
    is_exact: bool = False
    level0_is_exact: bool = False
    exit_code: int = 0
    fleet: str = "none"
    used: tuple[float, float, float] = (math.inf, math.inf, math.inf)  # USD per hour, Watts, GPUs
    simulations: int = 0


def answer(question: Question, *, seed: int = 0) -> FleetAnswer:
    """What `plan` finds on paper."""
    try:
        task = parse_task(question.document, question.catalog)
        searched = search_llm(SearchInputs(task, question.trace, question.catalog, seed))
    except InfeasibleError as error:
        return FleetAnswer(exit_code=error.exit_code)
    problem, best = best_of(searched)
    workers = workers_of(best.best)
    return FleetAnswer(
        best.value,
        best.level0.search.value,
        best.is_every_mix_simulated,
        best.level0.search.is_exact,
        fleet=", ".join(f"{count} {option.name}" for option, count in best.best),
        used=(
            problem.limits.used(COST, workers),
            problem.limits.used(POWER, workers),
            problem.limits.used(GPUS, workers),
        ),
        simulations=problem.oracle.simulations,
    )


def permuted(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question:
    """Rows and settings the other way round, or shuffled."""
    document = _copied(question)
    fleet, gpus = document["fleet"], list(document["fleet"]["gpus"].items())
    shuffled = [gpus[int(i)] for i in rng.permutation(len(gpus))]
    fleet["gpus"] = dict(shuffled if shuffled != gpus else gpus[::-1])
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        fleet[name] = fleet[name][::-1]
    rows = dict(reversed(list(question.catalog.gpus.items())))
    return replace(question, document=document, catalog=replace(question.catalog, gpus=rows))


def renamed(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question | None:
    """Other names, the last of which in the alphabet is of the GPU that was the first."""
    if question.kind == "shipped":
        return None  # what the catalog measured goes by name
    old = list(question.catalog.gpus)
    drawn = sorted((f"{chr(97 + int(rng.integers(26)))}{i}" for i in range(len(old))), reverse=True)
    names = dict(zip(old, drawn, strict=True))
    return _with_rows(question, {names[name]: name for name in old}, dict)


def duplicated(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question | None:
    """A GPU without end is listed twice, by a name before or behind all others."""
    endless = [name for name, count in question.document["fleet"]["gpus"].items() if count is None]
    if question.kind == "shipped" or not endless:
        return None
    twin = str(rng.choice(["a-twin", "z-twin"]))
    rows = {name: name for name in question.catalog.gpus} | {twin: str(rng.choice(endless))}

    def listed(new: Mapping[str, Any]) -> dict[str, Any]:
        return {twin: None, **new} if twin < "g" else {**new, twin: None}

    return _with_rows(question, rows, listed)


def _with_rows(
    question: Question, rows: Mapping[str, str], listed: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> Question:
    """The question with GPUs of these names, each what another one was."""
    catalog, document = question.catalog, _copied(question)
    gpus = {new: replace(catalog.gpus[old], name=new) for new, old in rows.items()}
    other = replace(
        catalog,
        gpus=gpus,
        gpu_aliases={name: name for name in gpus},
        provenance={**catalog.provenance, **{new: catalog.provenance[old] for new, old in rows.items()}},
        _fits={
            (llm, new): fits
            for new, old in rows.items()
            for (llm, gpu), fits in catalog._fits.items()
            if gpu == old
        },
    )
    stock = document["fleet"]["gpus"]
    by_old: dict[str, str] = {}
    for new, old in rows.items():
        by_old.setdefault(old, new)
    document["fleet"]["gpus"] = listed({by_old[old]: count for old, count in stock.items()})
    return replace(question, document=document, catalog=other)


def dearer(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question | None:
    """One GPU of those that may be used costs up to twice as much."""
    if question.document.get("objective", "cost") != "cost" or "cost" in question.document.get("limits", {}):
        return None
    name = str(rng.choice(list(question.document["fleet"]["gpus"])))
    gpu = question.catalog.gpus[name]
    price = round(gpu.price_usd_per_h * float(rng.uniform(1.01, 2.0)), 3)
    rows = {**question.catalog.gpus, name: replace(gpu, price_usd_per_h=price)}
    return replace(question, catalog=replace(question.catalog, gpus=rows))


def budget(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question | None:
    """Money, power or GPUs limited to what the answer takes, or a hundredth more."""
    if math.isinf(first.value):
        return None
    document, more = _copied(question), float(rng.choice([1e-6, 0.01]))
    cost, power_w, gpus = first.used
    written = {"cost": cost * (1 + more), "power": f"{power_w * (1 + more)!r} W", "gpus": round(gpus)}
    name = str(rng.choice(["cost", "cost", "power", "gpus"]))
    document["limits"] = {**document.get("limits", {}), name: written[name]}
    return replace(question, document=document)


def reseeded(question: Question, first: FleetAnswer, rng: np.random.Generator) -> Question | None:
    """The same question, for another seed, where no routing draws."""
    routings = question.document.get("policies", {}).get("routing", [])
    draws = any(ROUTING[name].draws for name in ([routings] if isinstance(routings, str) else routings))
    return None if draws else question


Relation = Callable[[Question, FleetAnswer, np.random.Generator], Question | None]
RELATIONS: Mapping[str, Relation] = {
    each.__name__: each for each in (permuted, renamed, duplicated, reseeded, dearer, budget)
}


def broken(
    question: Question, relation: str, first: FleetAnswer | None = None
) -> tuple[FleetAnswer, str | None]:
    """The answer, and what of the relation does not hold: "" where it does, None where it says nothing of
    this question.
    """
    first = answer(question) if first is None else first
    rng = np.random.default_rng([21, question.seed])
    other = RELATIONS[relation](question, first, rng)
    if other is None:
        return first, None
    second = answer(other, seed=1 + question.seed if relation == "reseeded" else 0)
    return first, _difference(first, second, relation)


def _difference(first: FleetAnswer, second: FleetAnswer, relation: str) -> str:
    """What contradicts the relation, as text."""
    both = f"{first.value:.6g} ({first.fleet}) and {second.value:.6g} ({second.fleet})"
    if PROVED_INFEASIBLE in (first.exit_code, second.exit_code) and first.exit_code != second.exit_code:
        return f"infeasible is said of one: {both}"
    if relation == "budget":
        return f"dearer within its own budget: {both}" if _is_below(first.value, second.value) else ""
    if _is_below(second.value, first.value) and first.is_exact:
        return f"an exact answer is beaten: {both}"
    if relation == "dearer":
        return ""
    if _is_below(first.value, second.value) and second.is_exact:
        return f"an exact answer is beaten: {both}"
    for one, two in ((first, second), (second, first)):
        if one.level0_is_exact and _is_below(two.level0, one.level0):
            return f"an exact level 0 is beaten: {two.level0:.6g} is below {one.level0:.6g}; {both}"
    return ""


def _is_below(value: float, other: float) -> bool:
    return value < other * (1 - CLOSE)


def _copied(question: Question) -> dict[str, Any]:
    document = dict(question.document)
    return document | {"fleet": dict(document["fleet"])}
