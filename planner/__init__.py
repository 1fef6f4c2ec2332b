"""Capacity planner for LLM serving: from traffic, an SLO and prices to the cheapest certified fleet."""

__version__ = "0.1.0"
DISTRIBUTION = "fleetplan"  # By this fleetplan tells the package from others of the same name.
