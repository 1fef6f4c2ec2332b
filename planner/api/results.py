"""The results of `fleetplan.plan` and others: figures as attributes, tables as DataFrames, pages as text."""

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from planner.api.questions import TaskDocument
from planner.errors import InputError, PlannerError
from planner.files.checked_files import check_output_directory, write_files
from planner.files.scarce_resources import missing_resource
from planner.fleet import Fleet
from planner.reports import figures, output, several_llms_report, words
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.report import render_report
from planner.search.evidence.plan import Plan
from planner.search.problem.bill import Bill
from planner.search.several.shared_plan import SharedPlan

# What `repr` shows at most: characters of a line, rows of the table, characters of a cell, and sentences.
REPR_COLUMNS, REPR_ROWS, REPR_CELL, REPR_SENTENCES = 100, 8, 24, 6


class Result(ABC):
    """A result that `repr` and notebooks show as a headline, a table and a few sentences."""

    __slots__ = ()  # Without slots here, those of the subclasses would save no memory.

    @abstractmethod
    def headline(self) -> str:
        """The answer in one sentence."""

    @abstractmethod
    def sentences(self) -> list[str]:
        """The sentences that a reader needs beside the headline."""

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The table of the result, with units in the names of its columns."""

    def __repr__(self) -> str:
        table = self.to_frame().to_string(
            max_rows=REPR_ROWS, index=False, line_width=None, max_colwidth=REPR_CELL
        )
        # The table's lines are cut here, because `shorten` below would collapse the spaces between columns.
        lines = [
            self.headline(),
            *(line[:REPR_COLUMNS] for line in table.splitlines()),
            *self.sentences()[:REPR_SENTENCES],
        ]
        return "\n".join(
            textwrap.shorten(line, REPR_COLUMNS, placeholder=" ...") if len(line) > REPR_COLUMNS else line
            for line in lines
        )

    def _repr_html_(self) -> str:
        list_items = "".join(f"<li>{escape(line)}</li>" for line in self.sentences())
        table = self.to_frame().to_html(max_rows=REPR_ROWS, index=False, border=0)
        return f"<div><strong>{escape(self.headline())}</strong>{table}<ul>{list_items}</ul></div>"


class PlanFiles(Result):
    """A plan that can be written to files, for one LLM or for several.

    `question` is the slo.yaml that was planned; None for a plan that was read back from its files, and for
    the plan of a SeveralLlmsQuestion.
    """

    __slots__ = ()
    question: TaskDocument | None

    @property
    @abstractmethod
    def fleets(self) -> Mapping[str, Fleet]:
        """The fleet of each LLM, by the LLM's name."""

    @property
    @abstractmethod
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures, as sentences."""

    @abstractmethod
    def report(self) -> str:
        """The page report.html, as text."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """What `plan --json` prints, as values of JSON's types."""

    @abstractmethod
    def files(self, *, png: bool = False, pages: bool = True) -> dict[str, str | bytes]:
        """The content of all files that `plan -o DIR` writes, by their paths in DIR.

        With `png` every chart is also a file of its own, a picture. Without `pages` there are neither charts
        nor reports.
        """

    @abstractmethod
    def _outdated(self) -> tuple[str, ...]:
        """Patterns of paths: files that an earlier plan may have left in the folder, and `save` removes."""

    @property
    def cost_usd_per_h(self) -> float:
        """What the fleets of all LLMs cost together, by whole nodes where only these are sold [USD/h]."""
        return self.bill.usd_per_h

    @property
    @abstractmethod
    def bill(self) -> Bill:
        """What is paid for all fleets, on the nodes on which their workers are placed."""

    @property
    def workers(self) -> int:
        """How many workers the fleets of all LLMs have."""
        return sum(fleet.workers for fleet in self.fleets.values())

    @property
    def gpus(self) -> int:
        """How many GPUs the fleets of all LLMs have."""
        return sum(fleet.gpus for fleet in self.fleets.values())

    @property
    def power_w(self) -> float:
        """The most power that the workers of all fleets may draw [W]."""
        return sum(fleet.power_w for fleet in self.fleets.values())

    def save(self, folder: str | Path, *, png: bool = False) -> tuple[str, ...]:
        """Write `files` into the folder, all or none; returns their paths in it.

        If an interrupt comes while reports and charts are drawn, or memory or open files run out, all other
        files are still written. Then KeyboardInterrupt is raised again, or PlannerError if something ran out.
        """
        check_output_directory(Path(folder))
        try:
            written = self.files(png=png)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt) and missing_resource(error) is None:
                raise
            write_files(Path(folder), self.files(pages=False), outdated=self._outdated())
            if isinstance(error, KeyboardInterrupt):
                raise
            raise PlannerError(
                f"{folder}: the plan is written, its report is not, as memory or open files do not suffice "
                f"(ulimit -v, ulimit -n); with more of them `plan report {folder}` draws it"
            ) from None
        write_files(Path(folder), written, outdated=self._outdated())
        return tuple(written)

    def replace(self, changes: Mapping[str, Any] | None = None, /, **more: Any) -> TaskDocument:
        """The plan's question with other values, to be planned again: see `TaskDocument.replace`. Raises
        InputError for a plan that does not hold its question.
        """
        if self.question is None:
            raise InputError(
                "replace: this plan was read back, and does not hold its question; give its slo.yaml"
            )
        return self.question.replace(changes, **more)

    def to_frame(self) -> pd.DataFrame:
        """A row per pool that has workers; with several LLMs the column `name` has the pool's LLM. `gpus`,
        cost and power are sums over the pool's workers.
        """
        has_several_llms = len(self.fleets) > 1
        return pd.DataFrame(
            [
                {
                    **({"name": name} if has_several_llms else {}),
                    "pool": pool.name,
                    "role": pool.role,
                    "workers": pool.count,
                    "gpu": pool.type.gpu.name,
                    "tp": pool.type.tp,
                    "pp": pool.type.pp,
                    "dp": pool.type.dp,
                    "gpus": pool.count * pool.type.gpus,
                    "max_num_batched_tokens": pool.type.max_num_batched_tokens,
                    "cost_usd_per_h": pool.count * pool.type.price_usd_per_h,
                    "power_w": pool.count * pool.type.power_w,
                }
                for name, fleet in self.fleets.items()
                for pool in fleet.running_pools
            ]
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PlanResult(PlanFiles):
    """A plan for one LLM. `command` is the command that writes the same files; empty where no command can."""

    plan: Plan
    question: TaskDocument | None = None
    command: str = ""

    @property
    def fleet(self) -> Fleet:
        """The fleet that the plan deploys."""
        return self.plan.fleet

    @property
    def fleets(self) -> Mapping[str, Fleet]:
        return {self.plan.fleet.llm.name: self.plan.fleet}

    @property
    def bill(self) -> Bill:
        """What is paid for the fleet, on the nodes on which its workers are placed."""
        return self.plan.bill

    @property
    def status(self) -> str:
        """One of `Status` in documents/certificate.py, such as "certified"."""
        return self.plan.status

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures, as sentences."""
        return tuple(fact_sentences_of(self.plan.warnings))

    def headline(self) -> str:
        return words.answer_sentence(self.plan)

    def sentences(self) -> list[str]:
        level0 = words.level0_line(self.plan.certificate)
        limit_lines = [
            f"{line.limit.label}: {', limit '.join(words.value_and_limit(line))}"
            for line in self.plan.verdict.lines
        ]
        # If the plan has several answers (on paper, production, with a loss), level 0 is about the one on
        # paper.
        of_fleets = "on paper, of" if self.plan.certificate.answers else "of"
        return [*limit_lines, f"{of_fleets} fleets with one worker type per pool {level0}", *self.warnings]

    def report(self) -> str:
        return render_report(self.plan, command=self.command)

    def to_dict(self) -> dict[str, Any]:
        return output.to_json(self.plan)

    def files(self, *, png: bool = False, pages: bool = True) -> dict[str, str | bytes]:
        pictures = output.chart_pictures(figures.all_figures(self.plan)) if png and pages else {}
        return {**output.render(self.plan, command=self.command, pages=pages), **pictures}

    def _outdated(self) -> tuple[str, ...]:
        return output.OUTDATED


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SharedPlanResult(PlanFiles):
    """A plan for several LLMs on one stock; `plans` holds the plan of each. `command` is as in PlanResult."""

    shared: SharedPlan
    question: TaskDocument | None = None
    command: str = ""

    @property
    def plans(self) -> dict[str, PlanResult]:
        """The plan of each LLM, by its name in the question."""
        return {name: PlanResult(plan, None, self.command) for name, plan in self.shared.plans.items()}

    @property
    def fleets(self) -> Mapping[str, Fleet]:
        return {name: plan.fleet for name, plan in self.shared.plans.items()}

    @property
    def bill(self) -> Bill:
        """What is paid for all fleets, on the nodes that they share."""
        return self.shared.bill

    @property
    def status(self) -> str:
        """One of `Status` in documents/certificate.py, such as "certified"."""
        return self.shared.status

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures, as sentences."""
        return tuple(fact_sentences_of(self.shared.warnings))

    def headline(self) -> str:
        return several_llms_report.answer_sentence(self.shared)

    def sentences(self) -> list[str]:
        return [*several_llms_report.proof_lines(self.shared), *self.warnings]

    def report(self) -> str:
        return several_llms_report.render_report(self.shared)

    def to_dict(self) -> dict[str, Any]:
        return several_llms_report.plan_document(self.shared)

    def files(self, *, png: bool = False, pages: bool = True) -> dict[str, str | bytes]:
        return several_llms_report.render(self.shared, command=self.command, png=png, pages=pages)

    def _outdated(self) -> tuple[str, ...]:
        return tuple(several_llms_report.outdated(self.shared))
