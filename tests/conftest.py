"""Settings shared by all tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# a busy machine is slow, not wrong
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# real servers, engines, processes and browsers: on a busy machine one loses a race now and then. What fails
# there is tried three times more, seconds later, and told as RERUN; everywhere else a failure is a failure
WITH_SERVERS = ("browser", "profiling", "runtime", "ui", "with_vllm")

# a worker takes a file at a time: the longest first, so that both end at once. The two after the tutorial,
# which is long in `make test-slow` alone, ask for other kernels: in a fresh clone each worker compiles one
LONGEST = (
    "test_tutorial.py",
    "ui/test_ui.py",
    "simulator/test_prefix_kernel.py",
    "commands/test_cli.py",
    "runtime/test_validate.py",
    "search/test_planning.py",
    "commands/test_mutations.py",
    "search/test_asked_elsewhere.py",
    "studies/test_whatif.py",
    "commands/test_bad_input.py",
    "search/test_sharing.py",
    "runtime/test_soak.py",
    "runtime/test_runtime_chaos.py",
    "search/test_losses.py",
    "simulator/test_policies.py",
    "test_policy_table.py",
    "face/test_face.py",
    "search/test_owned.py",
    "search/test_brute_force.py",
    "documents/test_planfile.py",
    "profiling/test_profiling.py",
    "simulator/test_distserve.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = {here / name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    of_servers = {
        path
        for path in {item.path for item in items}
        if any(path.is_relative_to(here / folder) for folder in WITH_SERVERS)
    }
    for item in items:
        if item.path in of_servers:
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=5))


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """To the log of the run, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n    {text}")

    return write
