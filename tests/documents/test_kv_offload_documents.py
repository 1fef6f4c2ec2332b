"""`policies: kv_offload` of slo.yaml, fleet.yaml and plan.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from plans import CATALOG

from planner.documents.fleet_file import fleet_document, fleet_of
from planner.documents.task import parse_task
from planner.errors import InputError
from planner.fleet import Fleet
from planner.models.kv_offload import KvOffload
from planner.search.problem.options import EngineChoices

NAME = "meta-llama/Llama-3.1-8B"
ASKED = {"size": "200 GB", "bandwidth": "50 GB/s"}


def fleet(**policies: Any) -> Fleet:
    document = {"llm": NAME, "workers": [{"gpu": "h100-80g"}], "policies": policies}
    return fleet_of(document, Path("fleet.yaml"), CATALOG)


def task(policies: dict[str, Any], **more: Any) -> Any:
    return parse_task({"llm": NAME, "slo": {"ttft": {"p90": "2 s"}}, "policies": policies, **more}, CATALOG)


def test_a_fleet_is_written_and_read_back() -> None:
    found = fleet(prefix_cache=True, kv_offload=ASKED)
    assert found.policies.kv_offload == KvOffload(200e9, 50e9)
    document = fleet_document(found)
    assert document["policies"]["kv_offload"] == ASKED
    assert fleet_of(document, Path("plan.yaml"), CATALOG) == found
    shared = fleet(prefix_cache=True, kv_offload=ASKED | {"shared": True})
    assert shared.policies.kv_offload == KvOffload(200e9, 50e9, is_shared=True)
    assert fleet_document(shared)["policies"]["kv_offload"] == ASKED | {"shared": True}
    disk = ASKED | {"size": "0 GB", "disk": {"size": "2000 GB", "bandwidth": "6 GB/s"}}
    behind = fleet(prefix_cache=True, kv_offload=disk)
    assert behind.policies.kv_offload == KvOffload(0.0, 50e9, disk_bytes=2e12, disk_bandwidth_bytes_per_s=6e9)
    assert fleet_of(fleet_document(behind), Path("plan.yaml"), CATALOG) == behind
    assert "kv_offload" not in fleet_document(fleet(prefix_cache=True))["policies"]
    assert fleet(prefix_cache=True, kv_offload="none").policies.kv_offload is None


def test_a_question_is_asked_of_fleets_that_count_on_caches() -> None:
    """Fleets without caches come first, those with caches alone last: over a slow link (0.5 GB/s) three
    workers were planned where two do without offload. Nobody is planned in pipelines.
    """
    found = task({"prefix_cache": True, "kv_offload": ASKED})
    has = dict.fromkeys((each.prefix_cache, each.kv_offload) for each in found.policy_choices())
    assert [*has] == [(False, None), (True, KvOffload(200e9, 50e9)), (True, None)]
    assert not EngineChoices.of(found).is_piped and EngineChoices.of(task({"prefix_cache": True})).is_piped


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"size": "200 GB"}, "kv_offload: bandwidth"),
        (ASKED | {"size": "0 GB"}, "kv_offload: size: must be > 0, found '0 GB'"),
        (ASKED | {"size": 200}, "kv_offload: size"),
        (ASKED | {"rate": 3}, "rate"),
        (ASKED | {"disk": {"size": "2 TB"}}, "kv_offload: disk: bandwidth is missing"),
        (
            ASKED | {"shared": True, "disk": {"size": "2 TB", "bandwidth": "6 GB/s"}},
            "goes not with shared: true",
        ),
        (ASKED | {"shared": "yes please"}, "kv_offload: shared"),
        ("200 GB", "kv_offload"),
    ],
)
def test_what_is_wrong_is_named(asked: object, message: str) -> None:
    for read in (fleet, lambda **policies: task(policies)):
        with pytest.raises(InputError, match=message) as error:
            read(prefix_cache=True, kv_offload=asked)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policies", "more", "message"),
    [
        ({"prefix_cache": False}, {}, "keeps what leaves prefix caches; add prefix_cache: true"),
        ({}, {"fleet": {"pp": [1, 2]}}, "is not simulated in pipelines"),
        (
            {},
            {"engine": {"speculative": {"method": "ngram", "tokens": 2, "acceptance": 0.5}}},
            "is not simulated with engine: speculative",
        ),
        ({}, {"lora": {"max_loras": 1, "max_rank": 8, "adapters": 2}}, "is not simulated with lora"),
        ({}, {"llm": "openai/gpt-oss-120b"}, "has layers with windows or states"),
        (
            {"kv_offload": ASKED | {"shared": True}},
            {"llm": "deepseek-ai/DeepSeek-V3"},
            "find in a store only blocks of their own tp",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(
    policies: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        task({"prefix_cache": True, "kv_offload": ASKED, **policies}, **more)
    assert "\n" not in str(error.value)
