"""Gradients from a CUDA device into RAM and updated parameters back, beside what the device computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiered.memory.slab import HostSlab

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """Copies of an optimizer whose parameters are on CUDA devices.

    They run on one stream of their own per device, behind what was queued before the last ``mark``: backwards that make
    gradients, and kernels that still read parameters. What is queued later, the next forward, does not hold them
    up. Gradients pass page-locked memory of the size of the largest one, which stays for the next.

    Used by one thread at a time. Touches no device before the first call.
    """

    def __init__(self) -> None:
        self._slab: HostSlab | None = None
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> None:
        """Order all later copies of a device behind what the calling thread's current stream has now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._stream(device).wait_event(event)

    def to_ram(self, tensor: Tensor) -> Tensor:
        """Return contents of a tensor on a device, dense and flat; they stay until the next call."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._slab is None or self._slab.nbytes < nbytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = HostSlab(nbytes, pin=True)
        here = self._slab.tensor[:nbytes].view(tensor.dtype)
        self._copy(here, tensor, tensor.device)
        return here

    def to_new_ram(self, tensor: Tensor) -> Tensor:
        """Return contents of a tensor on a device, dense and flat, in memory of their own."""
        here = torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._copy(here, tensor, tensor.device)
        return here

    def to_device(self, parameter: Tensor, contents: Tensor) -> None:
        """Fill a parameter from RAM; its kernels that are queued from now on read what is new."""
        self._copy(parameter, contents.view(parameter.shape), parameter.device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        """Copy and wait for it, making the source dense and of the target's shape before.

        All of it on the stream of the copies: kernels that do that on the caller's would be queued behind the mark, and
        the copy would read what they have not written yet. What they allocate lives until the host has waited.
        """
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            dense = source if source.layout is torch.strided else source.to_dense()
            if dense.shape != target.shape:
                dense = dense.reshape(target.shape)
            target.copy_(dense, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        event.synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
