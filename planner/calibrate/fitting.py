"""Fits the formula of step times (planner/models/latency.py) to a table of measured steps, and writes the fit
in the format of catalogs/latency.

A table that does not determine all coefficients of the formula is refused, with an error that says which
steps to measure.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.calibrate.engine_fit import without_host
from planner.calibrate.measured_runs import Calibrated, MeasuredEngine, calibrate_host
from planner.documents.catalog import Catalog
from planner.documents.engine_file import default_engine
from planner.documents.fits import fit_document, fit_row
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.files.document_values import errors_as
from planner.files.text_tables import as_floats, read_text
from planner.importers import foreign_fields
from planner.importers.benchmark_runs import MeasuredRun, parse_runs
from planner.importers.foreign_fields import StatedSetup
from planner.models.correction import CorrectedFormula
from planner.models.latency import DECODES, ON_WALL, PREFILLS, Array, StepLatency
from planner.models.step_fit import Errors, PiecewiseLinearStepLatency, cross_validated_errors
from planner.models.step_tables import StepTable, read_step_table

FOLDS = 5  # Held-out errors are those of five fits, each without a fifth of the distinct steps.
# Below this number of distinct steps (six in each of FOLDS) a note says that the held-out errors are rough.
MANY_STEPS = 30
# A measured host time counts as at most this share of the quickest step, because a step has some GPU time.
MOST_HOST_FRAC = 0.9
RANK_TOLERANCE = 1e-6  # Columns are scaled to at most 1; then a smaller singular value counts as 0.
_HOST_LIMIT_S = 1.0  # A host time of a step that is this long or longer is refused.


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """The fitted step times of an LLM on `tp` GPUs.

    `errors` are those on steps held out of the fit, by regime (prefill, decode, mixed, all). `date` is when
    the steps were measured. `families` has the held-out errors of every family of formulas that was tried, by
    family and regime. If `form` is not None, a fleet that names this fit is simulated with it, not `latency`.
    """

    llm: str
    gpu: str
    tp: int
    source: str
    latency: StepLatency
    errors: Mapping[str, Errors]
    notes: tuple[str, ...] = ()
    date: str | None = None
    families: Mapping[str, Mapping[str, Errors]] = field(default_factory=dict)
    form: CorrectedFormula | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fit as `plan fit` and `plan calibrate` print it with --json."""
        return {
            "llm": self.llm,
            "gpu": self.gpu,
            "tp": self.tp,
            "basis": self.latency.basis,
            "uncertainty_frac": self.latency.uncertainty_frac,
            "errors": {regime: asdict(errors) for regime, errors in self.errors.items()},
            "families": {
                name: {regime: asdict(errors) for regime, errors in family.items()}
                for name, family in self.families.items()
            },
            "notes": list(self.notes),
        }


