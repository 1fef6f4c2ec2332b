"""The catalog: facts on GPUs, LLMs, engines, SLOs of papers, and fitted step times, with source and date.

    catalog = read_catalog()
    llm, gpu = catalog.llm("llama-3.1-70b"), catalog.gpu("h100@350W")
    catalog.step_latency(llm, gpu, tp=4).step_s(2048)

A user's directory (`--catalog`) may hold any of acceptance.yaml, engines.yaml, gpus.yaml, llms.yaml,
slos.yaml, spreads.yaml, tasks.yaml, prices.yaml and latency/*.yaml. A file there replaces the shipped one;
fits there come before the shipped ones. Each kind of row is parsed by its own module (imports below).
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from planner.documents.acceptance import ROW_KEYS as ACCEPTANCE_KEYS
from planner.documents.acceptance import AcceptanceRow
from planner.documents.acceptance import parse_row as parse_acceptance_row
from planner.documents.capped_gpus import GpuRows, ProvenanceRows, capped, split_cap
from planner.documents.engine_file import ROW_KEYS as ENGINE_KEYS
from planner.documents.engine_file import EngineRow
from planner.documents.engine_file import parse_row as parse_engine_row
from planner.documents.fits import Split, read_fits, read_header
from planner.documents.llm_config import fetch_config, llm_from_config, may_be_on_hub
from planner.documents.llm_row import read_groups, summarise_groups
from planner.documents.offers import ProviderOffer, merge_offers, parse_offers
from planner.documents.slo import SloPreset, parse_slo, parse_slowdowns
from planner.documents.spreads import ROW_KEYS as SPREAD_KEYS
from planner.documents.spreads import SpreadRow, at_medians, spread_of
from planner.documents.spreads import parse_row as parse_spread_row
from planner.documents.traffic_description import TASK_KEYS, TaskRow, parse_shipped_task_row, parse_task_row
from planner.domain import OWNED, AllReduce, Gpu, Slo, payment_suffix, row_of
from planner.errors import CatalogError, InputError
from planner.files.checked_files import is_path, read_yaml, repository_dir
from planner.files.document_values import (
    Section,
    Wording,
    errors_as,
    nearest_names,
    refuse_unknown,
    refused_value,
)
from planner.models.all2all import (
    DEFAULT_EXCHANGE,
    MEASURED_LINK_BYTES_PER_S,
    All2All,
    Exchange,
    nodes_of_ranks,
)
from planner.models.latency import StepLatency
from planner.models.llm import WEIGHT_BYTES, WEIGHTS, Llm
from planner.models.roofline import roofline, transfer_fit
from planner.units import parse_quantity

Document = Mapping[str, Mapping[str, Any]]
Row = TypeVar("Row")
CatalogLike: TypeAlias = "Catalog | str | Path | None"
# The files of a catalog with rows by name.
FILES = (
    *("gpus.yaml", "llms.yaml", "slos.yaml", "engines.yaml", "spreads.yaml", "acceptance.yaml"),
    "tasks.yaml",
)
PRICES = "prices.yaml"  # Only a catalog directory of the user's has this file.
PROVENANCE = ("aliases", "source", "date")  # Keys that rows of every file may have.
# The keys of rows in gpus.yaml, beside PROVENANCE.
GPU_KEYS = (
    *("memory_vendor", "memory", "bandwidth", "dense_tflops", "link", "link_bandwidth", "power"),
    *("gpus_per_node", "sold_as", "price", "price_source", "price_date", "node_selector"),
    *("fp8_tflops", "fp4_tflops", "unchecked", "price_is", "prices", "all_reduce"),
    "mixed_kv_bandwidth",
)
SOLD_AS = ("gpu", "node")  # The values of `sold_as`.
PRICE_IS = ("listed", "remembered")  # The values of `price_is`: from a price list, or from memory.
UNCHECKED_BY_DEFAULT = (
    "its row says neither unchecked: false nor why nobody can tell how far its step times are from the truth"
)
# An error about an unknown name lists all rows of a file if there are at most this many. Set by hand.
MOST_NAMED = 12
CAP_KEYS = ("cap_of", "prefill_slowdown", "decode_slowdown")  # Keys of a power-capped GPU's row alone.
# The keys of rows in llms.yaml. A row without `groups` must have those of LLM_COUNTS.
LLM_COUNTS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
LLM_OPTIONAL = (
    *("head_dim", "dtype_bytes", "kv_dtype_bytes", "weights", "gated_ffn", "tied_embeddings"),
    *("experts", "experts_per_token"),
)
# Keys for LLMs whose layers differ, and for parameters beside the layers.
LLM_FURTHER = ("groups", "encoder_parameters", "draft_parameters", "head_weights")
# The keys of LLM_COUNTS and LLM_OPTIONAL that a row with `groups` has, because all layers share them.
LLM_OF_GROUPS = ("hidden", "vocab", "tied_embeddings", "kv_dtype_bytes")
_ACTIVE = re.compile(r"-a\d+b(?=-|$)")  # The active parameters in a name: qwen3-235b-a22b.
_MIG = re.compile(r"\bmig\b|\b\d+g\.\d+gb")  # The name of a slice of a GPU: h100-mig-3g.40gb.
_GPU_ADVICE = "; or add it as a row of your own, with --catalog (docs/how-to.md)"
_MIG_ADVICE = (
    "; a slice (MIG) is a row of your own, with --catalog (docs/how-to.md): its own memory, price and node "
    "label, its share of bandwidth and dense_tflops, and all slices of a node as gpus_per_node"
)
WORDING = Wording(whole="expected a whole number > 0")  # What the error for a wrong count says.


@dataclass(frozen=True)
class Provenance:
    """A row's source and other names, and of a GPU the source of its price and the offers of providers.

    Prices have a date of their own, because they age faster than other facts.
    """

    source: str
    date: str
    price_source: str = ""
    price_date: str = ""
    is_price_remembered: bool = False  # See PRICE_IS.
    offers: tuple[ProviderOffer, ...] = ()
    aliases: tuple[str, ...] = ()  # Other names of the row, as they are spelled.


@dataclass(frozen=True)
class Catalog:
    """The rows of each file by name, in its order. `provenance` is keyed by the names of GPUs, LLMs and SLOs.

    `aliases` map a lower-case name or alias to the row's own name. `fit_files` hold step times; a file is
    opened only when they are needed.
    """

    gpus: Mapping[str, Gpu]
    llms: Mapping[str, Llm]
    slos: Mapping[str, SloPreset]
    provenance: Mapping[str, Provenance]
    gpu_aliases: Mapping[str, str]
    llm_aliases: Mapping[str, str]
    fit_files: tuple[Path, ...] = ()
    engines: Mapping[str, EngineRow] = field(default_factory=dict)
    spreads: Mapping[str, SpreadRow] = field(default_factory=dict)
    acceptance: Mapping[str, AcceptanceRow] = field(default_factory=dict)
    tasks: Mapping[str, TaskRow] = field(default_factory=dict)
    # Files with fits by (LLM, GPU), and the fits that were read; both are filled by `_fits_of`.
    _fit_paths: dict[tuple[str, str], list[Path]] = field(default_factory=dict, repr=False, compare=False)
    _fits: dict[tuple[str, str], dict[Split, StepLatency]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def gpu(self, name: str) -> Gpu:
        """A GPU by name or alias, in any case, with blanks for hyphens. "h100-80g@spot" is the same GPU on
        the spot market, "h100-80g@owned" an owned one without a price, and "h100-80g@500W" one under a power
        limit. Raises CatalogError for an unknown name.
        """
        spelled = _spelled(name)
        gpu, suffix = self._gpu_without_suffix(row_of(spelled)), payment_suffix(spelled)
        if gpu is None:
            advice = _MIG_ADVICE if _MIG.search(spelled) else _GPU_ADVICE
            raise _unknown_name("GPU", name, self.gpus, self.gpu_aliases, "gpus.yaml", advice)
        price_usd_per_h = 0.0 if suffix == OWNED else gpu.price_usd_per_h
        return replace(gpu, name=gpu.name + suffix, price_usd_per_h=price_usd_per_h)

    def gpu_of_question(self, name: str, where: str) -> Gpu:
        """The GPU of a name in slo.yaml, which must not have a suffix such as @spot. Raises InputError."""
        suffix = payment_suffix(name.lower())
        if suffix:
            row = name[: -len(suffix)]
            section = f"owned: {{{row}: 8}}" if suffix == OWNED else f"prices: {{{row}: {{spot: 1.2 usd/h}}}}"
            raise InputError(
                f"{where}: expected the name of a GPU, found {name}; name {row}, and write fleet: {section}"
            )
        return self.gpu(name)

    def _gpu_without_suffix(self, alias: str) -> Gpu | None:
        """The GPU of a lower-case name or alias, which may end in a power limit; None if unknown."""
        if alias in self.gpu_aliases:
            return self.gpus[self.gpu_aliases[alias]]
        base_and_watts = split_cap(alias)
        if base_and_watts is None or base_and_watts[0] not in self.gpu_aliases:
            return None
        base, power_w = base_and_watts
        return capped(self.gpus[self.gpu_aliases[base]], power_w)

    def llm(self, name: str) -> Llm:
        """An LLM by name or alias, or from a Hugging Face config.json: its path, its folder, or its name on
        huggingface.co. Raises CatalogError if there is none.
        """
        if self.has_llm(name):
            return self.llms[self._llm_names[_spelled(name)][0]]
        if is_path(name):
            return llm_from_config(Path(name))
        if name.endswith(".json") or name.startswith(("/", "./", "../", "~")):
            raise CatalogError(f"LLM {name!r}: no such file or folder; expected a Hugging Face config.json")
        fetched = fetch_config(name)
        if fetched is not None:
            return replace(llm_from_config(fetched), name=name)
        advice = "; or give a path to its config.json, which may have an encoder of images"
        if may_be_on_hub(name):
            advice += (
                ", or a name that huggingface.co knows, where there is a network and "
                "pip install 'fleetplan[hub]'"
            )
        checkpoints = {alias: checkpoint for alias, (_, checkpoint) in self._llm_names.items()}
        raise _unknown_name("LLM", name, self.llms, checkpoints, "llms.yaml", advice)

    def served_llm(self, name: str) -> Llm:
        """The same as `llm`, but under the name of the checkpoint that engines load: a row of the catalog
        stands for several checkpoints of one shape.

        "llama-3.1-8b-instruct" is the row meta-llama/Llama-3.1-8B, served as
        meta-llama/Llama-3.1-8B-Instruct.
        """
        if self.has_llm(name):
            row_name, checkpoint = self._llm_names[_spelled(name)]
            return replace(self.llms[row_name], name=checkpoint)
        return self.llm(name)

    def has_llm(self, name: str) -> bool:
        """Whether this names a row: a name, an alias or its last part, in any case, blanks for hyphens."""
        return _spelled(name) in self._llm_names

    def name_in_folder(self, llm: str, folder: Path) -> str:
        """The name by which to look up an LLM that a file in `folder` names.

        It may be the path of a config.json, or its folder, relative to `folder`; but a row of this name, or a
        path from the working directory, comes first.
        """
        path_in_folder = str(folder / llm)
        is_in_folder = not self.has_llm(llm) and not is_path(llm) and is_path(path_in_folder)
        return path_in_folder if is_in_folder else llm

    @cached_property
    def _llm_names(self) -> dict[str, tuple[str, str]]:
        """Names in lower case -> the row, and the checkpoint that the name means.

        The last part of a name (after the "/") may stand for the whole, if all names that end with it are of
        one row; so may that part without the active parameters of a mixture of experts, qwen3-235b.
        """
        spelled = [
            (row, name)
            for row in self.llms
            for name in (row, *(self.provenance[row].aliases if row in self.provenance else ()))
        ]
        names = {alias: (row, self._checkpoint_of(alias, row)) for alias, row in self.llm_aliases.items()}
        names |= {name.lower(): (row, name) for row, name in spelled if "/" in name}
        by_last_part: dict[str, list[tuple[str, str]]] = {}
        for row, name in spelled:
            by_last_part.setdefault(_last_part(name), []).append((row, name))
        for last_part, named_rows in by_last_part.items():
            if len({row for row, _ in named_rows}) == 1:
                names.setdefault(last_part, named_rows[0])
        by_short_name: dict[str, set[str]] = {}
        for name in [name for name in names if "/" not in name and _ACTIVE.search(name)]:
            by_short_name.setdefault(_ACTIVE.sub("", name), set()).add(name)
        for short_name, full_names in by_short_name.items():
            if len({names[name][0] for name in full_names}) == 1:
                names.setdefault(short_name, names[min(full_names)])
        return names

    def _checkpoint_of(self, alias: str, row: str) -> str:
        """The checkpoint that an alias means: the row's first name with "/" and all words of the alias.

        "llama-3.3-70b" is an alias of the row meta-llama/Llama-3.1-70B, as both have one shape, but means the
        row's other name meta-llama/Llama-3.3-70B-Instruct. Without such a name it means the row's own.
        """
        others = self.provenance[row].aliases if row in self.provenance else ()
        checkpoints = (row, *(name for name in others if "/" in name))
        words = set(_last_part(alias).split("-"))
        return next((name for name in checkpoints if words <= set(_last_part(name).split("-"))), row)

    def step_latency(
        self,
        llm: Llm,
        gpu: Gpu,
        tp: int,
        *,
        ep: bool = False,
        dp: int = 1,
        exchange: Exchange = DEFAULT_EXCHANGE,
        engine: str = "vllm",
    ) -> StepLatency:
        """Step times of `llm` on `tp` GPUs: a fit if there is one, otherwise the roofline.

        An LLM without fits of its own uses those of a row with the same shape and weight format. A capped GPU
        without a fit of its own has the step times of the uncapped one, slowed. With `ep` every GPU has whole
        experts; without it a slice of each, if there is such a fit. `dp` ranks of `tp` GPUs each share whole
        experts; if they span nodes, `exchange` describes their link. A fit is used for links as fast as the
        measured one or faster. The spread is that of `engine`.
        """
        gpu = self.gpus.get(row_of(gpu.name), gpu)  # The row without "@spot" or "@owned".
        names = self._same_shape(llm)
        nodes = nodes_of_ranks(llm, gpu, tp, dp) if dp > 1 else 1
        all2all: All2All = exchange.all2all if nodes > 1 else ""
        has_whole_experts = dp > 1 or (ep and llm.is_mixture and tp > 1)
        split = Split(tp, has_whole_experts, dp, all2all)
        if nodes > 1 and exchange.link_bytes_per_s < MEASURED_LINK_BYTES_PER_S:
            names = []  # No fit is for a slower link, so the roofline is used.
        # `at_medians` (spreads.py) multiplies step times by the median of measured over predicted ones.
        fit = self._first_fit(names, gpu.name, split)
        if fit is not None:
            return at_medians(fit, llm, row_of(gpu.name), self.spreads.values(), engine)
        base = self.gpus.get(gpu.base, gpu)  # The uncapped row; the GPU itself where it has no cap.
        latency = self._first_fit(names, base.name, split)
        if latency is None:
            latency = self._calculate_latency(llm, base, split, names, exchange)
        latency = at_medians(latency, llm, row_of(base.name), self.spreads.values(), engine)
        if base.name == gpu.name:
            return latency
        return latency.with_power_cap(gpu.prefill_slowdown, gpu.decode_slowdown)

    def expert_splits(self, llm: Llm, gpu: Gpu, tp: int) -> tuple[bool, ...]:
        """How experts may be split over `tp` GPUs: slices of all on each (False), whole ones (True), or both.

        These are the ways that have fits. Without fits experts are sliced, unless slices would cut through
        the blocks of their number format.
        """
        if not llm.is_mixture or tp == 1:
            return (False,)
        for fits in self._fits_of_shape(llm, gpu):
            are_whole = sorted(split.ep for split in fits if (split.tp, split.dp) == (tp, 1))
            if are_whole:
                return tuple(are_whole)
        return (llm.slices_cut_blocks(tp),)  # True, whole experts, where slices would cut blocks.

    def rank_counts(self, llm: Llm, gpu: Gpu, tp: int) -> tuple[int, ...] | None:
        """The numbers (> 1) of data-parallel ranks of `tp` GPUs on one node that have a fit.

        None if this LLM has no fit on this GPU at all: then the roofline covers every number.
        """
        for fits in self._fits_of_shape(llm, gpu):
            # All-to-all kernels are named only where the ranks span nodes.
            splits = [split for split in fits if not split.all2all]
            if splits:
                return tuple(sorted(split.dp for split in splits if split.tp == tp and split.dp > 1))
        return None

    def rank_counts_on_nodes(self, llm: Llm, gpu: Gpu, tp: int) -> tuple[tuple[int, All2All], ...]:
        """The numbers of ranks of `tp` GPUs on several nodes with a fit, each with its all-to-all kernels."""
        splits = itertools.chain.from_iterable(self._fits_of_shape(llm, gpu))
        counts = {(split.dp, split.all2all) for split in splits if split.tp == tp and split.all2all}
        return tuple(sorted(counts))

    def _first_fit(self, names: Sequence[str], gpu: str, split: Split) -> StepLatency | None:
        """The fit of the first of these LLMs that has one. An LLM without a fit of sliced experts has that of
        whole experts; the reverse is not done.
        """
        for name in names:
            fits = self._fits_of(name, gpu)
            fit = fits.get(split) or fits.get(split._replace(ep=True))
            if fit is not None:
                return fit
        return None

    def _calculate_latency(
        self, llm: Llm, gpu: Gpu, split: Split, names: Sequence[str], exchange: Exchange
    ) -> StepLatency:
        """Step times without a fit: the roofline's. A TP that is no power of two is never measured; its step
        times are the fit of the nearest TP that has one, times the ratio of the rooflines of the two.
        """
        tp, ep, dp, _ = split
        latency = roofline(llm, gpu, tp, dp=dp, exchange=exchange)
        is_power_of_two = tp & (tp - 1) == 0  # Such a number has one bit, which tp - 1 lacks.
        if is_power_of_two or dp > 1:
            return latency
        fits_by_split = next(filter(None, (self._fits_of(name, gpu.name) for name in names)), {})
        nearest_tp = min(
            {other.tp for other in fits_by_split if other.dp == 1},
            key=lambda degree: abs(math.log(degree / tp)),
            default=None,
        )
        fit = None if nearest_tp is None else self._first_fit(names, gpu.name, Split(nearest_tp, ep))
        if nearest_tp is None or fit is None:
            return latency
        basis = f"roofline from the fit of tp {nearest_tp} ({fit.basis})"
        moved = transfer_fit(fit, roofline(llm, gpu, nearest_tp), latency, basis=basis)
        # With this kind the step times have the spread of rooflines: nothing was measured at `tp`.
        return replace(moved, kind="roofline")

    def is_checked(self, llm: Llm, gpu: Gpu) -> bool:
        """Whether measurements support step times of this LLM on this GPU: the roofline of the GPU was
        compared with measured steps (its row is not `unchecked`), or this pair has a fit.
        """
        return not gpu.unchecked or self.has_fit(llm, gpu)

    def has_fit(self, llm: Llm, gpu: Gpu) -> bool:
        """Whether there is a fit for this LLM on this GPU; else its step times are those of the roofline."""
        return any(self._fits_of_shape(llm, gpu))

    def find_unchecked_gpus(self, llm: Llm) -> tuple[str, ...]:
        """The GPUs for which `is_checked` is false; they are considered only if the question names them."""
        return tuple(name for name, gpu in self.gpus.items() if not self.is_checked(llm, gpu))

    def find_guessed_gpus(self, llm: Llm) -> tuple[str, ...]:
        """GPUs with a remembered price and estimated step times: left out unless named or priced."""
        return tuple(
            name
            for name, gpu in self.gpus.items()
            if self.provenance[name].is_price_remembered and not self.has_fit(llm, gpu)
        )

    def with_spread(self, latency: StepLatency, llm: Llm, gpu: Gpu, engine: str = "vllm") -> StepLatency:
        """Step times that a user gives, with the spread of their kind, LLM, GPU and engine, if known."""
        rows = self.spreads.values()
        return replace(latency, spread=spread_of(latency, llm, row_of(gpu.name), rows, engine))

    def _same_shape(self, llm: Llm) -> list[str]:
        """The row of this name, then all rows of the same shape and weight format. Image encoders and layers
        for speculative decoding do not count, as they take no time in a step.
        """
        alike = self._by_shape.get(_step_shape(llm), ())
        row_name, _ = self._llm_names.get(llm.name.lower(), (llm.name, ""))
        # An LLM of a config.json may have a row's name and another shape; that row's fits are not its own.
        own = row_name if row_name in alike else llm.name
        return [own, *(name for name in alike if name != own)]

    @cached_property
    def _by_shape(self) -> dict[Llm, list[str]]:
        """The names of all rows by their `_step_shape`."""
        names: dict[Llm, list[str]] = {}
        for name, row in self.llms.items():
            names.setdefault(_step_shape(row), []).append(name)
        return names

    def _fits_of_shape(self, llm: Llm, gpu: Gpu) -> Iterator[dict[Split, StepLatency]]:
        """The fits of each row with the LLM's shape, its own first: on the GPU, then on the uncapped one."""
        gpu = self.gpus.get(row_of(gpu.name), gpu)
        for name in self._same_shape(llm):
            for gpu_name in (gpu.name, gpu.base):
                yield self._fits_of(name, gpu_name)

    def _fits_of(self, llm: str, gpu: str) -> dict[Split, StepLatency]:
        """The fits of an LLM on a GPU by `Split` (fits.py); opens files of this pair only, and each once."""
        if not self._fit_paths:
            fit_paths: dict[tuple[str, str], list[Path]] = {}
            for path in self.fit_files:
                read_names = _shipped_header if path in _shipped_paths() else read_header
                with errors_as(CatalogError, path):
                    named_llm, named_gpu = read_names(path)
                pair = (
                    self.llm_aliases.get(named_llm.lower(), named_llm),
                    self.gpu_aliases.get(named_gpu.lower(), named_gpu),
                )
                fit_paths.setdefault(pair, []).append(path)
            # All at once: threads of a UI share a catalog, and must see either none of them or all.
            self._fit_paths.update(fit_paths)
        if (llm, gpu) not in self._fits:
            fits: dict[Split, StepLatency] = {}
            for path in self._fit_paths.get((llm, gpu), []):
                read = _shipped_fits if path in _shipped_paths() else read_fits
                with errors_as(CatalogError, path):
                    fits = {**read(path, WORDING), **fits}  # The first file wins: the user's before ours.
            self._fits[llm, gpu] = fits
        return self._fits[llm, gpu]


