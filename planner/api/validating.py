"""The function `validate` runs a plan's traffic on real engines, started on this machine or at an endpoint,
and compares the measured latencies with the plan's predictions.

planner.runtime is imported within functions, because its packages (aiohttp, prometheus-client) are installed
only where engines are run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import numpy as np
import pandas as pd

from planner.api import inputs
from planner.api.results import Result
from planner.documents.catalog import CatalogLike, read_catalog
from planner.documents.fleet_file import max_model_len_of
from planner.documents.slo import parse_slo
from planner.domain import Slo
from planner.errors import InputError
from planner.files.checked_files import check_output_directory, read_yaml
from planner.files.document_values import show_value
from planner.fleet import Fleet
from planner.manifests.engine_command import why_not_started
from planner.traffic.classes import check_classes
from planner.traffic.trace import Trace, spread_stamps

if TYPE_CHECKING:
    from planner.runtime.analysis import EngineKind, Validation, ValidationSetup
    from planner.runtime.endpoint import Endpoint
    from planner.runtime.prediction_errors import Tolerances


class ValidationKeys(TypedDict, total=False):
    """How engines are started, and what counts as agreement."""

    # "vllm", or "rehearsal": processes without an LLM, whose steps only take as long as the fit predicts.
    engine: str
    weights: str  # Weights are "dummy" or "real".
    config: Path | None  # A config.json to serve in place of the plan's LLM, with dummy weights.
    is_slice: bool  # Whether only one worker of each type is run, with its share of the traffic.
    # By how much the median and the 90th percentile of a latency may be off; None: the usual tolerances.
    tolerance_p50_frac: float | None
    tolerance_p90_frac: float | None
    png: bool  # Whether the report's charts are written as pictures too.
    progress: Callable[[str], None]  # Called with the name of each stage.
    url: str | None  # An OpenAI-compatible endpoint that others run, in place of engines here.
    api_key_env: str | None  # The environment variable with the endpoint's key.
    model: str | None  # The endpoint's name of the LLM, where it is not the plan's.
    max_usd: float | None  # What all requests may cost, at `usd_per_million`.
    # Prices of a million prompt tokens and of a million output tokens.
    usd_per_million: tuple[float, float] | None
    max_requests: int | None  # The count includes probes and warm-up.
    max_failed_frac: float  # The run ends if a larger share of the last requests fails.
    timeout_s: float  # The limit for one request.
    prometheus: Sequence[str]  # Addresses of engines' /metrics, or of Prometheus servers that scrape them.


# The keys of ValidationKeys that are refused without `url`, because they are about an endpoint.
OF_ENDPOINTS = (
    "api_key_env",
    "model",
    "max_usd",
    "usd_per_million",
    "max_requests",
    "max_failed_frac",
    "timeout_s",
    "prometheus",
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ValidationResult(Result):
    """Measured latencies beside the predicted ones; the files of the run are in the folder `out`."""

    validation: Validation

    @property
    def agrees(self) -> bool:
        """Whether every error of the prediction is within its tolerance."""
        return self.validation.comparison.agrees

    @property
    def slo_holds(self) -> bool | None:
        """Whether the engines kept the SLO; None where none was given."""
        return self.validation.slo_holds if self.validation.setup.slo.limits else None

    def headline(self) -> str:
        return str(self.to_dict()["verdict"])

    def sentences(self) -> list[str]:
        document = self.to_dict()
        return [f"{document['compared']} of {document['requests']} requests, {document['times']}"]

    def to_dict(self) -> dict[str, Any]:
        """What validation.json holds, and `plan validate --json` prints."""
        from planner.runtime.validation_document import validation_document

        return validation_document(self.validation)

    def to_frame(self) -> pd.DataFrame:
        """The predicted and the measured value of every compared figure, a row each."""
        from planner.runtime.validation_document import error_rows

        return pd.DataFrame(error_rows(self.validation))


def validate(
    plan: str | Path,
    out: str | Path,
    trace: inputs.TraceLike | None = None,
    slo: inputs.SloLike = None,
    *,
    traffic: inputs.TrafficLike = None,
    catalog: CatalogLike = None,
    seed: int = 0,
    **how: Unpack[ValidationKeys],
) -> ValidationResult:
    """Start a plan on vLLM engines here, replay its traffic, and write into `out` how far off the plan was.

    Without `trace` and `slo` these are the plan's own; `traffic` as for `simulate`, by default all of it. An
    interrupted run goes on in the same folder. With `url` no engine is started: the traffic goes to that
    OpenAI-compatible endpoint, and the client's clock is compared. Raises InputError for what cannot be run
    here, EndpointError for an endpoint that cannot be measured.
    """
    need_aiohttp()
    from planner.runtime.analysis import WholePlan
    from planner.runtime.validate import slice_plan
    from planner.runtime.validate import validate as run

    seed = inputs.checked_seed(seed)
    check_output_directory(Path(out))
    endpoint = _endpoint(how)
    catalog_rows, file = read_catalog(catalog), inputs.plan_file(plan)
    fleet = inputs.read_fleet(file, catalog_rows, slo=slo)
    given_slo, rate_request = inputs.limits_and_rate(
        slo, catalog_rows, traffic={"window": "whole"} if traffic is None else traffic, command="validate"
    )
    if trace is None:
        whole_trace = inputs.read_trace(traffic_beside_plan(file))
    else:
        whole_trace = inputs.read_trace(trace, log_options=rate_request.log_options)
    requests = rate_request.apply_to(spread_stamps(whole_trace, seed=seed), seed=seed)
    slo_to_keep = given_slo or own_slo(file)
    check_classes(slo_to_keep, requests)
    most_tokens = _most_tokens(fleet, requests)
    context_tokens = max_model_len_of(read_yaml(file), file) or most_tokens
    if most_tokens > context_tokens and how.get("engine") != "rehearsal" and endpoint is None:
        raise InputError(
            f"{requests.name}: has a request of {most_tokens:,} tokens, and the engines of {file} start with "
            f"max_model_len: {context_tokens:,}; leave it out, or raise that key"
        )
    whole_plan = None
    notes: tuple[str, ...] = ()
    if slo_to_keep.guarantees:
        notes = ("Not measured: shares of service of tenants, as engines do not say when a request began.",)
    if slo_to_keep.every_s is not None:
        notes += ("Not judged: the SLO in every window of it; it is judged over the whole run.",)
    if how.get("engine") != "rehearsal" and endpoint is None and (why := why_not_started(fleet)):
        raise InputError(f"{file}: {why}; rehearse it with engine rehearsal")
    if how.get("engine") == "rehearsal" and fleet.engine is not None:
        notes += (f"Rehearsed without what {fleet.engine.title} adds to the steps.",)
        fleet = fleet.without_engine()
    if how.get("is_slice"):
        whole_plan = WholePlan(fleet, requests)
        fleet, requests, note = slice_plan(fleet, requests)
        notes += (f"Validated was a {note}.",)
    setup = validation_setup(
        how,
        fleet=fleet,
        trace=requests,
        slo=slo_to_keep,
        max_model_len=context_tokens,
        seed=seed,
        notes=notes,
        plan=whole_plan,
        endpoint=endpoint,
    )
    validation = run(
        setup,
        Path(out),
        tolerances=_tolerances(how),
        progress=how.get("progress", lambda _: None),
        png=how.get("png", False),
    )
    return ValidationResult(validation)


def _most_tokens(fleet: Fleet, requests: Trace) -> int:
    """The prompt and output tokens of the longest request. Raises InputError if it fits into no worker's KV
    cache, because engines would not start, or would never finish it.
    """
    most_tokens = int(np.max(requests.input_tokens + requests.output_tokens))
    kv_tokens = max(pool.type.kv_tokens for pool in fleet.running_pools)
    if most_tokens > kv_tokens:
        raise InputError(
            f"{requests.name}: has a request of {most_tokens:,} tokens, and a worker of this fleet has room "
            f"for {kv_tokens:,} at most: leave it out, or validate a plan that was made for it"
        )
    return most_tokens


def need_aiohttp() -> None:
    """Raise InputError where the packages that talk to engines are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("aiohttp", "prometheus_client")):
        raise InputError("real engines need aiohttp and prometheus-client: pip install 'fleetplan[runtime]'")


