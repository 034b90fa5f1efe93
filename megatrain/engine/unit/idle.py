"""Visits of experts to which no token is routed. Their weights are not fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import MatrixParts, WeightAccess
    from megatrain.engine.unit.bound_unit import BoundUnit
    from megatrain.engine.unit.suspend import UnitCall


class RoutedWeights:
    """Lease of a unit's weights for a visit. The lease is skipped if no token of any micro-batch is routed to the unit.

    Attributes:
        is_idle: Whether no token is routed to the unit; valid after ``record_calls``.
    """

    def __init__(self, bound: BoundUnit, visit: int, access: WeightAccess) -> None:
        self._bound, self._visit, self._access = bound, visit, access
        self.is_idle = False

    def record_calls(self, calls: Sequence[UnitCall]) -> None:
        """Determine whether the unit is idle, given the calls that wait at it.

        If the unit is the first part of a module, this also announces which of the module's parts are idle.
        """
        part = self._bound.unit.part
        if part is None or not calls:
            return
        if part.siblings[0] is part and all(part.has_routing(call.args) for call in calls):
            visits = range(self._visit, self._visit + len(part.siblings))
            siblings = zip(visits, part.siblings, strict=True)
            idle_visits = {visit for visit, sibling in siblings if all(sibling.is_idle(call.args) for call in calls)}
            self._access.announce_idle(visits, idle_visits)
        self.is_idle = all(part.is_idle(call.args) for call in calls)

    @contextmanager
    def lease(self) -> Iterator[Mapping[str, Tensor | MatrixParts]]:
        """Lease the weights, by name. For an idle unit, yield zero-stride zeros instead.

        An idle unit runs on these zeros, so that its results and gradients have the usual form.
        """
        if self.is_idle:
            self._access.skip_weights(self._bound.unit, self._visit)
            yield self._bound.zeros()
            return
        with self._access.weights(self._bound.unit, self._visit) as weights:
            yield weights
