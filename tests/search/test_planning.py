"""The planner against brute force, its own constraints recomputed, and invariances."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import yaml
from shares import some

from benchmarks.generated_traffic import lognormal, synthesise
from planner.documents.catalog import Catalog, read_catalog
from planner.documents.facts import Cautioned, UncheckedEngine, UncheckedLeftOut
from planner.documents.task import PlanQuestion, parse_task
from planner.errors import InfeasibleError, InputError
from planner.fleet import Fleet
from planner.models.latency import StepLatency
from planner.models.spread import INTERVAL_SIGMAS
from planner.reports.fact_sentences import fact_sentences_of
from planner.reports.output import plan_yaml, to_json
from planner.reports.rows import alternative_rows
from planner.search.evidence.certify import plan
from planner.search.evidence.plan import Plan
from planner.search.oracle.fleet_counts import Counts, objective_of
from planner.search.oracle.fleet_oracle import Oracle
from planner.search.problem.bill import bill_fleet, paid_whole_usd_per_h
from planner.search.problem.options import EngineChoices, mixed_options, worker_types
from planner.simulator import judge_slo, simulate
from planner.solvers.master import Option
from planner.traffic.trace import Trace

LLM = "meta-llama/Llama-3.1-70B"


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return read_catalog()


def traffic(
    seed: int = 0, *, requests: int = 250, rate_rps: float = 15.0, input_tokens: float = 1200.0
) -> Trace:
    return synthesise(
        requests,
        rate_rps,
        input_tokens=lognormal(input_tokens, 1.0),
        output_tokens=lognormal(120, 1.0),
        gap_cv=1.5,
        rng=np.random.default_rng(seed),
    )


def question(catalog: Catalog, **changes: object) -> PlanQuestion:
    document: dict[str, object] = {
        "safety": "none",
        "llm": LLM,
        "slo": {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}},
        "fleet": {"gpus": ["a100-80g", "h100-80g"]},
    }
    return parse_task(document | changes, catalog)


@pytest.fixture(scope="module")
def plain(catalog: Catalog) -> Plan:
    """What others are held against."""
    return plan(question(catalog), traffic(), catalog)


def options_of(found: Plan, catalog: Catalog, task: PlanQuestion) -> list[Option]:
    """The options that the certificate says level 0 ranged over, built again from their names."""
    from planner.search.problem.options import decode_options, mixed_options, prefill_options

    longest = int((found.trace.input_tokens + found.trace.output_tokens).max())
    types, _ = worker_types(
        catalog.llm(task.llm), task.priced_gpus(catalog), catalog, longest, EngineChoices.of(task)
    )
    options = [
        *mixed_options(types, task.objective),
        *prefill_options(types, task.objective),
        *decode_options(types, task.objective),
    ]
    assert {option.name for option in options} >= set(found.certificate.universe)
    return options


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(4), 1))
@pytest.mark.parametrize(
    "slo",
    [
        {"ttft": {"p90": "1 s"}, "tbt": {"p99": "80 ms"}},
        {"ttft": {"p90": "400 ms"}, "tpot": {"p90": "35 ms"}},
    ],
)
def test_no_cheaper_fleet_of_level_0_holds(catalog: Catalog, seed: int, slo: dict[str, object]) -> None:
    """Brute force: every fleet with one worker type per pool that costs less than level 0's best fails."""
    task = question(catalog, slo=slo)
    found = plan(task, traffic(seed, requests=300, rate_rps=12.0), catalog)
    assert found.certificate.level0_exact
    oracle = Oracle(found.fleet.llm, found.trace, task.slo, task.network, found.fleet.policies)
    options = options_of(found, catalog, task)

    def cheaper(pools: tuple[Option, ...]) -> list[Counts]:
        most = [int(found.certificate.level0 / option.objective) + 1 for option in pools]
        fleets = itertools.product(*(range(1, n + 1) for n in most))
        counted = [tuple(zip(pools, fleet, strict=True)) for fleet in fleets]
        return [fleet for fleet in counted if objective_of(fleet) < found.certificate.level0 * (1 - 1e-9)]

    mixed = [(option,) for option in options if option.role == "mixed"]
    pairs = itertools.product(
        [option for option in options if option.role == "prefill"],
        [option for option in options if option.role == "decode"],
    )
    for pools in (*mixed, *pairs):
        assert not (kept := [fleet for fleet in cheaper(pools) if oracle.holds(fleet)]), kept


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(4), 2))
def test_plan_keeps_what_it_says(catalog: Catalog, plain: Plan, seed: int) -> None:
    """Simulated again from scratch: the SLO is kept, every neighbour with one worker fewer fails."""
    task = question(catalog)
    found = plan(task, traffic(seed), catalog) if seed else plain
    again = simulate(found.fleet, found.trace, limits=task.slo.limits, record=True)
    assert judge_slo(again, task.slo).holds and found.verdict.holds
    assert found.certificate.value == pytest.approx(bill_fleet(found.fleet).usd_per_h)
    assert found.certificate.bound <= found.certificate.value <= found.certificate.level0 * (1 + 1e-9)
    for i, pool in enumerate(found.fleet.pools):
        pools = list(found.fleet.pools)
        pools[i] = replace(pool, count=pool.count - 1)
        roles = {p.role for p in pools if p.count}
        if roles and ("prefill" in roles) == ("decode" in roles):
            fewer = Fleet(found.fleet.llm, tuple(pools), found.fleet.policies, found.fleet.network)
            assert not judge_slo(simulate(fewer, found.trace, limits=task.slo.limits), task.slo).holds
    assert all(not neighbour.holds for neighbour in found.certificate.neighbours)


