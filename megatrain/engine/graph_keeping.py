"""Runs whose graphs are kept from forward to backward, without offloading and recompute.

The weights must stay in place and unchanged until the backward. `program.keeping_graphs` ensures it.
docs/decisions/0015-keep-graphs-where-memory-is-left.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version

from megatrain.engine.unit_run import KeptRun, UnitGraph

if TYPE_CHECKING:
    from megatrain.engine.arguments import CapturedResult
    from megatrain.engine.state import RandomStates
    from megatrain.engine.suspend import SuspendedForward
    from megatrain.engine.unit_run import UnitRun

__all__ = ["GraphKeeping", "KeptGraph", "version_probe"]


class GraphKeeping:
    """Strategy that keeps the graph of each run of a visit."""

    recomputes = False

    def __init__(self, random: RandomStates) -> None:
        self._random = random

    def run(
        self, run: UnitRun, forward: SuspendedForward, weights: Mapping[str, Tensor]
    ) -> tuple[CapturedResult, KeptGraph]:
        """Run the unit and keep its graph."""
        leaves = run.leaves()
        # Disable autocast's cache. A cached cast of a weight is one graph node for all uses, so their gradients would
        # be added in a different order than in the recompute, which has no cache.
        result = run.compute(run.with_activations(leaves), self._random, keep_graph=True, cache_enabled=False)
        return result, KeptGraph(run.micro_batch, leaves, result.outputs, weights)


class KeptGraph(KeptRun):
    """Graph of one run, kept in memory outside of blocks from its forward to its backward.

    It holds the inputs that need a gradient and the tensors that autograd saved, outputs only among the latter.

    Args:
        streams: Activations among the inputs; leaves of this graph.
        weights: Leaves of the run's trainable weights, by owner's name.
    """

    def __init__(
        self, micro_batch: int, streams: Sequence[Tensor], outputs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        self.micro_batch = micro_batch
        self.requires_grad = tuple(stream.requires_grad for stream in streams)
        self.num_outputs = len(outputs)
        edges = [get_gradient_edge(output) for output in outputs]
        self._graph = UnitGraph(edges, [stream for stream in streams if stream.requires_grad], weights)
        self._inside = [version_probe(output) for output in outputs]
        self._outside: list[Tensor] = []

    def record_aliases(self, aliases: Sequence[Tensor]) -> None:
        """Record the aliases of the outputs. The rest of the model uses the aliases, and can change them in place."""
        self._outside = [version_probe(alias) for alias in aliases]

    @contextmanager
    def graph(self, weights: Mapping[str, Tensor]) -> Iterator[UnitGraph]:
        """Yield the graph. Its leaves are the leaves of the forward.

        Autograd must raise if the graph needs an output that the model has changed in place. The graph and the model
        share the memory of the outputs but not the version counters. Incrementing the inner counters makes autograd
        raise the errors of plain PyTorch.
        """
        for inside, outside in zip(self._inside, self._outside, strict=True):
            if outside._version:
                increment_version(inside)
        yield self._graph


def version_probe(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the `_version` of `tensor`, even after `tensor` is deleted."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
