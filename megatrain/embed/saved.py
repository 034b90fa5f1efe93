"""Weights in the autograd graph: saved by name, brought back when the backward wants them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.embed.weights import WeightInUseError, block_under, references

if TYPE_CHECKING:
    from megatrain.embed.order import UseOrder
    from megatrain.embed.weights import WeightBlock
    from tiered.lease import Lease

__all__ = ["BackwardWindow", "WeightHooks"]


@dataclass(frozen=True, slots=True)
class _SavedWeight:
    """A view of a block's numbers, without them. ``version``: of the block, as it was saved."""

    block: WeightBlock
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _SavedHere:
    """Any other tensor. Hooks keep autograd from seeing that it was changed in between: so its version is kept."""

    tensor: Tensor
    version: int


@dataclass(frozen=True, slots=True)
class _SavedElsewhere:
    """What the hooks around these ones made of a tensor."""

    unpack: Callable[[Any], Tensor]
    packed: Any


class BackwardWindow:
    """Leases of the backward: a unit's weights stay while its nodes run, and go when another unit's are wanted.

    A node of the graph has let go of its weights when it has run: that is seen by the number of tensors that share
    their memory, so a lease never ends under a node that still computes. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._open: OrderedDict[WeightBlock, tuple[Lease, int]] = OrderedDict()

    def numbers(self, block: WeightBlock) -> Tensor:
        """Return the flat numbers of a block, which stay valid until no view of them is left."""
        if block.held is not None:
            return block.held
        if block not in self._open:
            self.close_unused()
            if not self._open:
                self._close_after_backward()
            self._order.note(("backward", block.key), [(block.key, block.tier)])
            lease = block.borrow()
            self._open[block] = (lease, references(lease.tensor))
        return self._open[block][0].tensor

    def close_unused(self) -> None:
        """Give back the leases whose numbers nobody looks at."""
        for block, (lease, num_references) in list(self._open.items()):
            if references(lease.tensor) <= num_references:
                del self._open[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Give back the lease of one block, which is about to change.

        Raises:
            WeightInUseError: something still looks at its numbers.
        """
        if block not in self._open:
            return
        lease, num_references = self._open[block]
        if references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a graph that is kept (create_graph=True) still uses the weights of {block.layout.name}: drop what "
                "was computed with it before they are updated"
            )
        del self._open[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.close_unused)
        except RuntimeError:
            return  # a saved tensor is looked at outside of a backward: the next use closes it


class WeightHooks:
    """Saved-tensor hooks for one forward of a unit, or of a whole tiered module; entered and left once.

    Only the innermost pair of hooks is asked by autograd, so what is no weight goes to the pair around: that of
    ``offload_activations``, of ``torch.utils.checkpoint``, or of the user.
    """

    def __init__(self, window: BackwardWindow) -> None:
        self._window = window
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = outer
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def enter(self) -> None:
        """Be asked from now on."""
        self._hooks.__enter__()

    def leave(self) -> None:
        """Be asked no more."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Any:
        block = block_under(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(block, block.version, tensor.size(), tensor.stride(), offset)
        if self._outer is None:
            return tensor if tensor.is_inference() else _SavedHere(tensor, tensor._version)
        pack, unpack = self._outer
        return _SavedElsewhere(unpack, pack(tensor))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _SavedHere):
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{packed.tensor.dtype} {tuple(packed.tensor.shape)} is at version {packed.tensor._version}; "
                    f"expected version {packed.version} instead"
                )
            return packed.tensor
        if isinstance(packed, _SavedWeight):
            if packed.block.version != packed.version:
                raise RuntimeError(
                    f"the weights of {packed.block.layout.name}, needed for gradient computation, have been changed by "
                    "an optimizer's step or otherwise since the forward: run the forward again"
                )
            numbers = self._window.numbers(packed.block)
            return numbers.as_strided(packed.size, packed.stride, numbers.storage_offset() + packed.offset)
        if isinstance(packed, _SavedElsewhere):
            return packed.unpack(packed.packed)
        assert isinstance(packed, Tensor), type(packed)
        return packed
