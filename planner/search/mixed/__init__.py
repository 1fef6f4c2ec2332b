"""Searches fleets with several worker types per pool, for each choice of policies, and bounds their value."""