def _step_shape(llm: Llm) -> Llm:
    """The LLM without what step times do not depend on. LLMs for which the results are equal share fits."""
    return replace(llm, name="", context_tokens=1, encoder_parameters=0.0, draft_parameters=0.0)


def read_catalog(folder: CatalogLike = None) -> Catalog:
    """GPUs with prices, LLMs, SLO presets and step times: the shipped catalog, or the files of `folder` with
    the shipped ones for what it lacks. A Catalog is returned as it is. Raises CatalogError for a path that is
    no folder, and for the first row that is not valid.
    """
    if isinstance(folder, Catalog):
        return folder
    shipped = repository_dir("catalogs")
    directory = None if folder is None else Path(folder)
    if directory is not None:
        # Path.is_dir raises OSError for some names, for instance one that is too long.
        if not os.path.isdir(directory):  # noqa: PTH112
            raise CatalogError(f"{directory}: no such catalog directory")
        # A process may run with the rights of another user than the one who started it (effective ids). Those
        # rights count, where the system can test them.
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise CatalogError(f"{directory}: no permission to read it")
        if not any((directory / name).exists() for name in (*FILES, PRICES, "latency")):
            names = ", ".join((*FILES[:3], "latency/", *FILES[3:], PRICES))
            raise CatalogError(f"{directory}: holds none of {names}; expected at least one")
    paths = {name: shipped / name for name in FILES}
    if directory is not None:
        paths |= {name: directory / name for name in FILES if (directory / name).exists()}
    provenance: dict[str, Provenance] = {}
    gpus, gpu_aliases = _rows_and_aliases(paths["gpus.yaml"], _parse_gpu, provenance)
    llms, llm_aliases = _rows_and_aliases(paths["llms.yaml"], _parse_llm, provenance)
    slos, _ = _rows_and_aliases(paths["slos.yaml"], _parse_preset, provenance)
    # Engines, spreads, acceptance and tasks hold their sources in their rows; what goes into {} is dropped.
    engines, _ = _rows_and_aliases(paths["engines.yaml"], _parse_engine_row, {})
    spreads, _ = _rows_and_aliases(paths["spreads.yaml"], _parse_spread_row, {})
    if directory is not None and (directory / PRICES).exists():
        _add_own_offers(directory / PRICES, gpus, gpu_aliases, provenance)
    acceptance, _ = _rows_and_aliases(paths["acceptance.yaml"], _parse_acceptance_row, {})
    parse_task = _parse_shipped_task_row if paths["tasks.yaml"].parent == shipped else _parse_task_row
    tasks, _ = _rows_and_aliases(paths["tasks.yaml"], parse_task, {})
    fit_files = (*(_fit_files(directory) if directory is not None else ()), *_shipped_fit_files())
    return Catalog(
        gpus=GpuRows(gpus),
        llms=llms,
        slos=slos,
        provenance=ProvenanceRows(provenance),
        gpu_aliases=gpu_aliases,
        llm_aliases=llm_aliases,
        fit_files=fit_files,
        engines=engines,
        spreads=spreads,
        acceptance=acceptance,
        tasks=tasks,
    )


