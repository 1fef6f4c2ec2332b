"""A pytest plugin that writes every slo.yaml and fleet.yaml which tests parse, with what became of it.

    DOCUMENTS_OF_TESTS=file.jsonl pytest -p document_recorder tests/documents

A line is [kind, document, the error's message or null]. Documents that JSON cannot hold are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.documents import fleet_file, task
from planner.errors import PlannerError


def _recorded(kind: str, parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_and_record(document: Any, *arguments: Any, **options: Any) -> Any:
        message = None
        try:
            return parse(document, *arguments, **options)
        except PlannerError as error:
            message = str(error)
            raise
        finally:
            try:
                line = json.dumps([kind, document, message], allow_nan=False)
            except (TypeError, ValueError):
                line = ""
            if line:
                with Path(os.environ["DOCUMENTS_OF_TESTS"]).open("a") as file:
                    file.write(line + "\n")

    return parse_and_record


task.parse_task = _recorded("slo", task.parse_task)
fleet_file.fleet_of = _recorded("fleet", fleet_file.fleet_of)
fleet_file.parse_fleet = _recorded("fleet", fleet_file.parse_fleet)
