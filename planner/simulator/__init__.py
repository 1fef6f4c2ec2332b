"""Discrete-event check of a fleet: exact engine steps over a trace.

kernel.py runs the events, replay.py dresses them in numpy, slo_verdict.py judges the result against an SLO.
"""

from planner.simulator.replay import simulate
from planner.simulator.simulation import Simulation
from planner.simulator.slo_verdict import Verdict, judge

__all__ = ["Simulation", "Verdict", "judge", "simulate"]
