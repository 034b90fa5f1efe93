"""Fake CUDA tensors on a machine without a GPU, so that every machine can trace a plan for a GPU.

To plan a run on a GPU, the engine runs on torch's fake tensors with the device ``cuda``. On a machine without a GPU,
this module changes two things. It chooses the attention kernel, because a torch build without CUDA cannot. It also
hides the device from autograd, which would ask a driver for the streams of ``cuda`` tensors. To C++ code, the tensors
report ``lazy``, a device type without streams. If C++ code requests tensors on ``lazy``, they are made on ``cuda``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.nn import functional

from fakes.virtual_tensor import map_leaves
from fakes.virtual_torch import register_lazy_device_guard
from megatrain.engine.unit import bound_unit
from megatrain.engine.unit.absent_weights import AbsentWeight, absent_weight

aten = torch.ops.aten

_CUDA, _LAZY = torch.device("cuda", 0), torch.device("lazy", 0)
_torch_attention = functional.scaled_dot_product_attention


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Enable fake tensors on "cuda" within the context. On a machine with a real GPU, change nothing."""
    with nullcontext() if torch.cuda.is_available() else _in_place():
        yield


@contextmanager
def _in_place() -> Iterator[None]:
    register_lazy_device_guard()
    tensor_dispatch = fake_tensor.FakeTensor.__torch_dispatch__.__func__
    mode_dispatch = fake_tensor.FakeTensorMode.__torch_dispatch__
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    answer = handlers[torch.ops.prim.device.default]

    def dispatch_tensor(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _for_cpp(tensor_dispatch(cls, func, types, _from_cpp(args), _from_cpp(kwargs or {})))

    def dispatch_mode(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return mode_dispatch(mode, func, types, _from_cpp(args), _from_cpp(kwargs or {}))

    stands_for = {
        (bound_unit, "absent_weight"): lambda weight, _: absent_weight(weight, torch.device("cpu")),  # is a real tensor
        (fake_tensor.FakeTensor, "__torch_dispatch__"): classmethod(dispatch_tensor),
        (fake_tensor.FakeTensorMode, "__torch_dispatch__"): dispatch_mode,
        (fake_tensor.FakeTensorMode, "avoid_device_init"): property(lambda mode: True),
        (torch.cuda, "get_device_capability"): lambda device=None: (9, 0),
        (functional, "scaled_dot_product_attention"): _attention,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(AbsentWeight, "device", property(lambda weight: _CUDA), create=True))
        stack.enter_context(
            mock.patch.dict(handlers, {torch.ops.prim.device.default: lambda args: _for_cpp(answer(args))})
        )
        for (owner, name), stand_in in stands_for.items():
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def _for_cpp(value: Any) -> Any:
    return _LAZY if isinstance(value, torch.device) and value.type == "cuda" else value


def _from_cpp(values: Any) -> Any:
    return map_leaves(
        lambda value: _CUDA if isinstance(value, torch.device) and value.type == "lazy" else value, values
    )


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the kernel that SDPA would choose on an H100 in deterministic mode.

    This is flash attention for 16-bit inputs with equal head sizes and no mask, and memory-efficient attention
    otherwise.
    """
    if query.device.type != "cuda":
        return _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    options: dict[str, Any] = {"scale": scale}
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]:
        result: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, **options
        )[0]
        return result
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, **options
    )
    efficient: Tensor = found[0]
    return efficient
