"""Limits the number and the cost of requests: each is charged, and written to the journal, before it is sent.

A request is charged with the most it can cost. If its answer says how many tokens it had, the charge is
corrected to their price. A request that failed keeps its full charge, because it may be billed.
"""

import math
from dataclasses import dataclass

from planner.runtime.endpoint import Endpoint, EndpointAnswer
from planner.runtime.live_replay import JournalFile


@dataclass(slots=True)
class SendingBudget:
    """What was sent and charged so far, over the whole journal: earlier parts of the run count too."""

    endpoint: Endpoint
    journal: JournalFile
    requests: int = 0
    usd: float = 0.0

    def __post_init__(self) -> None:
        for row in self.journal.rows("charged_usd"):
            self.requests += 1
            self.usd += row["charged_usd"]
        # Corrections of `settle`: negative where the answer cost less than was charged.
        self.usd += sum(row["given_back_usd"] for row in self.journal.rows("given_back_usd"))

    def usd_of(self, input_tokens: int, output_tokens: int) -> float:
        """The price of these tokens [USD]; 0 if no price is known."""
        per_input, per_output = self.endpoint.usd_per_million or (0.0, 0.0)
        return (per_input * input_tokens + per_output * output_tokens) / 1e6

    def charge(self, input_tokens: int, output_tokens: int, *, share_frac: float = 1.0) -> float | None:
        """Charge a request of at most these tokens and return its price [USD].

        Returns None, and charges nothing, if all charges together would exceed `share_frac` of a limit.
        Prompts that only warm caches get a share below 1, so that enough is left for measured requests.
        """
        usd, endpoint = self.usd_of(input_tokens, output_tokens), self.endpoint
        if endpoint.max_requests is not None and self.requests + 1 > endpoint.max_requests * share_frac:
            return None
        if endpoint.max_usd is not None and self.usd + usd > endpoint.max_usd * share_frac:
            return None
        self.requests += 1
        self.usd += usd
        self.journal.write({"charged_usd": usd})
        return usd

    def settle(self, charged_usd: float, answer: EndpointAnswer) -> None:
        """Correct the charge to the tokens that the answer had, if it says how many.

        The journal calls the correction `given_back_usd`: it is negative where the answer cost less.
        """
        if not (answer.is_good and answer.input_tokens and answer.output_tokens):
            return
        correction_usd = self.usd_of(answer.input_tokens, answer.output_tokens) - charged_usd
        if correction_usd:
            self.usd += correction_usd
            self.journal.write({"given_back_usd": correction_usd})

    def describe_use(self) -> str:
        """The use in words, for instance "12 of at most 100 requests and 0.3 of at most 5 USD"."""
        limits = []
        if self.endpoint.max_requests is not None:
            limits.append(f"{self.requests} of at most {self.endpoint.max_requests} requests")
        if self.endpoint.max_usd is not None:
            limits.append(f"{self.usd:.4g} of at most {self.endpoint.max_usd:g} USD")
        return " and ".join(limits)


def is_spent(journal: JournalFile, endpoint: Endpoint) -> bool:
    """Whether an earlier part of the run ended because of the budget, and neither limit has grown since."""
    limits = [_or_infinite(limit) for limit in (endpoint.max_requests, endpoint.max_usd)]
    for row in journal.rows("budget_ended"):
        limits_then = [_or_infinite(limit) for limit in row["budget_ended"]]
        if all(limit <= limit_then for limit, limit_then in zip(limits, limits_then, strict=True)):
            return True
    return False


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else limit
