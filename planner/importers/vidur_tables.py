"""Step tables of Vidur: computed from its profiles (mlp.csv, attention.csv, all_reduce.csv), or read from
steps that Vidur computed.

Vidur computes the time of a step of N tokens as

    t = layers * ( sum of 9 ops (N) + attention + [TP > 1] 2 (all_reduce(N) + 0.02 ms launch) )

Vidur measures prefill and decode attention apart, so there are no mixed steps. It leaves out embedding, LM
head, sampling and the host. The seconds of each operator stay in the table beside the total
(`StepTable.operators`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from planner.documents.catalog import Catalog
from planner.errors import InputError
from planner.files.text_tables import as_floats, read_csv, read_number_column
from planner.importers import foreign_fields
from planner.importers.foreign_fields import StatedSetup
from planner.models.latency import Array
from planner.models.llm import Llm
from planner.models.step_tables import (
    ALL_REDUCE,
    ATTN_DECODE,
    ATTN_PREFILL,
    COLUMNS,
    NOT_INCLUDED,
    StepTable,
    operator_column,
)

NamedTable = tuple[Path, pd.DataFrame]
OPS = (  # The operators of a layer, as Vidur names them.
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "attn_rope",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
)
OP_COLUMNS = tuple(f"time_stats.{op}.median" for op in OPS)
SECOND_NORM = "time_stats.post_attention_layernorm.median"
# Columns of attention.csv and all_reduce.csv.
PREFILL_TIME, DECODE_TIME, ALL_REDUCE_TIME = (
    f"time_stats.{name}.median" for name in ("attn_prefill", "attn_decode", "all_reduce")
)
TP_COLUMN = "num_tensor_parallel_workers"
BATCH_COLUMNS = ("batch_size", "kv_cache_size", "prefill_chunk_size")
SAVE_TIME = "time_stats.attn_kv_cache_save.median"  # Newer profiles have this column.
# Columns of a profile -> fields of `Llm` that must agree.
SHAPE = {"n_embd": "hidden", "n_head": "heads", "n_q_head": "heads", "n_kv_head": "kv_heads"}
PARTS = {  # Columns of computed steps -> operators of a StepTable.
    "linear_ms": "linear",
    "allreduce_ms": ALL_REDUCE,
    "attn_prefill_ms": ATTN_PREFILL,
    "attn_decode_ms": ATTN_DECODE,
}
COMPUTED = ("kind", "n_prefill", "chunk", "prefix", "n_decode", "ctx", "total_ms")
# Sets of columns, each of which marks a file as Vidur's: steps, mlp.csv, attention.csv, all_reduce.csv.
MARKS = (COMPUTED, OP_COLUMNS[:3], (PREFILL_TIME, DECODE_TIME), (ALL_REDUCE_TIME,))
LAUNCH_MS = 0.02  # Vidur's constant for the launch of an all-reduce.
ACTIVATION_BYTES = 2  # An activation has 16 bits.


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> StepTable:
    """The step table of one file of computed steps; or of mlp.csv and attention.csv, with all_reduce.csv if
    TP > 1.
    """
    tables = [(path, read_csv(path)) for path in paths]
    if len(tables) == 1 and set(COMPUTED) <= set(tables[0][1].columns):
        return _read_computed_steps(*tables[0], stated, catalog)
    return _add_up_profiles(tables, stated, catalog)


def _read_computed_steps(path: Path, table: pd.DataFrame, stated: StatedSetup, catalog: Catalog) -> StepTable:
    """The steps of a file with the columns COMPUTED, and with their operators if it has those of PARTS."""
    step_columns = {}
    for key, name in (("llm", "model"), ("gpu", "device"), ("tp", "tp")):
        values = table[name].drop_duplicates().tolist() if name in table.columns else []
        if len(values) > 1:
            raise InputError(f"{path}: {name}: expected one, found {foreign_fields.one_line(values)[:200]}")
        step_columns[key] = values[0] if values else None
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, path, **step_columns)
    n, chunk, prefix, decodes, context, total_ms = (
        read_number_column(table, name, path) for name in COMPUTED[1:]
    )
    pairs = n * chunk * (prefix + (chunk + 1) / 2)  # Tokens times those that each attends to.
    steps = np.column_stack([n, n * chunk, n * prefix, pairs, decodes, decodes * context, total_ms / 1e3])
    operators = {}
    if set(PARTS) <= set(table.columns):
        operators = {name: read_number_column(table, part, path) / 1e3 for part, name in PARTS.items()}
    return _step_table(steps, operators, llm, gpu, tp, f"Vidur, steps of {path.name}")


def _add_up_profiles(tables: Sequence[NamedTable], stated: StatedSetup, catalog: Catalog) -> StepTable:
    """A step per row of attention.csv, with the other operators interpolated at its tokens."""
    names = ", ".join(path.name for path, _ in tables)
    llm, gpu, tp = foreign_fields.read_setup(stated, catalog, names)
    shape = catalog.llm(stated.llm or llm)
    mlp_path, mlp = _find_table(tables, OP_COLUMNS[0], "mlp.csv (compute profile)")
    attention_path, attention = _find_table(tables, PREFILL_TIME, "attention.csv")
    mlp = _rows_of_tp(_rows_of_llm(mlp, shape, mlp_path), TP_COLUMN, tp, mlp_path)
    attention = _rows_of_tp(_rows_of_llm(attention, shape, attention_path), TP_COLUMN, tp, attention_path)
    ops_tokens, ops_ms = _operator_curves(mlp, mlp_path)
    most_tokens = ops_tokens[-1]  # Most tokens of a step that all profiles cover.
    reduce_tokens = reduce_ms = np.zeros(1)
    if tp > 1:
        path, table = _find_table(tables, ALL_REDUCE_TIME, f"all_reduce.csv (tp is {tp})")
        table = _rows_of_tp(table, "num_workers", tp, path)
        if "devices_per_node" in table.columns:  # Only collectives within one node are read.
            table = _rows_of_tp(table, "devices_per_node", tp, path)
        reduce_tokens, reduce_ms = _median_curve(
            read_number_column(table, "size", path, least=1) / (shape.hidden * ACTIVATION_BYTES),
            read_number_column(table, ALL_REDUCE_TIME, path),
        )
        most_tokens = min(most_tokens, reduce_tokens[-1])

    for name in BATCH_COLUMNS:
        if name not in attention.columns:
            raise InputError(f"{attention_path}: lacks the column {name}")
    batch, cached, chunk = (read_number_column(attention, name, attention_path) for name in BATCH_COLUMNS)
    zeros = np.zeros(len(attention))
    prefill_ms = as_floats(attention[PREFILL_TIME])
    # Profiles of prefills alone lack the column: no decode has a time.
    has_decodes = DECODE_TIME in attention.columns
    decode_ms = as_floats(attention[DECODE_TIME]) if has_decodes else np.full(len(attention), np.nan)
    if SAVE_TIME in attention.columns:
        saved_ms = np.nan_to_num(as_floats(attention[SAVE_TIME]), nan=0.0, posinf=np.inf)
        prefill_ms, decode_ms = prefill_ms + saved_ms, decode_ms + saved_ms
    is_prefill = (chunk > 0) & (batch >= 1) & (prefill_ms > 0) & (batch * chunk <= most_tokens)
    is_decode = (chunk == 0) & (batch >= 1) & (decode_ms > 0) & (batch <= most_tokens)
    tokens = np.where(is_prefill, batch * chunk, batch)  # A decode has one token per sequence.
    layer_ms = {name: np.interp(tokens, ops_tokens, each) for name, each in ops_ms.items()}
    reduces_ms = 2 * (np.interp(tokens, reduce_tokens, reduce_ms) + LAUNCH_MS)
    layer_ms[ALL_REDUCE] = reduces_ms if tp > 1 else zeros
    layer_ms[ATTN_PREFILL] = np.where(is_prefill, prefill_ms, 0.0)
    layer_ms[ATTN_DECODE] = np.where(is_prefill, 0.0, decode_ms)
    operators = {name: shape.layers * each / 1e3 for name, each in layer_ms.items()}
    t_s = np.sum(list(operators.values()), axis=0)
    pairs = batch * chunk * (cached + (chunk + 1) / 2)
    prefills = np.column_stack([batch, batch * chunk, batch * cached, pairs, zeros, zeros, t_s])
    # A decode also attends to the token that it adds.
    decodes = np.column_stack([zeros, zeros, zeros, zeros, batch, batch * (cached + 1), t_s])
    is_used = is_prefill | is_decode
    if not is_used.any():
        raise InputError(
            f"{attention_path}: no step for tp {tp} lies within the {most_tokens:g} tokens of {mlp_path.name}"
        )
    left_out = (
        f"{(~is_used).sum()} attention row(s) beyond {most_tokens:g} tokens or without a time are left out"
    )
    steps = np.vstack([prefills[is_prefill], decodes[is_decode]])
    times = {name: np.concatenate([each[is_prefill], each[is_decode]]) for name, each in operators.items()}
    return _step_table(
        steps, times, llm, gpu, tp, f"Vidur profiles {names}", "" if is_used.all() else left_out
    )


def _find_table(tables: Sequence[NamedTable], column: str, what: str) -> NamedTable:
    """The table with this column; raises InputError that calls the missing file `what`."""
    for path, table in tables:
        if column in table.columns:
            return path, table
    raise InputError(
        f"vidur: {what} is missing: none of {', '.join(path.name for path, _ in tables)} has {column}"
    )


def _rows_of_llm(table: pd.DataFrame, shape: Llm, path: Path) -> pd.DataFrame:
    """The rows of an LLM of this shape, as older profiles hold several LLMs."""
    for name, field in SHAPE.items():
        if name in table.columns:
            wanted = getattr(shape, field)
            of_llm: pd.DataFrame = table[as_floats(table[name]) == wanted]
            if of_llm.empty:
                known_values = ", ".join(map(str, table[name].unique()[:6]))
                raise InputError(
                    f"{path}: {name} is {known_values}, {shape.name} has {wanted}; name the LLM it is of"
                )
            table = of_llm
    return table


def _rows_of_tp(table: pd.DataFrame, name: str, tp: int, path: Path) -> pd.DataFrame:
    """The rows whose column `name` is `tp`. Raises InputError if there are none."""
    if name not in table.columns:
        raise InputError(f"{path}: lacks the column {name}")
    of_tp: pd.DataFrame = table[as_floats(table[name]) == tp]
    if of_tp.empty:
        raise InputError(f"{path}: holds no rows with {name} = {tp}; measure them, or choose another --tp")
    return of_tp


def _operator_curves(mlp: pd.DataFrame, path: Path) -> tuple[Array, dict[str, Array]]:
    """The token counts of the profile, and milliseconds of each of the 9 operators of a layer at these."""
    if "num_tokens" not in mlp.columns:
        raise InputError(f"{path}: lacks the column num_tokens")
    missing = [name for name in OP_COLUMNS if name not in mlp.columns]
    if missing and missing != [SECOND_NORM]:  # Some LLMs have one norm per layer.
        raise InputError(f"{path}: lacks the column(s) {', '.join(missing)}")
    tokens = read_number_column(mlp, "num_tokens", path, least=1)
    curves = {
        op: _median_curve(tokens, np.asarray(read_number_column(mlp, name, path), dtype=float))
        for op, name in zip(OPS, OP_COLUMNS, strict=True)
        if name in mlp.columns
    }
    return curves[OPS[0]][0], {op: each_ms for op, (_, each_ms) in curves.items()}


def _median_curve(x: Array, y: Array) -> tuple[Array, Array]:
    """Distinct x in rising order, and the median of y at each."""
    medians = pd.Series(y).groupby(x).median()
    return np.asarray(medians.index, dtype=np.float64), np.asarray(medians, dtype=np.float64)


def _step_table(
    steps: Array, operators: Mapping[str, Array], llm: str, gpu: str, tp: int, source: str, note: str = ""
) -> StepTable:
    """The steps of one LLM, GPU and TP with the seconds of each operator; Vidur measures no host time."""
    about = {
        "llm": llm,
        "gpu": gpu,
        "tp": str(tp),
        "source": foreign_fields.one_line(source),
        "host_overhead": NOT_INCLUDED,
    }
    if note:
        about["note"] = note
    seconds = {operator_column(name): each for name, each in operators.items()}
    return StepTable(pd.DataFrame(steps, columns=list(COLUMNS)).assign(**seconds), about)
