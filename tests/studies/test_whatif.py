"""Changed questions: each answer is that of a plan from scratch, and differences have the right sign."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from plans import CATALOG, mixed
from questions import DOCUMENT, question, traffic
from shares import some
from typer.testing import CliRunner

from planner.cli import app
from planner.commands.what_if_command import _plan_cell
from planner.documents.catalog import read_catalog
from planner.documents.facts import HEADROOM_MOST_FRAC, HEADROOM_STEP_FRAC
from planner.documents.safety import Safety
from planner.documents.task import parse_task
from planner.domain import Limit, Slo
from planner.errors import InfeasibleError, InputError, MostKept
from planner.reports.fact_sentences import fact_sentence, fact_sentences_of
from planner.search.evidence.certify import plan
from planner.search.oracle.verdict_cache import VerdictCache, is_looser
from planner.simulator import judge_slo, simulate
from planner.studies.what_if import (
    ChangedQuestion,
    Study,
    StudyAnswer,
    _reason_of,
    answer_change,
    change_question,
    difference_text,
    explain_limits,
    find_keeping_policies,
    fleet_text,
    headroom,
    limit_changes,
    sensitivity,
    study_document,
    verdict_text,
)
from planner.traffic.scaling import rescale_trace
from planner.units import show_s

CHANGES = (
    "slo.ttft.p90=400 ms",
    "slo.ttft.p90=2 s",
    "slo.tbt.p99=40 ms",
    "slo.attainment=0.97",
    "fleet.prices.h100-80g=5 usd/h",
    "fleet.gpus.a100-80g=0",
    "traffic.rate=9",
    "objective=power",
    "limits.gpus=40",
    "spare=1",
    "policies={queue: [fcfs, sjf]}",
)


@pytest.mark.long
@pytest.mark.parametrize("text", some(CHANGES, 1))
def test_a_changed_question_has_the_answer_of_a_plan_from_scratch(text: str) -> None:
    """The warm start and remembered simulations change the work, not the value."""
    study = Study(traffic(requests=300), CATALOG)
    before = study.answer(question())
    changed = parse_task(change_question(DOCUMENT, text), CATALOG)
    moved = answer_change(study, before, changed, text)
    scratch = plan(changed, traffic(requests=300), CATALOG).certificate
    assert moved.answer is not None
    assert moved.answer.value == pytest.approx(scratch.value)
    assert moved.answer.is_exact and scratch.level0_exact
    assert study.bound(moved.answer) == pytest.approx(scratch.bound)


@pytest.mark.slow
def test_an_answer_knows_the_three_of_a_plan() -> None:
    """What `plan` says of the same question: on paper, production, with a loss; without safety none."""
    task, trace = question(safety={"kept_in": 0.9}), traffic(requests=200)
    study = Study(trace, CATALOG)
    answer, made = study.answer(task), plan(task, trace, CATALOG).certificate
    assert [each.name for each in answer.answers] == [each.name for each in made.answers]
    assert [each.value for each in answer.answers] == pytest.approx([each.value for each in made.answers])
    said = study_document(answer)["answers"]
    assert [each["kept"] for each in said] == [
        None if each.kept_in is None else each.kept_in.kept for each in made.answers
    ]
    assert study_document(study.answer(question()))["answers"] == []


@pytest.mark.slow
def test_of_fleets_at_one_bill_a_plan_and_a_changed_question_take_the_same() -> None:
    """Two nodes of 8 are paid whether 12 or 16 GPUs are used: the fleet that stands a loss is production, of
    `plan`, of the question asked by itself, and of the question that another becomes.
    """
    changes = {"slo": {"ttft": {"p90": "800 ms"}, "tbt": {"p99": "80 ms"}}, "safety": {"kept_in": 0.9}}
    task = question(**changes, fleet={"gpus": ["h100-80g"], "max_num_batched_tokens": 2048})
    trace = traffic(requests=200, rate_rps=8.5)
    made, study = plan(task, trace, CATALOG), Study(trace, CATALOG)
    asked = study.answer(task)
    before = study.answer(replace(task, rate_rps=7.0))
    moved = answer_change(study, before, task, "more traffic")
    lossy, best = made.certificate.find_answer("with-a-loss"), made.certificate.find_answer("production")
    assert lossy is not None and best is not None and lossy.workers == best.workers
    assert moved.answer is not None and made.fleet.gpus == 16
    assert asked.fleet == moved.answer.fleet == made.fleet


@pytest.mark.slow
def test_of_equal_offers_the_fleet_of_before_stays() -> None:
    """More money than it costs changes nothing."""
    study = Study(traffic(), CATALOG)
    before = study.answer(question())
    moved = answer_change(study, before, question(limits={"cost": 2 * before.value}), "more money")
    assert moved.answer is not None and moved.kept
    assert moved.answer.fleet == before.fleet and difference_text(moved, before) == "the same"


DRAWN: dict[str, object] = {
    "slo": {"ttft": {"p90": "500 ms"}},
    "fleet": {"gpus": ["a100-80g"]},
    "engine": "none",
}


@pytest.mark.slow
def test_the_fleet_of_before_is_asked_every_draw() -> None:
    """It keeps the SLO on the draw it was planned on and misses it on another, so it no longer holds."""
    trace = traffic(requests=250)
    study = Study(trace, CATALOG)
    before = study.answer(question(**DRAWN, traffic={"rate": 26}))
    draws = question(**DRAWN, traffic={"rate": 26, "draws": 6})
    kept = []
    for seed in range(6):
        drawn = rescale_trace(trace, 26.0, rng=np.random.default_rng(seed))
        verdict = judge_slo(simulate(before.fleet, drawn, limits=draws.slo.limits), draws.slo)
        kept.append(verdict.holds)
    assert kept[0] and not all(kept)
    moved = answer_change(study, before, draws, "draws")
    assert moved.kept is False
    assert moved.answer is not None and moved.answer.value > before.value


@pytest.mark.long
@pytest.mark.parametrize(("seed", "kept"), some([(2, False), (0, True)], 1))
def test_the_fleet_of_before_works_as_the_change_asks(seed: int, kept: bool) -> None:
    """Planned with shortest prompts first, asked to hold first come first served: simulated so."""
    study = Study(traffic(seed), CATALOG)
    gpus = ["a100-80g", "h100-80g"]
    asked = {"engine": "none", "fleet": {"gpus": gpus, "sold_as": dict.fromkeys(gpus, "gpu")}}
    before = study.answer(question(policies={"queue": "sjf"}, **asked))
    moved = answer_change(study, before, question(policies={"queue": "fcfs"}, **asked), "fcfs")
    in_order = replace(before.fleet, policies=replace(before.fleet.policies, queue="fcfs"))
    simulation = simulate(in_order, traffic(seed), limits=before.problem.slo.limits)
    assert judge_slo(simulation, before.problem.slo).holds is moved.kept is kept
    assert moved.kept_under == ("queue fcfs" if kept else "")


def _limits_of_classes(*limits_s: int) -> dict[str, Any]:
    """Short and long prompts, each with a limit on TTFT."""
    matches = {"short": {"to": 300}, "long": {"from": 301}}
    return {
        name: {"match": {"input_tokens": match}, "ttft": {"p90": f"{limit_s} s"}}
        for (name, match), limit_s in zip(matches.items(), limits_s, strict=True)
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"policies": {"queue": "sjf"}}, {"policies": {"queue": "sjf", "decode_routing": "round-robin"}}),
        ({"policies": {"queue": "sjf"}}, {"policies": {"queue": "sjf", "prediction": "mean"}}),
        ({"policies": {"queue": "sjf"}}, {"policies": {"queue": "any"}}),
        ({"slo": {"classes": _limits_of_classes(9, 9)}}, {"slo": {"classes": _limits_of_classes(9, 8)}}),
    ],
    ids=["decode routing", "prediction", "raced", "deadlines"],
)
def test_the_fleet_of_before_has_policies_that_the_change_allows(before: Any, after: Any) -> None:
    """Of its policies only queue, routing and caches were compared with the question's: a fleet was said to
    hold with predictions, routings of decodes and deadlines that the change took away.
    """
    study = Study(traffic(requests=60), CATALOG)
    problem = study.problem_of(question(**before, fleet={"gpus": ["h100-80g"]}))
    fleet = replace(
        problem.oracle.fleet(((problem.options()[0], 8),)), policies=problem.task.policy_choices()[0]
    )
    changed = study.problem_of(question(**after, fleet={"gpus": ["h100-80g"]}))
    policies = find_keeping_policies(changed, fleet)
    assert policies is not None and policies.queue == fleet.policies.queue
    assert policies in changed.task.policy_choices() or after == {"policies": {"queue": "any"}}


@pytest.mark.long
def test_a_fleet_that_scenarios_alone_refuse_is_not_said_to_miss_the_slo() -> None:
    """Twice the traffic in every scenario leaves the traffic as written as it is, where the previous fleet
    holds; the answer was that it "no longer holds".
    """
    study = Study(traffic(requests=100), CATALOG)
    task = question(fleet={"gpus": ["h100-80g"], "max_num_batched_tokens": 2048})
    before = study.answer(task)
    moved = answer_change(study, before, replace(task, safety=Safety(growth_frac=1.0)), "growth")
    assert moved.kept is False
    assert verdict_text(moved) == (
        "the previous fleet holds as written after the change, in too few scenarios"
    )
    assert _plan_cell(moved) == "too few scenarios"
    assert _plan_cell(replace(moved, kept_as_written=False)) == "fails"
    dearer = replace(moved, kept_as_written=False, kept=True, value_now=before.value / 2)
    assert dearer.is_previous_cheaper and _plan_cell(dearer) == "search's scenarios only"


@pytest.mark.long
def test_a_change_that_leaves_no_fleet_says_why() -> None:
    study = Study(traffic(), CATALOG)
    before = study.answer(question())
    moved = answer_change(study, before, question(fleet={"gpus": {"a100-80g": 2}}), "two GPUs")
    assert moved.answer is None and moved.kept is None and "stock of a100-80g" in moved.why
    moved = answer_change(study, before, question(slo={"ttft": {"p90": "1 ms"}}), "1 ms")
    assert moved.answer is None and moved.kept is False and "below what any worker can do" in moved.why


@pytest.mark.slow
def test_sensitivity_goes_the_right_way() -> None:
    """Worse step times, more traffic, tighter limits and dearer GPUs never save; the opposite never costs."""
    study = Study(traffic(), CATALOG)
    before = study.answer(
        question(fleet={"gpus": {"a100-80g": 20, "h100-80g": 12}}, limits={"power": "40 kW"})
    )
    moves = {moved.label: moved for moved in sensitivity(study, before)}
    assert len(moves) == 16
    for label, moved in moves.items():
        more = 0.0 if moved.answer is None else moved.answer.value - before.value
        worse = any(word in label for word in ("longer", "more traffic", "tighter", "dearer"))
        assert more >= -1e-9 if worse else more <= 1e-9, label
        assert moved.answer is not None or worse
    assert moves["TTFT p90 100 ms looser"].kept
    smallest = min(worker.gpus for worker in before.problem.types if worker.gpu.name == "h100-80g")
    assert smallest == 2 and moves["2 more h100-80g"].kept  # one GPU more is no worker more


@pytest.mark.parametrize(
    ("stock", "label", "is_whole"), [(8, "8 more h100-80g", True), (7, "one more", False)]
)
def test_more_gpus_are_sold_as_before(stock: int, label: str, is_whole: bool) -> None:
    """Of 9 GPUs, not whole nodes, single ones are taken to be for sale: one more seemed to save 21 USD/h."""
    task = question(fleet={"gpus": {"h100-80g": stock}})
    (gpu,) = task.priced_gpus(CATALOG)
    worker = SimpleNamespace(gpu=gpu, gpus=1)
    problem = SimpleNamespace(task=task, slo=Slo(()), types=[worker])
    ((said, more),) = limit_changes(cast(StudyAnswer, SimpleNamespace(problem=problem)), 0.1)
    assert said.startswith(label)
    assert [each.is_sold_whole for each in more.priced_gpus(CATALOG)] == [gpu.is_sold_whole] == [is_whole]


def test_headroom_is_where_the_fleet_stops_to_hold() -> None:
    """From scratch, with steps that much longer, with that much more traffic, and half a percent beyond."""
    study = Study(traffic(), CATALOG)
    before = study.answer(question())
    room = headroom(study, before)

    def keeps(steps_frac: float, traffic_frac: float) -> bool:
        pools = tuple(
            replace(pool, type=pool.type.with_longer_steps(steps_frac)) for pool in before.fleet.pools
        )
        requests = traffic()
        if traffic_frac:
            rate_rps = requests.rate_rps * (1 + traffic_frac)
            requests = rescale_trace(requests, rate_rps, scale="compress", rng=np.random.default_rng(0))
        simulation = simulate(replace(before.fleet, pools=pools), requests, limits=before.problem.slo.limits)
        return judge_slo(simulation, before.problem.slo).holds

    assert 0 < room.steps_frac < HEADROOM_MOST_FRAC
    assert keeps(room.steps_frac, 0.0) and not keeps(room.steps_frac + HEADROOM_STEP_FRAC, 0.0)
    assert keeps(0.0, room.traffic_frac)
    beyond = np.linspace(0.0, 1.0 / 256, 257)  # as finely as it was looked for
    assert not all(keeps(0.0, room.traffic_frac + float(more)) for more in beyond)
    assert f"steps take up to {100 * room.steps_frac:.2g} % longer" in fact_sentence(room)


@pytest.mark.slow
def test_prices_of_one_kind_of_gpu_change_no_choice() -> None:
    study = Study(traffic(), CATALOG)
    before = study.answer(question(fleet={"gpus": ["h100-80g"]}))
    assert not [moved for moved in sensitivity(study, before) if "h100-80g" in moved.label]


@pytest.mark.slow
def test_what_a_limit_costs_is_said_in_money() -> None:
    """The sentences are the finite differences: value of the moved question - value of the plan."""
    trace = traffic(requests=200)
    study = Study(trace, CATALOG)
    task = question()
    before = study.answer(task)
    said = fact_sentences_of(explain_limits(study, task, before.fleet))
    assert said[0] == f"TTFT p90 is {show_s(before.verdict.lines[0].value_s)} where the limit is 1.00 s"
    moved = said[len(before.verdict.lines) :]
    assert [line.split(":")[0] for line in moved] == [
        "TTFT p90 100 ms tighter",
        "TTFT p90 100 ms looser",
        "TBT p99 10 ms tighter",
        "TBT p99 10 ms looser",
    ]
    tighter = plan(question(slo={"ttft": {"p90": "900 ms"}, "tbt": {"p99": "80 ms"}}), trace, CATALOG)
    more = tighter.certificate.value - before.value
    expected = "the same" if abs(more) < 1e-9 else f"{more:+.4g} USD/h"
    assert expected in moved[0]


def slos() -> st.SearchStrategy[Slo]:
    seconds = st.sampled_from([0.5, 1.0, 2.0])
    return st.builds(
        lambda a, b, share: Slo((Limit("ttft", 0.9, a), Limit("tbt", 0.99, b)), share),
        seconds,
        seconds,
        st.sampled_from([None, 0.5, 0.9]),
    )


@given(asked=slos(), known=slos(), attained=st.tuples(*[st.floats(0.1, 3.0)] * 2, st.floats(0.0, 1.0)))
def test_an_answer_for_one_slo_holds_for_every_looser_one(
    asked: Slo, known: Slo, attained: tuple[float, float, float]
) -> None:
    """Against a fleet whose percentiles and attainment are drawn: it holds where each is within its limit."""

    def holds(slo: Slo) -> bool:
        within = all(value <= limit.limit_s for value, limit in zip(attained, slo.limits, strict=False))
        return within and attained[2] >= (slo.attainment_frac or 0.0)

    cache = VerdictCache()
    cache.add(("fleet",), known, holds=holds(known))
    assert cache.look_up(("fleet",), asked) in (None, holds(asked))
    assert cache.look_up(("another",), asked) is None
    if asked == known:
        assert cache.look_up(("fleet",), asked) == holds(asked)


def test_other_percentiles_are_not_comparable() -> None:
    one, other = (Slo((Limit("ttft", p, 1.0),)) for p in (0.9, 0.99))
    assert not is_looser(one, other) and not is_looser(other, one) and is_looser(one, one)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("slo.ttft.p90=1 s", ("slo", "ttft", "p90"), "1 s"),
        ("slo.tbt.p99.9=0.3", ("slo", "tbt", "p99.9"), 0.3),
        ("limits.cost = 40 usd/h", ("limits", "cost"), "40 usd/h"),
        ("fleet.gpus.h100-80g=8", ("fleet", "gpus"), {"a100-80g": None, "h100-80g": 8}),
        ("robust={step_times: 0.1}", ("robust",), {"step_times": 0.1}),
    ],
)
def test_a_change_sets_one_key(text: str, path: tuple[str, ...], value: Any) -> None:
    changed: Any = change_question(DOCUMENT, text)
    for key in path:
        changed = changed[key]
    assert changed == value
    assert "limits" not in DOCUMENT and DOCUMENT["fleet"] == {"gpus": ["a100-80g", "h100-80g"]}


def test_a_flat_limit_is_found_and_a_key_can_be_taken_out() -> None:
    flat = {"safety": "none", "llm": "x", "slo": {"ttft_p90": "2 s", "tbt_p99": "1 s"}}
    assert change_question(flat, "slo.ttft.p90=1 s")["slo"] == {"ttft_p90": "1 s", "tbt_p99": "1 s"}
    assert change_question(flat, "slo.tbt_p99=")["slo"] == {"ttft_p90": "2 s"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slo.ttft.p90", "expected KEY=VALUE"),
        ("=1 s", "expected KEY=VALUE"),
        ("llm.name=x", r"llm is 'meta-llama/Llama-3.1-70B' and has no 'name' in it"),
        ("limits={", "is no value that YAML can read"),
    ],
)
def test_a_bad_change_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        change_question(DOCUMENT, text)


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    """A question and its trace as files."""
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump(DOCUMENT))
    trace = traffic(requests=120)
    columns = (trace.arrival_s, trace.input_tokens, trace.output_tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = "".join(f"{a},{n},{m}\n" for a, n, m in rows)
    (tmp_path / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{lines}")
    return ["--slo", str(tmp_path / "slo.yaml"), "--trace", str(tmp_path / "trace.csv")]


@pytest.mark.long
def test_the_command_shows_before_and_after(asked: list[str]) -> None:
    arguments = ["what-if", *asked, "--change", "slo.ttft.p90=400 ms", "--change", "objective=gpus"]
    said = CliRunner().invoke(app, [*arguments, "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert [found[key]["objective"] for key in ("before", "after")] == ["cost", "gpus"]
    assert {line["limit"]: line["limit_s"] for line in found["after"]["slo"]}["ttft p90"] == 0.4
    assert found["after"]["bound"] <= found["after"]["value"] == found["after"]["gpus"]
    table = CliRunner().invoke(app, arguments)
    assert "the previous fleet" in table.stdout and "400 ms" in table.stdout


def test_too_few_scenarios_after_a_change_are_told_with_what_to_ask_for() -> None:
    """The message of other errors ends with its relaxation; that of this one is for sentences that add it."""
    ask = "safety: {kept_in: 0.88}, more stock, or safety: none"
    most = MostKept(0.9, 0.88, 191.36, 47.84, "USD/h")
    for most_kept, reason in ((most, f"too few; ask for {ask}"), (None, "too few")):
        error = InfeasibleError(
            "too few", kind="capacity", constraint="safety", relaxation=ask, most_kept=most_kept
        )
        assert _reason_of(error) == reason


@pytest.mark.long
def test_no_fleet_after_the_change_is_exit_code_3(asked: list[str]) -> None:
    said = CliRunner().invoke(app, ["what-if", *asked, "--change", "limits.gpus=1", "--json"])
    found = json.loads(said.stdout)
    assert said.exit_code == 3 and found["after"] is None and "GPUs" in found["why"]
    table = CliRunner().invoke(app, ["what-if", *asked, "--change", "limits.gpus=1"]).stdout
    assert "before" in table and "no fleet is left" in table
    assert table.count("│ no fleet") == 0, "18 rows said so, that of a changed limit too"


def test_a_fleet_that_was_not_found_in_time_is_not_said_to_be_none(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code was 3, as of a question without a fleet: "before the change there is no fleet: ... and
    the time limit came first".
    """

    def stopped(study: Study, task: object, start: object = ()) -> StudyAnswer:
        raise InfeasibleError("none yet", kind="capacity", constraint="time", is_proved=False)

    monkeypatch.setattr(Study, "answer", stopped)
    said = CliRunner().invoke(app, ["what-if", *asked, "--change", "limits.gpus=16"])
    assert said.exit_code == 4
    assert "before the change none was found: none yet; after it none was found: none yet" in said.stdout


