"""Who decides how many workers a pool has: one module per controller, one table of all of them.

A controller sees what a real one sees, as often and as late, and rounds, waits and holds back as it does. It
knows nothing of the requests that are still to come.
"""
