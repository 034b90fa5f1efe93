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

from megatrain.engine import device_kernels
from megatrain.engine.objective import Distillation, TeacherRows
from megatrain.engine.visit import METADATA_QUERIES, AbsentWeight
from megatrain.engine.weight_gradients import linear

__all__ = [
    "CutProbe",
    "PartWeight",
    "RunningDistillation",
    "RunningSoftmax",
    "RunningTopK",
    "TokenScores",
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


class RunningSoftmax:
    """Cross entropy of some rows whose logits come part by part: their loss after all parts, then each part's gradient.

    Everything is computed in fp32. The loss is the sum over the rows of ``-log softmax(logits)[label] / num_items``;
    with smoothing, ``smoothing`` of each target is spread evenly over the vocabulary; with a z-loss,
    ``z_loss * logsumexp(logits)**2`` is added for each row.

    Args:
        labels: [rows], each a word.
        vocab_size: words of all parts.
        num_items: what the sum is divided by.
        smoothing: 0: none.
        z_loss: 0: none.
    """

    def __init__(
        self, labels: Tensor, vocab_size: int, num_items: int, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        self._labels, self._vocab_size, self._num_items = labels, vocab_size, num_items
        self._smoothing, self._z_loss = smoothing, z_loss
        zeros = torch.zeros(len(labels), dtype=torch.float32, device=labels.device)
        self._largest = torch.full_like(zeros, -torch.inf)
        self._sum = zeros  # of exponentials, less the largest logit so far
        self._of_label = torch.zeros_like(zeros)
        self._total = torch.zeros_like(zeros) if smoothing else None  # of the logits
        self._weights: Tensor | None = None
        self._log_sums: Tensor | None = None  # of all logits that were taken in; kept, as each part asks for it

    def add(self, logits: Tensor, start: int) -> None:
        """Take in the logits [rows, columns] of the words from ``start`` on."""
        self._log_sums = None
        if device_kernels.are_for(logits):
            device_kernels.take_in_logits(
                logits,
                self._labels,
                start,
                largest=self._largest,
                exponentials=self._sum,
                of_label=self._of_label,
                totals=self._total,
            )
            return
        values = logits.float()
        at, is_here = _column_of(self._labels, start, values.shape[1])
        self._of_label = torch.where(is_here, values.gather(1, at).squeeze(1), self._of_label)
        if self._total is not None:
            self._total = self._total + values.sum(1)
        largest = torch.maximum(self._largest, values.amax(1))
        here = (values - largest.unsqueeze(1)).exp_().sum(1)
        self._sum = self._sum * torch.exp(self._largest - largest) + here
        self._largest = largest

    def log_probs(self) -> Tensor:
        """Return the log-probability of each row's label [rows], after all parts."""
        return self._of_label - self._log_sum()

    def weigh(self, weights: Tensor) -> None:
        """Have each row's gradient be that of ``-log softmax(logits)[label]`` times a weight [rows]."""
        self._weights = weights

    def loss(self) -> Tensor:
        """Return the loss, after all parts."""
        log_sum = self._log_sum()
        losses = log_sum - self._of_label
        if self._total is not None:
            even = log_sum - self._total / self._vocab_size
            losses = (1 - self._smoothing) * losses + self._smoothing * even
        if self._z_loss:
            losses = losses + self._z_loss * log_sum.square()
        return losses.sum() / self._num_items

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the loss's gradient of a part's logits, in their dtype, after all parts were taken in."""
        if device_kernels.are_for(logits):
            return device_kernels.gradient_of_logits(
                logits,
                self._labels,
                start,
                self._log_sum(),
                weights=self._weights,
                num_items=self._num_items,
                z_loss=self._z_loss,
                share=self._smoothing / self._vocab_size,
                at_label=1 - self._smoothing,
            )
        log_sum = self._log_sum().unsqueeze(1)
        found = (logits.float() - log_sum).exp_()
        if self._z_loss:
            found.mul_(1 + 2 * self._z_loss * log_sum)
        if self._smoothing:
            found.sub_(self._smoothing / self._vocab_size)
        at, is_here = _column_of(self._labels, start, found.shape[1])
        # Scattered, not added: each row has one place, so the order of writes does not matter on any device.
        found.scatter_(1, at, found.gather(1, at) - is_here.unsqueeze(1) * (1 - self._smoothing))
        if self._weights is not None:
            return found.mul_(self._weights.unsqueeze(1)).to(logits.dtype)
        return found.div_(self._num_items).to(logits.dtype)

    def _log_sum(self) -> Tensor:
        if self._log_sums is None:
            self._log_sums = self._largest + self._sum.log()
        return self._log_sums


def _column_of(labels: Tensor, start: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return the column [rows, 1] of each row's label, and whether it is in this part (else the column is any)."""
    at = labels - start
    return at.clamp(0, num_columns - 1).unsqueeze(1), (at >= 0) & (at < num_columns)


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What a model says of some tokens.

    Attributes:
        log_probs: [rows] fp32, of the tokens themselves.
        top_ids: [rows, k] int64, the likeliest words, the likeliest first.
        top_log_probs: [rows, k] fp32, theirs, at the temperature that was asked for.
        rest_log_probs: [rows] fp32, log of the probability of all other words together, at that temperature.
    """

    log_probs: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    rest_log_probs: Tensor


class RunningTopK:
    """The likeliest words of some rows whose logits come part by part, and the mass of all others. In fp32.

    Args:
        labels: [rows], each a word.
        k: so many words of each row, at most those of the vocabulary; 0: none.
        temperature: logits are divided by it for these words; the labels' probabilities are at 1.
    """

    def __init__(self, labels: Tensor, k: int, temperature: float = 1.0) -> None:
        self._labels, self._k, self._temperature = labels, k, temperature
        self._log_sum = torch.full((len(labels),), -torch.inf, device=labels.device)
        self._of_label = torch.zeros_like(self._log_sum)
        self._rest = torch.full_like(self._log_sum, -torch.inf)  # of the words that are not among the likeliest
        self._top = torch.empty(len(labels), 0, device=labels.device)
        self._ids = torch.empty(len(labels), 0, dtype=torch.long, device=labels.device)

    def add(self, logits: Tensor, start: int) -> None:
        """Take in the logits [rows, columns] of the words from ``start`` on."""
        values = logits.float()
        at, is_here = _column_of(self._labels, start, values.shape[1])
        self._of_label = torch.where(is_here, values.gather(1, at).squeeze(1), self._of_label)
        self._log_sum = torch.logaddexp(self._log_sum, values.logsumexp(1))
        if not self._k:
            return
        if self._temperature != 1.0:
            values = values / self._temperature
        top, at = values.topk(min(self._k, values.shape[1]), dim=1)
        rest = values.scatter(1, at, -torch.inf).logsumexp(1)
        top, ids = torch.cat([self._top, top], 1), torch.cat([self._ids, at + start], 1)
        # Summed when they drop out, not as 1 less the others at the end: that would cancel where the rest is small.
        self._top, order = top.topk(min(self._k, top.shape[1]), dim=1)
        dropped = top.scatter(1, order, -torch.inf).logsumexp(1)
        self._ids = ids.gather(1, order)
        self._rest = torch.logaddexp(self._rest, torch.logaddexp(rest, dropped))

    def scores(self) -> TokenScores:
        """Return the result, after all parts."""
        total = torch.logaddexp(self._rest, self._top.logsumexp(1)) if self._k else self._log_sum
        return TokenScores(
            self._of_label - self._log_sum, self._ids, self._top - total.unsqueeze(1), self._rest - total
        )


class RunningDistillation:
    """The loss of a student against a teacher's likeliest words, logits part by part; used as ``RunningSoftmax`` is.

    Everything is computed in fp32. See ``Distillation`` for the loss.

    Args:
        labels: [rows], each a word.
        teacher: what the teacher says of these rows.
        vocab_size: words of all parts.
        num_items: what the sum over the rows is divided by.
        spec: the loss.
    """

    def __init__(
        self, labels: Tensor, teacher: TeacherRows, vocab_size: int, num_items: int, spec: Distillation
    ) -> None:
        self._spec, self._num_items = spec, num_items
        self._hard = RunningSoftmax(labels, vocab_size, num_items) if spec.alpha else None
        self._ids = teacher.ids.long()
        self._log_p, self._log_rest_p = spec.targets(teacher)
        self._of_top = torch.zeros_like(self._log_p)
        self._rest = torch.full_like(self._log_rest_p, -torch.inf)

    def add(self, logits: Tensor, start: int) -> None:
        """Take in the logits [rows, columns] of the words from ``start`` on."""
        if self._hard is not None:
            self._hard.add(logits, start)
        values, at, is_here = self._tempered(logits, start)
        self._of_top = torch.where(is_here, values.gather(1, at), self._of_top)
        self._rest = torch.logaddexp(self._rest, values.scatter_(1, at, -torch.inf).logsumexp(1))

    def loss(self) -> Tensor:
        """Return the loss, after all parts."""
        log_sum = self._log_sum()
        found = _weighted(self._log_p, self._log_p - (self._of_top - log_sum.unsqueeze(1))).sum(1)
        if self._spec.rest == "bucket":
            found = found + _weighted(self._log_rest_p, self._log_rest_p - (self._rest - log_sum))
        soft = found.sum() * ((1 - self._spec.alpha) * self._spec.temperature**2 / self._num_items)
        return soft if self._hard is None else soft + self._spec.alpha * self._hard.loss()

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the loss's gradient of a part's logits, in their dtype, after all parts were taken in."""
        spec, log_sum = self._spec, self._log_sum().unsqueeze(1)
        values, at, _ = self._tempered(logits, start)
        found = values.sub_(log_sum).exp_()  # the student's probabilities; 0 in the column that is none
        of_top = found.gather(1, at)
        if spec.rest == "bucket":
            # Of a word outside: its own probability, and its part in that of the bucket.
            share = torch.exp(self._log_rest_p - (self._rest - log_sum.squeeze(1)))
            found.mul_((1 - torch.where(self._rest.isneginf(), 0, share)).unsqueeze(1))
        elif spec.rest == "ignore":
            mass = self._log_p.exp().sum(1, keepdim=True)
            found.mul_(mass)
            of_top = of_top * mass
        # Scattered, not added: each word has one place. Those of other parts share the column that is none.
        found = found.scatter_(1, at, of_top - self._log_p.exp())[:, :-1]
        found = found.mul_((1 - spec.alpha) * spec.temperature / self._num_items)
        if self._hard is not None:
            found = found + spec.alpha * self._hard.gradient(logits.float(), start)
        return found.to(logits.dtype)

    def _log_sum(self) -> Tensor:
        return torch.logaddexp(self._rest, self._of_top.logsumexp(1))

    def _tempered(self, logits: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits at the temperature, the teacher's words' columns [rows, k], and whether they are in this part.

        The logits have one column more, for the words of other parts.
        """
        num_columns = logits.shape[1]
        values = functional.pad(logits.float() / self._spec.temperature, (0, 1), value=-torch.inf)
        at = self._ids - start
        is_here = (at >= 0) & (at < num_columns)
        return values, torch.where(is_here, at, num_columns), is_here


def _weighted(log_p: Tensor, values: Tensor) -> Tensor:
    """Return ``exp(log_p) * values``; 0 where the probability is 0, whatever the value."""
    p = log_p.exp()
    return torch.where(p > 0, p * values, 0)


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
