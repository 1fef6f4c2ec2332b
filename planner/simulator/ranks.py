"""Data-parallel ranks of one worker, as vLLM has them (0.32: v1/engine/core.py, core_client.py).

Each rank schedules for itself: a queue, a batch, KV blocks and seats (max_num_seqs) of its own. A step begins
and ends on all of them at once, because experts need the tokens of all (joint_steps.py). A rank with nothing
to do runs an empty batch as long as another one has work, and takes what comes meanwhile into the next step.

Routers choose a worker, and the worker chooses the rank that takes the request: the one with the fewest
requests in flight, and among equals the next in turn. Three habits of vLLM are left out: what it adds to the
score of a rank with waiting prompts and more than half of its KV in use; the score 4 * waiting + running of
earlier releases, which was up to 100 ms old; and the up to 16 steps of empty batches that follow a worker's
last request.

In the kernel's state each rank is a worker of its own (state.workers), and the ranks of one worker of the
fleet follow each other. Each rank has one lane, the record of its batch (layout.py). The ends of the common
steps are events of the first rank's lane.

Below, w is such a worker of the state. In fleets without ranks `where_has` (numba_compile.py) calls its
second argument instead of the function below it.
"""

from __future__ import annotations

import numpy as np

from planner.simulator.counting import end_batch
from planner.simulator.layout import NONE, ONE
from planner.simulator.numba_compile import where_has


@where_has("dp_ranks", lambda state, w: state.workers[w].first_lane)
def event_lane(state, w):
    """The lane that has the events of worker w: its own first one, or that of its first rank."""
    return state.workers[state.dp_ranks[w].first].first_lane


@where_has("dp_ranks", lambda state, w: True)
def is_first_rank(state, w):
    """Whether routers see worker w; of several ranks they see only the first."""
    return state.dp_ranks[w].first == w


@where_has("dp_ranks", lambda state, w: ONE)
def rank_count(state, w):
    """How many ranks the worker of the fleet has to which rank w belongs."""
    return state.dp_ranks[w].count


@where_has("dp_ranks", lambda state, w: False)
def runs_empty(state, w):
    """Whether w is a rank that takes part in the steps under way with an empty batch."""
    lane = state.lanes[state.workers[w].first_lane]
    return (  # Decodes of the lane are in its batch only where `is_decoding` is 1.
        state.dp_ranks[w].count > 1
        and lane.run_steps > 0
        and lane.decodes * lane.is_decoding + lane.prefills == 0
    )


@where_has("dp_ranks", lambda state, w: w)
def rank_for_new(state, w):
    """The rank that takes a new request, of the worker of the fleet whose first rank is w."""
    if w == NONE:  # No worker was chosen.
        return w
    ranks = state.dp_ranks[w]
    best, fewest = w, np.inf
    for i in range(ranks.count):
        v = w + (ranks.turn + i) % ranks.count  # Ranks from the next in turn on.
        if state.workers[v].assigned < fewest:
            best, fewest = v, state.workers[v].assigned
    ranks.turn = (ranks.turn + 1) % ranks.count  # The turn moves on with every request, whoever takes it.
    return best


@where_has("dp_ranks", lambda state, w, steps: None)
def shorten_ranks(state, w, steps):
    """End the common run of rank w and its worker's other ranks after `steps` steps."""
    first = state.dp_ranks[w].first
    for v in range(first, first + state.dp_ranks[w].count):
        state.lanes[state.workers[v].first_lane].run_steps = steps


@where_has("dp_ranks", lambda state, w, time_s: False)
def end_if_empty(state, w, time_s):
    """End the run of w if it is one of empty batches; True if it was."""
    if not runs_empty(state, w):
        return False
    lane = state.lanes[state.workers[w].first_lane]
    end_batch(state, state.workers[w].first_lane, time_s - lane.run_start_s, lane.run_steps)
    lane.run_steps = 0
    return True
