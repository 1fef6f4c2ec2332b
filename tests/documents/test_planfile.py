"""A written plan read back: its report comes out to the byte, and files that are not of one plan are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from shares import some

from planner.api.inputs import check_file
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.task import read_task
from planner.errors import InputError
from planner.files.checked_files import write_files
from planner.reports import output
from planner.search.evidence.certify import plan
from planner.search.evidence.written_plan import read_plan
from planner.traffic.trace_reading import read_trace

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = "plan --slo <slo>.yaml"  # quoted on the page


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


def write_plan(catalog: Catalog, slo: Path, trace: Path, folder: Path) -> None:
    found = plan(read_task(slo, catalog), read_trace(trace, seed=None), catalog, seed=3)
    write_files(folder, output.render(found, command=COMMAND))


@pytest.fixture(scope="module")
def folder(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small plan, whose other GPUs cost what the user says."""
    here = tmp_path_factory.mktemp("small")
    (here / "slo.yaml").write_text(
        "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}, tbt: {p99: 200 ms}, attainment: 0.8}\n"
        "fleet: {gpus: {h100-80g: 4, l40s-48g: 4}, prices: {h100-80g: 9 usd/h, l40s-48g: 1 usd/h}}\n"
    )
    rows = [f"{i / 2},{200 + 10 * (i % 7)},{20 + i % 5}" for i in range(60)]
    (here / "trace.csv").write_text("\n".join(["timestamp,input_tokens,output_tokens", *rows, ""]))
    write_plan(catalog, here / "slo.yaml", here / "trace.csv", here / "out")
    return here / "out"


def test_the_report_comes_out_to_the_byte(folder: Path, catalog: Catalog) -> None:
    found, command = read_plan(folder, catalog)
    assert command == COMMAND
    for name in output.NAMES:
        assert output.render(found, command=command)[name] == (folder / name).read_text(), name


@pytest.mark.long
@pytest.mark.parametrize("policies", ["", "policies: {prefix_cache: true, routing: e2}\n"])
def test_so_it_does_where_requests_wait_and_share(policies: str, catalog: Catalog, tmp_path: Path) -> None:
    """40 sessions of three turns, each of which begins with the blocks of the one before."""
    trace = tmp_path / "sessions.csv"
    rows = [
        f"{s / 3},{320 * (turn + 1)},{20 + s % 5},{3 * s + turn},{3 * s + turn - 1 if turn else ''},1.7,"
        f"{' '.join(map(str, range(100 * s, 100 * s + 20 * (turn + 1))))},16"
        for s in range(40)
        for turn in range(3)
    ]
    head = "timestamp,input_tokens,output_tokens,request_id,after,think_s,prefix_ids,prefix_block_tokens"
    trace.write_text("\n".join([head, *rows, ""]))
    slo = tmp_path / "slo.yaml"
    slo.write_text(
        "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}}\ntraffic: {rate: 7, scale: compress}\n"
        "fleet: {gpus: {h100-80g: 4}}\n" + policies
    )
    write_plan(catalog, slo, trace, tmp_path / "out")
    found, command = read_plan(tmp_path / "out" / "plan.yaml", catalog)
    for name, text in output.render(found, command=command).items():
        assert text == (tmp_path / "out" / name).read_text(), name


