"""What lets ``megatrain.offload`` take parameters to a CUDA device in software, whose tensors are not torch's own.

torch gives a parameter of the host the memory of a device by ``data``; it refuses that for tensors of another class.
So the parameter changes places with a new one of the device, and stays of its class while it is present or absent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_tensor import VirtualTensor
from megatrain.embed import weights


class _Present(weights.PresentParameter, VirtualTensor):
    pass


class _Stored(weights.StoredParameter, VirtualTensor):
    pass


class _StandIn(weights.StandIn, VirtualTensor):
    pass


def _stand_in(parameter: Tensor, what: str, *, is_gradient: bool = False) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: Any = weights.placeholder(parameter.shape, parameter.dtype, parameter.device)
    made.__class__ = _StandIn
    made.what, made.is_gradient = what, is_gradient
    result: Tensor = made
    return result


class _Data:
    """Stands for ``Tensor.data``."""

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
    """Let modules be offloaded on the device."""
    address = weights._address
    stand_ins: dict[str, Any] = {
        "_DATA": _Data(),
        "PresentParameter": _Present,
        "StoredParameter": _Stored,
        "stand_in": _stand_in,
        "_address": lambda tensor: address(tensor.memory if isinstance(tensor, VirtualTensor) else tensor),
        "references": lambda tensor: 0,  # queued kernels hold what they read, which is no use by anybody
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "tells_addresses", True))
        for module in [module for name, module in sys.modules.items() if name.startswith("megatrain.embed")]:
            for name in stand_ins.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        yield
