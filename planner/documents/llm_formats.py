"""The number format of each module's weights in an LLM, as its checkpoint declares it.

    formats = read_formats(file, config)
    formats.format_of(["layers.3.mlp.experts.0.gate_proj"], is_expert=True)       # "nvfp4"

The declaration is `quantization_config` of config.json (fp8, AWQ, GPTQ, mxfp4, compressed-tensors, ModelOpt)
or hf_quant_config.json beside it (ModelOpt). It lists the modules that are not quantised: by name, with *, or
as a regular expression after "re:". These modules keep 16 bits, as does every module that no group of the
declaration has as a target. The names of formats ("fp8", "int4-g32") are those of WEIGHT_BYTES in
planner/models/llm.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.errors import CatalogError, InputError
from planner.files.checked_files import open_input
from planner.files.document_values import show_value
from planner.files.jsontext import parse_json
from planner.models.llm import WEIGHT_BYTES

Config = Mapping[str, Any]
# No more than this is read of a file. The largest known configs, which list every expert, have 3 MB.
MAX_CONFIG_BYTES = 16 * 2**20
# Keys under which a config.json declares the formats of its quantised weights.
QUANTISED = ("quantization_config", "compression_config", "quantization")
MODELOPT_FILE = "hf_quant_config.json"
# The end of messages about a format that is not modelled.
INSTEAD = (
    "name a checkpoint in 16 bits, fp8, int8, int4, mxfp4 or nvfp4, or describe this one in a llms.yaml of "
    "your own with its weights"
)
# GPTQ and AWQ write these files. A checkpoint that has one is refused if config.json declares no format.
_OTHER_FILES = ("quantize_config.json", "quant_config.json")
# Keys that list the modules which are not quantised.
_IGNORED = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
_FP8_METHODS = ("fp8", "fbgemm_fp8", "ptpc_fp8")
_NO_METHOD = "none"  # `str(section.get("quant_method")).lower()` is this for a section without the key.
# Values of `quant_method` with which a section may have `config_groups`. ModelOpt may write no method at all.
_GROUPED_METHODS = ("compressed-tensors", "modelopt", "modelopt_fp4", _NO_METHOD, *_FP8_METHODS)
# ModelOpt's names of formats, and ours.
_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8-block",
    "FP8_PB": "fp8-block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A16": "int4",
    "W4A16_AWQ": "int4",
    "INT4_AWQ": "int4",
    "INT8_SQ": "int8",
}
# Module names of checkpoints begin with one of these. Callers leave it out ("layers.3.mlp", "lm_head").
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.", "language_model.", "")
# How many weights share a scale: 128 in "int4", 32 in "int4-g32" and "int4-g32z", which take more memory.
_LARGE_GROUP, _SMALL_GROUP = 128, 32
_ONE_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")  # All experts of a layer share a format.
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Formats:
    """The formats of an LLM's modules.

    Modules that no rule names have the format `default`, or `experts` if they are routed experts. A rule in
    `names` applies to the module of this name and to all modules inside it; a rule in `patterns` applies to
    modules whose name begins with a match. `kv_dtype_bytes` are the bytes of one value in the KV cache.
    """

    default: str = "bf16"
    experts: str = "bf16"
    kv_dtype_bytes: float = 2.0
    names: Mapping[str, str] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()

    def format_of(self, aliases: Iterable[str], *, is_expert: bool = False) -> str:
        """The format of a module. `aliases` are the names that checkpoints give to it, from "layers." or
        "lm_head" on; the first alias with a rule decides. Patterns of quantised modules are tried last, as
        they may also match modules that another rule leaves in 16 bits.
        """
        names = list(aliases)
        for rule in (self._format_by_rule, self._format_by_wide_pattern):
            for name in names:
                if format := rule(name):
                    return format
        return self.experts if is_expert else self.default

    @property
    def head(self) -> str:
        """The format of the output head, which is quantised only where a rule names it."""
        if format := self.names.get("lm_head"):
            return format
        head_formats = (format for name, format in self.names.items() if name.endswith(".lm_head"))
        return next(head_formats, "bf16")

    def _format_by_rule(self, module: str) -> str | None:
        """The format by the rules of the checkpoint; None if no rule applies.

        A rule is a pattern of modules in 16 bits, which must match from the start; or a name, which may be
        any consecutive parts of the module's name between dots: "mlp.experts" applies to
        "layers.3.mlp.experts.0". A rule for the module itself comes before one for a module around it.
        """
        if not self.names and not self.patterns:
            return None
        for prefix in _PREFIXES:
            full = prefix + module
            for pattern, format in self.patterns:
                if format == "bf16" and pattern.match(full):
                    return format
            parts = _ONE_EXPERT.sub("*", full).split(".") if self.names else []
            for end in range(len(parts), 0, -1):
                if parts[end - 1] not in self._last_parts:  # No rule's name ends with this part.
                    continue
                for start in range(end):
                    if named_format := self.names.get(".".join(parts[start:end])):
                        return named_format
        return None

    def _format_by_wide_pattern(self, module: str) -> str | None:
        """The format by the patterns of quantised modules; None if none matches from the start."""
        full_names = [prefix + module for prefix in _PREFIXES]
        return next(
            (
                format
                for pattern, format in self.patterns
                if format != "bf16" and any(map(pattern.match, full_names))
            ),
            None,
        )

    @cached_property
    def _last_parts(self) -> frozenset[str]:
        """The last part of each name in `names`: a module with another last part needs no look-up."""
        return frozenset(name.rpartition(".")[2] for name in self.names)

    @property
    def weight_and_kv_bytes(self) -> tuple[float, float]:
        """Bytes of a weight in the narrowest format of any module, and bytes of a value in the KV cache."""
        formats = {self.default, self.experts, *self.names.values()}
        formats |= {format for _, format in self.patterns}
        return min(WEIGHT_BYTES[format] for format in formats), self.kv_dtype_bytes

    def is_same(self, other: Formats) -> bool:
        """Whether both have the same rules, in whichever order."""
        without_patterns, others = replace(self, patterns=()), replace(other, patterns=())
        return without_patterns == others and set(self.patterns) == set(other.patterns)


def read_config(path: Path) -> dict[str, Any]:
    """A Hugging Face config.json, or another JSON object. Raises CatalogError for anything else."""
    try:
        with open_input(path) as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
        # Configs of Mamba hold NaN.
        config = parse_json(raw[:MAX_CONFIG_BYTES].decode("utf-8-sig"), has_nan=True)
    except InputError as error:
        raise CatalogError(str(error)) from None
    except ValueError as error:
        raise CatalogError(f"{path}: is not JSON ({error}); expected a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise CatalogError(f"{path}: expected a Hugging Face config.json, found a {type(config).__name__}")
    return config


def read_formats(file: Path, config: Config) -> Formats:
    """The formats in which vLLM serves a checkpoint.

    Weights in float32 run in 16 bits, and the KV cache has 16 bits unless the checkpoint says otherwise.
    Raises CatalogError for formats that are not modelled, and if two files disagree.
    """
    statements = [
        (f"{file}: {key}", _parse_section(config[key], f"{file}: {key}", config))
        for key in QUANTISED
        if config.get(key) is not None
    ]
    if file.name == "config.json":
        if (modelopt := file.with_name(MODELOPT_FILE)).exists():
            where = f"{modelopt}: quantization"
            statements.append(
                (where, _parse_section(read_config(modelopt).get("quantization"), where, config))
            )
        for name in _OTHER_FILES:
            if not statements and file.with_name(name).exists():
                raise CatalogError(
                    f"{file.with_name(name)}: not read; expected quantization_config in config.json, as "
                    "vLLM wants it"
                )
    for other in statements[1:]:
        _check_same(statements[0], other)
    if statements:
        return statements[0][1]
    dtype = str(config.get("torch_dtype", config.get("dtype")) or "bfloat16").removeprefix("torch.")
    if dtype in ("float16", "bfloat16", "half", "float32", "float"):
        return Formats()
    if dtype.startswith("float8"):
        return Formats("fp8", "fp8")
    raise CatalogError(f"{file}: torch_dtype: expected bfloat16, float16, float32 or float8, found {dtype!r}")


def _check_same(first: tuple[str, Formats], second: tuple[str, Formats]) -> None:
    """Raise CatalogError if two declarations, each with its place, do not agree."""
    (where, formats), (other_where, other_formats) = first, second
    if formats.is_same(other_formats):
        return
    own_bytes, other_bytes = formats.weight_and_kv_bytes, other_formats.weight_and_kv_bytes
    if own_bytes == other_bytes:
        raise CatalogError(
            f"{where} and {other_where} say different things of some modules; remove what is out of date"
        )
    raise CatalogError(
        f"{where} counts {own_bytes[0]:g} byte(s) per weight and {own_bytes[1]:g} per key, "
        f"{other_where} {other_bytes[0]:g} and {other_bytes[1]:g}; remove what is out of date"
    )


def _parse_section(section: object, where: str, config: Config) -> Formats:
    """The formats in one declaration, as Hugging Face or ModelOpt writes it. `where` begins every error;
    `config` is the whole config.json. Raises CatalogError for formats that are not modelled.
    """
    if isinstance(section, dict) and isinstance(section.get("quantization"), dict):
        where, section = f"{where}: quantization", section["quantization"]
    if not isinstance(section, dict):
        raise CatalogError(
            f"{where}: expected keys and values such as quant_method: fp8, found {section!r:.80}"
        )
    kv_dtype_bytes = _kv_bytes(section, where)
    ignored = {name: "bf16" for name in _parse_ignored(section, where)}
    if config.get("model_type") == "deepseek_v4":
        return _deepseek_v4(section, where, config, kv_dtype_bytes)
    if section.get("quantized_layers"):
        named = _quantised_layers(section["quantized_layers"], f"{where}: quantized_layers")
        return _formats_of_rules("bf16", "bf16", kv_dtype_bytes, ignored | named)
    if (algorithm := section.get("quant_algo")) is not None:
        if str(algorithm).upper() not in _ALGORITHMS:
            raise CatalogError(f"{where}: quant_algo: {show_value(algorithm)} is not modelled; {INSTEAD}")
        format = _ALGORITHMS[str(algorithm).upper()]
        if format == "int4":
            format = _int4_format(section, where, "int4-g32")
        return _formats_of_rules(format, format, kv_dtype_bytes, ignored)
    method = str(section.get("quant_method")).lower()
    if groups := section.get("config_groups"):
        if method not in _GROUPED_METHODS:
            raise _not_modelled(section, where, "quant_method")
        return _config_groups(groups, f"{where}: config_groups", kv_dtype_bytes, ignored)
    if section.get("quant_method") is None and "quant_algo" in section:
        return Formats(kv_dtype_bytes=kv_dtype_bytes)  # ModelOpt changed the format of keys and values alone.
    experts = default = _method_format(section, where, method)
    if method in ("mxfp4", "gpt_oss_mxfp4"):
        default = "bf16"  # gpt-oss has other formats in its experts alone.
    return _formats_of_rules(default, experts, kv_dtype_bytes, ignored)


def _method_format(section: Config, where: str, method: str) -> str:
    """The one format of a `quant_method` without groups. Raises CatalogError for one that is not modelled."""
    match method:
        case "fp8" | "fbgemm_fp8" | "ptpc_fp8":
            return "fp8-block" if section.get("weight_block_size") else "fp8"
        case "mxfp4" | "gpt_oss_mxfp4":
            return "mxfp4"
        case "awq" | "gptq" | "awq_marlin" | "gptq_marlin":
            if section.get("dynamic"):
                raise CatalogError(
                    f"{where}: dynamic: bits that differ by module are not modelled; expected none"
                )
            if section.get("bits") == 8 and method.startswith("gptq"):
                return "int8-g128"
            if section.get("bits") == 4:
                return _int4_format(section, where, "int4-g32z")
            raise _not_modelled(section, where, "bits")
    # The message names what the section has: its method, or only its bits.
    key = "bits" if section.get("quant_method") is None and "bits" in section else "quant_method"
    raise _not_modelled(section, where, key)


def _not_modelled(section: Config, where: str, key: str) -> CatalogError:
    """The error for a format, found under `key`, that no formula describes."""
    return CatalogError(f"{where}: {key}: {show_value(section.get(key))} is not modelled; {INSTEAD}")


def _int4_format(section: Config, where: str, small_groups: str) -> str:
    """The format of weights in 4 bits, by how many of them share a scale (`group_size`); `small_groups` is
    the format for groups of 32.

    A `group_size` of -1 stands for a whole row; a missing one or None for 128, the default of AWQ and GPTQ.
    Sizes from 32 to 127 count as 32, larger ones as 128, so a weight is never counted as too small.
    """
    size = section.get("group_size", _LARGE_GROUP)
    if size is None or size == -1 or (isinstance(size, int) and size >= _LARGE_GROUP):
        return "int4"
    if isinstance(size, int) and size >= _SMALL_GROUP:
        return small_groups
    raise CatalogError(f"{where}: group_size: expected 32 or more, found {show_value(size)}")


def _config_groups(groups: object, where: str, kv_dtype_bytes: float, ignored: dict[str, str]) -> Formats:
    """The formats in `config_groups` of compressed-tensors and ModelOpt.

    Each group has a format and targets, which are kinds of modules or names of modules. `ignored` has the
    modules that are not quantised; no group changes their format. Raises CatalogError for formats that are
    not modelled, and for kinds of modules that two groups give different formats.
    """
    if not isinstance(groups, dict):
        raise CatalogError(f"{where}: expected groups of targets and weights, found {show_value(groups)}")
    default, names = "bf16", dict(ignored)
    for key, group in groups.items():
        place = f"{where}: {key}"
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise CatalogError(f"{place}: weights: expected num_bits and type, found {show_value(weights)}")
        format = _group_format(weights, place, multiplies_in_16_bits=group.get("input_activations") is None)
        for target in group.get("targets") or ("Linear",):
            if target in ("Linear", "FusedMoE", "RoutedExperts"):  # Kinds of modules: for all of the LLM.
                if default not in ("bf16", format):
                    raise CatalogError(f"{place}: targets: {target!r} is in {default} by another group")
                default = format
            else:
                _check_pattern(str(target), f"{place}: targets")
                names.setdefault(str(target), format)
    return _formats_of_rules(default, default, kv_dtype_bytes, names)


def _group_format(weights: Config, where: str, *, multiplies_in_16_bits: bool) -> str:
    """The format of one group of `config_groups`, by its bits, kind of number and values per scale, and by
    whether it leaves activations in 16 bits.
    """
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    match bits, kind:
        case 8, "float":
            if size == 32:
                return "mxfp8"
            return "fp8-block" if weights.get("strategy") == "block" else "fp8"
        case 8, "int":
            return "int8-g128" if multiplies_in_16_bits else "int8"
        case (4, "float") if size in (16, 32):
            return "nvfp4" if size == 16 else "mxfp4"
        case 4, "int":
            has_zeros = weights.get("symmetric") is False
            return _int4_format({"group_size": size}, where, "int4-g32z" if has_zeros else "int4-g32")
    raise CatalogError(
        f"{where}: weights: {show_value(kind)} of {show_value(bits)} bits in groups of "
        f"{show_value(size)} are not modelled; {INSTEAD}"
    )


def _quantised_layers(layers: object, where: str) -> dict[str, str]:
    """The format of each module in ModelOpt's `quantized_layers`, which maps a module's name to `quant_algo`.

    Raises CatalogError if experts of one layer differ.
    """
    if not isinstance(layers, dict):
        raise CatalogError(f"{where}: expected a format for each name, found {show_value(layers)}")
    names: dict[str, str] = {}
    for name, written in layers.items():
        algorithm = str(written.get("quant_algo") if isinstance(written, dict) else written).upper()
        if algorithm not in _ALGORITHMS:
            raise CatalogError(f"{where}: {name}: quant_algo: {algorithm!r} is not modelled; {INSTEAD}")
        module = _ONE_EXPERT.sub("*", name)
        if names.setdefault(module, _ALGORITHMS[algorithm]) != _ALGORITHMS[algorithm]:
            raise CatalogError(
                f"{where}: {name}: {algorithm}, other experts of this layer {names[module]}; not modelled"
            )
    return names


def _deepseek_v4(section: Config, where: str, config: Config, kv_dtype_bytes: float) -> Formats:
    """DeepSeek-V4: blocks of fp8, except in the routed experts, whose format is under `expert_dtype`.
    ModelOpt quantises the experts alone; modules of its `ignore` list keep the checkpoint's fp8.
    """
    experts = {"fp4": "mxfp4", "fp8": "fp8-block"}.get(str(config.get("expert_dtype", "fp4")))
    if experts is None:
        raise CatalogError(f"{where}: expert_dtype: expected fp4 or fp8, found {config['expert_dtype']!r}")
    if layers := section.get("quantized_layers"):
        named = set(_quantised_layers(layers, f"{where}: quantized_layers").values())
        if named != {"nvfp4"}:
            raise CatalogError(f"{where}: quantized_layers: expected experts in NVFP4, found {sorted(named)}")
        experts = "nvfp4"
    elif section.get("quant_method") != "fp8":
        raise _not_modelled(section, where, "quant_method")
    return Formats("fp8-block", experts, kv_dtype_bytes)


def _formats_of_rules(default: str, experts: str, kv_dtype_bytes: float, named: Mapping[str, str]) -> Formats:
    """The formats by the rules `named`. A key of `named` is a name, a name with wildcards, or a regular
    expression after "re:"; its value is a format. Only plain names can be looked up in a dictionary.
    """
    names: dict[str, str] = {}
    patterns = []
    for name, format in named.items():
        if name.startswith("re:"):
            patterns.append((re.compile(name.removeprefix("re:")), format))
        # All experts of a layer have one name here, with * in place of their number: no wildcard.
        elif _GLOB.search(name.replace("experts.*.", "")):
            patterns.append((re.compile(fnmatch.translate(name)), format))
            patterns.append((re.compile(fnmatch.translate(f"{name}.*")), format))
        else:
            names[_ONE_EXPERT.sub("*", name.rstrip("."))] = format  # AWQ writes "model.layers.0." too.
    return Formats(default, experts, kv_dtype_bytes, names, tuple(patterns))


def _parse_ignored(section: Config, where: str) -> list[str]:
    """The names and patterns of the modules that are not quantised."""
    names: list[str] = []
    for key in _IGNORED:
        listed = section.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise CatalogError(f"{where}: {key}: expected a list of names, found {show_value(listed)}")
        for name in listed:
            _check_pattern(name, f"{where}: {key}")
        names += listed
    return names


def _check_pattern(name: str, where: str) -> None:
    """Raise CatalogError for a rule after "re:" that is no regular expression."""
    if not name.startswith("re:"):
        return
    try:
        re.compile(name.removeprefix("re:"))
    except re.error as error:
        raise CatalogError(f"{where}: {name!r} is no regular expression: {error}") from None


def _kv_bytes(section: Config, where: str) -> float:
    """Bytes of one value in the KV cache: 2, or 1 if the checkpoint has one of the two keys that vLLM reads.

    compressed-tensors writes `kv_cache_scheme: {num_bits: 8, ...}`, ModelOpt the same or
    `kv_cache_quant_algo: FP8`. Raises CatalogError for other values of these keys.
    """
    scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
    if algorithm is not None and str(algorithm).upper() != "FP8":
        raise CatalogError(
            f"{where}: kv_cache_quant_algo: {algorithm!r} is not modelled; expected FP8, or none for 16 bits"
        )
    if scheme is None:
        return 2.0 if algorithm is None else 1.0
    if isinstance(scheme, str) and scheme.upper() == "FP8":
        return 1.0
    bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    if bits != 8 or (isinstance(scheme, dict) and scheme.get("type") == "int"):
        raise CatalogError(
            f"{where}: kv_cache_scheme: expected num_bits: 8 of floats, or none for 16 bits, found "
            f"{scheme!r:.80}"
        )
    return 1.0
