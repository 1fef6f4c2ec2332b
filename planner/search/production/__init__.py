"""The fleet that is kept in most scenarios, and the one that stands a loss."""