def test_simpler_fleets_cost_the_same_or_more(plain: Plan) -> None:
    assert plain.alternatives
    assert all(row.objective >= plain.certificate.value * (1 - 1e-9) for row in plain.alternatives)


@pytest.mark.parametrize("seed", some(range(3), 1))
def test_an_alternative_is_a_fleet_that_holds_or_has_no_price(catalog: Catalog, seed: int) -> None:
    """Every GPU type alone in a mixed pool: its price is the least of all counts of all its options, each
    simulated. "At least 23.92 (the same)" was read as a price where the fleet costs 35.88."""
    gpus = ["a100-80g", "h100-80g", "h100-80g@350W"]
    task, trace = question(catalog, fleet={"gpus": gpus}), traffic(seed, requests=300)
    found = plan(task, trace, catalog)
    oracle = Oracle(found.fleet.llm, found.trace, task.slo, task.network, found.fleet.policies)
    types, _ = worker_types(
        *(catalog.llm(LLM), task.priced_gpus(catalog), catalog),
        int((trace.input_tokens + trace.output_tokens).max()),
        EngineChoices.of(task),
    )
    rows = {row.label: row for row in found.alternatives}
    for gpu in gpus:
        options = [option for option in mixed_options(types, "cost") if option.type.gpu.name == gpu]
        prices = [
            paid_whole_usd_per_h(((option, n),))
            for option in options
            if oracle.holds(((option, 60),))
            for n in [next(n for n in itertools.count(1) if oracle.holds(((option, n),)))]
        ]
        row = rows.get(f"{gpu}, mixed")
        if row is None:
            assert {pool.type.gpu.name for pool in found.fleet.pools} == {gpu}
            assert found.certificate.value == pytest.approx(min(prices))
        else:
            assert row.is_priced and row.fleet is not None
            assert (
                row.objective == pytest.approx(bill_fleet(row.fleet).usd_per_h) == pytest.approx(min(prices))
            )
    for row in found.alternatives:
        assert row.fleet != found.fleet
        if row.fleet is not None:
            assert judge_slo(simulate(row.fleet, found.trace, limits=task.slo.limits), task.slo).holds


