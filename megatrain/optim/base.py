"""The contract between engine and optimizer: its kinds of state, and the update of one block group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatrain.base.layout import TensorEntry, UnitLayout
    from megatrain.optim.table import ParameterGroupConfig

__all__ = [
    "FORMATS",
    "GRADIENT_DTYPES",
    "Format",
    "MatrixOptimizer",
    "Optimizer",
    "Segment",
    "StateKind",
    "Update",
    "build_segments",
    "bytes_per_parameter",
    "decays",
    "master_kinds",
]

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a gradient block. bf16 is widened exactly when it is read, so arithmetic is in fp32 either way."""

Format = tuple[bool, torch.dtype]
"""A variant of a kernel: whether the master is split, and the dtype of the gradient block."""
FORMATS: tuple[Format, ...] = tuple((is_split, dtype) for is_split in (False, True) for dtype in GRADIENT_DTYPES)

_STATE_ALIGNMENT_ELEMENTS = 16
"""Parameters start at multiples of this in a block of `elements_of`: a cache line in fp32."""
_BLOCK_ALIGNMENT_ELEMENTS = 1024
"""The length of every block is a multiple of this, as a weight block's is."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of block that an update reads and writes.

    Attributes:
        name: Kind of the block: the part of its key after the unit's name.
        dtype: Element type.
        elements_of: Returns the number of elements of a parameter in the block, which holds them one parameter after
            another. None: one per `granularity` elements of the parameter, in the order of the weight block.
        needs_whole: The update needs all of a parameter at once, also where each element has one in the block.
        granularity: Elements of the weight that share one element of this block: 1, or a divisor of 1024, to which
            parameters and parts are aligned, so that none is shared by two of them.
        begins_as_weight: New state is the fp32 masters, not zeros: one element for each.
    """

    name: str
    dtype: torch.dtype
    elements_of: Callable[[TensorEntry], int] | None = None
    granularity: int = 1
    needs_whole: bool = False
    begins_as_weight: bool = False

    def __post_init__(self) -> None:
        assert _BLOCK_ALIGNMENT_ELEMENTS % self.granularity == 0, self
        assert self.granularity == 1 or self.elements_of is None, self
        is_aligned = self.dtype == torch.float32 and self.granularity == 1 and self.elements_of is None
        assert is_aligned or not self.begins_as_weight, self

    def num_elements(self, layout: UnitLayout) -> int:
        """Return the length of the block for a layout, padding included; never 0."""
        if self.elements_of is None:
            return self.elements_for(layout.num_elements)
        return max(1, -(-self._extent(layout)[1] // _BLOCK_ALIGNMENT_ELEMENTS)) * _BLOCK_ALIGNMENT_ELEMENTS

    def elements_for(self, num_elements: int) -> int:
        """Return the length of the range that belongs to a range of the weight block which begins where one does."""
        return -(-num_elements // self.granularity)

    def is_like_weight(self, layout: UnitLayout) -> bool:
        """Return whether the block of a layout can be cut as its weight is, one part after the other updated."""
        if self.elements_of is None or self.needs_whole:
            return not self.needs_whole
        return len(layout.entries) == 1 and self.elements_of(layout.entries[0]) == layout.entries[0].numel

    def starts(self, layout: UnitLayout) -> dict[str, int]:
        """Return the first element of each parameter in the block, by full name."""
        if self.elements_of is None:
            return {entry.name: entry.offset // self.granularity for entry in layout.entries}
        return self._extent(layout)[0]

    def length_of(self, entry: TensorEntry) -> int:
        """Return how many elements of the block belong to a parameter."""
        return self.elements_for(entry.numel) if self.elements_of is None else self.elements_of(entry)

    def _extent(self, layout: UnitLayout) -> tuple[dict[str, int], int]:
        assert self.elements_of is not None, self
        starts, end = {}, 0
        for entry in layout.entries:
            starts[entry.name] = end
            end += -(-self.elements_of(entry) // _STATE_ALIGNMENT_ELEMENTS) * _STATE_ALIGNMENT_ELEMENTS
        return starts, end


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a flat block whose parameters share their settings.

    Attributes:
        start: First element.
        stop: One past the last element; the padding after it is never touched.
        weight_decay: Decoupled decay, as a fraction per step at a learning rate of 1.
        lr_scale: Factor on the learning rate of the step.
        shape: Shape of the parameter, for optimizers that need it; `()` stands for a vector.
        state_starts: Kind -> first element of the parameter in that block, for kinds with `elements_of`.
        name: Full name of the parameter.
        first: Its element that `start` is: not 0 in a block that begins inside of the parameter. With `name` it tells
            an element from all others of the model, however blocks are cut and whichever rank has them.
    """

    start: int
    stop: int
    weight_decay: float
    lr_scale: float = 1.0
    shape: tuple[int, ...] = ()
    state_starts: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    first: int = 0

    def within(self, block: range) -> Segment:
        """Return what of the segment lies in a part of its block, counted from the start of that part."""
        start, stop = max(self.start, block.start), min(self.stop, block.stop)
        first = self.first + start - self.start
        starts = dict.fromkeys(self.state_starts, start - block.start)  # only blocks that are like the weight are cut
        return replace(self, start=start - block.start, stop=stop - block.start, first=first, state_starts=starts)


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of one optimizer step, the same for every block group.

    Attributes:
        step: Number of this update, counted from 1; it sets the bias corrections.
        grad_scale: Factor on every gradient, applied in fp32: the clip coefficient, 1 when nothing is clipped.
        decision: ``[2]`` fp32 on the device of the blocks, in place of ``grad_scale``: the factor, and 0 where nothing
            is to be updated. None: the host knows the factor. Only a `TableOptimizer` gets one.
    """

    step: int
    lr: float
    grad_scale: float = 1.0
    decision: Tensor | None = field(default=None, compare=False)


@runtime_checkable
class Optimizer(Protocol):
    """The contract between the engine and an optimizer.

    An optimizer object holds settings only. All state lies in the blocks, so it can live in any tier and be resumed
    from them alone. New state is all zeros, but for kinds that begin as the weights.
    """

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return every kind of block that `update` needs, the master weight first. Names are unique.

        Args:
            split_master: The master is a bf16 `weight` and an int16 `low` block; otherwise one fp32 `weight` block.
        """
        ...

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step to one block group, in place, and return when it is done.

        The result depends on the contents alone: neither on how the block is cut nor on the number of threads.
        May run on any thread and beside updates of other block groups; releases the GIL while it computes.

        Args:
            blocks: The flat CPU tensor of each kind, by kind; a `low` block makes it the split-master update.
            gradient: Sum of the gradients, as long as the weight block; fp32 or bf16; unchanged.
            segments: Ranges to update, without overlap. Elements outside all of them keep their values.
        """
        ...

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernels before the first step. May be called twice, from any thread.

        Args:
            formats: Variants that will be used; all of them take seconds more, most of all on a GPU.
        """
        ...


@runtime_checkable
class MatrixOptimizer(Optimizer, Protocol):
    """An optimizer that makes matrices orthogonal one at a time, so that a device can do it for updates in RAM.

    `update` is these three, one after the other. State is like the weight, or in `elements_of` one element for each
    of what is no matrix.
    """

    @property
    def piece_bytes(self) -> int:
        """The bytes that `make_directions` and `apply_directions` take at most, however much they are given."""
        ...

    def is_matrix_of(self, entry: TensorEntry) -> bool:
        """Return whether the last two dimensions of a parameter are matrices that have to be whole."""
        ...

    def make_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the moments of matrices, and write the direction in which each element is to move; see `update`.

        Args:
            blocks: Those of `update`, or their elements of one matrix.
            gradient: As long as the weight block.
            directions: bf16, as long as the weight block; of other elements it is unchanged.
        """
        ...

    def orthogonalize(self, matrix: Tensor, room: Tensor, name: str = "") -> None:
        """Make the directions of a whole matrix what is to be applied, in place.

        On a GPU it queues the work on the current stream, and returns before it is done.

        Args:
            matrix: [rows, columns] in bf16, contiguous, on any device.
            room: uint8, `orthogonalize_bytes` long or longer, on the same device. Nothing large is allocated beside it.
            name: Full name of its parameter, which may fuse several logical matrices.
        """
        ...

    def orthogonalize_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that this takes beside the matrix."""
        ...

    def orthogonalize_flops(self, rows: int, columns: int, name: str = "") -> int:
        """Return the operations that this takes; the plan predicts its time from them."""
        ...

    def apply_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the weights of matrices, and all other parameters; see `make_directions`.

        Args:
            blocks: As there; of packed state, the tensors that `Segment.state_starts` tells the places in.
            directions: What was made of them.
        """
        ...


def master_kinds(split_master: bool) -> tuple[StateKind, ...]:
    """Return the blocks that hold the fp32 master: 4 bytes per parameter either way."""
    if split_master:
        return (StateKind("weight", torch.bfloat16), StateKind("low", torch.int16))
    return (StateKind("weight", torch.float32),)


def bytes_per_parameter(kinds: Sequence[StateKind], layout: UnitLayout | None = None) -> float:
    """Return the bytes that `kinds` take together for one parameter.

    Args:
        layout: Count its blocks, padding included. None: no padding; kinds with `elements_of` count as nothing.
    """
    if layout is None:
        return sum(kind.dtype.itemsize / kind.granularity for kind in kinds if kind.elements_of is None)
    return sum(kind.num_elements(layout) * kind.dtype.itemsize for kind in kinds) / layout.num_parameters


def decays(entry: TensorEntry, exclude: Sequence[str]) -> bool:
    """Return whether weight decay applies to a parameter.

    Where anything is excluded, only parameters of two or more dimensions decay: biases and weights of norms are vectors
    in every architecture, whatever their names. `exclude` takes out more by name. Where it is empty, all decay.

    Args:
        exclude: Globs matched against its full name, case-sensitively.
    """
    if not exclude:
        return True
    return len(entry.shape) >= 2 and not any(fnmatchcase(entry.parameter, glob) for glob in exclude)


def build_segments(
    layout: UnitLayout,
    weight_decay: float,
    exclude: Sequence[str],
    groups: Sequence[ParameterGroupConfig] = (),
    kinds: Sequence[StateKind] = (),
    learning_rate: float = 1.0,
) -> tuple[Segment, ...]:
    """Return one segment per parameter of a block group, in the order of the block.

    Args:
        exclude: Globs of parameter names that do not; see `decays`.
        groups: Settings by name; the first group that matches a parameter counts.
        kinds: Kinds of the optimizer; needed where one has `elements_of`.
        learning_rate: Peak of the run, of which groups with a rate of their own have a share.
    """
    starts = {kind.name: kind.starts(layout) for kind in kinds if kind.elements_of is not None}
    segments = []
    for entry in layout.entries:
        group = next((group for group in groups if group.matches(entry.parameter)), None)
        decay = weight_decay if group is None or group.weight_decay is None else group.weight_decay
        segments.append(
            Segment(
                entry.offset,
                entry.offset + entry.numel,
                weight_decay=decay if decays(entry, exclude) else 0.0,
                lr_scale=1.0 if group is None else group.lr_scale(learning_rate),
                shape=entry.shape,
                state_starts={name: of_entry[entry.name] for name, of_entry in starts.items()},
                name=entry.name,
            )
        )
    return tuple(segments)
