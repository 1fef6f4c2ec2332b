"""Capacity planner for LLM serving, from Python."""
