"""`plan`: the question, its traffic and a folder in; the plan's files and a short answer out. Imports within
functions keep other commands fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.commands.command_output import (
    Progress,
    at_work,
    print_warnings,
    refuse_to_overwrite,
    stopped_after,
    write_best_so_far,
)
from planner.commands.first_screen import print_first_screen, print_next, print_shared_screen
from planner.commands.printed_tables import print_json, print_lines, print_rows, print_table, slo_rows
from planner.errors import InputError, OutOfTimeError, PlannerError
from planner.search.problem.stages import Stage
from planner.units import count_text, in_unit, show_digits, show_percent

if TYPE_CHECKING:
    from planner.api.questions import TaskDocument
    from planner.api.results import PlanResult
    from planner.fleet import Fleet
    from planner.search.evidence.plan import Plan
    from planner.search.oracle.resuming import VerdictFile
    from planner.search.problem.plan_problem import SearchProgress
    from planner.search.several.shared_plan import SharedPlan
    from planner.traffic.trace import Trace


# How long the last simulation and the files of a plan take, measured on one core: REPORT_S, and
# REPORT_REQUEST_S more for each request.
REPORT_S, REPORT_REQUEST_S = 2.0, 1.3e-5
UNFINISHED_STATUSES = ("best found", "not for production")  # A plan of this status ends with UNFINISHED_CODE.
UNFINISHED_CODE = OutOfTimeError.exit_code
NO_GPU_NAMED = (
    "no GPU was named, so those above were compared (--verbose: those left out): --gpus h100,l40s takes two"
)
QUESTION_FILE = "slo.yaml"  # The question is written beside the answer if it came from options.


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of one run (`plan --help`). `trace` may be missing if `slo` describes traffic or names a
    trace for every LLM. Without `slo` the question is `question_options`; without `out` no file is written.
    """

    slo: Path | None
    trace: Path | None
    out: Path | None
    catalog: Path | None
    seed: int
    time_limit_s: float
    explain: bool
    prove: bool
    per_gpu: bool | None
    drop_invalid: bool
    png: bool
    json_output: bool
    question_options: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()  # `question_options` as flags, for `to_command_line`.
    verbose: bool = False
    quiet: bool = False
    resume: bool = False
    executor: str | None = None
    address: str | None = None
    target: str | None = None

    def to_command_line(self) -> str:
        """The command that makes this plan; the report quotes it."""
        from planner.reports.words import command_line, option_flags

        flag_texts = option_flags(
            explain=self.explain,
            prove=self.prove,
            per_gpu=self.per_gpu,
            no_per_gpu=self.per_gpu is False,
            drop_invalid=self.drop_invalid,
        )
        return command_line(
            self.slo,
            self.trace,
            self.catalog,
            seed=self.seed,
            time_limit_s=self.time_limit_s,
            flags=(*self.flags, *flag_texts, *(() if self.target is None else ("--target", self.target))),
        )


def plan_one(options: PlanOptions) -> None:
    """Plan one LLM; exit code 4 if the search did not come to its end in time."""
    from planner.files.checked_files import reserve_folder

    with (
        nullcontext() if options.out is None else reserve_folder(options.out),
        at_work(options.executor, options.address),
    ):
        _plan_one(options)


