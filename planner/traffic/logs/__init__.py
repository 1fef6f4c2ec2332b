"""Logs of gateways, engines and tracers as traces: a module per kind of file."""
