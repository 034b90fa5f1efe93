"""Candidate programs for a training step, in the order in which the planner tries them.

The planner uses the first program that fits its tiers. The programs differ in peak memory and traffic, but their
results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megatrain.base.layout import UnitLayout
from megatrain.engine.program.block_plan import FrozenWeights
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.engine.program.sharing import share_gradients
from megatrain.engine.program.step_program import GroupUpdates, StepProgram
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.engine.program.workspace import peak_bytes, step_workspace_bytes, waiting_rows
from megatrain.machine.profiles import LoadedProfile
from megatrain.models.graph import ModelGraph
from megatrain.models.in_place import buffer_bytes
from megatrain.optim.base import MatrixOptimizer
from megatrain.optim.matrices import device_bytes, host_bytes, matrix_shapes
from megatrain.plan.budgets import teacher_bytes, with_folder, with_residents, with_workspace
from megatrain.plan.kept import GraphKeeper
from megatrain.plan.placement import TierBudget
from megatrain.plan.plan import PlacedStep, TracedModel
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.run_tiers import tier_budgets
from megatrain.plan.shortfall import Shortfall
from tiered.units import PAGE_BYTES, round_up

_Count = Literal["auto"] | int
_ALL_LAYERS = 1 << 20  # exceeds the number of layers of any model
#: Maximum distance, in visits, by which weights are gathered ahead. Distances above 1 use only otherwise free memory.
MAX_GATHERS_AHEAD = 3


@dataclass(frozen=True, slots=True)
class Attempts:
    """Candidate programs for a run's step, in the order in which the planner tries them.

    Attributes:
        run: The model's run, or a variant of it, for example with a different gradient dtype or different tiers.
        profile: Measured rates, used to choose the blocks whose home is GPU memory.
        capacities: Capacities in bytes, by tier. They override the run's capacities.
        max_ahead: Maximum gather distance in visits, for runs with several processes.
        passes_parts: Whether to process the vocabulary one part at a time if possible. None lets the planner choose.
    """

    run: RunSpec
    model: TracedModel
    profile: LoadedProfile
    capacities: Mapping[str, int] = field(default_factory=dict)
    max_ahead: int = MAX_GATHERS_AHEAD
    passes_parts: bool | None = None

    def first_fit(self) -> PlacedStep | Shortfall:
        """Place the first program that fits. If none does, return the smallest shortfall of the last overfull tier."""
        shortfalls: list[Shortfall] = []
        for program in self.programs():
            step = self.place(program)
            if not isinstance(step, Shortfall):
                return self._gather_further_ahead(step)
            shortfalls.append(step)
        # Later programs need less memory, but the vocabulary variants come in either order, so take the smallest need.
        return min((s for s in shortfalls if s.tier == shortfalls[-1].tier), key=lambda s: s.need_bytes)

    def programs(self) -> Iterator[StepProgram]:
        """Yield candidate programs, from those that hide the most latency to those that need the least memory."""
        for overlaps_device in self._overlap_choices():
            for gathers_ahead in self._gather_distances():
                yield from self._vocabulary_variants(self._builder(overlaps_device, gathers_ahead))

    def place(self, program: StepProgram) -> PlacedStep | Shortfall:
        """Place a program and choose the graphs that it keeps. Return a shortfall if a tier is too small."""
        run, model = self.run, self.model
        reader_bytes = buffer_bytes(model.in_place.values(), model.graph.dtype)
        budgets = with_folder(self._budgets(program), program, reader_bytes)
        budgets = with_residents(budgets, run, program, self.profile.machine if run.device.type == "cuda" else None)
        return GraphKeeper(run, model, program, budgets).solve(*_kept_layer_counts(run))

    def _overlap_choices(self) -> tuple[bool, ...]:
        """Return the values of `overlaps_device` to try. Overlap needs memory for one more layer's gradients."""
        is_required = self.model.compute_tier == "ram" or self.run.optimizer.defers_updates
        return (True,) if is_required else (True, False)

    def _gather_distances(self) -> tuple[int, ...]:
        """Return the gather distances to try, in visits. Distance 1 needs a second full copy of the largest layer."""
        is_possible = self.max_ahead and not self.run.world.is_single and self.run.advanced.prefetch_bytes != 0
        return (1, 0) if is_possible else (0,)

    def _gather_further_ahead(self, step: PlacedStep) -> PlacedStep:
        """Gather ``max_ahead`` visits ahead if that fits and does not change the traffic. Return the resulting step.

        This hides gathers that take longer than computing one layer. Gathers must not delay copies of other blocks, so
        the largest working set must fit in memory twice.
        """
        program, tier = step.program, self.model.compute_tier
        if self.max_ahead < 2 or not program.sharding.gathers_ahead:
            return step
        attempts = replace(self, passes_parts=bool(program.cuts.passing))
        (variant,) = attempts._vocabulary_variants(attempts._builder(program.updates.overlaps_device, self.max_ahead))
        other_step = self.place(variant)
        if isinstance(other_step, Shortfall):
            return step
        placement = other_step.placement
        fits_twice = placement.peak_bytes(tier) + placement.working_bytes[tier] <= other_step.budgets[tier]
        return other_step if fits_twice and placement.traffic_bytes == step.placement.traffic_bytes else step

    def _vocabulary_variants(self, builder: ProgramBuilder) -> Iterator[StepProgram]:
        """Yield programs that process the vocabulary as a whole or one part at a time, the cheaper program first."""
        run, graph, trace = self.run, self.model.graph, self.model.trace
        # A loss that compares rows needs the logits of all rows before any gradient, so the head recomputes the logits.
        keeps_parts = not run.objective.loss.compares_rows
        whole_program = share_gradients(builder.build())
        full_program = _with_kept_parts(whole_program, trace.head_parts if keeps_parts else 1)
        if not self.passes_parts and _fits_entirely(self._budgets(full_program)[self.model.compute_tier], full_program):
            yield full_program
            return
        whole_program = _with_kept_parts(whole_program, logit_parts_in_workspace(trace) if keeps_parts else 1)
        split_program = None if self.passes_parts is False else share_gradients(builder.build(passing_parts=True))
        if split_program is None or not split_program.cuts.passing:
            yield whole_program
            return
        splits_head = any(trace.visits[visit].is_head for visit, _ in split_program.cuts.passing)
        split_program = _with_kept_parts(split_program, 1 if splits_head else whole_program.recompute.kept_parts)
        if self.passes_parts:
            yield split_program
            return
        waiting_nbytes = peak_bytes(waiting_rows(graph, trace, split_program, run.num_together))
        # The factor 2 accounts for the logits that a head recomputes if it processes one part at a time.
        is_cheaper = 2 * waiting_nbytes < spared_bytes(graph, split_program)
        yield from (split_program, whole_program) if is_cheaper else (whole_program, split_program)

    def _builder(self, overlaps_device: bool, gathers_ahead: int) -> ProgramBuilder:
        run, model = self.run, self.model
        return ProgramBuilder(
            model.graph,
            model.trace,
            num_micro_batches=len(run.own_micro_batches),
            order=run.batch.order,
            compute_tier=model.compute_tier,
            optimizer=model.optimizer,
            grad_dtype=run.grad_dtype,
            updates=GroupUpdates(
                are_deferred=run.optimizer.defers_updates,
                in_compute_tier=model.device_optimizer is not None,
                overlaps_device=overlaps_device,
            ),
            frozen=FrozenWeights(not run.model.table.train_from_scratch, model.in_place, model.encodings),
            sharding=run.sharding(gathers_ahead),
        )

    def _budgets(self, program: StepProgram) -> dict[str, TierBudget]:
        """Return the tiers' budgets for a program, including its workspace."""
        run, model = self.run, self.model
        workspace = step_workspace_bytes(model.graph, model.trace, program, run.num_together, run.trace_device)
        budgets = with_workspace(tier_budgets(run, workspace), teacher_bytes(run), model.compute_tier)
        for tier, nbytes in self._update_workspace_bytes().items():
            budgets[tier] = replace(budgets[tier], workspace_bytes=budgets[tier].workspace_bytes + nbytes)
        for tier, capacity in self.capacities.items():
            budgets[tier] = replace(budgets[tier], capacity_bytes=capacity)
        return budgets

    def _update_workspace_bytes(self) -> dict[str, int]:
        """Return the scratch bytes that updates need, by tier. Empty if the optimizer needs none."""
        model, optimizer = self.model, self.model.optimizer
        layouts = [layout for layout in model.graph.layouts.values() if layout.trainable]
        if isinstance(optimizer, MatrixOptimizer) and model.compute_tier != "ram":
            shapes = matrix_shapes(optimizer, layouts)
            nbytes = round_up(device_bytes(optimizer, self.run.trace_device, shapes), PAGE_BYTES)
            return {"ram": host_bytes(shapes) + optimizer.piece_bytes, model.compute_tier: nbytes}
        bytes_of = getattr(optimizer, "workspace_bytes", None)
        if bytes_of is None:
            return {}
        return {"ram": max((bytes_of(entry) for layout in layouts for entry in layout.entries), default=0)}


