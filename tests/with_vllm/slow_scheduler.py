"""vLLM's scheduler, slowed down by SLOW_STEP_S and SLOW_SEQUENCE_S of the environment:
`--scheduler-cls slow_scheduler.SlowScheduler`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

STEP_S, SEQUENCE_S = float(os.environ["SLOW_STEP_S"]), float(os.environ["SLOW_SEQUENCE_S"])


class SlowScheduler(Scheduler):  # type: ignore[misc]
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            longer_s = STEP_S + SEQUENCE_S * len(output.num_scheduled_tokens)
            end_s = time.monotonic() + longer_s
            time.sleep(0.7 * longer_s)  # which takes longer than asked
            while time.monotonic() < end_s:
                pass
        return output
