"""Runs of units whose inputs are saved in blocks. The backward runs the unit again to rebuild the graph.

This is activation checkpointing per unit: in the first run, autograd saves nothing. A visit can also save results of
attention, or of attention and matmuls (`saved_results.py`). The recompute then reads these results instead of
computing them. The recompute always skips matmuls whose results no gradient needs (`unneeded.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.engine.unit.unit_run import KeptRun, UnitGraph
from megatrain.engine.unit.unneeded import without_values

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import BlockAccess
    from megatrain.engine.unit.arguments import CapturedResult
    from megatrain.engine.unit.saved_results import SavedResults
    from megatrain.engine.unit.state import RandomStates
    from megatrain.engine.unit.suspend import SuspendedForward
    from megatrain.engine.unit.unit_run import UnitRun


class InputSaving:
    """Strategy that saves the inputs of a visit's runs.

    Args:
        saved_results: Function that creates a run's ``SavedResults``; None if runs save no results.
        unneeded_weights: Names of the weights whose matmuls the recompute skips.
    """

    has_recompute = True

    def __init__(
        self,
        visit: int,
        access: BlockAccess,
        random: RandomStates,
        saved_results: Callable[[], SavedResults] | None = None,
        unneeded_weights: frozenset[str] = frozenset(),
    ) -> None:
        self.visit, self.access, self.random = visit, access, random
        self._saved_results, self._unneeded_weights = saved_results, unneeded_weights

    def run(
        self, run: UnitRun, forward: SuspendedForward, weights: Mapping[str, Tensor]
    ) -> tuple[CapturedResult, SavedInputs]:
        """Save the inputs and run the unit without a graph."""
        is_shared = run.bound.unit.shares_inputs
        # Save before the run, because a unit can change its input in place.
        locations = [self._put(forward, *item, is_shared=is_shared) for item in enumerate(run.activations)]
        tensors = run.with_activations(run.leaves())
        results = None if self._saved_results is None else self._saved_results()
        with ExitStack() as stack:
            if results is not None:
                block = stack.enter_context(self.access.results_block(self.visit, run.micro_batch))
                stack.enter_context(results.save_calls(block, self.matrices(run, needed=True)))
            result = run.compute(tensors, self.random, keep_graph=False)
        for i in run.captured.activations:
            run.captured.tensors[i] = None  # freed, because the backward reads it from its block
        return result, SavedInputs(self, run, locations, results, len(result.outputs))

    def _put(self, forward: SuspendedForward, index: int, activation: Tensor, *, is_shared: bool) -> tuple[int, int]:
        """Save an input if no earlier visit has saved the same tensor. Return the block's visit and input index."""
        location = forward.find_location(activation) if is_shared else None
        if location is not None:
            self.access.reuse_activation(self.visit, forward.micro_batch, index, location)
            return location
        self.access.put_activation(self.visit, forward.micro_batch, index, activation.detach())
        if is_shared:
            forward.record_location(activation, (self.visit, index))
        return self.visit, index

    def matrices(self, run: UnitRun, *, needed: bool) -> dict[int, str]:
        """Return the names, by id, of bound weights whose matmuls the recompute needs or, if not ``needed``, skips."""
        if not (self._unneeded_weights or needed):
            return {}
        owners = run.bound.matrices()
        return {key: name for key, name in owners.items() if (name not in self._unneeded_weights) == needed}


class SavedInputs(KeptRun):
    """Inputs of one run, saved until the run's backward.

    Args:
        locations: Visit and input index that identify the block of each activation.
        results: Results that the first run saved, if any.
    """

    def __init__(
        self,
        strategy: InputSaving,
        run: UnitRun,
        locations: Sequence[tuple[int, int]],
        results: SavedResults | None,
        num_outputs: int,
    ) -> None:
        self._strategy, self._run, self._locations, self._results = strategy, run, locations, results
        self.micro_batch, self.requires_grad, self.num_outputs = run.micro_batch, run.requires_grad, num_outputs

    @contextmanager
    def graph(self, weights: Mapping[str, Tensor]) -> Iterator[UnitGraph]:
        """Recompute the run and yield its graph. On exit, saved inputs and results are no longer needed."""
        strategy, run = self._strategy, self._run
        with self._lease() as (inputs, block):
            activations = [
                activation.detach().requires_grad_(requires_grad)
                for activation, requires_grad in zip(inputs, self.requires_grad, strict=True)
            ]
            with ExitStack() as stack:
                # Enter this context only if matmuls are skipped, because it makes compiled layers compile again.
                if skipped_weights := strategy.matrices(run, needed=False):
                    stack.enter_context(without_values(skipped_weights))
                if self._results is not None and block is not None:
                    stack.enter_context(self._results.replay_calls(block, strategy.matrices(run, needed=True)))
                tensors = run.with_activations(activations)
                result = run.compute(tensors, strategy.random, keep_graph=True, cache_enabled=False)
            outputs = result.outputs
            assert len(outputs) == self.num_outputs, (run.bound.unit.name, len(outputs), self.num_outputs)
            yield UnitGraph(outputs, [activation for activation in activations if activation.requires_grad], weights)

    def skip(self) -> None:
        """Lease inputs and results without using them, because the tape contains these leases."""
        with self._lease():
            pass

    @contextmanager
    def _lease(self) -> Iterator[tuple[list[Tensor], Tensor | None]]:
        """Lease the inputs and the block of saved results, if any."""
        access, visit = self._strategy.access, self._strategy.visit
        with ExitStack() as stack:
            inputs = [
                stack.enter_context(access.get_activation(source, self.micro_batch, index))
                for source, index in self._locations
            ]
            block = None
            if self._results is not None:
                block = stack.enter_context(access.results_block(visit, self.micro_batch))
            yield inputs, block


class AbsentMicroBatches:
    """Planned blocks of micro-batches that skip an optional unit.

    The micro-batches do not use these blocks, but the tape contains their leases, so they are leased in planned order.
    They are leased one at a time, because the plan has prefetch memory for only one of them.

    Args:
        activations: (micro-batch, index) of each planned activation, in order. Index None means saved results.
        anchor: Scalar on the compute device.
    """

    def __init__(
        self, visit: int, access: BlockAccess, activations: Sequence[tuple[int, int | None]], anchor: Tensor
    ) -> None:
        self._visit, self._access, self._anchor = visit, access, anchor
        self._pending_writes, self._pending_reads = deque(activations), deque[tuple[int, int | None]]()

    def put(self, stop: float = math.inf) -> None:
        """Lease the blocks of all micro-batches below ``stop`` for writing, as their forward would."""
        if not torch.is_grad_enabled():
            return
        while self._pending_writes and self._pending_writes[0][0] < stop:
            micro_batch, index = self._pending_writes.popleft()
            self._pending_reads.append((micro_batch, index))
            if index is None:
                with self._access.results_block(self._visit, micro_batch):
                    pass
            else:
                self._access.put_activation(self._visit, micro_batch, index, self._anchor.detach()[None][:0])

    def take(self, stop: float = math.inf) -> None:
        """Lease the blocks of all micro-batches below ``stop`` for reading, as their backward would."""
        while self._pending_reads and self._pending_reads[0][0] < stop:
            micro_batch, index = self._pending_reads.popleft()
            if index is None:
                block = self._access.results_block(self._visit, micro_batch)
            else:
                block = self._access.get_activation(self._visit, micro_batch, index)
            with block:
                pass
