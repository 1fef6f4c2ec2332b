"""slo.yaml: what is read, and that nothing unknown or senseless passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.documents.catalog import Catalog, read_catalog
from planner.documents.engine_file import default_engine
from planner.documents.safety import Safety
from planner.documents.slo import parse_slo, slo_document
from planner.documents.task import PlanQuestion, Robust, Spot, gpus_left_out_by_default, parse_task, read_task
from planner.domain import Limit, Slo
from planner.errors import CatalogError, InputError
from planner.files.checked_files import repository_dir
from planner.fleet import Network

CATALOG = read_catalog()
LEAST = {"llm": "llama-3.1-70b", "slo": {"ttft": {"p90": "2 s"}}}


@pytest.fixture
def catalog() -> Catalog:
    return CATALOG


def task(**change: Any) -> PlanQuestion:
    return parse_task({**LEAST, **change}, CATALOG)


def test_the_example_of_the_design(catalog: Catalog) -> None:
    """2 s, 200 ms, 20 requests/s, 50 GB/s, 80 kW, 500 USD/h in the library's units."""
    read = read_task(repository_dir("examples") / "slo.yaml", catalog)
    assert read == PlanQuestion(
        llm="meta-llama/Llama-3.1-70B",
        slo=parse_slo({"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}, where=""),
        stock={"a100-80g": 64, "h100-80g": 32, "h100-80g@350W": 32},
        rate_rps=20.0,
        network=Network(bandwidth_bytes_per_s=50e9),
        is_network_stated=True,
        power_limit_w=80_000.0,
        cost_limit_usd_per_h=500.0,
        engine=default_engine(catalog.engines.values()),
        safety=Safety(),
    )


@pytest.mark.parametrize("name", ["slo.yaml", "slo-code.yaml"])
def test_every_example_is_read(catalog: Catalog, name: str) -> None:
    assert read_task(repository_dir("examples") / name, catalog).slo.limits


def test_an_slo_of_every_window_is_read_and_written() -> None:
    slo = parse_slo({"ttft": {"p90": "2 s"}, "attainment": 0.9, "every": "10 min"}, where="slo")
    assert slo == Slo((Limit("ttft", 0.9, 2.0),), 0.9, 600.0)
    assert slo_document(slo) == {"ttft": {"p90": "2 s"}, "attainment": 0.9, "every": "600 s"}
    assert parse_slo(slo_document(slo), where="slo") == slo


def test_shares_of_an_slo_may_be_percentages() -> None:
    """As all other shares of slo.yaml; they are written as numbers."""
    slo = parse_slo(
        {"ttft": {"p90": "2 s"}, "attainment": "90 %", "tenants": {"gold": {"share_frac": "95%"}}},
        where="slo",
    )
    assert slo.attainment_frac == 0.9 and slo.guarantees[0].share_frac == 0.95
    assert slo_document(slo)["attainment"] == 0.9


def test_what_is_left_out_has_its_default() -> None:
    """Any GPU on which kernels of the LLM were measured, without limit; the trace as it is, least cost, no
    spare.
    """
    least = task()
    measured = [
        name for name, gpu in CATALOG.gpus.items() if CATALOG.has_fit(CATALOG.llm(str(LEAST["llm"])), gpu)
    ]
    assert least.stock == dict.fromkeys(measured) and least.network == Network()
    assert (least.rate_rps, least.scale, least.window, least.objective, least.spare_workers) == (
        None,
        "superpose",
        None,
        "cost",
        0,
    )
    assert (least.power_limit_w, least.cost_limit_usd_per_h, least.gpu_limit, least.slo.attainment_frac) == (
        None,
    ) * 4
    assert task(traffic=None, limits={"power": None}, fleet={}, spare=None) == least


def test_gpus_that_nobody_checked_are_asked_for() -> None:
    """The catalog's MI300X has no kernels: left out by default, in by `unchecked` or by its name."""
    unchecked = {name for name, gpu in CATALOG.gpus.items() if gpu.unchecked}
    assert {"mi300x-192g", "l4-24g", "gaudi3-128g", "tpu-v6e-32g", "tpu-v7-192g"} <= unchecked
    assert not unchecked & {"a100-80g", "h100-80g@350W", "b300-288g", "rtx-pro-6000"}
    own = parse_task({**LEAST, "llm": str(repository_dir("examples") / "tiny-llm")}, CATALOG)
    assert set(own.unchecked_left_out) == {*unchecked, "h100-nvl-94g", "rtx-pro-6000"}
    everything = task(fleet={"unchecked": True})
    assert everything.stock == dict.fromkeys(CATALOG.gpus) and everything.unchecked_left_out == ()
    named = task(fleet={"gpus": {"mi300x": 8}})
    assert (named.stock, named.unchecked_left_out) == ({"mi300x-192g": 8}, ())
    with pytest.raises(InputError, match=r"fleet: unchecked: is false, and gpus names mi300x-192g; drop one"):
        task(fleet={"gpus": ["mi300x"], "unchecked": False})


def test_an_estimate_competes_with_measured_kernels_only_if_it_is_asked_for() -> None:
    """Kernels of Llama-3.1-70B were measured on H100, not on A100 40 GB. A price in the question asks for the
    GPU. Of a provider that offers no GPU with measured kernels all checked GPUs are considered.
    """
    assert "h100-80g" in task().stock and "a100-40g" in task().unchecked_left_out
    for asked in ({"gpus": ["a100-40g"]}, {"prices": {"a100-40g": "1 usd/h"}}, {"unchecked": True}):
        assert "a100-40g" in task(fleet=asked).stock
    llm = CATALOG.llm("llama-3.1-70b")
    assert "a100-40g" in gpus_left_out_by_default(llm, CATALOG, (), {"a100-40g", "h100-80g"})
    assert "a100-40g" not in gpus_left_out_by_default(llm, CATALOG, (), {"a100-40g"})


def test_a_fit_of_ones_own_checks_a_gpu(tmp_path: Path) -> None:
    """With a fit of this LLM on MI300X its steps are known; those of L4 are as unknown as before."""
    shipped = repository_dir("catalogs") / "latency" / "llama-3.1-70b--h100-80g.yaml"
    (tmp_path / "latency").mkdir()
    (tmp_path / "latency" / "mine.yaml").write_text(shipped.read_text().replace("h100-80g", "mi300x-192g"))
    mine = read_catalog(tmp_path)
    assert "mi300x-192g" in parse_task(LEAST, mine).stock
    assert "l4-24g" in parse_task(LEAST, mine).unchecked_left_out
    other = parse_task({**LEAST, "llm": "qwen3-32b"}, mine)
    assert "mi300x-192g" in other.unchecked_left_out


def test_a_catalog_that_nobody_checked_says_so(tmp_path: Path) -> None:
    rows = yaml.safe_load((repository_dir("catalogs") / "gpus.yaml").read_text())
    (tmp_path / "gpus.yaml").write_text(yaml.safe_dump({"l4-24g": rows["l4-24g"]}))
    with pytest.raises(InputError, match=r"nobody checked step times of any GPU of this catalog \(l4-24g\)"):
        parse_task(LEAST, read_catalog(tmp_path))


def test_everything_at_once() -> None:
    full = task(
        traffic={"rate": "120 req/min", "scale": "thin", "window": "busiest 10 min"},
        fleet={
            "gpus": {"H100": 8, "l4": None, "a100": "unlimited"},
            "network": {"bandwidth": "100 Gbit/s", "latency": "1 ms", "transfer": "serialised"},
        },
        objective="power",
        limits={"power": "10 kW", "cost": "720 usd/day", "gpus": 16},
        spare="2 workers",
    )
    assert full.stock == {"h100-80g": 8, "l4-24g": None, "a100-80g": None}
    assert full.network == Network(12.5e9, 0.001, "serialised")
    assert (full.rate_rps, full.scale, full.window, full.objective) == (
        2.0,
        "thin",
        "busiest 10 min",
        "power",
    )
    assert (full.power_limit_w, full.cost_limit_usd_per_h, full.gpu_limit, full.spare_workers) == (
        1e4,
        30.0,
        16,
        2,
    )


def test_both_ways_to_write_a_percentile() -> None:
    nested = parse_slo({"ttft": {"p90": "2 s", "p99.9": "5 s"}, "e2e": {"p100": "1 min"}}, where="")
    flat = parse_slo({"ttft_p90": "2 s", "ttft_p99.9": "5 s", "e2e_p100": "1 min"}, where="")
    assert nested == flat
    assert nested.limits == (Limit("ttft", 0.9, 2.0), Limit("ttft", 0.999, 5.0), Limit("e2e", 1.0, 60.0))
    assert nested.limits[1].name == "ttft p99.9"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slo": {"ttft": {"p90": 2000}}}, "slo: ttft p90: 2000 has no unit; write 2000 ms or 2000 s"),
        ({"slo": {"ttft_p90": 2.0}}, "slo: ttft p90: 2.0 has no unit; write 2.0 ms or 2.0 s"),
        ({"slo": {"ttft": {"p90": "2000"}}}, "slo: ttft p90: '2000' has no unit"),
        ({"slo": {"ttft": {"p0.9": "2 s"}}}, "ttft: 'p0.9' is kept where 0.9 % of .* write p90 for 90 %"),
        ({"slo": {"ttft_p0.99": "2 s"}}, "write p99 for 99 %"),
        ({"fleet": {"network": {"bandwidth": 50}}}, "bandwidth: 50 has no unit; write 50 GB/s"),
        ({"fleet": {"network": {"latency": 1}}}, "latency: 1 has no unit; write 1 ms or 1 s"),
        ({"fleet": {"host_overhead": 2}}, "host_overhead: 2 has no unit"),
        ({"limits": {"gpus": 2**70}}, "limits: gpus: expected at most"),
        ({"limits": {"power": 80}}, "power: 80 has no unit; write 80 W or 80 kW"),
        ({"policies": {"queue": "sjf", "longest_wait": 60}}, "longest_wait: 60 has no unit"),
        (
            {"fleet": {"prices": {"h100": {"spot": 1, "spot_interruptions_per_h": 1, "spot_restart": 9}}}},
            "spot_restart: 9 has no unit",
        ),
    ],
)
def test_a_bare_number_is_refused_where_it_may_mean_two_things(
    change: dict[str, object], message: str
) -> None:
    """`ttft: {p90: 2000}` was 2000 s: half an hour of planning without a word, for a limit of 2 s."""
    with pytest.raises(InputError, match=message):
        parse_task({"llm": "llama-3.1-8b", "slo": {"ttft": {"p90": "2 s"}}} | change, CATALOG)


