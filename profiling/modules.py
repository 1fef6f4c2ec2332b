"""Seconds of an LLM's modules in a step of a real engine: a clock before and after each forward call.

Where an engine runs its LLM eagerly every leaf of the module tree is called as such: projections, norms,
activation, attention with its write into the KV cache, embedding, logits. They are named as Vidur's profiles
name operators, those that Vidur does not know by their own name. On CUDA the clock is an event on the stream.
An engine that compiles its LLM, or replays a graph, calls none of them, and has no operators. torch is
imported on use: an engine brings it.
"""

from __future__ import annotations

import re
import time
from typing import Any

ATTENTION, REST = "attn", "rest"  # Names of operators; REST is the time outside of all modules.
VIDURS_NAMES = {
    "embed_tokens": "embed",
    "qkv_proj": "attn_pre_proj",
    "rotary_emb": "attn_rope",
    "o_proj": "attn_post_proj",
    "gate_up_proj": "mlp_up_proj",
    "act_fn": "mlp_act",
    "down_proj": "mlp_down_proj",
    "norm": "add",
    "logits_processor": "head",
}


class ModuleTimes:
    """The clocks of a torch module's leaves; they run from `start` to `stop`."""

    def __init__(self, model: Any) -> None:
        self._is_on = False
        self._begun: list[Any] = []  # When the modules that now run began, the innermost last.
        self._spans: list[tuple[str, Any, Any]] = []  # (name, begin, end) of every call.
        self._torch: Any = None
        for path, module in model.named_modules():
            if path and not list(module.children()):
                own_name = re.sub(r"\W", "_", path.rpartition(".")[2])
                name = VIDURS_NAMES.get(own_name, own_name)
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(lambda *_, name=name: self._after(name))

    def start(self) -> None:
        """Forget what was timed so far and time the modules from now on."""
        import torch

        self._torch, self._is_on = torch, True
        self._begun.clear()
        self._spans.clear()

    def stop(self) -> dict[str, float]:
        """Seconds of each module name since the start, in the order of their first calls."""
        self._is_on = False
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
        seconds_by_name: dict[str, float] = {}
        for name, start, end in self._spans:
            # Two times of a clock [s], or two CUDA events, whose difference is in milliseconds.
            is_clock = isinstance(start, float)
            seconds = end - start if is_clock else float(start.elapsed_time(end)) / 1e3
            seconds_by_name[name] = seconds_by_name.get(name, 0.0) + seconds
        return seconds_by_name

    def _mark(self) -> Any:
        """This moment: seconds of a clock, or on CUDA an event on the stream."""
        if not self._torch.cuda.is_available():
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _before(self, *_: Any) -> None:
        """Note when a module begins."""
        if self._is_on:
            self._begun.append(self._mark())

    def _after(self, name: str) -> None:
        """Note when the module that began last ends."""
        if self._is_on and self._begun:
            self._spans.append((name, self._begun.pop(), self._mark()))