def test_a_kind_that_never_holds_has_a_bound_and_no_price(catalog: Catalog) -> None:
    """One A100 in stock: mixed A100 are too few, and neither text nor JSON gives them a price."""
    task = question(catalog, fleet={"gpus": {"a100-80g": 2, "h100-80g": None}})
    found = plan(task, traffic(), catalog)
    (row,) = (row for row in found.alternatives if row.label == "a100-80g, mixed")
    assert row.at_least and not row.is_priced and row.fleet is None
    (written,) = (each for each in to_json(found)["alternatives"] if each["label"] == row.label)
    assert written["objective"] is None and written["at_least"] is True
    assert written["bound"] == pytest.approx(row.objective)
    _, lines = alternative_rows(found)
    (line,) = (line for line in lines if line[0] == row.label)
    assert line[1:4] == ("none", "–", "–") and line[4].startswith(
        f"not priced, at least {row.objective:,.2f}"
    )
    assert "%" not in line[4] and "the same" not in line[4]


def test_long_prompts_with_tight_gaps_are_disaggregated(catalog: Catalog) -> None:
    """6,000-token prompts beside gaps of 17 ms at p99: a mixed step with any useful chunk is too long."""
    task = question(
        catalog, slo={"ttft": {"p90": "3 s"}, "tbt": {"p99": "17 ms"}}, fleet={"gpus": ["h100-80g"]}
    )
    trace = synthesise(
        200,
        2.0,
        input_tokens=lognormal(6000, 0.3),
        output_tokens=lognormal(300, 0.5),
        rng=np.random.default_rng(1),
    )
    network = {"gpus": ["h100-80g"], "network": {"bandwidth": "400 GB/s"}}
    found = plan(replace(task, network=question(catalog, fleet=network).network), trace, catalog)
    assert {pool.role for pool in found.fleet.pools} == {"prefill", "decode"}


def test_twice_the_price_is_the_same_fleet(catalog: Catalog, plain: Plan) -> None:
    prices = {"a100-80g": "3.78 usd/h", "h100-80g": "5.98 usd/h"}
    dear = plan(
        question(catalog, fleet={"gpus": ["a100-80g", "h100-80g"], "prices": prices}), traffic(), catalog
    )

    def shape(found: Plan) -> list[tuple[str, str, int]]:
        return [(pool.role, pool.type.name, pool.count) for pool in found.fleet.pools]

    assert shape(plain) == shape(dear)
    assert dear.certificate.value == pytest.approx(2 * plain.certificate.value)


@pytest.mark.long
def test_cheap_enough_gpus_win(catalog: Catalog) -> None:
    """At a tenth of its price the A100 must be in the plan; at ten times the price it must not."""
    for price, wins in (("0.2 usd/h", True), ("20 usd/h", False)):
        fleet = {"gpus": ["a100-80g", "h100-80g"], "prices": {"a100-80g": price}}
        found = plan(question(catalog, fleet=fleet), traffic(), catalog)
        assert any(pool.type.gpu.name == "a100-80g" for pool in found.fleet.pools) == wins


@pytest.mark.long
@pytest.mark.parametrize("wanted", ["power", "gpus"])
def test_other_objectives(catalog: Catalog, plain: Plan, wanted: str) -> None:
    """The fleet with fewest Watts (GPUs) uses no more of them than the cheapest fleet does."""
    found = plan(question(catalog, objective=wanted), traffic(), catalog)
    used = {"power": found.fleet.power_w, "gpus": found.fleet.gpus}[wanted]
    assert used <= {"power": plain.fleet.power_w, "gpus": plain.fleet.gpus}[wanted]
    assert found.certificate.value == pytest.approx(used)


