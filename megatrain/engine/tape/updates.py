"""Weight updates: their inputs and outputs, their gradient factors, and the calls to the optimizer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.device.host_io import PendingScalars
from megatrain.engine.program.visit_trace import layout_uses
from megatrain.optim.base import MatrixOptimizer, Segment, Update
from megatrain.optim.by_tier import optimizers_by_tier
from megatrain.optim.clip import global_norm, gradient_scale
from megatrain.optim.matrices import DeviceOrthogonalizer, matrix_shapes, update_by_matrix
from megatrain.optim.on_device import TableOptimizer

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.engine.tape.execution import TapeExecution
    from megatrain.engine.tape.streamed import StepRecipe, StreamedModel
    from megatrain.engine.tape.tape import Op
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.on_device import UpdateTable


def has_split_weights(graph: ModelGraph) -> bool:
    """Return whether weights are the bf16 high halves of fp32 masters. ``low`` blocks then contain the low halves."""
    return graph.dtype.itemsize == 2


class LayerScales:
    """Gradient factors of a step without a global norm. Each layer's factor depends only on the layer's own norm.

    Args:
        max_grad_norm: Maximum norm of each layer's gradient; 0 for no clipping.
        nonfinite: Reaction to a gradient that is not finite. ``stop`` skips the layer and all later layers. ``skip``
            skips only the layer. ``ignore`` updates the layer.

    Attributes:
        num_used: Number of layers whose gradients are used.
        skipped_layers: Names of the layers whose gradients were not finite and are not used, in order of the backward.
    """

    def __init__(self, max_grad_norm: float, nonfinite: Literal["stop", "skip", "ignore"]) -> None:
        self._max_grad_norm, self._nonfinite = max_grad_norm, nonfinite
        self._needs_norm = max_grad_norm > 0 or nonfinite != "ignore"
        self._norms: dict[str, PendingScalars] = {}
        self.num_used = 0
        self.skipped_layers: list[str] = []

    def record_norm(self, layout: str, squared_norm: float | torch.Tensor) -> None:
        """Record a complete gradient's squared norm. If it is a device scalar, queue its transfer to the host."""
        if self._needs_norm:
            self._norms[layout] = PendingScalars([squared_norm])

    def scale(self, layout: str) -> float | None:
        """Wait for a layer's norm. Return the factor by which to scale the gradient, or None to skip the update."""
        scale: float | None = 1.0
        if self._needs_norm:
            norm = global_norm(self._norms.pop(layout).read())
            scale = gradient_scale(norm, self._max_grad_norm, self._nonfinite)
        if scale is None:
            self.skipped_layers.append(layout)
        if self.skipped_layers and self._nonfinite == "stop":
            return None
        self.num_used += scale is not None
        return scale


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """Update that uses one step's gradients. Deferred updates run in the next step; all others run in the backward.

    Attributes:
        step: Index of the step that computes the gradients, counted from 0.
        update: Step count, learning rate and gradient factor.
        with_gradient: Parameters that have a gradient, by layout.
        scales: Separate factors for each layer; None if the factor of ``update`` applies to all layers.
    """

    step: int
    update: Update
    with_gradient: Mapping[str, set[str]]
    scales: LayerScales | None = None

    def for_layout(self, name: str) -> Update | None:
        """Return a layout's update, or None to skip the layout. With ``scales``, this waits for the layout's norm."""
        if self.scales is None:
            return self.update
        scale = self.scales.scale(name)
        return None if scale is None else replace(self.update, grad_scale=scale)


@dataclass(frozen=True, slots=True)
class _PartUpdate:
    """Inputs and outputs for updating one part of a layout.

    Attributes:
        states: Pairs (kind of state, key of its block).
        weight_range: Range of the part's elements in the weight's block; None for the whole block.
        segments: Pairs (parameter, segment of the part to update).
    """

    states: Sequence[tuple[str, str]]
    weight: str
    weight_range: range | None
    gradient: str
    segments: Sequence[tuple[str, Segment]]


