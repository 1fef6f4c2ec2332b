"""What the router has seen of its workers and requests: who fails again and again, and who may have killed.

A worker that fails requests quickly has the shortest queue, so most policies would send it most of them. One
that failed LEAST_FAILURES times in a row is passed over for 1, 2, 4 ... LONGEST_S seconds, unless no other
can take a request; an answer ends that.

A request that was on a worker when it went down may have killed it, or may have been beside the one that did.
It is suspect from then on: it goes on only to a worker that has just answered and has no other suspect within
TRIAL_S. A worker that goes down with a request that it had alone, or with the suspect on trial there, is a
strike against that request, and after STRIKES it is refused; those beside it are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

LEAST_FAILURES = 2  # Failures in a row; a single one may be the request's own fault.
LONGEST_S = 60.0
# Within this a prompt of several thousand tokens is computed, and most that kill do so while they are.
TRIAL_S = 1.0
STRIKES = 2


class Suspect(Protocol):
    """A request as far as it may have killed a worker."""

    is_shared: bool  # Its worker had another request too while it had this one.
    is_suspect: bool
    strikes: int


@dataclass(slots=True)
class WorkerRecord:
    """The failures of one worker, and until when it is passed over."""

    failures: int = 0  # How many in a row.
    rests_until_s: float = 0.0


class Trust:
    """The records of all workers, by their numbers. Times are those of the router's clock."""

    def __init__(self, workers: int) -> None:
        self.records = [WorkerRecord() for _ in range(workers)]
        self.failed: Counter[int] = Counter()  # Requests that each worker failed.
        self.refused: Counter[int] = Counter()  # Requests among them that it refused.
        # The suspect on trial at each worker, and since when.
        self.trials: dict[int, tuple[Suspect, float]] = {}
        self.rested: set[int] = set()  # Workers that may still be resting.

    def resting(self, now_s: float) -> Collection[int]:
        """Workers that are passed over now."""
        if not self.rested:
            return ()
        self.rested = {w for w in self.rested if self.records[w].rests_until_s > now_s}
        return self.rested

    def note_answer(self, w: int) -> None:
        """The worker served a request, or has started anew."""
        record = self.records[w]
        if record.failures:
            record.failures, record.rests_until_s = 0, 0.0

    def note_failure(self, w: int, now_s: float, *, is_refusal: bool) -> float:
        """The worker failed a request. Returns how long it is passed over from now on [s]; 0 if it is not, or
        was already.
        """
        record = self.records[w]
        self.failed[w] += 1
        self.refused[w] += is_refusal
        if now_s < record.rests_until_s:
            return 0.0
        record.failures += 1
        if record.failures < LEAST_FAILURES:
            return 0.0
        rest_s: float = min(2.0 ** (record.failures - LEAST_FAILURES), LONGEST_S)
        record.rests_until_s = now_s + rest_s
        self.rested.add(w)
        return rest_s

    def with_suspects(self, now_s: float) -> set[int]:
        """Workers that have a suspect on trial, to which no other suspect goes."""
        return {w for w, (_, since_s) in self.trials.items() if now_s < since_s + TRIAL_S}

    def begin_trial(self, w: int, suspect: Suspect, now_s: float) -> None:
        self.trials[w] = suspect, now_s

    def end_trial(self, w: int, suspect: Suspect) -> None:
        """The suspect's trial on the worker is over, so another one may begin."""
        if w in self.trials and self.trials[w][0] is suspect:
            del self.trials[w]

    def note_death(self, w: int, request: Suspect) -> None:
        """The worker went down while it had the request."""
        is_on_trial = w in self.trials and self.trials[w][0] is request
        request.strikes += is_on_trial or not request.is_shared
        request.is_suspect = True
