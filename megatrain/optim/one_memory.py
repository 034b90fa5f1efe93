"""Updates where GPU and RAM are one memory: the GPU makes them, or the host in the same bytes."""

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

__all__ = ["HostUpdates", "in_one_memory"]


class HostUpdates:
    """An optimizer of the host over blocks of a ``UnifiedTier``; see `megatrain.optim.base.Optimizer`.

    Waits for the device first, and moves nothing.

    Args:
        host: makes the updates.
        device: whose queued work wrote the blocks.
    """

    def __init__(self, host: Optimizer, device: torch.device) -> None:
        self._host, self._device = host, device

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return the kinds of the host's optimizer."""
        return self._host.state_kinds(split_master)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Make one step of one block group; it is done when this returns."""
        torch.cuda.current_stream(self._device).synchronize()
        views = {name: host_view(block) for name, block in blocks.items()}
        self._host.update(views, host_view(gradient), segments, update)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile the host's kernels."""
        self._host.warm_up(formats)


def in_one_memory(optimizer: Optimizer, device: torch.device) -> Optimizer:
    """Return what updates blocks where they are, with the bits of ``optimizer``: a GPU's kernels where it has some.

    The GPU reads the one memory faster than the processor's cores do.

    Args:
        optimizer: the host's.
        device: a CUDA device without memory of its own.
    """
    try:
        return device_optimizer(optimizer, device)
    except DeviceKernelError:
        return HostUpdates(optimizer, device)
