"""`plan`: the question, its traffic and a folder in; the plan's files and a short answer out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from planner.commands.common import (
    Progress,
    at_work,
    keep_inputs,
    print_json,
    print_rows,
    say_first,
    slo_rows,
    stdout_console,
    stopped_after,
)
from planner.commands.first_screen import print_first_screen, print_next, print_shared_screen
from planner.errors import InputError, PlannerError
from planner.search.stages import Stage

if TYPE_CHECKING:
    from planner.face.questions import TaskDocument
    from planner.search.plan import Plan
    from planner.search.problem import Standing
    from planner.search.resuming import Decided
    from planner.search.together import SharedPlan
    from planner.traffic.trace import Trace


REPORT_S, REPORT_REQUEST_S = 2.0, 1.3e-5  # that the plan's own simulation and its files take, on one core
UNFINISHED = ("best found", "not for production")  # what a plan that ends with exit code 4 is called
ASKED = "slo.yaml"  # the question, beside the answer, where it came from options


@dataclass(frozen=True, slots=True)
class Wish:
    """The options of one run; `trace` may be missing where `slo` names one for every LLM, or describes the
    traffic. Without `slo` the question is `asked`, and without `out` no file is written.
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
    asked: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()  # The flags of the command line that ask the question.
    verbose: bool = False
    quiet: bool = False
    resume: bool = False
    executor: str | None = None
    address: str | None = None
    target: str | None = None

    def command(self) -> str:
        from planner.reports.words import command_line, flags

        asked = flags(
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
            flags=(*self.flags, *asked, *(() if self.target is None else ("--target", self.target))),
        )


def plan_one(wish: Wish) -> None:
    """Plan one LLM; exit code 4 if the search did not come to its end in time."""
    from planner.io.files import reserved

    with nullcontext() if wish.out is None else reserved(wish.out), at_work(wish.executor, wish.address):
        _plan_one(wish)


def _plan_one(wish: Wish) -> None:
    from planner.documents.reading import reading_of
    from planner.face.inputs import read_catalog, requests_of
    from planner.face.planning import answered
    from planner.face.questions import read_task
    from planner.io.files import to_yaml, write_file
    from planner.io.interrupts import last_words
    from planner.io.wants import want_of
    from planner.reports import output
    from planner.search.long_traces import searched_requests
    from planner.search.oracle import Answers
    from planner.studies.whatif import Study

    if wish.out is not None:
        keep_inputs([wish.out / name for name in (*output.NAMES, ASKED)], wish.slo, wish.trace)
    with Progress(quiet=wish.quiet, limit_s=wish.time_limit_s) as progress:
        known = read_catalog(wish.catalog)
        question = read_task(wish.slo if wish.asked is None else wish.asked, known)
        if wish.per_gpu is not None:
            question = question.replace({"fleet.per_gpu": wish.per_gpu})
        if wish.target is not None:
            question = question.replace({"deploy": {"target": wish.target}})
        described = question.task().described
        how = reading_of(question.document, question.path)
        with stopped_after(wish.time_limit_s, lambda: ": the traffic is not read yet"):
            requests = requests_of(
                wish.trace, described, seed=wish.seed, drop_invalid=wish.drop_invalid, how=how
            )
        say_first((*requests.warnings, *question.task().doubts))
        progress(f"{len(requests)} requests of {requests.name}")
        decided = _decided(wish, question, requests)
        study = Study(requests, known, wish.seed, wish.time_limit_s, progress, Answers(decided=decided))
        searched = searched_requests(question.task(), requests, wish.time_limit_s)
        study.taken_s = progress.taken_s()
        study.taken_s += 0.0 if wish.out is None else report_s(searched) * progress.slowness()
        best = BestSoFar(wish.out)
        try:
            with last_words(best.save):
                found = answered(question, study, explain=wish.explain, prove=wish.prove, watch=best.see)
        except BaseException as error:
            if (want := want_of(error)) is None:
                raise
            raise PlannerError(
                f"this machine, or a limit on the process, does not give enough: the {want} is short; "
                f"{best.save()}; give it more, or ask for less (traffic: window, --executor serial)"
            ) from None
        written: tuple[str, ...] = ()
        if wish.out is not None:
            progress(Stage("writing the report", "report"))
            with last_words(told_of(wish.out)):
                written = replace(found, command=wish.command()).save(wish.out, png=wish.png)
            if wish.asked is not None:
                deploy = {} if wish.target is None else {"deploy": {"target": wish.target}}
                write_file(wish.out / ASKED, to_yaml({**wish.asked, **deploy}))
                written = (*written, ASKED)
        if decided is not None and found.status not in UNFINISHED:
            decided.remove()
    if wish.json_output:
        print_json(found.to_dict() | ({} if wish.out is None else {"directory": str(wish.out)}))
    else:
        print_first_screen(found.plan)
        if wish.verbose or wish.explain:
            _print_details(found.plan, explain=wish.explain)
        if wish.asked is not None and "--gpus" not in wish.flags:
            console = stdout_console(soft_wrap=True)
            console.print(
                "planned on h100-80g alone, as no GPUs were named: --gpus any tries all", markup=False
            )
        if wish.out is not None:
            _print_written(wish.out, written)
        print_next(wish.out, verbose=wish.verbose)
    if found.status in UNFINISHED:
        raise typer.Exit(4)


