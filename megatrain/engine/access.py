"""What the engine needs from whoever keeps weights, gradients and activations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.models.graph import Unit

__all__ = ["BlockAccess", "GradientSink"]


class GradientSink(Protocol):
    """fp32 accumulators of one use site."""

    def add(self, name: str, gradient: Tensor, /) -> None:
        """Add one micro-batch's gradient (compute dtype, the parameter's shape); the first one of a step is copied."""


class BlockAccess(Protocol):
    """Blocks of one training step, in the order in which the engine asks for them. Used by one thread.

    A *visit* is the ordinal of a unit call inside one forward; a unit that is called twice has two visits, and each
    visit is a use site with gradient accumulators of its own.
    """

    def begin(self, phase: Literal["forward", "head", "backward"], visit: int) -> None:
        """Announce the next piece of work: forward visits 0.., the head (its first visit), backward ..0.

        A visit that the loss does not depend on is announced too, and its accumulators and activations are opened
        and closed unused, so that the order of announcements depends on the model alone.
        """

    def weights(self, unit: Unit, visit: int) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Owner's full parameter name -> tensor in the compute dtype on the compute device, valid inside."""

    def gradients(self, unit: Unit, visit: int) -> AbstractContextManager[GradientSink]:
        """Accumulators of the unit's trainable parameters at this use site; asked for only if there are any."""

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        """Copy a tensor away; it must not be kept."""

    def get_activation(self, visit: int, micro_batch: int, index: int) -> AbstractContextManager[Tensor]:
        """The same shape, dtype and bits back, once; dead after exit."""