def test_limits_are_kept_and_cost(catalog: Catalog, plain: Plan) -> None:
    """With fewer of the GPUs it would have chosen, the plan is dearer but within stock."""
    favourite = plain.fleet.pools[0].type.gpu.name
    stock = {"a100-80g": 1000, "h100-80g": 1000} | {favourite: plain.fleet.pools[0].type.gpus - 1}
    found = plan(question(catalog, fleet={"gpus": stock}), traffic(), catalog)
    used = sum(pool.count * pool.type.gpus for pool in found.fleet.pools if pool.type.gpu.name == favourite)
    assert used <= stock[favourite]
    assert found.certificate.value >= plain.certificate.value


@pytest.mark.long
def test_too_little_stock_names_what_to_buy(catalog: Catalog) -> None:
    """Without hand-offs in TTFT: with them the fleet is one of three types, which a second search misses."""
    engine = {"name": "vllm", "first_token": "prefill"}
    with pytest.raises(InfeasibleError) as caught:
        plan(question(catalog, fleet={"gpus": {"a100-80g": 2}}, engine=engine), traffic(), catalog)
    assert caught.value.kind == "capacity" and "stock of a100-80g" in caught.value.constraint
    assert "from 2 to " in caught.value.relaxation

    needed = int(caught.value.relaxation.rsplit(" ", 1)[1])
    plan(question(catalog, fleet={"gpus": {"a100-80g": needed}}, engine=engine), traffic(), catalog)


def test_a_promise_below_the_floor_is_about_latency(catalog: Catalog) -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan(question(catalog, slo={"ttft": {"p90": "5 ms"}}), traffic(), catalog)
    assert caught.value.kind == "latency" and caught.value.constraint == "ttft p90"

    floor_s = float(caught.value.relaxation.split(">=")[1].split()[0])
    plan(question(catalog, slo={"ttft": {"p90": f"{3 * floor_s} s"}}), traffic(), catalog)


@pytest.mark.long
def test_gpus_that_nobody_checked_are_left_out_and_named(catalog: Catalog) -> None:
    """Without `fleet` the plan says which GPUs it left out. An error with `fleet` does not name them."""
    found = plan(question(catalog, fleet={}), traffic(requests=60, rate_rps=3), catalog)
    left_out = next(fact for fact in found.certificate.assumptions if isinstance(fact, UncheckedLeftOut))
    assert "mi300x-192g" in left_out.gpus and not set(left_out.gpus) & set(question(catalog, fleet={}).stock)
    assert not any("mi300x" in option for option in found.certificate.universe)
    (said,) = [line for line in fact_sentences_of(found.certificate.assumptions) if "mi300x-192g" in line]
    assert "fleet: {unchecked: true}" in said
    with pytest.raises(InfeasibleError) as named:
        plan(question(catalog, fleet={"gpus": {"a100-80g": 2}}), traffic(), catalog)
    assert "nobody measured" not in str(named.value)


@pytest.mark.slow
def test_an_error_names_unchecked_gpus_that_might_cure_it(catalog: Catalog) -> None:
    """Every GPU of the catalog that was checked is searched, and two of any are too few."""
    with pytest.raises(InfeasibleError, match=r"no kernels of such GPUs were measured, or as .*mi300x-192g"):
        plan(question(catalog, limits={"gpus": 2}, fleet={}), traffic(requests=60, rate_rps=60), catalog)


@pytest.mark.long
def test_a_plan_for_an_engine_that_nobody_checked_says_so(catalog: Catalog) -> None:
    """Among what is taken for granted and in the warnings; its answer is that of vLLM's constants."""
    small = traffic(requests=80, rate_rps=4)
    found = plan(question(catalog, engine={"name": "trtllm"}), small, catalog)
    said = UncheckedEngine("TensorRT-LLM 1.3, asynchronous scheduling")
    assert said in found.certificate.assumptions and said in found.warnings
    assert all(pool.role == "mixed" for pool in found.fleet.running_pools), "no target starts pairs of it"
    usual = plan(question(catalog), small, catalog)
    assert usual.certificate.value == found.certificate.value
    assert not any(isinstance(fact, UncheckedEngine) for fact in usual.certificate.assumptions)
    assert to_json(found)["certificate"]["assumptions"]
    engine = yaml.safe_load(plan_yaml(found))["engine"]
    assert (engine["name"], engine["version"], engine["checked"]) == ("trtllm", "1.3", False)


