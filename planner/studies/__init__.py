"""Studies, which use several plans or simulations to answer one question."""
