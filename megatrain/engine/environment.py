"""The settings and failures of the compute device: deterministic kernels, errors of CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.models.errors import UnsupportedModelError
from tiered.errors import TieredError

__all__ = [
    "DeterminismError",
    "DeviceError",
    "deterministic_kernels",
    "device_errors_explained",
]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: Those with which cuBLAS adds in the same order at every run: the only ones that torch accepts.
_REPEATABLE = (":4096:8", ":16:8")


class DeterminismError(RuntimeError):
    """The process can no longer be made to compute the same bits at every run: why, and what to do."""


@contextmanager
def deterministic_kernels(device: torch.device, model_type: str, *, enabled: bool = True) -> Iterator[None]:
    """Have torch choose kernels that add in a fixed order; by default some use atomics, in the order of arrival.

    On the CPU nothing is to be done. torch reads the setting of cuBLAS once, at its first matrix product on a GPU: it
    is set when ``megatrain`` is imported, which has to come before that.

    Args:
        model_type: class of the model, for what is said of an operation that has no such kernel.

    Raises:
        UnsupportedModelError: there is an operation without one.
        DeterminismError: cuBLAS was set up before, without its setting.
    """
    if device.type == "cpu" or not enabled:
        yield
        return
    _check_cublas()
    deterministic: Any = torch.utils.deterministic  # a module whose attributes are set: no type knows them
    fills, mode = deterministic.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # a second pass over every new tensor, which all are written anyway
    try:
        yield
    except RuntimeError as error:
        if _CUBLAS in str(error):  # set, but after torch had looked
            raise DeterminismError(_too_late("was set after the first matrix product on the GPU")) from error
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).partition(" does not have")[0]
        reason = f"its {operation} has no kernel on {device.type} that gives the same bits at every run. "
        raise UnsupportedModelError(model_type, f"{reason}Write full_determinism = false") from error
    finally:
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fills


def _check_cublas() -> None:
    setting = os.environ.get(_CUBLAS)
    if setting is None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise DeterminismError(_too_late("was not set before the process began to use the GPU"))
        os.environ[_CUBLAS] = _REPEATABLE[0]
    elif setting not in _REPEATABLE:
        raise DeterminismError(
            f"{_CUBLAS} is '{setting}' in the environment, with which cuBLAS gives other bits at every run: set it to "
            f"{_REPEATABLE[0]}, or unset it, or write full_determinism = false"
        )


def _too_late(what: str) -> str:
    return (
        f"{_CUBLAS} {what}, and torch reads it once: without it cuBLAS may add in another order at every run. Start "
        f"again with {_CUBLAS}={_REPEATABLE[0]} in the environment, or import megatrain before anything uses the GPU; "
        "or write full_determinism = false"
    )


_CPU_ALLOCATOR = "DefaultCPUAllocator: "


class DeviceError(RuntimeError):
    """The compute device failed, or its memory ran out: what was seen, and what to do."""


@contextmanager
def device_errors_explained() -> Iterator[None]:
    """Raise ``DeviceError`` in the place of torch's errors of a device, which speak to who writes kernels."""
    try:
        yield
    except (RuntimeError, TieredError) as error:
        text = _explain(error)
        if text is None:
            raise
        raise DeviceError(text) from error


def _explain(error: BaseException) -> str | None:
    if isinstance(error, torch.OutOfMemoryError):
        said = str(error).partition(" If reserved but unallocated")[0].removeprefix("CUDA out of memory. ")
        return (
            f"out of GPU memory: {said} Another program may have taken what was free when this one began (nvidia-smi "
            "names it). If none has, set a smaller tiers.gpu.size, or a shorter data.max_length"
        )
    if (failure := _failure_of_device(error)) is not None:
        return (
            f"the GPU failed: {str(failure).partition(chr(10))[0]}. No more can be computed in this process. `dmesg` "
            "tells of faults of the hardware and of the driver (Xid). If it does not, a kernel is at fault: please "
            "report it with what MEGATRAIN_TIER_DEBUG=1 and CUDA_LAUNCH_BLOCKING=1 show"
        )
    if _CPU_ALLOCATOR in str(error):
        said = str(error).partition(_CPU_ALLOCATOR)[2]
        return f"out of RAM: {said}. Give the run less in [tiers.ram], or a shorter data.max_length"
    return None


def _failure_of_device(error: BaseException | None) -> BaseException | None:
    """Return the error of the device that this one stands for, as that of a copy does."""
    while error is not None and not isinstance(error, torch.AcceleratorError):
        error = error.__cause__
    return error