def _add_own_offers(
    path: Path, gpus: Mapping[str, Gpu], aliases: Mapping[str, str], provenance: dict[str, Provenance]
) -> None:
    """In `provenance`, put the offers of the user's prices.yaml before those of the GPU's row. A capped GPU
    that prices.yaml does not name gets the offers for the uncapped one.
    """
    own: dict[str, tuple[ProviderOffer, ...]] = {}
    with errors_as(CatalogError, path):
        for written_name, written in read_yaml(path).items():
            name = aliases.get(str(written_name).lower())
            if name is None:
                raise _unknown_name("GPU", str(written_name), gpus, aliases, "gpus.yaml", _GPU_ADVICE)
            own[name] = parse_offers(written, f"{path}: {written_name}")
    for name, gpu in gpus.items():
        offers = own.get(name, own.get(gpu.base, ()))
        row = provenance[name]
        provenance[name] = replace(row, offers=merge_offers(offers, row.offers))


def _rows_and_aliases(
    path: Path, to_row: Callable[[str, Section, Document], Row], provenance: dict[str, Provenance]
) -> tuple[dict[str, Row], dict[str, str]]:
    """The rows of a file by name, and the rows' names by name or alias in lower case. The sources of the rows
    are added to `provenance`.
    """
    read = _shipped_rows if path.parent == repository_dir("catalogs") else _read_rows
    rows, aliases, sources = read(path, to_row)
    provenance |= sources
    return dict(rows), dict(aliases)


