"""Support for ``megatrain.offload`` on a software CUDA device, whose tensors are instances of a Python class.

To move a host parameter to a device, torch sets the parameter's ``data``, but rejects data of a different tensor class.
These replacements swap the parameter with a new device parameter instead. The parameter then remains a
``VirtualTensor``, whether its contents are present or absent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from types import ModuleType
from typing import Any
from unittest import mock
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fakes.lazy_device import DEVICE
from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_tensor import VirtualTensor
from megatrain.embed import absent_parameters, activation_cache, activations, source_storages, weights
from megatrain.engine.unit.graph_keeping import version_probe


class _Present(absent_parameters.PresentParameter, VirtualTensor):
    pass


class _Stored(absent_parameters.StoredParameter, VirtualTensor):
    pass


class _Placeholder(absent_parameters.Placeholder, VirtualTensor):
    pass


def _make_placeholder(parameter: Tensor, name: str, *, is_gradient: bool = False) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = absent_parameters.placeholder(parameter.shape, parameter.dtype, parameter.device)
    made.__class__ = _Placeholder
    made.source_name, made.is_gradient = name, is_gradient
    result: Tensor = made
    return result


class _Data:
    """Descriptor that replaces ``Tensor.data``."""

    def __get__(self, parameter: Any, owner: Any = None) -> Tensor:
        numbers: Tensor = Tensor.data.__get__(parameter)  # type: ignore[attr-defined]
        return numbers

    def __set__(self, parameter: Any, numbers: Any) -> None:
        if isinstance(parameter, VirtualTensor):
            Tensor.data.__set__(parameter, numbers)  # type: ignore[attr-defined]
            parameter.memory, parameter.allocation = numbers.memory, numbers.allocation
            return
        attributes = dict(parameter.__dict__)
        torch.utils.swap_tensors(parameter, nn.Parameter(numbers, parameter.requires_grad))  # type: ignore[no-untyped-call]
        parameter.__dict__.update(attributes)


@contextmanager
def embedded(device: VirtualCuda) -> Iterator[None]:
    """Make ``megatrain.offload`` support the device within the context."""
    address = weights._address
    stand_ins: dict[str, Any] = {
        "_DATA": _Data(),
        "PresentParameter": _Present,
        "StoredParameter": _Stored,
        "make_placeholder": _make_placeholder,
        "_address": lambda tensor: address(tensor.memory if isinstance(tensor, VirtualTensor) else tensor),
        "count_references": lambda tensor: 0,  # ignores references from queued kernels
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "allows_addresses", True))
        _replace(
            stack, [module for name, module in sys.modules.items() if name.startswith("megatrain.embed")], stand_ins
        )
        yield


def _replace(stack: ExitStack, modules: Sequence[ModuleType], stand_ins: Mapping[str, Any]) -> None:
    """Replace globals in every module that has them. Assert that each name exists in at least one module."""
    replaced = [(module, name) for module in modules for name in stand_ins.keys() & vars(module).keys()]
    assert {name for _, name in replaced} == stand_ins.keys()
    for module, name in replaced:
        stack.enter_context(mock.patch.object(module, name, stand_ins[name]))


class _Storage:
    """Stand-in for the storage of a device tensor, because torch does not support storages for such tensors."""

    device = DEVICE

    def __init__(self, tensor: VirtualTensor) -> None:
        self.host, self.allocation = tensor.memory.untyped_storage(), tensor.allocation
        self._cdata = self.host._cdata

    def nbytes(self) -> int:
        return self.host.nbytes()


class _WeakStorage:
    """Stand-in for ``WeakStorage``. A storage lives as long as its allocation."""

    def __init__(self, storage: _Storage) -> None:
        self._storage, self._allocation = copy(storage), ref(storage.allocation)
        del self._storage.allocation

    def __call__(self) -> _Storage | None:
        allocation = self._allocation()
        if allocation is None:
            return None
        found = copy(self._storage)
        found.allocation = allocation
        return found


def _set(empty: VirtualTensor, storage: _Storage, *place: Any) -> VirtualTensor:
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        memory = torch.empty(0, dtype=empty.dtype).set_(storage.host, *place)
    return VirtualTensor(memory, storage.allocation)


def _probe(tensor: Tensor) -> Tensor:
    probe = version_probe(tensor)
    if isinstance(probe, VirtualTensor):
        empty: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        probe.memory, probe.allocation = empty.memory, empty.allocation
    return probe


@contextmanager
def offloading(device: VirtualCuda) -> Iterator[None]:
    """Make ``offload_activations`` support the device's tensors within the context."""
    is_plain_strided = activations.is_plain_strided
    stand_ins: dict[str, Any] = {
        "is_plain_strided": lambda tensor: isinstance(tensor, VirtualTensor) or is_plain_strided(tensor),
        "WeakStorage": _WeakStorage,
        "version_probe": _probe,
        "_current_stream": device.current_stream,
    }
    with ExitStack() as stack:
        _replace(stack, (activations, activation_cache, source_storages), stand_ins)
        stack.enter_context(mock.patch.object(VirtualTensor, "untyped_storage", lambda tensor: _Storage(tensor)))
        stack.enter_context(mock.patch.object(VirtualTensor, "set_", _set))
        yield