def test_an_engine_that_takes_prompts_first_is_warned_of_where_gaps_are_limited(catalog: Catalog) -> None:
    """Here its plan costs at least as much as one with mixed steps, which is not warned of."""
    small, warned = traffic(requests=80, rate_rps=4), Cautioned("prompts-first")
    for limits, is_warned in (({"tbt": {"p99": "200 ms"}}, True), ({}, False)):
        slo = {"ttft": {"p90": "2 s"}, **limits}
        first = plan(question(catalog, slo=slo, engine={"name": "sglang"}), small, catalog)
        assert (warned in first.warnings) == is_warned
        mixed_steps = {"name": "sglang", "mixed_steps": True}
        mixed = plan(question(catalog, slo=slo, engine=mixed_steps), small, catalog)
        assert warned not in mixed.warnings and mixed.certificate.value <= first.certificate.value


def test_spare_worker_survives_the_loss_of_one(catalog: Catalog, plain: Plan) -> None:
    """With one spare the fleet still keeps the SLO after losing any one worker."""
    task = question(catalog, spare="1 worker")
    found = plan(task, traffic(), catalog)
    assert found.certificate.value > plain.certificate.value
    for i, pool in enumerate(found.fleet.pools):
        pools = list(found.fleet.pools)
        pools[i] = replace(pool, count=pool.count - 1)
        left = Fleet(found.fleet.llm, tuple(pools), found.fleet.policies, found.fleet.network)
        assert judge_slo(simulate(left, found.trace, limits=task.slo.limits), task.slo).holds


@pytest.mark.long
def test_same_seed_same_plan(catalog: Catalog) -> None:
    task = question(catalog, traffic={"rate": 9})
    first, second = (plan(task, traffic(), catalog, seed=3).certificate for _ in range(2))
    assert first == second


def test_attainment_counts_every_limit_at_once(catalog: Catalog) -> None:
    found = plan(question(catalog, slo={"ttft": {"p50": "1 s"}, "attainment": 0.95}), traffic(), catalog)
    assert found.verdict.attainment_frac >= 0.95


def test_relative_slo_is_resolved_against_the_reference(catalog: Catalog) -> None:
    """Splitwise's nine limits become seconds, each at least the idle reference's time at that percentile."""
    document = {"safety": "none", "llm": LLM, "preset": "splitwise", "fleet": {"gpus": ["h100-80g"]}}
    found = plan(parse_task(document, catalog), traffic(rate_rps=2.0), catalog)
    assert len(found.slo.limits) == 9 and found.verdict.holds
    assert any("relative SLO" in said for said in fact_sentences_of(found.certificate.assumptions))


def test_time_limit_is_reported(catalog: Catalog) -> None:
    """A limit of no time at all finds nothing; that is an error, not a plan."""
    with pytest.raises(Exception, match="time limit"):
        plan(question(catalog), traffic(), catalog, time_limit_s=0.0)


def test_one_instant_is_no_traffic(catalog: Catalog) -> None:
    trace = traffic()
    burst = trace.select(np.arange(5), arrival_s=np.zeros(5))
    with pytest.raises(InputError, match="one instant"):
        plan(question(catalog), burst, catalog)


def test_too_long_a_request_is_refused(catalog: Catalog) -> None:
    trace = replace(traffic(), input_tokens=np.full(250, 200_000))
    with pytest.raises(InputError, match="200"):
        plan(question(catalog), trace, catalog)


