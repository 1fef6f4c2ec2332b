"""Reads the layer groups of a row of llms.yaml, and makes the row of an LLM.

    groups:
      - {layers: 3, attention: {kind: latent, heads: 128, ...}, feed_forward: {width: 18432}}
      - {layers: 58, attention: {...}, feed_forward: {width: 2048, experts: 256, experts_per_token: 8}}

The keys are the fields of planner/models/llm.py. Fields with their default value have no key, nor has an
attention or feed-forward block that the layers lack.
"""

from collections import Counter
from dataclasses import MISSING, Field, fields
from typing import Any

from planner.errors import CatalogError, InputError
from planner.files.document_values import Section, check_rows
from planner.models.llm import (
    WEIGHT_BYTES,
    WEIGHTS,
    Attention,
    CompressedAttention,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    LayerGroup,
    Llm,
    StateAttention,
)

KINDS: dict[str, type[Attention]] = {
    "grouped": GroupedAttention,
    "latent": LatentAttention,
    "compressed": CompressedAttention,
    "state": StateAttention,
}
GROUP_KEYS = ("layers", "attention", "feed_forward")
# Fields of attention and feed-forward blocks that may be 0: then the block has no such part.
_MAY_BE_0 = ("q_rank", "ratio", "shared_width", "index_heads", "index_dim", "index_tokens")


def read_groups(row: Section) -> tuple[LayerGroup, ...]:
    """The layer groups under the row's key `groups`."""
    groups = []
    for number, written in enumerate(
        check_rows(row.get("groups"), row.path_of("groups"), "groups of layers", least=1)
    ):
        group = Section.from_document(
            written,
            f"{row.path_of('groups')}: {number + 1}",
            GROUP_KEYS,
            wording=row.wording,
            such_as="layers: 3",
        )
        attention, block = None, None
        if "attention" in group:
            section = group.subsection("attention")
            attention_class = KINDS[section.one_of("kind", KINDS)]
            attention = _parse_block(attention_class, section, ("kind",))
        if "feed_forward" in group:
            block = _parse_block(FeedForward, group.subsection("feed_forward"))
        groups.append(LayerGroup(group.whole_number("layers"), attention, block))
    return tuple(groups)


def _parse_block(block_class: type[Any], section: Section, extra_keys: tuple[str, ...] = ()) -> Any:
    """An object of the dataclass `block_class`; the keys of `section` are its fields, and `extra_keys`."""
    by_name = {field.name: field for field in fields(block_class)}
    section = Section.from_document(
        section.values, section.where, (*by_name, *extra_keys), wording=section.wording
    )
    values = {
        name: _parse_field(section, field)
        for name, field in by_name.items()
        if name in section or field.default is MISSING  # A missing key of such a field raises InputError.
    }
    try:
        return block_class(**values)
    except CatalogError as error:
        raise InputError(f"{section.where}: {error}") from None


def _parse_field(section: Section, field: Field[Any]) -> Any:
    """The value of one field, read by the field's type."""
    match str(field.type):  # Annotations are text: the module has `from __future__ import annotations`.
        case "bool":
            return section.flag(field.name)
        case "str":
            return section.one_of(field.name, WEIGHTS)
        case "float":
            return section.number(field.name, least=0.0)
        case _:
            return section.whole_number(field.name, least=0 if field.name in _MAY_BE_0 else 1)