@pytest.mark.slow
def test_the_sensitivity_command(asked: list[str]) -> None:
    said = CliRunner().invoke(app, ["sensitivity", *asked, "--by", "5 %", "--json"])
    assert said.exit_code == 0, said.output
    labels = [row["change"] for row in json.loads(said.stdout)["changes"]]
    assert labels[0] == "steps take 5 % longer" and "h100-80g 5 % cheaper" in labels
    assert json.loads(said.stdout)["headroom"].keys() == {"steps_frac", "traffic_frac"}
    said = CliRunner().invoke(app, ["sensitivity", *asked, "--by", "5 %"])
    assert "robust: {step_times: 5 %, traffic: 5 %}" in said.stdout
    with pytest.raises(InputError, match="--by"):
        CliRunner().invoke(app, ["sensitivity", *asked, "--by", "0"], catch_exceptions=False)


def test_a_fleet_that_differs_in_tokens_per_step_alone_does_not_read_as_the_same() -> None:
    """`sensitivity` said that the plan fails and that the best fleet is then "the same", the plan's own."""
    before = SimpleNamespace(fleet=mixed())
    other = mixed().with_types(lambda worker: replace(worker, max_num_batched_tokens=640))
    text = fleet_text(cast(Any, SimpleNamespace(fleet=other)), cast(Any, before))
    assert text == "2 workers of 4 × h100-80g with 640 tokens per step instead of 2,048"
    assert fleet_text(cast(Any, before), cast(Any, before)) == "2 workers of 4 × h100-80g"


