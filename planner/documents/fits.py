"""Reads and writes files of step times: our fits, and the forms in which other programs have step times.

    llm: meta-llama/Llama-3.1-70B            # a file of catalogs/latency, or one beside a fleet
    gpu: h100-80g
    source: ...
    date: 2026-11-20
    command: plan fit steps.csv -o fit.yaml
    fits:
      - {tp: 4, knots_tokens: [1, 8192], f_s: [0.01, 0.11], a_s: 1e-9, b_s: 0, d_s: 1e-7, e_s: 0, h_s: 0.001,
         basis: "measured", mape_frac: 0.02, max_context_tokens: 9000, simulated: {form: corrected, ...}}

`planner.models.latency` says what the numbers mean, `planner.models.foreign_forms` and `correction` explain
the forms. A fit with `ep: true` is of expert parallelism: every GPU has whole experts instead of slices of
all. A fit with `dp: 2` is of two data-parallel ranks, and `joint_s` is the part of f_s that depends on the
tokens of all ranks. Ranks on several nodes may have two fits, `all2all: deepep_low_latency` and
`deepep_high_throughput`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

from planner.documents.spreads import SPREAD_KEYS, parse_spread, spread_document
from planner.errors import InputError
from planner.files.checked_files import open_input, read_yaml
from planner.files.document_values import PLAIN, Section, Wording, check_rows, errors_as
from planner.models.all2all import All2All
from planner.models.correction import CorrectedFormula
from planner.models.foreign_forms import DistServeSteps, SplitwiseLookup, StepForm
from planner.models.latency import Kind, StepLatency

if TYPE_CHECKING:  # The module imports scikit-learn, which takes long.
    from planner.models.step_fit import Errors

HEADER = ("llm", "gpu", "source", "date", "command")
NUMBERS = ("a_s", "b_s", "d_s", "e_s", "h_s")  # Each fit has all of them.
OPTIONAL = ("mape_frac", "max_context_tokens", "uncertainty_frac")  # None where they are not known.
# The value of keys that only some fits have, for a fit without the key; `fit_row` leaves out keys with it.
LEFT_OUT: Mapping[str, Any] = {
    "ep": False,
    "dp": 1,
    "all2all": "",
    "joint_s": [],
    "m_s": 0.0,
    "uncertainty_frac": None,
    "simulated": None,
}
HEADER_BYTES = 4096  # `llm` and `gpu` are in the first lines of a file, perhaps after a long `source`.
FIT_KEYS = (
    "tp",
    "ep",
    "dp",
    "all2all",
    "knots_tokens",
    "f_s",
    "joint_s",
    *NUMBERS,
    "basis",
    "kind",
    *OPTIONAL,
    "m_s",
    "errors",
    "simulated",
    "spread",
)
KINDS: Mapping[str, Kind] = {  # By the first word of a basis, for files that name no kind (`_kind_of`).
    "silicon": "kernels",
    "measured": "steps",
    "fitted": "steps",
    "derived": "derived",
    "roofline": "roofline",
}
Form = SplitwiseLookup | DistServeSteps | CorrectedFormula


class Split(NamedTuple):
    """How an LLM is split over GPUs: TP, whether GPUs have whole experts (`ep`), the number of data-parallel
    ranks, and how ranks on several nodes exchange tokens ("": all on one node).
    """

    tp: int
    ep: bool
    dp: int = 1
    all2all: All2All = ""


class FormKeys(NamedTuple):
    """How a form of step times is written: its class, the keys of its lists of numbers, and those of its
    single numbers.
    """

    form_class: type[Form]
    lists: tuple[str, ...]
    numbers: tuple[str, ...]


FORMS: Mapping[str, FormKeys] = {
    "splitwise-lookup": FormKeys(
        SplitwiseLookup, lists=("knots_tokens", "prompt_s", "token_s"), numbers=("mixed_factor", "b_s", "d_s")
    ),
    "distserve": FormKeys(
        DistServeSteps,
        lists=("prefill_s", "decode_small_s", "decode_large_s"),
        numbers=("threshold", "per_rank_s", "overhead_s", "overhead_s_per_token"),
    ),
    "corrected": FormKeys(
        CorrectedFormula,
        lists=("formula_s", "weights", "tokens", "pairs", "decodes", "kv_tokens", "prefills"),
        numbers=("h_s", "context_step"),
    ),
}


def read_header(path: Path) -> tuple[str, str]:
    """`llm` and `gpu` of a fit file from its first lines: the fits are long and mostly not needed."""
    with open_input(path) as stream:
        # utf-8-sig drops the mark that editors on Windows put first.
        head = stream.read(HEADER_BYTES).decode("utf-8-sig", errors="replace")
    names = []
    for key in ("llm", "gpu"):
        # A line `key: name`, perhaps with a comment of YAML, whose # follows a space; `.*?` leaves the spaces
        # around the name out.
        match = re.search(rf"^{key}:[ \t]*(.*?)[ \t]*(?:(?<=[ \t])#.*)?\r?$", head, flags=re.MULTILINE)
        names.append(match[1].strip("'\"") if match else "")
        if not names[-1]:
            raise InputError(f"{path}: {key} is missing; expected `{key}: name` among the first lines")
    return names[0], names[1]


def read_fits(path: Path, wording: Wording = PLAIN) -> dict[Split, StepLatency]:
    """The fits of a file of a catalog. Raises InputError for two fits of one split."""
    file = Section.from_document(read_yaml(path), path, (*HEADER, "fits"), wording=wording)
    fits: dict[Split, StepLatency] = {}
    for n, row in enumerate(check_rows(file.get("fits"), file.path_of("fits"), "fits")):
        # Messages about the keys of the split name the fit by its number; later ones name it by its split.
        fit = Section.from_document(row, f"{path}: fits[{n}]", wording=wording)
        tp, ep, dp = fit.whole_number("tp"), fit.flag("ep", False), fit.whole_number("dp", 1)
        all2all = _parse_all2all(fit)
        split = Split(tp, ep, dp, all2all)
        where = f"{path}: tp {tp}" + (" with ep" if ep else "")
        where += f", dp {dp}" if dp > 1 else ""
        where += f", {all2all}" if all2all else ""
        if split in fits:
            raise InputError(f"{where}: is given twice; keep one")
        fits[split] = parse_latency(Section.from_document(row, where, FIT_KEYS, wording=wording))
    return fits


def _parse_all2all(row: Section) -> All2All:
    """How ranks on several nodes exchange tokens; "" on one node."""
    return cast(All2All, row.one_of("all2all", get_args(All2All), ""))


def read_fit(
    path: Path, tp: int, wording: Wording = PLAIN, *, ep: bool = False, dp: int = 1, all2all: All2All = ""
) -> tuple[Section, Section]:
    """The whole file, and its one fit of `tp` GPUs and `dp` ranks: a row of `fits`, or the file itself if it
    is one fit. A row without `tp`, `dp` or `all2all` matches any value of that key. If several rows match,
    those with the key `dp` are taken (for more than one rank), and of these the one with this `ep`. Raises
    InputError if not exactly one row is left.
    """
    file = Section.from_document(read_yaml(path), path, (*HEADER, "fits", *FIT_KEYS), wording=wording)
    listed = check_rows(file.get("fits", [dict(file.values)]), file.path_of("fits"), "fits")
    fits = [Section.from_document(row, path, (*HEADER, *FIT_KEYS), wording=wording) for row in listed]
    of_degrees = [row for row in fits if row.get("tp", tp) == tp and row.whole_number("dp", dp) == dp]
    matches = [row for row in of_degrees if not row.get("all2all") or _parse_all2all(row) == all2all]
    if len(matches) > 1 and dp > 1:
        matches = [row for row in matches if "dp" in row]
    if len(matches) > 1:
        matches = [row for row in matches if row.flag("ep", False) == ep]
    if len(matches) != 1:
        tp_text = ", ".join(str(row.get("tp")) for row in fits)
        ranks = f" and dp {dp}" if dp > 1 else ""
        raise InputError(f"{path} has {len(matches)} fits for tp {tp}{ranks}, need one; found tp {tp_text}")
    return file, matches[0]


def parse_latency(row: Section, *, basis: str | None = None) -> StepLatency:
    """The fit in `row`. `basis` stands in for a missing basis; without it InputError is raised."""
    knots_tokens, f_s = row.numbers("knots_tokens"), row.numbers("f_s")
    numbers: dict[str, Any] = {key: row.number(key) for key in NUMBERS}
    numbers |= {key: row.number(key, None) for key in OPTIONAL}
    stated_basis = row.plain_text("basis") if basis is None else row.plain_text("basis", basis)
    with errors_as(InputError, row.where):
        kind = cast(Kind, row.one_of("kind", get_args(Kind), _kind_of(stated_basis)))
        return StepLatency(
            knots_tokens=knots_tokens,
            f_s=f_s,
            **numbers,
            basis=stated_basis,
            kind=kind,
            spread=parse_spread(row.subsection("spread", SPREAD_KEYS)) if "spread" in row else None,
            m_s=row.number("m_s", 0.0),
            joint_s=row.numbers("joint_s") if "joint_s" in row else (),
        )


def _kind_of(basis: str) -> Kind:
    """The kind of a fit whose file was written before files named the kind, from the text of its basis."""
    if "host overhead not included" in basis:  # calibrate/fitting.py writes this of sums of kernels.
        return "kernels"
    first_word = basis.split(" ")[0].rstrip(":")
    return KINDS.get(first_word, "given")


def parse_simulated(row: Section) -> CorrectedFormula | None:
    """The form that `plan fit --choose` found better than the ordinary fit; None if the row has none."""
    section = row.get("simulated")
    if section is None:
        return None
    form = parse_form(row.subsection("simulated")) if isinstance(section, Mapping) else None
    if not isinstance(form, CorrectedFormula):
        raise row.refused("simulated", "expected form: corrected and its numbers", section)
    return form


def parse_form(section: Section) -> Form:
    """Step times of one of FORMS, from a section with the key `form`. Raises InputError."""
    name = section.one_of("form", FORMS)
    form_class, lists, numbers = FORMS[name]
    # The same section again, which now refuses all keys but those of this form.
    form = Section.from_document(
        section.values, section.where, ("form", *lists, *numbers), wording=section.wording
    )
    values: dict[str, Any] = {key: form.numbers(key) for key in lists}
    values |= {key: form.number(key) for key in numbers if key in form}
    if "threshold" in values and values["threshold"] % 1 == 0:
        values["threshold"] = int(values["threshold"])  # A count of tokens; the form refuses a fraction.
    try:
        return form_class(**values)
    except InputError as error:
        raise InputError(f"{form.where}: {error}") from None
    except TypeError:  # An argument without a default is missing.
        missing = ", ".join(key for key in numbers if key not in form)
        raise InputError(f"{form.where}: a {name} needs numbers for some of {missing}") from None


def latency_document(latency: StepLatency, form: StepForm | None = None) -> dict[str, Any]:
    """Step times, with no digit rounded. `parse_latency` reads the fit, and `parse_simulated` the form that
    is simulated in its place. Step times of another program are written as their form alone, which
    `parse_form` reads.
    """
    if isinstance(form, SplitwiseLookup | DistServeSteps):
        return form_document(form)
    simulated = {"simulated": form_document(form)} if isinstance(form, CorrectedFormula) else {}
    fit = {key: _as_list(value) for key, value in asdict(latency).items() if key not in ("spread", "joint_s")}
    if latency.joint_s:
        fit["joint_s"] = list(latency.joint_s)
    spread = {} if latency.spread is None else {"spread": spread_document(latency.spread)}
    return fit | spread | simulated


def form_document(form: Form) -> dict[str, Any]:
    """The mapping that `parse_form` reads as this form."""
    name = next(name for name, keys in FORMS.items() if isinstance(form, keys.form_class))
    return {"form": name} | {key: _as_list(value) for key, value in asdict(form).items()}


def fit_document(
    llm: str, gpu: str, fits: Sequence[Mapping[str, Any]], *, source: str, date: str, command: str
) -> dict[str, Any]:
    """A file of the rows `fits`, made by `fit_row`. `llm` and `gpu` come first, where `read_header` looks."""
    return {"llm": llm, "gpu": gpu, "source": source, "date": date, "command": command, "fits": list(fits)}


def fit_row(
    tp: int,
    latency: StepLatency,
    errors: Mapping[str, Errors],
    form: CorrectedFormula | None = None,
    *,
    ep: bool = False,
    dp: int = 1,
    all2all: All2All = "",
) -> dict[str, Any]:
    """One item of `fits:`, for step times that were measured on `tp` GPUs; `errors` is keyed by the kind of
    step. Numbers are rounded to seven digits, more than a measurement resolves.
    """
    row: dict[str, Any] = {
        "tp": tp,
        "ep": ep,
        "dp": dp,
        "all2all": all2all,
        "knots_tokens": _seven_digits(latency.knots_tokens),
        "f_s": _seven_digits(latency.f_s),
        "joint_s": _seven_digits(latency.joint_s),
        **{key: _seven_digits(getattr(latency, key)) for key in NUMBERS},
        "basis": latency.basis,
        "kind": latency.kind,
        "mape_frac": None if latency.mape_frac is None else round(latency.mape_frac, 4),
        "max_context_tokens": latency.max_context_tokens,
        "errors": {
            step_kind: {
                "mape_frac": round(error.mape_frac, 4),
                "p90_frac": round(error.p90_frac, 4),
                "steps": error.steps,
            }
            for step_kind, error in errors.items()
        },
        "m_s": _seven_digits(latency.m_s),
        "uncertainty_frac": None if latency.uncertainty_frac is None else round(latency.uncertainty_frac, 4),
        "simulated": None if form is None else _seven_digit_lists(form_document(form)),
    }
    return {key: value for key, value in row.items() if key not in LEFT_OUT or value != LEFT_OUT[key]}


def _as_list(value: Any) -> Any:
    """A tuple as a list, which YAML can write; other values as they are."""
    return list(value) if isinstance(value, tuple) else value


def _seven_digit_lists(form: Mapping[str, Any]) -> dict[str, Any]:
    """A form's document with its lists in seven digits; its single numbers and its name stay as they are."""
    return {key: _seven_digits(value) if isinstance(value, list) else value for key, value in form.items()}


def _seven_digits(value: Any) -> Any:
    """A number, or each number of a list, rounded to seven digits."""
    if isinstance(value, list | tuple):
        return [_seven_digits(item) for item in value]
    return float(f"{value:.7g}")
