"""Descriptions of blocks: kinds, sizes, and the sources of frozen weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from megatrain.engine.program.block_keys import weight_key
from megatrain.engine.program.encoding import Encoding

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout

Kind = Literal["weights", "optimizer", "gradients", "activations"]

#: Kinds of blocks whose contents outlive a step. Checkpoints contain these blocks unless the model folder has them.
DURABLE_KINDS: tuple[Kind, ...] = ("weights", "optimizer")

#: Kinds in display order. If two kinds save the same traffic per byte of a faster tier, the earlier one has priority.
KINDS: tuple[Kind, ...] = ("weights", "activations", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Description of a block, which is a flat tensor with ``num_elements`` elements.

    Attributes:
        parent_key: Key shared by all parts of a tensor, if the block is a part; otherwise empty.
        in_folder: Whether the model folder has the contents and no step writes the block. Checkpoints omit such blocks.
        in_place: Whether the model folder can be the home of the block, because uses can read the block there.
        num_packed: Number of elements after decoding, if the block holds packed bytes; otherwise 0.
    """

    key: str
    kind: Kind
    num_elements: int
    dtype: torch.dtype
    parent_key: str = ""
    in_folder: bool = False
    in_place: bool = False
    num_packed: int = 0

    @property
    def tensor_key(self) -> str:
        """Key shared by all parts of the tensor, or the block's own key if the block is not a part."""
        return self.parent_key or self.key

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def num_values(self) -> int:
        """Number of elements after decoding."""
        return self.num_packed or self.num_elements

    @property
    def is_saved(self) -> bool:
        """Whether checkpoints contain the block."""
        return self.kind in DURABLE_KINDS and not self.in_folder


@dataclass(frozen=True, slots=True)
class FrozenWeights:
    """Storage locations and encodings of frozen weights.

    Attributes:
        in_folder: Whether the model folder has the frozen weights. Checkpoints then omit them.
        in_place: Names of layouts that can stay in the model folder. Each use reads their weights from there.
        encodings: Encodings of weights whose blocks do not hold the weight itself, by layout.
    """

    in_folder: bool = False
    in_place: Collection[str] = ()
    encodings: Mapping[str, Encoding] = field(default_factory=dict)


def weight_block(
    layout: UnitLayout,
    num_elements: int,
    dtype: torch.dtype,
    encoding: Encoding | None,
    *,
    in_folder: bool,
    in_place: bool,
) -> BlockPlan:
    """Return the block of a weight that is not cut into parts.

    Args:
        num_elements: Number of elements in the layout, or in the owned shard of the layout.
        encoding: Encoding of the weight; None if the block holds the weight itself.
        in_place: Whether uses can read the weight from the model folder, if the folder has it.
    """
    return BlockPlan(
        weight_key(layout.name),
        "weights",
        num_elements if encoding is None else encoding.nbytes,
        dtype if encoding is None else torch.uint8,
        in_folder=in_folder,
        in_place=in_folder and in_place,
        num_packed=0 if encoding is None else layout.num_elements,
    )
