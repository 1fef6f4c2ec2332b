"""Adapters in manifests: every engine is told of its slots, and where the files are to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_commands import commands, serving

from planner import manifests
from planner.errors import InputError
from planner.models.lora import Lora

FLAGS: dict[str, Any] = yaml.safe_load((Path(__file__).parents[1] / "data" / "vllm_flags.yaml").read_text())[
    "flags"
]
NAMED = Lora(4, 16, ("sales", "legal-2"), 6, ("qkv_proj", "o_proj"))


def test_every_engine_is_told_of_its_slots() -> None:
    found = manifests.render(serving(NAMED), 5000)
    assert set(found.refused) == {"dynamo", "ray-serve", "disaggregatedset", "skypilot"}
    told = commands(found.files)
    assert set(told) == set(manifests.TARGETS) - set(found.refused)
    for target, each in told.items():
        for command in each:
            assert "--enable-lora" in command.args, target
            numbers = [command.value(f"--{key}") for key in ("max-loras", "max-lora-rank", "max-cpu-loras")]
            assert numbers == ["4", "16", "6"], target
            for flag, words in (
                ("--lora-target-modules", ("qkv_proj", "o_proj")),
                ("--lora-modules", ("sales=/adapters/sales", "legal-2=/adapters/legal-2")),
            ):
                at = command.args.index(flag) + 1
                assert tuple(command.args[at : at + 2]) == words, target
    assert "Mount each adapter's files below /adapters" in found.files["README.md"]


def test_adapters_without_names_leave_them_to_the_reader() -> None:
    found = manifests.render(serving(Lora(4, 16, 50, 50)), 5000)
    for each in commands(found.files).values():
        assert all(command.value("--lora-modules") == "ADAPTER=/adapters/ADAPTER" for command in each)
        assert all("--lora-target-modules" not in command.args for command in each)
    assert (
        "files of your adapters, 50 in all, one NAME=PATH each in place of ADAPTER"
        in found.files["README.md"]
    )


def test_names_that_no_command_line_carries_are_refused() -> None:
    with pytest.raises(InputError, match="lora: adapter 'a b'"):
        manifests.render(serving(replace(NAMED, adapters=("a b", "c"))), 5000, "vllm")


def test_vllm_knows_the_flags() -> None:
    lora = {flag for flag in FLAGS if "lora" in flag}
    assert {
        word
        for each in commands(manifests.render(serving(NAMED), 5000).files).values()
        for command in each
        for word in command.args
        if "lora" in word and word.startswith("--")
    } == lora
