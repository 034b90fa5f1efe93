"""Gradients that leave for the store as soon as autograd has made them, and their exact sum over backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatrain.embed.stores import compute_tier, ledger_of
from megatrain.optim.clip import squared_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain.models.layout import TensorEntry, UnitLayout
    from megatrain.optim.threads import KernelThreads
    from tiered.store import TieredStore

__all__ = ["GradientBlock", "drop_gradient", "gradient_of"]


class GradientBlock:
    """The fp32 gradients of the parameters of one layout, summed over the backward passes of a step.

    The first gradient of a parameter is copied in and later ones are added, as autograd does with ``.grad``: so sums
    of fp32 gradients have the same bits. Called by the threads that run autograd, one at a time.

    Args:
        key: of its block, which is registered here. parameters: by the name that the layout has for them.
        homes: tiers that it may live in, most wanted first.
        before_add: called before the first gradient of a step: whoever still reads the last step's finishes.
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
        self._filled: set[str] = set()
        self.before_add: Callable[[], None] | None = None
        self._tier = compute_tier(store)
        ledger_of(store).register(store, key, layout.num_elements, torch.float32, homes, durable=False)
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._take)

    @property
    def filled(self) -> frozenset[str]:
        """Names of the parameters that have a gradient now."""
        return frozenset(self._filled)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter has a gradient now."""
        return self._names.get(id(parameter)) in self._filled

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter."""
        self._filled.discard(self._names[id(parameter)])

    def consume(self) -> frozenset[str]:
        """Hand the sums over to an update: return whose they are; the next gradient starts a new sum."""
        filled, self._filled = frozenset(self._filled), set()
        return filled

    def view(self, flat: Tensor, entry: TensorEntry) -> Tensor:
        """Return the part of the block's contents that is one parameter's, flat."""
        return flat.narrow(0, entry.offset, entry.numel)

    def squared_norms(self, threads: KernelThreads) -> dict[str, float]:
        """Return the sum of squares of each gradient, by name."""
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
        if gradient is None:
            return
        drop_gradient(parameter)
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


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return what autograd has accumulated in a parameter, whatever its class says."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = torch.Tensor.grad.__get__(parameter)  # type: ignore[attr-defined]
    return gradient


def drop_gradient(parameter: Tensor) -> None:
    """Clear what autograd has accumulated in a parameter, whatever its class says."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.grad.__set__(parameter, None)  # type: ignore[attr-defined]