def report_s(requests: int) -> float:
    """About how long it takes to simulate a plan and to write its files, for so many requests in them."""
    return REPORT_S + REPORT_REQUEST_S * requests


def _decided(wish: Wish, question: TaskDocument, requests: Trace) -> Decided | None:
    """Where the run keeps what it decides; with --resume what an earlier one has left there."""
    from planner.search.resuming import Decided, question_digest

    if wish.out is None:
        if wish.resume:
            raise InputError("--resume: name the folder of the run that is to go on with -o")
        return None
    asked = (wish.prove, wish.explain, wish.per_gpu, None if wish.catalog is None else str(wish.catalog))
    decided = Decided(wish.out, question_digest(question.document, requests, wish.seed, *asked))
    if wish.resume:
        decided.load()
    return decided


class BestSoFar:
    """The best fleet that a search has found, which an interrupt leaves in the folder `out`."""

    def __init__(self, out: Path | None) -> None:
        self.out = out
        self.standing: Standing | None = None

    def see(self, standing: Standing) -> None:
        if standing.fleet is not None:
            self.standing = standing

    def save(self) -> str:
        """Write it down; what to say of it."""
        if self.standing is None or self.standing.fleet is None:
            return "no fleet was found yet"
        from planner.documents.fleet import fleet_document
        from planner.io.files import to_yaml, write_file
        from planner.reports.output import BEST_SO_FAR
        from planner.reports.words import describe

        fleet = self.standing.fleet()
        said = f"the best fleet so far is {describe(fleet)}, {fleet.price_usd_per_h:.2f} USD/h"
        if self.out is None:
            return said
        head = f"# The search was interrupted; not certified: {said}.\n"
        write_file(self.out / BEST_SO_FAR, head + to_yaml(fleet_document(fleet)))
        return f"{said}: {self.out / BEST_SO_FAR}"


def told_of(out: Path) -> Callable[[], str]:
    """What an interrupt says while a plan is written into `out`: whether it is there, and its report."""
    files = out / "plan.yaml", out / "report.html"

    def stamps() -> list[int | None]:  # a file is never changed, another takes its place
        return [path.stat().st_ino if path.exists() else None for path in files]

    before = stamps()

    def said() -> str:
        is_new = [now not in (None, then) for now, then in zip(stamps(), before, strict=True)]
        if not is_new[0]:
            return f"a plan was found, but is not in {out}"
        return f"the plan is in {out}" + ("" if is_new[1] else f", without its report: `plan report {out}`")

    return said


