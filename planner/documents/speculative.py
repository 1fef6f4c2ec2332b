"""`speculative:` of an engine, or of a worker in fleet.yaml and plan.yaml; rows of catalogs/acceptance.yaml.

    engine: {name: vllm, speculative: {method: mtp, tokens: [0, 1, 2, 3], acceptance: [0.85, 0.72, 0.6]}}
    speculative: {method: eagle3, tokens: 3, acceptance: kimi-k2.5-eagle3, model: nvidia/Kimi-K2.5-Eagle3}

`acceptance` is the chance that a draft token is accepted if all draft tokens before it are: a list with a
number for each token, one number for all, or a row of the catalog. From a list of `tokens` the plan chooses a
number; 0 means no drafts. One pass of the drafter takes the share `draft` of the time of a step of the LLM,
plus the time `draft_step`. Without `draft` the share is estimated from the drafter's weights. `basis` says
where the acceptance comes from. planner/models/speculation.py has the formula.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.documents.catalog import Catalog
from planner.errors import CatalogError, InputError
from planner.files.document_values import (
    Section,
    check_one_of,
    check_whole_number,
    errors_as,
    is_number,
    nearest_names,
    read_share,
    refused_value,
)
from planner.models.engine import Engine
from planner.models.llm import Llm
from planner.models.speculation import (
    METHODS,
    MOST_DRAFTS,
    OWN_LAYERS,
    WEIGHTLESS,
    Drafter,
    Speculation,
    conditional_acceptance,
    drafter_of,
)
from planner.units import show_exactly

NONE = "none"  # `speculative: none` means no drafts, as a missing key does.
KEYS = ("method", "tokens", "acceptance", "model", "draft", "draft_step", "basis")
# Methods of vLLM without a formula in planner/models/speculation.py.
NOT_MODELLED = ("dspark", "dflash", "medusa", "mlp_speculator", "ngram_gpu")
# A pass of the drafter takes at most this share of a step; a larger one is refused as a typing error.
MOST_DRAFT_FRAC = 2.0


def parse_speculative(
    value: object, llm: Llm, catalog: Catalog, where: str
) -> tuple[Speculation | None, ...]:
    """The drafts that may be chosen, one per number under `tokens`, the fewest first; None: no drafts."""
    if value is None or value == NONE:
        return (None,)
    section = Section.from_document(value, where, KEYS)
    method = section.read("method", _parse_method)
    counts = _parse_counts(section)
    if not any(counts):
        return (None,)
    acceptance_of, basis = _parse_acceptance(section, method, max(counts), catalog)
    model = section.text("model", None)
    draft_frac = _parse_draft_frac(section, method, llm, model, catalog)
    draft_s = section.at_least("draft_step", "s", 0.0)
    basis = section.text("basis", basis)
    with errors_as(InputError, section.where):
        return tuple(
            Speculation(method, acceptance_of(tokens), draft_frac, draft_s, model, basis) if tokens else None
            for tokens in counts
        )


def only_choice(choices: tuple[Speculation | None, ...], where: str) -> Speculation | None:
    """The single choice. Raises InputError for several, because a fleet drafts one number of tokens."""
    if len(choices) > 1:
        raise InputError(f"{where}: tokens: a fleet drafts one number of tokens, found several")
    return choices[0]


def speculative_document(speculation: Speculation) -> dict[str, Any]:
    """The mapping that `parse_speculative` reads as the same drafts, with all numbers written out."""
    return {
        "method": speculation.method,
        "tokens": speculation.tokens,
        "acceptance": list(speculation.acceptance),
        **({} if speculation.model is None else {"model": speculation.model}),
        "draft": speculation.draft_frac,
        "draft_step": show_exactly(speculation.draft_s, "s"),
        "basis": speculation.basis,
    }


def speculative_of_engine(engine: object) -> object:
    """The value of `speculative` in `engine:`; None if there is none."""
    return engine.get("speculative") if isinstance(engine, Mapping) else None


def engine_with_drafts(engine: Engine | None, speculation: Speculation | None) -> Engine | None:
    """The engine as it schedules with these drafts.

    Methods that look drafts up in the text (WEIGHTLESS) need the tokens of the last step, so with them vLLM
    prepares no step while another runs.
    """
    if engine is None or speculation is None or speculation.method not in WEIGHTLESS:
        return engine
    return replace(engine, async_scheduling=False)


def check_scheduling(engine: object, choices: tuple[Speculation | None, ...], where: str) -> None:
    """Raise InputError if `engine:` wants asynchronous scheduling with drafts that exclude it.

    These are drafts that vLLM looks up in the text (`engine_with_drafts`). A plan that may also draft nothing
    is not refused.
    """
    if not isinstance(engine, Mapping) or engine.get("async_scheduling") is not True:
        return
    looked_up = next((each.method for each in choices if each and each.method in WEIGHTLESS), None)
    if looked_up is not None and None not in choices:
        raise InputError(f"{where}: async_scheduling: vLLM has none with {looked_up}; drop one of the two")


def find_drafter(speculation: Speculation | None, llm: Llm, catalog: Catalog) -> Drafter:
    """Weights and KV of the drafter; an empty one if nothing is drafted."""
    if speculation is None:
        return Drafter()
    method = speculation.method
    # If the size of an LLM's own draft layers is unknown, they count as large as an EAGLE drafter.
    if method in OWN_LAYERS and not llm.draft_parameters:
        method = "eagle3"
    return _drafter_of_method(method, llm, speculation.model, catalog)


def _parse_method(value: object, where: str) -> str:
    """One of METHODS; raises InputError for any other value."""
    if value in NOT_MODELLED:
        raise InputError(f"{where}: {value} is not there yet; one of {', '.join(METHODS)}")
    return check_one_of(value, METHODS, where)


def _parse_counts(section: Section) -> list[int]:
    """The numbers of draft tokens to choose from, in ascending order."""
    tokens = section.get_required("tokens")
    # An empty list is refused like a value that is no number.
    count_list = tokens if isinstance(tokens, list) and tokens else [tokens]
    return sorted(
        {
            check_whole_number(count, section.path_of("tokens"), least=0, most=MOST_DRAFTS)
            for count in count_list
        }
    )


def _parse_acceptance(
    section: Section, method: str, most: int, catalog: Catalog
) -> tuple[Callable[[int], tuple[float, ...]], str]:
    """A function from drafted tokens (at most `most`) to the acceptance of each; and the source of these."""
    if "acceptance" not in section:
        rows = [name for name, row in catalog.acceptance.items() if row.method == method]
        named = f", or a row of catalogs/acceptance.yaml: {', '.join(rows)}" if rows else ""
        raise section.error("acceptance", f"missing; write a probability such as 0.7{named}")
    value, where = section.get_required("acceptance"), section.path_of("acceptance")
    # A text such as "70 %" is a share; any other text is the name of a row.
    if isinstance(value, str) and not value.strip().endswith("%"):
        if (row := catalog.acceptance.get(value)) is None:
            hints = nearest_names(value, catalog.acceptance) or list(catalog.acceptance)
            raise CatalogError(
                f"{where}: {value!r} is not in catalogs/acceptance.yaml; nearest: {', '.join(hints)}"
            )
        if row.method != method:
            raise InputError(f"{where}: {value} is of method {row.method}, found method {method}")
        if most > len(row.lengths):
            raise InputError(f"{where}: {value} knows up to {len(row.lengths)} draft tokens, found {most}")
        return lambda tokens: conditional_acceptance(row.lengths, tokens), f"acceptance {value}: {row.source}"
    if is_number(value) or isinstance(value, str):
        share = read_share(value, where)
        return lambda tokens: (share,) * tokens, "acceptance as given"
    if not isinstance(value, list):
        raise refused_value(
            where, "expected numbers such as [0.8, 0.7], or a row of catalogs/acceptance.yaml", value
        )
    if len(value) < most:
        raise InputError(f"{where}: expected a number for each of {most} draft tokens, found {len(value)}")
    shares = tuple(read_share(item, where) for item in value)
    return lambda tokens: shares[:tokens], "acceptance as given"


def _parse_draft_frac(section: Section, method: str, llm: Llm, model: str | None, catalog: Catalog) -> float:
    """The share of a step that a pass of the drafter takes, estimated where it is not given."""
    if method in (*WEIGHTLESS, *OWN_LAYERS) and model is not None:
        raise section.error("model", f"{method} has no model of its own, found {model!r}")
    if method not in (*WEIGHTLESS, *OWN_LAYERS) and model is None:
        raise section.error("model", f"{method} needs the name of the drafter's checkpoint, found none")
    if "draft" in section:
        return section.share("draft", most=MOST_DRAFT_FRAC)
    try:
        return _drafter_of_method(method, llm, model, catalog).draft_frac
    except InputError as error:
        # Of a small LLM a plan needs the memory too.
        advice = "" if method == "draft_model" else "; or say what a pass takes (draft: 3 %)"
        raise InputError(f"{section.where}: {error}{advice}") from None


def _drafter_of_method(method: str, llm: Llm, model: str | None, catalog: Catalog) -> Drafter:
    """The drafter of a method; `model` is looked up in the catalog only if a small LLM drafts."""
    if method != "draft_model":
        return drafter_of(method, llm)
    return drafter_of(method, llm, None if model is None else catalog.llm(model))