def _read_rows(
    path: Path, to_row: Callable[[str, Section, Document], Row]
) -> tuple[dict[str, Row], dict[str, str], dict[str, Provenance]]:
    """The rows of a file and their sources by name, and the rows' names by alias in lower case."""
    with errors_as(CatalogError, path):
        document = read_yaml(path)
    rows: dict[str, Row] = {}
    aliases: dict[str, str] = {}
    provenance: dict[str, Provenance] = {}
    for name, written in document.items():
        where = f"{path}: {name}"
        with errors_as(CatalogError, where):
            if not isinstance(name, str) or not isinstance(written, dict):
                raise refused_value(where, "expected a name and a mapping of fields", written)
            row = Section.from_document(written, where, wording=WORDING)
            rows[name] = to_row(name, row, document)
            provenance[name] = _parse_provenance(row, document)
            for alias in (name, *_parse_aliases(row)):
                if aliases.setdefault(alias.lower(), name) != name:
                    raise InputError(f"{where}: aliases: {alias!r} already names {aliases[alias.lower()]}")
    return rows, aliases, provenance


def _fit_files(directory: Path) -> tuple[Path, ...]:
    """The files with fits in a catalog's folder."""
    return tuple(sorted((directory / "latency").glob("*.yaml")))


# Shipped files do not change while a process runs, so they are read once.
_shipped_rows = cache(_read_rows)
_shipped_header = cache(read_header)
_shipped_fits = cache(read_fits)


