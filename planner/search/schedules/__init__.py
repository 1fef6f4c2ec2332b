"""Simulates a schedule of purchases over weeks."""
