"""Searches the fleet that keeps the SLO in most scenarios, and the fleet that survives a loss."""
