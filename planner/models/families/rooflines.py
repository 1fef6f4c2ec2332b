"""The roofline as a family: a shape from catalog figures, scaled to what was measured.

    t = s_0 + s_1 f(N) + s_2 a A_p + s_3 (b D + d K) + s_4 e P        s >= 0  [s]

The symbols are defined in planner/models/latency.py. `planner.models.roofline.roofline` gives f, a, b, d and
e, or any other StepLatency does, such as a fit of another GPU or TP. With
`scaled=False` nothing is learned: s_0 = 0 and the rest 1, the roofline without any profile.
"""

from dataclasses import replace

import numpy as np

from planner.models.families.step_family import StepFamily, fit_nonnegative
from planner.models.latency import Array, StepLatency

LEAST_STEP_S = 1e-6  # Steps of the fewest tokens take at least this long: a StepLatency must be above 0.


class RooflineSteps(StepFamily):
    """The form above; `scales_` (5,) has s_0 to s_4, and `latency_` is exactly the fitted form."""

    def __init__(self, shape: StepLatency, *, scaled: bool = True, beyond: str = "raise") -> None:
        self.shape = shape
        self.scaled = scaled
        self.beyond = beyond

    def _fit(self, X: Array, y: Array) -> None:
        """Set `latency_`: the roofline as it is; if `scaled`, its terms times the factors that fit best."""
        shape = self.shape
        if self.scaled:
            tokens, pairs, decodes, kv_tokens, prefills = X.T
            self.scales_ = fit_nonnegative(
                np.column_stack(
                    [
                        np.ones(len(X)),
                        replace(shape, h_s=0.0).step_s(tokens),
                        shape.a_s * pairs,
                        shape.b_s * decodes + shape.d_s * kv_tokens,
                        shape.e_s * prefills,
                    ]
                ),
                y,
            )
        else:
            self.scales_ = np.array([0.0, 1.0, 1.0, 1.0, 1.0])
        floor_s, f_scale, a_scale, decode_scale, e_scale = (float(s) for s in self.scales_)
        host_s = 0.0 if self.scaled else shape.h_s  # Measured steps have the host's time in s_0.
        floor_s = max(floor_s, LEAST_STEP_S - f_scale * shape.f_s[0], 0.0)
        self.latency_ = replace(
            shape,
            f_s=tuple(floor_s + f_scale * seconds for seconds in shape.f_s),
            a_s=a_scale * shape.a_s,
            b_s=decode_scale * shape.b_s,
            d_s=decode_scale * shape.d_s,
            e_s=e_scale * shape.e_s,
            h_s=host_s,
            basis=f"{shape.basis}, scaled to measured steps" if self.scaled else shape.basis,
            mape_frac=None,
        )

    def _predict(self, X: Array) -> Array:
        assert self.latency_ is not None
        return self.latency_.steps_s(X)