def plan_several(wish: Wish) -> None:
    """Plan all LLMs of `slo` together and write a folder for each; exit code as for one."""
    from planner.documents.together import read_question
    from planner.face.inputs import read_catalog
    from planner.face.planning import plan
    from planner.face.results import SharedPlanResult
    from planner.io.files import reserved
    from planner.io.interrupts import last_words
    from planner.reports.together import NAMES

    if wish.explain:
        raise InputError("--explain: is for one LLM; what more of a shared limit saves is said without it")
    if wish.resume:
        raise InputError("--resume: is for one LLM; run without it, or plan each LLM by itself")
    if wish.target is not None:
        raise InputError(f"--target: is for one LLM; write deploy: {{target: {wish.target}}} beside llms")
    if wish.prove:
        raise InputError("--prove: is for one LLM; leave it out, or plan each LLM by itself")
    if wish.per_gpu:
        raise InputError("--per-gpu: is for one LLM; leave it out, or plan each LLM by itself")
    assert wish.slo is not None and wish.out is not None
    with (
        reserved(wish.out),
        at_work(wish.executor, wish.address),
        Progress(quiet=wish.quiet, limit_s=wish.time_limit_s) as progress,
    ):
        known = read_catalog(wish.catalog)
        question = read_question(wish.slo, wish.trace, known, drop_invalid=wish.drop_invalid)
        say_first(
            dict.fromkeys(
                line for part in question.parts for line in (*part.trace.warnings, *part.task.doubts)
            )
        )
        folders = (wish.out, *(wish.out / part.name for part in question.parts))
        for given in (wish.slo, *question.files):
            keep_inputs([folder / name for folder in folders for name in (*NAMES, "requests.csv")], given)
        for part in question.parts:
            progress(f"{part.name}: {len(part.trace)} requests of {part.trace.name}")
        found = plan(
            question, catalog=known, seed=wish.seed, time_limit_s=wish.time_limit_s, progress=progress
        )
        assert isinstance(found, SharedPlanResult)
        progress("writing the reports")
        with last_words(told_of(wish.out)):
            replace(found, command=wish.command()).save(wish.out, png=wish.png)
    if wish.json_output:
        print_json(found.to_dict() | {"directory": str(wish.out)})
    else:
        _print_several(found.shared, wish.out, verbose=wish.verbose)
    if found.status in UNFINISHED:
        raise typer.Exit(4)


