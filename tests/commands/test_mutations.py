"""benchmarks/mutate.py with a fixed seed: inputs of every kind with a mistake in them end in one line."""

from __future__ import annotations

import pytest

from benchmarks.mutate import Found, Kind, kinds, mutate, written_plan

KINDS = ("slo described fleet plan schedule trace catalog engines config imports allocate tree").split()
QUICK, SLOW = range(5), range(5, 25)  # thousands: python benchmarks/mutate.py


@pytest.fixture(scope="module")
def known() -> dict[str, Kind]:
    return kinds(written_plan())


def test_every_kind_is_tried(known: dict[str, Kind]) -> None:
    assert list(known) == KINDS


def faults(known: dict[str, Kind], name: str, numbers: range) -> list[str]:
    found = Found()
    for number in numbers:
        mutate(name, known[name], number, 0, found)
    assert found.runs[name] == len(numbers)
    return found.faults


@pytest.mark.parametrize("name", KINDS)
def test_a_mistake_ends_in_one_line(known: dict[str, Kind], name: str) -> None:
    assert faults(known, name, QUICK) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_more_mistakes_end_in_one_line(known: dict[str, Kind], name: str) -> None:
    assert faults(known, name, SLOW) == []
