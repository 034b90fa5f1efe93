"""Use of liger-kernel's kernels for a model's norms and gated MLPs.

The package's rotary embedding is not used, because it replaces a function for the whole process. Its cross entropy
losses are not used, because they need whole rows of logits, and the head computes logits in parts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatrain.base.errors import UnsupportedModelError
from tiered.errors import install_command

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


__all__ = ["apply_liger_kernels", "check_liger_kernels", "has_liger_kernels"]

_KEY = "model.use_liger_kernel = true"
#: Arguments that disable liger's other kernels. Arguments that a function does not accept are omitted.
_DISABLED_KERNELS = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
_DISABLED_MLPS = {"swiglu": False, "geglu": False}


def has_liger_kernels() -> bool:
    """Return whether liger-kernel and Triton are installed, without importing them."""
    return all(find_spec(name) is not None for name in ("liger_kernel", "triton"))


def check_liger_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """Check that ``apply_liger_kernels`` can be called.

    Raises:
        UnsupportedModelError: If the device is not a GPU, the package is missing, or it lacks kernels for the model
            type.
    """
    if device.type != "cuda":
        raise UnsupportedModelError(_KEY, "its kernels need a GPU. Write use_liger_kernel = false")
    _find_function(model)


def apply_liger_kernels(model: PreTrainedModel, *, include_mlps: bool) -> None:
    """Make the modules of ``model`` compute with liger's kernels. Parameters and their names do not change.

    Rounding differs from the model's own code, but not between placements. A trace counts the reads and writes of these
    kernels (``trace/kernel_work.py``).

    Raises:
        UnsupportedModelError: If the package is missing, or does not support the model's type or layers.
    """
    function = _find_function(model)
    options = {**_DISABLED_KERNELS, **({} if include_mlps else _DISABLED_MLPS)}
    parameters = inspect.signature(function).parameters
    # liger's function changes this model's modules, and also classes for later models. Restore the classes below.
    namespace = vars(sys.modules[type(model).__module__])
    originals = dict(namespace)
    try:
        function(model=model, **{name: value for name, value in options.items() if name in parameters})
    except Exception as error:  # each family's function raises different errors
        raise UnsupportedModelError(
            _KEY,
            f"liger-kernel does not fit {type(model).__name__} ({type(error).__name__}: {error}). "
            "Write use_liger_kernel = false",
        ) from error
    finally:
        namespace.update(originals)


def _find_function(model: PreTrainedModel) -> Callable[..., Any]:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise _make_error(error) from error
    model_type = model.config.model_type
    function: Callable[..., Any] | None = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        raise UnsupportedModelError(
            _KEY, f"liger-kernel has no kernels for {model_type}. Write use_liger_kernel = false"
        )
    return function


def _make_error(error: ImportError) -> UnsupportedModelError:
    return UnsupportedModelError(
        _KEY,
        f"the package liger-kernel cannot be used here ({error}). Install it: {install_command('gpu')}. A new run can "
        "set use_liger_kernel = false; a run that began with these kernels keeps them",
    )
