"""Records of planning, in order: traced model, placed step, plan. ``megatrain.plan.show`` prints a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from megatrain.engine.program.encoding import Encoding
from megatrain.engine.program.step_program import StepProgram
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.models.graph import ModelGraph
from megatrain.models.in_place import FrozenBlock
from megatrain.optim.base import Optimizer
from megatrain.plan.checkpoint_bytes import CheckpointBytes
from megatrain.plan.limits import Objection
from megatrain.plan.placement import Placement, TierBudget
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.step_updates import StepUpdates
from megatrain.plan.times import Estimate, MeasuredTicks, StepShape


@dataclass(frozen=True, slots=True)
class TracedModel:
    """Traced model of a run, before blocks are placed. It does not depend on tier sizes or gradient dtypes.

    Attributes:
        run: Run, with packing and kernels chosen for the model.
        padded: Whether rows may have padding or hold several documents.
        trace: Visits of the model's units in a step, with the memory and FLOPs that one micro-batch needs.
        optimizer: Optimizer for updates in RAM.
        device_optimizer: Optimizer for groups in GPU memory, or None.
        host_updates: Reason why all updates run in RAM despite a GPU tier, or "".
        packing_warning: Reason why ``run.data`` does not use the default packing. Empty for the default or a configured
            value.
        flash_note: Reason why ``model.flash_attention = "auto"`` chose FA2 on a GPU, or "".
        in_place: Frozen layouts that may stay in the model's folder, by name.
        encodings: Encodings of packed weights, by layout name, as in ``StepProgram``.
    """

    run: RunSpec
    padded: bool
    graph: ModelGraph
    trace: VisitTrace
    optimizer: Optimizer
    compute_tier: str
    in_place: Mapping[str, FrozenBlock]
    encodings: Mapping[str, Encoding]
    device_optimizer: Optimizer | None = None
    host_updates: str = ""
    packing_warning: str = ""
    flash_note: str = ""


@dataclass(frozen=True)
class PlacedStep:
    """Program of a step, the homes of its blocks, and everything that follows from them except times.

    Attributes:
        run: Run of the traced model, or a variant with a different order of micro-batches.
        budgets_by_tier: Budgets of the tiers, fast to slow.
        ticks: Seconds per tick, if steps of this model were timed. No decision depends on them.
        kept_bytes: Workspace bytes of the compute tier for graphs that are kept until the backward. This is their
            share of the peak; all graphs together can be larger.
    """

    run: RunSpec
    traced: TracedModel
    program: StepProgram
    placement: Placement
    budgets_by_tier: Mapping[str, TierBudget]
    ticks: MeasuredTicks | None = None
    kept_bytes: int = 0

    @property
    def graph(self) -> ModelGraph:
        return self.traced.graph

    @property
    def trace(self) -> VisitTrace:
        return self.traced.trace

    @property
    def device(self) -> torch.device:
        """Device that computes the layers."""
        return self.run.device

    @property
    def shape(self) -> StepShape:
        """Inputs of the estimate other than the step itself."""
        run, tiers = self.run, self.run.tiers
        paths = [drive.path for drive in tiers.table.nvme]
        return StepShape(run.num_own_tokens, run.max_steps, paths, tiers.rates, tiers.has_rates)

    @property
    def tiers(self) -> Sequence[str]:
        return tuple(self.budgets_by_tier)

    @property
    def totals(self) -> Mapping[str, int]:
        return {tier: self.placement.peak_bytes(tier) for tier in self.tiers}

    @property
    def budgets(self) -> Mapping[str, int]:
        return {tier: budget.capacity_bytes for tier, budget in self.budgets_by_tier.items()}

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes moved in one step, by link."""
        return self.placement.traffic_bytes

    @cached_property
    def checkpoint(self) -> CheckpointBytes:
        """Bytes of one checkpoint."""
        return CheckpointBytes.of(self.program, self.placement, self.budgets_by_tier)

    @cached_property
    def updates(self) -> StepUpdates:
        """Updates in a step, and the memory in which they run."""
        return StepUpdates(self.program, self.placement.homes, self.device)


@dataclass(frozen=True, kw_only=True)
class Plan(PlacedStep):
    """Placed step with its estimate: all decisions made before a run starts.

    Attributes:
        estimate: Estimated step time and writes to drives, at the known rates of the machine.
        objections: Reasons against running the plan on this machine.
        library_memory: Sentence about the GPU memory left to libraries, or "" without a GPU.
    """

    estimate: Estimate
    objections: Sequence[Objection] = ()
    library_memory: str = ""

    @classmethod
    def of(cls, step: PlacedStep, estimate: Estimate) -> Plan:
        """Return the plan that consists of a step and its estimate."""
        return cls(**_fields(step), estimate=estimate)

    @property
    def step(self) -> PlacedStep:
        """The step without its estimate. Variants are made from it, because each needs a new estimate."""
        return PlacedStep(**_fields(self))


def _fields(step: PlacedStep) -> dict[str, Any]:
    return {field.name: getattr(step, field.name) for field in fields(PlacedStep)}
