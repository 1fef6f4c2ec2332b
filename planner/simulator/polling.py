"""Engines that look for new requests only every few steps (TYPE.poll_steps).

SGLang's scheduler adds the weight of the last step to a count before it forms the next one: 1 for a step of
decodes, PROMPT_WEIGHT for one with prompts. It looks for requests, and sets the count to 0, when the count is
at least --scheduler-recv-interval; without work it looks all the time (scheduler_recv_skipper.py and
environ.py of sgl-project/sglang, read on 2026-11-29). WORKER.unpolled is the count at the beginning of the
current run. A run of several steps is one of decodes, in which the scheduler has looked, and found nothing,
each time the count was full. Letters: w is a worker, l a lane.
"""

from __future__ import annotations

from planner.simulator.layout import NEVER, NONE, ONE, UNKNOWN
from planner.simulator.numba_compile import small_jit, where_rare

PROMPT_WEIGHT = 1000


@where_rare(lambda state, l: None)
def count_weights(state, l):
    """Add the run of lane l, which has ended, to its worker's count."""
    lane = state.lanes[l]
    worker = state.workers[lane.worker]
    poll_steps = state.types[worker.type].poll_steps
    if poll_steps <= 1:  # It looks before every step.
        return
    if lane.prefills > 0:
        worker.unpolled = min(worker.unpolled + PROMPT_WEIGHT, poll_steps)
    else:
        worker.unpolled += lane.run_steps


@small_jit
def has_step_in_flight(worker):
    """Whether a step of the worker runs, or has just ended, so that the next one follows it."""
    return worker.formed_s < NEVER


@where_rare(lambda state, w: True)
def polls_now(state, w):
    """Whether worker w looks for requests before the step that it forms; called once for each attempt."""
    worker = state.workers[w]
    if not has_step_in_flight(worker):
        worker.unpolled = 0
    worker.unpolled %= state.types[worker.type].poll_steps
    return worker.unpolled == 0


@where_rare(lambda state, w, steps: steps)
def steps_until_poll(state, w, steps):
    """After how many steps of its current run, at least `steps`, worker w looks for requests."""
    worker = state.workers[w]
    return steps + (-(worker.unpolled + steps)) % state.types[worker.type].poll_steps


@where_rare(lambda state, w, steps: steps)
def end_at_poll(state, w, steps):
    """The `steps` of the run of decodes that worker w begins, cut where it will hear of a request that has
    come.
    """
    if state.workers[w].head[UNKNOWN] == NONE:
        return steps
    return min(steps, steps_until_poll(state, w, ONE))
