"""Judges fleets by simulation: traffic and scenarios, queries, remembered verdicts."""
