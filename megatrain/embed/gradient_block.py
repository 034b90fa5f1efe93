"""Gradients of a layer's parameters as one block of a store, summed in fp32 over backward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.embed.absent_parameters import Placeholder, gradient_of, holder_of, make_placeholder, set_gradient
from megatrain.embed.stores import compute_tier, shared_state
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.optim.clip import squared_norm
from megatrain.optim.threads import KernelThreads
from tiered import TieredStore


class BlockUpdater(Protocol):
    """The optimizer's side of a weight block."""

    def finish_update(self) -> None:
        """Apply the due update, if any. Called before the weights are read or new gradients summed."""

    def weights_changed(self, names: frozenset[str]) -> None:
        """Handle a change of these parameters that was not an update."""


class GradientBlock:
    """The fp32 gradients of the parameters of one layout, summed over the backward passes of a step.

    The engine's ``GradientAccumulator`` adds them like autograd's ``.grad``: sums of fp32 gradients have the same bits.
    Unlike in the engine, gradients arrive one by one from autograd's hooks. Called by the threads that run autograd,
    one at a time.

    Args:
        key: key of its block, which is registered here.
        parameters: by their name in the layout.
        homes: allowed tiers, preferred first.

    Attributes:
        updater: applies the last step's update, which reads this block, before the first gradient of the next step.
        num_changes: number of gradients added or removed so far.
    """

    def __init__(
        self,
        store: TieredStore,
        key: str,
        layout: UnitLayout,
        parameters: Mapping[str, nn.Parameter],
        homes: Sequence[str],
    ) -> None:
        self.key, self.layout = key, layout
        self._store = store
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._entries = {entry.name: entry for entry in layout.entries}
        self._ordinary = {name: p for name, p in parameters.items() if holder_of(p) is None}
        self._filled: set[str] = set()
        self.num_changes = 0
        self.updater: BlockUpdater | None = None
        self._tier = compute_tier(store)
        self._register(homes)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # kept alive, because their hooks end with them
        for parameter in parameters.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
        for parameter in self._ordinary.values():
            node: Any = get_gradient_edge(parameter).node
            self._hooks.append(node.register_prehook(partial(self._drop_placeholder, parameter)))
            self._nodes.append(node)

    def _register(self, homes: Sequence[str]) -> None:
        shared_state(self._store).register(self.key, self.layout.num_elements, torch.float32, homes, durable=False)

    def close(self) -> None:
        """Stop taking gradients, and unregister the block."""
        for hook in self._hooks:
            hook.remove()
        shared_state(self._store).unregister(self.key)

    def move_hook_last(self, parameter: Tensor) -> None:
        """Run this block's hook after all others of a parameter; called when a hook was added."""
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key, hook in hooks.items() if hook == self._take]:
            hooks[key] = hooks.pop(key)  # autograd runs hooks in insertion order

    @property
    def filled(self) -> frozenset[str]:
        """Names of the parameters that have a gradient."""
        return frozenset(self._filled)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient."""
        return self._names.get(id(parameter)) in self._filled

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter; the next one starts a new sum."""
        self._filled.discard(self._names[id(parameter)])
        self.num_changes += 1

    def consume(self) -> frozenset[str]:
        """Hand the sums over to an update and return their names; the next gradient starts a new sum.

        Raises:
            RuntimeError: a parameter has another gradient than those that moved to the store.
        """
        for name, parameter in self._ordinary.items():
            gradient = gradient_of(parameter)
            if gradient is not None and not isinstance(gradient, Placeholder):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} ({name}) has a gradient that autograd did not make "
                    "in this process alone: set by hand, or by DistributedDataParallel. With offload_gradients=True "
                    "nothing else may set gradients"
                )
        self._drop_cleared()
        filled = frozenset(self._filled)
        self.clear()
        return filled

    def clear(self) -> None:
        """Drop all gradients."""
        self._filled.clear()
        self.num_changes += 1
        for parameter in self._ordinary.values():
            set_gradient(parameter, None)

    def _drop_cleared(self) -> None:
        """Drop gradients whose placeholder is gone: the module's ``zero_grad`` removed it."""
        for name, parameter in self._ordinary.items():
            if gradient_of(parameter) is None:
                self._filled.discard(name)

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return one parameter's flat part of the block's contents."""
        return flat.narrow(0, entry.offset, entry.numel)

    def squared_norms(self, threads: KernelThreads) -> dict[str, float]:
        """Return the sum of squares of each gradient, by name."""
        self._drop_cleared()
        if not self._filled:
            return {}
        with self._store.acquire(self.key, "ram") as lease:
            return {
                entry.name: squared_norm(self.view(lease.tensor, entry), threads)
                for entry in self.layout.entries
                if entry.name in self._filled
            }

    def _take(self, parameter: Tensor) -> None:
        """Move a gradient from its parameter into the block: autograd's hook after adding to ``.grad``."""
        gradient = gradient_of(parameter)
        if gradient is None or isinstance(gradient, Placeholder):
            return
        set_gradient(parameter, None)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not self._filled and self.updater is not None:
            self.updater.finish_update()  # reads the sums that this gradient replaces
        name = self._names[id(parameter)]
        self._add(self._entries[name], gradient)
        self.num_changes += 1
        if name in self._ordinary:  # clipping or reading it must raise, instead of finding no gradient
            set_gradient(parameter, make_placeholder(parameter, name, is_gradient=True))

    def _add(self, entry: TensorEntry, gradient: Tensor) -> None:
        with torch.no_grad(), self._store.acquire(self.key, self._tier, "rw" if self._filled else "w") as lease:
            sums = {entry.name: self.view(lease.tensor, entry).view(entry.shape)}
            GradientAccumulator(sums, self._filled).add(entry.name, gradient)

    def _drop_placeholder(self, parameter: Tensor, arriving: Any) -> None:
        """Remove the placeholder of an earlier gradient before autograd adds the next one to it."""
        if isinstance(gradient_of(parameter), Placeholder):
            set_gradient(parameter, None)
        else:
            self._filled.discard(self._names[id(parameter)])  # cleared by zero_grad, or replaced
