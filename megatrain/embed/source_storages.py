"""Storages of saved tensors: the elements that a tensor views, and the elements that are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatrain.embed.activation_blocks import ActivationBlock
from megatrain.engine.unit.graph_keeping import version_probe

#: Restored memory is aligned like the source storage up to this many bytes, because alignment affects kernel results.
_ALIGNMENT_BYTES = 512
#: Store the whole storage if it is at most this many times as large as the tensor.
_MAX_WHOLE_RATIO = 2
#: A tensor uses a block with its whole storage if the storage is at most this many times as large as the tensor.
_MAX_SHARED_RATIO = 4
#: Dtypes for bitwise copies, by element size in bytes.
_COPY_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_plain_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain strided view of its storage that can be copied byte by byte."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_inference()
        and tensor.dtype.itemsize in _COPY_DTYPES
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a storage that one block contains, without the bytes between them.

    Attributes:
        start: First byte in the storage.
    """

    itemsize: int
    start: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Total bytes of the elements."""
        return self.itemsize * math.prod(self.counts)

    @property
    def first_byte(self) -> int:
        """Position in the source storage of the first byte that is restored."""
        return self.start // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES

    def read(self, storage: torch.UntypedStorage, out: Tensor) -> None:
        """Copy the elements from a storage to ``out``, a contiguous 1-D uint8 tensor of ``nbytes`` on any device."""
        self._reshape(out).copy_(self._view_in(storage, 0))

    def restore(self, contents: Tensor, device: torch.device) -> torch.UntypedStorage:
        """Return new memory on ``device`` with the elements at their original positions. Other bytes are undefined."""
        last_index = sum((count - 1) * step for count, step in zip(self.counts, self.strides, strict=True))
        nbytes = self.start + (last_index + 1) * self.itemsize - self.first_byte
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
        self._view_in(memory, self.first_byte).copy_(self._reshape(contents))
        return memory

    def _view_in(self, storage: torch.UntypedStorage, first_byte: int) -> Tensor:
        empty = torch.empty(0, dtype=_COPY_DTYPES[self.itemsize], device=storage.device)
        return empty.set_(storage, (self.start - first_byte) // self.itemsize, self.counts, self.strides)

    def _reshape(self, contents: Tensor) -> Tensor:
        return contents.view(_COPY_DTYPES[self.itemsize]).view(self.counts)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor, described as a view of its storage.

    Attributes:
        elements: Elements of the view, without the repetitions of expanded dimensions.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool
    elements: Elements

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Describe a tensor for which ``is_plain_strided`` is true."""
        itemsize = tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        start = int(tensor.storage_offset()) * itemsize
        sizes = zip(shape, stride, strict=True)
        dimensions = sorted(((step, count) for count, step in sizes if step and count > 1), reverse=True)
        merged: list[tuple[int, int]] = []  # dimensions are merged so that reshaped views compare equal
        for step, count in dimensions:
            if merged and merged[-1][0] == count * step:
                count *= merged.pop()[1]
            merged.append((step, count))
        span = sum((count - 1) * step for step, count in merged) + 1
        if math.prod(count for _, count in merged) > span:  # overlapping windows contain elements several times
            merged = [(1, span)]
        elements = Elements(itemsize, start, tuple(count for _, count in merged), tuple(step for step, _ in merged))
        return cls(shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(), elements)

    def view(self, storage: torch.UntypedStorage, first_byte: int = 0) -> Tensor:
        """Return the tensor as a view of ``storage``, which begins at byte ``first_byte`` of the source storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        view = empty.set_(storage, (self.elements.start - first_byte) // self.dtype.itemsize, self.shape, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class WeakStorage:
    """Weak reference to a storage. While the reference exists, no other storage can get the same address."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __call__(self) -> torch.UntypedStorage | None:
        """Return the storage, or None if it was freed."""
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage


class SourceStorage:
    """One version of a storage with tensors saved for a backward. This object does not keep the storage alive.

    Attributes:
        stored: Elements of the storage that are in blocks.
        keeper: Weak reference to a saved tensor that keeps the storage in memory, or None.
    """

    __slots__ = ("__weakref__", "_nbytes", "_probe", "_reference", "_version", "keeper", "stored")

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self._reference = WeakStorage(storage)
        self._nbytes = storage.nbytes()
        self._probe, self._version = version_probe(tensor), tensor._version
        self.stored: WeakValueDictionary[Elements, StoredElements] = WeakValueDictionary()
        self.keeper: ref[Any] | None = None

    def is_current(self, version: int) -> bool:
        """Return whether the storage is unchanged, so that a tensor with this version has the recorded contents."""
        return self._probe._version == self._version == version

    def memory(self) -> torch.UntypedStorage | None:
        """Return the storage if other code keeps it alive and its contents are unchanged, otherwise None."""
        if self._probe._version != self._version:
            return None
        storage = self._reference()
        return storage if storage is not None and storage.nbytes() == self._nbytes else None

    def elements_to_store(self, view: StorageView) -> Elements:
        """Return the elements to store for a tensor: its whole storage, or only its own elements."""
        is_large = view.elements.nbytes * _MAX_WHOLE_RATIO >= self._nbytes
        return self._all_elements if is_large else view.elements

    def find(self, view: StorageView) -> StoredElements | None:
        """Return stored elements that include a tensor's elements, or None."""
        is_large = view.elements.nbytes * _MAX_SHARED_RATIO >= self._nbytes
        whole = self.stored.get(self._all_elements) if is_large else None
        return self.stored.get(view.elements) if whole is None else whole

    @property
    def _all_elements(self) -> Elements:
        return Elements(1, 0, (self._nbytes,), (1,))


@dataclass(slots=True, weakref_slot=True, eq=False)
class StoredElements:
    """Elements of a source storage that are stored in a block. The block is released when this object is freed.

    Attributes:
        number: Position in the order in which elements were stored.
        staging: Tier through which the elements were written.
        is_staged: Whether the staging tier has a copy of the block, or a prefetch was requested.
        restored: Weak reference to memory restored from the block, and the stream that restored it.
    """

    source: SourceStorage
    elements: Elements
    block: ActivationBlock
    number: int
    device: torch.device
    staging: str
    is_staged: bool
    restored: tuple[WeakStorage, Any] | None = None