def test_host_overhead_is_in_every_step(catalog: Catalog, plain: Plan) -> None:
    """5 ms more per step: the same fleet is slower token by token, so the plan costs as much or more."""
    fleet = {"gpus": ["a100-80g", "h100-80g"], "host_overhead": "5 ms"}
    slower = plan(question(catalog, fleet=fleet), traffic(), catalog)
    assert all(pool.type.latency.h_s == pytest.approx(0.005) for pool in slower.fleet.pools)
    assert slower.certificate.value >= plain.certificate.value
    assert "host overhead per step, on top of the engine's own: 5 ms" in fact_sentences_of(
        slower.certificate.assumptions
    )


@pytest.mark.parametrize("version", ["0.11.1", "0.15.1"])
def test_an_engine_is_simulated_and_the_bound_stays_below(
    catalog: Catalog, plain: Plan, version: str
) -> None:
    """Its host takes time and saves none: the plan costs as much or more, and step times are as they were."""
    engine = {"name": "vllm", "version": version, "host": {"step": "5 ms"}, "rest": {"step": "5 ms"}}
    slower = plan(question(catalog, engine=engine), traffic(), catalog)
    assert slower.fleet.engine is not None and slower.fleet.engine.version == version
    assert all(pool.type.latency.h_s == 0 for pool in slower.fleet.pools)
    assert slower.certificate.value >= plain.certificate.value >= (slower.certificate.bound or 0)
    assert judge_slo(simulate(slower.fleet, slower.trace, limits=slower.slo.limits), slower.slo).holds
    said = fact_sentences_of(slower.certificate.assumptions)
    assert any(line.startswith(f"simulated as vLLM {version}, ") for line in said)


def test_a_version_without_constants_is_warned_of(catalog: Catalog) -> None:
    found = plan(question(catalog, engine={"version": "0.33"}), traffic(), catalog)
    (said,) = (line for line in fact_sentences_of(found.warnings) if line.startswith("engine "))
    assert said.startswith(
        "engine vLLM 0.33, asynchronous scheduling: nearest row: vllm 0.33 has no constants"
    )


def test_steps_that_may_take_longer_have_a_host_that_does(catalog: Catalog) -> None:
    asked = question(catalog, engine={"version": "0.15.1"}, robust={"step_times": "50 %"})
    found = EngineChoices.of(asked).simulated_engine
    assert found is not None and asked.engine is not None
    assert found.host.step_s == pytest.approx(1.5 * asked.engine.host.step_s)
    assert found.rest.sequence_s == pytest.approx(1.5 * asked.engine.rest.sequence_s)
    assert found.front_end_s == asked.engine.front_end_s


def test_long_outputs_without_a_limit_on_gaps_are_no_work_to_count(catalog: Catalog) -> None:
    """27 outputs of 16,000 tokens in 20 s and a limit on TTFT alone: nobody asks when they end, so the work
    of decoding must not refute a single small worker."""
    from benchmarks.generated_traffic import fixed

    trace = synthesise(
        27,
        1.35,
        input_tokens=fixed(100),
        output_tokens=fixed(16000),
        gap_cv=0.0,
        rng=np.random.default_rng(0),
    )
    task = question(catalog, slo={"ttft": {"p90": "2 s"}}, fleet={"gpus": ["h100-80g"]})
    found = plan(task, trace, catalog)
    assert found.fleet.gpus == 4 and found.fleet.workers == 1
    assert all(not neighbour.holds for neighbour in found.certificate.neighbours)