def _plan_one(options: PlanOptions) -> None:
    """Like `plan_one`, after the folder is reserved and the executor is set."""
    from planner.api.inputs import requests_of
    from planner.api.planning import answer_question
    from planner.api.questions import read_task
    from planner.commands.described_command import errors_of_options
    from planner.documents.catalog import read_catalog
    from planner.documents.log_columns import log_options_of
    from planner.files.interrupts import saving_on_interrupt
    from planner.files.scarce_resources import missing_resource
    from planner.reports import output
    from planner.search.evidence.long_traces import searched_requests
    from planner.search.oracle.verdict_cache import VerdictCache
    from planner.search.oracle.work_clock import work_limit_s
    from planner.studies.what_if import Study

    if options.out is not None:
        refuse_to_overwrite(
            [options.out / name for name in (*output.NAMES, QUESTION_FILE)], options.slo, options.trace
        )
    with Progress(quiet=options.quiet, limit_s=options.time_limit_s) as progress:
        catalog = read_catalog(options.catalog)
        from_options = options.question_options  # None: the question is in a file.
        with nullcontext() if from_options is None else errors_of_options():
            question = read_task(options.slo if from_options is None else from_options, catalog)
            if options.per_gpu is not None:
                question = question.replace({"fleet.per_gpu": options.per_gpu})
            if options.target is not None:
                question = question.replace({"deploy": {"target": options.target}})
            task = question.task()
        log_options = log_options_of(question.document, question.path)
        with stopped_after(options.time_limit_s, lambda: ": the traffic is not read yet"):
            requests = requests_of(
                options.trace,
                task.described,
                seed=options.seed,
                drop_invalid=options.drop_invalid,
                log_options=log_options,
            )
        print_warnings((*requests.warnings, *task.warnings))
        progress(f"{count_text(len(requests), 'request')} of {requests.name}")
        verdict_file = _open_verdict_file(options, question, requests)
        study = Study(
            requests, catalog, options.seed, options.time_limit_s, progress, VerdictCache(file=verdict_file)
        )
        searched_count = searched_requests(task, requests, work_limit_s(options.time_limit_s))
        # Reading (`taken_s()`) and writing (`report_s`, CPU time) are taken off the search's time limit.
        writing_s = 0.0 if options.out is None else report_s(searched_count) * progress.wall_per_cpu()
        study.taken_s = progress.taken_s() + writing_s
        best_so_far = BestSoFar(options.out)
        try:
            with saving_on_interrupt(best_so_far.write_fleet):
                planned = answer_question(
                    question,
                    study,
                    explain=options.explain,
                    prove=options.prove,
                    watch=best_so_far.note_progress,
                    on_paper=lambda _, fleet: progress.print_estimate(estimate_text(fleet)),
                )
        except BaseException as error:  # Also MemoryError, and what process pools raise instead of it.
            if (missing := missing_resource(error)) is None:
                raise
            raise PlannerError(
                f"this machine, or a limit on the process, does not give enough: the {missing} is short; "
                f"{best_so_far.write_fleet()}; give it more, or ask for less (traffic: window, "
                "--executor serial)"
            ) from None
        written: tuple[str, ...] = ()
        if options.out is not None:
            progress(Stage("writing the report", "report"))
            written = _save_plan(planned, options, options.out)
        if verdict_file is not None and planned.status not in UNFINISHED_STATUSES:
            verdict_file.remove()  # Nothing is left to resume.
    if options.json_output:
        print_json(planned.to_dict() | ({} if options.out is None else {"directory": str(options.out)}))
    else:
        _print_plan(planned.plan, options, written)
    if planned.status in UNFINISHED_STATUSES:
        raise typer.Exit(UNFINISHED_CODE)


def _print_plan(plan: Plan, options: PlanOptions, written: tuple[str, ...]) -> None:
    """Print the answer as the options want it, and the files that were `written`."""
    print_first_screen(plan)
    if options.verbose or options.explain:
        _print_details(plan, explain=options.explain)
    if options.question_options is not None and "--gpus" not in options.flags:
        print_lines(NO_GPU_NAMED)
    if options.out is not None:
        _print_written(options.out, written)
    print_next(plan.trace, options.out, verbose=options.verbose)


def _save_plan(planned: PlanResult, options: PlanOptions, out: Path) -> tuple[str, ...]:
    """Write the plan's files, and the question if it came from options; returns their names."""
    from planner.files.checked_files import to_yaml, write_file
    from planner.files.interrupts import saving_on_interrupt

    with saving_on_interrupt(interrupt_message(out)):
        written = replace(planned, command=options.to_command_line()).save(out, png=options.png)
    if options.question_options is None:
        return written
    deploy = {} if options.target is None else {"deploy": {"target": options.target}}
    write_file(out / QUESTION_FILE, to_yaml({**options.question_options, **deploy}))
    return (*written, QUESTION_FILE)


def estimate_text(fleet: Fleet) -> str:
    """The line that shows the fleet on paper as an estimate, long before production is found."""
    from planner.reports.words import describe_fleet
    from planner.search.problem.bill import bill_fleet

    return (
        f"estimate: on paper {describe_fleet(fleet)} would do, {bill_fleet(fleet).usd_per_h:,.2f} USD/h; "
        "the fleet for production is looked for now, and may cost more"
    )