def fit_table(
    table: StepTable,
    stated: StatedSetup,
    catalog: Catalog,
    *,
    where: str,
    host_overhead_s: float | None = None,
    choose_family: bool = False,
) -> FittedSteps:
    """Fit step times to `table`, which was read from the file `where`. The LLM, GPU and parallelism in
    `stated` override those in the table's `#` lines. Raises InputError for a table that does not determine
    the fit.

    `host_overhead_s` is the time of each step that the engine spends on the host. It is subtracted from
    measured step times, or added to kernel times. None means the median of the table's column host_s. With
    `choose_family` the formula is the one of `planner.models.families` that predicts held-out steps best; its
    times include the host's part.
    """
    about = table.about
    # `plan profile` puts the host's times into the file `engines`; `without_host` leaves those of kernels.
    has_separate_host = "engines" in about and host_overhead_s is None
    if has_separate_host:
        slowdown, admission_s = (_number_of(about, key, where) for key in ("slowdown", "admission_s"))
        table = without_host(table, slowdown=slowdown, admission_s=admission_s)
    llm, gpu, tp = foreign_fields.read_setup(
        stated, catalog, where, llm=about.get("llm"), gpu=about.get("gpu"), tp=about.get("tp")
    )
    _check_identified(table.X, where)
    is_kernel_time = table.is_kernel_time
    if host_overhead_s is None:
        host_overhead_s = 0.0 if is_kernel_time else _measured_host_s(table)
    if not 0 <= host_overhead_s < _HOST_LIMIT_S:
        raise InputError(f"{where}: host overhead is {host_overhead_s:g} s, must be >= 0 and below 1 s")
    source = about.get("source") or where
    if "engine" in about and "source" not in about:  # A table of `plan profile` has no source.
        source = f"{where}, {about['engine']} on {about.get('device', gpu)}"
    host_text = "not included" if is_kernel_time else "included"
    if host_overhead_s:
        host_text = f"{host_overhead_s * 1e3:.3g} ms per step, " + (
            "added" if is_kernel_time else "separated from the GPU's"
        )
    # The basis ends so if times include waits for cores (step_fits.py, `includes_other_processes`).
    tail = ON_WALL if about.get("shares_cores") == "true" else ""
    basis = f"fitted: {source}; host overhead {host_text}{tail}"
    model = PiecewiseLinearStepLatency(
        host_s=0.0 if is_kernel_time else host_overhead_s, basis=basis, reads_cached=table.reads_cached
    )
    with errors_as(InputError, where):
        errors = cross_validated_errors(model, table.X, table.y, folds=FOLDS)
        latency: StepLatency = model.fit(table.X, table.y).latency_
    notes, families, form = _table_notes(table), {}, None
    if has_separate_host:
        notes = (
            *notes,
            f"host and front end are in {about['engines']} beside the table: --catalog of its folder",
        )
    elif host_overhead_s and not is_kernel_time:
        notes = (
            *notes,
            f"the host's part ({host_overhead_s * 1e3:.2g} ms) is in every step, and asynchronous scheduling "
            "would hide it: steps come out too long then; `plan profile` without --steps-only tells it apart",
        )
    if choose_family:
        # Imported here, because it needs scikit-learn's forests, which take long to import.
        from planner.models.family_choice import choose_step_family

        choice = choose_step_family(table, folds=FOLDS)
        families, form = dict(choice.errors_by_family), choice.form
        # If the family is no StepLatency, `latency` is a refit, and `converted` are the errors of the refit.
        errors = dict(choice.converted or choice.errors_by_family[choice.family])
        latency = replace(choice.latency, basis=f"{basis.removesuffix(tail)}; {choice.latency.basis}{tail}")
        notes = (*notes, str(choice))
    latency = replace(latency, mape_frac=errors["all"].mape_frac)
    latency = replace(latency, kind="kernels" if is_kernel_time else "steps")
    if is_kernel_time:
        latency = replace(latency, h_s=host_overhead_s)
        form = None if form is None else replace(form, h_s=host_overhead_s)
    return FittedSteps(llm, gpu, tp, source, latency, errors, notes, about.get("date"), families, form)


def _number_of(about: Mapping[str, str], key: str, where: str) -> float:
    """The engine's constant `key` from a table's `#` lines: slowdown, a factor on the time of the GPU (1 if
    the lines lack it), or admission_s, seconds per prefill of a step (0 if they lack it); engine_fit.py fits
    both. Raises InputError for what is no number.
    """
    default = {"slowdown": "1", "admission_s": "0"}[key]
    try:
        return float(about.get(key, default))
    except ValueError:
        raise InputError(f"{where}: # {key}: expected a number, found {about[key]!r}") from None


def _measured_host_s(table: StepTable) -> float:
    """The host's time of a step [s]: the median of the table's column host_s, at most MOST_HOST_FRAC of the
    quickest step; 0 if the table has no such column, or no positive value in it.
    """
    if "host_s" not in table.steps.columns:
        return 0.0
    host_s = as_floats(table.steps.host_s)
    measured_s = host_s[np.isfinite(host_s) & (host_s > 0)]
    if not measured_s.size:
        return 0.0
    return min(float(np.median(measured_s)), MOST_HOST_FRAC * float(table.y.min()))


def _table_notes(table: StepTable) -> tuple[str, ...]:
    """The notes on a table: which steps it lacks, and the note in its `#` lines."""
    X, notes = table.X, []
    if not ((X[:, DECODES] > 0) & (X[:, PREFILLS] > 0)).any():
        notes.append("no mixed steps: steps with prefill and decode are predicted by the sum of both")
    if (distinct_steps := len(np.unique(X, axis=0))) < MANY_STEPS:
        notes.append(f"only {distinct_steps} distinct steps: the held-out errors are rough")
    return (*notes, *((str(table.about["note"]),) if table.about.get("note") else ()))


def _check_identified(X: Array, where: str) -> None:
    """Raise InputError, with what to measure, if the steps do not determine all coefficients.

    X has a row for each step; its five columns are named in the first line below (planner/models/latency.py).
    The steps with prefill only must separate the effect of new tokens from that of attention's pairs of
    tokens: the columns 1, `tokens`, `pairs` must be linearly independent. The steps with decode only must
    separate the effect of sequences from that of the tokens they read: so must 1, `decodes`, `kv_tokens`.
    """
    tokens, pairs, decodes, kv_tokens, prefills = X.T
    prefill_only, decode_only = decodes == 0, prefills == 0
    missing = []
    if not _is_full_rank(tokens[prefill_only], pairs[prefill_only]):
        missing.append("prefills without decodes at three or more prompt lengths (say 128, 512, 2048, 8192)")
    if not _is_full_rank(decodes[decode_only], kv_tokens[decode_only]):
        missing.append(
            "decodes without prefill at two or more batch sizes and contexts (say 1, 16, 128 x 512, 4096)"
        )
    distinct_steps = len(np.unique(X, axis=0))
    # Each fold is to hold out two distinct steps or more.
    if not missing and distinct_steps < 2 * FOLDS:
        missing.append(f"{2 * FOLDS - distinct_steps} more distinct steps, to hold some out")
    if missing:
        raise InputError(
            f"{where}: {distinct_steps} distinct steps do not settle the fit; measure {'; '.join(missing)}"
        )


