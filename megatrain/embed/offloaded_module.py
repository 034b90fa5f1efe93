"""An offloaded module: its blocks, and the hooks that hold each unit's weights while the unit runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.embed.backward_window import BackwardLeases, weight_hooks
from megatrain.embed.block_homes import shared_state
from megatrain.embed.partition import UnitPart, parts_of
from megatrain.embed.room import Homes, LocalBlocks
from megatrain.embed.running_calls import Call, Calls
from megatrain.embed.use_order import UseOrder
from megatrain.embed.weights import WeightBlock, block_of, release_all

_ATTRIBUTE = "_megatrain_offloaded"


def offloaded_module(model: nn.Module) -> OffloadedModule | None:
    """Return the ``OffloadedModule`` of a module, or None if the module was not offloaded."""
    offloaded: OffloadedModule | None = model.__dict__.get(_ATTRIBUTE)
    return offloaded


@contextmanager
def gathered(of: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False) -> Iterator[None]:
    """Hold the weights of a module, or some parameters, in the compute tier. ``writable`` permits changes.

    All weights are held at the same time, so gather layer by layer if they do not fit. Parameters outside of stores
    are skipped. Computations with the weights are differentiable inside and after the context.

    Raises:
        CapacityError: The weights do not fit in the compute tier at the same time.
        WeightInUseError: Weights were changed without ``writable``, or a view of a weight outlives the context.
    """
    parameters = [of] if isinstance(of, Tensor) else of.parameters() if isinstance(of, nn.Module) else of
    blocks = dict.fromkeys(block for parameter in parameters if (block := block_of(parameter)) is not None)
    call = Call()
    try:
        for block in blocks:
            block.hold("rw" if writable else "r", is_watched=writable)
            call.held.append(block)
        if blocks and torch.is_grad_enabled():
            call.install_hooks(next(iter(blocks)).owner.saving_hooks())
        yield
    finally:
        call.end()


class OffloadedModule:
    """Blocks and running forwards of an offloaded module, as returned by ``offloaded_module(model)``.

    Attributes:
        blocks: Blocks that contain the module's parameters, in definition order.
        window: Weight leases for the backward.
    """

    def __init__(self, units: Sequence[UnitPart], homes: Homes, access: LocalBlocks) -> None:
        self.store, self.access = access.store, access
        self.order = UseOrder(self.store)
        self.window = BackwardLeases(self.order)
        self.calls = Calls()
        self._held_for_backward: list[WeightBlock] = []
        blocks = {part: WeightBlock(part, homes, access, self) for part in parts_of(units)}
        self.blocks = list(blocks.values())
        for unit in units:
            _UnitHooks(unit, [blocks[part] for part in unit.parts], self)
        shared_state(self.store).modules.add(self)

    def install(self, model: nn.Module) -> None:
        """Let ``offloaded_module`` find this object, and provide weights to code outside of their module's forward.

        Such code can be a fused loss, a head that multiplies by the embedding, or attention that reads its projections'
        weights. When it reads weights, they are fetched and held until the current forward or backward ends.
        """
        _register(model, self._before_forward, self._after_forward)
        model.__dict__[_ATTRIBUTE] = self

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        self.recover()
        call = self.calls.begin(self)
        if torch.is_grad_enabled():
            call.install_hooks(self.saving_hooks())

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls.end(self)

    def recover(self) -> None:
        """Release the leases of forwards and backwards that ended with an error and did not run their hooks."""
        self.calls.end_aborted()
        if not self.calls and torch._C._current_graph_task_id() == -1:
            self.end_backward(is_failing=True)

    def provide_weights(self, block: WeightBlock) -> bool:
        """Hold a block until the running forward or backward ends. Return False if neither is running.

        If the forward of another module uses the block, the block is held until the end of that forward. For example, a
        student can use the head of its teacher.
        """
        call = self.calls.find_innermost(self) or self._enclosing_forward()
        if call is not None:
            self.order.note(("use", block.key), [(block.key, block.tier)])
            call.hold(block)
            return True
        if torch._C._current_graph_task_id() == -1:
            return False
        if not self._held_for_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        block.hold()
        self._held_for_backward.append(block)
        return True

    def _enclosing_forward(self) -> Call | None:
        """Return the running forward of another module in the same store, or None."""
        modules = (module for module in shared_state(self.store).modules if module is not self)
        return next((call for module in modules if (call := module.calls.find_innermost(module)) is not None), None)

    def end_backward(self, *, is_failing: bool = False) -> None:
        """Release the blocks that the backward held for code outside of their modules."""
        blocks, self._held_for_backward = self._held_for_backward, []
        release_all(blocks, is_failing=is_failing)

    def release_backward(self, block: WeightBlock) -> None:
        self.window.close(block)

    def saving_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return weight_hooks(self.window)

    def finish_updates(self) -> None:
        """Apply the deferred updates of all units."""
        for block in self.blocks:
            if block.updater is not None:
                block.updater.finish_update()


class _UnitHooks:
    """Forward hooks that hold a unit's weights while it runs. The constructor installs them."""

    def __init__(self, unit: UnitPart, blocks: Sequence[WeightBlock], offloaded: OffloadedModule) -> None:
        self._unit, self._blocks, self._offloaded = unit, tuple(blocks), offloaded
        self._requests = [(block.key, block.tier) for block in blocks]
        _register(unit.module, self._before_forward, self._after_forward)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        call = self._offloaded.calls.begin(self)
        for block in self._blocks:
            block.check_frozen()
        self._offloaded.window.release_unused()
        for block in self._blocks:
            call.hold(block)
        self._offloaded.order.note(("forward", self._unit.name), self._requests)
        if torch.is_grad_enabled():
            call.install_hooks(self._offloaded.saving_hooks())

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._offloaded.calls.end(self)


def _register(module: nn.Module, pre_hook: Callable[..., None], hook: Callable[..., None]) -> None:
    """Install a hook before and a hook after a module's forward, and hide both from compilers."""
    disable: Callable[[Any], Any] = torch.compiler.disable
    module.register_forward_pre_hook(disable(pre_hook), prepend=True)
    module.register_forward_hook(disable(hook), always_call=True)