def report_s(requests: int) -> float:
    """A rough CPU time [s] to simulate a plan of this many requests once and to write its files."""
    return REPORT_S + REPORT_REQUEST_S * requests


def _open_verdict_file(options: PlanOptions, question: TaskDocument, requests: Trace) -> VerdictFile | None:
    """The file in which this run stores the verdicts of its simulations; --resume loads those of an earlier
    run. None without -o.
    """
    from planner.search.oracle.resuming import VerdictFile, question_digest

    if options.out is None:
        if options.resume:
            raise InputError("--resume: name the folder of the run that is to go on with -o")
        return None
    # With other values of these options the search simulates other fleets, so a run cannot be resumed.
    catalog = None if options.catalog is None else str(options.catalog)
    run_settings = (options.prove, options.explain, options.per_gpu, catalog)
    verdict_file = VerdictFile(
        options.out, question_digest(question.document, requests, options.seed, *run_settings)
    )
    if options.resume:
        verdict_file.load()
    return verdict_file


class BestSoFar:
    """The best fleet so far of a search; an interrupt writes it into the folder `out`."""

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.latest: SearchProgress | None = None

    def note_progress(self, latest: SearchProgress) -> None:
        """Remember the latest state of the search that has a fleet."""
        if latest.fleet is not None:
            self.latest = latest

    def write_fleet(self) -> str:
        """Write the fleet into `out`, if there are both. Returns a sentence on the fleet and the file."""
        if self.latest is None or self.latest.fleet is None:
            return "no fleet was found yet"
        from planner.reports.words import describe_fleet
        from planner.search.problem.bill import bill_fleet

        fleet = self.latest.fleet()  # Built only now, as that may take time (`SearchProgress`).
        message = (
            f"the best fleet so far is {describe_fleet(fleet)}, {bill_fleet(fleet).usd_per_h:,.2f} USD/h"
        )
        return write_best_so_far(fleet, self.out, message)


def interrupt_message(out: Path) -> Callable[[], str]:
    """A function for `saving_on_interrupt`: it says whether this run has written its plan and report to
    `out`.
    """
    files = out / "plan.yaml", out / "report.html"

    # Files are replaced, never changed, so a new inode number shows that this run wrote the file.
    def inode_numbers() -> list[int | None]:
        """The inode number of each file; None for a missing file."""
        return [path.stat().st_ino if path.exists() else None for path in files]

    before = inode_numbers()

    def describe_written() -> str:
        """Which of the files this run has written by now."""
        has_plan, has_report = (
            now not in (None, then) for now, then in zip(inode_numbers(), before, strict=True)
        )
        if not has_plan:
            return f"a plan was found, but is not in {out}"
        return f"the plan is in {out}" + ("" if has_report else f", without its report: `plan report {out}`")

    return describe_written


