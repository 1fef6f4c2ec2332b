"""A plan on real engines: workers, router, replay of the traffic, and how far the prediction was off.

live_routing.py decides with the simulator's code, router.py forwards, workers.py keeps the engines alive,
step_log.py notes each of their steps, live_replay.py sends the traffic, measured_against_simulated.py holds
it against the simulation, validate.py joins them all.
"""
