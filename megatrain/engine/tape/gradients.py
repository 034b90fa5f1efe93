"""Records of a step's gradients: their norms, and which parameters have a gradient from which use site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from megatrain.engine.program.visit_trace import layout_uses
from megatrain.optim.clip import SquaredNorm, sum_gradients
from megatrain.optim.threads import KernelThreads

if TYPE_CHECKING:
    from megatrain.engine.tape.streamed import StreamedModel
    from megatrain.engine.tape.updates import LayerScales
    from megatrain.ranks.lanes import Lanes


class StepGradients:
    """Records of the running step's gradients. Used only by the thread that runs the step.

    Attributes:
        lanes: Lanes of this process.
        uses: Visits that use each layout, in forward order. The backward reaches the first visit last.
        squared_norms: Squared norms of complete gradients, by layout. Norms computed on a device stay device scalars,
            because reading them would synchronize the host in the middle of the step.
        with_gradient: Parameters that have a gradient in this step, by layout.
    """

    def __init__(self, model: StreamedModel, threads: KernelThreads) -> None:
        self.lanes: Lanes = model.program.sharding.own_lanes
        self.threads = threads
        self.uses = layout_uses(model.graph, model.trace)
        self._filled_params: dict[str, dict[int, set[str]]] = {}  # layout -> use site -> parameters with a gradient
        self._norms: dict[str, SquaredNorm] = {}  # by layout, for gradients that are incomplete
        self._scales: LayerScales | None = None
        self.squared_norms: dict[str, float | torch.Tensor] = {}
        self.with_gradient: dict[str, set[str]] = {}

    def start_step(self, scales: LayerScales | None) -> None:
        """Reset all records for a new step.

        Args:
            scales: Factors for each layer's gradient; None if the norm of the whole step determines one factor.
        """
        self._filled_params = {name: {site: set() for site in range(len(uses))} for name, uses in self.uses.items()}
        # Create new objects, because a pending update still uses the objects of the previous step.
        self.squared_norms, self.with_gradient, self._scales = {}, {}, scales

    def use_site(self, name: str, visit: int) -> int:
        """Return the position of a visit among a layout's use sites."""
        return self.uses[name].index(visit)

    def site_params(self, name: str, visit: int) -> set[str]:
        """Return which parameters of a layout have a gradient from one use site."""
        return self._filled_params[name][self.use_site(name, visit)]

    def record_filled(self, name: str, visit: int, parameters: Iterable[str]) -> None:
        """Record that parameters of a layout have a gradient from one use site."""
        self.site_params(name, visit).update(parameters)

    def filled_params(self, name: str) -> set[str]:
        """Return which parameters of a layout have a gradient from any use site."""
        return set[str]().union(*self._filled_params[name].values())

    def add_uses(self, block: torch.Tensor, other_gradients: Sequence[torch.Tensor]) -> None:
        """Add the other use sites' gradients, in forward order, to the gradient of the first use site."""
        for gradient in other_gradients:
            if block.is_cuda:
                block.add_(gradient)
            else:
                sum_gradients(block, gradient, self.threads)

    def add_to_norm(self, name: str, part: int, block: torch.Tensor) -> None:
        """Add a part of a layout's complete gradient to its norm."""
        self._norms.setdefault(name, SquaredNorm(self.threads)).add(part, block)

    def add_all_to_norm(self, name: str, blocks: Sequence[torch.Tensor]) -> None:
        """Add all parts of a layout's complete gradient to its norm."""
        self._norms.setdefault(name, SquaredNorm(self.threads)).add_all(blocks)

    def complete(self, name: str, visit: int) -> None:
        """Record the norm of a layout's gradient if this use site completes the gradient and all parts were added."""
        if visit == self.uses[name][0] and name in self._norms:
            self.record_complete(name, self._norms.pop(name).total(), self.filled_params(name))

    def record_complete(self, name: str, squared_norm: float | torch.Tensor, filled_params: set[str]) -> None:
        """Record the norm of a layout's complete gradient, and the parameters that have a gradient."""
        self.with_gradient[name] = filled_params
        self.squared_norms[name] = squared_norm
        if self._scales is not None:
            self._scales.record_norm(name, squared_norm)
