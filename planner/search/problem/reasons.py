"""Why a kind of fleet is ruled out, in words.

These texts are here and not in planner.reports, because errors of planner.search hold them, and a search
imports no reports.
"""

from collections.abc import Sequence
from functools import singledispatch

from planner.documents import facts
from planner.units import count_text


@singledispatch
def reason_text(because: object) -> str:
    """The words of one reason, a record of planner/documents/facts.py. Each kind of record has a function
    below; TypeError for any other.
    """
    raise TypeError(f"no words for {because!r}")


@reason_text.register
def _(because: facts.HeadsNotShared) -> str:
    return f"{because.heads} attention heads cannot be shared by {because.tp} GPUs"


@reason_text.register
def _(because: facts.KvHeadsNotStored) -> str:
    return f"{because.kv_heads} KV heads do not split over {because.tp} GPUs: blocks would not fit other TPs"


@reason_text.register
def _(because: facts.LayersNotCut) -> str:
    return f"{because.layers} layers cannot be cut into {because.stages} stages"


@reason_text.register
def _(because: facts.RanksNotOnNodes) -> str:
    return because.why  # The check that refused the ranks already says why, in words.


@reason_text.register
def _(because: facts.NotSimulatedWith) -> str:
    return because.why  # So does the check of the policies.


@reason_text.register
def _(because: facts.WeightsTooLarge) -> str:
    return f"the weights ({because.weight_bytes / 1e9:.0f} GB) do not fit"


@reason_text.register
def _(because: facts.NoRoomForKv) -> str:
    return "no room for KV beside a step of so many tokens"


@reason_text.register
def _(because: facts.RequestTooLong) -> str:
    return f"room for {because.kv_tokens} KV tokens, the longest request has {because.longest_tokens}"


@reason_text.register
def _(because: facts.WorkersMissing) -> str:
    available = f"{because.available:g} {'is' if because.available == 1 else 'are'} available"
    return f"{_needs_text(because.least)}, {available}"


@reason_text.register
def _(because: facts.WorkTooDear) -> str:
    return (
        f"{_needs_text(because.least)}: {because.least_value:.4g} or more, best is {because.best_value:.4g}"
    )


@reason_text.register
def _(because: facts.WorkersFail) -> str:
    more = {
        "not-tried": "more were not tried",
        "not-available": "more are not available",
        "too-dear": "one more costs at least as much as the best fleet",
    }
    return f"{_workers_do(because.workers, 'fail')} in simulation, {more[because.more]}"


@reason_text.register
def _(because: facts.AloneFails) -> str:
    if because.role == "prefill":
        return f"{_workers_do(because.workers, 'miss', 'misses')} TTFT even with unlimited decode"
    return f"{_workers_do(because.workers, 'fall')} behind even with instant prefill"


@reason_text.register
def _(because: facts.SeatsTooFew) -> str:
    workers = count_text(because.workers, "worker")
    return f"{workers} cannot make the tokens in time with the most sequences of a step; not simulated"


@reason_text.register
def _(because: facts.PairFails) -> str:
    return f"{_workers_do(because.prefill_workers, 'fail', kind='prefill worker')}, more were not tried"


@reason_text.register
def _(because: facts.NoDecodeBeside) -> str:
    prefill = count_text(because.prefill_workers, "prefill worker")
    return (
        f"beside {prefill}, or fewer that keep TTFT, no number of decode workers holds that costs less than "
        "the best fleet"
    )


@reason_text.register
def _(because: facts.LinkTooSlow) -> str:
    needed, offered = because.needed_bytes_per_s / 1e9, because.bandwidth_bytes_per_s / 1e9
    if because.earlier:
        needs = f"KV blocks before the last tenth of the trace need {needed:.4g} GB/s on the link"
    else:
        needs = f"KV blocks need at least {needed:.4g} GB/s on the link"
    return f"{needs}, fleet.network.bandwidth is {offered:g} GB/s"


@reason_text.register
def _(because: facts.SmallerHolds) -> str:
    return "a fleet holds although a larger one of its kind does not"


def left_out_text(gpus: Sequence[str]) -> str:
    """A clause on GPUs that were not searched, and on how to allow them. The question does not name these
    GPUs, and their step times are estimates (task.gpus_left_out_by_default).
    """
    return (
        "not considered, as their step times are estimates, and kernels of this LLM were measured on others, "
        f"or none on such GPUs, or their price was not looked up: {', '.join(gpus)}; allow them all with "
        "fleet: {unchecked: true}, or some by naming them under fleet: gpus"
    )


def also_left_out(gpus: Sequence[str]) -> str:
    """The end of a message about a plan that failed: `left_out_text`, or nothing if no GPU was left out."""
    return f". {left_out_text(gpus)}" if gpus else ""


def _needs_text(least_workers: int) -> str:
    """How many workers the work alone takes, without any waiting (planner/solvers/required_work.py)."""
    return f"needs at least {count_text(least_workers, 'worker')} (work alone)"


def _workers_do(workers: int, verb: str, singular: str = "", *, kind: str = "worker") -> str:
    """For instance "1 worker fails" and "2 workers fail". `singular` is the form of the verb for one worker,
    where that is not the verb with an s.
    """
    verb_of_one = singular or f"{verb}s"
    return f"{count_text(workers, kind)} {verb_of_one if workers == 1 else verb}"