def plan_several(options: PlanOptions) -> None:
    """Plan all LLMs of `slo` together and write a folder for each; exit code as for one."""
    from planner.api.planning import plan
    from planner.api.results import SharedPlanResult
    from planner.documents.catalog import read_catalog
    from planner.documents.several_llms_question import read_question
    from planner.files.checked_files import reserve_folder
    from planner.files.interrupts import saving_on_interrupt
    from planner.reports.several_llms_report import NAMES

    for option, value, advice in (
        ("--explain", options.explain, "without it the answer says what more of a shared limit saves"),
        ("--resume", options.resume, "run without it, or plan each LLM by itself"),
        ("--target", options.target, f"write deploy: {{target: {options.target}}} beside llms"),
        ("--prove", options.prove, "leave it out, or plan each LLM by itself"),
        ("--per-gpu", options.per_gpu, "leave it out, or plan each LLM by itself"),
    ):
        if value:
            raise InputError(f"{option}: is for one LLM; {advice}")
    assert options.slo is not None and options.out is not None  # cli.py refuses the command without them.
    with (
        reserve_folder(options.out),
        at_work(options.executor, options.address),
        Progress(quiet=options.quiet, limit_s=options.time_limit_s) as progress,
    ):
        catalog = read_catalog(options.catalog)
        question = read_question(
            options.slo, options.trace, catalog, seed=options.seed, drop_invalid=options.drop_invalid
        )
        print_warnings(
            dict.fromkeys(
                line for entry in question.entries for line in (*entry.trace.warnings, *entry.task.warnings)
            )
        )
        folders = (options.out, *(options.out / entry.name for entry in question.entries))
        outputs = [folder / name for folder in folders for name in (*NAMES, "requests.csv")]
        refuse_to_overwrite(outputs, options.slo, *question.files)
        for entry in question.entries:
            progress(f"{entry.name}: {len(entry.trace):,} requests of {entry.trace.name}")
        with saving_on_interrupt(lambda: "several LLMs have no plan before the search for all of them ends"):
            shared_plan = plan(
                question,
                catalog=catalog,
                seed=options.seed,
                time_limit_s=options.time_limit_s,
                progress=progress,
            )
        assert isinstance(shared_plan, SharedPlanResult)
        progress("writing the reports")
        with saving_on_interrupt(interrupt_message(options.out)):
            replace(shared_plan, command=options.to_command_line()).save(options.out, png=options.png)
    if options.json_output:
        print_json(shared_plan.to_dict() | {"directory": str(options.out)})
    else:
        _print_several(shared_plan.shared, options.out, verbose=options.verbose)
    if shared_plan.status in UNFINISHED_STATUSES:
        raise typer.Exit(UNFINISHED_CODE)


def _print_details(plan: Plan, *, explain: bool) -> None:
    """Print what --verbose or --explain adds to the first screen."""
    from planner.reports import answer_sentences, words
    from planner.reports.fact_sentences import fact_sentence, router_text

    certificate = plan.certificate
    print_lines(*answer_sentences.scenario_lines(plan))
    if certificate.deploy is not None:
        for fact in certificate.routers:
            print_lines(f"planned for {fact.target}, {router_text(fact)}: {fact_sentence(fact)}")
    if certificate.answers:
        head, rows = answer_sentences.answer_rows(plan)
        print_table(head, rows, "answers")
    _print_tables(plan)
    _print_proof(plan)
    _print_prefixes(plan)
    if plan.throughput is not None:
        print_lines(words.throughput_line(plan.throughput))
    node_count = 0 if plan.placement is None else len(plan.placement.nodes)
    nodes = f"; {count_text(node_count, 'node')}" if node_count else ""
    print_lines(
        f"{show_digits(plan.usd_per_million_tokens, 3)} USD per million tokens, "
        f"{show_digits(plan.usd_per_million_output_tokens, 3)} USD per million of output{nodes}"
    )
    for repeats in certificate.repeats:
        if repeats.kept == repeats.runs or repeats.decision == "holds":  # The rest are warnings (draws.py).
            print_lines(fact_sentence(repeats))
    if explain:
        print_rows([{"what binds, and what limits cost": line} for line in words.binding_lines(plan)], "")


def _print_proof(plan: Plan) -> None:
    """Print the proof for the fleet on paper, the alternatives, and the GPUs left out as unchecked."""
    from planner.documents.facts import UncheckedLeftOut
    from planner.reports.fact_sentences import fact_sentence, fact_sentences_of
    from planner.reports.words import (
        alternative_note,
        cheaper_text,
        describe_fleet,
        level0_proof,
        unpriced_text,
    )

    certificate = plan.certificate
    proof = level0_proof(is_exact=certificate.level0_exact, is_exhausted=certificate.level0_exhausted)
    level0_text = "none found"
    if certificate.has_level0:
        level0_text = f"{in_unit(certificate.level0, certificate.unit)}, {proof}"
    print_lines(
        f"on paper, one worker type per pool: {level0_text}; any mix: "
        f"{certificate.value:.6g}; policy-free bound: {certificate.bound:.6g} "
        f"(gap {show_percent(certificate.gap_frac)}); {count_text(certificate.simulations, 'simulation')}"
    )
    if not certificate.level0_exact:
        print_lines(f"  {cheaper_text(certificate)}; --prove simulates the others")
        for pruning_rule in fact_sentences_of(certificate.assumed):
            print_lines(f"  {pruning_rule}")
    for alternative in plan.alternatives:
        value = unpriced_text(alternative, certificate.unit) or (
            f"{in_unit(alternative.objective, certificate.unit)} ({alternative_note(alternative, plan)})"
        )
        if alternative.fleet is not None and alternative.is_of_one_gpu_type:
            value += f": {describe_fleet(alternative.fleet)}"
        print_lines(f"  {alternative.label}: {value}")
    for fact in certificate.assumptions:  # The report shows the others too.
        if isinstance(fact, UncheckedLeftOut):
            print_lines(fact_sentence(fact))


