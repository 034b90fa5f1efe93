"""Hides the store's operations from torch's dispatch modes, which observe the operations of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as dispatch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def bypass_modes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function bypass the active dispatch modes, except modes that emulate a device.

    If copies of a layer's weights still exist, its recompute fetches less and thus runs different operations.
    PyTorch's selective checkpointing (``create_selective_checkpoint_contexts``) compares the operations of forward and
    recompute, and would raise an error. Modes that count operations would include the fetches.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        modes = dispatch._get_current_dispatch_mode_stack()
        infra_modes = [mode for mode in modes if mode.is_infra_mode()]
        _replace_modes(modes, infra_modes)
        try:
            return function(*args, **kwargs)
        finally:
            _replace_modes(infra_modes, modes)

    return wrapped


def _replace_modes(modes: Sequence[dispatch.TorchDispatchMode], stack: Sequence[dispatch.TorchDispatchMode]) -> None:
    """Replace the active dispatch modes with ``stack``. The last mode handles operations first."""
    for _ in modes:
        dispatch._pop_mode()
    for mode in stack:
        dispatch._push_mode(mode)
