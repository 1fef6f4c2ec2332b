"""The options of the commands that plan several times: what-if, sensitivity, pareto, replan and tiers.

Imports within functions keep other commands fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from planner.commands import shared_options
from planner.commands.command_output import Progress, at_work, read_requests
from planner.documents.catalog import Catalog, read_catalog
from planner.search.oracle.work_clock import USUAL_LIMIT_S

if TYPE_CHECKING:
    from planner.studies.what_if import Study

SloArgument = Annotated[Path, typer.Option("--slo", readable=False, help="The question: slo.yaml.")]
TraceArgument = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        readable=False,
        help=f"{shared_options.TRACE_HELP} Leave it out where slo.yaml describes the traffic.",
    ),
]
TimeOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="Seconds for each plan; then the best so far counts.")
]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """What every such command is given."""

    slo: SloArgument
    trace: TraceArgument = None
    catalog: shared_options.CatalogOption = None
    seed: shared_options.SeedOption = 0
    time_limit: TimeOption = USUAL_LIMIT_S
    executor: shared_options.ExecutorOption = None
    address: shared_options.AddressOption = None
    drop_invalid: shared_options.DropOption = False
    json_output: shared_options.JsonOption = False
    quiet: shared_options.QuietOption = False

    @contextmanager
    def at_work(self) -> Iterator[tuple[Progress, Catalog]]:
        """A context that shows progress and simulates where it should, with the catalog."""
        with Progress(quiet=self.quiet) as progress, at_work(self.executor, self.address):
            yield progress, read_catalog(self.catalog)

    def study(self, catalog: Catalog, progress: Progress) -> Study:
        """The study on the traffic of these options."""
        from planner.studies.what_if import Study

        requests = read_requests(
            self.trace, self.slo, catalog, seed=self.seed, drop_invalid=self.drop_invalid
        )
        progress(f"{len(requests):,} requests of {requests.name}")
        return Study(requests, catalog, seed=self.seed, time_limit_s=self.time_limit, progress=progress)


def with_study_options(
    *, time_limit: float = USUAL_LIMIT_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose first parameter is a StudyOptions: Typer sees the fields in its place, with
    `time_limit` as the default of --time-limit.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        hints = get_type_hints(StudyOptions, include_extras=True)
        # `empty` is for the option that must be given: it has no default.
        usual = {
            each.name: getattr(StudyOptions, each.name, Parameter.empty) for each in fields(StudyOptions)
        }
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in (usual | {"time_limit": time_limit}).items()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in usual}
            command(StudyOptions(**given), **values)

        # The question and its traffic come first in --help, then the command's own options.
        own = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in own]
        run.__signature__ = Signature([*shared[:2], *own, *shared[2:]])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*shared, *own)}
        return run

    return decorate
