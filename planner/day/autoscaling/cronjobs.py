"""Writes a timetable as CronJobs (Kubernetes' batch/v1), for clusters without KEDA: one job for every change
of a pool's size, which sets the size at its time of day.
"""

from collections.abc import Sequence

from planner.day.autoscaling import keda_object
from planner.day.autoscaling.autoscaler import DAY_S, MINUTE_S, Document, WrittenManifests
from planner.day.autoscaling.scale_targets import ScaleTarget
from planner.manifests import kubernetes

FILE = "cron-jobs.yaml"
KUBECTL = "registry.k8s.io/kubectl:v1.35.0"
# The next three are set by hand.
LATEST_S = 600  # Kubernetes skips a job that could not start within this time.
MOST_RETRIES = 5  # Kubernetes gives a job up after this many failed pods.
KEPT_FAILED_JOBS = 3  # This many failed jobs stay to be looked at, and one that succeeded.
# The resource of each kind of object, as access rights and kubectl name it.
_RESOURCES = {
    "Deployment": "deployments",
    "LeaderWorkerSet": "leaderworkersets",
    "DisaggregatedSetRoleScaler": "disaggregatedsetrolescalers",
    "DynamoGraphDeploymentScalingAdapter": "dynamographdeploymentscalingadapters",
}


def write_cronjobs(targets: Sequence[ScaleTarget], app: str) -> WrittenManifests:
    """The jobs of all pools, and the service account under which they run; `app` begins its name."""
    account = f"{app}-timetable"
    documents = _account_with_rights(account, targets)
    for target in targets:
        documents += [
            _job(target, start_s, size, account) for start_s, size in keda_object.merge_entries(target.scaled)
        ]
    return WrittenManifests(
        {FILE: documents},
        (f"    kubectl apply -f {FILE}   # in place of {keda_object.FILE}, in a cluster without KEDA",),
    )


def _account_with_rights(account: str, targets: Sequence[ScaleTarget]) -> list[Document]:
    """A ServiceAccount that may read and patch the pools' objects and their /scale, and nothing else."""
    names_by_resource: dict[tuple[str, str], list[str]] = {}
    for target in targets:
        group = target.api_version.rpartition("/")[0]  # "apps" of "apps/v1".
        names_by_resource.setdefault((group, _RESOURCES[target.kind]), []).append(target.object_name)
    rules: list[Document] = [
        {
            "apiGroups": [group],
            "resources": [resource, f"{resource}/scale"],
            "resourceNames": names,
            "verbs": ["get", "patch", "update"],
        }
        for (group, resource), names in names_by_resource.items()
    ]
    return kubernetes.account_with_role({"name": account}, rules)


def _job(target: ScaleTarget, start_s: int, size: int, account: str) -> Document:
    """A CronJob, named after its time HHMM, that gives a pool `size` workers at second `start_s` of a day."""
    minutes = start_s % DAY_S // MINUTE_S
    group = target.api_version.rpartition("/")[0]
    resource = f"{_RESOURCES[target.kind]}.{group}/{target.object_name}"
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
        "metadata": {"name": f"{target.name}-{minutes // 60:02}{minutes % 60:02}"},
        "spec": {
            "schedule": keda_object.cron_time(target.scaled, start_s),
            "timeZone": keda_object.TIME_ZONE,
            "concurrencyPolicy": "Replace",
            "startingDeadlineSeconds": LATEST_S,
            "successfulJobsHistoryLimit": 1,
            "failedJobsHistoryLimit": KEPT_FAILED_JOBS,
            "jobTemplate": {"spec": {"backoffLimit": MOST_RETRIES, "template": {"spec": pod}}},
        },
    }
