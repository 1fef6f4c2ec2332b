"""Warnings about a trace that can be read, but whose times are doubtful: a long gap, an unlikely unit of the
clock, or a time before that of an earlier row. The readers of traces (trace_rows.py, logs/) add them.

The limits below were set by hand.
"""

import numpy as np

from planner.traffic.trace import FloatArray
from planner.units import DAY_S, HOUR_S, show_digits, show_s

FEWEST_JUDGED = 20  # The fewest requests of a trace for a warning about a long gap.
FEWEST_REQUESTS = 5  # The fewest for a warning about a very long gap, or about a time that steps back.
LONG_GAP_S, VERY_LONG_GAP_S = HOUR_S, 60.0  # A gap must be longer than this to be called long, or very long.
# A very long gap is more than this many times as long as all others together. By chance one in 300 traces of
# 5 requests has one.
VERY_LONG_FACTOR = 10.0
# An hour in which nothing arrives is taken for a change of clocks only if no other gap is longer than this.
LONGEST_OTHER_GAP_S = 600.0
# With fewer requests/s a warning asks whether the clock counts a finer unit than it was read with. The first
# limit is for clocks with whole seconds only, the second for all others.
SLOW_WHOLE_RPS, SLOW_RPS = 1.0, 0.05
FAST_RPS = 1000.0  # With more requests/s a warning asks whether a clock of milliseconds counts seconds.
# With more requests/s a warning asks whether a clock of seconds counts days, as spreadsheets do: 5,000
# requests per day are 0.06 requests/s.
FAST_OF_DAYS_RPS = 5000.0
FEWEST_OF_CLOCK = 5  # With fewer requests the unit of a clock is not judged.
ROUNDED_TICKS = 1e-6  # A stamp this near to a whole number of ticks counts as whole.
SHOWN_IN_HOURS_S = 2 * HOUR_S  # Spans from this length on are written in hours.
# Names of units in messages, and ticks per second.
UNITS = {
    "s": ("seconds", 1.0),
    "ms": ("milliseconds", 1e3),
    "us": ("microseconds", 1e6),
    "ns": ("nanoseconds", 1e9),
}


def long_gap_warnings(name: str, arrival_s: FloatArray) -> tuple[str, ...]:
    """A warning about a gap between two arrivals that is longer than all others together; in a trace of few
    requests, VERY_LONG_FACTOR times as long. A time may be wrong, or two logs may have been joined.
    """
    if len(arrival_s) < FEWEST_REQUESTS:
        return ()
    gaps_s = np.diff(arrival_s)
    longest = int(gaps_s.argmax())
    gap_s = float(gaps_s[longest])
    others_s = float(arrival_s[-1] - arrival_s[0] - gaps_s[longest])  # All other gaps together.
    is_long = len(arrival_s) >= FEWEST_JUDGED and gap_s > max(others_s, LONG_GAP_S)
    is_very_long = gap_s > max(VERY_LONG_FACTOR * others_s, VERY_LONG_GAP_S)
    if not (is_long or is_very_long):
        return ()
    total_s = gap_s + others_s
    unit_s, unit = (HOUR_S, "h") if total_s >= SHOWN_IN_HOURS_S else (1.0, "s")
    span = f"{gap_s / unit_s:.1f} {unit} of {total_s / unit_s:.1f} {unit}"
    return (
        f"{name}: nothing arrives for {span}, after {longest + 1} of {len(arrival_s)} requests: is a time "
        "wrong, or are these two logs?",
    )


def clock_change_warnings(name: str, clock: str, at_s: FloatArray) -> tuple[str, ...]:
    """A warning about local times of `clock`, a column of dates without a zone, if clocks seem to have been
    put back an hour, or forward. `at_s` are the times in the order of the rows, and 0 is a full hour.

    Put back: times step back once, by half an hour to an hour within a clock hour. Put forward: nothing
    arrives in one whole clock hour, and no other gap is longer than LONGEST_OTHER_GAP_S.
    """
    if len(at_s) < FEWEST_JUDGED:
        return ()
    gaps_s, hours = np.diff(at_s), np.floor(at_s / HOUR_S)
    back = np.flatnonzero(gaps_s <= -HOUR_S / 2)
    longest, two_longest_s = int(gaps_s.argmax()), np.sort(gaps_s)[-2:]
    if len(back) == 1 and hours[back[0]] == hours[back[0] + 1]:
        row, change = int(back[0]), "step back"
    elif (
        hours[longest + 1] - hours[longest] == 2
        and two_longest_s[1] <= HOUR_S + LONGEST_OTHER_GAP_S
        and two_longest_s[0] <= LONGEST_OTHER_GAP_S
    ):
        row, change = longest, "skip an hour"
    else:
        return ()
    before, after = (f"{np.datetime64(int(at_s[k]), 's')}".replace("T", " ") for k in (row, row + 1))
    return (
        f"{name}: column {clock} names no zone, and its times {change}, from {before} to {after}: if clocks "
        "were changed there, name the zone: plan trace --tz Europe/Berlin, or traffic: {timezone: "
        "Europe/Berlin} in slo.yaml",
    )


