"""``named_tensors``: the weights of an offloaded module, one at a time, for export to another program.

A rollout engine of online RL (vLLM, SGLang) has a copy of the policy and receives new weights after each step. Its
trainer reads ``parameter.data`` for that, which an offloaded module lacks outside of its forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.embed.offload import gathered
from megatrain.embed.partition import OffloadError

#: Name components that peft adds to a wrapped model.
_WRAPPED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|modules_to_save\.[^.]+\.")


def named_tensors(
    model: nn.Module, *, merge: bool = True, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of a module's parameters in the order of ``named_parameters``, a tied one once.

    Each tensor is a copy, which the caller may keep. Nothing in the store is held meanwhile, so memory is one tensor in
    addition to the store and the caller's tensors. Deferred updates are applied first. Also works for ordinary
    parameters and modules. For a module with ``group`` it is a collective.

    Args:
        merge: merge adapters of peft into copies of their base weights, under the names of the model without adapters.
            The weights in the store keep their bits; a merged tensor needs three times its memory. False yields base
            weights and adapters separately, under the names of ``named_parameters``.
        device: device of the copies; None for the module's compute device.

    Raises:
        OffloadError: an adapter cannot be merged into weights.
        WeightInUseError: a parameter has no values yet.
        CapacityError: a layer does not fit the compute tier.
    """
    for entry in _entries(model, merge=merge):
        yield entry.name, entry.read(device)


def named_shapes(model: nn.Module, *, merge: bool = True) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Return (name, dtype, shape) of each tensor of ``named_tensors``, in its order; reads no values."""
    return [(entry.name, entry.parameter.dtype, entry.parameter.shape) for entry in _entries(model, merge=merge)]


@dataclass(frozen=True, slots=True)
class _NamedWeight:
    """One parameter. ``adapters`` are peft's layers around the module that owns it, outermost first."""

    name: str
    parameter: nn.Parameter
    adapters: Sequence[Any]

    def read(self, device: torch.device | str | None) -> Tensor:
        """Return a copy of the values, with adapters merged."""
        with torch.no_grad():
            if any(not adapter.merged for adapter in self.adapters):
                merged = self._merged()
                return merged if device is None else merged.to(device)
            with gathered(self.parameter):
                return self.parameter.detach().to(device or self.parameter.device, copy=True)

    def _merged(self) -> Tensor:
        """Let peft merge into copies that temporarily replace the layer's parameters."""
        adapters = [adapter for adapter in self.adapters if not adapter.merged]
        base: Any = adapters[0].get_base_layer()
        if isinstance(base, nn.MultiheadAttention):
            raise OffloadError(
                f"{self.name}: adapters on torch's MultiheadAttention cannot be merged one tensor at a time. Leave "
                "that module out of target_modules, or send base and adapters apart: named_tensors(model, merge=False)"
            )
        own = base._parameters
        leaf = next(leaf for leaf, parameter in own.items() if parameter is self.parameter)
        with gathered(adapters[0]):
            copies = {
                key: None if parameter is None else nn.Parameter(parameter.detach().clone(), requires_grad=False)
                for key, parameter in own.items()
            }
            base._parameters = copies
            try:
                for adapter in adapters:  # the class's method: the instance's method writes to the store
                    type(adapter).merge(adapter)
                values = copies[leaf]
                assert values is not None, leaf
                return values.detach().clone()
            finally:
                try:
                    for adapter in reversed(adapters):
                        if adapter.merged:  # restores peft's record; the copies are discarded
                            type(adapter).unmerge(adapter)
                finally:
                    base._parameters = own


def _entries(model: nn.Module, *, merge: bool) -> Iterator[_NamedWeight]:
    if not merge:
        yield from (_NamedWeight(name, parameter, ()) for name, parameter in model.named_parameters())
        return
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise OffloadError(
            f"{type(config).__name__} learns inputs, not weights: there is nothing to merge. Send the adapter apart: "
            "named_tensors(model, merge=False)"
        )
    layers = [module for module in model.modules() if hasattr(type(module), "get_base_layer")]
    adapters: dict[int, list[Any]] = {}
    left_out: set[int] = set()
    for layer in layers:
        base: Any = layer.get_base_layer()  # type: ignore[operator]
        own = {id(parameter) for parameter in base.parameters()}
        left_out |= {id(parameter) for parameter in layer.parameters()} - own
        for parameter in base._parameters.values():
            if parameter is not None:
                adapters.setdefault(id(parameter), []).append(layer)
    for name, parameter in model.named_parameters():
        if id(parameter) not in left_out and "original_module" not in name:
            yield _NamedWeight(_WRAPPED.sub("", name), parameter, tuple(adapters.get(id(parameter), ())))
