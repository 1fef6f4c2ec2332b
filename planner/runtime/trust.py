"""Counts the failures of workers, and notes requests that may have killed a worker.

A worker that fails its requests at once has the shortest queue, so most policies would send it most of the
requests. So a worker that failed LEAST_FAILURES times in a row is passed over for 1, 2, 4 ... LONGEST_REST_S
seconds, or until it answers. It still gets requests that no other worker can take.

A request that was on a worker when the worker went down may have killed it, or may have been beside the
request that did. The request is a suspect from then on: it is sent only to a worker that has just answered a
health check and got no other suspect within TRIAL_S, and is on trial there. If a worker goes down with a
single request, or with the suspect on trial there, this request alone gets a strike. After STRIKES strikes
the router refuses it.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

LEAST_FAILURES = 2  # Failures in a row; a single one may be the request's own fault.
LONGEST_REST_S = 60.0  # After a minute a worker that works again is worth a try.
# In this time a worker computes a prompt of several thousand tokens; most requests that kill a worker do so
# while it computes their prompt.
TRIAL_S = 1.0
STRIKES = 2  # One death may be chance; after two no third worker is risked.


class Suspect(Protocol):
    """What `Trust` reads and writes of a request that may have killed a worker."""

    is_shared: bool  # The request's worker had another request at the same time.
    is_suspect: bool
    strikes: int


@dataclass(slots=True)
class WorkerRecord:
    """The failures of one worker, and until when it is passed over."""

    failures: int = 0  # In a row.
    rests_until_s: float = 0.0


class Trust:
    """The records of all workers, by their numbers `w`. Times are those of the router's clock."""

    def __init__(self, workers: int) -> None:
        self.records = [WorkerRecord() for _ in range(workers)]
        self.failed: Counter[int] = Counter()  # How many requests each worker failed.
        self.refused: Counter[int] = Counter()  # How many of its failed requests each worker refused.
        # The suspect on trial at each worker, and since when.
        self.trials: dict[int, tuple[Suspect, float]] = {}
        self.resting_workers: set[int] = set()  # Some may have rested enough by now.

    def resting(self, now_s: float) -> Collection[int]:
        """Workers that are passed over at `now_s`."""
        if not self.resting_workers:
            return ()
        self.resting_workers = {w for w in self.resting_workers if self.records[w].rests_until_s > now_s}
        return self.resting_workers

    def note_answer(self, w: int) -> None:
        """The worker served a request, or has started again: its failures in a row are over."""
        record = self.records[w]
        if record.failures:
            record.failures, record.rests_until_s = 0, 0.0

    def note_failure(self, w: int, now_s: float, *, is_refusal: bool) -> float:
        """The worker failed a request.

        Returns how long the worker is passed over from now on [s]; 0 if it is not, or already was.
        """
        record = self.records[w]
        self.failed[w] += 1
        self.refused[w] += is_refusal
        if now_s < record.rests_until_s:
            return 0.0
        record.failures += 1
        if record.failures < LEAST_FAILURES:
            return 0.0
        rest_s: float = min(2.0 ** (record.failures - LEAST_FAILURES), LONGEST_REST_S)
        record.rests_until_s = now_s + rest_s
        self.resting_workers.add(w)
        return rest_s

    def with_suspects(self, now_s: float) -> set[int]:
        """Workers that have a suspect on trial, to which no other suspect goes."""
        return {w for w, (_, since_s) in self.trials.items() if now_s < since_s + TRIAL_S}

    def begin_trial(self, w: int, suspect: Suspect, now_s: float) -> None:
        """The suspect is sent to the worker."""
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