def test_a_signed_percentage_is_refused_with_the_factor_to_write() -> None:
    """20 requests/s and 30 % more are 26; "+30 %" may also be a value, as of `safety.growth`."""
    with pytest.raises(InputError, match=r"\+30 % of what is there is 26.*: write traffic.rate=x1.3, or the"):
        change_question({"traffic": {"rate": 20}}, "traffic.rate=+30 %")
    with pytest.raises(InputError, match=r"write slo.ttft.p90=x0.8"):
        change_question({"slo": {"ttft": {"p90": "2 s"}}}, "slo.ttft.p90=-20 %")
    assert change_question({}, "safety.growth=30 %") == {"safety": {"growth": "30 %"}}


def test_a_price_that_slo_yaml_leaves_out_is_the_catalogs() -> None:
    """ "-30 %" of the price of H200 was refused as "x0.7 multiplies a number, but it is not there"."""
    rows = read_catalog()
    cheaper = change_question({"fleet": {"gpus": ["h200"]}}, "fleet.prices.h200=x0.5", rows)
    half = rows.gpu("h200").price_usd_per_h / 2
    assert cheaper["fleet"] == {"gpus": ["h200"], "prices": {"h200": f"{half:.10g} usd/h"}}
    with pytest.raises(InputError, match=r"-30 % of what is there is .* usd/h: write fleet.prices.h200=x0.7"):
        change_question({}, "fleet.prices.h200=-30 %", rows)
    given = change_question({"fleet": {"prices": {"h200": "2 usd/h"}}}, "fleet.prices.h200=x0.5", rows)
    assert given["fleet"]["prices"] == {"h200": "1 usd/h"}
    with pytest.raises(InputError, match="is not there"):  # That provider's price is another.
        change_question({"fleet": {"price_of": {"provider": "verda"}}}, "fleet.prices.h200=x0.5", rows)


def test_a_cheaper_fleet_of_before_is_not_said_to_hold_beside_a_dearer_plan() -> None:
    """23.92 USD/h before, "still holds", and a plan of 31.92: it held in the search's scenarios alone."""
    problem = SimpleNamespace(same_value_factor=1 + 1e-9)
    answer = cast(Any, SimpleNamespace(value=31.92, problem=problem, is_passed=True))
    tested, on_paper = question(), question(safety="none")
    moved = ChangedQuestion(
        "traffic.rate=10", replace(tested, safety=Safety(0.9)), True, answer, "", "", 23.92
    )
    assert "still holds" not in verdict_text(moved) and "is not the plan" in verdict_text(moved)
    for same in (replace(moved, value_now=31.92), replace(moved, task=on_paper)):
        assert verdict_text(same) == "the previous fleet still holds after the change"
    failed = replace(moved, answer=cast(Any, SimpleNamespace(**vars(answer) | {"is_passed": False})))
    assert verdict_text(failed).endswith("failed its test in scenarios that its search had not seen")
