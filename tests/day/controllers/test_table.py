"""The table of controllers: what a document may say, and what every controller has in common."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy as np
import pytest
from readings import knowledge, per_worker, reading

from planner.day.controllers.knowledge import CapacityTable, EngineProfile, Knowledge
from planner.day.controllers.oscillation import find_oscillations
from planner.day.controllers.table import CONTROLLERS, parse_controller, parse_controllers, settings_variants
from planner.errors import InputError
from planner.fleet import Role
from planner.simulator.elastic import Controller, ElasticPool, Floats, Ints

ALL = tuple(CONTROLLERS)
GIVEN: dict[str, dict[str, object]] = {
    "cron": {"windows": [{"from": "8:00", "to": "20:00", "workers": 3}]},
    "wva": {"tolerance": "0 %"},
}
# a prompt of 500 tokens takes 0.5 s; four sequences keep 20 ms
SLOW = EngineProfile(0.02, 9.6e-4, 0.01, 2.4e-3, 0.0, seats=64, kv_tokens=100_000, context_tokens=4096)


def known(roles: tuple[Role, ...] = ("mixed",), **limits: float) -> Knowledge:
    """2 requests/s a worker of each pool."""
    table = per_worker(1.0, *[2.0] * len(roles), rows=60)
    return knowledge(
        roles,
        capacity=table,
        engines=(SLOW,) * len(roles),
        ttft_s=2.0,
        tpot_s=0.02,
        **limits,  # type: ignore[arg-type]
    )


WRONG = {
    "a name that is none": ("hpaa", {}, "unknown controller 'hpaa'; did you mean 'hpa'"),
    "a parameter that is none": ("hpa", {"tolerence": 0.1}, "did you mean 'tolerance'"),
    "a metric that nobody exports": ("hpa", {"metric": "vllm:gpu_cache_usage_perc"}, "no engine exports"),
    "a metric's own name": ("hpa", {"metric": "vllm:num_requests_waitin"}, "'vllm:num_requests_waiting'"),
    "a share above one": ("hpa", {"metric": "kv", "target": 70}, "expected at most 1 or 100 %"),
    "no unit": ("hpa", {"down_window": 300}, "has no unit; write 300 ms or 300 s"),
    "out of range": ("hpa", {"down_window": "2 h"}, "down_window: must be 0 s to 1 h, found 2 h"),
    "nothing per worker": ("hpa", {"target": 0}, "expected a number > 0"),
    "too fine a choice": ("dynamo", {"optimize": "latencies"}, "did you mean 'latency'"),
    "no mapping": ("keda", ["queue"], "expected keys and values"),
    "a clock of one pool": ("hpa", {"prefill": {"every": "5 s"}}, "every is one for all pools"),
    "apart where nothing is": ("fleetplan", {"prefill": {"hold": "5 s"}}, "unknown key 'prefill'"),
    "part of a day": ("cron", {"step": "7 h"}, "no whole part of a day"),
    "a panic of no length": ("knative", {"window": "6 s"}, "shorter than 1 s"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_line(case: str) -> None:
    name, parameters, says = WRONG[case]
    with pytest.raises(InputError, match=re.escape(says)) as found:
        parse_controller(name, parameters, f"slo.yaml: {name}")  # type: ignore[arg-type]
    assert str(found.value).startswith("slo.yaml: ") and "\n" not in str(found.value)


def test_values_with_units() -> None:
    chosen = parse_controller(
        "hpa", {"metric": "vllm:kv_cache_usage_perc", "target": "70 %", "down_window": "10 min"}
    )
    assert chosen.parameters() == {"metric": "kv", "target": "0.7", "down_window": "10 min"}
    with pytest.raises(FrozenInstanceError):
        chosen.settings.target = 1.0  # type: ignore[attr-defined]


def test_several_controllers() -> None:
    assert [each.row.name for each in parse_controllers("hpa, keda")] == ["hpa", "keda"]
    assert [each.row.name for each in parse_controllers({"hpa": {"metric": "kv"}, "static": None})] == [
        "hpa",
        "static",
    ]
    for value, says in ((["hpa", "hpa"], "there twice"), ("", "names no controller"), ("hpa,kda", "'keda'")):
        with pytest.raises(InputError, match=says):
            parse_controllers(value)


def test_least_above_most() -> None:
    with pytest.raises(InputError, match="least 4 and most 3 workers of a pool"):
        Knowledge((ElasticPool(60.0, least=4, most=3),), ("mixed",))


def test_a_table_that_cannot_be_made_of_the_traffic_says_what_it_takes() -> None:
    """Nobody can give a table; of 5 days at 0.1 requests/s the answer said "or give it"."""
    with pytest.raises(InputError, match=r"does not have; .* over 200 requests in its busiest 10 min"):
        Knowledge((ElasticPool(60.0),), ("mixed",)).require_facts("cron", "capacity")


@pytest.mark.parametrize("name", [name for name in ALL if CONTROLLERS[name].needs])
def test_what_is_needed_is_said(name: str) -> None:
    with pytest.raises(InputError, match=f"controller '{name}' needs "):
        parse_controller(name, {})(knowledge())


@pytest.mark.parametrize("name", ALL)
def test_rows_are_whole(name: str) -> None:
    row = CONTROLLERS[name]
    assert row.words and row.kind and row.source
    assert set(row.needs) <= {each.name for each in fields(Knowledge)}
    every = [each.name for each in row.parameters]
    assert len(every) == len(set(every)) and all(each.words and each.range for each in row.parameters)
    points = list(settings_variants(parse_controller(name, GIVEN.get(name))))
    assert len(points) >= len(row.grid) and len({repr(each.settings) for each in points}) == len(points)


def test_the_docs_have_every_controller() -> None:
    docs = Path(__file__).parents[3] / "docs"
    pages = "controllers.md", "tables/controllers.md", "evidence/controllers.md"
    page, parameters, evidence = ((docs / name).read_text() for name in pages)
    for row in CONTROLLERS.values():
        assert f"| `{row.name}` | {row.words} |" in page
        assert row.source.split("@")[0] in evidence
        for each in row.parameters:
            told = f"| `{each.name}` | {each.show_value(each.default)} | {each.range} | {each.words} |"
            assert told in parameters, told


def test_capacity_tables() -> None:
    table = CapacityTable(np.array([1.0, 2.0, 4.0]), np.array([[1, 1], [1, 2], [2, 3]]), "by hand")
    asked = [table.sizes_for_rate(rate).tolist() for rate in (0.0, 0.5, 1.0, 1.1, 4.0, 4.1, 6.0)]
    assert asked == [[0, 0], [1, 1], [1, 1], [1, 2], [2, 3], [3, 4], [3, 5]]
    for rates, sizes, says in (
        ([2.0, 1.0], [[1], [1]], "rates that rise"),
        ([1.0, 2.0], [[2], [1]], "a higher rate may not need fewer"),
    ):
        with pytest.raises(InputError, match=says):
            CapacityTable(np.array(rates), np.array(sizes), "by hand")


def fluid_day(controller: Controller, own: Knowledge, rates: Floats) -> tuple[Ints, Floats]:
    """Queues served as fluid, 2 requests/s a worker, by a minute's rates: sizes asked for, requests waiting.

    Workers start for 120 s; 20 requests hold a seat at a busy worker.
    """
    pools = len(own.pools)
    sizes = [2] * pools
    controller.start(sizes)
    ready, waiting = list(sizes), [0.0] * pools
    starting: list[list[float]] = [[] for _ in sizes]
    asked, queued = [], []
    step_s = controller.every_s
    for k in range(int(60 * len(rates) / step_s)):
        now_s = k * step_s
        rate = float(rates[int(now_s // 60)])
        busy = []
        for i in range(pools):
            ready[i] += sum(at_s <= now_s for at_s in starting[i])
            starting[i] = [at_s for at_s in starting[i] if at_s > now_s]
            need = waiting[i] + rate * step_s
            served = min(need, 2.0 * ready[i] * step_s)
            waiting[i] = need - served
            busy.append(served / (2.0 * ready[i] * step_s) if ready[i] else 0.0)
        seen = reading(
            now_s,
            interval_s=step_s,
            ready=ready,
            starting=[len(each) for each in starting],
            waiting=[int(each) for each in waiting],
            running=[int(20 * b * n) for b, n in zip(busy, ready, strict=True)],
            kv_frac=busy,
            arrived=[round(rate * step_s)] * pools,
            limbo=0 if min(ready) else int(max(waiting)),
            input_tokens=[500.0] * pools,
            output_tokens=[100.0] * pools,
            ttft_s=[0.1 + max(waiting)] * pools,
            tpot_s=[0.011] * pools,
        )
        sizes = [int(each) for each in controller.sizes(seen)]
        for i in range(pools):
            more = sizes[i] - ready[i] - len(starting[i])
            starting[i] += [now_s + 120.0] * max(more, 0)
            for _ in range(max(-more, 0)):
                ready[i], starting[i] = (ready[i], starting[i][:-1]) if starting[i] else (ready[i] - 1, [])
        asked.append(sizes)
        queued.append(max(waiting))
    return np.array(asked), np.array(queued)


DAY = 10 - 8 * np.cos(2 * math.pi * np.arange(240) / 240)  # requests/s, 4 h


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")])
def test_a_fluid_day(name: str, roles: tuple[Role, ...]) -> None:
    """2 to 18 requests/s and back: within the limits, whole numbers; whoever follows the traffic has five
    workers or more at some time, and fewer than its most in the end."""
    own = known(roles, least=1, most=24)
    controller = parse_controller(name, GIVEN.get(name))(own)
    asked, _ = fluid_day(controller, own, DAY)
    assert asked.min() >= 1 and asked.max() <= 24
    if name not in ("static", "cron"):
        assert (asked.max(axis=0) >= 5).all(), asked.max(axis=0)
        assert (asked[-1] < asked.max(axis=0)).all()
    again, _ = fluid_day(controller, own, DAY)
    assert (asked == again).all(), "start forgets"


def test_ours_leaves_less_waiting_than_the_usual_hpa() -> None:
    own = known(most=12)
    ours, hpa = (fluid_day(parse_controller(name, {})(own), own, DAY)[1] for name in ("fleetplan", "hpa"))
    assert ours.max() < 60 < hpa.max()


def test_an_hpa_without_windows_oscillates() -> None:
    """A queue of one per worker, nothing held: workers are given up while they start. Held, they are not."""
    own = known(most=12)
    jumpy = parse_controller("hpa", {"target": 1, "down_window": "0 s"})(own)
    asked, _ = fluid_day(jumpy, own, DAY)
    times_s = np.linspace(0.0, jumpy.every_s * (len(asked) - 1), len(asked))
    found = find_oscillations(times_s, asked, [120.0])
    assert found and found[0].times >= 3
    calm, _ = fluid_day(parse_controller("hpa", {"target": 1})(own), own, DAY)
    assert find_oscillations(times_s, calm, [120.0]) == ()
