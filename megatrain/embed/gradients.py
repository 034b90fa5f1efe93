"""Gradients that leave for the store as soon as autograd has made them, and their exact sum over backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megatrain.embed.parameters import StandIn, block_of, gradient_of, set_gradient, stand_in
from megatrain.embed.stores import compute_tier, ledger_of
from megatrain.optim.clip import squared_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.models.layout import TensorEntry, UnitLayout
    from megatrain.optim.threads import KernelThreads
    from tiered.store import TieredStore

__all__ = ["GradientBlock"]


class GradientBlock:
    """The fp32 gradients of the parameters of one layout, summed over the backward passes of a step.

    The first gradient of a parameter is copied in and later ones are added, as autograd does with ``.grad``: so sums
    of fp32 gradients have the same bits. Called by the threads that run autograd, one at a time.

    Args:
        key: of its block, which is registered here.
        parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.
        before_add: called before the first gradient of a step: whoever still reads the last step's finishes.

    Attributes:
        num_changes: gradients that came or went so far.
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
        self._ordinary = {name: p for name, p in parameters.items() if block_of(p) is None}
        self._filled: set[str] = set()
        self.num_changes = 0
        self.before_add: Callable[[], None] | None = None
        self._tier = compute_tier(store)
        ledger_of(store).register(store, key, layout.num_elements, torch.float32, homes, durable=False)
        self._hooks: list[Any] = []
        self._nodes: list[Any] = []  # kept, or their hooks go
        for parameter in parameters.values():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take))  # type: ignore[no-untyped-call]
        for parameter in self._ordinary.values():
            node: Any = get_gradient_edge(parameter).node
            self._hooks.append(node.register_prehook(partial(self._make_way, parameter)))
            self._nodes.append(node)

    def close(self) -> None:
        """Leave gradients with their parameters from now on, and forget the block."""
        for hook in self._hooks:
            hook.remove()
        ledger_of(self._store).unregister(self._store, self.key)

    def come_last(self, parameter: Tensor) -> None:
        """Take a gradient after all other hooks have seen it; called when there is a new one."""
        hooks = parameter._post_accumulate_grad_hooks
        for key in [key for key, hook in hooks.items() if hook == self._take]:
            hooks[key] = hooks.pop(key)  # autograd looks at the order of insertion alone

    @property
    def filled(self) -> frozenset[str]:
        """Names of the parameters that have a gradient now."""
        return frozenset(self._filled)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient now."""
        return self._names.get(id(parameter)) in self._filled

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter: the next one starts a new sum."""
        self._filled.discard(self._names[id(parameter)])
        self.num_changes += 1

    def consume(self) -> frozenset[str]:
        """Hand the sums over to an update: return whose they are; the next gradient starts a new sum.

        Raises:
            RuntimeError: another gradient came to a parameter than those that left for the store.
        """
        for name, parameter in self._ordinary.items():
            gradient = gradient_of(parameter)
            if gradient is not None and not isinstance(gradient, StandIn):
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
        """Drop those whose stand-in somebody took away: ``zero_grad`` of the module."""
        for name, parameter in self._ordinary.items():
            if gradient_of(parameter) is None:
                self._filled.discard(name)

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return the part of the block's contents that is one parameter's, flat."""
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
        """Move a gradient from its parameter into the block: autograd's hook, after it has added to ``.grad``."""
        gradient = gradient_of(parameter)
        if gradient is None or isinstance(gradient, StandIn):
            return
        set_gradient(parameter, None)
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if not self._filled and self.before_add is not None:
            self.before_add()
        name = self._names[id(parameter)]
        entry = self._entries[name]
        with torch.no_grad(), self._store.acquire(self.key, self._tier, "rw" if self._filled else "w") as lease:
            place = self.view(lease.tensor, entry).view(entry.shape)
            if name in self._filled:
                place.add_(gradient)
            else:
                place.copy_(gradient)
        self._filled.add(name)
        self.num_changes += 1
        if name in self._ordinary:  # whoever clips or reads it is told, instead of finding nothing
            set_gradient(parameter, stand_in(parameter, name, is_gradient=True))

    def _make_way(self, parameter: Tensor, arriving: Any) -> None:
        """Take the stand-in of an earlier gradient away before autograd adds the next one to it."""
        if isinstance(gradient_of(parameter), StandIn):
            set_gradient(parameter, None)
        else:
            self._filled.discard(self._names[id(parameter)])  # cleared by zero_grad, or replaced