class Updater:
    """Updater that calls the optimizer for the tier in which a layout's update runs.

    Attributes:
        trained: Trained layouts with their segments, by index of the layout.
        optimizers: Optimizers by tier.
        table_optimizers: Subset of ``optimizers`` that can update many parts in one launch.
        matrices: Orthogonalizer on the device for updates in RAM; None if updates do not use one.
    """

    def __init__(self, model: StreamedModel, recipe: StepRecipe) -> None:
        graph, program = model.graph, model.program
        assert recipe.device_optimizer is not None or not program.updates.in_compute_tier, program.compute_tier
        optimizers = optimizers_by_tier(recipe.optimizer, recipe.device_optimizer, program.compute_tier, model.device)
        uses = layout_uses(graph, model.trace)
        self.trained = {
            index: (layout, tuple(recipe.segments(layout)))
            for index, layout in enumerate(graph.layouts.values())
            if layout.trainable and uses[layout.name]
        }
        self._program, self.optimizers = program, optimizers
        self._parts: dict[tuple[int, int], _PartUpdate] = {}
        self.table_optimizers = {name: each for name, each in optimizers.items() if isinstance(each, TableOptimizer)}
        #: For each layout, by index: addresses of its blocks, parameters with a gradient, and the resulting tables.
        self._tables: dict[int, tuple[Sequence[int], Container[str], Sequence[UpdateTable] | None]] = {}
        kinds = optimizers["ram"].state_kinds(has_split_weights(graph))
        self._states = [kind.name for kind in kinds if kind.name != "weight"]
        self.matrices: DeviceOrthogonalizer | None = None
        self._matrix_names: frozenset[str] = frozenset()
        if isinstance(optimizer := optimizers["ram"], MatrixOptimizer) and program.compute_tier != "ram":
            layouts = [layout for layout, _ in self.trained.values()]
            entries = (entry for layout in layouts for entry in layout.entries)
            self._matrix_names = frozenset(entry.name for entry in entries if optimizer.has_matrices(entry))
            self.matrices = DeviceOrthogonalizer(model.device)
            self.matrices.allocate_buffers(optimizer, matrix_shapes(optimizer, layouts))

    def update(
        self,
        index: int,
        part: int,
        tier: str,
        tensors: Mapping[str, torch.Tensor],
        update: Update,
        filled_params: Container[str],
    ) -> None:
        """Update one part of a layout.

        Args:
            tensors: Weight of the layout, and state and gradient of the part, by block key.
            filled_params: Parameters that have a gradient.
        """
        optimizer, inputs = self.optimizers[tier], self.part_inputs(index, part, tensors, filled_params)
        if self.matrices is not None and isinstance(optimizer, MatrixOptimizer):
            update_by_matrix(optimizer, self.matrices, self._is_matrix, *inputs, update)
        else:
            optimizer.update(*inputs, update)

    def update_layout(
        self,
        index: int,
        num_parts: int,
        tier: str,
        tensors: Mapping[str, torch.Tensor],
        update: Update,
        filled_params: Container[str],
    ) -> None:
        """Update all parts of a layout, with tables if the optimizer supports them.

        Args:
            tensors: All blocks of the layout, by key. The caller has leased them.
        """
        if (optimizer := self.table_optimizers.get(tier)) is not None:
            addresses = optimizer.addresses(tensors.values())
            cached = self._tables.get(index)
            if cached is None or cached[:2] != (addresses, filled_params):
                groups = [self.part_inputs(index, part, tensors, filled_params) for part in range(num_parts)]
                cached = self._tables[index] = addresses, filled_params, optimizer.make_tables(groups)
            if cached[2] is not None:
                optimizer.update_by_tables(cached[2], update)
                return
        for part in range(num_parts):
            self.update(index, part, tier, tensors, update, filled_params)

    def _is_matrix(self, segment: Segment) -> bool:
        return segment.name in self._matrix_names

    def part_inputs(
        self, index: int, part: int, tensors: Mapping[str, torch.Tensor], filled_params: Container[str]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[Segment]]:
        """Return a part's blocks by kind, the part's gradient, and the segments to update."""
        inputs = self._parts.get((index, part))
        if inputs is None:
            inputs = self._parts[index, part] = self._make_part_update(index, part)
        blocks = {state: tensors[key] for state, key in inputs.states}
        weight = tensors[inputs.weight]
        span = inputs.weight_range
        blocks["weight"] = weight if span is None else weight[span.start : span.stop]
        # As in torch, a parameter without a gradient is not updated at all, not even by weight decay.
        segments = [segment for parameter, segment in inputs.segments if parameter in filled_params]
        return blocks, tensors[inputs.gradient], segments

    def _make_part_update(self, index: int, part: int) -> _PartUpdate:
        """Return the inputs and outputs for the update of one part."""
        layout, segments = self.trained[index]
        elements = self._program.owned_layout_parts(layout)[part]
        weights = self._program.weight_keys(layout)
        is_cut = len(weights) == len(self._program.layout_parts(layout))
        names = {entry.offset: entry.name for entry in layout.entries}
        return _PartUpdate(
            [(state, self._program.state_keys(layout, state)[part]) for state in self._states],
            weights[part if is_cut else 0],
            None if is_cut else elements,
            self._program.gradient_keys(layout, 0)[part],
            [
                (names[segment.start], segment if len(elements) == layout.num_elements else segment.within(elements))
                for segment in segments
                if segment.start < elements.stop and segment.stop > elements.start
            ],
        )


