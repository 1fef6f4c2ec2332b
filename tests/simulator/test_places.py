"""Where workers lie, and that a pair's link is the one between them: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.documents.catalog import read_catalog
from planner.documents.network import KEYS, network_document, parse_network
from planner.domain import Limit, Slo
from planner.errors import InputError
from planner.files.document_values import Section
from planner.fleet import Fleet, Network, Policies, Pool, Topology, WorkerType
from planner.models.latency import StepLatency
from planner.runtime.live_routing import LiveFleet
from planner.search.evidence.findings import place_workers
from planner.search.oracle.fleet_oracle import Oracle
from planner.simulator.replay import simulate
from planner.simulator.worker_places import make_links, worker_nodes
from planner.solvers.master import Option
from planner.traffic.trace import Trace

CATALOG = read_catalog()
LLM = CATALOG.llm("llama-3.1-8b")
GPU = replace(CATALOG.gpu("h100-80g"), gpus_per_node=4, link_bytes_per_s=400e9)
STEP = StepLatency((1.0, 2.0), (0.1, 0.1), 0.0, 0.0, 0.0, 0.0, 0.0, "by hand")
BLOCK_BYTES = 16 * LLM.kv_bytes_per_token


def kind(tp: int, pp: int = 1) -> WorkerType:
    return WorkerType(GPU, tp, STEP, 160_000, 8192, 64, pp)


def fleet(prefill: tuple[int, int], decode: tuple[int, int], network: Network, routing: str = "jsq") -> Fleet:
    """(tp, count) of each pool."""
    pools = (
        Pool("pre", "prefill", kind(prefill[0]), prefill[1]),
        Pool("dec", "decode", kind(decode[0]), decode[1]),
    )
    return Fleet(LLM, pools, Policies(routing="round-robin", decode_routing=routing), network)


def trace(n: int, gap_s: float = 100.0) -> Trace:
    return Trace("made", gap_s * np.arange(n, dtype=np.float64), np.full(n, 1600), np.full(n, 2))


SERIAL = Network(10e9, 1e-3, "serialised", topology=Topology())
WITHIN_S, BETWEEN_S = 100 * BLOCK_BYTES / 400e9, 100 * BLOCK_BYTES / 10e9 + 1e-3


def test_nodes_hold_both_roles_in_proportion() -> None:
    """2 prefill workers of 1 GPU, 6 decode: a node of 4 has 3 decode workers and then a prefill worker."""
    found = worker_nodes(fleet((1, 2), (1, 6), SERIAL))
    assert found[:2] == ((0,), (1,))
    assert found[2:] == ((0,), (0,), (0,), (1,), (1,), (1,))


def test_what_is_larger_than_a_node_takes_whole_ones() -> None:
    pools = (Pool("pre", "prefill", kind(4, 2), 1), Pool("dec", "decode", kind(2), 3))
    found = worker_nodes(Fleet(LLM, pools, Policies(), SERIAL))
    whole = found[0]
    assert len(whole) == 2 and not {node for nodes in found[1:] for node in nodes} & set(whole)


@pytest.mark.parametrize("batching", ["vllm-v1", "distserve"])
def test_the_link_of_a_pair_is_where_its_workers_lie(batching: str) -> None:
    """One pair on each of two nodes, one request after the other, in turns: the prefill worker of node 0,
    then of node 1. jsq has both decoded by the first idle worker, on node 0; same-node stays on the node. The
    second token is a step of 0.1 s and a transfer after the first."""
    near_s, far_s = 0.1 + WITHIN_S, 0.1 + BETWEEN_S
    for routing, expected in (("jsq", [near_s, far_s]), ("same-node", [near_s, near_s])):
        asked = fleet((2, 2), (2, 2), SERIAL, routing)
        asked = replace(asked, policies=replace(asked.policies, batching=batching))
        assert worker_nodes(asked) == ((0,), (1,), (0,), (1,))
        found = simulate(asked, trace(2))
        assert found.tpot_s == pytest.approx(expected, abs=1e-9)
        assert found.decode_worker.tolist() == ([2, 2] if routing == "jsq" else [2, 3])


def test_every_node_has_a_nic_of_its_own() -> None:
    """Two nodes that prefill and one with two that decode, hand-offs at once: beside each other. On one link
    the second waits for the first."""
    pools = (Pool("pre", "prefill", kind(4), 2), Pool("dec", "decode", kind(2), 2))
    asked = Fleet(LLM, pools, Policies(routing="round-robin"), SERIAL)
    assert worker_nodes(asked) == ((0,), (2,), (1,), (1,))
    together = trace(2, gap_s=0.0)
    apart = simulate(asked, together).tpot_s
    one = simulate(replace(asked, network=replace(SERIAL, topology=None)), together).tpot_s
    assert apart == pytest.approx([0.1 + BETWEEN_S] * 2, abs=1e-9)
    assert one[1] - one[0] == pytest.approx(100 * BLOCK_BYTES / 10e9, abs=1e-9)


def test_racks_are_joined_by_their_uplinks() -> None:
    """A node per rack, uplinks of half the NIC: a transfer takes twice as long; in one rack it does not."""
    pools = (Pool("pre", "prefill", kind(4), 1), Pool("dec", "decode", kind(4), 1))
    for per_rack, factor in ((1, 2.0), (2, 1.0)):
        network = replace(SERIAL, topology=Topology(nodes_per_rack=per_rack, rack_bytes_per_s=5e9))
        found = simulate(Fleet(LLM, pools, Policies(), network), trace(1)).tpot_s
        assert found == pytest.approx([0.1 + 1e-3 + factor * 100 * BLOCK_BYTES / 10e9], abs=1e-9)


def test_one_node_is_as_a_network_of_nvlink() -> None:
    """All on one node: the same as one link of that speed that nobody shares, request by request."""
    rng = np.random.default_rng(0)
    drawn = Trace(
        "drawn", np.cumsum(rng.exponential(0.05, 300)), rng.integers(16, 4000, 300), rng.integers(2, 40, 300)
    )
    asked = fleet((1, 2), (1, 2), replace(SERIAL, latency_s=0.0, transfer="layerwise"))
    one = replace(asked, network=Network(400e9, 0.0, "layerwise", is_shared=False))
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert np.array_equal(
            getattr(simulate(asked, drawn), name), getattr(simulate(one, drawn), name), True
        )


def test_the_live_router_stays_on_the_node_as_the_simulator_does() -> None:
    """The same choices, request by request, each done before the next is there."""
    asked = fleet((1, 3), (1, 5), SERIAL, "same-node")
    simulated = simulate(asked, trace(12))
    live = LiveFleet(asked)
    for w in range(asked.workers):
        live.note_up(w)
    for i in range(12):
        seat = live.take_seat(1600, 2, 100.0 * i)
        assert live.send_to_worker(seat, 100.0 * i) == simulated.prefill_worker[i]
        live.note_computed(seat, 100.0 * i + 0.1)
        live.note_left(seat, 100.0 * i + 0.1, 1)
        assert live.hand_off(seat, 100.0 * i + 0.1) == simulated.decode_worker[i]
        live.note_left(seat, 100.0 * i + 1.0, 2)
        live.release_seat(seat)


def test_the_placement_of_a_plan_is_where_the_simulator_has_its_workers() -> None:
    asked = fleet((2, 2), (1, 4), replace(SERIAL, topology=Topology(nodes_per_rack=1)))
    found = place_workers(asked)
    assert found is not None
    named = dict(zip(asked.worker_names, worker_nodes(asked), strict=True))
    for node in found.nodes:
        for part in node.parts:
            assert int(node.name.rsplit("-", 1)[1]) in named[f"{part.pool}-{part.worker}"]
        assert sum(len(part.gpus) for part in node.parts) <= 4
    assert [node.failure_domain for node in found.nodes] == ["rack-0", "rack-1"]
    assert found.cross_frac == 0.5


def test_it_is_read_and_written_to_the_last_bit() -> None:
    document = {"bandwidth": "25 GB/s", "topology": {"within": "300 GB/s", "nodes_per_rack": 4}}
    network = parse_network(Section.from_document(document, "network", KEYS))
    assert network.topology == Topology(300e9, 4)
    assert parse_network(Section.from_document(network_document(network), "network", KEYS)) == network
    with pytest.raises(InputError, match="topology"):
        parse_network(Section.from_document({"topology": {"nods": 4}}, "network", KEYS))


@pytest.mark.parametrize(
    ("policies", "network", "said"),
    [({"batching": "splitwise"}, SERIAL, "links of their own"), ({"pools": "flip"}, SERIAL, "their role")],
)
def test_what_nodes_do_not_go_with_is_refused(policies: dict[str, Any], network: Network, said: str) -> None:
    asked = fleet((1, 1), (1, 1), network)
    with pytest.raises(InputError, match=said):
        simulate(replace(asked, policies=replace(Policies(), **policies)), trace(1))


def test_a_plan_may_ask_for_it() -> None:
    """A question with a topology reaches the fleet that is simulated."""
    from planner.documents.task import parse_task

    document = {
        "llm": "llama-3.1-8b",
        "slo": {"ttft": {"p90": "1 s"}},
        "fleet": {"gpus": ["h100-80g"], "network": {"bandwidth": "25 GB/s", "topology": {}}},
    }
    assert parse_task(document, CATALOG).network.topology == Topology()


def test_an_answer_of_workers_on_one_node_is_not_that_of_workers_on_two() -> None:
    """Rented and owned GPUs of one row stand on nodes of their own. A hand-off of 100 blocks (200 MB) takes
    less than a millisecond over NVLink, and 42 s at 5 MB/s between nodes.
    """
    rented = kind(1)
    owned = replace(rented, gpu=replace(GPU, name="h100-80g@owned"))
    network = replace(SERIAL, bandwidth_bytes_per_s=5e6)
    oracle = Oracle(LLM, trace(4), Slo((Limit("e2e", 1.0, 20.0),)), network, Policies())
    together, apart = (
        ((Option("prefill", rented, 1.0), 1), (Option("decode", decodes, 1.0), 1))
        for decodes in (rented, owned)
    )
    assert oracle.holds(together) and not oracle.holds(apart)


def test_a_hand_off_of_sparse_attention_moves_the_scales_too() -> None:
    """656 bytes of a token in each of 61 layers before Blackwell, in place of 576."""
    for name, more in (("h200-141g", 61 * 80), ("b200-180g", 0)):
        llm, worker = CATALOG.llm("nvidia/DeepSeek-V3.2-NVFP4"), replace(kind(8), gpu=CATALOG.gpu(name))
        pools = (Pool("pre", "prefill", worker, 1), Pool("dec", "decode", worker, 1))
        (link,) = make_links(Fleet(llm, pools, Policies(), Network(10e9, 1e-3, "serialised")))
        assert link["block_s"] == pytest.approx(16 * (llm.kv_bytes_per_token + more) / 10e9)
