"""Updates that need whole matrices, one after the other: made orthogonal on the host, or where the model computes.

Products have other bits on a GPU than on a processor. So where they are made never follows from where blocks are at
home: it is the compute device, always (`docs/decisions/0059-newton-schulz-on-the-gpu.md`). All else of an update is
element by element, and is made in RAM.
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
    "DeviceMatrices",
    "HostMatrices",
    "Matrices",
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
"""Of an element: directions are in bf16, which is what the iteration begins with."""
_NUM_SLOTS = 2
"""Matrices whose directions are in RAM at once beside a device: one is made while the one before it is out."""
_CUBLAS_BYTES = 8 * 4096 * 1024
"""What cuBLAS takes for each stream that it computes on, at the setting under which its sums are repeatable."""


class Matrices(Protocol):
    """Makes matrices orthogonal, one after the other."""

    def make_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """Fill, make orthogonal and use the directions of one matrix after the other.

        Args:
            fill: Writes the directions of a matrix, by number, into a flat bf16 tensor of the host.
            use: Is given what was made of them, in the same order. Of one matrix it is called after its `fill`, and
                maybe after that of the next one.
            names: Full names of their parameters.
        """
        ...


class HostMatrices:
    """Makes matrices orthogonal on the processor; see `Matrices`. May be used by several threads."""

    def make_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """See `Matrices.make_each`."""
        directions = torch.empty(_most_elements(shapes), dtype=torch.bfloat16)
        room = torch.empty(_room_bytes(optimizer, shapes), dtype=torch.uint8)
        for number, shape in enumerate(shapes):
            own = directions[: math.prod(shape)]
            fill(number, own)
            optimizer.orthogonalize(own.view(shape), room, names[number])
            use(number, own)


class DeviceMatrices:
    """Makes matrices of the host orthogonal on a device; see `Matrices`.

    While one is there, the host uses the one before it and fills the next one. On a GPU, what is queued goes to a
    stream of its own: the host waits for its matrices alone, not for the layers that are queued. May be used by several
    threads, which take turns.

    Args:
        device: A CUDA device, or the CPU that emulates one.

    Attributes:
        moved_bytes: To the device, and as many back.
        sent_s: Seconds that copies there took.
        fetched_s: Seconds that copies back took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._slabs: list[HostSlab] = []  # pinned while they live
        self._slots: list[Tensor] = []
        self._matrix = self._room = torch.empty(0)
        self.moved_bytes, self.sent_s, self.fetched_s = 0, 0.0, 0.0

    def make_room(self, optimizer: MatrixOptimizer, shapes: Collection[Shape]) -> None:
        """Take the room for all matrices that there will be: `host_bytes` of pinned memory, `device_bytes` there."""
        with self._lock:
            most = _most_elements(shapes)
            self._slots, self._slabs = [], []  # the old ones go first
            self._matrix = self._room = torch.empty(0)
            slabs = [HostSlab(DIRECTION_BYTES * most, pin=self._stream is not None) for _ in range(_NUM_SLOTS)]
            self._slabs, self._slots = slabs, [slab.tensor.view(torch.bfloat16)[:most] for slab in slabs]
            with self._on_stream():
                self._matrix = torch.empty(most, dtype=torch.bfloat16, device=self._device)
                self._room = torch.empty(_room_bytes(optimizer, shapes), dtype=torch.uint8, device=self._device)

    def make_each(
        self,
        optimizer: MatrixOptimizer,
        shapes: Sequence[Shape],
        fill: Callable[[int, Tensor], None],
        use: Callable[[int, Tensor], None],
        names: Sequence[str],
    ) -> None:
        """See `Matrices.make_each`."""
        under_way: deque[tuple[int, Tensor, Sequence[_Mark]]] = deque()

        def use_first() -> None:
            number, own, (begun, sent, made, is_back) = under_way.popleft()
            is_back.wait()
            self.sent_s += begun.seconds_to(sent)
            self.fetched_s += made.seconds_to(is_back)
            use(number, own)

        with self._lock:
            for number, shape in enumerate(shapes):
                own = self._slots[number % _NUM_SLOTS][: math.prod(shape)]  # what was in it has been used
                fill(number, own)
                under_way.append((number, own, self._queue(optimizer, own, shape, names[number])))
                if len(under_way) == _NUM_SLOTS:
                    use_first()
            while under_way:
                use_first()

    def _queue(self, optimizer: MatrixOptimizer, own: Tensor, shape: Shape, name: str) -> Sequence[_Mark]:
        """Send a matrix there, make it orthogonal, and fetch it; return the marks around each copy."""
        with self._on_stream():
            matrix = self._matrix[: own.numel()]
            begun = self._mark()
            matrix.copy_(own, non_blocking=True)
            sent = self._mark()
            optimizer.orthogonalize(matrix.view(shape), self._room, name)
            made = self._mark()
            own.copy_(matrix, non_blocking=True)
            self.moved_bytes += DIRECTION_BYTES * own.numel()
            return begun, sent, made, self._mark()

    def _mark(self) -> _Mark:
        return _Mark(is_on_gpu=self._stream is not None)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Mark:
    """A point in time: on the current stream of a GPU, else on the host."""

    def __init__(self, *, is_on_gpu: bool) -> None:
        self._event: Any = None
        self._at_s = 0.0
        if is_on_gpu:  # a blocking event: the host sleeps instead of spinning
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Wait until the stream is there."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_to(self, later: _Mark) -> float:
        """Return the seconds up to a mark that was waited for."""
        if self._event is None:
            return later._at_s - self._at_s
        return float(self._event.elapsed_time(later._event)) / 1e3


