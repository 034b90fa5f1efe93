"""``tier``: any module, in place: its parameters live in the store and are there when its layers run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatrain.embed.calls import Call, Calls
from megatrain.embed.gradients import GradientBlock
from megatrain.embed.model_methods import install_methods
from megatrain.embed.order import UseOrder
from megatrain.embed.parameters import block_of
from megatrain.embed.partition import TieringError, UnitPart, partition
from megatrain.embed.room import block_root, check_room
from megatrain.embed.saved import BackwardWindow
from megatrain.embed.stores import compute_device, home_order
from megatrain.embed.weights import WeightBlock, let_go
from megatrain.engine.program import gradient_key, weight_key

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["TieredModule", "gathered", "tier", "tiered_module"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_ATTRIBUTE = "_megatrain_tiered"
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TieredModule:
    """What is kept about a tiered module; found with ``tiered_module(model)``.

    Attributes:
        blocks: of all its parameters, in definition order.
        window: leases of the backward.
        order: of use.
    """

    store: TieredStore
    name: str
    blocks: list[WeightBlock] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = UseOrder(self.store)
        self.window = BackwardWindow(self.order)
        self.calls = Calls()
        self._for_backward: list[WeightBlock] = []

    def watch(self, model: nn.Module) -> None:
        """Let weights be there also where code uses them outside of their own module's forward.

        A fused loss, a head that multiplies with the embedding, attention that reads its projections: such a use
        brings the weights in, and they stay to the end of the forward (or of the backward that it takes place in).
        """
        _register(model, self._before, self._after)
        for block in self.blocks:
            block.provide, block.window, block.recover = self._provide, self.window, self._recover

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._recover()
        call = self.calls.begin(self)
        if torch.is_grad_enabled():
            call.enter(self.window)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls.end(self)

    def _recover(self) -> None:
        """Let go of what forwards and backwards have left that ended with an error which nobody was told of."""
        self.calls.drop_dead()
        if not self.calls and torch._C._current_graph_task_id() == -1:
            self.end_backward(is_failing=True)

    def _provide(self, block: WeightBlock) -> bool:
        call = self.calls.innermost_of(self)
        if call is not None:
            self.order.note(("use", block.key), [(block.key, block.tier)])
            call.hold(block)
            return True
        if torch._C._current_graph_task_id() == -1:
            return False
        if not self._for_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        block.hold()
        self._for_backward.append(block)
        return True

    def end_backward(self, *, is_failing: bool = False) -> None:
        """Let go of what the backward brought in for code that uses weights outside of their modules."""
        blocks, self._for_backward = self._for_backward, []
        let_go(blocks, is_failing=is_failing)

    def finish_updates(self) -> None:
        """Make the updates that the optimizer left to the next use of each unit."""
        for block in self.blocks:
            if block.before_use is not None:
                block.before_use()


def tier(
    model: AnyModule,
    store: TieredStore,
    *,
    name: str = "model",
    weights: Sequence[str] | str = "auto",
    gradients: Sequence[str] | str = "auto",
    leave: Sequence[str] = (),
) -> AnyModule:
    """Move a module's parameters into a store, in place, and return the module.

    Layer by layer its weights are brought in when its forward or backward needs them, those that were used next the
    last time ahead; gradients leave for the store as they are made. ``parameters()`` are the same objects as before,
    to be given to ``TieredAdamW``. Set ``requires_grad`` of what is frozen before. Forward, backward, ``generate``,
    ``state_dict``, ``load_state_dict``, ``save_pretrained`` work as before; moving it to another device is ignored,
    converting its dtype is refused. It computes on the device of the store's fastest tier.

    Args:
        name: of its blocks; a second module in one store needs another.
        weights: tiers that they may live in, most wanted first; "auto": RAM while there is room, then drives.
        gradients: tiers that they may live in, most wanted first; "auto": RAM while there is room, then drives.
        leave: globs over names of parameters that stay ordinary ones.

    Raises:
        TieringError: a dtype without master weights, nothing to tier, or tiered already.
        CapacityError: no room.
    """
    units = partition(model, leave)
    parts = list(dict.fromkeys(part for unit in units for part in unit.parts))
    homes = home_order(store, weights), home_order(store, gradients)
    check_room(store, name, units, parts, *homes)
    _forbid_foreign_optimizers()
    tiered = TieredModule(store, name)
    blocks: dict[int, WeightBlock] = {}
    for part in parts:
        key = weight_key(block_root(name, part))
        block = WeightBlock(store, key, part.layout, part.parameters, part.dtype, homes[0])
        block.take_over()
        blocks[id(part)] = block
        tiered.blocks.append(block)
    for part in parts:
        if part.layout.trainable:
            key = gradient_key(block_root(name, part), 0)
            blocks[id(part)].gradients = GradientBlock(store, key, part.layout, part.parameters, homes[1])
    for unit in units:
        _UnitHooks(unit, [blocks[id(part)] for part in unit.parts], tiered).install()
    tiered.watch(model)
    _move_buffers(model, compute_device(store))
    model.__dict__[_ATTRIBUTE] = tiered
    install_methods(model, tiered)
    return model


def tiered_module(model: nn.Module) -> TieredModule:
    """Return what is kept about a tiered module.

    Raises:
        TieringError: ``tier`` was not called with it.
    """
    found = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(found, TieredModule):
        raise TieringError(f"{type(model).__name__} is not tiered: call megatrain.tier(model, store) first")
    return found


@contextmanager
def gathered(of: nn.Module | Tensor | Iterable[Tensor], *, writable: bool = False) -> Iterator[None]:
    """Hold the weights of a module, or of some parameters, in the compute tier: to read or, if asked, to change them.

    All of them at once: gather layer by layer what does not fit together. Parameters that are in no store are left
    as they are. What is computed with the weights inside can be differentiated, inside or after.

    Raises:
        CapacityError: together they do not fit.
        WeightInUseError: changed without ``writable``, or a view outlives it.
    """
    parameters = [of] if isinstance(of, Tensor) else of.parameters() if isinstance(of, nn.Module) else of
    blocks = dict.fromkeys(block for parameter in parameters if (block := block_of(parameter)) is not None)
    call = Call()
    try:
        for block in blocks:
            block.hold("rw" if writable else "r", is_watched=writable)
            call.held.append(block)
        window = next((block.window for block in blocks if block.window is not None), None)
        if window is not None and torch.is_grad_enabled():
            call.enter(window)
        yield
    finally:
        call.end()


class _UnitHooks:
    """Hold a unit's weights while its forward runs; let the graph save them by name."""

    def __init__(self, unit: UnitPart, blocks: Sequence[WeightBlock], tiered: TieredModule) -> None:
        self._unit, self._blocks, self._tiered = unit, tuple(blocks), tiered
        self._requests = [(block.key, block.tier) for block in blocks]

    def install(self) -> None:
        """Watch the module's forward: first of all hooks before it, last of all after it."""
        _register(self._unit.module, self._before, self._after)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        call = self._tiered.calls.begin(self)
        for block in self._blocks:
            block.check_frozen()
        self._tiered.window.close_unused()
        for block in self._blocks:
            call.hold(block)
        self._tiered.order.note(("forward", self._unit.name), self._requests)
        if torch.is_grad_enabled():
            call.enter(self._tiered.window)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._tiered.calls.end(self)


def _register(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Watch a module's forward: first of all hooks before it, last of all after it. Not for a compiler to trace."""
    disable: Callable[[Any], Any] = torch.compiler.disable
    module.register_forward_pre_hook(disable(before), prepend=True)
    module.register_forward_hook(disable(after), always_call=True)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                module._buffers[leaf] = buffer.to(device)


_is_forbidden: list[Callable[..., None]] = []


def _forbid_foreign_optimizers() -> None:
    """Let every optimizer that cannot see the gradients of tiered parameters say so instead of doing nothing."""
    if _is_forbidden:
        return

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "sees_the_store", False):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (block := block_of(parameter)) is not None:
                    raise TieringError(
                        f"{type(optimizer).__name__} was given {block.name_of(parameter)}, whose gradient is in the "
                        "store: it would do nothing. Use megatrain.TieredAdamW(model.parameters(), ...)"
                    )

    register_optimizer_step_pre_hook(check)
    _is_forbidden.append(check)
