"""Facts on file: GPUs, LLMs, SLOs of papers, and fitted step times; each row with its source and date.

    catalog = read_catalog()
    llm, gpu = catalog.llm("llama-3.1-70b"), catalog.gpu("h100@350W")
    catalog.latency(llm, gpu, tp=4).step_s(2048)

A directory of one's own may hold any of gpus.yaml, llms.yaml, slos.yaml and latency/*.yaml. A file there
replaces the shipped one; fits there come before the shipped ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from planner.documents.llm import llm_from_config
from planner.documents.slo import SloPreset, parse_slo, parse_slowdowns
from planner.domain import SPOT, Gpu, Llm, Slo
from planner.errors import CatalogError, InputError
from planner.io.files import is_path, open_input, read_yaml, repository_dir
from planner.io.values import nearest, refuse_unknown
from planner.models.latency import StepLatency
from planner.units import LARGEST, quantity

Row = Mapping[str, Any]
Named = TypeVar("Named")
FILES = ("gpus.yaml", "llms.yaml", "slos.yaml")
PROVENANCE = ("aliases", "source", "date")


@dataclass(frozen=True)
class Provenance:
    """Where a row comes from; for a GPU also its price, whose date matters more."""

    source: str
    date: str
    price_source: str = ""
    price_date: str = ""


@dataclass(frozen=True)
class Catalog:
    """The rows by name, in the order of the files. `provenance` is keyed by the same names.

    `aliases` leads from a lower-case name or alias to the row's own name. `fit_files` are the fits of step
    times, opened when asked for.
    """

    gpus: Mapping[str, Gpu]
    llms: Mapping[str, Llm]
    slos: Mapping[str, SloPreset]
    provenance: Mapping[str, Provenance]
    gpu_aliases: Mapping[str, str]
    llm_aliases: Mapping[str, str]
    fit_files: tuple[Path, ...] = ()
    _headers: dict[tuple[str, str], list[Path]] = field(default_factory=dict, repr=False, compare=False)
    _fits: dict[tuple[str, str], dict[int, StepLatency]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def gpu(self, name: str) -> Gpu:
        """By name or alias, whatever the case; "h100-80g@spot" is the same GPU on the spot market."""
        if found := self.gpu_aliases.get(name.lower().removesuffix(SPOT)):
            gpu = self.gpus[found]
            return replace(gpu, name=gpu.name + SPOT) if name.lower().endswith(SPOT) else gpu
        raise _unknown("GPU", name, self.gpus, self.gpu_aliases, "gpus.yaml")

    def llm(self, name: str) -> Llm:
        """By name or alias, or from a Hugging Face config.json (or the folder that holds it)."""
        if found := self.llm_aliases.get(name.lower()):
            return self.llms[found]
        if is_path(name):
            return llm_from_config(Path(name))
        if name.endswith(".json") or name.startswith(("/", "./", "../", "~")):
            raise CatalogError(f"LLM {name!r}: no such file or folder; expected a Hugging Face config.json")
        raise _unknown(
            "LLM", name, self.llms, self.llm_aliases, "llms.yaml", "; or give a path to its config.json"
        )

    def latency(self, llm: Llm, gpu: Gpu, tp: int) -> StepLatency:
        """Step times of `llm` on `tp` GPUs: the fit of this pair, else the roofline; slowed for a power cap.

        A fit of the capped GPU itself comes before its base's. An LLM that is in no catalog has the fits of a
        row of the same shape.
        """
        name, gpu = self._fitted_name(llm), self.gpus.get(gpu.name.removesuffix(SPOT), gpu)
        if tp in (own := self._fits_of(name, gpu.name)):
            return own[tp]
        base = self.gpus.get(gpu.base, gpu)
        if tp in (fits := self._fits_of(name, base.name)):
            latency = fits[tp]
        else:
            from planner.models.roofline import roofline

            latency = roofline(llm, base, tp)
        if base.name == gpu.name:
            return latency
        return latency.slowed(gpu.prefill_slowdown, gpu.decode_slowdown)

    def _fitted_name(self, llm: Llm) -> str:
        if llm.name in self.llms:
            return llm.name
        anonymous = replace(llm, name="", context_tokens=1)
        shapes = (row for row in self.llms.values() if replace(row, name="", context_tokens=1) == anonymous)
        twin = next(shapes, None)
        return llm.name if twin is None else twin.name

    def _fits_of(self, llm: str, gpu: str) -> dict[int, StepLatency]:
        """Fits by tensor parallelism; opens the files of this pair only, and each once."""
        if not self._headers:
            headers: dict[tuple[str, str], list[Path]] = {}
            for path in self.fit_files:
                of_llm, of_gpu = _header(path)
                pair = (
                    self.llm_aliases.get(of_llm.lower(), of_llm),
                    self.gpu_aliases.get(of_gpu.lower(), of_gpu),
                )
                headers.setdefault(pair, []).append(path)
            self._headers.update(headers)  # at once: a UI reads one catalog from several threads
        if (llm, gpu) not in self._fits:
            fits: dict[int, StepLatency] = {}
            for path in self._headers.get((llm, gpu), []):
                fits = {**_read_fits(path), **fits}  # the first file wins: a user's comes before ours
            self._fits[llm, gpu] = fits
        return self._fits[llm, gpu]


def read_catalog(directory: Path | None = None) -> Catalog:
    """The shipped catalog, or `directory` with the shipped files for what it lacks."""
    shipped = repository_dir("catalogs")
    directories = [shipped] if directory is None else [directory, shipped]
    if directory is not None:
        if not os.path.isdir(directory):  # noqa: PTH112 - silent about what cannot be looked at
            raise CatalogError(f"{directory}: no such catalog directory")
        if not os.access(directory, os.R_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise CatalogError(f"{directory}: no permission to read it")
        if not any((directory / name).exists() for name in (*FILES, "latency")):
            raise CatalogError(
                f"{directory}: holds none of {', '.join(FILES)}, latency/; expected at least one"
            )
    gpus_path, llms_path, slos_path = (
        next((found for d in directories if (found := d / name).exists()), shipped / name) for name in FILES
    )
    provenance: dict[str, Provenance] = {}
    gpus, gpu_aliases = _rows(gpus_path, _gpu, provenance)
    llms, llm_aliases = _rows(llms_path, _llm, provenance)
    slos, _ = _rows(slos_path, _preset, provenance)
    fit_files = tuple(path for d in directories for path in sorted((d / "latency").glob("*.yaml")))
    return Catalog(gpus, llms, slos, provenance, gpu_aliases, llm_aliases, fit_files)


def _rows(
    path: Path, to_row: Callable[[str, Mapping[str, Row], str], Named], provenance: dict[str, Provenance]
) -> tuple[dict[str, Named], dict[str, str]]:
    """Rows of a file by name, and lower-case names and aliases -> name."""
    try:
        document = read_yaml(path)
    except InputError as error:
        raise CatalogError(str(error)) from None
    rows: dict[str, Named] = {}
    aliases: dict[str, str] = {}
    for name, row in document.items():
        where = f"{path}: {name}"
        if not isinstance(name, str) or not isinstance(row, dict):
            raise CatalogError(f"{where}: expected a name and a mapping of fields, found {row!r}")
        try:
            rows[name] = to_row(name, document, where)
        except InputError as error:
            raise CatalogError(
                str(error) if str(error).startswith(str(path)) else f"{where}: {error}"
            ) from None
        priced = row if "price_source" in row else document.get(str(row.get("cap_of")), {})
        provenance[name] = Provenance(
            source=_text(row, "source", where),
            date=_text(row, "date", where),
            price_source=str(priced.get("price_source", "")),
            price_date=str(priced.get("price_date", "")),
        )
        for alias in (name, *_list(row, "aliases", where)):
            if aliases.setdefault(alias.lower(), name) != name:
                raise CatalogError(f"{where}: aliases: {alias!r} already names {aliases[alias.lower()]}")
    return rows, aliases


def _gpu(name: str, document: Mapping[str, Row], where: str) -> Gpu:
    row: Row = document[name]
    base, uncapped_w = name, None
    fields = (
        "memory_vendor",
        "memory",
        "bandwidth",
        "dense_tflops",
        "link",
        "link_bandwidth",
        "power",
        "gpus_per_node",
        "price",
        "price_source",
        "price_date",
        "node_selector",
    )
    capped = ("cap_of", "prefill_slowdown", "decode_slowdown")
    refuse_unknown(row, (*fields, *capped, *PROVENANCE), where)
    if "cap_of" in row:
        base = _text(row, "cap_of", where)
        uncapped = document.get(base)
        if not isinstance(uncapped, dict) or "cap_of" in uncapped:
            raise CatalogError(
                f"{where}: cap_of: expected the name of an uncapped row of this file, found {base!r}"
            )
        for key in ("power", "prefill_slowdown", "decode_slowdown"):
            _required(row, key, where)  # what a cap changes must be said, not inherited
        row = {key: value for key, value in uncapped.items() if key not in PROVENANCE} | dict(row)
        uncapped_w = _quantity(uncapped, "power", "w", where)
        if _quantity(row, "power", "w", where) >= uncapped_w:
            raise CatalogError(
                f"{where}: power: expected a cap below {uncapped['power']}, found {row['power']!r}"
            )
    elif stray := [key for key in capped if key in row]:
        raise CatalogError(f"{where}: {stray[0]}: only for a row with cap_of, the name of the uncapped GPU")
    _quantity(row, "memory_vendor", "bytes", where)
    for key in ("price_source", "price_date"):
        _text(row, key, where)
    return Gpu(
        name=name,
        memory_bytes=_quantity(row, "memory", "bytes", where),
        bandwidth_bytes_per_s=_quantity(row, "bandwidth", "bytes_per_s", where),
        dense_flops_per_s=_number(row, "dense_tflops", where) * 1e12,
        link=_text(row, "link", where),
        link_bytes_per_s=_quantity(row, "link_bandwidth", "bytes_per_s", where),
        power_w=_quantity(row, "power", "w", where),
        gpus_per_node=_whole(row, "gpus_per_node", where),
        price_usd_per_h=_quantity(row, "price", "usd_per_h", where),
        node_selector=_text(row, "node_selector", where),
        base=base,
        prefill_slowdown=_number(row, "prefill_slowdown", where, default=1.0),
        decode_slowdown=_number(row, "decode_slowdown", where, default=1.0),
        uncapped_w=uncapped_w,
    )


def _llm(name: str, document: Mapping[str, Row], where: str) -> Llm:
    row = document[name]
    counts = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    optional = (
        "head_dim",
        "dtype_bytes",
        "kv_dtype_bytes",
        "gated_ffn",
        "tied_embeddings",
        "experts",
        "experts_per_token",
    )
    refuse_unknown(row, (*counts, "context", *optional, *PROVENANCE), where)
    shape = {key: _whole(row, key, where) for key in counts}
    return Llm(
        name=name,
        **shape,
        context_tokens=_whole(row, "context", where),
        head_dim=_whole(row, "head_dim", where, default=shape["hidden"] // shape["heads"]),
        dtype_bytes=_number(row, "dtype_bytes", where, default=2.0),
        gated_ffn=_flag(row, "gated_ffn", where, default=True),
        tied_embeddings=_flag(row, "tied_embeddings", where, default=False),
        experts=_whole(row, "experts", where, default=1),
        experts_per_token=_whole(row, "experts_per_token", where, default=1),
        kv_dtype_bytes=_number(row, "kv_dtype_bytes", where, default=2.0),
    )


def _preset(name: str, document: Mapping[str, Row], where: str) -> SloPreset:
    row = document[name]
    refuse_unknown(row, ("slo", "slowdown", "reference", "for", *PROVENANCE), where)
    if ("slo" in row) == ("slowdown" in row):
        raise CatalogError(
            f"{where}: expected one of slo and slowdown, found {'both' if 'slo' in row else 'neither'}"
        )
    slowdowns = None
    if "slowdown" in row:
        slowdowns = parse_slowdowns(row["slowdown"], row.get("reference"), where=f"{where}: slowdown")
    elif "reference" in row:
        raise CatalogError(f"{where}: reference: only for a row with slowdown; a limit in seconds needs none")
    return SloPreset(
        name=name,
        slo=parse_slo(row["slo"], where=f"{where}: slo") if "slo" in row else Slo(()),
        slowdowns=slowdowns,
        served=_text(row, "for", where),
        source=_text(row, "source", where),
        date=_text(row, "date", where),
    )


_FIT_LISTS, _FIT_NUMBERS = ("knots_tokens", "f_s"), ("a_s", "b_s", "d_s", "e_s", "h_s")
_FIT_OPTIONAL = ("mape_frac", "max_context_tokens", "uncertainty_frac")


def _header(path: Path) -> tuple[str, str]:
    """`llm` and `gpu` of a fit file from its first lines: the fits are long and mostly not needed."""
    with open_input(path) as stream:
        head = stream.read(4096).decode("utf-8-sig", errors="replace")
    names = []
    for key in ("llm", "gpu"):
        match = re.search(rf"^{key}:[ \t]*(.*?)[ \t]*(?:#.*)?\r?$", head, flags=re.MULTILINE)
        names.append(match[1].strip("'\"") if match else "")
        if not names[-1]:
            raise CatalogError(f"{path}: {key} is missing; expected `{key}: name` among the first lines")
    return names[0], names[1]


def _read_fits(path: Path) -> dict[int, StepLatency]:
    try:
        document = read_yaml(path)
        refuse_unknown(document, ("llm", "gpu", "source", "date", "command", "fits"), str(path))
    except InputError as error:
        raise CatalogError(str(error)) from None
    fits: dict[int, StepLatency] = {}
    if not isinstance(document.get("fits"), list):
        raise CatalogError(f"{path}: fits: expected a list of fits, found {document.get('fits')!r}")
    for n, row in enumerate(document["fits"]):
        where = f"{path}: fits[{n}]"
        if not isinstance(row, dict):
            raise CatalogError(f"{where}: expected a mapping of fields, found {row!r}")
        tp = _whole(row, "tp", where)
        where = f"{path}: tp {tp}"
        if tp in fits:
            raise CatalogError(f"{where}: is given twice; keep one")
        try:
            refuse_unknown(
                row, ("tp", *_FIT_LISTS, *_FIT_NUMBERS, "basis", *_FIT_OPTIONAL, "errors", "simulated"), where
            )
            knots_tokens, f_s = (_numbers(row, key, where) for key in _FIT_LISTS)
            a_s, b_s, d_s, e_s, h_s = (_number(row, key, where) for key in _FIT_NUMBERS)
            optional = (
                _number(row, key, where) if row.get(key) is not None else None for key in _FIT_OPTIONAL
            )
            basis = _text(row, "basis", where)
            fits[tp] = StepLatency(knots_tokens, f_s, a_s, b_s, d_s, e_s, h_s, basis, *optional)
        except InputError as error:
            raise CatalogError(
                str(error) if str(error).startswith(str(path)) else f"{where}: {error}"
            ) from None
    return fits


def _required(row: Row, key: str, where: str) -> Any:
    if row.get(key) is None:
        raise CatalogError(f"{where}: {key} is missing; add it")
    return row[key]


def _quantity(row: Row, key: str, unit: str, where: str) -> float:
    return quantity(_required(row, key, where), unit, where=f"{where}: {key}")


def _number(row: Row, key: str, where: str, *, default: float | None = None) -> float:
    value = default if default is not None and key not in row else _required(row, key, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise CatalogError(f"{where}: {key}: expected a number, found {value!r}")
    return float(value)


def _numbers(row: Row, key: str, where: str) -> tuple[float, ...]:
    values = _required(row, key, where)
    if not isinstance(values, list):
        raise CatalogError(f"{where}: {key}: expected a list of numbers, found {values!r}")
    return tuple(_number({key: value}, key, where) for value in values)


def _whole(row: Row, key: str, where: str, *, default: int | None = None) -> int:
    value = default if default is not None and key not in row else _required(row, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CatalogError(f"{where}: {key}: expected a whole number > 0, found {value!r}")
    return value


def _flag(row: Row, key: str, where: str, *, default: bool) -> bool:
    value = row.get(key, default)
    if not isinstance(value, bool):
        raise CatalogError(f"{where}: {key}: expected true or false, found {value!r}")
    return value


def _text(row: Row, key: str, where: str) -> str:
    """Text, or a date, which YAML reads as one."""
    value = _required(row, key, where)
    if isinstance(value, dict | list | bool) or not str(value).strip():
        raise CatalogError(f"{where}: {key}: expected text, found {value!r}")
    return str(value).strip()


def _list(row: Row, key: str, where: str) -> list[str]:
    values = row.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CatalogError(f"{where}: {key}: expected a list of names, found {values!r}")
    return values


def _unknown(
    what: str, name: str, rows: Mapping[str, object], aliases: Mapping[str, str], file: str, advice: str = ""
) -> CatalogError:
    hints = list(dict.fromkeys(aliases[hit] for hit in nearest(name, aliases, 5)))[:3] or list(rows)
    return CatalogError(f"{what} {name!r} is not in catalogs/{file}; nearest: {', '.join(hints)}{advice}")
