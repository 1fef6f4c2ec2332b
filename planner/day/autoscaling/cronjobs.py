"""A timetable as CronJobs (batch/v1) that set the size of a pool: for clusters without KEDA.

One per change and pool, with the right to patch the /scale of these objects and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.day.autoscaling import keda_object
from planner.day.autoscaling.autoscaler import DAY_S, MINUTE_S, Document, Written
from planner.day.autoscaling.scale_targets import ScaleTarget

FILE = "cron-jobs.yaml"
KUBECTL = "registry.k8s.io/kubectl:v1.35.0"
LATEST_S = 600  # a job that could not start within it is left out
_RESOURCES = {
    "Deployment": "deployments",
    "LeaderWorkerSet": "leaderworkersets",
    "DisaggregatedSetRoleScaler": "disaggregatedsetrolescalers",
    "DynamoGraphDeploymentScalingAdapter": "dynamographdeploymentscalingadapters",
}


def write_cronjobs(places: Sequence[ScaleTarget], app: str) -> Written:
    """The jobs of all pools and who they run as."""
    name = f"{app}-timetable"
    documents = _rights(name, places)
    for place in places:
        documents += [
            _job(place, start_s, size, name) for start_s, size in keda_object.merge_entries(place.scaled)
        ]
    return Written(
        {FILE: documents},
        (f"    kubectl apply -f {FILE}   # in place of {keda_object.FILE}, in a cluster without KEDA",),
    )


def _rights(name: str, places: Sequence[ScaleTarget]) -> list[Document]:
    rbac = "rbac.authorization.k8s.io"
    objects: dict[tuple[str, str], list[str]] = {}
    for place in places:
        group = place.api_version.rpartition("/")[0]
        objects.setdefault((group, _RESOURCES[place.kind]), []).append(place.object_name)
    rules: list[Document] = [
        {
            "apiGroups": [group],
            "resources": [resource, f"{resource}/scale"],
            "resourceNames": names,
            "verbs": ["get", "patch", "update"],
        }
        for (group, resource), names in objects.items()
    ]
    metadata = {"name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
        },
    ]


def _job(place: ScaleTarget, start_s: int, size: int, account: str) -> Document:
    minutes = start_s % DAY_S // MINUTE_S
    group = place.api_version.rpartition("/")[0]
    resource = f"{_RESOURCES[place.kind]}.{group}/{place.object_name}"
    container = {
        "name": "scale",
        "image": KUBECTL,
        "command": ["kubectl", "scale", resource, f"--replicas={size}"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
    }
    pod = {"serviceAccountName": account, "restartPolicy": "OnFailure", "containers": [container]}
    return {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": f"{place.name}-{minutes // 60:02}{minutes % 60:02}"},
        "spec": {
            "schedule": keda_object.cron_time(place.scaled, start_s),
            "timeZone": keda_object.TIME_ZONE,
            "concurrencyPolicy": "Replace",
            "startingDeadlineSeconds": LATEST_S,
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": 3,
            "jobTemplate": {"spec": {"backoffLimit": 5, "template": {"spec": pod}}},
        },
    }
