"""What simulations say of a fleet: traffic and scenarios, queries, remembered verdicts."""
