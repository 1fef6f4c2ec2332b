"""Profiles an LLM on the machine at hand: plans which steps to time, times them, writes them down at once.

    profile(Path("config.json"), Path("table.csv"), budget_s=600)

The table is a step table (`planner.models.step_tables`) with a few more columns, described in
docs/profiling.md. A row is on disk before the next step runs, and a run that finds the file goes on where
the last one ended.

Other programs and changing clocks disturb a machine. So the smallest step, the reference, is timed after each
row. If it takes more than `DISTURBED_RATIO` times its shortest time so far, the row is measured again, up to
`MOST_TRIES` times, and the try with the shortest reference is written. Vidur's forest is imported on use,
because scikit-learn takes a second.
"""

from __future__ import annotations

import csv
import datetime
import io
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.llm_config import llm_from_config
from planner.domain import Gpu
from planner.errors import CatalogError, InputError
from planner.files.checked_files import check_output_file, write_file
from planner.models.llm import Llm
from planner.models.parallelism import tp_s
from planner.models.step_fit import (
    PiecewiseLinearStepLatency,
    cross_validated_errors,
    errors_by_regime,
    folds_of_steps,
)
from planner.models.step_tables import (
    ALL_REDUCE,
    COLUMNS,
    StepShape,
    StepTable,
    operator_column,
    read_step_table,
)
from profiling import design, machine
from profiling.collectives import Collectives, all_reduces
from profiling.config import read_config, read_size, shard_config, text_of
from profiling.meter import StepMeasurement, StepMeter, StepNotRunError
from profiling.operators import TorchOperators
from profiling.power_sampling import GpuPower, open_gpu
from profiling.vllm_engine import VllmEngine
from profiling.vllm_install import is_installed

