"""Which optimizer makes the updates of blocks that live in the memory of a compute device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.optim.elementwise import ElementwiseOptimizer
from megatrain.optim.triton_elementwise import DeviceKernelError, TritonOptimizer

if TYPE_CHECKING:
    import torch

    from megatrain.optim.base import Optimizer

__all__ = ["DeviceKernelError", "device_optimizer"]


def device_optimizer(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """Return what updates blocks on a device with the bits of the host's `optimizer`.

    Args:
        optimizer: The host's.
        device: Where the blocks are: a CUDA device, or the CPU, which stands in for one (`advanced.emulate_gpu`).

    Raises:
        DeviceKernelError: Only the host can make these updates; the text says why.
    """
    if not isinstance(optimizer, ElementwiseOptimizer):
        raise DeviceKernelError(f"{type(optimizer).__name__} has no kernel for a GPU")
    return optimizer if device.type == "cpu" else TritonOptimizer(optimizer)
