"""A plan on real engines: workers, router, replay of the traffic, and how far the prediction was off.

routing.py decides with the simulator's code, router.py forwards, workers.py keeps the engines alive,
steplog.py notes each of their steps, replay.py sends the traffic, compare.py holds it against the simulation,
validate.py joins them all.
"""
