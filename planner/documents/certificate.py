"""certificate.json: what was proved about a plan, over which fleets, under which assumptions.

A fact is a dataclass of facts.py. planner/reports writes each as a sentence in the part `certificate` or
`warnings` of the file. The part `facts` has the same facts as values, in the same order: first `kind`, which
names the class, then the fields. Sentences are never parsed: a certificate is read from the values.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from planner.documents import facts
from planner.documents.robustness_facts import FleetRobustness
from planner.domain import FleetLimit, Limit
from planner.fleet import Fleet
from planner.solvers.repeats import Interval, Repeats

Document = dict[str, Any]
Say = Callable[[Any], str]
"""A function that writes a fact as a sentence; reports/fact_sentences.py has it."""

ROUNDING_FRAC = 1e-12  # A difference by a smaller share of a value is a rounding error.
IN_SENTENCES = ("binding", "assumptions", "assumed")
"""The keys of the part `certificate` that hold facts as sentences."""
IN_VALUES = ("answers", "commitments", "robustness", "scenarios_drawn", "repeats", "for_targets")
"""The keys that hold facts as values, without their `kind`: each key has facts of one class."""

Written = TypeVar("Written")  # A class whose fields are written to the file.

Status = Literal["certified", "not certified", "on paper", "not for production", "best found"]
"""certified      level 0 was exhausted, the step times have a measured spread, and the fleet kept the SLO in
               enough scenarios that the search had not seen
not certified  scenarios were asked for, and the measured spread or the test on scenarios is missing
on paper       `safety: none`: level 0 was exhausted, and no scenario was simulated
not for production
               scenarios were asked for, and no fleet was found that keeps the SLO in enough of them:
               the plan is the cheapest fleet on paper
best found     time ran out before level 0 was exhausted"""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to serve the same traffic, and what it would cost.

    `label` is for people: "one GPU type only", "mixed pools only", "runner-up". `fleet` is None if no such
    fleet was found; `notes` then say why. `objective` is in the unit of the plan's objective. With `at_least`
    it is a lower bound for fleets of that kind, not a price; such an alternative has no fleet.
    """

    label: str
    fleet: Fleet | None
    objective: float
    notes: tuple[facts.Note, ...] = ()
    at_least: bool = False

    @property
    def is_of_one_gpu_type(self) -> bool:
        """Whether the question was planned again with one of its GPU types alone: "only h100-80g"."""
        return self.label.startswith("only ")

    @property
    def is_priced(self) -> bool:
        """Whether `objective` is what a fleet costs."""
        return math.isfinite(self.objective) and not self.at_least


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found, what bounds it, and what was assumed. Written as certificate.json.

    All fields are about the cheapest fleet on paper (traffic and step times as they are written), except
    `answers`, `scenarios_drawn`, `assumptions`, `robustness`, `commitments`, `repeats` and `routers`: they
    are about the plan. `binding` has facts about either fleet; reports mark those about the fleet on paper.
    Each of the `neighbours` is the fleet without one worker of a pool.

    `bound` is the master problem's lower bound over all fleets and policies; `level0` the optimum over fleets
    with one worker type per pool (infinite if none was found). `level0_exact`: each of the `cheaper` fleets
    of level 0 was simulated and fails, or has too few workers for the work that the SLO requires; no pruning
    rule was used. If `level0_exhausted` alone is true, the search came to its end with the help of the
    pruning rules in `assumed`, and simulated `cheaper_simulated` of the cheaper fleets. `cheaper` is None if
    there are infinitely many. `shadow_prices` say by how much one more GPU, Watt or USD/h of a limit lowers
    the bound, in the objective's unit: duals of its linear program, in which counts of workers are fractions.
    Gaps are shares of `value`. `universe` says what level 0 ranged over.
    """

    objective: str  # "cost", "power" or "gpus".
    unit: str  # For instance "USD/h", "W", "GPUs".
    value: float
    bound: float
    level0: float
    level0_exact: bool
    beyond_exact: bool  # Every cheaper fleet of any mix of types was simulated.
    universe: tuple[str, ...]
    refuted: tuple[facts.Refuted, ...]
    neighbours: tuple[facts.Neighbour, ...]
    binding: tuple[facts.Binding, ...]
    assumptions: tuple[facts.Assuming, ...]
    simulations: int
    cuts: int
    seed: int
    shadow_prices: Mapping[str, float] = field(default_factory=dict)  # By the name of the limit.
    # The plan's fleet on other draws of the traffic and other spot histories.
    repeats: tuple[Repeats, ...] = ()
    level0_exhausted: bool = True
    cheaper: int | None = 0
    cheaper_simulated: int = 0
    assumed: tuple[facts.Assumed, ...] = ()
    answers: tuple[facts.Answered, ...] = ()  # On paper, in production, with a loss.
    scenarios_drawn: facts.ScenariosDrawn | None = None  # None: planned on paper alone.
    # The deployment target whose router was simulated; None: the router that the policies say.
    deploy: str | None = None
    # The plan under the router of each deployment target that can run it.
    routers: tuple[facts.UnderRouter, ...] = ()
    # The price on each target that does not keep the plan, where it was requested.
    for_targets: tuple[facts.ForTargets, ...] = ()
    commitments: tuple[facts.Commitment, ...] = ()  # The bill by each term, where there is more than one.
    # How the plan does with other traffic and other numbers of workers; None unless requested.
    robustness: FleetRobustness | None = None

    def find_answer(self, name: facts.AnswerName) -> facts.Answered | None:
        """The answer of this name; None if it was not requested."""
        return next((each for each in self.answers if each.name == name), None)

    @property
    def gap_frac(self) -> float:
        """The share of `value` that the bound leaves open; 0 for a fleet that costs nothing."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    @property
    def has_level0(self) -> bool:
        """Whether level 0 found a fleet; without one `level0` is infinite."""
        return math.isfinite(self.level0)

    @property
    def level0_gap_frac(self) -> float:
        """The share that a mixed fleet saves against the best one of level 0; 0 if the plan is that one."""
        saved_frac = (self.level0 - self.value) / self.level0 if self.level0 and self.has_level0 else 0.0
        return saved_frac if saved_frac > ROUNDING_FRAC else 0.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """The most traffic that the limits allow.

    At the next higher rate, `refuted_rps`, no fleet of level 0 was found; it is None if time ran out before.

    With safety a fleet keeps the SLO in enough scenarios at `rate_rps`; `on_paper_rps` and
    `on_paper_refuted_rps` are then the two rates on paper, else None.
    """

    rate_rps: float
    refuted_rps: float | None
    on_paper_rps: float | None = None
    on_paper_refuted_rps: float | None = None


