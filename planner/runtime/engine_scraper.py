"""Reads what the engines themselves measured while traffic ran: the increase of vLLM's histograms between two
scrapes, of the engines' own /metrics or of a Prometheus server.

The histograms count all requests that the engines served in that time, also those of other clients. There
were such requests if `EngineTimes.requests` exceeds the number of ours. No scraped address gets the
endpoint's API key.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from planner.errors import InputError
from planner.importers.prometheus_scrape import HISTOGRAMS, Samples, histogram_statistics, samples_of
from planner.runtime.endpoint import UNREADABLE, EndpointError, open_session, read_text

SCRAPE_TIMEOUT_S = 20.0  # The limit on the time of one scrape.
SCRAPE_BYTES = 64 * 2**20  # The limit of a scrape; an engine's has about 100 KB.
# Usual scrape intervals are a minute at most, so within this time a server has scraped again.
SETTLE_S = 90.0
POLL_S = 1.0  # The server is asked this often whether it has scraped.
LABEL = "model_name"  # vLLM's label for the LLM of a sample.
# Queries to a Prometheus server: vLLM's histograms and counters; the oldest of the engines' last scrapes.
SAMPLES_QUERY = '{__name__=~"vllm:.+_(bucket|sum|count|total)"}'
OLDEST_SCRAPE_QUERY = "min(timestamp(vllm:e2e_request_latency_seconds_count))"
# In the order in which `engine_times` unpacks their values.
COUNTERS = ("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total")

Rows = Iterable[tuple[str, dict[str, str], float]]


@dataclass(slots=True)
class EngineScraper:
    """Scrapes each address of `urls` before and after the traffic; without addresses it does nothing.

    Call `check` first, `start` before the traffic, and `end` after it.
    """

    urls: Sequence[str]
    client: aiohttp.ClientSession | None = None
    llm: str = ""
    before: list[Samples] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.client = open_session(SCRAPE_TIMEOUT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.client is not None
        await self.client.close()

    async def check(self) -> None:
        """Raise EndpointError if an address is neither an engine's metrics nor a Prometheus server."""
        for url in self.urls:
            await self._rows(url)

    async def start(self, llm: str, progress: Callable[[str], None]) -> None:
        """Scrape before the traffic. `llm` is the endpoint's name of the LLM."""
        self.llm = llm
        self.before = [await self._scrape(url, progress) for url in self.urls]

    async def end(self, progress: Callable[[str], None]) -> dict[str, Any] | None:
        """Scrape after the traffic.

        Returns the increase of each sample, summed over engines, or the error, as the journal stores it; None
        without addresses.
        """
        if not self.urls:
            return None
        total: Samples = {}
        try:
            for url, before in zip(self.urls, self.before, strict=True):
                for key, value in (await self._scrape(url, progress)).items():
                    # A sample that the first scrape lacks has risen from 0.
                    if (increase := value - before.get(key, 0.0)) < 0:
                        raise InputError(f"{url}: {key[0]} fell: an engine was restarted while traffic ran")
                    total[key] = total.get(key, 0.0) + increase
        except (EndpointError, InputError) as error:
            return {"trouble": str(error)}
        return {"samples": [[*key, value] for key, value in total.items()]}

    async def _scrape(self, url: str, progress: Callable[[str], None]) -> Samples:
        """The samples at a URL: an engine's own, read now, or those of a Prometheus server's next scrape."""
        if not is_engine(url):
            await self._wait_for_scrape(url, progress)
        return sum_samples(await self._rows(url), self.llm, url)

    async def _wait_for_scrape(self, url: str, progress: Callable[[str], None]) -> None:
        """Wait until a Prometheus server has scraped the engines once more, by its own clock."""
        time_and_value = await self._query(url, "time()")
        try:
            _, now_s = map(float, time_and_value)  # A scalar is (time of the query, value).
        except (ValueError, TypeError):
            raise EndpointError(f"{url}: its time() is no number") from None
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            oldest = await self._query(url, OLDEST_SCRAPE_QUERY)
            # Without rows there is no engine of vLLM, and no scrape to wait for.
            if not oldest or float(oldest[0]["value"][1]) >= now_s:
                return
            if time.monotonic() > deadline_s:
                raise EndpointError(f"{url}: has not scraped the engines for {SETTLE_S:g} s")
            progress("waiting for Prometheus to scrape the engines")
            await asyncio.sleep(POLL_S)

    async def _rows(self, url: str) -> list[tuple[str, dict[str, str], float]]:
        """The samples at an address: (name, labels, value)."""
        if is_engine(url):
            return list(samples_of(await self._get(url), url))
        rows = []
        for row in await self._query(url, SAMPLES_QUERY):
            labels = {str(key): str(value) for key, value in row["metric"].items()}
            rows.append((labels.pop("__name__", ""), labels, float(row["value"][1])))
        return rows

    async def _query(self, url: str, query: str) -> Any:
        """A Prometheus server's answer to a query. Raises EndpointError unless it has Prometheus' form."""
        text = await self._get(f"{url.rstrip('/')}/api/v1/query", {"query": query})
        try:
            document = json.loads(text)
            if document["status"] == "success":
                result = document["data"]["result"]
                for row in result if document["data"]["resultType"] == "vector" else ():
                    float(row["value"][1]), row["metric"].items()  # Evaluated only to raise for a wrong form.
                return result
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            pass
        raise EndpointError(
            f"--prometheus {url}: is no Prometheus server, as it does not answer /api/v1/query; the "
            "address of an engine's metrics ends in /metrics"
        )

    async def _get(self, url: str, params: dict[str, str] | None = None) -> str:
        """The text at an address; EndpointError without an answer in time, and for any status but 200."""
        assert self.client is not None
        try:
            # Only the address that the user gave is read: redirects are not followed.
            async with self.client.get(url, params=params, allow_redirects=False) as answer:
                text = await read_text(answer, SCRAPE_BYTES)
        except TimeoutError:
            raise EndpointError(f"--prometheus {url}: no answer within {SCRAPE_TIMEOUT_S:g} s") from None
        except UNREADABLE as error:
            raise EndpointError(f"--prometheus {url}: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            raise EndpointError(f"--prometheus {url}: HTTP {answer.status}")
        return text


def is_engine(url: str) -> bool:
    """Whether the address is that of an engine's metrics; else it is that of a Prometheus server."""
    return url.endswith("/metrics")


def sum_samples(rows: Rows, llm: str, where: str) -> Samples:
    """vLLM's samples, summed over engines. If these serve several LLMs, only the samples of `llm` count; a
    single LLM counts under any name, as the endpoint may give it another.
    """
    by_llm: dict[str, Samples] = {}
    for name, labels, value in rows:
        if not name.startswith("vllm:") or not name.endswith(("_bucket", "_sum", "_count", "_total")):
            continue
        if not 0 <= value < math.inf:  # Some exporters write NaN before the first value.
            continue
        samples = by_llm.setdefault(labels.get(LABEL, ""), {})
        key = (name, labels.get("le", "") if name.endswith("_bucket") else "")
        samples[key] = samples.get(key, 0.0) + value
    if len(by_llm) > 1 and llm not in by_llm:
        raise EndpointError(
            f"--prometheus {where}: has {', '.join(sorted(by_llm))[:200]}, and none of them is {llm!r}; name "
            "the /metrics of the engines behind the endpoint"
        )
    # If `llm` is not among them, there is at most one LLM, which counts.
    return by_llm.get(llm) or next(iter(by_llm.values()), {})


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """The engines' own measurements of `requests`: for each metric (queue, ttft, tpot, tbt, e2e) the mean,
    and for percentiles the upper edge of their bucket [s]. `hit_frac` is the share of looked-up prompt tokens
    that prefix caches had; None if no token was looked up.
    """

    requests: int
    times_s: dict[str, dict[str, float]]
    preemptions: int
    hit_frac: float | None


def engine_times(records: Iterable[Mapping[str, Any] | None]) -> EngineTimes | None:
    """The engines' times over the parts of a run, from the values that `EngineScraper.end` gave for them;
    None if no part has samples. Parts with an error do not count; as_served.py reports them.
    """
    total: Samples = {}
    for record in records:
        for name, le, value in (record or {}).get("samples", ()):
            total[name, le] = total.get((name, le), 0.0) + value
    if not total:
        return None
    times_s = {}
    for metric, histograms in HISTOGRAMS.items():
        for histogram in histograms:  # Names of the histogram in several versions of vLLM.
            if metric not in times_s and (statistics := histogram_statistics(total, histogram)):
                times_s[metric] = statistics
    preemptions, looked_up, hits = (total.get((f"vllm:{name}", ""), 0.0) for name in COUNTERS)
    requests = int(total.get(("vllm:e2e_request_latency_seconds_count", ""), 0.0))
    return EngineTimes(requests, times_s, int(preemptions), hits / looked_up if looked_up else None)
