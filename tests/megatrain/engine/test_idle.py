"""Idle visits: an expert that gets no tokens leases no weights, and its visit is announced as idle."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from megatrain.converters import experts
from megatrain.converters.spec import build_graph
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.idle import RoutedWeights
from megatrain.engine.unit.suspend import UnitCall
from oracles.families import tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess, split_like

NUM_EXPERTS = 4
FIRST_VISIT = 7


class IdleRecordingAccess(MemoryAccess):
    """Access that records the announcements of idle visits."""

    told: list[tuple[list[int], set[int]]]

    def announce_idle(self, visits: Sequence[int], idle: Collection[int]) -> None:
        self.told.append((list(visits), set(idle)))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[IdleRecordingAccess, list[BoundUnit]]:
    """Return an access to the weights, and the experts of one layer as separate units."""
    monkeypatch.setattr(experts, "EXPERTS_ELEMENTS", 1)
    config = tiny_config("qwen3_moe", num_experts=NUM_EXPERTS, num_experts_per_tok=1)
    graph = build_graph(config, split_experts=True)
    access = IdleRecordingAccess(graph, split_like(graph, dict(build_model(config).named_parameters())), torch.float32)
    access.told = []
    units = [unit for unit in graph.units if unit.part is not None][:NUM_EXPERTS]
    return access, [BoundUnit(unit, torch.device("cpu")) for unit in units]


def routed_to(chosen: list[int]) -> UnitCall:
    """Return a call that routes each token to one expert."""
    return UnitCall(0, (torch.zeros(len(chosen), 1), torch.tensor(chosen)[:, None], None), {}, None)


def test_the_first_part_announces_all_idle_parts(parts: tuple[IdleRecordingAccess, list[BoundUnit]]) -> None:
    access, bounds = parts
    calls = [routed_to([1, 1]), routed_to([3])]
    for number, bound in enumerate(bounds):
        weights = RoutedWeights(bound, FIRST_VISIT + number, access)
        weights.record_calls(calls)
        assert weights.is_idle == (number in (0, 2))
    assert access.told == [([7, 8, 9, 10], {7, 9})]


def test_idle_unit_uses_zero_weights_and_leases_nothing(parts: tuple[IdleRecordingAccess, list[BoundUnit]]) -> None:
    access, bounds = parts
    idle, busy = (RoutedWeights(bound, FIRST_VISIT, access) for bound in bounds[:2])
    idle.record_calls([routed_to([1])])
    busy.record_calls([routed_to([1])])
    with idle.lease() as zeros, busy.lease() as weights:
        assert [zeros[name].shape for name in sorted(zeros)] == [weights[name].shape for name in sorted(weights)]
        assert all(isinstance(each, torch.Tensor) and not each.any() for each in zeros.values())
        assert all(isinstance(each, torch.Tensor) and each.any() for each in weights.values())
    assert access.skipped == [bounds[0].unit.name]


def test_unit_without_calls_is_not_announced_idle(parts: tuple[IdleRecordingAccess, list[BoundUnit]]) -> None:
    access, bounds = parts
    weights = RoutedWeights(bounds[0], FIRST_VISIT, access)
    weights.record_calls([])
    assert not weights.is_idle and access.told == []
