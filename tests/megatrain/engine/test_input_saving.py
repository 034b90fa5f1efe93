"""Saved inputs: a unit's second run is bit-identical to its first, and blocks are leased in the planned order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.converters.spec import build_graph
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.input_saving import AbsentMicroBatches, InputSaving, SavedInputs
from megatrain.engine.unit.saved_results import SavedResults
from megatrain.engine.unit.state import RandomStates
from megatrain.engine.unit.suspend import SuspendedForward, UnitCall, suspend
from megatrain.engine.unit.unit_run import UnitRun
from oracles.families import tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess

pytestmark = pytest.mark.usefixtures("one_thread")

VISIT = 3


class LeasesAccess(MemoryAccess):
    """Access that records the order in which activations and results are leased."""

    leases: list[tuple[str, int, int | None]]

    def put_activation(self, visit: int, micro_batch: int, index: int, tensor: Tensor) -> None:
        self.leases.append(("put", micro_batch, index))
        super().put_activation(visit, micro_batch, index, tensor)

    @contextmanager
    def get_activation(self, visit: int, micro_batch: int, index: int) -> Iterator[Tensor]:
        self.leases.append(("get", micro_batch, index))
        with super().get_activation(visit, micro_batch, index) as tensor:
            yield tensor

    @contextmanager
    def results_block(self, visit: int, micro_batch: int) -> Iterator[Tensor]:
        self.leases.append(("results", micro_batch, None))
        with super().results_block(visit, micro_batch) as room:
            yield room


class Layer:
    """One layer of a tiny model with dropout, and a micro-batch's forward that is suspended before the layer."""

    def __init__(self, *, results: bool = False) -> None:
        config = tiny_config("gpt2", attn_pdrop=0.2, resid_pdrop=0.2)
        graph = build_graph(config)
        graph.model.train()
        self.access = LeasesAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
        self.access.leases = []
        unit = next(unit for unit in graph.units if unit.is_layer)
        self.bound = BoundUnit(unit, torch.device("cpu"))
        self.random = RandomStates(torch.device("cpu"))
        make = (lambda: SavedResults(None, with_products=False)) if results else None
        self.keeping = InputSaving(VISIT, self.access, self.random, make)
        hidden = torch.randn(2, 5, config.hidden_size, requires_grad=True)
        call = UnitCall(unit.index, (hidden,), {}, None)
        self.waiting = SuspendedForward(1, lambda forward: suspend(call), self.random, torch.device("cpu"), seed=5)
        with torch.enable_grad():
            self.waiting.start()
        self.access.begin("forward", VISIT)

    def first_run(self) -> tuple[list[Tensor], SavedInputs]:
        """Run the layer. Return its outputs and its saved inputs."""
        with self.access.weights(self.bound.unit, VISIT) as weights, self.bound.bind(weights) as leaves:
            run = UnitRun.from_call(self.bound, self.waiting, 0)
            result, kept = self.keeping.run(run, self.waiting, leaves)
            return [output.detach().clone() for output in result.outputs], kept

    def gradients(self, kept: SavedInputs) -> tuple[list[Tensor], list[Any]]:
        """Run the layer again from its saved inputs. Return the outputs, and the gradients of the inputs."""
        self.access.begin("backward", VISIT)
        with (
            self.access.weights(self.bound.unit, VISIT) as weights,
            self.bound.bind(weights) as leaves,
            self.access.gradients(self.bound.unit, VISIT) as sink,
            self.bound.receiver.use_sink(sink),
            kept.graph(leaves) as graph,
        ):
            outputs = [output for output in graph.outputs if isinstance(output, Tensor)]
            values = [output.detach().clone() for output in outputs]
            return values, graph.gradients([torch.ones_like(output) for output in outputs])[0]


@pytest.mark.parametrize("results", [False, True])
def test_second_run_is_bit_identical_to_the_first(results: bool) -> None:
    layer = Layer(results=results)
    first, kept = layer.first_run()
    torch.manual_seed(99)  # the random stream advances in between
    second, gradients = layer.gradients(kept)
    assert len(first) == len(second) == kept.num_outputs > 0
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert len(gradients) == 1 and gradients[0] is not None and gradients[0].any()
    room = [("results", 1, None)] if results else []
    assert layer.access.leases == [("put", 1, 0), *room, ("get", 1, 0), *room]
    layer.waiting.close()
    layer.access.finish()  # raises if a block is left


def test_inputs_without_a_gradient_are_still_leased() -> None:
    layer = Layer(results=True)
    _, kept = layer.first_run()
    layer.access.begin("backward", VISIT)
    kept.skip()
    assert layer.access.leases[-2:] == [("get", 1, 0), ("results", 1, None)]
    layer.waiting.close()
    layer.access.finish()


def test_absent_micro_batches_lease_their_blocks_in_the_order_of_the_plan() -> None:
    access = Layer().access
    planned: list[tuple[int, int | None]] = [(0, 0), (0, None), (2, 0), (2, None)]
    absent = AbsentMicroBatches(VISIT, access, planned, torch.zeros((), requires_grad=True))
    with torch.enable_grad():
        absent.put(stop=1)
        assert access.leases == [("put", 0, 0), ("results", 0, None)]
        absent.put()
    access.begin("backward", VISIT)
    absent.take(stop=2)
    absent.take()
    assert access.leases[2:4] == [("put", 2, 0), ("results", 2, None)]
    assert access.leases[4:] == [("get", 0, 0), ("results", 0, None), ("get", 2, 0), ("results", 2, None)]
    access.finish()


def test_evaluations_lease_nothing_for_absent_micro_batches() -> None:
    access = Layer().access
    absent = AbsentMicroBatches(VISIT, access, [(0, 0)], torch.zeros(()))
    with torch.no_grad():
        absent.put()
    absent.take()
    assert access.leases == []
