"""`plan validate --url`: sends traffic to a deployment that others run, and times it by the client's clock.

First the endpoint is probed (planner/runtime/probe.py). Then requests warm it up, one in the first second and
twice as many in each further second up to the traffic's rate, so that a wrong address does not get the full
rate at once. The traffic itself is sent at its own times, whatever the endpoint answers: no request is sent
twice, and a refusal is an outcome. If too many requests fail, the run ends. The module profiling is imported
inside a function, because it may import torch.
"""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from planner.policies import by_tenant
from planner.runtime.analysis import ValidationSetup
from planner.runtime.budget import SendingBudget
from planner.runtime.endpoint import PROBE_TIMEOUT_S, Endpoint, EndpointAnswer, EndpointError, post_request
from planner.runtime.engine_scraper import EngineScraper
from planner.runtime.live_replay import JournalFile, RequestOutcome, Status, request_name, send_at_times
from planner.runtime.probe import ProbedEndpoint, Probing, refusal_message
from planner.traffic.trace import Trace

# HTTP codes after which all other requests would fail too: a wrong address or key, or no money left.
FATAL_CODES = (301, 302, 303, 307, 308, 401, 402, 403, 404)
# When to give up, from experience: late enough to outlast a hiccup, early enough to waste little money.
RECENT = 50  # The share of failures is taken over this many requests.
LEAST_FAILED = 5  # Fewer failures do not end a run, unless none is allowed (--max-failed 0).
IN_A_ROW = 10  # After this many failures in a row the endpoint is taken to be down.
# An endpoint refuses a request with these codes: too long, malformed, too many at once, overloaded.
REFUSAL_CODES = (400, 413, 422, 429, 503)
# With four requests per worker, a router that takes workers in turn reaches each of them. Warm-ups cost time
# and money, so their number is limited.
WARM_UPS_PER_WORKER, MOST_WARM_UPS = 4, 256
WARM_UP_OUTPUT_TOKENS = 8  # Prompts warm an engine up; a few output tokens make it decode as well.
WARM_UP_FRAC = 0.1  # Share of the budget for warm-up and probes.
TEXT_MARGIN_FRAC = 0.5  # A prompt of text may have this share more tokens than the probe measured.


@dataclass(slots=True)
class Failures:
    """Counts failed requests, and ends a run if more than `endpoint.max_failed_frac` of the last RECENT
    requests failed, or IN_A_ROW requests in a row. `sent_rps` is the rate of the traffic, for messages.
    """

    endpoint: Endpoint
    sent_rps: float
    # The last RECENT requests: 1 for each that failed, else 0; and their HTTP codes.
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    codes: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    in_a_row: int = 0
    last_failure: EndpointAnswer = field(default_factory=EndpointAnswer)

    def note_answer(self, answer: EndpointAnswer) -> None:
        """Count an answer. Raises EndpointError if no more requests should be sent."""
        endpoint = self.endpoint
        if answer.code in FATAL_CODES:
            raise EndpointError(f"{endpoint.url}: {refusal_message(endpoint, answer)}")
        self.recent.append(not answer.is_good)
        self.codes.append(answer.code)
        self.in_a_row = 0 if answer.is_good else self.in_a_row + 1
        if answer.is_good:
            return
        self.last_failure = answer
        failed, limit = sum(self.recent), endpoint.max_failed_frac
        # Of RECENT even while fewer have ended, so that a few failures at the start do not end the run.
        if (limit == 0 or failed >= LEAST_FAILED) and (failed > limit * RECENT or self.in_a_row >= IN_A_ROW):
            self._raise_error()

    def check_at_end(self) -> None:
        """Raise EndpointError if most of the recent requests failed, however few they are."""
        if 2 * sum(self.recent) > len(self.recent):
            self._raise_error()

    def _raise_error(self) -> None:
        """Raise EndpointError that says why too many requests failed, unless the user allows all to fail."""
        endpoint, answer, failed = self.endpoint, self.last_failure, sum(self.recent)
        if endpoint.max_failed_frac >= 1:
            return
        # If most failures are refusals for too many requests (HTTP 429), the message says how to send less.
        limited = sum(code == 429 for code in self.codes)
        if 2 * limited > failed:
            wait = f" (Retry-After: {answer.retry_after})" if answer.retry_after else ""
            raise EndpointError(
                f"{endpoint.host} limits requests: {limited} of the last {len(self.recent)} got HTTP "
                f"429{wait} at up to {self.sent_rps:.3g} requests/s; raise its limit, send less (--rate), or "
                "count refusals as outcomes (--max-failed 1)"
            )
        raise EndpointError(
            f"{endpoint.host}: {failed} of the last {len(self.recent)} requests failed, the last with "
            f"{answer.trouble!r}; more than --max-failed {endpoint.max_failed_frac:g} ends the run"
        )


