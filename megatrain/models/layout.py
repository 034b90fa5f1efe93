"""How the tensors of one unit lie inside one flat block.

Every kind of block of a unit (weight, low half, m, v, gradient) uses the same element offsets, so one layout serves
all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import Tensor, nn

__all__ = ["ALIGNMENT_ELEMENTS", "TensorEntry", "UnitLayout", "build_layout", "build_layouts", "views"]

ALIGNMENT_ELEMENTS = 1024
"""Every tensor starts at a multiple of this many elements: 4 KiB in fp32, the sector of an O_DIRECT transfer."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter inside a flat block.

    Attributes:
        name: Full parameter name as in `model.named_parameters()`.
        shape: Shape of the parameter; `()` for a scalar.
        offset: First element inside the block; a multiple of `ALIGNMENT_ELEMENTS`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """All parameters of one block group.

    Attributes:
        name: Name of the block group: the unit's name, or `<unit>.frozen` for the frozen part of a partly frozen unit.
        entries: Parameters in definition order, without overlap.
        num_elements: Length of the block in elements, padding included; a multiple of `ALIGNMENT_ELEMENTS`.
        trainable: Whether the group has gradients and optimizer state.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    num_elements: int
    trainable: bool

    @property
    def num_parameters(self) -> int:
        """Number of parameters, padding left out."""
        return sum(entry.numel for entry in self.entries)


def build_layout(name: str, parameters: Iterable[tuple[str, Sequence[int]]], trainable: bool) -> UnitLayout:
    """Lay parameters one after another, each at an aligned offset.

    Args:
        name: Name of the block group.
        parameters: `(full name, shape)` of every parameter, in definition order.
        trainable: Whether the group has gradients and optimizer state.
    """
    entries: list[TensorEntry] = []
    offset = 0
    for parameter_name, shape in parameters:
        entry = TensorEntry(parameter_name, tuple(int(size) for size in shape), offset)
        entries.append(entry)
        offset += -(-entry.numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
    return UnitLayout(name, tuple(entries), offset, trainable)


def build_layouts(path: str, parameters: Mapping[str, nn.Parameter], *, by_dtype: bool = False) -> list[UnitLayout]:
    """Return the layouts of the parameters that a unit owns: the trained ones in one block, the frozen ones in another.

    Args:
        path: Name of the unit; that of the first layout.
        parameters: Full name -> parameter, in definition order.
        by_dtype: Each dtype has blocks of its own.

    Returns:
        The trained ones first: `<unit>`, `<unit>.frozen`; for other dtypes `<unit>.<dtype>`, `<unit>.<dtype>.frozen`.
    """
    kinds: dict[tuple[bool, torch.dtype | None], list[tuple[str, torch.Size]]] = {}
    for name, parameter in parameters.items():
        kind = (parameter.requires_grad, parameter.dtype if by_dtype else None)
        kinds.setdefault(kind, []).append((name, parameter.shape))
    layouts = []
    ordered = sorted(kinds, key=lambda kind: not kind[0])
    for trains, dtype in ordered:
        other_dtype = "" if dtype == ordered[0][1] else f".{str(dtype).removeprefix('torch.')}"
        frozen_part = ".frozen" if ordered[0][0] and not trains else ""
        layouts.append(build_layout(f"{path}{other_dtype}{frozen_part}", kinds[trains, dtype], trains))
    return layouts


def views(flat: Tensor, layout: UnitLayout) -> dict[str, Tensor]:
    """Return one view of `flat` per parameter, by full name; nothing is copied.

    Args:
        flat: 1-D tensor of `layout.num_elements` elements, any dtype and device.
        layout: Where each parameter lies.
    """
    assert flat.dim() == 1 and flat.numel() == layout.num_elements, (
        tuple(flat.shape),
        layout.name,
        layout.num_elements,
    )
    return {entry.name: flat.narrow(0, entry.offset, entry.numel).view(entry.shape) for entry in layout.entries}
