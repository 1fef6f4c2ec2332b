"""The searches of the papers, over the simulator."""
