"""Process settings for deterministic kernels, and explanations of device errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.base.errors import UnsupportedModelError
from tiered.errors import TieredError

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: Environment variable that transformers reads at each flash-attn call. Without it, the backward is nondeterministic.
_FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
#: Settings that make cuBLAS add in the same order in every run. torch accepts no other settings.
_CONFIGS = (":4096:8", ":16:8")


class DeterminismError(RuntimeError):
    """Error for a process that can no longer become deterministic. The message states cause and remedy."""


@contextmanager
def deterministic_kernels(device: torch.device, model_type: str, *, enabled: bool = True) -> Iterator[None]:
    """Use deterministic kernels within the context. By default, some kernels add with atomics, in varying order.

    Does nothing on the CPU. torch reads the cuBLAS setting once, at the first matmul on a GPU. ``import megatrain``
    writes the setting, so import megatrain before the first matmul.

    Args:
        model_type: Class name of the model, for error messages.
        enabled: Whether to change the settings.

    Raises:
        UnsupportedModelError: If the model uses an operation that has no deterministic kernel.
        DeterminismError: If cuBLAS was initialized without the setting, or if the setting has an unsupported value.
    """
    if device.type == "cpu" or not enabled:
        yield
        return
    _check_cublas()
    settings: Any = torch.utils.deterministic  # the module's attributes are untyped
    flash_setting = os.environ.get(_FLASH_ATTENTION)
    fill_memory, mode = settings.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    os.environ[_FLASH_ATTENTION] = "1"
    settings.fill_uninitialized_memory = False  # the engine writes all tensors before it reads them
    try:
        yield
    except RuntimeError as error:
        if _CUBLAS in str(error):  # the variable was set after torch had read it
            raise DeterminismError(_late_setting_text("was set after the first matrix product on the GPU")) from error
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).partition(" does not have")[0]
        reason = f"its {operation} has no deterministic kernel on {device.type}. "
        raise UnsupportedModelError(model_type, f"{reason}Write full_determinism = false") from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill_memory
        if flash_setting is None:
            del os.environ[_FLASH_ATTENTION]
        else:
            os.environ[_FLASH_ATTENTION] = flash_setting


@contextmanager
def consume_cublas_setting(device: torch.device) -> Iterator[None]:
    """Make torch read the cuBLAS setting, then unset it within the context to make matmuls faster.

    Enter this context within ``deterministic_kernels``, before the model's first matmul. torch 2.11 checks the setting
    once, but parses it at every matmul, which takes 36 us of host time instead of 4 (docs/log.md). The setting is the
    size of the workspace that torch passes to cuBLAS. Any size makes cuBLAS deterministic, and while the setting is
    unset all matmuls use torch's default size. The workspace of the first matmul is freed. Otherwise, torch would pass
    this old workspace to cuBLAS with the new size. A smaller size that the user has set stays in place. Later versions
    of torch parse the setting once, and with them this function does nothing.
    """
    global _is_consumed
    setting = os.environ.get(_CUBLAS)
    is_parsed = torch.are_deterministic_algorithms_enabled() and not _is_parsed_once()
    if device.type == "cpu" or setting != _CONFIGS[0] or not is_parsed:
        yield
        return
    ones = torch.ones(1, 1, device=device)
    torch.mm(ones, ones)
    del os.environ[_CUBLAS]
    torch._C._cuda_clearCublasWorkspaces()
    _is_consumed = True
    try:
        yield
    finally:
        _is_consumed = False
        os.environ[_CUBLAS] = setting


def _is_parsed_once() -> bool:
    """Return whether torch parses the setting only once. Such versions have a function to change the workspace size."""
    return hasattr(torch.backends.cuda, "cublas_workspace_size")


#: Whether torch has read a setting that has since been removed from the environment.
_is_consumed = False


def _check_cublas() -> None:
    setting = os.environ.get(_CUBLAS)
    if setting is None and _is_consumed:
        return
    if setting is None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise DeterminismError(_late_setting_text("was not set before the process began to use the GPU"))
        os.environ[_CUBLAS] = _CONFIGS[0]
    elif setting not in _CONFIGS:
        raise DeterminismError(
            f"{_CUBLAS} is '{setting}' in the environment, so the results of cuBLAS differ from run to run: set it "
            f"to {_CONFIGS[0]}, or unset it, or write full_determinism = false"
        )


def _late_setting_text(cause: str) -> str:
    return (
        f"{_CUBLAS} {cause}, and torch reads it once: without it cuBLAS may add in a different order in every run. "
        f"Start again with {_CUBLAS}={_CONFIGS[0]} in the environment, or import megatrain before anything uses the "
        "GPU; or write full_determinism = false"
    )


_CPU_ALLOCATOR = "DefaultCPUAllocator: "


class DeviceError(RuntimeError):
    """Error for a compute device that fails or runs out of memory. The message states cause and remedy."""


@contextmanager
def explain_device_errors() -> Iterator[None]:
    """Raise ``DeviceError`` instead of torch's device errors, which are written for kernel authors."""
    try:
        yield
    except (RuntimeError, TieredError) as error:
        text = _explain(error)
        if text is None:
            raise
        raise DeviceError(text) from error


def _explain(error: BaseException) -> str | None:
    if isinstance(error, torch.OutOfMemoryError):
        text = str(error).partition(" If reserved but unallocated")[0].removeprefix("CUDA out of memory. ")
        return (
            f"out of GPU memory: {text} Another program may have taken memory that was free at the start (nvidia-smi "
            "shows it). If none has, set a smaller tiers.gpu.size, or a shorter data.max_length"
        )
    if (failure := _find_device_error(error)) is not None:
        return (
            f"the GPU failed: {str(failure).partition(chr(10))[0]}. This process cannot compute any more. `dmesg` "
            "reports faults of the hardware and of the driver (Xid). If it does not, a kernel is at fault: please "
            "report it with what MEGATRAIN_TIER_DEBUG=1 and CUDA_LAUNCH_BLOCKING=1 show"
        )
    if _CPU_ALLOCATOR in str(error):
        text = str(error).partition(_CPU_ALLOCATOR)[2]
        return f"out of RAM: {text}. Give the run less in [tiers.ram], or a shorter data.max_length"
    return None


def _find_device_error(error: BaseException | None) -> BaseException | None:
    """Return the device error in an error's chain of causes, or None. A failed transfer wraps the device error."""
    while error is not None and not isinstance(error, torch.AcceleratorError):
        error = error.__cause__
    return error
