"""Step tables: the steps of an engine that a profile measured, one per row.

    # llm: meta-llama/Llama-3.1-70B
    # gpu: h100-80g
    # tp: 4
    n_prefill,prefill_tokens,cached_tokens,prefill_pairs,n_decode,kv_tokens,t_s
    1,512,0,131328,0,0,0.037
    0,0,0,0,64,131072,0.0207

A row is one step, and each column a sum over the step's requests. `n_prefill` counts its prompts, `n_decode`
its decodes. `prefill_tokens` are the new tokens of prompts, and `cached_tokens` the tokens of the same
prompts that lie in the KV cache already. `prefill_pairs` is A_p, the pairs of a query and a key of prompts
(models/latency.py). `kv_tokens` is K, the tokens to which decodes attend, the new one included. `t_s` is the
time of the step [s]. Columns `op_NAME_s` are the seconds of one operator in the whole step, timed apart from
`t_s`. Other columns are kept and ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.errors import InputError
from planner.files.text_tables import as_floats, parse_csv, read_text
from planner.models.latency import Array

NOT_INCLUDED = "not included"  # The value of the line `# host_overhead: ...` in a table of kernel times.
LEAST_COUNT = -0.5  # Counts above this pass, because rounding may have left a count of 0 just below 0.
COLUMNS = ("n_prefill", "prefill_tokens", "cached_tokens", "prefill_pairs", "n_decode", "kv_tokens", "t_s")

# Operators of the columns `op_NAME_s` that readers of tables know.
ATTN_PREFILL, ATTN_DECODE, ALL_REDUCE, HEAD = "attn_prefill", "attn_decode", "all_reduce", "head"


def operator_column(name: str) -> str:
    """The name of the column with an operator's seconds."""
    return f"op_{name}_s"


class StepShape(NamedTuple):
    """Equal prompts, each `new` tokens after `cached` ones, and equal decodes that attend to `context`."""

    prompts: int
    new: int
    cached: int
    decodes: int
    context: int

    @property
    def kv_tokens(self) -> int:
        """The KV tokens of these requests in the cache after the step. (Not the column `kv_tokens`.)"""
        return self.prompts * (self.new + self.cached) + self.decodes * self.context

    @property
    def column_sums(self) -> tuple[float, ...]:
        """The columns of the step in the order of COLUMNS, without the time."""
        prompts, new, cached, decodes, context = self
        pairs = prompts * new * (cached + (new + 1) / 2)  # Token i of `new` attends to cached + i tokens.
        return prompts, prompts * new, prompts * cached, pairs, decodes, decodes * context


@dataclass(frozen=True)
class StepTable:
    """Steps and their times, as the module's docstring says. `about` has the `#` lines by their keys. Raises
    InputError for steps that cannot be fitted (`check_step_table`).
    """

    steps: pd.DataFrame
    about: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_step_table(self.steps, where="step table")

    @property
    def X(self) -> Array:
        """(n, 5): N, A_p, D, K and P of latency.py: tokens, pairs, decodes, KV tokens, prompts."""
        steps = self.steps
        tokens = steps.prefill_tokens + steps.n_decode
        columns = [tokens, steps.prefill_pairs, steps.n_decode, steps.kv_tokens, steps.n_prefill]
        return np.column_stack(columns).astype(float)

    @property
    def y(self) -> Array:
        """(n,): the measured seconds of the steps."""
        return self.steps.t_s.to_numpy(float)

    @property
    def operators(self) -> pd.DataFrame | None:
        """Seconds of each operator in each step, a column for each operator by its NAME. None if a step lacks
        the time of an operator, or if there are no operators.
        """
        names = {
            column: column.removeprefix("op_").removesuffix("_s")
            for column in self.steps.columns
            if column.startswith("op_") and column.endswith("_s")
        }
        columns = {name: as_floats(self.steps[column]) for column, name in names.items()}
        seconds = pd.DataFrame(columns, index=self.steps.index)
        return None if seconds.empty or seconds.isna().any(axis=None) else seconds

    @property
    def is_kernel_time(self) -> bool:
        """Whether these are times of kernels alone, without the time that the host takes."""
        host_s = self.about.get("host_s", "")  # "0: ..." says that there is none, and why.
        return self.about.get("host_overhead") == NOT_INCLUDED or host_s.startswith("0:")

    @property
    def reads_cached(self) -> bool:
        """Whether the times include the time in which prefills read the KV of their cached tokens.

        AIConfigurator's do not: its times of attention depend on pairs alone, and for 72 tokens after 95,000
        cached ones they are shorter than an H100 takes to read the KV.
        """
        is_measured = not self.about.get("source", "").startswith("AIConfigurator")
        return is_measured and bool((self.steps.cached_tokens > 0).any())

    def to_csv(self) -> str:
        """The table as text: the lines of `about` as comments, then a row per step."""
        header = "".join(f"# {key}: {value}\n" for key, value in self.about.items())
        return header + self.steps.to_csv(index=False, lineterminator="\n")


