"""Models of optimisation, one per file; nothing is simulated here.

Only backend.py knows the peculiarities of the solvers. The models by what they are for:

    the solvers      backend
    fleets           master, allocation, multiple_choice
    bounds           required_work, demand
    nodes            whole_nodes, placement
    one moment       moment_packing
    a day            pool_sizes, any_moment, paid_work, worker_rule
    weeks            reserved_schedule, schedule_pricing
    prefixes         prefix_demand, prefix_prices, prefix_replication
    chance           repeats, drift
"""
