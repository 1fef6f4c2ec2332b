"""Prefix trees written down by hand: the worked example of test_prefixes.py as a file, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from prefix_trees import tools
from typer.testing import CliRunner

from planner.cli import app
from planner.documents.prefix_tree import place_tree, read_tree
from planner.errors import InfeasibleError, InputError

TOOLS = """
memory_tokens: 5000
token_s: 100 us
rest: 40 ms
nodes:
  - {name: sys, tokens: 500}
  - {name: A, after: sys, tokens: 2000, rate: 4}
  - {name: B, after: sys, tokens: 1500, prefill: 150 ms, rate: 6 req/s}
  - {name: C, after: sys, tokens: 3000, rate: 2, rest: 40 ms}
  - {name: A1, after: A, tokens: 1200, rate: 30}
  - {name: A2, after: A, tokens: 800, rate: 3}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tree.yaml"


def test_the_file_is_the_tree(path: Path) -> None:
    path.write_text("replicas: 3" + TOOLS)
    read, known = read_tree(path).demand, tools()
    for name in ("parent", "tokens", "prefill_s", "rate_rps", "work_s"):
        np.testing.assert_allclose(getattr(read, name), getattr(known, name), err_msg=name)


def test_the_command_answers_the_worked_example(path: Path) -> None:
    """Three replicas: .7077 s of work per second on each; two have to do 1.20, so 0.8 needs three."""
    for asked in ("replicas: 3", "largest_load: 0.8"):
        path.write_text(asked + TOOLS)
        done = CliRunner().invoke(app, ["prefixes", "--tree", str(path), "--json"])
        answer = json.loads(done.stdout)
        assert answer["load"] == pytest.approx([0.7077] * 3, abs=1e-4)
        assert (answer["status"], answer["relaxed_bound"]) == ("optimal", pytest.approx(0.6))
        routed = {node["name"]: sum(node["routed_rps"]) for node in answer["nodes"]}
        assert routed == pytest.approx({"sys": 0, "A": 4, "B": 6, "C": 2, "A1": 30, "A2": 3})


def test_a_load_that_no_number_of_replicas_keeps(path: Path) -> None:
    """16.79 s of work per second without caches, 1.8 s with all of them: at most 1.8 ms on each of 1000."""
    path.write_text("largest_load: 0.0001" + TOOLS)
    with pytest.raises(InfeasibleError, match=r"1000 replicas are too few for 16\.79 s"):
        place_tree(read_tree(path), time_limit_s=60.0, rng=np.random.default_rng(0))


@pytest.mark.parametrize(
    ("rate", "relaxation"), [(1234.4, "a largest_load of 0.12344"), (50_000, "10 times fewer requests/s")]
)
def test_the_load_that_is_called_within_reach_is_kept(path: Path, rate: float, relaxation: str) -> None:
    """Without memory each request takes 100 ms: 123.44 s per second are 0.12344 on each of 1000, not 0.123.
    5,000 s are 5 on each, and no load is above 1: a tenth of the requests takes half of the time.
    """

    def place(load: str, rate: float) -> float:
        node = f"nodes: [{{tokens: 500, prefill: 100 ms, rate: {rate}}}]"
        path.write_text(f"largest_load: {load}\nmemory_tokens: 0\n{node}\n")
        return place_tree(read_tree(path), time_limit_s=9.0, rng=np.random.default_rng(0)).largest_load

    load = "0.5" if rate > 10_000 else "0.1"
    with pytest.raises(InfeasibleError) as error:
        place(load, rate)
    assert error.value.relaxation == relaxation and relaxation in str(error.value)
    if rate > 10_000:
        assert place(load, rate / 10) == pytest.approx(0.5)
    else:
        assert place(relaxation.split()[-1], rate) == pytest.approx(0.12344)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TOOLS, "expected one of replicas and largest_load"),
        ("replicas: 0" + TOOLS, "replicas: expected a whole number >= 1, found 0"),
        ("replicas: 2000" + TOOLS, "replicas: expected at most 1000, found 2000"),
        ("largest_load: 2" + TOOLS, "expected a number from 0 to 1"),
        ("replicas: 1" + TOOLS.replace("after: A,", "after: Z,"), r"nodes\[4\]: 'A1' after 'Z': each"),
        ("replicas: 1" + TOOLS.replace("name: B", "name: A"), "each node needs a name of its own"),
        ("replicas: 1" + TOOLS.replace("tokens: 800", "tokens: -1"), r"nodes\[5\]: tokens: expected a whole"),
        ("replicas: 1" + TOOLS.replace("rate: 30", "rate: -30"), "rate: must be >= 0"),
        ("replicas: 1" + TOOLS.replace("rate: 30", "rat: 30"), "unknown key 'rat'"),
        (
            "replicas: 1" + TOOLS.replace("tokens: 800", "tokens: 9007199254740993"),
            r"nodes\[5\]: tokens: expected at most 100000000, found 9007199254740993",
        ),
        (
            "replicas: 1" + TOOLS.replace("5000", "9007199254740993"),
            "memory_tokens: expected at most 1000000000000",
        ),
        ("replicas: 1" + TOOLS.replace("150 ms", "150"), "prefill: 150 has no unit"),
        ("replicas: 1\nmemory_tokens: 1\nnodes: []", "nodes: expected a list of nodes"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_tree(path)


def test_a_trace_or_a_tree_is_needed() -> None:
    done = CliRunner().invoke(app, ["prefixes"])
    assert isinstance(done.exception, InputError)
