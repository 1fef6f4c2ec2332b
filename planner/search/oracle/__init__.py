"""What simulations say of a fleet: the traffic and scenarios that are asked for, queries, remembered
verdicts.
"""
