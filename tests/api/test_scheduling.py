"""A schedule that is simulated on the requests it is for, and repaired where windows miss the SLO."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fleetplan
from planner.api.scheduling import ScheduleResult
from planner.reports.schedule_page import gpu_rows, worker_rows
from planner.search.schedules import scheduled
from planner.simulator.layout import UNFINISHED

ONE = {
    "llm": "meta-llama/Llama-3.1-8B",
    "workers": [{"name": "mixed", "role": "mixed", "gpu": "a100-80g", "tp": 1, "count": 1}],
}
SLO = {"ttft": {"p90": "1 s"}, "tbt": {"p95": "100 ms"}}


def traffic(minutes: int = 6, busy: int = 720, seed: int = 0) -> pd.DataFrame:
    """2 and 12 requests/s, every other minute."""
    rng = np.random.default_rng(seed)
    counts = [120 if k % 2 else busy for k in range(minutes)]
    at_s = np.concatenate([60 * k + np.sort(rng.uniform(0, 60, n)) for k, n in enumerate(counts)])
    at_s[-1] = 60 * minutes
    lengths = rng.integers(200, 1500, len(at_s)), rng.integers(20, 200, len(at_s))
    return pd.DataFrame({"arrival_s": at_s, "input_tokens": lengths[0], "output_tokens": lengths[1]})


def market(
    folder: Path, *, rate: str = "12 req/s", stock: int = 6, llms: tuple[str, ...] = ("chat",), **more: Any
) -> dict[str, Any]:
    (folder / "one.yaml").write_text(json.dumps(ONE))
    row = {
        "worker": "tp1",
        "gpu": "a100-80g",
        "rate": rate,
        "start": "10 s",
        "fleet": str(folder / "one.yaml"),
    }
    return {
        "gpus": {"a100-80g": {"on_demand": "2 usd/h", "reserved": "1 usd/h", "stock": stock, **more}},
        "capacity": [{"llm": llm, **row} for llm in llms],
        "slo": dict.fromkeys(llms, SLO),
    }


def asked(sold: Mapping[str, Any], **traces: pd.DataFrame) -> ScheduleResult:
    # In a fresh clone the simulator is compiled within the limit, which takes a minute on a busy machine.
    return fleetplan.schedule(sold, traces, window="1 min", time_limit_s=600)


def test_gpus_of_whole_nodes_are_said_to_be_counted_singly() -> None:
    """The command said it; Python and schedule.html did not."""
    by_hand = {
        "gpus": {"h100-80g": {"on_demand": "3 usd/h"}},
        "capacity": [{"llm": "chat", "worker": "tp4", "gpu": "h100-80g", "gpus": 4, "rate": "2 req/s"}],
    }
    found = fleetplan.schedule(by_hand, pd.DataFrame({"chat": [1.0, 3.0]}))
    said = "in which the catalog sells h100-80g by 8"
    assert any(said in line for line in found.sentences())
    assert said in found.to_dict()["market_note"] and said in found.report()


def test_busy_windows_get_workers_until_they_hold(tmp_path: Path) -> None:
    """One worker is said to sustain 12 requests/s and does not: the busy minutes miss, and hold with more.
    The calm ones stay as they were."""
    found = asked(market(tmp_path), chat=traffic())
    told = found.simulated
    assert told is not None and found.to_dict()["workers"][0]["firm"] == [1] * 6
    (of_slo,) = told.slo_windows
    assert (
        of_slo.windows == 5
        and of_slo.missed_before >= 3
        and not of_slo.missed_begin_s
        and told.added_worker_windows >= 3
    )
    assert min(told.schedule.workers[0]) == 1 < told.schedule.workers[0][0]
    assert told.cost_usd_per_h > told.cost_before_usd_per_h
    written = told_csv(found, tmp_path)
    assert "window,llm,worker,firm,spot\n0,chat,tp1," in written
    # Tables and frames have the workers of the file, not those before the repair.
    assert [line.split(",")[3] for line in written.splitlines()[1:]] == [
        str(n) for n in found.to_frame()["firm"]
    ]
    workers = told.schedule.workers[0]
    assert worker_rows(found.answer)[1] == [("chat", "tp1", f"{workers.min()} to {workers.max()}", "0")]
    assert gpu_rows(found.answer)[1][0][:2] == ("a100-80g", f"{told.schedule.reserved_gpus[0]}")
    assert any("keeps its SLO in 5 of 5" in line for line in found.sentences())
    assert found.to_dict()["simulated"]["added_worker_windows"] == told.added_worker_windows


def told_csv(found: ScheduleResult, folder: Path) -> str:
    found.save(folder / "w.csv")
    return (folder / "w.csv").read_text()


def test_what_is_paid_is_what_is_held(tmp_path: Path) -> None:
    """Two workers at first and last, one between, ready in time: asked for 10 s before the fourth minute. By
    hand: 60 + 50 s with two or, from 170 s on, two again to 240 s; one is reserved for 1 USD/h."""
    frame = traffic(4, busy=120)
    sold = market(tmp_path, rate="2.1 req/s")
    more = frame.iloc[:120].copy()
    more["arrival_s"] = np.linspace(180.5, 239.5, 120)
    more[["input_tokens", "output_tokens"]] = 10
    frame = pd.concat([frame, more]).sort_values("arrival_s", ignore_index=True)
    found = asked(sold, chat=frame)
    told = found.simulated
    assert told is not None and told.added_worker_windows == 0
    assert told.schedule.workers[0].tolist() == [1, 1, 1, 2] and told.reserved_gpus.tolist() == [1]
    assert told.reserved_usd_per_h == pytest.approx(1.0)
    assert told.on_demand_usd_per_h == pytest.approx(2 * 70 / 240)
    assert told.held_gpus[0] == pytest.approx([1, 1, 1 + 10 / 60, 2])


def test_an_llm_whose_traffic_ends_is_paid_no_longer_and_frees_its_gpus(tmp_path: Path) -> None:
    """chat has traffic for the first two of six minutes and the moment after them; code then takes its GPU.
    By hand: 2 USD/h for code's first worker, for chat's half the time, and for code's second one from 10 s
    before the fifth minute on. chat's worker was paid, and held the second of two GPUs, to the end.
    """
    frame = traffic(6, busy=120, seed=1)
    more = pd.DataFrame(
        {"arrival_s": np.linspace(240.5, 359.5, 240), "input_tokens": 10, "output_tokens": 10}
    )
    frame = pd.concat([frame, more]).sort_values("arrival_s", ignore_index=True)
    sold = market(tmp_path, rate="2.1 req/s", stock=2, llms=("chat", "code"))
    sold["gpus"]["a100-80g"].pop("reserved")
    told = asked(sold, chat=traffic(2, busy=120), code=frame).simulated
    assert told is not None and told.added_worker_windows == 0
    assert told.schedule.workers.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2]]
    assert told.held_gpus[0] == pytest.approx([2, 2, 2, 1 + 10 / 60, 2, 2])
    assert told.on_demand_usd_per_h == pytest.approx(2 * (180 + 360 + 130) / 360)


def test_llms_share_the_stock(tmp_path: Path) -> None:
    """Both want two in the busy minutes, of three GPUs: what cannot be mended is said."""
    sold = market(tmp_path, stock=3, llms=("chat", "code"))
    found = asked(sold, chat=traffic(), code=traffic(seed=1))
    told = found.simulated
    assert told is not None and told.missed_windows > 0
    assert (told.held_gpus.sum(axis=0) <= 3 + 1e-9).all()
    assert told.why_missed == "no limit leaves room for more workers" or "do not help" in told.why_missed
    assert any(line.startswith("Windows that are missed still") for line in found.sentences())


def test_spot_workers_are_taken_and_asked_for_again(tmp_path: Path) -> None:
    sold = market(tmp_path, rate="3 req/s", spot="0.5 usd/h", interruptions=60) | {"spot": 0.5}
    told = asked(sold, chat=traffic()).simulated
    assert told is not None and told.spot_workers_taken > 0 and told.spot_usd_per_h > 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda sold: sold["capacity"][0].pop("fleet"), r"capacity\[0\] names no fleet"),
        (lambda sold: sold.pop("slo"), "slo: says nothing of chat"),
    ],
)
def test_why_it_is_not_simulated(tmp_path: Path, change: Any, why: str) -> None:
    sold = market(tmp_path)
    change(sold)
    found = asked(sold, chat=traffic(2))
    assert found.simulated is None
    with pytest.raises(AssertionError, match=why):
        assert not found.answer.not_simulated, found.answer.not_simulated
    rates = fleetplan.schedule(sold, pd.DataFrame({"chat": [2.0, 12.0]}))
    assert "is rates, not requests" in rates.to_dict()["not_simulated"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpus": 2}, "gpus is 2, its fleet has 1"),
        ({"fleet": "nowhere.yaml"}, "nowhere.yaml"),
        ({"flet": "one.yaml"}, "fleet"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    sold = market(tmp_path)
    sold["capacity"][0] |= change
    with pytest.raises(fleetplan.PlannerError, match=said):
        asked(sold, chat=traffic(2))
    with pytest.raises(fleetplan.PlannerError, match="demand: names no LLM"):
        fleetplan.schedule(market(tmp_path), {})
    strict = market(tmp_path) | {"slo": {"chat": SLO | {"every": "2 min"}}}
    with pytest.raises(fleetplan.PlannerError, match="at most a window"):
        asked(strict, chat=traffic(2))


def test_a_window_with_a_request_that_is_never_served_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are: by its percentiles the window was kept."""
    monkeypatch.setattr(scheduled, "missed_windows", lambda *_: [0])
    simulation = SimpleNamespace(
        edges_s=np.array([0.0, 60.0, 120.0, 180.0]),
        arrival_s=np.array([10.0, 70.0, 130.0]),
        status=np.array([UNFINISHED, UNFINISHED + 1, UNFINISHED]),
    )
    served, run = SimpleNamespace(slo=None), SimpleNamespace(run=SimpleNamespace(simulation=simulation))
    assert scheduled._missed_windows([served], [run]) == [(0, 0), (0, 2)]  # type: ignore[list-item]


def test_a_busy_machine_repairs_a_schedule_as_an_idle_one_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each simulation takes 150 s of 600 s here. After four of them no needless worker was taken away."""
    idle = asked(market(tmp_path), chat=traffic()).simulated
    real_s, simulated = time.monotonic, list[float]()

    def simulate_slowly(*arguments: Any) -> Any:
        simulated.append(150.0)
        return simulate_llms(*arguments)

    simulate_llms = scheduled._Rehearsal.simulate
    monkeypatch.setattr(scheduled._Rehearsal, "simulate", simulate_slowly)
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + sum(simulated))
    busy = asked(market(tmp_path), chat=traffic()).simulated
    assert idle is not None and busy is not None and len(simulated) > 4
    assert busy.schedule.workers.tolist() == idle.schedule.workers.tolist()
    assert (busy.cost_usd_per_h, busy.why_missed) == (idle.cost_usd_per_h, idle.why_missed)
