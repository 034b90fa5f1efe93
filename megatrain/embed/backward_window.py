"""Weights in the backward: the graph saves references to blocks, and the backward leases the blocks again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.embed.held_weights import references
from megatrain.embed.room import WeightLease
from megatrain.embed.saved_tensors import KeptInMemory, OuterSavedTensor, SavedTensor, outer_hooks, saving
from megatrain.embed.use_order import UseOrder
from megatrain.embed.weights import WeightBlock, WeightInUseError, block_under


@dataclass(frozen=True, slots=True)
class _SavedWeight(SavedTensor):
    """Saved view of a weight block, without its memory. ``version`` is the block's version when the view was saved."""

    window: BackwardWindow
    block: WeightBlock
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        if self.block.version != self.version:
            raise RuntimeError(
                f"the weights of {self.block.layout.name}, needed for gradient computation, have been changed by an "
                "optimizer's step or by other code since the forward. Run the forward again"
            )
        weights = self.window.weights(self.block)
        return weights.as_strided(self.size, self.stride, weights.storage_offset() + self.offset)


class BackwardWindow:
    """Leases of the backward. A unit's weights stay leased until the backward needs another unit's weights.

    A graph node drops its weights after it ran. The number of tensors that share the memory shows whether a node still
    uses the weights, so a lease in use never ends. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._open: OrderedDict[WeightBlock, tuple[WeightLease, int]] = OrderedDict()

    def weights(self, block: WeightBlock) -> Tensor:
        """Return a block's flat weights, which stay valid while a view of them exists."""
        if block.held is not None:
            return block.held
        if block not in self._open:
            self.close_unused()
            if not self._open:
                self._close_after_backward()
            self._order.note(("backward", block.key), [(block.key, block.tier)])
            lease = block.lease()
            self._open[block] = (lease, references(lease.tensor))
        return self._open[block][0].tensor

    def close_unused(self) -> None:
        """Release the leases whose weights have no remaining views."""
        for block, (lease, num_references) in list(self._open.items()):
            if references(lease.tensor) <= num_references:
                del self._open[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Release a lease before its block changes. Raise ``WeightInUseError`` if a graph still uses the weights."""
        if block not in self._open:
            return
        lease, num_references = self._open[block]
        if references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a retained graph (create_graph=True) still uses the weights of {block.layout.name}. Delete its "
                "results before the weights are updated"
            )
        del self._open[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.close_unused)
        except RuntimeError:
            return  # no backward is running, so the next use releases the lease


def weight_hooks(window: BackwardWindow) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks for a forward of a unit or module. They save weights as block references.

    All other tensors are passed to the outer hooks, such as hooks of ``offload_activations``,
    ``torch.utils.checkpoint`` or the user.
    """
    outer = outer_hooks()

    def pack(tensor: Tensor) -> SavedTensor:
        block = block_under(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(window, block, block.version, tensor.size(), tensor.stride(), offset)
        return KeptInMemory(tensor) if outer is None else OuterSavedTensor(outer, tensor)

    return saving(pack)
