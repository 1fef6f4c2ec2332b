"""Searches all fleets with one worker type per pool, except those that pruning rules leave out."""