class UpdateOps:
    """Executor of a tape's updates. Used by the thread that runs the step."""

    def __init__(self, execution: TapeExecution, updater: Updater) -> None:
        self._execution, self._updater = execution, updater
        self._program, self._homes = execution.model.program, execution.model.homes

    def are_all_on_device(self) -> bool:
        """Return whether all updates are deferred and can run on the device, with a factor that the device computes."""
        program, updater = self._program, self._updater
        if not program.updates.are_deferred or program.compute_tier == "ram":
            return False
        keys = (key for tick in program.ticks if tick.phase == "update" for key, _ in tick.uses)
        return program.compute_tier in updater.table_optimizers and all(
            self._homes[key] == program.compute_tier for key in keys
        )

    def op_layout(self, op: Op) -> UnitLayout:
        """Return the layout that an update op updates."""
        return self._updater.trained[op.visit][0]

    def run(self, op: Op, pending: PendingUpdate) -> None:
        """Run an update op, one part at a time."""
        layout = self.op_layout(op)
        # With separate factors, `for_layout` waits for the layer's norm and removes it, so call it once per layer.
        update, filled_params = pending.for_layout(layout.name), pending.with_gradient[layout.name]
        parts = self._program.layout_parts(layout)
        if update is not None and self._can_overlap_device(op):
            self._run_in_background(op, update, len(parts), filled_params)
            return
        if op.tier == "ram":
            # Wait, because the plan has scratch memory for only one update on the host at a time.
            self._execution.background.wait()
        # Lease the blocks even if the update is skipped, because later ops rely on the pins and evictions that follow.
        with self._execution.lease(self._execution.content_keys(op, op.held)) as held_blocks:
            if not op.passing and update is not None:
                self._updater.update_layout(op.visit, len(parts), op.tier, held_blocks, update, filled_params)
            for part, group in enumerate(op.passing):
                with self._execution.lease(self._execution.content_keys(op, group)) as blocks:
                    if update is not None:
                        self._updater.update(op.visit, part, op.tier, {**held_blocks, **blocks}, update, filled_params)

    def _can_overlap_device(self, op: Op) -> bool:
        """Return whether a host update can run while a device computes the next layers.

        All blocks of the update must be at home in RAM, so that longer leases do not reduce the memory for other
        blocks. The update must not orthogonalize matrices on the device, because only this thread queues such work.
        """
        is_at_home = all(self._homes[use.key] == op.tier for use in op.uses)
        return op.tier == "ram" != self._program.compute_tier and is_at_home and self._updater.matrices is None

    def _run_in_background(self, op: Op, update: Update, num_parts: int, filled_params: Container[str]) -> None:
        """Start an update on the background thread.

        This method leases the blocks at the update's position in the tape, so that no other op can change them. The
        background thread ends the leases when the update is done, so that the weights can be fetched without delay.
        """
        updater, leases = self._updater, ExitStack()
        assert not op.passing, op
        tensors = leases.enter_context(self._execution.lease(self._execution.content_keys(op, op.held)))

        def run_update() -> None:
            with leases:
                updater.update_layout(op.visit, num_parts, op.tier, tensors, update, filled_params)

        self._execution.background.start([use.key for use in op.held], run_update)
