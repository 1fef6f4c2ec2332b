"""Requests that wait for others: in the kernel, against the plain simulator, and in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from simulations import LLM, compare, make_latency, make_pool, make_trace, random_case

from planner.domain import Limit, Slo
from planner.errors import InputError, TraceError
from planner.fleet import Disturbance, Fleet, Policies
from planner.reports.output import requests_csv
from planner.simulator import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import judge_slo
from planner.traffic.scaling import select_window
from planner.traffic.sessions import with_nominal_arrivals
from planner.traffic.trace import Trace
from planner.traffic.trace_reading import read_trace


def waiting(trace: Trace, after: list[tuple[int, int]], think_s: Sequence[float] = ()) -> Trace:
    """`after`: (request, parent)."""
    edges = np.array(sorted(after, key=lambda edge: (edge[1], edge[0])), np.int64)
    return replace(trace, after=edges, think_s=np.array(think_s, float))


def fleet(*, step_s: float = 1.0, kv_tokens: int = 16 * 1000, **policies: object) -> Fleet:
    """One worker; every step takes so long, whatever is in it."""
    pool = make_pool(make_latency((step_s, step_s)), kv_tokens=kv_tokens)
    return Fleet(LLM, (pool,), Policies(**policies))  # type: ignore[arg-type]


def finished_s(found: Simulation) -> npt.NDArray[np.float64]:
    return found.arrival_s + found.e2e_s


# ------------------------------------------------------------------------------- against the plain simulator


@pytest.mark.long
@pytest.mark.parametrize("dyadic", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_kernel_and_plain_simulator_agree(part: int, dyadic: bool) -> None:
    """Everything of 40 random fleets each, mixed and disaggregated; one request in two waits for one or two
    others, half of them without a pause.
    """
    for seed in range(40 * part, 40 * (part + 1)):
        engines, trace, limits, _ = random_case(seed, dyadic=dyadic)
        rng = np.random.default_rng(seed)
        children = np.repeat(1 + np.flatnonzero(rng.integers(2, size=len(trace) - 1)), 2)
        edges = {(child, int(rng.integers(child))) for child in children.tolist()}
        pauses = rng.integers(0, 2048, len(trace)) / 1024 if dyadic else rng.uniform(0, 2, len(trace))
        think_s = (pauses * rng.integers(2, size=len(trace))).tolist()
        compare(engines, waiting(trace, sorted(edges), think_s), limits, 0)


# ------------------------------------------------------------------------------------------------- by hand


def test_a_turn_begins_after_the_answer_and_a_pause() -> None:
    """3 tokens from 0: finished at 3 s. The next turn comes 5 s later and takes 2 s."""
    trace = waiting(make_trace([0, 0], [8, 8], [3, 2]), [(1, 0)], [0, 5])
    found = simulate(fleet(), trace)
    assert found.arrival_s.tolist() == [0, 8]
    assert found.ttft_s.tolist() == [1, 1]
    assert finished_s(found).tolist() == [3, 10]


def test_who_waits_for_several_waits_for_the_last() -> None:
    """Finished at 1, 4 and 2 s."""
    trace = waiting(make_trace([0, 0, 0, 0], [8] * 4, [1, 4, 2, 1]), [(3, 0), (3, 1), (3, 2)])
    assert simulate(fleet(), trace).arrival_s[3] == 4


def test_nobody_comes_before_the_own_time() -> None:
    trace = waiting(make_trace([0, 7], [8, 8], [1, 1]), [(1, 0)], [0, 2])
    assert simulate(fleet(), trace).arrival_s[1] == 7


def test_a_client_is_not_so_quick_as_the_step_that_starts_with_its_answer() -> None:
    """A at 0 takes 3 s, B one. What waits for B comes at 1 s, but the step of A from 1 to 2 s has begun."""
    trace = waiting(make_trace([0, 0, 0], [8] * 3, [3, 1, 1]), [(2, 1)])
    found = simulate(fleet(), trace)
    assert found.arrival_s[2] == 1
    assert found.queue_s[2] == 1 and found.ttft_s[2] == 2


def test_load_follows_the_fleet() -> None:
    """Ten agents of ten steps: never more than ten requests are in flight, and if everything takes twice as
    long, every request comes twice as late.
    """
    agents, n = 10, 100
    after = [(i, i - agents) for i in range(agents, n)]
    trace = waiting(make_trace([0.0] * n, [8] * n, [2] * n), after)
    found, slower = simulate(fleet(), trace), simulate(fleet(step_s=2.0), trace)
    in_flight = [
        (found.arrival_s <= at_s).sum() - (finished_s(found) <= at_s).sum() for at_s in found.arrival_s
    ]
    assert max(in_flight) == agents
    assert slower.arrival_s.tolist() == (2 * found.arrival_s).tolist()
    assert found.arrival_s[-1] > 20  # 9 steps of 2 s before, in 8 seats


def test_what_waits_for_the_rejected_is_rejected() -> None:
    """3 blocks of memory: 64 tokens fit never. Whoever waits for that, or for who waits for that, does not
    come; another does.
    """
    trace = waiting(make_trace([0] * 5, [8, 64, 8, 8, 8], [2] * 5), [(2, 1), (3, 2), (3, 0), (4, 0)])
    found = simulate(fleet(kv_tokens=48), trace)
    assert found.status.tolist() == [0, 1, 1, 1, 0]
    assert np.isnan(found.ttft_s[2:4]).all() and found.complete


def test_children_wait_through_a_failure() -> None:
    """The worker dies at 1.5 s and is back at 10: two of three tokens then, the child comes at 12 s."""
    down = (Disturbance(1.5, "down"), Disturbance(10.0, "up"))
    trace = waiting(make_trace([0, 0], [8, 8], [3, 1]), [(1, 0)])
    found = simulate(replace(fleet(), disturbances=down), trace)
    assert found.arrival_s[1] == finished_s(found)[0] == 12


def test_early_stop_counts_who_comes_late() -> None:
    """A promise that the last turn breaks is refuted, though its own arrival_s lies in the warm-up."""
    n = 40
    trace = waiting(make_trace(np.arange(n), [8] * n, [1] * n), [(39, 0)], [0] * 39 + [1000])
    whole = simulate(fleet(), trace, limits=(Limit("ttft", 1.0, 2.0),))
    assert whole.complete and whole.counted[0] == (whole.arrival_s >= whole.window_s[0]).sum()


# ---------------------------------------------------------------------------------------- what goes with it


def test_engines_of_their_own_and_closed_loops_are_refused() -> None:
    trace = waiting(make_trace([0, 0], [8, 8], [1, 1]), [(1, 0)])
    for engines in (fleet(batching="distserve"), fleet(batching="splitwise")):
        with pytest.raises(InputError, match=r"wait for others \(column after\), which goes neither"):
            simulate(engines, trace)
    with pytest.raises(InputError, match="goes neither with a closed loop"):
        simulate(fleet(), trace, closed_loop=2)


def test_a_part_of_a_trace_keeps_the_edges_within_it() -> None:
    trace = waiting(make_trace([0, 1, 2, 3], [8] * 4, [1] * 4), [(1, 0), (2, 1), (3, 2)])
    assert select_window(trace, "first 2 s").after.tolist() == [[1, 0]]
    assert trace.select([1, 3]).after.tolist() == []
    assert trace.select([0, 1, 3]).after.tolist() == [[1, 0]]


# --------------------------------------------------------------------------------------------------- files

HEADER = "request_id,arrival_s,input_tokens,output_tokens,after,think_s\n"


def read(tmp_path: Path, content: str, name: str = "t.csv") -> Trace:
    path = tmp_path / name
    path.write_text(content)
    return read_trace(path, drop_invalid=True)


def test_a_file_says_who_waits_for_whom(tmp_path: Path) -> None:
    """Ids are names, not places; rows without tokens are left out and nobody may wait for them."""
    table = HEADER + '7,0,8,2,,\n5,0,8,0,,\n3,1,8,2,7,2.5\n9,1,8,2,"[7, 3]",\n'
    trace = read(tmp_path, table)
    assert trace.after.tolist() == [[1, 0], [2, 0], [2, 1]]
    assert trace.think_s.tolist() == [0, 2.5, 0]
    assert trace.arrival_s.tolist() == [0, 2.5, 2.5]
    assert trace.notes[0].startswith("2 requests wait for others, so when they arrive depends on the fleet")
    lines = (
        '{"request_id":7,"timestamp":0,"input_tokens":8,"output_tokens":2,"after":[],"think_s":0}',
        '{"request_id":3,"timestamp":1,"input_tokens":8,"output_tokens":2,"after":[7],"think_s":1}',
    )
    trace = read(tmp_path, "\n".join(lines), "t.jsonl")
    assert trace.after.tolist() == [[1, 0]] and trace.think_s.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("arrival_s,input_tokens,output_tokens,after\n0,8,2,\n", "names requests by their request_id"),
        (HEADER + "1,0,8,2,,\n1,0,8,2,,\n", "'1' is given twice"),
        (HEADER + "1,0,8,2,,\n2,0,8,2,4,\n", "request 2 waits for 4, which is no request with tokens"),
        (
            HEADER + "1,0,8,2,2,\n2,0,8,2,,\n",
            "request 1 waits for 2, which is no request with tokens that st",
        ),
        (HEADER + "1,0,8,0,,\n2,0,8,2,1,\n", "request 2 waits for 1, which is no request with tokens"),
        (HEADER + "1,0,8,2,x,\n", "line 2, column after: expected a list of whole numbers"),
        (HEADER + "1,0,8,2,,-1\n", "line 2, column think_s: expected seconds >= 0, found '-1'"),
    ],
)
def test_nonsense_is_one_line(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(tmp_path, table)


def test_edges_that_lead_nowhere_are_refused() -> None:
    trace = make_trace([0, 0], [8, 8], [1, 1])
    for edge in ((0, 1), (1, 1), (1, -1), (2, 0)):
        with pytest.raises(TraceError, match="parents must come before their children"):
            waiting(trace, [edge])


def test_requests_csv_is_a_trace_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    """Requests 1 and 2 change places; replayed at these times everything happens again."""
    trace = waiting(make_trace([0, 0, 1], [8, 8, 8], [3, 2, 2]), [(1, 0)], [0, 5, 0])
    found = simulate(fleet(), trace)
    path = tmp_path / "requests.csv"
    path.write_text(requests_csv(found))
    again = simulate(fleet(), read_trace(path))
    assert again.arrival_s.tolist() == sorted(found.arrival_s.tolist()) == [0, 1, 8]
    assert sorted(again.e2e_s.tolist()) == sorted(found.e2e_s.tolist())


def test_a_queue_that_grows_while_sessions_begin_is_no_steady_state() -> None:
    """A worker of one seat takes 2 s for a request; a session begins every second and has two. The last ones
    to begin wait for minutes. In the last tenth of the run, which only works off the queue, nobody arrives.
    """
    n = 100
    first = make_trace(np.arange(n), [8] * n, [2] * n)
    both = first.select(np.repeat(np.arange(n), 2))
    trace = with_nominal_arrivals(waiting(both, [(i, i - 1) for i in range(1, 2 * n, 2)], [0, 5] * n))
    pool = make_pool(make_latency((1.0, 1.0)), seats=1)
    slo = Slo((Limit("tbt", 0.5, 2.0),))
    found = simulate(Fleet(LLM, (pool,), Policies()), trace, limits=slo.limits)
    assert found.end_s == 400 and found.arrival_s.max() < 360
    assert not judge_slo(found, slo).is_steady
    quick = simulate(Fleet(LLM, (replace(pool, count=5),), Policies()), trace, limits=slo.limits)
    assert judge_slo(quick, slo).is_steady


@pytest.mark.parametrize("queue", ["fcfs", "sjf", "srpt"])
def test_of_equals_the_first_to_arrive_goes_first(queue: str) -> None:
    """One seat. Requests 0 (5 tokens) and 2 (9) come at 0 s, 1 (as 3) once 0 has ended at 1 s, 3 at 0.5 s."""
    trace = waiting(make_trace([0.0, 0.0, 0.0, 0.5], [5, 9, 9, 9], [1, 1, 4, 1]), [(1, 0)], [0.0] * 4)
    one_seat = fleet(queue=queue)
    pool = replace(one_seat.pools[0], type=replace(one_seat.pools[0].type, max_num_seqs=1))
    assert finished_s(simulate(replace(one_seat, pools=(pool,)), trace))[[3, 1]].argsort().tolist() == [0, 1]
