"""benchmarks/mutate.py with a fixed seed: inputs of every kind with a mistake in them end in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mutate as mutations
from benchmarks.mutate import Found, Kind, kinds, mutate, reading_alone, written_plan

KINDS = (
    "slo described map several fleet plan schedule trace packed catalog engines config imports allocate tree"
).split()
READ = range(25)  # and checked, not simulated; `make test-weekly` reads 500
BEYOND = range(25)  # of what is no plain value, likewise
WHOLE = range(1000, 1003)  # thousands: python benchmarks/mutate.py


@pytest.fixture(scope="module")
def known() -> dict[str, Kind]:
    return kinds(written_plan())


def test_every_kind_is_tried(known: dict[str, Kind]) -> None:
    assert list(known) == KINDS


def tried(known: dict[str, Kind], name: str, numbers: range, *, beyond: bool = False) -> Found:
    found = Found()
    for number in numbers:
        mutate(name, known[name], number, 0, found, beyond=beyond)
    assert found.runs[name] == len(numbers)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_mistake_ends_in_one_line(known: dict[str, Kind], name: str) -> None:
    """Some changes are no mistake, and most are."""
    with reading_alone():
        found = tried(known, name, READ)
    assert found.faults == []
    assert found.codes[0] >= 1 and found.codes[1] >= 7


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_plain_value_ends_in_one_line(known: dict[str, Kind], name: str) -> None:
    with reading_alone():
        found = tried(known, name, BEYOND, beyond=True)
    assert found.faults == []
    assert found.codes[1] >= 5


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_few_run_to_their_end(known: dict[str, Kind], name: str) -> None:
    assert tried(known, name, WHOLE).faults == []


def test_what_goes_wrong_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback, a hang, a wrong exit code and a file that is left are faults, each with its number."""
    kind, said = Kind({"a.json": '{"a": 1}'}, ("a.json",), (("allocate", "a.json"),)), [0]

    def ends(_: object, folder: Path) -> tuple[object, str]:
        (folder / "left").touch()
        said[0] += 1
        return [("Traceback", ""), ("hang", ""), (7, ""), (1, "no"), (1, "plan: no"), (0, "")][said[0] - 1]

    monkeypatch.setattr(mutations, "run", ends)
    found = Found()
    for number in range(6):
        mutate("allocate", kind, number, 0, found)
    expected = ("traceback: Traceback", "hang", "exit code 7: ", "exit code 1 without a line: no", "files: [")
    assert len(found.faults) == len(expected)
    for number, (fault, text) in enumerate(zip(found.faults, expected, strict=True)):
        assert fault.startswith(f"allocate:{number} ") and text in fault
