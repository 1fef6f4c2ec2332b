"""Simulates a fleet on a trace, step by step of every engine.

initial_state.py fills the kernel's arrays, kernel.py runs the events, read_results.py reads the results of
the requests, and slo_verdict.py judges them by an SLO. replay.py joins them all. The modules by what they are
for; begin with layout.py:

    arrays           layout, cache_layout, offload_layout, adapter_layout
    before a run     policy_checks, initial_state, worker_rows, worker_places, pins, counted_limits
    events           kernel, event_heap, queues, request_ends, outages, flips
    a step           batching, priorities, slots, kv_blocks, step_times, polling, joint_steps, ranks
    its tokens       decoding, counting
    waiting prompts  queue_orders, held_prompts
    routers          routing, prefix_routing, router_loads, predictions
    KV and adapters  caches, offload, transfer, adapters
    other engines    splitwise, splitwise_pools, distserve
    whole runs       replay, streaming_requests
    changing pools   elastic, timetable, readings
    results          simulation, read_results, measured_values, recorded_gaps, gap_counts
    judgements       slo_verdict, service_shares, tenant_service, utilisation, energy
    compilation      numba_compile, kernel_variants, linking, pointers
"""

from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo

__all__ = ["Simulation", "Verdict", "judge_slo", "simulate"]
