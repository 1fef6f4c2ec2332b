"""From the inputs of a page (a form) to slo.yaml and the command that gives the same plan, and back.

A form is a mapping of plain values, one per input. It is kept with a session and with every plan. Keys of
slo.yaml that have no input, and values that an input cannot hold, are in `form["more"]`, so that a question
passes through the page without loss. Here `document` makes slo.yaml of a form, and `form_of_document` a form
of slo.yaml.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner.documents.catalog import Catalog
from planner.documents.policy_choices import ANY
from planner.documents.safety import KEPT_IN_FRAC
from planner.documents.slo import SloPreset, slo_document
from planner.documents.task import MOST_INTERRUPTIONS_PER_H, PlanQuestion, parse_task
from planner.domain import Slo
from planner.errors import InputError, PlannerError
from planner.files.checked_files import is_path
from planner.files.document_values import read_share
from planner.fleet import Policies
from planner.search.oracle.work_clock import USUAL_LIMIT_S
from planner.slo_metrics import METRICS
from planner.units import parse_quantity, percentile_name, read_tokens, shortest_digits, show_s
from ui.store import SAMPLES

Form = dict[str, Any]
# The metrics with an input; limits of the others are written in slo.yaml's text.
INPUT_METRICS = {key: row for key, row in METRICS.items() if not row.is_of_agents}
Fields = Mapping[str, Any]  # Some values of a form, or of a row of its table of GPUs.

OWN_LIMITS = "own limits"  # Chosen in place of a preset: the limits are typed in.
# What the inputs of percentiles and of windows offer.
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9", "p100")
WINDOWS = ("whole", "busiest 10 min", "busiest 1 h", "first 10 min", "first 1 h")
WORKERS, NODES = "workers", "nodes"  # What the number `spare` counts.
SAMPLE, UPLOAD, DESCRIBED = "sample", "upload", "describe"
SOURCES = (SAMPLE, UPLOAD, DESCRIBED)
"""Where requests come from: a sample trace, an uploaded one, or a description in slo.yaml."""
OWN_LENGTHS = "own lengths"  # Chosen in place of a task of the catalog: the lengths are typed in.
LENGTHS = ("input", "output")
PROFILES: dict[str, dict[str, Any]] = {
    "on paper": {"kept_in": None, "spare": 0},
    "production": {"kept_in": 100 * KEPT_IN_FRAC, "spare": 0},
    "high availability": {"kept_in": 100 * KEPT_IN_FRAC, "spare": 1, "spare_of": NODES},
}
"""Safety profiles. Such a fleet keeps the SLO on the traffic as written, in most scenarios, or also after the
loss of a node.
"""
OWN_PROFILE = "own"  # The inputs of safety are those of no profile.
PRICES = {
    "USD/h": "on_demand",
    "reserved": "reserved",
    "spot": "spot",
    "interruptions/h": "spot_interruptions_per_h",
}
"""The columns of prices, and what slo.yaml calls them."""
INPUT_KEYS: dict[str, Any] = {
    "llm": None,
    "preset": None,
    "slo": None,
    "objective": None,
    "spare": None,
    "traffic": {"rate": None, "scale": None, "window": None, "map": None},
    "fleet": {
        "gpus": None,
        "owned": None,
        "prices": None,
        "pp": None,
        "host_overhead": None,
        "network": {"bandwidth": None},
    },
    "policies": {"queue": None, "longest_wait": None},
    "limits": {"power": None, "cost": None, "gpus": None},
    "robust": {"step_times": None, "traffic": None},
    "safety": {"kept_in": None, "growth": None},
}
"""The keys of slo.yaml that have inputs, nested as in slo.yaml; None where all keys inside have inputs."""
DESCRIBED_INPUT_KEYS = {
    "task": None,
    "duration": None,
    "input": None,
    "output": None,
    "burstiness": {"cv": None},
}
"""The keys of `traffic` that have inputs too if it describes requests."""


def sample_form(catalog: Catalog) -> Form:
    """The inputs of the page Plan as in examples/slo.yaml."""
    stock = {"a100-80g": 64, "h100-80g": 32, "h100-80g@350W": 32}
    form: Form = {
        "source": SAMPLE,
        "trace": f"{SAMPLES}/azure-conversation-sample.csv",
        "map": {},
        "task": OWN_LENGTHS,
        "duration_min": None,
        "input_mean": 1500.0,
        "input_p95": None,
        "output_mean": 300.0,
        "output_p95": None,
        "burst_cv": None,
        "rate": 20.0,
        "scale": "superpose",
        "window": "whole",
        "llm": catalog.llm("llama-3.1-70b").name,
        "preset": OWN_LIMITS,
        "attainment": None,
        "objective": "cost",
        "power_kw": 80.0,
        "cost": 500.0,
        "gpu_limit": None,
        "kept_in": 100 * KEPT_IN_FRAC,
        "growth": 0.0,
        "spare": 0,
        "spare_of": WORKERS,
        "robust_steps": 0.0,
        "robust_traffic": 0.0,
        "queues": [Policies().queue],
        "longest_wait": None,
        "stages": [1],
        "bandwidth": 50.0,
        "host_overhead": 0.0,
        "seed": 0,
        "time_limit": int(USUAL_LIMIT_S),
        "more": {},
    }
    for metric in INPUT_METRICS:
        form[f"{metric}_percentile"] = "p90" if metric == "ttft" else "p99"
        form[f"{metric}_ms"] = {"ttft": 2000.0, "tbt": 200.0}.get(metric)
    return form | {"gpus": gpu_rows({}, catalog, use=stock)}


def restore_form(stored: Mapping[str, Any], catalog: Catalog) -> Form:
    """A stored form, perhaps of an earlier version or another catalog, with the inputs of this version."""
    sample = sample_form(catalog)
    form = sample | {key: stored[key] for key in sample if key in stored}
    # Earlier versions kept no source; there every trace but the samples was uploaded.
    if "source" not in stored and not form["trace"].startswith(f"{SAMPLES}/"):
        form["source"] = UPLOAD
    if form["preset"] not in catalog.slos:
        form["preset"] = OWN_LIMITS
    # Earlier versions kept NaN for an empty figure of a GPU.
    rows = {
        row["GPU"]: {
            column: None if isinstance(value, float) and math.isnan(value) else value
            for column, value in row.items()
        }
        for row in form["gpus"]
    }
    unused = gpu_rows({}, catalog, use={})
    return form | {"gpus": [row | rows.get(row["GPU"], {}) for row in unused]}


def gpu_rows(prices: Mapping[str, Fields], catalog: Catalog, *, use: Mapping[str, int | None]) -> list[Form]:
    """The table of GPUs; `use` has the GPUs that may be used, with their stock (None: any number).

    A power-capped GPU costs as much as its uncapped row, unless `prices` has a price for it.
    """
    rows = []
    for name, gpu in catalog.gpus.items():
        of_base = prices.get(gpu.base, {})
        terms = dict(prices.get(name, of_base))
        if not _firm_terms(terms):
            terms |= _firm_terms(of_base) or {"on_demand": gpu.price_usd_per_h}
        columns = {column: terms.get(key) for column, key in PRICES.items()}
        rows.append({"use": name in use, "GPU": name, "stock": use.get(name), "owned": None, **columns})
    return rows


def _firm_terms(terms: Fields) -> dict[str, Any]:
    """The firm ones of these prices: at them the provider cannot take GPUs back, as it may at spot prices."""
    return {key: terms[key] for key in ("on_demand", "reserved") if key in terms}


def safety_profile(form: Mapping[str, Any]) -> str:
    """The safety profile whose values the inputs have, or `OWN_PROFILE`."""
    if form["growth"]:  # No profile has growth.
        return OWN_PROFILE
    equal = (name for name, inputs in PROFILES.items() if all(form[k] == v for k, v in inputs.items()))
    return next(equal, OWN_PROFILE)


def parse_map(written: str) -> dict[str, str]:
    """The roles and columns in a text like "arrival=ts:ms,input=prompt_tokens"."""
    pairs = (part.partition("=") for part in written.split(",") if "=" in part)
    return {role.strip(): name.strip() for role, _, name in pairs}


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each key of slo.yaml in which two questions differ: "traffic.rate: 20, now 30"."""
    old, new = _texts_by_key(before), _texts_by_key(after)
    return [
        f"{key}: {old.get(key, 'not asked')}, now {new.get(key, 'not asked')}"
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def _texts_by_key(document: Mapping[str, Any]) -> dict[str, str]:
    """The texts of all values of a question: {"traffic.rate": "20"}."""
    lines = (line.partition(": ") for line in leaf_texts(document))
    return {key: text for key, _, text in lines}


def llm_name(llm: str) -> str:
    """An LLM as the page names it: its name in the catalog, or the file name of a path."""
    return Path(llm).name if is_path(llm) else llm


def slo_summary(form: Mapping[str, Any]) -> str:
    """The preset and the limits of the inputs, in one line."""
    limits = [
        f"{row.abbreviation} {form[f'{metric}_percentile']} ≤ {show_s(form[f'{metric}_ms'] / 1e3)}"
        for metric, row in INPUT_METRICS.items()
        if form[f"{metric}_ms"] is not None
    ]
    if form["attainment"] is not None:
        limits.append(f"{form['attainment']:g} % of requests keep all limits")
    preset = f"Preset {form['preset']}. " if form["preset"] != OWN_LIMITS else ""
    return f"{preset}{', '.join(limits) or 'No limit in seconds'}."


def form_of_preset(preset: SloPreset) -> Form | None:
    """A preset's limits as inputs; None if they are relative, or if inputs cannot hold them, such as two
    limits on one metric.
    """
    if preset.slowdowns is not None:
        return None
    form, more = _form_of_slo(preset.slo)
    return None if more else form


def form_of_document(document: Mapping[str, Any], form: Form, catalog: Catalog) -> Form:
    """The form of a slo.yaml; trace, seed and time limit stay those of `form`. Raises what `parse_task`
    raises.
    """
    task = parse_task(document, catalog)
    is_described = task.described is not None
    traffic = document.get("traffic") or {}
    traffic_keys = INPUT_KEYS["traffic"] | (DESCRIBED_INPUT_KEYS if is_described else {})
    more = _keys_without_input(document, INPUT_KEYS | {"traffic": traffic_keys})
    limits, more_limits = _form_of_slo(task.slo) if task.slowdowns is None else ({}, {})
    prices, more_prices = _parse_prices((document.get("fleet") or {}).get("prices") or {}, catalog)
    described, more_described = _form_of_described(traffic) if is_described else ({}, {})
    queues, more_policies = _form_of_queues(document.get("policies") or {}, task)
    more_fleet = _without_empty({"prices": more_prices})
    unheld = {"slo": more_limits, "fleet": more_fleet, "traffic": more_described, "policies": more_policies}
    more = merged(more, _without_empty(unheld))  # What inputs of these keys cannot hold.
    if not is_described and form["source"] == DESCRIBED:
        described = {"source": SAMPLE if form["trace"].startswith(f"{SAMPLES}/") else UPLOAD}
    owned = {catalog.gpu(str(name)).name: count for name, count in task.owned.items()}
    longest_wait_s = task.policies.longest_wait_s
    states_bandwidth = "bandwidth" in ((document.get("fleet") or {}).get("network") or {})
    return (
        form
        | limits
        | described
        | {
            "llm": document["llm"] if is_path(document["llm"]) else task.llm,
            "preset": task.preset or OWN_LIMITS,
            "rate": described.get("rate", task.rate_rps),
            "map": dict(traffic.get("map") or {}),
            "scale": task.scale,
            "window": task.window or WINDOWS[0],
            "gpus": [
                row | {"owned": owned.get(row["GPU"])} for row in gpu_rows(prices, catalog, use=task.stock)
            ],
            "objective": task.objective,
            "power_kw": converted(task.power_limit_w, 1e-3),
            "cost": task.cost_limit_usd_per_h,
            "gpu_limit": task.gpu_limit,
            "kept_in": None if task.safety is None else converted(task.safety.kept_in_frac, 100),
            "growth": 0.0 if task.safety is None else converted(task.safety.growth_frac, 100),
            "spare": task.spare_workers or task.spare_nodes,
            "spare_of": NODES if task.spare_nodes else WORKERS,
            "robust_steps": converted(task.robust.step_times_frac, 100),
            "robust_traffic": converted(task.robust.traffic_frac, 100),
            "queues": queues,
            "stages": list(task.stages),
            "longest_wait": None if not queues or math.isinf(longest_wait_s) else longest_wait_s,
            "bandwidth": converted(task.network.bandwidth_bytes_per_s, 1e-9) if states_bandwidth else None,
            "host_overhead": converted(task.host_overhead_s, 1e3),
            "more": more,
        }
    )


def _form_of_queues(policies: Mapping[str, Any], task: PlanQuestion) -> tuple[list[str], dict[str, Any]]:
    """The queues for the input; and, as no input can hold them, the keys of `queue: any`."""
    queue = policies.get("queue")
    if queue == ANY:
        return [], {key: policies[key] for key in ("queue", "longest_wait") if key in policies}
    if queue is None:
        # Without a key the plan takes the default queue. Where the SLO has classes the plan chooses one, and
        # the input has none.
        return [] if task.policies.is_queue_assumed else list(task.policies.queues), {}
    return [queue] if isinstance(queue, str) else list(queue), {}


def _default_stock(
    llm: str, more_fleet: Fields, prices: Fields, catalog: Catalog
) -> Mapping[str, int | None]:
    """The stock that `parse_task` gives a question whose section `fleet` names no GPU. Beside prices, other
    keys of it choose GPUs: `unchecked`, `price_of`.
    """
    try:
        fleet = merged(more_fleet, {"prices": prices})
        return parse_task({"llm": llm, "slo": {"ttft": {"p90": "1 s"}}, "fleet": fleet}, catalog).stock
    except PlannerError:  # `parse_task` of the whole question reports it.
        return {}


def document(form: Mapping[str, Any], catalog: Catalog) -> dict[str, Any]:
    """The slo.yaml of a form. Empty inputs are left out; `parse_task` refuses values that make no sense.

    Raises InputError where an input and `more` have different values of one key.
    """
    used = [row for row in form["gpus"] if row["use"]]
    traffic = _described_section(form) if form["source"] == DESCRIBED else _trace_section(form)
    if form["window"] != WINDOWS[0]:
        traffic["window"] = form["window"]
    limits = {
        "power": _with_unit(form["power_kw"], "kW"),
        "cost": _with_unit(form["cost"], "usd/h"),
        "gpus": form["gpu_limit"],
    }
    fleet: dict[str, Any] = {}
    prices = _prices_section(used, catalog)
    default_stock = _default_stock(form["llm"], form["more"].get("fleet") or {}, prices, catalog)
    if {row["GPU"]: row["stock"] for row in used} != default_stock:  # Otherwise no GPU need be named.
        fleet["gpus"] = {row["GPU"]: None if row["stock"] is None else int(row["stock"]) for row in used}
    if owned := {row["GPU"]: int(row["owned"]) for row in used if row.get("owned")}:
        fleet["owned"] = owned
    if prices:
        fleet["prices"] = prices
    if form["stages"] not in ([1], []):  # One stage is the default.
        fleet["pp"] = form["stages"]
    if form["bandwidth"] is not None:  # A plan says whether a link was stated.
        fleet["network"] = {"bandwidth": _with_unit(form["bandwidth"], "GB/s")}
    if form["host_overhead"]:
        fleet["host_overhead"] = _with_unit(form["host_overhead"], "ms")
    question: dict[str, Any] = {"llm": form["llm"]}
    preset = catalog.slos.get(form["preset"])
    if preset is not None and _is_preset(preset, form):
        question["preset"] = preset.name
    else:
        question["slo"] = _slo_section(form)
    question |= {"traffic": _without_empty(traffic), "fleet": fleet}
    has_classes = "classes" in (form["more"].get("slo") or {})
    # The input of a question without `policies: queue`: if it has classes the plan chooses a queue, and the
    # input is empty; else it has the default queue, or is empty too.
    usual_queues: list[list[str]] = [[]] if has_classes else [[Policies().queue], []]
    policies = {"queue": form["queues"] if form["queues"] not in usual_queues else None}
    if policies["queue"]:  # In the default queue no prompt overtakes another, so no wait need be limited.
        policies["longest_wait"] = _with_unit(form["longest_wait"], "s")
    robust = {
        "step_times": _with_unit(form["robust_steps"] or None, "%"),
        "traffic": _with_unit(form["robust_traffic"] or None, "%"),
    }
    question |= _without_empty({"policies": _without_empty(policies)}) | {"objective": form["objective"]}
    question |= _without_empty({"limits": _without_empty(limits), "robust": _without_empty(robust)})
    question |= _without_empty({"safety": _safety_section(form)})
    if form["spare"]:
        question["spare"] = f"{form['spare']} {form['spare_of']}"
    return merged(question, form["more"])


def _trace_section(form: Mapping[str, Any]) -> dict[str, Any]:
    """The section `traffic` for a trace."""
    rate = None if form["objective"] == "throughput" else form["rate"]
    return {"rate": rate, "scale": form["scale"], "map": form["map"] or None}


def _described_section(form: Mapping[str, Any]) -> dict[str, Any]:
    """The section `traffic` of inputs that describe requests; keys without a value are None."""
    description: dict[str, Any] = {"rate": form["rate"]}
    description["task"] = form["task"] if form["task"] != OWN_LENGTHS else None
    description["duration"] = _with_unit(form["duration_min"], "min")
    for key in LENGTHS:
        mean, p95 = form[f"{key}_mean"], form[f"{key}_p95"]
        description[key] = mean if p95 is None else _without_empty({"mean": mean, "p95": p95})
    description["burstiness"] = _without_empty({"cv": form["burst_cv"]}) or None
    return description


def _form_of_described(traffic: Mapping[str, Any]) -> tuple[Form, dict[str, Any]]:
    """The inputs for a section `traffic` that describes requests, and the keys that have no input."""
    more: dict[str, Any] = {}
    form: Form = {"source": DESCRIBED, "rate": None, "task": traffic.get("task", OWN_LENGTHS)}
    rate = traffic.get("rate")  # Tenants that are described one by one have a rate each.
    if isinstance(rate, Mapping):
        more["rate"] = rate
    elif rate is not None:
        form["rate"] = parse_quantity(rate, "rps", where="slo.yaml: traffic: rate")
    duration = traffic.get("duration")
    form["duration_min"] = (
        None if duration is None else converted(parse_quantity(duration, "s", where="duration"), 1 / 60)
    )
    for key in LENGTHS:
        length = read_tokens(traffic.get(key))
        form |= {f"{key}_mean": None, f"{key}_p95": None}
        if isinstance(length, int | float):
            form[f"{key}_mean"] = float(length)
        elif isinstance(length, Mapping) and set(length) <= {"mean", "p95"} and "p95" in length:
            for name in ("mean", "p95"):
                form[f"{key}_{name}"] = None if length.get(name) is None else float(length[name])
        elif length is not None:
            more[key] = length
    burstiness = traffic.get("burstiness") or {}
    form["burst_cv"] = burstiness.get("cv")
    return form, more


def _safety_section(form: Mapping[str, Any]) -> Any:
    """The section `safety` of slo.yaml; None if the inputs have the default."""
    if form["kept_in"] is None:  # With `robust` a plan has no safety by default.
        return None if form["robust_steps"] or form["robust_traffic"] else "none"
    section = {
        "kept_in": form["kept_in"] / 100 if form["kept_in"] != 100 * KEPT_IN_FRAC else None,
        "growth": _with_unit(form["growth"] or None, "%"),
    }
    return _without_empty(section) or None


def command(form: Mapping[str, Any], catalog_folder: Path | None = None) -> str:
    """The command line that gives the same plan from slo.yaml and the trace."""
    words = ["plan", "--slo", "slo.yaml"]
    words += ["--trace", form["trace"].partition("/")[2]] if form["source"] != DESCRIBED else []
    words += ["-o", "out/"]
    words += ["--seed", str(form["seed"])] if form["seed"] else []
    words += ["--time-limit", str(form["time_limit"])] if form["time_limit"] != USUAL_LIMIT_S else []
    words += ["--catalog", str(catalog_folder)] if catalog_folder else []
    return shlex.join(words)


def merged(first: Mapping[str, Any], second: Mapping[str, Any], where: str = "slo.yaml") -> dict[str, Any]:
    """Two documents in one, section by section. Raises InputError where they differ in the value of a key;
    `where` is the path of these sections in slo.yaml.
    """
    both = dict(first)
    for key, value in second.items():
        here = f"{where}: {key}"
        if isinstance(both.get(key), Mapping) and isinstance(value, Mapping):
            both[key] = merged(both[key], value, here)
        elif both.setdefault(key, value) != value:
            raise InputError(
                f"{here}: an input says {both[key]!r}, slo.yaml says {value!r}; keep one of them"
            )
    return both


def leaf_texts(document: Mapping[str, Any], path: str = "") -> Iterable[str]:
    """Every key with its value, "fleet.network.latency: 1 ms", for people."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from leaf_texts(value, f"{path}{key}.")
        else:
            yield f"{path}{key}: {value}"


def _keys_without_input(document: Mapping[str, Any], input_keys: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a document whose keys are not in `input_keys`, a nested mapping like INPUT_KEYS."""
    more: dict[str, Any] = {}
    for key, value in document.items():
        if key not in input_keys:
            more[key] = value
        elif input_keys[key] is not None and isinstance(value, Mapping):
            more[key] = _keys_without_input(value, input_keys[key])
    return _without_empty(more)


def _form_of_slo(slo: Slo) -> tuple[Form, dict[str, Any]]:
    """The inputs for the first limit of each metric; and, as slo.yaml has them, the other limits, `every`,
    `classes` and `tenants`.
    """
    form: Form = {f"{metric}_ms": None for metric in INPUT_METRICS}
    more: dict[str, Any] = {} if slo.every_s is None else {"every": f"{shortest_digits(slo.every_s)} s"}
    more |= {key: value for key, value in slo_document(slo).items() if key in ("classes", "tenants")}
    for limit in slo.limits:
        if limit.selector is not None:
            continue
        name, ms = percentile_name(limit.percentile_frac), converted(limit.limit_s, 1e3)
        if limit.metric in INPUT_METRICS and form[f"{limit.metric}_ms"] is None:
            form |= {f"{limit.metric}_ms": ms, f"{limit.metric}_percentile": name}
        else:
            more.setdefault(limit.metric, {})[name] = _with_unit(ms, "ms")
    return form | {"attainment": converted(slo.attainment_frac, 100)}, more


def _is_preset(preset: SloPreset, form: Mapping[str, Any]) -> bool:
    """Whether the inputs have the preset's limits. True also for a preset whose limits no input can show."""
    return all(form[key] == value for key, value in (form_of_preset(preset) or {}).items())


def _slo_section(form: Mapping[str, Any]) -> dict[str, Any]:
    """The section `slo` of the inputs: a line for each metric that has a limit, and the attainment."""
    lines: dict[str, Any] = {
        metric: {form[f"{metric}_percentile"]: _with_unit(form[f"{metric}_ms"], "ms")}
        for metric in INPUT_METRICS
        if form[f"{metric}_ms"] is not None
    }
    if form["attainment"] is not None:
        lines["attainment"] = converted(form["attainment"], 1 / 100)
    return lines


def _parse_prices(given: Mapping[str, Any], catalog: Catalog) -> tuple[dict[str, Fields], dict[str, Fields]]:
    """The prices of slo.yaml by GPU: those that the table of GPUs shows, in numbers, and the others as they
    are written.
    """
    shown: dict[str, Fields] = {}
    more: dict[str, Fields] = {}
    interruptions = PRICES["interruptions/h"]
    for gpu, value in given.items():
        name = catalog.gpu(str(gpu)).name
        terms = value if isinstance(value, Mapping) else {"on_demand": value}
        shown[name] = {
            key: read_share(terms[key], key, most=MOST_INTERRUPTIONS_PER_H, bare=MOST_INTERRUPTIONS_PER_H)
            if key == interruptions
            else parse_quantity(terms[key], "usd_per_h", where=key)
            for key in PRICES.values()
            if key in terms
        }
        if others := {key: terms[key] for key in terms if key not in PRICES.values()}:
            more[name] = others
    return shown, more


def _prices_section(used: Iterable[Fields], catalog: Catalog) -> dict[str, Any]:
    """The section `prices`: of each GPU whose prices are not the usual ones. These are the catalog's, and for
    a capped GPU those of its uncapped row. A GPU with a spot price gets no firm price that is the usual one.
    """
    by_gpu: dict[str, dict[str, Any]] = {}
    has_usual_price = set[str]()  # GPUs with a spot price whose firm price is the usual one.
    # Uncapped rows come first, as the capped ones are compared with them.
    for row in sorted(used, key=lambda row: catalog.gpus[row["GPU"]].base != row["GPU"]):
        gpu = catalog.gpus[row["GPU"]]
        terms = {key: row[column] for column, key in PRICES.items() if row[column] is not None}
        if "on_demand" not in terms and "reserved" not in terms:
            terms["on_demand"] = gpu.price_usd_per_h
        usual_terms = by_gpu.get(gpu.base, {"on_demand": gpu.price_usd_per_h})
        if terms != usual_terms:
            by_gpu[gpu.name] = terms
            if "spot" in terms and _firm_terms(terms) == _firm_terms(usual_terms):
                has_usual_price.add(gpu.name)
    prices: dict[str, Any] = {}
    for name, terms in by_gpu.items():
        texts = {
            key: value if key == PRICES["interruptions/h"] else _with_unit(value, "usd/h")
            for key, value in terms.items()
            if name not in has_usual_price or key not in ("on_demand", "reserved")
        }
        prices[name] = texts["on_demand"] if set(texts) == {"on_demand"} else texts
    return prices


def converted(value: float | None, factor: float) -> float | None:
    """The value in another unit, without digits that only the conversion made."""
    return None if value is None else float(f"{value * factor:.12g}")


def _without_empty(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section without the keys whose value is None or an empty mapping."""
    return {key: value for key, value in section.items() if value is not None and value != {}}


def _with_unit(value: Any, unit: str) -> str | None:
    """A number as slo.yaml has it, "20 ms"; None stays None."""
    if value is None:
        return None
    return f"{value} {unit}" if isinstance(value, int) else f"{value:.12g} {unit}"
