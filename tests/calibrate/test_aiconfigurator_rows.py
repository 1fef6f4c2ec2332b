"""benchmarks/aiconfigurator_rows.py on made-up rows and a made-up AIConfigurator."""

from __future__ import annotations

import pytest

from benchmarks.aiconfigurator_rows import Pair, lines, pairs, print_page
from benchmarks.reality import Load, Row, Run

RUN = Run("ml-energy", "c", "8 in flight", "a/B", "h100-80g", 1, "vLLM 0.11.1", load=Load(200.0, 100.0, 8.0))


def row(run: Run, quantity: str, predicted: float, measured: float = 1.0) -> Row:
    return Row(run, "fit", quantity, "p50" if quantity == "itl" else "mean", predicted, measured)


def test_the_nearer_one_of_each_line_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """ITL of 1 s: we say 0.9 and 1.1, they 1.05: 10 against 5 %. Of 1 token/s we say 1.1, they 2."""
    again = Run("ml-energy", "c", "8 again", "a/B", "h100-80g", 1, "vLLM 0.11.1", load=RUN.load)
    rows = [row(RUN, "itl", 0.9), row(again, "itl", 1.1), row(RUN, "throughput", 1.1), row(RUN, "power", 9.0)]
    both = [
        each
        for each in pairs(rows, lambda run, load: {"itl": 1.05, "throughput": 2.0})
        if isinstance(each, Pair)
    ]
    table = lines(both)
    assert [(line.metric, line.runs, line.is_worse) for line in table] == [
        ("ITL p50", 2, True),
        ("tokens/s mean", 1, False),
    ]
    assert (table[0].ours_frac, table[0].theirs_frac) == pytest.approx((0.1, 0.05))
    print_page(table, [(RUN, "why | not")], both)
    page = capsys.readouterr().out
    assert "| ml-energy | B | h100-80g | 2 | ITL p50 | 10.0 | 5.0 | worse |" in page
    assert "| ml-energy | a/B | h100-80g | 1 | why / not |" in page


def test_a_run_that_it_refuses_counts_for_neither_and_is_named_once() -> None:
    def refuse(run: Run, load: Load) -> dict[str, float]:
        raise RuntimeError("OOM: does not fit")

    found = list(pairs([row(RUN, "itl", 1.0), row(RUN, "throughput", 1.0)], refuse))
    assert found == [(RUN, "out of memory, by its account")]


def test_fleets_behind_a_router_are_left_out() -> None:
    """Before, a run of llm-d's, which says no load of one worker, ended the comparison with a ValueError."""
    fleet = Run("llm-d", "c", "3/s", "a/B", "h100-80g", 2, "vLLM")
    assert list(pairs([row(fleet, "ttft", 1.0)], lambda run, load: {})) == []
