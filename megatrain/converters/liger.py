"""Kernels of the package liger-kernel in the layers of a model: its norms and its gated MLPs.

Its rotary embedding is left out, as it replaces a function of the whole process. So are its cross entropies: they need
whole rows of logits, where the head makes them for a part of the vocabulary at a time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


__all__ = ["apply_liger_kernels", "check_liger_kernels", "has_liger_kernels"]

_KEY = "model.use_liger_kernel = true"
#: Arguments of liger's functions -> what is asked for; those that a function does not have are left out.
_LEFT_OUT = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
_NO_MLP = {"swiglu": False, "geglu": False}


def has_liger_kernels() -> bool:
    """Return whether liger-kernel and Triton are installed, without importing them."""
    return all(find_spec(name) is not None for name in ("liger_kernel", "triton"))


def check_liger_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """See whether ``apply_liger_kernels`` can do its work.

    Raises:
        UnsupportedModelError: not on a GPU; not installed; no kernels for this kind of model.
    """
    if device.type != "cuda":
        raise UnsupportedModelError(_KEY, "its kernels need a GPU. Write use_liger_kernel = false")
    _function_for(model)


def apply_liger_kernels(model: PreTrainedModel, *, with_mlps: bool) -> None:
    """Let the modules of ``model`` compute with liger's kernels; parameters and their names stay.

    Results are rounded in other places, at every placement in the same ones. A trace counts what these kernels read
    and write (``engine/kernel_work.py``).

    Raises:
        UnsupportedModelError: as above, or its layers are not what liger takes them for.
    """
    function = _function_for(model)
    wanted = {**_LEFT_OUT, **({} if with_mlps else _NO_MLP)}
    known = inspect.signature(function).parameters
    # It changes this model's modules, and classes for models that are built later: those are none of ours.
    namespace = vars(sys.modules[type(model).__module__])
    before = dict(namespace)
    try:
        function(model=model, **{name: value for name, value in wanted.items() if name in known})
    except Exception as error:  # it takes for granted what layers look like, in its own way for each family
        raise UnsupportedModelError(
            _KEY,
            f"liger-kernel does not fit {type(model).__name__} ({type(error).__name__}: {error}). "
            "Write use_liger_kernel = false",
        ) from error
    finally:
        namespace.update(before)


def _function_for(model: PreTrainedModel) -> Callable[..., Any]:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise _cannot_be_used(error) from error
    model_type = model.config.model_type
    found: Callable[..., Any] | None = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if found is None:
        raise UnsupportedModelError(
            _KEY, f"liger-kernel has no kernels for {model_type}. Write use_liger_kernel = false"
        )
    return found


def _cannot_be_used(error: ImportError) -> UnsupportedModelError:
    return UnsupportedModelError(
        _KEY,
        f"the package liger-kernel cannot be used here ({error}). Install it: pip install 'megatrain-tier[gpu]'. A new "
        "run may write use_liger_kernel = false; one that began with these kernels keeps them",
    )
