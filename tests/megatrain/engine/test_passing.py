"""Embeddings with passing parts: one lease of each part is enough to look up the rows of all micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.converters.spec import build_graph
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.passing import lease_passing_parts
from megatrain.engine.unit.suspend import UnitCall
from megatrain.models.graph import Unit
from oracles.families import VOCAB, tiny_config

ROWS = (range(30), range(30, 70), range(70, VOCAB))


class Parts:
    """Matrix whose parts are leased as in a store."""

    def __init__(self, matrix: Tensor, *, passes: bool = True) -> None:
        self._matrix, self.is_passing = matrix, passes
        self.shape, self.rows = tuple(matrix.shape), ROWS
        self.lease: list[int] = []

    @contextmanager
    def part(self, number: int) -> Iterator[Tensor]:
        self.lease.append(number)
        yield self._matrix[ROWS[number].start : ROWS[number].stop]


class Embedding:
    """The embedding of a tiny model, bound to a matrix in parts."""

    def __init__(self) -> None:
        graph = build_graph(tiny_config("llama", tied=False))
        unit: Unit = graph.units[0]
        self.bound = BoundUnit(unit, torch.device("cpu"))
        ((_, self.owner, _),) = unit.params
        shape = self.bound.placeholder(self.owner).shape
        self.matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.parts = Parts(self.matrix)

    @property
    def weights(self) -> Mapping[str, Any]:
        return {self.owner: self.parts}

    def run(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Run a visit for several micro-batches, and return its results."""
        calls = [UnitCall(0, (each,), {}, None) for each in ids]
        with self.bound.bind(self.weights), torch.no_grad():
            wanted = self.bound.look_up(calls)
            assert [[list(each.shape) for each in of_weight] for of_weight in wanted] == [[list(i.shape) for i in ids]]
            found = []
            for self.bound.rows.call_index, call in enumerate(calls):
                found.append(self.bound.call(call))
        return found


def ids_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, ROWS[-1].stop, shape, generator=generator) for shape in shapes]


def test_each_part_is_leased_once_for_all_micro_batches() -> None:
    embedding, ids = Embedding(), ids_of((2, 8), (1, 5), (3, 4))
    found = embedding.run(ids)
    assert embedding.parts.lease == [0, 1, 2]
    for each, rows in zip(ids, found, strict=True):
        assert torch.equal(rows, embedding.matrix[each])


def test_rows_are_looked_up_again_for_second_runs() -> None:
    embedding, ids = Embedding(), ids_of((2, 8), (1, 5))
    with embedding.bound.bind(embedding.weights), torch.no_grad():
        embedding.bound.rows.look_up_again([ids])
        embedding.bound.rows.call_index = 1
        assert torch.equal(embedding.bound.call(UnitCall(0, (ids[1],), {}, None)), embedding.matrix[ids[1]])
    assert embedding.parts.lease == [0, 1, 2]


def test_an_index_out_of_range_is_refused() -> None:
    embedding = Embedding()
    with pytest.raises(IndexError, match="not in the range of 101 rows"):
        embedding.run([torch.tensor([[3, ROWS[-1].stop]])])


def test_after_a_visit_no_weight_passes() -> None:
    embedding = Embedding()
    embedding.run(ids_of((1, 4)))
    assert embedding.bound.look_up([UnitCall(0, (torch.tensor([[1]]),), {}, None)]) == []


def test_unused_parts_are_still_leased() -> None:
    passing, held = Parts(torch.zeros(VOCAB, 4)), Parts(torch.zeros(VOCAB, 4), passes=False)
    lease_passing_parts({"passing": passing, "held": held, "whole": torch.zeros(2, 2)})
    assert passing.lease == [0, 1, 2] and held.lease == []
