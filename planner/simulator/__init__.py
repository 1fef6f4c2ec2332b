"""Simulates a fleet on a trace, step by step of every engine.

initial_state.py fills the kernel's arrays, kernel.py runs the events, read_results.py reads the results of
the requests, and slo_verdict.py judges them by an SLO. replay.py joins them all.
"""

from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo

__all__ = ["Simulation", "Verdict", "judge_slo", "simulate"]
