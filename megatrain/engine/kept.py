"""Graphs that a unit's first run leaves for its backward, where memory is left: nothing is run again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version

__all__ = ["KeptGraph"]


class KeptGraph:
    """The graph of one micro-batch's run of a unit, from its forward to its backward.

    It holds what autograd saved, and the inputs that need a gradient. Outputs are held only if autograd saved them.

    Args:
        streams: The inputs that belong to the stream of activations: leaves of this graph.
        outputs: What the run gave that needs a gradient.
    """

    def __init__(self, streams: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.requires_grad = tuple(stream.requires_grad for stream in streams)
        self.wanted = [stream for stream in streams if stream.requires_grad]
        self.edges = [get_gradient_edge(output) for output in outputs]
        self.num_outputs = len(self.edges)
        self._inside = [_counter(output) for output in outputs]
        self._outside: list[Tensor] = []

    def handed_out(self, aliases: Sequence[Tensor]) -> None:
        """Note the aliases of the outputs that the rest of the model works with; it may change these in place."""
        self._outside = [_counter(alias) for alias in aliases]

    def check(self) -> None:
        """Let autograd see what was changed in place since: it refuses the backward if the graph needs that tensor.

        The graph and the rest of the model share the outputs' memory but not their version counters. So a change that
        plain PyTorch refuses is refused here too, and every other one is allowed.
        """
        for inside, outside in zip(self._inside, self._outside, strict=True):
            if outside._version:
                increment_version(inside)


def _counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of `tensor`, and nothing else."""
    counter = tensor.detach()
    counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter
