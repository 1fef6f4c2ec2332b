"""Completes a fleet.yaml from the slo.yaml with which it is simulated.

Keys that fleet.yaml lacks are taken from slo.yaml: `prices`, `sold_as` and `electricity` by GPU, `engine` or
`host_overhead`, `lora` and `network`, and the times of classes (`policies: due`) for a queue by deadline. A
plan.yaml already has them all.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.gpu_payment import KEYS as PAID_KEYS
from planner.documents.gpu_payment import paid_document, uncapped_name
from planner.documents.policy_choices import due_of
from planner.documents.policy_settings import due_document
from planner.documents.task import PlanQuestion
from planner.errors import CatalogError
from planner.fleet import Policies
from planner.policies import QUEUE

Document = Mapping[str, Any]
BY_DEADLINE = [name for name, row in QUEUE.items() if row.by_deadline]


def complete_fleet(
    fleet: Document, question: Document, task: PlanQuestion, catalog: Catalog
) -> dict[str, Any]:
    """The document of a fleet, completed from `question`, which is the document of `task`."""
    if "status" in fleet or "llms" in fleet:  # A plan.yaml, of one LLM or of several.
        return dict(fleet)
    paid = paid_document(task.priced_gpus(catalog))
    section = question.get("fleet") or {}
    of_question = {"lora": question.get("lora"), "network": section.get("network")}
    if _batches_as_engine(fleet) and not {"engine", "host_overhead"} & {*fleet}:
        # `engine` and `host_overhead` both give the host's time, so a fleet with one of them gets neither.
        of_question |= {"engine": question.get("engine"), "host_overhead": section.get("host_overhead")}
    policies = fleet.get("policies")
    if isinstance(policies, Mapping) and policies.get("queue") in BY_DEADLINE and "due" not in policies:
        # An SLO without classes has no such times, and `parse_policies` asks for `due`.
        due = due_document(due_of(task.slo))
        fleet = {**fleet, "policies": {**policies, **({"due": due} if due else {})}}
    missing_keys = {
        key: value for key, value in of_question.items() if value is not None and key not in fleet
    }
    return {
        **fleet,
        **missing_keys,
        **{key: _merge_by_gpu(paid.get(key, {}), fleet.get(key), catalog) for key in PAID_KEYS},
    }


def _merge_by_gpu(of_question: Document, own: object, catalog: Catalog) -> object:
    """Values by GPU: the fleet's own, and those of the question for GPUs that the fleet does not name. A name
    in the fleet stands for the GPU under every power cap.

    A value that is no mapping and unknown names stay, as `parse_paid` refuses them later.
    """
    if own is not None and not isinstance(own, Mapping):
        return own
    own_names = set()
    for name in own or {}:
        with suppress(CatalogError):
            own_names.add(catalog.gpu(str(name)).name)
    others = {
        name: value
        for name, value in of_question.items()
        if not {name, uncapped_name(catalog.gpu(name))} & own_names
    }
    return {**others, **(own or {})}


def _batches_as_engine(fleet: Document) -> bool:
    """Whether the fleet batches as the engine of a question does, not as some other program."""
    policies = fleet.get("policies")
    usual = Policies().batching
    return not isinstance(policies, Mapping) or policies.get("batching", usual) == usual
