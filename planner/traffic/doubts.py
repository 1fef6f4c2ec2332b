"""What is doubtful in a trace that can be read: a warning before any answer."""

from __future__ import annotations

import numpy as np

from planner.traffic.trace import FloatArray
from planner.units import show_s

FEWEST_JUDGED, FEWEST_GAPS = 20, 5  # requests of which a long gap, and a very long one, can be judged
LONG_GAP_S, VERY_LONG_GAP_S = 3600.0, 60.0
VERY_LONG = 10.0  # times all other gaps together: of 5 random arrivals one in 300 has such a gap
SLOW_WHOLE_RPS, SLOW_RPS = 1.0, 0.05  # slower, whole numbers or any, a clock may count a finer unit
FAST_RPS = 1000.0  # faster, a clock of milliseconds may count seconds
FEWEST_OF_CLOCK = 5
UNITS = {"s": ("seconds", 1.0), "ms": ("milliseconds", 1e3), "us": ("microseconds", 1e6)}
UNITS |= {"ns": ("nanoseconds", 1e9)}


def of_gaps(name: str, arrival_s: FloatArray) -> tuple[str, ...]:
    """A gap that is longer than all else together is a wrong time, or two logs."""
    if len(arrival_s) < FEWEST_GAPS:
        return ()
    gaps_s = np.diff(arrival_s)
    longest = int(gaps_s.argmax())
    gap_s, others_s = float(gaps_s[longest]), float(arrival_s[-1] - arrival_s[0] - gaps_s[longest])
    is_long = len(arrival_s) >= FEWEST_JUDGED and gap_s > max(others_s, LONG_GAP_S)
    if not is_long and gap_s <= max(VERY_LONG * others_s, VERY_LONG_GAP_S):
        return ()
    of_s = gap_s + others_s
    each, unit = (3600.0, "h") if of_s >= 7200 else (1.0, "s")
    span = f"{gap_s / each:.1f} {unit} of {of_s / each:.1f} {unit}"
    return (
        f"{name}: nothing arrives for {span}, after {longest + 1} of {len(arrival_s)} requests: is a time "
        "wrong, or are these two logs?",
    )


def of_unit(
    name: str, clock: str, lengths: tuple[str, str], arrival_s: FloatArray, per_s: float
) -> tuple[str, ...]:
    """A clock that counts from zero in a unit that its column does not name, at a rate that fits another.

    `per_s` ticks are taken for a second; `lengths` are the columns of input and output tokens.
    """
    span_s = float(arrival_s[-1] - arrival_s[0])
    if len(arrival_s) < FEWEST_OF_CLOCK or not span_s:
        return ()
    rate_rps = len(arrival_s) / span_s
    stamps = arrival_s * per_s
    is_whole = bool((stamps == np.floor(stamps)).all())
    is_ms = per_s == UNITS["ms"][1]
    others: tuple[str, ...]
    if per_s == 1.0 and rate_rps < (SLOW_WHOLE_RPS if is_whole else SLOW_RPS):
        taken, others = "seconds", ("ms", "us", "ns")
    elif is_ms and (rate_rps > FAST_RPS or not (np.abs(stamps - np.rint(stamps)) < 1e-6).all()):
        taken, others = "milliseconds", ("s",)
    elif is_ms and rate_rps < SLOW_RPS:
        taken, others = "milliseconds", ("us", "ns")
    else:
        return ()
    rates_rps = {unit: rate_rps * UNITS[unit][1] / per_s for unit in others}
    likely = [unit for unit in others if SLOW_RPS <= rates_rps[unit] <= FAST_RPS] or [others[0]]
    meant = ", ".join(
        f"if {'it counts ' if unit == likely[0] else ''}{UNITS[unit][0]} these are "
        f"{rates_rps[unit]:.3g} requests/s"
        for unit in likely
    )
    or_another = "".join(f" (or {clock}:{unit})" for unit in likely[1:])
    return (
        f"{name}: column {clock} is read as {taken}: {len(arrival_s)} requests in {show_s(span_s)}, "
        f"{rate_rps:.3g} requests/s; {meant}: say --map "
        f"arrival={clock}:{likely[0]},input={lengths[0]},output={lengths[1]}{or_another}, or traffic: map in "
        "slo.yaml",
    )


def of_steps_back(name: str, clock: str, ticks: FloatArray) -> tuple[str, ...]:
    """Rows that are sorted although they stand far from where their time belongs."""
    latest = np.maximum.accumulate(ticks)
    far = np.flatnonzero(latest - ticks > (latest[-1] - ticks.min()) / 2)
    if not far.size or len(ticks) < FEWEST_GAPS:
        return ()
    at = int(far[0])
    return (
        f"{name}: column {clock} steps back from {latest[at]:.15g} to {ticks[at]:.15g} at request {at + 1} "
        f"of {len(ticks)}, more than half of the trace: it is sorted by time; is that time wrong?",
    )
