"""The door for losses: what a step minimises, as the head computes it.

A head never has the logits of a step at once. It runs over pieces of the rows with a label, and over parts of the
vocabulary (`head.py`). So a loss is asked for three things, each a class of its file:

- `Loss`, a value of the run's plan: which tensors of a micro-batch it reads, and what it needs of the whole step.
- `MicroBatchLoss`, made of these tensors on the compute device: the loss of each piece of rows; where rows are
  compared with each other, the loss of all of them together.
- `RowsLoss`: takes in the logits of some rows part by part; then it tells their loss, and its gradient by every logit.

`cross_entropy.py` is what the core has; those of tasks (`megatrain/tasks`) are handed in, and nothing here knows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["Loss", "PartialMean", "MicroBatchLoss", "RowsLoss", "mean_figures"]


@dataclass(frozen=True, slots=True, eq=False)
class PartialMean:
    """A part of a mean that is told of a step: ``total`` over ``count`` examples.

    Attributes:
        total: Scalar, on the compute device or on the host.
        count: Number of examples that it is the sum over.
    """

    name: str
    total: Tensor | float
    count: int


class RowsLoss(Protocol):
    """The loss of some rows, whose logits come a part of the vocabulary at a time.

    All parts are taken in, in order; then loss and gradients may be asked for, those of parts in any order.
    """

    def add(self, logits: Tensor, start: int) -> None:
        """Take in the logits [rows, columns] of the words from ``start`` on."""

    def loss(self) -> Tensor:
        """Return the rows' part of the loss of the step: a scalar on the compute device."""

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the loss's gradient by the logits of a part, in their dtype; called once for each part."""


class MicroBatchLoss(Protocol):
    """The loss of one micro-batch of a step."""

    @property
    def compares_rows(self) -> bool:
        """Whether the gradient of a row depends on other rows.

        Then all rows of a micro-batch are taken in before the gradient of any is made, and no logits are kept between.
        """
        return False

    def of_rows(
        self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool
    ) -> RowsLoss | None:
        """Return the loss of some rows; None: the model's own loss function computes it from their whole logits.

        Args:
            labels: Words that follow the rows [rows].
            first: Number of the first row among the micro-batch's rows with a label.
            num_items: Rows with a label of the whole step, that a mean over them is divided by.
            in_parts: Whether logits come in parts, which the model's own loss function cannot take.
        """

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        """Return the loss, and what is told of it, once all rows were taken in; where rows are compared.

        Afterwards the gradients of ``rows`` are those of this loss.

        Args:
            rows: What ``of_rows`` returned for the pieces of the micro-batch, in order.
        """
        raise AssertionError(f"{type(self).__name__} compares no rows")


class Loss(Protocol):
    """What a step minimises. A value: plans of equal losses are equal. Evaluations have plain cross entropy."""

    @property
    def refusal(self) -> str:
        """What follows "it has its own loss function," where such a model is refused; "": it is trained, too."""
        return ""

    @property
    def compares_rows(self) -> bool:
        """Whether micro-batches of its data compare rows, see ``MicroBatchLoss``."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether its data has what the model that the run starts from says of it."""
        return False

    @property
    def token_nbytes(self) -> int:
        """What a micro-batch holds for the loss beside each of its tokens."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """What is known, on the compute device, of each row with a label until all rows of a micro-batch are."""
        return 0

    def applied(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Change the model for training steps inside of the ``with`` block."""
        return nullcontext()

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> Mapping[str, Tensor]:
        """Return what the loss reads of a micro-batch, as it is to be on the compute device.

        Args:
            batch: The micro-batch on the host, with keys that only losses read (``base.batch_keys.LOSS_KEYS``).
            shifted: Labels for the next token [B * S].
            positions: Those of them that are a label.
        """
        return {}

    def made_up(self, num_rows: int, device: torch.device) -> Mapping[str, Tensor]:
        """Return what a plan traces in the place of what ``read`` returns, for so many rows with a label."""
        return {}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> object:
        """Return what micro-batches have to know of all micro-batches of a step, those of other ranks included."""
        return None

    def of_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss of a micro-batch of a step.

        Args:
            host: What ``read`` returned; nothing where a plan traces the loss.
            placed: The same on the compute device; what ``made_up`` returned where a plan traces it.
            size: What ``size_of_step`` returned; None where a plan traces it.
        """

    def told(self, means: dict[str, float]) -> dict[str, float]:
        """Return what is told of a step, given the means of its figures by name."""
        return means


def mean_figures(figures: Iterable[PartialMean], numbers: Sequence[float]) -> dict[str, float]:
    """Return the means of a step by name, given the totals of its figures as numbers."""
    totals: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for figure, number in zip(figures, numbers, strict=True):
        totals.setdefault(figure.name, []).append(number)
        counts[figure.name] = counts.get(figure.name, 0) + figure.count
    return {name: fsum(values) / max(1, counts[name]) for name, values in totals.items()}
