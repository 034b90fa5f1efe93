"""Interfaces through which the running model requests weights, activations and gradient sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatrain.engine.program.step_program import ModelPhase

if TYPE_CHECKING:
    from megatrain.models.graph import Unit


class WeightAccess(Protocol):
    """Interface through which the running model requests weights, in program order and on one thread."""

    def begin(self, phase: ModelPhase, visit: int) -> None:
        """Advance to the next tick: forward visits in order, then the head, then backward visits in reverse.

        For the head, ``visit`` is its first visit. The model also announces visits that do not affect the loss, and
        takes their planned leases. The order of ticks and the planned traffic therefore never depend on data.
        """

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, Tensor | MatrixParts]]:
        """Lease a unit's weights in the compute dtype on the compute device, by full parameter name.

        For a cut weight, the value is a `MatrixParts`.
        """

    def skip_weights(self, unit: Unit, visit: int) -> None:
        """Skip a unit's weights. Called instead of ``weights`` if no token of the step is routed to the unit.

        Planned traffic is an upper bound, because it also counts skipped weights.
        """

    def announce_idle(self, visits: Sequence[int], idle_visits: Collection[int]) -> None:
        """Announce which visits, starting with the current visit, will skip their weights in forward and backward.

        Args:
            visits: Visits of all routed parts of one layer.
            idle_visits: Visits that get no token.
        """


class BlockAccess(WeightAccess, Protocol):
    """Interface through which the running model requests the blocks of one step.

    A unit that is called twice in a forward has two visits. Each visit is a use site with separate accumulators.
    """

    def gradients(self, unit: Unit, visit: int) -> AbstractContextManager[GradientSink]:
        """Lease the gradient accumulators of a unit's trainable parameters at this use site."""

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        """Copy an activation into its block. The block keeps no reference to the caller's tensor."""

    def reuse_activation(self, visit: int, micro_batch: int, index: int, source: tuple[int, int]) -> None:
        """Record that an activation is the tensor already saved at ``source`` (visit, index), and uses its block."""

    def get_activation(self, visit: int, micro_batch: int, index: int) -> AbstractContextManager[Tensor]:
        """Lease an activation, bit-identical to the stored tensor. The visit that stored it reads it last."""

    def results_block(self, visit: int, micro_batch: int) -> AbstractContextManager[Tensor]:
        """Lease the block of a visit's results, uint8 [N]. The forward writes it, and the backward reads it once.

        Called only by visits that save results (``Recompute``), after the activations of the micro-batch.
        """


class MatrixParts(Protocol):
    """Matrix whose rows are stored in several blocks.

    Attributes:
        shape: [rows, columns] of the matrix.
        is_passing: Whether a tick leases the parts one at a time, each part once. If False, it leases all at once.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def rows(self) -> Sequence[range]: ...

    @property
    def is_passing(self) -> bool: ...

    def part(self, index: int, /) -> AbstractContextManager[Tensor]:
        """Lease the rows of part ``index``."""


class GradientSink(Protocol):
    """Gradient accumulators of one use site, in fp32."""

    def set_micro_batch(self, micro_batch: int, /) -> None:
        """Set the micro-batch to which the next gradients belong, by its number in this process.

        Call this for the micro-batches in order. Each ``rows`` context starts again with the first micro-batch.
        """

    def part_rows(self, name: str, /) -> Sequence[range]:
        """Return the row range of each part to fill within ``part``; empty if all rows are leased at once."""
        return ()

    def part(self, name: str, index: int, /) -> AbstractContextManager[None]:
        """Lease one part of a parameter's accumulator. Lease each part once. The head leases the parts in reverse."""
        raise AssertionError(f"{name} has no parts")

    def rows(self, name: str, start: int, stop: int, /) -> AbstractContextManager[None]:
        """Return a context in which all micro-batches add their products to these rows of the leased part."""
        raise AssertionError(f"{name} has no parts")

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Add one micro-batch's gradient, in the compute dtype. A step's first gradient overwrites the accumulator."""

    def add_product(self, name: str, left: Tensor, right: Tensor, first_row: int = 0, /) -> None:
        """Add the product of two matrices to the rows of a gradient that start at ``first_row``.

        Together, the products of a pass must cover all rows of the gradient.
        """

    def add_rows(self, name: str, indexes: Tensor, rows: Tensor, padding_idx: int | None = None, /) -> None:
        """Add rows to the gradient's rows at ``indexes``, in order. Rows whose index is ``padding_idx`` are skipped."""