def test_so_it_does_where_the_traffic_is_drawn(folder: Path, catalog: Catalog, tmp_path: Path) -> None:
    """Superposed copies are drawn anew: what became of the other draws is read back too."""
    slo = tmp_path / "slo.yaml"
    slo.write_text((folder.parent / "slo.yaml").read_text() + "traffic: {rate: 5}\nsafety: none\n")
    write_plan(catalog, slo, folder.parent / "trace.csv", tmp_path / "out")
    found, command = read_plan(tmp_path / "out", catalog)
    assert found.certificate.repeats
    for name, text in output.render(found, command=command).items():
        assert text == (tmp_path / "out" / name).read_text(), name
    written = (tmp_path / "out" / "certificate.json").read_text()
    assert '"half_width"' in written  # Older versions wrote "half".
    (tmp_path / "out" / "certificate.json").write_text(written.replace('"half_width"', '"half"'))
    assert read_plan(tmp_path / "out", catalog)[0].certificate.repeats == found.certificate.repeats
    document = json.loads(written)
    values: tuple[object, ...] = (
        None,
        [],
        "x",
        {"ttft p90": {"mean": "x", "half_width": 1, "least": 1, "most": 1}},
    )
    for value in values:
        damage = damaged(document, "certificate.repeats.0.limits", value)
        (tmp_path / "out" / "certificate.json").write_text(damage)
        with pytest.raises(InputError, match="certificate: repeats"):
            read_plan(tmp_path / "out", catalog)


def test_requests_of_another_plan_are_told(folder: Path, catalog: Catalog, tmp_path: Path) -> None:
    for name in output.NAMES:
        (tmp_path / name).write_text((folder / name).read_text())
    head, *rows = (folder / "requests.csv").read_text().splitlines(keepends=True)
    (tmp_path / "requests.csv").write_text("".join([head, *rows[:-20]]))
    with pytest.raises(InputError, match=r"has 40 requests, certificate\.json says 60: they are not of one"):
        read_plan(tmp_path, catalog)
    (tmp_path / "requests.csv").write_text("".join([head, *rows]).replace(",200,", ",2000,"))
    with pytest.raises(InputError, match=r"has ttft p90 at .* s, certificate\.json says .* s: they are not"):
        read_plan(tmp_path, catalog)


@pytest.mark.parametrize("key", ["certificate", "simulated", "alternatives", "warnings", "command"])
def test_a_certificate_of_another_version_is_told(
    key: str, folder: Path, catalog: Catalog, tmp_path: Path
) -> None:
    for name in output.NAMES:
        (tmp_path / name).write_text((folder / name).read_text())
    document = json.loads((folder / "certificate.json").read_text())
    del document[key]
    (tmp_path / "certificate.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=f"is not as this version of the planner writes it.*{key}"):
        read_plan(tmp_path, catalog)


def damaged(document: dict[str, Any], path: str, value: object) -> str:
    """certificate.json with one value put in the place of another."""
    *above, last = path.split(".")
    at: Any = document
    for key in above:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = value
    return json.dumps(document)


@pytest.mark.long
@pytest.mark.parametrize("value", some([None, "many", -1.5, {}, True, [], [None], {"a": None}], 4), ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        "status",
        "certificate",
        "certificate.value",
        "certificate.bound",
        "certificate.level0_exact",
        "certificate.unit",
        "certificate.universe",
        "certificate.binding",
        "certificate.neighbours",
        "certificate.neighbours.0",
        "certificate.neighbours.0.holds",
        "certificate.shadow_prices",
        "certificate.repeats",
        "certificate.refuted",
        "certificate.seed",
        "slo",
        "simulated",
        "simulated.lines",
        "simulated.lines.0.simulated_s",
        "alternatives",
        "alternatives.0",
        "alternatives.0.fleet",
        "alternatives.0.objective",
        "alternatives.0.note",
        "traffic",
        "traffic.dropped",
        "traffic.notes",
        "traffic.requests",
        "traffic.note",
        "max_model_len",
        "warnings",
        "prices",
        "command",
    ],
)
def test_a_damaged_certificate_is_one_line(
    path: str, value: object, folder: Path, catalog: Catalog, tmp_path: Path
) -> None:
    """Eight kinds of it ended in a traceback. What is still of the right kind may be drawn."""
    for name in output.NAMES:
        (tmp_path / name).write_text((folder / name).read_text())
    document = json.loads((folder / "certificate.json").read_text())
    (tmp_path / "certificate.json").write_text(damaged(document, path, value))
    try:
        found, command = read_plan(tmp_path, catalog)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        output.render(found, command=command)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"certificate": NaN}', "{", '"x"', "\0", "{}"], ids=repr)
