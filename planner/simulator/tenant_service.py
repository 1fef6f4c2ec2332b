"""How much service each tenant got in a simulation, and how even it was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.simulator.simulation import Floats, Simulation


@dataclass(frozen=True, slots=True, eq=False)
class ServiceOfTenants:
    """Service of each tenant (U,) per second, while all were served: tokens of prompts and of output, each
    kind with its weight in the policies. Cached tokens count too, which fair queues leave out.

    A prompt counts when its first token is out, the output when it ends. `window_s` begins when every tenant
    has sent a request, and ends when the first tenant has its last answer. `jain_index` is that of service
    over weight: 1 if all are equal, 1 / U if one has all; NaN if the window is empty.
    """

    window_s: tuple[float, float]
    tokens_per_s: Floats
    jain_index: float


def tenant_service(simulation: Simulation) -> ServiceOfTenants:
    """The service of the tenants of a simulation whose trace names them."""
    tenant_of, tenants = simulation.tenant, range(len(simulation.tenants))
    first_token_s = simulation.arrival_s + simulation.ttft_s
    finish_s = simulation.arrival_s + simulation.e2e_s
    # When every tenant has sent a request, and when the first has its last answer.
    start_s = max(float(simulation.arrival_s[tenant_of == u].min(initial=np.inf)) for u in tenants)
    end_s = min(float(np.nanmax(finish_s[tenant_of == u], initial=-np.inf)) for u in tenants)
    tokens = np.zeros(len(simulation.tenants))
    of_prompt, of_output = simulation.token_weights
    for at_s, amount in (
        (first_token_s, of_prompt * simulation.input_tokens),
        (finish_s, of_output * simulation.output_tokens),
    ):
        inside = (at_s >= start_s) & (at_s <= end_s)
        tokens += np.bincount(tenant_of[inside], weights=amount[inside], minlength=len(tokens))
    rate = tokens / (end_s - start_s) if end_s > start_s else np.full(len(tokens), np.nan)
    return ServiceOfTenants((start_s, end_s), rate, jain_index(rate / simulation.tenant_weights))


def jain_index(values: Floats) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2); NaN where nothing is above 0."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else float("nan")
