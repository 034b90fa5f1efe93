"""How bytes move between ranks: gather, exchange, scatter, gather to one rank. Nothing is added up here.

torch.distributed carries bytes, gloo between host memory and NCCL between GPUs. Its reductions are not used: the order
in which they add depends on the number of ranks, the topology and the library. So every number of a run is made by the
project's own kernels.

With several hosts bytes move in two levels, so that the network carries each of them once: what the ranks of a host
need from others comes to one of them, and what they send is added up before. The ranks of a host have collectives of
their own, and so have those with the same number on all hosts; both are counted as links of their own.

Collectives are matched by their order, and a rank that leaves one out makes all others wait forever. So only ticks of a
program issue them, which are the same on all ranks (`check_same`), whatever the data are; and, where there is no
program, what is announced first (`megatrain.embed.shared`).
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
from megatrain.ranks.world import WorldError, groups_of_hosts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from megatrain.ranks.redistribute import Moves
    from megatrain.ranks.world import World

__all__ = ["Alone", "Collectives", "RanksDifferError", "check_same", "collectives_of"]

_Result = TypeVar("_Result")


class RanksDifferError(WorldError):
    """Ranks would not do the same: their collectives would not match. Raised on all of them."""


def check_same(
    gather: Callable[[Any], Sequence[Any]],
    what: str,
    parts: Mapping[str, str],
    advice: str = "Start all of them with the same config, data and versions",
) -> None:
    """Refuse what is not the same on all ranks. A collective: one digest travels while all agree.

    Args:
        gather: Returns what every rank gave, by rank.
        what: It is, in words: ``"config"``.
        parts: Name -> text of each part, in the order in which they are compared.
        advice: What to do where they differ.

    Raises:
        RanksDifferError: names the first part that differs, and what it is on two ranks. On all ranks.
    """
    digests = {name: xxh3_128_hexdigest(text.encode()) for name, text in parts.items()}
    if len(set(gather(xxh3_128_hexdigest(repr(digests).encode())))) == 1:
        return
    of_ranks = gather(digests)
    names = dict.fromkeys(name for each in of_ranks for name in each)
    name = next(name for name in names if len({each.get(name) for each in of_ranks}) > 1)
    texts = gather(parts.get(name, "nothing"))
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    raise RanksDifferError(
        f"the ranks do not have the same {what}: {name} is {texts[0]} on rank 0, and {texts[other]} on rank {other}. "
        f"{advice}"
    )


class _Works:
    """Several works that go on at once, as one."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait until all are done."""
        for work in self._works:
            work.wait()


