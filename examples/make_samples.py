"""Writes the traces in traces/: two like Azure's, one with shared prefixes, one of chat sessions.

The Azure ones are synthetic traces in the format and with the published shape of the Azure LLM inference
traces of 2023 (Patel et al. 2024, arXiv:2311.18677; AzurePublicDataset, CC-BY-4.0): percentiles of both
lengths, mean rate and burstiness. Every row is drawn from the tables below; none is a row of those traces.

The third has prefixes: tool calls whose instructions recur and agents whose steps build on each other, with
the lengths and sharing of Toolbench and the embodied agents in Table 1 of Preble (Srivatsa et al. 2024,
arXiv:2407.00023), drawn by benchmarks/generated_traffic.py.

The fourth is fifteen minutes of a chat service: turns that wait for the answer before and for their user,
with prompts that hold the turns before. Its shapes are our choice, see `chat_csv`.

    python examples/make_samples.py
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.generated_traffic import merged, preble

FloatArray = npt.NDArray[np.float64]

REQUESTS = 3000
PERCENTILES = (0, 1, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 65, 70, 80, 90, 95, 99, 100)
CONVERSATION_INPUT = (
    2,
    29,
    181,
    207,
    372,
    387,
    396,
    403,
    414,
    703,
    984,
    1020,
    1071,
    1097,
    1130,
    1315,
    2734,
    4083,
    4142,
    9000,
)
CONVERSATION_OUTPUT = (
    7,
    16,
    41,
    54,
    67,
    77,
    85,
    91,
    96,
    103,
    113,
    129,
    177,
    217,
    384,
    400,
    424,
    451,
    601,
    1000,
)
CODE_INPUT = (
    3,
    17,
    75,
    147,
    232,
    385,
    578,
    770,
    938,
    1075,
    1261,
    1469,
    1909,
    2163,
    2433,
    3192,
    5187,
    7303,
    7436,
    7437,
)
CHAT_S, CHAT_BEFORE_S = 900.0, 1800.0  # seconds of the log, and before it, in which chats begin
CHATS_PER_S = 0.2
CHAT_BLOCK = 128
INSTRUCTIONS = (700, 1500, 2900)  # tokens of the three assistants'
CODE_OUTPUT = (6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 16, 18, 20, 29, 55, 90, 251, 700)


def lengths(tokens: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Lengths with these PERCENTILES: one from each of REQUESTS equal slices, the slices in random order."""
    slices = (rng.permutation(REQUESTS) + rng.uniform(size=REQUESTS)) / REQUESTS
    # straight between the percentiles in the logarithm, as lengths spread by ratios
    logs: FloatArray = np.interp(slices, np.array(PERCENTILES) / 100, np.log(tokens))
    return np.round(np.exp(logs)).astype(np.float64)


def steady_arrivals_s(rate_rps: float, rng: np.random.Generator) -> FloatArray:
    """Nearly Poisson: Gamma gaps of coefficient of variation 1.09."""
    gaps = rng.gamma(1.09**-2, size=REQUESTS)
    return at_rate(np.cumsum(gaps), rate_rps)


def bursty_arrivals_s(rate_rps: float, rng: np.random.Generator) -> FloatArray:
    """Bursts of some 40 requests, 12 each second, then a silence: mostly short, at times long."""
    gaps_s = rng.exponential(1 / 12, REQUESTS)
    ends_burst = rng.uniform(size=REQUESTS) < 1 / 40
    gaps_s[ends_burst] += rng.gamma(0.35, 34.0, int(ends_burst.sum()))
    return at_rate(np.cumsum(gaps_s), rate_rps)


def at_rate(arrival_s: FloatArray, rate_rps: float) -> FloatArray:
    """From 0, with the clock turned so that requests / duration is `rate_rps`."""
    arrival_s = arrival_s - arrival_s[0]
    scaled: FloatArray = arrival_s * (REQUESTS / rate_rps / arrival_s[-1])
    return scaled


