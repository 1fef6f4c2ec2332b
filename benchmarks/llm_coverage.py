"""Counts the published configs of LLMs that can be planned, and those of them that have kernel times.

    python benchmarks/llm_coverage.py [folder of *_config.json]

The folder: `model_configs` of aiconfigurator-core 0.12.0 (the extra `silicon`), 89 published configs. One is
planned if it is read and some GPU of the catalog holds it and a request of 4096 tokens; on kernel times if a
worker type of it has a fit to them. A config that is no row of the catalog shares the fits of a row of the
same shape and formats (`Catalog.latency`), and of no other. Names every config that is not on kernel times.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.llm_config import llm_from_config
from planner.errors import PlannerError
from planner.models.llm import Llm
from planner.search.problem.options import worker_types

LONGEST_TOKENS = 4096
QUANTISER = "hf_quant_config.json"


def configs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The names in the folder and, one after the other, a folder as a checkpoint has it."""
    for path in sorted(folder.glob("*_config.json")):
        if path.name.endswith(QUANTISER):
            continue
        name = path.name.removesuffix("_config.json")
        with tempfile.TemporaryDirectory() as made:
            checkpoint = Path(made, name)
            checkpoint.mkdir()
            shutil.copy(path, checkpoint / "config.json")
            if (beside := path.with_name(f"{name}_{QUANTISER}")).exists():
                shutil.copy(beside, checkpoint / QUANTISER)
            yield name.replace("--", "/", 1), checkpoint


def planned_on(llm: Llm, catalog: Catalog) -> dict[str, bool]:
    """The GPUs that hold it, and whether there are kernel times of it there."""
    gpus = [gpu for gpu in catalog.gpus.values() if gpu.name == gpu.base and catalog.is_checked(llm, gpu)]
    found: dict[str, bool] = {}
    for worker in worker_types(llm, gpus, catalog, LONGEST_TOKENS)[0]:
        found[worker.gpu.name] = found.get(worker.gpu.name, False) or worker.latency.kind == "kernels"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    if (given := parser.parse_args().folder) is not None:
        folder = given
    elif spec := find_spec("aiconfigurator_core"):
        folder = Path(str(spec.origin)).parent / "model_configs"
    else:
        sys.stderr.write("name the folder of the configs, or install fleetplan[silicon]\n")
        return 2
    catalog, read, planned, fitted = read_catalog(), 0, 0, 0
    for name, checkpoint in configs(folder):
        read += 1
        try:
            gpus = planned_on(llm_from_config(checkpoint), catalog)
        except PlannerError as error:
            print(f"refused   {name}: {str(error).replace(str(checkpoint), '')}")
            continue
        planned += bool(gpus)
        fitted += any(gpus.values())
        if not any(gpus.values()):
            print(f"{'roofline ' if gpus else 'no room  '} {name}")
    print(f"{read} configs, {planned} planned, {fitted} of them on kernel times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
