"""The function `catalog` of `import fleetplan`: GPUs, LLMs, presets of SLOs, tasks and engines as DataFrames.
Names of columns end in the unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from planner.documents.catalog import Catalog, CatalogLike, read_catalog
from planner.documents.traffic_description import example_of

_PLAIN = (str, int, float, bool)  # Types of values that a cell can hold.


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CatalogFrames:
    """The tables of a catalog; all but `engines` are indexed by name.

    `read` is the catalog as it was read; other functions of this package take it as `catalog`.
    """

    read: Catalog

    @property
    def gpus(self) -> pd.DataFrame:
        """Every GPU: memory, bandwidth, price, and in `unchecked` why step times for it may be far off; empty
        if they were compared with measured ones.
        """
        return self._table_frame(self.read.gpus)

    @property
    def llms(self) -> pd.DataFrame:
        """Every LLM: its structure, the number of its parameters, and the bytes of a token in KV."""
        computed = {
            name: {"parameters": llm.parameters, "kv_bytes_per_token": llm.kv_bytes_per_token}
            for name, llm in self.read.llms.items()
        }
        return self._table_frame(self.read.llms).join(pd.DataFrame.from_dict(computed, orient="index"))

    @property
    def slos(self) -> pd.DataFrame:
        """The presets of SLOs whose limits are in seconds, one row per limit, with its source. A preset of
        slowdowns, which depend on a GPU, has no row.
        """
        rows = [
            {"name": name, "limit": limit.name, "limit_s": limit.limit_s, "source": preset.source}
            for name, preset in self.read.slos.items()
            for limit in preset.slo.limits
        ]
        return pd.DataFrame(rows).set_index("name")

    @property
    def tasks(self) -> pd.DataFrame:
        """Every task (`task: chat` in slo.yaml): the mean tokens in and out of its requests, and on which
        traffic (`of`) they were measured.
        """
        rows = []
        for task in self.read.tasks.values():
            example = example_of(task.values, task.name)  # The described traffic of the task.
            means = {"input_tokens": example.input.mean_tokens, "output_tokens": example.output.mean_tokens}
            rows.append({"name": task.name, "of": task.measured_on, **means, "source": task.source})
        return pd.DataFrame(rows).set_index("name")

    @property
    def engines(self) -> pd.DataFrame:
        """A row for each span of versions of an engine, `first` to `last`, with the time that its host takes
        per step.
        """
        return pd.DataFrame([_plain_fields(row) for row in self.read.engines.values()])

    def _table_frame(self, rows: Mapping[str, Any]) -> pd.DataFrame:
        """The plain fields (`_plain_fields`) of these dataclasses and of their provenance, a row per name."""
        provenance = self.read.provenance
        table = {
            name: _plain_fields(row) | (_plain_fields(provenance[name]) if name in provenance else {})
            for name, row in rows.items()
        }
        # The name is the index already; a table without rows has no column `name`.
        frame = pd.DataFrame.from_dict(table, orient="index").drop(columns="name", errors="ignore")
        return frame.rename_axis("name")

    def __repr__(self) -> str:
        read = self.read
        return (
            f"catalog: {len(read.gpus)} GPUs (.gpus), {len(read.llms)} LLMs (.llms), {len(read.slos)} SLO "
            f"presets (.slos), {len(read.tasks)} tasks (.tasks), {len(read.engines)} engines (.engines)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>{self.gpus.to_html(max_rows=12)}"


def catalog(folder: CatalogLike = None) -> CatalogFrames:
    """GPUs with prices, LLMs, presets, tasks and engines as DataFrames; rows of `folder` come first."""
    return CatalogFrames(read_catalog(folder))


def _plain_fields(row: Any) -> dict[str, Any]:
    """The fields of a dataclass that a cell can hold."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {key: value for key, value in values.items() if value is None or isinstance(value, _PLAIN)}