@dataclass(slots=True)
class ToEndpoint:
    """Sends requests of the trace in the endpoint's dialect (a `live_replay.Sender`).

    `charged_usd` has the charge of each request in flight. With `is_spent` the budget was too small for a
    request. `trouble` has, by request, the error that ends the run once the request's outcome is written.
    `inexact` is the number of answers without an exact number of tokens.
    """

    setup: ValidationSetup
    client: aiohttp.ClientSession
    endpoint: Endpoint
    probed: ProbedEndpoint
    budget: SendingBudget
    failures: Failures
    longer_frac: float = 1.0  # The largest factor by which a prompt exceeded the tokens foreseen.
    charged_usd: dict[int, float] = field(default_factory=dict)
    trouble: dict[int, EndpointError] = field(default_factory=dict)
    is_spent: bool = False
    inexact: int = 0

    def body(self, request: int) -> bytes:
        """The body of a request of the trace, in the endpoint's dialect."""
        trace, dialect = self.setup.trace, self.probed.dialect
        prompt = dialect.prompt_of(
            trace, request, self.setup.seed, shares_prefixes=self.setup.shares_prefixes
        )
        is_by_tenant = by_tenant(self.setup.fleet.policies)  # Otherwise no tenant's name is sent.
        user = trace.tenants[trace.tenant[request]] if trace.tenants and is_by_tenant else ""
        return dialect.body(self.probed.model, prompt, int(trace.output_tokens[request]), user)

    def may_send(self, request: int) -> bool:
        """Charge the budget with the most that the request can cost; False if the budget is spent."""
        trace, dialect = self.setup.trace, self.probed.dialect
        # No prompt is shorter than one word within the endpoint's chat template.
        inputs = max(float(trace.input_tokens[request]), dialect.added_tokens + dialect.tokens_per_word)
        if not dialect.by_ids:
            inputs *= 1 + TEXT_MARGIN_FRAC
        inputs = math.ceil(inputs * self.longer_frac)
        charged = self.budget.charge(inputs, int(trace.output_tokens[request]))
        if charged is None:
            self.is_spent = True
            return False
        self.charged_usd[request] = charged
        return True

    async def send(
        self, request: int, part: int, start_s: float, due_s: float, body: bytes
    ) -> RequestOutcome:
        """Send one request, and return its outcome.

        If too many requests have failed, `ended` raises the error, once this outcome is in the journal. Only
        an answer with one of FATAL_CODES raises EndpointError at once.
        """

        def now_s() -> float:
            return round(time.monotonic() - start_s, 6)

        trace, sent_s = self.setup.trace, now_s()
        answer = await post_request(
            self.client,
            self.endpoint,
            self.probed.dialect.path,
            body,
            int(trace.output_tokens[request]),
            now_s=now_s,
            name=request_name(part, request),
        )
        self.budget.settle(self.charged_usd.pop(request), answer)
        if answer.input_tokens:
            longer_frac = answer.input_tokens / float(trace.input_tokens[request])
            if not self.probed.dialect.by_ids:
                longer_frac /= 1 + TEXT_MARGIN_FRAC  # `may_send` has already charged this margin.
            self.longer_frac = max(self.longer_frac, longer_frac)
        self.inexact += answer.is_good and not answer.is_exact
        try:
            self.failures.note_answer(answer)
        except EndpointError as error:
            if answer.code in FATAL_CODES:
                # No outcome is written, so that the request is sent again once address or key is corrected.
                raise
            self.trouble[request] = error
        status: Status = "finished"
        if not answer.is_good:
            status = "rejected" if answer.code in REFUSAL_CODES else "failed"
        return RequestOutcome(
            request=request,
            part=part,
            due_s=round(due_s, 6),
            sent_s=sent_s,
            end_s=now_s(),
            status=status,
            reason=answer.trouble,
            workers=(),
            token_s=answer.token_s,
            input_tokens=answer.input_tokens,
        )

    def note_end(self, outcome: RequestOutcome) -> None:
        """Raise the error that this request's answer caused, if there is one."""
        if outcome.request in self.trouble:
            raise self.trouble[outcome.request]