def test_zero_money_and_rates_need_no_unit() -> None:
    task = parse_task(
        {
            "llm": "llama-3.1-8b",
            "slo": {"ttft": {"p90": "2 s"}},
            "traffic": {"rate": 20},
            "fleet": {"network": {"latency": 0}, "host_overhead": 0, "prices": {"h100-80g": 2}},
        },
        CATALOG,
    )
    assert (task.rate_rps, task.network.latency_s, task.prices_usd_per_h) == (20.0, 0.0, {"h100-80g": 2.0})


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{gpus: {h100-80g: 010}}", "'010' would be read as the octal number 8; write 10"),
        ("{gpus: {h100-80g: 1:30}}", "'1:30' would be read as 90"),
        ("{prices: {h100-80g: 2,10 usd/h}}", "the comma in '2,10 usd/h' ends an entry; write a decimal"),
        ("{gpus: {h100-80g: +0_17}}", "would be read as the octal number 15; write 17"),
    ],
)
def test_numbers_that_yaml_takes_for_others_are_refused(tmp_path: Path, written: str, message: str) -> None:
    """A stock of 010 was one of 8 GPUs."""
    path = tmp_path / "slo.yaml"
    path.write_text(f"llm: llama-3.1-8b\nslo: {{ttft: {{p90: 2 s}}}}\nfleet: {written}\n")
    with pytest.raises(InputError, match=rf"slo.yaml, line 3: .*{message}"):
        read_task(path, CATALOG)
    path.write_text(path.read_text().replace(written, "{gpus: {h100-80g: 0x10}, prices: {h100-80g: 0.5}}"))
    assert read_task(path, CATALOG).stock == {"h100-80g": 16}


