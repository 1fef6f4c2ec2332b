"""Chooses workers for the live router (planner/runtime/router.py) with the simulator's own routing functions.

`LiveFleet` keeps a state of the simulator (planner/simulator/layout.py) up to date with what the router sees
(planner/runtime/events.py). The simulator's compiled functions read this state and choose a worker. A router
cannot see all that an engine does, so the state differs from that of a simulation:

- A prompt counts as admitted to an engine's batch, and as computed, when the first byte of its answer comes
  (the whole answer, if it is not streamed). Its cache hits and its KV are those of this moment.
- The policy e2 (planner/policies.py) judges workers by the requests of a recent window. A request keeps its
  seat in this window after it has left. How long it waited is estimated: the time to the first byte less the
  time of computing the tokens that no cache had.
- Requests hold the KV of their prompts and of the output tokens that have come. Preemptions in an engine, and
  the blocks that it drops then, are not known. Blocks of outputs are not reused by other prompts.
- The output length of a request is its limit, `max_tokens`; with `prediction_buckets` the mean of recent
  outputs, if it is smaller.
- Engines are taken to drop blocks as the simulated ones do, least recently used first.
- Mean lengths, which some policies need (e2 for the cost of an output, d2lpm for its quantum), are taken over
  the requests so far, with more weight on recent ones.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.domain import KV_BLOCK_TOKENS
from planner.errors import InputError
from planner.fleet import Fleet, Policies
from planner.models.output_length import OutputTable, output_table
from planner.policies import FLIP, POOLS, QUEUE, REPURPOSE, ROUTING, STATIC, by_tenant
from planner.runtime import events
from planner.runtime.prompt_blocks import BlockNumbers
from planner.simulator import cache_layout, layout
from planner.simulator.cache_layout import Caches
from planner.simulator.initial_state import fresh_state
from planner.simulator.layout import State
from planner.simulator.pins import pin_nodes
from planner.simulator.worker_rows import ROLES
from planner.traffic.classes import takes_request
from planner.traffic.trace import Trace

# These sizes limit memory, and how long one request can wait for upkeep. No choice depends on them.
SEATS = 1024  # Rows for requests (seats) at first; the arrays grow.
WINDOW_SEATS = 1 << 17  # The window of the policy e2 keeps at most this many requests.
NODES = 1 << 14  # Rows for prompt blocks (nodes, which are no machines here) at first; the arrays grow.
SWEEP = 4096  # One step of the sweep for free nodes (`_free_nodes`) looks at this many nodes.
# A round of the sweep (`_free_nodes`) that frees a smaller share of the nodes than this has freed few.
FEW_FREED_FRAC = 1 / 8
TENANTS = 1024  # Accounts for tenants, besides those that the policies name; all others share one.
# The router learns lengths from the latest requests, often enough to follow a change of traffic.
LENGTHS_EVERY = 1024  # After this many requests mean lengths are set anew, and older requests lose weight.
ENDED_KEPT = 1024  # Outputs are predicted from this many of the latest requests that ended.
PREDICTED_EVERY = 256  # After this many ended requests the table of predictions is made again.


class LiveFleet:
    """The state of a running fleet by which requests are routed: its workers, in the fleet's order, and their
    requests. All workers are down at first.

    A request has a seat, a row of the state, from `take_seat` to `release_seat`. All times are of one clock
    that never goes back. `lengths` are the mean tokens of prompts and of outputs. `history` has the tokens of
    earlier prompts and outputs, from which outputs are predicted. Whichever is missing is learnt from the
    requests. Raises InputError for policies that real engines cannot follow.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        lengths: tuple[float, float] | None = None,
        history: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        self.policies = _routing_alone(fleet.policies)
        # Disturbances are of simulations alone, and `pin_prompt` notes each pinned prompt by itself.
        self.state = _empty_state(replace(fleet, policies=self.policies, disturbances=(), pinned=()))
        self.state.policy[layout.LIVE] = 1.0  # The compiled functions then know that nothing is simulated.
        self.state.types["prompt_token_s"] = 0.0  # The workers' own API servers split prompts into tokens.
        self.roles = [pool.role for pool in fleet.pools for _ in range(pool.count)]
        self.types = [pool.type for pool in fleet.pools for _ in range(pool.count)]
        self.is_up = np.zeros(len(self.types), bool)
        # Whether the policy changes roles between prefill and decode. A worker that is to change takes no
        # more requests (`is_draining`), then restarts in the other role (`is_restarting`). The caller takes
        # workers with a new role from `role_changed` and restarts them.
        self.changes_roles = POOLS[self.policies.pools].code in (FLIP, REPURPOSE)
        self.is_draining = np.zeros(len(self.types), bool)
        self.is_restarting = np.zeros(len(self.types), bool)
        self.role_changed: list[int] = []
        self._set_most_tokens()
        self.free_seats: list[int] = []
        self._add_seats(SEATS)
        self.keeps_prefixes = self.state.caches is not None and self.policies.prefix_cache
        self.has_window = ROUTING[self.policies.routing].has_window
        self.holds_back = ROUTING[self.policies.routing].holds_back
        # Whether requests with a worker may wait at the router, and the workers to which `send_held` may send
        # some of them.
        self.holds_prompts = QUEUE[self.policies.queue].held_by_router
        self.may_take_held: set[int] = set()
        # Whether the router keeps accounts of tenants, and whether router or engines use their names at all.
        self.is_by_tenant, self.reads_tenants = by_tenant(self.policies), by_tenant(fleet.policies)
        self.tenants = {name: tenant for tenant, (name, _) in enumerate(self.policies.tenant_weights)}
        # Requests seen, and their weighted number, sum of prompt tokens and sum of output tokens.
        self.lengths, self.seen_requests, self.sums = lengths, 0, (0.0, 0.0, 0.0)
        if lengths is not None:
            self._set_mean_lengths(*lengths)
        # Prompt and output tokens of the latest requests that ended; None unless they predict outputs.
        self.ended: deque[tuple[int, int]] | None = None
        if self.policies.prediction_buckets:
            if history is None:
                self.ended, self.ended_count = deque(maxlen=ENDED_KEPT), 0
            else:
                self._predict_from(*history)
        if self.keeps_prefixes:
            # A node is a row of the caches' tables for one prompt block; `nodes` gives each block a free one.
            self.nodes = BlockNumbers(len(self.caches.holders))
            # How many seats use each node; -1: the number is free.
            self.users = np.full(len(self.nodes), -1, np.int32)
            self.touched = np.zeros(len(self.nodes), np.uint8)
            self.most_nodes = 2 * len(self.caches.entries)
            self.path_end = 0  # How much of the path table is in use.
            # The sweep for free nodes (`_free_nodes`): its position, the nodes freed in this round, and how
            # many rounds in a row have freed few.
            self.sweep_node = self.round_freed = self.poor_rounds = 0
        self._compile()

    def _set_most_tokens(self) -> None:
        """Set `most_tokens`: the tokens that the largest worker of each role can hold, by role."""
        self.most_tokens = dict.fromkeys(("mixed", "prefill", "decode"), 0)
        for role, row in zip(self.roles, self.workers, strict=True):
            held_tokens = int(self.state.types["longest_blocks"][row["type"]]) * KV_BLOCK_TOKENS
            self.most_tokens[role] = max(self.most_tokens[role], held_tokens)

    def _compile(self) -> None:
        """Call each compiled function once, so that none is compiled while a request waits."""
        events.take_seat(self.state, 0, 0.0, 1, 1, 0, 0, 0)
        self.state.requests["status"][0] = events.FREE
        events.note_event(self.state, events.LEAVE, 0, 0, 0.0)  # Seat 0 is on no worker: nothing changes.
        if self.keeps_prefixes:
            events.sweep_nodes(self.state, self.users, self.touched, 0, 0, 0, np.empty(0, np.int32))

    @property
    def caches(self) -> Caches:
        """The records of prefix caches in the state; only for policies that need them."""
        caches: Caches = self.state.caches
        return caches

    @property
    def workers(self) -> npt.NDArray[np.void]:
        """(W,) layout.WORKER: with `assigned` requests, `pending_tokens` and `used_blocks` of each."""
        return self.state.workers

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a mixed worker, or a prefill and a decode worker, could hold when idle."""
        most_tokens = self.most_tokens
        return max(most_tokens["mixed"], min(most_tokens["prefill"], most_tokens["decode"]))

    def take_seat(
        self, inputs: int, outputs: int, time_s: float, *, names: Sequence[int] = (), tenant: str = ""
    ) -> int:
        """Give a new request a seat and return it.

        `inputs` and `outputs` are numbers of tokens. `names` identify the prompt's blocks, each with all
        before it (planner/runtime/prompt_blocks.py).
        """
        if self.lengths is None:
            self._learn_lengths(inputs, outputs)
        if not self.free_seats:
            self._find_free_seats()
        account = self._account(tenant) if self.is_by_tenant else 0
        # Only whole blocks are cached.
        names = names[: inputs // KV_BLOCK_TOKENS] if self.keeps_prefixes else ()
        start = self._write_path(names) if names else 0
        seat = self.free_seats.pop()
        events.take_seat(self.state, seat, time_s, inputs, outputs, account, start, len(names))
        return seat

    def send_to_worker(self, seat: int, time_s: float, excluded: Collection[int] = ()) -> int | None:
        """Choose a worker outside `excluded` for the request's prompt, note the request there, and return it.

        Returns None if the request fits on no worker that is up, or if no worker is free (`is_held_back`).
        The caller must then try again, in the order of arrival. If the router `holds_prompts`, the request is
        sent once it is not `is_held` any more.
        """
        worker = self._choose(events.SEND, seat, time_s, excluded)
        self._note_may_take_held(seat)
        return worker

    def is_held(self, seat: int) -> bool:
        """Whether the request has a worker, but waits at the router."""
        return bool(self.state.requests["status"][seat] == events.HELD)

    def send_held(self) -> list[int]:
        """The seats of the requests that wait at the router, and that are sent to their workers now."""
        seats = []
        for worker in self.may_take_held:
            if not self.is_up[worker]:
                continue
            while (
                seat := int(events.note_event(self.state, events.SEND_HELD, 0, worker, 0.0))
            ) != layout.NONE:
                seats.append(seat)
        self.may_take_held.clear()
        return seats

    def _note_may_take_held(self, seat: int) -> None:
        if self.holds_prompts and (worker := int(self.state.requests["prefill_worker"][seat])) != layout.NONE:
            self.may_take_held.add(worker)

    def is_held_back(self, seat: int, excluded: Collection[int] = ()) -> bool:
        """Whether a request without a worker will get one that is up and not `excluded`, once it is free."""
        if not self.holds_back:
            return False
        self._set_status()[list(excluded)] = layout.OUT_OF_SERVICE
        return bool(events.note_event(self.state, events.IS_HELD_BACK, seat, 0, 0.0))

    def queue_number(self, seat: int) -> int | None:
        """The request's place in its worker's queue, the smallest first; None if engines order it."""
        if not QUEUE[self.policies.queue].by_turns:
            return None
        return int(self.caches.prompts["place"][seat])

    def hand_off(self, seat: int, time_s: float, excluded: Collection[int] = ()) -> int | None:
        """Choose the decode worker as `send_to_worker` does, once the request has left its prefill worker."""
        return self._choose(events.HAND_OFF, seat, time_s, excluded)

    def _choose(self, event: int, seat: int, time_s: float, excluded: Collection[int]) -> int | None:
        """The worker that the policy chooses for a seat, outside `excluded`; None if there is none."""
        status = self._set_status()
        if self.changes_roles:
            status[self.is_draining] = layout.DRAINING
            status[self.is_restarting] = layout.RESTARTING
        excluded_workers = list(excluded)
        status[excluded_workers] = layout.OUT_OF_SERVICE
        worker = int(events.note_event(self.state, event, seat, 0, time_s))
        if self.changes_roles:
            # The event may have begun or ended the draining of workers; excluded ones took no part in it.
            still_drains = status == layout.DRAINING
            still_drains[excluded_workers] = self.is_draining[excluded_workers]
            self.is_draining = still_drains & self.is_up
            self._note_new_roles()
        return None if worker == layout.NONE else worker

    def _set_status(self) -> npt.NDArray[np.int64]:
        """Set the workers' status, in service or not, and return it: a view that compiled functions write."""
        status: npt.NDArray[np.int64] = self.workers["status"]
        status[:] = np.where(self.is_up, layout.IN_SERVICE, layout.OUT_OF_SERVICE)
        return status

    def _note_new_roles(self) -> None:
        """Note the workers with a new role; where that takes a restart they are down until `note_up`."""
        for w, code in enumerate(self.workers["role"].tolist()):
            if ROLES[self.roles[w]] == code:
                continue
            self.roles[w] = "prefill" if code == layout.PREFILL else "decode"
            self.is_draining[w] = False
            if self.policies.flip_restart_s > 0:
                self.is_up[w], self.is_restarting[w] = False, True
            self.role_changed.append(w)
            self._set_most_tokens()

    def note_admitted(self, seat: int, time_s: float) -> None:
        """Note that the worker begins to compute the prompt.

        A caller that cannot see this calls `note_computed` alone.
        """
        events.note_event(self.state, events.ADMIT, seat, 0, time_s)

    def note_computed(self, seat: int, time_s: float) -> None:
        """Note that the prompt is computed: the first byte of the answer has come."""
        events.note_event(self.state, events.COMPUTE, seat, 0, time_s)
        self._note_may_take_held(seat)

    def note_output(self, seat: int, tokens: int, time_s: float) -> None:
        """Note that `tokens` tokens of output have come so far."""
        events.note_event(self.state, events.GROW, seat, tokens, time_s)

    def note_left(self, seat: int, time_s: float, tokens: int = 0) -> None:
        """Note that the request has left its worker after `tokens` tokens of output, finished or not."""
        events.note_event(self.state, events.LEAVE, seat, tokens, time_s)
        self._note_may_take_held(seat)
        if self.ended is not None and tokens > 0:
            self.ended.append((int(self.state.requests["input_tokens"][seat]), tokens))
            self.ended_count += 1
            if _is_due(self.ended_count, PREDICTED_EVERY):
                self._predict_from(*np.array(self.ended).T)

    def _predict_from(self, input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> None:
        """Predict the outputs of new requests from these requests that have ended."""
        table = output_table(input_tokens, output_tokens, self.policies.prediction_buckets)
        self.state = self.state._replace(outputs=table)

    def release_seat(self, seat: int) -> None:
        """Give back the seat of a request that is on no worker.

        With the policy e2 the request keeps the seat until it has left the window (`_find_free_seats`).
        """
        if self.has_window:
            self.state.requests["status"][seat] = events.GONE
        else:
            self._free_seat(seat)

    def pin_prompt(self, worker: int, names: Sequence[int]) -> None:
        """Note that the worker keeps a prompt of these blocks for good.

        Requests that begin with it are sent there.
        """
        start = self._write_path(names)
        # No seat uses this path, so that the table drops it; its nodes stay in use and are never freed.
        nodes = self.caches.path[start : start + len(names)].copy()
        pin_nodes(self.state, worker, nodes)

    def note_up(self, worker: int, time_s: float = 0.0) -> None:
        """Note that the worker is up, and idle since `time_s`."""
        self.is_up[worker], self.is_restarting[worker] = True, False
        self.workers["idle_since_s"][worker] = time_s

    def note_down(self, worker: int, time_s: float) -> None:
        """Note that the worker is down, and its cache lost."""
        self.is_up[worker] = self.is_draining[worker] = False
        events.note_event(self.state, events.GO_DOWN, 0, worker, time_s)

    def _learn_lengths(self, inputs: int, outputs: int) -> None:
        """Count a request for the mean lengths, and set the means when `_is_due` says so.

        From the first LENGTHS_EVERY requests on, older requests lose half of their weight each time.
        """
        self.seen_requests += 1
        count, input_sum, output_sum = self.sums
        count, input_sum, output_sum = count + 1, input_sum + inputs, output_sum + outputs
        if _is_due(self.seen_requests, LENGTHS_EVERY):
            self._set_mean_lengths(input_sum / count, output_sum / count)
            if self.seen_requests >= LENGTHS_EVERY:
                count, input_sum, output_sum = count / 2, input_sum / 2, output_sum / 2
        self.sums = count, input_sum, output_sum

    def _set_mean_lengths(self, input_tokens: float, output_tokens: float) -> None:
        """Set what the policies derive from the mean tokens of prompts and outputs."""
        if self.state.caches is None:
            return
        mean_context = input_tokens + output_tokens / 2  # An output grows while it is written.
        batch = self.policies.decode_batch
        output_s = {kind: cache_layout.output_token_s(kind, mean_context, batch) for kind in set(self.types)}
        self.caches.workers["output_s"] = [output_s[kind] for kind in self.types]
        work = self.policies.extend_weight * input_tokens + self.policies.output_weight * output_tokens
        # A quantum is the work that a tenant may have done in one turn (d2lpm): by default, as in
        # the simulator, the work of two mean requests.
        quantum = 2 * work
        settings = self.caches.settings
        settings[cache_layout.WORKER_QUANTUM_TOKENS] = self.policies.worker_quantum_tokens or quantum
        settings[cache_layout.QUANTUM_TOKENS] = self.policies.quantum_tokens or quantum

    def _account(self, tenant: str) -> int:
        """The number of a tenant's account. Once all are taken, tenants without one share the last."""
        shared_account = len(self.caches.weights) - 1
        if len(self.tenants) < shared_account:
            return self.tenants.setdefault(tenant, len(self.tenants))
        return self.tenants.get(tenant, shared_account)

    def _add_seats(self, size: int) -> None:
        first = len(self.state.requests)
        state = self.state._replace(requests=_lengthen_rows(self.state.requests, size))
        if state.caches is not None:
            prompts = _lengthen_rows(state.caches.prompts, size)
            prompts["worker"][first:] = layout.NONE
            state = state._replace(caches=state.caches._replace(prompts=prompts))
        self.state = state
        self.free_seats.extend(range(size - 1, first - 1, -1))

    def _find_free_seats(self) -> None:
        """Free the seats of requests that have left e2's window; double the seats if few are free then."""
        size = len(self.state.requests)
        if self.has_window:
            if size >= WINDOW_SEATS:
                # Drop the oldest `size // 2` requests of the window.
                events.note_event(self.state, events.FORGET, 0, size // 2, 0.0)
            is_out = self.caches.prompts["worker"] == layout.NONE
            for seat in np.flatnonzero(is_out & (self.state.requests["status"] == events.GONE)).tolist():
                self._free_seat(seat)
        if len(self.free_seats) < size // 4:
            self._add_seats(2 * size)

    def _free_seat(self, seat: int) -> None:
        """Free a seat. Its prompt no longer counts among the users of the prompt's nodes."""
        if self.keeps_prefixes:
            start, depth = self.caches.prompts["start"][seat], self.caches.prompts["depth"][seat]
            self.users[self.caches.path[start : start + depth]] -= 1
        self.state.requests["status"][seat] = events.FREE
        self.free_seats.append(seat)

    def _write_path(self, names: Sequence[int]) -> int:
        """Write the nodes of a prompt's blocks into the path table and return where they start there."""
        if len(self.nodes.free) < len(names):
            self._free_nodes(len(names))
        if len(self.caches.path) < self.path_end + len(names):
            self._compact_path(len(names))
        nodes = self.nodes.give(names)
        self.users[nodes] = np.maximum(self.users[nodes], 0) + 1  # A node that was free has -1.
        self.touched[nodes] = 1
        start, self.path_end = self.path_end, self.path_end + len(names)
        self.caches.path[start : self.path_end] = nodes
        return start

    def _compact_path(self, needed: int) -> None:
        """Remove the prompts of ended requests from the path table.

        The table then has room for `needed` further nodes and is no more than half full.
        """
        seats = np.flatnonzero(self.state.requests["status"] != events.FREE)
        caches, prompts = self.caches, self.caches.prompts
        depth = prompts["depth"][seats]
        new_start = np.cumsum(depth) - depth
        self.path_end = int(depth.sum())
        # Each prompt's nodes stay side by side, so they all move by the same distance.
        distance = prompts["start"][seats] - new_start
        old_places = np.arange(self.path_end) + np.repeat(distance, depth)
        size = max(len(caches.path), 2 * (self.path_end + needed))
        path, used = (_lengthen_rows(row[old_places], size) for row in (caches.path, caches.used))
        prompts["start"][seats] = new_start
        self.state = self.state._replace(caches=caches._replace(path=path, used=used))

    def _free_nodes(self, needed: int) -> None:
        """Free at least `needed` nodes that no request uses and no worker caches, in a sweep over all nodes.

        If a whole round of the sweep frees few, nodes are added. If there are already twice as many nodes as
        the caches can hold, the sweep frees cached nodes too, as a worker may have dropped them unseen: first
        those that no prompt has used since the last round.
        """
        free_nodes = np.empty(SWEEP, np.int32)
        while len(self.nodes.free) < needed:
            is_large = len(self.nodes) >= self.most_nodes
            end = min(self.sweep_node + SWEEP, len(self.nodes))
            # The nodes that the sweep frees besides unused ones. 0: none. 1: cached nodes that no prompt has
            # touched since the last round. 2: all cached nodes.
            forgets = (1 + self.poor_rounds) if is_large else 0
            count = events.sweep_nodes(
                self.state, self.users, self.touched, self.sweep_node, end, forgets, free_nodes
            )
            self.users[free_nodes[:count]] = -1
            if self.has_window:
                self.caches.prefixes[free_nodes[:count]] = _new_prefix()
            self.nodes.drop(free_nodes[:count].tolist())
            self.sweep_node, self.round_freed = end, self.round_freed + count
            if end == len(self.nodes):  # The round is done.
                has_freed_few = self.round_freed < int(end * FEW_FREED_FRAC)
                self.poor_rounds = self.poor_rounds + 1 if has_freed_few else 0
                if self.poor_rounds > (1 if is_large else 0):
                    self._add_nodes(2 * end)
                    self.poor_rounds = 0
                self.sweep_node = self.round_freed = 0

    def _add_nodes(self, size: int) -> None:
        """Lengthen the arrays of prompt blocks so that there is room for `size` of them."""
        first, caches = len(self.nodes), self.caches
        prefixes = caches.prefixes
        if self.has_window:
            prefixes = _lengthen_rows(prefixes, size)
            prefixes[first:] = _new_prefix()
        caches = caches._replace(
            holders=_lengthen_rows(caches.holders, size),
            pinned=_lengthen_rows(caches.pinned, size) if len(caches.pinned) else caches.pinned,
            prefixes=prefixes,
        )
        self.state = self.state._replace(caches=caches)
        self.users, self.touched = _lengthen_rows(self.users, size), _lengthen_rows(self.touched, size)
        self.users[first:] = -1
        self.nodes.grow(size)


def _is_due(count: int, every: int) -> bool:
    """Whether to learn again: at powers of two, as early requests tell most, and multiples of `every`."""
    is_power_of_two = count & (count - 1) == 0
    return is_power_of_two or count % every == 0


def _routing_alone(policies: Policies) -> Policies:
    """The policies of the router alone: defaults replace those of engines and of simulations.

    Engines have policies for batching, admission and most queues; only a simulation has guessed output
    lengths and Vidur's restarts.
    """
    defaults = Policies()
    if POOLS[policies.pools].code not in (STATIC, FLIP, REPURPOSE):
        raise InputError(
            f"policies.pools is {policies.pools!r}: real engines have one role at a time; "
            f"make a plan with pools: {defaults.pools!r}"
        )
    return replace(
        policies,
        batching=defaults.batching,
        queue=policies.queue if QUEUE[policies.queue].is_of_our_router else defaults.queue,
        admission=defaults.admission,
        prediction_accuracy_frac=None,
        vidur_restarts=False,
    )


def _empty_state(fleet: Fleet) -> State:
    """The simulator's state for this fleet without any request.

    The state is made from a trace of one request, which is then removed. The prompt of this request has as
    many blocks as the state needs nodes, and the trace has a tenant for each account.
    """
    if fleet.lora is not None:
        raise InputError(
            "lora: our router takes requests to the LLM alone, not to adapters; use the router of a manifest"
        )
    cache_blocks = sum(pool.count * (pool.type.kv_tokens // KV_BLOCK_TOKENS) for pool in fleet.pools)
    first_nodes = min(cache_blocks, NODES) if fleet.policies.prefix_cache else 0
    names = tuple(name for name, _ in fleet.policies.tenant_weights)
    trace = Trace(
        "live",
        np.zeros(1),
        np.array([max(first_nodes, 1) * KV_BLOCK_TOKENS]),
        np.ones(1, np.int64),
        prefix_offsets=np.array([0, first_nodes]),
        prefix_ids=np.arange(first_nodes),
        prefix_block_tokens=KV_BLOCK_TOKENS if first_nodes else 0,
        tenants=(*names, *[""] * (TENANTS + 1)),  # The one more is the shared account of `_account`.
    )
    # The router sees one engine for all data-parallel ranks; the engine chooses a rank by itself. `as_one`
    # adds up the KV of the ranks, but a request has to fit into the KV of one rank.
    workers = fleet.with_types(lambda worker: replace(worker.as_one, kv_tokens=worker.kv_tokens))
    state = fresh_state(workers, trace)
    state = state._replace(requests=state.requests[:0])
    if state.outputs is not None:  # Nothing is known of outputs yet.
        empty = np.zeros(0)
        # One bucket without entries: it begins and ends at index 0.
        state = state._replace(outputs=OutputTable(empty, np.zeros(2, np.int64), empty, empty))
    if state.caches is not None:
        caches = state.caches._replace(prompts=state.caches.prompts[:0])
        entries = cache_blocks if fleet.policies.prefix_cache else 0
        state = state._replace(caches=cache_layout.with_entries(caches, entries))
    return state


def _new_prefix() -> npt.NDArray[np.void]:
    """The row of a prompt block that no worker has yet and that was never copied to a second worker."""
    prefix = np.zeros(1, cache_layout.PREFIX)
    prefix["replicated_s"], prefix["home"] = -np.inf, layout.NONE
    return prefix


def _lengthen_rows(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy of `array` with `size` rows; the new ones are zero."""
    longer = np.zeros((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def priority_number(
    policies: Policies,
    inputs: int,
    outputs: int,
    arrival_s: float,
    longest_tokens: int,
    *,
    tenant: str = "",
    llm: str = "",
) -> int:
    """A request's priority for a vLLM that schedules by priority; the smallest comes first.

    `tenant` and `llm` are the names by which classes of the SLO select requests.

    The order is that of the simulator (`slots.enqueue_request`). Where the simulator uses the longest prompt
    of the trace, this uses `longest_tokens`, the longest request that the engines take: a request of this
    length may be overtaken by requests that arrive up to `queue_window_s` later.
    """
    if QUEUE[policies.queue].by_deadline:
        # vLLM's priorities are whole numbers, so times become milliseconds.
        return round(1000 * (arrival_s + _due_s(policies, inputs, tenant, llm)))
    rank = QUEUE[policies.queue].rank
    assert rank is not None, "a queue that is first come, first served needs no priorities"
    tokens = rank(inputs, outputs, longest_tokens)
    if policies.queue_window_s == math.inf:
        return tokens
    return round(1000 * (arrival_s + policies.queue_window_s * tokens / longest_tokens))


def _due_s(policies: Policies, inputs: int, tenant: str, llm: str) -> float:
    """How long after its arrival a request is due [s], by its class; without a class by the most patient one.

    No request names an adapter, because this router serves no fleets with LoRA.
    """
    for selector, due_s in policies.due:
        if takes_request(selector, inputs, tenant=tenant, llm=llm):
            return due_s
    return max((due_s for _, due_s in policies.due), default=0.0)
