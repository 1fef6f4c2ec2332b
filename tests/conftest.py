"""Settings shared by all tests."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # As the command has it, before NumPy is loaded.

# As the command has it: a tenth of the tests' CPU time goes into looking for garbage otherwise.
gc.set_threshold(10_000, 20, 100)

# A shell that starts `make test` in the background lets it ignore interrupts, and with it all that tests
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a busy machine is slow, not wrong
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# real servers, engines, processes and browsers: on a busy machine one loses a race now and then. What fails
# there is tried three times more, seconds later, and told as RERUN; everywhere else a failure is a failure
WITH_SERVERS = ("browser", "profiling", "runtime", "ui", "with_vllm")

# A worker takes a file at a time: the longest come first, so that all workers end at once. The order is that
# of CPU seconds, children's too (2026-11-27), 4 or more, or of waits. The first three need three kernels,
# which a fresh clone compiles.
LONGEST = (
    "search/test_agent_plans.py",
    "commands/test_cli.py",
    "studies/test_two_routes.py",
    "search/test_losses.py",
    "ui/test_ui.py",
    "search/test_planning.py",
    "search/test_policy_race.py",
    "search/test_production.py",
    "studies/test_whatif.py",
    "runtime/test_soak.py",
    "runtime/test_validate.py",
    "search/test_shared_production.py",
    "commands/test_mutations.py",
    "simulator/test_policies.py",
    "day/test_day_study.py",
    "search/test_brute_force.py",
    "search/test_sharing.py",
    "studies/test_pareto.py",
    "solvers/test_prefixes.py",
    "api/test_studies_api.py",
    "commands/test_mcp.py",
    "simulator/test_prefix_kernel.py",
    "api/test_face.py",
    "studies/test_replan.py",
    "search/test_asked_elsewhere.py",
    "search/test_repeats.py",
    "commands/test_described_command.py",
    "search/test_random_questions.py",
    "parallel/test_executors.py",
    "documents/test_planfile.py",
    "search/test_most_traffic.py",
    "runtime/test_runtime_routing.py",
    "search/test_metamorphic.py",
    "studies/test_routers.py",
    "search/test_owned.py",
    "commands/test_bad_input.py",
    "profiling/test_profiling.py",
    "solvers/test_allocation.py",
    "models/test_latency.py",
    "runtime/test_runtime_chaos.py",
    "commands/test_search_command.py",
    "studies/test_per_gpu.py",
    "day/test_autoscaling.py",
    "runtime/test_runtime_predictions.py",
    "manifests/test_manifests_hostile.py",
    "day/test_days.py",
    "simulator/test_offload.py",
    "importers/test_imports.py",
    "day/test_day_bounds.py",
    "runtime/test_validate_sessions.py",
    "search/test_loss_beside_production.py",
    "search/test_shared_bill.py",
    "search/test_kept_brute_force.py",
    "models/test_choice.py",
    "search/test_long_traces.py",
    "solvers/test_schedule.py",
    "search/test_session_plans.py",
    "reports/test_report.py",
    "search/test_fewest_gpus.py",
    "search/test_nodes.py",
    "documents/test_schemas.py",
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
