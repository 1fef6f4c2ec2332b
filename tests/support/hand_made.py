"""A GPU and step times by hand."""

from planner.domain import Gpu
from planner.models.latency import StepLatency

# f(N) = 10 ms up to 100 tokens, then 0.1 ms per token: 100 tokens or more cost 0.1 ms each at best
LATENCY = StepLatency((1.0, 100.0, 1000.0), (0.010, 0.010, 0.100), 0.0, 1e-5, 1e-7, 0.0, 0.0, basis="by hand")


GPU = Gpu("g", 80e9, 2e12, 3e14, "nvlink", 3e11, 400.0, 8, 1.0, "g", "g")
