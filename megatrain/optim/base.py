"""Contract between the engine and optimizers: kinds of state, and updates of block groups."""

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
    "is_decayed",
    "master_kinds",
]

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of a gradient block. Kernels widen bf16 exactly, so arithmetic is in fp32 in both cases."""

Format = tuple[bool, torch.dtype]
"""A variant of a kernel: whether the master is split, and the dtype of the gradient block."""
FORMATS: tuple[Format, ...] = tuple((is_split, dtype) for is_split in (False, True) for dtype in GRADIENT_DTYPES)

_STATE_ALIGNMENT_ELEMENTS = 16
"""Alignment of each parameter in the block of a kind with `elements_of`, in elements: a cache line of fp32."""
_BLOCK_ALIGNMENT_ELEMENTS = 1024
"""The lengths of weight blocks, and of blocks of state kinds with ``elements_of``, are multiples of this number."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of block that an update reads and writes.

    Attributes:
        name: Name of the kind, which follows the unit's name in block keys.
        dtype: Element type.
        elements_of: Function that returns how many elements a parameter has in the block. Parameters are stored
            consecutively. If None, each run of `granularity` weights in the weight block has one element here.
        needs_whole: Whether an update needs whole parameters, even if the block has the same layout as the weight
            block.
        granularity: Number of weights that share one element of this block, a divisor of 1024. Parameters and parts are
            aligned to it, so no two parameters or parts share an element.
        begins_as_weight: Whether new state is a copy of the fp32 masters instead of zeros. Requires one fp32 element
            per weight.
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
        """Return the length of a layout's block, including padding; at least 1."""
        if self.elements_of is None:
            return self.elements_for(layout.num_elements)
        return max(1, -(-self._extent(layout)[1] // _BLOCK_ALIGNMENT_ELEMENTS)) * _BLOCK_ALIGNMENT_ELEMENTS

    def elements_for(self, num_elements: int) -> int:
        """Return the number of state elements for an aligned range of `num_elements` weights."""
        return -(-num_elements // self.granularity)

    def has_weight_layout(self, layout: UnitLayout) -> bool:
        """Return whether the block can be split at the same elements as the weight block, for updates of parts."""
        if self.elements_of is None or self.needs_whole:
            return not self.needs_whole
        return len(layout.entries) == 1 and self.elements_of(layout.entries[0]) == layout.entries[0].numel

    def starts(self, layout: UnitLayout) -> dict[str, int]:
        """Return the index of each parameter's first element in the block, by full name."""
        if self.elements_of is None:
            return {entry.name: entry.offset // self.granularity for entry in layout.entries}
        return self._extent(layout)[0]

    def length_of(self, entry: TensorEntry) -> int:
        """Return the number of elements that a parameter has in the block."""
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
    """Range of a flat block whose parameters share the same settings.

    Attributes:
        start: First element.
        stop: One past the last element. Updates never change the padding that follows.
        weight_decay: Weight decay, as a fraction per step at a learning rate of 1.
        lr_scale: Factor by which the step's learning rate is multiplied.
        shape: Shape of the parameter, for optimizers that need it. `()` for a vector.
        state_starts: Index of the parameter's first element in the block, by kind. Only for kinds with `elements_of`.
        name: Full name of the parameter.
        param_start: Index of element `start` within the parameter, above 0 if the block begins inside the
            parameter. With `name`, it identifies an element of the model independently of parts and ranks.
    """

    start: int
    stop: int
    weight_decay: float
    lr_scale: float = 1.0
    shape: tuple[int, ...] = ()
    state_starts: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    param_start: int = 0

    def within(self, block: range) -> Segment:
        """Return the overlap of the segment and a range of its block, relative to the start of the range."""
        start, stop = max(self.start, block.start), min(self.stop, block.stop)
        param_start = self.param_start + start - self.start
        # Only blocks with the weight's layout are split, so state and weight start at the same element.
        starts = dict.fromkeys(self.state_starts, start - block.start)
        start, stop = start - block.start, stop - block.start
        return replace(self, start=start, stop=stop, param_start=param_start, state_starts=starts)


@dataclass(frozen=True, slots=True)
class Update:
    """The scalars of one optimizer step. All block groups use the same scalars.

    Attributes:
        step: Update number, counted from 1. Determines the bias corrections.
        grad_scale: Factor by which every gradient is multiplied in fp32: the clip coefficient, or 1 without clipping.
        decision: fp32 tensor ``[2]`` on the blocks' device that replaces ``grad_scale``: the factor, then 1 to apply or
            0 to skip the update. None if the host knows the factor. Only a `TableOptimizer` gets decisions.
    """

    step: int
    lr: float
    grad_scale: float = 1.0
    decision: Tensor | None = field(default=None, compare=False)


@runtime_checkable
class Optimizer(Protocol):
    """Contract between the engine and an optimizer.

    An optimizer object holds only settings. All state is in blocks, so state can be in any tier, and the blocks are
    sufficient to resume. New state is zeros, except for kinds that begin as the weights.
    """

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return all kinds of blocks that `update` needs, beginning with the master weight. Names are unique.

        Args:
            split_master: Whether a bf16 `weight` and an int16 `low` block replace the fp32 `weight` block.
        """
        ...

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        """Apply one step to one block group in place. Return after the step is finished.

        The result depends only on the contents of the blocks, not on their division into parts or the number of
        threads. Any thread can call this method, even while other block groups are being updated. It releases the GIL.

        Args:
            blocks: Flat CPU tensors by kind. A `low` block selects the split-master update.
            gradient: Sum of the gradients in fp32 or bf16, with the length of the weight block. Not changed.
            segments: Ranges to update, without overlap. Elements outside these ranges do not change.
        """
        ...

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        """Compile or load the kernels before the first step. Any thread can call this method, even repeatedly.

        Args:
            formats: Variants to compile. Each variant takes seconds, especially on a GPU.
        """
        ...


@runtime_checkable
class MatrixOptimizer(Optimizer, Protocol):
    """Optimizer that orthogonalizes matrices one at a time, so that a GPU can do this for blocks in RAM.

    `update` is equivalent to `make_directions`, `orthogonalize` and `apply_directions` in sequence. Each kind of state
    has the weight's layout, or its `elements_of` counts only elements outside of matrices.
    """

    @property
    def piece_bytes(self) -> int:
        """Maximum scratch bytes of `make_directions` and `apply_directions`, for inputs of any size."""
        ...

    def has_matrices(self, entry: TensorEntry) -> bool:
        """Return whether an update needs whole matrices, formed by a parameter's last two dimensions."""
        ...

    def make_directions(
        self,
        blocks: Mapping[str, Tensor],
        gradient: Tensor,
        segments: Sequence[Segment],
        update: Update,
        directions: Tensor,
    ) -> None:
        """Update the moments of matrices, and write each element's update direction; see `update`.

        Args:
            blocks: Blocks as in `update`, or only the elements of one matrix.
            gradient: Gradient with the length of the weight block.
            directions: bf16 output of the same length. Elements outside of matrices are not written.
        """
        ...

    def orthogonalize(self, matrix: Tensor, scratch: Tensor, name: str = "") -> None:
        """Convert the directions of a whole matrix to its update, in place.

        On a GPU, the call queues the work on the current stream and returns before the work is finished.

        Args:
            matrix: [rows, columns] in bf16, contiguous, on any device.
            scratch: uint8 scratch buffer on the same device, at least `orthogonalize_bytes` long. No other large
                buffers are allocated.
            name: Full name of the parameter, which can fuse several logical matrices.
        """
        ...

    def orthogonalize_bytes(self, rows: int, columns: int) -> int:
        """Return the scratch bytes that `orthogonalize` needs."""
        ...

    def orthogonalize_flops(self, rows: int, columns: int, name: str = "") -> int:
        """Return the FLOPs of `orthogonalize`, to predict its time."""
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
            blocks: As in `make_directions`. `Segment.state_starts` indexes the blocks of kinds with `elements_of`.
            directions: Results of `orthogonalize`.
        """
        ...


def master_kinds(split_master: bool) -> tuple[StateKind, ...]:
    """Return the kinds that store the fp32 master. Both forms take 4 bytes per parameter."""
    if split_master:
        return (StateKind("weight", torch.bfloat16), StateKind("low", torch.int16))
    return (StateKind("weight", torch.float32),)


def bytes_per_parameter(kinds: Sequence[StateKind], layout: UnitLayout | None = None) -> float:
    """Return the total bytes of `kinds` per parameter.

    Args:
        layout: Layout whose padded blocks are counted. Without it, padding and kinds with `elements_of` count as 0.
    """
    if layout is None:
        return sum(kind.dtype.itemsize / kind.granularity for kind in kinds if kind.elements_of is None)
    return sum(kind.num_elements(layout) * kind.dtype.itemsize for kind in kinds) / layout.num_parameters


def is_decayed(entry: TensorEntry, exclude: Sequence[str]) -> bool:
    """Return whether weight decay applies to an entry's parameter.

    If `exclude` is empty, all parameters decay. Otherwise, parameters that match `exclude` do not decay, and neither do
    parameters with fewer than two dimensions: biases and norm weights are vectors in every architecture.

    Args:
        exclude: Case-sensitive globs for full names.
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
        exclude: Globs for names of parameters without decay; see `is_decayed`.
        groups: Settings by parameter name. The first matching group applies.
        kinds: State kinds of the optimizer. Required if a kind has `elements_of`.
        learning_rate: Peak learning rate of the run. A group's rate becomes a factor relative to this rate.
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
                weight_decay=decay if is_decayed(entry, exclude) else 0.0,
                lr_scale=1.0 if group is None else group.lr_scale(learning_rate),
                shape=entry.shape,
                state_starts={name: kind_starts[entry.name] for name, kind_starts in starts.items()},
                name=entry.name,
            )
        )
    return tuple(segments)
