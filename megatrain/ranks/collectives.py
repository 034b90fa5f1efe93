"""How bytes move between ranks: gather, exchange, scatter, gather to one rank. Nothing is added up here.

torch.distributed carries bytes, gloo between host memory and NCCL between GPUs. Its reductions are not used: the order
in which they add depends on the number of ranks, the topology and the library. So every number of a run is made by the
project's own kernels.

Collectives are matched by their order, and a rank that leaves one out makes all others wait forever. So only ticks of a
program issue them, which are the same on all ranks (`check_alike`), whatever the data are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["PEER", "Collectives"]

#: Stands for the other ranks in the names of links: ``"ranks->ram"``, ``"gpu->ranks"``.
PEER = "ranks"


class Collectives:
    """The ranks of a process group, as places to send bytes to. Used by one thread.

    Tensors are contiguous, of any dtype, and on the group's device: of the host with gloo, of a GPU with NCCL. On a
    GPU collectives are queued on the current stream; on the host they are done when the call returns, or, if
    ``is_async``, when the work that is returned has been waited for.

    Args:
        group: of the ranks; None: the default group.
        tier: name of the tier that the tensors of ``gather`` and ``exchange`` are in: names the links.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        moved_bytes: by link, what ``gather`` and ``exchange`` sent to other ranks, and received from them.
    """

    def __init__(self, group: ProcessGroup | None = None, *, tier: str = "ram") -> None:
        import torch.distributed as dist

        self._dist, self._group, self._tier = dist, group, tier
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.moved_bytes: Counter[str] = Counter({f"{PEER}->{tier}": 0, f"{tier}->{PEER}": 0})
        # torch 2.13 deprecates the name that versions before it have.
        self._all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(self, full: Tensor, share: Tensor, *, is_async: bool = False) -> Work | None:
        """Write the shares of all ranks into ``full``, one after the other.

        Args:
            full: [ranks * N]; written.
            share: [N], the same length on all ranks.
        """
        assert full.numel() == self.size * share.numel() and full.dtype == share.dtype, (full.shape, share.shape)
        self._count((self.size - 1) * _nbytes(share), (self.size - 1) * _nbytes(share))
        work: Work | None = self._all_gather(_bytes(full), _bytes(share), group=self._group, async_op=is_async)
        return work

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
        *,
        is_async: bool = False,
    ) -> Work | None:
        """Send each rank its part of ``sent``, and write what each sends here into ``received``, in their order.

        Args:
            received: 1-D, as long as the lengths together; written.
            sent: 1-D, as long as the lengths together.
            received_lengths: elements that come from each rank.
            sent_lengths: elements that go to each rank.
        """
        assert received.numel() == sum(received_lengths) and sent.numel() == sum(sent_lengths)
        size = sent.element_size()
        self._count(
            size * (sent.numel() - sent_lengths[self.rank]), size * (received.numel() - received_lengths[self.rank])
        )
        work: Work | None = self._dist.all_to_all_single(
            received, sent, list(received_lengths), list(sent_lengths), group=self._group, async_op=is_async
        )
        return work

    def scatter(self, share: Tensor, shares: Sequence[Tensor] | None, source: int) -> None:
        """Write the n-th of ``shares``, which rank ``source`` gives, into ``share`` on rank n.

        Args:
            share: [N], the same length on all ranks; written.
            shares: one for each rank, on the source alone.
            source: rank.
        """
        self._dist.scatter(
            _bytes(share), None if shares is None else [_bytes(each) for each in shares], source, group=self._group
        )

    def collect(self, share: Tensor, shares: Sequence[Tensor] | None, target: int) -> None:
        """Write ``share`` of rank n into the n-th of ``shares`` on rank ``target``.

        Args:
            share: [N], the same length on all ranks.
            shares: one for each rank, on the target alone; written.
            target: rank.
        """
        self._dist.gather(
            _bytes(share), None if shares is None else [_bytes(each) for each in shares], target, group=self._group
        )

    def gather_objects(self, item: object) -> list[Any]:
        """Return what every rank gave, by rank. The objects are pickled, and travel through host memory."""
        found: list[Any] = [None] * self.size
        self._dist.all_gather_object(found, item, group=self._group)
        return found

    def _count(self, sent: int, received: int) -> None:
        self.moved_bytes[f"{self._tier}->{PEER}"] += sent
        self.moved_bytes[f"{PEER}->{self._tier}"] += received


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes: not every backend knows every dtype."""
    return tensor.view(torch.uint8)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