def _print_prefixes(plan: Plan) -> None:
    """Print the share of prompt tokens that hit in each pool's caches, and how pinned prefixes are placed."""
    from planner.documents.facts import PinsPlaced
    from planner.reports.fact_sentences import fact_sentence
    from planner.reports.prefix_values import keep_alive_text

    for pool in plan.prefixes:
        hits = (pool.simulated_hit_frac, pool.plan.hit_frac, pool.possible_hit_frac)
        simulated, planned, possible = (show_percent(share) for share in hits)
        print_lines(
            f"prefix caches of {pool.plan.pool.name}: {simulated} of input tokens hit in simulation, "
            f"{planned} planned, once warm, {possible} possible from cold"
        )
        if pool.keep_alive is not None:
            print_lines(keep_alive_text(pool.keep_alive))
    for fact in plan.certificate.binding:
        if isinstance(fact, PinsPlaced):
            print_lines(fact_sentence(fact))


def _print_written(out: Path, written: tuple[str, ...]) -> None:
    """Print the files in `out` that were written; of files in a subfolder only the subfolder."""
    # "manifests/" of "manifests/ray/serve.yaml".
    names = dict.fromkeys("".join(name.partition("/")[:2]) for name in written)
    print_lines(f"written to {out}: {', '.join(names)}")


def _print_tables(plan: Plan) -> None:
    """Print the fleet, the SLO, and the bill by other terms of payment."""
    from planner.reports.output import verdict_document
    from planner.reports.words import commitment_rows

    # If GPUs of a node stay idle, the bill is for whole nodes, and more than the sum over the pools.
    by_gpu = "USD/h by the GPU" if plan.bill.idle_gpus else "USD/h"
    has_drafts = any(pool.type.speculation for pool in plan.fleet.pools)
    has_ranks = any(pool.type.dp > 1 for pool in plan.fleet.pools)
    rows = [
        {
            "pool": pool.name,
            "role": pool.role,
            "workers": pool.count,
            "GPU": pool.type.gpu.name,
            "TP": f"{pool.type.tp} EP" if pool.type.ep else f"{pool.type.tp}",
            **({"DP": pool.type.dp} if has_ranks else {}),
            "PP": pool.type.pp,
            "tokens/step": pool.type.max_num_batched_tokens,
            # One token of a step is no draft.
            **({"drafts": pool.type.step_tokens - 1} if has_drafts else {}),
            by_gpu: round(pool.count * pool.type.price_usd_per_h, 2),
        }
        for pool in plan.fleet.pools
    ]
    print_rows(rows, "fleet")
    print_rows(slo_rows(verdict_document(plan.verdict), plan.slo), "SLO")
    if plan.certificate.commitments:
        head, terms = commitment_rows(plan)
        print_table(head, terms, "the same fleet by other terms")


def _print_several(shared_plan: SharedPlan, out: Path, *, verbose: bool) -> None:
    """Print the answer for several LLMs, and where its files are."""
    print_shared_screen(shared_plan)
    if verbose:
        _print_shared_details(shared_plan)
    folders = ", ".join(f"{name}/" for name in shared_plan.plans)
    print_lines(f"written to {out}: plan.yaml, certificate.json, report.html; a whole plan each in {folders}")


def _print_shared_details(shared_plan: SharedPlan) -> None:
    """Print what --verbose adds to the first screen of several LLMs."""
    from planner.reports.several_llms_report import answer_rows, fleet_rows, limit_rows, proof_lines

    for title, (head, rows) in (
        ("fleets", fleet_rows(shared_plan)),
        ("answers", answer_rows(shared_plan)),
        ("shared limits", limit_rows(shared_plan)),
    ):
        if rows:
            print_table(head, rows, title)
    for line in proof_lines(shared_plan):
        print_lines(line)
