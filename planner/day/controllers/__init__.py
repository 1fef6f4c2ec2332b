"""Controllers decide how many workers a pool has: one module for each, and one table of all.

A simulated controller sees the metrics that the real one sees, as often and as late, and decides as it does.
It knows nothing of future requests.
"""
