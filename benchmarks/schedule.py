"""Schedules a made-up week of three LLMs on shared GPUs: cost, bound, time, and savings.

    python benchmarks/schedule.py [--seed N] [--time-limit S] [--scale X] [--spot SHARE]

The week has a shape like that of the Azure LLM traces, but is drawn: a code assistant that is used in office
hours and hardly at weekends, a conversation service with an evening peak and quieter nights, and a summariser
with a flat load and a nightly batch. Every hour has lognormal noise of 8 %.
`--scale` multiplies rates, stock and power. Prices and capacities are round numbers of the right size.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt

from planner.solvers.reserved_schedule import (
    Demand,
    GpuOffer,
    LlmWorkerType,
    Market,
    find_broken_constraint,
    schedule,
    schedule_at_peak,
    schedule_by_rule,
)

HOURS = 168


def week(*, scale: float = 1.0, seed: int = 0) -> Demand:
    """168 hourly rates of three LLMs, Monday first."""
    rng = np.random.default_rng(seed)
    hour, day = np.arange(HOURS) % 24, np.arange(HOURS) // 24
    workday = day < 5

    def bump(centre_h: float, width_h: float) -> npt.NDArray[np.float64]:
        away = np.abs(hour - centre_h)
        return np.asarray(np.exp(-0.5 * (np.minimum(away, 24 - away) / width_h) ** 2))

    code = 3 + 40 * np.where(workday, 1.0, 0.15) * (bump(10.5, 2.0) + bump(15.0, 2.2))
    conversation = 12 + np.where(workday, 30.0, 24.0) * bump(20.0, 3.5) + 14 * bump(12.0, 4.0)
    summaries = 8 + 25 * bump(2.0, 1.5)
    noise = rng.lognormal(0, 0.08, (3, HOURS))
    rates = scale * np.array([code, conversation, summaries]) * noise
    return Demand(("code", "conversation", "summaries"), rates, 3600.0)


def market(*, scale: float = 1.0, spot_frac: float = 0.25) -> Market:
    """Two GPUs, each sold three ways; two or three worker types per LLM."""
    return Market(
        (
            GpuOffer("h100", 6.98, 4.40, 2.80, 0.05, round(200 * scale)),
            GpuOffer("a100", 3.67, 2.20, 1.40, 0.08, round(160 * scale)),
        ),
        (
            LlmWorkerType("code", "h100 tp4", "h100", 4, 3.1, 2800.0, 240.0),
            LlmWorkerType("code", "a100 tp4", "a100", 4, 1.4, 1600.0, 240.0),
            LlmWorkerType("code", "h100 tp2", "h100", 2, 1.4, 1400.0, 240.0),
            LlmWorkerType("conversation", "h100 tp4", "h100", 4, 5.2, 2800.0, 300.0),
            LlmWorkerType("conversation", "a100 tp4", "a100", 4, 2.7, 1600.0, 300.0),
            LlmWorkerType("summaries", "h100 tp1", "h100", 1, 2.3, 700.0, 120.0),
            LlmWorkerType("summaries", "a100 tp1", "a100", 1, 1.1, 400.0, 120.0),
        ),
        most_spot_frac=spot_frac,
        power_w=150e3 * scale,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=2.0)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--spot", type=float, default=0.25, help="most of a rate that spot may carry")
    options = parser.parse_args()
    demand, sold = (
        week(scale=options.scale, seed=options.seed),
        market(scale=options.scale, spot_frac=options.spot),
    )
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    found = schedule(sold, demand, time_limit_s=options.time_limit)
    wall_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    if (constraint := find_broken_constraint(sold, demand, found)) is not None:
        raise SystemExit(f"the schedule does not keep {constraint}")
    print(
        f"schedule     {found.cost_usd_per_h:9.2f} USD/h, bound {found.bound_usd_per_h:.2f}, gap "
        f"{100 * found.gap_frac:.2f} %, {cpu_s:.1f} CPU-s, {wall_s:.1f} s"
    )
    reserved = zip(sold.offers, found.reserved_gpus.tolist(), strict=True)
    print(f"reserved     {', '.join(f'{count} {offer.gpu}' for offer, count in reserved)}")
    for name, other in (
        ("peak", schedule_at_peak(sold, demand)),
        ("linear rule", schedule_by_rule(sold, demand)),
    ):
        if other is None:
            print(f"{name:12} exceeds a limit")
        else:
            saved = 1 - found.cost_usd_per_h / other.cost_usd_per_h
            print(f"{name:12} {other.cost_usd_per_h:9.2f} USD/h, the schedule saves {100 * saved:.1f} %")


if __name__ == "__main__":
    main()
