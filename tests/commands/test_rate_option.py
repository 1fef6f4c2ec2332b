"""--rate of the commands that rescale a trace."""

from __future__ import annotations

import pytest
import typer

from planner.commands.shared_options import _rate_rps


@pytest.mark.parametrize(
    "text", ["4", "4 req/s", "4 requests/s", "240 req/min", "14400 requests/h", "14400/h"]
)
def test_a_rate_may_have_the_units_of_slo_yaml(text: str) -> None:
    """`plan simulate --rate '4 req/s'` was "unable to parse string as a number"; `plan --rate` takes it."""
    assert _rate_rps(text) == 4.0


def test_another_rate_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="expected a quantity such as '2 rps', found 'fast'"):
        _rate_rps("fast")
