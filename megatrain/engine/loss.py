"""Interface of losses: the quantity that a step minimises, as the head computes it.

A head never has all logits of a step at once. It runs over pieces of the rows with a label, and over parts of the
vocabulary (`head.py`). So a loss consists of three classes:

- `Loss`, a value in the run's plan: the tensors of a micro-batch that it reads, and its data about the whole step.
- `MicroBatchLoss`, made from these tensors on the compute device: the loss of each piece of rows, or, if rows are
  compared with each other, of all rows together.
- `RowsLoss`: receives the logits of some rows part by part, then returns their loss and its gradient by each logit.

`cross_entropy.py` has the built-in loss. Tasks (`megatrain/tasks`) pass in other losses; nothing here depends on them.
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
    """Share of a reported mean of a step: ``total`` over ``count`` examples.

    Attributes:
        total: Scalar, on the compute device or on the host.
        count: Number of examples in the sum.
    """

    name: str
    total: Tensor | float
    count: int


class RowsLoss(Protocol):
    """Loss of some rows, whose logits come in parts of the vocabulary.

    All parts are added in order. Then the loss is available, and the gradients of parts in any order.
    """

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the vocabulary from ``start`` on."""

    def loss(self) -> Tensor:
        """Return the rows' share of the step's loss, a scalar on the compute device."""

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the gradient of the loss by a part's logits, in their dtype. Called once per part."""


class MicroBatchLoss(Protocol):
    """Loss of one micro-batch of a step."""

    @property
    def compares_rows(self) -> bool:
        """Whether the gradient of a row depends on other rows.

        If so, all rows of a micro-batch are added before any gradient is computed, and logits are not kept in between.
        """
        return False

    def of_rows(
        self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool
    ) -> RowsLoss | None:
        """Return the loss of some rows; None if the model's own loss function computes it from their whole logits.

        Args:
            labels: Vocabulary indexes of the labels, [rows].
            first: Number of the first row among the micro-batch's rows with a label.
            num_items: Rows with a label in the whole step, the divisor of a mean over them.
            in_parts: Whether logits come in parts, which the model's own loss function cannot process.
        """

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        """Return the loss and its figures after all rows were added. Only called if rows are compared.

        Afterwards ``rows`` return the gradients of this loss.

        Args:
            rows: Results of ``of_rows`` for the pieces of the micro-batch, in order.
        """
        raise AssertionError(f"{type(self).__name__} compares no rows")


class Loss(Protocol):
    """Quantity that a step minimises. A value: equal losses have equal plans. Evaluations use plain cross entropy."""

    @property
    def refusal(self) -> str:
        """End of the error "it has its own loss function, ..." for such a model; "" to accept the model."""
        return ""

    @property
    def compares_rows(self) -> bool:
        """Whether micro-batches of its data compare rows; see ``MicroBatchLoss``."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether its data contains scores of the model that the run starts from."""
        return False

    @property
    def token_nbytes(self) -> int:
        """Bytes that a micro-batch holds for the loss per token."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """Bytes kept on the compute device per row with a label until all rows of a micro-batch are added."""
        return 0

    def applied(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Change the model for training steps inside of the ``with`` block."""
        return nullcontext()

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a micro-batch that the loss reads, in their form for the compute device.

        Args:
            batch: The micro-batch on the host, with keys that only losses read (``base.batch_keys.LOSS_KEYS``).
            shifted: Labels of the next tokens, [B * S].
            positions: Positions in ``shifted`` with a label.
        """
        return {}

    def synthetic_inputs(self, num_rows: int, device: torch.device) -> Mapping[str, Tensor]:
        """Return invented results of ``read`` for ``num_rows`` rows with a label, which a plan traces."""
        return {}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> object:
        """Return data about all micro-batches of a step, on all ranks, that each micro-batch's loss needs."""
        return None

    def of_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss of a micro-batch of a step.

        Args:
            host: Result of ``read``; empty if a plan traces the loss.
            placed: The same on the compute device; result of ``synthetic_inputs`` if a plan traces the loss.
            size: Result of ``size_of_step``; None if a plan traces the loss.
        """

    def step_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the reported figures of a step, given the means of its figures by name."""
        return means


def mean_figures(figures: Iterable[PartialMean], numbers: Sequence[float]) -> dict[str, float]:
    """Return the means of a step by name, given the totals of its figures as numbers."""
    totals: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for figure, number in zip(figures, numbers, strict=True):
        totals.setdefault(figure.name, []).append(number)
        counts[figure.name] = counts.get(figure.name, 0) + figure.count
    return {name: fsum(values) / max(1, counts[name]) for name, values in totals.items()}
