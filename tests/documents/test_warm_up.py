"""warm-up.json with prompts, and pinned prefixes in fleet.yaml."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import mixed

from planner.documents.catalog import read_catalog
from planner.documents.fleet_file import fleet_document, read_fleet
from planner.documents.warm_up import WarmPrompt, read_warm_up
from planner.errors import InputError
from planner.files.checked_files import to_yaml
from planner.fleet import PinnedPrefix, Policies

FLEET = mixed()
WORKER = f"{FLEET.pools[0].name}-0"


def test_prompts_are_token_ids_or_text(tmp_path: Path) -> None:
    path = tmp_path / "warm-up.json"
    rows = [{"worker": WORKER, "prompt": [5, 6]}, {"worker": WORKER, "prompt": "You are", "keep_alive_s": 3}]
    path.write_text(json.dumps(rows))
    assert read_warm_up(path, FLEET) == (WarmPrompt(0, (5, 6)), WarmPrompt(0, "You are", 3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "is no JSON"),
        ("{}", "expected a list of"),
        ('[{"worker": "gone-3", "prompt": [1]}]', "row 0: worker is 'gone-3', the plan has"),
        (json.dumps([{"worker": WORKER, "block_ids": [1]}]), "row 0: has no prompt; add the text"),
        (json.dumps([{"worker": WORKER, "prompt": [1], "keep_alive_s": 0}]), "row 0: keep_alive_s is 0"),
    ],
)
def test_other_rows_are_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "warm-up.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        read_warm_up(path, FLEET)
    assert "\n" not in str(error.value)


def test_a_fleet_file_keeps_what_is_pinned(tmp_path: Path) -> None:
    policies = Policies(routing="pinned-prefix", prefix_cache=True)
    fleet = replace(FLEET, policies=policies, pinned=(PinnedPrefix((3, 1, 4), 512, (0, 1)),))
    path = tmp_path / "fleet.yaml"
    path.write_text(to_yaml(fleet_document(fleet)))
    assert read_fleet(path, read_catalog()).pinned == fleet.pinned
    text = path.read_text()
    for other in ("gone-7", "{a: 1}"):
        path.write_text(text.replace(f"{FLEET.pools[0].name}-1", other))
        with pytest.raises(InputError, match="pinned\\[0\\]: workers: expected some of"):
            read_fleet(path, read_catalog())
