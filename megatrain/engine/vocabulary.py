"""Logits, loss and gradients of a head over a part of the vocabulary at a time.

Cross entropy needs of a row's logits their maximum, the sum of their exponentials, and the one of the label. These come
from one pass over the parts of the vocabulary; then the gradient of every part is known by itself. So the memory of the
head does not depend on the vocabulary.

A part of the logits is made by the model's own forward: in the place of the weight that makes the logits stands a
`PartWeight`, whose `F.linear` multiplies by the rows of the part alone. What the model does with logits (scales, soft
caps) runs on the part. `CutProbe` finds out whether that is the same: whether it is elementwise over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.visit import METADATA_QUERIES, AbsentWeight
from megatrain.engine.weight_gradients import linear

__all__ = [
    "CutProbe",
    "PartWeight",
    "VocabularyPart",
    "vocabulary_ranges",
]


def vocabulary_ranges(vocab_size: int, columns: int, borders: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the parts of a vocabulary, `(start, stop)`: as few as hold at most ``columns`` words.

    Between two borders they are equally large.

    Args:
        vocab_size: words.
        columns: most words of a part.
        borders: words that a part begins with in any case: blocks of the weight begin there.
    """
    found: list[tuple[int, int]] = []
    for first, last in zip((0, *borders), (*borders, vocab_size), strict=True):
        num_parts = -(-(last - first) // columns)
        size = -(-(last - first) // num_parts)
        found += [(start, min(start + size, last)) for start in range(first, last, size)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """The rows of the weight that make the logits of some words.

    Attributes:
        start: first word.
        stop: after the last one.
        weight: [stop - start, hidden]; a leaf with a target (``weight_leaf``) if it is trained.
    """

    start: int
    stop: int
    weight: Tensor


class PartWeight(AbsentWeight):
    """Stands for the weight that makes the logits, with its shape; its `F.linear` makes those of the present part."""

    _part: VocabularyPart | None

    @classmethod
    def in_place_of(cls, absent: AbsentWeight) -> PartWeight:
        """Return a stand-in with the shape, dtype and device of an absent weight."""
        weight: Any = Tensor._make_subclass(cls, absent)
        weight._part = None
        assert isinstance(weight, PartWeight)
        return weight

    @contextmanager
    def at(self, part: VocabularyPart) -> Iterator[None]:
        """Make the logits of a part of the vocabulary."""
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
            return _linear_of_part(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _linear_of_part(rows: Tensor, weight: PartWeight, bias: Tensor | None = None) -> Tensor:
    part = weight._part
    assert part is not None, "no part of the vocabulary is there"
    own_bias = None if bias is None else bias[part.start : part.stop]
    if not part.weight.requires_grad or not torch.is_grad_enabled():
        return functional.linear(rows, part.weight, own_bias)
    out = linear(rows, part.weight, own_bias)
    return functional.linear(rows, part.weight, own_bias) if out is None else out  # under autocast: autograd's way


# -- whether a head can be cut --------------------------------------------------------------------------------------

#: Operators that leave the columns alone if their result has as many.
_KEEPERS = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.view.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.squeeze.dim,
    }
)


class _Product:
    """A product with a weight in a head's forward."""

    def __init__(self, owner: str, rows: Tensor, bias: Tensor | None) -> None:
        self.owner, self.rows, self.bias = owner, rows, bias
        self.is_cuttable = True
        self.is_changed = False  # an operator makes something of it before the loss


class CutProbe:
    """Watches a head's forward on made-up rows: which weight makes the logits, and may they come part by part?

    They may if that weight is used once, by `F.linear`, if nothing is drawn at random, and if all that happens to its
    columns until the loss is elementwise, with operands that are the same for every word.

    Args:
        weights: the head's parameters, by their owner's name.
        num_columns: make so many columns alone, which a model that can be cut does not notice; None: all.
    """

    def __init__(self, weights: Mapping[str, Tensor], num_columns: int | None = None) -> None:
        self._owners = {id(weight): name for name, weight in weights.items()}
        self._num_columns = num_columns
        self._products: list[_Product] = []
        self._used_otherwise: set[str] = set()
        self._columns: dict[int, tuple[Tensor, _Product]] = {}  # with the tensor, so that its id is not used again
        self._draws = self._is_paused = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside."""
        with _Functions(self), _Operators(self):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch what runs inside: the loss."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def weight_of(self, logits: Tensor) -> str | None:
        """Return the owner's name of the weight that makes the logits, if they may come part by part."""
        _, product = self._columns.get(id(logits), (None, None))
        if product is None or not product.is_cuttable or self._draws:
            return None
        uses = sum(other.owner == product.owner for other in self._products)
        return product.owner if uses == 1 and product.owner not in self._used_otherwise else None

    def is_product(self, logits: Tensor, rows: Tensor) -> bool:
        """Return whether the logits are the product of these rows with the weight, and nothing else."""
        if self.weight_of(logits) is None:
            return False
        _, product = self._columns[id(logits)]
        # Transformers slices the rows that are to have logits: all of them, in training.
        is_whole = product.rows._base is rows and product.rows.shape == rows.shape
        return not product.is_changed and product.bias is None and (product.rows is rows or is_whole)

    def on_function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of torch, noting products with the head's weights, and other uses of them."""
        owners = [name for leaf in tree_leaves((args, kwargs)) if (name := self._owners.get(id(leaf))) is not None]
        result = func(*args, **kwargs)
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if func is functional.linear and id(weight) in self._owners:
            if self._num_columns is not None:
                result = result[..., : self._num_columns]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            product = _Product(self._owners[id(weight)], args[0] if args else kwargs["input"], bias)
            self._products.append(product)
            self._columns[id(result)] = (result, product)
            owners.remove(product.owner)
        is_query = getattr(func, "__name__", "") in METADATA_QUERIES or not isinstance(result, Tensor)
        self._used_otherwise.update(() if is_query else owners)
        return result

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operator does to columns."""
        if self._is_paused:
            return
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws = True
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = [(leaf, self._columns[id(leaf)][1]) for leaf in given if id(leaf) in self._columns]
        for leaf, product in marked:
            product.is_changed = True
            others = [other for other in given if id(other) not in self._columns]
            if not _keeps_columns(func, args, leaf, others, result):
                product.is_cuttable = False
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self._columns[id(made)] = (made, product)


def _keeps_columns(func: Any, args: Any, columns: Tensor, others: list[Tensor], result: Any) -> bool:
    """Return whether an operator computes each column by itself, all of them alike."""
    if not isinstance(result, Tensor) or result.shape[-1:] != columns.shape[-1:]:
        return False
    if func is torch.ops.aten.slice.Tensor:
        return (args[1] if len(args) > 1 else 0) not in (-1, columns.dim() - 1)
    if torch.Tag.pointwise in func.tags:
        return all(other.dim() == 0 or other.shape[-1] == 1 for other in others)
    return func in _KEEPERS and result.numel() == columns.numel()


class _Functions(TorchFunctionMode):
    def __init__(self, probe: CutProbe) -> None:
        super().__init__()
        self._probe = probe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._probe.on_function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, probe: CutProbe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._probe.on_operator(func, args, kwargs or {}, result)
        return result