@cache
def _shipped_fit_files() -> tuple[Path, ...]:
    return _fit_files(repository_dir("catalogs"))


@cache
def _shipped_paths() -> frozenset[Path]:
    return frozenset(_shipped_fit_files())


def _parse_provenance(row: Section, document: Document) -> Provenance:
    """The sources of a row. A capped GPU without a `price_source` has the price of its uncapped row."""
    priced = row.values if "price_source" in row else document.get(str(row.get("cap_of")), {})
    price_is = Section.from_document(priced, row.where).one_of("price_is", PRICE_IS, "listed")
    return Provenance(
        source=row.plain_text("source"),
        date=row.plain_text("date"),
        price_source=str(priced.get("price_source", "")),
        price_date=str(priced.get("price_date", "")),
        is_price_remembered=price_is == "remembered",
        offers=parse_offers(priced["prices"], row.path_of("prices")) if priced.get("prices") else (),
        aliases=tuple(_parse_aliases(row)),
    )


def _parse_aliases(row: Section) -> list[str]:
    """Other names of a row, as they are spelled."""
    aliases = row.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise row.refused("aliases", "expected a list of names", aliases)
    return aliases


def _parse_gpu(name: str, row: Section, document: Document) -> Gpu:
    """A GPU of gpus.yaml. What a row with `cap_of` does not state, it takes from its uncapped row."""
    base, uncapped_w = name, None
    refuse_unknown(row.values, (*GPU_KEYS, *CAP_KEYS, *PROVENANCE), row.where)
    if "cap_of" in row:
        base = row.plain_text("cap_of")
        uncapped = document.get(base)
        if not isinstance(uncapped, dict) or "cap_of" in uncapped:
            raise row.refused("cap_of", "expected the name of an uncapped row of this file", base)
        for key in ("power", "prefill_slowdown", "decode_slowdown"):
            row.get_required(key)  # A cap changes these, so its row must state them.
        inherited = {key: value for key, value in uncapped.items() if key not in PROVENANCE}
        row = replace(row, values=inherited | dict(row.values))
        uncapped_w = parse_quantity(uncapped.get("power"), "w", where=row.path_of("power"))
        if row.quantity("power", "w") >= uncapped_w:
            raise row.refused("power", f"expected a cap below {uncapped['power']}", row.get("power"))
    else:
        for key in CAP_KEYS:
            if key in row:
                raise row.error(key, "only for a row with cap_of, the name of the uncapped GPU")
    # Nothing is computed from these three, but a row must state them.
    row.quantity("memory_vendor", "bytes")
    for key in ("price_source", "price_date"):
        row.plain_text(key)
    return Gpu(
        name=name,
        memory_bytes=row.quantity("memory", "bytes"),
        bandwidth_bytes_per_s=row.quantity("bandwidth", "bytes_per_s"),
        dense_flops_per_s=row.number("dense_tflops") * 1e12,
        link=row.plain_text("link"),
        link_bytes_per_s=row.quantity("link_bandwidth", "bytes_per_s"),
        power_w=row.quantity("power", "w"),
        gpus_per_node=row.whole_number("gpus_per_node"),
        is_sold_whole=row.one_of("sold_as", SOLD_AS, "gpu") == "node",
        price_usd_per_h=row.quantity("price", "usd_per_h"),
        node_selector=row.plain_text("node_selector"),
        base=base,
        prefill_slowdown=row.number("prefill_slowdown", 1.0),
        decode_slowdown=row.number("decode_slowdown", 1.0),
        uncapped_w=uncapped_w,
        fp8_flops_per_s=row.number("fp8_tflops") * 1e12 if "fp8_tflops" in row else None,
        fp4_flops_per_s=row.number("fp4_tflops") * 1e12 if "fp4_tflops" in row else None,
        unchecked=_parse_unchecked(row),
        all_reduce=tuple(_parse_all_reduce(row)),
        mixed_kv_bytes_per_s=row.quantity("mixed_kv_bandwidth", "bytes_per_s", None),
    )


