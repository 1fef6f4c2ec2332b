"""Where plans and simulations are computed, for everything inside a `with` block."""

from contextlib import AbstractContextManager

from planner.parallel.executors import Executor
from planner.parallel.executors import working_on as _working_on


def working_on(executor: Executor | str, address: str | None = None) -> AbstractContextManager[None]:
    """A context whose plans and simulations run on this executor: `with working_on("processes:4"):`.

    `executor` is one of serial, threads[:N], processes[:N], ray and dask; the last two with the cluster's
    `address`, by default $RAY_ADDRESS or $DASK_SCHEDULER_ADDRESS. Answers are the same to the last bit.
    Raises InputError where package, cluster or the right version are missing.
    """
    return _working_on(executor if isinstance(executor, Executor) else Executor(executor, address))
