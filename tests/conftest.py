"""Settings shared by all tests."""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import typer.main
import typer.testing
import yaml
from hypothesis import HealthCheck, settings

# a busy machine is slow, not wrong
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# a process has one command line, tests have thousands: its sixty commands are read from their signatures once
typer.main.get_command = typer.testing._get_command = cache(  # type: ignore[attr-defined]
    typer.main.get_command
)


# the same documents ten times as fast
yaml.safe_load = partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))

# real servers, engines, processes and browsers: on a busy machine one loses a race now and then. What fails
# there is tried twice more and told as RERUN; everywhere else a failure is a failure
WITH_SERVERS = ("browser", "runtime", "ui", "with_vllm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    of_servers = {
        path
        for path in {item.path for item in items}
        if any(path.is_relative_to(here / folder) for folder in WITH_SERVERS)
    }
    for item in items:
        if item.path in of_servers:
            item.add_marker(pytest.mark.flaky(reruns=2))


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """To the log of the run, past pytest's capture."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stdout.write(f"\n    {text}")

    return write
