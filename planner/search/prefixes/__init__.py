"""Decides which prefixes of prompts each worker keeps: places, pins and keeps them alive, and lets them
drift.
"""
