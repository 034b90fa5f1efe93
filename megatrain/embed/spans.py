"""Which bytes of a storage a tensor needs: cut out, stored, and made a tensor of the same strides again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Place", "Span", "bytes_of", "can_be_placed"]

#: Restored memory begins where it lay in the storage, modulo this: some kernels round by the alignment of an address.
_ALIGNMENT_BYTES = 512
#: A span is stored whole if at least one in so many of its bytes belongs to the tensor, else only those that do.
_DENSE_SHARE = 2
#: A tensor is read from a larger span that is stored already if that is at most so many times its own size.
_SHARED_SHARE = 4
#: Elements are copied as numbers of the same size, so that no bit of them means anything.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def can_be_placed(tensor: Tensor) -> bool:
    """Return whether a tensor is nothing but a strided view of its storage; False for subclasses and other layouts."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_inference()
        and tensor.dtype.itemsize in _WORDS
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its storage, and how it is read there.

    Attributes:
        shape: the tensor's, strides in elements.
        stride: the tensor's, strides in elements.
        dtype: the tensor's, strides in elements.
        is_conj: its lazy bits.
        is_neg: its lazy bits.
        start: first byte of the storage that it needs, and the one after the last.
        stop: first byte of the storage that it needs, and the one after the last.
        own_bytes: of its different elements: one that is expanded counts once.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    start: int
    stop: int
    own_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Return the place of a tensor for which ``can_be_placed``."""
        size = tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        start = int(tensor.storage_offset()) * size
        steps = [(int(count), int(step)) for count, step in zip(shape, stride, strict=True)]
        stop, own_bytes = start, 0
        if tensor.numel():
            stop = start + (sum((count - 1) * step for count, step in steps) + 1) * size
            num_own = math.prod(count for count, step in steps if step)
            own_bytes = min(num_own * size, stop - start)  # windows that overlap show an element more than once
        return cls(shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(), start, stop, own_bytes)

    def view(self, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
        """Return the tensor as a view of memory whose byte 0 is byte ``first_byte`` of the original storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = empty.set_(storage, (self.start - first_byte) // self.dtype.itemsize, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a storage that is stored as one block, for one tensor or for several.

    Attributes:
        start: bytes of the original storage that restored memory stands for.
        stop: bytes of the original storage that restored memory stands for.
        nbytes: of contents, which are all bytes from ``start`` to ``stop``, or with ``grid`` only its elements.
        grid: (bytes per element, first byte, counts, strides in elements) of those, largest stride first.
    """

    start: int
    stop: int
    nbytes: int
    grid: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None

    @classmethod
    def around(cls, place: Place, storage_bytes: int) -> Span:
        """Return what to store for a tensor: what it needs, or a little more where others will need the rest."""
        start = place.start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        if place.own_bytes * _DENSE_SHARE < place.stop - place.start:
            return cls(start, place.stop, place.own_bytes, _grid_of(place))
        if (place.stop - place.start) * 8 >= storage_bytes * 7:  # such as x[:, :-1]: then x is there as well
            return cls(0, storage_bytes, storage_bytes, None)
        return cls(start, place.stop, place.stop - start, None)

    def serves(self, place: Place) -> bool:
        """Return whether a tensor is better read from this span than stored by itself."""
        if self.grid is not None:
            return place.own_bytes == self.nbytes and self.grid == _grid_of(place)
        is_inside = self.start <= place.start and place.stop <= self.stop
        return is_inside and place.own_bytes * _SHARED_SHARE >= self.nbytes

    def read(self, storage: torch.UntypedStorage, into: Tensor) -> None:
        """Copy the contents out of the original storage, to ``nbytes`` bytes: contiguous, 1-D, uint8, any device."""
        self._copy(into, storage, 0, outward=True)

    def restore(self, contents: Tensor, device: torch.device) -> torch.UntypedStorage:
        """Return new memory on ``device`` with the contents where they were; the rest of it is undefined."""
        memory = torch.empty(self.stop - self.start, dtype=torch.uint8, device=device).untyped_storage()
        self._copy(contents, memory, self.start, outward=False)
        return memory

    def _copy(self, contents: Tensor, storage: torch.UntypedStorage, first_byte: int, *, outward: bool) -> None:
        if self.grid is None:
            inside = bytes_of(storage)[self.start - first_byte : self.stop - first_byte]
        else:
            size, start, counts, strides = self.grid
            empty = torch.empty(0, dtype=_WORDS[size], device=storage.device)
            inside = empty.set_(storage, (start - first_byte) // size, counts, strides)
            contents = contents.view(_WORDS[size]).view(counts)
        source, target = (inside, contents) if outward else (contents, inside)
        target.copy_(source)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a 1-D uint8 tensor, no copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _grid_of(place: Place) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    steps = sorted(
        ((step, count) for count, step in zip(place.shape, place.stride, strict=True) if step and count > 1),
        reverse=True,
    )
    counts, strides = tuple(count for _, count in steps), tuple(step for step, _ in steps)
    return place.dtype.itemsize, place.start, counts, strides