def azure_csv(start: datetime, arrival_s: FloatArray, inputs: FloatArray, outputs: FloatArray) -> str:
    """The format of 2023: seven digits of a second, CRLF."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at_s, context, generated in zip(arrival_s, inputs, outputs, strict=True):
        stamp = start + timedelta(seconds=float(at_s))
        lines.append(f"{stamp:%Y-%m-%d %H:%M:%S.%f}0,{context:.0f},{generated:.0f}")
    return "\r\n".join(lines) + "\r\n"


def prefixes_jsonl(rng: np.random.Generator) -> str:
    """1200 tool calls and 400 steps of agents in ten minutes, in blocks of 128 tokens."""
    parts = {
        "tools": preble("toolbench", 1200, 2.0, rng=rng, block_tokens=128),
        "agents": preble("embodied", 400, 2 / 3, rng=rng, block_tokens=128),
    }
    trace = merged(parts)
    lines = [
        json.dumps(
            {
                "timestamp": round(float(trace.arrival_s[i]), 3),
                "input_tokens": int(trace.input_tokens[i]),
                "output_tokens": int(trace.output_tokens[i]),
                "tenant": trace.tenants[trace.tenant[i]],
                "prefix_block_tokens": trace.prefix_block_tokens,
                "prefix_ids": trace.prefix_ids[
                    trace.prefix_offsets[i] : trace.prefix_offsets[i + 1]
                ].tolist(),
            },
            separators=(",", ":"),
        )
        for i in range(len(trace))
    ]
    return "\n".join(lines) + "\n"


def chat_csv(rng: np.random.Generator) -> str:
    """Turns of chats from 0 to CHAT_S, as a log has them: of chats under way at 0 the turns that follow.

    A chat begins with the instructions of one of three assistants, has 5 messages on average, each a tenth of
    the time with a document, and 45 s of its user's time before each but the first (half of them less).
    `arrival_s` is as if answers took no time. A block has an id once it is full: the same for all chats where
    it lies within the instructions, else the chat's own.
    """
    rows: list[tuple[float, int, int, str, float, list[int]]] = []
    next_id = sum(tokens // CHAT_BLOCK for tokens in INSTRUCTIONS)
    first_ids = np.cumsum([0, *(tokens // CHAT_BLOCK for tokens in INSTRUCTIONS)])
    for _ in range(round(CHATS_PER_S * (CHAT_S + CHAT_BEFORE_S))):
        at_s = float(rng.uniform(-CHAT_BEFORE_S, CHAT_S))
        assistant = int(rng.choice(3, p=(0.6, 0.3, 0.1)))
        prompt = INSTRUCTIONS[assistant]
        ids = list(range(first_ids[assistant], first_ids[assistant + 1]))
        last = ""
        for turn in range(int(rng.geometric(1 / 5))):
            think_s = round(float(rng.lognormal(np.log(45), 0.8)), 2) if turn else 0.0
            at_s += think_s
            prompt += (
                1 + int(rng.lognormal(np.log(90), 1.0)) + int(rng.uniform() < 0.1) * int(rng.gamma(4, 800))
            )
            answer = 1 + min(int(rng.lognormal(np.log(220), 0.8)), 1500)
            while len(ids) < prompt // CHAT_BLOCK:
                ids.append(next_id)
                next_id += 1
            if at_s >= CHAT_S:
                break
            if at_s >= 0:
                name = f"{len(rows)}"
                rows.append((at_s, prompt, answer, last, think_s if last else 0.0, list(ids)))
                last = name
            prompt += answer
    order = sorted(range(len(rows)), key=lambda i: rows[i][0])
    lines = ["request_id,arrival_s,input_tokens,output_tokens,after,think_s,prefix_block_tokens,prefix_ids"]
    for i in order:
        at_s, prompt, answer, last, think_s, ids = rows[i]
        blocks = " ".join(map(str, ids))
        lines.append(f"{i},{at_s:.3f},{prompt},{answer},{last},{think_s:g},{CHAT_BLOCK},{blocks}")
    return "\n".join(lines) + "\n"


def samples() -> dict[str, str]:
    """File name -> content, the same on every run."""
    rng = np.random.default_rng(20231116)
    start = datetime(2023, 11, 16, 18, 15)
    return {
        "azure-conversation-sample.csv": azure_csv(
            start,
            steady_arrivals_s(5.5, rng),
            lengths(CONVERSATION_INPUT, rng),
            lengths(CONVERSATION_OUTPUT, rng),
        ),
        "azure-code-sample.csv": azure_csv(
            start, bursty_arrivals_s(2.6, rng), lengths(CODE_INPUT, rng), lengths(CODE_OUTPUT, rng)
        ),
        "shared-prefixes-sample.jsonl": prefixes_jsonl(rng),
        "chat-sessions-sample.csv": chat_csv(rng),
    }


def main() -> None:
    folder = Path(__file__).parent / "traces"
    folder.mkdir(exist_ok=True)
    for name, content in samples().items():
        (folder / name).write_bytes(content.encode())
        print(f"{folder / name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