class Collectives:
    """The ranks of a process group, as places to send bytes to. Used by one thread.

    Tensors are contiguous, of any dtype, and on the group's device: of the host with gloo, of a GPU with NCCL. On a
    GPU collectives are queued on the current stream; on the host they are done when the call returns, or, if
    ``is_async``, when the work that is returned has been waited for.

    Args:
        group: Process group of the ranks; None: the default one.
        tier: name of the tier that the tensors of ``gather`` and ``exchange`` are in: names the links.
        num_hosts: on which the ranks of the default group are, as many on each, one host after the other.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        on_host: the ranks of this one's host among themselves; None: there is one host, or one rank on each.
        across_hosts: the ranks with this one's number on their hosts; None: as above.
        moved_bytes: by link, what ``gather``, ``exchange`` and ``redistribute`` sent to other ranks, and received.
    """

    def __init__(self, group: ProcessGroup | None = None, *, tier: str = "ram", num_hosts: int = 1) -> None:
        import torch.distributed as dist

        self._dist, self._group, self._tier = dist, group, tier
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._num_hosts, self._place = num_hosts, PEER if num_hosts == 1 else NETWORK
        self.moved_bytes: Counter[str] = Counter(dict.fromkeys(peer_links(tier, self.size, num_hosts), 0))
        self.on_host: Collectives | None = None
        self.across_hosts: Collectives | None = None
        if 1 < num_hosts < self.size:
            assert group is None, "the levels are those of the default group"
            on_host, across_hosts = groups_of_hosts(self.size // num_hosts)
            self.on_host = Collectives(on_host, tier=tier)
            self.across_hosts = Collectives(across_hosts, tier=tier, num_hosts=num_hosts)
            self.on_host.moved_bytes = self.across_hosts.moved_bytes = self.moved_bytes
        # torch 2.13 deprecates the name that versions before it have.
        self._all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def serves(self, device_type: str) -> bool:
        """Return whether the group has a backend for the memory of such devices: ``"cpu"``, ``"cuda"``."""
        return f"{device_type}:" in self._dist.get_backend_config(self._group)

    def gather(
        self, full: Tensor, shard: Tensor, *, beside: Tensor | None = None, is_async: bool = False
    ) -> Work | _Works | None:
        """Write the shards of all ranks into ``full``, one after the other.

        Args:
            full: [ranks * N]; written.
            shard: [N], the same length on all ranks.
            beside: with two levels, [hosts * N] for what comes from other hosts; written, and free when the call
                returns, or, on a GPU, behind what it has queued.
            is_async: on the host, what is passed on within it may go on after the call.
        """
        assert full.numel() == self.size * shard.numel() and full.dtype == shard.dtype, (full.shape, shard.shape)
        if self.on_host is not None and self.across_hosts is not None:
            assert beside is not None and beside.numel() == self.across_hosts.size * shard.numel(), full.shape
            self.across_hosts.gather(beside, shard)
            of_hosts = full.view(self.across_hosts.size, self.on_host.size, -1)
            of_hosts[:, self.on_host.rank].copy_(beside.view(self.across_hosts.size, -1))
            return _Works(
                [self.on_host.gather(each.view(-1), each[self.on_host.rank], is_async=is_async) for each in of_hosts]  # type: ignore[misc]
            )
        self._count((self.size - 1) * _nbytes(shard), (self.size - 1) * _nbytes(shard))
        work: Work | None = self._all_gather(_bytes(full), _bytes(shard), group=self._group, async_op=is_async)
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

    def redistribute(self, target: Tensor, source: Tensor, moves: Moves) -> int:
        """Bring elements from where they lie on some ranks to where they belong on others, in host memory.

        All ranks of the default group call it; each element is sent once, to the rank that needs it, on any host.

        Args:
            target: 1-D; written where ``moves`` says.
            source: 1-D, of the same dtype.
            moves: What this rank sends and receives.

        Returns:
            The bytes that it took beside the two.
        """
        if moves.is_empty:
            return 0
        size = source.element_size()
        sent = torch.empty(sum(moves.sent_lengths), dtype=source.dtype)
        received = torch.empty(sum(moves.received_lengths), dtype=source.dtype)
        end = 0
        for move in moves.sent:
            sent[end : end + move.length] = source[move.start : move.start + move.length]
            end += move.length
        received_bytes = [size * length for length in moves.received_lengths]
        sent_bytes = [size * length for length in moves.sent_lengths]
        self._dist.all_to_all_single(_bytes(received), _bytes(sent), received_bytes, sent_bytes, group=self._group)
        per_host = self.size // self._num_hosts
        for rank in range(self.size):
            if rank != self.rank:
                place = PEER if rank // per_host == self.rank // per_host else NETWORK
                self.moved_bytes[f"ram->{place}"] += sent_bytes[rank]
                self.moved_bytes[f"{place}->ram"] += received_bytes[rank]
        begin = 0
        for move in moves.received:
            target[move.at : move.at + move.length] = received[begin : begin + move.length]
            begin += move.length
        return _nbytes(sent) + _nbytes(received)

    def scatter(self, shard: Tensor, shards: Sequence[Tensor] | None, source: int) -> None:
        """Write the n-th of ``shards``, which rank ``source`` gives, into ``shard`` on rank n.

        Args:
            shard: [N], the same length on all ranks; written.
            shards: one for each rank, on the source alone.
            source: rank.
        """
        self._dist.scatter(
            _bytes(shard), None if shards is None else [_bytes(each) for each in shards], source, group=self._group
        )

    def collect(self, shard: Tensor, shards: Sequence[Tensor] | None, target: int) -> None:
        """Write ``shard`` of rank n into the n-th of ``shards`` on rank ``target``.

        Args:
            shard: [N], the same length on all ranks.
            shards: one for each rank, on the target alone; written.
            target: rank.
        """
        self._dist.gather(
            _bytes(shard), None if shards is None else [_bytes(each) for each in shards], target, group=self._group
        )

    def gather_objects(self, item: object) -> list[Any]:
        """Return what every rank gave, by rank. Objects as ``messages.encode`` takes them, through host memory."""
        return gather_messages(item, self._group)

    def all_or_none(self, action: Callable[[], _Result]) -> _Result:
        """Return the result of what every rank does at once; where it fails on one, all raise the first one's error.

        So ranks that are refused say the same, and none of them waits for one that is gone.

        Args:
            action: no collective.
        """
        error: Exception | None = None
        result: list[_Result] = []
        try:
            result.append(action())
        except Exception as raised:
            error = raised
        for rank, other in enumerate(self.gather_objects(error)):
            if rank == self.rank and error is not None:
                raise error
            if other is not None:
                raise other
        return result[0]

    def _count(self, sent: int, received: int) -> None:
        self.moved_bytes[f"{self._tier}->{self._place}"] += sent
        self.moved_bytes[f"{self._place}->{self._tier}"] += received


class Alone:
    """The collectives of one process: nothing moves.

    Attributes:
        rank: 0.
        size: 1.
        moved_bytes: Nothing.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.moved_bytes: Mapping[str, int] = {}

    def gather_objects(self, item: _Result) -> list[_Result]:
        """Return what every rank gave: this one."""
        return [item]


def collectives_of(world: World, tier: str) -> Collectives | Alone:
    """Return the collectives of a world; of several ranks all call this together, when they have joined it.

    Args:
        world: The processes that train together.
        tier: Name of the tier that layers run in.
    """
    return Alone() if world.is_single else Collectives(tier=tier, num_hosts=world.num_hosts)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes: not every backend knows every dtype."""
    return tensor.view(torch.uint8)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
