"""Choice of the optimizer for each tier. If GPU and CPU share one memory, either processor can update a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.optim.base import FORMATS
from megatrain.optim.on_device import DeviceKernelError, device_optimizer
from tiered.ext import host_view

if TYPE_CHECKING:
    from megatrain.optim.base import Format, Optimizer, Segment, StateKind, Update

__all__ = ["UnifiedOptimizer", "optimizers_by_tier"]


class UnifiedOptimizer:
    """Host optimizer for blocks in a ``UnifiedTier``; see `megatrain.optim.base.Optimizer`.

    `update` waits for the device's current stream, which wrote the blocks. It copies no bytes.
    """

    def __init__(self, host: Optimizer, device: torch.device) -> None:
        self._host, self._device = host, device

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the kinds of the host optimizer."""
        return self._host.state_kinds(split_master)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step to one block group. Return after the step is finished."""
        torch.cuda.current_stream(self._device).synchronize()
        views = {name: host_view(block) for name, block in blocks.items()}
        self._host.update(views, host_view(gradient), segments, update)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile the host optimizer's kernels."""
        self._host.warm_up(formats)


def optimizers_by_tier(
    host: Optimizer, compute_optimizer: Optimizer | None, compute_tier: str, device: torch.device
) -> dict[str, Optimizer]:
    """Return the optimizer for the blocks in each tier. All of them give the same results as ``host``, bit for bit.

    If GPU and CPU share one memory, GPU kernels update the blocks in RAM, because the GPU reads this memory faster than
    the CPU does. If the optimizer has no GPU kernels, ``host`` updates these blocks.

    Args:
        host: Optimizer for blocks in RAM.
        compute_optimizer: Optimizer for blocks in the compute tier; default: ``host``.
        compute_tier: "ram", or the tier of a device with separate memory.
    """
    if compute_tier != "ram" or device.type != "cuda":
        return {compute_tier: compute_optimizer or host, "ram": host}
    try:
        return {"ram": device_optimizer(host, device)}
    except DeviceKernelError:
        return {"ram": UnifiedOptimizer(host, device)}
