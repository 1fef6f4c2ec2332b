"""Fitted and derived models of an engine: step latency, memory. One quantity per file."""
