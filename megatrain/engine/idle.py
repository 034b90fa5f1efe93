"""Visits of experts without a token. Their weights are not fetched."""

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
    """Lease of a unit's weights for a visit, skipped if no token of any micro-batch is routed to the unit.

    Args:
        access: Leases the weights, and receives the list of idle visits.

    Attributes:
        is_idle: Whether no token is routed to the unit; valid after ``note_calls``.
    """

    def __init__(self, bound: BoundUnit, visit: int, access: WeightAccess) -> None:
        self._bound, self._visit, self._access = bound, visit, access
        self.is_idle = False

    def note_calls(self, calls: Sequence[UnitCall]) -> None:
        """Determine whether the unit is idle. The first part of a module announces all idle parts.

        Args:
            calls: Calls that wait at the unit. The visits of the module's other parts follow this one.
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
        """Yield the weights by owner's name; for an idle unit, zeros in the memory of one element each.

        Forward and backward of an idle unit still run, on zeros, so that its result and the set of parameters with a
        gradient stay the same.
        """
        if self.is_idle:
            self._access.skip_weights(self._bound.unit, self._visit)
            yield self._bound.zeros()
            return
        with self._access.weights(self._bound.unit, self._visit) as weights:
            yield weights
