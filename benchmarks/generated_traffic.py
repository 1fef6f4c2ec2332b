"""Draws traffic: independent requests, prompts that share prefixes, and programs of several requests.

The prompts with prefixes are those of Preble's five workloads: lengths and sharing follow Table 1 of Srivatsa
et al. 2024, arXiv:2407.00023, whose rows are in `TABLE`. Where the table leaves something open, we chose, and
the functions say so. The programs, trees of thoughts and judges, have the shapes of section 6.1 of
"Locality-aware Fair Scheduling in LLM Serving" (DLPM, 2025).

A prompt is a path from a root in a tree of texts, and is cut into blocks. Two prompts share a block if they
share all text up to its end. Arrivals are a Poisson process where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.traffic.trace import MAX_REQUESTS, FloatArray, IntArray, Trace

MeanSd = tuple[float, float]
Lengths = Callable[[np.random.Generator, int], IntArray]
"""Draws the lengths [tokens] of so many requests."""
NO_EDGES = np.zeros((0, 2), np.int64)
NO_TIMES = np.zeros(0)

CANDIDATES = 8  # "programming": so many requests try to solve the same problem.
STEP_S = 2.0  # "embodied": the mean time in which an agent's environment answers.
HEIGHT = 4  # Levels of a tree of thoughts; with 4 branches it has 340 requests, with 2 it has 30.


@dataclass(frozen=True, slots=True)
class PrebleShape:
    """A row of Preble's Table 1, each cell (mean, standard deviation).

    `shared_frac` is the share of a prompt that other prompts have too. The key portion of a prompt,
    `key_frac` of it, is the deepest text with more tokens than all texts before it. `key_requests` counts the
    requests with the same key portion.
    """

    prompt_tokens: MeanSd
    output_tokens: MeanSd
    shared_frac: MeanSd
    key_frac: MeanSd
    key_requests: MeanSd


TABLE = {
    "toolbench": PrebleShape((1835, 742), (43, 16), (0.85, 0.13), (0.76, 0.16), (39, 64)),
    "embodied": PrebleShape((2285, 471), (16, 13), (0.97, 0.14), (0.76, 0.12), (48, 8)),
    "programming": PrebleShape((3871, 1656), (190, 343), (0.97, 0.074), (0.78, 0.13), (126, 2157)),
    "videoqa": PrebleShape((9865, 5976), (4, 1.5), (0.88, 0.32), (0.99, 0.002), (8.6, 2)),
    "loogle": PrebleShape((23474, 6105), (16, 9.9), (0.91, 0.24), (0.94, 0.15), (18, 8.6)),
}
# Tokens of the system prompt. In other workloads it is the shared text that is not in the key portion.
SYSTEM_TOKENS = {"videoqa": 0, "loogle": 13}


class _Texts:
    """A tree of texts under construction; a text begins where its parent ends."""

    def __init__(self) -> None:
        self.parent: list[IntArray] = []
        self.tokens: list[IntArray] = []
        self.count = 0

    def add(self, parent: IntArray, tokens: IntArray) -> IntArray:
        """Adds texts of so many tokens (k,), each after its `parent` (k,), -1 for none. Returns their numbers
        (k,).
        """
        self.parent.append(parent)
        self.tokens.append(tokens)
        self.count += len(tokens)
        return np.arange(self.count - len(tokens), self.count)

    def trace(
        self,
        name: str,
        arrival_s: FloatArray,
        end: IntArray,
        output_tokens: IntArray,
        block_tokens: int,
        note: str,
        after: IntArray = NO_EDGES,
        think_s: FloatArray = NO_TIMES,
    ) -> Trace:
        """Requests (n,) in order of arrival, whose prompts run from a root to the end of the texts `end`."""
        parent, tokens = np.concatenate(self.parent), np.concatenate(self.tokens)
        # A text starts after all tokens above it: one level is added in each round.
        start = np.zeros(len(parent), np.int64)
        above = parent
        while (up := above >= 0).any():
            start[up] += tokens[above[up]]
            above = np.where(up, parent[above], -1)
        inputs = start[end] + tokens[end]
        blocks = -(-inputs // block_tokens)
        offsets = np.concatenate(([0], np.cumsum(blocks)))
        block = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks)
        text = np.repeat(end, blocks)
        # A block belongs to the deepest text of the path that starts before the block ends.
        while len(high := np.flatnonzero(start[text] // block_tokens > block)):
            text[high] = parent[text[high]]
        # A text gets numbers for all blocks that may belong to it: its whole ones, and one at each end.
        first_id = np.cumsum(tokens // block_tokens + 2) - (tokens // block_tokens + 2)
        return Trace(
            name=name,
            arrival_s=arrival_s,
            input_tokens=inputs,
            output_tokens=output_tokens,
            prefix_offsets=offsets,
            prefix_ids=first_id[text] + block - start[text] // block_tokens,
            prefix_block_tokens=block_tokens,
            notes=(note,),
            after=after,
            think_s=think_s,
        )


def synthesise(
    requests: int,
    rate_rps: float,
    *,
    input_tokens: Lengths,
    output_tokens: Lengths,
    gap_cv: float = 1.0,
    rng: np.random.Generator,
    name: str = "synthetic",
) -> Trace:
    """`requests` independent arrivals, the first at 0, with lengths drawn from the two distributions.

    Gaps are Gamma distributed with mean 1 / rate_rps and coefficient of variation `gap_cv`: 1 is a Poisson
    process, more is bursty, 0 is a clock.
    """
    if not 1 <= requests <= MAX_REQUESTS:
        raise InputError(f"requests: expected 1 to {MAX_REQUESTS}, found {requests}")
    if not 0 < rate_rps < np.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")
    if not 0 <= gap_cv <= 100:
        raise InputError(f"gap_cv: expected 0 (a clock) to 100, found {gap_cv}")
    gaps_s = np.full(requests, 1 / rate_rps)
    if gap_cv:
        gaps_s = rng.gamma(gap_cv**-2, gap_cv**2 / rate_rps, requests)
    gaps_s[0] = 0.0
    return Trace(
        name=name,
        arrival_s=np.cumsum(gaps_s),
        input_tokens=input_tokens(rng, requests),
        output_tokens=output_tokens(rng, requests),
        notes=(f"synthetic: {requests} requests, {rate_rps:g} requests/s, Gamma gaps of CV {gap_cv:g}",),
    )


def fixed(tokens: int) -> Lengths:
    """Every request has this length."""
    _at_least_one("fixed length", tokens)
    return lambda rng, n: np.full(n, tokens, np.int64)


def uniform(low_tokens: int, high_tokens: int) -> Lengths:
    """Every whole number from low to high, both included, is equally likely."""
    _at_least_one("lowest length", low_tokens)
    if high_tokens < low_tokens:
        raise InputError(f"uniform lengths: the highest ({high_tokens}) is below the lowest ({low_tokens})")
    return lambda rng, n: rng.integers(low_tokens, high_tokens, n, dtype=np.int64, endpoint=True)


def lognormal(mean_tokens: float, cv: float) -> Lengths:
    """Lognormal with this mean and coefficient of variation, rounded, at least 1."""
    _at_least_one("mean length", mean_tokens)
    if not 0 <= cv < np.inf:
        raise InputError(f"lognormal lengths: expected a coefficient of variation >= 0, found {cv}")
    variance = np.log1p(cv**2)
    mu, sigma = np.log(mean_tokens) - variance / 2, np.sqrt(variance)
    return lambda rng, n: _rounded(rng.lognormal(mu, sigma, n))


def empirical(tokens: npt.ArrayLike) -> Lengths:
    """Drawn from observed lengths, with replacement."""
    observed = np.asarray(tokens, dtype=np.float64)
    if not observed.size or not (observed >= 1).all():
        raise InputError("empirical lengths: expected one or more numbers of tokens >= 1")
    return lambda rng, n: _rounded(rng.choice(observed, n))


def _rounded(tokens: FloatArray) -> IntArray:
    return np.maximum(np.round(tokens), 1).astype(np.int64)


def _at_least_one(what: str, tokens: float) -> None:
    if not 1 <= tokens < np.inf:
        raise InputError(f"{what}: expected a number of tokens >= 1, found {tokens}")


def preble(
    workload: str,
    requests: int,
    rate_rps: float,
    *,
    rng: np.random.Generator,
    block_tokens: int = KV_BLOCK_TOKENS,
    zipf: float | None = None,
) -> Trace:
    """Traffic as in the row `workload` of TABLE. Only in "embodied" do requests wait for others, with time in
    between.

    With `zipf` the share of requests for the k-th document (tool, video) is proportional to k^-zipf.
    """
    if workload not in TABLE:
        raise InputError(f"workload: expected one of {', '.join(TABLE)}, found {workload!r}")
    if requests < 1 or not 0 < rate_rps < np.inf or block_tokens < 1:
        raise InputError(
            f"{workload}: expected requests, rate and block > 0, found {requests}, {rate_rps}, {block_tokens}"
        )
    if workload in ("embodied", "programming"):
        if zipf is not None:
            raise InputError(
                f"{workload}: has no documents of which zipf could say how often they are asked for"
            )
        make = _embodied if workload == "embodied" else _programming
        return make(workload, requests, rate_rps, block_tokens, rng)
    return _documents(workload, requests, rate_rps, block_tokens, rng, zipf)


def _documents(
    workload: str,
    requests: int,
    rate_rps: float,
    block_tokens: int,
    rng: np.random.Generator,
    zipf: float | None,
) -> Trace:
    """Toolbench, Video QA, LooGLE: a prompt is a system prompt, a document (tool, video) and a question.

    The number of requests per document is Gamma distributed as `key_requests` says, and they come in random
    order. If system prompt and document are more of a prompt than `shared_frac`, some requests have a
    document of their own. Lengths of questions have an exponential distribution, so their standard deviation
    is their mean; the rest of the variance of prompts is that of the documents.
    """
    shape = TABLE[workload]
    mean, sd = shape.prompt_tokens
    system = SYSTEM_TOKENS.get(workload, round((shape.shared_frac[0] - shape.key_frac[0]) * mean))
    alone_frac = max(1 - shape.shared_frac[0] / (shape.key_frac[0] + system / mean), 0.0)
    question = mean * (1 - shape.key_frac[0]) - system
    alone = round(alone_frac * requests)
    shared = _popular(requests - alone, shape.key_requests, rng)
    if zipf is not None:
        shares = np.arange(1.0, len(np.unique(shared)) + 1) ** -zipf
        shared = rng.choice(len(shares), len(shared), p=shares / shares.sum())
    document = np.concatenate((shared, -1 - np.arange(alone)))
    document = np.unique(rng.permutation(document), return_inverse=True)[1]
    texts = _Texts()
    root = texts.add(np.array([-1]), np.array([system]))
    lengths = _gamma((mean * shape.key_frac[0], np.sqrt(sd**2 - question**2)), document.max() + 1, rng)
    documents = texts.add(np.repeat(root, len(lengths)), lengths)
    end = texts.add(documents[document], _gamma((question, question), requests, rng))
    arrival_s = _poisson_s(requests, rate_rps, rng)
    outputs = _gamma(shape.output_tokens, requests, rng)
    return texts.trace(workload, arrival_s, end, outputs, block_tokens, _note(workload))


def _embodied(
    workload: str, requests: int, rate_rps: float, block_tokens: int, rng: np.random.Generator
) -> Trace:
    """Agents: a run is an instruction, then steps that each append the last answer and the environment's.

    A run has `key_requests` steps. The instruction is its key portion, and the length of what a step appends
    follows from the mean length of prompts. A step comes STEP_S after the answer to the one before it, on
    average (our choice); `arrival_s` counts answers as if they took no time.
    """
    shape = TABLE[workload]
    mean, sd = shape.prompt_tokens
    steps = _gamma(shape.key_requests, int(2 * requests / shape.key_requests[0]) + 2, rng)
    # As many runs as reach the number of requests; the last is cut to match it.
    steps = steps[: int(np.searchsorted(np.cumsum(steps), requests)) + 1]
    steps[-1] -= steps.sum() - requests
    # The mean step lies in the middle of its run, after half of all that is appended.
    growth = mean * (1 - shape.key_frac[0]) * 2 / (shape.key_requests[0] - 1)
    # The standard deviation of prompts that comes from the step's place in its run, which is uniform.
    spread = growth * shape.key_requests[0] / np.sqrt(12)
    run = np.repeat(np.arange(len(steps)), steps)
    step = np.arange(requests) - np.repeat(np.cumsum(steps) - steps, steps)
    outputs = _gamma(shape.output_tokens, requests, rng)
    texts = _Texts()
    instruction = _gamma((shape.key_frac[0] * mean, np.sqrt(sd**2 - spread**2)), len(steps), rng)
    end = np.empty(requests, np.int64)
    end[step == 0] = texts.add(np.full(len(steps), -1), instruction)
    observed = _gamma((growth - shape.output_tokens[0],) * 2, requests, rng)
    for now in range(1, int(steps.max())):
        at = np.flatnonzero(step == now)
        end[at] = texts.add(end[at - 1], outputs[at - 1] + observed[at])
    start_s = rng.uniform(0.0, requests / rate_rps, len(steps))
    waits_s = rng.exponential(STEP_S, requests) * (step > 0)
    elapsed_s = np.cumsum(waits_s)
    arrival_s = start_s[run] + elapsed_s - elapsed_s[step == 0][run]
    edges = np.column_stack((np.arange(1, requests), np.arange(requests - 1)))[step[1:] > 0]
    return _in_order(texts, workload, arrival_s, end, outputs, edges, block_tokens, waits_s)


def _programming(
    workload: str, requests: int, rate_rps: float, block_tokens: int, rng: np.random.Generator
) -> Trace:
    """Programming: all prompts begin with the same demonstrations, then follows a problem, then a text of the
    request's own (3 %). CANDIDATES requests have the same problem (our choice).

    Lengths of problems vary so much that the longest problems are key portions; otherwise the demonstrations
    are.
    """
    shape = TABLE[workload]
    mean, sd = shape.prompt_tokens
    own = (1 - shape.shared_frac[0]) * mean
    demonstrations = shape.key_frac[0] * mean
    problems = -(-requests // CANDIDATES)
    texts = _Texts()
    root = texts.add(np.array([-1]), np.array([round(demonstrations)]))
    lengths = _gamma((mean - demonstrations - own, sd), problems, rng)
    problem = texts.add(np.repeat(root, problems), lengths)
    end = texts.add(np.repeat(problem, CANDIDATES)[:requests], _gamma((own, own / 2), requests, rng))
    arrival_s = np.repeat(_poisson_s(problems, rate_rps / CANDIDATES, rng), CANDIDATES)[:requests]
    outputs = _gamma(shape.output_tokens, requests, rng)
    return texts.trace(workload, arrival_s, end, outputs, block_tokens, _note(workload))


def tree_of_thoughts(
    trees: int,
    rate_rps: float,
    *,
    branches: int = 2,
    question_tokens: MeanSd = (500, 100),
    thought_tokens: MeanSd = (80, 30),
    rng: np.random.Generator,
    block_tokens: int = KV_BLOCK_TOKENS,
) -> Trace:
    """Trees of HEIGHT levels. Each thought leads to `branches` requests, whose prompts hold the question and
    all thoughts above.

    `rate_rps` counts trees. The lengths are our choice.
    """
    if trees < 1 or branches < 1:
        raise InputError(f"trees of thoughts: {trees} trees of {branches} branches, need >= 1 of both")
    texts = _Texts()
    start_s = _poisson_s(trees, rate_rps, rng)
    above = texts.add(np.full(trees, -1), _gamma(question_tokens, trees, rng))
    tree = np.arange(trees)
    parent, request = np.full(trees, -1), 0
    ends, outputs, arrivals, edges = [], [], [], []
    for _ in range(HEIGHT):
        tree, end = np.repeat(tree, branches), np.repeat(above, branches)
        numbers = request + np.arange(len(end))
        awaited = np.repeat(parent, branches)
        edges.append(np.column_stack((numbers, awaited))[awaited >= 0])
        ends.append(end)
        outputs.append(_gamma(thought_tokens, len(end), rng))
        arrivals.append(start_s[tree])
        above, parent, request = texts.add(end, outputs[-1]), numbers, request + len(end)
    return _in_order(
        texts,
        "tree-of-thoughts",
        np.concatenate(arrivals),
        np.concatenate(ends),
        np.concatenate(outputs),
        np.concatenate(edges),
        block_tokens,
    )


def judges(
    articles: int,
    rate_rps: float,
    *,
    dimensions: int = 2,
    template_tokens: int = 200,
    article_tokens: MeanSd = (800, 200),
    verdict_tokens: MeanSd = (120, 40),
    rng: np.random.Generator,
    block_tokens: int = KV_BLOCK_TOKENS,
) -> Trace:
    """Branch, solve, merge: a first request names dimensions of an article, further ones judge it in one
    dimension each, at the same time, and a last one sums up.

    `rate_rps` counts articles. The lengths are our choice; all prompts begin with the same `template_tokens`.
    """
    if articles < 1 or dimensions < 1:
        raise InputError(f"judges: {articles} articles in {dimensions} dimensions, need >= 1 of both")
    texts = _Texts()
    start_s = _poisson_s(articles, rate_rps, rng)
    each = dimensions + 2
    template = texts.add(np.array([-1]), np.array([template_tokens]))
    article = texts.add(np.repeat(template, articles), _gamma(article_tokens, articles, rng))
    outputs = _gamma(verdict_tokens, articles * each, rng).reshape(articles, each)
    branch = texts.add(article, np.full(articles, 30))
    solve = texts.add(np.repeat(article, dimensions), 20 + np.repeat(outputs[:, 0], dimensions) // dimensions)
    merge = texts.add(article, 20 + outputs[:, 1:-1].sum(axis=1))
    end = np.column_stack((branch, solve.reshape(articles, dimensions), merge))
    first = each * np.arange(articles)[:, None]
    middle = first + np.arange(1, each - 1)
    down = np.column_stack((middle.ravel(), np.repeat(first, dimensions)))
    up = np.column_stack((np.repeat(first + each - 1, dimensions), middle.ravel()))
    return _in_order(
        texts,
        "judges",
        np.repeat(start_s, each),
        end.ravel(),
        outputs.ravel(),
        np.concatenate((down, up)),
        block_tokens,
    )


def merged(tenants: Mapping[str, Trace]) -> Trace:
    """The traffic of several tenants at once; they share no prefix."""
    traces = list(tenants.values())
    if not traces or len({trace.prefix_block_tokens for trace in traces}) > 1:
        raise InputError("tenants: expected at least one, with blocks of one size")
    ids, edges, before, id_from = [], [], 0, 0
    for trace in traces:
        ids.append(trace.prefix_ids + id_from)
        edges.append(trace.after + before)
        before += len(trace)
        id_from += int(trace.prefix_ids.max(initial=-1)) + 1
    together = np.concatenate([trace.arrival_s for trace in traces])
    order = np.argsort(together, kind="stable")
    blocks = np.concatenate([np.diff(trace.prefix_offsets) for trace in traces])
    joined = Trace(
        name="+".join(tenants),
        arrival_s=np.zeros(len(together)),
        input_tokens=np.concatenate([trace.input_tokens for trace in traces]),
        output_tokens=np.concatenate([trace.output_tokens for trace in traces]),
        prefix_offsets=np.concatenate(([0], np.cumsum(blocks))),
        prefix_ids=np.concatenate(ids),
        prefix_block_tokens=traces[0].prefix_block_tokens,
        tenant=np.repeat(np.arange(len(traces)), [len(trace) for trace in traces]),
        tenants=tuple(tenants),
        notes=tuple(note for trace in traces for note in trace.notes),
        after=_by_parent(np.concatenate(edges)),
        think_s=np.concatenate([trace.think_s for trace in traces]),
        image_tokens=_images(traces),
    )
    return joined.select(order, arrival_s=together[order])


def _images(traces: Sequence[Trace]) -> IntArray | None:
    """The tokens of images of all requests, 0 for traces that do not state them; None if no trace does."""
    if all(trace.image_tokens is None for trace in traces):
        return None
    none = [np.zeros(len(trace), np.int64) for trace in traces]
    return np.concatenate(
        [zeros if t.image_tokens is None else t.image_tokens for t, zeros in zip(traces, none, strict=True)]
    )


def _in_order(
    texts: _Texts,
    name: str,
    arrival_s: FloatArray,
    end: IntArray,
    outputs: IntArray,
    edges: IntArray,
    block_tokens: int,
    think_s: FloatArray = NO_TIMES,
) -> Trace:
    """The trace of these requests, sorted by arrival; requests of one program that arrive at once keep their
    order. `edges` (k, 2) are pairs of a request and the one it waits for.
    """
    order = np.argsort(arrival_s, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return texts.trace(
        name,
        (arrival_s - arrival_s.min())[order],
        end[order],
        outputs[order],
        block_tokens,
        _note(name),
        after=_by_parent(place[edges]),
        think_s=think_s[order] if len(think_s) else think_s,
    )


def _by_parent(edges: IntArray) -> IntArray:
    return edges[np.lexsort((edges[:, 0], edges[:, 1]))]


def _popular(requests: int, popularity: MeanSd, rng: np.random.Generator) -> IntArray:
    """The document of each request. The number of requests per document is drawn by `popularity`, at
    least 2.
    """
    if requests == 0:
        return np.zeros(0, np.int64)
    sizes = np.maximum(_gamma(popularity, int(2 * requests / popularity[0]) + 2, rng), 2)
    while sizes.sum() < requests:
        sizes = np.concatenate((sizes, np.maximum(_gamma(popularity, len(sizes), rng), 2)))
    return np.repeat(np.arange(len(sizes)), sizes)[:requests]


def _gamma(tokens: MeanSd, size: int, rng: np.random.Generator) -> IntArray:
    """Whole numbers of at least 1 with this mean and standard deviation, Gamma distributed."""
    mean, sd = tokens
    drawn = rng.gamma((mean / sd) ** 2, sd**2 / mean, int(size))
    return np.maximum(np.round(drawn), 1).astype(np.int64)


def _poisson_s(requests: int, rate_rps: float, rng: np.random.Generator) -> FloatArray:
    """Arrivals of a Poisson process, the first at 0."""
    if not 0 < rate_rps < np.inf:
        raise InputError(f"rate: expected a number of requests/s > 0, found {rate_rps}")
    arrival_s: FloatArray = np.cumsum(rng.exponential(1 / rate_rps, requests))
    arrival_s -= arrival_s[0]
    return arrival_s


def _note(name: str) -> str:
    return f"made up: {name}, see benchmarks/generated_traffic.py"