@pytest.mark.long
@pytest.mark.parametrize("seed", some(range(6), 3))
def test_bound_is_below_every_fleet_that_holds(catalog: Catalog, seed: int) -> None:
    """Random questions; the plan is never below the bound as it comes from the solver."""
    from planner.search.mixed.bounds import envelopes
    from planner.solvers.master import FleetLimits, TrafficLoad, bound_objective
    from planner.solvers.required_work import compute_slo_work
    from planner.traffic.workload import to_classes

    rng = np.random.default_rng(seed)
    slo = {"ttft": {"p90": f"{rng.uniform(0.5, 4)} s"}, "tpot": {"p90": f"{rng.uniform(30, 200)} ms"}}
    task = question(catalog, slo=slo)
    trace = synthesise(
        400,
        float(rng.uniform(2, 20)),
        input_tokens=lognormal(float(rng.uniform(100, 3000)), 0.8),
        output_tokens=lognormal(float(rng.uniform(5, 300)), 0.8),
        rng=rng,
    )
    found = plan(task, trace, catalog)
    options = [o for o in options_of(found, catalog, task) if o.name in found.certificate.universe]
    lower = bound_objective(
        envelopes(options),
        TrafficLoad(
            to_classes(found.trace),
            compute_slo_work(task.slo, found.trace),
            found.fleet.llm.kv_bytes_per_token,
            task.network.bandwidth_bytes_per_s,
        ),
        FleetLimits(task.stock),
    )
    assert lower is not None and lower <= found.certificate.value * (1 + 1e-9)


@pytest.mark.parametrize("has_spread", [True, False])
def test_a_plan_says_whether_it_survives_the_error_of_its_step_times(
    catalog: Catalog, plain: Plan, has_spread: bool
) -> None:
    """Simulated again at the upper end of their spread; where nobody knows one, with every step longer by the
    held-out error of its fit.
    """
    task = question(catalog)
    found = plain if has_spread else plan(task, traffic(), replace(catalog, spreads={}, _fits={}))
    began = "if prefills took" if has_spread else "if every step took"
    (sentence,) = (line for line in fact_sentences_of(found.certificate.binding) if line.startswith(began))

    def longer(latency: StepLatency) -> StepLatency:
        return (
            latency.at_spread(INTERVAL_SIGMAS, INTERVAL_SIGMAS)
            if has_spread
            else latency.with_longer_steps(latency.mape_frac or 0)
        )

    pools = tuple(
        replace(pool, type=replace(pool.type, latency=longer(pool.type.latency)))
        for pool in found.fleet.pools
    )
    slower = simulate(replace(found.fleet, pools=pools), found.trace, limits=task.slo.limits)
    holds = judge_slo(slower, task.slo).holds
    assert sentence.endswith("keeps the SLO") == holds
    assert (sentence in fact_sentences_of(found.warnings)) != holds


def test_a_capped_gpu_at_the_same_price_is_not_preferred(catalog: Catalog) -> None:
    """Capped and uncapped cost the same per hour, and the capped one is never faster."""
    task = question(catalog, fleet={"gpus": ["h100-80g@350W", "h100-80g"]})
    found = plan(task, traffic(1), catalog)
    assert {pool.type.gpu.name for pool in found.fleet.pools} == {"h100-80g"}


@pytest.mark.long
def test_shortest_first_is_chosen_where_it_saves_workers(catalog: Catalog) -> None:
    """In bursts long prompts hold up many short ones. Each order alone costs what the plan says of it, and
    the chosen one is replayed as certified."""
    trace = synthesise(
        3000,
        20.0,
        input_tokens=lognormal(2500, 1.0),
        output_tokens=lognormal(30, 1.0),
        gap_cv=4.0,
        rng=np.random.default_rng(1),
    )
    slo = {"ttft": {"p90": "2 s"}, "tbt": {"p99": "200 ms"}}
    alone = plan(question(catalog, slo=slo, engine="none"), trace, catalog)
    queues = {"queue": ["fcfs", "sjf"]}
    both = plan(question(catalog, slo=slo, policies=queues, engine="none"), trace, catalog)
    assert both.fleet.policies.queue == "sjf"
    assert both.certificate.value < alone.certificate.value
    other = next(row for row in both.alternatives if row.label == "queue fcfs")
    assert other.objective == pytest.approx(alone.certificate.value)
    replayed = simulate(both.fleet, both.trace, limits=both.slo.limits)
    assert judge_slo(replayed, both.slo, with_percentiles=False).holds
    hint = next(row for row in alone.alternatives if row.label.startswith("queue sjf"))
    assert both.certificate.value - 1e-9 <= hint.objective <= alone.certificate.value + 1e-9


