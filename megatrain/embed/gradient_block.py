"""Gradients of a layer's parameters in one block of a store. They are summed in fp32 over backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.base.layout import TensorEntry, UnitLayout
from megatrain.embed.absent_parameters import Placeholder, gradient_of, holder_of, make_placeholder, set_gradient
from megatrain.embed.block_homes import compute_tier, shared_state
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.optim.clip import squared_norm
from megatrain.optim.threads import KernelThreads
from tiered import TieredStore


class BlockUpdater(Protocol):
    """Interface through which a weight block calls its optimizer."""

    def finish_update(self) -> None:
        """Apply the deferred update, if any. This is called before weights are read or new gradients are added."""

    def handle_changed_weights(self, names: frozenset[str]) -> None:
        """Adapt the state to parameters that code other than the optimizer has changed."""


class GradientBlock:
    """Block that contains the fp32 gradients of a layout's parameters, summed over the backward passes of a step.

    Gradients are added in the same way as in autograd's ``.grad`` and the engine's ``GradientAccumulator``, so sums of
    fp32 gradients are bit-identical. Unlike in the engine, gradients arrive one at a time, from autograd's hooks. The
    threads that run autograd call this object, one thread at a time.

    Args:
        key: Key of the registered block.
        parameters: Parameters by name in the layout.

    Attributes:
        updater: Optimizer group. Before the next step's first gradient is added, the group applies the last step's
            update, which reads this block.
        version: Number of gradients added or removed so far.
    """

    #: Factor by which all sums are multiplied, in addition to clipping.
    factor = 1.0

    def __init__(self, store: TieredStore, key: str, layout: UnitLayout, parameters: dict[str, nn.Parameter]) -> None:
        self.key, self.layout = key, layout
        self._store = store
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._entries = {entry.name: entry for entry in layout.entries}
        self._ordinary = {name: p for name, p in parameters.items() if holder_of(p) is None}
        self._filled: set[str] = set()
        self.version = 0
        self.updater: BlockUpdater | None = None
        self._tier = compute_tier(store)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # keep the nodes alive, because their hooks would be removed with them
        for parameter in parameters.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._move_gradient))  # type: ignore[no-untyped-call]
        for parameter in self._ordinary.values():
            node: Any = get_gradient_edge(parameter).node
            self._hooks.append(node.register_prehook(partial(self._drop_placeholder, parameter)))
            self._nodes.append(node)

    def close(self) -> None:
        """Remove the hooks that move gradients, and unregister the block."""
        for hook in self._hooks:
            hook.remove()
        shared_state(self._store).unregister(self.key)

    def move_hook_last(self, parameter: Tensor) -> None:
        """Move this block's hook behind all other hooks of a parameter. Call this after adding a hook."""
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key, hook in hooks.items() if hook == self._move_gradient]:
            hooks[key] = hooks.pop(key)  # autograd runs hooks in insertion order

    @property
    def filled_names(self) -> frozenset[str]:
        """Names of the parameters that have a gradient."""
        return frozenset(self._filled)

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient."""
        return self._names.get(id(parameter)) in self._filled

    def drop_gradient(self, parameter: nn.Parameter) -> None:
        """Drop a parameter's gradient. The next gradient starts a new sum."""
        self._filled.discard(self._names[id(parameter)])
        self.version += 1

    def take(self) -> frozenset[str]:
        """Mark the sums as used by an update, and return their parameters' names. The next gradient starts a new sum.

        Raises:
            RuntimeError: A parameter has a gradient that did not move to the store.
        """
        for name, parameter in self._ordinary.items():
            gradient = gradient_of(parameter)
            if gradient is not None and not isinstance(gradient, Placeholder):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} ({name}) has a gradient that was set by the user "
                    "or by DistributedDataParallel. With offload_gradients=True, only autograd in this process may "
                    "set gradients"
                )
        self._drop_cleared()
        names = frozenset(self._filled)
        self.clear()
        return names

    def clear(self) -> None:
        """Drop all gradients."""
        self._filled.clear()
        self.version += 1
        for parameter in self._ordinary.values():
            set_gradient(parameter, None)

    def _drop_cleared(self) -> None:
        """Drop gradients whose placeholders were removed, for example by the module's ``zero_grad``."""
        for name, parameter in self._ordinary.items():
            if gradient_of(parameter) is None:
                self._filled.discard(name)

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return a flat view of a parameter's range in the block's contents."""
        return flat.narrow(0, entry.offset, entry.numel)

    def read(self, entry: TensorEntry, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a flat view of a parameter's sum. ``tensors`` contains the contents of the leased blocks by key."""
        return self.view(tensors[self.key], entry)

    def squared_norms(self, threads: KernelThreads) -> dict[str, float]:
        """Return each gradient's sum of squares, by name."""
        self._drop_cleared()
        if not self._filled:
            return {}
        with self._store.acquire(self.key, "ram") as lease:
            return {
                entry.name: squared_norm(self.view(lease.tensor, entry), threads)
                for entry in self.layout.entries
                if entry.name in self._filled
            }

    def _move_gradient(self, parameter: Tensor) -> None:
        """Move a gradient from its parameter to the block. Autograd calls this hook after adding to ``.grad``."""
        gradient = gradient_of(parameter)
        if gradient is None or isinstance(gradient, Placeholder):
            return
        set_gradient(parameter, None)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not self._filled and self.updater is not None:
            self.updater.finish_update()  # the update reads the old sums, which this gradient replaces
        name = self._names[id(parameter)]
        self._add(self._entries[name], gradient)
        self.version += 1
        if name in self._ordinary:  # reading or clipping the gradient must raise an error, not find None
            set_gradient(parameter, make_placeholder(parameter, name, is_gradient=True))

    def _add(self, entry: TensorEntry, gradient: Tensor) -> None:
        with torch.no_grad(), self._store.acquire(self.key, self._tier, "rw" if self._filled else "w") as lease:
            sums = {entry.name: self.view(lease.tensor, entry).view(entry.shape)}
            GradientAccumulator(sums, self._filled).add(entry.name, gradient)

    def _drop_placeholder(self, parameter: Tensor, gradients: Any) -> None:
        """Remove a placeholder before autograd adds a gradient to it. If it is already gone, start a new sum."""
        if isinstance(gradient_of(parameter), Placeholder):
            set_gradient(parameter, None)
        else:
            self._filled.discard(self._names[id(parameter)])  # zero_grad or other code removed the placeholder