MORE_COLUMNS = (
    "context_tokens",
    "host_s",
    "repeats",
    "spread_frac",
    "reference_s",
    "spent_s",
    "all_reduce_s",
    "power_w",
    "peak_power_w",
)
# Keys of the header that must agree before a run adds rows to a table.
IDENTITY = ("llm", "gpu", "tp", "dtype", "engine", "device", "driver", "torch", "vllm", "limits")
START_STEPS, MOST_STEPS = 36, 5000  # Steps of the start design, and of a whole table; set by hand.
# `design.choose_step` fits the table several times. If these fits differ by less than AGREED_FRAC on every
# candidate, AGREED_TIMES in a row with other candidates each time, the profile ends early: more rows would
# teach nothing.
AGREED_FRAC, AGREED_TIMES = 0.004, 3
MOST_REFUSED = 25  # An engine may refuse this many steps before the profile fails; set by hand.
FOLDS = 5  # The folds of the cross-validation in `profile_summary`.
REFERENCE = StepShape(1, 1, 0, 0, 0)  # A prompt of one token, the smallest step.
# Bounds for disturbed rows (the module's docstring); tries are limited, since a machine may stay busy.
DISTURBED_RATIO, MOST_TRIES = 1.4, 3


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: the engine, its settings, and one rank's share of the LLM where tp > 1.

    `gpu` names the row of the catalog where the driver's name does not.
    """

    engine: str = "auto"
    tp: int = 1
    dtype: str = "bfloat16"
    gpu: str | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 32768
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """How many seconds to measure, from the time `started_s` on `clock`, or without it from the call of
    `measure_into` on.
    """

    seconds: float
    started_s: float | None = None
    clock: Callable[[], float] = time.monotonic


DEFAULT_SUBJECT = Subject()


def profile(
    config: Path | str,
    out: Path,
    subject: Subject = DEFAULT_SUBJECT,
    *,
    budget_s: float = 600.0,
    seed: int = 0,
    catalog: Catalog | None = None,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> StepTable:
    """Measure steps of the LLM in `config` (a Hugging Face config.json or its folder) into `out`.

    `budget_s` counts from this call, so that it includes the start of the engine, and what earlier runs into
    the same file spent counts too. With tp > 1 one rank's share is measured on one GPU, and the time of its
    all-reduces is added. If the machine has `tp` GPUs, the all-reduces are measured between `tp` ranks
    (profiling/collectives.py), and written beside the table; otherwise they come from the roofline. Raises
    InputError as `measure_into` does, and for an LLM or an engine that cannot be measured here.
    """
    started_s = time.monotonic()
    check_output_file(out)
    catalog = catalog or read_catalog()
    folder, llm, name = _read_llm(config, catalog)
    engine, tp = _engine_name(subject.engine), subject.tp
    power_meter = open_gpu()
    machine_facts = machine.describe_machine()
    gpu_name = subject.gpu or machine.catalog_name(machine_facts["device"], catalog)
    gpu = catalog.gpus.get(catalog.gpu_aliases.get(gpu_name.lower(), ""))  # None if it is in no catalog.
    # Measured before the engine holds the GPU.
    idle_w = None if power_meter is None else power_meter.idle_w()
    identity = {
        "llm": name,
        "gpu": gpu_name if gpu is None else gpu.name,
        "tp": str(tp),
        "dtype": subject.dtype,
        "engine": engine + (" (eager)" if subject.enforce_eager else ""),
        **machine_facts,
    }
    if out.exists() and out.stat().st_size:
        _check_same_measurement(out, identity)  # Before an engine starts for nothing.
    progress(f"starting {engine} on {machine_facts['device']}")
    settings: dict[str, Any] = dict(
        tp=tp,
        dtype=subject.dtype,
        max_num_batched_tokens=subject.max_num_batched_tokens,
        max_num_seqs=subject.max_num_seqs,
        max_model_len=subject.max_model_len,
        gpu=power_meter,
    )
    collectives = _time_collectives(folder, subject, out) if tp > 1 else None
    meter: StepMeter  # Either engine; `finally` closes it.
    if engine == "vllm":
        meter = VllmEngine(folder, enforce_eager=subject.enforce_eager, **settings)
    else:
        meter = TorchOperators(folder, **settings)
    try:
        limits = meter.limits
        header = {
            **identity,
            "limits": f"{limits.step_tokens} tokens and {limits.sequences} sequences per step, "
            f"{limits.context_tokens} of context",
            "kv_cache": f"{limits.kv_tokens} tokens in blocks of {limits.block_tokens}",
            "host_s": meter.host_s_meaning,
            "all_reduce": _all_reduce_note(llm, gpu, tp, collectives),
            **_power_notes(power_meter, idle_w),
            "date": datetime.date.today().isoformat(),
            "command": command or "profiling.measure.profile",
            "seed": str(seed),
        }
        return measure_into(
            out,
            meter,
            header,
            Budget(budget_s, started_s),
            seed=seed,
            extra_s=lambda tokens: _all_reduces_s(llm, gpu, tp, collectives, tokens),
            progress=progress,
        )
    finally:
        meter.close()


def _power_notes(power_meter: GpuPower | None, idle_w: float | None) -> dict[str, str]:
    """Lines of the header on the GPU's power; none where it cannot be read."""
    if power_meter is None:
        return {}
    limits = f"idle {idle_w:.1f} W, limit {power_meter.limit_w:.0f} W"
    return {"power": limits, "clocks": power_meter.clocks()}