def test_prices_of_ones_own_hold_for_capped_rows_too() -> None:
    """H100 at 2 USD/h also with a cap, unless the cap has a price of its own; a stock of 0 is left out."""
    stock = {"h100": 1, "h100@350W": 1, "h100@450W": 1, "l4": 1, "a100": 0}
    gpus = task(fleet={"gpus": stock, "prices": {"h100": "2 usd/h", "h100@450W": 1.5}}).priced_gpus(CATALOG)
    assert {gpu.name: gpu.price_usd_per_h for gpu in gpus} == {
        "h100-80g": 2.0,
        "h100-80g@350W": 2.0,
        "h100-80g@450W": 1.5,
        "l4-24g": CATALOG.gpu("l4").price_usd_per_h,
    }


def test_kinds_of_prices() -> None:
    """Around the clock the reserved price counts; on spot the H100 is a second GPU of the same stock."""
    prices = {
        "h100": {"on_demand": "2.5 usd/h", "reserved": 1.8, "spot": 1.0, "spot_interruptions_per_h": 0.05},
        "a100": {"on_demand": 1.2, "reserved": 1.5},
    }
    read = task(fleet={"gpus": {"h100": 8, "h100@350W": 8, "a100": 8}, "prices": prices})
    assert read.reserved == {"h100-80g"} and read.prices_usd_per_h == {"h100-80g": 1.8, "a100-80g": 1.2}
    assert {gpu.name: gpu.price_usd_per_h for gpu in read.priced_gpus(CATALOG)} == {
        "h100-80g": 1.8,
        "h100-80g@350W": 1.8,
        "a100-80g": 1.2,
        "h100-80g@spot": 1.0,
        "h100-80g@350W@spot": 1.0,
    }
    (spot,) = {read.spot_terms(gpu) for gpu in read.priced_gpus(CATALOG)} - {None}
    assert spot == Spot(1.0, 0.05, 600.0)
    assert spot is not None and spot.down_frac == pytest.approx(0.05 / 6 / (1 + 0.05 / 6))
    on_spot = CATALOG.gpu("H100@spot")
    assert (on_spot.name, on_spot.base) == ("h100-80g@spot", "h100-80g")