def update_by_matrix(
    optimizer: MatrixOptimizer,
    matrices: Matrices,
    is_matrix: Callable[[Segment], bool],
    blocks: Mapping[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    update: Update,
) -> None:
    """Update a block group; of its matrices the directions of one or two are there at a time.

    Args:
        is_matrix: Whether a parameter is one, or a stack of them.
        blocks: As in `Optimizer.update`; matrices come whole.
    """
    found: list[tuple[Segment, slice]] = []
    others: list[Segment] = []
    for segment in segments:
        if not is_matrix(segment):
            others.append(segment)
            continue
        assert segment.stop - segment.start == math.prod(segment.shape), segment
        size = math.prod(segment.shape[-2:])
        starts = range(segment.start, segment.stop, size)  # one by one, as experts are stacked
        found += [(segment.within(range(start, start + size)), slice(start, start + size)) for start in starts]
    # Packed state has no element of a matrix.
    like_weight = {name: block for name, block in blocks.items() if len(block) == len(gradient)}

    def step(make: Callable[..., None], number: int, directions: Tensor) -> None:
        segment, inside = found[number]
        own = {name: block[inside] for name, block in like_weight.items()}
        make(own, gradient[inside], (segment,), update, directions)

    if found:
        matrices.make_each(
            optimizer,
            [_last_two(segment.shape) for segment, _ in found],
            lambda number, directions: step(optimizer.make_directions, number, directions),
            lambda number, directions: step(optimizer.apply_directions, number, directions),
            [segment.name for segment, _ in found],
        )
    if others:
        optimizer.apply_directions(blocks, gradient, others, update, torch.empty(0, dtype=torch.bfloat16))


def matrix_shapes(optimizer: MatrixOptimizer, layouts: Iterable[UnitLayout]) -> set[Shape]:
    """Return the shapes of matrices that trained layouts have."""
    return {
        _last_two(entry.shape)
        for layout in layouts
        if layout.trainable
        for entry in layout.entries
        if optimizer.is_matrix_of(entry)
    }


def matrix_elements(optimizer: MatrixOptimizer, layout: UnitLayout) -> int:
    """Return the elements of the matrices of a layout."""
    return sum(entry.numel for entry in layout.entries if optimizer.is_matrix_of(entry))


def host_bytes(shapes: Collection[Shape]) -> int:
    """Return what `DeviceMatrices` of these shapes take in RAM."""
    return _NUM_SLOTS * round_up(DIRECTION_BYTES * _most_elements(shapes), PAGE_BYTES)


def device_bytes(optimizer: MatrixOptimizer, device: torch.device, shapes: Collection[Shape]) -> int:
    """Return what `DeviceMatrices` of these shapes take on a device."""
    if not shapes:
        return 0
    own = DIRECTION_BYTES * _most_elements(shapes) + _room_bytes(optimizer, shapes)
    return own + (_CUBLAS_BYTES if device.type == "cuda" else 0)


def _last_two(shape: Sequence[int]) -> Shape:
    return shape[-2], shape[-1]


def _most_elements(shapes: Collection[Shape]) -> int:
    return max((rows * columns for rows, columns in shapes), default=0)


def _room_bytes(optimizer: MatrixOptimizer, shapes: Collection[Shape]) -> int:
    return max((optimizer.orthogonalize_bytes(rows, columns) for rows, columns in shapes), default=0)
