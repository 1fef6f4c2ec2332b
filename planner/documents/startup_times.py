"""catalogs/startup.yaml: where weights and images come from, and how long engines take to start.

facts = read_startup()
facts.start_time(llm, worker_type, "object-store").start_s
facts.warm_start_time(llm, worker_type).start_s
facts.wake_s(llm, worker_type, 1, "nvme-raid0")    # from level 1 of vLLM's sleep mode

How the phases of a start add up: planner/models/startup.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from planner.domain import Gpu, row_of
from planner.errors import CatalogError, InputError
from planner.files.checked_files import read_yaml, repository_dir
from planner.files.document_values import Section, errors_as, nearest_names
from planner.fleet import WorkerType
from planner.models.llm import Llm
from planner.models.memory import worker_memory
from planner.models.startup import EngineStart, Image, SleepLevel, StartTime, Storage, start_time

FILE = "startup.yaml"
# The row of `storage` for a node that has run the same LLM before: its page cache still has the weights.
WARM = "page-cache"
KEYS = ("storage", "image", "engine", "sleep")  # The sections of the file.
SLEEP_KEYS = ("wake", "wake_load", "fall_asleep", "fall_asleep_load", "keeps")
COMMON = ("measured", "source", "date")  # Keys that every row may have; `measured` is true by default.
# Keys of a row of `engine` -> fields of `EngineStart`.
ENGINE_SECONDS = {
    "boot": "boot_s",
    "trace_per_layer": "trace_layer_s",
    "compile_per_layer": "compile_layer_s",
    "cached_per_layer": "cached_layer_s",
    "profile": "profile_s",
    "capture_per_layer": "capture_layer_s",
}
Row = TypeVar("Row")


def gpu_weight_bytes(llm: Llm, worker: WorkerType) -> float:
    """The weights on each GPU of a worker. Data-parallel ranks share experts, and copy all other weights."""
    if worker.dp == 1:
        return llm.weight_bytes / worker.gpus
    return worker_memory(llm, worker.gpu, worker.tp, dp=worker.dp).weight_bytes


@dataclass(frozen=True, slots=True)
class StartupFacts:
    """The rows of startup.yaml by name.

    A worker's start time is that of the row of `engines` for its GPU. If its GPU has no row, another row is
    used (`_find_engine`), and the start time is marked as estimated.
    """

    storages: Mapping[str, Storage]
    images: Mapping[str, Image]
    engines: Mapping[str, EngineStart]
    sleep_levels: Mapping[str, SleepLevel]

    def find_sleep_level(self, level: int) -> SleepLevel:
        """The row of a sleep level of vLLM; raises CatalogError for a level that has none."""
        return _find_row(self.sleep_levels, "sleep", str(level))

    def fall_asleep_s(self, llm: Llm, worker: WorkerType, level: int) -> float:
        """Seconds until a worker has freed its GPUs, including the copy of its weights to the host's memory
        if the level makes one. Raises CatalogError as `find_sleep_level` does.
        """
        row, gpu_bytes = self.find_sleep_level(level), gpu_weight_bytes(llm, worker)
        copy_bytes_per_s = row.fall_asleep_bytes_per_s
        return row.fall_asleep_s + (0.0 if copy_bytes_per_s is None else gpu_bytes / copy_bytes_per_s)

    def wake_s(self, llm: Llm, worker: WorkerType, level: int, storage: str) -> float:
        """Seconds until a sleeping worker takes requests. `storage` is the row from which a level that does
        not keep the weights reads them. Raises CatalogError for a level or storage without a row.
        """
        row = self.find_sleep_level(level)
        if row.wake_bytes_per_s is None:  # The level keeps no weights in the host's memory.
            return row.wake_s + self.start_time(llm, worker, storage).load_s
        return row.wake_s + gpu_weight_bytes(llm, worker) / row.wake_bytes_per_s

    def start_time(
        self,
        llm: Llm,
        worker: WorkerType,
        storage: str,
        *,
        image: str | None = None,
        is_compiled: bool = False,
        node_s: float = 0.0,
    ) -> StartTime:
        """How long a worker takes to start, by phase, with weights from the row `storage`.

        Without an `image` the node has the container's image already; with `is_compiled` it has the compiled
        kernels already. `node_s` is the time until there is a node. Raises CatalogError for a storage or an
        image without a row.
        """
        engine, is_of_other_gpu = self._find_engine(worker.gpu)
        phases = start_time(
            llm,
            worker.gpus,
            engine,
            _find_row(self.storages, "storage", storage),
            pp=worker.pp,
            image=None if image is None else _find_row(self.images, "image", image),
            is_compiled=is_compiled,
            node_s=node_s,
        )
        # `start_time` splits weights evenly over all GPUs; with data-parallel ranks each GPU loads more.
        into_gpus_s = gpu_weight_bytes(llm, worker) / engine.load_bytes_per_s
        phases = replace(phases, load_s=max(phases.load_s, into_gpus_s))
        if not is_of_other_gpu:
            return phases
        return replace(phases, estimated=(*phases.estimated, f"{worker.gpu.name}: measured on {engine.gpu}"))

    def warm_start_time(self, llm: Llm, worker: WorkerType) -> StartTime:
        """How long a worker takes to start on a node with image, weights and kernels of an earlier run."""
        return self.start_time(llm, worker, WARM, is_compiled=True)

    def _find_engine(self, gpu: Gpu) -> tuple[EngineStart, bool]:
        """The row of `engine` for this GPU, and whether that row was measured on another GPU.

        A GPU without a row gets the row of a GPU whose name is the same before the "-" (the same GPU with
        other memory). If no GPU has that name either, it gets the file's first row.
        """
        name = row_of(gpu.base)
        for engine in self.engines.values():
            if engine.gpu == name:
                return engine, False
        for engine in self.engines.values():
            if engine.gpu.partition("-")[0] == name.partition("-")[0]:
                return engine, True
        return next(iter(self.engines.values())), True


def read_startup(directory: Path | None = None) -> StartupFacts:
    """The facts of the shipped startup.yaml, or of the one in `directory` if there is one there. Raises
    CatalogError for a bad row, and for a file without an engine or without the row WARM.
    """
    path = repository_dir("catalogs") / FILE
    if directory is not None and (directory / FILE).exists():
        path = directory / FILE
    with errors_as(CatalogError, path):
        document = Section.from_document(read_yaml(path), str(path), KEYS)
        facts = StartupFacts(
            _parse_rows(document, "storage", ("bandwidth",), _parse_storage),
            _parse_rows(document, "image", ("size", "bandwidth"), _parse_image),
            _parse_rows(document, "engine", ("gpu", "layers", "load", *ENGINE_SECONDS), _parse_engine),
            _parse_rows(document, "sleep", SLEEP_KEYS, _parse_sleep),
        )
        if not facts.engines or WARM not in facts.storages:
            raise InputError(f"{path}: must have an engine, and {WARM} among the storage")
        return facts


def _parse_rows(
    document: Section, section: str, keys: tuple[str, ...], to_row: Callable[[str, Section], Row]
) -> dict[str, Row]:
    """The rows of one section of the file, by name, each made by `to_row`. A row may have `keys` and COMMON,
    and must have a source and a date. Raises InputError otherwise.
    """
    rows = {}
    for name, values in document.subsection(section).values.items():
        row = Section.from_document(values, f"{document.path_of(section)}: {name}", (*keys, *COMMON))
        if not row.plain_text("source") or not row.plain_text("date"):
            raise row.refused("source", "expected where it was measured, and when", None)
        rows[str(name)] = to_row(str(name), row)
    return rows


def _parse_storage(name: str, row: Section) -> Storage:
    return Storage(
        name, row.positive("bandwidth", "bytes_per_s"), row.flag("measured", True), _parse_source(row)
    )


def _parse_image(name: str, row: Section) -> Image:
    size_bytes, bandwidth = row.positive("size", "bytes"), row.positive("bandwidth", "bytes_per_s")
    return Image(name, size_bytes, bandwidth, row.flag("measured", True), _parse_source(row))


def _parse_engine(name: str, row: Section) -> EngineStart:
    """A row of `engine`; `layers` must be [fewest, most] of the LLMs it was measured with."""
    layers = row.numbers("layers")
    if len(layers) != 2 or not 1 <= layers[0] <= layers[1]:
        raise row.refused("layers", "expected [fewest, most]", list(layers))
    seconds = {field: row.at_least(key, "s", 0.0) for key, field in ENGINE_SECONDS.items()}
    return EngineStart(
        name=name,
        gpu=row.plain_text("gpu"),
        layers=(int(layers[0]), int(layers[1])),
        load_bytes_per_s=row.positive("load", "bytes_per_s"),
        is_measured=row.flag("measured", True),
        source=_parse_source(row),
        **seconds,
    )


def _parse_sleep(name: str, row: Section) -> SleepLevel:
    """A row of `sleep`, whose name is the level. Without `wake_load` the level does not keep the weights;
    without `fall_asleep_load` it does not copy them.
    """
    return SleepLevel(
        level=int(name),
        wake_s=row.at_least("wake", "s", 0.0),
        wake_bytes_per_s=row.positive("wake_load", "bytes_per_s", None),
        fall_asleep_s=row.at_least("fall_asleep", "s", 0.0),
        fall_asleep_bytes_per_s=row.positive("fall_asleep_load", "bytes_per_s", None),
        kept_gpu_bytes=row.positive("keeps", "bytes"),
        is_measured=row.flag("measured", True),
        source=_parse_source(row),
    )


def _parse_source(row: Section) -> str:
    """Where a row was measured, and when."""
    return f"{row.plain_text('source')}, {row.plain_text('date')}"


def _find_row(rows: Mapping[str, Row], what: str, name: str) -> Row:
    """The row of this name in `rows`, which messages call `what`. Raises CatalogError if there is none, with
    the names nearest to it, or all names if none is near.
    """
    if name not in rows:
        hints = nearest_names(name, rows) or list(rows)
        raise CatalogError(f"{what} {name!r} is not in catalogs/{FILE}; nearest: {', '.join(hints)}")
    return rows[name]
