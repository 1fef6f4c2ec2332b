"""Compares predictions with published measurements of real engines; docs/evidence/accuracy.md has the table.

    python benchmarks/reality.py DIR [--engine runs|none] [--only SOURCE] [--every N] [--json]

Simulates every run in DIR, and the measured points of the package aiconfigurator-core if it is installed.
Each is simulated as for a user who describes the deployment in a fleet.yaml: with the catalog's step times
and the version of the engine that ran (and its scheduling, where that is not the version's default). Nothing
is fitted to the run itself. With `--engine none` the engine's host adds no time to the steps.

Prints the share of runs that is left out, the errors per source, LLM and GPU, the errors that other
simulators report on such data, and every reason for leaving runs out. Saturated runs count like all others.
The exit code is 1 if an error is above its bound (BOUNDS), or if for some quantity the share of measurements
inside the stated spread is not within INSIDE_FRAC or not known; it is 2 if there is nothing to simulate.

Reads these files; the README beside the data says how they were measured. In an open loop requests arrive at
their own times; in a closed loop each client sends its next request when the last one has ended.

    *inference_perf*.json                      open loop, stages of a constant rate
    *ml_energy*.jsonl, *output_lengths*.json   all requests sent at once, a line per run; histograms of the
                                               lengths of outputs
    *.requests.jsonl, *.meta.json              every request of a run, by the engine's own clock;
                                               RUN--tpN--*.csv.gz: kernel profiles for `plan import`
    *inferencex*.jsonl                         closed loop, a line per run, medians and 99th percentiles
    *llmd*.jsonl                               open loop, fleets of llm-d's guides: several rates in turn
                                               ("ladders"), and fleets of prefill and decode workers
    *.runs.json                                sessions, which are only counted as left out
    systems/silicon_sample.csv                 closed loop, means of TTFT and TPOT; in aiconfigurator-core
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner import importers
from planner.calibrate.fitting import fit_table
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.fits import latency_document
from planner.documents.fleet_file import fleet_of
from planner.errors import InputError, PlannerError
from planner.files.checked_files import read_yaml, repository_dir
from planner.fleet import Fleet
from planner.importers import StatedSetup
from planner.models.engine import DEPLOYED_VERSION
from planner.models.latency import StepLatency
from planner.models.memory import MemorySettings, active_weight_bytes, worker_memory
from planner.models.spread import INTERVAL_SIGMAS
from planner.models.step_tables import StepTable
from planner.simulator import Simulation, simulate
from planner.simulator.energy import expected_power
from planner.simulator.recorded_gaps import gap_percentile_s, gap_runs
from planner.traffic.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Document = Mapping[str, Any]

CONFIGS = Path(__file__).parent / "configs"  # Published config.json files of LLMs that the catalog lacks.
GPUS = {  # A GPU's name in the sources -> its row in the catalog.
    "H100 SXM 80 GB": "h100-80g",
    "H100": "h100-80g",
    "H200": "h200-141g",
    "B200": "b200-180g",
    "h100_sxm": "h100-80g",
    "h200_sxm": "h200-141g",
    "b200_sxm": "b200-180g",
    "b300_sxm": "b300-288g",
    "RTXPRO6000": "rtx-pro-6000",
}
# The format of weights by its name in the sources -> our names of the formats in which most of an LLM's
# weights may be.
WEIGHTS = {
    "": ("bf16",),
    "bfloat16": ("bf16",),
    "fp8": ("fp8", "fp8-block"),
    "mxfp4": ("mxfp4",),
    "fp8_block": ("fp8-block", "fp8"),
    "int4_wo": ("int4", "int4-g32", "int4-g32z"),
    # InferenceX's "fp4"; gpt-oss in "fp4" has the weights that OpenAI published, which are in mxfp4.
    "nvfp4": ("nvfp4", "mxfp4"),
}
# The checkpoint that was loaded, where the source names the LLM alone: by LLM and format of the weights.
CHECKPOINTS = {
    ("meta-llama/Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    # InferenceX loads the next version, which has the same shape.
    ("meta-llama/Llama-3.1-70B", "nvfp4"): "nvidia/Llama-3.3-70B-Instruct-FP4",
    ("Qwen/Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "Qwen/Qwen3.5-397B-A17B-FP8",
    ("meta-llama/Llama-3.1-8B-Instruct", "fp8_block"): "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
    ("MiniMaxAI/MiniMax-M2.5", "nvfp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("moonshotai/Kimi-K2.5", "nvfp4"): "nvidia/Kimi-K2.5-NVFP4",
    # InferenceX loads nvidia's DeepSeek-R1, which has the same shape and formats.
    ("deepseek-ai/DeepSeek-R1", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "nvfp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("zhipuai/GLM-5", "nvfp4"): "nvidia/GLM-5-NVFP4",
}
SERVER = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}  # vLLM's defaults on GPUs of 70 GB and more.
BLOCK_TOKENS = 16  # Tokens of a KV block, vLLM's default.
# "itl", a name of the sources, is every gap between two tokens of an answer (TBT).
QUANTITIES = ("ttft", "tpot", "itl", "e2e", "throughput", "power")
QUANTILES = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
FAILED_FRAC = 0.01  # A stage in which more than this share of the requests failed is overloaded.
HOST_BOUND_FRAC = 0.6  # GPUs that draw less than this share of their power limit wait for their host.
# Prompt lengths of a task [tokens]: about the median of a lognormal distribution and the standard deviation
# of its logarithm. ML.ENERGY does not publish them.
PROMPTS = {
    # Every turn of a chat follows all turns before it: 340 tokens on average, a tenth above 790.
    "lm-arena-chat": (150, 1.3),
    "gpqa": (200, 0.4),
    # With these numbers 89 of 96 requests in flight fit the KV cache of one H100, as was measured.
    "sourcegraph-fim": (800, 0.7),
}
LONGEST_PROMPT = 8192  # Longer drawn prompts are cut to this length.
# ML.ENERGY ran gpt-oss on B200 with VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8 (its *.env.yaml), which is not vLLM's
# default, so these runs have fits of their own.
MXFP8_FITS = repository_dir("catalogs") / "latency" / "mxfp8"
# InferenceX's scripts start vLLM with VLLM_MXFP4_USE_MARLIN=1 for gpt-oss on Hopper (gptoss_fp4_h200.sh, read
# on 2026-11-30), which is not vLLM's default either.
MARLIN_FITS = repository_dir("catalogs") / "latency" / "marlin"
KV8_FITS = repository_dir("catalogs") / "latency" / "kv8"  # Fits with keys and values in 8 bits.
# The LLMs in fp8 that they are for, and their rows.
KV8_ROWS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8",
    "Qwen/Qwen3.5-397B-A17B": "Qwen/Qwen3.5-397B-A17B-FP8",
}
SWEEPS = Path(__file__).parent / "ml_energy_sweeps.yaml"  # How often a run sends its prompts.
# The number of prompts of a task, all of which ML.ENERGY sends each time.
SENT = {"lm-arena-chat": 1024, "gpqa": 198, "sourcegraph-fim": 1024}
UNSTATED_RANKS = "its experts are shared by more GPUs than it has"
# The version of vLLM where InferenceX states none; it ran with asynchronous scheduling.
UNSTATED_VERSIONS = {"meta-llama/Llama-3.1-70B": "0.10.2"}
# This build is taken for a version between 0.18 and 0.19: its runs are of the day on which those of 0.19
# begin.
NIGHTLIES = {"nightly-5b8c30d62b754b57": "0.18.2"}
AUTHORS = "AIConfigurator's authors"
# Backend of a point in silicon_sample.csv -> our name of the source, and the engine.
BACKENDS = {"vllm": ("silicon-sample", "vLLM"), "sglang": ("sglang", "SGLang")}
# On these GPUs InferenceX's SGLang looks for new requests every few steps only (--scheduler-recv-interval).
POLLED = ("b200-180g", "b300-288g")
# So many by most of InferenceX's scripts of March and April 2026 (benchmarks/single_node), from
# MANY_CLIENTS on and with fewer.
POLL_STEPS, MANY_CLIENTS = (30, 10), 16
# LLMs, weights and GPUs whose script says another number, with any number of clients.
OTHER_POLL_STEPS = {
    ("zhipuai/GLM-5", "fp8", "b200-180g"): 1,
    ("zhipuai/GLM-5", "fp8", "b300-288g"): 1,
    ("zhipuai/GLM-5", "nvfp4", "b200-180g"): 10,
    ("Qwen/Qwen3.5-397B-A17B", "fp8", "b300-288g"): 10,
}
# A run is cold, its engine compiles while it serves, if its TTFT is more than COLD_TTFT times that of another
# run of the same configuration, and its time per token less than COLD_TPOT times as long.
COLD_TTFT, COLD_TPOT = 3.0, 2.0
PROMPTS_HELD = "its prompts were not all computed: that takes more than 60 % of the GPUs' peak FLOP/s"
KV_UNSTATED = "its steps read more than the GPUs' memory can: KV in another format than by default"
# A run that needs more than this share of the peak FLOP/s over its whole time cannot have computed its
# prompts; no other campaign needs more than 49 %.
MOST_FLOPS_FRAC = 0.6
SAME_AGAIN = "the same measurement is in the file already"
# Points that agree in these columns, and in the times to 0.01 ms, are one measurement. The file repeats some
# under another name of the LLM (DeepSeek-R1 and V3) or of the engine's version, and with rounded times.
MEASUREMENT = ("backend", "system", "mode", "isl", "osl")
DRAFTS_UNTOLD = "its engine had drafts (MTP), of which the file does not tell"
# LLMs in fp8, systems and GPUs of a worker that InferenceX ran on SGLang 0.5.9 with MTP, and with slices of
# experts (nvidia-master.yaml of 2026-04-04). The file has a part from a database (db-dump) without MTP.
WITH_DRAFTS = (
    ("deepseek-ai/DeepSeek-R1", "b200_sxm", 8),
    ("Qwen/Qwen3.5-397B-A17B", "b200_sxm", 4),
    ("Qwen/Qwen3.5-397B-A17B", "b300_sxm", 4),
)
# InferenceX's nightlies of vLLM of February 2026 lie between 0.15 and 0.16; its file names no GPU.
INFERENCEX_ENGINE, INFERENCEX_GPU = "vLLM 0.16.0", "h200-141g"
# Draft tokens per step, and the share of them that is accepted. InferenceX's serve_glm5_sbatch.sh starts vLLM
# with MTP and one draft token; the README beside the data has the share.
DRAFTS = {"zai-org/GLM-5-FP8": (1, 0.8)}
# InferenceX's bmk_glm5_sbatch.sh sends all runs of one length to one server, with more and more clients. All
# draw their prompts with one seed, so vLLM's prefix cache has the prompts of the run before.
ONE_SERVER = ("zai-org/GLM-5-FP8",)
# llm-d's guides (modelserver, benchmark-templates and router in guides of llm-d/llm-d, read on 2026-11-26).
# A stock Kubernetes Service sends each connection to a worker drawn at random. llm-d's scorers send a prompt
# to the worker that has its beginning cached. If no worker has, it goes to the worker whose last prompt of
# this kind was longest ago. Load weighs as much as the cache. Our nearest routing is cache-aware.
LLMD_ROUTING: Mapping[str, Document] = {"rr": {"routing": "random"}, "aware": {"routing": "cache-aware"}}
LLMD_WEIGHTS = {"openai/gpt-oss-120b": "mxfp4"}
LLMD_MEMORY_FRAC = 0.95  # --gpu-memory-utilization of llm-d's guide "optimized baseline".
LLMD_WARM_UP = (15.0, 50.0)  # Requests/s and seconds of the stage before a ladder; no results are reported.
LLMD_SEEDS = 3  # A prediction is the mean over ladders drawn with so many seeds.
LLMD_GAP_S = 600.0  # Between two stages, longer than any request takes: a stage starts on idle workers.
LLMD_SATURATED_S = 5.0  # A stage with a larger mean TTFT is saturated: its requests queue for seconds.
CLIENT_ROUNDS = 10  # Requests per client of a closed loop, for load generators that report on all of them.


@dataclass(frozen=True)
class Load:
    """The load of an engine as means over a run's requests, for tools that take nothing else.

    `requests` are in flight at once; in an open loop this number follows by Little's law from the rate and
    the measured E2E. `cached_tokens` of the `input_tokens` are in the prefix cache. With `experts_whole`
    every GPU has whole experts (expert parallelism). `ranks` of data parallelism share the requests.
    `accepted` is the share of the `drafts` per step that is accepted. With `kv_in_8_bits` keys and values
    have 8 bits, whatever the checkpoint says. SGLang looks for new requests every `poll_steps` steps.
    """

    input_tokens: float
    output_tokens: float
    requests: float
    cached_tokens: float = 0.0
    weights: str = ""
    experts_whole: bool = False
    ranks: int = 1
    drafts: int = 0
    accepted: float = 0.0
    kv_in_8_bits: bool = False
    poll_steps: int = 1


@dataclass(frozen=True)
class Run:
    """A measured run. A `campaign` is a group of runs measured together; `case` names the run in its
    campaign.

    `regime` is "overloaded", "saturated", "host-bound", "cold" or "".
    """

    source: str
    campaign: str
    case: str
    llm: str
    gpu: str
    tp: int
    engine: str
    regime: str = ""
    load: Load | None = None


@dataclass(frozen=True)
class Row:
    """One figure of a run: seconds, tokens per second or Watts.

    `basis` is the origin of the step times: "fit" or "roofline" of the catalog, or "import" of the run's own
    kernel profiles. `bounds` are the predictions at both ends of the step times' spread; None if no spread is
    known.
    """

    run: Run
    basis: str
    quantity: str
    statistic: str
    predicted: float
    measured: float
    bounds: tuple[float, float] | None = None

    @property
    def error_frac(self) -> float:
        """By how much the prediction is too high, as a share of the measurement."""
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies within the bounds."""
        return self.bounds is not None and min(self.bounds) <= self.measured <= max(self.bounds)

    def document(self) -> dict[str, Any]:
        """The row and its run as plain values."""
        row = asdict(self)
        run: dict[str, Any] = row.pop("run")
        return run | row | {"error_frac": self.error_frac}


