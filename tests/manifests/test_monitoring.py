"""Alert rules and dashboard: checked by promtool where it is, and against what the exporter serves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from planner.manifests.monitoring import DASHBOARD_FILE, RULES_FILE, watch_files
from planner.studies.watch_words import GAUGES

FILES = watch_files("meta-llama/Llama-3.1-8B")


def test_every_gauge_that_is_asked_for_is_exported() -> None:
    asked = set(re.findall(r"fleetplan_\w+", FILES[RULES_FILE] + FILES[DASHBOARD_FILE]))
    assert asked <= set(GAUGES)


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