def test_spares_are_workers_or_nodes() -> None:
    found = [(t.spare_workers, t.spare_nodes) for t in (task(spare=1), task(spare="2 nodes"), task())]
    assert found == [(1, 0), (0, 2), (0, 0)]


def test_shares_with_and_without_a_percent_sign() -> None:
    assert task(robust={"step_times": "10 %", "traffic": 0.1}).robust == Robust(0.1, 0.1)


def test_cheapest_tokens_are_the_cheapest_fleet() -> None:
    """The traffic is given, so its tokens are a constant."""
    assert task(objective="cost_per_million_tokens") == task(objective="cost")


def test_a_preset_instead_of_limits() -> None:
    vidur = parse_task({"llm": "llama-2-70b", "preset": "vidur"}, CATALOG)
    assert vidur.slo == CATALOG.slos["vidur"].slo and vidur.preset == "vidur" and vidur.slowdowns is None
    splitwise = parse_task({"llm": "bloom", "preset": "splitwise"}, CATALOG)
    assert splitwise.slo.limits == () and splitwise.slowdowns == CATALOG.slos["splitwise"].slowdowns


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"ttft": {"mean": "2 s"}}, r"slo: ttft: 'mean' is refused: .* such as p50 or p90"),
        ({"ttft_avg": "2 s"}, r"'avg' is refused"),
        ({"ttft": "2 s"}, r"ttft: expected percentiles such as \{p90: 2 s\}, found '2 s'"),
        ({"ttft": {}}, r"ttft: expected percentiles"),
        ({"ttft": {"p0": 1}}, r"expected a percentile from p50 to p100 such as p90, found 'p0'"),
        ({"ttft": {"p101": 1}}, r"found 'p101'"),
        ({"ttft": {90: 1}}, r"expected a percentile .* found '90'"),
        ({"ttft": {"p90": 0}}, r"slo: ttft p90: must be > 0, found 0"),
        ({"ttft": {"p90": "-1 s"}}, r"must be > 0, found '-1 s'"),
        ({"ttft": {"p90": float("nan")}}, r"expected a quantity such as '2 s', found nan"),
        ({"ttft": {"p90": float("inf")}}, r"expected a quantity such as '2 s', found inf"),
        ({"ttft": {"p90": True}}, r"expected a quantity"),
        ({"ttft": {"p90": "2 parsec"}}, r"unknown unit 'parsec'"),
        ({"ttft": {"p90": "2,5 s"}}, r"found '2,5 s', with a comma; write a decimal point"),
        ({"ttft": {"p90": 1}, "ttft_p90": 2}, r"ttft p90 is given twice"),
        ({"ttft": {"p90": 1, "p90.0": 2}}, r"ttft p90.0 is given twice"),
        ({"tftt": {"p90": 1}}, r"unknown key 'tftt'; did you mean 'ttft'"),
        ({"attainment": 0.9}, r"no limit found"),
        ({}, r"no limit found"),
        (None, r"slo: expected keys and values, found None"),
        ({"ttft_p90": 1, "attainment": 0}, r"attainment: expected a share above 0 such as 0.9, found 0"),
        ({"ttft_p90": 1, "attainment": "0 %"}, r"attainment: expected a share above 0 such as 0.9"),
        ({"ttft_p90": 1, "attainment": 90}, r"such as 0.9, or a percentage; write '90 %', found 90"),
        ({"ttft_p90": 1, "attainment": "101 %"}, r"found '101 %'"),
        ({"ttft_p90": "1 s", "tenants": {"each": {}}}, r"share_frac: expected a number from 0 to 1"),
        ({"ttft_p90": 1, "attainment": float("nan")}, r"found nan"),
        ({"ttft_p90": 1, "attainment": True}, r"found True"),
        ({"every": "10 min"}, r"no limit found"),
        ({"ttft_p90": "1 s", "every": 600}, r"every: 600 has no unit; write 600 ms or 600 s"),
        ({"ttft_p90": "1 s", "every": "0 s"}, r"every: must be > 0, found '0 s'"),
        ({"ttft_p90": "1 s", "every": True}, r"every: expected a quantity"),
        ({"ttft_p90": "1 s", "evry": "1 h"}, r"unknown key 'evry'; did you mean 'every'"),
    ],
)
def test_a_bad_slo_is_refused(slo: Any, message: str) -> None:
    with pytest.raises(InputError, match=rf"^slo.yaml: .*{message}"):
        task(slo=slo)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trafic": {}}, r"unknown key 'trafic'; did you mean 'traffic'"),
        ({"llm": None}, r"llm: expected the name of an LLM, found None"),
        ({"preset": "vidur"}, r"found both of slo and preset, expected one"),
        ({"traffic": {"rps": 20}}, r"traffic: unknown key 'rps'.* Valid: rate, scale, window"),
        ({"weights": "fp8"}, r"did you mean 'llm: a checkpoint in it, such as llama-3.1-70b-fp8'"),
        ({"fleet": {"region": "eu"}}, r"fleet: unknown key 'region'; did you mean 'price_of: "),
        (
            {"fleet": {"prices": {"h100-80g": "2 EUR/h"}}},
            r"h100-80g: unknown unit 'EUR/h' .* not converted: write the amount in USD",
        ),
        ({"traffic": 20}, r"traffic: expected keys and values, found 20"),
        ({"traffic": {"rate": 0}}, r"traffic: rate: must be > 0, found 0"),
        ({"traffic": {"rate": "20 tokens/s"}}, r"unknown unit 'tokens/s'"),
        (
            {"traffic": {"scale": "stretch"}},
            r"scale: expected one of superpose, compress, thin, found 'stretch'",
        ),
        ({"traffic": {"window": 600}}, r"window: expected text such as 'busiest 10 min', found 600"),
        ({"fleet": {"gpus": {"a100": 0, "h100": 0}}}, r"fleet: gpus: stock of every GPU is 0"),
        ({"fleet": {"gpus": {}}}, r"stock of every GPU is 0"),
        ({"fleet": {"gpus": {"a100": -1}}}, r"gpus: a100: expected a whole number >= 0, found -1"),
        ({"fleet": {"gpus": {"a100": 1.5}}}, r"found 1.5"),
        ({"fleet": {"gpus": {"a100": 1, "a100-80g": 2}}}, r"a100-80g is a100-80g, which is given twice"),
        ({"fleet": {"prices": {"h100": "-1 usd/h"}}}, r"prices: h100: must be >= 0, found '-1 usd/h'"),
        ({"fleet": {"prices": {"h100": 1, "h100-80g": 2}}}, r"which is given twice"),
        ({"fleet": {"prices": 3}}, r"prices: expected keys and values, found 3"),
        ({"fleet": {"network": {"bandwidth": 0}}}, r"network: bandwidth: must be > 0"),
        ({"fleet": {"network": {"latency": "-1 ms"}}}, r"network: latency: must be >= 0"),
        (
            {"fleet": {"network": {"transfer": "pigeon"}}},
            r"expected one of serialised, layerwise, found 'pigeon'",
        ),
        ({"fleet": {"network": {"speed": 1}}}, r"network: unknown key 'speed'"),
        ({"objective": "throughput"}, r"objective throughput has no end without a limit; set limits"),
        (
            {"objective": "throughput", "limits": {"gpus": 4}, "traffic": {"scale": "thin"}},
            r"objective throughput raises the rate, and traffic: scale: thin can only lower it",
        ),
        (
            {"objective": "throughput", "fleet": {"owned": {"h100": 16}}},
            r"rented beside owned ones; to rent none, write fleet: \{gpus: \{h100-80g: 16\}\} too",
        ),
        (
            {"objective": "throughput", "traffic": {"rate": 5}, "limits": {"gpus": 8}},
            r"objective throughput looks for the rate, found traffic: rate: 5; drop one of the two",
        ),
        (  # it was accepted, and every plan with it refused later, by a key that no slo.yaml has
            {"policies": {"routing": ["jsq", "least-waiting"]}},
            r"simulate` has least-waiting \(as DistServe's program: .* no plan; take of jsq, least-out",
        ),
        ({"robust": {"step_times": "ten"}}, r"robust: step_times: expected a number from 0 to 1 .* 'ten'"),
        ({"robust": {"traffic": "120 %"}}, r"robust: traffic: expected a number from 0 to 1"),
        ({"robust": {"prices": 0.1}}, r"robust: unknown key 'prices'; .*Valid: step_times, traffic"),
        (
            {"fleet": {"prices": {"h100": {"spot": 1.0}}}},
            r"prices: h100: spot: needs spot_interruptions_per_h too, such as 0.05",
        ),
        ({"fleet": {"prices": {"h100": {"spot_restart": "5 min"}}}}, r"terms of spot workers and no price"),
        ({"fleet": {"prices": {"h100": {"on_demand": -1}}}}, r"h100: on_demand: must be >= 0, found -1"),
        (
            {"objective": "beauty"},
            r"objective: expected one of cost, power, gpus, throughput, found 'beauty'",
        ),
        ({"limits": {"power": "0 W"}}, r"limits: power: must be > 0"),
        ({"limits": {"gpus": 0}}, r"limits: gpus: expected a whole number >= 1, found 0"),
        ({"limits": {"watts": 1}}, r"limits: unknown key 'watts'"),
        ({"spare": "1 rack"}, r"spare: expected a number of workers or nodes .*, found '1 rack'"),
        ({"spare": -1}, r"spare: expected a number of workers"),
        ({"spare": True}, r"spare: expected a number of workers"),
        ({"fleet": {"pp": [1, 0]}}, "fleet: pp: expected a whole number >= 1, found 0"),
        ({"fleet": {"pp": 64}}, "fleet: pp: found 64, at most 16"),
        ({"fleet": {"max_num_seqs": [64, 0]}}, "fleet: max_num_seqs: expected a whole number >= 1, found 0"),
        ({"fleet": {"max_num_batched_tokens": "2k"}}, "max_num_batched_tokens: expected a whole number"),
        ({"policies": {"queue": "lifo"}}, "policies: queue: expected one of fcfs, sjf, ljf, srpt"),
        ({"policies": {"queue": ["sjf", "sjf"]}}, "found one twice"),
        ({"policies": {"longest_wait": "5 s"}}, "fcfs overtakes nobody"),
        ({"policies": {"batching": "faster-transformer"}}, "faster-transformer needs reserve_tokens"),
        ({"policies": {"queue": "sjf", "longest_wait": "0 s"}}, "longest_wait"),
        ({"policies": {"cue": "sjf"}}, "cue"),
    ],
)
def test_a_bad_task_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^slo.yaml: .*{message}"):
        task(**change)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(
        CatalogError, match=r"^slo.yaml: LLM 'llama-3.1-71b' .*nearest: meta-llama/Llama-3.1-70B"
    ):
        task(llm="llama-3.1-71b")
    with pytest.raises(CatalogError, match=r"^slo.yaml: GPU 'a100-81g' .*nearest: a100-80g"):
        task(fleet={"gpus": {"a100-81g": 1}})
    with pytest.raises(InputError, match=r"preset: 'vidurr' is not in catalogs/slos.yaml; nearest: vidur"):
        parse_task({"llm": "bloom", "preset": "vidurr"}, CATALOG)
    with pytest.raises(InputError, match=r"found neither of slo and preset"):
        parse_task({"llm": "bloom"}, CATALOG)