def _parse_unchecked(row: Section) -> str:
    """Why nobody can tell how far step times of this GPU are off; "" if the row says `unchecked: false`."""
    written = row.get("unchecked")
    if written is False:
        return ""
    return UNCHECKED_BY_DEFAULT if written is None or written is True else row.plain_text("unchecked")


def _parse_all_reduce(row: Section) -> Iterator[AllReduce]:
    """What the key `all_reduce` says of each number of GPUs: {2: {latency: 4 us, bandwidth: 9 GB/s}, ..}."""
    by_gpus = row.get("all_reduce", {})
    where = row.path_of("all_reduce")
    if not isinstance(by_gpus, Mapping):
        raise refused_value(where, "expected latency and bandwidth by the number of GPUs", by_gpus)
    for gpus, values in by_gpus.items():
        if not isinstance(gpus, int) or isinstance(gpus, bool):
            raise refused_value(where, "expected numbers of GPUs", gpus)
        entry = Section.from_document(
            values, f"{where}.{gpus}", ("latency", "bandwidth"), wording=row.wording
        )
        yield AllReduce(gpus, entry.quantity("latency", "s"), entry.quantity("bandwidth", "bytes_per_s"))


def _parse_llm(name: str, row: Section, document: Document) -> Llm:
    """An LLM of llms.yaml, with equal layers or with groups of layers."""
    refuse_unknown(row.values, (*LLM_COUNTS, "context", *LLM_OPTIONAL, *LLM_FURTHER, *PROVENANCE), row.where)
    beside_layers: dict[str, Any] = {
        "tied_embeddings": row.flag("tied_embeddings", False),
        "kv_dtype_bytes": row.number("kv_dtype_bytes", 2.0),
        "encoder_parameters": row.number("encoder_parameters", 0.0, least=0.0),
        "draft_parameters": row.number("draft_parameters", 0.0, least=0.0),
    }
    if "groups" in row:
        return _llm_of_groups(name, row, beside_layers)
    shape: dict[str, Any] = {key: row.whole_number(key) for key in LLM_COUNTS}
    # A row states the number format of its weights, the bytes of one weight, or neither (then bf16).
    weights = row.one_of("weights", WEIGHTS, None)
    dtype_bytes = row.number("dtype_bytes", WEIGHT_BYTES[weights or "bf16"])
    return Llm(
        name=name,
        **shape,
        context_tokens=row.whole_number("context"),
        head_dim=row.whole_number("head_dim", shape["hidden"] // shape["heads"]),
        dtype_bytes=dtype_bytes,
        gated_ffn=row.flag("gated_ffn", True),
        experts=row.whole_number("experts", 1),
        experts_per_token=row.whole_number("experts_per_token", 1),
        weights=weights or ("fp8" if dtype_bytes == 1 else "bf16"),
        **beside_layers,
    )


def _llm_of_groups(name: str, row: Section, beside_layers: dict[str, Any]) -> Llm:
    """An LLM whose layers differ (llm_row.py). `beside_layers` are fields that are not of the layers."""
    for key in (*LLM_COUNTS, *LLM_OPTIONAL):
        if key in row and key not in LLM_OF_GROUPS:
            raise row.error(key, "only for a row without groups, which say it themselves")
    hidden = row.whole_number("hidden")
    return Llm(
        name=name,
        hidden=hidden,
        vocab=row.whole_number("vocab"),
        context_tokens=row.whole_number("context"),
        head_weights=row.one_of("head_weights", WEIGHTS, "bf16"),
        **beside_layers,
        **summarise_groups(read_groups(row), hidden, row.where),
    )


def _refusing_unknown(
    keys: Sequence[str], parse: Callable[[str, Section], Row]
) -> Callable[[str, Section, Document], Row]:
    """A parser for `_rows_and_aliases` that refuses keys beside `keys` and PROVENANCE, then calls `parse`.

    It drops the document, which these rows do not need.
    """

    def parse_row(name: str, row: Section, document: Document) -> Row:
        refuse_unknown(row.values, (*keys, *PROVENANCE), row.where)
        return parse(name, row)

    return parse_row


_parse_engine_row = _refusing_unknown(ENGINE_KEYS, lambda _, row: parse_engine_row(row))
_parse_spread_row = _refusing_unknown(SPREAD_KEYS, lambda _, row: parse_spread_row(row))
_parse_acceptance_row = _refusing_unknown(ACCEPTANCE_KEYS, lambda _, row: parse_acceptance_row(row))
_parse_task_row = _refusing_unknown(TASK_KEYS, parse_task_row)
_parse_shipped_task_row = _refusing_unknown(TASK_KEYS, parse_shipped_task_row)


def _parse_preset(name: str, row: Section, document: Document) -> SloPreset:
    """An SLO of slos.yaml, with limits in seconds or as slowdowns against a reference worker."""
    refuse_unknown(row.values, ("slo", "slowdown", "reference", "for", *PROVENANCE), row.where)
    if ("slo" in row) == ("slowdown" in row):
        present = "both" if "slo" in row else "neither"
        raise InputError(f"{row.where}: expected one of slo and slowdown, found {present}")
    slowdowns = None
    if "slowdown" in row:
        slowdowns = parse_slowdowns(row.get("slowdown"), row.get("reference"), where=row.path_of("slowdown"))
    elif "reference" in row:
        raise row.error("reference", "only for a row with slowdown; a limit in seconds needs none")
    return SloPreset(
        name=name,
        slo=parse_slo(row.get("slo"), where=row.path_of("slo")) if "slo" in row else Slo(()),
        slowdowns=slowdowns,
        served=row.plain_text("for"),
        source=row.plain_text("source"),
    )


def _last_part(name: str) -> str:
    """The part of a name after its last "/", in lower case; all of a name without one."""
    return name.rpartition("/")[2].lower()


def _spelled(name: str) -> str:
    """A name as aliases are spelled: "Llama-3.3-70B FP8" -> "llama-3.3-70b-fp8"."""
    return "-".join(name.lower().split())


def _unknown_name(
    what: str, name: str, rows: Mapping[str, object], aliases: Mapping[str, str], file: str, advice: str = ""
) -> CatalogError:
    """The error for a name that no row and no alias of `file` has, with up to three that it may mean."""
    # Several near aliases may name one row, so nine are looked up to have three rows.
    near = nearest_names(_spelled(name), aliases, 9)
    hints = list(dict.fromkeys(aliases[hit] for hit in near))[:3]
    if not hints and len(rows) <= MOST_NAMED:
        hints = list(rows)
    table = file.removesuffix(".yaml")
    hint_text = f"nearest: {', '.join(hints)}" if hints else f"`plan catalog {table}` lists all {len(rows)}"
    return CatalogError(f"{what} {name!r} is not in catalogs/{file}; {hint_text}{advice}")