def traffic_beside_plan(file: Path) -> Path:
    """The path of the traffic in the folder of a plan. Raises InputError if there is none.

    traffic.jsonl is preferred to requests.csv, which has neither sessions nor shared prefixes.
    """
    places = [file.parent / name for name in ("traffic.jsonl", "requests.csv")]
    if (traffic_path := next((path for path in places if path.exists()), None)) is None:
        raise InputError(f"--trace: none was given, and there is no {places[1]}; give the traffic to replay")
    return traffic_path


def own_slo(file: Path) -> Slo:
    """The SLO in a plan.yaml; for a fleet.yaml an SLO without limits."""
    own = read_yaml(file).get("slo")
    return Slo(()) if own is None else parse_slo(own, where=f"{file}: slo")


def validation_setup(how: ValidationKeys, **values: Any) -> ValidationSetup:
    """The setup of a run with the engine, weights and config of `how`. `values` are the other fields of
    `analysis.ValidationSetup`. Raises InputError for options that contradict each other.
    """
    from planner.runtime.analysis import ValidationSetup

    engine, weights, config = how.get("engine", "vllm"), how.get("weights", "dummy"), how.get("config")
    if values.get("endpoint") is not None:
        for name, value, default in (("engine", engine, "vllm"), ("weights", weights, "dummy")):
            if value != default:
                raise InputError(f"--{name} {value}: --url measures engines that run already; leave it out")
        if config is not None:
            raise InputError("--config: --url measures engines that run already; leave it out")
        return ValidationSetup(engine="endpoint", **values)
    if engine not in ("vllm", "rehearsal"):
        raise InputError(f"--engine: expected vllm or rehearsal, found {engine!r}")
    if weights not in ("dummy", "real"):
        raise InputError(f"--weights: expected dummy or real, found {weights!r}")
    if config is not None and weights == "real":
        raise InputError("--config serves dummy weights; leave out --weights real")
    return ValidationSetup(
        engine=cast("EngineKind", engine), real_weights=weights == "real", config=config, **values
    )