async def measure_endpoint(
    setup: ValidationSetup, journal: JournalFile, missing: list[int], progress: Callable[[str], None]
) -> None:
    """Probe and warm up the endpoint, send the missing requests within the budget, write a record."""
    from profiling.machine import describe_machine

    endpoint = setup.endpoint
    assert endpoint is not None  # The caller checks that --url was given.
    budget = SendingBudget(endpoint, journal)
    part = len(journal.read().parts)
    longest = int(np.max(setup.trace.input_tokens + setup.trace.output_tokens))
    async with endpoint.client() as client, EngineScraper(endpoint.prometheus) as scraper:
        await scraper.check()
        probing = Probing(client, endpoint, budget)
        probed = await probing.probe_endpoint(setup.fleet.llm.name, longest, progress)
        rate_rps = rate_of(setup.trace, missing)
        failures = Failures(endpoint, rate_rps)
        warm_ups = await warm_up(setup, client, probed, budget, failures, progress)
        await scraper.start(probed.model, progress)
        sender = ToEndpoint(setup, client, endpoint, probed, budget, failures)
        load_before = os.getloadavg()[0]
        # The keys are those of a run on our own engines (validate.py), which here have no values.
        record: dict[str, Any] = {"part": part, "events": [], "router": {}, "engines": []}
        record |= {"date": time.strftime("%Y-%m-%d"), "machine": describe_machine(), "spare_cores": None}
        try:
            sent = await send_at_times(setup.trace, missing, sender, journal, part=part, progress=progress)
            if sender.is_spent and not sent and not part:  # No request was sent, now or before.
                raise EndpointError(
                    f"the budget does not last for one request of the traffic ({budget.describe_use()} used "
                    "before it); raise --max-requests or --max-usd"
                )
            if sender.is_spent:
                journal.write({"budget_ended": [endpoint.max_requests, endpoint.max_usd]})
            record["engine_clock"] = await scraper.end(progress)
        finally:
            record["load_average"] = [load_before, os.getloadavg()[0]]
            record["endpoint"] = {
                "url": endpoint.url,
                "model": probed.model,
                **probed.dialect.as_dict(),
                "round_trip_s": probed.round_trip_s,
                "requests_before": probing.sent + warm_ups,
                "answers_without_exact_tokens": sender.inexact,
                "notes": list(probed.notes),
            }
            journal.write({"record": record})


def rate_of(trace: Trace, requests: list[int]) -> float:
    """The mean rate of these requests, in order of arrival [requests/s]; 1 if all arrive at once."""
    arrival_s = trace.arrival_s[requests]
    span_s = float(arrival_s[-1] - arrival_s[0])
    return len(requests) / span_s if span_s > 0 else 1.0


def warm_up_times(rate_rps: float, requests: int) -> list[float]:
    """Times of warm-ups [s]: one in the first second, then twice as many in each, up to `rate_rps`."""
    times, at_s = [], 0.0
    for _ in range(requests):
        times.append(at_s)
        doubled_rps = 2.0 ** math.floor(at_s)
        at_s += 1 / max(1.0, min(doubled_rps, rate_rps))
    return times


async def warm_up(
    setup: ValidationSetup,
    client: aiohttp.ClientSession,
    probed: ProbedEndpoint,
    budget: SendingBudget,
    failures: Failures,
    progress: Callable[[str], None],
) -> int:
    """Send requests of the trace's median length before the traffic, and return their number: some for each
    worker, at least as many as two seconds of traffic have, within WARM_UP_FRAC of the budget.
    """
    endpoint, dialect = budget.endpoint, probed.dialect
    tokens = int(np.median(setup.trace.input_tokens))
    requests = max(WARM_UPS_PER_WORKER * setup.fleet.workers, math.ceil(2 * failures.sent_rps))
    times = warm_up_times(failures.sent_rps, min(requests, MOST_WARM_UPS))
    progress(f"warming up: {len(times)} requests in {times[-1]:.0f} s")
    start_s = time.monotonic()
    warm_up_failures = Failures(endpoint, failures.sent_rps)  # Counted apart from those of the traffic.

    async def send(number: int, charged_usd: float) -> None:
        # Another seed than the traffic's, so that none of the traffic's prompts is in a cache yet.
        prompt = dialect.prompt(tokens, number, setup.seed + 1)
        body = dialect.body(probed.model, prompt, WARM_UP_OUTPUT_TOKENS)
        answer = await post_request(
            client,
            endpoint,
            dialect.path,
            body,
            WARM_UP_OUTPUT_TOKENS,
            name=f"warm-up-{number}",
            timeout_s=min(endpoint.timeout_s, PROBE_TIMEOUT_S),
        )
        budget.settle(charged_usd, answer)
        warm_up_failures.note_answer(answer)

    sent = 0
    try:
        async with asyncio.TaskGroup() as group:
            for at_s in times:
                await asyncio.sleep(start_s + at_s - time.monotonic())
                inputs = math.ceil(tokens * (1 if dialect.by_ids else 1 + TEXT_MARGIN_FRAC))
                charged = budget.charge(inputs, WARM_UP_OUTPUT_TOKENS, share_frac=WARM_UP_FRAC)
                if charged is None:
                    break
                group.create_task(send(sent, charged))
                sent += 1
    except ExceptionGroup as errors:  # Several requests may fail in the same way; the user reads one message.
        raise errors.exceptions[0] from None
    warm_up_failures.check_at_end()
    return sent
