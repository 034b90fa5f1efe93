"""Leases of a running head's weights and gradients, either whole or one vocabulary part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.engine.head.head_model import HeadRows, TrunkOutput
from megatrain.engine.head.vocabulary import PartWeight, VocabularyPart
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.passing import SplitWeight
from megatrain.engine.unit.unit_run import optional_gradients
from megatrain.engine.unit.weight_gradients import GradientTarget, gradient_target, weight_leaf

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import BlockAccess, GradientSink


#: For each unit of the head: the unit, its visit number, and its trainable weights by name.
BoundWeights = list[tuple[BoundUnit, int, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, eq=False)
class HeadGradients:
    """Trained weights of a head, by visit and name, and the sinks for their gradients, by visit."""

    weights: dict[tuple[int, str], Tensor]
    sinks: dict[int, GradientSink]

    def set_micro_batch(self, item: TrunkOutput) -> None:
        """Set the micro-batch to which the next gradients of all sinks belong."""
        for sink in self.sinks.values():
            sink.set_micro_batch(item.micro_batch)

    def add_gradients(self, piece: HeadRows, output: Tensor, gradient: Tensor, part_leaves: list[Tensor]) -> None:
        """Run the backward from ``output``. Accumulate the gradients of the weights and of the piece's rows.

        Args:
            part_leaves: Leaves of vocabulary parts. Their gradients go to their own targets (``gradient_target``).
        """
        rows = [piece.leaf] if piece.leaf.requires_grad else []
        gradients = optional_gradients([output], [gradient], [*rows, *self.weights.values(), *part_leaves])
        if rows:
            piece.gradient = _add_in_fp32(piece.gradient, gradients.pop(0))
        for (visit, name), weight_grad in zip(self.weights, gradients, strict=False):
            if weight_grad is not None:
                self.sinks[visit].add(name, weight_grad)
        for leaf, weight_grad in zip(part_leaves, gradients[len(self.weights) :], strict=True):
            target = gradient_target(leaf)
            if weight_grad is not None and target is not None:
                indexes = torch.arange(target.first_row, target.first_row + len(weight_grad), device=weight_grad.device)
                target.receiver.sink.add_rows(target.name, indexes, weight_grad)


class HeadWeights:
    """Leases of a head's weights and gradients.

    Args:
        bounds: Units of the head, each with its visit number.
        cut_weight: Name of the weight that computes logits in parts; "" if the vocabulary is not split.
        part_weight: Placeholder for the cut weight; None if the vocabulary is not split.
        ranges: Columns `(start, stop)` of each vocabulary part.

    Attributes:
        parts: Vocabulary parts, leased until the stack of ``bind`` closes; empty if blocks are leased one at a time.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[BoundUnit, int]],
        access: BlockAccess,
        cut_weight: str = "",
        part_weight: PartWeight | None = None,
        ranges: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._bounds, self._access = bounds, access
        self._cut_weight, self._part_weight, self._ranges = cut_weight, part_weight, ranges
        self.parts: list[VocabularyPart] = []
        self._passing_weight: SplitWeight | None = None  # cut weight whose blocks are leased one at a time

    @property
    def is_passing(self) -> bool:
        """Whether the blocks of the cut weight are leased one at a time, each block once per tick."""
        return self._passing_weight is not None

    def bind(self, stack: ExitStack) -> BoundWeights:
        """Lease and bind the weights of all units until the stack closes."""
        if self._bounds:
            self._access.begin("head", self._bounds[0][1])
        units: BoundWeights = []
        for bound, visit in self._bounds:
            weights = stack.enter_context(self._access.weights(bound.unit, visit))
            leaves = stack.enter_context(bound.bind(weights))
            if self._part_weight is not None and self._cut_weight in weights:
                weight = stack.enter_context(bound.replace_weight(self._cut_weight, self._part_weight))
                self.parts = self._lease_parts(weight, stack)
                stack.callback(self.parts.clear)  # drop these views of leased blocks before the leases end
            units.append((bound, visit, leaves))
        return units

    def leaves(self, stack: ExitStack, units: BoundWeights) -> HeadGradients:
        """Lease the gradient accumulators of bound weights until the stack closes."""
        gradients = HeadGradients({}, {})
        for bound, visit, leaves in units:
            gradients.weights.update(((visit, name), leaf) for name, leaf in leaves.items())
            if leaves:
                gradients.sinks[visit] = stack.enter_context(self._access.gradients(bound.unit, visit))
                stack.enter_context(bound.receiver.use_sink(gradients.sinks[visit]))
        return gradients

    def blocks(self) -> Iterator[AbstractContextManager[list[VocabularyPart]]]:
        """Yield one context per block of the cut weight, in order. The context leases the block and yields its parts.

        If all parts are already leased, they count as one block.
        """
        weight = self._passing_weight
        if weight is None:
            yield nullcontext(self.parts)
            return
        yield from (self._block(weight, index) for index in range(len(weight.parts.rows)))

    def reversed_blocks(self, leaves: HeadGradients) -> Iterator[AbstractContextManager[list[VocabularyPart]]]:
        """Yield contexts like ``blocks``, but in reverse order. The contexts also lease blocks of the gradient.

        If neither weight nor gradient is leased by part, all parts count as one block.
        """
        sinks = [sink for sink in leaves.sinks.values() if sink.part_rows(self._cut_weight)]
        weight = self._passing_weight
        rows = weight.parts.rows if weight is not None else sinks[0].part_rows(self._cut_weight) if sinks else ()
        for index in reversed(range(len(rows))):
            gradient = sinks[0].part(self._cut_weight, index) if sinks else nullcontext()
            yield self._block_with_gradient(gradient, index, rows[index])
        if not rows:
            yield nullcontext(self.parts)

    def accumulate_part(self, part: VocabularyPart, leaves: HeadGradients) -> AbstractContextManager[None]:
        """Return a context in which the gradients of one vocabulary part are accumulated."""
        for sink in leaves.sinks.values():
            if sink.part_rows(self._cut_weight):
                return sink.rows(self._cut_weight, part.start, part.stop)
        return nullcontext()

    def _lease_parts(self, weight: Tensor, stack: ExitStack) -> list[VocabularyPart]:
        """Return the vocabulary parts, leased until the stack closes, or none if blocks are leased one at a time."""
        self._passing_weight = None
        if not isinstance(weight, SplitWeight):
            return _vocabulary_parts(weight.detach(), 0, self._ranges, gradient_target(weight))
        if weight.parts.is_passing:
            self._passing_weight = weight
            return []
        parts: list[VocabularyPart] = []
        for index in range(len(weight.parts.rows)):
            parts += stack.enter_context(self._block(weight, index))
        return parts

    @contextmanager
    def _block(self, weight: SplitWeight, index: int) -> Iterator[list[VocabularyPart]]:
        """Lease a block of the weight, and yield the vocabulary parts in the block."""
        rows = weight.parts.rows[index]
        block_ranges = [(start, stop) for start, stop in self._ranges if start in rows]
        assert block_ranges[-1][1] == rows.stop, (rows, block_ranges)
        with weight.parts.part(index) as block:
            parts = _vocabulary_parts(block.to(weight.dtype), rows.start, block_ranges, weight.target)
            yield parts
            parts.clear()

    @contextmanager
    def _block_with_gradient(
        self, gradient: AbstractContextManager[None], index: int, rows: range
    ) -> Iterator[list[VocabularyPart]]:
        block_parts = [part for part in self.parts if part.start in rows]
        weight = self._passing_weight
        with gradient, nullcontext(block_parts) if weight is None else self._block(weight, index) as parts:
            yield parts


def _vocabulary_parts(
    rows: Tensor, first_row: int, ranges: Sequence[tuple[int, int]], target: GradientTarget | None
) -> list[VocabularyPart]:
    """Return vocabulary parts as views of ``rows``, which start at row ``first_row`` of the weight."""
    parts: list[VocabularyPart] = []
    for start, stop in ranges:
        part_rows = rows[start - first_row : stop - first_row]
        leaf = part_rows if target is None else weight_leaf(part_rows, replace(target, first_row=start))
        parts.append(VocabularyPart(start, stop, leaf))
    return parts


def _add_in_fp32(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Add a part's gradient to the sum of a piece, in fp32. The first gradient is returned unchanged."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return total.float().add_(gradient)
