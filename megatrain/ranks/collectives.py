"""Transfers between ranks without arithmetic: all-gather, all-to-all, scatter, and gather to one rank.

torch.distributed transfers the bytes. It uses gloo between host memories and NCCL between GPUs. Its reductions are not
used, because the order of their additions depends on the number of ranks, the topology and the library. The project's
own kernels compute all sums of a run.

Either all ranks are on one host, or each rank is on a separate host. All links between ranks are thus of one kind.

Collectives are matched by their order. If one rank skips a collective, all other ranks wait forever. Therefore only the
ticks of a program issue collectives. Programs are equal on all ranks (`check_same`) and do not depend on data. Without
a program, collectives are announced before they start (`megatrain.embed.shared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from megatrain.ranks.messages import gather_messages
from megatrain.ranks.shards import NETWORK, PEER, peer_links
from megatrain.ranks.world import WorldError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from megatrain.ranks.world import World

__all__ = ["Collectives", "RanksDifferError", "SingleRank", "check_same", "make_collectives"]

_Result = TypeVar("_Result")


class RanksDifferError(WorldError):
    """Error for ranks that differ in a property that determines the order of collectives. Raised on all ranks."""


def check_same(
    gather: Callable[[Any], Sequence[Any]],
    subject: str,
    parts: Mapping[str, str],
    advice: str = "Start all of them with the same config, data and versions",
) -> None:
    """Check that all ranks have the same strings. This is a collective. If they are equal, it sends only a digest.

    Args:
        gather: Collective that returns every rank's item, by rank.
        subject: Name of what is compared, such as ``"config"``, for the error message.
        parts: Strings to compare, by name. They are compared in this order.
        advice: Remedy for a difference.

    Raises:
        RanksDifferError: A string differs. The message shows its value on two ranks. Raised on all ranks.
    """
    digests = {name: xxh3_128_hexdigest(text.encode()) for name, text in parts.items()}
    if len(set(gather(xxh3_128_hexdigest(repr(digests).encode())))) == 1:
        return
    rank_digests = gather(digests)
    names = dict.fromkeys(name for digest_by_name in rank_digests for name in digest_by_name)
    name = next(name for name in names if len({digest_by_name.get(name) for digest_by_name in rank_digests}) > 1)
    texts = gather(parts.get(name, "nothing"))
    other_rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise RanksDifferError(
        f"the ranks do not have the same {subject}: {name} is {texts[0]} on rank 0, but {texts[other_rank]} on rank "
        f"{other_rank}. {advice}"
    )


class Collectives:
    """Transfers between the ranks of a process group. Not thread-safe.

    Tensors must be contiguous and on the group's device: the host with gloo, a GPU with NCCL. On a GPU, collectives are
    queued on the current stream. On the host, a collective is complete when the call returns. With ``is_async``, the
    caller must wait for the returned work.

    Args:
        group: Process group of the ranks, or None for the default group.
        tier: Name of the tier that holds the tensors of ``gather`` and ``exchange``. Used in the names of links.
        num_hosts: Number of hosts: either 1, or one host per rank.

    Attributes:
        rank: Number of this process, counted from 0.
        moved_bytes: Bytes that ``gather`` and ``exchange`` sent to and received from other ranks, by link.
    """

    def __init__(self, group: ProcessGroup | None = None, *, tier: str = "ram", num_hosts: int = 1) -> None:
        import torch.distributed as dist

        self._dist, self._group, self._tier = dist, group, tier
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        assert num_hosts in (1, self.size), f"{self.size} ranks on {num_hosts} hosts"
        self._peer = PEER if num_hosts == 1 else NETWORK
        self.moved_bytes: Counter[str] = Counter(dict.fromkeys(peer_links(tier, self.size, num_hosts), 0))
        # torch 2.13 renames `all_gather_into_tensor` to `all_gather_single`.
        self._all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def supports_device(self, device_type: str) -> bool:
        """Return whether the group has a backend for a device type (``"cpu"`` or ``"cuda"``)."""
        return f"{device_type}:" in self._dist.get_backend_config(self._group)

    def gather(self, output: Tensor, shard: Tensor, *, is_async: bool = False) -> Work | None:
        """Concatenate the shards of all ranks into ``output``, in rank order.

        Args:
            output: Output, ``(ranks * N,)``.
            shard: This rank's shard, ``(N,)``. Must have the same length on all ranks.
            is_async: Whether to return before the collective is complete. Only supported on the host.
        """
        assert output.numel() == self.size * shard.numel() and output.dtype == shard.dtype, (output.shape, shard.shape)
        self._count((self.size - 1) * shard.nbytes, (self.size - 1) * shard.nbytes)
        work: Work | None = self._all_gather(_bytes(output), _bytes(shard), group=self._group, async_op=is_async)
        return work

    def exchange(
        self,
        output: Tensor,
        input_: Tensor,
        output_lengths: Sequence[int],
        input_lengths: Sequence[int],
        *,
        is_async: bool = False,
    ) -> Work | None:
        """Send each rank its part of ``input_``. Write the parts received from all ranks to ``output``, in rank order.

        Args:
            output: 1-D output. Its length must be the sum of ``output_lengths``.
            input_: 1-D input. Its length must be the sum of ``input_lengths``.
            output_lengths: Number of elements to receive from each rank.
            input_lengths: Number of elements to send to each rank.
        """
        assert output.numel() == sum(output_lengths) and input_.numel() == sum(input_lengths)
        size = input_.element_size()
        self._count(
            size * (input_.numel() - input_lengths[self.rank]), size * (output.numel() - output_lengths[self.rank])
        )
        work: Work | None = self._dist.all_to_all_single(
            output, input_, list(output_lengths), list(input_lengths), group=self._group, async_op=is_async
        )
        return work

    def scatter(self, shard: Tensor, shards: Sequence[Tensor] | None, source: int) -> None:
        """Send a different tensor from rank ``source`` to each rank.

        Args:
            shard: Output, ``(N,)``. Must have the same length on all ranks.
            shards: Tensors to send, in rank order. None on all ranks except ``source``.
        """
        self._dist.scatter(
            _bytes(shard), None if shards is None else [_bytes(tensor) for tensor in shards], source, group=self._group
        )

    def collect(self, shard: Tensor, shards: Sequence[Tensor] | None, target: int) -> None:
        """Send one tensor from each rank to rank ``target``.

        Args:
            shard: Tensor to send, ``(N,)``. Must have the same length on all ranks.
            shards: Outputs in rank order. None on all ranks except ``target``.
        """
        self._dist.gather(
            _bytes(shard), None if shards is None else [_bytes(tensor) for tensor in shards], target, group=self._group
        )

    def gather_objects(self, item: object) -> list[Any]:
        """Return every rank's item, by rank. ``messages.encode`` must support the items."""
        return gather_messages(item, self._group)

    def run_on_all(self, action: Callable[[], _Result]) -> _Result:
        """Run an action on all ranks and return this rank's result. If any rank fails, raise an error on all ranks.

        All ranks raise the error of the first failed rank, so that no rank waits for a rank that has ended.

        Args:
            action: Function to run. It must not call a collective.
        """
        error: Exception | None = None
        result: list[_Result] = []
        try:
            result.append(action())
        except Exception as exception:
            error = exception
        for rank, rank_error in enumerate(self.gather_objects(error)):
            if rank == self.rank and error is not None:
                raise error
            if rank_error is not None:
                raise rank_error
        return result[0]

    def _count(self, sent_bytes: int, received_bytes: int) -> None:
        self.moved_bytes[f"{self._tier}->{self._peer}"] += sent_bytes
        self.moved_bytes[f"{self._peer}->{self._tier}"] += received_bytes


class SingleRank:
    """Collectives for a single process, which transfer nothing."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.moved_bytes: Mapping[str, int] = {}

    def gather_objects(self, item: _Result) -> list[_Result]:
        """Return a list with only this process's item."""
        return [item]


def make_collectives(world: World, tier: str) -> Collectives | SingleRank:
    """Return a world's collectives. If there are several ranks, they must have joined the process group.

    Args:
        tier: Name of the tier in which layers run.
    """
    return SingleRank() if world.is_single else Collectives(tier=tier, num_hosts=world.num_hosts)


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because the backends do not support all dtypes."""
    return tensor.view(torch.uint8)
