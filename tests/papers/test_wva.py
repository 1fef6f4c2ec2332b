"""benchmarks/peers/wva.py: the queueing model against theory, and against the cases of other programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import wva

ROOT = Path(__file__).parents[2]
CASES = ROOT.parent / "shared" / "reference" / "wva_queue_cases.json"
ONE_SEAT = {"N": 1, "Q": 9, "alpha": 2.0, "beta": 0.0, "gamma": 60.0, "delta": 0.0, "tin": 100, "tout": 21}


def test_one_seat_is_a_queue_of_theory() -> None:
    """60 + 20 x 2 = 100 ms of service. M/M/1/10 at 5 requests/s, u = 0.5: in all there are
    u / (1 - u) - 11 u^11 / (1 - u^11) = 0.9946, and p_10 = (1 - u) u^10 / (1 - u^11) of them are refused."""
    u = 0.5
    refused = (1 - u) * u**10 / (1 - u**11)
    held = u / (1 - u) - 11 * u**11 / (1 - u**11)
    found = wva.analyze(ONE_SEAT, 5.0)
    assert found["tput"] == pytest.approx(5 * (1 - refused))
    assert found["resp"] == pytest.approx(1e3 * held / found["tput"])
    assert found["serv"] == pytest.approx(100)
    assert found["ttft"] == pytest.approx(found["wait"] + 60) and found["itl"] == 2.0


def test_the_rates_it_sizes_meet_their_targets_just_so() -> None:
    """Where a target is loose, the fastest service less a thousandth is the answer: 9.99 requests/s of 10."""
    sized = wva.size(ONE_SEAT, {"ttft": 160.0, "itl": 3.0})
    assert wva.analyze(ONE_SEAT, sized["ttft"])["ttft"] == pytest.approx(160.0)
    assert sized["itl"] == sized["tps"] == pytest.approx(9.99)
    assert wva.size(ONE_SEAT, {"ttft": 59.0, "itl": 3.0})["ttft"] == 0


def test_one_seat_is_simulated_as_theory_says() -> None:
    """M/D/1 at u = 0.5: a prompt waits u / (2 (1 - u)) = 0.5 services of 100 ms on average, then 60 ms."""
    ttft_ms, tpot_ms = wva.simulated(ONE_SEAT | {"Q": 0}, 5.0, 40_000)
    assert ttft_ms == pytest.approx(110.0, rel=0.03)
    assert tpot_ms == pytest.approx(2.0)


@pytest.mark.shared
@pytest.mark.skipif(not CASES.is_file(), reason="no reference data beside the checkout")
def test_the_cases_of_wva_come_out() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "peers" / "wva.py"), str(CASES), "--requests", "500"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