def test_a_config_beside_slo_yaml_is_found_from_anywhere(tmp_path: Path, catalog: Catalog) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,'
        ' "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 512}'
    )
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump({**LEAST, "llm": "tuned"}))
    read = read_task(tmp_path / "slo.yaml", catalog)
    assert catalog.llm(read.llm).layers == 2


def test_a_folder_does_not_hide_a_row_of_the_catalog(tmp_path: Path, catalog: Catalog) -> None:
    (tmp_path / "bloom").mkdir()
    (tmp_path / "slo.yaml").write_text(yaml.safe_dump({**LEAST, "llm": "bloom"}))
    assert read_task(tmp_path / "slo.yaml", catalog).llm == "bigscience/bloom"


def test_an_error_names_the_file(tmp_path: Path, catalog: Catalog) -> None:
    (tmp_path / "mine.yaml").write_text("llm: bloom\nslo: {ttft: {p90: 2 parsec}}\n")
    with pytest.raises(InputError, match=r"mine.yaml: slo: ttft p90: unknown unit 'parsec'"):
        read_task(tmp_path / "mine.yaml", catalog)


@given(
    st.dictionaries(
        st.sampled_from(
            ["llm", "slo", "preset", "traffic", "fleet", "objective", "limits", "spare", "robust", "ttft"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("bloom"),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(
                    st.sampled_from(["gpus", "ttft", "p90", "rate", "power", "a100"]), inner, max_size=2
                )
            ),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_document_is_read_or_refused_in_one_line(document: dict[str, Any]) -> None:
    """Whatever the YAML holds, an InputError or a Task: never a traceback of ours."""
    try:
        parse_task(document, CATALOG)
    except InputError as error:
        assert "\n" not in str(error)


def test_a_deadline_of_all_requests_is_said_to_be_a_limit_on_e2e() -> None:
    """Batch work has a deadline: `slo: {deadline: 1 h}` read "unknown key", without what to write."""
    with pytest.raises(
        InputError, match=r"did you mean 'e2e: \{p99: 1 h\}; a deadline is of one of its classes'"
    ):
        task(slo={"deadline": "1 h"})
