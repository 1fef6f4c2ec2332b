"""Alert rules and dashboard: checked by promtool where it is, and against what the exporter serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from planner.manifests.monitoring import DASHBOARD_FILE, RULES_FILE, serving_dashboard, watch_files
from planner.studies.watch_words import GAUGES

FILES = watch_files("meta-llama/Llama-3.1-8B")


def test_every_gauge_that_is_asked_for_is_exported() -> None:
    asked = set(re.findall(r"fleetplan_\w+", FILES[RULES_FILE] + FILES[DASHBOARD_FILE]))
    assert asked - {"fleetplan_role"} <= set(GAUGES)  # that one is a label


def test_requests_of_pairs_and_of_other_llms_are_not_counted_in() -> None:
    """A prefill and a decode worker count each request both: the dashboard showed twice the requests/s, half
    of the mean output, and a TTFT half of whose samples were of decode workers; and all LLMs' together."""
    for text in (FILES[DASHBOARD_FILE], serving_dashboard("meta-llama/Llama-3.1-8B", "llama-3-1-8b")):
        queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
        of_vllm = [query for query in queries if "vllm:" in query]
        assert of_vllm and not any("request_success" in query for query in of_vllm)
        for query in of_vllm:
            assert query.count('model_name="meta-llama/Llama-3.1-8B"') == query.count("vllm:")
            assert ('fleetplan_role!="decode"' in query) == ("time_to_first_token" in query)
            assert ('fleetplan_role!="prefill"' in query) == ("_tokens_" in query)


def test_a_watch_that_has_ended_is_stale() -> None:
    """Its series end with it, and a comparison with no series is no alert."""
    rules = yaml.safe_load(FILES[RULES_FILE])["groups"][0]["rules"]
    (stale,) = (rule["expr"] for rule in rules if rule["alert"] == "FleetplanWatchStale")
    assert stale.endswith(" or absent_over_time(fleetplan_watched_timestamp_seconds[3600s])")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / RULES_FILE).write_text(FILES[RULES_FILE])
    tests = {
        "rule_files": [RULES_FILE],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": "fleetplan_plan_holds", "values": "1x5 0x20"}],
                "alert_rule_test": [
                    {"eval_time": "4m", "alertname": "FleetplanPlanBroken", "exp_alerts": []},
                    {
                        "eval_time": "15m",
                        "alertname": "FleetplanPlanBroken",
                        "exp_alerts": [
                            {
                                "exp_labels": {"severity": "critical"},
                                "exp_annotations": {
                                    "summary": "the plan no longer holds",
                                    "description": "meta-llama/Llama-3.1-8B: run `plan watch` once for the "
                                    "sentences",
                                },
                            }
                        ],
                    },
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    for command in (["check", "rules", RULES_FILE], ["test", "rules", "test.yaml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """Of Grafana's model: unique ids, panels within 24 columns that do not overlap, a data source."""
    board = json.loads(FILES[DASHBOARD_FILE])
    assert isinstance(board["schemaVersion"], int)
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        at = panel["gridPos"]
        assert 0 <= at["x"] and at["x"] + at["w"] <= 24
        places.add((at["x"], at["y"]))
        assert panel["targets"] and all(target["expr"] for target in panel["targets"])
        assert panel["datasource"]["uid"] == "${source}"
    assert len(places) == len(panels)
    assert board["templating"]["list"][0]["name"] == "source"
