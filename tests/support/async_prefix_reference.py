"""The plain simulator of prefix caches on engines that schedule asynchronously.

What prefix_reference.py says of caches and async_reference.py of steps holds as it is. Orders that charge
tenants are left out: whether a step is charged as it is formed or as it begins is nobody's rule.
"""

from __future__ import annotations

from async_reference import AsyncReference
from prefix_reference import PrefixReference
from simulator_reference import Worker


class AsyncPrefixReference(AsyncReference, PrefixReference):
    def start_step(self, worker: Worker, now: float) -> None:
        self.now = now
        super().start_step(worker, now)

    def end_step(self, worker: Worker, now: float) -> None:
        self.now = now
        self.check(worker)
        super().end_step(worker, now)
