"""What the searches take for granted where they do not simulate, and how often that failed in tests."""

from __future__ import annotations

MORE_MIXED = "one mixed pool: what holds with n workers holds with n + 1"
MORE_DECODE = "beside the same prefill pool, what holds with d decode workers holds with d + 1"
LEADS = "a prefill pool that misses TTFT with unlimited decode misses it beside any decode pool"
FOLLOWS = (
    "a decode pool whose backlog grows with instant prefill has a growing backlog behind any prefill pool"
)
LINK = "prefill and decode pools are left out where the link is slower than the KV blocks of the trace"
