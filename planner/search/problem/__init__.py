"""Builds the problem that a search solves: worker types, limits, prices, and figures of the traffic."""
