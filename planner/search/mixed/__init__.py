"""Searches fleets with several worker types per pool, under each choice of policies, and bounds their value."""
