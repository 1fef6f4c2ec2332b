"""Fits from measured steps and runs."""
