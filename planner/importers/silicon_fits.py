"""Fits step times to AIConfigurator's kernel tables ("silicon", silicon.py), as files of catalogs/latency.

Experts of a mixture are split over the GPUs of a worker as slices of all experts, or (EP) as whole experts.
Several data-parallel ranks may share the experts: each rank computes its own attention, and then the experts
compute the tokens of all ranks together (`joint`).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.documents.fits import fit_document, fit_row
from planner.domain import Gpu
from planner.errors import InputError
from planner.importers import silicon
from planner.importers.silicon_experts import ExpertsTimes
from planner.importers.silicon_nodes import NODES, on_nodes_ms, why_not_on_nodes
from planner.importers.silicon_sparse import MOST_TOKENS, is_sparse
from planner.models.all2all import HIGH_THROUGHPUT, LOW_LATENCY, MOST_LOW_LATENCY_TOKENS, All2All
from planner.models.latency import Kind, StepLatency
from planner.models.llm import Llm
from planner.models.memory import active_weight_bytes, fits_memory
from planner.models.step_fit import Errors, PiecewiseLinearStepLatency, cross_validated_errors
from planner.models.step_tables import StepShape, StepTable

TPS = (1, 2, 4, 8)  # GPUs of a worker; with data-parallel ranks, of each rank.
DPS = (2, 4, 8)  # Data-parallel ranks of a worker on one node.
# The tokens of a step at which the times of shared experts are computed, the corners of the fit: 1, 2, 3, 4,
# 6, 8, 12 and so on to 98,304.
JOINT_TOKENS = (1, *sorted(n * 2**i for i in range(16) for n in (2, 3)))
OFF_GRID_STEPS = 900  # Each fit is compared with this many random steps off its table; set by hand.
# A fit whose mean error is larger is not written, so that the roofline is used. The error is that on the
# fit's own table; with data-parallel ranks it is that on the random steps. The limit is set by hand.
WORST_MAPE_FRAC = 0.08
NO_MEMORY = "does not fit into memory"  # The end of a reason in `left_out`, which other modules look for.
SOURCE = f"vLLM kernel times in aiconfigurator-core {silicon.VERSION} (NVIDIA, Apache-2.0); docs/models.md"
BASIS = f"silicon: AIConfigurator {silicon.VERSION} kernel times, without host overhead"


@dataclass(frozen=True)
class FittedKernels:
    """A file of fits as `document`, None if there is no fit; `left_out` says why others are missing."""

    document: dict[str, Any] | None
    left_out: tuple[str, ...]


def fit_kernels(table: StepTable, *, basis: str, kind: Kind) -> tuple[StepLatency, dict[str, Errors]]:
    """The fit to all rows of `table`, and its errors by regime on rows that were held out in turn."""
    model = PiecewiseLinearStepLatency(basis=basis, reads_cached=table.reads_cached)
    errors = cross_validated_errors(model, table.X, table.y)
    latency: StepLatency = model.fit(table.X, table.y).latency_
    return dataclasses.replace(latency, mape_frac=errors["all"].mape_frac, kind=kind), errors


def silicon_fits(
    llm: Llm,
    gpu: Gpu,
    tps: Iterable[int] = TPS,
    *,
    date: str,
    command: str,
    folder: Path | None = None,
    experts_of: ExpertsTimes | None = None,
) -> FittedKernels:
    """A fit for each TP whose worker fits into memory and has kernel times, if its error is at most
    WORST_MAPE_FRAC.

    A mixture of experts has one fit with slices of all experts, one with whole experts, and those of
    data-parallel ranks; these last are left out if `experts_of` is given, because it does not apply to ranks.
    `experts_of` gives times in place of those of vLLM's default kernels for experts (silicon_experts.py).
    `folder` has the config.json if AIConfigurator has no copy of it.
    """
    if why := silicon.why_not_covered(llm, gpu, folder):
        return FittedKernels(None, (f"{llm.name} on {gpu.name}: {why}",))
    rows, left_out = [], []
    for tp in tps:
        if not llm.splits_over(tp):
            left_out.append(f"{llm.name} on {gpu.name} tp{tp}: its heads cannot be dealt out evenly")
            continue
        has_memory = fits_memory(llm, gpu, tp)
        if not has_memory:
            left_out.append(f"{llm.name} on {gpu.name} tp{tp}: {NO_MEMORY}")
        expert_splits = _expert_splits(llm, tp) if has_memory else ()
        for ep in expert_splits:
            try:
                rows.append(_fitted_row(llm, gpu, tp, ep, folder, experts_of))
            except InputError as error:
                left_out.append(str(error))
        # Shared experts take less memory of each GPU, so ranks may fit where one worker does not. Ranks that
        # do not fit get no reason of their own in `left_out`.
        rank_choices = _rank_choices(llm, gpu, tp) if experts_of is None else ()
        for dp, all2all in rank_choices:
            try:
                if fits_memory(llm, gpu, tp, dp=dp):
                    rows.append(_ranks_row(llm, gpu, tp, dp, all2all, folder))
            except InputError as error:
                left_out.append(str(error))
    if not rows:
        return FittedKernels(None, tuple(left_out))
    document = fit_document(llm.name, gpu.name, rows, source=SOURCE, date=date, command=command)
    return FittedKernels(document, tuple(left_out))


def ranks_latency(own: StepLatency, joint_s: silicon.Floats) -> StepLatency:
    """Step times of data-parallel ranks.

    `own` are the step times of a rank without the experts. `joint_s` are the seconds that the experts take at
    JOINT_TOKENS, which are tokens of all ranks together.
    """
    knots = np.array(JOINT_TOKENS, dtype=float)
    # Some measured times are below those of fewer tokens, but more tokens cannot really take less time.
    joint_s = np.maximum.accumulate(joint_s)
    # `step_s` adds the host's seconds per step, `h_s`, which `f_s` must not have.
    own_s = np.asarray(own.step_s(knots)) - own.h_s
    return dataclasses.replace(
        own,
        knots_tokens=tuple(knots.tolist()),
        f_s=tuple((own_s + joint_s).tolist()),
        joint_s=tuple(joint_s.tolist()),
    )


def file_name(llm: Llm, gpu: Gpu) -> str:
    """The name of the file of fits in catalogs/latency."""
    return f"{llm.name.split('/')[-1].lower()}--{gpu.name}.yaml"


def _rank_choices(llm: Llm, gpu: Gpu, tp: int) -> Iterator[tuple[int, All2All]]:
    """The numbers of data-parallel ranks that a worker may have, each with the kernels that exchange tokens:
    "" on one node, those of DeepEP on several.
    """
    per_node = gpu.gpus_per_node
    if not llm.is_mixture:
        return
    yield from ((dp, "") for dp in DPS if tp * dp <= per_node)
    for nodes in NODES:  # The ranks fill this many nodes, so `tp` must divide the GPUs of a node.
        if per_node % tp == 0 and not why_not_on_nodes(llm, gpu, nodes):
            yield from ((nodes * per_node // tp, all2all) for all2all in (LOW_LATENCY, HIGH_THROUGHPUT))


def _expert_splits(llm: Llm, tp: int) -> Sequence[bool]:
    """The ways to split experts over `tp` GPUs: False for slices of all experts, True for whole ones."""
    if not llm.is_mixture or tp == 1:
        return (False,)
    # Slices that would cut through blocks of fp8 weights are no choice.
    return (True,) if silicon.is_whole(llm, tp) else (False, True)


def _basis_text(llm: Llm) -> str:
    """What the step times of an LLM are based on."""
    return f"{BASIS}, prompts past {MOST_TOKENS} tokens carried on" if is_sparse(llm) else BASIS


def _ranks_row(llm: Llm, gpu: Gpu, tp: int, dp: int, all2all: All2All, folder: Path | None) -> dict[str, Any]:
    """One fit for a worker of `dp` data-parallel ranks. Raises InputError where its error on random steps is
    too large.

    Its errors "all" are on random steps while the other ranks are idle ("off_grid" in `_fitted_row`). Its
    errors "own" are on steps of the grid that were held out in turn, without the experts' times ("all" in
    `_fitted_row`).
    """
    basis = f"{_basis_text(llm)}, {dp} ranks share the experts, whole ones per GPU"
    if all2all:
        basis += f"; {all2all} between nodes as measured for SGLang"
    # Steps of more tokens than the low-latency kernels take are left out.
    most_tokens = MOST_LOW_LATENCY_TOKENS if all2all == LOW_LATENCY else silicon.MOST_STEP_TOKENS
    grid_steps = [step for step in silicon.step_grid() if _step_tokens(step) <= most_tokens]
    table = silicon.silicon_table(llm, gpu, tp, grid_steps, ep=True, folder=folder, dp=dp)
    own, own_errors = fit_kernels(table, basis=basis, kind="kernels")

    def experts_s(tokens: Sequence[int]) -> silicon.Floats:
        """The seconds of the experts at each of these numbers of tokens of all ranks together."""
        if all2all:
            experts_ms = on_nodes_ms(llm, gpu, tp * dp, all2all)
            return np.array([experts_ms(n) for n in tokens]) / 1e3
        return silicon.joint_seconds(llm, gpu, tp, tokens, dp=dp, folder=folder)

    latency = ranks_latency(own, experts_s(JOINT_TOKENS))
    # The seed is the TP, so that the same fit is always judged on the same steps.
    drawn = silicon.random_steps(np.random.default_rng(tp), OFF_GRID_STEPS)
    steps = [step for step in drawn if _step_tokens(step) <= most_tokens]
    unseen = silicon.silicon_table(llm, gpu, tp, steps, ep=True, folder=folder, dp=dp)
    unseen_s = unseen.y + experts_s(unseen.X[:, 0].astype(int).tolist())  # X[:, 0] are the tokens of a step.
    off_grid = _errors_on(unseen, unseen_s, latency)
    if off_grid.mape_frac > WORST_MAPE_FRAC:
        raise InputError(
            f"{llm.name} on {gpu.name} tp{tp} dp{dp} ep {all2all}: the fit misses its kernel times by "
            f"{100 * off_grid.mape_frac:.0f} %, more than {100 * WORST_MAPE_FRAC:.0f} %"
        )
    latency = dataclasses.replace(latency, mape_frac=off_grid.mape_frac)
    errors = {"all": off_grid, "own": own_errors["all"]}
    return fit_row(tp, latency, errors, ep=True, dp=dp, all2all=all2all)


def _fitted_row(
    llm: Llm, gpu: Gpu, tp: int, ep: bool, folder: Path | None, experts_of: ExpertsTimes | None = None
) -> dict[str, Any]:
    """One fit without data-parallel ranks. Its errors "all" are on steps of its table that were held out in
    turn, and "off_grid" on random steps. Raises InputError where "all" is too large.
    """
    basis = f"{_basis_text(llm)}, whole experts per GPU" if ep else _basis_text(llm)
    table = silicon.silicon_table(llm, gpu, tp, ep=ep, folder=folder, experts_of=experts_of)
    latency, errors = fit_kernels(table, basis=basis, kind="kernels")
    if errors["all"].mape_frac > WORST_MAPE_FRAC:
        raise InputError(
            f"{llm.name} on {gpu.name} tp{tp}{' ep' if ep else ''}: the fit misses its kernel times by "
            f"{100 * errors['all'].mape_frac:.0f} %, more than {100 * WORST_MAPE_FRAC:.0f} %"
        )
    # The experts that one token visits may fit into the L2 cache of an L40S or RTX PRO 6000, where a
    # benchmark of one layer finds them again. An engine reads all weights from memory in each step.
    least_s = float(active_weight_bytes(llm)) / (tp * gpu.bandwidth_bytes_per_s)
    latency = dataclasses.replace(latency, f_s=tuple(np.maximum(latency.f_s, least_s).tolist()))
    steps = silicon.random_steps(np.random.default_rng(tp), OFF_GRID_STEPS)  # Seed as in `_ranks_row`.
    unseen = silicon.silicon_table(llm, gpu, tp, steps, ep=ep, folder=folder, experts_of=experts_of)
    off_grid = _errors_on(unseen, unseen.y, latency)
    return fit_row(tp, latency, {"all": errors["all"], "off_grid": off_grid}, ep=ep)


def _step_tokens(step: StepShape) -> int:
    return step.prompts * step.new + step.decodes


def _errors_on(table: StepTable, t_s: silicon.Floats, latency: StepLatency) -> Errors:
    """The relative errors of the fit `latency` on the steps of a table, which take `t_s` (n,) seconds."""
    error_frac = np.abs(latency.step_s(*table.X.T) / t_s - 1)
    return Errors(float(error_frac.mean()), float(np.quantile(error_frac, 0.9)), len(error_frac))