def _endpoint(how: ValidationKeys) -> Endpoint | None:
    """The endpoint at `url`, with the API key from the environment; None without `url`. Raises InputError for
    an option of endpoints without `url`, and for a missing environment variable.
    """
    from planner.runtime.endpoint import MOST_FAILED_FRAC, TIMEOUT_S, Endpoint

    url = how.get("url")
    if url is None:
        for name in OF_ENDPOINTS:
            if how.get(name) not in (None, (), []):
                raise InputError(f"{name}: is about an endpoint; name it with url (--url)")
        return None
    key_name, key = how.get("api_key_env"), ""
    if key_name is not None and not (key := os.environ.get(key_name, "").strip()):
        raise InputError(
            f"--api-key-env: there is no environment variable {show_value(key_name)}, or it is empty"
        )
    return Endpoint(
        url,
        key,
        key_name or "",
        how.get("model"),
        how.get("max_usd"),
        how.get("usd_per_million"),
        how.get("max_requests"),
        tuple(how.get("prometheus") or ()),
        how.get("timeout_s") or TIMEOUT_S,
        MOST_FAILED_FRAC if (failed_frac := how.get("max_failed_frac")) is None else failed_frac,
    )


def _tolerances(how: ValidationKeys) -> Tolerances:
    """How far off a prediction may be: as the user says, or else by default. Defaults are wider for engines
    on this machine's CPU, because router and client take cores from them.
    """
    from planner.runtime.prediction_errors import CPU_TOLERANCES, Tolerances
    from profiling.vllm_install import is_cpu_build

    is_cpu = how.get("engine") == "rehearsal" or (how.get("url") is None and is_cpu_build())
    defaults = CPU_TOLERANCES if is_cpu else Tolerances()
    p50_frac, p90_frac = how.get("tolerance_p50_frac"), how.get("tolerance_p90_frac")
    return Tolerances(
        defaults.p50_frac if p50_frac is None else p50_frac,
        defaults.p90_frac if p90_frac is None else p90_frac,
        defaults.attainment_frac,
    )
