"""Fleets with several worker types per pool, the best fleet under each choice of policies, and the bound."""