def clock_unit_warnings(
    name: str, clock: str, lengths: tuple[str, str], arrival_s: FloatArray, per_s: float
) -> tuple[str, ...]:
    """A warning about the column `clock`, whose name states no unit, if another unit would give a likelier
    rate than the one it was read with, of `per_s` ticks to the second. `lengths` are the names of the columns
    of input and output tokens, for the option that the warning proposes.
    """
    span_s = float(arrival_s[-1] - arrival_s[0])
    if len(arrival_s) < FEWEST_OF_CLOCK or not span_s:
        return ()
    rate_rps = len(arrival_s) / span_s
    stamps = arrival_s * per_s
    is_whole = bool((stamps == np.floor(stamps)).all())
    # The product `arrival_s * per_s` has rounding errors, so whole milliseconds may be a little off.
    is_nearly_whole = bool((np.abs(stamps - np.rint(stamps)) < ROUNDED_TICKS).all())
    is_read_in_s, is_read_in_ms = per_s == UNITS["s"][1], per_s == UNITS["ms"][1]
    if is_read_in_s and rate_rps > FAST_OF_DAYS_RPS:
        return (
            f"{name}: column {clock} is read as seconds: {len(arrival_s)} requests in {show_s(span_s)}, "
            f"{show_digits(rate_rps, 4)} requests/s; if it counts days, as spreadsheets do, these are "
            f"{show_digits(rate_rps / DAY_S, 3)} requests/s: write seconds, {DAY_S:g} times as many",
        )
    others: tuple[str, ...]  # Units that may be meant instead.
    if is_read_in_s and rate_rps < (SLOW_WHOLE_RPS if is_whole else SLOW_RPS):
        read_as, others = "seconds", ("ms", "us", "ns")
    # A clock that counts milliseconds has whole ones; fractions mean that it counts seconds.
    elif is_read_in_ms and (rate_rps > FAST_RPS or not is_nearly_whole):
        read_as, others = "milliseconds", ("s",)
    elif is_read_in_ms and rate_rps < SLOW_RPS:
        read_as, others = "milliseconds", ("us", "ns")
    else:
        return ()
    rates_rps = {unit: rate_rps * UNITS[unit][1] / per_s for unit in others}  # The rate if `unit` is meant.
    # The units that give a usual rate; if none does, the first of `others`.
    likely = [unit for unit in others if SLOW_RPS <= rates_rps[unit] <= FAST_RPS] or [others[0]]
    rates_text = ", ".join(
        f"if {'it counts ' if unit == likely[0] else ''}{UNITS[unit][0]} these are "
        f"{show_digits(rates_rps[unit], 3)} requests/s"
        for unit in likely
    )
    or_another = "".join(f" (or {clock}:{unit})" for unit in likely[1:])
    return (
        f"{name}: column {clock} is read as {read_as}: {len(arrival_s)} requests in {show_s(span_s)}, "
        f"{show_digits(rate_rps, 3)} requests/s; {rates_text}: say --map "
        f"arrival={clock}:{likely[0]},input={lengths[0]},output={lengths[1]}{or_another}, or traffic: map in "
        "slo.yaml",
    )


def step_back_warnings(name: str, clock: str, ticks: FloatArray) -> tuple[str, ...]:
    """A warning about rows far from where their times belong. Rows may be in any order, but a time so far off
    may be wrong. `ticks` are the times in the order of the rows.
    """
    latest = np.maximum.accumulate(ticks)  # The latest time of each row and those before it.
    span = latest[-1] - ticks.min()
    # A time is far from its place if an earlier row has a time later by more than half of the span.
    far = np.flatnonzero(latest - ticks > span / 2)
    if not far.size or len(ticks) < FEWEST_REQUESTS:
        return ()
    first = int(far[0])
    return (
        f"{name}: column {clock} steps back from {latest[first]:.15g} to {ticks[first]:.15g} at request "
        f"{first + 1} of {len(ticks)}, more than half of the trace: it is sorted by time; is that time "
        "wrong?",
    )
