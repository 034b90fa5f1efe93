"""Visits of experts to which no token goes: their weights stay where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatrain.engine.bound_unit import BoundUnit
    from megatrain.engine.program import MatrixParts, WeightAccess
    from megatrain.engine.suspend import UnitCall

__all__ = ["RoutedWeights"]


class RoutedWeights:
    """Leases the weights of a unit for a visit, unless no token of any micro-batch goes to the unit.

    Args:
        access: Leases the weights, and is told which visits are idle.

    Attributes:
        is_idle: Whether no token goes to the unit; known once ``note_calls`` has run.
    """

    def __init__(self, bound: BoundUnit, visit: int, access: WeightAccess) -> None:
        self._bound, self._visit, self._access = bound, visit, access
        self.is_idle = False

    def note_calls(self, calls: Sequence[UnitCall]) -> None:
        """Find out whether the unit is idle; at the first part of a module, announce all idle parts.

        Args:
            calls: The calls that wait at the unit. The visits of the module's other parts follow this one.
        """
        own = self._bound.unit.part
        if own is None or not calls:
            return
        if own.siblings[0] is own and all(own.is_routed(call.args) for call in calls):
            visits = range(self._visit, self._visit + len(own.siblings))
            parts = zip(visits, own.siblings, strict=True)
            idle = {number for number, part in parts if all(part.is_idle(call.args) for call in calls)}
            self._access.note_idle(visits, idle)
        self.is_idle = all(own.is_idle(call.args) for call in calls)

    @contextmanager
    def leased(self) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Yield the weights by owner's name; of an idle unit zeros, in the memory of one element.

        The forward and backward of an idle unit run all the same, on zeros: its result is the same, and the same
        parameters have gradients.
        """
        if self.is_idle:
            self._access.skip_weights(self._bound.unit, self._visit)
            yield self._bound.zeros()
            return
        with self._access.weights(self._bound.unit, self._visit) as weights:
            yield weights