def _kept_layer_counts(run: RunSpec) -> tuple[_Count, _Count]:
    """Return how many of the last layers keep their graphs, and how many save results, as configured.

    Compiled layers save no results. With several processes, layers keep no graphs, because a weight's full copy has no
    home tier that could hold it until the backward.
    """
    choice, count = run.recompute, run.recompute.num_layers or _ALL_LAYERS
    graph_counts: dict[str, _Count] = {"auto": "auto", "full": 0, "selective": 0, "none": count}
    result_counts: dict[str, _Count] = {"auto": "auto", "full": 0, "selective": count, "none": count}
    num_graphs = graph_counts[choice.mode] if run.world.is_single else 0
    return num_graphs, result_counts[choice.mode] if run.model.table.compiler is None else 0


def _with_kept_parts(program: StepProgram, count: int) -> StepProgram:
    """Return the program with a head that keeps the logits of ``count`` parts of the vocabulary."""
    return replace(program, recompute=replace(program.recompute, kept_parts=count))


def logit_parts_in_workspace(trace: VisitTrace) -> int:
    """Return how many vocabulary parts can keep their logits in workspace that is reserved for the layers anyway."""
    if trace.head_parts == 1:
        return 1
    trunk = (visit for visit in trace.visits if not visit.is_head)
    peak_nbytes = max((max(visit.memory.forward_nbytes, visit.memory.backward_nbytes) for visit in trunk), default=0)
    free_nbytes = max(0, peak_nbytes - trace.head_nbytes)
    return min(trace.head_parts, 1 + free_nbytes // trace.head_part_nbytes)


def _fits_entirely(budget: TierBudget, program: StepProgram) -> bool:
    """Return whether a tier can hold all blocks of a step and the workspace."""
    block_bytes = sum(budget.slot_bytes(block.nbytes) for block in program.blocks.values())
    return block_bytes + budget.workspace_bytes <= budget.capacity_bytes


def spared_bytes(graph: ModelGraph, program: StepProgram) -> int:
    """Return by how many bytes the working set shrinks if gradients and split weights are leased in parts."""

    def layout_bytes(layout: UnitLayout) -> int:
        nbytes = 4 * program.sharding.own_lanes.max_open_sums
        nbytes += graph.dtype.itemsize if layout.name in program.cuts.weights else 0
        return nbytes * (layout.num_elements - max(map(len, layout.parts)))

    return max((layout_bytes(graph.layouts[layout]) for _, layout in program.cuts.passing), default=0)
