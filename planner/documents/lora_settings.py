"""`lora:` of slo.yaml, fleet.yaml and plan.yaml: how adapters are served.

    lora: {max_loras: 8, max_rank: 16, adapters: 100, targets: [qkv_proj, o_proj]}
    lora: {max_loras: 2, max_rank: 64, adapters: [sales, support, legal], max_cpu_loras: 3}

`max_loras`, `max_rank` and `max_cpu_loras` are vLLM's settings: the adapters in a GPU's slots at once, the
largest rank, and the adapters in the host's memory, by default all of them (at least `max_loras`). `adapters`
counts or names all that are served. The column `adapter` of a trace names the adapter of each request;
without the column all adapters are equally likely. `targets` are the matrices that adapters change, by
default all. `link` is the bandwidth from the host's memory into a slot, `disk` that from disk into the host's
memory (planner/models/lora.py). `longer` is the share by which a plan with `robust` raises the times of LoRA.
"""

from typing import Any

from planner.errors import InputError
from planner.files.document_values import Section, check_whole_number, errors_as, refused_value
from planner.models.lora import DISK_BYTES_PER_S, LINK_BYTES_PER_S, MODULES, Lora
from planner.units import show_exactly

NONE = "none"  # `lora: none` says the same as no `lora`.
KEYS = ("max_loras", "max_rank", "adapters", "max_cpu_loras", "targets", "link", "disk", "longer")
# Values above these two are taken for typing errors.
MOST_ADAPTERS = 100_000
MOST_LONGER_FRAC = 10.0


def parse_lora(value: object, where: str) -> Lora | None:
    """How adapters are served; None for a missing value or "none". Raises InputError."""
    if value is None or value == NONE:
        return None
    section = Section.from_document(value, where, KEYS)
    adapters = _parse_adapters(section)
    count = adapters if isinstance(adapters, int) else len(adapters)
    max_loras = section.whole_number("max_loras")
    settings: dict[str, Any] = {
        "max_loras": max_loras,
        "max_rank": section.whole_number("max_rank"),
        "adapters": adapters,
        "max_cpu_loras": section.whole_number("max_cpu_loras", max(count, max_loras)),
        "targets": _parse_targets(section),
        "link_bytes_per_s": section.positive("link", "bytes_per_s", LINK_BYTES_PER_S),
        "disk_bytes_per_s": section.positive("disk", "bytes_per_s", DISK_BYTES_PER_S),
        # A bare number is a share too, even above 1.
        "longer_frac": section.share("longer", 0.0, most=MOST_LONGER_FRAC, bare=MOST_LONGER_FRAC),
    }
    with errors_as(InputError, where):
        return Lora(**settings)


def lora_document(lora: Lora) -> dict[str, Any]:
    """The section `lora` that `parse_lora` reads back as this value."""
    return {
        "max_loras": lora.max_loras,
        "max_rank": lora.max_rank,
        "adapters": lora.adapters if isinstance(lora.adapters, int) else list(lora.adapters),
        "max_cpu_loras": lora.max_cpu_loras,
        **({} if lora.targets is None else {"targets": list(lora.targets)}),
        "link": show_exactly(lora.link_bytes_per_s, "GB/s"),
        "disk": show_exactly(lora.disk_bytes_per_s, "GB/s"),
        **({"longer": lora.longer_frac} if lora.longer_frac else {}),
    }


def _parse_adapters(section: Section) -> int | tuple[str, ...]:
    """The names of all adapters, or how many there are. Raises InputError for anything else."""
    value, where = section.get_required("adapters"), section.path_of("adapters")
    if not isinstance(value, list):
        return check_whole_number(value, where, most=MOST_ADAPTERS)
    if not value or not all(isinstance(name, str) and name.strip() for name in value):
        raise refused_value(where, "expected a number, or a list of names", value)
    if len(set(value)) < len(value):
        twice = next(name for name in value if value.count(name) > 1)
        raise InputError(f"{where}: {twice!r} is given twice")
    return tuple(value)


def _parse_targets(section: Section) -> tuple[str, ...] | None:
    """The matrices that adapters change, by vLLM's names, each once; None for all. Raises InputError."""
    value = section.get("targets", "all")
    if value == "all":
        return None
    if not isinstance(value, list) or not value or not all(name in MODULES for name in value):
        raise section.refused("targets", f"expected all, or a list of {', '.join(MODULES)}", value)
    return tuple(dict.fromkeys(value))
