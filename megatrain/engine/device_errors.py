"""What a failing device, or memory that has run out, means to a person."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiered.errors import TieredError

__all__ = ["DeviceError", "device_errors_explained"]

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
