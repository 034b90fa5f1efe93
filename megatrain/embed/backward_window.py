"""Weights in the backward: the graph saves references to blocks, and the backward leases the blocks again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.embed.held_weights import count_references
from megatrain.embed.room import WeightLease
from megatrain.embed.saved_tensors import KeptTensor, OuterSavedTensor, SavedTensor, make_saving_hooks, outer_hooks
from megatrain.embed.use_order import UseOrder
from megatrain.embed.weights import WeightBlock, WeightInUseError, find_held_block


@dataclass(frozen=True, slots=True)
class _SavedWeight(SavedTensor):
    """Saved view of a weight block, without its memory. ``version`` is the block's version when the view was saved."""

    window: BackwardLeases
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


class BackwardLeases:
    """Weight leases for the backward. A unit's weights stay leased until the backward needs another unit's weights.

    A graph node drops its weights after it has run. The number of tensors that share the memory shows whether a node
    still uses the weights, so only unused leases are released. Used by the thread that runs autograd.
    """

    def __init__(self, order: UseOrder) -> None:
        self._order = order
        self._leases: OrderedDict[WeightBlock, tuple[WeightLease, int]] = OrderedDict()

    def weights(self, block: WeightBlock) -> Tensor:
        """Return a block's flat weights, which stay valid while a view of them exists."""
        if block.held is not None:
            return block.held
        if block not in self._leases:
            self.release_unused()
            if not self._leases:
                self._close_after_backward()
            self._order.note(("backward", block.key), [(block.key, block.tier)])
            lease = block.lease()
            self._leases[block] = (lease, count_references(lease.tensor))
        return self._leases[block][0].tensor

    def release_unused(self) -> None:
        """Release the leases whose weights have no remaining views."""
        for block, (lease, num_references) in list(self._leases.items()):
            if count_references(lease.tensor) <= num_references:
                del self._leases[block]
                lease.release()

    def close(self, block: WeightBlock) -> None:
        """Release a lease before the block changes. Raise ``WeightInUseError`` if a graph still uses the weights."""
        if block not in self._leases:
            return
        lease, num_references = self._leases[block]
        if count_references(lease.tensor) > num_references:
            raise WeightInUseError(
                f"a retained graph (create_graph=True) still uses the weights of {block.layout.name}. Delete its "
                "results before the weights are updated"
            )
        del self._leases[block]
        lease.release()

    def _close_after_backward(self) -> None:
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self.release_unused)
        except RuntimeError:
            return  # no backward is running, so the next use releases the lease


def weight_hooks(window: BackwardLeases) -> torch.autograd.graph.saved_tensors_hooks:
    """Return saved-tensor hooks for a forward of a unit or module. They save weights as block references.

    All other tensors are passed to the outer hooks, such as hooks of ``offload_activations``,
    ``torch.utils.checkpoint`` or the user.
    """
    outer = outer_hooks()

    def pack(tensor: Tensor) -> SavedTensor:
        block = find_held_block(tensor)
        if block is not None and block.held is not None:
            offset = int(tensor.storage_offset()) - int(block.held.storage_offset())
            return _SavedWeight(window, block, block.version, tensor.size(), tensor.stride(), offset)
        return KeptTensor(tensor) if outer is None else OuterSavedTensor(outer, tensor)

    return make_saving_hooks(pack)
