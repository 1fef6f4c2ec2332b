"""The whole answer of `plan` against every fleet, on 60 random questions (benchmarks/brute_force.py: 2,000).

A good quarter of these seeds were answered wrongly on 2026-11-20: by an exact level 0 that was beaten, by an
exit 3 where a fleet holds, or by a relaxation that has no plan.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from against_all_fleets import check, relaxed
from assumptions import NAMES, measure
from random_questions import CLASSES, KINDS, Question, drafting_engine, files, question

from planner.documents.catalog import read_catalog
from planner.documents.task import read_task
from planner.errors import Change
from planner.search.problem.build_problem import build_problem
from planner.traffic.trace_reading import read_trace

SEEDS = (
    13,
    14,
    18,
    25,
    29,
    35,
    39,
    41,
    42,
    45,
    49,
    50,
    53,
    56,
    57,
    94,
    98,
    105,
    106,
    108,
    113,
    121,
    127,
    129,
    132,
    133,
    138,
    141,
    142,
    150,
    154,
    158,
    161,
    162,
    165,
    179,
    180,
    181,
    186,
    187,
    195,
    201,
    203,
    211,
    213,
    215,
    219,
    224,
    257,
    245,
    271,
    279,
    287,
    292,
    299,
    316,
    320,
    321,
    326,
    329,
    406,
)


def mostly_slow(seeds: Iterable[int]) -> list[Any]:
    """One in twelve in `make test`, the others in `make test-weekly`."""
    return [
        seed if k % 12 == 0 else pytest.param(seed, marks=pytest.mark.slow) for k, seed in enumerate(seeds)
    ]


@pytest.mark.parametrize("seed", mostly_slow(SEEDS))
def test_no_fleet_contradicts_the_answer(seed: int) -> None:
    """No cheaper one where level 0 is exact, none where none is said to hold, none below the bound."""
    _refuse_a_wrong_answer(question(seed))


@pytest.mark.parametrize("seed", mostly_slow(range(1000, 1024)))
def test_no_fleet_contradicts_the_answer_of_an_asynchronous_engine(seed: int) -> None:
    _refuse_a_wrong_answer(question(seed, engine="vllm"))


@pytest.mark.parametrize("seed", mostly_slow(range(2004, 2015)))
def test_no_fleet_contradicts_the_answer_where_engines_draft(seed: int) -> None:
    """Draft lengths are chosen, and no bound is above a fleet whose drafts are all accepted."""
    asked = question(seed, engine=drafting_engine(seed), requests=(20, 120))
    assert any(asked.task.speculations)
    _refuse_a_wrong_answer(asked)


@pytest.mark.parametrize("seed", (17, 20, 24, 36))
def test_no_fleet_contradicts_the_answer_of_classes_of_requests(seed: int) -> None:
    """Two or three classes with lines of their own; queues edf, fcfs and sjf, named or left to the plan."""
    asked = question(seed, CLASSES, (20, 100))
    assert len(asked.task.slo.selectors) in (2, 3)
    _refuse_a_wrong_answer(asked)


def _refuse_a_wrong_answer(asked: Question) -> None:
    report = check(asked, most_fleets=1000, samples=40)
    assert not report.wrong
    assert report.said != "plan" or report.value <= report.level0 * (1 + 1e-6)


def test_a_seed_gives_the_same_question_again() -> None:
    first, again = question(3), question(3)
    assert first.document == again.document and files(first) == files(again)
    assert question(3, "bursts").kind == "bursts"


@pytest.mark.parametrize("kind", ("hand-off", "prefix", "sessions", "shipped", CLASSES))
def test_a_question_written_to_files_is_the_same(kind: str, tmp_path: Path) -> None:
    """Trace, limits and worker types: what whoever runs `plan` on the files is asked."""
    asked = question(KINDS.index(kind) if kind in KINDS else 2, kind)
    for name, text in files(asked).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    folder = tmp_path / "catalog"
    catalog = read_catalog(folder if folder.exists() else None)
    task, trace = read_task(tmp_path / "slo.yaml", catalog), read_trace(tmp_path / "trace.jsonl")
    assert task.slo == asked.task.slo and task.stock == asked.task.stock
    assert np.array_equal(trace.arrival_s, asked.trace.arrival_s) and np.array_equal(
        trace.after, asked.trace.after
    )
    assert np.array_equal(trace.prefix_ids, asked.trace.prefix_ids)
    read, drawn = (
        build_problem(t, r, c)
        for t, r, c in ((task, trace, catalog), (asked.task, asked.trace, asked.catalog))
    )
    assert [(w.name, w.latency, w.price_usd_per_h) for w in read.types] == [
        (w.name, w.latency, w.price_usd_per_h) for w in drawn.types
    ]
    assert all(math.isclose(r.kv_tokens, d.kv_tokens) for r, d in zip(read.types, drawn.types, strict=True))


def test_relaxations_are_read_from_what_the_error_says() -> None:
    task = question(0).task
    gpu = next(iter(task.stock))
    more = relaxed(task, [Change(f"stock of {gpu}", 3, 5, "GPUs"), Change("cost", 10, 12.5, "USD/h")])
    assert more is not None and more.stock[gpu] == 5 and more.cost_limit_usd_per_h == 12.5
    limit = task.slo.limits[0]
    looser = relaxed(task, [Change(limit.name, limit.limit_s, 9.5, "s")])
    assert looser is not None and looser.slo.limits[0].limit_s == 9.5
    assert relaxed(task, []) is None


def test_assumptions_are_counted() -> None:
    """No more often than there are neighbours: of 4 counts of 2 options at most, of 16 cells of 2 pairs."""
    for seed in (0, 1):
        tallies = measure(question(seed), 4, np.random.default_rng(seed))
        assert set(tallies) == set(NAMES)
        assert all(0 <= tally.failed <= tally.tested for tally in tallies.values())
        assert tallies["A1"].tested <= 2 * 3 and tallies["A2"].tested <= 2 * 4 * 3
