"""Fleets with one worker type per pool: the search that comes to an end, and what it may leave out."""
