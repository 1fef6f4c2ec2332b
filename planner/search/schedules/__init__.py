"""A schedule of purchases over weeks, simulated."""
