"""Numbers that cross between host and compute device outside of blocks: micro-batches in, losses and norms out.

On a GPU both go through page-locked memory. A copy from ordinary memory is staged by the driver, which may wait for
all work before it; `.to(device)` and `float(tensor)` always wait. On the CPU there is nothing to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatrain.engine.labels import labelled_rows
from megatrain.engine.mirror import HostMirror
from tiered.memory.slab import HostSlab
from tiered.units import MiB, round_up

__all__ = ["MicroBatches", "Staging", "looks_are_waits", "read_numbers"]

Name = TypeVar("Name")

_ALIGNMENT_BYTES = 64


def looks_are_waits(device: torch.device) -> bool:
    """Return whether a look at a value on the device makes the host wait for all that is queued there."""
    return device.type == "cuda"


class MicroBatches:
    """Brings the micro-batches of a pass to the compute device.

    Args:
        device: Compute device.

    Attributes:
        mirror: Knows what was brought; None where the model may as well look for itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device)
        self.mirror = HostMirror() if looks_are_waits(device) else None

    def place(
        self, micro_batches: Mapping[int, Mapping[str, Tensor]], shifted: Mapping[int, Tensor]
    ) -> tuple[dict[int, dict[str, Any]], dict[int, tuple[Tensor, Tensor]]]:
        """Return micro-batches, and their rows with a label, on the compute device; the host does not wait.

        Args:
            micro_batches: By number, on the host. All of a pass at once: a second call waits for the first's copies.
            shifted: By the same numbers, the shifted labels [B * S].

        Returns:
            By number the micro-batch, and the positions that have a label with their labels.
        """
        host = {(number, key): value for number, batch in micro_batches.items() for key, value in batch.items()}
        labelled = {number: labelled_rows(labels) for number, labels in shifted.items()}
        parts = {(number, part): pair[part] for number, pair in labelled.items() for part in (0, 1)}
        placed = self._staging.upload({**host, **parts})
        batches: dict[int, dict[str, Any]] = {number: {} for number in micro_batches}
        for (number, key), tensor in host.items():
            batches[number][key] = placed[number, key]
            if self.mirror is not None:
                self.mirror.know(placed[number, key], tensor)
        return batches, {number: (placed[number, 0], placed[number, 1]) for number in labelled}

    def forget(self) -> None:
        """Let go of the host's tensors: the pass is over."""
        if self.mirror is not None:
            self.mirror.forget()


class Staging:
    """Page-locked memory that the tensors of one step's micro-batches are copied through. Used by one thread.

    It grows to the largest step, in powers of two of 1 MiB, so that rows of changing length make few of them: a few
    bytes per token, outside of the RAM tier as the micro-batches themselves are.

    Args:
        device: Compute device.
        make_slab: Returns page-locked memory of at least that many bytes.
    """

    def __init__(self, device: torch.device, make_slab: Callable[[int], HostSlab] | None = None) -> None:
        self._device = device
        self._is_staged = device.type == "cuda"
        self._make_slab = make_slab or (lambda nbytes: HostSlab(nbytes, pin=True))
        self._slab: HostSlab | None = None
        self._copied: Any = None  # event after the copies out of the slab

    def upload(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        """Return the tensors on the compute device; the host does not wait for the copies.

        They are there for whatever is queued on the current stream afterwards. The slab is written again by the next
        call: that one waits first until these copies have left it, which the end of a step has long awaited.

        Args:
            tensors: On the host; not kept.
        """
        if not self._is_staged:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        starts, need_bytes = _offsets(tensors)
        slab = self._room(need_bytes)
        placed: dict[Name, Tensor] = {}
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            staged = slab.tensor[starts[name] : starts[name] + nbytes].view(tensor.dtype).view(tensor.shape)
            staged.copy_(tensor)
            placed[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            placed[name].copy_(staged, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()
        return placed

    def _room(self, need_bytes: int) -> HostSlab:
        if self._copied is not None:
            # The device reads the slab until then; after an interrupted step too, whose end nobody awaited.
            self._copied.synchronize()
        if self._slab is None or self._slab.nbytes < need_bytes:
            if self._slab is not None:
                self._slab.close()
            self._slab = self._make_slab(max(MiB, 1 << (need_bytes - 1).bit_length()))
        return self._slab


def _offsets(tensors: Mapping[Name, Tensor]) -> tuple[dict[Name, int], int]:
    starts: dict[Name, int] = {}
    end = 0
    for name, tensor in tensors.items():
        starts[name] = end
        end += round_up(tensor.numel() * tensor.element_size(), _ALIGNMENT_BYTES)
    return starts, max(end, 1)


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars in double precision, those on a device with one copy and one wait for all that came before.

    Args:
        values: Numbers, and tensors of one element of any float dtype; all tensors are on one device.
    """
    scalars = [value for value in values if isinstance(value, Tensor)]
    if not scalars:
        return [float(value) for value in values]
    stacked = torch.stack([scalar.detach().reshape(()).to(torch.float64) for scalar in scalars])
    if stacked.is_cuda:
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        # An event that the host sleeps on, not a wait for the stream: what is queued behind is none of its business.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        arrived.record()
        arrived.synchronize()
        stacked = host
    found = iter(stacked.tolist())
    return [float(next(found)) if isinstance(value, Tensor) else float(value) for value in values]
