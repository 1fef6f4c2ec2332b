"""What pods may do and what they ask of a node."""

from typing import Any

import pytest
from plans import mixed, pairs

from planner.fleet import Fleet
from planner.manifests import disaggregatedset, kubernetes, lws

Document = dict[str, Any]


def pods(value: Any) -> list[Document]:
    """The specs of all pods in some objects."""
    if isinstance(value, list):
        return [pod for each in value for pod in pods(each)]
    if not isinstance(value, dict):
        return []
    return [value] if "containers" in value else pods(list(value.values()))


@pytest.mark.parametrize("target", [kubernetes, lws, disaggregatedset])
@pytest.mark.parametrize("fleet", [mixed(), pairs()])
def test_pods_ask_for_what_they_need_and_may_do_no_more(target: Any, fleet: Fleet) -> None:
    if target is disaggregatedset and not fleet.is_disaggregated:
        pytest.skip("it has no mixed pools")
    specs = pods(target.documents(fleet, 5000))
    assert len(specs) > len(fleet.running_pools)  # and the router
    for spec in specs:
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        if spec["containers"][0]["name"] == "router":
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
        else:
            assert spec["automountServiceAccountToken"] is False


def test_a_worker_of_four_gpus_asks_for_nine_cpus() -> None:
    """One process per GPU and one in front: 1 + 2 x 4 CPUs; 16 GiB of shared memory and 8 x 4 GiB."""
    fleet = mixed("h100-80g", 4, 1)
    (container,) = pods(kubernetes.documents(fleet, 5000))[0]["containers"]
    assert container["resources"]["requests"] == {"nvidia.com/gpu": "4", "cpu": "9", "memory": "48Gi"}
