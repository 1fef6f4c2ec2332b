"""Vidur's own step times as tables, to compare our simulator with Vidur's at equal step times."""

from __future__ import annotations

from dataclasses import dataclass

from planner.models.foreign_forms import VIDUR_TABLES, Compiled, Floats


@dataclass(frozen=True, slots=True, eq=False)
class VidurTables:
    """Vidur's predictor as tables, a form of step times (planner/models/foreign_forms.py).

    `linear_s` (N / 8,) is indexed by tokens / 8. `prefill_s` (C, edge) is indexed by cached tokens / 64, and
    by the root of the summed squares of the chunks. `decode_s` (D, context) is indexed by decodes, and by
    their mean context / 64.

    Attention takes longer by `prefill_over_frac` or `decode_over_frac` where a step has several prefills or
    decodes. Sending to the next pipeline stage takes `send_s`, and `send_s_per_token`. The simulator refuses
    a step beyond the tables.
    """

    linear_s: Floats
    prefill_s: Floats
    decode_s: Floats
    prefill_over_frac: float = 0.0
    decode_over_frac: float = 0.0
    send_s_per_token: float = 0.0
    send_s: float = 0.0

    def compile_for_kernel(self, most_tokens: int, most_decodes: int) -> Compiled:
        return Compiled(
            VIDUR_TABLES,
            (self.prefill_over_frac, self.decode_over_frac, self.send_s_per_token, self.send_s),
            (self.linear_s, self.prefill_s.ravel(), self.decode_s.ravel()),
            (len(self.linear_s), *self.prefill_s.shape, self.decode_s.shape[1], len(self.decode_s)),
        )
