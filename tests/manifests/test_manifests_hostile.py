"""Hostile names through every renderer: each arrives where it belongs, to the letter, or is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile_names import NAMES, named
from manifest_commands import EXAMPLES, commands, documents, run_script
from plans import LLM, a_pool, mixed, pairs
from shares import every

from planner import manifests
from planner.errors import InputError
from planner.files.checked_files import write_files
from planner.fleet import Fleet
from planner.manifests import engine_command

SELECTORS = (
    "a b",
    "a=b=c",
    "a: b",
    "$(X)",
    "{{ x }}",
    "a\nb",
    "",
    "=",
    "a=",
    "=b",
    "x" * 64,
    "-a",
    "a-",
    "a/b/c=d",
    "é",
    "'a'",
    "a;b",
    "nvidia.com/gpu.product=NVIDIA-H100",
    "amd.com/gpu.product-name=MI",
    "a/b=c",
    "NVIDIA-L4",
    "a.b_c",
)


@functools.cache
def rendered(name: str, plan: str = "mixed") -> manifests.Rendered:
    return manifests.render(named(EXAMPLES[plan], name), 5000)


def yaml_of(files: dict[str, str]) -> dict[str, list[Any]]:
    return {
        path: documents(text)
        for path, text in files.items()
        if path.endswith(".yaml") and not path.startswith("chart/templates/")
    }


@pytest.mark.long
@pytest.mark.parametrize("number", every(3, range(len(NAMES))))
@pytest.mark.parametrize("plan", ["mixed", "pairs of two gpus"])
def test_the_llms_name_arrives_to_the_letter_or_is_refused(number: int, plan: str) -> None:
    """As the model and as the served name of every engine, whatever escapes its target asks for."""
    name = NAMES[number]
    found = rendered(name, plan)
    for target, engines in commands(found.files).items():
        for command in engines:
            assert command.args[0] == name, target
            assert command.value("--served-model-name") == name, target
            assert command.args.count(name) == 2, target
    assert set(found.refused) | set(commands(found.files)) == set(manifests.TARGETS)
    for why in found.refused.values():
        assert "\n" not in engine_command.one_line(why) and len(why) < 6000


@pytest.mark.parametrize("number", every(3, range(len(NAMES))))
def test_yaml_of_either_version_reads_the_same(number: int) -> None:
    """Go's tools read YAML 1.2 with rests of 1.1, PyYAML reads 1.1: y, 0o17 and 1e3 differ unless quoted."""
    ruamel = pytest.importorskip("ruamel.yaml")
    files = rendered(NAMES[number]).files
    for path in ("vllm/mixed.config.yaml", "ray-serve.yaml", "compose/compose.yaml", "kserve.yaml"):
        if path in files:
            assert list(ruamel.YAML(typ="safe", pure=True).load_all(files[path])) == documents(files[path])
            assert not {"y", "n"} & {line.split()[-1] for line in files[path].splitlines()}  # Go's booleans


def test_what_is_refused_for_all_targets() -> None:
    """What no line can carry, or would be taken for a flag; everything else has a target that takes it."""
    for name in NAMES:
        found = rendered(name)
        is_hopeless = (
            not name
            or name.startswith("-")
            or not name.isprintable()
            or name != name.strip()
            or len(name) > 1000
        )
        assert (set(found.refused) == set(manifests.TARGETS)) == is_hopeless, name
        assert found.files["README.md"].startswith("# Deploying ")


def test_templates_get_plain_names_only() -> None:
    """Helm, KServe's controller and Dynamo's operator paste names into templates and shells."""
    for name in NAMES:
        if set(name) & set(" {}$`'\"\\;|&<>()*?!#%~[]=,:\n\t"):
            refused = rendered(name).refused
            assert {"llm-d", "kserve", "dynamo", "production-stack"} <= set(refused), name


def test_no_name_of_an_llm_changes_the_structure() -> None:
    """Comments and headings keep their number; the same keys stand in the same places."""
    tame = rendered("me/tame").files

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return [shape(item) for item in value] if isinstance(value, list) else type(value)

    for name in NAMES:
        files = rendered(name).files
        for path, text in files.items():
            if path.startswith("chart/templates/"):
                assert text == tame[path]
            elif path.endswith(".yaml"):
                assert text.count("\n#") == tame[path].count("\n#")
                assert shape(documents(text)) == shape(documents(tame[path])), (name, path)
        headings = [line for line in files["README.md"].split("\n") if line.startswith("#")]
        assert len(headings) <= len(manifests.TARGETS) + 3