def test_an_engines_settings_are_chosen_among_those_allowed(catalog: Catalog) -> None:
    """Level 0 over several settings is the least over each alone, and so is the bound; none is taken that was
    not allowed."""
    trace = traffic(requests=200)

    def asked(seats: list[int]) -> tuple[float, float]:
        fleet = {"gpus": ["h100-80g"], "max_num_batched_tokens": [1024, 2048], "max_num_seqs": seats}
        found = plan(question(catalog, fleet=fleet), trace, catalog)
        assert {pool.type.max_num_batched_tokens for pool in found.fleet.pools} <= {1024, 2048}
        assert {pool.type.max_num_seqs for pool in found.fleet.pools} <= set(seats)
        assert found.certificate.level0_exact
        return found.certificate.level0, found.certificate.bound

    (few, _), (many, bound), (both, bound_of_both) = asked([4]), asked([256]), asked([4, 256])
    assert both == min(few, many) < few
    assert bound_of_both <= bound


def test_ageing_bounds_who_is_overtaken(catalog: Catalog) -> None:
    """With a longest wait the longest TTFT is no larger than without, at the same fleet."""
    task = question(catalog, policies={"queue": "sjf", "longest_wait": "5 s"}, engine="none")
    found = plan(task, traffic(3, requests=300, rate_rps=20.0), catalog)
    assert found.fleet.policies.queue_window_s == 5.0
    free = replace(found.fleet, policies=replace(found.fleet.policies, queue_window_s=np.inf))
    aged, unaged = (simulate(fleet, found.trace).ttft_s.max() for fleet in (found.fleet, free))
    assert aged <= unaged + 1e-9


def test_pipelines_are_tried_where_nothing_fits_without(catalog: Catalog) -> None:
    """Llama-3.1-405B has 810 GB of weights: 8 H100 hold 640 GB, 2 stages of 8 hold them."""
    task = question(
        catalog,
        llm="llama-3.1-405b",
        slo={"ttft": {"p90": "10 s"}, "tbt": {"p99": "400 ms"}},
        fleet={"gpus": ["h100-80g"]},
    )
    found = plan(task, traffic(requests=200, rate_rps=2.0), catalog)
    assert {(pool.type.tp, pool.type.pp) for pool in found.fleet.pools} == {(8, 2)}
    assert found.certificate.value % (16 * found.fleet.pools[0].type.gpu.price_usd_per_h) == 0


@pytest.mark.parametrize("seed", some(range(2), 1))
@pytest.mark.slow
def test_no_cheaper_fleet_of_level_0_holds_with_pipelines(catalog: Catalog, seed: int) -> None:
    """Brute force over one mixed pool of every GPU x TP x PP x token budget."""
    slo = {"ttft": {"p90": "1 s"}, "tpot": {"p90": "60 ms"}}
    task = question(catalog, slo=slo, fleet={"gpus": ["a100-80g", "h100-80g"], "pp": [1, 2]})
    trace = traffic(seed, requests=200, rate_rps=8.0)
    found = plan(task, trace, catalog)
    longest = int((trace.input_tokens + trace.output_tokens).max())
    types, _ = worker_types(
        catalog.llm(LLM),
        task.priced_gpus(catalog),
        catalog,
        longest,
        EngineChoices(stages=task.stages, node_bytes_per_s=task.network.bandwidth_bytes_per_s),
    )
    assert {worker.pp for worker in types} == {1, 2}
    oracle = Oracle(found.fleet.llm, trace, task.slo, task.network, found.fleet.policies)
    for option in mixed_options(types, "cost"):
        for count in range(1, int(found.certificate.level0 / option.objective) + 1):
            if objective_of([(option, count)]) < found.certificate.level0 * (1 - 1e-9):
                assert not oracle.holds(((option, count),)), (option.name, count)