# -- written -----------------------------------------------------------------------------------------------


def certificate_document(certificate: Certificate, say: Say) -> Document:
    """The part `certificate` of certificate.json; `say` makes sentences of the facts under IN_SENTENCES."""
    document = {each.name: getattr(certificate, each.name) for each in fields(certificate)}
    return document | {
        "level0": certificate.level0 if certificate.has_level0 else None,
        "refuted": [
            {
                "label": refuted.label,
                "reason": say(refuted.because),
                "because": fact_document(refuted.because),
            }
            for refuted in certificate.refuted
        ],
        "neighbours": [
            {**plain_values(neighbour), "reason": say(neighbour)} for neighbour in certificate.neighbours
        ],
        **{name: [say(fact) for fact in getattr(certificate, name)] for name in IN_SENTENCES},
        **{name: plain_values(getattr(certificate, name)) for name in IN_VALUES},
        "routers": [{**plain_values(each), "keeps": each.keeps} for each in certificate.routers],
        "gap_frac": certificate.gap_frac,
        "level0_gap_frac": certificate.level0_gap_frac,
    }


def facts_document(**facts_by_name: Iterable[facts.Fact]) -> Document:
    """The part `facts` of certificate.json: the facts of each list of sentences, by name, in order."""
    return {name: [fact_document(fact) for fact in each] for name, each in facts_by_name.items()}


def fact_document(fact: facts.Fact) -> Document:
    """A fact as values that JSON has, with its `kind`."""
    return {"kind": fact_kind(type(fact)), **plain_values(fact)}


