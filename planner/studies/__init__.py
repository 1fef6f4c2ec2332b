"""Questions that ask the planner or the simulator several times."""
