"""From a question to a certified plan.

docs/architecture.md tells one run of `plan`. Here are the modules of each folder, the highest first; a module
imports only its own folder and lower ones. Begin with certify.py, or from below with fleet_oracle.py:

    schedules              scheduled
    several                several_llms, shared_plan, shared_paper, shared_production, shared_bill
    several, limits        joint_limits, shared_kept
    evidence               certify, plan, written_plan, findings, assumptions, long_traces
    evidence, fleets       alternatives, robustness
    production             production_fleet, cheapest_kept, scenario_test, scale_model, idle_scenarios
    production, cheaper    cheaper_fleets, other_roles, like_price
    production, answers    three_answers, fleet_with_a_loss, kept_policies, most_traffic
    mixed                  best_fleet, mixed_fleets, mixtures, bounds
    mixed, policies        policy_search, policy_race, router_fit, polished_pins
    mixed, no fleet        infeasible, least_limits, agents_reach
    level0                 level0_search, one_pool, two_pools, walk, pruning_rules
    level0, lists          cheapest, designs, filling, owned_gpus
    problem                plan_problem, build_problem, options, idle_limits, link, prefix_hits
    problem, money         bill, owned_first
    problem, reports       stages, reasons, draws
    oracle                 fleet_oracle, fleet_counts, node_losses, headroom, more_workers
    oracle, simulations    simulation_queries, verdict_cache, resuming, deterministic_parallel, work_clock
    oracle, traffic        traffic_request, scenarios
    prefixes               prefix_placing, pinning, prefix_replay, keep_alive, prefix_drift
"""
