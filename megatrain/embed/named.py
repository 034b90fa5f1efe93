"""``named_tensors``: yields an offloaded module's weights one at a time, to export them to another program.

In online RL, a rollout engine (vLLM, SGLang) receives the policy's new weights after each step. Trainers usually copy
them from ``parameter.data``, but the parameters of an offloaded module have no data outside of its forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.embed.offloaded_module import gathered
from megatrain.embed.partition import OffloadError

#: Components that peft adds to the parameter names of a model.
_WRAPPER_NAMES = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|modules_to_save\.[^.]+\.")


def named_tensors(
    model: nn.Module, *, merge: bool = True, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of each parameter in the order of ``named_parameters``. Tied parameters are yielded once.

    Each tensor is a copy that the caller can keep. No weights stay gathered between two tensors, so at most one
    tensor is in memory in addition to the store and the caller's tensors. Deferred updates are applied first. Ordinary
    parameters and modules are also supported. For a module with ``group``, this is a collective.

    Args:
        merge: True merges peft's adapters into copies of their base weights, under the names of the model without
            adapters. The weights in the store do not change. Merging needs three times the memory of a tensor. False
            yields base weights and adapters separately, under the names of ``named_parameters``.
        device: Device of the copies; None for the module's compute device.

    Raises:
        OffloadError: An adapter cannot be merged into weights.
        WeightInUseError: A parameter has no values yet.
        CapacityError: A layer does not fit in the compute tier.
    """
    for entry in _iter_weights(model, merge=merge):
        yield entry.name, entry.read(device)


def named_shapes(model: nn.Module, *, merge: bool = True) -> list[tuple[str, torch.dtype, torch.Size]]:
    """Return (name, dtype, shape) of each tensor that ``named_tensors`` yields, in order, without reading values."""
    return [(entry.name, entry.parameter.dtype, entry.parameter.shape) for entry in _iter_weights(model, merge=merge)]


@dataclass(frozen=True, slots=True)
class _NamedWeight:
    """A parameter and its peft layers (``adapters``, outermost first), which wrap the module that owns it."""

    name: str
    parameter: nn.Parameter
    adapters: Sequence[Any]

    def read(self, device: torch.device | str | None) -> Tensor:
        """Return a copy of the parameter's values, with its adapters merged."""
        with torch.no_grad():
            if any(not adapter.merged for adapter in self.adapters):
                values = self._merge()
                return values if device is None else values.to(device)
            with gathered(self.parameter):
                return self.parameter.detach().to(device or self.parameter.device, copy=True)

    def _merge(self) -> Tensor:
        """Merge the adapters with peft, into copies that temporarily replace the layer's parameters."""
        adapters = [adapter for adapter in self.adapters if not adapter.merged]
        base: Any = adapters[0].get_base_layer()
        if isinstance(base, nn.MultiheadAttention):
            raise OffloadError(
                f"{self.name}: adapters on torch's MultiheadAttention cannot be merged one tensor at a time. Leave "
                "that module out of target_modules, or send them separately: named_tensors(model, merge=False)"
            )
        parameters = base._parameters
        leaf = next(leaf for leaf, parameter in parameters.items() if parameter is self.parameter)
        with gathered(adapters[0]):
            copies = {
                key: None if parameter is None else nn.Parameter(parameter.detach().clone(), requires_grad=False)
                for key, parameter in parameters.items()
            }
            base._parameters = copies
            try:
                # Call the class's method. The instance's method writes to the store, because ``offload`` replaced it.
                for adapter in adapters:
                    type(adapter).merge(adapter)
                values = copies[leaf]
                assert values is not None, leaf
                return values.detach().clone()
            finally:
                try:
                    for adapter in reversed(adapters):
                        if adapter.merged:  # reset peft's list of merged adapters; the copies are discarded
                            type(adapter).unmerge(adapter)
                finally:
                    base._parameters = parameters


def _iter_weights(model: nn.Module, *, merge: bool) -> Iterator[_NamedWeight]:
    if not merge:
        yield from (_NamedWeight(name, parameter, ()) for name, parameter in model.named_parameters())
        return
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise OffloadError(
            f"{type(config).__name__} learns inputs instead of weights, so it cannot be merged. Send the adapter "
            "separately: named_tensors(model, merge=False)"
        )
    layers = [module for module in model.modules() if hasattr(type(module), "get_base_layer")]
    adapters: dict[int, list[Any]] = {}
    adapter_ids: set[int] = set()
    for layer in layers:
        base: Any = layer.get_base_layer()  # type: ignore[operator]
        base_ids = {id(parameter) for parameter in base.parameters()}
        adapter_ids |= {id(parameter) for parameter in layer.parameters()} - base_ids
        for parameter in base._parameters.values():
            if parameter is not None:
                adapters.setdefault(id(parameter), []).append(layer)
    for name, parameter in model.named_parameters():
        if id(parameter) not in adapter_ids and "original_module" not in name:
            yield _NamedWeight(_WRAPPER_NAMES.sub("", name), parameter, tuple(adapters.get(id(parameter), ())))
