"""Run of a unit for one micro-batch, and the interface through which a backward gets the run's graph.

A forward either keeps the graph (`graph_keeping.py`), or saves the inputs, from which the backward rebuilds the graph
(`input_saving.py`). Both modules implement `KeptRun`, so the visit's backward (`visit.py`) need not distinguish them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from megatrain.engine.unit.arguments import CapturedArguments, CapturedResult

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from megatrain.engine.unit.bound_unit import BoundUnit
    from megatrain.engine.unit.state import RandomStates, ThreadModes
    from megatrain.engine.unit.suspend import SuspendedForward


@dataclass(slots=True)
class UnitRun:
    """Run of a unit for one micro-batch, with all data needed to repeat the run.

    Attributes:
        call_index: Position of the run among the visit's calls.
        random_state: State of the micro-batch's random stream at the start of the run.
        modes: Grad mode and autocast in the code that called the unit.
        requires_grad: For each activation among the arguments, whether it needs a gradient.
    """

    bound: BoundUnit
    micro_batch: int
    call_index: int
    captured: CapturedArguments
    record_keys: tuple[str, ...]
    random_state: tuple[Tensor, ...]
    modes: ThreadModes
    requires_grad: tuple[bool, ...]

    @classmethod
    def from_call(cls, bound: BoundUnit, forward: SuspendedForward, call_index: int) -> UnitRun:
        """Capture the unit call at which a forward is suspended."""
        call = forward.call
        assert call is not None
        captured = CapturedArguments(bound.unit.name, call.args, call.kwargs)
        # Keep only the lists of records: a collector can also contain the setting that selects them.
        keys = tuple(key for key, items in (call.collector or {}).items() if isinstance(items, list))
        activations = [captured.tensors[i] for i in captured.activations]
        requires_grad = tuple(activation is not None and activation.requires_grad for activation in activations)
        return cls(
            bound, forward.micro_batch, call_index, captured, keys, forward.random_state, forward.modes, requires_grad
        )

    @property
    def is_differentiable(self) -> bool:
        """Whether the run has a backward."""
        return self.modes.grad_enabled and (any(self.requires_grad) or bool(self.bound.trainable))

    @property
    def activations(self) -> list[Tensor]:
        """Activations among the arguments, in order."""
        tensors = [self.captured.tensors[i] for i in self.captured.activations]
        return [tensor for tensor in tensors if tensor is not None]

    def with_activations(self, activations: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the tensors among the arguments, with activations replaced by ``activations``."""
        tensors = list(self.captured.tensors)
        for i, activation in zip(self.captured.activations, activations, strict=True):
            tensors[i] = activation
        return tensors

    def leaves(self) -> list[Tensor]:
        """Return each activation as a leaf for a new graph.

        Leaves are contiguous, as in the recompute, because strides can affect how kernels round.
        """
        grad_enabled = self.modes.grad_enabled
        return [
            activation.detach().contiguous().requires_grad_(requires_grad and grad_enabled)
            for activation, requires_grad in zip(self.activations, self.requires_grad, strict=True)
        ]

    def compute(
        self, tensors: list[Tensor | None], random: RandomStates, *, keep_graph: bool, cache_enabled: bool | None = None
    ) -> CapturedResult:
        """Run the unit with the saved modes and random state.

        Args:
            keep_graph: Whether a backward uses the graph. If False, autograd saves nothing.
            cache_enabled: Whether autocast caches cast weights; None for the setting in the modes.
        """
        with self.modes.apply(cache_enabled=cache_enabled):
            random.set(self.random_state)
            self.bound.rows.call_index = self.call_index
            return self.bound.run(self.captured, tensors, self.record_keys, keep_graph=keep_graph)


@dataclass(slots=True)
class UnitGraph:
    """Autograd graph of one run, ready for its backward.

    Attributes:
        outputs: Differentiable outputs of the run, or their gradient edges.
        inputs: Leaves for the activations that need a gradient.
        weights: Leaves for the trainable weights, by name.
    """

    outputs: Sequence[Tensor | GradientEdge]
    inputs: Sequence[Tensor]
    weights: Mapping[str, Tensor]

    def gradients(self, grad_outputs: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Run the backward and free the graph.

        Returns:
            Gradients of the inputs, and gradients of the weights. An entry is None if the tensor has no gradient.
        """
        gradients = optional_gradients(self.outputs, grad_outputs, [*self.inputs, *self.weights.values()])
        return gradients[: len(self.inputs)], gradients[len(self.inputs) :]


class KeptRun:
    """State of one run that is kept until the run's backward.

    Attributes:
        requires_grad: For each activation among the arguments, whether it needs a gradient.
        num_outputs: Number of differentiable outputs of the run.
    """

    micro_batch: int
    requires_grad: tuple[bool, ...]
    num_outputs: int

    def record_aliases(self, aliases: Sequence[Tensor]) -> None:
        """Record the output aliases that the rest of the model receives. The model can change them in place."""

    def graph(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[UnitGraph]:
        """Yield the graph of the run.

        Args:
            weights: Leaves for the trainable weights that are currently bound, by name.
        """
        raise NotImplementedError

    def skip(self) -> None:
        """Take the backward's planned leases without computing, because no gradient has arrived."""


def optional_gradients(
    outputs: Sequence[Tensor | GradientEdge], grad_outputs: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradient of each input, or None if no output with a gradient depends on the input."""
    pairs = [(out, grad) for out, grad in zip(outputs, grad_outputs, strict=True) if grad is not None]
    if not inputs:
        return []
    # Call the engine directly, because `torch.autograd.grad` would first dispatch to the leaves' class, which disables
    # interception of torch functions. Units with activation checkpointing need interception in their recompute.
    gradients = _engine_run_backward(
        tuple(out for out, _ in pairs), tuple(grad for _, grad in pairs), False, False, tuple(inputs), True, False
    )
    return list(gradients)
