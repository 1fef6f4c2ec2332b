"""Imports the kernel profiles of LLMServingSim: attention.csv, dense.csv, per_sequence.csv, and for a mixture
of experts moe.csv.

A folder of these files is of one LLM on one GPU at one tensor parallelism. LLMServingSim computes the time of
a step as

    t = embedding(N) + final_layernorm(N) + lm_head(S) + sampler(S)
        + layers * ( operators(N), the layer norm twice + attention + [mixture] moe(N, experts)
                     + [TP > 1] 2 all_reduce(N) )

with N tokens of S sequences, in microseconds, interpolated between measured sizes. `operators` are the rows
of dense.csv that are not in the first line of the formula; the file's column for them is called `layer`. Only
kernels on one GPU were timed. So the times are without the host, and the times of all-reduces are computed
from the GPU's row of the catalog.

Attention was measured in launches of one prefill with decodes of one context length. The times of several
prefills in a step are added, with the launch counted once. In a mixture with E experts, k of them per token,
N tokens visit E (1 - (1 - k/E)^N) experts, which are evenly split over the GPUs.

The step table is made of steps drawn at random. A regular grid would be biased: sizes that are powers of two
are quicker than their neighbours, because GEMMs are cut into tiles.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from planner.documents.catalog import Catalog
from planner.domain import Gpu
from planner.errors import InputError
from planner.files.text_tables import read_csv, read_number_column
from planner.importers import foreign_fields
from planner.importers.foreign_fields import StatedSetup
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.parallelism import tp_s
from planner.models.step_tables import COLUMNS, NOT_INCLUDED, StepShape, StepTable

ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
FILES = {  # Each file, with the columns that say what was measured in a row. Its time is in the column TIME.
    "attention.csv": ATTENTION,
    "dense.csv": ("layer", "tokens"),
    "per_sequence.csv": ("layer", "sequences"),
    "moe.csv": ("tokens", "activated_experts"),
}
TIME = "time_us"
# The columns of each file, by which the importer recognises it.
MARKS = tuple((*names, TIME) for names in FILES.values())
# How often a layer of the LLM calls an operator of dense.csv; once if the operator is not here. With 0 no
# layer calls it, but each step calls it once.
CALLS_PER_LAYER = {"embedding": 0, "final_layernorm": 0, "layernorm": 2}
# The number of steps in the table: a third each of prefills alone, decodes alone, and both together.
DRAWN_STEPS = 3000
MOST_PROMPTS = 8  # The most prompts in a drawn step; with more, each would get few of the step's tokens.

Tree = Mapping[float, Any]
"""Microseconds by sizes, in nested mappings with rising keys: the time at sizes a and b is tree[a][b]."""


@dataclass(frozen=True)
class Profile:
    """The measured times of kernels on one of `tp` GPUs [us], and the times of steps that follow from them.

    `attention` is by the columns of ATTENTION, `moe` by those of moe.csv; `moe` is None unless the LLM is a
    mixture of experts.
    """

    llm: Llm
    gpu: Gpu
    tp: int
    attention: Tree
    layers: Mapping[str, Tree]  # The operators of dense.csv by name; their times are by tokens.
    heads: Sequence[Tree]  # LM head and sampler; their times are by sequences.
    moe: Tree | None

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step for which every operator was measured."""
        return int(min(max(tree) for tree in self.layers.values()))

    @property
    def most_sequences(self) -> int:
        """The most sequences of a step for which LM head and sampler were measured."""
        return int(min(max(tree) for tree in self.heads))

    def step_s(self, step: StepShape) -> float:
        """The time of a step on the GPUs [s], without the host, by the formula of the module."""
        tokens = step.prompts * step.new + step.decodes
        once_us = sum(interpolate_time(tree, step.prompts + step.decodes) for tree in self.heads)
        layer_us = self._attention_us(step)
        for name, tree in self.layers.items():
            calls = CALLS_PER_LAYER.get(name, 1)
            layer_us += calls * interpolate_time(tree, tokens)
            once_us += interpolate_time(tree, tokens) if calls == 0 else 0.0
        if self.moe is not None:
            layer_us += interpolate_time(self.moe, tokens, self._visited_experts(tokens))
        all_reduces_s = float(tp_s(self.llm, self.gpu, self.tp, tokens))
        return (once_us + self.llm.layers * layer_us) / 1e6 + all_reduces_s

    def _attention_us(self, step: StepShape) -> float:
        """Time of the attention of one layer [us]: that of each prompt alone, with one launch for all
        prompts, plus what the decodes add.
        """
        prompts, new, cached, decodes, context = step
        if not prompts:
            return interpolate_time(self.attention, 0, 0, decodes, context)
        # One decode without context takes the shortest time, which counts as the time of a launch.
        launch_us = interpolate_time(self.attention, 0, 0, 1, 0)
        alone_us = interpolate_time(self.attention, new, cached, 0, 0)
        decodes_us = 0.0
        if decodes:  # What decodes add to one prefill with the new tokens of all prompts.
            both_us = interpolate_time(self.attention, prompts * new, cached, decodes, context)
            decodes_us = both_us - interpolate_time(self.attention, prompts * new, cached, 0, 0)
        return launch_us + prompts * max(alone_us - launch_us, 0.0) + decodes_us

    def _visited_experts(self, tokens: int) -> float:
        """How many of a layer's experts on one GPU are visited by this many tokens, on average."""
        missed_frac = (1 - self.llm.experts_per_token / self.llm.experts) ** tokens
        return self.llm.experts * (1 - missed_frac) / self.tp

    def steps(self, rng: np.random.Generator) -> Iterator[StepShape]:
        """An endless series of random steps within the measured sizes: in turn a prefill, a decode and both.

        The prefixes and decodes that were measured may differ by size of prefill chunk. The smallest of their
        limits is used for all chunks, so that nothing is extrapolated.
        """
        chunks = [size for size in self.attention if size > 0]
        least, most = int(min(chunks)), int(min(self.most_tokens, max(chunks)))
        longest_prefix = int(min(max(self.attention[size]) for size in chunks))
        longest_context = int(max(self.attention[0][0][1]))
        most_decodes_alone = int(min(max(self.attention[0][0]), self.most_sequences))
        most_decodes_with_prefills = int(min(max(self.attention[size][0]) for size in chunks))

        def draw_log_uniform(low: int, high: int) -> int:
            """A number drawn evenly by its logarithm."""
            return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

        def cached() -> int:
            """Cached tokens of each prompt: none in half of the draws, and none if no prefix was measured."""
            if longest_prefix <= least:
                return 0
            return int(rng.integers(2)) * draw_log_uniform(least, longest_prefix)

        while True:
            prompts = draw_log_uniform(1, MOST_PROMPTS)
            yield StepShape(prompts, draw_log_uniform(least, max(most // prompts, least)), cached(), 0, 0)
            yield StepShape(
                0, 0, 0, draw_log_uniform(1, most_decodes_alone), draw_log_uniform(least, longest_context)
            )
            prompts = draw_log_uniform(1, MOST_PROMPTS)
            decodes = draw_log_uniform(1, most_decodes_with_prefills)
            new = int(rng.integers(least, max((most - decodes) // prompts, least) + 1))
            yield StepShape(prompts, new, cached(), decodes, draw_log_uniform(least, longest_context))


def interpolate_time(tree: Any, *sizes: float) -> float:
    """The time at these sizes [us]: linear between the sizes of the tree, constant beyond the outermost."""
    if not sizes:
        return float(tree)
    tree_sizes, (size, *rest) = list(tree), sizes
    right = bisect_right(tree_sizes, size)
    low, high = tree_sizes[max(right - 1, 0)], tree_sizes[min(right, len(tree_sizes) - 1)]
    low_us = interpolate_time(tree[low], *rest)
    if low == high or size <= low:
        return low_us
    share = float((size - low) / (high - low))
    return low_us + (interpolate_time(tree[high], *rest) - low_us) * share


def read(paths: Sequence[Path], stated: StatedSetup, catalog: Catalog) -> StepTable:
    """The step table of the profile's files, which may be in any order.

    The LLM, GPU and tensor parallelism are those in `stated`, or are read from the paths. Files that do not
    belong to a profile are left out; the table's note names them. Raises InputError for a profile that is not
    complete, and if no drawn step fits into the GPU's memory.
    """
    llm_name, gpu_name, tp = foreign_fields.read_setup(
        stated, catalog, foreign_fields.list_files(foreign_fields.file_labels(paths))
    )
    llm, gpu = catalog.llm(stated.llm or llm_name), catalog.gpu(gpu_name)
    tables, unknown = _read_tables(paths)
    profile = _build_profile(tables, llm, gpu, tp)
    kv_tokens = worker_memory(llm, gpu, tp).kv_tokens
    drawn = islice(profile.steps(np.random.default_rng(0)), DRAWN_STEPS)
    rows = [(*step.column_sums, profile.step_s(step)) for step in drawn if step.kv_tokens <= kv_tokens]
    if not rows:
        raise InputError(f"{llm.name} on {gpu.name} tp{tp}: no step fits its {kv_tokens} KV tokens")
    names = ", ".join(path.name for path, _ in tables.values())
    about = {
        "llm": llm_name,
        "gpu": gpu_name,
        "tp": str(tp),
        "source": foreign_fields.one_line(f"LLMServingSim profiles {names}"),
        "host_overhead": NOT_INCLUDED,
    }
    notes = [f"{profile.most_tokens} tokens and {profile.most_sequences} sequences per step were profiled"]
    if tp > 1:
        notes.append(f"all-reduces were not: those of {gpu.name} in the catalog are added")
    if unknown:
        notes.append(f"not used: {foreign_fields.list_files(unknown)}")
    about["note"] = "; ".join(notes)
    return StepTable(pd.DataFrame(rows, columns=list(COLUMNS)), about)


def _read_tables(paths: Sequence[Path]) -> tuple[dict[str, tuple[Path, pd.DataFrame]], list[str]]:
    """Each table with its path, by its key in FILES; and the names of files that are none of these. Raises
    InputError for two files of one kind.
    """
    tables: dict[str, tuple[Path, pd.DataFrame]] = {}
    unknown = []
    for path, label in zip(paths, foreign_fields.file_labels(paths), strict=True):
        table = read_csv(path)
        kinds = [kind for kind, names in FILES.items() if {*names, TIME} <= set(table.columns)]
        if not kinds:
            unknown.append(label)
        elif kinds[0] in tables:
            other = tables[kinds[0]][0]
            raise InputError(f"{path}: is a second {kinds[0]}, beside {other}; name the files of one --tp")
        else:
            tables[kinds[0]] = path, table
    return tables, unknown


def _build_profile(tables: Mapping[str, tuple[Path, pd.DataFrame]], llm: Llm, gpu: Gpu, tp: int) -> Profile:
    """The profile in these tables. Raises InputError if a file is missing, or is of another kind of LLM."""
    needed = ["attention.csv", "dense.csv", "per_sequence.csv"] + ["moe.csv"] * (llm.experts > 1)
    if missing := [name for name in needed if name not in tables]:
        raise InputError(f"llmservingsim: {', '.join(missing)} is missing; name all files of the profile")
    if "moe.csv" in tables and llm.experts == 1:
        raise InputError(f"{tables['moe.csv'][0]}: is of a mixture of experts, {llm.name} is none")
    path, attention = tables["attention.csv"]
    trees = {kind: _by_layer(*tables[kind]) for kind in ("dense.csv", "per_sequence.csv")}
    tree = _tree(path, attention, ATTENTION)
    _check_attention(tree, path)
    return Profile(
        llm=llm,
        gpu=gpu,
        tp=tp,
        attention=tree,
        layers=trees["dense.csv"],
        heads=list(trees["per_sequence.csv"].values()),
        moe=_tree(*tables["moe.csv"], FILES["moe.csv"]) if "moe.csv" in tables else None,
    )


def _by_layer(path: Path, table: pd.DataFrame) -> dict[str, Tree]:
    """The times of each operator in a table, by the table's tokens or sequences."""
    size = table.columns[table.columns.isin(["tokens", "sequences"])][0]
    return {str(name): _tree(path, rows, [size]) for name, rows in table.groupby("layer")}


def _tree(path: Path, table: pd.DataFrame, names: Sequence[str]) -> Tree:
    """The times of a table by the sizes in these columns; repeats of a size count as their median."""
    sizes = [pd.Series(read_number_column(table, name, path), name=name) for name in names]
    times_us = pd.Series(read_number_column(table, TIME, path)).groupby(sizes).median()
    tree: dict[float, Any] = {}
    for key, time_us in times_us.sort_index().items():
        *branches, leaf = key if isinstance(key, tuple) else (key,)
        branch = tree
        for size in branches:
            branch = branch.setdefault(size, {})
        branch[leaf] = float(time_us)
    return tree


def _check_attention(tree: Tree, path: Path) -> None:
    """Raise InputError, which names `path`, unless decodes were measured alone, prefills alone, and both
    together.
    """
    if 1 not in tree.get(0, {}).get(0, {}):
        raise InputError(f"{path}: lacks decodes alone: rows with prefill_chunk and kv_prefill 0, n_decode 1")
    if not (chunks := [size for size in tree if size > 0]):
        raise InputError(f"{path}: lacks prefills: rows with prefill_chunk > 0")
    if chunks[0] < 1:
        raise InputError(f"{path}: prefill_chunk is {chunks[0]:g}, must be 0 or a number of tokens")
    for size in chunks:
        if max(tree[size].get(0, {0: 0})) < 1:
            where = f"prefill_chunk {size:g}, kv_prefill 0 and n_decode > 0"
            raise InputError(f"{path}: lacks rows with {where}: prefills and decodes together")
        for prefix, decodes in tree[size].items():
            if 0 not in decodes:
                where = f"prefill_chunk {size:g}, kv_prefill {prefix:g}"
                raise InputError(f"{path}: lacks rows with {where} and n_decode 0")
