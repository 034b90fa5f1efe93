"""Choice of the flash attention kernels that torch's operators use: FA2 from torch, or FA3 or FA4 from a package.

torch registers the package's kernels for the operators that models call. The choice affects the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.attention
from torch.nn.functional import scaled_dot_product_attention

from megatrain.base.errors import UnsupportedModelError

FlashKernels = Literal["FA2", "FA3", "FA4"]

_PACKAGES = {"FA3": "flash-attn-3", "FA4": "flash-attn-4"}
_ARCHITECTURES = {"FA3": "Hopper (H100, H200, GH200)", "FA4": "Blackwell (B200, B300, GB200, GB300)"}
#: Kernels by major compute capability. No package supports consumer Blackwell (12).
_KERNELS_BY_CAPABILITY: dict[int, FlashKernels] = {9: "FA3", 10: "FA4"}
#: Kernels by a substring of the GPU's name, for plans that are made without the GPU.
_KERNELS_BY_NAME: dict[str, FlashKernels] = {
    **dict.fromkeys(("H100", "H200", "H20", "H800"), "FA3"),
    **dict.fromkeys(("B100", "B200", "B300"), "FA4"),
}
_planned_kernels: FlashKernels = "FA2"
#: Number of backward passes to compare, shape of their queries (heads, tokens, width), and number of key heads.
_NUM_TRIES, _TEST_SHAPE, _TEST_KEY_HEADS = 4, (16, 4096, 128), 4


def flash_for_gpu(device: torch.device, planned_gpu: str | None) -> FlashKernels:
    """Return the newest kernels that support a GPU.

    Args:
        device: GPU of this machine; ignored if ``planned_gpu`` is given.
        planned_gpu: Name of a GPU in another machine, or None.
    """
    if planned_gpu is None:
        is_nvidia = torch.version.hip is None and torch.version.cuda is not None
        return _KERNELS_BY_CAPABILITY.get(torch.cuda.get_device_capability(device)[0], "FA2") if is_nvidia else "FA2"
    # This also matches "GH200" and "GB200", which contain the names of their GPUs.
    return next((kernels for name, kernels in _KERNELS_BY_NAME.items() if name in planned_gpu.upper()), "FA2")


def unusable_reason(kernels: FlashKernels, device: torch.device, planned_gpu: str | None) -> str:
    """Return the reason why a GPU cannot use the kernels, with a remedy, or "" if it can.

    If ``planned_gpu`` is given, the package is assumed to be installed on its machine.
    """
    if kernels == "FA2":
        return ""
    if flash_for_gpu(device, planned_gpu) != kernels:
        return f"{kernels} needs a GPU of the architecture {_ARCHITECTURES[kernels]}"
    if planned_gpu is not None:
        return ""
    with _activate(kernels) as reason:
        return reason


@contextmanager
def flash_kernels(kernels: FlashKernels, checked_device: torch.device | None = None) -> Iterator[None]:
    """Use these kernels for torch's flash attention within the context.

    Args:
        checked_device: Device on which to check that the package's kernels are deterministic; None for no check.

    Raises:
        UnsupportedModelError: If torch cannot switch kernels, or if the package is missing or does not work.
    """
    with _activate(kernels) as reason:
        if reason:
            raise unsupported_flash(kernels, reason)
        if kernels != "FA2" and checked_device is not None:
            check_determinism(kernels, checked_device)
        yield


@contextmanager
def _activate(kernels: FlashKernels) -> Iterator[str]:
    """Activate kernels within the context. Yield "" on success, and otherwise the reason for the failure."""
    attention: Any = torch.nn.attention
    if kernels == "FA2":
        yield ""
        return
    if not hasattr(attention, "activate_flash_attention_impl"):
        yield f"torch {torch.__version__} cannot use {kernels}. Install a newer torch"
        return
    previous, reason = attention.current_flash_attention_impl(), ""
    try:
        attention.activate_flash_attention_impl(kernels)
    except Exception as error:  # the package can raise any error
        reason = f"the package {_PACKAGES[kernels]} cannot be used here ({type(error).__name__}: {error}). Install it"
    try:
        yield reason
    finally:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        if previous is not None:
            attention.activate_flash_attention_impl(previous)


def unsupported_flash(kernels: FlashKernels, reason: str) -> UnsupportedModelError:
    """Return the error for kernels that cannot be used, with the remedies."""
    text = f'{reason}. A new run can set flash_attention = "FA2"; a run that began with {kernels} keeps it'
    return UnsupportedModelError(f'model.flash_attention = "{kernels}"', text)


def check_determinism(kernels: FlashKernels, device: torch.device) -> None:
    """Check that several backward passes are bit-identical, because some builds of FA3 ignore the determinism flag.

    Raises:
        UnsupportedModelError: If the results differ.
    """
    _compare_backwards(kernels, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # free the cached memory, because the plan assigns it to the run


def _compare_backwards(kernels: FlashKernels, device: torch.device) -> None:
    heads, tokens, width = _TEST_SHAPE
    generator = torch.Generator(device).manual_seed(0)

    def draw(num_heads: int) -> torch.Tensor:
        values = torch.randn(1, tokens, num_heads, width, generator=generator, device=device, dtype=torch.bfloat16)
        return values.transpose(1, 2).requires_grad_()

    inputs = draw(heads), draw(_TEST_KEY_HEADS), draw(_TEST_KEY_HEADS)
    expected: tuple[torch.Tensor, ...] | None = None
    for _ in range(_NUM_TRIES):
        with torch.enable_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            gradients = torch.autograd.grad(out, inputs, out.detach())
        expected = expected or gradients
        if not all(map(torch.equal, gradients, expected)):
            reason = f"the results of the installed {_PACKAGES[kernels]} differ from run to run. Install a newer build"
            raise unsupported_flash(kernels, reason)


@contextmanager
def plan_flash(kernels: FlashKernels) -> Iterator[None]:
    """Make traces count the workspace of these kernels within the context.

    The setting is process-wide, because a context variable would have a separate value in each greenlet of a trace.
    """
    global _planned_kernels
    previous, _planned_kernels = _planned_kernels, kernels
    try:
        yield
    finally:
        _planned_kernels = previous


def planned_flash() -> FlashKernels:
    """Return the kernels whose workspace traces count."""
    return _planned_kernels
