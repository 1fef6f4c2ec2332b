"""Plans that count on CPU memory behind prefix caches: certified, and the same when simulated again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from plans import CATALOG
from questions import question

from planner.documents.fleet import read_fleet
from planner.reports.facts import sentences
from planner.reports.output import render
from planner.search.certify import plan
from planner.simulator.replay import simulate
from planner.traffic.reading import read_trace
from planner.traffic.trace import Trace