def test_a_certificate_that_is_no_object_is_one_line(
    text: str, folder: Path, catalog: Catalog, tmp_path: Path
) -> None:
    for name in output.NAMES:
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "certificate.json").write_text(text)
    with pytest.raises(InputError, match=r"certificate.json"):
        read_plan(tmp_path, catalog)


def test_a_folder_without_a_plan_is_told(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan\.yaml"):
        read_plan(tmp_path, catalog)


@pytest.mark.parametrize(
    ("old", "new", "doubt"),
    [
        ("count: 1", "count: 2", r"its workers are 2 GPUs, and it was planned with 1: they were changed"),
        ("gpu: l40s-48g", "gpu: h100-80g", r"its workers are 700 W, and it was planned with 350"),
        ("count: 1", "count: 1", ""),
    ],
)
def test_workers_that_were_changed_by_hand_are_doubtful(
    old: str, new: str, doubt: str, folder: Path, catalog: Catalog, tmp_path: Path
) -> None:
    """Step times, KV cache, routers and production in the file are those of other workers."""
    text = (folder / "plan.yaml").read_text()
    assert text.count(old) == 1
    file = tmp_path / "plan.yaml"
    file.write_text(text.replace(old, new))
    doubts = check_file(file, catalog)
    assert [bool(re.search(doubt, each)) for each in doubts] == ([True] if doubt else [])


def test_doubts_of_several_llms_name_them(catalog: Catalog, tmp_path: Path) -> None:
    """`plan check` found nothing doubtful in any question of several LLMs."""
    entry = "{llm: llama-3.1-8b, slo: {ttft: {p90: 2 s}}, trace: a.csv}"
    file = tmp_path / "slo.yaml"
    fleet = "fleet: {gpus: {h100-80g: 8}, prices: {h100-80g: 20 usd/h}}"
    file.write_text(f"llms: {{chat: {entry}, code: {entry}}}\n{fleet}\n")
    (doubt,) = check_file(file, catalog)
    assert doubt.startswith("chat, code: fleet: prices: h100-80g costs 20 USD/h")


def test_policies_that_are_not_simulated_together_are_refused(catalog: Catalog, tmp_path: Path) -> None:
    """`plan check` called a question right that `plan` refuses."""
    file = tmp_path / "slo.yaml"
    text = "llm: llama-3.1-8b\nslo: {ttft: {p90: 2 s}}\nlora: {max_loras: 8, max_rank: 16, adapters: 8}\n"
    file.write_text(text + "policies: {batching: orca}\n")
    with pytest.raises(InputError, match="lora: needs batching vllm-v1, found 'orca'"):
        check_file(file, catalog)
    file.write_text(text + "policies: {queue: sjf}\n")
    assert check_file(file, catalog) == []
    offload = "{queue: dlpm, prefix_cache: true, kv_offload: {size: 20 GB, bandwidth: 20 GB/s}}"
    file.write_text(f"llm: llama-3.1-8b\nslo: {{ttft: {{p90: 2 s}}}}\npolicies: {offload}\n")
    with pytest.raises(InputError, match="kv_offload: is not simulated with queue 'dlpm'"):
        check_file(file, catalog)


def test_described_traffic_too_long_for_the_llm_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    """`plan check` called a question right that `plan` refuses."""
    file = tmp_path / "slo.yaml"
    traffic = "{rate: 2/s, duration: 10 min, input: {mean: 9000, p95: 30000}, output: 300}"
    file.write_text(
        f"llm: phi-4\nslo: {{ttft: {{p90: 2 s}}}}\ntraffic: {traffic}\nfleet: {{gpus: [h100-80g]}}\n"
    )
    with pytest.raises(InputError, match="of its requests have more than the 16384 tokens"):
        check_file(file, catalog)
