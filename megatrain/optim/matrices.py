"""Updates of whole matrices, one at a time, with orthogonalization on the host or on the compute device.

A GPU and a CPU round matmuls differently. The compute device therefore computes all matmuls, regardless of the homes of
the blocks (`docs/decisions/0059-newton-schulz-on-the-gpu.md`). All other operations of an update are elementwise and
run in RAM.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from tiered.ext import HostSlab
from tiered.units import PAGE_BYTES, round_up

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.optim.base import MatrixOptimizer, Segment, Update

__all__ = [
    "DIRECTION_BYTES",
    "DeviceOrthogonalizer",
    "HostOrthogonalizer",
    "Orthogonalizer",
    "Shape",
    "device_bytes",
    "host_bytes",
    "matrix_elements",
    "matrix_shapes",
    "update_by_matrix",
]

Shape = tuple[int, int]
"""Rows and columns of a matrix."""
DIRECTION_BYTES = 2
"""Bytes per element of directions. Their dtype is bf16, the input dtype of the iteration."""
_NUM_SLOTS = 2
"""Number of matrices whose directions are in RAM: one is filled while the previous one is on the device."""
_CUBLAS_BYTES = 8 * 4096 * 1024
"""Workspace of cuBLAS per stream, with the setting for deterministic sums."""


class Orthogonalizer(Protocol):
    """Interface for orthogonalizing matrices one at a time."""

    def orthogonalize_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """Fill, orthogonalize and use each matrix's directions, in order.

        Args:
            fill: Function that writes the directions of a matrix, given its index, to a flat bf16 host tensor.
            use: Function that gets the orthogonalized directions of each matrix, in the same order. `fill` for the next
                matrix may be called before `use` for this matrix.
            names: Full names of the matrices' parameters.
        """
        ...


class HostOrthogonalizer:
    """`Orthogonalizer` that runs on the CPU. Thread-safe."""

    def orthogonalize_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """See `Orthogonalizer.orthogonalize_each`."""
        directions = torch.empty(_max_elements(shapes), dtype=torch.bfloat16)
        scratch = torch.empty(_scratch_bytes(optimizer, shapes), dtype=torch.uint8)
        for index, shape in enumerate(shapes):
            matrix = directions[: math.prod(shape)]
            fill(index, matrix)
            optimizer.orthogonalize(matrix.view(shape), scratch, names[index])
            use(index, matrix)


class DeviceOrthogonalizer:
    """`Orthogonalizer` that processes matrices from RAM on a device. Thread-safe; calls are serialized.

    While the device works on a matrix, the host uses the previous matrix and fills the next matrix. A GPU does this
    work on a separate stream, so the host does not wait for queued layers.

    Args:
        device: A CUDA device, or a CPU device that emulates one.

    Attributes:
        moved_bytes: Bytes copied to the device. The same number is copied back.
        send_s: Seconds spent copying to the device.
        fetch_s: Seconds spent copying back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._slabs: list[HostSlab] = []  # own the memory that the slots view
        self._slots: list[Tensor] = []
        self._matrix = self._scratch = torch.empty(0)
        self.moved_bytes, self.send_s, self.fetch_s = 0, 0.0, 0.0

    def allocate_buffers(self, optimizer: MatrixOptimizer, shapes: Collection[Shape]) -> None:
        """Allocate memory for matrices of these shapes: `host_bytes` of pinned RAM, `device_bytes` on the device."""
        with self._lock:
            max_elements = _max_elements(shapes)
            self._slots, self._slabs = [], []  # free the old memory before allocating the new memory
            self._matrix = self._scratch = torch.empty(0)
            slabs = [HostSlab(DIRECTION_BYTES * max_elements, pin=self._stream is not None) for _ in range(_NUM_SLOTS)]
            self._slabs, self._slots = slabs, [slab.tensor.view(torch.bfloat16)[:max_elements] for slab in slabs]
            with self._on_stream():
                self._matrix = torch.empty(max_elements, dtype=torch.bfloat16, device=self._device)
                self._scratch = torch.empty(_scratch_bytes(optimizer, shapes), dtype=torch.uint8, device=self._device)

    def orthogonalize_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """See `Orthogonalizer.orthogonalize_each`."""
        queue: deque[tuple[int, Tensor, Sequence[_Timestamp]]] = deque()

        def use_oldest() -> None:
            index, directions, (send_start, send_end, fetch_start, fetch_end) = queue.popleft()
            fetch_end.wait()
            self.send_s += send_start.seconds_to(send_end)
            self.fetch_s += fetch_start.seconds_to(fetch_end)
            use(index, directions)

        with self._lock:
            for index, shape in enumerate(shapes):
                slot = self._slots[index % _NUM_SLOTS]  # free: `use` has returned for the matrix that was in it
                directions = slot[: math.prod(shape)]
                fill(index, directions)
                queue.append((index, directions, self._queue(optimizer, directions, shape, names[index])))
                if len(queue) == _NUM_SLOTS:
                    use_oldest()
            while queue:
                use_oldest()

    def _queue(self, optimizer: MatrixOptimizer, directions: Tensor, shape: Shape, name: str) -> Sequence[_Timestamp]:
        """Queue the copy to the device, the orthogonalization, and the copy back. Return timestamps of the copies."""
        with self._on_stream():
            matrix = self._matrix[: directions.numel()]
            send_start = self._mark()
            matrix.copy_(directions, non_blocking=True)
            send_end = self._mark()
            optimizer.orthogonalize(matrix.view(shape), self._scratch, name)
            fetch_start = self._mark()
            directions.copy_(matrix, non_blocking=True)
            self.moved_bytes += DIRECTION_BYTES * directions.numel()
            return send_start, send_end, fetch_start, self._mark()

    def _mark(self) -> _Timestamp:
        return _Timestamp(is_on_gpu=self._stream is not None)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Timestamp:
    """Timestamp on the current stream of a GPU, or on the host."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        self._event: Any = None
        self._time_s = 0.0
        if is_on_gpu:  # with blocking=True, a waiting thread sleeps instead of spinning
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._time_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the stream reaches this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: _Timestamp) -> float:
        """Return the seconds from this timestamp to a later one. Call `later.wait` first."""
        if self._event is None:
            return later._time_s - self._time_s
        return float(self._event.elapsed_time(later._event)) / 1e3


def update_by_matrix(
    optimizer: MatrixOptimizer,
    matrices: Orthogonalizer,
    is_matrix: Callable[[Segment], bool],
    blocks: Mapping[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    update: Update,
) -> None:
    """Update a block group, with the directions of at most two matrices in memory.

    Args:
        is_matrix: Function that returns whether a parameter is a matrix or a stack of matrices.
        blocks: As in `Optimizer.update`, with whole matrices.
    """
    matrix_slices: list[tuple[Segment, slice]] = []
    other_segments: list[Segment] = []
    for segment in segments:
        if not is_matrix(segment):
            other_segments.append(segment)
            continue
        assert segment.stop - segment.start == math.prod(segment.shape), segment
        size = math.prod(segment.shape[-2:])
        starts = range(segment.start, segment.stop, size)  # update a stack one matrix at a time
        matrix_slices += [(segment.within(range(start, start + size)), slice(start, start + size)) for start in starts]
    # Omit blocks of kinds with `elements_of`, because they contain no elements of matrices.
    full_blocks = {name: block for name, block in blocks.items() if len(block) == len(gradient)}

    def run_method(method: Callable[..., None], index: int, directions: Tensor) -> None:
        segment, elements = matrix_slices[index]
        matrix_blocks = {name: block[elements] for name, block in full_blocks.items()}
        method(matrix_blocks, gradient[elements], (segment,), update, directions)

    if matrix_slices:
        matrices.orthogonalize_each(
            optimizer,
            [_last_two(segment.shape) for segment, _ in matrix_slices],
            lambda index, directions: run_method(optimizer.make_directions, index, directions),
            lambda index, directions: run_method(optimizer.apply_directions, index, directions),
            [segment.name for segment, _ in matrix_slices],
        )
    if other_segments:
        optimizer.apply_directions(blocks, gradient, other_segments, update, torch.empty(0, dtype=torch.bfloat16))


def matrix_shapes(optimizer: MatrixOptimizer, layouts: Iterable[UnitLayout]) -> set[Shape]:
    """Return the shapes of the matrices in trained layouts."""
    return {
        _last_two(entry.shape)
        for layout in layouts
        if layout.trainable
        for entry in layout.entries
        if optimizer.has_matrices(entry)
    }


def matrix_elements(optimizer: MatrixOptimizer, layout: UnitLayout) -> int:
    """Return the number of elements in the matrices of a layout."""
    return sum(entry.numel for entry in layout.entries if optimizer.has_matrices(entry))


def host_bytes(shapes: Collection[Shape]) -> int:
    """Return the bytes of RAM that `DeviceOrthogonalizer` needs for these shapes."""
    return _NUM_SLOTS * round_up(DIRECTION_BYTES * _max_elements(shapes), PAGE_BYTES)


def device_bytes(optimizer: MatrixOptimizer, device: torch.device, shapes: Collection[Shape]) -> int:
    """Return the bytes of device memory that `DeviceOrthogonalizer` needs for these shapes."""
    if not shapes:
        return 0
    num_bytes = DIRECTION_BYTES * _max_elements(shapes) + _scratch_bytes(optimizer, shapes)
    return num_bytes + (_CUBLAS_BYTES if device.type == "cuda" else 0)


def _last_two(shape: Sequence[int]) -> Shape:
    return shape[-2], shape[-1]


def _max_elements(shapes: Collection[Shape]) -> int:
    return max((rows * columns for rows, columns in shapes), default=0)


def _scratch_bytes(optimizer: MatrixOptimizer, shapes: Collection[Shape]) -> int:
    return max((optimizer.orthogonalize_bytes(rows, columns) for rows, columns in shapes), default=0)
