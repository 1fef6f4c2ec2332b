"""Pools that change during a day: the cheapest sizes that keep an SLO, knowing the future."""
