"""What an optimizer is to the engine: the state it keeps per parameter, and one update of one block group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatrain.models.layout import TensorEntry, UnitLayout

__all__ = ["Optimizer", "Segment", "StateKind", "Update", "build_segments", "bytes_per_parameter", "master_kinds"]


@dataclass(frozen=True, slots=True)
class StateKind:
    """One kind of block that an update reads and writes, one element per parameter.

    Attributes:
        name: Kind of the block: the part of its key after the unit's name.
        dtype: Element type.
    """

    name: str
    dtype: torch.dtype

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a flat block whose parameters share their settings.

    Attributes:
        start: First element.
        stop: One past the last element; the padding after it is never touched.
        weight_decay: Decoupled decay, as a fraction per step at a learning rate of 1.
        lr_scale: Factor on the learning rate of the step.
    """

    start: int
    stop: int
    weight_decay: float
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Update:
    """The numbers of one optimizer step, the same for every block group.

    Attributes:
        step: Number of this update, counted from 1; it sets the bias corrections.
        lr: Learning rate.
        grad_scale: Factor on every gradient, applied in fp32: the clip coefficient, 1 when nothing is clipped.
    """

    step: int
    lr: float
    grad_scale: float = 1.0


@runtime_checkable
class Optimizer(Protocol):
    """The contract between the engine and an optimizer.

    An optimizer object holds settings only. All state lies in the blocks, so it can live in any tier and be resumed
    from them alone. New state is all zeros.
    """

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        """Return every kind of block that `update` needs, the master weight first.

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
            gradient: fp32 sum of the gradients, as long as the blocks; unchanged.
            segments: Ranges to update, without overlap. Elements outside all of them keep their values.
            update: Numbers of the step.
        """
        ...

    def warm_up(self) -> None:
        """Compile or load the kernels, so that no step pays for it. Safe to call twice and from any thread."""
        ...


def master_kinds(split_master: bool) -> tuple[StateKind, ...]:
    """Return the blocks that hold the fp32 master: 4 bytes per parameter either way."""
    if split_master:
        return (StateKind("weight", torch.bfloat16), StateKind("low", torch.int16))
    return (StateKind("weight", torch.float32),)


def bytes_per_parameter(kinds: Sequence[StateKind]) -> int:
    """Return the bytes that `kinds` take together for one parameter."""
    return sum(kind.bytes_per_parameter for kind in kinds)


def decays(entry: TensorEntry, exclude: Sequence[str]) -> bool:
    """Tell whether weight decay applies to a parameter.

    Biases and the weights of norms are vectors in every architecture, whatever their names, so only parameters of two
    or more dimensions decay; `exclude` takes out more by name.

    Args:
        entry: The parameter.
        exclude: Globs matched against its full name, upper and lower case told apart.
    """
    return len(entry.shape) >= 2 and not any(fnmatchcase(entry.name, glob) for glob in exclude)


def build_segments(layout: UnitLayout, weight_decay: float, exclude: Sequence[str]) -> tuple[Segment, ...]:
    """Return one segment per parameter of a block group, in the order of the block.

    Args:
        layout: Where each parameter lies.
        weight_decay: Decay of the parameters that decay.
        exclude: Globs of parameter names that do not.
    """
    return tuple(
        Segment(entry.offset, entry.offset + entry.numel, weight_decay if decays(entry, exclude) else 0.0)
        for entry in layout.entries
    )
