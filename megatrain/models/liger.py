"""Kernels of the package liger-kernel in the layers of a model: its norms and its gated MLPs.

And behind the layers its cross entropy. Its rotary embedding is left out, as it replaces a function of the whole
process. So is its fused linear cross entropy: the head computes logits for a few rows at a time already, and the
model's own code scales or caps them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["LigerCrossEntropy", "apply_liger_kernels", "check_liger_kernels"]

_KEY = "model.use_liger_kernel = true"
#: Arguments of liger's functions -> what is asked for; those that a function does not have are left out.
_LEFT_OUT = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
_NO_MLP = {"swiglu": False, "geglu": False}
#: Arguments of the cross-entropy kernel that are the same at every launch; those that it does not have are left out.
_PLAIN = {
    "weight_ptr": None,
    "z_loss_ptr": None,
    "token_accuracy_ptr": None,
    "token_accuracy_stride": 0,
    "predicted_tokens_ptr": None,
    "predicted_tokens_stride": 0,
    "sum_non_ignore_weight": 1.0,
    "weight_sum": 0.0,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "softcap": None,
    "RETURN_Z_LOSS": False,
    "RETURN_TOKEN_ACCURACY": False,
    "RETURN_PREDICTED_TOKENS": False,
    "HAS_WEIGHT": False,
    "HAS_SOFTCAPPING": False,
    # Its "mean" divides by the number passed to it, in fp32 and before it rounds: here the tokens of the step.
    "reduction": "mean",
}
_NEEDED = {"X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride"}
_NEEDED |= {"n_cols", "n_non_ignore", "ignore_index", "reduction", "BLOCK_SIZE"}


def check_liger_kernels(model: PreTrainedModel, device: torch.device) -> None:
    """See whether ``apply_liger_kernels`` can do its work.

    Raises:
        UnsupportedModelError: not on a GPU; not installed; no kernels for this kind of model; an unknown version.
    """
    if device.type != "cuda":
        raise UnsupportedModelError(_KEY, "its kernels need a GPU. Write use_liger_kernel = false")
    _function_for(model)
    LigerCrossEntropy()


def apply_liger_kernels(model: PreTrainedModel, *, with_mlps: bool) -> None:
    """Let the modules of ``model`` compute with liger's kernels; parameters and their names stay.

    Results are rounded in other places, at every placement in the same ones. A plan is made before, of the
    modules as they were: these kernels cannot be traced without memory.

    Args:
        with_mlps: also the MLPs.

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
        f"the package liger-kernel cannot be used here ({error}). Install it, with Triton: pip install "
        "liger-kernel; or write use_liger_kernel = false",
    )


class LigerCrossEntropy:
    """Cross entropy of rows of logits by liger-kernel's Triton kernel, which makes their gradient in the same launch.

    Arithmetic and loss are fp32, and the gradient is rounded once, to the dtype of the logits: where transformers
    rounds, which first copies logits to fp32. Nothing of the size of the logits is made.

    The kernel is launched from here, as liger's own function around it does not do for a step: it looks at labels and
    at the incoming gradient on the host, which waits for the device at each piece; it divides by the labels that it
    sees, not by those of the step; and it sums losses in the dtype of the logits. Nobody looks at labels here: each
    must be ``ignored`` or a column.

    Raises:
        UnsupportedModelError: not installed, or a version with a kernel that takes other arguments.
    """

    def __init__(self) -> None:
        try:
            from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
        except ImportError as error:
            raise _cannot_be_used(error) from error
        names = set(liger_cross_entropy_kernel.arg_names)
        if unknown := (names - _NEEDED - _PLAIN.keys() - {"HAS_GRADIENTS"}) | (_NEEDED - names):
            raise UnsupportedModelError(
                _KEY,
                "the cross entropy of this version of liger-kernel does not take the arguments that it is called with "
                f"here ({', '.join(sorted(unknown))}). Install version 0.8.5, or write use_liger_kernel = false",
            )
        self._kernel, self._most_columns = liger_cross_entropy_kernel, MAX_FUSED_SIZE
        self._plain = {name: value for name, value in _PLAIN.items() if name in names}
        self._can_leave_logits = "HAS_GRADIENTS" in names

    def __call__(self, logits: Tensor, labels: Tensor, num_items: int, ignored: int) -> Tensor:
        """Return the sum over rows of ``-log softmax(logits)[label] / num_items``, fp32.

        Where a gradient will be asked for, it is in ``logits`` when this returns: reading the logits afterwards reads
        that, and torch does not notice. One backward is possible. Runs on the current stream; nothing waits.

        Args:
            logits: [rows, columns], of any float dtype.
            labels: [rows], int64; a row with ``ignored`` adds nothing.
        """
        loss: Tensor = _CrossEntropy.apply(logits, labels, num_items, ignored, self)  # type: ignore[no-untyped-call]
        return loss

    def launch(self, logits: Tensor, labels: Tensor, num_items: int, ignored: int, *, has_gradient: bool) -> Tensor:
        """Return the loss of every row, [rows] fp32; with ``has_gradient`` logits become their gradient."""
        num_rows, num_columns = logits.shape
        losses = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
        options: dict[str, Any] = {"HAS_GRADIENTS": has_gradient} if self._can_leave_logits else {}
        self._kernel[(num_rows,)](
            X_ptr=logits,
            X_stride=logits.stride(0),
            Y_ptr=labels,
            Y_stride=labels.stride(0),
            loss_ptr=losses,
            loss_stride=losses.stride(0),
            n_cols=num_columns,
            n_non_ignore=float(num_items),  # an int would be compiled into the code where it is 1 or a multiple of 16
            ignore_index=ignored,
            BLOCK_SIZE=min(self._most_columns, 1 << (num_columns - 1).bit_length()),
            num_warps=32 if torch.version.hip is None else 16,
            **self._plain,
            **options,
        )
        return losses


class _CrossEntropy(torch.autograd.Function):
    """Keeps the gradient that the kernel left in the place of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, num_items: int, ignored: int, kernel: LigerCrossEntropy
    ) -> Tensor:
        rows = logits.detach()
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        needs_gradient: bool = ctx.needs_input_grad[0]
        losses = kernel.launch(rows, labels.contiguous(), num_items, ignored, has_gradient=needs_gradient)
        ctx.gradient = rows if needs_gradient else None
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "a second backward: the gradient was in the place of the logits, and is used up"
        # By a number on the device, 1 unless the model changes its loss afterwards: it is never read on the host.
        return gradient.mul_(grad_out), None, None, None, None
