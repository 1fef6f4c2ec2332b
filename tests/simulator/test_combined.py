"""What other tests have one at a time, together: orders by deadline, adapters, memory behind caches."""

from __future__ import annotations

import pytest
from combined_cases import KINDS
from prefix_cases import compare_prefix_case


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_the_plain_simulators(kind: str) -> None:
    """30 random fleets of each kind; benchmarks/references.py compares more."""
    for seed in range(30):
        KINDS[kind](seed)


def test_blocks_released_late_are_idle_behind_those_of_a_request_preempted_before() -> None:
    """A hand-off ends while the next step, which preempts another user of its blocks, is formed already."""
    KINDS["order, caches"](506)


@pytest.mark.parametrize("seed", [143, 167, 442])
def test_nodes_handed_over_count_as_used_after_the_step_that_knows_of_it(seed: int) -> None:
    """An asynchronous engine has formed the next step when the last prompt of a step is handed over."""
    KINDS["memory"](seed)


@pytest.mark.parametrize("seed", [819, 1030, 1691])
def test_nodes_of_who_has_left_count_as_used_before_a_later_step_stores(seed: int) -> None:
    """A run of decode steps lies between the end of the request and the step that stores or seeks them."""
    KINDS["memory"](seed)


def test_a_worker_does_not_forget_that_a_load_has_ended() -> None:
    """It heard of it without a step in flight, had no room for the request, and began another's step."""
    KINDS["memory"](3107)


@pytest.mark.parametrize("seed", [7, 10, 42, 70, 91, 187, 1578])
def test_an_asynchronous_engine_looks_into_a_shared_store_when_it_forms_a_step(seed: int) -> None:
    """What others store while the step before runs is not found; what they drive out is."""
    KINDS["store"](seed)


@pytest.mark.parametrize("seed", [1058, 1411, 1415])
def test_what_was_found_in_a_shared_store_stays_where_it_was_in_the_order_of_use(seed: int) -> None:
    """It left the store before the step began that loads it, and comes back as what was used longest ago."""
    KINDS["store"](seed)


def test_routers_know_nothing_of_blocks_that_a_step_formed_ahead_shares() -> None:
    """Blocks are free for a router if only requests of the step that is formed but not begun use them."""
    compare_prefix_case(1486)


@pytest.mark.parametrize("seed", [4244, 5782, 20172])
def test_a_late_notice_of_an_eviction_says_nothing_of_the_next_one(seed: int) -> None:
    """The node was there again as the notice came, and was evicted again before the router next chose."""
    compare_prefix_case(seed)