@dataclass(frozen=True)
class LeftOut:
    """A run that is not simulated, and `why`."""

    run: Run
    why: str

    @property
    def is_replayed_once(self) -> bool:
        """Whether nothing is lost, because another line with the same measurement is simulated."""
        return self.why == SAME_AGAIN


# What the reader of a source yields: figures of its runs, and the runs that it leaves out.
Found = Iterator[Row | LeftOut]


@dataclass(frozen=True)
class Engines:
    """Makes the fleets of runs as `plan simulate` does from a fleet.yaml.

    If `modelled`, with the version of the engine that ran; otherwise the engine's host adds no time. With `z`
    the times of prefills and of decodes are so many standard deviations of their spread above the medians.
    `every` N takes only each N-th point of a campaign of silicon-sample.
    """

    catalog: Catalog
    modelled: bool = True
    z: tuple[float, float] | None = None
    every: int = 1

    def fleet(
        self,
        run: Run,
        engine: Document,
        *,
        weights: str = "",
        count: int = 1,
        cache: bool = False,
        policies: Document | None = None,
        workers: Sequence[Document] = ({},),
        kv_in_8_bits: bool = False,
    ) -> Fleet:
        """The fleet of a run. `engine` are keys of all workers in addition to SERVER, `workers` those of each
        pool. With `kv_in_8_bits` keys and values have 8 bits where the checkpoint has 16. Raises PlannerError
        for a deployment that is not modelled.
        """
        catalog, llm = self.catalog, self._llm(run.llm, weights)
        if kv_in_8_bits and weights == "fp8" and run.llm in KV8_ROWS:
            catalog, llm = self._catalog_with_kv_in_8_bits, KV8_ROWS[run.llm]
        worker = {"gpu": run.gpu, "tp": run.tp, "count": count, **SERVER, **engine}
        document: dict[str, Any] = {
            "llm": llm,
            "workers": [{**worker, **each} for each in workers],
            "policies": {"prefix_cache": cache, **(policies or {})},
        }
        if not self.modelled:
            document["engine"] = "none"
        elif named := re.match(r"(vLLM|SGLang) (\d+\.\d+(\.\d+)?)", run.engine):
            document["engine"] = {"name": named[1].lower(), "version": named[2], **_engine_settings(run)}
        elif run.engine.startswith("SGLang"):
            document["engine"] = {"name": "sglang", **_engine_settings(run)}
        fleet = fleet_of(document, Path("fleet.yaml"), catalog)
        if fleet.llm.weights not in WEIGHTS[weights]:
            raise InputError(f"{run.llm}: its config.json has no {weights or '16 bit'} weights, the run has")
        return fleet if self.z is None else fleet.with_step_spread(*self.z)

    def _llm(self, name: str, weights: str) -> str:
        """The LLM for fleet.yaml: its name in the catalog, or the path of a config.json."""
        if weights not in WEIGHTS:
            raise InputError(f"weights in {weights} are not modelled")
        name = CHECKPOINTS.get((name, weights), name)
        if weights != "fp8" and name.lower() in self.catalog.llm_aliases:
            return name
        stem = name.replace("/", "--")
        for place in _places():
            for file in (place / f"{stem}.json", place / f"{stem}_config.json"):
                if file.exists():
                    return str(file)
        if name.lower() in self.catalog.llm_aliases:
            return name
        raise InputError(f"{name}: neither in the catalog nor in {CONFIGS.parent.name}/{CONFIGS.name}")

    @cached_property
    def _catalog_with_kv_in_8_bits(self) -> Catalog:
        """The catalog with KV in 8 bits for the rows of KV8_ROWS, and their fits."""
        narrow = {name: replace(self.catalog.llm(name), kv_dtype_bytes=1.0) for name in KV8_ROWS.values()}
        # A catalog without fits has none here either.
        fit_files = tuple(sorted(KV8_FITS.glob("*.yaml"))) if self.catalog.fit_files else ()
        return replace(
            self.catalog, llms={**self.catalog.llms, **narrow}, fit_files=fit_files, _fit_paths={}, _fits={}
        )

    def basis(self, fleet: Fleet) -> str:
        """The origin of a fleet's step times, as a `Row` has it."""
        return "roofline" if fleet.pools[0].type.latency.kind == "roofline" else "fit"


def _engine_settings(run: Run) -> Document:
    """The keys of `engine` in fleet.yaml that set this run's engine apart from the defaults of its
    version.
    """
    if run.source == "llmservingsim":
        return {"front_end": "0 s"}  # The times are of the engine's own clock, so no front end is in them.
    if run.load is not None and run.load.drafts:
        drafts, accepted = run.load.drafts, run.load.accepted
        return {"speculative": {"method": "mtp", "tokens": drafts, "acceptance": accepted}}
    if run.engine == f"vLLM {UNSTATED_VERSIONS.get(run.llm)}":
        return {"async_scheduling": True}
    if _mixes_steps(run):
        return {"mixed_steps": True}
    if run.load is not None and run.load.poll_steps > 1:
        return {"poll_steps": run.load.poll_steps}
    return {}


def _mixes_steps(run: Run) -> bool:
    """Whether the run's SGLang was started with --enable-mixed-chunk, so that prompts and decodes share
    steps.

    AIConfigurator's generator starts it so from its template for SGLang 0.5.6 on. The template for 0.5.1, in
    its release 0.4.0, does not.
    """
    version = re.match(r"SGLang 0\.(\d+)\.(\d+)", run.engine)
    is_authors = run.campaign.startswith(AUTHORS)
    return is_authors and version is not None and (int(version[1]), int(version[2])) >= (5, 6)


def _places() -> list[Path]:
    """Folders of config.json files: ours, and that of aiconfigurator-core."""
    return [CONFIGS] if (wheel := _wheel()) is None else [CONFIGS, wheel / "model_configs"]