def llm_row(llm: Llm) -> dict[str, Any]:
    """The keys and values of a row of llms.yaml, without aliases, source and date."""
    row: dict[str, Any] = {"hidden": llm.hidden, "vocab": llm.vocab, "context": llm.context_tokens}
    if not llm.groups:  # All layers are alike.
        sizes = ("layers", "heads", "kv_heads", "head_dim", "ffn")
        row = {key: getattr(llm, key) for key in (*sizes, "experts", "experts_per_token", "gated_ffn")} | row
        if llm.experts == 1:
            del row["experts"], row["experts_per_token"]
        if llm.gated_ffn:
            del row["gated_ffn"]
        if llm.weights != "bf16":
            row["weights"] = llm.weights
    for key, default in (("tied_embeddings", False), ("kv_dtype_bytes", 2.0)):
        if getattr(llm, key) != default:
            row[key] = getattr(llm, key)
    if llm.head_weights != "bf16":
        row["head_weights"] = llm.head_weights
    for key in ("encoder_parameters", "draft_parameters"):
        if getattr(llm, key):
            row[key] = int(getattr(llm, key))
    if llm.groups:
        row["groups"] = [_group_row(group) for group in llm.groups]
    return row


def _group_row(group: LayerGroup) -> dict[str, Any]:
    """An item of `groups`, which `read_groups` reads as the same group."""
    row: dict[str, Any] = {"layers": group.count}
    if group.attention is not None:
        kind = next(name for name, each in KINDS.items() if isinstance(group.attention, each))
        row["attention"] = {"kind": kind, **_changed_fields(group.attention)}
    if group.feed_forward is not None:
        row["feed_forward"] = _changed_fields(group.feed_forward)
    return row


def _changed_fields(block: Attention | FeedForward) -> dict[str, Any]:
    values = {field.name: (getattr(block, field.name), field.default) for field in fields(block)}
    return {name: value for name, (value, default) in values.items() if value != default}


def summarise_groups(groups: tuple[LayerGroup, ...], hidden: int, where: str) -> dict[str, Any]:
    """The fields of a whole LLM: the sizes of its largest block and heads, the format of most weights."""
    blocks = [group.feed_forward for group in groups if group.feed_forward is not None]
    if not blocks:
        raise CatalogError(f"{where}: no layer has a feed-forward block; such LLMs are not modelled")
    largest = max(blocks, key=lambda block: (block.experts, block.width))  # A block with experts comes first.
    weights = most_weights(groups, hidden)
    return {
        **_largest_heads([group.attention for group in groups], where),
        "layers": sum(group.count for group in groups),
        "ffn": largest.width,
        "gated_ffn": largest.is_gated,
        "experts": largest.experts,
        "experts_per_token": largest.experts_per_token,
        "groups": groups,
        "weights": weights,
        "dtype_bytes": WEIGHT_BYTES[weights],
    }


def most_weights(groups: tuple[LayerGroup, ...], hidden: int) -> str:
    """The weight format that most parameters of these layers have."""
    parameters: Counter[str] = Counter()
    for group in groups:
        if (attention := group.attention) is not None:
            quantised = attention.parameters(hidden) - attention.bf16_parameters
            parameters[attention.weights] += round(group.count * quantised)
            parameters["bf16"] += round(group.count * attention.bf16_parameters)
        if (block := group.feed_forward) is not None:
            parameters[block.weights] += round(group.count * block.experts * block.expert_parameters(hidden))
            parameters[block.shared_weights] += round(group.count * block.shared_parameters(hidden))
    return parameters.most_common(1)[0][0]


def _largest_heads(attentions: list[Attention | None], where: str) -> dict[str, int]:
    """Head counts and head size: the largest of grouped attentions, else those of the first other one."""
    grouped = [each for each in attentions if isinstance(each, GroupedAttention)]
    if grouped:
        return {
            "heads": max(each.heads for each in grouped),
            "kv_heads": max(each.kv_heads for each in grouped),
            "head_dim": max(each.head_dim for each in grouped),
        }
    for each in attentions:
        if isinstance(each, LatentAttention):
            return {"heads": each.heads, "kv_heads": 1, "head_dim": each.nope_dim + each.rope_dim}
        if isinstance(each, CompressedAttention):
            return {"heads": each.heads, "kv_heads": 1, "head_dim": each.head_dim}
    raise CatalogError(f"{where}: no layer keeps keys and values; such LLMs are not modelled")
