"""Runs whose graphs are kept from forward to backward, so that the backward needs no recompute.

The weights must stay in place and unchanged until the backward. `program/keeping.py` plans this.
docs/decisions/0015-keep-graphs-where-memory-is-left.md
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version

from megatrain.engine.unit.unit_run import KeptRun, UnitGraph

if TYPE_CHECKING:
    from megatrain.engine.unit.arguments import CapturedResult
    from megatrain.engine.unit.state import RandomStates
    from megatrain.engine.unit.suspend import SuspendedForward
    from megatrain.engine.unit.unit_run import UnitRun


class GraphKeeping:
    """Strategy that keeps the graph of every run in a visit."""

    has_recompute = False

    def __init__(self, random: RandomStates) -> None:
        self._random = random

    def run(
        self, run: UnitRun, forward: SuspendedForward, weights: Mapping[str, Tensor]
    ) -> tuple[CapturedResult, KeptGraph]:
        """Run the unit and keep its graph."""
        leaves = run.leaves()
        # Disable autocast's cache, as in a recompute. With the cache, all uses of a weight would share one cast in the
        # graph, so gradients would be added in a different order.
        result = run.compute(run.with_activations(leaves), self._random, keep_graph=True, cache_enabled=False)
        return result, KeptGraph(run.micro_batch, leaves, result.outputs, weights)


class KeptGraph(KeptRun):
    """Graph of one run, kept as workspace from forward to backward.

    The graph holds inputs that need a gradient, and tensors that autograd has saved. Unsaved outputs can be freed.

    Args:
        activations: Activations among the inputs, which are leaves of the graph.
        weights: Leaves for the run's trainable weights, by name.
    """

    def __init__(
        self, micro_batch: int, activations: Sequence[Tensor], outputs: Sequence[Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        self.micro_batch = micro_batch
        self.requires_grad = tuple(activation.requires_grad for activation in activations)
        self.num_outputs = len(outputs)
        edges = [get_gradient_edge(output) for output in outputs]
        self._graph = UnitGraph(edges, [activation for activation in activations if activation.requires_grad], weights)
        self._output_probes = [version_probe(output) for output in outputs]
        self._alias_probes: list[Tensor] = []

    def record_aliases(self, aliases: Sequence[Tensor]) -> None:
        """Record the output aliases that the rest of the model receives. The model can change them in place."""
        self._alias_probes = [version_probe(alias) for alias in aliases]

    @contextmanager
    def graph(self, weights: Mapping[str, Tensor]) -> Iterator[UnitGraph]:
        """Yield the graph. ``weights`` is not used, because the graph already has the leaves of its forward.

        If the model has changed an output in place and the graph needs this output, autograd raises an error, as in
        plain PyTorch. The model's aliases have separate version counters, so the graph's counters are incremented here.
        """
        for output_probe, alias_probe in zip(self._output_probes, self._alias_probes, strict=True):
            if alias_probe._version:
                increment_version(output_probe)
        yield self._graph


def version_probe(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the `_version` of `tensor`, even after `tensor` is deleted."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe
