"""`plan profile` with a real engine: the engine's steps one by one, and the time that the host and the front
end add when the engine runs behind a server.

table.csv          single steps, of an engine in the profiler's process (profiling.measure)
table.served.csv   steps of engines behind their servers (planner.runtime.served)
engines.yaml       the engine's constants as fitted to both tables (planner/calibrate/engine_fit.py)

`--catalog` with the folder of these files makes a plan with these constants.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.calibrate.engine_fit import EngineFit, about_engine, fit_engine
from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.checked_files import read_yaml, to_yaml, write_file
from planner.models.step_tables import StepTable, read_step_table
from profiling.machine import describe_machine
from profiling.measure import Subject, profile, write_notes
from profiling.vllm_install import is_cpu_build

ENGINES = "engines.yaml"
# Settings of the profiled engine that the engines behind servers have too.
SHARED_SETTINGS = ("tp", "dtype", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "enforce_eager")


@dataclass(frozen=True, slots=True)
class Profiled:
    """The steps, the constants of the engine, and the files that hold them.

    `EngineFit` says what each constant is.
    """

    steps: StepTable
    engine: EngineFit
    files: tuple[Path, ...]

    def as_dict(self) -> dict[str, Any]:
        """The files, and the numbers of the engine that were taken from them."""
        return {
            "files": [str(file) for file in self.files],
            "async_scheduling": self.engine.async_scheduling,
            "host": asdict(self.engine.host),
            "rest": asdict(self.engine.rest),
            "front_end_s": self.engine.front_end_s,
            "slowdown": self.engine.slowdown,
            "admission_s": self.engine.admission_s,
            "engine_error_frac": self.engine.error_frac,
        }


def profile_engine(
    config: Path,
    out: Path,
    subject: Subject,
    *,
    engine_count: int | None = None,
    arguments: tuple[str, ...] = (),
    catalog: Catalog,
    progress: Callable[[str], None] = lambda _: None,
    **how: Any,
) -> Profiled:
    """Measure `engine_count` engines behind their servers at once, then profile the steps of one.

    The default count is one engine; on a CPU, as many as there are cores for, with one core per
    tensor-parallel rank. `config` is the LLM's config.json, `out` the table.csv, and `subject` the engine
    with its settings. `how` are the options of `profiling.measure.profile`. Raises InputError if the engines
    do not run.
    """
    served_file, rows_file = out.with_suffix(".served.csv"), out.with_name(ENGINES)
    other_rows = read_yaml(rows_file) if rows_file.exists() else {}
    engines_by_cores = max(len(os.sched_getaffinity(0)) // subject.tp, 1) if is_cpu_build() else 1
    count = engine_count or engines_by_cores
    settings = {key: getattr(subject, key) for key in SHARED_SETTINGS}
    settings |= {"engines": count, "arguments": arguments, "seed": how.get("seed", 0)}
    progress(
        f"watching {count} engine{'s' if count > 1 else ''} behind {'their' if count > 1 else 'its'} server"
    )
    # A process of its own gives back all GPU memory when it ends, which the profile then needs.
    program = [sys.executable, "-m", "planner.runtime.served"]
    command = [*program, str(config), str(served_file), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise InputError(
            f"the engine's host and front end cannot be measured: {lines[-1]} (--steps-only leaves them out)"
        )
    steps = profile(config, out, subject, catalog=catalog, progress=progress, **how)
    served_steps = read_step_table(served_file)
    # Constants that these tables do not show are taken from the catalog's rows of the same program.
    vllm_rows = [row for row in catalog.engines.values() if row.engine == "vllm"]
    fit = fit_engine(steps, served_steps, vllm_rows)
    machine = "; ".join(
        (
            describe_machine()["device"],
            f"{served_steps.about['spare_cores']} cores to spare",
            f"load {served_steps.about['load_average']}",
        )
    )
    source = f"{about_engine(served_steps.about)}; {machine}"
    row = fit.row(source=source, date=served_steps.about["date"])
    first_version = row["from"]  # The row holds for this version of vLLM and later ones.
    write_file(rows_file, to_yaml(other_rows | {f"vllm-{first_version}": row}))
    # `write_notes` adds the fit to the head of table.csv, so that the table is read once more below.
    fit_notes = {"slowdown": f"{fit.slowdown:.4g}", "admission_s": f"{fit.admission_s:.3g}"}
    write_notes(out, {"engines": ENGINES, **fit_notes, "shares_cores": str(fit.shares_cores).lower()})
    return Profiled(read_step_table(out), fit, (out, served_file, rows_file))
