"""How many tokens of a prompt saturate a GPU: L_m of DistServe (Zhong et al. 2024, arXiv:2401.09670).

    r(n)  tokens per second of one prompt of n tokens alone in its step
    L_m   the least n with  r(n) >= SATURATED_FRAC max_n r(n)          (sections 3.1, 4.3)

Beyond L_m a longer batch takes longer in proportion, so prompts that share it only wait for each other:
DistServe batches prompts up to L_m together, and longer ones alone. The paper profiles it per LLM and GPU,
and names 512 for a 13B LLM on an A100, whose roofline gives 558 here. max_n is over prompts up to
MOST_TOKENS: the pairs of attention make longer ones slower per token again.
"""

import numpy as np

from planner.models.foreign_forms import DistServeSteps, StepForm
from planner.models.latency import StepLatency

SATURATED_FRAC = 0.95  # The share of the highest rate that counts as saturated.
MOST_TOKENS = 1 << 16  # The longest prompt that is looked at.


def saturating_tokens(latency: StepLatency, form: StepForm | None = None) -> int:
    """L_m by the fit, in tokens; by DistServe's own form where the steps are given in it."""
    n = np.arange(1.0, MOST_TOKENS + 1)
    if isinstance(form, DistServeSteps):
        a, b, c = form.prefill_s
        seconds = a + b * n + c * n**2
    else:
        seconds = latency.step_s(n, pairs=n * (n + 1) / 2, prefills=1.0)
    rate = n / seconds
    return 1 + int(np.argmax(rate >= SATURATED_FRAC * rate.max()))  # n begins at 1.