def _is_full_rank(first: Array, second: Array) -> bool:
    """Whether the columns 1, `first` and `second` are linearly independent."""
    if len(first) < 3:  # Three columns need three steps.
        return False
    columns = np.column_stack([np.ones(len(first)), first, second])
    scaled = columns / columns.max(axis=0).clip(min=1.0)
    return int(np.linalg.matrix_rank(scaled, tol=RANK_TOLERANCE)) == 3


def fit_yaml(fitted: FittedSteps, *, command: str, date: str | None = None) -> str:
    """The text of a fit's YAML file, in which `command` is named as its origin. The date in it is `date`, or
    else when the steps were measured, or else today.
    """
    return to_yaml(
        fit_document(
            fitted.llm,
            fitted.gpu,
            [fit_row(fitted.tp, fitted.latency, fitted.errors, fitted.form)],
            source=foreign_fields.one_line(fitted.source),
            date=date or fitted.date or datetime.date.today().isoformat(),
            command=command,
        )
    )


def calibrate_files(
    paths: Sequence[Path],
    stated: StatedSetup,
    catalog: Catalog,
    *,
    base: Path | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    kv_tokens: int | None = None,
) -> tuple[FittedSteps, Calibrated]:
    """Correct a fit by step tables and benchmark runs (runs.json) of one engine. The fit is the one in the
    file `base`, or without `base` the catalog's.

    Without `kv_tokens` the memory model computes them. A run that names its own settings
    is simulated with its own. Returns the corrected fit, and what was corrected. Raises InputError for
    measurements of several engines, and for a `base` without a fit of this one.
    """
    steps: list[StepTable] = []
    runs: list[MeasuredRun] = []
    setups = set()
    notes: list[str] = []
    for path in paths:
        text = read_text(path)
        if text.lstrip().startswith(("{", "[")):  # JSON: benchmark runs.
            measured = parse_runs(foreign_fields.parse_json(text, path), path)
            setup_facts = {"llm": measured.llm, "gpu": measured.gpu, "tp": measured.tp}
            runs += measured.runs
            notes += measured.notes
        else:
            table = read_step_table(path)
            setup_facts = {key: table.about.get(key) for key in ("llm", "gpu", "tp")}
            steps.append(table)
        setups.add(foreign_fields.read_setup(stated, catalog, path, **setup_facts))
    if len(setups) != 1:
        engine_names = "; ".join(f"{llm} on {tp} x {gpu}" for llm, gpu, tp in sorted(setups))
        raise InputError(
            f"calibrate: the measurements are of different engines ({engine_names}); give those of one"
        )
    llm_name, gpu_name, tp = setups.pop()
    # `stated.llm` may be a path to a config.json, whose LLM the catalog need not find by name.
    llm, gpu = catalog.llm(stated.llm or llm_name), catalog.gpu(gpu_name)
    latency = (catalog if base is None else _catalog_of_fits(catalog, base)).step_latency(llm, gpu, tp)
    # A catalog without a fit answers with a roofline. So `base` has no fit if the answer without it is the
    # same.
    if base is not None and latency == _catalog_of_fits(catalog).step_latency(llm, gpu, tp):
        raise InputError(f"{base}: holds no fit of {llm_name} on {tp} x {gpu_name}")
    version = default_engine(catalog.engines.values())
    engine = MeasuredEngine(llm, gpu, tp, max_num_batched_tokens, max_num_seqs, kv_tokens, version)
    result = calibrate_host(latency, steps=steps, runs=runs, engine=engine)
    names = ", ".join(path.name for path in paths)
    source = f"{base.name if base else 'the catalog'}, calibrated by {names}"
    return FittedSteps(llm_name, gpu_name, tp, source, result.latency, {}, tuple(notes)), result


def _catalog_of_fits(catalog: Catalog, *fit_files: Path) -> Catalog:
    """The catalog with the fits of these files only; without files it has only rooflines."""
    # `_fit_paths` and `_fits` are emptied, because they hold what was read from the catalog's other files.
    return replace(catalog, fit_files=fit_files, _fit_paths={}, _fits={})
