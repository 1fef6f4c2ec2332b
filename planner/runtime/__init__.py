"""A plan on real engines: workers, router, replay of the traffic, and how far the prediction was off.

live_routing.py chooses workers with the simulator's code, router.py forwards requests to them, workers.py
keeps their engines alive, step_log.py logs each step of an engine, live_replay.py sends the traffic,
measured_against_simulated.py compares the measurement with the simulation, validate.py joins them all.
"""
