"""Discrete-event check of a fleet: exact engine steps over a trace.

initial_state.py fills the kernel's arrays, kernel.py runs the events, read_results.py reads what became of
the requests, and slo_verdict.py judges that against an SLO. replay.py joins them all.
"""

from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge_slo

__all__ = ["Simulation", "Verdict", "judge_slo", "simulate"]
