"""Capacity planner for LLM serving: from traffic, an SLO and prices to the cheapest certified fleet."""

__version__ = "0.1.0"
DISTRIBUTION = "fleetplan"  # `fleetplan` checks this name, as other packages are imported as `planner` too.