@pytest.mark.parametrize("number", every(3, range(len(NAMES))))
def test_the_name_of_a_pool_is_a_label_everywhere(number: int) -> None:
    """A plan whose pool is called by the label of the hostile name gives the same files, README apart."""
    first, *others = pairs().pools
    hostile = replace(pairs(), pools=(replace(first, name=NAMES[number]), *others))
    tame = replace(pairs(), pools=(replace(first, name=engine_command.pool_labels(hostile)[0]), *others))
    for target in ("vllm", "compose", "disaggregatedset", "dynamo"):
        files, expected = (manifests.render(fleet, 5000, target).files for fleet in (hostile, tame))
        readme, expected_readme = files.pop("README.md"), expected.pop("README.md")
        assert files == expected
        assert len(readme.split("\n")) == len(expected_readme.split("\n"))


def test_pools_of_reserved_and_equal_names_keep_apart() -> None:
    names = ("router", "Router!", "router-mixed", "pair", "frontend", "x" * 90, "x" * 91)
    fleet = Fleet(LLM, tuple(a_pool(name, "mixed", "h100-80g", 1, 1) for name in names))
    labels = engine_command.pool_labels(fleet)
    assert len(set(labels)) == len(names) and not set(labels) & set(engine_command.RESERVED_LABELS)
    for target, found in commands(manifests.render(fleet, 5000).files).items():
        # The workers are equal, so in SkyPilot they are replicas of one service.
        assert len(found) == (1 if target == "skypilot" else len(names)), target


@functools.cache
def with_gpu(name: str) -> dict[str, str]:
    pool = mixed().pools[0]
    gpu = replace(pool.type.gpu, name=name, base=name)
    fleet = Fleet(LLM, (replace(pool, type=replace(pool.type, gpu=gpu)),))
    return manifests.render(fleet, 5000).files


@pytest.mark.long
@pytest.mark.parametrize("number", every(3, range(len(NAMES))))
def test_the_name_of_a_gpu_stays_in_its_comment(number: int) -> None:
    files, expected = with_gpu(NAMES[number]), with_gpu("tame")
    assert yaml_of(files) == yaml_of(expected)
    lines, expected_lines = ({k: len(v.split("\n")) for k, v in each.items()} for each in (files, expected))
    assert lines == expected_lines


@pytest.mark.parametrize("number", range(len(SELECTORS)))
def test_a_node_selector_is_a_label_or_refused(number: int) -> None:
    selector = SELECTORS[number]
    pool = mixed().pools[0]
    fleet = Fleet(
        LLM, (replace(pool, type=replace(pool.type, gpu=replace(pool.type.gpu, node_selector=selector))),)
    )
    key, _, value = selector.rpartition("=")
    try:
        text = manifests.render(fleet, 5000, "kubernetes").files["kubernetes.yaml"]
    except InputError as error:
        assert "node_selector" in str(error) and "\n" not in str(error)
        assert number < SELECTORS.index("nvidia.com/gpu.product=NVIDIA-H100")
    else:
        found = documents(text)[0]["spec"]["template"]["spec"]["nodeSelector"]
        assert found == {key or "nvidia.com/gpu.product": value}
        assert number >= SELECTORS.index("nvidia.com/gpu.product=NVIDIA-H100")


@pytest.mark.parametrize("name", [name for name in NAMES if "pwned" in name])
def test_nothing_a_name_says_is_run(tmp_path: Path, name: str) -> None:
    """Scripts are run with stand-ins for the programs; routers have no shell."""
    fleet = replace(named(EXAMPLES["pairs of two gpus"], name))
    pools = tuple(replace(pool, name=name + pool.name) for pool in fleet.pools)
    write_files(tmp_path, manifests.render(replace(fleet, pools=pools), 5000).files)
    worker = next(path for path in (tmp_path / "vllm").glob("*.sh") if path.stem != "router")
    run_script('cd "$1" && bash "$0"', str(worker), str(tmp_path), stubs=("vllm",), folder=tmp_path)
    router = yaml.safe_load((tmp_path / "compose/router.yaml").read_text())["services"]["router"]
    assert router["entrypoint"] == ["vllm-router"]  # no shell reads what follows
    assert not list(tmp_path.rglob("pwned"))
