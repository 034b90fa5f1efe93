"""Layouts are cut into parts, which together hold the values and the norm of the whole layout."""

from __future__ import annotations

import pytest
import torch

from megatrain.base import layout as layouts
from megatrain.base.layout import (
    PART_ALIGNMENT_ELEMENTS,
    SplitTensor,
    UnitLayout,
    build_layout,
    split_into_parts,
    views,
    views_of_parts,
)
from megatrain.optim import kernels
from megatrain.optim.clip import SquaredNorm, squared_norm


def cut(monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, ...]], part_elements: int) -> UnitLayout:
    monkeypatch.setattr(layouts, "PART_ELEMENTS", part_elements)
    layout = build_layout("unit", [(f"p{number}", shape) for number, shape in enumerate(shapes)], trainable=True)
    return split_into_parts([layout])[0]


SHAPES: list[list[tuple[int, ...]]] = [
    [(2000, 640)],
    [(700, 333), (64,), (5, 300, 301), ()],
    [(1_000_003,)],
    [(6, 70_000)],
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_parts_cover_a_layout_at_partial_sum_boundaries(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PART_ALIGNMENT_ELEMENTS == kernels.NORM_BLOCK_ELEMENTS
    most = 6 * PART_ALIGNMENT_ELEMENTS
    layout = cut(monkeypatch, shapes, most)
    assert [index for part in layout.parts for index in (part.start, part.stop)][1:-1:2] == [
        part.start for part in layout.parts[1:]
    ]
    assert layout.parts[0].start == 0 and layout.parts[-1].stop == layout.num_elements
    assert all(part.start % PART_ALIGNMENT_ELEMENTS == 0 and 0 < len(part) <= most for part in layout.parts)
    assert len(layout.parts) > 1


def test_an_embedding_is_cut_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = cut(monkeypatch, [(262_144, 640)], 16 << 20)
    assert all(part.start % 640 == 0 for part in layout.parts) and len(layout.parts) == 11


def test_a_huge_model_has_larger_parts_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    monkeypatch.setattr(layouts, "MAX_PARTS", 8)
    found = split_into_parts([build_layout(str(number), [("w", (1024, 1024))], trainable=True) for number in range(4)])
    assert sum(len(layout.parts) for layout in found) == 8


@pytest.mark.parametrize("shapes", SHAPES)
def test_split_parameters_equal_whole_parameters(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = cut(monkeypatch, shapes, 2 * PART_ALIGNMENT_ELEMENTS)
    whole = torch.zeros(layout.num_elements)
    blocks = [torch.zeros(len(part)) for part in layout.parts]
    scattered = views_of_parts(blocks, layout.parts, layout)
    assert any(isinstance(place, SplitTensor) for place in scattered.values())
    for name, view in views(whole, layout).items():
        # The gradient is not contiguous, as gradients from autograd may be.
        gradient = torch.randn(view.shape[::-1]).permute(*range(view.dim())[::-1]) if view.dim() else torch.randn(())
        view.copy_(gradient)
        scattered[name].copy_(gradient)
        view.add_(gradient)
        scattered[name].add_(gradient)
    assert torch.equal(torch.cat(blocks), whole)


@pytest.mark.parametrize("sizes", [[65_536, 131_072, 7], [200_000]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_parts_equals_the_whole_norm(sizes: list[int], dtype: torch.dtype) -> None:
    """The parts may be added in any order. For example, the head adds its parts in reverse."""
    gradient = torch.randn(sum(sizes)).to(dtype)
    norm = SquaredNorm()
    for number, part in reversed(list(enumerate(torch.split(gradient, sizes)))):
        norm.add(number, part)
    assert norm.total() == squared_norm(gradient)