def _wheel() -> Path | None:
    """The folder of the installed package aiconfigurator-core, None if it is not installed."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def refused(run: Run, error: PlannerError) -> LeftOut:
    """The run left out for this error, whose text is shortened to the reason."""
    why = str(error).removeprefix("fleet.yaml: ").removeprefix("llm: ").removeprefix("workers[0]: ")
    for place in _places():
        why = why.replace(f"{place}/", "")
    return LeftOut(run, why)


def statistic(values: Floats, name: str) -> float:
    """The mean or quantile of all values that are not NaN: a request of one token has no time per token."""
    q = QUANTILES[name]
    return float(np.nanmean(values) if q is None else np.nanquantile(values, q))


# --- inference-perf: open loop, stages of a constant rate


def inference_perf(path: Path, engines: Engines) -> Found:
    """Means and percentiles of TTFT, time per token and E2E per stage, and of the gaps between tokens.

    vLLM wrote `output_len` tokens for every request (ignore_eos). The file's `output_tokens` are counted from
    the text by a tokeniser and are up to a fifth less, which would make the time per token too long. The
    client saw each token as two chunks, one right after the other. So the file's `tpot_s` is the time of half
    a token, and half of the gaps in `itl_s` are nearly 0: quantile q of the true gaps is quantile (1 + q) / 2
    there.
    """
    for name, document in json.loads(path.read_text()).items():
        engine = document["engine"]
        run = Run(
            "inference-perf",
            name,
            "",
            engine["model"],
            GPUS.get(document["gpu"], document["gpu"]),
            int(engine["tensor_parallelism"]),
            f"vLLM {document['vllm']}",
        )
        settings = {key: int(engine[key]) for key in ("max_num_batched_tokens", "max_num_seqs")}
        stages = document["stages"]
        runs = [
            replace(
                run,
                case=f"{stage['requested_rate']:g}/s",
                regime=_stage_regime(stage),
                load=_stage_load(document, stage, load["duration"]),
            )
            for stage, load in zip(stages, document["load"]["stages"], strict=True)
        ]
        try:
            fleet = engines.fleet(run, settings, cache=True)
        except PlannerError as error:
            yield from (refused(each, error) for each in runs)
            continue
        trace, stage_of, starts_s = shared_prompts(document)
        simulation = simulate(fleet, trace, record=True)
        for k, (each, stage) in enumerate(zip(runs, stages, strict=True)):
            if each.regime == "overloaded":
                share = f"{stage['failed']} of {stage['sent']}"
                yield LeftOut(
                    each, f"overloaded: {share} requests failed; no client gives up in the simulator"
                )
                continue
            of_stage = replace(simulation, window_s=(starts_s[k], starts_s[k + 1]))
            yield from _stage_rows(each, engines.basis(fleet), document, stage, of_stage, stage_of == k)


def _stage_regime(stage: Document) -> str:
    """ "overloaded" if many requests of the stage failed, else empty."""
    return "overloaded" if stage["failed"] > FAILED_FRAC * stage["sent"] else ""


def _stage_load(document: Document, stage: Document, duration_s: float) -> Load:
    """The mean load of a stage. Users repeat their prompts, so after the first round all whole blocks of a
    prompt are cached, except for that of its last token, which the engine always computes.
    """
    inputs = float(stage["prompt_tokens"]["mean"])
    return Load(
        inputs,
        float(document["data"]["shared_prefix"]["output_len"]),
        stage["sent"] / duration_s * stage["e2e_s"]["mean"],
        cached_tokens=(inputs - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
    )


def _stage_rows(
    run: Run,
    basis: str,
    document: Document,
    stage: Document,
    simulation: Simulation,
    chosen: npt.NDArray[np.bool_],
) -> Iterator[Row]:
    """The figures of a stage; `chosen` are its requests in the simulation of the whole run."""
    names = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    tokens = int(document["data"]["shared_prefix"]["output_len"])
    # The true mean time per token; the file's percentiles of `tpot_s` are scaled by the same factor.
    token_s = (stage["e2e_s"]["mean"] - stage["ttft_s"]["mean"]) / (tokens - 1)
    for quantity, values, factor in (
        ("ttft", simulation.ttft_s, 1.0),
        ("tpot", simulation.tpot_s, token_s / stage["tpot_s"]["mean"]),
        ("e2e", simulation.e2e_s, 1.0),
    ):
        for name, key in names.items():
            measured = float(stage[f"{quantity}_s"][key]) * factor
            yield Row(run, basis, quantity, name, statistic(values[chosen], name), measured)
    gaps = gap_runs(simulation)
    for name, q, key in (("p50", 0.5, "p75"), ("p90", 0.9, "p95")):  # The key is quantile (1 + q) / 2.
        yield Row(run, basis, "itl", name, gap_percentile_s(gaps, q), float(stage["itl_s"][key]))


def shared_prompts(document: Document, *, seed: int = 0) -> tuple[Trace, Ints, list[float]]:
    """The requests of a run, the stage of each, and the starts of the stages, with the end of the last [s].

    Users take turns, each with one prompt that it sends again and again; the prompts of a group of users
    begin alike. As in the client, the intervals within a stage are exponential and fill it exactly. A minute
    lies between stages, longer than any request takes.
    """
    rng = np.random.default_rng(seed)
    data, stages = document["data"]["shared_prefix"], document["stages"]
    groups, members = int(data["num_unique_system_prompts"]), int(data["num_users_per_system_prompt"])
    users = groups * members
    lengths = spread_lengths(stages[0]["prompt_tokens"], users)[rng.permutation(users)]
    arrivals, starts_s = [], [0.0]
    for stage, load in zip(stages, document["load"]["stages"], strict=True):
        arrivals.append(starts_s[-1] + np.sort(rng.uniform(0, load["duration"], int(stage["sent"]))))
        starts_s.append(starts_s[-1] + load["duration"] + 60.0)
    user = np.concatenate([np.arange(len(each)) % users for each in arrivals])
    common = int(data["system_prompt_len"]) // BLOCK_TOKENS
    blocks = np.maximum(lengths // BLOCK_TOKENS, common)
    # No prompt has a million blocks, so no two groups or users have ids in common.
    ids = [
        np.concatenate(
            [
                (u // members) * 1_000_000 + np.arange(common),
                1_000_000_000 + u * 1_000_000 + np.arange(common, blocks[u]),
            ]
        )
        for u in range(users)
    ]
    trace = Trace(
        "inference-perf",
        np.concatenate(arrivals),
        lengths[user],
        np.full(len(user), int(data["output_len"])),
        prefix_offsets=np.concatenate(([0], np.cumsum(blocks[user]))),
        prefix_ids=np.concatenate([ids[u] for u in user]),
        prefix_block_tokens=BLOCK_TOKENS,
    )
    return trace, np.repeat(np.arange(len(stages)), [len(each) for each in arrivals]), starts_s


def spread_lengths(quantiles: Document, n: int) -> Ints:
    """(n,) lengths with these quantiles (min, p10, median, max, ...), in ascending order."""
    known = {"min": 0.0, "median": 0.5, "max": 1.0}
    points = sorted(
        (known[key] if key in known else float(key[1:]) / 100, float(value))
        for key, value in quantiles.items()
        if key in known or key.startswith("p")
    )
    shares, values = zip(*points, strict=True)
    lengths: Ints = np.round(np.interp((np.arange(n) + 0.5) / n, shares, values)).clip(min=1).astype(np.int64)
    return lengths


# --- ML.ENERGY: all requests are sent at once. An engine's seats are its max_num_seqs.


def ml_energy(path: Path, lengths: Document, engines: Engines) -> Found:
    """Gaps between tokens of a whole run, and tokens per second and Watts while all seats are taken.

    A run with all its GPUs in one group is simulated as one worker with this tensor parallelism, and with
    expert parallelism if the run had it. Prompt lengths are drawn by PROMPTS, output lengths from the
    histogram of the LLM and task. Runs with many seats send the same prompts several times (SWEEPS), so
    vLLM's prefix cache has them.
    """
    taken: Counter[tuple[str, str]] = Counter()  # Some cases were measured twice and need different names.
    for line in path.read_text().splitlines():
        point = json.loads(line)
        split, seats = point["parallelization"], int(point["max_num_seqs"])
        gpus, groups = int(point["num_gpus"]), int(split["data_parallel"])
        campaign, case = f"{point['llm']} {point['task']} {gpus} x {point['gpu_model']}", f"{seats} in flight"
        taken[campaign, case] += 1
        run = Run(
            "ml-energy",
            campaign,
            case if taken[campaign, case] == 1 else f"{case}, run {taken[campaign, case]}",
            point["llm"],
            GPUS.get(point["gpu_model"], point["gpu_model"]),
            gpus // groups,
            "vLLM 0.11.1",
        )
        try:
            if groups > 1:
                raise InputError("data-parallel groups: whether they share experts is not stated")
            if point["task"] not in PROMPTS:
                raise InputError(f"task {point['task']}: nothing says how long its prompts are")
            run = replace(run, load=_seat_load(point))
            settings: dict[str, Any] = {"max_num_seqs": seats}
            chosen = MXFP8_FITS / f"{run.llm.split('/')[-1].lower()}--{run.gpu}.yaml"
            if chosen.exists():
                settings["latency"] = str(chosen)
            if run.load is not None and run.load.experts_whole:
                settings["ep"] = True
            fleet = engines.fleet(run, settings, weights=point["weights"], cache=True)
        except PlannerError as error:
            yield refused(run, error)
            continue
        watts = float(point["avg_power_watts"])
        if watts / gpus < HOST_BOUND_FRAC * fleet.pools[0].type.gpu.power_w:
            run = replace(run, regime="host-bound")
        yield from _seat_rows(run, engines.basis(fleet), point, all_at_once(fleet, point, lengths), fleet)


def _seat_load(point: Document) -> Load:
    """The mean load of a run; prompts are computed once, and cached when they are sent again."""
    median, sigma = PROMPTS[point["task"]]
    inputs = median * math.exp(sigma**2 / 2)  # The mean of the lognormal distribution.
    return Load(
        inputs,
        float(point["avg_output_len"]),
        float(point["max_num_seqs"]),
        cached_tokens=inputs * (1 - 1 / repeats_of(point)),
        weights=point["weights"],
        experts_whole=int(point["parallelization"].get("expert_parallel", 1)) > 1,
    )


def repeats_of(point: Document) -> int:
    """How often a run sends its prompts: the number in SWEEPS for its seats, or for the next fewer seats. If
    SWEEPS has neither, the prompts are sent so often that there are at least twice as many requests as seats.
    """
    campaign = f"{point['llm']} {point['task']} {point['num_gpus']} x {point['gpu_model']}"
    seats = int(point["max_num_seqs"])
    sweeps = read_yaml(SWEEPS).get(campaign, {})
    sweep = {run_seats: repeats for repeats, seat_list in sweeps.items() for run_seats in seat_list}
    fewer = [run_seats for run_seats in sweep if run_seats <= seats]
    return int(sweep[max(fewer)]) if fewer else math.ceil(2 * seats / SENT[point["task"]])


def all_at_once(fleet: Fleet, point: Document, lengths: Document, *, seed: int = 0) -> Simulation:
    """Simulates a run, whose requests are all sent at once.

    The window of its figures is that of ml-energy/benchmark (c1d6557): from the moment when as many requests
    as there are seats have their first token, until only one request more than there are seats is left.
    """
    seats, rng = int(point["max_num_seqs"]), np.random.default_rng(seed)
    sent = SENT[point["task"]]
    n = sent * repeats_of(point)
    histogram = lengths.get(f"{point['llm']} {point['task']}")
    outputs = np.full(n, round(point["avg_output_len"]))
    if histogram is not None:
        outputs = drawn(histogram, n, rng)
    median, sigma = PROMPTS[point["task"]]
    inputs = np.round(median * rng.lognormal(0, sigma, sent)).clip(1, LONGEST_PROMPT).astype(np.int64)
    prompt = np.arange(n) % sent
    blocks = inputs[prompt] // BLOCK_TOKENS
    offsets = np.concatenate(([0], np.cumsum(blocks)))
    # The blocks of a prompt are numbered from a million times its number, so that prompts have none in
    # common.
    ids = np.arange(offsets[-1]) - np.repeat(offsets[:-1], blocks) + np.repeat(prompt * 1_000_000, blocks)
    trace = Trace(
        "all at once",
        np.zeros(n),
        inputs[prompt],
        outputs,
        prefix_offsets=offsets,
        prefix_ids=ids,
        prefix_block_tokens=BLOCK_TOKENS,
    )
    simulation = simulate(fleet, trace, closed_loop=n, record=True)
    first_s = np.sort(simulation.arrival_s + simulation.ttft_s)
    finish_s = np.sort(simulation.arrival_s + simulation.e2e_s)
    start_s, end_s = float(first_s[min(seats, n) - 1]), float(finish_s[max(n - seats - 2, 0)])
    return replace(simulation, window_s=(start_s, end_s) if start_s < end_s else (0.0, float(finish_s[-1])))


def drawn(histogram: Document, n: int, rng: np.random.Generator) -> Ints:
    """(n,) lengths drawn from a histogram: a bin with the frequency of its count, and uniformly within it."""
    edges, counts = np.array(histogram["bins"]), np.array(histogram["counts"], dtype=float)
    chosen = rng.choice(len(counts), size=n, p=counts / counts.sum())
    lengths = np.round(rng.uniform(edges[chosen], edges[chosen + 1])).astype(np.int64)
    return np.maximum(lengths, 1)


def _seat_rows(run: Run, basis: str, point: Document, simulation: Simulation, fleet: Fleet) -> Iterator[Row]:
    """The figures of a run: gaps over the whole run, tokens per second and Watts within its window."""
    start_s, end_s = simulation.window_s
    whole_s = (0.0, float((simulation.arrival_s + simulation.e2e_s).max()))
    gaps = gap_runs(replace(simulation, window_s=whole_s))
    for name, key in (("p50", "median_itl_ms"), ("p90", "p90_itl_ms"), ("p99", "p99_itl_ms")):
        yield Row(run, basis, "itl", name, gap_percentile_s(gaps, QUANTILES[name] or 0.5), point[key] / 1e3)
    # The tokens of the window: one per gap, and the first tokens of requests.
    gaps = gap_runs(simulation)
    first_s = simulation.arrival_s + simulation.ttft_s
    tokens = int(
        (gaps["steps"] * gaps["sequences"]).sum() + ((first_s >= start_s) & (first_s <= end_s)).sum()
    )
    measured = float(point["output_throughput_tokens_per_sec"])
    yield Row(run, basis, "throughput", "mean", tokens / (end_s - start_s), measured)
    try:
        power = expected_power(fleet, simulation)
    except PlannerError:
        return  # The catalog has no figures for this GPU.
    if power is not None:
        yield Row(run, basis, "power", "mean", power.mean_w, float(point["avg_power_watts"]))


# --- LLMServingSim's runs: every request, by the engine's own clock


def request_logs(folder: Path, engines: Engines) -> Found:
    """TTFT, time per token and E2E of each run, with the catalog's step times, and with those that are fitted
    to the kernel profiles beside the run (`plan import`, `plan fit`).
    """
    for path in sorted(folder.rglob("*.requests.jsonl")):
        stem = path.name.removesuffix(".requests.jsonl")
        meta = json.loads(path.with_name(f"{stem}.meta.json").read_text())
        settings = meta["engine_kwargs"]
        run = Run(
            "llmservingsim",
            stem,
            "",
            meta["model"],
            GPUS.get(stem.split("--")[0], stem.split("--")[0]),
            int(settings["tensor_parallel_size"]),
            f"vLLM {meta['vllm_version']}",
        )
        limits: dict[str, Any] = {
            key: int(settings[key]) for key in ("max_num_batched_tokens", "max_num_seqs")
        }
        try:
            count = ranks = int(settings["data_parallel_size"])
            if count > 1 and settings["enable_expert_parallel"]:
                limits |= {"dp": count, "ep": True}
                run, count = replace(run, case=f"DP {count}"), 1
            fleet = engines.fleet(run, limits, count=count)
            fleets = {engines.basis(fleet): fleet}
            if count == 1 and "dp" not in limits and (profiles := _profiles(folder, stem, run.tp)):
                latency = latency_document(imported(run, profiles, engines.catalog))
                fleets["import"] = engines.fleet(run, limits | {"latency": latency}, count=count)
        except PlannerError as error:
            yield refused(run, error)
            continue
        log = [json.loads(line) for line in path.read_text().splitlines()]
        run = replace(run, load=replace(_log_load(log), ranks=ranks, experts_whole=run.case != ""))
        for basis, each in fleets.items():
            yield from _request_rows(run, basis, log, each)


def _log_load(log: Sequence[Document]) -> Load:
    """The mean load of a run; by Little's law the mean in flight is the sum of all E2E over the run's
    length.
    """
    keys = ("arrival_time", "last_token_ts", "input_toks", "output_toks")
    sent_s, last_s, inputs, outputs = np.array([[float(each[key]) for key in keys] for each in log]).T
    in_flight = float((last_s - sent_s).sum() / (last_s.max() - sent_s.min()))
    return Load(float(inputs.mean()), float(outputs.mean()), in_flight)


def _profiles(folder: Path, stem: str, tp: int) -> list[Path]:
    """The kernel profiles of a run. Experts are profiled on one GPU, and the file counts for every TP."""
    paths = sorted(folder.rglob(f"{stem}--tp{tp}--*.csv*"))
    if paths and not any("--moe." in path.name for path in paths):
        paths += sorted(folder.rglob(f"{stem}--tp1--moe.csv*"))
    return paths


def imported(run: Run, profiles: Sequence[Path], catalog: Catalog) -> StepLatency:
    """The step times that `plan import llmservingsim` and `plan fit` make of kernel profiles."""
    facts = StatedSetup(llm=run.llm, gpu=run.gpu, tp=run.tp)
    table = importers.read("llmservingsim", profiles, facts, catalog)
    assert isinstance(table, StepTable)
    return fit_table(table, facts, catalog, where=run.campaign).latency


def _request_rows(run: Run, basis: str, log: Sequence[Document], fleet: Fleet) -> Iterator[Row]:
    """The figures of a run, counted from the moment at which a request reached the engine.

    The engine notes this moment (`queued_ts`) only between two steps, up to a step too late. So the client's
    times are taken, on the engine's clock: shifted so that the quickest hand-over takes no time.
    """
    columns = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "input_toks", "output_toks")
    table = np.array([[float(request[key]) for key in columns] for request in log])
    sent_s, queued_s, first_s, last_s, inputs, outputs = table[np.argsort(table[:, 0], kind="stable")].T
    arrived_s = sent_s + (queued_s - sent_s).min()
    trace = Trace(run.campaign, arrived_s - arrived_s[0], inputs.astype(np.int64), outputs.astype(np.int64))
    simulation = simulate(fleet, trace)
    with np.errstate(divide="ignore", invalid="ignore"):
        token_s = np.where(outputs > 1, (last_s - first_s) / (outputs - 1), np.nan)
    for quantity, predicted, measured in (
        ("ttft", simulation.ttft_s, first_s - arrived_s),
        ("tpot", simulation.tpot_s, token_s),
        ("e2e", simulation.e2e_s, last_s - arrived_s),
    ):
        for name in QUANTILES:
            yield Row(run, basis, quantity, name, statistic(predicted, name), statistic(measured, name))


# --- silicon_sample of aiconfigurator-core: closed loop, means


def silicon_sample(path: Path, engines: Engines, backends: Collection[str] = tuple(BACKENDS)) -> Found:
    """Mean TTFT and TPOT of the points of vLLM and SGLang. The file has some measurements two or three times;
    each is taken once.

    InferenceX drew lengths from 0.8 to 1 of the nominal ones. AIConfigurator's authors sent prompts of equal
    length to engines with the settings of their generator. Its budget of a prompt, the batch and 1500 tokens
    counts for vLLM; SGLang takes the LLM's context where `--max-prefill-tokens` is less, so that only its
    chunks of 8192 tokens are left. The scripts by which InferenceX starts SGLang (benchmarks/single_node,
    read on 2026-11-28) set a budget of 32768 tokens.

    A campaign is left out if the GPUs cannot have computed all prompts of one of its points, or cannot have
    read as much KV as its steps would: the file says neither how many prompts were cached nor in which format
    the KV was.
    """
    figures = list(_points(path, engines, backends))
    unstated = {
        each.run.campaign
        for each in figures
        if isinstance(each, LeftOut) and each.why in (PROMPTS_HELD, KV_UNSTATED)
    }
    for each in figures:
        if not isinstance(each, Row) or each.run.campaign not in unstated:
            yield each
        elif each.quantity == "tpot":  # Every point has one row of TTFT and one of TPOT.
            yield LeftOut(each.run, "as others of its campaign: not what an engine does by default")


def _cold_points(points: Sequence[Mapping[str, str]]) -> set[str]:
    """The ids of the points that are cold by COLD_TTFT and COLD_TPOT, from measured times alone."""
    alike: dict[tuple[object, ...], list[tuple[str, float, float]]] = {}
    for point in points:
        llm = CHECKPOINTS.get((point["model_path"], point["gemm_quant_mode"]), point["model_path"])
        columns = (point[column] for column in (*MEASUREMENT, "gemm_quant_mode"))
        ttft_ms, tpot_ms = (float(point[f"silicon_{each}_ms"]) for each in ("ttft", "tpot"))
        key = llm, _gpus(point), _clients(point), *columns
        alike.setdefault(key, []).append((point["id"], ttft_ms, tpot_ms))
    return {
        name
        for group in alike.values()
        for name, ttft_ms, tpot_ms in group
        if any(ttft_ms > COLD_TTFT * other[1] and tpot_ms < COLD_TPOT * other[2] for other in group)
    }


def _points(path: Path, engines: Engines, backends: Collection[str]) -> Found:
    """The figures of all points of the file, whatever their campaigns leave open."""
    seen, counted = set(), Counter[str]()
    points = [each for each in csv.DictReader(path.read_text().splitlines()) if each["backend"] in backends]
    cold = _cold_points(points)
    for point in points:
        is_authors = "aic-auto-gap-analysis" in point["silicon_data_source"]
        run = _point_run(point, AUTHORS if is_authors else "InferenceX")
        times = (round(float(point[f"silicon_{each}_ms"]), 2) for each in ("ttft", "tpot"))
        measurement = (*(point[column] for column in MEASUREMENT), _clients(point), *times)
        try:
            if measurement in seen:
                raise InputError(SAME_AGAIN)
            seen.add(measurement)
            if point["mode"] != "agg":
                raise InputError("disaggregated: its pools and their link are not in the file")
            slices, whole = _expert_split(point)
            if slices * whole > run.tp:
                raise InputError(UNSTATED_RANKS)
            if _has_untold_drafts(point, run.tp, whole):
                raise InputError(DRAFTS_UNTOLD)
            length, clients = int(point["isl"]), _clients(point)
            shortest = 1.0 if is_authors else 0.8
            settings = _point_settings(run, length, clients)
            if run.tp > 1 and whole > 1:
                settings["ep"] = True
            load = _point_load(run, point, shortest)
            run = replace(run, load=load)
            fleet = engines.fleet(run, settings, weights=load.weights, kv_in_8_bits=load.kv_in_8_bits)
            _refuse_unstated(fleet, point, clients, shortest)
            if _waits_for_host(fleet, run.load) or point["id"] in cold:
                run = replace(run, regime="cold" if point["id"] in cold else "host-bound")
        except PlannerError as error:
            yield refused(run, error)
            continue
        counted[run.campaign] += 1
        if counted[run.campaign] % engines.every:
            continue
        ttft_s, tpot_s = client_means(fleet, length, int(point["osl"]), clients, shortest)
        basis = engines.basis(fleet)
        yield Row(run, basis, "ttft", "mean", ttft_s, float(point["silicon_ttft_ms"]) / 1e3)
        yield Row(run, basis, "tpot", "mean", tpot_s, float(point["silicon_tpot_ms"]) / 1e3)


def _gpus(point: Mapping[str, str]) -> int:
    """The GPUs of the worker of a point. Some lines of SGLang have the product of these and of the GPUs that
    share the experts: where `tp_size` is 16 and both kinds of sharing are 4, other lines with the same times
    have TP 4 with whole experts.
    """
    tp, slices, whole = (int(float(point[f"{key}_size"] or 0)) for key in ("tp", "moe_tp", "moe_ep"))
    return slices if slices == whole > 1 and tp == slices * whole else max(tp, 1)


def _expert_split(point: Mapping[str, str]) -> tuple[int, int]:
    """The GPUs that share slices of the experts of a point, and those that share whole ones.

    Where the GPUs count twice (`_gpus`), or on vLLM as data-parallel ranks once more (TP 4, 4 ranks and 16
    GPUs that share whole experts), all of a worker's GPUs share whole ones: so it is in the lines that repeat
    these measurements.
    """
    tp, slices, whole = _gpus(point), *(int(float(point[f"moe_{key}_size"] or 0)) for key in ("tp", "ep"))
    return (
        (1, tp)
        if tp > 1 and (slices == whole == tp or (slices <= 1 and whole == tp * tp))
        else (slices, whole)
    )


def _clients(point: Mapping[str, str]) -> int:
    """The clients of a point: `batch_size` is their number by data-parallel rank."""
    return round(float(point["batch_size"] or 0) * float(point.get("attention_dp_size") or 1))


def _has_untold_drafts(point: Mapping[str, str], tp: int, whole: int) -> bool:
    """Whether InferenceX ran the point with MTP (WITH_DRAFTS)."""
    is_theirs = point["backend_version"] == "0.5.9" and "db-dump" not in point["silicon_data_source"]
    is_like = (point["model_path"], point["system"], tp) in WITH_DRAFTS and whole <= 1
    return is_theirs and is_like and point["gemm_quant_mode"] == "fp8"


def _point_settings(run: Run, length: int, clients: int) -> dict[str, Any]:
    """Token budget and max_num_seqs of the engine of a point with prompts of `length` tokens."""
    is_authors = run.campaign.startswith(AUTHORS)
    if run.source == "silicon-sample":
        budget = length + clients + 1500 if is_authors else SERVER["max_num_batched_tokens"]
        chosen = MARLIN_FITS / f"{run.llm.split('/')[-1].lower()}--{run.gpu}.yaml"
        latency = {"latency": str(chosen)} if chosen.exists() and not is_authors else {}
        return {"max_num_batched_tokens": budget, **latency}
    # InferenceX lets weights and KV have 0.82 of the memory, about what SGLang gives them by default with a
    # budget of 16384.
    return {"max_num_batched_tokens": 8192 if is_authors else 16384, "max_num_seqs": 512}


def _has_kv_in_8_bits(run: Run, weights: str) -> bool:
    """Whether the run's SGLang was started with --kv-cache-dtype fp8_e4m3, or takes 8 bits by itself as for
    GLM-5 on Blackwell.

    InferenceX's scripts of April 2026 set it on Blackwell but for Qwen3.5 in 16 bits, and on H200 for Qwen3.5
    alone.
    """
    is_theirs = run.source == "sglang" and not run.campaign.startswith(AUTHORS)
    return is_theirs and bool(weights) and (run.gpu in POLLED or "Qwen3.5" in run.llm)


def _poll_steps(run: Run, weights: str, clients: int) -> int:
    """After how many steps of decodes the run's SGLang looked for new requests.

    No script of InferenceX for B300 is older than 2026-04-17. For runs from before, those for B200 stand in.
    """
    if run.source != "sglang" or run.campaign.startswith(AUTHORS) or run.gpu not in POLLED:
        return 1
    few = (run.tp < 8 and weights == "fp8" and "DeepSeek" in run.llm) or clients < MANY_CLIENTS
    return OTHER_POLL_STEPS.get((run.llm, weights, run.gpu), POLL_STEPS[few])


def _point_load(run: Run, point: Mapping[str, str], shortest: float) -> Load:
    """The mean load of a point, whose lengths are uniform from `shortest` to 1 of the nominal ones."""
    share = (1 + shortest) / 2
    return Load(
        share * int(point["isl"]),
        share * int(point["osl"]),
        float(_clients(point)),
        weights=point["gemm_quant_mode"],
        experts_whole=_expert_split(point)[1] > 1,
        kv_in_8_bits=_has_kv_in_8_bits(run, point["gemm_quant_mode"]),
        poll_steps=_poll_steps(run, point["gemm_quant_mode"], _clients(point)),
    )


def _waits_for_host(fleet: Fleet, load: Load | None) -> bool:
    """Whether the host takes longer per step of this many decodes than the GPUs: the file has no Watts."""
    worker = fleet.pools[0].type
    if worker.engine is None or load is None:
        return False
    step_s, sequence_s = worker.engine.host.per_step_s(worker.tp)
    kv_tokens = load.requests * (load.input_tokens + load.output_tokens / 2)
    gpus_s = worker.latency.step_s(load.requests, decodes=load.requests, kv_tokens=kv_tokens)
    return worker.engine.async_scheduling and step_s + load.requests * sequence_s > float(gpus_s)


def _refuse_unstated(fleet: Fleet, point: Mapping[str, str], clients: int, shortest: float) -> None:
    """Raises InputError for a point that depends on something the file does not say: on the size of the KV
    cache, if all clients together need more than it has by default; on how many prompts were cached, if the
    GPUs cannot have computed all of them in the time that the requests took; or on the format of the KV.
    """
    worker, share = fleet.pools[0].type, (1 + shortest) / 2
    inputs, outputs = share * int(point["isl"]), share * int(point["osl"])
    if clients * (inputs + outputs) > worker.kv_tokens:
        raise InputError("its clients need more KV cache than an engine has by default; the file is silent")
    request_s = (float(point["silicon_ttft_ms"]) + outputs * float(point["silicon_tpot_ms"])) / 1e3
    flops = 2 * clients * (inputs + outputs) * fleet.llm.active_parameters
    peak = worker.gpu.dense_flops_per_s
    if fleet.llm.weights in ("fp8", "fp8-block"):
        peak = worker.gpu.fp8_flops_per_s or peak
    elif fleet.llm.weights == "nvfp4":
        peak = worker.gpu.fp4_flops_per_s or peak
    if flops > MOST_FLOPS_FRAC * peak * worker.gpus * request_s:
        raise InputError(PROMPTS_HELD)
    # A decode step reads the weights and all KV; an answer is half written on average.
    step_bytes = active_weight_bytes(fleet.llm, clients) + clients * (inputs + outputs / 2) * (
        fleet.llm.kv_bytes_per_token
    )
    if step_bytes > worker.gpus * worker.gpu.bandwidth_bytes_per_s * float(point["silicon_tpot_ms"]) / 1e3:
        raise InputError(KV_UNSTATED)


def _point_run(point: Mapping[str, str], campaign: str) -> Run:
    """The run of a point of silicon_sample.csv; `campaign` is the name of those who measured it."""
    llm, gpu, weights = (
        point["model_path"],
        GPUS.get(point["system"], point["system"]),
        point["gemm_quant_mode"] or "16 bit",
    )
    stated = point["backend_version"]
    unstated = "of an unstated version"
    if point["backend"] == "vllm":
        version = NIGHTLIES.get(stated, stated) or UNSTATED_VERSIONS.get(llm, unstated)
    else:
        version = stated or unstated
    source, engine = BACKENDS[point["backend"]]
    name = f"{campaign}, {llm}, {gpu}, {weights}" + ("" if engine == "vLLM" else f", {engine}")
    return Run(source, name, point["id"], llm, gpu, _gpus(point), f"{engine} {version}")


def client_means(
    fleet: Fleet, input_tokens: int, output_tokens: int, clients: int, shortest: float, *, seed: int = 0
) -> tuple[float, float]:
    """Mean TTFT and TPOT [s] of `clients` that each send one request after the other."""
    rng, n = np.random.default_rng(seed), CLIENT_ROUNDS * clients
    inputs = np.round(input_tokens * rng.uniform(shortest, 1, n)).astype(np.int64)
    outputs = np.round(output_tokens * rng.uniform(shortest, 1, n)).astype(np.int64)
    simulation = simulate(fleet, Trace("closed loop", np.zeros(n), inputs, outputs), closed_loop=clients)
    return statistic(simulation.ttft_s, "mean"), statistic(simulation.tpot_s, "mean")


# --- InferenceX's files: closed loop, medians and 99th percentiles


def inferencex(path: Path, engines: Engines) -> Found:
    """Median and 99th percentile of TTFT, time per token and E2E, and tokens per second.

    The clients of a file send prompts of one length. A run is called saturated if the measured median request
    waits longer for its first token than for all others. If one server had runs with more and more clients
    (ONE_SERVER), the simulation begins with the requests of the run before, for their cached prompts.
    """
    points = [json.loads(line) for line in path.read_text().splitlines()]
    for point in points:
        match = re.search(r"_tp(\d+)_", point["file"])
        weights = "fp8" if "FP8" in point["model_id"] else ""
        clients, n = int(point["max_concurrency"]), int(point["num_prompts"])
        drafts, accepted = DRAFTS.get(point["model_id"], (0, 0.0))
        inputs, outputs = (round(point[f"total_{key}_tokens"] / n) for key in ("input", "output"))
        run = Run(
            "inferencex",
            f"{point['model_id']}, {path.stem}",
            f"{inputs} in, {outputs} out, {clients} clients",
            point["model_id"],
            INFERENCEX_GPU,
            int(match[1]) if match else 1,
            INFERENCEX_ENGINE,
            "saturated" if point["median_ttft"] > point["median_e2el"] / 2 else "",
            Load(inputs, outputs, clients, weights=weights, drafts=drafts, accepted=accepted),
        )
        try:
            fleet = engines.fleet(run, {}, weights=weights, cache=point["model_id"] in ONE_SERVER)
        except PlannerError as error:
            yield refused(run, error)
            continue
        earlier = _requests_before(point, points) if point["model_id"] in ONE_SERVER else 0
        if earlier * (inputs + outputs) > fleet.pools[0].type.kv_tokens:
            # The cache cannot hold them all. It evicts the least recently used, which in a round are those
            # that come next, so none is left when it is sent again.
            earlier = 0
        simulation = simulate(fleet, _one_seed(earlier, n, inputs, outputs), closed_loop=clients)
        for quantity, key, values in (
            ("ttft", "ttft", simulation.ttft_s),
            ("tpot", "tpot", simulation.tpot_s),
            ("e2e", "e2el", simulation.e2e_s),
        ):
            for name, prefix in (("p50", "median"), ("p99", "p99")):
                measured = float(point[f"{prefix}_{key}"])
                predicted = statistic(values[earlier:], name)
                yield Row(run, engines.basis(fleet), quantity, name, predicted, measured)
        ends_s = (simulation.arrival_s + simulation.e2e_s)[earlier:]
        tokens_per_s = n * outputs / float(ends_s.max() - simulation.arrival_s[earlier:].min())
        measured = float(point["output_throughput"])
        yield Row(run, engines.basis(fleet), "throughput", "mean", tokens_per_s, measured)


def _requests_before(point: Document, points: Sequence[Document]) -> int:
    """How many requests the run before had: that with prompts as long and the next fewer clients; 0 if this
    run is the first.
    """
    each_tokens = point["total_input_tokens"] / point["num_prompts"]
    alike = [each for each in points if each["total_input_tokens"] / each["num_prompts"] == each_tokens]
    fewer = [each for each in alike if each["max_concurrency"] < point["max_concurrency"]]
    return int(max(fewer, key=lambda each: each["max_concurrency"])["num_prompts"]) if fewer else 0


def _one_seed(earlier: int, n: int, inputs: int, outputs: int) -> Trace:
    """`n` requests after `earlier` ones; request k of both has the same prompt, as both have one seed."""
    prompts = np.concatenate((np.arange(earlier), np.arange(n)))
    blocks = inputs // BLOCK_TOKENS
    return Trace(
        "closed loop",
        np.zeros(earlier + n),
        np.full(earlier + n, inputs),
        np.full(earlier + n, outputs),
        prefix_offsets=np.arange(earlier + n + 1) * blocks,
        prefix_ids=(prompts[:, None] * 1_000_000 + np.arange(blocks)).ravel(),
        prefix_block_tokens=BLOCK_TOKENS,
    )


# --- llm-d's guides: open loop, several workers behind a router


def llmd(path: Path, engines: Engines) -> Found:
    """Mean and P90 of TTFT and tokens per second for ladders of rates, TTFT and E2E for constant rates.

    The client, inference-perf, draws exponential intervals; those of a constant rate fill the stage exactly.
    Every stage of a ladder begins with the first prompt again, after the stage before has ended. Tokens per
    second are counted until a stage's last request ends. For fleets of prefill and decode workers TTFT is not
    compared, because the client saw several tokens in its first chunk.
    """
    ladders: dict[tuple[str, str, str], list[Document]] = {}
    for line in path.read_text().splitlines():
        point = json.loads(line)
        if "shared_prefix" in point:
            ladders.setdefault((point["llm"], point["gpu"], point["routing"]), []).append(point)
        else:
            yield from _llmd_constant(point, engines)
    for points in ladders.values():
        yield from _llmd_ladder(points, engines)


def _llmd_run(point: Document, campaign: str, tp: int) -> Run:
    """The run of a point of llm-d, of workers with this tensor parallelism."""
    regime = "saturated" if point["ttft_s"]["mean"] > LLMD_SATURATED_S else ""
    gpu, rate = str(GPUS.get(point["gpu"], point["gpu"])), f"{point['rate']:g}/s"
    return Run("llm-d", campaign, rate, point["llm"], gpu, tp, "vLLM", regime)


def _llmd_ladder(points: Sequence[Document], engines: Engines) -> Found:
    """The figures of all stages of a ladder, the mean over LLMD_SEEDS simulations.

    A first fleet gives the LLM and GPU, from which the KV cache at LLMD_MEMORY_FRAC follows.
    """
    count, tp = (int(each) for each in points[0]["workers"].split(" x TP"))
    runs = [_llmd_run(point, f"{point['llm']}, {point['routing']}", tp) for point in points]
    policies = LLMD_ROUTING[points[0]["routing"]]
    try:
        fleet = engines.fleet(runs[0], {}, count=count, cache=True, policies=policies)
        use = worker_memory(
            fleet.llm,
            fleet.pools[0].type.gpu,
            tp,
            max_num_batched_tokens=SERVER["max_num_batched_tokens"],
            max_num_seqs=SERVER["max_num_seqs"],
            settings=MemorySettings(DEPLOYED_VERSION, None, LLMD_MEMORY_FRAC),
        )
        kv_tokens = int(use.kv_bytes / use.kv_bytes_per_token)
        engine = {"kv_tokens": kv_tokens}
        fleet = engines.fleet(runs[0], engine, count=count, cache=True, policies=policies)
    except PlannerError as error:
        yield from (refused(each, error) for each in runs)
        return
    predicted: dict[tuple[int, str, str], list[float]] = {}
    for seed in range(LLMD_SEEDS):
        trace, stage_of = ladder(points, seed=seed)
        simulation = simulate(fleet, trace)
        for k in range(len(runs)):
            in_stage = stage_of == k + 1  # Stage 0 is the warm-up.
            arrivals_s, e2e_s = simulation.arrival_s[in_stage], simulation.e2e_s[in_stage]
            tokens_per_s = trace.output_tokens[in_stage].sum() / (
                (arrivals_s + e2e_s).max() - arrivals_s.min()
            )
            predicted.setdefault((k, "throughput", "mean"), []).append(float(tokens_per_s))
            for name in ("mean", "p90"):
                value = statistic(simulation.ttft_s[in_stage], name)
                predicted.setdefault((k, "ttft", name), []).append(value)
    for (k, quantity, name), values in predicted.items():
        point = points[k]
        measured = point["output_tokens_per_s"] if quantity == "throughput" else point["ttft_s"][name]
        yield Row(runs[k], engines.basis(fleet), quantity, name, float(np.mean(values)), float(measured))


def ladder(points: Sequence[Document], *, seed: int = 0) -> tuple[Trace, Ints]:
    """The requests of a ladder after its warm-up, and the stage of each: 0 is the warm-up."""
    rng, data = np.random.default_rng(seed), points[0]["shared_prefix"]
    stages = [LLMD_WARM_UP, *((point["rate"], point["duration_s"]) for point in points)]
    counts = [int(rate * duration_s) for rate, duration_s in stages]
    arrivals, start_s = [], 0.0
    for (rate, _), n in zip(stages, counts, strict=True):
        arrivals.append(start_s + np.cumsum(rng.exponential(1 / rate, n)))
        start_s = float(arrivals[-1][-1]) + LLMD_GAP_S
    members = int(data["prompts_per_group"])
    prompts = rng.permutation(int(data["groups"]) * members)
    prompt = np.concatenate([prompts[np.arange(n) % len(prompts)] for n in counts])
    common = int(data["system_tokens"]) // BLOCK_TOKENS
    own = int(data["system_tokens"] + data["question_tokens"]) // BLOCK_TOKENS - common
    ids = np.concatenate(
        (
            (prompt // members)[:, None] * 1_000_000 + np.arange(common),
            1_000_000_000 + prompt[:, None] * 1_000_000 + np.arange(own),
        ),
        axis=1,
    )
    n = len(prompt)
    trace = Trace(
        "llm-d",
        np.concatenate(arrivals),
        np.full(n, int(points[0]["input_tokens"])),
        np.full(n, int(points[0]["output_tokens"])),
        prefix_offsets=np.arange(n + 1) * (common + own),
        prefix_ids=ids.ravel(),
        prefix_block_tokens=BLOCK_TOKENS,
    )
    return trace, np.repeat(np.arange(len(counts)), counts)


def _llmd_constant(point: Document, engines: Engines) -> Found:
    """The figures of a constant rate of prompts that have nothing in common, for mixed workers behind a
    Kubernetes Service, or for prefill and decode workers.
    """
    pairs = bool(point["disaggregated"])
    pools = [point["prefill"], point["decode"]] if pairs else [point["workers"]]
    sizes = [tuple(int(each) for each in pool.split(" x TP")) for pool in pools]
    workers: list[Document] = [{"count": count, "tp": tp} for count, tp in sizes]
    if pairs:
        workers = [{**row, "role": role} for row, role in zip(workers, ("prefill", "decode"), strict=True)]
    policies = (
        {"routing": "pending-tokens", "decode_routing": "least-outstanding"} if pairs else LLMD_ROUTING["rr"]
    )
    run = _llmd_run(point, f"{point['llm']}, {'prefill and decode' if pairs else 'mixed'}", sizes[0][1])
    try:
        fleet = engines.fleet(run, {}, weights=LLMD_WEIGHTS[point["llm"]], policies=policies, workers=workers)
    except PlannerError as error:
        yield refused(run, error)
        return
    n = int(point["rate"] * point["duration_s"])
    trace = Trace(
        "llm-d",
        np.sort(np.random.default_rng(0).uniform(0, point["duration_s"], n)),
        np.full(n, int(point["input_tokens"])),
        np.full(n, int(point["output_tokens"])),
    )
    simulation = simulate(fleet, trace)
    for quantity, values in (("ttft", simulation.ttft_s), ("e2e", simulation.e2e_s)):
        for name in QUANTILES:
            if name in point[f"{quantity}_s"] and not (pairs and quantity == "ttft"):
                measured = float(point[f"{quantity}_s"][name])
                yield Row(run, engines.basis(fleet), quantity, name, statistic(values, name), measured)


def unread(folder: Path) -> Iterator[LeftOut]:
    """Runs in files of sessions, which are not simulated here but count as left out."""
    for path in sorted(folder.rglob("*.runs.json")):
        for each in json.loads(path.read_text()):
            run = Run(
                "sessions",
                path.stem,
                each["run"],
                each["llm"].split()[0],
                each["gpu"],
                0,
                each.get("engine", ""),
            )
            yield LeftOut(run, "sessions whose turns wait for one another: benchmarks/agents_reality.py")


# --- bounds on our errors, and the errors of other simulators


@dataclass(frozen=True)
class Bound:
    """The mean absolute error of a source's runs, or with `bias` the absolute value of their mean error, must
    be at most `limit_frac`. `over` describes the runs that count, which `holds_for` selects.
    """

    source: str
    quantity: str
    statistic: str
    limit_frac: float
    over: str = ""
    bias: bool = False
    holds_for: Callable[[Row], bool] = lambda row: True

    def of(self, rows: Sequence[Row]) -> Floats:
        """The relative errors of the rows that count."""
        figure = self.source, self.quantity, self.statistic
        return np.array(
            [
                row.error_frac
                for row in rows
                if (row.run.source, row.quantity, row.statistic) == figure and self.holds_for(row)
            ]
        )

    def value_frac(self, errors: Floats) -> float:
        """What must be at most `limit_frac`, from the relative errors."""
        return float(abs(errors.mean()) if self.bias else np.abs(errors).mean())


# Parts of ML.ENERGY's names by which mixtures of experts are recognised.
MIXTURES = ("-A3B-", "-A22B-", "gpt-oss", "Llama-4", "DeepSeek")


def _on(
    gpu: str, *, fit: bool = False, busy: bool = False, named: Sequence[str] = ("",)
) -> Callable[[Row], bool]:
    """Selects rows on a GPU ("": any): with `fit` only those with a fit, with `busy` only those whose GPUs do
    not wait for their host, and only LLMs with one of `named` in their name.
    """
    return lambda row: (
        (not gpu or row.run.gpu == gpu)
        and any(part in row.run.llm for part in named)
        and (not fit or row.basis == "fit")
        and (not busy or row.run.regime != "host-bound")
    )


BOUNDS = (
    Bound("inference-perf", "ttft", "mean", 0.12, "stages not overloaded"),
    Bound("inference-perf", "tpot", "mean", 0.08, "stages not overloaded"),
    Bound("inference-perf", "e2e", "mean", 0.06, "stages not overloaded"),
    *(
        Bound("llmservingsim", quantity, "mean", limit_frac, over, holds_for=holds_for)
        for over, holds_for in (
            ("its profiles imported", lambda row: row.basis == "import"),
            ("ours", lambda row: row.basis != "import" and not row.run.case),
        )
        for quantity, limit_frac in (("ttft", 0.06), ("tpot", 0.03), ("e2e", 0.03))
    ),
    *(
        Bound(
            "llmservingsim",
            quantity,
            name,
            limit_frac,
            "ours, DP 2",
            holds_for=lambda row: bool(row.run.case),
        )
        for quantity, name, limit_frac in (("ttft", "p50", 0.15), ("tpot", "mean", 0.03))
    ),
    Bound("ml-energy", "itl", "p50", 0.10, "H100, LLMs with fits", holds_for=_on("h100-80g", fit=True)),
    Bound(
        "ml-energy",
        "itl",
        "p50",
        0.04,
        "H100, LLMs with fits",
        bias=True,
        holds_for=_on("h100-80g", fit=True),
    ),
    Bound(
        "ml-energy", "throughput", "mean", 0.10, "H100, LLMs with fits", holds_for=_on("h100-80g", fit=True)
    ),
    Bound("ml-energy", "itl", "p50", 0.15, "H100, mixtures", holds_for=_on("h100-80g", named=MIXTURES)),
    Bound("ml-energy", "itl", "p50", 0.15, "B200, not host-bound", holds_for=_on("b200-180g", busy=True)),
    Bound("silicon-sample", "ttft", "mean", 0.15, "GPUs with fits", holds_for=_on("", fit=True)),
    Bound("silicon-sample", "tpot", "mean", 0.08, "GPUs with fits", holds_for=_on("", fit=True)),
)
# Errors that other simulators report: source, simulator, over which runs, TTFT, TPOT or ITL, E2E.
PEERS = (
    ("inference-perf", "BLIS", "15 runs like these, other LLMs", "24 %", "22 %", "23 %"),
    ("inference-perf", "AIConfigurator 0.9", "9 of them", "809 %", "21 %", "17 %"),
    ("inference-perf", "Vidur", "4 of them", "18 %", "10 %", "9 %"),
    ("inference-perf", "llm-optimizer", "11 of them", "709 %", "56 %", "42 %"),
    ("inference-perf", "LLMServingSim 1.1", "medians of 32 runs", "73 %", "22 %", "19 %"),
    (
        "llmservingsim",
        "LLMServingSim 1.2",
        "its own profiles of that GPU",
        "1 to 14 %",
        "0.2 to 1.7 %",
        "2 %",
    ),
    ("silicon-sample", "AIConfigurator 0.12", "339 dense points", "36 %", "18 %", "-"),
)


# A spread states an interval for 90 % of measurements: the share that lies in it must be within these limits.
INSIDE_FRAC = (0.85, 0.95)
# The figures that are compared with the spread, by quantity.
INSIDE = {"ttft": {("ttft", "mean")}, "tpot": {("tpot", "mean"), ("itl", "p50")}, "e2e": {("e2e", "mean")}}
NOT_STEPS = ("host-bound", "cold")  # Regimes of runs that say nothing of step times.
# The figures of InferenceX's runs that are compared with the spread: their files have no means.
MEDIANS = {"ttft": ("ttft", "p50"), "tpot": ("tpot", "p50"), "e2e": ("e2e", "p50")}


def counted(rows: Sequence[Row], quantity: str) -> list[Row]:
    """The rows of `quantity` that are compared with their spread: one figure per run, without runs of
    NOT_STEPS and runs of which no spread is known.
    """
    return [
        row
        for row in rows
        if row.bounds is not None
        and row.run.regime not in NOT_STEPS
        and (row.quantity, row.statistic)
        in ({MEDIANS[quantity]} if row.run.source == "inferencex" else INSIDE[quantity])
    ]


def inside(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The share of measurements between the predictions at both ends of the spread, for each quantity."""
    answers = []
    for quantity in INSIDE:
        compared = counted(rows, quantity)
        share = sum(row.is_inside for row in compared) / len(compared) if compared else None
        answers.append(
            {
                "quantity": quantity,
                "rows": len(compared),
                "inside_frac": share,
                "holds": share is not None and INSIDE_FRAC[0] <= share <= INSIDE_FRAC[1],
            }
        )
    return answers