def measure_into(
    out: Path,
    meter: StepMeter,
    header: Mapping[str, str],
    budget: Budget,
    *,
    seed: int = 0,
    extra_s: Callable[[float], float] = lambda _: 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> StepTable:
    """Measure the start design, then the most informative steps, each appended to `out`, until the budget is
    over, the fits agree or the table is full. `extra_s` gives the seconds of all-reduces to add to a step, by
    its tokens. Raises InputError for an `out` of another measurement, an engine that refuses more than
    MOST_REFUSED steps, and a budget without a step.
    """
    clock, budget_s = budget.clock, budget.seconds
    start_s = clock() if budget.started_s is None else budget.started_s
    earlier = _resume(out, header, meter.operators)
    spent_s = float(earlier.steps.spent_s.sum()) if earlier is not None else 0.0
    measured_steps = _measured_steps(earlier) if earlier is not None else []
    refused: list[StepShape] = []
    start_steps = [
        step
        for step in design.start_design(meter.limits, START_STEPS, seed)
        if step not in set(measured_steps)
    ]
    agreed_times = 0
    # The shortest time of the reference so far. It is timed a few times, as the machine may be busy just now.
    quiet_s = min(meter.measure(REFERENCE, quick=True).t_s for _ in range(MOST_TRIES))
    if earlier is not None:
        quiet_s = min(quiet_s, float(earlier.steps.reference_s.min()))
    while spent_s + clock() - start_s < budget_s and len(measured_steps) < MOST_STEPS:
        if start_steps:
            step = start_steps.pop(0)
            note = "start design"  # For the progress line.
        else:
            table = read_step_table(out)
            tried_steps = {*measured_steps, *refused}
            # Other candidates each time, the same in every run with this seed.
            drawn = design.candidates(
                meter.limits, design.CANDIDATES, seed + 1 + len(measured_steps) + len(refused)
            )
            candidates = [step for step in drawn if step not in tried_steps]
            if not candidates:  # A small engine has few different steps.
                progress("every step that was drawn is measured; done early")
                break
            choice = design.choose_step(
                table.X,
                table.y,
                candidates,
                np.random.default_rng((seed, len(measured_steps))),
                repeats=float(table.steps.repeats.median()) + 1,  # One more to warm up.
                overhead_s=_overhead_s(table),
            )
            # The fits must agree on the worst candidate; how far they differ on the chosen one is only shown.
            agreed_times = agreed_times + 1 if choice.worst_frac < AGREED_FRAC else 0
            if agreed_times >= AGREED_TIMES:
                progress(f"the fits agree within {100 * AGREED_FRAC:.1f} % everywhere; done early")
                break
            step, note = choice.step, f"the fits differ by {100 * choice.disagreement_frac:.1f} %"
        used_s = spent_s + clock() - start_s
        progress(f"{len(measured_steps)} steps measured, {used_s:.0f} of {budget_s:.0f} s; {note}")
        try:
            measurement, quiet_s = _measure_undisturbed(meter, step, quiet_s)
        except StepNotRunError as error:
            refused.append(step)
            if len(refused) > MOST_REFUSED:
                raise InputError(f"{out}: {len(refused)} steps were refused; the last: {error}") from None
            continue
        tokens = step.prompts * step.new + step.decodes
        _append_row(out, measurement.row(extra_s(tokens)), meter.operators)
        measured_steps.append(step)
    if not measured_steps:
        raise InputError(f"{out}: the budget of {budget_s:g} s was spent before the first step; allow more")
    return read_step_table(out)


def _measure_undisturbed(meter: StepMeter, step: StepShape, quiet_s: float) -> tuple[StepMeasurement, float]:
    """The step, measured again while the reference shows a disturbance, with the seconds spent on all tries;
    and the shortest time of the reference so far [s].
    """
    best, spent_s = None, 0.0
    for _ in range(MOST_TRIES):
        measured, reference = meter.measure(step), meter.measure(REFERENCE, quick=True)
        spent_s += measured.spent_s + reference.spent_s
        measured = replace(measured, reference_s=reference.t_s)
        quiet_s = min(quiet_s, reference.t_s)
        if best is None or measured.reference_s < best.reference_s:
            best = measured
        if best.reference_s <= DISTURBED_RATIO * quiet_s:
            break
    assert best is not None
    return replace(best, spent_s=spent_s), quiet_s


def _overhead_s(table: StepTable) -> float:
    """The median seconds of a measurement beyond its repeats and the run that warms up; at least a quarter of
    a median measurement, so that the cheapest steps are not measured over and over.
    """
    spent_s = table.steps.spent_s
    beyond_s = float((spent_s - (table.steps.repeats + 1) * table.y).median())
    return max(beyond_s, float(spent_s.median()) / 4)


def profile_summary(table: StepTable, *, seed: int = 0) -> dict[str, Any]:
    """Rows, seconds, host overhead, and the error of a fit on steps held out of it, by kind of step."""
    steps = table.steps
    figures: dict[str, Any] = {
        "steps": len(steps),
        "spent_s": round(float(steps.spent_s.sum()), 1),
        "host_s_median": float(steps.host_s.median()) if steps.host_s.notna().any() else None,
        "max_step_tokens": int((steps.prefill_tokens + steps.n_decode).max()),
        "max_decodes": int(steps.n_decode.max()),
    }
    if steps.power_w.notna().any():
        figures |= {
            "power_w_mean": float(steps.power_w.mean()),
            "power_w_peak": float(steps.peak_power_w.max()),
        }
    if len(np.unique(table.X, axis=0)) >= 2 * FOLDS:
        errors = cross_validated_errors(
            PiecewiseLinearStepLatency(), table.X, table.y, folds=FOLDS, seed=seed
        )
        figures["held_out_mape_frac"] = {name: round(error.mape_frac, 4) for name, error in errors.items()}
        if (operators := table.operators) is not None:
            figures["held_out_mape_frac_by_operators"] = _by_operators(table, operators, seed)
    return figures


def _time_collectives(folder: Path, subject: Subject, out: Path) -> tuple[int, Collectives] | None:
    """The LLM's layers and its measured all-reduces, written beside the table too; None if not possible."""
    config = read_config(folder)
    shard_config(config, subject.tp)  # Raises now where the LLM cannot be divided.
    decoder = text_of(config)
    layers = read_size(decoder, "num_hidden_layers")
    measured = all_reduces(
        ranks=subject.tp,
        hidden=read_size(decoder, "hidden_size"),
        dtype=subject.dtype,
        most_tokens=subject.max_num_batched_tokens,
    )
    if measured is None:
        return None
    write_file(out.with_suffix(".all_reduce.csv"), measured.to_csv())
    return layers, measured


def _all_reduces_s(
    llm: Llm | None, gpu: Gpu | None, tp: int, measured: tuple[int, Collectives] | None, tokens: float
) -> float:
    """Seconds of all-reduces in a step: measured, or by the roofline, or 0 where neither is known."""
    if measured is not None:
        layers, collectives = measured
        return collectives.step_s(layers, tokens)
    return float(tp_s(llm, gpu, tp, tokens)) if llm is not None and gpu is not None else 0.0


def _by_operators(table: StepTable, operators: pd.DataFrame, seed: int) -> dict[str, float]:
    """The errors on held-out steps, predicted as sums of Vidur's forests, one per operator."""
    from planner.models.families.vidur_forest import VidurForest
    from planner.models.family_choice import cross_validated_s

    fold = folds_of_steps(table.X, FOLDS, seed)
    predicted = cross_validated_s(VidurForest(seed=seed), table.X, table.y, fold, operators)
    errors = errors_by_regime(table.X, table.y, predicted)
    return {name: round(error.mape_frac, 4) for name, error in errors.items()}


def _all_reduce_note(
    llm: Llm | None, gpu: Gpu | None, tp: int, measured: tuple[int, Collectives] | None
) -> str:
    """Where the table's all-reduces come from, for its header."""
    if tp == 1:
        return "none"
    if measured is not None:
        return f"measured by {measured[1].backend} between {tp} ranks here; in t_s"
    if llm is None or gpu is None:
        return "not measured, not in t_s: the GPU or the LLM is in no catalog"
    return f"not measured; added to t_s from the roofline of {gpu.name}"


def _engine_name(engine: str) -> str:
    """The engine that `--engine` means: "auto" is vLLM where it is installed. Raises InputError for other
    names.
    """
    if engine not in ("auto", "vllm", "torch"):
        raise InputError(f"--engine: expected auto, vllm or torch, found {engine!r}")
    return ("vllm" if is_installed() else "torch") if engine == "auto" else engine


def _read_llm(config: Path | str, catalog: Catalog) -> tuple[Path, Llm | None, str]:
    """The path `config`; the LLM, None if our formulas do not know it; and its name in the table: that of a
    catalog row of the same shape, else the path. Raises InputError if nothing is at the path.
    """
    path = Path(config)
    if not path.exists():
        raise InputError(f"{config}: no such file or folder; expected a Hugging Face config.json")
    try:
        llm = llm_from_config(path)
    except CatalogError:
        return path, None, str(path)
    names = [row.name for row in catalog.llms.values() if _shape(row) == _shape(llm)]
    return path, llm, names[0] if names else str(path)  # `plan fit` reads the LLM's shape at that path.


# LLMs with these fields alike have the same step times.
_shape = attrgetter(
    *"layers hidden heads kv_heads head_dim ffn vocab experts experts_per_token dtype_bytes".split()
)


def _columns(operators: Sequence[str]) -> tuple[str, ...]:
    """The columns of a table whose meter times these operators, with one for the collective."""
    timed = (*operators, ALL_REDUCE) if operators else ()
    return (*COLUMNS, *MORE_COLUMNS, *map(operator_column, timed))


def _resume(out: Path, header: Mapping[str, str], operators: Sequence[str]) -> StepTable | None:
    """The rows of an earlier run of the same measurement; None if `out` has none. A new file gets the header.
    Raises InputError if the file is of another measurement.
    """
    if not out.exists() or out.stat().st_size == 0:
        lines = "".join(f"# {key}: {value}\n" for key, value in header.items())
        write_file(out, lines + ",".join(_columns(operators)) + "\n")
        return None
    _check_same_measurement(out, header)  # Before anything is cut from a file that is not ours.
    text = out.read_text(encoding="utf-8", errors="replace")
    if not text.endswith("\n"):  # The run ended within a line.
        text = text[: text.rfind("\n") + 1]
        os.truncate(out, len(text.encode()))
    head, *rows = (line for line in text.splitlines() if not line.startswith("#"))
    if tuple(head.split(",")) != _columns(operators):
        raise InputError(f"{out}: holds steps with other operators; name another file with -o")
    return read_step_table(out) if rows else None


def _check_same_measurement(out: Path, header: Mapping[str, str]) -> None:
    """Raise InputError unless `out` is a table of this profiler with the IDENTITY of `header`."""
    text = out.read_text(encoding="utf-8", errors="replace")
    head = next((line for line in text.splitlines() if not line.startswith("#")), "")
    header_of_file = {}
    for line in text.splitlines():
        if line.startswith("#"):
            key, _, value = line.lstrip("# ").partition(":")
            header_of_file[key.strip()] = value.strip()
    columns = _columns(())
    is_ours = tuple(head.split(",")[: len(columns)]) == columns
    if not is_ours or not all(name.startswith("op_") for name in head.split(",")[len(columns) :]):
        raise InputError(f"{out}: exists and is no table of this profiler; name another file with -o")
    for key in IDENTITY:
        if key in header and header_of_file.get(key, "") != header[key]:
            raise InputError(
                f"{out}: holds steps with {key} {header_of_file.get(key, 'unknown')!r}, this run has "
                f"{header[key]!r}; name another file with -o"
            )


def write_notes(out: Path, notes: Mapping[str, str]) -> None:
    """Add `notes` to the `#` lines of a table; lines with the same keys are replaced."""
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    first_row = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    other_lines = [
        line for line in lines[:first_row] if line.lstrip("# ").partition(":")[0].strip() not in notes
    ]
    added = [f"# {key}: {value}\n" for key, value in notes.items()]
    write_file(out, "".join((*other_lines, *added, *lines[first_row:])))


def _measured_steps(table: StepTable) -> list[StepShape]:
    """The step of each row of a table. A row has the tokens of all its prompts, which are of one length; a
    StepShape has those of one prompt.
    """
    return [
        StepShape(prompts, new // max(prompts, 1), cached // max(prompts, 1), decodes, context)
        for prompts, new, cached, decodes, context in table.steps[
            ["n_prefill", "prefill_tokens", "cached_tokens", "n_decode", "context_tokens"]
        ]
        .astype(int)
        .itertuples(index=False)
    ]


def _append_row(out: Path, row: Mapping[str, float | int | str], operators: Sequence[str]) -> None:
    """Add a row, on disk when this returns. Raises InputError where `out` cannot be written."""
    text = io.StringIO()
    csv.DictWriter(text, _columns(operators), lineterminator="\n").writerow(row)
    try:
        with out.open("a", encoding="utf-8") as stream:
            stream.write(text.getvalue())
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror or error})") from None
