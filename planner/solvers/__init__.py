"""Formulations, one per file; backend.py alone knows the habits of the solvers behind them."""
