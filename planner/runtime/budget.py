"""How many requests may be sent, and for how much: counted before each is sent, and kept in the journal.

A request is charged with the most it can cost, and once its answer says how many tokens it had, with these.
One that failed stays charged with the most: it may be billed.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.runtime.endpoint import Endpoint, EndpointAnswer
from planner.runtime.live_replay import JournalFile


@dataclass(slots=True)
class SendingBudget:
    """`requests` and `usd` of the whole journal, earlier parts of the run included."""

    endpoint: Endpoint
    journal: JournalFile
    requests: int = 0
    usd: float = 0.0

    def __post_init__(self) -> None:
        for row in self.journal.rows("charged_usd"):
            self.requests += 1
            self.usd += row["charged_usd"]
        self.usd += sum(row["given_back_usd"] for row in self.journal.rows("given_back_usd"))

    def usd_of(self, input_tokens: int, output_tokens: int) -> float:
        """What so many tokens cost; 0 where no price is known."""
        per_input, per_output = self.endpoint.usd_per_million or (0.0, 0.0)
        return (per_input * input_tokens + per_output * output_tokens) / 1e6

    def charge(self, input_tokens: int, output_tokens: int, *, share_frac: float = 1.0) -> float | None:
        """Take what a request with at most so many tokens may cost; None if it is not to be sent. With
        `share_frac` only so much of the budget may be used up."""
        usd, limits = self.usd_of(input_tokens, output_tokens), self.endpoint
        if limits.max_requests is not None and self.requests + 1 > limits.max_requests * share_frac:
            return None
        if limits.max_usd is not None and self.usd + usd > limits.max_usd * share_frac:
            return None
        self.requests += 1
        self.usd += usd
        self.journal.write({"charged_usd": usd})
        return usd

    def settle(self, charged_usd: float, answer: EndpointAnswer) -> None:
        """Charge what the answer really had, where it says so."""
        if not (answer.is_good and answer.input_tokens and answer.output_tokens):
            return
        back_usd = self.usd_of(answer.input_tokens, answer.output_tokens) - charged_usd
        if back_usd:
            self.usd += back_usd
            self.journal.write({"given_back_usd": back_usd})

    def describe_use(self) -> str:
        """The limits, for a sentence."""
        limits = []
        if self.endpoint.max_requests is not None:
            limits.append(f"{self.requests} of at most {self.endpoint.max_requests} requests")
        if self.endpoint.max_usd is not None:
            limits.append(f"{self.usd:.4g} of at most {self.endpoint.max_usd:g} USD")
        return " and ".join(limits)

    def limit_values(self) -> list[float | None]:
        return [self.endpoint.max_requests, self.endpoint.max_usd]


def is_spent(journal: JournalFile, endpoint: Endpoint) -> bool:
    """Whether an earlier part ended because of the budget, and this one is no larger."""
    present_limits = (endpoint.max_requests, endpoint.max_usd)
    return any(
        all(
            now == then or (now is not None and then is not None and now <= then)
            for now, then in zip(present_limits, row["budget_ended"], strict=True)
        )
        for row in journal.rows("budget_ended")
    )