def without_next_launch(
    t_s: Array, predicted_s: Array, *, was_launched_meanwhile: npt.NDArray[np.bool_]
) -> Array:
    """Step times (n,) of an engine that schedules asynchronously, each without the launch of the next step.

    Such an engine launches a step before it reads the tokens of the step before. The launch of a prefill
    takes long, because the host starts every layer by itself, and the measured time of the step before
    includes it: on an H100 34 ms for a decode of 8 ms, and then 4 ms for the prefill. Only their sum is
    measured rightly. So the measured seconds `t_s` (n,) of a step that `was_launched_meanwhile` (n,) and of
    the step before are added up, and divided in the ratio of their `predicted_s` (n,).
    """
    group = np.cumsum(~was_launched_meanwhile)  # A step and those launched meanwhile have one number.
    measured_s, expected_s = (np.bincount(group, weights=each)[group] for each in (t_s, predicted_s))
    return np.asarray(predicted_s * measured_s / expected_s)


def read_step_table(path: Path) -> StepTable:
    """Read and check a step table. Raises InputError with file, column and row."""
    text = read_text(path)
    about = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        key, _, value = line.lstrip("# ").partition(":")
        about[key.strip()] = value.strip()
    steps = parse_csv(text, path)
    check_step_table(steps, where=str(path))
    return StepTable(steps, about)


def check_step_table(steps: pd.DataFrame, *, where: str) -> None:
    """Raise InputError for a table that cannot be fitted. The message begins with `where`, and names the
    column and the first wrong row (1 is the first step).
    """
    if missing := [column for column in COLUMNS if column not in steps.columns]:
        raise InputError(f"{where}: lacks the column(s) {', '.join(missing)}; needs {', '.join(COLUMNS)}")
    if steps.empty:
        raise InputError(f"{where}: holds no steps")
    for column in COLUMNS:
        values = as_floats(steps[column])
        is_time = column == "t_s"
        is_possible = values > 0 if is_time else values > LEAST_COUNT
        bound = "> 0" if is_time else ">= 0"
        _refuse_rows(~(np.isfinite(values) & is_possible), steps, column, f"must be a number {bound}", where)
    work = steps.prefill_tokens + steps.n_decode
    _refuse_rows(work <= 0, steps, "prefill_tokens", "a step without prefill or decode has no work", where)
    _refuse_rows(
        (steps.n_prefill > 0) != (steps.prefill_tokens > 0),
        steps,
        "n_prefill",
        "prefills and prefill_tokens must be zero together",
        where,
    )
    _refuse_rows(
        steps.prefill_pairs < steps.prefill_tokens,
        steps,
        "prefill_pairs",
        "every new token attends at least to itself, so prefill_pairs must be >= prefill_tokens",
        where,
    )
    _refuse_rows(
        steps.kv_tokens < steps.n_decode,
        steps,
        "kv_tokens",
        "counts the new token too, so it must be >= n_decode",
        where,
    )


def _refuse_rows(bad: object, steps: pd.DataFrame, column: str, why: str, where: str) -> None:
    """Raise InputError for the first row that is `bad` (n,), if there is one, with what is wrong (`why`)."""
    if (rows := np.flatnonzero(np.asarray(bad))).size:
        row = int(rows[0])
        raise InputError(f"{where}: step {row + 1}: {column} is {steps[column].iloc[row]}: {why}")