def _sources(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> set[str]:
    """The sources of all runs, simulated or left out."""
    return {row.run.source for row in rows} | {each.run.source for each in left_out}


def judged(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> list[dict[str, Any]]:
    """Every bound on a source of which there are runs. A bound without any figure counts as missed."""
    sources = _sources(rows, left_out)
    answers = []
    for bound in BOUNDS:
        if bound.source not in sources:
            continue
        errors = bound.of(rows)
        value = bound.value_frac(errors) if len(errors) else None
        answers.append(
            {
                "source": bound.source,
                "over": bound.over,
                "quantity": f"{bound.quantity} {bound.statistic}" + (", bias" if bound.bias else ""),
                "rows": len(errors),
                "error_frac": value,
                "limit_frac": bound.limit_frac,
                "holds": value is not None and value <= bound.limit_frac,
            }
        )
    return answers


# --- the page


def share_left_out(rows: Sequence[Row], left_out: Sequence[LeftOut]) -> dict[str, int]:
    """How many runs there are, are simulated and are left out; `same_again` of these only repeat another."""
    runs = {row.run for row in rows}
    return {
        "runs": len(runs) + len(left_out),
        "replayed": len(runs),
        "left_out": len(left_out),
        "same_again": sum(each.is_replayed_once for each in left_out),
        "host_bound": sum(run.regime == "host-bound" for run in runs),
        "cold": sum(run.regime == "cold" for run in runs),
        "saturated": sum(run.regime == "saturated" for run in runs),
    }


def print_page(rows: Sequence[Row], left_out: Sequence[LeftOut], bounds: Sequence[Document]) -> None:
    """Print all tables; `bounds` are those of `judged`."""
    shares = share_left_out(rows, left_out)
    replayed, again = shares["replayed"], shares["same_again"]
    measured, lost = shares["runs"] - again, shares["left_out"] - again
    print(
        f"Left out: {lost} of {measured} runs ({100 * lost / max(measured, 1):.0f} %), and {again} lines "
        f"that repeat one. Of the {replayed} replayed {shares['saturated']} are saturated, "
        f"{shares['host_bound']} host-bound and {shares['cold']} cold; "
        "all count but where a line says otherwise.\n"
    )
    print("Bounds: mean over runs of the error's size (bias: size of the mean error).\n")
    print("| truth | over | quantity | runs | error | bound | |")
    print("|---|---|---|---|---|---|---|")
    for b in bounds:
        error = "-" if b["error_frac"] is None else f"{100 * b['error_frac']:.1f} %"
        verdict = "holds" if b["holds"] else "missed"
        print(
            f"| {b['source']} | {b['over']} | {b['quantity']} | {b['rows']} | {error} | "
            f"{100 * b['limit_frac']:g} % | {verdict} |"
        )
    print(
        f"\nMeasurements inside the stated spread ({100 * INSIDE_FRAC[0]:g} to {100 * INSIDE_FRAC[1]:g} %):\n"
    )
    print("| quantity | measured | inside | |")
    print("|---|---|---|---|")
    for each in inside(rows):
        share = "-" if each["inside_frac"] is None else f"{100 * each['inside_frac']:.0f} %"
        print(f"| {each['quantity']} | {each['rows']} | {share} | {'holds' if each['holds'] else 'missed'} |")
    print_inside(rows)
    print_at_limit(rows)
    print(
        "\nErrors in %: mean size over runs, of mean / P50 / P90 / P99 as far as they were measured, and in "
        "brackets the mean with its sign of the first of them.\n"
    )
    print("| truth | LLM | GPU | step times | runs | TTFT | TPOT | ITL | E2E | tokens/s | W |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        key = (row.run.source, row.run.llm.split("/")[-1], row.run.gpu, row.basis)
        groups.setdefault(key, []).append(row)
    for key, group in sorted(groups.items()):
        runs = _runs({row.run for row in group})
        print(f"| {' | '.join(key)} | {runs} | {' | '.join(_cell(group, each) for each in QUANTITIES)} |")
    sources = _sources(rows, left_out)
    print("\nWhat others reach.\n")
    print("| truth | who | over | TTFT | TPOT or ITL | E2E |\n|---|---|---|---|---|---|")
    for peer in PEERS:
        if peer[0] in sources:
            print(f"| {' | '.join(peer)} |")
    of_source = {source: len({row.run for row in rows if row.run.source == source}) for source in SOURCES}
    print("\nReplayed: " + ", ".join(f"{source} {n} runs" for source, n in of_source.items()) + ".")
    print("\nLeft out.\n\n| truth | LLM | GPU | runs | why |\n|---|---|---|---|---|")
    counted = Counter((each.run.source, each.run.llm, each.run.gpu, each.why) for each in left_out)
    for (source, llm, gpu, why), n in sorted(counted.items()):
        print(f"| {source} | {llm} | {gpu} | {n} | {why} |")


def print_inside(rows: Sequence[Row]) -> None:
    """Prints by LLM and GPU the mean error, and the shares of measurements inside, below and above the
    spread.
    """
    print("\nBy LLM and GPU: mean error; inside the spread / shorter / longer than it says, in %.\n")
    print("| truth | LLM | GPU | step times | measured | TTFT | TPOT or ITL |\n|---|---|---|---|---|---|---|")
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if row.run.regime not in NOT_STEPS and row.bounds is not None:
            key = (row.run.source, row.run.llm.split("/")[-1], row.run.gpu, row.basis)
            groups.setdefault(key, []).append(row)
    for key, group in sorted(groups.items()):
        cells, most = [], 0
        for quantity in ("ttft", "tpot"):
            of_quantity = counted(group, quantity)
            most = max(most, len(of_quantity))
            cells.append(_inside_cell(of_quantity))
        print(f"| {' | '.join(key)} | {most} | {' | '.join(cells)} |")


# Bounds of a 99th percentile that are more times apart are those of requests that queue at one end of the
# spread alone. Others are up to 3 times apart in the open loops of inference-perf, and up to 10 in the closed
# loops of GLM-5, whose requests always queue.
LIMIT_RATIO = 10.0


def at_limit(rows: Sequence[Row]) -> list[Row]:
    """The 99th percentiles of TTFT that a limit (seats, KV cache) decides: at one end of the spread of step
    times requests wait, at the other they do not. Whatever was measured plays no part.
    """
    return [
        row
        for row in rows
        if (row.quantity, row.statistic) == ("ttft", "p99")
        and row.bounds is not None
        and max(row.bounds) > LIMIT_RATIO * min(row.bounds)
    ]


def print_at_limit(rows: Sequence[Row]) -> None:
    """A line for each figure of `at_limit`, and the error of all other such figures of its source."""
    if not (limited_rows := at_limit(rows)):
        return
    print("\n99th percentiles of TTFT that a limit decides, with their bounds [s]:\n")
    print(
        "| truth | LLM | GPU | case | predicted | from | to | measured |\n|---|---|---|---|---|---|---|---|"
    )
    for row in limited_rows:
        assert row.bounds is not None
        values = (row.predicted, *row.bounds, row.measured)
        cells = " | ".join(f"{value:.3g}" for value in values)
        print(
            f"| {row.run.source} | {row.run.llm.split('/')[-1]} | {row.run.gpu} | {row.run.case} | {cells} |"
        )
    for source in dict.fromkeys(row.run.source for row in limited_rows):
        others = [
            abs(row.error_frac)
            for row in rows
            if row.run.source == source
            and (row.quantity, row.statistic) == ("ttft", "p99")
            and row not in limited_rows
        ]
        error = f"{100 * np.mean(others):.1f} %" if others else "-"
        print(f"\n{source}: the {len(others)} others are {error} off.")


def _inside_cell(rows: Sequence[Row]) -> str:
    """Their mean error, and the shares of measurements inside, below and above the spread [%]."""
    if not rows:
        return "-"
    shorter = sum(row.bounds is not None and row.measured < min(row.bounds) for row in rows)
    within = sum(row.is_inside for row in rows)
    shares = [100 * n / len(rows) for n in (within, shorter, len(rows) - within - shorter)]
    error = 100 * np.mean([abs(row.error_frac) for row in rows])
    return f"{error:.0f}; {' / '.join(f'{share:.0f}' for share in shares)}"


def _runs(runs: set[Run]) -> str:
    """How many runs there are, and how many of each regime."""
    regimes = Counter(run.regime for run in runs if run.regime)
    return f"{len(runs)}" + "".join(f", {n} {regime}" for regime, n in sorted(regimes.items()))


def _cell(rows: Sequence[Row], quantity: str) -> str:
    """The mean size of the errors of each statistic, and in brackets the signed mean of the first [%]."""
    errors = [
        [row.error_frac for row in rows if (row.quantity, row.statistic) == (quantity, name)]
        for name in QUANTILES
    ]
    measured = [each for each in errors if each]
    if not measured:
        return "-"
    sizes = [f"{100 * np.abs(each).mean():.0f}" if each else "-" for each in errors]
    shown = sizes if len(measured) > 1 else [size for size in sizes if size != "-"]
    return f"{' / '.join(shown)} ({100 * np.mean(measured[0]):+.0f})"


SOURCES = ("inference-perf", "ml-energy", "llmservingsim", "inferencex", "llm-d", "silicon-sample", "sglang")


def found(folder: Path, engines: Engines, only: str | None = None) -> Found:
    """The figures of every run in `folder`, and in aiconfigurator-core if it is installed; of one source with
    `only`.
    """
    if only in (None, "inference-perf"):
        for path in sorted(folder.rglob("*inference_perf*.json")):
            yield from inference_perf(path, engines)
    if only in (None, "ml-energy"):
        lengths: dict[str, Any] = {}
        for path in sorted(folder.rglob("*output_lengths*.json")):
            lengths |= json.loads(path.read_text())
        for path in sorted(folder.rglob("*ml_energy*.jsonl")):
            yield from ml_energy(path, lengths, engines)
    if only in (None, "llmservingsim"):
        yield from request_logs(folder, engines)
    if only in (None, "inferencex"):
        for path in sorted(folder.rglob("*inferencex*.jsonl")):
            yield from inferencex(path, engines)
    if only in (None, "llm-d"):
        for path in sorted(folder.rglob("*llmd*.jsonl")):
            yield from llmd(path, engines)
    if only is None:
        yield from unread(folder)
    backends = [backend for backend, (source, _) in BACKENDS.items() if only in (None, source)]
    if backends and (wheel := _wheel()) is not None:
        yield from silicon_sample(wheel / "systems" / "silicon_sample.csv", engines, backends)


def replayed(folder: Path, engines: Engines, only: str | None = None) -> tuple[list[Row], list[LeftOut]]:
    """Every figure of every run, with the bounds that the spread of step times gives it; and what is left
    out.

    A prediction is simulated five times: with median step times, and with prefills, then decodes, at either
    end of their spread. The errors of prefills and decodes are independent, so on each side of the prediction
    the squares of the two changes, as logarithms, add up.
    """
    ends = [(z, 0.0) for z in (INTERVAL_SIGMAS, -INTERVAL_SIGMAS)]
    ends += [(0.0, z) for z in (INTERVAL_SIGMAS, -INTERVAL_SIGMAS)]
    nominal, *moved = (list(found(folder, replace(engines, z=z), only)) for z in (None, *ends))
    rows = []
    for row, *others in zip(nominal, *moved, strict=True):
        if isinstance(row, Row):
            moved_to = [each.predicted for each in others if isinstance(each, Row)]
            rows.append(replace(row, bounds=bounds_of(row.predicted, moved_to)))
    return rows, [each for each in nominal if isinstance(each, LeftOut)]


def bounds_of(predicted: float, moved_to: Sequence[float]) -> tuple[float, float]:
    """The bounds of a prediction that becomes each of `moved_to` where one kind of step is at an end of its
    spread.
    """
    logs = [math.log(each / predicted) for each in moved_to]
    down, up = (math.hypot(*(max(sign * each, 0.0) for each in logs)) for sign in (-1, 1))
    return predicted * math.exp(-down), predicted * math.exp(up)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predicted against measured, on published runs.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", choices=SOURCES)
    parser.add_argument("--catalog", type=Path, help="a catalog directory in place of the shipped one")
    parser.add_argument(
        "--engine",
        choices=("runs", "none"),
        default="runs",
        help="runs (default): the engine that ran; none: step times alone",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="of silicon-sample every N-th point of a campaign"
    )
    parser.add_argument("--json", action="store_true", help="every row, as one JSON object")
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    engines = Engines(read_catalog(args.catalog), args.engine == "runs", every=max(args.every, 1))
    rows, left_out = replayed(args.folder, engines, args.only)
    if not rows and not left_out:
        print(f"{args.folder}: no run of a known form; see --help", file=sys.stderr)
        return 2
    bounds = judged(rows, left_out)
    if args.json:
        document = {
            "rows": [row.document() for row in rows],
            "share_left_out": share_left_out(rows, left_out),
            "left_out": [asdict(each.run) | {"why": each.why} for each in left_out],
            "bounds": bounds,
            "inside": inside(rows),
        }
        print(json.dumps(document, indent=1))
    else:
        print_page(rows, left_out, bounds)
    return 0 if all(each["holds"] for each in (*bounds, *inside(rows))) else 1


if __name__ == "__main__":
    sys.exit(main())
