"""Windows of cron and KEDA: numbers of workers from one time of day to another, on some days of the week."""

import re
from dataclasses import dataclass

from planner.day.controllers.knowledge import Knowledge
from planner.errors import InputError
from planner.files.document_values import Section, check_one_of, check_rows, refused_value
from planner.units import DAY_S, count_text

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"^([01]?\d|2[0-4]):([0-5]\d)$")


@dataclass(frozen=True, slots=True)
class Window:
    """A number of workers from `begin_s` to `end_s`, in seconds of the day, on each of `days` (0: Monday).

    If `end_s` is not above `begin_s`, the window ends on the next day. `workers` has one number for all
    pools, or one for each.
    """

    begin_s: float
    end_s: float
    workers: tuple[int, ...]
    days: tuple[int, ...] = tuple(range(7))

    def __str__(self) -> str:
        """The window for a reader: "08:00 to 20:00 8 workers on mon, tue"."""
        workers = f"{' and '.join(map(str, self.workers))} workers"
        if len(self.workers) == 1:
            workers = count_text(self.workers[0], "worker")
        days = "" if len(self.days) == len(DAYS) else f" on {', '.join(DAYS[day] for day in self.days)}"
        return f"{format_clock(self.begin_s)} to {format_clock(self.end_s)} {workers}{days}"

    def contains(self, week_s: float) -> bool:
        """Whether the window contains this time of the week (seconds since Monday 0:00)."""
        day, time_s = int(week_s // DAY_S) % 7, week_s % DAY_S
        if self.begin_s < self.end_s:
            return day in self.days and self.begin_s <= time_s < self.end_s
        # The window spans midnight: it begins on one of `days`, and ends on the day after.
        return (day in self.days and time_s >= self.begin_s) or (
            (day - 1) % 7 in self.days and time_s < self.end_s
        )

    def workers_of(self, pool: int) -> int:
        """The workers of the pool with this number."""
        return self.workers[pool] if len(self.workers) > 1 else self.workers[0]


def format_clock(second: float) -> str:
    """A second of the day as 06:30; the end of a day is 24:00."""
    minutes = int(second % (DAY_S + 1)) // 60  # Modulo DAY_S, 24:00 would become 00:00.
    return f"{minutes // 60:02}:{minutes % 60:02}"


def workers_at(windows: tuple[Window, ...], knowledge: Knowledge, time_s: float) -> list[int]:
    """The workers of each pool (P,) at a time of the run: the most of the windows open then, or 0."""
    # `clock_s` is the time of the week at which the run begins.
    open_windows = [each for each in windows if each.contains(knowledge.clock_s + time_s)]
    return [
        max((each.workers_of(i) for each in open_windows), default=0) for i in range(len(knowledge.pools))
    ]


def check_windows(windows: tuple[Window, ...], knowledge: Knowledge) -> None:
    """Raise InputError for a window whose list of workers does not have one number per pool."""
    for each in windows:
        if len(each.workers) not in (1, len(knowledge.pools)):
            raise InputError(
                f"windows: {list(each.workers)} are workers of {len(each.workers)} pools, "
                f"the fleet has {len(knowledge.pools)}; give one number, or one for each pool"
            )


def read_windows(value: object, where: str) -> tuple[Window, ...]:
    """A list of {from: "08:00", to: "20:00", workers: 6, days: [mon, tue]}; raises InputError."""
    return tuple(
        _read_window(each, f"{where}: window {i}")
        for i, each in enumerate(check_rows(value, where, "windows", least=1), start=1)
    )


def _read_window(value: object, where: str) -> Window:
    """One window of the list; raises InputError."""
    section = Section.from_document(
        value, where, ("from", "to", "workers", "days"), such_as='from: "08:00", to: "20:00", workers: 6'
    )
    begin_s = section.read("from", _read_clock_s)
    end_s = section.read("to", _read_clock_s)
    if begin_s == end_s:
        raise InputError(f"{where}: from and to are the same time; a whole day is from 0:00 to 24:00")
    days_path = section.path_of("days")
    names = check_rows(section.get("days", list(DAYS)), days_path, "days", least=1)
    days = tuple(DAYS.index(check_one_of(name, DAYS, days_path)) for name in names)
    workers = section.read("workers", read_workers)
    return Window(begin_s, end_s, workers, days)


def _read_clock_s(value: object, where: str) -> float:
    """The second of the day of a text such as "08:30"; raises InputError."""
    # YAML 1.1 reads 8:30 without quotes as a number with base 60: 510 [minutes].
    text = f"{value // 60}:{value % 60:02}" if isinstance(value, int) else str(value).strip()
    clock_match = _CLOCK.match(text)
    if clock_match is None or (seconds := int(clock_match[1]) * 3600 + int(clock_match[2]) * 60) > DAY_S:
        raise refused_value(where, 'expected a time of day such as "08:30"', value)
    return float(seconds)


def read_workers(value: object, where: str) -> tuple[int, ...]:
    """A whole number (>= 0) of workers for every pool, or a list with one for each; raises InputError."""
    entries = value if isinstance(value, list) and value else [value]
    # `type`, as isinstance would take true for 1.
    if not all(type(each) is int and each >= 0 for each in entries):
        raise refused_value(where, "expected a number of workers, or a list with one for each pool", value)
    return tuple(entries)
