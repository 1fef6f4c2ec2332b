"""Whether a date names its time zone, and local times of a zone as UTC."""

import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pandas as pd

# Two ambiguous times follow each other in a file. If the second is earlier by more than _STEP_BACK_NS, clocks
# were put back between the two. If it is later by more than _NEXT_YEAR_NS, they are of different years, each
# with an ambiguous hour of its own.
_STEP_BACK_NS = 30 * 60 * 10**9
_NEXT_YEAR_NS = 2 * 3600 * 10**9

_OFFSET = r"(?:[zZ]|[+-]\d\d(?::?\d\d)?)\s*$"  # Z, +01, +0100 or +01:00 at the end.
_ZONE_AFTER_TIME = re.compile(
    rf"\d\d:\d\d.*{_OFFSET}|\d{{8}}T\d+.*[zZ]\s*$"
)  # The latter for 20261116T181703Z.


def says_zone(date: str) -> bool:
    """True for 2026-11-16T18:17:03Z and ...+01:00. The dashes of the day, ten characters, are no offset."""
    return bool(_ZONE_AFTER_TIME.search(date) or re.search(_OFFSET, date[10:]))


@dataclass(slots=True)
class LocalTimes:
    """Turns the local times of one file into UTC, block by block in the file's order.

    It keeps the latest ambiguous local time so far, and whether clocks were put back before it.
    """

    zone: ZoneInfo
    _latest_ns: int = 0
    _is_put_back: bool = False

    def to_utc_ns(self, ns: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Local times (n,) [ns since 1970] as UTC, and which of them the zone leaves out, as clocks are put
        forward there. When clocks are put back, an hour comes twice, and a time in it is ambiguous. It is
        taken to be in the first of the two hours; after the times in the file have fallen, in the second.
        """
        naive = pd.DatetimeIndex(ns.view("M8[ns]"))
        # An ambiguous time is taken as in the first hour here, and as in the second one in `late`.
        early = naive.tz_localize(self.zone, ambiguous=np.ones(len(ns), bool), nonexistent="NaT")
        late = naive.tz_localize(self.zone, ambiguous=np.zeros(len(ns), bool), nonexistent="NaT")
        first = early.tz_convert("UTC").tz_localize(None).as_unit("ns").to_numpy().astype(np.int64)
        second = late.tz_convert("UTC").tz_localize(None).as_unit("ns").to_numpy().astype(np.int64)
        # `first` and `second` differ where a time is ambiguous, and only there.
        for k in np.flatnonzero(first != second).tolist():
            if ns[k] - self._latest_ns > _NEXT_YEAR_NS:
                self._is_put_back = False
            elif self._latest_ns - ns[k] > _STEP_BACK_NS:
                self._is_put_back = True
            # Until clocks are put back, the next time is compared with the latest ambiguous time of all, and
            # after that with the last one in the file.
            self._latest_ns = int(ns[k]) if self._is_put_back else max(self._latest_ns, int(ns[k]))
            if self._is_put_back:
                first[k] = second[k]
        return first, np.asarray(early.isna())
