"""Matrices of which every rank has a shard come whole to one rank and go back; nothing is moved twice, or left out."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megatrain.base.layout import build_layout
from megatrain.optim.elementwise import AdamW
from megatrain.optim.muon import Muon
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.redistribute import DealtLayout, Moves, assign_by_cost, plan_redistribution
from megatrain.ranks.shards import RankShards

SHAPES = {"q": (256, 200), "norm": (3000,), "experts": (5, 128, 96), "out": (300, 256), "table": (700, 256), "b": (7,)}
LAYOUT = build_layout("layer", SHAPES.items(), True)
OPTIMIZER = Muon(AdamW(threads=KernelThreads(1)), lambda name, shape: len(shape) >= 2 and name != "table")
KINDS = OPTIMIZER.state_kinds(True)
(SECOND,) = (kind for kind in KINDS if kind.elements_of is not None)


def dealt(size: int) -> list[DealtLayout]:
    """Return the view of each rank."""
    return [
        plan_redistribution(
            LAYOUT,
            OPTIMIZER.is_matrix_of,
            KINDS,
            RankShards(rank, size),
            OPTIMIZER.orthogonalize_bytes,
            OPTIMIZER.orthogonalize_flops,
        )
        for rank in range(size)
    ]


def overlap(first: range, second: range) -> range:
    """Return what two ranges share."""
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def redistributed(sources: list[Tensor], lengths: list[int], moves: list[Moves]) -> list[Tensor]:
    """Return what every rank has after what ``Collectives.redistribute`` does among processes."""
    targets = [torch.full((length,), -1.0) for length in lengths]
    for target, source in product(range(len(moves)), repeat=2):
        sent = [move for move in moves[source].sent if move.target == target]
        received = [move for move in moves[target].received if move.source == source]
        assert [move.length for move in sent] == [move.length for move in received]
        assert sum(move.length for move in sent) == moves[source].sent_lengths[target]
        assert moves[source].sent_lengths[target] == moves[target].received_lengths[source]
        for out, come in zip(sent, received, strict=True):
            targets[target][come.at : come.at + come.length] = sources[source][out.start : out.start + out.length]
    return targets


@pytest.mark.parametrize("size", [2, 3, 5])
def test_matrices_are_whole_on_one_rank_and_go_back(size: int) -> None:
    views, whole = dealt(size), range(LAYOUT.num_elements)
    values = torch.arange(LAYOUT.num_elements, dtype=torch.float32)
    shards = [torch.full((view.length,), -2.0) for view in views]
    for rank, shard in enumerate(shards):
        owned = RankShards(rank, size).owned(whole)
        shard[: len(owned)] = values[owned.start : owned.stop]
    found = redistributed(shards, [view.num_own for view in views], [view.directions for view in views])
    seen = 0
    for view, tensor in zip(views, found, strict=True):
        start = 0
        for matrix in view.own:
            assert torch.equal(tensor[start : start + matrix.numel], values[matrix.first : matrix.first + matrix.numel])
            start += matrix.numel
        seen += start
    assert seen == sum(torch.Size(SHAPES[name]).numel() for name in ("q", "experts", "out"))
    back = redistributed(found, [view.length for view in views], [view.directions.back for view in views])
    for shard, tensor in zip(shards, back, strict=True):
        assert torch.equal(tensor[tensor >= 0], shard[tensor >= 0])
    assert sum(int((tensor >= 0).sum()) for tensor in back) == seen


@pytest.mark.parametrize("size", [2, 3, 5])
def test_packed_state_is_lent_to_the_ranks_of_the_weights(size: int) -> None:
    views, block = dealt(size), range(SECOND.num_elements(LAYOUT))
    shards = [RankShards(rank, size) for rank in range(size)]
    values = torch.arange(len(block), dtype=torch.float32)
    held = [torch.full((each.num_elements(block),), -2.0) for each in shards]
    for each, tensor in zip(shards, held, strict=True):
        tensor[: len(each.owned(block))] = values[each.owned(block).start : each.owned(block).stop]
    loans = [view.loans["v"] for view in views]
    lent = redistributed(held, [loan.num_elements for loan in loans], [loan.moves for loan in loans])
    for entry in LAYOUT.entries:
        numel, first = SECOND.length_of(entry), SECOND.starts(LAYOUT)[entry.name]
        pieces: list[Tensor] = []
        for each, loan, tensor in zip(shards, loans, lent, strict=True):
            owned = each.owned(range(LAYOUT.num_elements))
            here = max(0, min(owned.stop, entry.offset + numel) - max(owned.start, entry.offset))
            if here:
                pieces.append(tensor[loan.starts[entry.name] : loan.starts[entry.name] + here])
        assert torch.equal(torch.cat(pieces or [values[:0]]), values[first : first + numel])
    back = redistributed(lent, [len(tensor) for tensor in held], [loan.moves.back for loan in loans])
    assert sum(int((tensor >= 0).sum()) for tensor in back) == sum(loan.num_elements for loan in loans)
    assert all(torch.equal(a[a >= 0], b[a >= 0]) for a, b in zip(back, held, strict=True))


def test_bytes_are_those_of_elements_that_change_ranks() -> None:
    """What all ranks send is what all receive; of each pair of hosts too, and nothing moves where one rank has all."""
    views = dealt(4)
    by_rank = [view.bytes_by_link(2) for view in views]
    for place in ("ranks", "hosts"):
        assert sum(found[f"ram->{place}"] for found in by_rank) == sum(found[f"{place}->ram"] for found in by_rank) > 0
    flat = [view.bytes_by_link(1) for view in views]
    assert [each["ram->ranks"] for each in flat] == [each["ram->ranks"] + each["ram->hosts"] for each in by_rank]
    # There and back: bfloat16 of matrices, and fp32 state of other weights, that another rank has.
    expected = 0
    for rank, view in enumerate(views):
        shard = RankShards(rank, 4).owned(range(LAYOUT.num_elements))
        packed = RankShards(rank, 4).owned(range(SECOND.num_elements(LAYOUT)))
        for matrix in view.own:
            whole = range(matrix.first, matrix.first + matrix.numel)
            expected += 2 * 2 * (len(whole) - len(overlap(whole, shard)))
        for entry in LAYOUT.entries:
            weight = overlap(range(entry.offset, entry.offset + SECOND.length_of(entry)), shard)
            moved_by = SECOND.starts(LAYOUT)[entry.name] - entry.offset
            lent = range(weight.start + moved_by, weight.stop + moved_by)
            expected += 2 * 4 * (len(lent) - len(overlap(lent, packed)))
    assert sum(each["ram->ranks"] for each in flat) == expected


def test_work_is_dealt_by_its_cost() -> None:
    costs = [9, 1, 1, 7, 3, 3, 8]
    for size in (1, 2, 3, 8):
        owners = assign_by_cost(costs, size)
        loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
        assert max(loads) <= sum(costs) / size + max(costs) * (size - 1) / size
    assert assign_by_cost(costs, 2) == assign_by_cost(list(costs), 2)
