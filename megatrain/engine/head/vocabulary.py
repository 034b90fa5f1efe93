"""Computation of logits one vocabulary part at a time, so that a head's memory is independent of the vocabulary size.

The model's own forward computes each part. A `PartWeight` replaces the weight that computes the logits, so that
`F.linear` multiplies only by the part's rows. The model's operations on logits (scales, soft caps) then run on the
part. Results are the same, because `head_plan.py` checks that these operations are elementwise over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine.unit.absent_weights import AbsentWeight
from megatrain.engine.unit.weight_gradients import linear


def vocabulary_ranges(vocab_size: int, columns: int, boundaries: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Divide a vocabulary into as few parts as possible, and return their ranges `(start, stop)`.

    Parts between two boundaries have equal sizes, except for a smaller last part.

    Args:
        columns: Maximum number of columns per part.
        boundaries: Columns at which a part must begin, because a block of the weight begins there.
    """
    ranges: list[tuple[int, int]] = []
    for begin, end in zip((0, *boundaries), (*boundaries, vocab_size), strict=True):
        num_parts = -(-(end - begin) // columns)
        size = -(-(end - begin) // num_parts)
        ranges += [(start, min(start + size, end)) for start in range(begin, end, size)]
    return ranges


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """Rows of a weight that compute one range of the logits.

    Attributes:
        weight: Rows of the weight, [stop - start, hidden]; a leaf with a target (``weight_leaf``) if it is trained.
    """

    start: int
    stop: int
    weight: Tensor


class PartWeight(AbsentWeight):
    """Placeholder for the weight that computes the logits. With it, `F.linear` computes the logits of one part."""

    _part: VocabularyPart | None

    @classmethod
    def from_placeholder(cls, placeholder: AbsentWeight) -> PartWeight:
        """Return a placeholder with the shape, dtype and device of ``placeholder``."""
        weight: Any = Tensor._make_subclass(cls, placeholder)
        weight._part = None
        assert isinstance(weight, PartWeight)
        return weight

    @contextmanager
    def use_part(self, part: VocabularyPart) -> Iterator[None]:
        """Compute only the logits of a part of the vocabulary within the context."""
        self._part = part
        try:
            yield
        finally:
            self._part = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            return _part_linear(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _part_linear(rows: Tensor, weight: PartWeight, bias: Tensor | None = None) -> Tensor:
    part = weight._part
    assert part is not None, "no part of the vocabulary is bound"
    part_bias = None if bias is None else bias[part.start : part.stop]
    if not part.weight.requires_grad or not torch.is_grad_enabled():
        return functional.linear(rows, part.weight, part_bias)
    out = linear(rows, part.weight, part_bias)
    return functional.linear(rows, part.weight, part_bias) if out is None else out