def fact_kind(fact: type) -> str:
    """The `kind` of a class of facts: "limit-binds" for LimitBinds."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", fact.__name__).lower()


def plain_values(value: Any) -> Any:
    """A field's value in JSON's own types: a dataclass becomes a mapping, and a limit gets its `name` too."""
    if isinstance(value, Limit | FleetLimit):
        unit = {"unit": value.unit} if isinstance(value, FleetLimit) else {}
        return {"name": value.name, **dataclasses.asdict(value), **unit}
    if isinstance(value, tuple):
        return [plain_values(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, facts.OfLlm):  # Its warning may be of any class of warnings, so it has a `kind`.
        return {"llm": value.llm, "warning": fact_document(value.warning)}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_values(getattr(value, each.name)) for each in fields(value)}
    return value


# -- read --------------------------------------------------------------------------------------------------

FACT_KINDS = {fact_kind(each): each for each in get_args(facts.Fact)}
NULL_STANDS_FOR: Mapping[type, float] = {Interval: math.nan, **facts.NULL_STANDS_FOR}
"""By class, the number that null stands for in its float fields: JSON has no nan and no infinity."""


def read_certificate(row: Mapping[str, Any], values: Mapping[str, Any]) -> Certificate:
    """The certificate from the parts `certificate` (`row`) and `facts` (`values`) of certificate.json.

    Raises LookupError, TypeError or ValueError if `row` or `values` is not what this module writes.
    """
    facts_by_name = {name: _check_one_value_each(row[name], values[name], name) for name in IN_SENTENCES}
    # Defaults for certificates of older versions, which computed no prices for targets, and simulated routers
    # on the traffic as written alone.
    completed_row = {
        "for_targets": [],
        **row,
        **facts_by_name,
        "level0": math.inf if row["level0"] is None else row["level0"],
        "robustness": _robustness_row(row),
        "routers": [{"kept_in": None, "passes": True, **each} for each in row["routers"]],
    }
    return dataclass_of(Certificate, completed_row, "certificate")


def _robustness_row(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The values of `robustness`. An older certificate calls it `around`, and its part `headroom` by the name
    `ends`.

    None if an older certificate has no such values, or lacks one of them for which there is no default.
    """
    written = row.get("robustness", row.get("around"))
    if written is None:
        return None
    robustness = {"is_out_of_time": False, **written}
    if not all(key_in_file(robustness, each.name) in robustness for each in fields(FleetRobustness)):
        return None
    return robustness | {
        "left_out": ["headroom" if part == "ends" else part for part in robustness["left_out"]]
    }


def read_warnings(sentences: Any, values: Any) -> tuple[facts.Warned, ...]:
    """The warnings of certificate.json: facts (`values`) and their sentences. Raises ValueError."""
    warnings: tuple[facts.Warned, ...] = value_of(
        tuple[facts.Warned, ...], _check_one_value_each(sentences, values, "warnings"), "warnings"
    )
    return warnings


def _check_one_value_each(written: Any, values: Any, where: str) -> Any:
    """The `values`, unchanged; raises ValueError if they are not as many as the sentences `written`."""
    sentences = value_of(tuple[str, ...], written, where)
    if not isinstance(values, list) or len(values) != len(sentences):
        raise ValueError(f"facts: {where} must have one fact for each of its sentences")
    return values


def read_alternative(row: Mapping[str, Any], fleet: Fleet | None) -> Alternative:
    """One of `alternatives` of the file (`row`), with the `fleet` that the caller has read from it."""
    value = row["bound"] if row["at_least"] else row["objective"]
    completed_row = {**row, "objective": math.inf if value is None else value}
    return dataclass_of(Alternative, completed_row, "alternatives", fleet=fleet)


def key_in_file(row: Mapping[str, Any], name: str) -> str:
    """The key under which `row` has the field `name`: its name, or that of an older version (OLDER_KEYS)."""
    older = facts.OLDER_KEYS.get(name, name)
    return older if name not in row and older in row else name


def dataclass_of(of_class: type[Written], row: Any, where: str, **given: Any) -> Written:
    """A dataclass from its fields in `row`, a part of a file, and those in `given`. Raises LookupError for a
    missing key, and ValueError, whose message begins with `where`, for a value of another type.
    """
    hints = get_type_hints(of_class)
    if of_class in NULL_STANDS_FOR:
        null = NULL_STANDS_FOR[of_class]
        row = {
            key: null if value is None and hints.get(key) is float else value for key, value in row.items()
        }
    names = [each.name for each in fields(of_class) if each.name not in given]  # type: ignore[arg-type]
    return of_class(
        **{
            name: value_of(hints[name], row[key := key_in_file(row, name)], f"{where}: {key}")
            for name in names
        },
        **given,
    )


def value_of(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` of a field; raises ValueError if it has another type."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return _one_of(inner, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(value_of(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (Mapping, dict) and isinstance(value, dict):
        return {key: value_of(inner[1], item, f"{where}: {key}") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(value, dict):
        return dataclass_of(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    accepted = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}
    # For Python True is an int, but `true` in a file is no number.
    if isinstance(value, accepted.get(hint, ())) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{where} is {value!r:.80}")


def _one_of(inner: tuple[Any, ...], value: Any, where: str) -> Any:
    """`value` as one of the types `inner` of a union: None, the only other type, or the fact whose class
    `kind` names. Raises ValueError if it is none of these.
    """
    if types.NoneType in inner:
        if value is None:
            return None
        inner = tuple(each for each in inner if each is not types.NoneType)
    if len(inner) == 1:
        return value_of(inner[0], value, where)
    if isinstance(value, dict) and FACT_KINDS.get(value["kind"]) in inner:
        return dataclass_of(FACT_KINDS[value["kind"]], value, where)
    raise ValueError(f"{where} is {value!r:.80}")
