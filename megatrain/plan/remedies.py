"""Config changes that make a run fit, each with the size that the run then needs.

Gradients that wait for a global norm are a quarter of a run's bytes. The first remedies therefore store gradients in
bf16 or on a drive, or avoid the norm. Other remedies stream a layer's experts in parts, or run one micro-batch at a
time so that only one micro-batch's activations exist. The run is planned with each change, so a change that is reported
to fit does fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from megatrain.base.names import ELEMENTWISE_OPTIMIZERS
from megatrain.base.sizes import Size
from megatrain.machine.table import NvmeTierConfig
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.shortfall import Remedy, Shortfall

#: Function that returns a tier's smallest sufficient capacity for a run, or None if another tier is too small.
LeastBytes = Callable[["RunSpec", str], int | None]


def add_remedies(
    shortfall: Shortfall, run: RunSpec, least_bytes: LeastBytes, *, can_cut_experts: bool = False
) -> Shortfall:
    """Return a run's shortfall with the config changes that would help.

    Args:
        least_bytes: Function that plans a changed run and returns the capacity that a tier needs.
        can_cut_experts: Whether the model has experts that ``model.split_experts`` would split.
    """
    remedies: list[Remedy] = []
    for change, changed_run in _changes(run, can_cut_experts):
        need_bytes = least_bytes(changed_run, shortfall.tier)
        if need_bytes is not None and need_bytes < shortfall.need_bytes:
            remedies.append(Remedy(change, shortfall.tier, need_bytes, need_bytes <= shortfall.have_bytes))
    # Suggest a drive only if the run has none. With drives, the shortfall itself asks for more space.
    if not run.tiers.table.nvme:
        need_bytes = least_bytes(_with_drive(run), "nvme")
        if need_bytes:
            remedies.append(Remedy("a [[tiers.nvme]]", "nvme", need_bytes, fits=True))
    if not remedies:
        return shortfall
    advice = f"{shortfall.advice} Remedies: {'; '.join(map(str, remedies))}."
    return replace(shortfall, advice=advice, remedies=tuple(remedies))


def _changes(run: RunSpec, can_cut_experts: bool) -> Iterator[tuple[str, RunSpec]]:
    if can_cut_experts and _may_cut_experts(run):
        table = run.model.table.model_copy(update={"split_experts": True})
        yield "model.split_experts = true", replace(run, model=replace(run.model, table=table))
    is_summed_in_place = run.batch.order == "micro_batch" and run.batch.num_micro_batches > 1
    if run.grad_dtype == torch.float32 and not is_summed_in_place:
        yield 'precision.grad_dtype = "bfloat16"', replace(run, grad_dtype=torch.bfloat16)
    if run.optimizer.defers_updates:
        yield from _changes_without_norm(run)
    if (spec := run.sequential_run) is not None:
        yield 'advanced.micro_batch_order = "micro_batch" (streamed weights then move for each micro-batch)', spec


def _changes_without_norm(run: RunSpec) -> Iterator[tuple[str, RunSpec]]:
    """Yield config changes after which a run needs no global gradient norm."""
    changes = []
    if run.optimizer.nonfinite != "skip" and run.optimizer.max_grad_norm > 0:
        changes.append("optimizer.max_grad_norm = 0")
    if not run.model.table.split_experts:  # the config forbids clipping by layer with split experts
        changes.append('optimizer.clip_scope = "layer"')
    if changes:  # all these changes need the same bytes, so plan only one
        by_layer = run.optimizer.model_copy(update={"clip_scope": "layer"})
        yield ", or ".join(changes), replace(run, optimizer=by_layer)


def _may_cut_experts(run: RunSpec) -> bool:
    """Return whether the run's other config keys allow split experts."""
    table = run.model.table
    needs_layers = table.compiler is not None or table.mlp_rows or run.optimizer.clip_scope == "layer"
    return not needs_layers and run.optimizer.optim in ELEMENTWISE_OPTIMIZERS


def _with_drive(run: RunSpec) -> RunSpec:
    """Return the run with a drive on which the planner may place every kind of block that the config does not place."""
    homes = {kind: list(tiers) for kind, tiers in run.placement.homes.items()}
    for kind in run.placement.residents:
        homes[kind].append("nvme")
    drive = NvmeTierConfig(path=run.output_dir / "nvme", size=Size("0B", nbytes=0))
    tiers = replace(
        run.tiers, table=run.tiers.table.model_copy(update={"nvme": (drive,)}), rates=(1.0,), has_rates=False
    )
    return replace(run, tiers=tiers, placement=replace(run.placement, homes=homes))
