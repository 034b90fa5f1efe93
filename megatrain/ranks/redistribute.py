"""Which rank computes on a whole matrix of which every rank has a shard, and what moves for it.

Some updates are made of all of a matrix at once. What is done element by element before and after is done where the
elements are; in between each matrix is brought to one rank, and what is made of it is brought back. Which rank that is
follows from shapes and the number of ranks alone, so that traffic is planned and all ranks issue the same collectives.

State of some parameters only is packed, one parameter after the other (`StateKind.elements_of`), and shared as a block
of its own: its elements need not lie on the rank that has the weight's. They are lent to it for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatrain.ranks.shards import NETWORK, PEER, RankShards, peer_links

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.optim.base import StateKind

__all__ = ["DealtLayout", "DealtMatrix", "Loan", "Move", "Moves", "plan_redistribution", "assign_by_cost"]

_DIRECTION_BYTES = 2  # directions travel in bf16
_STATE_BYTES = 4  # and state in fp32


@dataclass(frozen=True, slots=True)
class DealtMatrix:
    """A matrix, and the rank that computes on it.

    Attributes:
        name: Full name of its parameter, which may be a stack of several.
        first: Its first element in the layout.
        rows: Of the matrix.
        columns: Of the matrix.
        owner: Rank.
    """

    name: str
    first: int
    rows: int
    columns: int
    owner: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Move:
    """Elements that one rank has and another one needs.

    Attributes:
        source: Rank that has them.
        target: Rank that needs them.
        start: First of them in the source's tensor.
        at: Where it goes in the target's tensor.
        length: Number of elements.
    """

    source: int
    target: int
    start: int
    at: int
    length: int

    @property
    def back(self) -> Move:
        """The same elements on their way back."""
        return Move(self.target, self.source, self.at, self.start, self.length)


class Moves:
    """What one rank sends and receives in a redistribution; what stays on a rank is among it.

    Args:
        all_moves: Those of all ranks, in the order in which elements travel between any two of them.
        rank: whose view this is.
        size: number of ranks.

    Attributes:
        sent: what leaves the rank, by target, in order.
        received: what comes to it, by source, in order.
        is_empty: whether no rank has anything to move: then there is no collective.
    """

    def __init__(self, all_moves: Iterable[Move], rank: int, size: int) -> None:
        moves = list(all_moves)
        self.is_empty = not moves
        self.sent = sorted((move for move in moves if move.source == rank), key=lambda move: move.target)
        self.received = sorted((move for move in moves if move.target == rank), key=lambda move: move.source)
        self.sent_lengths, self.received_lengths = [0] * size, [0] * size
        for move in self.sent:
            self.sent_lengths[move.target] += move.length
        for move in self.received:
            self.received_lengths[move.source] += move.length
        self._rank, self._size = rank, size

    def bytes_by_link(self, tier: str, item_size: int, num_hosts: int) -> dict[str, int]:
        """Return what moves between this rank and others, of its host and of other hosts.

        Args:
            tier: that the elements are in: names the links.
            item_size: Bytes of an element.
            num_hosts: with as many ranks each, one host after the other.
        """
        per_host = self._size // num_hosts
        moved = dict.fromkeys(peer_links(tier, self._size, num_hosts), 0)
        for other, (sent, received) in enumerate(zip(self.sent_lengths, self.received_lengths, strict=True)):
            if other != self._rank:
                place = PEER if other // per_host == self._rank // per_host else NETWORK
                moved[f"{tier}->{place}"] += item_size * sent
                moved[f"{place}->{tier}"] += item_size * received
        return moved

    @cached_property
    def back(self) -> Moves:
        """The way back."""
        moves = [*(move.back for move in self.sent), *(move.back for move in self.received)]
        own = Moves(dict.fromkeys(moves), self._rank, self._size)  # once: what stays here is in both
        own.is_empty = self.is_empty
        return own


@dataclass(frozen=True, slots=True)
class Loan:
    """Packed state of a kind, brought to where the elements of the weight are.

    Attributes:
        moves: From the block of the kind to a tensor of what this rank's weights need.
        num_elements: Length of that tensor.
        starts: Parameter -> where in it this rank's elements begin.
    """

    moves: Moves
    num_elements: int
    starts: Mapping[str, int]


class DealtLayout:
    """What ranks move for the update of one layout, as one of them sees it.

    Args:
        matrices: Matrices that the layout has.
        length: Elements of the rank's shard of the weight.
        directions: from shards to whole matrices, which lie one after the other on their rank.
        loans: by kind of state.
        rank: whose view this is.
        scratch_bytes: Bytes that making a matrix orthogonal takes beside it.

    Attributes:
        own: matrices of the rank, in order.
        length: Elements of its shard.
        num_own: elements of its matrices.
        scratch_bytes: what making one of them orthogonal takes beside it, at most.
    """

    def __init__(
        self,
        matrices: Sequence[DealtMatrix],
        length: int,
        directions: Moves,
        loans: Mapping[str, Loan],
        rank: int,
        scratch_bytes: Callable[[int, int], int],
    ) -> None:
        self._matrices = matrices
        self.own = [matrix for matrix in matrices if matrix.owner == rank]
        self.num_own = sum(matrix.numel for matrix in self.own)
        self.length, self.directions, self.loans = length, directions, loans
        self.scratch_bytes = max((scratch_bytes(matrix.rows, matrix.columns) for matrix in self.own), default=0)

    def bytes_by_link(self, num_hosts: int) -> dict[str, int]:
        """Return what the update of the layout moves between this rank and others, in RAM."""
        found: dict[str, int] = {}
        for moves, item_size in self._moved():
            for link, nbytes in moves.bytes_by_link("ram", item_size, num_hosts).items():
                found[link] = found.get(link, 0) + nbytes
        return found

    def describe(self) -> str:
        """Return what must be the same on all ranks."""
        return " ".join([*self.loans, *(f"{each.first}@{each.owner}" for each in self._matrices)])

    def _moved(self) -> Iterator[tuple[Moves, int]]:
        """Yield everything that an update moves, there and back, with the size of an element."""
        for loan in self.loans.values():
            yield loan.moves, _STATE_BYTES
        yield self.directions, _DIRECTION_BYTES
        yield self.directions.back, _DIRECTION_BYTES
        for loan in self.loans.values():
            yield loan.moves.back, _STATE_BYTES

    @property
    def workspace_bytes(self) -> int:
        """What an update takes on this rank beside its blocks, but for `MatrixOptimizer.piece_bytes`."""
        lent = sum(_STATE_BYTES * loan.num_elements for loan in self.loans.values())
        lending = max((_travelling(loan.moves, _STATE_BYTES) for loan in self.loans.values()), default=0)
        ends = _DIRECTION_BYTES * (self.length + self.num_own)
        dealing = ends + _travelling(self.directions, _DIRECTION_BYTES)
        # The shard's directions are gone while matrices are made orthogonal.
        computing = _DIRECTION_BYTES * self.num_own + self.scratch_bytes
        return lent + max(lending, dealing, computing)


def _travelling(moves: Moves, size: int) -> int:
    return 0 if moves.is_empty else size * (sum(moves.sent_lengths) + sum(moves.received_lengths))


def assign_by_cost(costs: Sequence[int], size: int) -> list[int]:
    """Return the rank of each piece of work: the most expensive first, each to the rank with the least so far."""
    loads, owners = [0] * size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def plan_redistribution(
    layout: UnitLayout,
    is_matrix: Callable[[TensorEntry], bool],
    kinds: Sequence[StateKind],
    shards: RankShards,
    scratch_bytes: Callable[[int, int], int],
    flops: Callable[[int, int], int],
) -> DealtLayout:
    """Return what ranks move for the update of a layout that is not cut into parts.

    Args:
        layout: Layout of the weight.
        is_matrix: tells parameters whose last two dimensions are matrices that have to be whole.
        kinds: Kinds of state; those with `elements_of` are lent.
        shards: What this rank owns.
        scratch_bytes: Rows and columns -> bytes that work on a matrix takes beside it.
        flops: likewise: its operations, by which matrices are dealt.
    """
    whole = range(layout.num_elements)
    places: list[tuple[str, int, int, int]] = []
    for entry in layout.entries:
        if is_matrix(entry):
            rows, columns = entry.shape[-2:]
            starts = range(entry.offset, entry.offset + entry.numel, rows * columns)
            places += [(entry.name, start, rows, columns) for start in starts]
    owners = assign_by_cost([flops(rows, columns) for _, _, rows, columns in places], shards.size)
    matrices = [DealtMatrix(*place, owner) for place, owner in zip(places, owners, strict=True)]

    def directions() -> Iterator[Move]:
        ends = [0] * shards.size
        for matrix in matrices:
            for rank in range(shards.size):
                shard = shards.owned(whole, rank)
                first, last = max(shard.start, matrix.first), min(shard.stop, matrix.first + matrix.numel)
                if first < last:
                    at = ends[matrix.owner] + first - matrix.first
                    yield Move(rank, matrix.owner, first - shard.start, at, last - first)
            ends[matrix.owner] += matrix.numel

    loans = {kind.name: _lend(layout, kind, shards) for kind in kinds if kind.elements_of is not None}
    moves = Moves(directions(), shards.rank, shards.size)
    return DealtLayout(matrices, shards.num_elements(whole), moves, loans, shards.rank, scratch_bytes)


def _lend(layout: UnitLayout, kind: StateKind, shards: RankShards) -> Loan:
    """Return how state of one element for each of some parameters reaches the weights' ranks."""
    assert kind.dtype.itemsize == _STATE_BYTES, kind
    block, whole = range(kind.num_elements(layout)), range(layout.num_elements)
    packed = kind.starts(layout)
    moves: list[Move] = []
    ends = [0] * shards.size
    own_starts: dict[str, int] = {}
    for entry in layout.entries:
        if not kind.length_of(entry):
            continue
        assert kind.length_of(entry) == entry.numel, (kind, entry)
        for target in range(shards.size):
            shard = shards.owned(whole, target)
            first, last = max(shard.start, entry.offset), min(shard.stop, entry.offset + entry.numel)
            if first >= last:
                continue
            if target == shards.rank:
                own_starts[entry.name] = ends[target]
            begin = packed[entry.name] + first - entry.offset
            for source in range(shards.size):
                held = shards.owned(block, source)
                start, stop = max(held.start, begin), min(held.stop, begin + last - first)
                if start < stop:
                    moves.append(Move(source, target, start - held.start, ends[target] + start - begin, stop - start))
            ends[target] += last - first
    return Loan(Moves(moves, shards.rank, shards.size), ends[shards.rank], own_starts)