def _print_details(found: Plan, *, explain: bool) -> None:
    from planner.documents.facts import UncheckedLeftOut
    from planner.reports import answers, words
    from planner.reports.facts import alternative_note, router_text, sentence, sentences
    from planner.reports.words import describe, excluded_text, level0_proof, unpriced

    console = stdout_console(soft_wrap=True)
    certificate = found.certificate
    for line in answers.futures_lines(found):
        console.print(line, markup=False)
    if certificate.deploy is not None:
        for under in certificate.routers:
            said = f"planned for {under.target}, {router_text(under)}: {sentence(under)}"
            console.print(said, markup=False)
    if certificate.answers:
        head, rows = answers.answer_rows(found)
        print_rows([dict(zip(head, row, strict=True)) for row in rows], "answers")
    _print_tables(found)
    proof = level0_proof(is_exact=certificate.level0_exact, is_exhausted=certificate.level0_exhausted)
    is_found = math.isfinite(certificate.level0)
    level0 = f"{certificate.level0:.6g} {certificate.unit}, {proof}" if is_found else "none found"
    console.print(
        f"on paper, level 0 (one worker type per pool): {level0}; any mix: "
        f"{certificate.value:.6g}; policy-free bound: {certificate.bound:.6g} "
        f"(gap {100 * certificate.gap_frac:.1f} %); {certificate.simulations} simulations",
        markup=False,
    )
    if not certificate.level0_exact:
        fails = excluded_text(certificate.cheaper, certificate.cheaper_simulated)
        console.print(f"  {fails}; --prove simulates the others", markup=False)
        for said in sentences(certificate.assumed):
            console.print(f"  {said}", markup=False)
    for alternative in found.alternatives:
        value = unpriced(alternative, certificate.unit) or (
            f"{alternative.objective:.6g} {certificate.unit} "
            f"({alternative_note(alternative, certificate.value)})"
        )
        if alternative.fleet is not None and alternative.label.startswith("only "):
            value += f": {describe(alternative.fleet)}"
        console.print(f"  {alternative.label}: {value}", markup=False)
    for fact in certificate.assumptions:
        if isinstance(fact, UncheckedLeftOut):
            console.print(sentence(fact), markup=False)
    for pool in found.prefixes:
        hits = (pool.simulated_hit_frac, pool.plan.hit_frac, pool.possible_hit_frac)
        simulated, planned, possible = (f"{100 * share:.1f} %" for share in hits)
        console.print(
            f"prefix caches of {pool.plan.pool.name}: {simulated} of input tokens hit in simulation, "
            f"{planned} planned, once warm, {possible} possible from cold",
            markup=False,
        )
    if found.throughput is not None:
        console.print(words.throughput_line(found.throughput), markup=False)
    count = 0 if found.placement is None else len(found.placement.nodes)
    nodes = f"; {count} node{'' if count == 1 else 's'}" if count else ""
    console.print(
        f"{found.usd_per_million_tokens:.3g} USD per million tokens, "
        f"{found.usd_per_million_output_tokens:.3g} USD per million of output{nodes}",
        markup=False,
    )
    for repeats in certificate.repeats:
        if repeats.kept == repeats.runs or repeats.decision == "holds":  # else it is among the warnings
            console.print(sentence(repeats), markup=False)
    if explain:
        print_rows(
            [{"what binds, and what limits cost": line} for line in sentences(certificate.binding)], ""
        )


def _print_written(out: Path, written: tuple[str, ...]) -> None:
    names = dict.fromkeys(f"{head}{slash}" for head, slash, _ in (name.partition("/") for name in written))
    stdout_console(soft_wrap=True).print(f"written to {out}: {', '.join(names)}", markup=False)


def _print_tables(found: Plan) -> None:
    from planner.reports.output import verdict_document
    from planner.reports.words import commitment_rows

    by_gpu = "USD/h by the GPU" if found.bill.idle_gpus else "USD/h"
    has_drafts = any(pool.type.speculation for pool in found.fleet.pools)
    has_ranks = any(pool.type.dp > 1 for pool in found.fleet.pools)
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
            **({"drafts": pool.type.step_tokens - 1} if has_drafts else {}),
            by_gpu: round(pool.count * pool.type.price_usd_per_h, 2),
        }
        for pool in found.fleet.pools
    ]
    print_rows(rows, "fleet")
    print_rows(slo_rows(verdict_document(found.verdict), found.slo), "SLO")
    if found.certificate.commitments:
        head, terms = commitment_rows(found)
        print_rows([dict(zip(head, row, strict=True)) for row in terms], "the same fleet by other terms")


def _print_several(found: SharedPlan, out: Path, *, verbose: bool) -> None:
    print_shared_screen(found)
    if verbose:
        _print_shared_details(found)
    folders = ", ".join(f"{name}/" for name in found.plans)
    stdout_console(soft_wrap=True).print(
        f"written to {out}: plan.yaml, certificate.json, report.html; a whole plan each in {folders}",
        markup=False,
    )


def _print_shared_details(found: SharedPlan) -> None:
    from planner.reports.together import answer_rows, fleet_rows, limit_rows, proof_lines

    for title, (head, rows) in (
        ("fleets", fleet_rows(found)),
        ("answers", answer_rows(found)),
        ("shared limits", limit_rows(found)),
    ):
        if rows:
            print_rows([dict(zip(head, row, strict=True)) for row in rows], title)
    for line in proof_lines(found):
        stdout_console(soft_wrap=True).print(line, markup=False)
