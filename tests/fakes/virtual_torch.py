"""Replacements for torch functions whose C++ code queries the device, for a software CUDA device."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from fakes.lazy_device import DEVICE
from fakes.virtual_tensor import VirtualTensor, is_ours, map_leaves, memories

aten = torch.ops.aten

_NUM_DEVICE_TYPES, _LAZY, _META = 24, 13, 14
_FLASH = 1  # result of `_fused_sdp_choice` for flash attention

_torch_to = Tensor.to


def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace ``Tensor.to``, which asks the device guard for an index if the argument is "cuda" without one."""

    def numbered(value: Any) -> Any:
        return DEVICE if isinstance(value, str | torch.device) and is_ours(value) else value

    args, kwargs = map_leaves(numbered, args), map_leaves(numbered, kwargs)
    wanted = [value for value in (*args, *kwargs.values()) if value == DEVICE]
    if wanted and isinstance(tensor, VirtualTensor) and not kwargs.get("copy"):
        rest = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype | torch.memory_format)]
        return _torch_to(tensor, *rest) if rest else tensor
    return _torch_to(tensor, *args, **kwargs)


_torch_attention = functional.scaled_dot_product_attention


def attention(
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
    """Replace SDPA, which has no kernel for this device, with the CPU's kernel."""
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        inputs = memories((query, key, value, attn_mask))
        choice = torch._fused_sdp_choice(*inputs, dropout_p, enable_gqa=enable_gqa, **options)
    if choice != _FLASH or not isinstance(query, VirtualTensor):
        return _torch_attention(query, key, value, attn_mask, dropout_p, enable_gqa=enable_gqa, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return result


_torch_tensor = torch.tensor


def tensor_of(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Replace ``torch.tensor``: create the tensor on the host, and then copy it to the device.

    torch's version does both internally, and reads the values of tensors in ``data`` without dispatching.
    """
    if isinstance(data, list | tuple):
        data = map_leaves(lambda each: each.tolist() if isinstance(each, Tensor) else each, data)
    made = _torch_tensor(data, **kwargs)
    return made if device is None else made.to(device)


def class_of(make: Callable[..., Any]) -> type:
    """Return a class whose constructor returns ``make(...)``, for annotations that need a class."""
    return type("Made", (), {"__new__": lambda cls, *args, **kwargs: make(*args, **kwargs)})


@functools.cache
def register_lazy_device_guard() -> None:
    """Make autograd accept tensors of the device type "lazy", for which torch has no device guard.

    Autograd gets streams from the guard, so register the guard of meta tensors, which does nothing. The registry is an
    array of pointers, indexed by device type.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    registry[_LAZY] = registry[_LAZY] or registry[_META]
